"""Tests output on a terminal: the map of experts, line breaks, download progress,
statistics, and `moegguf top`."""

import base64
import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyte
import pytest
from fake_manager import BusyManager, server_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from servers import Command, environment
from terminal import Terminal, control, moegguf_command

from moegguf.chat.experts import maps_of, read_snapshot
from moegguf.chat.session import Wrapper
from moegguf.cli.top import apply_line
from moegguf.cli.top_screen import MIN_MAP_LINES, ModelView, Screen
from moegguf.engine.stats import Stats, TierStats
from moegguf.errors import WorkerError
from moegguf.generate.request import AnswerSummary
from moegguf.models.entry import PullStatus
from moegguf.terminal import progress
from moegguf.terminal.heatmap import LEGEND, group_size, heatmap, legend, tiers_line
from moegguf.terminal.progress import PullProgress, duration
from moegguf.terminal.statistics import expert_lines, statistics

STATE = np.array([[0, 1, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]], np.uint8)
USES = np.array([[0, 0, 0, 9, 9, 9], [0, 0, 0, 0, 0, 1]], np.uint32)
LOADS = np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]], np.uint32)


def rows(*arguments: object, **options: object) -> list[str]:
    return heatmap(*arguments, **options).plain.split("\n")  # type: ignore[arg-type]


def test_heatmap_has_a_letter_for_each_state() -> None:
    assert rows(STATE, USES, LOADS, [3, 14], width=80) == [" 3 ·~▒█+○", "14 ·····○"]


def test_heatmap_groups_experts_on_a_narrow_terminal() -> None:
    state = np.zeros((1, 64), np.uint8)
    uses = np.zeros((1, 64), np.uint8)
    # Resident: all experts in the first group of eight, and one in the second.
    state[0, :9] = 2
    uses[0, 8] = 1
    state[0, 24] = 1
    uses[0, 40] = 1
    assert group_size(64, 8) == 8
    assert rows(state, uses, uses * 0, [0], width=10) == ["0 ▒▓·~·○··"]
    state[0, 1:8] = 0
    assert rows(state, uses, uses * 0, [0], width=10) == ["0 ░▓·~·○··"]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_legend_names_every_letter_and_fits_the_width(width: int) -> None:
    lines = legend(width).plain.split("\n")
    assert all(
        letters in "".join(lines) and meaning in "".join(lines)
        for letters, meaning in LEGEND
    )
    assert max(map(len, lines)) <= max(width, 25)


def test_heatmap_has_separate_letters_for_vram_and_ram() -> None:
    state = np.array([[0, 1, 2, 3, 3, 2], [2, 3, 3, 0, 0, 0]], np.uint8)
    uses = np.array([[0, 0, 0, 0, 9, 9], [0, 0, 0, 0, 0, 0]], np.uint32)
    assert rows(state, uses, uses * 0, [0, 1], width=80, vram=True) == [
        "0 ·~%▒█○",
        "1 %▒▒···",
    ]
    assert tiers_line(state, vram=True) == "4 of 12 in VRAM, 3 in RAM only"
    halves = np.array([[2, 0] * 8, [3, 2] * 8], np.uint8)
    assert rows(halves, halves * 0, halves * 0, [0, 1], width=10, vram=True) == [
        "0 ::::::::",
        "1 ░░░░░░░░",
    ]
    assert (
        "in VRAM" in legend(80, vram=True).plain and "in VRAM" not in legend(80).plain
    )


def shown(deltas: list[str], width: int) -> list[str]:
    """Feeds pieces of text through a `Wrapper` to a terminal of this width. Returns the
    lines that the terminal shows."""
    screen = pyte.HistoryScreen(width, 200, history=10)
    stream = pyte.Stream(screen)
    wrapper = Wrapper(lambda: width)
    for piece in deltas:
        stream.feed(wrapper.feed(piece).replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip("\n").split("\n")


@pytest.mark.parametrize(("text", "width", "lines"), [
    ("one two three", 9, ["one two", "three"]),
    ("one  two", 4, ["one", "two"]),
    ("abcdefghijkl m", 6, ["abcde", "fghij", "kl m"]),
    ("日本語のテキスト", 8, ["日本語", "のテキ", "スト"]),
    ("ab 日本 cd", 7, ["ab 日", "本 cd"]),
    ("e\u0301te\u0301 e\u0301te\u0301", 5, ["été", "été"]),
])  # fmt: skip
def test_wrapper_breaks_lines_between_words_and_wide_characters(
    text: str, width: int, lines: list[str]
) -> None:
    import unicodedata

    for deltas in ([text], list(text), [text[:4], text[4:]]):
        assert [
            unicodedata.normalize("NFC", line) for line in shown(deltas, width)
        ] == lines


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab é日\n x"), max_size=12), max_size=12),
    st.integers(5, 30),
)
def test_wrapper_output_is_independent_of_pieces_and_complete(
    deltas: list[str], width: int
) -> None:
    lines, whole = shown(deltas, width), "".join(deltas)
    assert lines == shown([whole], width)
    assert max(map(cell_len, lines)) < width
    assert "".join("".join(lines).split()) == "".join(whole.split())


STEPS = [
    PullStatus("pulling manifest"),
    PullStatus("pulling aaa", "sha256:aaa", "a.gguf", 100),
    PullStatus("pulling bbb", "sha256:bbb", "b.gguf", 300),
    PullStatus("pulling aaa", "sha256:aaa", "a.gguf", 100, 100),
    PullStatus("pulling bbb", "sha256:bbb", "b.gguf", 300, 150),
    PullStatus("success"),
]


def test_pull_progress_has_a_line_for_each_file_and_one_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress.sys, "stderr", terminal := Tty())
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with PullProgress() as shown:
        for step in STEPS:
            shown.report(step)
    written = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    assert (
        written.index("pulling manifest")
        < written.index("pulling aaa:")
        < written.index("success")
    )
    last = written[written.rindex("pulling aaa:") :]
    assert re.search(
        r"aaa: 100% .* 100/100 bytes .*bbb: +50% .* 150/300 bytes .*all 2 files: +62%",
        last,
        re.DOTALL,
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (3e-9, "3ns"), (412.5e-6, "412.5µs"), (1.234e-3, "1.234ms"), (4.9, "4.9s"), (60, "1m0s"),
        (123.5, "2m3.5s"), (3605, "1h0m5s"), (0.9999999999, "1s"), (298.000000001, "4m58.000000001s"),
    ],
)  # fmt: skip
def test_duration_prints_the_largest_fitting_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


WHOLE = Stats(
    tokens=12, lookups=200, hits_ready=150, hits_late=10, misses=40, evictions=4, bytes_missed=40_000_000,
    bytes_prefetched=5_000_000, n_slots=32, n_experts=64, pool_bytes=32 << 20, n_threads=2,
)  # fmt: skip
DECODE = Stats(
    tokens=9,
    stall_s=0.09,
    eval_s=0.5,
    bytes_missed=18_000_000,
    n_slots=32,
    n_experts=64,
)


def test_statistics_print_expert_cache_lines_after_ollamas() -> None:
    summary = AnswerSummary(
        prompt_tokens=3, cached_tokens=7, answer_tokens=10, prompt_s=0.25, answer_s=0.5, total_s=0.75,
        stats=WHOLE, answer_stats=DECODE,
    )  # fmt: skip
    assert statistics(summary, 0.25) == [
        "total duration:       1s",
        "load duration:        250ms",
        "prompt eval count:    3 token(s)",
        "prompt eval duration: 250ms",
        "prompt eval rate:     12.00 tokens/s",
        "eval count:           10 token(s)",
        "eval duration:        500ms",
        "eval rate:            20.00 tokens/s",
        "time to first token:  250ms",
        "prompt cached:        7 token(s)",
        "threads:              2",
        "expert cache:         32 of 64 experts (50%), 32.0MiB",
        "hit rate:             ram 75.0% in flight 5.0% disk 20.0% of 200 lookups",
        "moved:                45.00 MB from disk (2.00 MB/token)",
        "evictions:            4",
        "stall:                18% of decode, 10.00 ms/token",
    ]


def test_expert_lines_of_two_tiers_are_separate() -> None:
    vram = TierStats(
        "VRAM", "RPC0", lookups=200, hits_ready=150, hits_late=10, misses=40, evictions=9, bytes_missed=60_000_000,
        n_slots=16, pool_bytes=16 << 20,
    )  # fmt: skip
    ram = TierStats("RAM", "RPC0", lookups=40, hits_ready=24, hits_late=2, misses=14, evictions=4, n_slots=32,
                    pool_bytes=32 << 20)  # fmt: skip
    whole = replace(WHOLE, n_slots=16, tiers=(vram, ram))
    decode = replace(
        DECODE,
        tiers=(replace(vram, bytes_missed=9_000_000), replace(ram, stall_s=0.045)),
    )
    assert list(expert_lines(whole, decode).items()) == [
        ("expert cache VRAM", "16 of 64 experts (25%), 16.0MiB on RPC0"),
        ("expert cache RAM", "32 of 64 experts (50%), 32.0MiB"),
        ("hit rate", "vram 75.0% ram 12.0% in flight 6.0% disk 7.0% of 200 lookups"),
        ("moved to VRAM", "60.00 MB (1.00 MB/token)"),
        ("moved", "45.00 MB from disk (2.00 MB/token)"),
        ("evictions", "9 VRAM, 4 RAM"),
        ("stall", "18% of decode, 10.00 ms/token, 9% for disk"),
    ]
    alone = expert_lines(replace(whole, tiers=(vram,)), replace(decode, tiers=(vram,)))
    assert alone["hit rate"] == "vram 75.0% in flight 5.0% disk 20.0% of 200 lookups"
    assert alone["evictions"] == "4" and "expert cache RAM" not in alone


def test_stats_add_and_subtract_tiers_by_name_and_device() -> None:
    before = Stats(
        lookups=3,
        tiers=(
            TierStats("VRAM", "A", lookups=3, n_slots=9),
            TierStats("RAM", "A", misses=1),
        ),
    )
    now = Stats(
        lookups=10,
        tiers=(
            TierStats("VRAM", "A", lookups=10, n_slots=8),
            TierStats("VRAM", "B", lookups=4),
        ),
    )
    grown = (now - before).tiers
    assert [(tier.device, tier.lookups, tier.n_slots) for tier in grown] == [
        ("A", 7, 8),
        ("B", 4, 0),
    ]
    total = (before + now).tiers
    assert [(tier.name, tier.device, tier.lookups, tier.misses) for tier in total] == [
        ("VRAM", "A", 13, 0), ("VRAM", "B", 4, 0), ("RAM", "A", 0, 1)
    ]  # fmt: skip
    assert total[0].n_slots == 8


LOADED = {
    "name": "demo:latest",
    "size_bytes": 76_000_000,
    "n_ctx": 4096,
    "queue": 2,
    "busy": True,
    "stopping": False,
}
LOADED |= {"expires": None}
COLOURS = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")


def line_of(
    tokens: int, name: str = "demo:latest", n_layer: int = 6, n_expert: int = 32
) -> dict[str, Any]:
    """Returns a parsed snapshot of /live after `tokens` tokens, with a hit rate of 0.9
    and 1 MB read per token."""
    map_ = base64.b64encode(bytes(i % 3 for i in range(n_layer * n_expert))).decode()
    stats = {
        "tokens": tokens,
        "lookups": 10 * tokens,
        "hits_ready": 9 * tokens,
        "hits_late": 0,
    }
    stats |= {
        "bytes_missed": 1_000_000 * tokens,
        "stall_s": 0.25 * tokens,
        "eval_s": float(tokens),
    }
    maps = {
        "state": map_,
        "uses": map_,
        "loads": map_,
        "layers": list(range(n_layer)),
        "n_expert": n_expert,
    }
    snapshot = {
        "model": name,
        **maps,
        "stats": stats,
        "busy": True,
        "seconds": 60.0,
        "tokens_per_s": 12.5,
    }
    return {**snapshot, "loaded": {**LOADED, "name": name}}


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
        console.print(
            Screen("http://localhost", models.values(), height=height, keys="q quits")
        )
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_frame_of_top_shows_figures_now_and_since_load() -> None:
    lines = frame(models_of("demo:latest"), 100, 24)
    assert lines[0] == "moegguf top  http://localhost  1 model" + " " * 55 + "q quits"
    assert (
        lines[2]
        == "demo:latest  busy · 2 waiting · 76 MB · 4,096 tokens of context · never expires"
    )
    figures = [re.split(r"\s{2,}", line.strip()) for line in lines[3:7]]
    assert figures[0][:3] == ["hit rate", "90.0%", "90.0% since load"]
    assert figures[1][:2] == ["speed", "12.5 t/s"]
    assert figures[2] == ["read/token", "1 MB", "1 MB since load"]
    assert figures[3] == [
        "stall",
        "25.0%",
        "25.0% since load",
        "64 of 192 experts in memory",
    ]
    assert len([line for line in lines if re.match(r"[0-5] \S{32}$", line)]) == 6


@pytest.mark.parametrize(
    ("width", "rest"),
    [
        (80, "busy · 2 waiting · 76 MB · 4,096 tokens of context · never expires"),
        (75, "busy · 2 waiting · 4,096 tokens of context · never expires"),
        (60, "busy · 2 waiting · 4,096 tokens of context"),
        (40, "busy · 2 waiting"),
        (20, "busy"),
    ],
)
def test_top_leaves_out_parts_of_a_title_that_do_not_fit(width: int, rest: str) -> None:
    assert frame(models_of("demo:latest"), width, 24)[2] == f"demo:latest  {rest}"


def test_a_frame_of_two_tiers_has_a_line_each_and_a_map_of_three_places() -> None:
    line = line_of(10)
    line["state"] = base64.b64encode(bytes(i % 4 for i in range(192))).decode()
    tier = {
        "hits_ready": 8,
        "hits_late": 1,
        "lookups": 10,
        "bytes_missed": 3_000_000,
        "bytes_prefetched": 0,
    }
    tier |= {
        "evictions": 1234,
        "slots_used": 47,
        "n_slots": 48,
        "pool_bytes": 12_000_000,
    }
    tiers = [
        {"name": "VRAM", **tier},
        {"name": "RAM", **tier, "lookups": 1, "hits_ready": 0, "hits_late": 0},
    ]
    staged = {
        "staging_bytes": 6_000_000,
        "bytes_staged": 9_000_000,
        "staging_copy_s": 1.0,
        "staging_stall_s": 0.07,
    }
    line["stats"] = {**line["stats"], "tiers": tiers, **staged}
    models = {"demo:latest": ModelView("demo:latest")}
    apply_line(models, line)
    for height in (24, None):
        lines = frame(models, 100, height)
        figures = [re.split(r"\s{2,}", text.strip()) for text in lines[6:10]]
        assert figures[0][-1] == "48 of 192 in VRAM, 48 in RAM only"
        assert figures[1] == [
            "VRAM",
            "90.0%",
            "47 of 48 slots, 12 MB · 3 MB in, 1,234 evicted",
        ]
        assert figures[2][:2] == ["RAM", "0.0%"]
        assert figures[3] == [
            "staging",
            "93.0%",
            "overlapped, 6 MB · 9 MB in for prompts",
        ]
        assert any("in RAM (some, all)" in text for text in lines)
        assert height is None or len(lines) <= height
        assert "…" not in "".join(frame(models, 80, height))
    found = models["demo:latest"].snapshot
    assert found is not None and maps_of(found)[0][0, :4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("width", "height"), [(40, 16), (40, 10), (80, 24), (20, 24), (200, 60), (100, 12)]
)
@pytest.mark.parametrize("n_models", [1, 2, 5])
def test_a_frame_of_top_fits_the_terminal(
    width: int, height: int, n_models: int
) -> None:
    models = models_of(
        *(f"hf.co/user/a-model-with-a-long-name:{i}" for i in range(n_models)),
        n_layer=48,
    )
    lines = frame(models, width, height)
    assert max(map(len, lines)) <= width
    # Two header lines, six lines for each model, and a legend of at most seven lines.
    least = 2 + 6 * n_models + 7
    assert len(lines) <= max(height, least)


def test_the_first_model_has_the_only_map_that_fits() -> None:
    models = models_of("one:latest", "two:latest", n_layer=48)
    n_figures = len(frame(models, 100, 1))  # a screen without maps
    lines = frame(models, 100, n_figures + MIN_MAP_LINES + 1)
    at = next(i for i, line in enumerate(lines) if line.startswith("two:latest"))
    with_map = [
        bool(re.search(r"[·~▒█+○]{32}$", "\n".join(part), re.MULTILINE))
        for part in (lines[:at], lines[at:])
    ]
    assert with_map == [True, False]


def test_a_snapshot_without_counters_raises_worker_error() -> None:
    with pytest.raises(WorkerError, match="not a valid Snapshot"):
        read_snapshot(
            {name: value for name, value in line_of(1).items() if name != "stats"}
        )


def test_a_reloaded_model_starts_its_counts_anew() -> None:
    models = models_of("demo:latest")
    apply_line(models, line_of(1))
    apply_line(models, line_of(2))
    assert models["demo:latest"].now.tokens == 1


def test_models_unloaded_by_the_server_leave_the_view() -> None:
    models = models_of("a:latest", "b:latest")
    apply_line(models, {"loaded_models": ["b:latest"]})
    apply_line(models, line_of(30, "a:latest"))  # a late snapshot of the unloaded model
    assert list(models) == ["b:latest"]
    apply_line(models, {"loaded_models": []})
    assert any("No model is loaded" in line for line in frame(models, 80, 24))


def test_a_frame_of_a_model_without_experts_has_no_map() -> None:
    assert any(
        line == "no experts"
        for line in frame(models_of("dense:latest", n_layer=0), 80, 24)
    )


# The command


@pytest.mark.parametrize("arguments", [["--once"], []], ids=["once", "no terminal"])
def test_top_once_prints_one_frame(here: Command, arguments: list[str]) -> None:
    with server_of(BusyManager()) as url:
        done = here("top", *arguments, MOEGGUF_HOST=url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"moegguf top  {url}  1 model"
    assert "0 █·~" not in lines[0] and any(
        re.fullmatch(r"2 \S{3}", line) for line in lines
    )
    assert "\x1b" not in done.stdout


def test_top_json_prints_the_models_of_the_server(here: Command) -> None:
    with server_of(BusyManager()) as url:
        done = here("top", "--once", "--json", MOEGGUF_HOST=url)
    printed = json.loads(done.stdout)
    [model] = printed["models"]
    assert (printed["server"], model["name"], model["queue"]) == (url, "demo:latest", 0)
    assert model["experts"] == {
        "layers": [0, 2],
        "n_expert": 3,
        "state": ["201", "220"],
    }
    assert (model["tokens_per_s"], model["stats"]["lookups"]) == (
        pytest.approx(12.5),
        10,
    )


def test_top_without_unicode_prints_a_map_in_ascii(moegguf: Command) -> None:
    with server_of(BusyManager()) as url:
        done = moegguf("top", "--once", MOEGGUF_HOST=url, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and "?" not in done.stdout
    assert ". on disk" in done.stdout and "-= in memory (some, all)" in done.stdout


def top_at(url: str, size: tuple[int, int] = (80, 24), **environ: str) -> Terminal:
    """Returns a terminal of `size` (columns, rows) that runs `moegguf top` against the
    server at `url`."""
    names = environment(MOEGGUF_HOST=url, **environ)
    return Terminal(
        moegguf_command("top"),
        names,
        columns=size[0],
        rows=size[1],
        term="xterm-256color",
    )


def until(shown: Terminal, pattern: str) -> None:
    shown.wait(
        lambda: re.search(pattern, "\n".join(shown.screen.display)), repr(pattern)
    )


@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (40, 16)])
def test_top_runs_until_q(columns: int, rows: int) -> None:
    with server_of(BusyManager()) as url, top_at(url, (columns, rows)) as shown:
        until(shown, r"hit rate +90\.0% +90\.0% since load")
        until(shown, r"speed +12\.5 t/s")
        until(shown, r"0 █?")
        shown.send("xq")
        assert shown.exit_code() == 0
        assert b"\x1b[?1049h" in shown.raw and shown.raw.rindex(
            b"\x1b[?1049l"
        ) > shown.raw.rindex(b"hit rate")
        assert COLOURS.search(shown.raw)


def test_ctrl_c_quits_top_and_no_color_applies() -> None:
    with server_of(BusyManager()) as url, top_at(url, NO_COLOR="1") as shown:
        until(shown, "since load")
        shown.send(control("c"))
        assert shown.exit_code() == 0
        assert not COLOURS.search(shown.raw) and b"Traceback" not in shown.raw


def test_top_ends_with_an_error_after_a_lost_connection() -> None:
    with server_of(BusyManager()) as url:
        shown = top_at(url)
        until(shown, "since load")
    with shown:
        assert shown.exit_code() == 1
        assert (
            f"error: lost the connection to the server at {url}; check that it is running"
            in " ".join(shown.text.split())
        )
