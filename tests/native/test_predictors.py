"""Tests the native predictors: their probabilities, which have definitions in Python,
and their prefetches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import FakeModel, Open
from predictor_definitions import Arrays, Sequence, any_of, defined
from waiting import until

from moegguf.controller.collection import Eamc
from moegguf.controller.controller import ActingOptions, build_controller
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.predictors import counts, networks
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.counts import previous_token
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.predictors.routing_path import routing_path as routing_path_of
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.errors import OptionError
from moegguf.gguf.routers import Gating, Router, Routers
from moegguf.learning.routing_path import Options, array_sizes
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent
from moegguf.native.predictor import NativeForecast, NativePredictor, integers
from moegguf.native.store import Store, StoreContext, StoreOptions
from moegguf.trace.simulate import layout_of
from predictors.study.asked import asked

SHAPE = MoeShape(
    n_layer=7,
    n_expert=16,
    n_expert_used=3,
    layers=(1, 2, 4, 5, 6),
    n_embd=40,
    n_vocab=50,
    expert_bytes=3000,
)
N = len(SHAPE.layers)
EVERYTHING = NativeForecast(window=N)


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def skip(gating: Gating = Gating.SOFTMAX, n_group: int = 1) -> Predictor:
    random = rng()

    def router() -> Router:
        matrix = (
            random.standard_normal((SHAPE.n_expert, SHAPE.n_embd)).astype(np.float32)
            * 0.3
        )
        bias = random.standard_normal((2, SHAPE.n_expert)).astype(np.float32) * 0.1
        return Router(SHAPE.n_expert_used, matrix, bias[0], bias[1])

    # Layer 5 has no router, like a layer that routes by token id.
    routers = {il: router() for il in SHAPE.layers if il != 5}
    return networks.skip(SHAPE, Routers(gating, routers, n_group, max(1, n_group // 2)))


def mlp() -> Predictor:
    random, arrays = rng(), {}
    for name, size in networks.mlp_sizes(SHAPE, [1, 3], 24).items():
        spread = 0.1 if name.endswith("bias") else 0.3
        arrays[name] = random.standard_normal(size).astype(np.float32) * spread
    return networks.mlp(SHAPE, Weights(arrays, {"windows": [1, 3], "n_hidden": 24}))


def table_of(tokens: npt.ArrayLike, counted: npt.ArrayLike) -> Predictor:
    arrays = {
        "tokens": np.asarray(tokens, np.int32),
        "counts": np.asarray(counted, np.uint16),
    }
    return counts.token_table(SHAPE, Weights(arrays))


def token_table() -> Predictor:
    """Returns a token-id predictor for the tokens 0 to 29, stored in random order.

    The random counts of a token in a layer add up to ten uses of 3 experts.
    """
    random = rng()
    counted = random.multivariate_hypergeometric(
        np.full(SHAPE.n_expert, 9), 10 * SHAPE.n_expert_used, (30, N)
    )
    return table_of(random.permutation(30), counted)


def always(*choices: list[int]) -> Predictor:
    """Returns a token-id predictor that has counted token i 20 times, with the experts
    choices[i] in every layer."""
    counted = np.zeros((len(choices), N, SHAPE.n_expert), np.uint16)
    for token, experts in enumerate(choices):
        counted[token][:, experts] = 20
    return table_of(np.arange(len(choices)), counted)


AFFINITY = (
    rng().dirichlet(np.ones(SHAPE.n_expert), (N - 1, SHAPE.n_expert)).astype(np.float32)
)


def affinity(matrix: Float32s = AFFINITY, shape: MoeShape = SHAPE) -> Predictor:
    return counts.affinity(shape, Weights({"affinity": matrix}))


def expert_mlp() -> Predictor:
    random, hidden, arrays = rng(), [20, 16, 12, 12, 8, 8], {}
    for name, size in networks.expert_mlp_sizes(SHAPE, hidden).items():
        spread = 0.1 if name.endswith("bias") else size[-1] ** -0.5
        arrays[name] = random.standard_normal(size).astype(np.float32) * spread
    arrays["popularity"] = random.random((N, SHAPE.n_expert), np.float32)
    arrays["affinity"] = AFFINITY
    return networks.expert_mlp(SHAPE, Weights(arrays, {"hidden": hidden}))


def path_arrays() -> Arrays:
    """Returns random arrays for a small routing path."""
    options = Options(window=6, chunk=4, n_embd=32, n_head=2, n_ff=24)
    sizes = array_sizes(options, SHAPE.n_vocab + 1, N, SHAPE.n_expert)
    random, arrays = rng(), {}
    for name, size in sizes.items():
        drawn = random.standard_normal(size)
        if name.endswith("norm"):
            drawn = 1 + 0.1 * drawn
        elif name.startswith(("encoder", "decoder", "heads.weight")):
            drawn /= 6
        arrays[name] = drawn.astype(np.float32)
    return arrays


def routing_path() -> Predictor:
    return routing_path_of(SHAPE, Weights(path_arrays()))


def eamc(n_entries: int = 30) -> EamcPredictor:
    """Returns a predictor whose collection has `n_entries` random entries of about ten
    tokens each."""
    random, entries = rng(), Eamc(*SHAPE.table)
    for _ in range(n_entries):
        counts = np.zeros(SHAPE.table, np.float32)
        for il in SHAPE.layers:
            likely = random.dirichlet(np.full(SHAPE.n_expert, 0.3))
            counts[il] = random.multinomial(10 * SHAPE.n_expert_used, likely).clip(
                max=10
            )
        entries.add(counts)
    return EamcPredictor(SHAPE, entries)


MADE: dict[str, Callable[[], Predictor]] = {
    "previous-token": lambda: previous_token(SHAPE),
    "token-id": token_table,
    "affinity": affinity,
    "skip": skip,
    "skip-sigmoid": lambda: skip(Gating.SIGMOID),
    "skip-softplus": lambda: skip(Gating.SQRT_SOFTPLUS),
    "skip-groups": lambda: skip(Gating.SIGMOID, n_group=4),
    "mlp": mlp,
    "expert-mlp": expert_mlp,
    "routing-path": routing_path,
    "eamc": eamc,
    "eamc-full": lambda: eamc(1000),
}
# The tolerance of this predictor's probabilities; all other predictors have a tolerance
# of 0.01.
ALIKE = {"routing-path": 0.03}


def choice(random: np.random.Generator, n_tokens: int) -> np.ndarray[Any, Any]:
    """Returns random expert ids (n_tokens, n_expert_used). The experts of one token are
    distinct."""
    return (
        random.random((n_tokens, SHAPE.n_expert))
        .argsort(axis=1)[:, : SHAPE.n_expert_used]
        .astype(np.int32)
    )


@contextmanager
def simulated(
    n_slots: int = 20, **options: Any
) -> Iterator[tuple[Store, StoreContext]]:
    store = Store(
        layout_of(SHAPE), n_slots, StoreOptions(repack=False, simulate=True, **options)
    )
    context = store.context
    try:
        yield store, context
    finally:
        store.close()


def native(predictor: Predictor) -> NativePredictor:
    found = predictor.native()
    assert found is not None
    return found


class Comparison:
    """Compares a predictor's forecasts with its definition in Python, for the sequences
    of a pass.

    If a layer is predicted several times, the latest prediction is compared.
    """

    def __init__(self, name: str) -> None:
        predictor = MADE[name]()
        self._make, self._alike, self.n_known = (
            defined(predictor, path_arrays()),
            ALIKE.get(predictor.name, 0.01),
            0,
        )
        self._known: dict[int, Sequence] = {}
        self._expected: dict[int, Float32s] = {}

    def announce(self, sequences: list[int], tokens: Int32s) -> None:
        """Announces one token of each sequence, or all `tokens` of a single
        sequence."""
        self._present, self._expected = (
            [self._known.setdefault(each, self._make()) for each in sequences],
            {},
        )
        parts = [tokens] if len(sequences) == 1 else tokens[:, np.newaxis]
        for sequence, part in zip(self._present, parts, strict=True):
            sequence.announce(part)

    def observe(self, row: int, ids: Int32s, inputs: Float32s) -> None:
        """Records the routing of a layer."""
        one = len(self._present) == 1
        for i, sequence in enumerate(self._present):
            sequence.observe(
                row, *((ids, inputs) if one else (ids[i : i + 1], inputs[i : i + 1]))
            )

    def expected(self, row: int, later: int) -> Float32s | None:
        """Returns the definition's prediction for the row `later`, after `row` was
        routed (-1: before the first layer).

        A row is the index of a MoE layer. Returns None if the definition predicts
        nothing.
        """
        return any_of(
            [sequence.predict(later, later - row) for sequence in self._present]
        )

    def check(self, store: Store, row: int) -> None:
        """Asserts that the store's forecast for the layers after `row` agrees with the
        definition."""
        table, known = store.forecast()
        for later in range(row + 1, N):
            il, predicted = SHAPE.layers[later], self.expected(row, later)
            if predicted is not None:
                self._expected[il] = predicted
            assert known[il] == (il in self._expected), (row, il)
            if known[il]:
                assert table[il] == pytest.approx(self._expected[il], abs=self._alike)
                self.n_known += 1

    def check_asked(self, found: Predictor, row: int) -> None:
        """Asserts that `found` predicts what the definition predicts for each later
        layer.

        Skips layers without a prediction.
        """
        for later in range(row + 1, N):
            if (expected := self.expected(row, later)) is not None:
                predicted = found.predict(SHAPE.layers[later], later - row)
                assert predicted == pytest.approx(expected, abs=self._alike)


@pytest.mark.parametrize("name", MADE)
def test_native_predictions_equal_the_definition_in_bulk_and_by_layer(
    name: str,
) -> None:
    random, comparison, found = rng(), Comparison(name), asked(MADE[name])
    with simulated() as (store, context):
        store.set_predictor(native(MADE[name]()), EVERYTHING)
        for p in range(12):
            tokens = random.integers(0, SHAPE.n_vocab, 3 if p % 4 == 2 else 1).astype(
                np.int32
            )
            context.announce(0, Phase.DECODE, tokens)
            comparison.announce([0], tokens)
            found.announce(Announcement(0, Phase.DECODE, tokens))
            if len(tokens) == 1:
                comparison.check(store, -1)
            for row, il in enumerate(SHAPE.layers):
                ids = choice(random, len(tokens))
                inputs = random.standard_normal((len(tokens), SHAPE.n_embd)).astype(
                    np.float32
                )
                context.acquire(il, ids, inputs)
                comparison.observe(row, ids, inputs)
                found.observe(
                    RoutingEvent(p, 0, 0, Phase.DECODE, 0, il, ids, None, inputs)
                )
                if len(tokens) == 1:
                    comparison.check(store, row)
                    comparison.check_asked(found, row)
                else:
                    assert not store.forecast()[1].any(), "prompts are not predicted"
    assert comparison.n_known > 20


def test_python_policy_gets_the_forecast_of_the_native_predictor() -> None:
    random, comparison, seen = (
        rng(),
        Comparison("affinity"),
        list[tuple[list[int], Float32s]](),
    )
    comparison.announce([0], np.zeros(1, np.int32))

    class Forecasts:
        def scores(self, history: History, forecast: Forecast) -> Float32s:
            seen.append((forecast.known(), forecast.probabilities().copy()))
            return seen[-1][1]

    with simulated() as (store, context):
        controller = build_controller(
            SHAPE, Forecasts(), affinity(), store, ActingOptions(strict=True)
        )
        assert controller is not None and controller.native and controller.needs_events
        for row, il in enumerate(SHAPE.layers):
            event = RoutingEvent(0, 0, 0, Phase.DECODE, 0, il, choice(random, 1))
            context.acquire(il, event.expert_ids)
            comparison.observe(
                row, event.expert_ids, np.zeros((1, SHAPE.n_embd), np.float32)
            )
            controller.observe(event)
            later = list(SHAPE.layers[row + 1 : row + 2])
            assert seen[-1][0] == later
            for next_il in later:
                assert seen[-1][1][next_il] == pytest.approx(
                    comparison.expected(row, row + 1), abs=0.01
                )
            assert not seen[-1][1][
                [other for other in range(SHAPE.n_layer) if other not in later]
            ].any()
    assert len(seen) == N


def batch(
    random: np.random.Generator,
    context: StoreContext,
    sequences: list[int],
    comparison: Comparison | None = None,
) -> None:
    """Announces a random token of each sequence to the context, and to `comparison` if
    there is one."""
    of, tokens = (
        np.array(sequences, np.int32),
        random.integers(0, SHAPE.n_vocab, len(sequences)).astype(np.int32),
    )
    context.announce(of, np.full(len(of), Phase.DECODE, np.int32), tokens)
    if comparison is not None:
        comparison.announce(sequences, tokens)


# Two predictors are left out: rounding may decide which groups, or which of a thousand
# entries, they select.
@pytest.mark.parametrize(
    "name", [name for name in MADE if name not in ("skip-groups", "eamc-full")]
)
def test_forecast_of_several_sequences_equals_the_forecast_of_each_alone(
    name: str,
) -> None:
    """Compares the forecast for several sequences with the combined predictions for
    each sequence alone.

    The sequences change between passes, and only the current pass's sequences are
    combined.
    """
    random, comparison = rng(), Comparison(name)
    with simulated() as (store, context):
        store.set_predictor(native(MADE[name]()), EVERYTHING)
        for sequences in [
            [0],
            [0, 1, 2],
            [2, 3],
            [0, 1, 2, 3, 4, 5, 6, 7],
            [1],
            [3, 1],
            [0, 1, 2],
        ] * 3:
            batch(random, context, sequences, comparison)
            comparison.check(store, -1)
            for row, il in enumerate(SHAPE.layers):
                ids = choice(random, len(sequences))
                inputs = random.standard_normal((len(sequences), SHAPE.n_embd)).astype(
                    np.float32
                )
                context.acquire(il, ids, inputs)
                comparison.observe(row, ids, inputs)
                comparison.check(store, row)
        found = store.counters()
    assert comparison.n_known > 80
    assert found["forecast_picks"] % SHAPE.n_expert_used == 0 < found["forecast_right"]


def test_forecast_samples_eight_of_up_to_64_sequences_and_extrapolates() -> None:
    with simulated() as (store, context):
        store.set_predictor(native(previous_token(SHAPE)), EVERYTHING)
        for n, n_asked in ((8, 8), (12, 8), (64, 8), (65, 0)):
            for _ in range(2):
                n_before = store.counters()["forecast_picks"]
                batch(rng(), context, list(range(n)))
                chances = store.forecast()[0]
                for il in SHAPE.layers:
                    context.acquire(
                        il, [[i % 2, 2 + i % 4, 6 + i % 8] for i in range(n)]
                    )
            assert (
                store.counters()["forecast_picks"] - n_before
                == N * SHAPE.n_expert_used * n_asked
            )
            assert (chances[1] > 0).any() == bool(n_asked)
            assert np.isin(chances, (0, 1)).all(), (
                "certain is certain, however many there are"
            )
    # All affinities are equal, so every sequence has equal predictions.
    even = affinity(
        np.full((N - 1, SHAPE.n_expert, SHAPE.n_expert), 1 / SHAPE.n_expert, np.float32)
    )
    alone = SHAPE.n_expert_used / SHAPE.n_expert
    with simulated() as (store, context):
        store.set_predictor(native(even), EVERYTHING)
        for n in (1, 2, 8, 9, 20, 64):
            batch(rng(), context, list(range(n)))
            context.acquire(1, np.tile(np.arange(3, dtype=np.int32), (n, 1)))
            assert store.forecast()[0][2] == pytest.approx(
                1 - (1 - alone) ** n, abs=1e-5
            )


def test_forecast_is_empty_for_passes_with_prompts() -> None:
    with simulated() as (store, context):
        store.set_predictor(native(previous_token(SHAPE)), EVERYTHING)
        phases = [
            Phase.DECODE,
            Phase.DECODE,
            Phase.PREFILL,
            Phase.PREFILL,
            Phase.PREFILL,
        ]
        for sequences in ([0, 1], [0, 1, 2, 2, 2], [0, 1, 2, 2, 2]):
            context.announce(sequences, phases[: len(sequences)], [1] * len(sequences))
            for il in SHAPE.layers:
                assert len(sequences) == 2 or not store.forecast()[1].any()
                context.acquire(
                    il, np.tile(np.arange(3, dtype=np.int32), (len(sequences), 1))
                )
        assert store.counters()["forecast_picks"] == 0
        context.announce([2, 0], [Phase.DECODE] * 2, [1, 1])
        assert store.forecast()[1].any(), "what they showed is known"


def test_popularity_predicts_its_shares_for_every_layer() -> None:
    shares = rng().dirichlet(np.ones(SHAPE.n_expert), N).astype(np.float32)
    predictor = asked(lambda: counts.popularity(SHAPE, Weights({"popularity": shares})))
    predictor.announce(Announcement(0, Phase.DECODE, np.array([7], np.int32)))
    for row, il in enumerate(SHAPE.layers):
        expected = np.minimum(shares[row] * SHAPE.n_expert_used, 1)
        assert predictor.predict(il, row + 1) == pytest.approx(expected)


def test_every_native_predictor_has_a_definition_in_the_tests() -> None:
    with simulated() as (store, _), pytest.raises(OptionError) as unknown:
        store.set_predictor(NativePredictor("oracle", {}))
    listed = (
        str(unknown.value).partition("known predictors are ")[2].rstrip(".").split(", ")
    )
    assert {native(make()).name for make in MADE.values()} == set(listed)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_skip_predicts_nothing_from_inputs_that_are_not_finite(bad: float) -> None:
    with simulated() as (store, context):
        store.set_predictor(native(skip()), EVERYTHING)
        inputs = np.ones((1, SHAPE.n_embd), np.float32)
        context.acquire(1, [[0, 1, 2]], inputs)
        assert store.forecast()[1].any()
        inputs[0, 3] = bad
        context.acquire(1, [[0, 1, 2]], inputs)
        assert not store.forecast()[1].any()
        context.acquire(1, [[0, 1, 2]], inputs[:, :-1])
        assert not store.forecast()[1].any()


def test_forecast_once_covers_the_window_and_ends_at_the_last_layer() -> None:
    with simulated() as (store, context):
        store.set_predictor(
            native(previous_token(SHAPE)), NativeForecast(window=2, once=True)
        )
        for _ in range(2):
            for il in SHAPE.layers:
                context.acquire(il, [[0, 1, 2]])
        context.announce(0, Phase.DECODE, [5])
        assert store.forecast()[1].nonzero()[0].tolist() == [1, 2]
        context.acquire(1, [[0, 1, 2]])
        assert store.forecast()[1].nonzero()[0].tolist() == [2, 4]
        store.set_predictor(None)
        assert not store.forecast()[1].any()
    shape = MoeShape(
        n_layer=2, n_expert=4, n_expert_used=2, layers=(1,), expert_bytes=300
    )
    store = Store(layout_of(shape), 3, StoreOptions(repack=False, simulate=True))
    context = store.context
    store.set_predictor(
        native(affinity(np.zeros((0, 4, 4), np.float32), shape)),
        NativeForecast(window=3),
    )
    for token in range(3):
        context.acquire(1, [[token, token + 1]])
    assert not store.forecast()[1].any()
    store.close()


# Bytes per second, so that reading an expert takes 3 us.
LINK = {"link_bytes_per_s": 1e9}


def run(store: Store, context: StoreContext, n: int, compute_ns: int = 20_000) -> None:
    """Routes 6 * n tokens. Every group of six successive tokens uses the same random
    experts.

    The simulated clock advances by `compute_ns` after each layer.
    """
    random = rng()
    for _ in range(n):
        ids = [choice(random, 1) for _ in SHAPE.layers]
        for _ in range(6):
            context.announce(0, Phase.DECODE, [1])
            for il, layer_ids in zip(SHAPE.layers, ids, strict=True):
                context.acquire(il, layer_ids)
                if compute_ns:
                    store.advance(compute_ns)


def prefetched(forecast: NativeForecast, compute_ns: int = 20_000) -> dict[str, int]:
    """Routes 300 tokens in a simulated store of 12 slots with the previous-token
    predictor.

    Returns the store's counters.
    """
    with simulated(12, fill=False, **LINK) as (store, context):
        store.set_predictor(native(previous_token(SHAPE)), forecast)
        run(store, context, 50, compute_ns)
        store.drain()
        return store.counters()


def test_predicted_experts_are_prefetched_up_to_the_limit_and_reduce_stall() -> None:
    without = prefetched(NativeForecast(window=N))
    assert without["prefetch_started"] == 0
    assert without["forecast_picks"] > 0
    assert without["forecast_right"] / without["forecast_picks"] == pytest.approx(
        5.2 / 6, abs=0.05
    )
    within = prefetched(NativeForecast(window=N, most_prefetches=2))
    assert 0 < within["prefetch_started"] <= 2 * 300
    free = prefetched(NativeForecast(window=N, most_prefetches=100))
    assert free["prefetch_started"] > within["prefetch_started"]
    assert free["prefetch_useful"] > 0.4 * free["prefetch_started"]
    assert free["stall_ns"] < within["stall_ns"] < without["stall_ns"]
    for counters in (without, within, free):
        assert counters["queue_wanted"] == 0
        assert (
            counters["prefetch_requested"]
            == counters["prefetch_started"] + counters["prefetch_dropped"]
        )


def test_likely_expert_is_prefetched_although_its_score_is_lowest() -> None:
    """The predicted experts of token 1 were never used, and all slots hold experts that
    were used often.

    A prefetch starts anyway, because a miss would also evict one of these experts.
    """
    often, rarely = [[0, 1, 2]], [[3, 4, 5]]
    table = always(*often, *rarely)
    with simulated(SHAPE.n_expert_used * N, fill=False, **LINK) as (store, context):
        store.set_policy("next-use")
        store.set_predictor(
            native(table), NativeForecast(window=N, most_prefetches=100)
        )
        for _ in range(40):
            context.announce(0, Phase.DECODE, [0])
            for il in SHAPE.layers:
                context.acquire(il, often)
                store.advance(20_000)
        before = store.counters()["prefetch_started"]
        context.announce(0, Phase.DECODE, [1])
        store.advance(20_000)
        assert store.counters()["prefetch_started"] > before


def test_late_prefetches_are_counted_apart_from_useful_ones() -> None:
    """Runs twice; reading an expert takes 3 us.

    With 5 us of compute time per layer, an expert arrives in time. With 1 us, most
    experts arrive late.
    """
    forecast = NativeForecast(window=1, most_prefetches=100, waste_weight=0.0)
    found = {}
    for compute_ns in (5000, 1000):
        with simulated(12, fill=False, preempt=False, **LINK) as (store, context):
            store.set_predictor(native(previous_token(SHAPE)), forecast)
            run(store, context, 50, compute_ns)
            found[compute_ns] = store.counters()
    for counters in found.values():
        used = counters["prefetch_useful"] + counters["prefetch_late"]
        assert used + counters["prefetch_wasted"] <= counters["prefetch_started"]
        assert counters["prefetch_late"] <= counters["hits_late"]
    assert found[5000]["prefetch_useful"] > 0 == found[5000]["prefetch_late"]
    assert found[1000]["prefetch_late"] > found[1000]["prefetch_useful"]


def test_by_proximity_prefetches_the_most_probable_expert_of_near_layers_first() -> (
    None
):
    """Uses a token that was counted with twelve experts in every layer but the second,
    where it always used three experts."""
    counted = np.zeros((1, N, SHAPE.n_expert), np.uint16)
    counted[0][:, :12] = 5
    counted[0][1] = [20] * SHAPE.n_expert_used + [0] * (
        SHAPE.n_expert - SHAPE.n_expert_used
    )
    table = native(table_of([0], counted))
    for by_proximity, first in ((False, SHAPE.layers[0]), (True, SHAPE.layers[1])):
        forecast = NativeForecast(
            window=N, most_prefetches=1, waste_weight=0.0, by_proximity=by_proximity
        )
        with simulated(20, fill=False, link_bytes_per_s=1e9) as (store, context):
            store.set_predictor(table, forecast)
            context.announce(0, Phase.DECODE, [0])
            store.advance(10**6)
            assert np.argwhere(store.residency())[:, 0].tolist() == [first]


def test_prefetching_stops_if_waste_is_costly_or_the_link_is_busy() -> None:
    found = prefetched(NativeForecast(window=N, most_prefetches=100, waste_weight=50.0))
    # Few prefetches start, because the store learns how often the predictor is wrong.
    assert found["prefetch_started"] < 50
    assert (
        prefetched(NativeForecast(window=N, most_prefetches=100), compute_ns=0)[
            "prefetch_started"
        ]
        == 0
    )


def test_calibration_of_a_predictor_survives_a_pause_but_not_a_replacement() -> None:
    """Uses two predictors that are always wrong. No predictor is set during the pause,
    as between two trials of the watchdog."""
    matrix = np.zeros((N - 1, SHAPE.n_expert, SHAPE.n_expert), np.float32)
    matrix[..., :3] = 1 / 3
    wrong, other = always([0, 1, 2]), affinity(matrix)
    forecast = NativeForecast(window=1, most_prefetches=100)
    with simulated(20, fill=False, **LINK) as (store, context):

        def requested(n_tokens: int) -> int:
            before = store.counters()["prefetch_requested"]
            for _ in range(n_tokens):
                context.announce(0, Phase.DECODE, [0])
                for il in SHAPE.layers:
                    context.acquire(il, [[5, 6, 7]])
                    store.advance(20_000)
            return store.counters()["prefetch_requested"] - before

        first, second = native(wrong), native(other)
        store.set_predictor(first, forecast)
        assert requested(1) > 0
        requested(60)
        for predictor, finds in (
            (first, False),
            (None, False),
            (first, False),
            (second, True),
            (first, True),
        ):
            store.set_predictor(predictor, forecast)
            assert (requested(1) > 0) == finds, (predictor, finds)


@pytest.mark.parametrize("pause", ["none", "idle", "prompt"])
def test_pauses_and_prompts_do_not_count_as_time_to_prefetch(pause: str) -> None:
    """A link moves a tenth of an expert while a layer is computed. The tokens' experts
    change after every three tokens.
    """
    random, forecast = (
        rng(),
        NativeForecast(window=1, most_prefetches=100, waste_weight=0.5),
    )
    with simulated(12, fill=False, sweep=False, link_bytes_per_s=1e8) as (
        store,
        context,
    ):
        store.set_predictor(native(previous_token(SHAPE)), forecast)

        def token(ids: np.ndarray[Any, Any], compute_ns: int) -> None:
            context.announce(0, Phase.DECODE, np.zeros(len(ids), np.int32))
            for il in SHAPE.layers:
                context.acquire(il, ids)
                store.advance(compute_ns)

        def tokens(n: int) -> int:
            before = store.counters()["prefetch_started"]
            for _ in range(n):
                ids = choice(random, 1)
                for _ in range(3):
                    token(ids, 3000)
                if pause == "idle":
                    store.advance(10**9)
                elif pause == "prompt":
                    token(choice(random, 4), 10**8)
            return store.counters()["prefetch_started"] - before

        tokens(3)  # the store learns the time of a layer from these tokens
        assert tokens(20) == 0


def test_act_on_forecasts_switches_prefetching_off_and_on() -> None:
    with simulated(12, fill=False, **LINK) as (store, context):
        store.set_predictor(
            native(previous_token(SHAPE)), NativeForecast(window=N, most_prefetches=100)
        )

        def started() -> int:
            before = store.counters()["prefetch_started"]
            run(store, context, 10)
            return store.counters()["prefetch_started"] - before

        store.act_on_forecasts(False)
        assert started() == 0
        store.act_on_forecasts(True)
        assert started() > 0
        store.set_predictor(None)
        assert started() == 0
        assert not store.forecast()[1].any()


@pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's"
)
def test_store_threads_inherit_the_scheduling_policy_of_the_process(
    fake: FakeModel, open_store: Open
) -> None:
    def threads() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/task")}

    before = threads()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        store, context = open_store(fake, 14, readers=1)
        n_without = len(threads())
        store.set_predictor(
            native(previous_token(MoeShape.of(fake.layout))),
            NativeForecast(lockstep=True),
        )
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    fake.token(store, context, [3, 4])
    # The new threads include a reader and the predictor's thread.
    new = threads() - before
    assert len(threads()) > n_without
    assert {os.sched_getscheduler(thread) for thread in new} == {os.SCHED_BATCH}


def test_set_predictor_rejects_bad_arrays_and_keeps_the_previous_predictor() -> None:
    good = native(mlp())
    missing = {
        name: values for name, values in good.arrays.items() if name != "1.2.out.scale"
    }
    short = {**good.arrays, "1.2.out.scale": good.arrays["1.2.out.scale"][:-1]}
    other_type = {
        **good.arrays,
        "1.2.out.scale": good.arrays["1.2.out.bias"].astype(np.int8),
    }
    beyond = {**good.arrays, "pairs": integers(1, 3)}
    table = native(token_table())
    with simulated() as (store, context):
        store.set_predictor(good, EVERYTHING)
        for name, arrays, message in (
            (
                "oracle",
                {},
                "no native predictor 'oracle'; the known predictors are previous-token",
            ),
            ("mlp", missing, "needs an array '1.2.out.scale'"),
            ("mlp", short, "15 values"),
            ("mlp", other_type, "of type 1"),
            ("mlp", beyond, "two layers with experts"),
            ("mlp", {**good.arrays, "n_hidden": integers(0)}, "hidden values"),
            ("skip", {}, "needs an array 'n_embd'"),
            ("skip", {**native(skip()).arrays, "gating": integers(9)}, "gating"),
            ("skip", {**native(skip()).arrays, "n_group": integers(3)}, "same size"),
            (
                "token-id",
                {**table.arrays, "entry_of": integers(10**6)},
                "entry that does not exist",
            ),
            ("affinity", {"affinity": np.zeros(3, np.float32)}, "3 values"),
            (
                "expert-mlp",
                {**native(expert_mlp()).arrays, "sizes": integers(4, 4)},
                "another size",
            ),
            (
                "routing-path",
                {**native(routing_path()).arrays, "n_chunk": integers(0)},
                "sizes above 0",
            ),
            (
                "routing-path",
                {
                    **native(routing_path()).arrays,
                    "decoder.1.cross.n_head": integers(3),
                },
                "evenly",
            ),
            (
                "eamc",
                {**native(eamc()).arrays, "n_entries": integers(10**6)},
                "as many entries",
            ),
            ("eamc", {**native(eamc()).arrays, "n_matches": integers(65)}, "1 to 64"),
            (
                "previous-token",
                {"x": np.zeros((4, 4), np.float32).T},
                "must be contiguous",
            ),
        ):
            with pytest.raises(OptionError, match=message):
                store.set_predictor(NativePredictor(name, arrays), EVERYTHING)
        for forecast in (
            NativeForecast(window=0), NativeForecast(most_prefetches=-1), NativeForecast(waste_weight=-1),
            NativeForecast(waste_weight=float("nan")),
        ):  # fmt: skip
            with pytest.raises(OptionError, match="at least one layer ahead"):
                store.set_predictor(good, forecast)
        context.acquire(1, [[0, 1, 2]], np.ones((1, SHAPE.n_embd), np.float32))
        assert store.forecast()[1].any()


def test_slots_hold_the_files_bytes_while_predictors_prefetch_and_change(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 14, readers=2)
    stop = threading.Event()
    counts = rng().integers(0, 9, (50, 4, 8)).astype(np.uint16)
    average = np.full((4, 8), 0.25, np.float32)
    table = NativePredictor(
        "token-id",
        {
            "entry_of": np.arange(50, dtype=np.int32),
            "counts": counts,
            "average": average,
        },
    )

    def change() -> None:
        while not stop.is_set():
            store.set_predictor(
                table, NativeForecast(window=2, most_prefetches=9, waste_weight=0.0)
            )
            store.act_on_forecasts(True)
            time.sleep(0.002)
            store.set_predictor(None)

    def look() -> None:
        while not stop.is_set():
            store.forecast()

    random = np.random.default_rng(1)
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(change), pool.submit(look)]
        for n in range(400):
            context.announce(n, Phase.DECODE, [n % 50])
            ids = random.permutation(8)[:2].tolist()
            for il in range(4):
                fake.check(store, il, ids, context.acquire(il, [ids]))
                time.sleep(0.0001)  # leaves the readers time for prefetches
        stop.set()
        for done in beside:
            done.result()
    store.drain(10)
    fake.token(store, context, [3, 4])
    assert store.counters()["prefetch_started"] > 0


def test_lockstep_predictor_predicts_before_the_next_event(
    fake: FakeModel, open_store: Open
) -> None:
    """Each routing event waits for all earlier predictions (lockstep), so every run
    makes the same forecasts."""
    store, context = open_store(fake, 14, readers=1)
    store.set_predictor(
        native(previous_token(MoeShape.of(fake.layout))),
        NativeForecast(window=4, lockstep=True),
    )
    for _ in range(50):
        context.announce(0, Phase.DECODE, [1])
        for il in range(4):
            context.acquire(il, [[3, 4]])
    # Nothing waits for the predictions of the last event.
    until(lambda: store.counters()["forecast_picks"] >= 49 * 4 * 2)
    assert store.counters()["forecast_right"] == 49 * 4 * 2
