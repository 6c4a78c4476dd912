"""Pieces leave a worker at once when they are rare, joined when they are many, and none is lost or out of order."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from moegguf.generate.request import Delta, TokenLogprob, ToolCall
from moegguf.serving.delta_buffer import INTERVAL_S, DeltaBuffer, join


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_piece_leaves_at_once_and_the_next_ones_together() -> None:
    sent, clock = list[Delta](), Clock()
    outbox = DeltaBuffer(sent.append, clock=clock)
    for letter in "abc":
        outbox.put(Delta(letter))
        clock.now_s += INTERVAL_S * 0.4
    assert [piece.text for piece in sent] == ["a"]
    outbox.put(Delta("d"))
    assert [piece.text for piece in sent] == ["a", "bcd"]
    outbox.put(Delta("e"))
    outbox.flush()
    outbox.flush()
    assert [piece.text for piece in sent] == ["a", "bcd", "e"]


def test_pieces_of_a_slow_model_all_leave_at_once() -> None:
    sent, clock = list[Delta](), Clock()
    outbox = DeltaBuffer(sent.append, clock=clock)
    for letter in "abc":
        outbox.put(Delta(letter))
        assert sent[-1].text == letter
        clock.now_s += INTERVAL_S


def test_who_wants_no_stream_gets_one_piece() -> None:
    sent, clock = list[Delta](), Clock()
    outbox = DeltaBuffer(sent.append, math.inf, clock)
    for letter in "abc":
        outbox.put(Delta(letter))
        clock.now_s += 1000
    assert sent == []
    outbox.flush()
    assert sent == [Delta("abc")]


def test_joining_keeps_everything_in_order() -> None:
    calls = tuple(ToolCall(str(i), "f", {}) for i in range(2))
    logprobs = tuple(TokenLogprob(letter, -1.0) for letter in "ab")
    deltas = [Delta("a", "x", calls[:1], logprobs[:1]), Delta("b", "y", calls[1:], logprobs[1:])]
    assert join(deltas) == Delta("ab", "xy", calls, logprobs)
    assert join(deltas[:1]) is deltas[0]


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0, 0.1))))
def test_nothing_is_lost(steps: list[tuple[str, float]]) -> None:
    sent, clock = list[Delta](), Clock()
    outbox = DeltaBuffer(sent.append, clock=clock)
    for text, wait_s in steps:
        outbox.put(Delta(text))
        clock.now_s += wait_s
    outbox.flush()
    assert "".join(piece.text for piece in sent) == "".join(text for text, _ in steps)
