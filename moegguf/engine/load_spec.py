"""`LoadSpec`: the options of one load, each checked once.

Commands, servers and `Llama` build a LoadSpec from one table (`moegguf.options`), and
plans read no other options.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from moegguf.controller.strategies import find_strategy
from moegguf.engine.devices import NO_GPU, find_device, has_gpu
from moegguf.engine.machine import Device
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.projector import ProjectorHeader, read_projector
from moegguf.gguf.reader import GGML_TYPES, StrPath, ggml_type
from moegguf.native.store import StoreOptions
from moegguf.options import BUDGETS, COMMAND_DEFAULTS, KV_CACHE_TYPES, load_keywords
from moegguf.quantities import ExpertCache, parse_expert_cache, parse_store_size
from moegguf.settings import parse_option, read_load_keywords

F16 = 1
EVERY_LAYER = 999  # value of n_gpu_layers that covers every layer of any model
NO_SPLIT, BY_LAYERS = 0, 1  # values of enum llama_split_mode
AUTO = ExpertCache("auto")
LLAMA_CPP_KEYWORDS = (
    "embedding", "flash_attn", "lora_path", "main_gpu", "n_gpu_layers", "split_mode", "tensor_split", "type_k",
    "type_v",
)  # fmt: skip
"""Options that may change the code that llama.cpp runs, with the names of its
bindings."""

Budget = str | int | float | ExpertCache
ListGpus = Callable[[], Sequence[Device] | None]
"""A function that returns the GPUs, each with the bytes that are free for all models
together, or None if all GPUs have failed."""


@dataclass(frozen=True)
class Budgets:
    """The budgets for experts in RAM and on GPUs."""

    ram: ExpertCache = AUTO
    # One for all GPUs together, or one for each.
    vram: tuple[ExpertCache, ...] = (replace(AUTO, tier="VRAM"),)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Budgets:
        """Parses the options with budgets. A missing option is "auto", and so is an
        empty budget for GPUs. Budgets for several GPUs are separated by commas. Raises
        BudgetError."""
        ram, vram = map(options.get, BUDGETS.values())
        parts = vram.split(",") if isinstance(vram, str) and vram else [vram or "auto"]
        return cls(
            parse_expert_cache("auto" if ram is None else ram),
            tuple(parse_expert_cache(part, "VRAM") for part in parts),
        )

    def as_limits(
        self, n_experts: int, ram_slot_bytes: int, vram_slot_bytes: int
    ) -> Budgets:
        """Returns automatic budgets (as much as fits) with these budgets as their
        maxima. A share of all `n_experts` experts counts as slots of `ram_slot_bytes`
        or `vram_slot_bytes` bytes."""

        def limit(cache: ExpertCache, slot_bytes: int) -> ExpertCache:
            n_bytes = int(cache.fraction * n_experts + 1e-9) * slot_bytes
            return replace(
                cache,
                mode="auto",
                n_bytes=n_bytes if cache.mode == "fraction" else cache.n_bytes,
            )

        in_vram = tuple(limit(cache, vram_slot_bytes) for cache in self.vram)
        return Budgets(limit(self.ram, ram_slot_bytes), in_vram)

    @property
    def texts(self) -> dict[str, str]:
        """{option: the text of its value}: "auto", "50%", "4.00GiB"; for several GPUs
        "50%,4.00GiB"."""
        return dict(
            zip(
                BUDGETS.values(),
                (str(self.ram), ",".join(map(str, self.vram))),
                strict=True,
            )
        )

    def as_given(self, tier: str) -> str:
        """Returns the option for a tier and its value, for messages, in the form
        NAME='50%,4.00GiB'."""
        return f"{BUDGETS[tier]}={self.texts[BUDGETS[tier]]!r}"


@dataclass(frozen=True)
class LoadSpec:
    """Options of one load. The defaults are the defaults of `Llama`."""

    n_ctx: int | None = 512  # None: chosen to fit the memory; 0: the model's own length
    # None: the tokens of a pass, but at least 512; for an embedding model, the tokens
    # of the context, but at most 2048
    n_batch: int | None = None
    n_ubatch: int | None = None  # None: chosen together with the slots
    n_seq_max: int = 1
    # Total tokens of all sequences; None: chosen to fit the memory.
    kv_tokens: int | None = None
    type_k: int = F16  # KV cache types, as ggml's numbers
    type_v: int = F16
    flash_attn: bool | None = False  # None: used if the compute devices support it
    logits_all: bool = False  # True: every token of a pass has logits
    # True (`swa_full`): layers with a sliding window have KV cache cells for the whole
    # context, so a sequence can be cut after any token. False: they have cells only for
    # the window and a pass. A sequence that is cut before these cells then continues
    # from a stored context.
    whole_windows: bool = True
    # Limit in bytes on the contexts that are stored on disk; 0: no contexts are stored;
    # None: `KvBlockStore` chooses the limit.
    context_store: int | None = None
    embedding: bool | None = False  # None: True if the file's header has a pooling type
    budgets: Budgets = Budgets()
    placement: str = "auto"
    draft: str = "auto"
    projector: ProjectorHeader | None = None
    lora_path: str | None = None
    # Paths of copies of the model's file, or of folders with copies.
    mirror: tuple[str, ...] = ()
    # None: one for each processor that this process may use.
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    split_mode: int = BY_LAYERS
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    store: StoreOptions = field(default_factory=StoreOptions)
    # True: a GPU is required. This is so if a budget for GPUs is set, also by
    # MOEGGUF_VRAM_CACHE, or if the caller chose a placement that uses a GPU.
    # MOEGGUF_PLACEMENT alone requires no GPU.
    needs_gpu: bool = False
    # True: llama.cpp's own options decide which layers run on GPUs, and no GPU has
    # slots.
    leaves_layers: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any], *, commands: bool = False) -> LoadSpec:
        """Returns the options of a load. An option in `given` (by name, or as a keyword
        of `Llama`) overrides the environment, and the environment overrides the
        defaults.

        commands: True for a command or a server, which has more defaults and
        environment variables (`moegguf.options`). If there is no `store`, `strategy`
        chooses the options of the store. An option that is None is treated as not
        given, except for options in COMMAND_DEFAULTS. Raises BudgetError, OptionError,
        and the same errors as `read_projector`.
        """
        chosen = COMMAND_DEFAULTS if commands else {}
        options = {**chosen, **read_load_keywords(commands=commands)}
        given = load_keywords(given)
        options |= {
            name: value
            for name, value in given.items()
            if value is not None or name in COMMAND_DEFAULTS
        }
        n_gpu_layers = options.get("n_gpu_layers")
        mode = options.get("split_mode", BY_LAYERS)
        budget = options.get(BUDGETS["VRAM"])
        placement = parse_option(
            "placement", options.get("placement", "auto"), "placement"
        )
        store = options.get("store") or find_strategy(options.get("strategy", "")).store
        is_some = n_gpu_layers is not None and 0 <= n_gpu_layers < EVERY_LAYER
        needs_gpu = bool(budget) or given.get("placement") in (
            "layers",
            "slots",
            "slots-mapped",
        )
        own_division = (
            mode not in (NO_SPLIT, BY_LAYERS)
            or bool(store.device)
            or (is_some and not commands)
        )
        if commands and n_gpu_layers == 0 and not needs_gpu:
            placement = "cpu"
        elif placement == "cpu" and n_gpu_layers:
            raise OptionError(
                f"placement 'cpu' uses no GPU, but n_gpu_layers is {n_gpu_layers}; leave one out."
            )
        images = options.get("mmproj") or getattr(
            options.get("chat_handler"), "clip_model_path", None
        )
        adapter = options.get("lora_path")
        whole_windows = options.get("swa_full")
        kept_bytes = _context_limit(options.get("context_store", "auto"))
        if whole_windows is None:
            # No contexts are stored in these cases, so a prompt with an edited message
            # would be computed again from its beginning.
            whole_windows = kept_bytes == 0 or bool(options.get("logits_all"))
        split = options.get("tensor_split") if mode == BY_LAYERS else None
        checked = {
            "type_k": _cache_type("type_k", options.get("type_k", F16)),
            "type_v": _cache_type("type_v", options.get("type_v", F16)),
            "budgets": Budgets.of(options),
            "placement": placement,
            "draft": os.fspath(options.get("draft", "auto")),
            "projector": read_projector(images) if images else None,
            "lora_path": os.path.abspath(os.path.expanduser(adapter))
            if adapter
            else None,
            "mirror": parse_mirrors(options.get("mirror")),
            "tensor_split": None if split is None else tuple(map(float, split)),
            "store": store,
            "context_store": kept_bytes,
            "whole_windows": bool(whole_windows),
            "needs_gpu": needs_gpu,
            "leaves_layers": not needs_gpu and (own_division or budget == ""),
        }
        # llama.cpp supports a quantised V cache only with fused attention.
        if GGML_TYPES[checked["type_v"]][1] > 1:
            checked["flash_attn"] = True
        names = {each.name for each in fields(cls)}
        found = cls(
            **{name: value for name, value in options.items() if name in names}
            | checked
        )
        found.is_divided(())
        return found

    @staticmethod
    def others(given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options in `given` that a LoadSpec does not contain, such as the
        policy, as keywords of `Llama`."""
        known = {each.name for each in fields(LoadSpec)}.union(BUDGETS.values())
        return {
            name: value
            for name, value in load_keywords(given).items()
            if name not in known and value is not None
        }

    @property
    def keywords(self) -> dict[str, Any]:
        """The options that are also keywords of `llama_cpp.Llama`, without sizes."""
        return {
            name: value
            for name, value in vars(self).items()
            if name in LLAMA_CPP_KEYWORDS
            and (value is not None or name in COMMAND_DEFAULTS)
        }

    def with_free_placement(self) -> LoadSpec:
        """Returns the same options without the options that place layers and experts on
        devices."""
        return replace(self, placement="auto", n_gpu_layers=None)

    @property
    def refuses_cpu(self) -> bool:
        """True if a CPU-only plan is not allowed, because n_gpu_layers was given and
        the placement is not "cpu"."""
        return self.n_gpu_layers is not None and self.placement != "cpu"

    def is_divided(self, devices: Sequence[Device]) -> bool:
        """Returns True if layers are divided among devices, or between devices and the
        CPU: there are several devices or budgets, a tensor_split, or an n_gpu_layers
        below EVERY_LAYER (and not -1). Then the only possible placement on GPUs is
        "slots". Returns False if the placement is "cpu".

        Raises OptionError if layers are divided and the placement is "layers".
        """
        is_some = self.n_gpu_layers is not None and 0 <= self.n_gpu_layers < EVERY_LAYER
        is_one = len(devices) <= len(self.budgets.vram) == 1
        if self.placement == "cpu" or (
            is_one and not is_some and self.tensor_split is None
        ):
            return False
        if self.placement == "layers":
            names = ", ".join(device.name for device in devices) or "the GPU"
            raise OptionError(
                "placement 'layers' needs one GPU that computes every layer, and one budget, but the options give"
                f" {names}, n_gpu_layers {self.n_gpu_layers}, tensor_split {self.tensor_split} and"
                f" {len(self.budgets.vram)} vram_cache budget(s); use placement 'slots', or choose one GPU"
                f" (split_mode {NO_SPLIT}, main_gpu) with one budget, and leave n_gpu_layers and tensor_split out."
            )
        return True

    def choose_gpus(self, list_gpus: ListGpus) -> tuple[Device, ...] | None:
        """Returns the GPUs on which experts may be placed. (): no GPU is used. None: no
        GPU has experts, and llama.cpp divides layers by its own options.

        list_gpus: called only if GPUs may be used, because drivers reserve memory for a
        process that lists them. If it returns None because the listing failed, no GPU
        is used. Raises BudgetError if a GPU is required and there is none. Raises
        OptionError for a GPU that does not exist, and for options that divide matrices
        among GPUs.
        """
        if self.placement == "cpu":
            return ()
        if self.leaves_layers or not (self.needs_gpu or has_gpu()):
            return None
        if self.split_mode not in (NO_SPLIT, BY_LAYERS):
            raise OptionError(
                f"split_mode {self.split_mode} divides each matrix among devices, but a slot holds a whole expert;"
                f" use {BY_LAYERS} (layers), or {NO_SPLIT} (main_gpu alone), or leave vram_cache and placement out."
            )
        if (devices := list_gpus()) is None:
            return ()
        if not devices:
            raise BudgetError(NO_GPU)
        if self.store.device:
            return (find_device(devices, self.store.device),)
        if self.split_mode == BY_LAYERS:
            return tuple(devices)
        if not 0 <= self.main_gpu < len(devices):
            names = ", ".join(f"{device.index} ({device.name})" for device in devices)
            raise OptionError(
                f"main_gpu is {self.main_gpu}, but must be one of: {names}."
            )
        return (devices[self.main_gpu],)


def parse_mirrors(given: StrPath | Sequence[StrPath] | None) -> tuple[str, ...]:
    """Returns the absolute paths of mirrors. Raises OptionError for an empty path."""
    several = [given] if isinstance(given, str | os.PathLike) else given or ()
    paths = [os.path.expanduser(os.fspath(each)) for each in several]
    if not all(paths):
        raise OptionError(
            "mirror is '', but must be the path of a copy of the model's file, or of its folder."
        )
    return tuple(map(os.path.abspath, paths))


def _context_limit(given: str | int) -> int | None:
    """Returns the limit in bytes from the option `context_store`; None for "auto".
    Raises OptionError."""
    try:
        return parse_store_size(given)
    except ValueError as error:
        raise OptionError(f"context_store: {error}.") from None


def _cache_type(name: str, given: str | int) -> int:
    """Returns ggml's number for a KV cache type. Raises OptionError for a type that
    would make llama.cpp abort."""
    try:
        number = ggml_type(given) if isinstance(given, str) else given
    except OptionError:
        number = -1  # no type has this number
    if GGML_TYPES.get(number, ("",))[0].lower() not in KV_CACHE_TYPES:
        accepted = ", ".join(f"{ggml_type(type)} ({type})" for type in KV_CACHE_TYPES)
        raise OptionError(
            f"{name} is {given!r}, which is not a type of KV cache; accepted: {accepted}."
        )
    return number
