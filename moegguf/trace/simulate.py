"""Replays a trace against the same store and the same controller as live, on a modelled link: hits, bytes, stall, t/s.

Its counters equal those of a live run with the same trace, policy and slots. It needs the native library but no model:
the layout comes from the trace's shape. Layers may compute on one or several devices, with slots there and in RAM
behind them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from moegguf.controller.controller import ActingOptions, Controller, build_controller, name_of
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

GGML_TYPE_I8 = 24  # one byte per value: an expert of any size is one row
NO_LIMIT = 1 << 30  # tokens of a pass
REAL_TIME = ("hook_ns", "forecast_ns")  # the counters that do not follow from the trace
VRAM, RAM, STAGING = "VRAM", "RAM", "staging"  # keys of `SimResult.tiers`
SIMULATED = "CUDA"  # backend of the devices whose slots are simulated, by ggml's name


@dataclass(frozen=True)
class SimOptions:
    """Options of a replay.

    prefetch: None acts on no prediction. link_bytes_per_s 0: transfers are free. layer_compute_us: a layer's time for
    one token, layer_pass_us: and for a pass. store: switches of a strategy. n_ram_slots: in RAM behind those of
    devices, with a native policy, ram_policy.
    """

    prefetch: PrefetchOptions | None = None
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    layer_compute_us: float = 0.0
    layer_pass_us: float = 0.0
    store: StoreOptions = field(default_factory=StoreOptions)
    n_ram_slots: int = 0
    ram_policy: str = LRU.name

    @property
    def timed(self) -> bool:
        """Returns whether reads take time."""
        return self.link_bytes_per_s > 0

    @property
    def simulated(self) -> StoreOptions:
        """The options of the simulated store."""
        return replace(
            self.store, repack=False, fill=False, simulate=True, link_bytes_per_s=self.link_bytes_per_s,
            link_latency_s=self.link_latency_s,
        )  # fmt: skip


class _Sums:
    """Counters that add up field by field."""

    lookups: int
    hits: int

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(operator.sub, vars(self).values(), vars(other).values()))

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0 to 1; 0 without lookups."""
        return self.hits / max(1, self.lookups)


@dataclass(frozen=True)
class Span(_Sums):
    """Counters over some of the passes. bytes_useful: of experts that were fetched ahead and there when asked for."""

    tokens: int = 0
    lookups: int = 0
    hits: int = 0
    bytes_missed: int = 0
    bytes_prefetched: int = 0
    stall_ns: int = 0
    clock_ns: int = 0
    bytes_useful: int = 0

    @property
    def moved_per_useful(self) -> float | None:
        """Bytes fetched ahead for one of them that was used and in time; None where none was."""
        return self.bytes_prefetched / self.bytes_useful if self.bytes_useful else None


@dataclass(frozen=True)
class TierSpan(_Sums):
    """Counters of one tier over some of the passes. In RAM behind a device, a lookup is one that missed there.

    bytes_in: that came into its slots, from wherever. copy_ns: of copies from RAM. stall_ns: that layers waited; in
    RAM, while something was still to be read from the file.
    """

    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    bytes_in: int = 0
    copy_ns: int = 0
    stall_ns: int = 0

    @classmethod
    def of(cls, figures: Mapping[str, int]) -> TierSpan:
        """The counters in the figures of `Store.tier` since the store was opened."""
        n_bytes = figures["bytes_missed"] + figures["bytes_prefetched"]
        hits = figures["hits_ready"] + figures["hits_late"]
        counted = figures["lookups"], hits, figures["evictions"], n_bytes, figures["copy_ns"], figures["stall_ns"]
        return cls(*counted)


@dataclass(frozen=True)
class SimResult:
    """The counts of a replay.

    counters: all of the store's that follow from the trace. decode: of decode passes; whole: of all. sequences:
    {request: its decode passes, or all of its passes where it has none}. tiers: {"VRAM", "RAM" and, where prompts are
    staged, "staging": what was counted there} of all passes, and decode_tiers of decode passes; empty with one tier.
    With several devices "VRAM" is all of them together, and each is there by its name, too.
    t_per_s: decoded tokens per modelled second, None without a link.
    """

    policy: str
    predictor: str
    n_slots: int
    share: float
    counters: Mapping[str, int]
    whole: Span
    decode: Span
    sequences: Mapping[int, Span] = field(default_factory=dict)
    t_per_s: float | None = None
    tiers: Mapping[str, TierSpan] = field(default_factory=dict)
    decode_tiers: Mapping[str, TierSpan] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """`Span.hit_rate` of all passes."""
        return self.whole.hit_rate

    @property
    def prefetch_accuracy(self) -> float | None:
        """Returns how many of the experts that were fetched ahead were used, in time or late; None where none was
        fetched."""
        used = self.counters["prefetch_useful"] + self.counters["prefetch_late"]
        return used / self.counters["prefetch_started"] if self.counters["prefetch_started"] else None

    @property
    def decode_hit_rate(self) -> float:
        """`Span.hit_rate` of the decode passes."""
        return self.decode.hit_rate


def layout_of(shape: MoeShape) -> ExpertLayout:
    """A layout with this shape and no files, for a simulated store. Experts have shape.expert_bytes each."""
    third = max(1, shape.expert_bytes // 3)
    n = shape.n_layer
    k = shape.n_expert_used
    sizes: dict[Kind, int] = {"gate": third, "up": third, "down": max(1, shape.expert_bytes - 2 * third)}

    def matrix(il: int, kind: Kind) -> ExpertMatrix:
        name = f"blk.{il}.ffn_{kind}_exps"
        return ExpertMatrix(il, kind, name, GGML_TYPE_I8, sizes[kind], 1, shape.n_expert, 0, 0, sizes[kind])

    layers = tuple(MoeLayer(il, shape.n_expert, k, tuple(matrix(il, kind) for kind in sizes)) for il in shape.layers)
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
    """The number of slots for a share (0 to 1) of all experts: at least n_expert_used. Raises OptionError."""
    if not 0 < share <= 1:
        raise OptionError(f"a share of the experts lies above 0 and up to 1 (100%), but is {share}.")
    return max(shape.n_expert_used, round(share * len(shape.layers) * shape.n_expert))


def fitted(trace: Trace, n_slots: int) -> Trace:
    """The trace with passes split, so that no event needs more than n_slots experts: where they cannot be streamed."""
    return _cut(trace, _most_tokens(trace, n_slots, len(trace.shape.layers), NO_LIMIT))


def _most_tokens(trace: Trace, n_slots: int, n_layers: int, slot_tokens: int) -> int:
    """The most tokens of a pass with so many slots for so many layers; slot_tokens where not every expert has one."""
    shape = trace.shape
    longest = int(np.diff(trace.pass_start).max(initial=0))
    if n_slots >= n_layers * shape.n_expert:
        return NO_LIMIT
    k = shape.n_expert_used
    return min(slot_tokens, NO_LIMIT if n_slots >= min(shape.n_expert, longest * k) else max(1, n_slots // k))


def _cut(trace: Trace, most: int) -> Trace:
    """The trace with no pass of more tokens."""
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
    """One replay of a trace with one policy and predictor, which must be new: they keep state.

    n_slots: those of the CPU, which computes every layer, or of devices, with tensors in which passes of more than one
    token are staged; where there are none, passes are cut to what slots are exact for. Raises OptionError for slots
    that cannot hold one token's experts of a layer.
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
        devices = [DeviceSlots(None, n_slots, trace.shape.layers)] if isinstance(n_slots, int) else n_slots
        for device in devices:
            if device.n_slots < trace.shape.n_expert_used:
                where = f" on {device.name}" if device.name else ""
                raise OptionError(
                    f"{device.n_slots} slots{where} cannot hold the {trace.shape.n_expert_used} experts that a token"
                    " uses."
                )
        self._is_staged = any(device.staging for device in devices)
        any_pass = self._is_staged if on_devices else self.options.simulated.can_stream
        most = min(_most_tokens(trace, d.n_slots, len(d.layers), slot_tokens(d.name)) for d in devices)
        self.trace = trace if any_pass else _cut(trace, most)
        self._timed = self.options.timed or any(device.link for device in devices)
        self.policy = policy
        self.predictor = predictor
        self.slots = n_slots
        self.n_slots = sum(device.n_slots for device in devices)

    def run(self) -> SimResult:
        """Replays all passes. Raises CallbackError when the policy or predictor fails."""
        n_ram = self.options.n_ram_slots
        store = Store(layout_of(self.trace.shape), self.slots, self.options.simulated, n_ram_slots=n_ram)
        try:
            if n_ram:
                store.set_policy(self.options.ram_policy, Tier.RAM)
            return self._replay(store)
        finally:
            store.close()

    def _controller(self, store: Store) -> Controller | None:
        """Returns the controller that a live run would have; None where the store needs none. A
        policy or predictor that fails ends the simulation."""
        acting = ActingOptions(
            self.options.prefetch, strict=True, clock_ns=lambda: store.counters()["sim_clock_ns"],
        )  # fmt: skip
        return build_controller(self.trace.shape, self.policy, self.predictor, store, acting)

    def _replay(self, store: Store) -> SimResult:
        controller = self._controller(store)
        meter = _Meter(store, self.trace.shape.expert_bytes)
        if controller is None and self.trace.token_sequence is None and not self._is_staged:
            self._replay_passes(store.context, meter)
        else:  # where prompts are staged, their end counts
            self._replay_events(store, controller, meter)
        failure = store.context.take_failure()
        if failure is not None:
            raise OptionError(f"the trace cannot be replayed in {self.n_slots} slots: {failure.message.decode()}.")
        return self._result(meter)

    def _replay_passes(self, context: StoreContext, meter: _Meter) -> None:
        """The events of a pass at once, without announcements."""
        trace = self.trace
        layers = np.array(self.trace.shape.layers, np.int32)
        used = np.array(trace.used(), np.int32)
        starts = trace.pass_start
        for p, computed in enumerate(np.array(trace.computed(), np.int32).reshape(-1, len(layers))):
            rows = np.flatnonzero(computed)
            phase = Phase(int(trace.pass_phase[p]))
            if rows.size == 0:
                continue
            n_tokens = computed[rows]
            ids = trace.expert_ids[:, starts[p] : starts[p + 1]]
            n_decoded = int(n_tokens[0]) * (phase == Phase.DECODE)
            meter.begin(int(trace.pass_sequence[p]), phase, int(n_tokens[0]), n_decoded)
            layer_ns = self._layer_ns(n_tokens.astype(np.uint64))
            context.replay(layers[rows], n_tokens, used[rows], ids[ids >= 0].astype(np.int32), layer_ns)

    def _layer_ns(self, n_tokens: Any) -> Any:
        """Returns the ns that layers take for `n_tokens` (a number, or uint64); None where they take no time."""
        token_us = self.options.layer_compute_us
        pass_us = self.options.layer_pass_us
        return round(token_us * 1000) * n_tokens + round(pass_us * 1000) if token_us or pass_us else None

    def _replay_events(self, store: Store, controller: Controller | None, meter: _Meter) -> None:
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
                n_decoded = all_decode if event.phases is None else int(np.sum(event.phases == Phase.DECODE))
                meter.begin(event.sequence, event.phase, n_tokens, n_decoded)
            store.context.acquire(event.il, event.expert_ids, event.inputs)
            if controller is not None:
                controller.observe(event)
            if layer_ns := self._layer_ns(len(event.expert_ids)):
                store.advance(layer_ns)

    def _result(self, meter: _Meter) -> SimResult:
        meter.end()
        decode = meter.decode
        total = len(self.trace.shape.layers) * self.trace.shape.n_expert
        counters = {name: n for name, n in meter.counters.items() if name not in REAL_TIME}
        timed = self._timed and decode.clock_ns > 0
        return SimResult(
            name_of(self.policy), name_of(self.predictor), self.n_slots, self.n_slots / total, counters,
            meter.whole, decode, meter.requests(),
            decode.tokens / decode.clock_ns * 1e9 if timed else None, meter.tiers, meter.decode_tiers,
        )  # fmt: skip


def announce_to(context: StoreContext, event: Announcement) -> None:
    """Tells a store which tokens are evaluated next."""
    if event.sequences is None or event.phases is None:
        context.announce(event.sequence, event.phase, event.tokens)
    else:
        context.announce(event.sequences, event.phases, event.tokens, event.outputs)


class _Meter:
    """Splits the store's counters by phase and request; it reads them only when one of these changes.

    A pass that decodes counts as decoding, with all that it needed; its tokens of prompts count as the prompts'.
    """

    def __init__(self, store: Store, expert_bytes: int) -> None:
        self._store = store
        self._expert_bytes = expert_bytes
        self._now: tuple[int, Phase] | None = None
        self._tokens = self._n_read = 0  # n_read: of prompts, in passes that decode
        self._parts: dict[tuple[int, Phase], Span] = {}
        self.counters = store.counters()
        self.tiers = _tier_spans(store)
        self.decode_tiers: dict[str, TierSpan] = {}

    def begin(self, sequence: int, phase: Phase, n_tokens: int, n_decoded: int) -> None:
        """Passes of n_tokens, of which n_decoded decode, begin, before their first routing event."""
        if (sequence, phase) != self._now:
            self.end()
            self._now = sequence, phase
        n_read = n_tokens - n_decoded if phase == Phase.DECODE else 0
        self._tokens += n_tokens - n_read
        self._n_read += n_read

    def end(self) -> None:
        """Adds the counters since the last call to the current phase and request."""
        before = self.counters
        self.counters = self._store.counters()
        earlier = self.tiers
        self.tiers = _tier_spans(self._store)
        if self._now is None:
            return
        grown: dict[str, Any] = {name: self.counters[name] - before[name] for name in before}
        span = Span(
            self._tokens, grown["lookups"], grown["lookups"] - grown["misses"], grown["bytes_missed"],
            grown["bytes_prefetched"], grown["stall_ns"], grown["sim_clock_ns"],
            grown["prefetch_useful"] * self._expert_bytes,
        )  # fmt: skip
        self._tokens = 0
        self._parts[self._now] = self._parts.get(self._now, Span()) + span
        if self._now[1] == Phase.DECODE:
            for name, now in self.tiers.items():
                self.decode_tiers[name] = self.decode_tiers.get(name, TierSpan()) + (now - earlier[name])

    @property
    def decode(self) -> Span:
        """Returns the counters of passes that decode."""
        return sum((span for (_, phase), span in self._parts.items() if phase == Phase.DECODE), Span())

    @property
    def whole(self) -> Span:
        """Returns the counters of all passes."""
        return sum(self._parts.values(), Span(self._n_read))

    def requests(self) -> dict[int, Span]:
        """{sequence: its decode passes, or all of them where it has none}."""
        return {
            sequence: self._parts.get((sequence, Phase.DECODE)) or self._parts[sequence, phase]
            for sequence, phase in self._parts
        }


def _tier_spans(store: Store) -> dict[str, TierSpan]:
    """Returns the counters of each tier since the store was opened; empty with one tier."""
    if len(store.tiers) == 1:
        return {}
    found = {name: store.tier(tier) for name, tier in ((VRAM, Tier.COMPUTE), (RAM, Tier.RAM))}
    if len(store.devices) > 1:
        found |= {device.name or str(n): store.device(n) for n, device in enumerate(store.devices)}
    staged = store.staging()
    return {name: TierSpan.of(figures) for name, figures in (found | ({STAGING: staged} if staged else {})).items()}
