"""The llama.cpp context of a loaded model: evaluates tokens and images, one call at a
time.

A context may have several sequences. Sequence 0 belongs to the `Llama` itself; its
tokens are in `input_ids`, and `n_tokens` is their number. Before each pass, the pass's
tokens are announced to the expert store, if the store needs them, and the number of
threads may change. This module knows nothing about prompts, sampling, or how a model is
loaded.
"""

from __future__ import annotations

import ctypes as c
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from moegguf.engine.checkpoints import Checkpoints
from moegguf.engine.error_log import llama_log
from moegguf.engine.memory_parts import CELLS, RECURRENT, WHOLE, WINDOW, MemoryParts
from moegguf.engine.projector import (
    PLACEHOLDER,
    ContextImages,
    ImagePrompt,
    ImageSpan,
    Projector,
)
from moegguf.engine.recurrent import shares_cells
from moegguf.engine.rollback import Rollback
from moegguf.engine.sequences import PassBatch, SequenceTokens, Tokens
from moegguf.engine.stats import Stats
from moegguf.errors import (
    AllocationError,
    CallbackError,
    CapabilityError,
    ClosedError,
    ForkError,
    GenerationCancelled,
    LibraryError,
    MoeggufError,
    OptionError,
)
from moegguf.gguf.reader import StrPath
from moegguf.native import library
from moegguf.native.events import Phase

if TYPE_CHECKING:
    from moegguf.engine.loader import Loader
    from moegguf.engine.upstream import Floats, UpstreamLlama

Step = TypeVar("Step")
_FULL = "llama_decode returned 1"
_NO_MEMORY = "llama_decode returned -2"
_FAILED = "llama_decode returned -3"  # a backend could not compute the graph
# Our abort callback stopped the pass, after a failure or cancel().
_ABORTED = "llama_decode returned 2"


class ClosedModel:
    """Replaces the model, its context, its tokenizer and its vocabulary after close().
    Reading an attribute raises ClosedError."""

    def __getattr__(self, _name: str) -> Any:
        raise ClosedError("the model is closed; load it again.")


class Requests:
    """Numbers the requests of one context. Calls that generate text run one after the
    other (`run`).

    Each such call is one request: its first evaluation is the prompt, and all later
    evaluations belong to the phase DECODE. Outside such a call, an evaluation in an
    empty context begins a new request, and later evaluations of single tokens belong to
    DECODE. llama.cpp reports neither the number nor the phase of a request, so this
    class provides them for routing events.
    """

    def __init__(self) -> None:
        self.sequence = -1
        self._changed = threading.Condition()
        # Id of the thread, and an object unique to the running request.
        self._owner: tuple[int, object] | None = None
        self._at_prompt = self._generating = False

    def run(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        """Runs `steps` as one request, until the last step or until the generator is
        closed.

        Waits while another thread's request is running, but not for an unfinished
        request of the calling thread.

        If the thread begins another request before this request has ended, the next
        step of this request raises GenerationCancelled.
        """
        request = threading.get_ident(), object()
        with self._changed:
            self._changed.wait_for(
                lambda: self._owner is None or self._owner[0] == request[0]
            )
            self._owner = request
        self._at_prompt = self._generating = True
        try:
            sent = None
            while True:
                try:
                    step = steps.send(sent)
                except StopIteration:
                    return
                sent = yield step
                if self._owner is not request:
                    raise GenerationCancelled(
                        "this thread has started another request on this model, so this one cannot continue; finish"
                        " each request before you start the next one, or use a thread for each."
                    )
        finally:
            steps.close()
            with self._changed:
                if self._owner is request:
                    self._at_prompt = self._generating = False
                    self._owner = None
                    self._changed.notify_all()

    def begin(self) -> int:
        """Begins a request outside `run`, such as one for `eval_sequences` or an
        embedding. Returns its number."""
        self.sequence += 1
        return self.sequence

    def next_phase(self, n_past: int, n_tokens: int) -> Phase:
        """Returns the phase of the next `n_tokens` tokens, which follow the first
        `n_past` tokens of the context.

        If the tokens begin a new request, adds one to `self.sequence`, the number of
        the current request. The first request is number 0. Call this method once for
        each evaluation.
        """
        if (
            self._at_prompt
            or (n_past == 0 and not self._generating)
            or self.sequence < 0
        ):
            self._at_prompt = False
            self.sequence += 1
            return Phase.PREFILL
        return Phase.DECODE if self._generating or n_tokens == 1 else Phase.PREFILL


class Context:
    """Evaluates tokens and images in the llama.cpp context of `llm`. `loader` provides
    the session, the controller and the compute threads.

    mmproj: path of the file with the model's projector, which turns images into
    embeddings.

    Evaluations raise typed errors, such as ExpertIOError, GenerationCancelled,
    ForkError and ClosedError. They raise CallbackError if a listener to this model's
    routing events has raised an exception, or if a policy, predictor or listener of
    this model is the caller.
    """

    def __init__(
        self, llm: UpstreamLlama, loader: Loader, mmproj: StrPath | None = None
    ) -> None:
        self._llm: UpstreamLlama = weakref.proxy(llm)  # type: ignore[assignment]  # `llm` holds this object
        self.session = loader.session  # None: there is no expert store
        self._threads = loader.threads
        self._n_seq_max = loader.n_seq_max
        self._mmproj = mmproj
        # Decides which experts to keep and fetch; None: there is no expert store.
        self.controller = loader.controller
        self._bindings = library.llama_cpp()
        self.run_hits = loader.run_hits
        # Sliding window in tokens; 0: there is none.
        self._n_swa = self._bindings.llama_model_n_swa(llm.model)
        self.memory = MemoryParts(self._llm)
        plan = loader.load_plan.plan
        # Sequences cannot return to a checkpoint with other parts of the memory, such
        # as the cells of a sliding window.
        has_checkpoints = (
            plan.context.n_checkpoints and self.memory.all == CELLS | RECURRENT
        )
        # Tracks by how many tokens each sequence can be rolled back.
        self.rollback = Rollback(
            plan.context.n_rs_seq,
            min(llm.context_params.n_ubatch, llm.n_batch),
            own_cells=not shares_cells(loader.load_plan.layout),
            checkpoints=Checkpoints(self.memory, loader.n_seq_max)
            if has_checkpoints
            else None,
        )
        self._evaluated: tuple[int, ...] = (0,)  # sequences of the last pass
        # True: cells that have left a sliding window are reused.
        self._reuses_cells = (
            bool(self.memory.all & WINDOW) and not llm.context_params.swa_full
        )
        if llm._is_stateful or self._n_swa:
            # The base class calls this to remove tokens.
            llm._ctx.kv_cache_seq_rm = self._remove
        self._batch = PassBatch(llm.n_batch)
        # Maximum number of tokens with logits in a pass.
        self.n_logits = min(
            llm.n_batch, int(llm.context_params.n_outputs_max) or llm.n_batch
        )
        # Indices of the last pass's tokens that have logits.
        self._chunk_rows: list[int] = []
        self.requests = Requests()  # numbers the requests in routing events
        self._projector: Projector | None = None
        self._projector_lock = threading.Lock()
        self._closed = False
        self.lock = threading.RLock()  # held during each evaluation
        self.images = ContextImages()  # images of sequence 0
        # Scale of the LoRA adapter for the next evaluation; 0.0: none.
        self.lora_scale: float = llm.lora_scale if llm._lora_adapter else 0.0
        self.eval_s = 0.0  # total seconds of all evaluations
        self.n_computed = 0  # evaluated tokens, as far as their number was known
        self.drafted = Counter[str]()  # counters of drafts, by their names in `Stats`
        # Called with the llama_batch after each pass of `eval` or `eval_sequences` that
        # has not failed.
        self.after_pass: Callable[[Any], object] | None = None
        # called after each batch of `eval` with three arguments: 0 (the sequence), its
        # tokens, and the number of new tokens
        self.after_eval: Callable[[int, Tokens, int], object] | None = None

    def check_open(self) -> None:
        """Raises ClosedError if the model is closed. Raises ForkError in a child
        process that was forked after the model was loaded, if the model has an expert
        store."""
        if self._closed:
            raise ClosedError("the model is closed; load it again.")
        # Fork() does not copy the store's threads.
        if self.session is not None and self.session.forked:
            raise ForkError(
                "the model was loaded before fork(); load it in this process, or start this process with spawn."
            )

    def stats(self) -> Stats:
        """Returns the counters since the model was loaded, as `Llama.stats` does."""
        self.check_open()
        stats = (
            self.session.stats(self.eval_s)
            if self.session
            else Stats(tokens=self.n_computed, eval_s=self.eval_s)
        )
        n_threads = self._threads.n_threads if self._threads else self._llm.n_threads
        drafted: dict[str, Any] = self.drafted
        return replace(stats, n_threads=n_threads, **drafted)

    def check_caller(self) -> None:
        """Raises CallbackError if the caller is a policy, predictor or listener of this
        model. Such a call would never return, because the model waits until its
        callback has returned."""
        if self.session is not None and self.session.store.calls_back:
            raise CallbackError(
                "a policy, predictor or listener cannot use the model that calls it, because the model would wait"
                " for itself; use another model, or use this model from another thread after the call has returned."
            )

    def check_weights(self) -> None:
        """Raises CapabilityError if the model has no weights (vocab_only). Also raises
        ClosedError and ForkError."""
        self.check_open()
        if self._llm.model_params.vocab_only:
            raise CapabilityError(
                "a model that was loaded with vocab_only tokenizes text, but has no weights to compute with; load it"
                " without vocab_only."
            )

    def check_generates(self) -> None:
        """Raises CapabilityError if the model cannot generate: it has no weights, or it
        only computes embeddings and so has no KV cache. Also raises ClosedError and
        ForkError."""
        self.check_weights()
        if self._llm._ctx.memory is None:
            arch = self._llm.metadata.get("general.architecture", "such")
            raise CapabilityError(
                f"{arch} models embed text and do not generate text; use another model."
            )

    # Requests.

    def as_request(
        self, steps: Generator[Step, Any, None], keeps_logits: bool = False
    ) -> Generator[Step, Any, None]:
        """Returns a generator that runs `steps`, which evaluate tokens, as one request.
        Requests of other threads wait until this request ends.

        keeps_logits: the request may start from the logits that the previous request
        left.

        Raises CallbackError, ClosedError or ForkError.
        """

        self.check_caller()
        self.check_open()

        def with_own_logits() -> Generator[Step, Any, None]:
            self._llm._requires_eval = self._llm._requires_eval or not keeps_logits
            yield from steps

        return self.requests.run(with_own_logits())

    # Evaluations.

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens of sequence 0, `n_batch` at a time, or `n_ubatch` if cells
        that have left a sliding window are reused, because `after_eval` may save them
        first. A failure restores the sequence to its earlier tokens, so that the call
        can be repeated. It empties a sequence with a recurrent state, and a sequence
        whose earlier cells were reused."""
        with self._guarded():
            llm = self._llm
            phase = self.requests.next_phase(self._llm.n_tokens, len(tokens))
            self.images.truncate(llm.n_tokens)
            # This removes the cells left by a failed pass.
            if not llm._ctx.kv_cache_seq_rm(0, self.images.position(llm.n_tokens), -1):
                raise OptionError(
                    f"this model's state cannot go back to its first {llm.n_tokens} tokens; call reset(), and evaluate"
                    " all of them again."
                )
            n_ubatch = int(llm.context_params.n_ubatch)
            n_pass = min(llm.n_batch, n_ubatch) if self._reuses_cells else llm.n_batch
            for begin in range(0, len(tokens), n_pass):
                batch = tokens[begin : begin + n_pass]
                self._evaluate(
                    [
                        SequenceTokens(
                            0, batch, llm.n_tokens, self.requests.sequence, phase
                        )
                    ]
                )
                if self.after_eval is not None:
                    self.after_eval(0, llm.input_ids[: llm.n_tokens], len(batch))

    def eval_sequences(self, chunks: Sequence[SequenceTokens]) -> list[int] | None:
        """Evaluates up to `n_batch` tokens of several sequences together. Returns the
        index in the pass of each chunk's last token before its draft, or None if the KV
        cache has no room for the tokens. `logits` accepts this index. The draft tokens
        directly follow that token. After an exception the caller must truncate the
        sequences, because some of the tokens may be in the context. After a pass with
        drafts the caller must also truncate the sequences, because rejected draft
        tokens stay in the context."""
        with self._guarded():
            try:
                return self._evaluate(chunks)
            except RuntimeError as error:
                if str(error) != _FULL:
                    raise
        return None

    def _evaluate(self, chunks: Sequence[SequenceTokens]) -> list[int]:
        """Evaluates the chunks in one call of llama_decode. Returns the index in the
        pass of each chunk's last token before its draft."""
        llm = self._llm
        own = chunks[-1] if chunks[-1].sequence == 0 else None
        llm._requires_eval = True
        self._evaluated = tuple(chunk.sequence for chunk in chunks)
        rows = self._batch.fill(
            chunks,
            self.images.position,
            all_logits=llm._logits_all and len(chunks) == 1,
        )
        with_logits = np.flatnonzero(self._batch.logits[: self._batch.batch.n_tokens])
        if len(with_logits) > self.n_logits:  # llama.cpp would abort the process
            raise OptionError(
                f"{len(with_logits)} tokens of a pass have logits, but its buffers hold {self.n_logits}; evaluate fewer"
                " at a time, or load the model with logits_all=True."
            )
        self._announce(chunks)
        self.rollback.before_pass(chunks)
        self.computed(self._decode, sum(chunk.n_evaluated for chunk in chunks))
        self.rollback.note_pass(chunks)
        if self.after_pass is not None:
            self.after_pass(self._batch.batch)
        self._chunk_rows = with_logits.tolist()
        for chunk in chunks:
            if chunk.sequence == 0:
                llm.n_tokens = chunk.n_past + len(chunk.tokens)
                llm.input_ids[chunk.n_past : llm.n_tokens] = chunk.tokens
        if own is not None and own.wants_logits:
            llm._requires_eval = False
            if llm._logits_all and len(chunks) == 1:
                logits = np.ctypeslib.as_array(
                    llm._ctx.get_logits(), shape=(len(own.tokens), llm.n_vocab())
                )
                llm.scores[own.n_past : llm.n_tokens] = logits
        return rows

    def _decode(self) -> None:
        """Calls llama_decode. If there are no free cells, drops the cells outside the
        sliding windows, and tries once more: llama.cpp does not reuse cells that
        several sequences share."""
        try:
            self._llm._ctx.decode(self._batch)
        except RuntimeError as error:
            if str(error) != _FULL or not self._reuses_cells:
                raise
            for sequence in range(self._n_seq_max):
                self._drop_before_window(sequence)
            self._llm._ctx.decode(self._batch)

    def _drop_before_window(self, sequence: int) -> None:
        """Drops a sequence's cells that later tokens do not need."""
        end = self.memory.end(WINDOW, sequence) - self._n_swa
        if end > 0:
            self.memory.remove(WINDOW, sequence, 0, end)

    def _announce(self, chunks: Sequence[SequenceTokens]) -> None:
        """Announces the next pass to the controller. Also announces its tokens, with
        their requests and phases, to the store if the store needs them."""
        first = chunks[0]
        session = self.session
        if session is None:
            return
        decodes = all(chunk.phase == Phase.DECODE for chunk in chunks)
        if self.controller is not None:
            n_tokens = (
                sum(chunk.n_evaluated for chunk in chunks) if decodes else len(chunks)
            )
            self.controller.before_tokens(
                Phase.DECODE if decodes else Phase.PREFILL, n_tokens
            )
        if not session.store.context.awaits_tokens(first.request, first.phase):
            return
        n = self._batch.batch.n_tokens
        each = [chunk for chunk in chunks for _ in range(chunk.n_evaluated)]
        sequences = [chunk.request for chunk in each]
        phases = [chunk.phase for chunk in each]
        tokens = self._batch.tokens[:n].tolist()
        outputs = self._batch.logits[:n].tolist()
        session.store.context.announce(sequences, phases, tokens, outputs)

    def eval_image(self, prompt: ImagePrompt, span: ImageSpan, request: int) -> None:
        """Evaluates the image at `span` of `prompt`. Sequence 0 must already hold the
        tokens before the image. request: the request's number in routing events. Raises
        the same errors as an evaluation, and OptionError for a damaged image."""
        with self._guarded():
            llm = self._llm
            projector = self.open_projector()
            assert projector is not None
            if self.controller is not None:
                self.controller.before_tokens(Phase.PREFILL)
            if self.session is not None:
                self.session.store.context.announce(request, Phase.PREFILL, ())
            self.truncate(span.begin)
            self._evaluated = (0,)
            self.rollback.clear()
            sizes = (
                self.images.position(span.begin),
                llm.n_batch,
                llm.context_params.n_ubatch,
            )
            self.computed(
                lambda: projector.evaluate(llm.ctx, prompt, span, *sizes), span.n_tokens
            )
            llm.input_ids[span.begin : span.end] = PLACEHOLDER
            llm.n_tokens = span.end
            self.images.spans.append(span)

    def open_projector(self) -> Projector | None:
        """Returns the projector, loading it on the first call; None without `mmproj`.
        Raises ModelFormatError."""
        # Another thread may count a prompt's tokens at the same time.
        with self._projector_lock:
            if self._projector is None and self._mmproj:
                self.check_open()
                self._projector = Projector(self._mmproj, self._llm)
            return self._projector

    def evaluate(self, call: Callable[[], Any], tokens: Sequence[int] = ()) -> Any:
        """Runs `call` as one request and returns its result. `call` evaluates the
        tokens itself. tokens: the tokens that `call` evaluates; empty if unknown."""
        with self._guarded():
            self.rollback.clear()
            self._llm._requires_eval = True
            number = self.requests.begin()
            if self.session is not None:
                self.session.store.context.announce(number, Phase.PREFILL, tokens)
            return self.computed(call, len(tokens))

    def computed(self, call: Callable[[], Any], n_tokens: int) -> Any:
        """Runs `call` and returns its result. Before that, the number of threads may be
        chosen again, from measurements of earlier passes. `n_tokens`: the number of
        tokens that `call` evaluates; 0: unknown."""
        if self._threads is not None:
            self._threads.before_pass()
        start_s = time.perf_counter()
        result = call()
        self.n_computed += n_tokens
        if self._threads is not None:
            self._threads.after_pass(n_tokens, time.perf_counter() - start_s)
        return result

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Holds the lock while the `with` block evaluates tokens. A failure restores
        sequence 0 to its earlier tokens. With a recurrent state, it instead empties the
        sequence of the failed pass, or all sequences if the pass had several. Known
        failures of llama.cpp become typed errors; other errors are raised unchanged."""
        self.check_caller()
        with self.lock:
            self.check_weights()
            session = self.session
            llm = self._llm
            before = self._llm.n_tokens
            start_s = time.perf_counter()
            if session is not None:
                # A failure, or an exception in a callback, since the last call.
                session.raise_failure()
            self._chunk_rows = []
            try:
                yield
                if session is not None:
                    session.raise_failure()
            except BaseException as error:
                # Also on KeyboardInterrupt: no token may remain half computed.
                llm._requires_eval = True  # the context's logits are stale
                if llm._is_stateful:
                    self._drop_failed()
                elif self._n_swa:
                    self.truncate(before)
                else:
                    llm.n_tokens = before
                if isinstance(error, MoeggufError):
                    raise
                if session is not None:
                    session.raise_failure()
                if found := _typed_error(str(error)):
                    raise found from None
                raise
            finally:
                self.eval_s += time.perf_counter() - start_s

    # The adapter.

    def check_adapter(self) -> None:
        """Raises OptionError for a model without a LoRA adapter."""
        if self._llm._lora_adapter is None:
            raise OptionError(
                "a scale needs a LoRA adapter, which this model was loaded without; give lora_path."
            )

    def scale_adapter(self, scale: float | None) -> None:
        """Sets the scale of the model's LoRA adapter for tokens that are evaluated from
        now on.

        None restores the scale that was set at load time, and 0 switches the adapter
        off. Tokens that are already in the context were evaluated with an earlier
        scale, which this class does not record. Does nothing for a model without an
        adapter.
        """
        llm = self._llm
        bindings = self._bindings
        if llm._lora_adapter is None:
            return
        wanted = llm.lora_scale if scale is None else scale
        if wanted == self.lora_scale:
            return
        adapters = (bindings.llama_adapter_lora_p_ctypes * 1)(llm._lora_adapter)
        with self.lock:
            bindings.llama_set_adapters_lora(
                llm.ctx, adapters, int(wanted != 0), (c.c_float * 1)(wanted)
            )
            self.lora_scale = wanted
            llm._requires_eval = True

    # Logits.

    def check_logits(self, row: int = -1) -> None:
        """Raises OptionError unless the current request has evaluated the token with
        this index.

        `row`: an index that `eval_sequences` has returned; -1: the last token of
        sequence 0.
        """
        if self._llm._requires_eval if row < 0 else row not in self._chunk_rows:
            raise OptionError(
                "this request has no logits from which a token can be sampled (a loaded state contains none, because"
                " llama.cpp saves only the KV cache); evaluate a token first."
            )

    def logits(self, row: int = -1) -> Floats:
        """Returns a row of logits, shape [n_vocab], valid until the next pass. Raises
        the same errors as `check_logits`."""
        self.check_logits(row)
        return np.ctypeslib.as_array(
            self._llm._ctx.get_logits_ith(row), shape=(self._llm.n_vocab(),)
        )

    # The KV cache. `n_tokens` is a number of tokens from the beginning of a sequence.

    def keeps(self, n_tokens: int, sequence: int = 0) -> bool:
        """Returns True if a sequence can be cut to its first `n_tokens`. A recurrent
        state can be rolled back by at most as many tokens as there are valid snapshots.
        With a sliding window, cells that the next token needs must not have been
        reused."""
        position = self.images.position(n_tokens) if sequence == 0 else n_tokens
        if position == 0:
            return True
        if self._llm._is_stateful:
            n_lost = self.memory.end(WHOLE, sequence) - position
            return n_lost == 0 or 0 < n_lost <= self.rollback.n_back(sequence)
        return not self._n_swa or self._has_window(position, sequence)

    def _has_window(self, position: int, sequence: int) -> bool:
        """Returns True if a sequence has all tokens before `position`, except those
        whose cells in a sliding window the next token does not need."""
        first = self.memory.first(WHOLE, sequence)
        is_there = self.memory.end(WHOLE, sequence) >= position
        return is_there and first <= max(0, position - self._n_swa + 1)

    @property
    def returns_to_checkpoints(self) -> bool:
        """True if a sequence returns to a checkpoint when drafted tokens are rejected,
        because llama.cpp cannot roll its state back."""
        return self.rollback.checkpoints is not None

    def return_to_checkpoint(self, n_tokens: int, sequence: int) -> int:
        """Restores the checkpoint that the last pass saved, if a sequence cannot be cut
        to its first `n_tokens` and the checkpoint has no more tokens. Returns the
        number of tokens to which the caller should cut the sequence: the checkpoint's
        number, or `n_tokens` if nothing was restored."""
        checkpoints = self.rollback.checkpoints
        if checkpoints is None or self.keeps(n_tokens, sequence):
            return n_tokens
        with self.lock:
            end = checkpoints.restore(sequence, n_tokens)
        return n_tokens if end is None else end

    def _remove(self, sequence: int, first: int, last: int) -> bool:
        """Removes a sequence's tokens from position `first` up to but not including
        `last` (-1: to the end). Used for models with a recurrent state or a sliding
        window. Returns False, and changes nothing, if the sequence cannot be cut there.
        The base class passes sequence -1, which stands for sequence 0 here."""
        sequence = max(0, sequence)
        if not self._llm._is_stateful:
            is_cut = first > 0 and last < 0
            if is_cut and not self._has_window(first, sequence):
                return False
            return self.memory.remove(WHOLE, sequence, first, last)
        n_lost = self.memory.end(WHOLE, sequence) - first
        if first > 0 and n_lost > self.rollback.n_back(sequence):
            return False
        removed = self.memory.remove(WHOLE, sequence, first, last)
        if first <= 0:
            self.rollback.forget(sequence)
        elif n_lost > 0:
            self.rollback.note_restored(sequence)
        return removed

    def cut(self, n_tokens: int, sequence: int = 0) -> bool:
        """Cuts a sequence to its first `n_tokens`. Returns False, and changes nothing,
        if `keeps` returns False."""
        llm = self._llm
        position = self.images.position(n_tokens) if sequence == 0 else n_tokens
        if not self.keeps(n_tokens, sequence):
            return False
        if llm._is_stateful:
            kept = self._remove(sequence, position, -1)
        else:
            kept = self.memory.remove(WHOLE, sequence, position)
        if sequence == 0 and kept:
            self.images.truncate(n_tokens)
            # The logits belong to other tokens.
            llm.n_tokens = n_tokens
            llm._requires_eval = True
        return kept

    def truncate(self, n_tokens: int, sequence: int = 0) -> bool:
        """Cuts a sequence to its first `n_tokens`. If that is impossible, empties the
        sequence and returns False."""
        if self.cut(n_tokens, sequence):
            return True
        if sequence == 0:
            self._llm.reset()
        self.forget(sequence)
        return False

    def forget(self, sequence: int) -> None:
        """Empties a sequence."""
        self.memory.remove(WHOLE, sequence)
        self.rollback.forget(sequence)

    def _drop_failed(self) -> None:
        """Empties the sequence of a failed pass. If the pass had several sequences,
        empties all sequences, because llama.cpp moves states for such a pass."""
        if len(self._evaluated) == 1:
            self.forget(*self._evaluated)
            if self._evaluated == (0,):
                self._llm.reset()
        else:
            self.clear()

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Copies the first `n_tokens` of `source` into `target`, and drops the earlier
        tokens of `target`. Returns False, and changes nothing, if some of the tokens to
        copy have left a sliding window. With a recurrent state, returns False instead
        if `source` does not have exactly these tokens, or has not been evaluated since
        a rollback.
        """
        first = 0
        last = n_tokens
        if self._llm._is_stateful:
            end = self.memory.end(WHOLE, source)
            if end != n_tokens or not self.rollback.can_copy(source):
                return False
            first = last = -1
        elif self.memory.first(WHOLE, source) != 0:
            return False
        self.forget(target)
        self.memory.copy(WHOLE, source, target, first, last)
        self.rollback.note_shared(source, target)
        # The copied tokens are not known here; PLACEHOLDER matches no token of a later
        # prompt.
        if target == 0:
            self._llm.n_tokens = n_tokens
            self._llm._requires_eval = True
            self._llm.input_ids[:n_tokens] = PLACEHOLDER
        return True

    def read_state(self, sequence: int) -> bytes:
        """Returns a sequence's state, as llama.cpp serializes it."""
        llm = self._llm
        bindings = self._bindings
        with self.lock:
            if self._reuses_cells:  # the state then fits between other sequences
                self._drop_before_window(sequence)
            data = np.empty(
                bindings.llama_state_seq_get_size(llm.ctx, sequence), np.uint8
            )
            pointer = data.ctypes.data_as(c.POINTER(c.c_uint8))
            n_bytes = bindings.llama_state_seq_get_data(
                llm.ctx, pointer, len(data), sequence
            )
        return data[:n_bytes].tobytes()

    def write_state(self, sequence: int, tokens: Sequence[int], state: bytes) -> bool:
        """Writes a saved state of `tokens` into an empty sequence. Returns False, and
        leaves the sequence empty, if llama.cpp cannot place the state, or if the state
        does not end after `tokens`."""
        llm = self._llm
        bindings = self._bindings
        with self.lock:
            data = np.frombuffer(state, np.uint8).ctypes.data_as(c.POINTER(c.c_uint8))
            done = bool(
                bindings.llama_state_seq_set_data(llm.ctx, data, len(state), sequence)
            )
            self.rollback.forget(sequence)
            if not done or self.memory.end(WHOLE, sequence) != len(tokens):
                self.truncate(0, sequence)
                return False
            if sequence == 0:
                self.images.truncate(0)
                llm.n_tokens = len(tokens)
                llm._requires_eval = True
                llm.input_ids[: len(tokens)] = tokens
        return True

    def warm_up(self, n_tokens: int) -> None:
        """Evaluates a pass of `n_tokens`, so that backends allocate their permanent
        memory now. Empties the context afterwards.

        All tokens of the pass are identical, so the pass uses few experts.
        """
        self.eval([0] * n_tokens)
        self.clear()

    def clear(self) -> None:
        """Empties all sequences, so the next token is at position 0."""
        self._bindings.llama_memory_clear(self._llm._ctx.memory, False)
        self.rollback.clear()
        self._llm.reset()

    @property
    def can_shift(self) -> bool:
        """True if tokens can be dropped from the middle of the context by moving the
        cells of later tokens.

        This is impossible without a KV cache, with a recurrent state, and for cells
        that llama.cpp cannot shift, for example if a position consists of several
        numbers (M-RoPE).
        """
        memory = self._llm._ctx.memory
        return (
            memory is not None
            and not self._llm._is_stateful
            and bool(self._bindings.llama_memory_can_shift(memory))
        )

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Drops the `n_discard` tokens of sequence 0 that follow its first `n_keep`.
        Moves all later tokens down, so that no gap is left. Needs `can_shift`."""
        self.check_caller()
        with self.lock:
            self.check_open()
            llm = self._llm
            end = n_keep + n_discard
            llm._ctx.kv_cache_seq_rm(0, n_keep, end)
            llm._ctx.kv_cache_seq_shift(0, end, llm.n_tokens, -n_discard)
            llm.input_ids[n_keep : llm.n_tokens - n_discard] = llm.input_ids[
                end : llm.n_tokens
            ].copy()
            llm.n_tokens -= n_discard

    def close(self, forked: bool = False) -> None:
        """Makes later evaluations raise ClosedError. Waits until no evaluation is in
        progress, and frees the projector. forked: True in a child process, where
        nothing is freed."""
        self._closed = True
        if forked:
            return
        with self.lock, self._projector_lock:
            if self._projector is not None:
                self._projector.close()
                self._projector = None


def _typed_error(failure: str) -> MoeggufError | None:
    """Returns the typed error for a known error text of llama_decode; None for any
    other text."""
    if failure == _ABORTED:
        return GenerationCancelled(
            "generation was cancelled; resume() allows it again."
        )
    reason = llama_log().reason()
    if failure == _NO_MEMORY:
        return AllocationError(
            f"there is no memory for this pass ({reason}); lower n_ctx (--ctx) or n_batch."
        )
    if failure == _FAILED:
        return LibraryError(
            f"a device or the CPU could not compute this pass ({reason}); load the model again, with placement='cpu'"
            " where a GPU fails."
        )
    return None
