"""The chat on a terminal: turns are remembered, commands are not sent to the model, Ctrl-C stops only the answer."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from commanding import TinyModel, environment

PROMPT = ">>> "


class Terminal:
    """A moegguf process with a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.unread = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "moegguf.faces.cli", *arguments]
            os.execvpe(command[0], command, environment(TERM="dumb"))

    def read_until(self, words: str, seconds: float = 30) -> str:
        """What appears, up to and with `words`."""
        end = time.monotonic() + seconds
        while words not in self.unread:
            ready, *_ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{words!r} did not appear in {self.unread!r}"
            self.unread += os.read(self.fd, 65536).decode("utf-8", errors="replace")
        before, _, self.unread = self.unread.partition(words)
        return before + words

    def say(self, line: str) -> None:
        os.write(self.fd, line.encode())

    def exit_code(self, seconds: float = 30) -> int:
        for _ in range(int(seconds * 10)):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("the chat did not end")


@pytest.fixture
def chat(tiny: TinyModel) -> Iterator[Terminal]:
    terminal = Terminal("run", str(tiny()), "--expert-cache", "50%", "-t", "1", "-c", "2048", "--temperature", "0")
    yield terminal
    os.close(terminal.fd)


def test_a_chat_answers_obeys_and_ends(chat: Terminal) -> None:
    chat.read_until(PROMPT)
    chat.say("/stats\r")
    chat.read_until("There is no answer yet.")
    chat.read_until(PROMPT)
    chat.say("/nonsense\r")
    chat.read_until("Unknown command '/nonsense'")
    chat.read_until(PROMPT)
    chat.say("hello\r")
    time.sleep(1)
    chat.say("\x03")  # in the answer or after it
    chat.read_until(PROMPT)
    chat.say("/stats\r")
    assert "eval count" in chat.read_until("expert cache")
    chat.read_until(PROMPT)
    chat.say("/bye\r")
    assert chat.exit_code() == 0


def test_ctrl_d_leaves(chat: Terminal) -> None:
    chat.read_until(PROMPT)
    time.sleep(1)  # the prompt is there before the terminal is switched over
    chat.say("\x04")
    assert chat.exit_code() == 0
