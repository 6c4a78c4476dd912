"""`moegguf serve`: what its flags hand to the workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
from command_line import TinyModel

from moegguf.cli.serve import serve, serve_settings
from moegguf.engine import devices, here
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout
from moegguf.server import serve as server
from moegguf.settings import read_environment


class Listener:
    """A socket that nobody listens on."""

    def close(self) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """MOEGGUF_STRATEGY at each start of a server, none of which runs."""
    strategies: list[str] = []

    def run(*_: Any) -> int:
        strategies.append(os.environ["MOEGGUF_STRATEGY"])
        return 0

    monkeypatch.setenv("MOEGGUF_STRATEGY", "")  # and gone afterwards
    monkeypatch.setattr(server, "listen", lambda host: Listener())
    monkeypatch.setattr(server, "run_server", run)
    return strategies


def test_workers_get_the_strategy_by_the_environment(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve() == serve(strategy="promoe") == 0
    monkeypatch.setenv("MOEGGUF_STRATEGY", "lru")
    serve()
    assert started == ["", "promoe", "lru"]
    with pytest.raises(OptionError, match="no strategy 'promo'"):
        serve(strategy="promo")
    assert len(started) == 3


def test_what_needs_a_gpu_is_told_where_there_is_none(
    started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "slots")
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "")
    serve()
    serve(placement="cpu")
    assert capsys.readouterr().err == ""
    serve(placement="layers")
    assert "--placement layers needs a GPU, and this build of moegguf sees none" in capsys.readouterr().err
    serve(vram_cache="50%")
    assert "models with experts cannot be loaded" in capsys.readouterr().err
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    serve(placement="slots")
    assert capsys.readouterr().err == "" and len(started) == 5


def test_a_placement_of_the_environment_without_a_gpu_is_a_reason(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "has_gpu", lambda: False)
    monkeypatch.setattr(here, "gpus", list)
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "slots")
    layout = read_layout(tiny())
    assert "sees no GPU: the CPU computes every layer" in here.plan_here(layout, "50%").reasons[-1]
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "auto")
    assert not any("sees no GPU" in reason for reason in here.plan_here(layout, "50%").reasons)


def test_workers_get_the_warm_start_by_the_environment(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_WARM_START", "1")
    serve()
    assert read_environment().warm_start
    serve(warm_start=False)
    assert not read_environment().warm_start
    assert len(started) == 2


def test_flags_count_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TRUST_NETWORK": "10.0.0.0/8", "API_KEY": "k", "NUM_PARALLEL": "3", "MEMORY": "1GiB"}.items():
        monkeypatch.setenv(f"MOEGGUF_{name}", value)
    found = serve_settings(1, {"trusted": (), "api_key": "", "n_parallel": 0, "memory_bytes": 5})
    assert (found.trusted, found.api_key, found.n_parallel, found.memory_bytes, found.host.port) == ((), "k", 3, 5, 1)
