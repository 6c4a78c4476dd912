"""What is printed on a terminal: the map of the experts, broken lines, progress, and statistics for scripts."""

import re
from dataclasses import replace

import numpy as np
import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from moegguf.chat.printer import Wrapper, visible
from moegguf.engine.stats import Stats, TierStats
from moegguf.generate.request import Timing
from moegguf.models.entry import PullStatus
from moegguf.terminal import progress
from moegguf.terminal.heatmap import LEGEND, group_size, heatmap, legend, tiers_line
from moegguf.terminal.progress import PullProgress, loading_text, prompt_text
from moegguf.terminal.statistics import duration, expert_lines, statistics

STATE = np.array([[0, 1, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]], np.uint8)
USES = np.array([[0, 0, 0, 9, 9, 9], [0, 0, 0, 0, 0, 1]], np.uint32)
LOADS = np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]], np.uint32)


def rows(*arguments: object, **options: object) -> list[str]:
    return heatmap(*arguments, **options).plain.split("\n")  # type: ignore[arg-type]


def test_every_state_has_its_letter() -> None:
    assert rows(STATE, USES, LOADS, [3, 14], width=80) == [" 3 ·~▒█+○", "14 ·····○"]


def test_experts_share_letters_where_the_terminal_is_narrow() -> None:
    state = np.zeros((1, 64), np.uint8)
    uses = np.zeros((1, 64), np.uint8)
    state[0, :9] = 2  # one whole group of eight, and one of the next
    uses[0, 8] = 1
    state[0, 24] = 1
    uses[0, 40] = 1
    assert group_size(64, 8) == 8
    assert rows(state, uses, uses * 0, [0], width=10) == ["0 ▒▓·~·○··"]
    state[0, 1:8] = 0
    assert rows(state, uses, uses * 0, [0], width=10) == ["0 ░▓·~·○··"]


@pytest.mark.parametrize("n_expert", [1, 7, 60, 128, 513])
@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
def test_no_line_is_wider_than_the_limit(n_expert: int, width: int) -> None:
    state = np.full((27, n_expert), 2, np.uint8)
    lines = rows(state, state, state * 0, list(range(1, 28)), width=width)
    assert len(lines) == 27
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= max(width, 11)
    assert len(rows(state, state, state, list(range(27)), width=width, height=10)) == 9


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_legend_names_every_letter_and_fits(width: int) -> None:
    lines = legend(width).plain.split("\n")
    assert all(letters in "".join(lines) and meaning in "".join(lines) for letters, meaning in LEGEND)
    assert max(map(len, lines)) <= max(width, 25)


def test_experts_in_vram_and_in_ram_have_letters_of_their_own() -> None:
    state = np.array([[0, 1, 2, 3, 3, 2], [2, 3, 3, 0, 0, 0]], np.uint8)
    uses = np.array([[0, 0, 0, 0, 9, 9], [0, 0, 0, 0, 0, 0]], np.uint32)
    assert rows(state, uses, uses * 0, [0, 1], width=80, vram=True) == ["0 ·~%▒█○", "1 %▒▒···"]
    assert tiers_line(state, vram=True) == "4 of 12 in VRAM, 3 in RAM only"
    halves = np.array([[2, 0] * 8, [3, 2] * 8], np.uint8)
    assert rows(halves, halves * 0, halves * 0, [0, 1], width=10, vram=True) == ["0 ::::::::", "1 ░░░░░░░░"]
    assert "in VRAM" in legend(80, vram=True).plain and "in VRAM" not in legend(80).plain


def shown(deltas: list[str], width: int) -> list[str]:
    """What a terminal shows of them."""
    screen = pyte.HistoryScreen(width, 200, history=10)
    stream = pyte.Stream(screen)
    wrapper = Wrapper(lambda: width)
    for piece in deltas:
        stream.feed(wrapper.feed(piece).replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip("\n").split("\n")


@pytest.mark.parametrize(("text", "width", "lines"), [
    ("one two three", 20, ["one two three"]),
    ("one two three", 9, ["one two", "three"]),
    ("one two three", 8, ["one two", "three"]),
    ("one  two", 4, ["one", "two"]),
    ("one\n  two", 9, ["one", "  two"]),
    ("a\n\nb", 10, ["a", "", "b"]),
    ("abcdefghijkl m", 6, ["abcde", "fghij", "kl m"]),
    ("in abcdefghijkl", 6, ["in", "abcde", "fghij", "kl"]),
    ("日本語のテキスト", 8, ["日本語", "のテキ", "スト"]),
    ("ab 日本 cd", 7, ["ab 日", "本 cd"]),
    ("e\u0301te\u0301 e\u0301te\u0301", 5, ["été", "été"]),
])  # fmt: skip
def test_lines_break_where_they_should(text: str, width: int, lines: list[str]) -> None:
    import unicodedata

    for deltas in ([text], list(text), [text[:4], text[4:]]):
        assert [unicodedata.normalize("NFC", line) for line in shown(deltas, width)] == lines


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab é日\n x"), max_size=12), max_size=12), st.integers(5, 30))
def test_pieces_do_not_matter_and_nothing_is_lost(deltas: list[str], width: int) -> None:
    lines, whole = shown(deltas, width), "".join(deltas)
    assert lines == shown([whole], width)
    assert max(map(cell_len, lines)) < width
    assert "".join("".join(lines).split()) == "".join(whole.split())


def test_the_width_is_read_for_every_piece() -> None:
    widths = iter([20, 6])
    wrapper = Wrapper(lambda: next(widths))
    assert wrapper.feed("one two ") == "one two "
    assert wrapper.feed("three") == "\nthree"


def test_control_characters_become_control_pictures() -> None:
    assert visible("a\x1b]0;title\x07b\x9bc\x7f\r\n\té") == "a␛]0;title␇b\ufffdc␡\n\té"


def test_progress_of_a_load_and_of_a_prompt() -> None:
    assert loading_text("demo", None, 0, 0) == "loading demo"
    assert loading_text("demo", 0.43, 6_100_000_000, 2.0) == "loading demo 43% of 6.1 GB · 1.3 GB/s"
    assert prompt_text(6300, 0, 1024, 22.75) == "reading the prompt 1,024/6,300 tokens · 45 t/s · 1m57s left"
    assert prompt_text(6300, 1000, 1000, 0) == "reading the prompt 1,000/6,300 tokens"


STEPS = [
    PullStatus("pulling manifest"),
    PullStatus("pulling aaa", "sha256:aaa", "a.gguf", 100),
    PullStatus("pulling bbb", "sha256:bbb", "b.gguf", 300),
    PullStatus("pulling aaa", "sha256:aaa", "a.gguf", 100, 100),
    PullStatus("pulling bbb", "sha256:bbb", "b.gguf", 300, 150),
    PullStatus("success"),
]


def test_a_terminal_gets_a_line_for_each_file_and_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty:
        def isatty(self) -> bool:
            return True

        written = ""

        def write(self, text: str) -> int:
            Tty.written += text
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(progress.sys, "stderr", Tty())
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with PullProgress() as shown:
        for step in STEPS:
            shown.report(step)
    written = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", Tty.written)
    assert written.index("pulling manifest") < written.index("pulling aaa:") < written.index("success")
    last = written[written.rindex("pulling aaa:") :]
    assert re.search(r"aaa: 100% .* 100/100 bytes .*bbb: +50% .* 150/300 bytes .*all 2 files: +62%", last, re.DOTALL)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ns"), (3e-9, "3ns"), (412.5e-6, "412.5µs"), (1.234e-3, "1.234ms"), (4.9, "4.9s"), (60, "1m0s"),
        (123.5, "2m3.5s"), (3605, "1h0m5s"), (0.9999999999, "1s"), (298.000000001, "4m58.000000001s"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


WHOLE = Stats(
    tokens=12, lookups=200, hits_ready=150, hits_late=10, misses=40, evictions=4, bytes_missed=40_000_000,
    bytes_prefetched=5_000_000, n_slots=32, n_experts=64, pool_bytes=32 << 20, n_threads=2,
)  # fmt: skip
DECODE = Stats(tokens=9, stall_s=0.09, eval_s=0.5, bytes_missed=18_000_000, n_slots=32, n_experts=64)


def test_the_expert_caches_lines_follow_ollamas() -> None:
    timing = Timing(
        prompt_tokens=3, cached_tokens=7, answer_tokens=10, prompt_s=0.25, answer_s=0.5, total_s=0.75,
        stats=WHOLE, answer_stats=DECODE,
    )  # fmt: skip
    assert statistics(timing, 0.25) == [
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


def test_two_tiers_have_lines_of_their_own() -> None:
    vram = TierStats(
        "VRAM", "RPC0", lookups=200, hits_ready=150, hits_late=10, misses=40, evictions=9, bytes_missed=60_000_000,
        n_slots=16, pool_bytes=16 << 20,
    )  # fmt: skip
    ram = TierStats("RAM", "RPC0", lookups=40, hits_ready=24, hits_late=2, misses=14, evictions=4, n_slots=32,
                    pool_bytes=32 << 20)  # fmt: skip
    whole = replace(WHOLE, n_slots=16, tiers=(vram, ram))
    decode = replace(DECODE, tiers=(replace(vram, bytes_missed=9_000_000), replace(ram, stall_s=0.045)))
    assert expert_lines(whole, decode) == [
        ("expert cache VRAM", "16 of 64 experts (25%), 16.0MiB on RPC0"),
        ("expert cache RAM", "32 of 64 experts (50%), 32.0MiB"),
        ("hit rate", "vram 75.0% ram 12.0% in flight 6.0% disk 7.0% of 200 lookups"),
        ("moved to VRAM", "60.00 MB (1.00 MB/token)"),
        ("moved", "45.00 MB from disk (2.00 MB/token)"),
        ("evictions", "9 VRAM, 4 RAM"),
        ("stall", "18% of decode, 10.00 ms/token, 9% for disk"),
    ]
    alone = dict(expert_lines(replace(whole, tiers=(vram,)), replace(decode, tiers=(vram,))))
    assert alone["hit rate"] == "vram 75.0% in flight 5.0% disk 20.0% of 200 lookups"
    assert alone["evictions"] == "4" and "expert cache RAM" not in alone


def test_tiers_are_added_and_subtracted_by_name_and_device() -> None:
    before = Stats(lookups=3, tiers=(TierStats("VRAM", "A", lookups=3, n_slots=9), TierStats("RAM", "A", misses=1)))
    now = Stats(lookups=10, tiers=(TierStats("VRAM", "A", lookups=10, n_slots=8), TierStats("VRAM", "B", lookups=4)))
    grown = (now - before).tiers
    assert [(tier.device, tier.lookups, tier.n_slots) for tier in grown] == [("A", 7, 8), ("B", 4, 0)]
    total = (before + now).tiers
    assert [(tier.name, tier.device, tier.lookups, tier.misses) for tier in total] == [
        ("VRAM", "A", 13, 0), ("VRAM", "B", 4, 0), ("RAM", "A", 0, 1)
    ]  # fmt: skip
    assert total[0].n_slots == 8
