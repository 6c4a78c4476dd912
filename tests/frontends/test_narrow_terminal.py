"""Tests tables and an error on a narrow terminal: no model's name is cut off, and lines
break between words."""

from pathlib import Path

import pytest
from servers import environment
from terminal import Terminal, moegguf_command

from moegguf.models.names import library
from moegguf.terminal.facts import best_fit_of
from moegguf.terminal.tables import print_columns


def shown(home: Path, *arguments: object, columns: int = 80) -> list[str]:
    """Runs a command on a terminal. Returns the lines that the terminal shows when the
    command has finished."""
    command = moegguf_command(*arguments)
    with Terminal(
        command, environment(MOEGGUF_HOME=str(home)), columns=columns, rows=60
    ) as terminal:
        assert terminal.exit_code() == 0
        return terminal.text.splitlines()


def test_library_at_80_columns_has_whole_names_and_one_mark(tmp_path: Path) -> None:
    lines = shown(tmp_path, "library")
    names = [line.split()[0] for line in lines[1 : 1 + len(library())]]
    assert names == [model.name for model in library()]
    assert "SPEED HERE" in lines[0] and "MODEL" not in lines[0]
    assert "…" not in "\n".join(lines)
    assert sum(" * " in line for line in lines[1 : 1 + len(names)]) == 1


def test_list_at_20_columns_keeps_the_name(tmp_path: Path) -> None:
    header, demo = shown(tmp_path, "list", columns=20)
    assert header.split()[0] == "NAME" and "ID" not in header
    assert demo.split()[0] == "demo:latest"


def test_print_columns_into_a_pipe_drops_no_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_columns(("NAME", "WIDE"), [("a", "b" * 120)], drop=("WIDE",))
    assert capsys.readouterr().out == f"NAME    WIDE\na       {'b' * 120}\n"


def model(name: str, size_bytes: int, tokens_per_s: float | None) -> dict[str, object]:
    return {
        "name": name,
        "size_bytes": size_bytes,
        "tokens_per_s": tokens_per_s and [tokens_per_s / 2, tokens_per_s],
    }


def test_best_fit_is_the_largest_model_at_reading_speed_or_the_fastest() -> None:
    small, large, slow, too_large = (
        model("small", 1, 50.0),
        model("large", 2, 6.0),
        model("slow", 3, 2.0),
        model("too large", 4, None),
    )
    assert best_fit_of([small, large, slow, too_large]) == "large"
    assert best_fit_of([model("slower", 1, 1.0), slow, too_large]) == "slow"
    assert best_fit_of([too_large]) is None


def test_an_error_breaks_between_words_on_a_terminal(tmp_path: Path) -> None:
    command = moegguf_command("run", "nothing-like-this", "hi")
    with Terminal(
        command, environment(MOEGGUF_HOME=str(tmp_path)), columns=60, rows=20
    ) as terminal:
        assert terminal.exit_code() == 1
        lines = terminal.text.splitlines()
    assert lines[0] == "error: there is no model named 'nothing-like-this'. `moegguf"
    assert any("huggingface.co/models?library=gguf&search=" in line for line in lines)
    assert " `moegguf list` " in f" {' '.join(line.strip() for line in lines)} "
