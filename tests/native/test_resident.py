"""A slot for every expert; pools that shrink and grow while they are used; how often each expert was used."""

import pytest
from fake_model import FakeModel, Open, check_counters

from moegguf.errors import OptionError
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.predictor import NativeForecast, NativePredictor


def test_with_a_slot_for_every_expert_slot_ids_are_expert_ids(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 32, fill=False)
    assert store.info()["resident"] == 1
    for il in range(4):
        slots = fake.acquire(store, context, il, [[7, 0], [3, 3 + il]])
        assert slots.tolist() == [[7, 0], [3, 3 + il]]


def test_more_slots_than_experts_are_not_allocated(fake: FakeModel, open_store: Open) -> None:
    store, _ = open_store(fake, 1_000_000)
    assert store.info()["n_slots"] == 32


def test_fill_reads_every_expert_once_and_gates_then_read_nothing(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 32)
    store.drain(10)
    assert (store.residency() == 2).all()
    filled = store.counters()
    assert filled["bytes_prefetched"] == fake.layout.expert_bytes
    assert filled["prefetch_started"] == 0
    for first in range(0, 8, 2):
        fake.token(store, context, [first, first + 1])
    counters = store.counters()
    assert counters["reads"] == filled["reads"]
    assert counters["hits_ready"] == counters["lookups"] == 32
    check_counters(counters, 32)


def test_tokens_are_awaited_where_something_uses_them(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 32, fill=False)
    assert context.awaits_tokens(1, Phase.DECODE), "experts are still to be read"
    for first in range(0, 8, 2):
        fake.token(store, context, [first, first + 1])
    store.set_predictor(NativePredictor("previous-token"), NativeForecast())
    assert not context.awaits_tokens(1, Phase.DECODE), "of experts that are all there nothing is predicted"
    seen: list[Announcement | RoutingEvent] = []
    context.announce(7, Phase.PREFILL, [10, 11])
    assert not context.awaits_tokens(8, Phase.DECODE)
    store.listen(on_routing=seen.append, on_tokens=seen.append)
    assert context.awaits_tokens(8, Phase.DECODE)
    context.acquire(0, [1, 4])  # not announced
    store.listen()
    (event,) = seen
    assert isinstance(event, RoutingEvent)
    assert (event.sequence, event.phase, event.first_token) == (8, Phase.DECODE, -1), "those before are forgotten"
    assert not context.awaits_tokens(8, Phase.DECODE)
    store.resize(20)
    assert context.awaits_tokens(8, Phase.DECODE), "from the next routing event on slots have to be filled"


@pytest.mark.parametrize("n_slots", [-1, 0, 1, 33, 1 << 30])
def test_sizes_that_the_pool_cannot_have_are_refused(fake: FakeModel, open_store: Open, n_slots: int) -> None:
    store, context = open_store(fake, 32)
    with pytest.raises(OptionError, match="2 to 32 slots"):
        store.resize(n_slots)
    fake.token(store, context, [0, 1])


def test_activity_counts_look_ups_and_slots_per_expert(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8)
    for experts in ([0, 1], [0, 2], [0, 1]):
        fake.token(store, context, experts)
    uses, loads = store.activity()
    counters = store.counters()
    assert uses.shape == loads.shape == store.shape
    assert uses[0].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert uses.sum() == counters["lookups"]
    assert loads.sum() == counters["misses"]


def test_an_expert_that_was_evicted_and_came_back_counts_as_two_loads(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 2)
    for expert in (0, 1, 2, 0):
        fake.acquire(store, context, 0, [[expert]])
    assert store.activity()[1][0].tolist()[:3] == [2, 1, 1]


def test_watching_can_be_turned_on_and_off(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 32)
    store.watch(True)
    fake.token(store, context, [1, 5])
    store.watch(False)
    assert store.activity()[0].sum() == store.counters()["lookups"] == 8
