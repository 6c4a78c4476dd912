"""One answer on stdout: the prompt's words, the model, the text as it comes.

stdout gets the answer and a newline, always UTF-8; figures and complaints go to stderr.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moegguf.faces.messages import STOPPED, say

if TYPE_CHECKING:
    from moegguf.engine.answer import Answer, Sampling
    from moegguf.engine.llama import Llama
    from moegguf.faces.display import Waiting

DEFAULT_CTX = 4096
CTX_PAGE = 256  # tokens
PATIENCE_S = 0.5  # for a load that was interrupted


@dataclass(frozen=True)
class LoadOptions:
    """How a model is opened. None: as moegguf decides. verbose 1 shows our statistics, 2 llama.cpp's log as well."""

    expert_cache: str | None = None
    threads: int | None = None
    ctx: int | None = None
    verbose: int = 0
    policy: str = "auto"
    predictor: str | None = None
    prefetch: bool | None = None


def run(model: str, words: Sequence[str], options: LoadOptions, sampling: Sampling) -> int:
    """Answers the prompt, or talks when there is none and someone is there to talk to. Returns the exit code."""
    from moegguf.engine.models import find_model

    path = find_model(model)
    prompt = read_prompt(words)
    from moegguf.faces.display import Waiting

    with Waiting() as waiting:
        llm, load_s = load(path, options, waiting)
        if prompt is not None:
            return answer(llm, prompt, sampling, load_s, waiting, options.verbose)
    from moegguf.faces.chat import Chat

    return Chat(llm, model, sampling, verbose=options.verbose > 0).talk()


def read_prompt(words: Sequence[str]) -> str | None:
    """What was piped in, a blank line, the words; None when there is neither and a person sits at the terminal.

    Raises BadParameter when nothing was asked and nobody can be asked.
    """
    piped, terminal = "", False
    if sys.stdin is not None and not sys.stdin.closed:
        terminal = sys.stdin.isatty()
        if not terminal:
            piped = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    parts = [part for part in (piped.rstrip("\n"), " ".join(words)) if part.strip()]
    if parts:
        return "\n\n".join(parts)
    if terminal and not words and sys.stdout.isatty():
        return None
    raise typer.BadParameter('there is no prompt: write one, as in `moegguf run demo "hello"`, or pipe one in')


def context_size(n_ctx_train: int, asked: int | None) -> int:
    """Tokens of context: as asked for, else as the model was trained, up to DEFAULT_CTX; whole pages of them."""
    if asked is not None and asked > n_ctx_train:
        say(f"warning: a context of {asked} tokens is more than the {n_ctx_train} the model was trained on.")
    # llama.cpp rounds up; the bindings' own buffers do not, and would be shorter than what llama.cpp says it holds.
    return -(-(asked or min(n_ctx_train, DEFAULT_CTX)) // CTX_PAGE) * CTX_PAGE


def interruptible(load: Callable[[threading.Event], Llama]) -> Llama:
    """`load` on a thread of its own: C computes for seconds, and a signal in a callback from C would be lost.

    Raises KeyboardInterrupt on Ctrl-C, with the event set, or ends the process when `load` does not heed it.
    """
    interrupted = threading.Event()
    done: queue.SimpleQueue[Llama | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put(load(interrupted))
        except BaseException as error:  # raised again by the thread that waits
            done.put(error)

    thread = threading.Thread(target=work, name="moegguf-load", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        interrupted.set()
        thread.join(PATIENCE_S)
        if thread.is_alive():
            os._exit(STOPPED)
        raise
    result = done.get()
    if isinstance(result, BaseException):
        raise result
    return result


def silence() -> None:
    """llama.cpp's log, which goes to stderr through this logger's level, says nothing."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)


def load(path: Path, options: LoadOptions, waiting: Waiting) -> tuple[Llama, float]:
    """The model, and the seconds it took to load."""
    start = time.perf_counter()
    waiting.show("loading the library", None)
    import moegguf

    layout = moegguf.read_layout(path)
    n_ctx = context_size(layout.hparams.n_ctx_train, options.ctx)

    def open_model(interrupted: threading.Event) -> Llama:
        def progress(share: float) -> bool:
            waiting.show(f"loading {layout.name}", share)
            return not interrupted.is_set()

        return moegguf.Llama(
            path,
            expert_cache=options.expert_cache,
            policy=options.policy,
            predictor=options.predictor,
            prefetch=options.prefetch,
            n_ctx=n_ctx,
            n_threads=options.threads,
            verbose=options.verbose > 1,
            progress=progress,
        )

    if options.verbose > 1:
        return interruptible(open_model), time.perf_counter() - start
    silence()  # from the first line on
    llm = interruptible(open_model)
    silence()  # the bindings have turned warnings on again, such as that a pass was cancelled
    return llm, time.perf_counter() - start


def answer(llm: Llama, prompt: str, sampling: Sampling, load_s: float, waiting: Waiting, verbose: int) -> int:
    """Writes the answer to `prompt` on stdout, then the statistics when asked for; closes the model."""
    from moegguf.engine.answer import Answer

    reply = Answer(llm, [{"role": "user", "content": prompt}], sampling)
    waiting.show("reading the prompt", None)
    try:
        write(first_then_rest(reply, waiting))
    except KeyboardInterrupt:
        write(["\n"], end="")
        leave_if_running(reply)
        return STOPPED
    if verbose:
        from moegguf.faces.statistics import statistics

        say("\n" + "\n".join(statistics(reply.timing, load_s, llm.decisions())))
    llm.close()
    return 0


def first_then_rest(reply: Answer, waiting: Waiting) -> Iterable[str]:
    """The texts of `reply`; what was waited for is cleared before the first."""
    try:
        for text in reply:
            waiting.close()
            yield text
    finally:
        waiting.close()


def write(texts: Iterable[str], end: str = "\n") -> str:
    """Writes to stdout at once, whatever encoding the terminal claims; returns what was written."""
    written = []
    out = sys.stdout.buffer
    for text in texts:
        out.write(text.encode("utf-8", errors="replace"))
        out.flush()
        written.append(text)
    out.write(end.encode())
    out.flush()
    return "".join(written)


def leave_if_running(reply: Answer) -> None:
    """Ends the process when the model cannot be stopped: a pass without experts computes to its end."""
    if reply.running:
        os._exit(STOPPED)
