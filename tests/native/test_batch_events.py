"""Announcements of several sequences: events tell them apart, ubatch by ubatch, also in the last layer."""

import ctypes as c
from dataclasses import replace

import numpy as np
import pytest
from fake_model import FakeModel, Open
from traces import SMALL, random_trace

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies import LRU, AnyPolicy, Lfu, make_policy
from moegguf.controller.predictors.base import NoPrediction
from moegguf.errors import OptionError
from moegguf.native import abi, library
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import native_policies
from moegguf.trace.simulate import Simulation
from moegguf.trace.trace import Trace
from predictors.study.arrange import grouped, used_experts
from predictors.study.synthesize import shape_of, synthesize


def test_events_carry_the_sequence_and_phase_of_each_token(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 16)
    seen: list[Announcement | RoutingEvent] = []
    store.listen(on_routing=seen.append, on_tokens=seen.append)
    context.announce([4, 4, 5, 6, 6], [0, 0, 1, 0, 0], [10, 11, 12, 13, 14], outputs=[0, 1, 1, 0, 1])
    context.acquire(0, np.zeros((3, 2)))  # the first ubatch
    context.acquire(3, np.zeros((2, 2)))  # its last layer, for two of its tokens
    context.acquire(0, np.zeros((2, 2)))
    context.acquire(3, np.zeros((1, 2)))
    context.acquire(0, np.zeros((1, 2)))  # never announced
    store.listen()
    announced, *events = seen
    assert isinstance(announced, Announcement)
    assert (announced.sequence, announced.phase) == (4, Phase.DECODE)
    found = np.stack([announced.sequences, announced.phases, announced.outputs])  # type: ignore[list-item]
    assert found.tolist() == [[4, 4, 5, 6, 6], [0, 0, 1, 0, 0], [0, 1, 1, 0, 1]]
    sequences = [None if event.sequences is None else event.sequences.tolist() for event in events]
    phases = [None if event.phases is None else event.phases.tolist() for event in events]
    assert sequences == [[4, 4, 5], [4, 5], [6, 6], [6], None]
    assert phases == [[0, 0, 1], [0, 1], [0, 0], [0], None]
    assert {event.phase for event in events[:4]} == {Phase.DECODE}, "a controller acts for the one that decodes"
    assert [event.first_token for event in events if isinstance(event, RoutingEvent)] == [0, 0, 3, 3, -1]


def test_one_sequence_needs_no_arrays(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 16)
    seen: list[Announcement | RoutingEvent] = []
    store.listen(on_routing=seen.append, on_tokens=seen.append)
    context.announce([4, 4], [1, 1], [10, 11], outputs=[0, 1])
    context.acquire(0, np.zeros((2, 2)))
    context.announce(5, Phase.PREFILL, ())
    store.listen()
    assert [(event.sequence, event.phase) for event in seen] == [(4, 1), (4, 1), (5, 0)]
    assert all(event.sequences is None for event in seen)


def test_an_announcement_that_does_not_fit_is_refused(fake: FakeModel, open_store: Open) -> None:
    _, context = open_store(fake, 16)
    with pytest.raises(OptionError, match="2 tokens have a sequence"):
        context.announce([1, 2, 3], Phase.DECODE, [10, 11])
    with pytest.raises(OptionError, match="a phase"):
        context.announce([1, 2], [0, 2], [10, 11])
    with pytest.raises(OptionError, match="a phase"):
        context.announce(1, 7, [10, 11])  # type: ignore[arg-type]
    event = abi.TokensEvent(1, 0, 0, None, (c.c_int32 * 1)(), None, None)
    with pytest.raises(OptionError):
        library.load().moegguf_context_announce(context.handle, event)


def batches() -> Trace:
    trace = random_trace(n_sequences=8, n_prefill=3, n_decode=12)
    of = [np.flatnonzero(trace.sequence_of == sequence) for sequence in range(8)]
    prompts = [np.concatenate([tokens[:3] for tokens in of[half : half + 4]]) for half in (0, 4)]
    return grouped(trace, [*prompts, *(np.array([tokens[3 + step] for tokens in of]) for step in range(12))])


POLICIES = {"lru": lambda: LRU, "lfu": Lfu, "sparsity": lambda: make_policy("sparsity", SMALL, Artifacts(None))}


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_of_a_trace_is_replayed_as_it_was(name: str) -> None:
    def run(policy: AnyPolicy) -> dict[str, int]:
        return dict(Simulation(batches(), policy, NoPrediction(SMALL), 40).run().counters)

    counters = run(POLICIES[name]())
    assert counters == run(POLICIES[name]())
    assert (counters["passes"], counters["tokens"]) == (14, 8 * 15)
    paths = used_experts(batches(), np.arange(8 * 15))
    starts = batches().pass_start[:-1]
    distinct = np.logical_or.reduceat(paths, starts, axis=0).sum()
    assert counters["lookups"] == distinct


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_of_prompts_beside_decoding_ones_are_not_decoded(name: str) -> None:
    trace = random_trace(n_sequences=3, n_prefill=4, n_decode=6)
    first, second, third = (np.flatnonzero(trace.sequence_of == sequence) for sequence in range(3))
    mixed = [np.array([first[4 + i], second[i], third[i]]) for i in range(4)]
    alone = [np.array([first[8], second[4], third[4]]), np.array([first[9]]), *(third[at : at + 1] for at in (5, 6))]
    trace = grouped(trace, [first[:4], *mixed, *alone])
    found = Simulation(trace, POLICIES[name](), NoPrediction(SMALL), 40).run()
    assert found.decode.tokens == np.count_nonzero(trace.phase_of == Phase.DECODE) == 4 + 3 + 1 + 2
    assert found.whole.tokens == trace.n_tokens == 4 + 12 + 6
    assert found.decode.lookups > found.whole.lookups / 2, "what mixed passes needed counts as decoding"


def test_sequences_that_decode_together_keep_what_they_use_often() -> None:
    """Eight topics pass through the pool between two uses of an expert, which recency cannot bridge."""
    shape = shape_of("qwen3-30b", 4, 60, 4)
    trace = synthesize("qwen3-30b", shape, 128, 0, 8)
    trace = replace(trace, tokens=np.zeros(trace.n_tokens, np.int32))  # known, so that passes are announced
    trace = grouped(trace, [np.arange(8) * 128 + at for at in range(128)])
    misses = {
        name: Simulation(trace, native_policies()[name], NoPrediction(shape), 89).run().counters["misses"]
        for name in ("lru", "next-use")
    }
    assert misses["next-use"] < 0.7 * misses["lru"]
