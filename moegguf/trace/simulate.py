"""Replays a trace against the same store and the same controller as live, on a modelled link: hits, bytes, stall, t/s.

What a live run does with the same trace, policy and slots, this does, count for count. It needs the native library but
no model: the layout comes from the trace's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from moegguf.controller.controller import Controller, ControllerOptions, carried_by_store
from moegguf.controller.policies.base import Policy
from moegguf.controller.policies.lru import Lru
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.errors import CallbackError, OptionError
from moegguf.gguf.experts import ExpertLayout, ExpertMatrix, Kind, MoeLayer
from moegguf.gguf.hparams import Hparams
from moegguf.native.events import Announcement, Gate, Phase
from moegguf.native.store import Lane, Store, StoreOptions
from moegguf.trace.trace import Trace

GGML_TYPE_I8 = 24  # one byte per value: an expert of any size is one row
REAL_TIME = "hook_ns"  # the one counter that is no matter of the trace


@dataclass(frozen=True)
class SimOptions:
    """How to replay.

    prefetch: None acts on no prediction. link_bytes_per_s 0: transfers are free. layer_compute_us: what a layer takes
    for one token; a pass of n tokens takes n times as long. sweep, chunked, preempt: as in StoreOptions.
    """

    prefetch: PrefetchOptions | None = None
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    layer_compute_us: float = 0.0
    sweep: bool = True
    chunked: bool = True
    preempt: bool = True

    @property
    def timed(self) -> bool:
        return self.link_bytes_per_s > 0

    @property
    def store(self) -> StoreOptions:
        return StoreOptions(
            repack=False, fill=False, simulate=True, sweep=self.sweep, chunked=self.chunked, preempt=self.preempt,
            link_bytes_per_s=self.link_bytes_per_s, link_latency_s=self.link_latency_s,
        )  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Counters over some of the passes."""

    tokens: int = 0
    lookups: int = 0
    hits: int = 0
    bytes_missed: int = 0
    bytes_prefetched: int = 0
    stall_ns: int = 0
    clock_ns: int = 0

    def __add__(self, other: Span) -> Span:
        return Span(*(mine + theirs for mine, theirs in zip(_values(self), _values(other), strict=True)))

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.lookups)


def _values(span: Span) -> tuple[int, ...]:
    return (
        span.tokens, span.lookups, span.hits, span.bytes_missed, span.bytes_prefetched, span.stall_ns, span.clock_ns
    )  # fmt: skip


@dataclass(frozen=True)
class SimResult:
    """What a replay counted.

    counters: all of the store's that follow from the trace. decode: of decode passes; whole: of all. sequences:
    {request: its decode passes, or all of its passes where it has none}.
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

    @property
    def hit_rate(self) -> float:
        return self.whole.hit_rate

    @property
    def decode_hit_rate(self) -> float:
        return self.decode.hit_rate


class _Strict(Controller):
    """A simulation measures the policy it was given, or nothing: there is no going on without it."""

    def _drop_policy(self, why: str) -> NoReturn:
        raise CallbackError(f"the policy {name_of(self.policy)} {why}; the simulation has no result.")

    def _drop_predictor(self, why: str) -> NoReturn:
        raise CallbackError(f"the predictor {name_of(self.predictor)} {why}; the simulation has no result.")


def name_of(of: object) -> str:
    """What a policy or predictor calls itself."""
    return str(getattr(of, "name", type(of).__name__))


def layout_of(shape: MoeShape) -> ExpertLayout:
    """A layout with this shape and no files: what a simulated store needs. Experts have shape.expert_bytes each."""
    layers = tuple(
        MoeLayer(il, shape.n_expert, shape.n_expert_used, _matrices(shape, il)) for il in shape.layers
    )  # fmt: skip
    n, k = shape.n_layer, shape.n_expert_used
    hparams = Hparams(
        arch="trace", n_layer_all=n, n_layer=n, n_ctx_train=0, n_embd=shape.n_embd, n_expert=shape.n_expert,
        n_expert_used=(k,) * n, n_head=(1,) * n, n_head_kv=(1,) * n, n_ff=(0,) * n, n_ff_exp=(0,) * n, key_length=0,
        value_length=0, is_mla=False, n_rot=0, has_swa_lengths=False,
    )  # fmt: skip
    return ExpertLayout(
        arch="trace", shards=(), n_layer=n, layers=layers, dense_bytes=0,
        expert_bytes=sum(layer.n_expert * layer.expert_bytes for layer in layers), unused_bytes=0,
        tied_output_bytes=0, n_vocab=shape.n_vocab, hparams=hparams, metadata={}, tensor_types={},
    )  # fmt: skip


def _matrices(shape: MoeShape, il: int) -> tuple[ExpertMatrix, ...]:
    third = max(1, shape.expert_bytes // 3)
    sizes: dict[Kind, int] = {"gate": third, "up": third, "down": max(1, shape.expert_bytes - 2 * third)}
    return tuple(
        ExpertMatrix(il, kind, f"blk.{il}.ffn_{kind}_exps", GGML_TYPE_I8, size, 1, shape.n_expert, 0, 0, size)
        for kind, size in sizes.items()
    )  # fmt: skip


def slots_of(shape: MoeShape, share: float) -> int:
    """How many experts a share (0 to 1) of all of them is: at least what one layer needs for a token."""
    if not 0 < share <= 1:
        raise OptionError(f"a share of the experts lies above 0 and up to 1 (100%), but is {share}.")
    return max(shape.n_expert_used, round(share * len(shape.layers) * shape.n_expert))


def fitted(trace: Trace, n_slots: int) -> Trace:
    """The trace with passes cut so that no gate needs more than n_slots experts: as a run with n_slots must."""
    k, lengths = trace.shape.n_expert_used, np.diff(trace.pass_start)
    most = max(1, n_slots // k)
    if n_slots >= min(trace.shape.n_expert, int(lengths.max(initial=0)) * k):
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
    """One replay of a trace by one policy and predictor, which must be fresh: they remember what they saw.

    Raises OptionError when n_slots cannot hold one token's experts of a layer.
    """

    def __init__(
        self, trace: Trace, policy: Policy, predictor: Predictor, n_slots: int, options: SimOptions | None = None
    ) -> None:
        if n_slots < trace.shape.n_expert_used:
            raise OptionError(f"{n_slots} slots cannot hold the {trace.shape.n_expert_used} experts that a token uses.")
        self.trace = fitted(trace, n_slots)
        self.policy, self.predictor, self.n_slots = policy, predictor, n_slots
        self.options = options or SimOptions()

    def run(self, progress: Callable[[int], None] | None = None) -> SimResult:
        """Replays all passes; `progress` hears the number of the pass begun. Raises CallbackError when the policy or
        predictor fails.
        """
        store = Store(layout_of(self.trace.shape), self.n_slots, self.options.store)
        try:
            lane = store.open_lane()
            try:
                return self._replay(store, lane, progress)
            finally:
                lane.close()
        finally:
            store.close()

    def _controller(self, store: Store) -> Controller | None:
        """As live: None where the store needs nobody."""
        options = ControllerOptions(
            self.options.prefetch, slowest_s=float("inf"), clock_ns=lambda: store.counters()["sim_clock_ns"]
        )
        rates = carried_by_store(self.policy, self.predictor, options)
        if rates is not None:
            store.set_rates(rates)
        if rates is not None or (isinstance(self.policy, Lru) and isinstance(self.predictor, NoPrediction)):
            return None
        return _Strict(self.trace.shape, self.policy, self.predictor, store, options)

    def _replay(self, store: Store, lane: Lane, progress: Callable[[int], None] | None) -> SimResult:
        controller, meter = self._controller(store), _Meter(store)
        compute_ns = round(self.options.layer_compute_us * 1000)
        pass_ = -1
        for event in self.trace.events():
            if isinstance(event, Announcement):
                if controller is not None:
                    controller.announce(event)
                continue
            if event.pass_ != pass_:
                pass_ = event.pass_
                meter.begin(event)
                if progress is not None:
                    progress(pass_)
            lane.gate(event.il, event.expert_ids)
            if controller is not None:
                controller.observe(event)
            if compute_ns:
                store.advance(compute_ns * len(event.expert_ids))
        failure = lane.take_failure()
        if failure is not None:
            raise OptionError(f"the trace cannot be replayed in {self.n_slots} slots: {failure.message.decode()}.")
        return self._result(meter)

    def _result(self, meter: _Meter) -> SimResult:
        meter.end()
        decode, total = meter.phases[Phase.DECODE], len(self.trace.shape.layers) * self.trace.shape.n_expert
        counters = {name: n for name, n in meter.counters.items() if name != REAL_TIME}
        timed = self.options.timed and decode.clock_ns > 0
        return SimResult(
            name_of(self.policy), name_of(self.predictor), self.n_slots, self.n_slots / total, counters,
            meter.phases[Phase.PREFILL] + decode, decode, meter.requests(),
            decode.tokens / decode.clock_ns * 1e9 if timed else None,
        )  # fmt: skip


class _Meter:
    """Deals the store's counters to phases and requests; it reads them only where one of these changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._now: tuple[int, Phase] | None = None
        self._tokens = 0
        self.counters = store.counters()
        self.phases = {phase: Span() for phase in Phase}
        self._parts: dict[tuple[int, Phase], Span] = {}

    def begin(self, gate: Gate) -> None:
        """A pass begins, at its first gate."""
        key = gate.sequence, gate.phase
        if key != self._now:
            self.end()
            self._now = key
        self._tokens += len(gate.expert_ids)

    def end(self) -> None:
        """Books what happened since the last call."""
        before, self.counters = self.counters, self._store.counters()
        if self._now is None:
            return
        grown: dict[str, Any] = {name: self.counters[name] - before[name] for name in before}
        span = Span(
            self._tokens, grown["lookups"], grown["lookups"] - grown["misses"], grown["bytes_missed"],
            grown["bytes_prefetched"], grown["stall_ns"], grown["sim_clock_ns"],
        )  # fmt: skip
        self._tokens = 0
        self.phases[self._now[1]] += span
        self._parts[self._now] = self._parts.get(self._now, Span()) + span

    def requests(self) -> dict[int, Span]:
        return {
            sequence: self._parts.get((sequence, Phase.DECODE)) or self._parts[sequence, phase]
            for sequence, phase in self._parts
        }
