"""Tests the installation of Chromium: a missing package or missing root privileges do not raise an error."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tools import check_machine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Imitates a machine with apt-get and root privileges, but without a browser.

    Returns a list to which each command appends its last word instead of running.
    """
    ran: list[str] = []
    there = {"apt-get"}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(command[-1])
        if command[-1] == "chromium":
            there.add("chromium")
        return subprocess.CompletedProcess(
            command, 100 if command[-1] == "chromium-headless-shell" else 0
        )

    monkeypatch.setattr(check_machine.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        check_machine.shutil, "which", lambda name: name if name in there else None
    )
    monkeypatch.setattr(check_machine.subprocess, "run", run)
    return ran


def test_install_chromium_tries_the_next_package_if_one_is_missing(
    calls: list[str],
) -> None:
    check_machine.install_chromium()
    assert calls == ["update", "chromium-headless-shell", "chromium"]
    check_machine.install_chromium()
    assert len(calls) == 3, "it is there"


def test_install_chromium_without_root_prints_a_note(
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check_machine.os, "geteuid", lambda: 1000)
    check_machine.install_chromium()
    assert calls == [] and "there is no Chromium" in capsys.readouterr().out
