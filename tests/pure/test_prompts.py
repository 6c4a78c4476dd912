"""Prompts files: both formats as documented, and each mistake named with its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegguf.errors import OptionError
from moegguf.trace import prompts
from moegguf.trace.prompts import Prompt, read_prompts


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_paragraphs_of_plain_text(tmp_path: Path) -> None:
    path = write(tmp_path, "stories.txt", "\ufeff\n\nOnce upon\r\na time.\n \n\n\nThe end.")
    assert read_prompts(path) == [Prompt("Once upon\na time.", "stories"), Prompt("The end.", "stories")]


def test_objects_of_json_lines(tmp_path: Path) -> None:
    lines = ['{"prompt": "a \u2028 b", "label": " code ", "n_predict": 7, "completion": "c"}', "", '{"prompt": "d"}\r']
    path = write(tmp_path, "mixed.jsonl", "\n".join(lines))
    assert read_prompts(path) == [Prompt("a \u2028 b", "code", 7, "c"), Prompt("d", "mixed")]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ('{"label": "x"}', "prompt: Field required"),
        ('{"prompt": " "}', "prompt: String should match"),
        ('{"prompt": 3}', "prompt: Input should be a valid string, but is 3"),
        (r'{"prompt": "\ud800"}', "Invalid JSON"),
        ('{"prompt": "x", "completion": ""}', "completion: String should match"),
        ('{"prompt": "x", "label": ""}', "label: String should have at least 1"),
        ('{"prompt": "x", "n_predict": 0}', "n_predict: Input should be greater"),
        ('{"prompt": "x", "n_predict": true}', "n_predict: Input should be a valid integer"),
        ('{"prompt": "x", "n_tokens": 1}', "n_tokens: Extra inputs are not permitted"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, line: str, rule: str) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(OptionError) as caught:
        read_prompts(path)
    assert rule in str(caught.value) and "'p.jsonl', line 3:" in str(caught.value)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_files_without_prompts_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="is empty"):
        read_prompts(write(tmp_path, name, " \n\n"))
    with pytest.raises(OptionError, match="line 2: must be UTF-8, but has byte 0xff"):
        read_prompts(write(tmp_path, name, b"fine\nnot \xff fine"))
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path / ("missing" + name))
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path)


def test_the_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "p.txt", "one two\n\nthree")
    monkeypatch.setattr(prompts, "MAX_FILE_BYTES", 13)
    with pytest.raises(OptionError, match="at most 13 bytes"):
        read_prompts(path)


WORD = st.text(min_size=1, max_size=20).filter(lambda text: bool(text.strip()))


@given(
    st.lists(st.builds(Prompt, WORD, WORD.map(str.strip), st.none() | st.integers(1, 99), st.none() | WORD), min_size=1)
)
@settings(max_examples=50)
def test_what_was_written_as_json_is_read_back(tmp_path_factory: pytest.TempPathFactory, given_: list[Prompt]) -> None:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"prompt": p.text, "label": p.label, "n_predict": p.n_predict, "completion": p.completion} for p in given_]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), newline="")
    assert read_prompts(path) == given_
