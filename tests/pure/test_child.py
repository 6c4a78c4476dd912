"""Tests that killing a child process leaves the exit code to asyncio."""

import asyncio
import logging
import signal
import subprocess

import pytest

from moegguf.child import child_command, kill_child


def test_kill_child_keeps_the_exit_code_and_asyncio_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    polled = []
    monkeypatch.setattr(
        subprocess.Popen, "poll", lambda process: polled.append(process.pid)
    )

    async def killed() -> int:
        child = await asyncio.create_subprocess_exec(
            *child_command("timeit"), "-s", "import time", "time.sleep(60)"
        )
        kill_child(child)
        assert not polled, "poll() would take the exit code that asyncio waits for"
        code = await child.wait()
        kill_child(child)
        return code

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(killed()) == -signal.SIGKILL
    assert not caplog.records
