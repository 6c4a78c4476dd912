"""Rare deltas are sent at once, frequent ones joined; none is lost or out of order."""

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


def test_the_first_delta_is_sent_at_once_and_the_next_ones_together() -> None:
    sent, clock = list[Delta](), Clock()
    buffer = DeltaBuffer(sent.append, clock=clock)
    for letter in "abc":
        buffer.put(Delta(letter))
        clock.now_s += INTERVAL_S * 0.4
    assert [delta.text for delta in sent] == ["a"]
    buffer.put(Delta("d"))
    assert [delta.text for delta in sent] == ["a", "bcd"]
    buffer.put(Delta("e"))
    buffer.flush()
    buffer.flush()
    assert [delta.text for delta in sent] == ["a", "bcd", "e"]


def test_deltas_of_a_slow_model_are_all_sent_at_once() -> None:
    sent, clock = list[Delta](), Clock()
    buffer = DeltaBuffer(sent.append, clock=clock)
    for letter in "abc":
        buffer.put(Delta(letter))
        assert sent[-1].text == letter
        clock.now_s += INTERVAL_S


def test_without_streaming_there_is_one_delta() -> None:
    sent, clock = list[Delta](), Clock()
    buffer = DeltaBuffer(sent.append, math.inf, clock)
    for letter in "abc":
        buffer.put(Delta(letter))
        clock.now_s += 1000
    assert sent == []
    buffer.flush()
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
    buffer = DeltaBuffer(sent.append, clock=clock)
    for text, wait_s in steps:
        buffer.put(Delta(text))
        clock.now_s += wait_s
    buffer.flush()
    assert "".join(delta.text for delta in sent) == "".join(text for text, _ in steps)
