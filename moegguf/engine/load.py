"""Prepares loading a model: checks options, reads the file's header, plans memory. Loads nothing."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS
from moegguf.engine.device_plan import divide_ram_slots
from moegguf.engine.devices import gpus
from moegguf.engine.machine import count_cpus, read_memory
from moegguf.engine.memory import check_context, choose_kv_tokens, fit_kv_tokens, pad_context, pooling_batch_tokens
from moegguf.engine.placing import (
    BY_LAYERS,
    NO_SPLIT,
    Gpus,
    Placed,
    gpus_for,
    place_on,
    with_misses_computed,
    with_placement_unused,
)
from moegguf.engine.plan import Plan, given_bytes, make_plan
from moegguf.engine.sequences import sequences_of
from moegguf.engine.tiers import lower_slots, parse_vram_cache
from moegguf.errors import (
    AllocationError,
    BudgetError,
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
from moegguf.quantities import ExpertCache, format_bytes_up, parse_expert_cache
from moegguf.settings import parse_choice, read_environment

_bindings = library.llama_cpp()

# Passed by known wrappers (LangChain) for old llama.cpp versions; without effect here.
LEGACY_OPTIONS = frozenset({"device", "f16_kv", "n_parts", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps"})
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})  # llm_arch_is_diffusion()
N_CTX, N_BATCH = 512, 512  # llama-cpp-python's defaults
READ_ERROR = "read error"  # of llama.cpp, where the system says that reading failed

Budget = str | int | float | ExpertCache
Progress = Callable[[float], object]


@dataclass(frozen=True)
class LoadPlan:
    """A model about to be loaded. `options` are keywords of llama_cpp.Llama, without n_ubatch."""

    path: str
    layout: ExpertLayout
    slots_layout: ExpertLayout  # of the experts that have slots; those of other layers are plain weights of the device
    plan: Plan
    hooks: bool  # whether the expert store is used
    n_ubatch: int
    options: dict[str, Any]
    govern_threads: bool  # whether the number of threads follows the load of the machine
    projector: ProjectorHeader | None = None
    n_seq_max: int = 1
    kv_tokens: int = 0  # of all sequences
    gpu: Gpus | None = None  # that experts could be placed on
    no_device: bool = False  # llama.cpp gets none: beside one, even unused, it does not repack weights for the CPU

    @property
    def whole_layers(self) -> list[int]:
        """Numbers of the layers whose experts all lie on a device, as plain weights."""
        with_slots = {layer.il for layer in self.slots_layout.layers}
        return [layer.il for layer in self.layout.layers if layer.il not in with_slots]

    def ram_slots_within(self, expert_cache: Budget) -> tuple[int, int]:
        """(slots of layers that the CPU computes beside devices, slots below those of devices) of another budget, in
        their proportion at load. Raises BudgetError where it holds fewer than passes need."""
        plan, total = self.plan, self.lower_slots_within(expert_cache)
        of_cpu = next((part for part in plan.devices if part.name is None), None)
        if of_cpu is None:
            return 0, total
        n_lower = plan.n_lower_slots
        least = min(of_cpu.n_slots, plan.pass_slots(self.slots_layout, on_device=False))
        if total < least + min(1, n_lower):
            size = format_bytes_up((least + min(1, n_lower)) * plan.slot_bytes)
            raise BudgetError(
                f"expert_cache={expert_cache!r} is too small for a model that was loaded with {len(of_cpu.layers)}"
                f" layers on the CPU, to read {plan.n_ubatch} tokens at a time; give at least {size!r}, or load it"
                " again."
            )
        found = divide_ram_slots(min(total, of_cpu.n_slots + n_lower), of_cpu.n_slots, n_lower, least)
        return min(found[0], of_cpu.n_slots), min(found[1], n_lower)

    def lower_slots_within(self, expert_cache: Budget) -> int:
        """Slots in RAM of another budget, where a device computes. Raises BudgetError where it holds none."""
        cache = parse_expert_cache(expert_cache)
        return lower_slots(self.slots_layout, cache, read_memory(), self.plan.slot_bytes, self.plan.n_ubatch)

    def slots_within(self, expert_cache: Budget) -> int:
        """Slots of another budget for the loaded model. Raises BudgetError when its passes need more."""
        cache, layout = parse_expert_cache(expert_cache), self.slots_layout
        if self.plan.layers_on:
            n_slots = self.lower_slots_within(cache)
        else:
            n_slots = make_plan(layout, cache, read_memory(), n_ctx=self.kv_tokens, n_ubatch=1).n_slots
        least = self.plan.pass_slots(layout, on_device=False)
        if n_slots < least:
            size = format_bytes_up(least * self.plan.slot_bytes)
            raise BudgetError(
                f"expert_cache={expert_cache!r} is too small for a model that was loaded to read {self.plan.n_ubatch}"
                f" tokens at a time; give at least {size!r}, or load it again with the smaller budget."
            )
        return n_slots

    def vram_slots_within(self, vram_cache: Budget, least: int) -> int:
        """Slots on all devices together of another budget, which holds staging tensors, too, as at load, up to the one
        at load.
        Raises BudgetError below `least`, which passes need, and for a model whose slots are the CPU's."""
        cache, plan, layout = parse_vram_cache(vram_cache), self.plan, self.slots_layout
        if plan.layers_on is not None:
            raise BudgetError(
                f"vram_cache={vram_cache!r}: {plan.layers_on} has the experts of whole layers, which stay there; load"
                " the model again with another vram_cache, or with placement 'slots'."
            )
        if plan.device is None:
            raise BudgetError(
                f"vram_cache={vram_cache!r}: the CPU computes this model, so it has no experts in VRAM; load it with"
                " vram_cache (--vram-cache) to use a GPU."
            )
        asked = {
            "auto": plan.device_slots,
            "fraction": int(cache.fraction * layout.n_expert_total + 1e-9),
            "bytes": cache.n_bytes // plan.slot_bytes,
        }
        beside = self.gpu is not None and self.gpu.staging is not None  # of tensors that were asked for besides
        n_staged = 0 if beside or cache.mode == "auto" else plan.staging_slots_bytes // plan.slot_bytes
        n_slots = min(asked[cache.mode] - n_staged, plan.device_slots)
        if n_slots < least:
            size = format_bytes_up((least + n_staged) * plan.slot_bytes)
            raise BudgetError(
                f"vram_cache={vram_cache!r} is too small for a model that was loaded to read {plan.n_ubatch} tokens at"
                f" a time; give at least {size!r}, or load it again with the smaller budget."
            )
        return n_slots

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
) -> LoadPlan:
    """Reads the header and plans memory. `options`: keywords of llama_cpp.Llama as the user gave them.

    vram_cache: the budget on a GPU, that of `store`, or on all of them; None: of MOEGGUF_VRAM_CACHE.
    placement: what goes there (`placement.Choice`); None: of MOEGGUF_PLACEMENT.
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
    cache = parse_expert_cache(environment.expert_cache if expert_cache is None else expert_cache)
    options = {name: value for name, value in options.items() if name not in LEGACY_OPTIONS}
    govern_threads = environment.hooks and not (options.get("n_threads") or options.get("n_threads_batch"))
    options["n_threads"] = options.get("n_threads") or count_cpus()
    options["n_threads_batch"] = options.get("n_threads_batch") or options["n_threads"]
    projector = _projector(options)
    options["n_ctx"] = pad_context(options.get("n_ctx", N_CTX) or layout.hparams.n_ctx_train or N_CTX)
    if options.get("embedding"):
        options.setdefault("n_batch", pooling_batch_tokens(options["n_ctx"]))
        options.setdefault("n_ubatch", options["n_batch"])
    n_batch, given = options.get("n_batch", N_BATCH), options.pop("n_ubatch", None)
    n_image = projector.one_pass_tokens if projector else 0
    if n_image > n_batch:
        n_batch = options["n_batch"] = n_image
    hooks = layout.is_moe and environment.hooks
    gpu = gpus_for(vram_cache, placement, options, store.device) if hooks else None
    computes_misses = parse_choice("misses", environment.misses if misses is None else misses) == "compute"
    gpu = replace(gpu, staging=store.staging, computes_misses=computes_misses) if gpu else None
    n_seq_max, kv_tokens, kv_tokens_in_ram = _sequences(layout, options, n_batch, cache, gpu)
    choice = environment.placement if placement is None else placement
    if hooks and choice == "cpu":
        options["n_gpu_layers"] = 0
    n_given = min(given, n_batch) if given else None
    placed = _place(layout, cache, n_given, options, projector, (kv_tokens, kv_tokens_in_ram), store, gpu)
    plan = placed.plan
    if not placed.on_device:
        kv_tokens = kv_tokens_in_ram
    if hooks and gpu is None:
        plan = with_placement_unused(plan, placement)
    if computes_misses:
        plan = with_misses_computed(plan)
    if hooks:
        options["use_mmap"] = False
    n_ubatch = plan.n_ubatch if hooks else max(n_image, min(given or DEFAULT_UBATCH_TOKENS, n_batch))
    return LoadPlan(
        path, layout, placed.layout, plan, hooks, n_ubatch, options, govern_threads, projector, n_seq_max, kv_tokens,
        gpu, hooks and (choice == "cpu" or (gpu is not None and not placed.on_device)),
    )  # fmt: skip


def _sequences(
    layout: ExpertLayout, options: dict[str, Any], n_batch: int, cache: ExpertCache, gpu: Gpus | None
) -> tuple[int, int, int]:
    """Sequences of the context, and tokens of the KV cache for all of them: where it lies on a device, and where in
    RAM. Their options are taken out."""
    wanted, kv_tokens, n_ctx = options.pop("n_seq_max", 1), options.pop("kv_tokens", None), options["n_ctx"]
    n_seq_max = min(sequences_of(layout, n_ctx, 1 if options.get("embedding") else wanted), n_batch)
    types = {name: value for name in ("type_k", "type_v") if (value := options.get(name)) is not None}

    def tokens_within(free_bytes: int, pool_bytes: int) -> int:
        chosen = kv_tokens or n_ctx
        if n_seq_max > 1 and not kv_tokens:
            chosen = choose_kv_tokens(
                layout,
                free_bytes,
                min(n_batch, DEFAULT_UBATCH_TOKENS),
                n_ctx,
                n_seq_max,
                flash_attn=bool(options.get("flash_attn")),
                pool_bytes=pool_bytes,
                **types,
            )
        return fit_kv_tokens(chosen, n_ctx, n_seq_max)

    in_ram = tokens_within(read_memory().available_bytes, given_bytes(layout, cache))
    on_devices = tokens_within(gpu.free_bytes, gpu.given_bytes(layout)) if gpu is not None else in_ram
    return n_seq_max, on_devices, in_ram


def _projector(options: dict[str, Any]) -> ProjectorHeader | None:
    """Of the option `mmproj`, which is taken out, or of a chat handler's own file for images."""
    given = options.pop("mmproj", None) or getattr(options.get("chat_handler"), "clip_model_path", None)
    return read_projector(given) if given else None


def _place(
    layout: ExpertLayout,
    cache: ExpertCache,
    n_ubatch: int | None,
    options: dict[str, Any],
    projector: ProjectorHeader | None,
    kv_tokens: tuple[int, int],
    store: StoreOptions,
    gpu: Gpus | None,
) -> Placed:
    """Where experts go. Changes options so that llama.cpp uses GPUs where the plan does, and only there, and divides
    layers as it says. kv_tokens: of a KV cache on a device, and in RAM."""
    types = {name: value for name in ("type_k", "type_v") if (value := options.get(name)) is not None}
    for name, number in types.items():
        if GGML_TYPES.get(number, ("",))[0].lower() not in KV_CACHE_TYPES:  # llama.cpp would end the process
            accepted = ", ".join(f"{ggml_type(type)} ({type})" for type in KV_CACHE_TYPES)
            raise OptionError(f"{name} is {number!r}, which no KV cache can have; accepted: {accepted}.")
    memory, n_ctx = read_memory(), options["n_ctx"]
    on_device, in_ram = kv_tokens
    check_context(layout, in_ram if gpu is None else on_device, memory, **types)
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_ubatch": n_ubatch, "n_batch": options.get("n_batch", N_BATCH)}
    sizes |= {"kv_tokens": in_ram if gpu is None else on_device, "projector": projector}
    sizes |= {"flash_attn": bool(options.get("flash_attn")), **types}  # None may become off, which needs more
    if gpu is None:
        return Placed(make_plan(layout, cache, memory, **sizes, streams=store.can_stream), layout)
    streams = replace(store, device=None).can_stream  # it names the one that experts may be placed on
    how: dict[str, Any] = {"repack": store.repack, "streams": streams, "on_cpu": {"kv_tokens": in_ram}}
    placed = place_on(gpu, layout, cache, memory, options["n_threads"], sizes, **how)
    options["n_gpu_layers"] = gpu.n_gpu_layers if placed.on_device else 0
    if placed.tensor_split is not None:  # of the devices that the session names
        options |= {"split_mode": BY_LAYERS, "tensor_split": placed.tensor_split}
    elif placed.on_device and len(gpus()) > 1:
        options |= {"split_mode": NO_SPLIT, "main_gpu": gpu.devices[0].index}
        options.pop("tensor_split", None)
    return placed


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
