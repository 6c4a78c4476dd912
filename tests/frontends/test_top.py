"""`moegguf top`: its frames at every size, its JSON, and the command in a terminal."""

import base64
import json
import re
import threading
from typing import Any

import pytest
from command_line import Command, environment
from fake_manager import BusyManager, FakeManager, running
from rich.console import Console
from starlette.applications import Starlette
from terminal import Terminal, control, moegguf_command

from moegguf.cli.top import apply_line
from moegguf.cli.top_screen import ModelView, Screen, state_rows
from moegguf.server import live
from moegguf.server.common.errors import HANDLERS

LOADED = {"name": "demo:latest", "size_bytes": 76_000_000, "n_ctx": 4096, "queue": 2, "busy": True, "stopping": False}
LOADED |= {"expires": None}
COLOURS = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")


def line_of(tokens: int, name: str = "demo:latest", n_layer: int = 6, n_expert: int = 32) -> dict[str, Any]:
    """A line of /live: nine of ten lookups hit, a megabyte per token."""
    map_ = base64.b64encode(bytes(i % 3 for i in range(n_layer * n_expert))).decode()
    stats = {"tokens": tokens, "lookups": 10 * tokens, "hits_ready": 9 * tokens, "hits_late": 0}
    stats |= {"bytes_read": 1_000_000 * tokens, "stall_s": 0.25 * tokens, "eval_s": float(tokens)}
    maps = {"state": map_, "uses": map_, "loads": map_, "layers": list(range(n_layer)), "n_expert": n_expert}
    return {
        "model": name,
        **maps,
        "stats": stats,
        "busy": True,
        "tokens_per_s": 12.5,
        "loaded": {**LOADED, "name": name},
    }


def models_of(*names: str, **shape: int) -> dict[str, ModelView]:
    models: dict[str, ModelView] = {}
    apply_line(models, {"loaded_models": list(names)})
    for tokens in (10, 20):
        for name in names:
            apply_line(models, line_of(tokens, name, **shape))
    return models


def frame(models: dict[str, ModelView], width: int, height: int | None) -> list[str]:
    console = Console(width=width, height=height or 25, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(Screen("http://localhost", models.values(), height=height, keys="q quits"))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_frame_shows_figures_now_and_since_load() -> None:
    lines = frame(models_of("demo:latest"), 100, 24)
    assert lines[0] == "moegguf top  http://localhost  1 model" + " " * 55 + "q quits"
    assert lines[2] == "demo:latest  busy · 2 waiting · 76 MB · 4,096 tokens of context · never expires"
    figures = [re.split(r"\s{2,}", line.strip()) for line in lines[3:7]]
    assert figures[0][:3] == ["hit rate", "90.0%", "90.0% since load"]
    assert figures[1][:2] == ["speed", "12.5 t/s"]
    assert figures[2] == ["read/token", "1 MB", "1 MB since load"]
    assert figures[3] == ["stall", "25.0%", "25.0% since load", "64 of 192 experts in memory"]
    assert len([line for line in lines if re.match(r"[0-5] \S{32}$", line)]) == 6


def test_two_tiers_have_a_line_each_and_a_map_of_three_places() -> None:
    line = line_of(10)
    line["state"] = base64.b64encode(bytes(i % 4 for i in range(192))).decode()
    tier = {"hits_ready": 8, "hits_late": 1, "lookups": 10, "bytes_missed": 3_000_000, "bytes_prefetched": 0}
    tier |= {"evictions": 1234, "slots_used": 47, "n_slots": 48, "pool_bytes": 12_000_000}
    tiers = [{"name": "VRAM", **tier}, {"name": "RAM", **tier, "lookups": 1, "hits_ready": 0, "hits_late": 0}]
    staged = {"staging_bytes": 6_000_000, "bytes_staged": 9_000_000, "staging_overlap": 0.93}
    line["stats"] = {**line["stats"], "tiers": tiers, **staged}
    models = {"demo:latest": ModelView("demo:latest")}
    apply_line(models, line)
    for height in (24, None):
        lines = frame(models, 100, height)
        figures = [re.split(r"\s{2,}", text.strip()) for text in lines[6:10]]
        assert figures[0][-1] == "48 of 192 in VRAM, 48 in RAM only"
        assert figures[1] == ["VRAM", "90.0%", "47 of 48 slots, 12 MB · 3 MB in, 1,234 evicted"]
        assert figures[2][:2] == ["RAM", "0.0%"]
        assert figures[3] == ["staging", "93.0%", "overlapped, 6 MB · 9 MB in for prompts"]
        assert any("in RAM (some, all)" in text for text in lines)
        assert height is None or len(lines) <= height
    assert state_rows(models["demo:latest"].snapshot)[0].startswith("0123")


@pytest.mark.parametrize(("width", "height"), [(40, 16), (40, 10), (80, 24), (20, 24), (200, 60), (100, 12)])
@pytest.mark.parametrize("n_models", [1, 2, 5])
def test_a_frame_is_never_wider_than_the_terminal_nor_higher_with_room(width: int, height: int, n_models: int) -> None:
    models = models_of(*(f"hf.co/user/a-model-with-a-long-name:{i}" for i in range(n_models)), n_layer=48)
    lines = frame(models, width, height)
    assert max(map(len, lines)) <= width
    least = 2 + 6 * n_models + 7  # a head, figures of each, a legend of up to seven lines
    assert len(lines) <= max(height, least)


def test_a_model_that_was_loaded_anew_starts_its_counts_anew() -> None:
    models = models_of("demo:latest")
    apply_line(models, line_of(1))
    apply_line(models, line_of(2))
    now = models["demo:latest"].now
    assert now is not None and now["tokens"] == 1


def test_models_come_and_go() -> None:
    models = models_of("a:latest", "b:latest")
    apply_line(models, {"loaded_models": ["b:latest"]})
    apply_line(models, line_of(30, "a:latest"))  # a last snapshot, sent before the unload
    assert list(models) == ["b:latest"]
    apply_line(models, {"loaded_models": []})
    assert any("No model is loaded" in line for line in frame(models, 80, 24))


def test_a_model_without_experts_has_figures_and_no_map() -> None:
    assert any(line == "no experts" for line in frame(models_of("dense:latest", n_layer=0), 80, 24))


# The command


def serve(manager: FakeManager) -> Any:
    app = Starlette(routes=live.routes, exception_handlers=HANDLERS)
    app.state.manager, app.state.catalog, app.state.ending = manager, manager.catalog, threading.Event()
    return running(app)


@pytest.mark.parametrize("arguments", [["--once"], []], ids=["once", "no terminal"])
def test_once_prints_a_frame(here: Command, arguments: list[str]) -> None:
    with serve(BusyManager()) as url:
        done = here("top", *arguments, MOEGGUF_HOST=url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"moegguf top  {url}  1 model"
    assert "0 █·~" not in lines[0] and any(re.fullmatch(r"2 \S{3}", line) for line in lines)
    assert "\x1b" not in done.stdout


def test_json_is_for_scripts(here: Command) -> None:
    with serve(BusyManager()) as url:
        done = here("top", "--once", "--json", MOEGGUF_HOST=url)
    printed = json.loads(done.stdout)
    [model] = printed["models"]
    assert (printed["server"], model["name"], model["queue"]) == (url, "demo:latest", 0)
    assert model["experts"] == {"layers": [0, 2], "n_expert": 3, "state": ["201", "220"]}
    assert (model["tokens_per_s"], model["stats"]["lookups"]) == (pytest.approx(12.5), 10)


def test_a_terminal_without_unicode_gets_a_map_of_ascii(moegguf: Command) -> None:
    with serve(BusyManager()) as url:
        done = moegguf("top", "--once", MOEGGUF_HOST=url, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and "?" not in done.stdout
    assert ". on disk" in done.stdout and "-= in memory (some, all)" in done.stdout


def test_without_a_server_there_is_one_clear_sentence(here: Command) -> None:
    for arguments in ([], ["--once"], ["--json"]):
        done = here("top", *arguments, MOEGGUF_HOST="127.0.0.1:1")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "error: no server is running at http://127.0.0.1:1; start one with `moegguf serve`.\n"


def top_at(url: str, size: tuple[int, int] = (80, 24), **environ: str) -> Terminal:
    """`moegguf top` in a terminal."""
    names = environment(MOEGGUF_HOST=url, **environ)
    return Terminal(moegguf_command("top"), names, columns=size[0], rows=size[1], term="xterm-256color")


def until(shown: Terminal, pattern: str) -> None:
    shown.wait(lambda: re.search(pattern, "\n".join(shown.screen.display)), repr(pattern))


@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (40, 16)])
def test_it_runs_until_q(columns: int, rows: int) -> None:
    with serve(BusyManager()) as url, top_at(url, (columns, rows)) as shown:
        until(shown, r"hit rate +90\.0% +90\.0% since load")
        until(shown, r"speed +12\.5 t/s")
        until(shown, r"0 █?")
        shown.send("xq")
        assert shown.exit_code() == 0
        assert b"\x1b[?1049h" in shown.raw and shown.raw.rindex(b"\x1b[?1049l") > shown.raw.rindex(b"hit rate")
        assert COLOURS.search(shown.raw)


def test_ctrl_c_quits_and_no_color_applies() -> None:
    with serve(BusyManager()) as url, top_at(url, NO_COLOR="1") as shown:
        until(shown, "since load")
        shown.send(control("c"))
        assert shown.exit_code() == 0
        assert not COLOURS.search(shown.raw) and b"Traceback" not in shown.raw


def test_a_lost_connection_is_an_error() -> None:
    manager = BusyManager()
    with serve(manager) as url:
        shown = top_at(url)
        until(shown, "since load")
    with shown:
        assert shown.exit_code() == 1
        assert f"error: lost the connection to the server at {url}." in " ".join(shown.text.split())
