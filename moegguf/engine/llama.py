"""`Llama`: llama-cpp-python's `Llama` with a budget for experts.

Everything that class takes still works. Its two parameter structs are properties here, so that whatever the base
class assigns or reads, the experts' buffer type and hook are in them when llama.cpp sees them; nothing is patched in
Python, and two models never share anything.
"""

from __future__ import annotations

import ctypes as c
import inspect
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from moegguf.config import ExpertCache, format_bytes_up, parse_expert_cache, read_environment
from moegguf.controller.policies.base import Policy
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.engine.knowledge import Knowledge
from moegguf.engine.machine import count_cpus, read_memory
from moegguf.engine.plan import Plan, make_plan
from moegguf.engine.readahead import readahead
from moegguf.engine.recording import Recording, TraceOptions
from moegguf.engine.requests import Requests
from moegguf.engine.session import Session
from moegguf.engine.stats import Stats
from moegguf.engine.steering import Steer, Steering
from moegguf.engine.threads import Threadpool, built_with_openmp
from moegguf.engine.turns import Closed, Turns
from moegguf.errors import (
    AllocationError,
    BudgetError,
    CallbackError,
    ClosedError,
    GenerationCancelled,
    ModelFormatError,
    MoeggufError,
    OptionError,
)
from moegguf.experts import read_layout
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.native.store import StoreOptions

_bindings = library.llama_cpp()

# Passed by known wrappers (LangChain) for llama.cpp versions long gone; they never did anything here.
_LEGACY_OPTIONS = frozenset({"f16_kv", "n_parts", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps"})

Progress = Callable[[float], object]

_ABORTED = "llama_decode returned 2"  # our abort callback said so: a failure with a reason, or else cancel()


def known_options() -> list[str]:
    """Keywords of `Llama`: the base class's and ours."""
    own = inspect.signature(Llama.__init__).parameters
    base = inspect.signature(_bindings.Llama.__init__).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in {**base, **own}.values() if p.kind in named and p.name != "self"]


class Llama(_bindings.Llama):  # type: ignore[misc, name-defined]
    """A GGUF model; when it is a Mixture of Experts, its experts are kept within a budget.

    Args:
        model_path: the GGUF file, the first one of a split model.
        expert_cache: memory for experts: "auto" (what is free after everything else), "4GiB", "50%" of all experts,
            or bytes. Ignored for a model without experts.
        store: how experts are moved; the defaults are the measured best.
        policy: which experts stay: a name (`moegguf.controller.policies.POLICIES`), an object with a method
            `scores(history, outlook)`, or "auto": what was measured to be best for this model, else LRU.
        predictor: which experts come next: a name (`moegguf.controller.predictors.PREDICTORS`) or an object.
        prefetch: True fetches ahead what the predictor says, while that saves time; a `PrefetchOptions` says
            how much. None: only where that was measured to pay.
        judge: compare every prediction with what happens, without acting on it unless `prefetch`: see `decisions`.
        trace: a file to record routing in, or a `TraceOptions`.
        progress: called with 0.0 to 1.0 while the weights are read; returning False cancels the load.
        All keywords of `llama_cpp.Llama`. `n_threads` defaults to the processors this process may use. `use_mmap` has
        no effect on a model with experts: mapping the file would spend the budget on pages nobody chose.

    Raises:
        ModelNotFoundError, ModelFormatError: before llama.cpp sees the file.
        BudgetError: the budget cannot be read or is too small; the message states the minimum.
        OptionError: an unknown keyword, naming the nearest known one.
        AllocationError, ExpertIOError, LibraryError.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_cache: str | int | float | ExpertCache | None = None,
        store: StoreOptions | None = None,
        policy: str | Policy = "auto",
        predictor: str | Predictor | None = None,
        prefetch: bool | PrefetchOptions | None = None,
        judge: bool = False,
        lockstep: bool = False,
        trace: str | os.PathLike[str] | TraceOptions | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self._session: Session | None = None
        self._steering: Steering | None = None
        self._recording: Recording | None = None
        self._threads: Threadpool | None = None
        self._closed = False
        self._eval_s = 0.0
        self._progress_error: BaseException | None = None
        self._load_cancelled = False
        self._turns = Turns()
        self._requests = Requests()
        self._busy = threading.RLock()  # held by whoever is inside llama_decode
        self._check_options(options)
        steer = Steer(policy, predictor, prefetch, judge, lockstep)
        path = os.fspath(model_path)
        environment = read_environment()
        self.layout = read_layout(path)
        cache = parse_expert_cache(environment.expert_cache if expert_cache is None else expert_cache)
        n_threads = options.pop("n_threads", None) or count_cpus()
        options.setdefault("n_threads_batch", n_threads)
        n_ubatch = min(options.pop("n_ubatch", 512), options.get("n_batch", 512))
        self.plan = self._make_plan(cache, n_ubatch, options)
        self._progress = _progress_callback(progress, self)
        try:
            if self.layout.is_moe and environment.hooks:
                self._session = Session(self.layout, self.plan, store or StoreOptions())
                self._steering = Steering(self._session, Knowledge(self.layout), steer)
                options["use_mmap"] = False
                n_ubatch = self.plan.n_ubatch
                for warning in self.plan.warnings:
                    warnings.warn(warning, stacklevel=2)
            with readahead(self.layout) if self._session else nullcontext():
                self._load(path, n_ubatch=n_ubatch, n_threads=n_threads, **options)
            if self._session is None and trace:
                raise OptionError(
                    "trace: there are no experts in this model, or MOEGGUF_HOOKS=0 is set: nothing to record."
                )
            if self._session is not None and trace:
                self._recording = Recording(self._session, Knowledge(self.layout), trace)
            if self._session is not None and n_threads > 1 and not built_with_openmp():
                self._threads = Threadpool(self._ctx.ctx, n_threads)
        except BaseException:
            self.close()
            raise

    def _check_options(self, options: dict[str, Any]) -> None:
        known = known_options()
        for name in list(options):
            if name in _LEGACY_OPTIONS:
                del options[name]
            elif name not in known:
                raise OptionError.unknown(name, known)

    def _make_plan(self, cache: ExpertCache, n_ubatch: int, options: dict[str, Any]) -> Plan:
        n_ctx = options.get("n_ctx", 512) or self.layout.hparams.n_ctx_train or 512
        types = {name: value for name in ("type_k", "type_v") if (value := options.get(name)) is not None}
        flash_attn = options.get("flash_attn", False)
        return make_plan(
            self.layout, cache, read_memory(), n_ctx=n_ctx, n_ubatch=n_ubatch, flash_attn=flash_attn, **types
        )

    def _load(self, path: str, **options: Any) -> None:
        try:
            super().__init__(path, **options)
        except MoeggufError:
            raise
        except MemoryError as error:
            raise AllocationError(
                f"no memory left while loading {path}; give a smaller expert_cache or n_ctx."
            ) from error
        except ValueError as error:
            self._raise_progress_error()
            if self._load_cancelled:
                raise GenerationCancelled("loading was stopped by the progress callback.") from None
            if "llama_context" in str(error):
                raise AllocationError(
                    f"llama.cpp has no memory for a context of this size ({error}); lower n_ctx."
                ) from error
            raise ModelFormatError(f"llama.cpp cannot load {path}: {error}; verbose=True shows its reasons.") from error

    # The base class assigns these structs and later hands them to llama.cpp: each read puts our fields in.
    @property
    def model_params(self) -> c.Structure:
        if self._session is not None:
            self._session.attach_model(self._model_params)
        if self._progress is not None:
            self._model_params.progress_callback = self._progress
        return self._model_params

    @model_params.setter
    def model_params(self, params: c.Structure) -> None:
        self._model_params = params

    @property
    def context_params(self) -> c.Structure:
        if self._session is not None:
            self._session.attach_context(self._context_params)
        return self._context_params

    @context_params.setter
    def context_params(self, params: c.Structure) -> None:
        self._context_params = params

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens. A failed pass leaves the tokens before it in place, so that the call can be repeated.

        Raises ExpertIOError, GenerationCancelled, ForkError, ClosedError.
        """
        self._guarded(self._eval_announced, tokens)

    def _eval_announced(self, tokens: Sequence[int]) -> None:
        if self._session is not None:
            phase = self._requests.next_phase(self.n_tokens, len(tokens))
            if self._steering is not None:
                self._steering.before_tokens(phase)
            self._session.lane.announce(self._requests.sequence, phase, tokens)
        super().eval(tokens)

    def embed(self, *arguments: Any, **options: Any) -> Any:
        """As in llama-cpp-python; raises what `eval` raises."""
        if self._session is not None and not self._closed:
            self._session.lane.announce(self._requests.begin(), Phase.PREFILL, [])  # its tokens are not ours to know
        return self._guarded(super().embed, *arguments, **options)

    def generate(self, *arguments: Any, **options: Any) -> Generator[int, Sequence[int] | None, None]:
        """As in llama-cpp-python, one request at a time: other threads wait until this one has ended."""
        self._open_session()
        return self._turns.hold(self._requests.hold(super().generate(*arguments, **options)))

    def _guarded(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._busy:
            session = self._open_session()
            if session is not None:
                session.raise_failure()  # a callback's error since the last call
            before, start = self.n_tokens, time.perf_counter()
            try:
                result = call(*arguments, **options)
                if session is not None:
                    session.raise_failure()
                return result
            except BaseException as error:
                self._forget_pass(before)
                if session is not None and not isinstance(error, MoeggufError):
                    session.raise_failure()
                    if str(error) == _ABORTED:
                        raise GenerationCancelled("generation was cancelled; resume() allows it again.") from None
                raise
            finally:
                self._eval_s += time.perf_counter() - start

    def _forget_pass(self, n_tokens: int) -> None:
        """After a failed pass: the tokens before it stay, but what the context holds as logits is not theirs."""
        if self._is_recurrent or self._is_hybrid:
            self.reset()  # such a state cannot be taken back by some tokens
        else:
            self.n_tokens = n_tokens
        self._requires_eval = True

    def _open_session(self) -> Session | None:
        if self._closed:
            raise ClosedError("the model is closed; load it again.")
        if self._session is not None:
            self._session.check_process()
        return self._session

    def stats(self) -> Stats:
        """Figures since the model was loaded; subtract an earlier one for those of a request."""
        session = self._open_session()
        return session.stats(self._eval_s) if session else Stats(eval_s=self._eval_s)

    def decisions(self) -> dict[str, Any]:
        """Who decides and how well: policy, predictor, whether it prefetches, its accuracy when `judge` was given."""
        self._open_session()
        return self._steering.figures() if self._steering else {}

    @property
    def recording(self) -> Recording | None:
        """The trace being recorded."""
        return self._recording

    @property
    def next_sequence(self) -> int:
        """The number that gates of the next request will carry."""
        return self._requests.sequence + 1

    @property
    def session(self) -> Session | None:
        """The expert store behind this model; None for a model without experts and with MOEGGUF_HOOKS=0."""
        return self._session

    def set_expert_cache(self, expert_cache: str | int | float | ExpertCache) -> None:
        """Another budget from the next token on, at most the one given at load; memory goes back to the system.

        Raises BudgetError below the minimum.
        """
        session = self._open_session()
        if session is None:
            return
        plan = make_plan(self.layout, parse_expert_cache(expert_cache), read_memory(), n_ctx=self.n_ctx(), n_ubatch=1)
        least = min(self.plan.n_ubatch * self.layout.n_expert_used, self.layout.n_expert)
        if plan.n_slots < least:
            size = format_bytes_up(least * self.plan.slot_bytes)
            raise BudgetError(
                f"expert_cache={expert_cache!r} is too small for a model that was loaded to read {self.plan.n_ubatch}"
                f" tokens at a time; give at least {size!r}, or load it again with the smaller budget."
            )
        n_slots = min(plan.n_slots, session.store.info()["n_slots"])
        session.store.resize(n_slots)
        if self._steering is not None:
            self._steering.update(n_slots)

    def cancel(self) -> None:
        """Ends the evaluation in progress, from another thread: it raises GenerationCancelled at once."""
        if self._session is not None and not self._closed:
            self._session.store.cancel(True)

    def resume(self) -> None:
        """Allows evaluation again after `cancel`."""
        if self._session is not None and not self._closed:
            self._session.store.cancel(False)

    def _raise_progress_error(self) -> None:
        if self._progress_error is not None:
            raise CallbackError(f"the progress callback raised: {self._progress_error}") from self._progress_error

    def close(self) -> None:
        """Frees context, model, pool and threads. Twice is harmless."""
        if getattr(self, "_closed", True):
            return
        forked = self._session is not None and self._session.forked
        if not forked:
            self.cancel()  # a pass of another thread ends now, with GenerationCancelled
        self._closed = True
        if forked:
            return  # the parent's to free
        with self._busy:
            try:
                for hearer in (self._steering, self._recording):
                    if hearer is not None:
                        hearer.close()
            finally:  # a trace that could not be written keeps nothing in memory
                self._free()

    def _free(self) -> None:
        with suppress(AttributeError):  # the base class had not come that far
            super().close()
        if self._threads is not None:
            self._threads.close()
        self._model = self._ctx = self._batch = self.tokenizer_ = Closed()
        if self._session is not None:
            self._session.close()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Llama:
        self._open_session()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise OptionError("a loaded model cannot be pickled; load it in the process that uses it.")


def _progress_callback(progress: Progress | None, llama: Llama) -> Any:
    if progress is None:
        return None

    def call(share: float, _user: int) -> bool:
        try:
            llama._load_cancelled = progress(share) is False
            return not llama._load_cancelled
        except BaseException as error:  # an exception must not enter llama.cpp
            llama._progress_error = error
            return False

    return _bindings.llama_progress_callback(call)
