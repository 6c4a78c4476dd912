"""`moegguf serve`: what its flags hand to the workers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from moegguf.cli.serve import serve
from moegguf.errors import OptionError
from moegguf.server import serve as server
from moegguf.settings import read_environment


class Listener:
    """A socket that nobody listens on."""

    def close(self) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """MOEGGUF_SYSTEM at each start of a server, none of which runs."""
    systems: list[str] = []

    def run(*_: Any) -> int:
        systems.append(os.environ["MOEGGUF_SYSTEM"])
        return 0

    monkeypatch.setenv("MOEGGUF_SYSTEM", "")  # and gone afterwards
    monkeypatch.setattr(server, "listen", lambda host: Listener())
    monkeypatch.setattr(server, "run_server", run)
    return systems


def test_workers_get_the_system_by_the_environment(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve() == serve(system="promoe") == 0
    monkeypatch.setenv("MOEGGUF_SYSTEM", "lru")
    serve()
    assert started == ["moegguf", "promoe", "lru"]
    with pytest.raises(OptionError, match="no system 'promo'"):
        serve(system="promo")
    assert len(started) == 3


def test_workers_get_the_warm_start_by_the_environment(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_WARM_START", "1")
    serve()
    assert read_environment().warm_start
    serve(warm_start=False)
    assert not read_environment().warm_start
    assert len(started) == 2
