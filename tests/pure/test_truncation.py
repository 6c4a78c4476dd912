"""Which messages and tokens stay when not all fit."""

import itertools
from typing import Any

import pytest

from moegguf.generate.prompt import Conversation, cut_middle, longest, n_after_shift


def messages(roles: str) -> list[dict[str, Any]]:
    """One for each letter: s(ystem), u(ser), a(ssistant), t(ool)."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[letter], "content": f"{letter}{i}"} for i, letter in enumerate(roles)]


def texts(kept: list[dict[str, Any]]) -> str:
    return " ".join(message["content"] for message in kept)


@pytest.mark.parametrize(("n_keep", "left"), [(4, 258), (0, 256), (-5, 256), (500, 506), (511, 511), (9999, 511)])
def test_a_shift_frees_half_of_what_may_go(n_keep: int, left: int) -> None:
    """Ollama's rule: 512 - (512 - num_keep) / 2, and at least one token goes."""
    assert n_after_shift(512, n_keep) == left
    kept = cut_middle(range(2000), 512, n_keep)
    n_first = min(max(n_keep, 0), 511)
    assert kept == [*range(n_first), *range(2000 - left + n_first, 2000)]


def test_all_tokens_of_the_ends_stay_where_they_are_few() -> None:
    assert cut_middle(range(400), 1000, 4) == [*range(400)]
    assert cut_middle(range(501), 1000, 4) == [*range(501)]
    assert cut_middle(range(3), 1000, 4) == [*range(3)]


def test_a_conversation_begins_at_a_question_or_a_later_call() -> None:
    conversation = Conversation(messages("suauatauatat"))
    assert conversation.begins == [1, 3, 7, 8, 10]
    assert texts(conversation.kept(3)) == "s0 u3 a4 t5 a6 u7 a8 t9 a10 t11"
    assert texts(conversation.kept(10)) == "s0 u7 a10 t11", "the question goes, or a result loses its call"


def test_without_a_question_nothing_is_lost() -> None:
    assert Conversation(messages("s")).steady_begin([0], 5) == 0
    assert texts(Conversation(messages("sa")).kept(1)) == "s0 a1"


def test_the_beginning_stays_for_several_turns() -> None:
    """Else every prompt would begin in another way, and nothing of the context could be reused."""
    turns = messages("ua" * 40 + "u")
    begins = []
    for n in range(1, len(turns) + 1, 2):
        begin = Conversation(turns[:n]).steady_begin([10] * n, 100)
        assert 0 < (n - begin) * 10 <= 100
        begins.append(begin)
    assert begins == sorted(begins)
    lasts = [len(list(group)) for _, group in itertools.groupby(begins)]
    assert min(lasts[:-1]) >= 2 and len(lasts) < len(begins) / 2


def test_a_message_larger_than_the_room_begins_the_conversation_alone() -> None:
    assert Conversation(messages("uauau")).steady_begin([10, 10, 10, 10, 500], 100) == 4


def test_the_longest_message_is_not_the_systems() -> None:
    some = [*messages("suat"), {"role": "user", "content": [{"type": "image"}]}]
    some[0]["content"] = "x" * 99
    some[3]["content"] = "x" * 9
    assert longest(some) == 3
    assert longest(messages("s")) is None
