"""The expert store as a Python object, one method per call of the C ABI, and what its calls take and give.

That is its options, its listener's events as numpy, and the policies that it carries out itself.
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
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent
from moegguf.native.predictor import NativeForecast, NativePredictor, predictor_struct
from moegguf.native.slot_sizes import matrices_of
from moegguf.quantities import Link


class Tier(enum.IntEnum):
    """The place of slots: the memory of all devices that layers compute with, or RAM below it."""

    COMPUTE = abi.COMPUTE_TIER
    RAM = abi.RAM_TIER


STAGING_TENSORS = 2  # one is filled while the other is computed with; more gain nothing
STAGING_SHARE = 0.25  # largest share of the device's memory for experts for several tensors: they cost answers slots


@dataclass(frozen=True)
class DeviceSlots:
    """A device that computes layers, and the slots there for their experts."""

    name: str | None  # ggml's name; None: the CPU
    n_slots: int
    layers: Collection[int]  # il of its layers; layers without experts do not count
    through_ram: bool = False  # misses come through slots in RAM, if the store has some
    staging: int = 0  # tensors of a layer's full shape in which prompts are staged
    pass_slots: int = 0  # slots that a pass may need at once if it is not staged; 0: the slots of a token
    link: Link | None = None  # simulated link from RAM to the device; None: the store's options have it


UInt64s = npt.NDArray[np.uint64]
Integers = Sequence[int] | Int32s
EVERY_PASS = 2**31 - 1
_COUNTED_BY_TIER = (
    "lookups", "hits_ready", "hits_late", "misses", "evictions", "prefetch_wasted", "slots_used", "slots_pinned",
)  # fmt: skip


def _bits(options: StoreOptions | ListenOptions, enum: str) -> int:
    """Returns the bits of an enum of flags whose names are fields that are True."""
    return sum(bit for name, bit in abi.enum(enum).items() if getattr(options, name))


@dataclass(frozen=True)
class StoreOptions:
    """The ways in which the store moves experts. The defaults were measured; tests and ablations turn parts off."""

    readers: int = 4  # threads that read each copy of the file
    repack: bool = True  # slots have the layout of the CPU's fastest kernels
    direct: bool = True  # O_DIRECT
    chunked: bool = True  # prefetches go matrix by matrix
    preempt: bool = True  # a routing event drops stale prefetches of its layer
    demand_first: bool = True  # demands are read before all prefetches, else after earlier requests
    overlap: bool = True  # a layer's computing begins before all of its matrices are there
    # A pass that chooses nearly all experts of a layer fetches experts of the next layer meanwhile, as many as fit. In
    # such passes, and where a pass's experts do not fit, experts of the layer that comes last are evicted first,
    # unless the policy's scores decide.
    sweep: bool = True
    # The experts of a prompt's layer pass through a few slots, each read once, also if each could have its own slot.
    stream: bool = False
    fill: bool = True  # reads all experts in the background if every expert has a slot
    staging: int | None = None  # staging tensors of a device, up to STAGING_TENSORS; None: the planned number
    simulate: bool = False
    device: str | None = None  # ggml device of the slots, None for the CPU
    link_bytes_per_s: float = 0.0  # simulation only; 0: transfers are free
    link_latency_s: float = 0.0
    copy_bytes_per_s: float = 0.0  # simulated link from RAM to the device; 0: copies are free
    copy_latency_s: float = 0.0

    @property
    def can_stream(self) -> bool:
        """True if experts may be streamed, if kernels can do it (`SlotSizes.streams`)."""
        return self.overlap and self.device is None


@dataclass(frozen=True)
class ListenOptions:
    """The data that a listener gets beside expert ids, and the cost that it may have."""

    weights: bool = False  # the router's weights
    inputs: bool = False  # the router's input vectors, for passes of at most `max_input_tokens`
    everything: bool = False  # compute threads wait for a slow listener instead of dropping events
    lockstep: bool = False  # each event waits until earlier ones were delivered: slow, and reproducible
    lazy: bool = False  # many events at a time, up to 0.1 s late, which disturbs the model less
    max_input_tokens: int = 1


def _copied(values: Any, *shape: int, dtype: type = np.int32) -> Any:
    """A copy of that many values of 4 bytes; None for a null pointer."""
    return np.frombuffer(c.string_at(values, 4 * math.prod(shape)), dtype).reshape(shape) if values else None


def _announcement(event: Any) -> Announcement:
    of_tokens = (_copied(values, event.n_tokens) for values in (event.sequences, event.phases, event.outputs))
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
    """(layers, experts, n) of as many pairs as there are."""
    n = min(len(il), len(experts))
    return (c.c_int32 * n)(*il[:n]), (c.c_int32 * n)(*experts[:n]), n


class NativePolicy(NamedTuple):
    """An eviction policy that the store carries out, by its name there.

    takes_forecast: it makes use of `Store.set_forecast`.
    """

    name: str
    takes_forecast: bool = False


@functools.cache
def native_policies() -> Mapping[str, NativePolicy]:
    """The eviction policies that can be chosen by name."""
    found: dict[str, NativePolicy] = {}
    takes_forecast = c.c_int32()
    while name := library.load().moegguf_policy_name(len(found), c.byref(takes_forecast)):
        found[name.decode()] = NativePolicy(name.decode(), bool(takes_forecast.value))
    return found


class Store:
    """A cache of n_slots experts of `layout` in the memory of the device that computes, and n_ram_slots below it in
    RAM.

    With n_ram_slots = 0 there is one tier. With two tiers a miss on the device is copied from RAM; an expert that RAM
    does not have is read from the file into RAM first. `tiers` lists the tiers that exist. `context` has the calls for
    the llama_context that uses the store.

    n_slots: a number, or the slots of several devices. Then every layer with experts is on one of the devices, and
    `options.device` has no effect. Their misses come through shared slots in RAM.

    mirrors: copies of the layout's shards on other drives, from which experts are read, too.

    Raises AllocationError when the device has no free memory, and ExpertIOError when a shard cannot be opened. Raises
    OptionError for an option out of range, and for a mirror that differs from the shards. Close the store after the
    model and the llama_context that use it. Every method raises ClosedError after close(), and ForkError in a child
    process.
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
        self._listener: Any = None  # struct moegguf_listener: what C calls must not be collected
        self._callback_error: BaseException | None = None
        self._callback_thread = 0  # the thread on which a callback runs now
        self._predictor: NativePredictor | None = None  # kept because its arrays are in use
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
            n_devices=len(self.devices),
            n_readers=options.readers,
            n_ram_slots=n_ram_slots,
            matrices=matrices,
            shard_paths=(c.c_char_p * len(paths))(*paths),
            n_expert_used=(c.c_int32 * layout.n_layer)(*(used.get(il, 0) for il in range(layout.n_layer))),
            devices=(abi.Device * len(self.devices))(*map(self._device, self.devices)),
            device_of_layer=(c.c_int32 * layout.n_layer)(*map(self.device_of, range(layout.n_layer))),
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
            DeviceSlots(self.options.device, n_slots, range(self.layout.n_layer), through_ram=True, staging=staging),
        )

    def _device(self, device: DeviceSlots) -> Any:
        link = device.link or Link(self.options.copy_bytes_per_s, self.options.copy_latency_s)
        name = device.name.encode() if device.name else None
        per_ns, latency_ns = link.bytes_per_s / 1e9, link.latency_s * 1e9
        return abi.Device(
            name, device.n_slots, device.through_ram, device.staging, device.pass_slots, per_ns, latency_ns
        )

    def device_of(self, il: int) -> int:
        """Returns the index of the device that computes a layer; -1: none."""
        return next((index for index, device in enumerate(self.devices) if il in device.layers), -1)

    @property
    def handle(self) -> int:
        """The address of the moegguf_store. Raises ClosedError."""
        if self._handle is None:
            raise ClosedError("the expert store is closed; load the model again.")
        return self._handle

    @property
    def shape(self) -> tuple[int, int]:
        """(n_layer, most experts of a layer): the shape of scores and of the residency map."""
        return self.layout.n_layer, self.layout.n_expert

    @property
    def buffer_type(self) -> int:
        """Address of the reserved buffer type, for llama.cpp's tensor_buft_overrides."""
        return int(self._library.moegguf_store_buft(self.handle))

    def _figures(self, call: Any, struct: Any, *arguments: int) -> dict[str, Any]:
        """The fields of the struct that a call fills, texts decoded."""
        call(self.handle, *arguments, c.byref(struct))
        fields = {name: getattr(struct, name) for name, *_ in struct._fields_}
        return {k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in fields.items()}

    def counters(self) -> dict[str, int]:
        """Every figure of struct moegguf_counters, and some of the tier that layers compute on; times in ns."""
        tier = self.tier()
        of_tier = {name: tier[name] for name in _COUNTED_BY_TIER}
        return self._figures(self._library.moegguf_store_counters, abi.Counters()) | of_tier

    def info(self) -> dict[str, Any]:
        """Every figure of struct moegguf_tier_info, of the tier that layers compute on."""
        return self.tier()

    def tier(self, tier: Tier = Tier.COMPUTE) -> dict[str, Any]:
        """Every figure of struct moegguf_tier_info; times in ns. Raises OptionError where there is no such tier."""
        return self._figures(self._library.moegguf_store_tier, abi.TierInfo(), tier)

    def device(self, index: int) -> dict[str, Any]:
        """Returns the figures of the slots of one of `devices`. Raises OptionError if there is no such device."""
        return self._figures(self._library.moegguf_store_tier, abi.TierInfo(), abi.DEVICE_TIER + index)

    def drives(self) -> list[dict[str, Any]]:
        """Returns every figure of struct moegguf_drive_info, of the model's own files and of each mirror; nothing in a
        simulation."""
        call = self._library.moegguf_store_drive
        return [self._figures(call, abi.DriveInfo(), index) for index in range(self._n_copies)]

    def staging(self) -> dict[str, Any]:
        """Returns the figures of the tensors of all devices in which prompts are staged; empty without any.

        Look-ups count experts of prompts: a hit had been copied ahead, or its copy had begun. bytes_prefetched were
        copied ahead, bytes_missed while a layer waited. copy_ns is the time of both, stall_ns the part that layers
        waited.
        """
        figures = self._figures(self._library.moegguf_store_tier, abi.TierInfo(), abi.STAGING_TIER)
        return figures if figures["n_slots"] else {}

    def residency(self, tier: Tier = Tier.COMPUTE) -> npt.NDArray[np.uint8]:
        """(n_layer, n_expert): 0 absent, 1 on its way, 2 there. Raises OptionError where there is no such tier."""
        there = np.zeros(self.shape, np.uint8)
        self._library.moegguf_store_residency(self.handle, tier, there.ctypes.data, there.size)
        return there

    def activity(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """(look-ups, slots given) of each expert since open, both (n_layer, n_expert).

        Look-ups of single tokens in a fully resident pool count only while watched: see `watch`.
        """
        uses, loads = np.zeros(self.shape, np.uint32), np.zeros(self.shape, np.uint32)
        self._library.moegguf_store_activity(self.handle, uses.ctypes.data, loads.ctypes.data, uses.size)
        return uses, loads

    def watch(self, on: bool) -> None:
        """While on, layers of a fully resident pool are not skipped: `activity` is complete, and they cost more."""
        self._library.moegguf_store_watch(self.handle, on)

    def set_scores(self, scores: npt.ArrayLike | None) -> None:
        """Scores (n_layer, n_expert): the lowest goes first, least recently used among equals.

        None: the policy set with `set_policy` decides.
        """
        if scores is None:
            self._library.moegguf_store_set_scores(self.handle, None, 0)
            return
        table = np.ascontiguousarray(scores, np.float32)
        self._library.moegguf_store_set_scores(self.handle, table.ctypes.data, table.size)

    def set_forecast(self, probabilities: npt.ArrayLike | None, known: Sequence[int] = ()) -> None:
        """Replaces the forecast that policies read.

        probabilities: (n_layer, n_expert) probability that an expert is used when its layer comes next; None: nothing
        is known.

        known: the layers with a forecast.
        """
        if probabilities is None:
            self._library.moegguf_store_set_forecast(self.handle, None, None, 0)
            return
        table = np.ascontiguousarray(probabilities, np.float32)
        if table.shape != self.shape:
            raise OptionError(f"a forecast has the shape {self.shape}, not {table.shape}.")
        mask = np.zeros(len(table), np.uint8)
        mask[list(known)] = 1
        self._library.moegguf_store_set_forecast(self.handle, table.ctypes.data, mask.ctypes.data, table.size)

    def set_policy(self, name: str = "lru", tier: Tier = Tier.COMPUTE, values: Sequence[float] = ()) -> None:
        """A tier evicts by the policy of this name from now on; see `native_policies`. It starts anew.

        values: numbers in place of its own, for tests; its file in `moegguf/native/policies` says which. A score table
        in force, on the tier that layers compute on, comes before. Raises OptionError for an unknown name, or a value
        out of range; the policy before then stays.
        """
        numbers = np.array(values, np.float32)
        self._library.moegguf_store_set_policy(self.handle, tier, name.encode(), numbers.ctypes.data, numbers.size)

    def set_predictor(self, predictor: NativePredictor | None, forecast: NativeForecast = NativeForecast()) -> None:
        """Predicts what comes in passes of one token, on a thread of the store's own, and acts on it; None: no longer.

        Raises OptionError for an unknown name, a missing array or one of a wrong size, and a limit out of range; the
        predictor before then stays.
        """
        chosen = None if predictor is None else c.byref(predictor_struct(predictor, forecast))
        self._library.moegguf_store_set_predictor(self.handle, chosen)
        self._predictor = predictor

    def act_on_forecasts(self, on: bool) -> None:
        """Switches prefetching for the store's own forecasts on or off. It is on until switched off."""
        self._library.moegguf_store_prefetch(self.handle, on)

    def forecast(self) -> tuple[Float32s, npt.NDArray[np.bool_]]:
        """(probabilities (n_layer, n_expert) as the store's predictor gave them, layers (n_layer,) they are about).

        A layer's part ends when it is routed.
        """
        probabilities, known = np.zeros(self.shape, np.float32), np.zeros(self.layout.n_layer, np.uint8)
        self._library.moegguf_store_forecast(
            self.handle, probabilities.ctypes.data, known.ctypes.data, probabilities.size
        )
        return probabilities, known.astype(bool)

    def prefetch(self, il: Integers, experts: Integers) -> None:
        """Asks for experts (il[i], experts[i]) early, in order, behind those asked for before. Unknown or resident ones
        are dropped, and counted."""
        self._library.moegguf_store_want(self.handle, *_arrays(il, experts), False)

    def warm(self, il: Integers, experts: Integers) -> None:
        """Fills free slots in the background with experts (il[i], experts[i]), in this order: first slots of the tier
        that computes, then slots in RAM below it.

        Waits for all demands, and evicts nothing. Replaces the experts given before.
        """
        self._library.moegguf_store_want(self.handle, *_arrays(il, experts), True)

    def pause_fill(self, on: bool) -> None:
        """Until called with False, free slots are not filled with what nothing waits for: the processor and the disk
        have other work."""
        self._library.moegguf_store_pause_fill(self.handle, on)

    def listen(
        self,
        on_routing: Callable[[RoutingEvent], None] | None = None,
        on_tokens: Callable[[Announcement], None] | None = None,
        options: ListenOptions | None = None,
    ) -> None:
        """Calls back on the store's event thread, never on a compute thread. Without callbacks: stops, after the last.

        The arrays are the callee's to keep. An exception in a callback ends its calls and is raised from the next
        `raise_callback_error`.
        """
        self._library.moegguf_store_listen(self.handle, None)
        self._listener = None
        if on_routing is None and on_tokens is None:
            return
        options = options or ListenOptions()
        self._listener = abi.Listener(_bits(options, "listen_flag"), options.max_input_tokens)
        types = dict(self._listener._fields_)
        for name, convert, callback in (("on_tokens", _announcement, on_tokens), ("on_routing", _routing, on_routing)):
            if callback is not None:
                setattr(self._listener, name, types[name](self._guarded(convert, callback)))
        self._library.moegguf_store_listen(self.handle, c.byref(self._listener))

    def _guarded(self, convert: Callable[[Any], Any], callback: Callable[[Any], None]) -> Callable[[int, Any], None]:
        def call(_user: int, event: Any) -> None:
            if self._callback_error is not None:
                return
            self._callback_thread = threading.get_ident()
            try:
                callback(convert(event.contents))
            except BaseException as error:  # an exception must not enter the C++ below
                self._callback_error = error
            finally:
                self._callback_thread = 0

        return call

    @property
    def calls_back(self) -> bool:
        """True if the calling thread is in a callback of `listen`."""
        return self._callback_thread == threading.get_ident()

    def raise_callback_error(self) -> None:
        """Raises CallbackError when a callback has failed, once."""
        error = self._callback_error
        if error is not None:
            self.listen()
            self._callback_error = None
            raise CallbackError(f"a callback raised {type(error).__name__}: {error}; listening stopped.") from error

    def cancel(self, on: bool = True) -> None:
        """Ends passes in flight and to come as cancelled, until called with False."""
        self._library.moegguf_store_cancel(self.handle, on)

    def resize(self, n_slots: int, tier: Tier = Tier.COMPUTE, device: int | None = None) -> None:
        """Uses n_slots slots of a tier, up to the number that it was opened with, while no pass is under way.

        The memory of the other slots goes back to the system if it is pageable host memory. Elsewhere the pool is
        allocated anew; slots are emptied first if there is too little memory for both.

        device: index of the one device that is resized. Without it, several devices share the slots in proportion to
        the numbers that they were opened with. Slots of the CPU beside devices stay as they are.

        Raises AllocationError when the device refuses more; the slots are then as before. Raises OptionError for a
        number that is not possible.
        """
        index = tier if device is None else abi.DEVICE_TIER + device
        self._library.moegguf_store_resize(self.handle, index, n_slots)

    def drain(self, timeout_s: float = 600.0) -> None:
        """Waits until nothing is queued or being read, and checks (`check`)."""
        self._library.moegguf_store_drain(self.handle, timeout_s)

    def check(self) -> None:
        """Verifies the bookkeeping of every slot. Raises MoeggufError with the rule that is broken, and the values."""
        self._library.moegguf_store_check(self.handle)

    def advance(self, ns: int) -> None:
        """Simulation: compute time passes on the modelled clock."""
        self._library.moegguf_store_sim_advance(self.handle, ns)

    def close(self) -> None:
        """Joins the threads and frees the pool. Twice is harmless."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.moegguf_store_close(handle)


class StoreContext:
    """A store as the llama_context that computes with it sees it: tokens, routing events, and why a pass failed."""

    def __init__(self, store: Store) -> None:
        self._library = library.load()
        self._store = store

    @property
    def handle(self) -> int:
        """The address of the moegguf_store. Raises ClosedError."""
        return self._store.handle

    def eval_callback(self) -> int:
        """Address of the callback for llama_context_params.cb_eval; its user data is `handle`."""
        return c.cast(self._library.moegguf_eval, c.c_void_p).value or 0

    def abort_callback(self) -> int:
        """Address of the callback for llama_context_params.abort_callback; its user data is `handle`."""
        return c.cast(self._library.moegguf_abort, c.c_void_p).value or 0

    def acquire(self, il: int, expert_ids: npt.ArrayLike, inputs: Float32s | None = None) -> Int32s:
        """Slot ids for expert_ids (n_tokens, n_expert_used) of layer il: as the hook does, for simulation and tests.

        inputs (n_tokens, n_embd): what entered the router, for predictors.
        """
        ids = np.atleast_2d(np.ascontiguousarray(expert_ids, np.int32))
        slots = np.empty_like(ids)
        n_tokens, n_used = ids.shape
        vectors = None if inputs is None else np.ascontiguousarray(inputs, np.float32).reshape(n_tokens, -1)
        entered = (None, 0) if vectors is None else (vectors.ctypes.data, vectors.shape[1])
        event = il, ids.ctypes.data, n_used, n_tokens, *entered, slots.ctypes.data
        self._library.moegguf_context_acquire(self.handle, *event)
        return slots

    def replay(
        self, il: Int32s, n_tokens: Int32s, n_expert_used: Int32s, expert_ids: Int32s, compute_ns: UInt64s | None = None
    ) -> None:
        """Acquires the experts of many routing events one after another (`acquire`).

        il, n_tokens and n_expert_used are (n_events,). expert_ids has the ids of all events, one after another.
        compute_ns (n_events,) is the modelled time that passes after each event. The call ends at the first event that
        fails, with its error.
        """
        columns = [np.ascontiguousarray(column, np.int32) for column in (il, n_tokens, n_expert_used, expert_ids)]
        if compute_ns is not None:
            columns.append(np.ascontiguousarray(compute_ns, np.uint64))  # type: ignore[arg-type]
        n_events = columns[0].size
        if any(column.size != n_events for column in (*columns[:3], *columns[4:])):
            raise OptionError("a replay has one layer, number of tokens, experts per token and time for each event.")
        routing, n_done = abi.Routing(n_events, columns[3].size), c.c_int64()
        for (name, type_), column in zip(routing._fields_[2:], columns, strict=False):
            setattr(routing, name, column.ctypes.data_as(type_))
        self._library.moegguf_context_replay(self.handle, c.byref(routing), c.byref(n_done))

    def awaits_tokens(self, sequence: int, phase: Phase) -> bool:
        """Forgets the tokens announced last: others come next, the first of them of this request and phase.

        Returns whether they have to be announced: False while every expert has a slot and nothing listens or predicts.
        """
        return bool(self._library.moegguf_context_awaits_tokens(self.handle, sequence, phase))

    def announce(
        self, sequence: int | Integers, phase: int | Integers, tokens: Integers, outputs: Integers | None = None
    ) -> None:
        """Gives the listener the tokens evaluated next, and routing events their requests and phases.

        sequence, phase: of all tokens, or of each (n_tokens,). outputs (n_tokens,): whose logits are wanted; None: of
        all. Comes before every pass, so that it costs little. Raises OptionError.
        """
        n = len(tokens)
        given = sequence, phase, 1 if outputs is None else outputs
        columns: list[Any] = [values if hasattr(values, "__len__") else [values] * n for values in given]
        if any(len(column) != n for column in columns):
            raise OptionError(f"{n} tokens have a sequence, a phase and an output each, not {[*map(len, columns)]}.")
        sequences, phases, _ = columns
        several = n > 0 and any(min(column) < max(column) for column in (sequences, phases))
        arrays = [(c.c_int32 * n)(*column) for column in columns] if several else []
        first, of_all = (sequences[0], max(phases)) if n else given[:2]
        event = abi.TokensEvent(first, of_all, n, (c.c_int32 * n)(*tokens), *arrays)
        self._library.moegguf_context_announce(self.handle, c.byref(event))

    def take_failure(self) -> Any:
        """Returns the failure of the last pass once (struct moegguf_failure), or None. For the thread that computes."""
        if self._library.moegguf_context_is_clear(self.handle):
            return None
        failure = abi.Failure()
        self._library.moegguf_context_failure(self.handle, c.byref(failure), 1)
        return failure if failure.status != abi.OK else None
