"""Which replica a request prefers: its conversation's holder, then the least loaded."""

import subprocess
import sys
from typing import Any

import pytest

from moegguf.generate.request import GenerationRequest
from moegguf.serving.ray.preference import (
    FIRST_CUT_BYTES,
    MAX_IMBALANCE,
    Candidate,
    Conversation,
    Sequences,
    after,
    conversation_of,
    rank,
)

WITHOUT_RAY = ("config", "preference")


def talk(*contents: str, **fields: Any) -> GenerationRequest:
    system, *turns = contents
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return GenerationRequest(messages=tuple(messages), **fields)


def holding(*conversations: Conversation) -> Sequences:
    return tuple(each.digests for each in conversations)


FIRST = conversation_of(talk("", "What is an expert?"))
NEXT = conversation_of(talk("", "What is an expert?", "A matrix.", "Why?"))
OTHER = conversation_of(talk("", "Who are you?"))


def test_preference_needs_no_ray() -> None:
    modules = ", ".join(f"moegguf.serving.ray.{name}" for name in WITHOUT_RAY)
    code = f"import sys; sys.modules['ray'] = None; import {modules}"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_turn_begins_with_the_turns_before_it() -> None:
    assert NEXT.digests[: len(FIRST.digests)] == FIRST.digests
    assert not set(OTHER.digests) & set(NEXT.digests)


@pytest.mark.parametrize(
    "other",
    [
        talk("", "What is an expert?", tools=({"type": "function", "function": {"name": "f"}},)),
        talk("", "What is an expert?", template="{{ messages }}"),
        talk("", "What is an expert?", think=True),
        talk("Be short.", "What is an expert?"),
        talk("", "What is an expert?", owner="another"),
    ],
)
def test_its_owner_and_what_the_template_writes_first_are_part_of_every_prefix(other: GenerationRequest) -> None:
    assert not set(conversation_of(other).digests) & set(FIRST.digests)


def test_a_system_message_alone_is_not_a_conversation() -> None:
    system = "You are short. " * 3
    one, two = (conversation_of(talk(system, f"{text}? " * 40)) for text in ("Why", "How"))
    assert set(one.digests) & set(two.digests)
    assert one.n_shared(two.digests) == 0


def test_a_long_beginning_counts_without_the_rest() -> None:
    document = "An expert is a matrix. " * 400
    one, two = (conversation_of(talk(document, text)) for text in ("Why?", "How?"))
    assert one.n_shared(two.digests) == len(one.digests) - 1


def test_a_prompt_is_cut_at_doubling_lengths() -> None:
    long = conversation_of(GenerationRequest(prompt="x" * 3000)).digests
    for n_cuts in range(4):
        n_bytes = FIRST_CUT_BYTES << n_cuts
        assert conversation_of(GenerationRequest(prompt="x" * n_bytes)).digests[-1] == long[n_cuts]
    assert len(long) == 5


def test_the_holder_of_the_conversation_comes_first() -> None:
    candidates = [Candidate(holding(OTHER)), Candidate(holding(FIRST), queue=2), Candidate()]
    assert rank(NEXT, candidates) == [[1], [2, 0]]


def test_of_two_holders_the_one_with_more_of_it_comes_first() -> None:
    third = conversation_of(talk("", "What is an expert?", "A matrix.", "Why?", "So.", "And?"))
    assert rank(third, [Candidate(holding(FIRST)), Candidate(holding(NEXT))])[0] == [1]


def test_where_nothing_is_known_all_are_equal_and_an_empty_cache_comes_first() -> None:
    assert rank(Conversation(), [Candidate(holding(OTHER)), Candidate(), Candidate()]) == [[1, 2, 0]]
    assert rank(NEXT, []) == []


def test_a_preferred_replica_with_too_long_a_queue_is_not_waited_for() -> None:
    candidates = [Candidate(holding(FIRST), queue=MAX_IMBALANCE), Candidate(queue=0)]
    assert rank(NEXT, candidates) == [[1, 0]]


def test_what_is_sent_takes_the_place_of_its_earlier_turns_and_then_of_the_oldest() -> None:
    assert after((), FIRST, 1) == holding(FIRST)
    assert after(holding(FIRST), OTHER, 1) == holding(OTHER)
    both = after(holding(FIRST), OTHER, 2)
    assert both == holding(FIRST, OTHER)
    assert after(both, NEXT, 2) == holding(OTHER, NEXT)
    assert after(holding(OTHER, NEXT), conversation_of(talk("", "Where?")), 2)[0] == NEXT.digests
