"""`Llama`: llama-cpp-python's `Llama` with a budget for experts.

All of that class's keywords still work. Its two parameter structs are properties here, so that the experts' buffer
type and hook are in them whenever they reach llama.cpp. Nothing is patched in Python, and two models share nothing.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies.base import Policy
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.strategies import find_strategy
from moegguf.engine.error_log import llama_log
from moegguf.engine.live_controller import ControllerOptions, LiveController
from moegguf.engine.load import Budget, LoadPlan, LoadProgress, Progress, check_options, prepare
from moegguf.engine.plan import Plan
from moegguf.engine.projector import (
    PLACEHOLDER,
    ContextImages,
    ImagePrompt,
    ImageSpan,
    PositionedBatch,
    Projector,
)
from moegguf.engine.readahead import readahead
from moegguf.engine.recording import Recording, TraceOptions
from moegguf.engine.requests import RequestCounter, RequestLock
from moegguf.engine.resize import EVERY_DEVICE, Resize
from moegguf.engine.sequences import Chunk, ContextSequences, PassBatch
from moegguf.engine.session import Session
from moegguf.engine.stats import Stats
from moegguf.engine.threadpool import GovernedThreads, Threadpool
from moegguf.engine.trial import try_first
from moegguf.engine.upstream import UpstreamLlama
from moegguf.engine.vocabulary import Vocabulary, to_utf8
from moegguf.engine.warm_start import WarmStart
from moegguf.errors import (
    CallbackError,
    CapabilityError,
    ClosedError,
    GenerationCancelled,
    MoeggufError,
    OptionError,
)
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.native.store import StoreOptions, Tier
from moegguf.options import take_old_keywords
from moegguf.settings import read_environment

Step = TypeVar("Step")
_FULL = "llama_decode returned 1"
_ABORTED = "llama_decode returned 2"  # by our abort callback: for a failure with a reason, or for cancel()


class ClosedModel:
    """Replaces the model, its context and its tokenizer after close(): reading any attribute raises ClosedError."""

    def __getattr__(self, _name: str) -> Any:
        raise ClosedError("the model is closed; load it again.")


class Llama(UpstreamLlama):
    """A GGUF model; when it is a Mixture of Experts, its experts are kept within a budget.

    Args:
        model_path: the GGUF file, the first one of a split model, or a name: "demo", "hf.co/user/repo:Q4_K_M".
        expert_cache: memory for experts: "auto" (what is free after everything else), "4GiB", "50%" of all experts,
            or bytes. Ignored for a model without experts.
        vram_cache: memory of a GPU for experts, in the same forms; expert_cache is RAM then, that missed experts are
            copied from, or that the CPU computes with. Several GPUs share it, and the layers, as tensor_split,
            split_mode and main_gpu say; "8GiB,4GiB" is a budget for each. With it, layers that n_gpu_layers leaves to
            the CPU have slots in RAM. None: MOEGGUF_VRAM_CACHE, and without that "auto" where there is a GPU, unless
            n_gpu_layers says which layers it computes.
        placement: what goes into that memory: "layers" (the experts of whole layers; the CPU computes the others),
            "slots" (experts as they are used; the GPU computes everything), "cpu" (no GPU), or "auto": what is
            predicted to be fastest with speeds that are measured here (engine/cost.py); with several GPUs, slots.
            None: MOEGGUF_PLACEMENT.
        misses: what happens to experts that a GPU with slots over slots in RAM lacks: "fetch" copies them there;
            "compute" lets the CPU compute them from RAM in passes of up to 8 tokens, where that is faster by what was
            measured so far, and until an expert was used twice in 64 tokens. That is not exact: a CPU rounds otherwise
            than a GPU, so an answer depends on what was in VRAM (`Plan.exact`, `Stats.exact`). None: MOEGGUF_MISSES,
            else "fetch".
        strategy: what decides on experts: "moegguf" (what was measured to be best), "lru", "none", or a paper's as a
            whole, "moe-infinity", "promoe", "expertflow", "duoserve" (`moegguf.controller.strategies`). The next four
            replace parts of it. None: MOEGGUF_STRATEGY, else "moegguf".
        store: how experts are moved, instead of as the strategy does.
        policy: which experts stay: a name (`moegguf.controller.policies.policy_names()`), an object with a method
            `scores(history, forecast)`, or "auto": that of MOEGGUF_POLICY, else the strategy's. "vram=NAME,ram=NAME"
            names those of a GPU's slots and of slots in RAM; of RAM below a GPU it is LRU where none is named.
        predictor: which experts come next: a name (`moegguf.controller.predictors.PREDICTORS`) or an object.
        prefetch: True fetches predicted experts ahead, while that saves time; a `PrefetchOptions` sets limits.
            None: as the strategy does.
        warm_start: fetch the experts that earlier runs used most as soon as the model is loaded, and remember those of
            this run. None: MOEGGUF_WARM_START, else False; never with `lockstep`.
        trace: a file to record routing in, or a `TraceOptions`.
        n_seq_max: sequences of `n_ctx` tokens each that the context holds, for `moegguf.Engine`; this class itself
            uses one. The property `n_seq_max` says which models have only one.
        kv_tokens: tokens of all sequences that there is memory for, n_ctx at least. None: n_seq_max * n_ctx, less where
            experts would miss that memory (`moegguf.engine.memory.choose_kv_tokens`).
        flash_attn: fused attention, which rounds otherwise: True, False (llama-cpp-python's default), or None: where
            the devices that compute have it, as llama.cpp's own programs, `moegguf.Engine`, `run` and `serve` do.
        mmproj: the model's projector, for images in messages (moegguf.generate); it is loaded with the first image.
        plan: of a server that has planned this load (engine/planner.py), in place of the first four.
        progress: called with 0.0 to 1.0 while the weights are read; returning False cancels the load.
        All keywords of `llama_cpp.Llama`. Without `n_threads` and `n_threads_batch` there are as many threads as
        processors this process may use, and fewer while other processes use some of them. `use_mmap` has no effect on
        a model with experts: pages of a mapped file are outside the budget's control.

    Raises:
        ModelNotFoundError, ModelFormatError: before llama.cpp sees the file, or because it ended the trial load
            (engine/trial.py).
        CapabilityError: a kind of model that is not run.
        BudgetError: the budget cannot be read or is too small; the message states the minimum.
        OptionError: an unknown keyword, naming the nearest known one.
        AllocationError, ExpertIOError, LibraryError.
    """

    n_batch: int

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_cache: Budget | None = None,
        vram_cache: Budget | None = None,
        placement: str | None = None,
        misses: str | None = None,
        strategy: str | None = None,
        store: StoreOptions | None = None,
        policy: str | Policy = "auto",
        predictor: str | Predictor | None = None,
        prefetch: bool | PrefetchOptions | None = None,
        lockstep: bool = False,
        warm_start: bool | None = None,
        trace: str | os.PathLike[str] | TraceOptions | None = None,
        progress: Progress | None = None,
        n_seq_max: int = 1,
        kv_tokens: int | None = None,
        mmproj: str | os.PathLike[str] | None = None,
        plan: Plan | None = None,
        **options: Any,
    ) -> None:
        self._images = ContextImages()
        self._projector: Projector | None = None
        self._projector_lock = threading.Lock()
        self._session: Session | None = None
        self._live_controller: LiveController | None = None
        self._recording: Recording | None = None
        self._warm_start: WarmStart | None = None
        self._threadpool: Threadpool | None = None
        self._threads: GovernedThreads | None = None
        self._closed = False
        self._eval_s = 0.0
        self._no_devices = (c.c_void_p * 1)()  # a list that ends at once
        self._progress = LoadProgress(progress)
        self._request_lock = RequestLock()
        self._requests = RequestCounter()
        self._decode_lock = threading.RLock()  # held during llama_decode
        strategy = take_old_keywords(options).get("strategy", strategy)
        check_options(options, Llama)
        of = find_strategy(read_environment().strategy if strategy is None else strategy)
        policy = read_environment().policy if isinstance(policy, str) and policy == "auto" else policy
        chosen = ControllerOptions(*of.parts(policy, predictor, prefetch), lockstep)
        options.update(mmproj=mmproj, n_seq_max=n_seq_max, kv_tokens=kv_tokens)
        store = of.store if store is None else store
        warm_start = read_environment().warm_start if warm_start is None else warm_start
        self._keywords = dict(
            model_path=model_path, expert_cache=expert_cache, vram_cache=vram_cache, placement=placement,
            misses=misses, plan=plan, strategy=of.name, store=store, warm_start=warm_start, **vars(chosen), **options,
        )  # fmt: skip
        self._load_plan = load_plan = prepare(
            model_path, expert_cache, options, vram_cache, store, placement, misses, plan
        )
        self.layout, self.plan = load_plan.layout, load_plan.plan
        self._n_seq_max = load_plan.n_seq_max
        try:
            try_first(self.layout, options, self._progress.wait, load_plan.projector)
            if load_plan.no_device or self.plan.layers_on:
                store = replace(store, device=None)  # it named the one to place experts on: these slots are the CPU's
            if load_plan.hooks:
                self._session = Session(load_plan.slots_layout, self.plan, store)
                if not self.plan.exact:
                    self._session.compute_misses(load_plan.options["n_threads"])
                self._live_controller = LiveController(self._session, Artifacts(self.layout), chosen, self._n_seq_max)
                for warning in self.plan.warnings:
                    warnings.warn(warning, stacklevel=2)
            self._load(load_plan)
            if self._session is not None and (reason := self._session.not_computed()):
                warnings.warn(reason, stacklevel=2)
            if self._session is not None and warm_start and not self.plan.whole_layers and not lockstep:
                self._warm_start = WarmStart(self._session, Artifacts(self.layout))
                self._warm_start.begin()
            self._start_threads(load_plan)
            self._start_recording(trace)
        except BaseException:  # also an interrupt: nothing of a load stays
            if self._recording is not None:
                self._recording.discard()  # keeps an older trace file
            self.close()
            raise

    def _load(self, load_plan: LoadPlan) -> None:
        while True:
            llama_log().forget()
            try:
                with readahead(self._session.layout) if self._session else nullcontext():
                    super().__init__(load_plan.path, n_ubatch=load_plan.n_ubatch, **load_plan.options)
                break
            except MoeggufError:
                raise
            except (MemoryError, ValueError) as error:
                self._progress.raise_reason()
                if not self._give_slots_back():
                    raise load_plan.failure(error, llama_log().reason()) from error
        load_plan.layout.check_not_overwritten()
        self.input_ids.fill(PLACEHOLDER)
        if self._n_seq_max > 1:
            self._pass_batch = PassBatch(self.n_batch)
        if load_plan.projector is not None:
            self._batch = PositionedBatch(self._batch, self._images)

    def _give_slots_back(self) -> bool:
        """Leaves half of the slots' memory on a device to what did not fit beside them; False where there is none."""
        if self._session is None or self.plan.device is None:
            return False
        store = self._session.store
        least = sum(device.pass_slots for device in store.devices)
        n_slots = store.info()["n_slots_usable"]
        if n_slots <= least:
            return False
        with suppress(AttributeError):  # what was loaded before the failure
            self._stack.close()
        fewer = max(least, n_slots // 2)
        store.reallocate(fewer)
        warnings.warn(
            f"{self.plan.device} has no memory for weights and a context beside {n_slots} expert slots; going on with"
            f" {fewer}, which is slower; give a smaller vram_cache, or lower n_ctx.",
            stacklevel=2,
        )
        return True

    def _start_threads(self, load_plan: LoadPlan) -> None:
        n_threads, n_threads_batch = (load_plan.options[name] for name in ("n_threads", "n_threads_batch"))
        if max(n_threads, n_threads_batch) == 1:
            return
        if load_plan.hooks or load_plan.govern_threads:
            self._threadpool = Threadpool(self._ctx.ctx, n_threads, n_threads_batch)
        if load_plan.govern_threads:
            self._threads = GovernedThreads(self._ctx.ctx, n_threads, self._stall_s)

    def _stall_s(self) -> float:
        return self._session.store.counters()["stall_ns"] / 1e9 if self._session is not None else 0.0

    def _start_recording(self, trace: str | os.PathLike[str] | TraceOptions | None) -> None:
        if trace and self._session is None:
            raise OptionError(
                "trace: there are no experts in this model, or MOEGGUF_HOOKS=0 is set: nothing to record."
            )
        if trace and self._session is not None:
            self._recording = Recording(self._session, Artifacts(self.layout), trace)

    @staticmethod
    def estimate(
        model_path: str | os.PathLike[str],
        *,
        expert_cache: Budget | None = None,
        vram_cache: Budget | None = None,
        placement: str | None = None,
        misses: str | None = None,
        **options: Any,
    ) -> Plan:
        """The memory plan for loading the model with these keywords. Raises what loading would raise."""
        options |= take_old_keywords(options)
        check_options(options, Llama)
        return prepare(model_path, expert_cache, options, vram_cache, placement=placement, misses=misses).plan

    # The base class assigns these structs and later passes them to llama.cpp: each read sets our fields.
    @property
    def model_params(self) -> c.Structure:
        """struct llama_model_params, with the experts' buffer type and the progress callback."""
        if self._session is not None:
            self._session.attach_model(self._model_params)
        if self._progress.callback is not None:
            self._model_params.progress_callback = self._progress.callback
        if self._load_plan.no_device:
            self._model_params.devices = c.addressof(self._no_devices)
        return self._model_params

    @model_params.setter
    def model_params(self, params: c.Structure) -> None:
        self._model_params = params

    @property
    def context_params(self) -> c.Structure:
        """struct llama_context_params, with the expert hook, the sequences and flash attention."""
        if self._n_seq_max > 1 and "_model" in self.__dict__:  # the context is created next
            self._hold_sequences()
        if self._load_plan.options.get("flash_attn", False) is None:  # the base class knows on and off
            self._context_params.flash_attn_type = library.llama_cpp().LLAMA_FLASH_ATTN_TYPE_AUTO
        if self._session is not None:
            self._session.attach_context(self._context_params)
        return self._context_params

    @context_params.setter
    def context_params(self, params: c.Structure) -> None:
        self._context_params = params

    @property
    def n_seq_max(self) -> int:
        """Sequences that the context holds: as given, or 1 for a model that has a recurrent state, that embeds, or that
        would compute differently in a context as large as all of them."""
        return self._n_seq_max

    def _hold_sequences(self) -> None:
        bindings, model, params = library.llama_cpp(), self._model.model, self._context_params
        if bindings.llama_model_is_recurrent(model) or bindings.llama_model_is_hybrid(model):
            self._n_seq_max = 1
        else:
            params.n_seq_max, params.n_ctx, params.kv_unified = self._n_seq_max, self.plan.kv_tokens, True

    def n_ctx(self) -> int:
        """Tokens of context, of one sequence."""
        return int(self._load_plan.options["n_ctx"] if self._n_seq_max > 1 else super().n_ctx())

    @cached_property
    def sequences(self) -> ContextSequences:
        """The KV cache by sequence; this class's own methods use sequence 0."""
        return ContextSequences(self._ctx)

    def begin_request(self) -> int:
        """The number in routing events of a request that `eval_chunks` evaluates."""
        return self._requests.begin()

    @property
    def request_number(self) -> int:
        """The number in routing events of the last request that began; -1: none has."""
        return self._requests.sequence

    def eval_chunks(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """Evaluates at most `n_batch` tokens of several sequences together; returns each chunk's row of logits, or None
        when the KV cache has no room for them.

        After an exception, which is one of `eval`'s, some of the tokens may be in the context: truncate the sequences.
        """
        rows: list[int] | None = self._guarded(self._eval_chunks, chunks)
        self._chunk_rows = [row for chunk, row in zip(chunks, rows or (), strict=False) if chunk.wants_logits]
        return rows

    def _eval_chunks(self, chunks: Sequence[Chunk]) -> list[int] | None:
        self._announce_chunks(chunks)
        self._requires_eval = True
        rows = self._pass_batch.fill(chunks)
        try:
            self._computed(lambda: self._ctx.decode(self._pass_batch), sum(len(chunk.tokens) for chunk in chunks))
        except RuntimeError as error:
            if str(error) == _FULL:
                return None
            raise
        return rows

    def _announce_chunks(self, chunks: Sequence[Chunk]) -> None:
        if self._session is None:
            return
        first = chunks[0]
        if self._live_controller is not None:
            decodes = all(chunk.phase == Phase.DECODE for chunk in chunks)
            self._live_controller.before_tokens(Phase.DECODE if decodes else Phase.PREFILL, len(chunks))
        if not self._session.lane.awaits_tokens(first.request, first.phase):
            return
        sequences, phases, tokens, outputs = list[int](), list[int](), list[int](), list[int]()
        for chunk in chunks:
            n = len(chunk.tokens)
            sequences += [chunk.request] * n
            phases += [chunk.phase] * n
            tokens += chunk.tokens
            outputs += [0] * (n - 1)
            outputs.append(chunk.wants_logits)
        self._session.lane.announce(sequences, phases, tokens, outputs)

    def clear(self) -> None:
        """Empties all sequences."""
        self.sequences.clear()
        self.reset()

    def eval(self, tokens: Sequence[int], after_batch: Callable[[], object] | None = None) -> None:
        """Evaluates tokens, `n_batch` at a time, and calls `after_batch` after each; an exception of that ends it.

        A failed call leaves the tokens before it in place, so that it can be repeated. Raises ExpertIOError,
        GenerationCancelled, ForkError, ClosedError.
        """
        self._guarded(self._eval_announced, tokens, after_batch)

    def _eval_announced(self, tokens: Sequence[int], after_batch: Callable[[], object] | None) -> None:
        if self._session is not None:
            phase = self._requests.next_phase(self.n_tokens, len(tokens))
            if self._live_controller is not None:
                self._live_controller.before_tokens(phase)
            if self._session.lane.awaits_tokens(self._requests.sequence, phase):
                self._session.lane.announce(self._requests.sequence, phase, tokens)
        if self._images:
            self.truncate(self.n_tokens)
        for begin in range(0, len(tokens), self.n_batch):
            self._eval_batch(tokens[begin : begin + self.n_batch])
            if after_batch is not None:
                after_batch()

    def _eval_batch(self, tokens: Sequence[int]) -> None:
        self._computed(lambda: super(Llama, self).eval(tokens), len(tokens))

    def _computed(self, call: Callable[[], Any], n_tokens: int) -> Any:
        """The result of `call`, which evaluates so many tokens (0: unknown), with as many threads as are best now."""
        if self._threads is None:
            return call()
        self._threads.before_pass()
        start_s = time.perf_counter()
        result = call()
        self._threads.after_pass(n_tokens, time.perf_counter() - start_s)
        return result

    def eval_image(self, prompt: ImagePrompt, span: ImageSpan) -> None:
        """Evaluates an image's span of `prompt`, whose tokens before it are in the context. Raises what `eval` raises,
        and OptionError for a damaged image."""
        self._guarded(self._eval_image, prompt, span)

    def _eval_image(self, prompt: ImagePrompt, span: ImageSpan) -> None:
        assert self.projector is not None
        if self._session is not None:
            phase = self._requests.next_image(self.n_tokens, span.n_tokens)
            if self._live_controller is not None:
                self._live_controller.before_tokens(phase)
            self._session.lane.announce(self._requests.sequence, phase, ())
        self.truncate(span.begin)
        position, n_ubatch = self._images.position(span.begin), self._context_params.n_ubatch
        evaluate = partial(self.projector.evaluate, self._ctx.ctx, prompt, span, position, self.n_batch, n_ubatch)
        self._computed(evaluate, span.n_tokens)
        self.input_ids[span.begin : span.end] = PLACEHOLDER
        self.n_tokens = span.end
        self._images.add(span)

    def truncate(self, n_tokens: int) -> bool:
        """Keeps the first `n_tokens` tokens of the context; False where the model's state cannot be truncated."""
        self._images.truncate(n_tokens)
        if not self._ctx.kv_cache_seq_rm(-1, self._images.position(n_tokens), -1):
            return False
        self.n_tokens = n_tokens
        self._requires_eval = True  # the logits are of other tokens
        return True

    def reset(self) -> None:
        """Empties the context. What others evaluate into it, such as a chat handler's images, then equals no prompt."""
        super().reset()
        self._images.truncate(0)
        self.input_ids.fill(PLACEHOLDER)

    @property
    def images(self) -> ContextImages:
        """The images in the context."""
        return self._images

    @property
    def reads_images(self) -> bool:
        """Whether it was loaded with a projector."""
        return self._load_plan.projector is not None and bool(self._keywords["mmproj"])

    @property
    def projector(self) -> Projector | None:
        """What reads images, loaded when it is first used; None without `mmproj`. Raises ModelFormatError."""
        with self._projector_lock:  # a server counts tokens beside a running answer
            if self._projector is None and self.reads_images:
                self._open_session()
                self._projector = Projector(self._keywords["mmproj"], self)
            return self._projector

    def embed(self, *arguments: Any, **options: Any) -> Any:
        """As in llama-cpp-python; raises what `eval` raises, and OptionError for a text without tokens."""
        texts = arguments[0] if arguments else options.get("input", ())
        if not all(self.tokenize(to_utf8(text)) for text in ([texts] if isinstance(texts, str) else texts)):
            raise OptionError("a text is empty, and this model begins none with a token of its own; leave it out.")
        return self.evaluate(lambda: super(Llama, self).embed(*arguments, **options))

    def evaluate(self, call: Callable[[], Any], tokens: Sequence[int] = ()) -> Any:
        """The result of `call`, which evaluates `tokens` itself (empty: unknown); raises what `eval` raises."""

        def announced() -> Any:
            self._requires_eval = True
            if self._session is not None:
                self._session.lane.announce(self._requests.begin(), Phase.PREFILL, tokens)
            return self._computed(call, len(tokens))

        return self._guarded(announced)

    def generate(self, *arguments: Any, **options: Any) -> Generator[int, Sequence[int] | None, None]:
        """As in llama-cpp-python, one request at a time: other threads wait until this one has ended.

        Raises OptionError without a token to begin with, CapabilityError.
        """
        self.check_generates()
        tokens = arguments[0] if arguments else options.get("tokens", ())
        if not len(tokens) and (options.get("reset", True) or not self.n_tokens):
            raise OptionError("there is nothing to continue: the prompt has no tokens of this model's vocabulary.")
        return self._one_request(super().generate(*arguments, **options))

    def check_generates(self) -> None:
        """Raises CapabilityError for a model that only embeds: it has no context to go on from. Raises ClosedError."""
        self._open_session()
        if self._ctx.memory is None:
            raise CapabilityError(f"{self.layout.arch} models do not generate text, they embed it; take another model.")

    def as_request(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        """The same steps, which evaluate tokens, as one request, which begins without logits; others wait for it.

        Raises ClosedError, ForkError.
        """
        return self._one_request(self._with_own_logits(steps))

    def _with_own_logits(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        self._requires_eval = True  # the logits are of the request before
        yield from steps

    def _one_request(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        self.check_caller()
        self._open_session()
        return self._request_lock.run(self._requests.run(steps))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The text of each token, and the special tokens."""
        return Vocabulary(self)

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Drops `n_discard` tokens after the first `n_keep` of the context; later ones move up. Needs `can_shift`."""
        self.check_caller()
        with self._decode_lock:
            self._open_session()
            super().shift(n_keep, n_discard)

    def check_caller(self) -> None:
        """Raises CallbackError from a policy, predictor or listener of this model, which an evaluation may wait for."""
        if self._session is not None and self._session.store.calls_back:
            raise CallbackError(
                "a policy, predictor or listener cannot use the model that calls it, which would wait for itself; call"
                " another one, or this one from another thread once it has returned."
            )

    def _guarded(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.check_caller()
        with self._decode_lock:
            session = self._open_session()
            if session is not None:
                session.raise_failure()  # a callback's error since the last call
            before, start = self.n_tokens, time.perf_counter()
            self._chunk_rows = ()
            try:
                result = call(*arguments, **options)
                if session is not None:
                    session.raise_failure()
                return result
            except BaseException as error:  # also an interrupt: no token stays half computed
                self._roll_back(before)
                if session is not None and not isinstance(error, MoeggufError):
                    session.raise_failure()
                    if str(error) == _ABORTED:
                        raise GenerationCancelled("generation was cancelled; resume() allows it again.") from None
                raise
            finally:
                self._eval_s += time.perf_counter() - start

    def _roll_back(self, n_tokens: int) -> None:
        """After a failed pass: keeps the `n_tokens` tokens before it, and marks the context's logits as stale."""
        if self._is_stateful:
            self.reset()
        else:
            self.n_tokens = n_tokens
        self._requires_eval = True

    def _open_session(self) -> Session | None:
        """The session, if any; raises ClosedError or ForkError when the model cannot be used."""
        if self._closed:
            raise ClosedError("the model is closed; load it again.")
        if self._session is not None:
            self._session.check_process()
        return self._session

    def stats(self) -> Stats:
        """Counters since the model was loaded; subtract earlier ones for those of a request."""
        session = self._open_session()
        stats = session.stats(self._eval_s) if session else Stats(eval_s=self._eval_s)
        return replace(stats, n_threads=self._threads.n_threads if self._threads is not None else self.n_threads)

    def decisions(self) -> dict[str, Any]:
        """Policy, predictor, whether prefetching is on, and what that cost."""
        self._open_session()
        return self._live_controller.figures() if self._live_controller else {}

    @property
    def recording(self) -> Recording | None:
        """The trace being recorded, None without `trace`."""
        return self._recording

    @property
    def next_sequence(self) -> int:
        """The number in the routing events of the next request."""
        return self._requests.sequence + 1

    @property
    def session(self) -> Session | None:
        """The expert store behind this model; None for a model without experts and with MOEGGUF_HOOKS=0."""
        return self._session

    def set_expert_cache(self, expert_cache: Budget) -> None:
        """`set_budget(expert_cache=...)`."""
        self.set_budget(expert_cache=expert_cache)

    def set_budget(self, *, expert_cache: Budget | None = None, vram_cache: Budget | None = None) -> None:
        """Changes the budget in RAM, the one on the GPU, or both, up to those at load; freed memory returns to the
        system, and to the device. None: as it is. As when loading, vram_cache holds what prompts are staged in, which
        stays; so do experts of whole layers, which are in no budget. No token changes. But where a device had a slot
        for every expert, and so stages nothing, prompts are read in shorter passes from then on, with a warning: tokens
        are those of a model that was loaded for such passes.

        At once while the model is idle; while another thread evaluates tokens, between two passes. A model without
        experts has no budget. Raises BudgetError below the minimum and for a tier that the model does not have, with
        nothing changed, AllocationError where a device refuses more: that tier then has what it had.
        """
        self.check_caller()
        with self._decode_lock:
            session = self._open_session()
            if session is None:
                return
            store, on_device = session.store, self.plan.device is not None
            load_plan = self._load_plan
            resize = Resize(self.plan, load_plan.slots_layout, store, load_plan.stages_beside)
            wanted = resize.slots(expert_cache, vram_cache)
            try:
                if on_device:
                    library.llama_cpp().llama_synchronize(self._ctx.ctx)  # nothing computes with slots any more
                    for (tier, device), n_slots in reversed(wanted.items()):
                        store.reallocate(n_slots, tier, device)
                elif wanted:
                    store.resize(wanted[EVERY_DEVICE])
            finally:
                if wanted.get(EVERY_DEVICE, self.plan.device_slots) < self.plan.device_slots:
                    self._shorten_passes()
                if self._live_controller is not None and any(tier is Tier.COMPUTE for tier, _ in wanted):
                    n_slots = store.info()["n_slots_usable"] if on_device else wanted[EVERY_DEVICE]
                    self._live_controller.update(n_slots)

    def _shorten_passes(self) -> None:
        """To what slots are exact for, where passes were planned for a device with every expert."""
        most, plan = self.plan.slot_tokens, self.plan
        if plan.device is None or plan.n_staging or min(self.n_batch, plan.n_ubatch) <= most:
            return
        self.n_batch = most
        warnings.warn(
            f"{plan.device} had a slot for every expert, and stages no prompts: with fewer slots they are read"
            f" {most} token{'s' * (most > 1)} at a time, as slots are exact for no more; load the model again with this"
            " vram_cache to have them staged.",
            stacklevel=3,
        )

    def cancel(self) -> None:
        """Ends the evaluation in progress, from another thread: it raises GenerationCancelled at once."""
        if self._session is not None and not self._closed:
            self._session.store.cancel(True)

    def resume(self) -> None:
        """Allows evaluation again after `cancel`."""
        if self._session is not None and not self._closed:
            self._session.store.cancel(False)

    def close(self) -> None:
        """Frees context, model, pool and threads. Twice is harmless."""
        if getattr(self, "_closed", True):
            return
        self.check_caller()
        forked = self._session is not None and self._session.forked
        if not forked:
            self.cancel()  # a pass of another thread ends now, with GenerationCancelled
        self._closed = True
        if forked:
            return  # the parent process owns it
        with self._decode_lock:
            try:
                for part in (self._live_controller, self._recording, self._warm_start):
                    if part is not None:
                        part.close()
            finally:  # also when the trace could not be written
                self._free()

    def _free(self) -> None:
        with self._projector_lock:
            if self._projector is not None:
                self._projector.close()
                self._projector = None
        with suppress(AttributeError):  # the base class was not fully constructed
            super().close()
        if self._threadpool is not None:
            self._threadpool.close()
        self._model = self._ctx = self._batch = self.tokenizer_ = ClosedModel()
        self.__dict__.pop("vocabulary", None)
        self.__dict__.pop("sequences", None)
        if self._session is not None:
            self._session.close()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Llama:
        self._open_session()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
