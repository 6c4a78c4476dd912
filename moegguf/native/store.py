"""The expert store as a Python object, whose methods call the C ABI's functions for a
store.

The module also contains the store's options, the names of its eviction policies, and
the conversion of events to numpy.
"""

from __future__ import annotations

import ctypes as c
import enum
import functools
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moegguf.errors import CallbackError, ClosedError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native import abi, library
from moegguf.native.events import (
    Announcement,
    Bools,
    Float32s,
    Int32s,
    Phase,
    RoutingEvent,
)
from moegguf.native.predictor import NativeForecast, NativePredictor, predictor_struct
from moegguf.native.slot_sizes import matrices_of
from moegguf.quantities import Link


class Tier(enum.IntEnum):
    """A tier of slots: COMPUTE for devices that run layers, RAM for slots from which
    COMPUTE's slots are filled."""

    COMPUTE = abi.COMPUTE_TIER
    RAM = abi.RAM_TIER


# One tensor is filled while a layer uses the other; a third would bring no benefit.
STAGING_TENSORS = 2
# The largest share of a device's memory for experts that two staging tensors may
# occupy. Slots get the rest.
STAGING_SHARE = 0.25


@dataclass(frozen=True)
class DeviceSlots:
    """A device that runs layers, and the slots in its memory for their experts."""

    name: str | None  # ggml's name; None: the CPU
    n_slots: int
    # Il of the layers that the device runs; layers without experts are ignored.
    layers: Collection[int]
    # Missing experts are read into slots in RAM first, if the store has such slots.
    through_ram: bool = False
    # Number of staging tensors for prompts, each with space for all experts of a layer.
    staging: int = 0
    # Number of slots that a layer may need in a pass that is not staged; 0: as many as
    # one token needs.
    pass_slots: int = 0
    # The device looks up slots itself, and reads experts directly from slots in RAM
    # (mapped.h).
    maps: bool = False
    # Simulated link from RAM to the device; None: the link in the store's options.
    link: Link | None = None


UInt64s = npt.NDArray[np.uint64]
Integers = Sequence[int] | Int32s
EVERY_PASS = 2**31 - 1
_COUNTED_BY_TIER = (
    "lookups", "hits_ready", "hits_late", "misses", "evictions", "prefetch_wasted", "slots_used", "slots_pinned",
)  # fmt: skip


def _bits(options: StoreOptions | ListenOptions, enum: str) -> int:
    """Returns the sum of the flags of a C enum whose names are fields of `options` with
    the value True."""
    return sum(bit for name, bit in abi.enum(enum).items() if getattr(options, name))


@dataclass(frozen=True)
class StoreOptions:
    """Options that control how the store moves experts.

    The defaults were chosen by measurement. Tests and ablations turn individual options
    off.
    """

    readers: int = 4  # number of threads that read each copy of the model's files
    # Slots on the CPU are interleaved for its fastest kernels, if these support the
    # type.
    repack: bool = True
    direct: bool = True  # files are read with O_DIRECT, if a test read with it succeeds
    chunked: bool = True  # prefetches are read matrix by matrix
    # A routing event drops queued prefetches of its layer (MOEGGUF_PREEMPT).
    preempt: bool = True
    # Demands are read before prefetches; False: prefetches are read first.
    demand_first: bool = True
    # A layer may start running before all of its matrices have arrived.
    overlap: bool = True
    # If several tokens choose nearly all experts of a layer, experts of the next layer
    # are prefetched into the slots that the layer does not need. In successive passes
    # of several tokens that use more experts than there are slots, experts of the layer
    # that is needed last are evicted first, unless the policy's scores decide.
    sweep: bool = True
    # If True, absent experts of a pass with several tokens are streamed through a few
    # of the CPU's slots in each layer, and each expert is read once. If False, experts
    # are streamed only if the experts of a layer do not fit into the slots.
    stream: bool = False
    # A tier with a slot for each of its experts is filled in the background.
    fill: bool = True
    # Number of staging tensors of the device `device`, up to STAGING_TENSORS; None: the
    # planned number, or none without a plan.
    staging: int | None = None
    simulate: bool = False
    # Ggml's name of the device that has the slots; None: the CPU.
    device: str | None = None
    # Speed of the simulated link from the files; 0: reads take no time.
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    # Speed of the simulated link from RAM to the device; 0: copies take no time.
    copy_bytes_per_s: float = 0.0
    copy_latency_s: float = 0.0

    @property
    def can_stream(self) -> bool:
        """True if these options allow streaming. Streaming also needs kernels that
        support it (`SlotSizes.streams`)."""
        return self.overlap and self.device is None


@dataclass(frozen=True)
class ListenOptions:
    """Options of a listener: the data that it receives in addition to expert ids, and
    how events are delivered."""

    weights: bool = False  # the router's weights
    # The router's input vectors, for events of at most `max_input_tokens` tokens.
    inputs: bool = False
    # Compute threads wait for a slow listener; False: events are dropped.
    everything: bool = False
    # Each routing event waits until all earlier events are delivered; runs are then
    # reproducible, but slow.
    lockstep: bool = False
    # Many events are delivered together, up to 0.1 s late; this slows the model down
    # less.
    lazy: bool = False
    max_input_tokens: int = 1


def _copied(values: Any, *shape: int, dtype: type = np.int32) -> Any:
    """Copies a C array of 4-byte values into a numpy array with this shape. Returns
    None for a null pointer."""
    return (
        np.frombuffer(c.string_at(values, 4 * math.prod(shape)), dtype).reshape(shape)
        if values
        else None
    )


def _announcement(event: Any) -> Announcement:
    of_tokens = (
        _copied(values, event.n_tokens)
        for values in (event.sequences, event.phases, event.outputs)
    )
    tokens = _copied(event.tokens, event.n_tokens)
    return Announcement(event.sequence, Phase(event.phase), tokens, *of_tokens)


def _routing(event: Any) -> RoutingEvent:
    n_tokens, n_used = event.n_tokens, event.n_expert_used
    return RoutingEvent(
        event.pass_, event.time_ns, event.sequence, Phase(event.phase), event.first_token, event.il,
        _copied(event.expert_ids, n_tokens, n_used),
        _copied(event.weights, n_tokens, n_used, dtype=np.float32),
        _copied(event.inputs, n_tokens, event.n_embd, dtype=np.float32),
        _copied(event.sequences, n_tokens),
        _copied(event.phases, n_tokens),
    )  # fmt: skip


def _arrays(il: Integers, experts: Integers) -> tuple[Any, Any, int]:
    """Returns (layers, experts, n): two C arrays, and their common length n. The longer
    sequence is truncated."""
    n = min(len(il), len(experts))
    return (c.c_int32 * n)(*il[:n]), (c.c_int32 * n)(*experts[:n]), n


class NativePolicy(NamedTuple):
    """An eviction policy that the store itself runs: its name, and whether it uses
    forecasts."""

    name: str
    # True: the policy uses forecasts (`Store.set_forecast`).
    takes_forecast: bool = False


@functools.cache
def native_policies() -> Mapping[str, NativePolicy]:
    """Returns the store's eviction policies by their names."""
    found: dict[str, NativePolicy] = {}
    takes_forecast = c.c_int32()
    while name := library.load().moegguf_policy_name(
        len(found), c.byref(takes_forecast)
    ):
        found[name.decode()] = NativePolicy(name.decode(), bool(takes_forecast.value))
    return found


class Store:
    """A cache of experts of `layout`, with n_slots slots in the memory of the compute
    device.

    With n_ram_slots = 0, there is one tier. Otherwise there is a second tier with
    n_ram_slots slots in RAM. Experts missing on the device are then copied from RAM.
    Experts that are not in RAM either are first read from the file into RAM, or
    directly into the device's slots if no slot in RAM is available. `tiers` lists the
    tiers that exist. `context` provides the calls for the llama_context that uses the
    store.

    n_slots: a number, or a list of several devices with their slots. In the second
    case, every layer with experts is on one of the devices, `options.device` and
    `options.staging` have no effect, and devices with `through_ram` share the slots in
    RAM.

    mirrors: copies of the layout's shards on other drives. Each read goes to the copy
    that is expected to finish it first.

    Raises AllocationError when the device has no free memory, and ExpertIOError when a
    shard cannot be opened. Raises OptionError for an option out of range, and for a
    mirror that differs from the shards. Free the model and the llama_context that use
    the store before closing the store. Methods that call the library raise ClosedError
    after close(), and most of them raise ForkError in a child process.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        n_slots: int | Sequence[DeviceSlots],
        options: StoreOptions = StoreOptions(),
        n_ram_slots: int = 0,
        mirrors: Sequence[Sequence[Path]] = (),
    ) -> None:
        self._library = library.load()
        self._handle: int | None = None
        # Struct moegguf_listener, kept because C calls its functions.
        self._listener: Any = None
        self._callback_error: BaseException | None = None
        # Identifier of the thread on which a callback is running; 0: none.
        self._callback_thread = 0
        # Kept because the store reads its arrays.
        self._predictor: NativePredictor | None = None
        self.layout = layout
        self.options = options
        self.tiers = (Tier.COMPUTE, Tier.RAM) if n_ram_slots else (Tier.COMPUTE,)
        self.devices = self._devices(n_slots)
        used = {layer.il: layer.n_expert_used for layer in layout.layers}
        names = [] if options.simulate else [device.name for device in self.devices]
        matrices = matrices_of(layout, names)
        copies = [[shard.path for shard in layout.shards], *mirrors]
        paths = [os.fsencode(path) for copy in copies for path in copy]
        self._n_copies = 0 if options.simulate else len(copies)
        config = abi.Config(
            abi=abi.ABI_VERSION,
            flags=_bits(options, "flag"),
            n_layer=layout.n_layer,
            n_matrices=len(matrices),
            n_shards=len(layout.shards),
            n_mirrors=len(mirrors),
            n_row_tables=len(layout.row_tables),
            n_devices=len(self.devices),
            n_readers=options.readers,
            n_ram_slots=n_ram_slots,
            matrices=matrices,
            row_tables=(abi.RowTable * len(layout.row_tables))(
                *(
                    abi.RowTable(table.name.encode(), table.shard, table.offset)
                    for table in layout.row_tables
                )
            ),
            shard_paths=(c.c_char_p * len(paths))(*paths),
            n_expert_used=(c.c_int32 * layout.n_layer)(
                *(used.get(il, 0) for il in range(layout.n_layer))
            ),
            devices=(abi.Device * len(self.devices))(*map(self._device, self.devices)),
            device_of_layer=(c.c_int32 * layout.n_layer)(
                *map(self.device_of, range(layout.n_layer))
            ),
            sim_bytes_per_ns=options.link_bytes_per_s / 1e9,
            sim_latency_ns=options.link_latency_s * 1e9,
        )
        handle = c.c_void_p()
        self._library.moegguf_store_open(c.byref(config), c.byref(handle))
        self._handle = handle.value
        self.context = StoreContext(self)

    def _devices(self, n_slots: int | Sequence[DeviceSlots]) -> tuple[DeviceSlots, ...]:
        if not isinstance(n_slots, int):
            return tuple(n_slots)
        staging = self.options.staging or 0
        return (
            DeviceSlots(
                self.options.device,
                n_slots,
                range(self.layout.n_layer),
                through_ram=True,
                staging=staging,
            ),
        )

    def _device(self, device: DeviceSlots) -> Any:
        link = device.link or Link(
            self.options.copy_bytes_per_s, self.options.copy_latency_s
        )
        name = device.name.encode() if device.name else None
        per_ns, latency_ns = link.bytes_per_s / 1e9, link.latency_s * 1e9
        sizes = device.n_slots, device.through_ram, device.staging, device.pass_slots
        return abi.Device(name, *sizes, device.maps, per_ns, latency_ns)

    def device_of(self, il: int) -> int:
        """Returns the index of the device that runs a layer; -1: none."""
        return next(
            (index for index, device in enumerate(self.devices) if il in device.layers),
            -1,
        )

    @property
    def handle(self) -> int:
        """The address of the moegguf_store. Raises ClosedError after close()."""
        if self._handle is None:
            raise ClosedError("the expert store is closed; load the model again.")
        return self._handle

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of scores and of the residency map: (n_layer, largest number of
        experts in a layer)."""
        return self.layout.n_layer, self.layout.n_expert

    @property
    def buffer_type(self) -> int:
        """The address of the buffer type that only reserves address space, for
        llama.cpp's tensor_buft_overrides."""
        return int(self._library.moegguf_store_buft(self.handle))

    @property
    def row_buffer_type(self) -> int:
        """The address of the buffer type of row tables, which only reserves address
        space."""
        return int(self._library.moegguf_store_row_buft(self.handle))

    def _figures(self, call: Any, struct: Any, *arguments: int) -> dict[str, Any]:
        """Calls a C function that fills `struct`. Returns the struct's fields as a
        dict, with texts as str."""
        call(self.handle, *arguments, c.byref(struct))
        fields = {name: getattr(struct, name) for name, *_ in struct._fields_}
        return {
            k: v.decode(errors="replace") if isinstance(v, bytes) else v
            for k, v in fields.items()
        }

    def counters(self) -> dict[str, int]:
        """Returns the fields of struct moegguf_counters, and the compute tier's
        look-ups, evictions and slots.

        Times are in ns.
        """
        tier = self.tier()
        of_tier = {name: tier[name] for name in _COUNTED_BY_TIER}
        return (
            self._figures(self._library.moegguf_store_counters, abi.Counters())
            | of_tier
        )

    def info(self) -> dict[str, Any]:
        """Returns every field of struct moegguf_tier_info for the compute tier."""
        return self.tier()

    def tier(self, tier: Tier = Tier.COMPUTE) -> dict[str, Any]:
        """Returns every field of struct moegguf_tier_info for a tier; times in ns.

        Raises OptionError if there is no such tier.
        """
        return self._figures(self._library.moegguf_store_tier, abi.TierInfo(), tier)

    def device(self, index: int) -> dict[str, Any]:
        """Returns every field of struct moegguf_tier_info for the slots of
        devices[index].

        Raises OptionError if there is no such device.
        """
        return self._figures(
            self._library.moegguf_store_tier,
            abi.TierInfo(),
            self._tier_of_device(index),
        )

    def _tier_of_device(self, index: int) -> int:
        """Returns the number of the tier of devices[index]. Raises OptionError if there
        is no such device."""
        if not 0 <= index < len(self.devices):
            raise OptionError(
                f"this store has no such slots: device {index} of {len(self.devices)}, which are numbered from 0; give"
                " the number of one of them."
            )
        return abi.DEVICE_TIER + index

    def drives(self) -> list[dict[str, Any]]:
        """Returns every field of struct moegguf_drive_info, for the model's own files
        and for each mirror.

        The list is empty in a simulation.
        """
        call = self._library.moegguf_store_drive
        return [
            self._figures(call, abi.DriveInfo(), index)
            for index in range(self._n_copies)
        ]

    def staging(self) -> dict[str, Any]:
        """Returns the fields of struct moegguf_tier_info for the staging tensors of all
        devices; {} without any.

        Each look-up is for one expert that a staged pass uses in a layer. It is a hit
        if the expert was already in the tensor or on its way. bytes_prefetched were
        copied ahead, and bytes_missed were copied while a layer waited. copy_ns is the
        time of all copies, and stall_ns is the time that layers waited.
        """
        figures = self._figures(
            self._library.moegguf_store_tier, abi.TierInfo(), abi.STAGING_TIER
        )
        return figures if figures["n_slots"] else {}

    def residency(self, tier: Tier = Tier.COMPUTE) -> npt.NDArray[np.uint8]:
        """Returns the state of each expert in a tier, as an array (n_layer, n_expert):
        0 absent, 1 incomplete, 2 complete.

        Raises OptionError if there is no such tier.
        """
        there = np.zeros(self.shape, np.uint8)
        self._library.moegguf_store_residency(
            self.handle, tier, there.ctypes.data, there.size
        )
        return there

    def activity(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Returns how often each expert was looked up, and how often it got a slot,
        since the store was opened.

        Both arrays are (n_layer, n_expert), and cover the compute tiers. In a pool that
        holds every expert, look-ups are counted only while `watch` is on or there is a
        listener.
        """
        uses, loads = np.zeros(self.shape, np.uint32), np.zeros(self.shape, np.uint32)
        self._library.moegguf_store_activity(
            self.handle, uses.ctypes.data, loads.ctypes.data, uses.size
        )
        return uses, loads

    def watch(self, on: bool) -> None:
        """Switches the complete counting of `activity` on or off.

        While counting is complete, the store also handles routing events of layers
        whose experts are all in slots. This makes passes slower.
        """
        self._library.moegguf_store_watch(self.handle, on)

    def set_scores(self, scores: npt.ArrayLike | None) -> None:
        """Sets scores (n_layer, n_expert) for evictions: the expert with the lowest
        score is evicted first.

        Among equal scores, the least recently used expert is evicted first. None: the
        policy from `set_policy` decides again.
        """
        if scores is None:
            self._library.moegguf_store_set_scores(self.handle, None, 0)
            return
        table = np.ascontiguousarray(scores, np.float32)
        self._library.moegguf_store_set_scores(
            self.handle, table.ctypes.data, table.size
        )

    def set_forecast(
        self, probabilities: npt.ArrayLike | None, known: Sequence[int] = ()
    ) -> None:
        """Replaces the forecast that policies read.

        probabilities: (n_layer, n_expert) probability that an expert will be used the
        next time its layer is computed; None: nothing is known.

        known: the layers with a forecast.
        """
        if probabilities is None:
            self._library.moegguf_store_set_forecast(self.handle, None, None, 0)
            return
        table = np.ascontiguousarray(probabilities, np.float32)
        if table.shape != self.shape:
            raise OptionError(
                f"a forecast must have the shape {self.shape}, but has {table.shape}."
            )
        mask = np.zeros(len(table), np.uint8)
        mask[list(known)] = 1
        self._library.moegguf_store_set_forecast(
            self.handle, table.ctypes.data, mask.ctypes.data, table.size
        )

    def set_policy(self, name: str = "lru", tier: Tier = Tier.COMPUTE) -> None:
        """Sets the eviction policy of a tier, by a name from `native_policies`. The
        policy starts without a history.

        While scores are set (`set_scores`), they decide in the compute tier. Raises
        OptionError for an unknown name; the earlier policy then stays in effect.
        """
        self._library.moegguf_store_set_policy(self.handle, tier, name.encode())

    def set_predictor(
        self,
        predictor: NativePredictor | None,
        forecast: NativeForecast = NativeForecast(),
    ) -> None:
        """Sets the predictor of the experts that passes will use; None: nothing is
        predicted.

        The predictor runs on the store's own thread, in passes in which each sequence
        decodes one token. The store passes the forecasts to policies, and prefetches
        experts. Raises OptionError for an unknown name, a missing array, an array of
        the wrong size, or a limit out of range; the earlier predictor then stays in
        effect.
        """
        chosen = (
            None
            if predictor is None
            else c.byref(predictor_struct(predictor, forecast))
        )
        self._library.moegguf_store_set_predictor(self.handle, chosen)
        self._predictor = predictor

    def act_on_forecasts(self, on: bool) -> None:
        """Switches prefetching for forecasts of the store's own predictor on or off.
        Prefetching is initially on."""
        self._library.moegguf_store_prefetch(self.handle, on)

    def forecast(self) -> tuple[Float32s, Bools]:
        """Returns the forecast of the store's predictor: (probabilities (n_layer,
        n_expert), known (n_layer,)).

        known is True for layers with a forecast. The forecast of a layer is dropped
        when the layer's router has chosen.
        """
        probabilities, known = (
            np.zeros(self.shape, np.float32),
            np.zeros(self.layout.n_layer, np.uint8),
        )
        self._library.moegguf_store_forecast(
            self.handle,
            probabilities.ctypes.data,
            known.ctypes.data,
            probabilities.size,
        )
        return probabilities, known.astype(bool)

    def prefetch(self, il: Integers, experts: Integers) -> None:
        """Queues prefetches of experts (il[i], experts[i]), in this order, after
        earlier requests.

        A request is dropped and counted if the expert is unknown or already has a slot
        in the compute tier, or if 4096 requests are already waiting.
        """
        self._library.moegguf_store_want(self.handle, *_arrays(il, experts), False)

    def warm(self, il: Integers, experts: Integers) -> None:
        """Fills free slots in the background with experts (il[i], experts[i]), in this
        order.

        Each expert gets a free slot of the compute tier, or else a free slot in RAM. If
        there is neither, the expert is skipped. Demands and prefetches come first, and
        nothing is evicted. A later call replaces the experts of an earlier one that
        have no slot yet.
        """
        self._library.moegguf_store_want(self.handle, *_arrays(il, experts), True)

    def pause_fill(self, on: bool) -> None:
        """Pauses or resumes the filling of free slots in the background.

        Callers pause it while the processor and the disk have other work.
        """
        self._library.moegguf_store_pause_fill(self.handle, on)

    def listen(
        self,
        on_routing: Callable[[RoutingEvent], None] | None = None,
        on_tokens: Callable[[Announcement], None] | None = None,
        options: ListenOptions | None = None,
    ) -> None:
        """Calls on_routing for each routing event, and on_tokens for each announcement,
        on the store's event thread.

        Without arguments, stops the calls, and returns after the last one. The
        functions may keep an event's arrays. If they are too slow, events are dropped
        unless `options.everything` is True. An exception in a function stops the calls.
        The next `raise_callback_error` then raises CallbackError.
        """
        self._library.moegguf_store_listen(self.handle, None)
        self._listener = None
        if on_routing is None and on_tokens is None:
            return
        options = options or ListenOptions()
        self._listener = abi.Listener(
            _bits(options, "listen_flag"), options.max_input_tokens
        )
        types = dict(self._listener._fields_)
        for name, convert, callback in (
            ("on_tokens", _announcement, on_tokens),
            ("on_routing", _routing, on_routing),
        ):
            if callback is not None:
                setattr(
                    self._listener, name, types[name](self._guarded(convert, callback))
                )
        self._library.moegguf_store_listen(self.handle, c.byref(self._listener))

    def _guarded(
        self, convert: Callable[[Any], Any], callback: Callable[[Any], None]
    ) -> Callable[[int, Any], None]:
        def call(_user: int, event: Any) -> None:
            if self._callback_error is not None:
                return
            self._callback_thread = threading.get_ident()
            try:
                callback(convert(event.contents))
            except BaseException as error:
                # An exception must not reach the C++ code that calls this.
                self._callback_error = error
            finally:
                self._callback_thread = 0

        return call

    @property
    def calls_back(self) -> bool:
        """True if the calling thread is in a callback of `listen`."""
        return self._callback_thread == threading.get_ident()

    def raise_callback_error(self) -> None:
        """Raises CallbackError and stops listening if a callback has failed since the
        last call."""
        error = self._callback_error
        if error is not None:
            self.listen()
            self._callback_error = None
            raise CallbackError(
                f"a callback raised {type(error).__name__}: {error}; listening stopped, so correct the callback and"
                " listen again."
            ) from error

    def cancel(self, on: bool = True) -> None:
        """Cancels the running pass and all later passes, until `cancel(False)` is
        called."""
        self._library.moegguf_store_cancel(self.handle, on)

    def resize(
        self, n_slots: int, tier: Tier = Tier.COMPUTE, device: int | None = None
    ) -> None:
        """Sets the number of slots that a tier uses, up to the number with which it was
        opened.

        No pass may be under way. Pageable host memory of the unused slots goes back to
        the system. In other memory, a new pool is allocated. If there is too little
        memory for both the old pool and a smaller new one, all slots are emptied first,
        and the tier may get fewer slots.

        device: index of the device whose slots change; None: the tier's only device.

        Raises AllocationError if the device refuses a larger pool (the slots are then
        unchanged), or refuses every pool after the slots were emptied (no slot is then
        left). Raises OptionError for a number of slots that the tier cannot have, and
        without `device` if COMPUTE has several devices. Raises ExpertIOError if reads
        do not end within a minute.
        """
        index = tier if device is None else self._tier_of_device(device)
        self._library.moegguf_store_resize(self.handle, index, n_slots)

    def drain(self, timeout_s: float = 600.0) -> None:
        """Waits until no transfer is queued or under way, and the background fill has
        ended; then runs `check`.

        Raises GenerationCancelled if this takes longer than timeout_s seconds.
        """
        self._library.moegguf_store_drain(self.handle, timeout_s)

    def check(self) -> None:
        """Verifies the bookkeeping of every slot. Raises MoeggufError with the rule
        that is broken, and the values."""
        self._library.moegguf_store_check(self.handle)

    def advance(self, ns: int) -> None:
        """Advances the modelled clock of a simulation, as if layers had run for this
        long."""
        self._library.moegguf_store_sim_advance(self.handle, ns)

    def close(self) -> None:
        """Stops the store's threads and frees its pools. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.moegguf_store_close(handle)


class StoreContext:
    """The store's calls for the llama_context that uses it: announced tokens, routing
    events, pass failures."""

    def __init__(self, store: Store) -> None:
        self._library = library.load()
        self._store = store

    @property
    def handle(self) -> int:
        """The address of the moegguf_store. Raises ClosedError."""
        return self._store.handle

    def eval_callback(self) -> int:
        """Returns the address of the callback for llama_context_params.cb_eval; its
        user data is `handle`."""
        return c.cast(self._library.moegguf_eval, c.c_void_p).value or 0

    def abort_callback(self) -> int:
        """Returns the address of the callback for llama_context_params.abort_callback;
        its user data is `handle`."""
        return c.cast(self._library.moegguf_abort, c.c_void_p).value or 0

    def acquire(
        self, il: int, expert_ids: npt.ArrayLike, inputs: Float32s | None = None
    ) -> Int32s:
        """Acquires experts (n_tokens, n_expert_used) of layer il, and returns the slot
        id of each one.

        While a model runs, the hook (hook.cpp) does this. Simulations and tests call
        this function. inputs (n_tokens, n_embd): the router's input vectors, for
        predictors.
        """
        ids = np.atleast_2d(np.ascontiguousarray(expert_ids, np.int32))
        slots = np.empty_like(ids)
        n_tokens, n_used = ids.shape
        vectors = (
            None
            if inputs is None
            else np.ascontiguousarray(inputs, np.float32).reshape(n_tokens, -1)
        )
        entered = (
            (None, 0) if vectors is None else (vectors.ctypes.data, vectors.shape[1])
        )
        event = il, ids.ctypes.data, n_used, n_tokens, *entered, slots.ctypes.data
        self._library.moegguf_context_acquire(self.handle, *event)
        return slots

    def replay(
        self,
        il: Int32s,
        n_tokens: Int32s,
        n_expert_used: Int32s,
        expert_ids: Int32s,
        compute_ns: UInt64s | None = None,
    ) -> None:
        """Acquires the experts of many routing events one after another (`acquire`).

        il, n_tokens and n_expert_used are (n_events,). expert_ids contains the ids of
        all events, one event after another. compute_ns (n_events,) is the modelled time
        that passes after each event. The call stops at the first event that fails, and
        raises this event's error.
        """
        columns = [
            np.ascontiguousarray(column, np.int32)
            for column in (il, n_tokens, n_expert_used, expert_ids)
        ]
        if compute_ns is not None:
            columns.append(np.ascontiguousarray(compute_ns, np.uint64))  # type: ignore[arg-type]
        n_events = columns[0].size
        if any(column.size != n_events for column in (*columns[:3], *columns[4:])):
            raise OptionError(
                "il, n_tokens, n_expert_used and compute_ns (if given) must have one element for each event, but have"
                f" {[column.size for column in (*columns[:3], *columns[4:])]} elements; make them equally long."
            )
        routing, n_done = abi.Routing(n_events, columns[3].size), c.c_int64()
        for (name, type_), column in zip(routing._fields_[2:], columns, strict=False):
            setattr(routing, name, column.ctypes.data_as(type_))
        self._library.moegguf_context_replay(
            self.handle, c.byref(routing), c.byref(n_done)
        )

    def awaits_tokens(self, sequence: int, phase: Phase) -> bool:
        """Discards the announced tokens, and notes the sequence and phase of the next
        tokens.

        Returns True if the next tokens have to be announced (`announce`). Returns False
        if every expert is complete in its own slot and there is no listener.
        """
        return bool(
            self._library.moegguf_context_awaits_tokens(self.handle, sequence, phase)
        )

    def announce(
        self,
        sequence: int | Integers,
        phase: int | Integers,
        tokens: Integers,
        outputs: Integers | None = None,
    ) -> None:
        """Announces to the listener and the predictor the tokens that will be evaluated
        next.

        sequence, phase: one value for all tokens, or a value for each token
        (n_tokens,). outputs (n_tokens,): 1 for tokens whose logits are needed; None:
        logits of all tokens are needed. The call is fast enough to be made before every
        pass. Raises OptionError if the lengths differ.
        """
        n = len(tokens)
        given = sequence, phase, 1 if outputs is None else outputs
        columns: list[Any] = [
            values if hasattr(values, "__len__") else [values] * n for values in given
        ]
        if any(len(column) != n for column in columns):
            raise OptionError(
                f"{n} tokens must have {n} sequences, phases and outputs, but have {[*map(len, columns)]}."
            )
        sequences, phases, _ = columns
        several = n > 0 and any(
            min(column) < max(column) for column in (sequences, phases)
        )
        arrays = [(c.c_int32 * n)(*column) for column in columns] if several else []
        first, of_all = (sequences[0], max(phases)) if n else given[:2]
        event = abi.TokensEvent(first, of_all, n, (c.c_int32 * n)(*tokens), *arrays)
        self._library.moegguf_context_announce(self.handle, c.byref(event))

    def take_failure(self) -> Any:
        """Returns the failure of the last pass (struct moegguf_failure), and forgets
        it; None: there is no failure.

        Only the thread that runs passes may call this.
        """
        if self._library.moegguf_context_is_clear(self.handle):
            return None
        failure = abi.Failure()
        self._library.moegguf_context_failure(self.handle, c.byref(failure), 1)
        return failure if failure.status != abi.OK else None
