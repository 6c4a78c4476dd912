"""Lines of a block leave in one call, in order; none is lost when the block fails, none is held outside."""

from __future__ import annotations

import pytest

from moegguf.serving.outbox import Outbox


class Socket:
    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.calls.append(data)


def test_lines_of_a_block_leave_in_one_call() -> None:
    socket = Socket()
    outbox = Outbox(socket)  # type: ignore[arg-type]  # only sendall is used
    outbox.put(b"a\n")
    with outbox.together():
        assert outbox.holds
        outbox.put(b"b\n")
        outbox.put(b"c\n")
        assert socket.calls == [b"a\n"]
    with outbox.together():
        pass
    assert not outbox.holds
    outbox.put(b"d\n")
    assert socket.calls == [b"a\n", b"b\nc\n", b"d\n"]


def test_a_block_that_fails_sends_what_it_has() -> None:
    socket = Socket()
    outbox = Outbox(socket)  # type: ignore[arg-type]

    def fail() -> None:
        with outbox.together():
            outbox.put(b"a\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    outbox.put(b"b\n")
    assert socket.calls == [b"a\n", b"b\n"]
