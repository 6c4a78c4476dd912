"""`Llama`: llama-cpp-python's `Llama` with a memory budget for experts.

This class only connects other objects: the loader creates them, the context evaluates
tokens, and the session holds the experts. All keywords of llama-cpp-python's class are
still accepted.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

from moegguf.controller.policies import Policy
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.strategies import find_strategy
from moegguf.decisions import start_log
from moegguf.engine.context import ClosedModel, Context
from moegguf.engine.drafts import Drafts, ModelDrafts
from moegguf.engine.kv_block_store import KvBlockStore, default_folder
from moegguf.engine.live_controller import ControllerOptions
from moegguf.engine.load import check_options, prepare
from moegguf.engine.load_spec import Budget, LoadSpec
from moegguf.engine.loader import Loader, Progress
from moegguf.engine.plan import Plan
from moegguf.engine.prefix_cache import PrefixCache, open_prefix_cache
from moegguf.engine.projector import PLACEHOLDER
from moegguf.engine.recent_experts import RecentExperts
from moegguf.engine.resize import set_budget
from moegguf.engine.sequences import Tokens, common_tokens, is_batch_invariant
from moegguf.engine.session import Session
from moegguf.engine.stats import Stats
from moegguf.engine.upstream import (
    LlamaCppOptions,
    TokenSteps,
    UpstreamLlama,
    with_keywords,
)
from moegguf.engine.vocabulary import Vocabulary
from moegguf.errors import OptionError
from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.settings import read_load_keywords
from moegguf.text import to_utf8

if TYPE_CHECKING:
    from moegguf.engine.recording import Recording, TraceOptions


class Llama(UpstreamLlama):
    """A loaded GGUF model. The experts of a Mixture-of-Experts model use no more memory
    than a given budget.

    Example:
        >>> import moegguf
        >>> with moegguf.Llama("demo", expert_cache="50%", verbose=False) as llm:
        ...     answer = llm("The capital of France is", max_tokens=4, temperature=0.0)
        >>> answer["usage"]["completion_tokens"]
        4
    """

    n_batch: int
    vocabulary: Vocabulary
    """The text of each token, and the special tokens."""
    session: Session | None = None
    """The expert store behind this model; None for a model without experts, or with
    MOEGGUF_HOOKS=0."""
    drafts: Drafts | None = None
    """The object that guesses tokens ahead; None if nothing is drafted."""
    recording: Recording | None = None
    """The recording of a trace; None without the option `trace`."""
    prefix_cache: PrefixCache | None = None
    """The cache on disk of this model's computed contexts; None if no contexts are
    kept."""
    _closed = True  # False while there is a loader with something to free
    _loader: Loader

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_cache: Budget | None = None,
        vram_cache: Budget | None = None,
        placement: str | None = None,
        strategy: str | None = None,
        store: StoreOptions | None = None,
        policy: str | Policy = "auto",
        predictor: str | Predictor | None = None,
        prefetch: bool | PrefetchOptions | None = None,
        lockstep: bool = False,
        warm_start: bool | None = None,
        context_store: str | int | None = None,
        trace: str | os.PathLike[str] | TraceOptions | None = None,
        progress: Progress | None = None,
        n_seq_max: int = 1,
        kv_tokens: int | None = None,
        mmproj: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = None,
        mirror: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        planned: tuple[LoadSpec, Plan] | None = None,
        **options: Unpack[LlamaCppOptions],
    ) -> None:
        """Loads a model.

        Args:
            model_path: the path of the GGUF file (for a split model, of its first file), or a name such as "demo" or
                "hf.co/user/repo:Q4_K_M".
            expert_cache: memory for experts: "auto" (what is free after everything else), a size such as "4GiB", a
                share of all experts such as "50%", or a number of bytes. If `expert_cache` is None,
                MOEGGUF_EXPERT_CACHE is used, or "auto" without this variable. Ignored for a model without experts.
            vram_cache: GPU memory for experts, in the same forms as `expert_cache`. `expert_cache` is then the RAM from
                which missed experts are copied to the GPU. Several GPUs share the memory according to tensor_split,
                split_mode and main_gpu, or each GPU has a separate budget ("8GiB,4GiB"). Layers that n_gpu_layers
                leaves to the CPU have slots in RAM. If `vram_cache` is None, MOEGGUF_VRAM_CACHE is used. Without this
                variable, the value is "auto" if there is a GPU, unless n_gpu_layers chooses the layers that run on the
                GPU.
            placement: which experts are in GPU memory. "layers": all experts of some layers; the experts of the other
                layers run on the CPU. "slots": the experts that are used; everything runs on the GPU. "slots-mapped":
                an experiment that no GPU's backend supports yet (docs/gpu.md, "Mapped slots"). "cpu": no experts, and
                the GPU is not used. "auto": the fastest of "layers", "slots" and "cpu" according to predictions
                (engine/cost.py), or "slots" with several GPUs. If `placement` is None, MOEGGUF_PLACEMENT is used.
            strategy: the method that manages experts: "moegguf" (the parts that were best in measurements), "lru",
                "none", or the method of a paper: "moe-infinity", "promoe", "expertflow", "duoserve"
                (`moegguf.controller.strategies`). `store`, `policy`, `predictor` and `prefetch` replace parts of the
                strategy. If `strategy` is None, MOEGGUF_STRATEGY is used, or "moegguf" without this variable.
            store: a `StoreOptions` that replaces the strategy's options for moving experts.
            policy: the policy that decides which experts stay in memory: a name
                (`moegguf.controller.policies.policy_names()`), an object with a method `scores(history, forecast)`, a
                class of such objects as "FILE.py:CLASS", or "auto" (the policy in MOEGGUF_POLICY, or the strategy's
                policy without this variable). "vram=NAME,ram=NAME" sets one policy for a GPU's slots and one policy for
                slots in RAM. If a memory has no policy in this form, it uses LRU.
            predictor: the predictor of the experts that are used next: a name
                (`moegguf.controller.predictors.PREDICTORS`), an object, or a class as "FILE.py:CLASS".
            lockstep: if True, decisions take effect at a fixed point of each pass, so that a simulation can repeat
                them. `lockstep` makes passes slower.
            prefetch: if True, moegguf prefetches predicted experts as long as this saves time. A `PrefetchOptions` sets
                limits. If `prefetch` is None, the strategy decides.
            warm_start: if True, moegguf prefetches the experts that earlier runs used most as soon as the model is
                loaded, and saves how often this run uses each expert. If `warm_start` is None, MOEGGUF_WARM_START is
                used, or False without this variable. Has no effect with `lockstep`.
            context_store: disk space for computed contexts: a size such as "8GiB", "auto" (a tenth of the free disk
                space, at most 16 GiB), or 0. If a prompt begins with the same tokens as an earlier prompt, moegguf
                reads the context of these tokens from disk, even in another process (engine/prefix_cache.py). `Llama`
                uses stored contexts for batch-invariant models, and never with `trace`, `lockstep`, `logits_all` or
                `embedding`. If `context_store` is None, MOEGGUF_CONTEXT_STORE is used, or "auto" without this variable.
                With 0, layers with a sliding window have cells for the whole context, unless `swa_full` is False.
            trace: the path of the file to which moegguf writes the recorded routing, or a `TraceOptions`.
            n_seq_max: number of sequences, of `n_ctx` tokens each, for which `moegguf.Engine` needs space in the
                context. `Llama` itself uses one sequence. The property `n_seq_max` is 1 for models that allow only one
                sequence.
            kv_tokens: total number of tokens, over all sequences, for which the context has memory; at least n_ctx. If
                `kv_tokens` is None, the number is n_seq_max * n_ctx, or less if experts need the memory
                (`moegguf.engine.memory.choose_context`).
            n_ctx: context length in tokens; 512 by default, as in llama-cpp-python. If `n_ctx` is None, as in commands,
                moegguf chooses the length that leaves the most memory to experts. If `n_ctx` is 0, the model's own
                length is used.
            flash_attn: fused attention, which rounds differently: True, False (llama-cpp-python's default), or None.
                With None, as in `moegguf.Engine`, `run` and `serve`, fused attention is used if the compute devices
                support it.
            mmproj: the model's projector, for images in messages (moegguf.generate). moegguf loads the projector with
                the first image.
            draft: the source of drafts: tokens that `moegguf.generate` and `Engine` guess ahead, and verify in the next
                pass, as long as this saves time. "ngram": tokens that followed the same tokens earlier in the text.
                "mtp": tokens of the extra heads in the model's file, if no earlier text repeats. "auto": "mtp" if the
                file has these heads, else "ngram", but only if the model is `batch_invariant`, so that every answer is
                the same as without drafts. "off": no drafts. Any other value is the name or path of a second, smaller
                model with the same vocabulary. If `draft` is None, MOEGGUF_DRAFT is used, or "auto" without this
                variable; with `trace` or `lockstep`, None means "off". The methods of `Llama` itself use no drafts.
            mirror: a copy of the model's file on another drive, or a list of copies. moegguf reads each expert from the
                copy that it expects to deliver the expert first. A mirror is the path of a copy (for a split model, of
                its first file), or a folder of copies with the model's own file names. A copy that differs from the
                model's file raises OptionError. If moegguf cannot read a copy, it prints a warning and no longer uses
                this copy. For a model without experts, mirrors have no effect.
            planned: the checked options and the plan that a server has made for this load (engine/solver.py). If
                `planned` is None, `Llama` makes both. Otherwise options in the `LoadSpec` must not be given again.
            progress: a function that is called with values from 0.0 to 1.0 while the weights are read. The load fails
                with GenerationCancelled if the function returns False, and with CallbackError if the function raises an
                exception.
            options: the other keywords of `llama_cpp.Llama` (engine/upstream.py). Without `n_threads` and
                `n_threads_batch`, moegguf uses one compute thread for each processor that the process may use, and
                fewer threads while other processes use these processors. `use_mmap` has no effect on a model with
                experts. With `vocab_only`, a model can tokenize text but computes nothing, and its file may contain
                only a vocabulary.

        Raises:
            ModelNotFoundError, ModelFormatError: the check before llama.cpp opens the file failed, or the trial load of
                the file failed (engine/trial.py).
            CapabilityError: moegguf does not run this kind of model.
            BudgetError: the budget is not in one of the accepted forms, or is too small; the message states the
                minimum.
            OptionError: a keyword is unknown (the message suggests the nearest known keyword), or a value is invalid.
            AllocationError, ExpertIOError, LibraryError.
        """
        given: dict[str, Any] = dict(options)
        start_log()
        check_options(given, Llama.__init__)
        environment = read_load_keywords()
        named = find_strategy(
            environment.get("strategy", "") if strategy is None else strategy
        )
        if policy == "auto":
            policy = environment.get("policy", "auto")
        chosen = ControllerOptions(*named.parts(policy, predictor, prefetch), lockstep)
        warm_start = (
            bool(environment.get("warm_start")) if warm_start is None else warm_start
        )
        own: dict[str, Any] = {
            "expert_cache": expert_cache,
            "vram_cache": vram_cache,
            "placement": placement,
            "strategy": named.name,
            "store": store,
            "context_store": context_store,
            "draft": draft,
            "n_seq_max": n_seq_max,
            "kv_tokens": kv_tokens,
            "mmproj": mmproj,
            "mirror": mirror,
        }
        self._keywords = dict(
            model_path=model_path, planned=planned, warm_start=warm_start, **own, **vars(chosen), **given,
        )  # fmt: skip
        if draft is None and (trace or lockstep):
            # Drafts would change the routing that is recorded or replayed.
            own["draft"] = "off"
        if trace or lockstep or given.get("vocab_only"):
            own["context_store"] = 0
        spec, plan = planned or (LoadSpec.of({**given, **own}), None)
        self._drafts = ModelDrafts(spec.draft)
        load_plan = prepare(model_path, spec, given, plan)
        self.layout = load_plan.layout
        self.plan = load_plan.plan
        self.reads_images = spec.projector is not None and bool(mmproj)
        try:
            self._loader = loader = Loader(load_plan, given, progress)
            self.session = loader.session
            self._closed = False
            kept = (
                KvBlockStore(default_folder(), spec.context_store)
                if spec.context_store != 0
                else None
            )
            recent = (
                RecentExperts(self.session, kept) if kept and self.session else None
            )
            base = super().__init__
            loader.read(
                lambda: base(load_plan.path, **load_plan.options), self._unload, chosen
            )
            self.n_batch = int(self.context_params.n_batch)
            self.input_ids.fill(PLACEHOLDER)
            self.vocabulary = Vocabulary(self)
            loader.start_threads(self._ctx.ctx)
            self.context = Context(self, loader, mmproj if self.reads_images else None)
            if self.plan.warms_up:
                self.context.warm_up(min(self.plan.n_ubatch, self.n_ctx()))
            self._drafts.open(self, self.n_seq_max, self.batch_invariant)
            self.drafts = self._drafts.drafts
            loader.start_parts(warm_start and not lockstep, trace)
            self.recording = loader.recording
            self.prefix_cache = (
                open_prefix_cache(self, self.context, load_plan, kept, recent)
                if kept
                else None
            )
        except BaseException:
            # Also on KeyboardInterrupt: no part of a failed load may remain.
            if not self._closed:
                # Deletes the unfinished trace; an older file stays.
                self._loader.end_parts(discard=True)
            self.close()
            raise

    @staticmethod
    def estimate(
        model_path: str | os.PathLike[str],
        *,
        expert_cache: Budget | None = None,
        vram_cache: Budget | None = None,
        placement: str | None = None,
        **options: Any,
    ) -> Plan:
        """Returns the plan for loading the model with these keywords, but does not load
        the model.

        Raises the errors that planning a load raises, such as BudgetError and
        OptionError.

        Example:
            >>> plan = moegguf.Llama.estimate("demo", expert_cache="50%")
            >>> plan.n_slots, plan.n_experts
            (96, 192)
        """
        given = {
            **options,
            "expert_cache": expert_cache,
            "vram_cache": vram_cache,
            "placement": placement,
        }
        check_options(given, Llama.__init__)
        return prepare(model_path, LoadSpec.of(given), given).plan

    def _attach_model(self, params: c.Structure) -> None:
        self._loader.attach_model(params)

    def _attach_context(self) -> None:
        # Close() also sets `_model`; in any other case, the base class creates the
        # context next.
        if not self._closed:
            self._loader.attach_context(self.context_params)

    @property
    def n_seq_max(self) -> int:
        """The number of sequences for which the context has space: the requested
        number, or 1 if the model allows only one.

        Example:
            >>> llm.n_seq_max
            1
        """
        return self._loader.n_seq_max

    @functools.cached_property
    def batch_invariant(self) -> bool:
        """True if a token's results are the same, bit for bit, in any pass and with any
        other sequences (engine/sequences.py).

        The value describes the loaded model and never changes. It does not cover a
        sequence whose full context was shifted, if the model can move cells of its KV
        cache. If other sequences are being processed, a shift evaluates the remaining
        tokens again. Otherwise a shift moves their cells, which rounds differently.
        Models that cannot move cells always evaluate the remaining tokens again.
        """
        return is_batch_invariant(self, self.layout, self.plan)

    def n_ctx(self) -> int:
        """Returns the context length of one sequence, in tokens.

        Example:
            >>> llm.n_ctx()
            512
        """
        return int(
            self._loader.load_plan.options["n_ctx"]
            if self.n_seq_max > 1
            else super().n_ctx()
        )

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens in batches of at most `n_batch`.

        If the evaluation fails, the context again contains only its earlier tokens, so that you can repeat the call. A
        context with a recurrent state is empty after a failure. So is a context whose cells for a sliding window were
        reused. Raises MoeggufError, such as ExpertIOError, GenerationCancelled, ForkError and ClosedError.

        Example:
            >>> llm.reset()
            >>> llm.eval([10, 20, 30])
            >>> llm.n_tokens
            3
        """
        self.context.eval(tokens)

    def reset(self) -> None:
        """Empties the context of sequence 0, the only sequence that `Llama` itself
        uses.

        Also clears `input_ids`, so that images that a chat handler evaluates afterwards
        never match the beginning of a later prompt.

        Example:
            >>> llm.reset()
            >>> llm.n_tokens
            0
        """
        self.n_tokens = 0
        self._requires_eval = True
        if self._is_stateful:  # the base class would empty every sequence
            self.context.forget(0)
        self.context.images.truncate(0)
        self.input_ids.fill(PLACEHOLDER)

    def load_state(self, state: Any) -> None:
        """Restores a state that `save_state` returned, as in llama-cpp-python.

        Example:
            >>> llm.reset()
            >>> llm.eval([10, 20, 30])
            >>> state = llm.save_state()
            >>> llm.eval([40, 50])
            >>> llm.load_state(state)
            >>> llm.n_tokens
            3
        """
        super().load_state(state)
        self.context.rollback.forget(0)

    def sample(self, *arguments: Any, **options: Any) -> int:
        """Returns the next token, as in llama-cpp-python.

        Raises OptionError if this request has evaluated nothing yet.

        Example:
            >>> llm.eval([10, 20, 30])
            >>> 0 <= llm.sample(temp=0.0) < llm.n_vocab()
            True
        """
        self.context.check_logits()
        return super().sample(*arguments, **options)

    def embed(
        self,
        input: str | list[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Returns embeddings as in llama-cpp-python.

        Raises the same errors as `eval`, and OptionError for a text without tokens.

        Example:
            >>> with moegguf.Llama("demo", embedding=True, pooling_type=1, verbose=False) as embedder:
            ...     len(embedder.embed("a text")) == embedder.n_embd()
            True
        """
        texts = [input] if isinstance(input, str) else input
        base = super().embed
        if not all(self.tokenize(to_utf8(text)) for text in texts):
            raise OptionError(
                "a text is empty, and this model adds no token at its beginning; leave the text out."
            )
        if (
            isinstance(input, str)
            or self.pooling_type() != library.llama_cpp().LLAMA_POOLING_TYPE_NONE
        ):
            return self.context.evaluate(
                lambda: base(input, normalize, truncate, return_count)
            )
        # If there is one vector for each token, the base class reads the vectors of a
        # second text from the wrong place.
        found = [
            self.context.evaluate(
                functools.partial(base, text, normalize, truncate, True)
            )
            for text in texts
        ]
        vectors = [each for each, _ in found]
        if return_count:
            return (vectors, sum(n_tokens for _, n_tokens in found))
        return vectors

    def generate(
        self, *arguments: Any, **options: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yields tokens as in llama-cpp-python.

        Only one request runs at a time, and other threads wait until the request has
        finished. Raises OptionError if the prompt has no tokens, and CapabilityError
        for a model that cannot generate text.

        Example:
            >>> import itertools
            >>> tokens = llm.generate([10, 20, 30], temp=0.0)
            >>> len(list(itertools.islice(tokens, 5)))
            5
            >>> tokens.close()  # ends the request
        """
        self.context.check_generates()
        steps = self._with_kept(
            super().generate(*arguments, **options), arguments, options
        )
        return self.context.as_request(steps, keeps_logits=True)

    def _with_kept(
        self, steps: TokenSteps, arguments: Sequence[Any], options: dict[str, Any]
    ) -> TokenSteps:
        """Yields the tokens of `steps`. If contexts are kept for this model and the
        option `reset` is True, first restores the part of the prompt's context that is
        on disk. In this case, new parts are also written to disk, after each evaluation
        and at the end."""
        cache = self.prefix_cache
        if cache is None or not self.batch_invariant or not options.get("reset", True):
            return (yield from steps)

        def store(sequence: int, tokens: Tokens, n_new: int) -> None:
            cache.store(sequence, tokens, n_new, goes_on=len(tokens) != len(prompt))

        prompt = list(arguments[0] if arguments else options["tokens"])
        held = self.input_ids[: self.n_tokens].tolist()
        n_held = common_tokens(held, prompt[:-1])
        # The last token remains: the logits after it may still be valid.
        if n_held + 1 < len(held):
            n_held = cache.truncate(0, held, n_held)
        cache.restore(0, prompt, n_held)
        self.context.after_eval = store
        try:
            return (yield from steps)
        finally:
            self.context.after_eval = None
            if not self._closed:
                cache.store(0, self.input_ids[: self.n_tokens], 1, goes_on=False)

    def stats(self) -> Stats:
        """Returns the counters since the model was loaded. To get the counters of one
        request, subtract the counters from before the request.

        Example:
            >>> before = llm.stats()
            >>> llm.eval([10, 20, 30])
            >>> (llm.stats() - before).tokens
            3
        """
        return self.context.stats()

    def decisions(self) -> dict[str, Any]:
        """Returns the policy, the predictor, the state of prefetching, and the time
        that decisions took. Returns {} for a model without an expert store.

        Example:
            >>> llm.decisions()["policy"]
            'next-use'
        """
        self.context.check_open()
        return self.context.controller.figures() if self.context.controller else {}

    def set_budget(
        self, *, expert_cache: Budget | None = None, vram_cache: Budget | None = None
    ) -> None:
        """Changes the budget for experts in RAM, on the GPU, or both. A tier never gets
        more slots than it had at load time.

        The value None leaves a budget unchanged. If a budget becomes smaller, the freed
        memory is returned to the system and to the device. A new budget does not change
        generated tokens. If the model is idle, the change happens immediately. If
        another thread is evaluating tokens, the change happens after that evaluation.

        vram_cache also includes the buffers in which prompts are staged, and their size
        does not change. If the GPU contains whole layers, you can change only
        expert_cache. If a device had a slot for every expert, prompts may be processed
        in shorter passes after the change; moegguf then prints a warning.

        Raises BudgetError for a budget below the minimum, for a tier that the model
        does not have, and for a model without experts. Such an error changes nothing.
        Raises AllocationError if a device has no memory for more slots; the tier then
        keeps its slots.

        Example:
            >>> llm.set_budget(expert_cache="25%")
            >>> llm.stats().n_slots
            48
        """
        set_budget(
            self, self.context, self.session, {"RAM": expert_cache, "VRAM": vram_cache}
        )

    def cancel(self) -> None:
        """Cancels the evaluation that another thread is running. The cancelled
        evaluation, and all evaluations until `resume` is called, raise
        GenerationCancelled. Does nothing for a model without an expert store.

        Example:
            >>> llm.cancel()
            >>> llm.eval([10])
            Traceback (most recent call last):
            moegguf.errors.GenerationCancelled: ...
            >>> llm.resume()
        """
        if self.session is not None and not self._closed:
            self.session.store.cancel(True)

    def resume(self) -> None:
        """Allows evaluations again after `cancel`.

        Example:
            >>> llm.resume()
            >>> llm.eval([10])
        """
        if self.session is not None and not self._closed:
            self.session.store.cancel(False)

    def close(self) -> None:
        """Frees the context, the model, the slots and the threads. Frees nothing in a
        forked child process. A second call does nothing.

        Example:
            >>> llm = moegguf.Llama("demo", verbose=False)
            >>> llm.close()
        """
        if self._closed:
            return
        # Absent if the load failed before the context was created.
        if context := self.__dict__.get("context"):
            context.check_caller()
        forked = self.session is not None and self.session.forked
        if not forked:
            # A pass in another thread stops now, with GenerationCancelled.
            self.cancel()
        self._closed = True
        if context:
            context.close(forked)
        if self.prefix_cache is not None and not forked:
            self.prefix_cache.close()
        if forked:
            return  # the parent process owns the model
        try:
            self._loader.end_parts()
        finally:  # even if the trace could not be written
            self._unload()
            closed: Any = ClosedModel()
            self._model = self._ctx = self._batch = self.tokenizer_ = (
                self.vocabulary
            ) = closed
            self._loader.close()

    def _unload(self) -> None:
        self._drafts.close()
        with suppress(AttributeError):  # the base class was not fully constructed
            super().close()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Llama:
        self.context.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_keywords = with_keywords(Llama.__init__, UpstreamLlama.__base__.__init__)
Llama.__init__.__signature__ = _keywords  # type: ignore
