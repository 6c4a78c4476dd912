"""Replays a trace with the same store and the same controller as a live run, over a
simulated link. The results are hits, bytes, stall and tokens per second.

With the policy, predictor and slots of the recorded run, the counts of lookups, hits,
misses and evictions equal the run's counts, under the conditions in
`moegguf/trace/__init__.py`. The native library is needed, but no model: the layout of
the experts comes from the trace's shape. Layers may run on one or several devices, from
the devices' slots, with slots in RAM below them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from moegguf.controller.controller import (
    ActingOptions,
    Controller,
    build_controller,
    name_of,
)
from moegguf.controller.policies import LRU, AnyPolicy
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout, ExpertMatrix, Kind, MoeLayer
from moegguf.gguf.hparams import Hparams
from moegguf.native.events import Announcement, Phase
from moegguf.native.slot_sizes import slot_tokens
from moegguf.native.store import DeviceSlots, Store, StoreContext, StoreOptions, Tier
from moegguf.trace.trace import Trace

# One byte per value, so that an expert's matrix of any size can be a single row.
GGML_TYPE_I8 = 24
NO_LIMIT = 1 << 30  # a number of tokens that no pass reaches
# Counters of measured time, which cannot be derived from the trace.
REAL_TIME = ("hook_ns", "forecast_ns")
VRAM, RAM, STAGING = "VRAM", "RAM", "staging"  # keys of `SimResult.tiers`
SIMULATED = "CUDA"  # ggml's name for the backend of simulated devices


@dataclass(frozen=True)
class SimOptions:
    """Options of a replay."""

    prefetch: PrefetchOptions | None = None  # None: no prefetching
    # Speed of the link from the file; 0: reads take no time.
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    layer_compute_us: float = 0.0  # compute time of a layer for each token
    layer_pass_us: float = 0.0  # additional compute time of a layer for each pass
    store: StoreOptions = field(default_factory=StoreOptions)
    n_ram_slots: int = 0  # slots in RAM below the slots of devices
    ram_policy: str = LRU.name  # name of the native policy for the slots in RAM

    @property
    def timed(self) -> bool:
        """True if reads from the file take simulated time."""
        return self.link_bytes_per_s > 0

    @property
    def simulated(self) -> StoreOptions:
        """The options of the simulated store."""
        return replace(
            self.store, repack=False, fill=False, simulate=True, link_bytes_per_s=self.link_bytes_per_s,
            link_latency_s=self.link_latency_s,
        )  # fmt: skip


class _Sums:
    """Base class of counters that are added and subtracted field by field."""

    lookups: int
    hits: int

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(operator.sub, vars(self).values(), vars(other).values()))

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0 to 1; 0 if there are no lookups."""
        return self.hits / max(1, self.lookups)


@dataclass(frozen=True)
class Span(_Sums):
    """Counters of a store over some of the passes."""

    tokens: int = 0
    lookups: int = 0
    hits: int = 0
    bytes_missed: int = 0
    bytes_prefetched: int = 0
    stall_ns: int = 0
    clock_ns: int = 0  # simulated time of the passes
    # Bytes of prefetched experts that were complete in their slots when they were
    # looked up.
    bytes_useful: int = 0

    @property
    def moved_per_useful(self) -> float | None:
        """Prefetched bytes divided by `bytes_useful`; None if `bytes_useful` is 0."""
        return self.bytes_prefetched / self.bytes_useful if self.bytes_useful else None


@dataclass(frozen=True)
class TierSpan(_Sums):
    """Counters of one tier over some of the passes. A lookup in RAM below a device is a
    miss of the device."""

    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    bytes_in: int = 0  # bytes that were read or copied into the tier's slots
    copy_ns: int = 0  # time of copies into the tier's slots
    # Time that layers spent waiting for this tier; for RAM, waiting for reads from the
    # file.
    stall_ns: int = 0

    @classmethod
    def of(cls, figures: Mapping[str, int]) -> TierSpan:
        """Returns the counters from the figures of `Store.tier`, which have been
        counted since the store was opened."""
        n_bytes = figures["bytes_missed"] + figures["bytes_prefetched"]
        hits = figures["hits_ready"] + figures["hits_late"]
        counted = (
            figures["lookups"],
            hits,
            figures["evictions"],
            n_bytes,
            figures["copy_ns"],
            figures["stall_ns"],
        )
        return cls(*counted)


@dataclass(frozen=True)
class SimResult:
    """The result of a replay.

    `tiers` holds counters by tier: "VRAM", "RAM" and, if prompts are staged, "staging".
    With several devices, "VRAM" is the sum of the devices, and each device also has an
    entry with its name. `decode_tiers` holds the counters of decode passes only. Both
    dictionaries are empty if there is only one tier.
    """

    policy: str
    predictor: str
    n_slots: int
    share: float
    counters: Mapping[str, int]  # all counters of the store except the measured times
    whole: Span  # all passes
    decode: Span  # decode passes
    # {request: counters of its decode passes, or of its other passes if there are none}
    sequences: Mapping[int, Span] = field(default_factory=dict)
    # Decoded tokens per second of simulated time; None if transfers or decode passes
    # take no time
    t_per_s: float | None = None
    tiers: Mapping[str, TierSpan] = field(default_factory=dict)
    decode_tiers: Mapping[str, TierSpan] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Hits per lookup in all passes, 0 to 1."""
        return self.whole.hit_rate

    @property
    def prefetch_accuracy(self) -> float | None:
        """The share of prefetched experts that were used, whether they arrived in time
        or late; None if there were no prefetches."""
        used = self.counters["prefetch_useful"] + self.counters["prefetch_late"]
        return (
            used / self.counters["prefetch_started"]
            if self.counters["prefetch_started"]
            else None
        )

    @property
    def decode_hit_rate(self) -> float:
        """Hits per lookup in the decode passes, 0 to 1."""
        return self.decode.hit_rate


def layout_of(shape: MoeShape) -> ExpertLayout:
    """Returns a layout with this shape but no files, for a simulated store. Each expert
    has shape.expert_bytes bytes, but at least 3."""
    third = max(1, shape.expert_bytes // 3)
    n = shape.n_layer
    k = shape.n_expert_used
    sizes: dict[Kind, int] = {
        "gate": third,
        "up": third,
        "down": max(1, shape.expert_bytes - 2 * third),
    }

    def matrix(il: int, kind: Kind) -> ExpertMatrix:
        name = f"blk.{il}.ffn_{kind}_exps"
        return ExpertMatrix(
            il,
            kind,
            name,
            GGML_TYPE_I8,
            sizes[kind],
            1,
            shape.n_expert,
            0,
            0,
            sizes[kind],
        )

    layers = tuple(
        MoeLayer(il, shape.n_expert, k, tuple(matrix(il, kind) for kind in sizes))
        for il in shape.layers
    )
    hparams = Hparams(
        arch="trace", n_layer_all=n, n_layer=n, n_ctx_train=0, n_embd=shape.n_embd, n_expert=shape.n_expert,
        n_expert_used=(k,) * n, n_head=(1,) * n, n_head_kv=(1,) * n, n_ff=(0,) * n, n_ff_exp=(0,) * n, key_length=0,
        value_length=0, is_mla=False, key_lengths=(0,), value_lengths=(0,),
    )  # fmt: skip
    return ExpertLayout(
        arch="trace", shards=(), n_layer=n, layers=layers, dense_bytes=0,
        expert_bytes=sum(layer.n_expert * layer.expert_bytes for layer in layers), unused_bytes=0,
        tied_output_bytes=0, n_vocab=shape.n_vocab, hparams=hparams, metadata={}, tensor_types={},
    )  # fmt: skip


def slots_of(shape: MoeShape, share: float) -> int:
    """Returns the number of slots for a share of all experts, but at least
    n_expert_used. Raises OptionError unless the share is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise OptionError(
            f"a share of the experts must be above 0 and at most 1 (100%), but is {share}."
        )
    return max(shape.n_expert_used, round(share * shape.n_moe_layer * shape.n_expert))


def fitted(trace: Trace, n_slots: int) -> Trace:
    """Returns the trace with long passes split, so that no routing event needs more
    than n_slots experts. n_slots must be at least n_expert_used. A store that cannot
    stream experts needs such a trace."""
    return _cut(trace, _most_tokens(trace, n_slots, trace.shape.n_moe_layer, NO_LIMIT))


def _most_tokens(trace: Trace, n_slots: int, n_layers: int, slot_tokens: int) -> int:
    """Returns the maximum number of tokens that a pass may have with n_slots slots for
    n_layers layers.

    slot_tokens: another limit, which applies unless every expert has a slot.
    """
    shape = trace.shape
    longest = int(np.diff(trace.pass_start).max(initial=0))
    if n_slots >= n_layers * shape.n_expert:
        return NO_LIMIT
    k = shape.n_expert_used
    return min(
        slot_tokens,
        NO_LIMIT
        if n_slots >= min(shape.n_expert, longest * k)
        else max(1, n_slots // k),
    )


def _cut(trace: Trace, most: int) -> Trace:
    """Returns the trace with passes split, so that no pass has more than `most`
    tokens."""
    lengths = np.diff(trace.pass_start)
    if lengths.max(initial=0) <= most:
        return trace
    parts = np.maximum(1, -(-lengths // most))
    first = np.concatenate([np.arange(n) * most for n in parts])
    old = np.repeat(np.arange(trace.n_pass), parts)
    announced = trace.pass_first_token[old]
    return replace(
        trace, pass_sequence=trace.pass_sequence[old], pass_phase=trace.pass_phase[old], pass_ns=trace.pass_ns[old],
        pass_first_token=np.where(announced < 0, announced, announced + first).astype(np.int32),
        pass_start=np.append(trace.pass_start[old] + first, trace.n_tokens).astype(np.int64),
    )  # fmt: skip


class Simulation:
    """One replay of a trace. The policy and the predictor must be new objects, because
    they keep state.

    n_slots: the number of slots if every layer runs on the CPU, otherwise the devices
    with their slots. Devices may have staging tensors for passes of more than one
    token. If no device has any, passes are cut to a number of tokens that can be
    computed exactly from slots. Raises OptionError if the slots of a device are fewer
    than one token's experts of a layer.
    """

    def __init__(
        self,
        trace: Trace,
        policy: AnyPolicy,
        predictor: Predictor,
        n_slots: int | Sequence[DeviceSlots],
        options: SimOptions | None = None,
    ) -> None:
        self.options = options or SimOptions()
        on_devices = not isinstance(n_slots, int)
        devices = (
            [DeviceSlots(None, n_slots, trace.shape.layers)]
            if isinstance(n_slots, int)
            else n_slots
        )
        for device in devices:
            if device.n_slots < trace.shape.n_expert_used:
                where = f" on {device.name}" if device.name else ""
                raise OptionError(
                    f"{device.n_slots} slots{where} cannot hold the {trace.shape.n_expert_used} experts that a token"
                    " uses; give more."
                )
        self._is_staged = any(device.staging for device in devices)
        any_pass = self._is_staged if on_devices else self.options.simulated.can_stream
        most = min(
            _most_tokens(trace, d.n_slots, len(d.layers), slot_tokens(d.name))
            for d in devices
        )
        self.trace = trace if any_pass else _cut(trace, most)
        self._timed = self.options.timed or any(device.link for device in devices)
        self.policy = policy
        self.predictor = predictor
        self.slots = n_slots
        self.n_slots = sum(device.n_slots for device in devices)

    def run(self) -> SimResult:
        """Replays all passes. Raises CallbackError if the policy or predictor fails.
        Raises OptionError if the trace cannot be replayed with these slots."""
        n_ram = self.options.n_ram_slots
        store = Store(
            layout_of(self.trace.shape),
            self.slots,
            self.options.simulated,
            n_ram_slots=n_ram,
        )
        try:
            if n_ram:
                store.set_policy(self.options.ram_policy, Tier.RAM)
            return self._replay(store)
        finally:
            store.close()

    def _controller(self, store: Store) -> Controller | None:
        """Returns the controller that a live run would have; None if the policy and
        predictor do not need one. An exception in the policy or predictor aborts the
        simulation."""
        acting = ActingOptions(
            self.options.prefetch, strict=True, clock_ns=lambda: store.counters()["sim_clock_ns"],
        )  # fmt: skip
        return build_controller(
            self.trace.shape, self.policy, self.predictor, store, acting
        )

    def _meter(self, store: Store) -> Meter:
        return Meter(store, self.trace.shape.expert_bytes)

    def _replay(self, store: Store) -> SimResult:
        controller = self._controller(store)
        meter = self._meter(store)
        if (
            controller is None
            and self.trace.token_sequence is None
            and not self._is_staged
        ):
            self._replay_passes(store.context, meter)
        else:
            # Announcements are replayed, too, because with staging the store must know
            # where a prompt ends.
            self._replay_events(store, controller, meter)
        failure = store.context.take_failure()
        if failure is not None:
            raise OptionError(
                f"the trace cannot be replayed in {self.n_slots} slots: {failure.message.decode()}."
            )
        return self._result(meter)

    def _replay_passes(self, context: StoreContext, meter: Meter) -> None:
        """Replays the passes without announcements. Each pass's routing events are
        replayed in one call."""
        trace = self.trace
        layers = np.array(self.trace.shape.layers, np.int32)
        used = np.array(trace.used(), np.int32)
        starts = trace.pass_start
        for p, computed in enumerate(
            np.array(trace.computed(), np.int32).reshape(-1, len(layers))
        ):
            rows = np.flatnonzero(computed)
            phase = Phase(int(trace.pass_phase[p]))
            if rows.size == 0:
                continue
            n_tokens = computed[rows]
            ids = trace.expert_ids[:, starts[p] : starts[p + 1]]
            n_decoded = int(n_tokens[0]) * (phase == Phase.DECODE)
            meter.begin(int(trace.pass_sequence[p]), phase, int(n_tokens[0]), n_decoded)
            layer_ns = self._layer_ns(n_tokens.astype(np.uint64))
            context.replay(
                layers[rows],
                n_tokens,
                used[rows],
                ids[ids >= 0].astype(np.int32),
                layer_ns,
            )

    def _layer_ns(self, n_tokens: Any) -> Any:
        """Returns the nanoseconds that a layer takes for `n_tokens` tokens (a number or
        an array); None if layers take no time."""
        token_us = self.options.layer_compute_us
        pass_us = self.options.layer_pass_us
        return (
            round(token_us * 1000) * n_tokens + round(pass_us * 1000)
            if token_us or pass_us
            else None
        )

    def _replay_events(
        self, store: Store, controller: Controller | None, meter: Meter
    ) -> None:
        pass_ = -1
        for event in self.trace.events():
            if isinstance(event, Announcement):
                announce_to(store.context, event)
                if controller is not None:
                    controller.announce(event)
                continue
            if event.pass_ != pass_:
                pass_ = event.pass_
                n_tokens = len(event.expert_ids)
                all_decode = n_tokens * (event.phase == Phase.DECODE)
                n_decoded = (
                    all_decode
                    if event.phases is None
                    else int(np.sum(event.phases == Phase.DECODE))
                )
                meter.begin(event.sequence, event.phase, n_tokens, n_decoded)
            store.context.acquire(event.il, event.expert_ids, event.inputs)
            if controller is not None:
                controller.observe(event)
            if layer_ns := self._layer_ns(len(event.expert_ids)):
                store.advance(layer_ns)

    def _result(self, meter: Meter) -> SimResult:
        meter.end()
        decode = meter.decode
        total = self.trace.shape.n_moe_layer * self.trace.shape.n_expert
        counters = {
            name: n for name, n in meter.counters.items() if name not in REAL_TIME
        }
        timed = self._timed and decode.clock_ns > 0
        return SimResult(
            name_of(self.policy), name_of(self.predictor), self.n_slots, self.n_slots / total, counters,
            meter.whole, decode, meter.requests(),
            decode.tokens / decode.clock_ns * 1e9 if timed else None, meter.tiers, meter.decode_tiers,
        )  # fmt: skip


def announce_to(context: StoreContext, event: Announcement) -> None:
    """Passes an announcement (the tokens that are evaluated next) to a store."""
    if event.sequences is None or event.phases is None:
        context.announce(event.sequence, event.phase, event.tokens)
    else:
        context.announce(event.sequences, event.phases, event.tokens, event.outputs)


class Meter:
    """Divides the store's counters by phase and request. Reads the counters only when
    the phase or the request changes.

    All counters of a pass are attributed to the phase of its announcement, which is
    decode if any announced token is decoded. The prompt tokens of such a pass are not
    counted as decoded tokens. If an announcement has tokens of several requests, its
    passes are counted under the request of its first token.
    """

    def __init__(self, store: Store, expert_bytes: int) -> None:
        self.store = store
        self._expert_bytes = expert_bytes
        self._now: tuple[int, Phase] | None = None
        # _n_read: number of prompt tokens in decode passes.
        self._tokens = self._n_read = 0
        self._parts: dict[tuple[int, Phase], Span] = {}
        self.counters = store.counters()
        self.tiers = _tier_spans(store)
        self.decode_tiers: dict[str, TierSpan] = {}

    def begin(self, sequence: int, phase: Phase, n_tokens: int, n_decoded: int) -> None:
        """Counts a pass of n_tokens tokens before its first routing event. n_decoded of
        these tokens are decoded; the others belong to prompts."""
        if (sequence, phase) != self._now:
            self.end()
            self._now = sequence, phase
        n_read = n_tokens - n_decoded if phase == Phase.DECODE else 0
        self._tokens += n_tokens - n_read
        self._n_read += n_read

    def end(self) -> None:
        """Attributes the counters' growth since the previous call to the current phase
        and request. Attributes nothing before the first pass."""
        before = self.counters
        self.counters = self.store.counters()
        earlier = self.tiers
        self.tiers = _tier_spans(self.store)
        if self._now is None:
            return
        grown: dict[str, Any] = {
            name: self.counters[name] - before[name] for name in before
        }
        span = Span(
            self._tokens, grown["lookups"], grown["lookups"] - grown["misses"], grown["bytes_missed"],
            grown["bytes_prefetched"], grown["stall_ns"], grown["sim_clock_ns"],
            grown["prefetch_useful"] * self._expert_bytes,
        )  # fmt: skip
        self._tokens = 0
        self._parts[self._now] = self._parts.get(self._now, Span()) + span
        if self._now[1] == Phase.DECODE:
            for name, now in self.tiers.items():
                self.decode_tiers[name] = self.decode_tiers.get(name, TierSpan()) + (
                    now - earlier[name]
                )

    @property
    def decode(self) -> Span:
        """The counters of the passes whose announcements have decoded tokens."""
        return sum(
            (span for (_, phase), span in self._parts.items() if phase == Phase.DECODE),
            Span(),
        )

    @property
    def whole(self) -> Span:
        """The counters of all passes."""
        return sum(self._parts.values(), Span(self._n_read))

    def requests(self) -> dict[int, Span]:
        """Returns {request: counters of its decode passes}. A request without decode
        passes has the counters of its other passes."""
        return {
            sequence: self._parts.get((sequence, Phase.DECODE))
            or self._parts[sequence, phase]
            for sequence, phase in self._parts
        }


def _tier_spans(store: Store) -> dict[str, TierSpan]:
    """Returns the counters of each tier since the store was opened; {} if there is only
    one tier."""
    if len(store.tiers) == 1:
        return {}
    found = {
        name: store.tier(tier) for name, tier in ((VRAM, Tier.COMPUTE), (RAM, Tier.RAM))
    }
    if len(store.devices) > 1:
        found |= {
            device.name or str(n): store.device(n)
            for n, device in enumerate(store.devices)
        }
    staged = store.staging()
    return {
        name: TierSpan.of(figures)
        for name, figures in (found | ({STAGING: staged} if staged else {})).items()
    }
