"""Line breaks between words of streamed text: the screen does not depend on the pieces."""

from __future__ import annotations

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from moegguf.chat.printer import Wrapper, visible


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
