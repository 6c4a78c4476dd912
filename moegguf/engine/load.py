"""Prepares loading a model: checks options, reads the header and the environment, and plans for this machine now.

Asks the system for its free memory, and drivers for their devices. Where placements are compared, this machine may be
measured, and what was found is kept (`speeds`). Loads nothing.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moegguf.controller.strategies import find_strategy
from moegguf.engine.devices import find_gpus, gpus, has_gpu
from moegguf.engine.drafts import drafted
from moegguf.engine.machine import Device, Machine, count_cpus, read_memory
from moegguf.engine.memory import Sizes, check_context, pad_context, pooling_batch_tokens
from moegguf.engine.plan import Budgets, Plan
from moegguf.engine.planner import plan_known
from moegguf.engine.sequences import sequences_of
from moegguf.engine.speeds import KnownSpeeds
from moegguf.errors import AllocationError, CapabilityError, ExpertIOError, ModelFormatError, MoeggufError, OptionError
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.projector import ProjectorHeader, read_projector
from moegguf.gguf.reader import GGML_TYPES, ggml_type
from moegguf.models.catalog import find_model
from moegguf.native.store import StoreOptions
from moegguf.options import KV_CACHE_TYPES
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.settings import parse_option, read_environment

# Passed by known wrappers (LangChain) for old llama.cpp versions; without effect here.
LEGACY_OPTIONS = frozenset({"device", "f16_kv", "n_parts", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps"})
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})  # llm_arch_is_diffusion()
N_CTX, N_BATCH = 512, 512  # llama-cpp-python's defaults
EVERY_LAYER = 999  # n_gpu_layers above any model's
NO_SPLIT, BY_LAYERS = 0, 1  # enum llama_split_mode
NO_OPTIONS: Mapping[str, Any] = {}
READ_ERROR = "read error"  # of llama.cpp, where the system says that reading failed

Budget = str | int | float | ExpertCache


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
    no_device: bool = False  # llama.cpp gets none: beside one, even unused, it does not repack weights for the CPU

    def failure(self, error: ValueError | MemoryError | RuntimeError, reason: str) -> MoeggufError:
        """The typed error for an error of the base class while loading. `reason`: the errors that llama.cpp logged."""
        if isinstance(error, MemoryError):
            return AllocationError(f"no memory left while loading {self.path}; give a smaller expert_cache or n_ctx.")
        if "LoRA" in str(error):
            adapter = self.options["lora_path"]
            return ModelFormatError(f"{adapter} does not fit this model: {reason}; give one that was trained on it.")
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
    plan: Plan | None = None,
    draft: str | os.PathLike[str] | None = None,
) -> LoadPlan:
    """Reads the header and plans memory, unless there is a plan.

    options: keywords of llama_cpp.Llama as the user gave them.
    vram_cache: the budget on a GPU, that of `store`, or on all of them; None: of MOEGGUF_VRAM_CACHE.
    placement: what goes there (`plan.Choice`); None: of MOEGGUF_PLACEMENT.
    draft: `Llama`'s.

    Raises ModelNotFoundError, ModelFormatError, CapabilityError for a kind of model that is not run, BudgetError,
    OptionError, and AllocationError for a context above all memory of this machine.
    """
    path, environment = os.fspath(find_model(model)), read_environment()
    layout = read_layout(path, vocab_only=bool(options.get("vocab_only")))
    layout = drafted(layout, draft, options.get("flash_attn", False))
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
        check_context(layout, sizes, read_memory())
        devices = choose_gpus(vram_cache, placement, options, store.device) if hooks else None
        divides = devices is not None
        plan = _plan_now(layout, expert_cache, vram_cache, placement, options, devices or (), sizes, store)
    if hooks:
        options["use_mmap"] = False
    if hooks and divides:
        _divide_layers(options, plan)
    n_ubatch = plan.n_ubatch if hooks or received else sizes.most_ubatch
    return LoadPlan(
        path, layout, plan, hooks, n_ubatch, options, govern_threads, sizes.projector, sizes.n_seq_max,
        hooks and divides and not plan.on_device,
    )  # fmt: skip


def _sizes(layout: ExpertLayout, options: dict[str, Any]) -> Sizes:
    """Those of the options, of which some are taken out or changed. Raises OptionError."""
    # A chat handler brings its own file for images.
    mmproj = options.pop("mmproj", None) or getattr(options.get("chat_handler"), "clip_model_path", None)
    projector, given_ubatch = read_projector(mmproj) if mmproj else None, options.pop("n_ubatch", None)
    options["n_ctx"] = n_ctx = pad_context(options.get("n_ctx", N_CTX) or layout.hparams.n_ctx_train or N_CTX)
    if options.get("embedding"):
        options.setdefault("n_batch", pooling_batch_tokens(n_ctx))
        given_ubatch = given_ubatch or options["n_batch"]
    n_batch, n_image = options.get("n_batch", N_BATCH), projector.one_pass_tokens if projector else 0
    if n_image > n_batch:
        n_batch = options["n_batch"] = n_image
    types: dict[str, Any] = {name: number for name in ("type_k", "type_v") if (number := options.get(name)) is not None}
    for name, number in types.items():
        if GGML_TYPES.get(number, ("",))[0].lower() not in KV_CACHE_TYPES:  # llama.cpp would end the process
            accepted = ", ".join(f"{ggml_type(type)} ({type})" for type in KV_CACHE_TYPES)
            raise OptionError(f"{name} is {number!r}, which no KV cache can have; accepted: {accepted}.")
    wanted, kv_tokens = options.pop("n_seq_max", 1), options.pop("kv_tokens", None)
    n_seq_max = min(sequences_of(layout, n_ctx, 1 if options.get("embedding") else wanted), n_batch)
    adapter_bytes = 0
    if adapter := options.get("lora_path"):
        options["lora_path"] = os.path.expanduser(os.fspath(adapter))
        adapter_bytes = read_adapter(options["lora_path"], layout.arch).n_bytes
    return Sizes(
        n_ctx, min(given_ubatch, n_batch) if given_ubatch else None, n_batch, n_seq_max, kv_tokens, **types,
        flash_attn=bool(options.get("flash_attn")),  # None may become off, which needs more
        projector=projector, adapter_bytes=adapter_bytes,
    )  # fmt: skip


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


def check_options(options: dict[str, Any], init: Callable[..., None]) -> None:
    """Raises OptionError for a keyword that neither the signature of `init`, a `Llama`'s, nor LEGACY_OPTIONS names."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]
    for name in options:
        if name not in known and name not in LEGACY_OPTIONS:
            raise OptionError.unknown(name, known)


def parse_vram_caches(value: Budget) -> tuple[ExpertCache, ...]:
    """One budget for all devices together, or, where commas are in it, one for each. Raises BudgetError."""
    if not isinstance(value, str):
        return (parse_expert_cache(value, "vram_cache"),)
    return tuple(parse_expert_cache(part, "vram_cache") for part in value.split(","))


def given_budgets(
    expert_cache: Budget | None,
    vram_cache: Budget | None,
    placement: str | None,
    options: Mapping[str, Any] = NO_OPTIONS,
    devices: tuple[Device, ...] = (),
) -> Budgets:
    """What is given here, and what the environment gives where it is None, with layers divided as options say.

    options: as `choose_gpus` takes them. devices: what that chose; (): the one GPU that there may be. Raises
    BudgetError, OptionError, also for options that contradict a placement.
    """
    vram_cache, choice, _, some_layers = _asked(vram_cache, placement, options)
    n_gpu_layers, mode = options.get("n_gpu_layers"), options.get("split_mode", BY_LAYERS)
    tensor_split = options.get("tensor_split") if mode == BY_LAYERS else None
    vram = parse_vram_caches(vram_cache or "auto")
    whole = choice == "cpu" or (len(devices) <= len(vram) == 1 and not some_layers and tensor_split is None)
    if choice == "layers" and not whole:
        names = ", ".join(device.name for device in devices) or "the GPU"
        raise OptionError(
            f"placement 'layers' is for one GPU with one budget and every layer, but these are to compute: {names}"
            f" (n_gpu_layers {n_gpu_layers}, tensor_split {tensor_split}); take placement 'slots', or choose one GPU"
            f" (split_mode {NO_SPLIT}, main_gpu) and leave these options out."
        )
    return Budgets(
        parse_expert_cache(read_environment().expert_cache if expert_cache is None else expert_cache),
        vram,
        choice,
        n_gpu_layers=-1 if whole or n_gpu_layers is None else n_gpu_layers,
        tensor_split=None if tensor_split is None else tuple(tensor_split),
        divided=not whole,
        refuses_cpu=n_gpu_layers is not None and choice != "cpu",
    )


def _asked(
    vram_cache: Budget | None, placement: str | None, options: Mapping[str, Any]
) -> tuple[Budget | None, str, bool, bool]:
    """The budget on GPUs and the placement, those of the environment where they are None; whether they need a GPU, and
    whether GPUs are to compute a part of the layers only."""
    environment, n_gpu_layers = read_environment(), options.get("n_gpu_layers")
    vram_cache = environment.vram_cache or None if vram_cache is None else vram_cache
    choice = parse_option("placement", environment.placement if placement is None else placement, "placement")
    if choice == "cpu" and n_gpu_layers:
        raise OptionError(f"placement 'cpu' uses no GPU, but n_gpu_layers is {n_gpu_layers}; leave one out.")
    some_layers = n_gpu_layers is not None and 0 <= n_gpu_layers < EVERY_LAYER
    return vram_cache, choice, bool(vram_cache) or placement in ("layers", "slots"), some_layers


def choose_gpus(
    vram_cache: Budget | None, placement: str | None, options: Mapping[str, Any], name: str | None = None
) -> tuple[Device, ...] | None:
    """The GPUs that experts may be placed on, that of this name, or those that options leave; (): none is to be used;
    None: there is none, or the caller divides the model.

    Where no budget or placement was asked for that needs a GPU, GPUs are used where there are some, unless `name` or
    options say that the caller divides the model. options: n_gpu_layers, split_mode, main_gpu and tensor_split, as
    llama_cpp.Llama takes them; with n_gpu_layers -1 GPUs compute every layer, also where the CPU would be faster.

    Raises BudgetError where there is no GPU for what was asked, OptionError for an unknown one, and for options that
    contradict a placement.
    """
    vram_cache, choice, needs_gpu, some_layers = _asked(vram_cache, placement, options)
    mode, main_gpu = options.get("split_mode", BY_LAYERS), options.get("main_gpu", 0)
    by_matrix = mode not in (NO_SPLIT, BY_LAYERS)
    if choice == "cpu":
        return ()
    if not needs_gpu and (some_layers or by_matrix or name or vram_cache == "" or not gpus()):
        return None
    if by_matrix:
        raise OptionError(
            f"split_mode {mode} divides each matrix among devices, but a slot holds a whole expert; take"
            f" {BY_LAYERS} (layers), or {NO_SPLIT} (main_gpu alone), or leave vram_cache and placement out."
        )
    devices = tuple(find_gpus(name))
    if mode == BY_LAYERS or name is not None:
        return devices
    if not 0 <= main_gpu < len(devices):
        names = ", ".join(f"{device.index} ({device.name})" for device in devices)
        raise OptionError(f"main_gpu is {main_gpu}, but there are: {names}.")
    return (devices[main_gpu],)


def default_store(strategy: str | None = None) -> StoreOptions:
    """How experts are moved where the caller does not say it: as the strategy does. None: MOEGGUF_STRATEGY."""
    return find_strategy(read_environment().strategy if strategy is None else strategy).store


def _plan_now(
    layout: ExpertLayout,
    expert_cache: Budget | None,
    vram_cache: Budget | None,
    placement: str | None,
    options: Mapping[str, Any],
    devices: tuple[Device, ...],
    sizes: Sizes,
    store: StoreOptions = StoreOptions(),
) -> Plan:
    """The plan for this machine now, on these devices. Raises BudgetError, OptionError."""
    budgets = given_budgets(expert_cache, vram_cache, placement, options if devices else {}, devices)
    streams = store.overlap if devices else store.can_stream  # a device's name says where experts may be placed
    budgets = replace(budgets, sizes=sizes, staging=store.staging, streams=streams)
    known = KnownSpeeds(layout, options.get("n_threads") or count_cpus(), store.repack)
    found = plan_known(layout, Machine(read_memory(), devices=devices), budgets, known.speeds)
    choice = budgets.choice
    if devices or not layout.is_moe or choice in ("auto", "cpu", placement) or has_gpu():
        return found
    reason = f"MOEGGUF_PLACEMENT is {choice!r}, but this build of moegguf sees no GPU: the CPU computes every layer"
    return replace(found, reasons=(*found.reasons, reason))


def plan_here(
    layout: ExpertLayout,
    expert_cache: Budget | None = None,
    vram_cache: Budget | None = None,
    placement: str | None = None,
    n_gpu_layers: int | None = None,
    **sizes: Any,
) -> Plan:
    """The plan that `Llama` would make now. sizes: fields of `Sizes`. Raises BudgetError, OptionError."""
    layout = drafted(layout, read_environment().draft, sizes.get("flash_attn"))
    options = {"n_gpu_layers": n_gpu_layers}
    devices = choose_gpus(vram_cache, placement, options) if layout.is_moe else None
    return _plan_now(layout, expert_cache, vram_cache, placement, options, devices or (), Sizes(**sizes))
