"""One answer: a prompt or a conversation goes in, text comes out while it is written, and it can be stopped.

The model computes on a thread of its own, so that whoever waits for the text can still be interrupted: one pass may
wait for a slow disk in C, where Python's signals do not reach. Does not know terminals or HTTP.
"""

from __future__ import annotations

import codecs
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moegguf.engine.stats import Stats
from moegguf.errors import GenerationCancelled, ModelFormatError, OptionError
from moegguf.native import library

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

WAKE_S = 0.1  # a signal that another thread took wakes nobody: the waiting one looks for itself

Message = dict[str, str]  # role and content


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 takes the likeliest; max_tokens None goes on until the model ends or the
    context is full; seed None differs each time."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None


@dataclass
class Timing:
    """What an answer took. `prompt_tokens` are those evaluated: what the context still held from before is not
    counted. `stats` is for all of the answer, `answer_stats` for the part after its first token."""

    prompt_tokens: int = 0
    answer_tokens: int = 0
    prompt_s: float = 0.0
    answer_s: float = 0.0
    total_s: float = 0.0
    finish: str = "stop"  # "stop", "length" or "cancelled"
    stats: Stats = field(default_factory=Stats)
    answer_stats: Stats = field(default_factory=Stats)


def has_chat_template(llm: Llama) -> bool:
    return bool(llm.metadata.get("tokenizer.chat_template"))


def prompt_tokens(llm: Llama, messages: Sequence[Message]) -> list[int]:
    """The tokens of a conversation, through the model's chat template; without one, its texts on lines of their own.

    Raises ModelFormatError when the template cannot be used.
    """
    template = llm.metadata.get("tokenizer.chat_template")
    if not template:
        text = "\n".join(message["content"] for message in messages)
        return list(llm.tokenize(text.encode(), add_bos=True, special=False))
    formats, eos = library.llama_cpp().llama_chat_format, llm.token_eos()
    try:
        formatter = formats.Jinja2ChatFormatter(
            template=template, eos_token=_token_text(llm, eos), bos_token=_token_text(llm, llm.token_bos())
        )
        text = formatter(messages=list(messages)).prompt
    except Exception as error:  # whatever jinja2 and the model's own template raise
        raise ModelFormatError(f"the model's chat template fails ({error}); the file needs another one.") from error
    return list(llm.tokenize(text.encode(), add_bos=False, special=True))


def _token_text(llm: Llama, token: int) -> str:
    return str(llm._model.token_get_text(token)) if token != -1 else ""


class Answer:
    """Iterate over it, once, for the text as it comes; `timing` is complete afterwards.

    Leaving the loop early, by Ctrl-C too, stops the model and waits for that, for a second at most: `running` tells.
    `cancel` stops it from any thread: the loop then ends as if the answer had. Iterating raises what the model
    raised: ExpertIOError, ...
    """

    PATIENCE_S = 1.0

    def __init__(self, llm: Llama, messages: Sequence[Message], sampling: Sampling = Sampling()) -> None:
        self.llm = llm
        self.sampling = sampling
        self.timing = Timing()
        self._prompt = prompt_tokens(llm, messages)
        self._limit = self._token_limit()
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="moegguf-answer", daemon=True)

    def _token_limit(self) -> int:
        n_ctx = int(self.llm.n_ctx())
        if not self._prompt:
            raise OptionError("the prompt is empty; give at least one word.")
        if len(self._prompt) >= n_ctx:
            raise OptionError(
                f"the prompt has {len(self._prompt)} tokens, but the context holds {n_ctx}; give a larger context or a"
                " shorter prompt."
            )
        return min(self.sampling.max_tokens or n_ctx, n_ctx - len(self._prompt))

    def __iter__(self) -> Iterator[str]:
        self._thread.start()
        try:
            while (text := self._next_text()) is not None:
                if text:
                    yield text
        finally:
            self.cancel(self.PATIENCE_S)
        if self._error is not None:
            raise self._error

    def _next_text(self) -> str | None:
        while True:
            try:
                return self._texts.get(timeout=WAKE_S)
            except queue.Empty:
                continue

    def cancel(self, timeout_s: float | None = None) -> bool:
        """Stops the model and waits until it has stopped; False when it has not after `timeout_s`.

        A model without experts stops at its next token, one with experts in the middle of a pass.
        """
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.llm.cancel()
            try:
                self._thread.join(timeout_s)
            finally:
                self.llm.resume()
        return not self.running

    @property
    def running(self) -> bool:
        """The model still computes; it must not be used or closed before it has stopped."""
        return self._thread.is_alive()

    def _work(self) -> None:
        start, before = time.perf_counter(), self.llm.stats()
        try:
            self._write(start, before)
        except GenerationCancelled:
            self.timing.finish = "cancelled"
        except BaseException as error:  # raised again where the text is read
            self._error = error
        finally:
            self.timing.total_s = time.perf_counter() - start
            self.timing.answer_s = self.timing.total_s - self.timing.prompt_s if self.timing.answer_tokens else 0.0
            self.timing.stats = self.llm.stats() - before
            self._texts.put(None)

    def _write(self, start: float, before: Stats) -> None:
        """Tokens to text until the model ends the answer, the limit is reached or someone stops it."""
        llm, timing = self.llm, self.timing
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        vocabulary = library.llama_cpp()
        held = llm.longest_token_prefix(llm._input_ids, self._prompt[:-1]) if llm.n_tokens else 0
        first = before
        timing.finish = "length"
        for token in llm.generate(self._prompt, **self._choice()):
            if timing.answer_tokens == 0:
                timing.prompt_tokens = len(self._prompt) - held
                timing.prompt_s, first = time.perf_counter() - start, llm.stats()
            timing.answer_tokens += 1
            if self._stop.is_set() or vocabulary.llama_vocab_is_eog(llm._model.vocab, token):
                timing.finish = "cancelled" if self._stop.is_set() else "stop"
                break
            self._texts.put(decoder.decode(llm.detokenize([token])))
            if timing.answer_tokens >= self._limit:
                break
        self._texts.put(decoder.decode(b"", final=True))
        timing.answer_stats = llm.stats() - first

    def _choice(self) -> dict[str, Any]:
        """Keywords for `Llama.generate`; sets the seed, which it takes from the model."""
        ask = self.sampling
        self.llm.set_seed(random.getrandbits(32) if ask.seed is None else ask.seed & 0xFFFFFFFF)
        return {
            "temp": ask.temperature, "top_k": ask.top_k, "top_p": ask.top_p, "min_p": ask.min_p, "repeat_penalty": 1.0,
        }  # fmt: skip
