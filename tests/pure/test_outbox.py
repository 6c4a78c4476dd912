"""What a worker sends: lines of a block in one call, rare deltas at once, frequent ones joined; nothing is lost."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegguf.generate.request import Delta, Timing, TokenLogprob, ToolCall, join
from moegguf.serving.outbox import DELTA_S, Events, Outbox


class Socket(socket.socket):
    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def sendall(self, data: bytes, *_: object) -> None:  # type: ignore[override]
        self.calls.append(data)


def test_lines_of_a_block_leave_in_one_call_also_where_it_fails() -> None:
    connection = Socket()
    outbox = Outbox(connection)

    def fill_and_fail() -> None:
        with outbox.one_call():
            assert outbox.holds
            outbox.put(b"b\n")
            outbox.put(b"c\n")
            assert connection.calls == [b"a\n"]
            raise RuntimeError

    outbox.put(b"a\n")
    with pytest.raises(RuntimeError):
        fill_and_fail()
    with outbox.one_call():
        pass
    outbox.put(b"d\n")
    assert not outbox.holds and connection.calls == [b"a\n", b"b\nc\n", b"d\n"]


def sent(texts_and_waits: list[tuple[str, float]], *, stream: bool = True) -> tuple[list[str], str]:
    """The deltas that are sent before the end, and after it, where `texts` come with these waits in seconds."""
    found, now_s = list[str](), 1000.0
    events = Events(
        1, stream=stream, send=lambda _, delta: found.append(delta.text),  # type: ignore[union-attr]
        sent_first=lambda: None, end=lambda *_: None, clock=lambda: now_s,
    )  # fmt: skip
    for text, wait_s in texts_and_waits:
        events.on_delta(Delta(text))
        now_s += wait_s
    before = list(found)
    events.on_end(Timing(), None)
    return before, "".join(found[len(before) :])


def test_the_first_delta_is_sent_at_once_and_frequent_ones_together() -> None:
    often, seldom = DELTA_S * 0.4, DELTA_S * 1.1
    assert sent([(letter, often) for letter in "abcde"]) == (["a", "bcd"], "e")
    assert sent([(letter, seldom) for letter in "abc"]) == (["a", "b", "c"], "")
    assert sent([(letter, 1000) for letter in "abc"], stream=False) == ([], "abc")


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0, 0.1))))
def test_nothing_is_lost(steps: list[tuple[str, float]]) -> None:
    before, rest = sent(steps)
    assert "".join(before) + rest == "".join(text for text, _ in steps)


def test_joining_keeps_everything_in_order() -> None:
    calls = tuple(ToolCall(str(i), "f", {}) for i in range(2))
    logprobs = tuple(TokenLogprob(letter, -1.0) for letter in "ab")
    deltas = [Delta("a", "x", calls[:1], logprobs[:1]), Delta("b", "y", calls[1:], logprobs[1:])]
    assert join(deltas) == Delta("ab", "xy", calls, logprobs)
    assert join(deltas[:1]) is deltas[0]
