"""The expert store of one model, with its connection to llama.cpp, its listeners, and
the figures of its tiers.

The store is opened before the model and closed after it, because the model's expert
tensors use a buffer type that belongs to the store and only reserves address space. The
session keeps the arrays that llama.cpp reads.
"""

from __future__ import annotations

import ctypes as c
import enum
import itertools
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moegguf.engine.devices import find_device, gpus
from moegguf.engine.pinning import note_pinning
from moegguf.engine.plan import MemoryPlan, Plan, divide_slots, layer_slots
from moegguf.engine.solver import share_out
from moegguf.engine.stats import CPU, RAM, VRAM, DriveStats, Stats, TierStats
from moegguf.errors import AllocationError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native import library
from moegguf.native.events import Announcement, RoutingEvent
from moegguf.native.slot_sizes import most_slots, padded
from moegguf.native.store import DeviceSlots, ListenOptions, Store, StoreOptions, Tier

REFUSED = "was refused pinned memory"  # part of the store's note
EXPERT_TENSORS = r"\.ffn_(gate|up|down|gate_up)_exps\.weight"


def open_store(
    layout: ExpertLayout,
    plan: Plan,
    options: StoreOptions,
    mirrors: Sequence[Sequence[Path]] = (),
) -> Store:
    """Opens a store with the plan's slots. If they cannot be allocated, opens the store
    with fewer staging tensors or, with a warning, with fewer slots.

    mirrors: copies of the layout's shards. Raises AllocationError if not even the
    minimum fits, and OptionError for a mirror that differs.
    """
    supply = plan.supply
    used = [part for part in plan.memories if part.n_slots]
    # One memory has all slots, and the store's options may name its device.
    if plan.tensor_split is None:
        name = used[0].name or options.device
        used = [replace(used[0], name=name, layers=tuple(range(layout.n_layer)))]
    layout = padded(layout, [part.name for part in used])
    needed = {
        part.name: layer_slots(
            layout,
            plan.n_ubatch,
            supply.streams and (part.name is None or supply.n_staging > 0),
        )
        for part in used
    }
    if plan.size_classes:
        n_each = divide_slots(layout, plan.size_classes, used[0].n_slots)
        used = [
            replace(used[0], layers=of, n_slots=n)
            for of, n in zip(plan.size_classes, n_each, strict=True)
        ]
    parts = (
        used
        if supply.maps
        else [
            pool for part in used for pool in pools_of(layout, part, needed[part.name])
        ]
    )
    staging = supply.n_staging
    least = [
        max(layout.n_expert_used, min(part.n_slots, needed[part.name]))
        for part in parts
    ]
    of_pass = [
        min(part.n_slots, plan.pass_slots(layout, part.name is not None))
        for part in parts
    ]
    n_slots = [part.n_slots for part in parts]
    n_ram = plan.n_ram_slots
    while True:
        slots = [
            DeviceSlots(
                part.name,
                n,
                part.layers,
                through_ram=part.name is not None,
                staging=staging if part.name else 0,
                pass_slots=min(n, n_pass),
                maps=supply.maps,
            )
            for part, n, n_pass in zip(parts, n_slots, of_pass, strict=True)
        ]
        try:
            store = Store(layout, slots, options, n_ram, mirrors)
            break
        except AllocationError:
            if n_slots == least and (supply.maps or n_ram <= 1):
                raise
            if staging > 1:
                staging = 1
                continue
            n_slots = [max(few, n // 2) for few, n in zip(least, n_slots, strict=True)]
            if not supply.maps:  # RAM holds every expert if slots are mapped
                n_ram = max(min(1, n_ram), n_ram // 2)
    if sum(n_slots) < plan.n_slots or n_ram < plan.n_ram_slots:
        below = f" and {plan.n_ram_slots} below them" if n_ram else ""
        going_on = f" and {n_ram}" if n_ram else ""
        warnings.warn(
            f"there is no memory for {plan.n_slots} expert slots{below}; continuing with {sum(n_slots)}{going_on},"
            " more slowly; free some memory, or give a smaller budget for experts.",
            stacklevel=2,
        )
    for tier in store.tiers:
        figures = store.tier(tier)
        is_refused = REFUSED in figures["note"]
        if figures["note"]:
            next_time = (
                "; the next plan for this model uses the speed of such copies"
                * is_refused
            )
            warnings.warn(f"{figures['note']}{next_time}.", stacklevel=2)
        if is_refused or figures["pinned_memory"]:
            note_pinning(layout, figures["pool_bytes"], is_refused)
    return store


def pools_of(layout: ExpertLayout, part: MemoryPlan, needed: int) -> list[MemoryPlan]:
    """Returns a memory's part of the plan as one pool, or as several pools, each for
    some of its layers.

    There are several pools if one pool would be larger than the device's buffers or
    kernels allow. If several pools would have too few slots for a pass, there is one
    pool with fewer slots instead, and a warning.

    needed: number of slots that a pass uses in a layer.
    """
    there = [layer.il for layer in layout.layers if layer.il in part.layers]
    most = most_slots(layout.only(there), part.name, part.n_slots)
    if most >= part.n_slots:
        return [part]
    for n_pools in range(2, len(there) + 1):
        bounds = [n * len(there) // n_pools for n in range(n_pools + 1)]
        layers = [
            tuple(there[first:last]) for first, last in itertools.pairwise(bounds)
        ]
        n_slots = divide_slots(layout, layers, part.n_slots)
        if min(n_slots) < needed:
            break
        if max(n_slots) <= most:
            return [
                replace(part, layers=of, n_slots=n)
                for of, n in zip(layers, n_slots, strict=True)
            ]
    warnings.warn(
        f"{part.name} has buffers and kernels for {most} expert slots, not for {part.n_slots}; continuing with {most}.",
        stacklevel=2,
    )
    return [replace(part, n_slots=most)]


# A tier, and the index of a device; None: the tier's slots belong to no single device.
Slots = tuple[Tier, int | None]


def devices_of_layers(store: Store) -> dict[int, DeviceSlots]:
    """Returns the devices that share a budget, by their indices: the GPUs that run
    layers, or the CPU if it runs every layer."""
    devices = dict(enumerate(store.devices))
    on_gpus = {i: of for i, of in devices.items() if of.name is not None}
    return on_gpus or devices


def divide_among_devices(store: Store, n_slots: int) -> dict[Slots, int]:
    """Divides `n_slots` slots among the devices that share a budget.

    Each device first gets the slots that a pass needs. The rest are divided in
    proportion to each device's remaining capacity.
    """
    devices = devices_of_layers(store)
    least = sum(device.pass_slots for device in devices.values())
    room = [device.n_slots - device.pass_slots for device in devices.values()]
    more = share_out(n_slots - least, room, room, 0)
    return {
        (Tier.COMPUTE, index): device.pass_slots + n
        for (index, device), n in zip(devices.items(), more, strict=True)
    }


class Place(enum.IntEnum):
    """The place of an expert: only in the file (DISK), on its way to a slot (LOADING),
    or in memory (RAM, VRAM)."""

    DISK = 0
    LOADING = 1
    RAM = 2
    VRAM = 3


# Names of figures in `moegguf_tier_info` that are sums over the devices of a tier.
_TIER_SUMS = (
    "lookups", "hits_ready", "hits_late", "misses", "evictions", "bytes_missed", "bytes_prefetched", "stall_ns",
    "stream_waits", "copy_ns", "slots_used", "slots_pinned", "pool_bytes", "n_slots", "n_slots_usable",
)  # fmt: skip


class RoutingListener(Protocol):
    """An object whose methods the store's event thread calls for routing events and
    announcements. By default announcements are ignored."""

    @property
    def listen_options(self) -> ListenOptions:
        """The events and arrays that the store must send to this listener."""

    def announce(self, announcement: Announcement) -> None:
        """Receives the tokens that are evaluated next."""
        return

    def observe(self, event: RoutingEvent) -> None:
        """Receives the experts that a layer's router has chosen."""


class RoutingListeners:
    """The listeners of one store, such as the controller and a recorder. Each of them
    receives the events in order. The store drops events for slow listeners, unless a
    listener sets `everything`. After an exception in a listener, all listeners are
    removed.

    Without a listener the store sends no events. If every expert is complete in its own
    slot, it then does not read the routers' choices, unless it is watched
    (`Store.watch`). Adding or removing a listener renews the subscription between two
    routing events.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners: tuple[RoutingListener, ...] = ()

    def add(self, listener: RoutingListener) -> None:
        """Adds a listener, which receives the events from now on."""
        self._subscribe((*self._listeners, listener))

    def remove(self, listener: RoutingListener) -> None:
        """Removes a listener. After the call, the listener receives no more events.
        Does nothing if the listener was not added."""
        if listener in self._listeners:
            self._subscribe(
                tuple(other for other in self._listeners if other is not listener)
            )

    def _subscribe(self, listeners: tuple[RoutingListener, ...]) -> None:
        self._store.listen()
        self._listeners = listeners
        if listeners:
            asked = [listener.listen_options for listener in listeners]
            options = ListenOptions(
                weights=any(o.weights for o in asked),
                inputs=any(o.inputs for o in asked),
                everything=any(o.everything for o in asked),
                lockstep=any(o.lockstep for o in asked),
                lazy=all(o.lazy for o in asked),
                max_input_tokens=max(o.max_input_tokens for o in asked),
            )
            self._store.listen(
                on_routing=self._observe, on_tokens=self._announce, options=options
            )

    def _announce(self, announcement: Announcement) -> None:
        self._call_each(lambda listener: listener.announce(announcement))

    def _observe(self, event: RoutingEvent) -> None:
        self._call_each(lambda listener: listener.observe(event))

    def _call_each(self, call: Callable[[RoutingListener], object]) -> None:
        try:
            for listener in self._listeners:
                call(listener)
        except BaseException:
            # None of these listeners is called again, even if another listener is added
            # later.
            self._listeners = ()
            raise


class _Override(c.Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = [("pattern", c.c_char_p), ("buft", c.c_void_p)]


class Session:
    """One expert store, attached to one `Llama`. layout: the layers whose experts have
    slots. mirrors: copies of the layout's shards."""

    def __init__(
        self,
        layout: ExpertLayout,
        plan: Plan,
        options: StoreOptions,
        mirrors: Sequence[Sequence[Path]] = (),
    ) -> None:
        self.layout = layout
        self.plan = plan
        self._bindings = library.llama_cpp()
        self._pid = os.getpid()
        self.store = open_store(layout, plan, options, mirrors)
        self._has_mirrors = bool(mirrors)
        # Indices of the copies of the model's files for which a warning was already
        # given.
        self._dropped = set[int]()
        self._warn_of_dropped()
        self.listeners = RoutingListeners(self.store)
        layers = "|".join(str(layer.il) for layer in layout.layers)
        pattern = (rf"blk\.({layers})" + EXPERT_TENSORS).encode()
        tables = "|".join(re.escape(table.name) for table in layout.row_tables)
        overrides = [_Override(pattern, self.store.buffer_type)]
        if tables:
            overrides.append(
                _Override(f"^({tables})$".encode(), self.store.row_buffer_type)
            )
        self._overrides = (_Override * (len(overrides) + 1))(*overrides, _Override())
        there = gpus() if plan.devices else []
        on_devices = [
            find_device(there, part.name).handle for part in plan.devices if part.name
        ]
        self._devices = (c.c_void_p * (len(on_devices) + 1))(*on_devices, None)

    def attach_model(self, params: c.Structure) -> None:
        """Makes llama.cpp use the store's buffer types for experts and for row tables.
        These buffer types only reserve address space, so that only the store reads the
        tensors. If the plan divides layers among several memories, also sets the
        devices."""
        params.tensor_buft_overrides = c.addressof(self._overrides)
        # llama.cpp would map row tables.
        params.lazy_mode = self._bindings.LLAMA_LAZY_MODE_OFF
        if self.plan.devices:
            params.devices = c.addressof(self._devices)

    def attach_context(self, params: c.Structure) -> None:
        """Sets the hook that runs at each layer's routing, and the callback that aborts
        a failed pass at the next node of its graph."""
        params.cb_eval = self._bindings.ggml_backend_sched_eval_callback(
            self.store.context.eval_callback()
        )
        params.cb_eval_user_data = self.store.handle
        params.abort_callback = self._bindings.ggml_abort_callback(
            self.store.context.abort_callback()
        )
        params.abort_callback_data = self.store.handle
        # op_offload would copy all slots of a pool to the GPU if the pool is in host
        # memory and layers are on a GPU.
        params.op_offload = False

    def give_slots_back(self, unload: Callable[[], object]) -> bool:
        """Frees about half of the slots that layers read experts from, because weights
        or a context did not fit into a device's memory.

        Returns False, and frees nothing, if no device has slots or if passes need all
        slots.

        unload: called before slots are freed, to free the parts of the model that were
        already loaded.
        """
        devices = devices_of_layers(self.store)
        least = sum(device.pass_slots for device in devices.values())
        n_slots = sum(self.store.device(i)["n_slots_usable"] for i in devices)
        if self.plan.device is None or n_slots <= least:
            return False
        unload()
        fewer = max(least, n_slots // 2)
        for (tier, device), n in divide_among_devices(self.store, fewer).items():
            self.store.resize(n, tier, device)
        warnings.warn(
            f"{self.plan.device} has too little memory for weights, a context and {n_slots} expert slots together;"
            f" continuing with {fewer} slots, more slowly; give a smaller budget for experts on it, or lower n_ctx.",
            stacklevel=2,
        )
        return True

    @property
    def forked(self) -> bool:
        """True in a child process of the process that opened the store."""
        return os.getpid() != self._pid

    def raise_failure(self) -> None:
        """Raises the typed error of the last pass if it failed, or CallbackError if a
        callback has raised. First warns about copies of the model's files that are no
        longer read because reading them failed, once for each copy."""
        self._warn_of_dropped()
        failure = self.store.context.take_failure()
        if failure is not None:
            raise library.error(
                failure.status, failure.message.decode(errors="replace")
            )
        self.store.raise_callback_error()

    def _warn_of_dropped(self) -> None:
        """Warns once for each copy of the model's files that is no longer read, because
        reading it has failed."""
        for index, drive in enumerate(self.store.drives() if self._has_mirrors else ()):
            if drive["dropped"] and index not in self._dropped:
                self._dropped.add(index)
                warnings.warn(
                    f"a copy of the model is no longer used: {drive['note']}. The other copies hold every expert."
                    " Load the model again when this copy can be read.",
                    stacklevel=2,
                )

    def _drives(self) -> tuple[DriveStats, ...]:
        """Returns the figures of the model's own files and of each mirror; () if there
        are no mirrors."""
        return tuple(
            DriveStats(
                f"mirror {index}" if index else "file",
                reads=drive["reads"],
                bytes_read=drive["bytes"],
                bytes_per_s=drive["bytes_per_s"],
                is_dropped=bool(drive["dropped"]),
            )
            for index, drive in enumerate(
                self.store.drives() if self._has_mirrors else ()
            )
        )

    def stats(self, eval_s: float) -> Stats:
        """Returns the counters and sizes of the store. eval_s: evaluation time in
        seconds, measured by the caller."""
        counters = self.store.counters()
        info = self.store.info()
        seconds: dict[str, Any] = {
            f"{name}_s": counters[f"{name}_ns"] / 1e9
            for name in ("stall", "hook", "read", "upload")
        }
        counted = {
            name: value
            for name, value in counters.items()
            if name in Stats.__dataclass_fields__
        }
        staged = defaultdict(int, self.store.staging())
        tiers = list[TierStats]()
        for name, figures in self.tiers().items():
            counted_there = {
                key: figures[key]
                for key in figures.keys() & TierStats.__dataclass_fields__.keys()
            }
            n_slots = figures["n_slots_usable"]
            stall_s = figures["stall_ns"] / 1e9
            fixed = {
                "n_slots": n_slots,
                "pool_bytes": n_slots * figures["slot_bytes"],
                "stall_s": stall_s,
            }
            tiers.append(TierStats(name, **counted_there | fixed))
        return Stats(
            **counted,
            **seconds,
            staging_bytes=staged["pool_bytes"],
            bytes_staged=staged["bytes_missed"] + staged["bytes_prefetched"],
            staging_copy_s=staged["copy_ns"] / 1e9,
            staging_stall_s=staged["stall_ns"] / 1e9,
            eval_s=eval_s,
            n_slots=info["n_slots_usable"],
            n_experts=info["n_experts"],
            pool_bytes=info["n_slots_usable"] * info["slot_bytes"],
            tiers=tuple(tiers),
            drives=self._drives(),
        )

    def places(self) -> npt.NDArray[np.uint8]:
        """Returns the `Place` of each expert, shape (n_layer, n_expert). If an expert
        is in slots of several tiers, VRAM has priority over RAM. Experts of whole
        layers on a device are reported as VRAM."""
        places = np.zeros(self.store.shape, np.uint8)
        for tier in reversed(self.store.tiers):
            there = self.store.residency(tier)
            places[(there == 1) & (places == Place.DISK)] = Place.LOADING
            places[there == 2] = (
                Place.VRAM if tier == Tier.COMPUTE and self._on_device else Place.RAM
            )
        for device in self._cpu_slots:
            layers = places[list(device.layers)]
            places[list(device.layers)] = np.where(
                layers == Place.VRAM, Place.RAM, layers
            )
        places[list(self.plan.whole_layers)] = Place.VRAM
        return places

    def tiers(self) -> dict[str, dict[str, Any]]:
        """Returns {name of a tier: its figures}, with times in ns. If no device has
        slots, "RAM" is the only tier. Otherwise "VRAM" comes first, followed by "RAM"
        if slots in RAM back those in VRAM. The last entry is "CPU" if some layers run
        on the CPU, which has separate slots for them in RAM. "VRAM" counts the lookups
        of layers that run on devices. "RAM" after it counts the lookups that missed in
        VRAM.
        """
        names = (VRAM, RAM) if self._on_device else (RAM,)
        found = {
            name: self.store.tier(tier)
            for name, tier in zip(names, self.store.tiers, strict=False)
        }
        for device in self._cpu_slots:
            found[CPU] = self.store.device(self.store.devices.index(device))
            found[VRAM] |= {
                name: found[VRAM][name] - found[CPU][name] for name in _TIER_SUMS
            }
            found[VRAM]["device"] = ", ".join(
                part.name
                for part in self.store.devices
                if part.name and part.name != CPU
            )
        return found

    @property
    def _on_device(self) -> bool:
        """True if layers read experts from slots in a device's memory."""
        return any(device.name not in (None, CPU) for device in self.store.devices)

    @property
    def _cpu_slots(self) -> list[DeviceSlots]:
        """The slots of layers that run on the CPU while others run on devices; empty if
        there are none."""
        return [
            device
            for device in self.store.devices
            if self._on_device and device.name in (None, CPU)
        ]

    def close(self) -> None:
        """Frees the store. Call this method after llama.cpp's context and model have
        been freed. A second call does nothing."""
        self.store.close()
