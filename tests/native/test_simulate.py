"""Tests replays of traces.

No policy's hit rate exceeds Belady's, and a failing policy raises an error. The hit
rates of synthetic routing are within three points of the published ones.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from traces import SMALL, random_trace

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies import (
    LOCALITY,
    LRU,
    AnyPolicy,
    Lfu,
    Policy,
    make_policy,
)
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.errors import CallbackError, OptionError
from moegguf.native.events import Float32s, RoutingEvent
from moegguf.native.store import DeviceSlots, NativePolicy, StoreOptions
from moegguf.trace.belady import Lookups, belady
from moegguf.trace.format import read, write
from moegguf.trace.simulate import (
    SimOptions,
    SimResult,
    Simulation,
    fitted,
    layout_of,
    slots_of,
)
from moegguf.trace.trace import Trace
from predictors.study.synthesize import shape_of, synthesize
from tools.models.locality import LOCALITIES, find_locality

TRACE = random_trace(n_sequences=6, n_prefill=6, n_decode=40)
NEXT_USE = NativePolicy("next-use", takes_forecast=True)
LFU_DECAY = NativePolicy("lfu-decay")
SLRU = NativePolicy("slru")
ALL: list[Callable[[], AnyPolicy]] = [
    lambda: LRU, Lfu, lambda: LFU_DECAY, lambda: LOCALITY, lambda: make_policy("sparsity", SMALL, Artifacts(None)),
    lambda: NEXT_USE, lambda: SLRU,
]  # fmt: skip


def run(policy: AnyPolicy, n_slots: int = 24, **options: object) -> SimResult:
    return Simulation(
        TRACE, policy, NoPrediction(SMALL), n_slots, SimOptions(**options)
    ).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("make", ALL, ids=lambda make: make().name)
def test_policies_replay_deterministically_and_stay_below_belady(
    make: Callable[[], AnyPolicy],
) -> None:
    first, again = (run(make()) for _ in range(2))
    assert first == again
    assert first.whole.lookups == Lookups.of(TRACE).keys.size
    assert first.hit_rate <= belady(Lookups.of(TRACE), 24).hit_rate
    assert list(first.sequences) == TRACE.sequences()
    assert sum(span.hits for span in first.sequences.values()) == first.decode.hits


def test_policy_without_scores_equals_lru() -> None:
    class Quiet:
        name: ClassVar[str] = "quiet"

        def scores(self, history: History, forecast: Forecast) -> Float32s | None:
            return None

    assert run(Quiet()).counters == run(LRU).counters


class Answers:
    """A policy whose `scores` returns `answer`, or raises `answer` if it is an
    exception."""

    name: ClassVar[str] = "answers"

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


def test_failing_policy_ends_the_simulation_with_its_name() -> None:
    with pytest.raises(
        CallbackError,
        match="in a policy or predictor: the policy answers raised ZeroDivisionError: no",
    ):
        run(Answers(ZeroDivisionError("no")))
    with pytest.raises(
        CallbackError,
        match=r"policy answers raised ValueError: scores must have the shape .*, but have \(3, 3\)",
    ):
        run(Answers(np.zeros((3, 3), np.float32)))


def test_simulated_time_is_compute_plus_stall() -> None:
    result = run(
        LRU, link_bytes_per_s=1e9, layer_compute_us=5.0, store=StoreOptions(sweep=False)
    )
    decode = result.decode
    # The link moves 1 byte per ns, and no transfer overlaps computation.
    assert decode.stall_ns == decode.bytes_missed
    assert decode.tokens == 6 * 40
    assert decode.clock_ns == decode.stall_ns + decode.tokens * 5 * 5000
    assert result.t_per_s == pytest.approx(decode.tokens / decode.clock_ns * 1e9)
    assert run(LRU).t_per_s is None


class Oracle(Predictor):
    """Predicts the experts that the last token of the current pass uses, for the next
    layer."""

    name: ClassVar[str] = "oracle"

    def __init__(self) -> None:
        super().__init__(SMALL, reach=1)
        self.token = -1

    def observe(self, event: RoutingEvent) -> None:
        self.token = int(TRACE.pass_start[event.pass_ + 1]) - 1

    def predict(self, il: int, distance: int) -> Float32s | None:
        probabilities = np.zeros(SMALL.n_expert, np.float32)
        probabilities[TRACE.expert_ids[SMALL.row_of[il], self.token]] = 1
        return probabilities


@pytest.mark.parametrize(
    "policy", [lambda: LRU, lambda: NEXT_USE], ids=["lru", "next-use"]
)
def test_correct_prefetches_hide_stall_behind_compute(
    policy: Callable[[], Policy],
) -> None:
    options = SimOptions(link_bytes_per_s=1e9, layer_compute_us=50.0)
    acting = replace(
        options, prefetch=PrefetchOptions(window=1, budget_bytes=10_000, watchdog=False)
    )
    without = Simulation(TRACE, policy(), Oracle(), 40, options).run().decode
    ahead = Simulation(TRACE, policy(), Oracle(), 40, acting).run().decode
    assert ahead.bytes_prefetched > 0 == without.bytes_prefetched
    assert ahead.stall_ns < without.stall_ns / 2


def test_slots_of_converts_a_share_and_rejects_shares_out_of_range() -> None:
    assert slots_of(SMALL, 0.25) == 20
    assert slots_of(SMALL, 0.001) == SMALL.n_expert_used
    for share in (0.0, 1.01):
        with pytest.raises(OptionError, match="above 0 and at most 1"):
            slots_of(SMALL, share)
    with pytest.raises(OptionError, match="1 slots cannot hold the 2 experts"):
        Simulation(TRACE, LRU, NoPrediction(SMALL), 1)


def test_fitted_cuts_passes_to_the_slots_and_layout_of_keeps_the_shape() -> None:
    cut = fitted(TRACE, 5)
    lengths = np.diff(cut.pass_start)
    assert lengths.max() == 2
    assert cut.n_tokens == TRACE.n_tokens
    assert cut.pass_first_token[:3].tolist() == [0, 2, 4]
    assert fitted(TRACE, 16) is TRACE
    # Passes of up to 4 tokens with slots on CUDA are bit-identical to a resident
    # model's.
    device = DeviceSlots("CUDA0", 16, SMALL.layers)
    assert (
        np.diff(
            Simulation(TRACE, LRU, NoPrediction(SMALL), [device]).trace.pass_start
        ).max()
        == 4
    )
    shape = MoeShape(4, 8, 2, (1, 3), 32, 64, expert_bytes=1001)
    assert MoeShape.of(layout_of(shape)) == shape


def hit_rate(trace: Trace, share: float) -> float:
    return (
        Simulation(trace, LRU, NoPrediction(trace.shape), slots_of(trace.shape, share))
        .run()
        .hit_rate
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOCALITIES)
def test_synthetic_hit_rates_are_within_three_points_of_the_published(
    name: str, seed: int
) -> None:
    trace = synthesize(name, shape_of(name, 4), 1024, seed)
    for share, published in LOCALITIES[name].hit_rates.items():
        assert hit_rate(trace, share) == pytest.approx(published, abs=0.03), share


def test_synthetic_trace_depends_only_on_its_seed_and_survives_its_file(
    tmp_path: Path,
) -> None:
    shape = shape_of("glm", 3, 40, 5, 1000)
    trace, again, other = (synthesize("glm", shape, 50, seed) for seed in (7, 7, 8))
    assert np.array_equal(trace.expert_ids, again.expert_ids)
    assert not np.array_equal(trace.expert_ids, other.expert_ids)
    write(tmp_path / "t", trace)
    found = read(tmp_path / "t")
    assert found.shape == shape
    assert np.array_equal(found.expert_ids, trace.expert_ids)
    assert found.header.settings == {"locality": "glm", "seed": 7}
    assert "synthetic" in found.header.model
    with pytest.raises(OptionError, match="qwen3-30b, glm"):
        find_locality("qwen")
    with pytest.raises(OptionError, match="at most all 4 experts"):
        shape_of("glm", 3, 4, 5)
