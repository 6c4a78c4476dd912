"""Tests the store's eviction policies. The expected victims are computed by hand, or by
a policy in Python."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel, Open, make_model
from reference_policies import LearnedRates

from moegguf.controller.policies import LOCALITY
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import Float32s
from moegguf.native.store import Store, StoreOptions
from moegguf.trace.simulate import layout_of

# Routed (layer, expert) pairs. Expert (0, 0) is then the least recently used one, and
# expert (1, 1) the most rarely used one.
STORY = [*[(0, 0), (1, 0)] * 8, (0, 0), (1, 1), (1, 0)]


@pytest.fixture
def two(tmp_path: Path) -> FakeModel:
    """Returns a model of two layers with 8 experts each. A token uses one expert of
    each layer."""
    return make_model(tmp_path, n_layer=2, n_used=1)


Told = Callable[..., tuple[Store, Callable[..., None]]]


@pytest.fixture
def told(two: FakeModel, open_store: Open) -> Told:
    """Returns a function that opens a store with 3 slots and routes the events of
    STORY.

    The function returns the store, and a second function, which routes one more event.
    """

    def tell() -> tuple[Store, Callable[..., None]]:
        store, context = open_store(two, 3)
        store.set_policy("next-use")

        def event(il: int, *experts: int) -> None:
            two.acquire(store, context, il, [[expert] for expert in experts])

        for il, expert in STORY:
            event(il, expert)
        return store, event

    return tell


def there(store: Store) -> set[tuple[int, int]]:
    return {
        (int(il), int(expert)) for il, expert in np.argwhere(store.residency() == 2)
    }


def test_next_use_starts_counting_when_a_resident_pool_shrinks(
    two: FakeModel, open_store: Open
) -> None:
    store, context = open_store(two, 16, fill=False)
    store.set_policy("next-use")
    for _ in range(9):
        # No use is counted while every expert is resident.
        two.acquire(store, context, 1, [1])
    store.resize(3)
    for il, expert in [*STORY, (0, 2)]:
        two.acquire(store, context, il, [expert])
    assert there(store) == {(0, 0), (1, 0), (0, 2)}


def test_forecast_of_a_layer_ends_when_that_layer_is_routed(told: Told) -> None:
    store, event = told()
    store.set_forecast([[0] * 8, [0, 1, *[0] * 6]], [1])
    # Ends the forecast of layer 1, which would have kept (1, 1) in its slot.
    event(1, 0)
    event(0, 2)
    assert there(store) == {(0, 0), (1, 0), (0, 2)}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("lfu", "no eviction policy 'lfu'; the known policies are .*lru.*next-use"),
        ("", "no eviction policy ''"),
    ],
)
def test_set_policy_rejects_an_unknown_name_and_keeps_the_policy(
    told: Told, name: str, rule: str
) -> None:
    store, event = told()
    with pytest.raises(OptionError, match=rule):
        store.set_policy(name)
    event(0, 2)
    assert there(store) == {(0, 0), (1, 0), (0, 2)}


@pytest.mark.parametrize("n_slots", [12, 20])
def test_next_use_evicts_the_same_victims_as_rates_learned_in_python(
    tmp_path: Path, open_store: Open, n_slots: int
) -> None:
    """Routes 120 passes: three prompts of three tokens, and single tokens.

    With a probability of 0.8, the experts of a pass's first token follow a repeating
    pattern.
    """
    fake = make_model(tmp_path, n_layer=3)
    shape, rng = MoeShape.of(fake.layout), np.random.default_rng(n_slots)
    rates_of, first_weights = LearnedRates(shape), LearnedRates(shape).weights
    (native, native_context), (scored, scored_context) = (
        open_store(fake, n_slots, simulate=True, sweep=False) for _ in range(2)
    )
    native.set_policy("next-use")
    n_row, motif = len(shape.layers), rng.integers(0, 8, (9, 2))
    scores: Float32s | None = None
    for pass_ in range(120):
        n_tokens = 3 if pass_ % 40 == 39 else 1
        for row, il in enumerate(shape.layers):
            first = motif[(pass_ * (1 + pass_ // 60) + row) % 9]
            ids = np.array([first if token == 0 and rng.random() < 0.8 else rng.permutation(8)[:2]
                            for token in range(n_tokens)], np.int32)  # fmt: skip
            ids[:, 1] = np.where(ids[:, 0] == ids[:, 1], (ids[:, 1] + 1) % 8, ids[:, 1])
            scored.set_scores(scores if n_tokens == 1 else None)
            native_context.acquire(il, ids)
            scored_context.acquire(il, ids)
            assert np.array_equal(native.residency(), scored.residency()), (pass_, il)
            rates_of.count(il, ids)
            ahead = (np.arange(n_row) - row - 2) % n_row + 1
            scores = np.zeros(shape.table, np.float32)
            scores[list(shape.layers)] = (
                1
                - 1 / rates_of.table[list(shape.layers)]
                - np.float32(4 / n_row) * ahead[:, np.newaxis]
            )
    # Learning has changed some weight by more than its initial value.
    assert (np.abs(rates_of.weights - first_weights) > first_weights).any()
    assert native.counters()["evictions"] == scored.counters()["evictions"] > 50


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 7.0])
def test_next_use_assigns_slots_after_any_forecast_values(
    told: Told, value: float
) -> None:
    store, give = told()
    for expert in range(8):
        store.set_forecast(np.full((2, 8), value, np.float32), [0, 1])
        give(expert % 2, expert)
        assert store.residency()[expert % 2, expert] > 0


@pytest.mark.parametrize(
    ("n_slots", "story", "left"),
    [
        # Expert 0, used twice, stays longer than expert 1, used once.
        (3, [0, 0, 1, 2, 3], {0, 2, 3}),
        # Four of five resident experts may be protected, so expert 4 replaces expert 0,
        # and expert 0 is then evicted before expert 5.
        (6, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6], {1, 2, 3, 4, 5, 6}),
        # Expert 0 is used again, so expert 4 replaces expert 1 instead.
        (6, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 5, 6], {0, 2, 3, 4, 5, 6}),
        # Four experts are protected, so the two others are evicted first.
        (6, [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7], {0, 1, 2, 3, 6, 7}),
        # Expert 0 is evicted, returns unprotected, and is evicted again.
        (3, [0, 0, 1, 1, 2, 2, 3, 0, 4], {1, 2, 4}),
    ],
)
def test_slru_protects_experts_that_are_used_again(
    tmp_path: Path, open_store: Open, n_slots: int, story: list[int], left: set[int]
) -> None:
    one = make_model(tmp_path, n_layer=1, n_used=1)
    store, context = open_store(one, n_slots)
    store.set_policy("slru")
    for expert in story:
        one.acquire(store, context, 0, [[expert]])
    assert there(store) == {(0, expert) for expert in left}


# The example in section 3.2.1 of ExpertFlow.
PAPER = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(0, 1, 2, 3))
Expert = tuple[int, int]


class Pool:
    """A simulated store with the policy "locality", and short forms of the calls that a
    controller makes."""

    def __init__(self, n_slots: int) -> None:
        self.store = Store(
            layout_of(PAPER),
            n_slots,
            StoreOptions(repack=False, fill=False, simulate=True, sweep=False),
        )
        self.store.set_policy(LOCALITY.name)
        self.context = self.store.context

    def route(self, il: int, *experts: int) -> set[Expert]:
        """Routes layer `il` to these experts. Returns the experts that were evicted for
        them."""
        before = self.there()
        self.context.acquire(il, [list(experts)])
        return before - self.there()

    def predict(self, **layers: Sequence[int]) -> None:
        """Sets a forecast with probability 1 for some experts.

        The keyword l1=(0, 2) names experts 0 and 2 of layer 1.
        """
        statuses = np.zeros(PAPER.table, np.float32)
        for name, experts in layers.items():
            statuses[int(name[1:]), list(experts)] = 1
        self.store.set_forecast(statuses, [int(name[1:]) for name in layers])

    def prefetch(self, *experts: Expert) -> None:
        il, ids = zip(*experts, strict=True)
        self.store.prefetch(np.array(il, np.int32), np.array(ids, np.int32))
        self.store.drain()

    def there(self) -> set[Expert]:
        return there(self.store)

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


def foretell(pool: Pool) -> None:
    """Routes layer 0 to experts 0 and 1, and predicts and prefetches these experts of
    layers 1 to 3.

    The pool is then full.
    """
    pool.route(0, 0, 1)
    pool.predict(l1=(0, 1), l2=(0, 1), l3=(0, 1))
    pool.prefetch((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
    assert len(pool.there()) == 8


def test_locality_evicts_a_mispredicted_expert_first(pool: Pool) -> None:
    foretell(pool)
    # (1, 1) was predicted but not chosen, so it is evicted before experts of other
    # layers.
    assert pool.route(1, 0, 2) == {(1, 1)}


def test_locality_evicts_completed_layers_next_and_then_the_farthest_prediction(
    pool: Pool,
) -> None:
    foretell(pool)
    assert pool.route(1, 2, 3) == {(1, 0), (1, 1)}
    assert pool.route(2, 2, 3) == {(2, 0), (2, 1)}
    assert pool.route(3, 2, 0) == {(3, 1)}
    pool.predict(l0=(0, 1), l1=(2, 3), l2=(2, 3), l3=(2, 0))  # the next token
    assert pool.route(0, 2, 3) <= {(0, 0), (0, 1), (3, 0), (3, 2)}


def test_locality_keeps_a_hot_expert_after_a_misprediction(pool: Pool) -> None:
    for _ in range(8):
        for il in range(4):
            pool.route(il, 0, 1)
    pool.predict(l1=(0, 1, 3))
    pool.prefetch((1, 3))
    # (1, 0) and (1, 3) were predicted but not chosen.
    assert pool.route(1, 1, 2) == {(1, 3)}
    assert (1, 0) in pool.there()


def test_locality_evicts_a_wasted_prefetch_before_rarely_used_experts(
    pool: Pool,
) -> None:
    for _ in range(8):
        for il in range(4):
            pool.route(il, 0, 1)
    assert pool.route(1, 2, 3) == {(1, 0), (1, 1)}
    pool.predict(l1=(0, 2, 3))
    pool.prefetch((1, 0))
    for il in (2, 3, 0):
        pool.route(il, 0, 1)
    assert pool.route(1, 2, 3) == set()
    assert (1, 0) in pool.route(2, 2, 3), (
        "and not (1, 2) and (1, 3), which were used twice only"
    )


@pytest.mark.parametrize(
    ("probabilities", "active"),
    [
        ([0.4, 0.1, 0.3, 0.0], {0, 2}),
        ([0.9, 0.6, 0.7, 0.4], {0, 1, 2}),
        ([0.2, 0.0, 0.0, 0.0], {0}),
    ],
)
def test_locality_keeps_the_top_k_and_all_likely_experts_of_a_forecast(
    probabilities: list[float], active: set[int]
) -> None:
    pool = Pool(4)
    pool.prefetch(*((1, expert) for expert in range(4)))
    pool.store.set_forecast([[0.0] * 4, probabilities, [0.0] * 4, [0.0] * 4], [1])
    assert pool.route(0, *range(4 - len(active))) == {
        (1, expert) for expert in range(4) if expert not in active
    }
    pool.close()


def test_locality_without_forecasts_evicts_by_decayed_frequency(pool: Pool) -> None:
    for _ in range(6):
        for il in range(4):
            pool.route(il, 0, 1)
    for il in range(4):
        pool.route(il, 2, 3)  # experts 2 and 3 of each layer are used once
    for il in range(4):
        pool.route(il, 0, 1)
    assert pool.there() == {(il, expert) for il in range(4) for expert in (0, 1)}


def test_sparsity_reproduces_figure_6_of_moe_infinity() -> None:
    """An expert's predicted share of its layer determines eviction until the layer is
    predicted again.

    In prompts, and before the first prediction, the least recently used expert is
    evicted.
    """
    shape = MoeShape(n_layer=3, n_expert=3, n_expert_used=1, layers=(0, 1, 2))
    store = Store(
        layout_of(shape),
        3,
        StoreOptions(repack=False, fill=False, simulate=True, sweep=False),
    )
    context = store.context
    store.set_policy("sparsity")

    def route(il: int, *ids: int) -> set[Expert]:
        before = there(store)
        context.acquire(il, [[expert] for expert in ids])
        return before - there(store)

    for il, expert in ((1, 1), (0, 0), (2, 0)):
        route(il, expert)
    store.set_forecast([[1 / 3, 2 / 3, 0], [0, 1, 0], [0, 1, 0]], [0, 1, 2])
    assert route(0, 1) == {(2, 0)}, "LRU would evict (1, 1)"
    assert route(1, 0) == {(0, 0)}, (
        "(1/3 + epsilon) * 1; of (1, 1) it is 1 * 2/3, after its layer was routed, too"
    )
    assert route(0, 0, 2) == {(1, 1), (0, 1)}, "a prompt takes the least recently used"
    store.close()
