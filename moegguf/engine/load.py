"""Plans one load: builds a `LoadSpec` from the options, a plan for this machine from
the LoadSpec, and the keywords of llama.cpp from both.

    options ─► LoadSpec (load_spec.py) ─► Sizes (memory.py) ─► solver.py over a Machine (machine.py, devices.py) ─► Plan

The process that owns the memory makes the plan, here or in `serving/memory_budget.py`;
a process that receives a LoadSpec and a plan makes none. Reads the system's free memory, and lists
devices through their drivers. If placements are compared, this machine may be measured,
and the results are kept (`speeds.py`). Does not load anything.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moegguf.engine.cost import HitRates, Speeds
from moegguf.engine.devices import find_gpus, gpus, has_gpu
from moegguf.engine.drafts import drafted
from moegguf.engine.load_spec import BY_LAYERS, NO_SPLIT, ListGpus, LoadSpec
from moegguf.engine.machine import Device, Machine, count_cpus, read_memory
from moegguf.engine.memory import (
    DEFAULT_UBATCH_TOKENS,
    Sizes,
    check_context,
    computes_embeddings,
)
from moegguf.engine.pinning import refused_bytes
from moegguf.engine.plan import Plan
from moegguf.engine.solver import make_plan
from moegguf.engine.speeds import KnownSpeeds
from moegguf.errors import (
    AllocationError,
    CapabilityError,
    ExpertIOError,
    ModelFormatError,
    MoeggufError,
    OptionError,
)
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import StrPath
from moegguf.models.catalog import find_model
from moegguf.quantities import format_bytes
from moegguf.settings import read_environment

# Known wrappers (LangChain) pass these keywords for old llama.cpp versions. The
# keywords have no effect here.
LEGACY_OPTIONS = frozenset(
    {"device", "f16_kv", "n_parts", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps"}
)
# Architectures for which llama.cpp's llm_arch_is_diffusion() returns true.
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
READ_ERROR = "read error"  # llama.cpp's error text for a read that failed

MeasureSpeeds = Callable[[Device], Speeds]


@dataclass(frozen=True)
class LoadPlan:
    """A model that is about to be loaded, with its plan."""

    path: str
    layout: ExpertLayout
    spec: LoadSpec
    plan: Plan
    hooks: bool  # True: the expert store is used
    options: dict[str, Any]  # keywords of llama_cpp.Llama
    # True: the number of compute threads follows the processor load of the machine.
    govern_threads: bool
    # True: devices are hidden from llama.cpp, which would otherwise not repack weights
    # for the CPU
    no_device: bool = False

    def failure(
        self, error: ValueError | MemoryError | RuntimeError, reason: str
    ) -> MoeggufError:
        """Returns the typed error for an error that the base class raised while
        loading. `reason`: errors that llama.cpp logged."""
        if isinstance(error, MemoryError):
            return AllocationError(
                f"no memory left while loading {self.path}; give less memory to experts (--expert-cache), or a smaller"
                " n_ctx."
            )
        if "LoRA" in str(error):
            adapter = self.spec.lora_path
            return ModelFormatError(
                f"{adapter} does not fit this model: {reason}; give one that was trained on it."
            )
        if "llama_context" in str(error):
            return AllocationError(
                f"llama.cpp cannot create a context of {self.plan.context.n_ctx} tokens, most likely for lack of memory"
                f" ({reason}); lower n_ctx (--ctx)."
            )
        if READ_ERROR in reason:
            return ExpertIOError(
                f"reading {self.path} failed: {reason}; check the disk that it is on."
            )
        return ModelFormatError(
            f"llama.cpp cannot load {self.path}: {reason}; verbose=True shows more."
        )


def prepare(
    model: StrPath, spec: LoadSpec, options: Mapping[str, Any], plan: Plan | None = None
) -> LoadPlan:
    """Reads the model's header, and returns the load with its plan. Makes the plan if
    `plan` is None.

    options: keywords that llama_cpp.Llama also has, as the user passed them.

    Raises ModelNotFoundError, ModelFormatError, BudgetError, OptionError,
    CapabilityError for a kind of model that moegguf does not run, and AllocationError
    for a context that is larger than this machine's total memory.
    """
    path = os.fspath(find_model(model))
    options = {n: v for n, v in options.items() if n not in LEGACY_OPTIONS}
    layout = read_model(path, spec, vocab_only=bool(options.get("vocab_only")))
    if layout.arch in DIFFUSION:
        raise CapabilityError(
            f"{layout.shards[0].path.name}: {layout.arch} models generate text by diffusion, not token by token, and"
            " moegguf cannot run them; choose another model."
        )
    hooks = layout.is_moe and read_environment().hooks
    options |= spec.keywords
    # True if the plan, not the caller's options, decides which layers run on devices.
    divides = hooks and (plan is not None or not spec.leaves_layers)
    if plan is None:
        sizes = Sizes.of(layout, spec)
        check_context(layout, sizes, read_memory())
        plan = plan_here(layout, spec)
        # The plan chose the pass length for its slots, but without hooks there are no
        # slots.
        if not hooks:
            sizes = sizes.with_context(layout, plan.context.n_ctx)
            plan = replace(plan, n_ubatch=sizes.usual_ubatch)
    govern_threads = read_environment().hooks and not (
        spec.n_threads or options.get("n_threads_batch")
    )
    options["n_threads"] = spec.n_threads or count_cpus()
    options["n_threads_batch"] = options.get("n_threads_batch") or options["n_threads"]
    pools = computes_embeddings(layout, spec)
    n_batch = plan.context.n_batch
    options |= {
        "embedding": pools,
        "n_ctx": plan.context.n_ctx,
        # Unless logits_all is set, llama_cpp.Llama allocates an array for the logits of
        # this many tokens, which moegguf uses only for embeddings. The loader later
        # sets the context's n_batch to the plan's.
        "n_batch": n_batch if pools else min(n_batch, DEFAULT_UBATCH_TOKENS),
        "n_ubatch": plan.n_ubatch,
    }
    if hooks:
        options["use_mmap"] = False
    if divides:
        _divide_layers(options, plan)
    no_device = divides and not plan.on_device
    return LoadPlan(path, layout, spec, plan, hooks, options, govern_threads, no_device)


def _divide_layers(options: dict[str, Any], plan: Plan) -> None:
    """Sets the options so that llama.cpp uses exactly the GPUs of the plan, and divides
    the layers among them as the plan does."""
    # Proportions of layers for the devices that the session passes to llama.cpp.
    if plan.tensor_split is not None:
        options |= {"split_mode": BY_LAYERS, "tensor_split": list(plan.tensor_split)}
        options.setdefault("n_gpu_layers", -1)
        return
    options["n_gpu_layers"] = -1 if plan.on_device else 0
    if plan.on_device and len(gpus()) > 1:
        (device,) = find_gpus(plan.on_devices[0].name)
        options |= {"split_mode": NO_SPLIT, "main_gpu": device.index}
        options.pop("tensor_split", None)


def check_options(options: dict[str, Any], init: Callable[..., None]) -> None:
    """Raises OptionError for a keyword that is neither in the signature of `init` (of a
    `Llama`) nor in LEGACY_OPTIONS."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]
    for name in options:
        if name not in known and name not in LEGACY_OPTIONS:
            raise OptionError.unknown(name, known)


def read_model(
    path: StrPath, spec: LoadSpec, *, vocab_only: bool = False
) -> ExpertLayout:
    """Reads the layout of the parts of a model that are loaded. Draft heads are
    included only if they may be used. Raises the same errors as `read_layout`, and
    OptionError if the model lacks required heads."""
    return drafted(read_layout(path, vocab_only=vocab_only), spec)


def choose_gpus(
    layout: ExpertLayout, spec: LoadSpec, list_gpus: ListGpus = gpus
) -> tuple[Device, ...] | None:
    """Returns the result of `LoadSpec.choose_gpus`; None if no expert store is used."""
    uses_slots = layout.is_moe and read_environment().hooks
    return spec.choose_gpus(list_gpus) if uses_slots else None


def known_speeds(layout: ExpertLayout, spec: LoadSpec) -> KnownSpeeds:
    """Returns the source of the speeds for comparing this load's placements."""
    return KnownSpeeds(layout, spec.n_threads or count_cpus(), spec.store.repack)


def plan_load(
    layout: ExpertLayout, spec: LoadSpec, machine: Machine, measure: MeasureSpeeds
) -> Plan:
    """Creates the plan for a load on a machine. Speeds and hit rates are looked up only
    if the machine has one device and the layers are not divided.

    measure: returns the speeds of a device with the model.

    Raises BudgetError or OptionError. Also raises OptionError if a device that must be
    used has no kernel for the model's experts.
    """
    speeds = None
    hits = None
    reasons = list[str]()
    if machine.devices and not spec.is_divided(machine.devices):
        (device,) = machine.devices
        try:
            hits = HitRates.of(layout).curve()
            speeds = measure(device)
        except OptionError as error:
            if spec.placement != "auto" or spec.refuses_cpu:
                raise
            machine = replace(machine, devices=())
            reasons = [f"not on {device.name}: {error}"]
    elif (
        not machine.devices
        and layout.is_moe
        and spec.placement not in ("auto", "cpu")
        and not has_gpu()
    ):
        reasons.append(
            f"MOEGGUF_PLACEMENT is {spec.placement!r}, but this build of moegguf sees no GPU: the CPU computes every"
            " layer"
        )
    found = make_plan(layout, machine, spec, speeds, hits)
    refused = refused_bytes(layout) if speeds and speeds.pageable else 0
    if (
        speeds
        and speeds.pageable
        and 0 < refused <= found.n_ram_slots * found.slot_bytes
    ):
        found = make_plan(
            layout, machine, spec, replace(speeds, copies=speeds.pageable), hits
        )
        reasons.append(
            f"{format_bytes(refused)} of RAM could not be pinned before: copies from pageable memory are expected, at"
            f" {speeds.pageable.bytes_per_s / 1e9:.1f} GB/s"
        )
    return replace(found, reasons=(*found.reasons, *reasons))


def plan_here(layout: ExpertLayout, spec: LoadSpec) -> Plan:
    """Creates the plan for a load on this machine in its current state. Raises
    BudgetError or OptionError."""
    machine = Machine(read_memory(), devices=choose_gpus(layout, spec) or ())
    return plan_load(layout, spec, machine, known_speeds(layout, spec).speeds)
