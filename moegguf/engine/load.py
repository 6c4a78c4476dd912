"""Prepares loading a model: checks options, reads the file's header, plans memory. Loads nothing."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from moegguf.engine.devices import find_gpus, gpus
from moegguf.engine.here import BY_LAYERS, NO_SPLIT, Budget, given_budgets, plan_now, with_gpus
from moegguf.engine.machine import Device, count_cpus, read_memory
from moegguf.engine.memory import check_context, pad_context, pooling_batch_tokens
from moegguf.engine.plan import Plan, Sizes
from moegguf.engine.sequences import sequences_of
from moegguf.errors import (
    AllocationError,
    CallbackError,
    CapabilityError,
    ExpertIOError,
    GenerationCancelled,
    ModelFormatError,
    MoeggufError,
    OptionError,
)
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.projector import ProjectorHeader, read_projector
from moegguf.gguf.reader import GGML_TYPES, ggml_type
from moegguf.models.catalog import find_model
from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.options import KV_CACHE_TYPES
from moegguf.settings import read_environment

_bindings = library.llama_cpp()

# Passed by known wrappers (LangChain) for old llama.cpp versions; without effect here.
LEGACY_OPTIONS = frozenset({"device", "f16_kv", "n_parts", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps"})
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})  # llm_arch_is_diffusion()
N_CTX, N_BATCH = 512, 512  # llama-cpp-python's defaults
READ_ERROR = "read error"  # of llama.cpp, where the system says that reading failed

Progress = Callable[[float], object]


@dataclass(frozen=True)
class LoadPlan:
    """A model about to be loaded. `options` are keywords of llama_cpp.Llama, without n_ubatch."""

    path: str
    layout: ExpertLayout
    plan: Plan
    hooks: bool  # whether the expert store is used
    n_ubatch: int
    options: dict[str, Any]
    govern_threads: bool  # whether the number of threads follows the load of the machine
    projector: ProjectorHeader | None = None
    n_seq_max: int = 1
    stages_beside: bool = False  # staging tensors were asked for, beside a budget in VRAM
    no_device: bool = False  # llama.cpp gets none: beside one, even unused, it does not repack weights for the CPU

    @cached_property
    def slots_layout(self) -> ExpertLayout:
        """The layout of the experts that have slots; those of other layers are plain weights of the device."""
        return self.plan.slots_layout(self.layout)

    def failure(self, error: ValueError | MemoryError, reason: str) -> MoeggufError:
        """The typed error for an error of the base class while loading. `reason`: the errors that llama.cpp logged."""
        if isinstance(error, MemoryError):
            return AllocationError(f"no memory left while loading {self.path}; give a smaller expert_cache or n_ctx.")
        if "llama_context" in str(error):
            return AllocationError(f"llama.cpp has no memory for a context of this size ({error}); lower n_ctx.")
        if READ_ERROR in reason:
            return ExpertIOError(f"reading {self.path} failed: {reason}; check the disk that it is on.")
        return ModelFormatError(f"llama.cpp cannot load {self.path}: {reason}; verbose=True shows more.")


def prepare(
    model: str | os.PathLike[str],
    expert_cache: Budget | None,
    options: dict[str, Any],
    vram_cache: Budget | None = None,
    store: StoreOptions = StoreOptions(),
    placement: str | None = None,
    misses: str | None = None,
    plan: Plan | None = None,
) -> LoadPlan:
    """Reads the header and plans memory, unless there is a plan.

    options: keywords of llama_cpp.Llama as the user gave them.
    vram_cache: the budget on a GPU, that of `store`, or on all of them; None: of MOEGGUF_VRAM_CACHE.
    placement: what goes there (`plan.Choice`); None: of MOEGGUF_PLACEMENT.
    misses: what happens to experts that are not there (`options.MISSES`); None: of MOEGGUF_MISSES.

    Raises ModelNotFoundError, ModelFormatError, CapabilityError for a kind of model that is not run, BudgetError,
    OptionError, and AllocationError for a context above all memory of this machine.
    """
    path, environment = os.fspath(find_model(model)), read_environment()
    layout = read_layout(path)
    if layout.arch in DIFFUSION:
        raise CapabilityError(
            f"{layout.shards[0].path.name}: {layout.arch} models write by diffusion, not token after token, and cannot"
            " be run here; choose another model."
        )
    options = {name: value for name, value in options.items() if name not in LEGACY_OPTIONS}
    govern_threads = environment.hooks and not (options.get("n_threads") or options.get("n_threads_batch"))
    options["n_threads"] = options.get("n_threads") or count_cpus()
    options["n_threads_batch"] = options.get("n_threads_batch") or options["n_threads"]
    sizes, hooks = _sizes(layout, options), layout.is_moe and environment.hooks
    divides = received = plan is not None  # divides: the plan, and not the caller, says which layers devices compute
    if plan is None:
        check_context(layout, max(sizes.kv_tokens or 0, options["n_ctx"]), read_memory(), sizes.type_k, sizes.type_v)
        budgets, devices = given_budgets(expert_cache, vram_cache, placement, misses), tuple[Device, ...]()
        if hooks:
            budgets, devices = with_gpus(budgets, vram_cache, placement, options, store.device)
            divides = len(devices) > 0 or budgets.choice == "cpu"
        streams = store.overlap if devices else store.can_stream  # a device's name says where experts may be placed
        budgets = replace(budgets, sizes=sizes, staging=store.staging, streams=streams)
        plan = plan_now(layout, budgets, devices, placement, options["n_threads"], store.repack)
    if hooks:
        options["use_mmap"] = False
    if hooks and divides:
        _divide_layers(options, plan)
    n_ubatch = plan.n_ubatch if hooks or received else sizes.most_ubatch
    return LoadPlan(
        path, layout, plan, hooks, n_ubatch, options, govern_threads, sizes.projector, sizes.n_seq_max,
        store.staging is not None, hooks and divides and not plan.on_device,
    )  # fmt: skip


def _projector(options: dict[str, Any]) -> ProjectorHeader | None:
    """The header of the option `mmproj`, which is taken out, or of a chat handler's own file for images."""
    given = options.pop("mmproj", None) or getattr(options.get("chat_handler"), "clip_model_path", None)
    return read_projector(given) if given else None


def _sizes(layout: ExpertLayout, options: dict[str, Any]) -> Sizes:
    """Those of the options, of which some are taken out or changed. Raises OptionError."""
    projector, given_ubatch = _projector(options), options.pop("n_ubatch", None)
    options["n_ctx"] = n_ctx = pad_context(options.get("n_ctx", N_CTX) or layout.hparams.n_ctx_train or N_CTX)
    if options.get("embedding"):
        options.setdefault("n_batch", pooling_batch_tokens(n_ctx))
        given_ubatch = given_ubatch or options["n_batch"]
    n_batch, n_image = options.get("n_batch", N_BATCH), projector.one_pass_tokens if projector else 0
    if n_image > n_batch:
        n_batch = options["n_batch"] = n_image
    types = {name: number for name in ("type_k", "type_v") if (number := options.get(name)) is not None}
    for name, number in types.items():
        if GGML_TYPES.get(number, ("",))[0].lower() not in KV_CACHE_TYPES:  # llama.cpp would end the process
            accepted = ", ".join(f"{ggml_type(type)} ({type})" for type in KV_CACHE_TYPES)
            raise OptionError(f"{name} is {number!r}, which no KV cache can have; accepted: {accepted}.")
    wanted, kv_tokens = options.pop("n_seq_max", 1), options.pop("kv_tokens", None)
    n_seq_max = min(sequences_of(layout, n_ctx, 1 if options.get("embedding") else wanted), n_batch)
    n_ubatch = min(given_ubatch, n_batch) if given_ubatch else None
    flash_attn = bool(options.get("flash_attn"))  # None may become off, which needs more
    return Sizes(n_ctx, n_ubatch, n_batch, n_seq_max, kv_tokens, **types, flash_attn=flash_attn, projector=projector)


def _divide_layers(options: dict[str, Any], plan: Plan) -> None:
    """Changes options so that llama.cpp uses GPUs where the plan does, and only there, and divides layers as it
    says."""
    options["n_gpu_layers"] = plan.n_gpu_layers
    if plan.tensor_split is not None:  # of the devices that the session names
        options |= {"split_mode": BY_LAYERS, "tensor_split": list(plan.tensor_split)}
    elif plan.on_device and len(gpus()) > 1:
        (device,) = find_gpus(plan.device or plan.layers_on)
        options |= {"split_mode": NO_SPLIT, "main_gpu": device.index}
        options.pop("tensor_split", None)


def check_options(options: dict[str, Any], kind: type) -> None:
    """Raises OptionError for a keyword that neither `kind`, a `Llama`, nor its bases take, nor LEGACY_OPTIONS names."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    inits = [base.__dict__["__init__"] for base in kind.__mro__ if base is not object and "__init__" in base.__dict__]
    parameters = [parameter for init in inits for parameter in inspect.signature(init).parameters.values()]
    known = [parameter.name for parameter in parameters if parameter.kind in named and parameter.name != "self"]
    for name in options:
        if name not in known and name not in LEGACY_OPTIONS:
            raise OptionError.unknown(name, known)


class LoadProgress:
    """Passes llama.cpp's progress to a user's callback, and keeps its exception or cancellation."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._error: BaseException | None = None
        self._cancelled = False
        self.callback = _bindings.llama_progress_callback(self._call) if progress else None

    def _call(self, share: float, _user: int) -> bool:
        assert self._progress is not None
        try:
            self._cancelled = self._progress(share) is False
            return not self._cancelled
        except BaseException as error:  # must not propagate into llama.cpp
            self._error = error
            return False

    def wait(self) -> None:
        """Reports that nothing is read yet; raises what the callback has ended the load with."""
        if self._progress is not None:
            self._call(0.0, 0)
            self.raise_reason()

    def raise_reason(self) -> None:
        """Raises CallbackError or GenerationCancelled when the callback ended the load."""
        if self._error is not None:
            raise CallbackError(f"the progress callback raised: {self._error}") from self._error
        if self._cancelled:
            raise GenerationCancelled("loading was stopped by the progress callback.")
