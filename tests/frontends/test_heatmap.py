"""The map of the experts: one letter per expert or group of experts."""

from __future__ import annotations

import numpy as np
import pytest

from moegguf.terminal.heatmap import LEGEND, group_size, heatmap, legend, tiers_line

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


def test_a_group_of_layers_has_the_index_of_its_first() -> None:
    state = np.zeros((4, 8), np.uint8)
    state[3] = 2
    assert rows(state, state, state, [1, 2, 3, 4], width=80, height=2) == ["1 ········", "3 ++++++++"]


def test_a_model_without_experts_has_no_map() -> None:
    empty = np.zeros((0, 0), np.uint8)
    assert heatmap(empty, empty, empty, [], width=80).plain == "no layers with experts"


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
