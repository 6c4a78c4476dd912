"""Reads prompt files, the input of trace recordings and benchmarks. Independent of models and tokenizers.

NAME.jsonl has one object per line: {"prompt": "...", "label": "...", "n_predict": 64, "completion": "..."}, of which
only the prompt is required. Any other file is plain text, one prompt per paragraph, separated by empty lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moegguf.errors import OptionError

MAX_FILE_BYTES = 256 << 20
MAX_PROMPT_CHARACTERS = 8 << 20
MAX_PROMPTS = 1 << 17
MAX_PREDICT_TOKENS = 1 << 20
MAX_LABEL_CHARACTERS = 200
_KEYS = ("prompt", "label", "n_predict", "completion")


@dataclass(frozen=True)
class Prompt:
    """One request.

    label: kind of text. n_predict: tokens to generate, None for the caller's default. completion: an answer whose
    tokens are evaluated instead of sampled ones, None to sample.
    """

    text: str
    label: str
    n_predict: int | None = None
    completion: str | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """The prompts in a file, in order; the default label is the file's name without extension.

    Raises OptionError, with the line, for a file that is missing, too large, not UTF-8, or holds no valid prompts.
    """
    path = Path(path)
    lines = _read_text(path).replace("\r\n", "\n").split("\n")  # not splitlines: JSON may hold its other separators
    label = path.stem[:MAX_LABEL_CHARACTERS] or "text"
    found = _objects(path, lines, label) if path.suffix.lower() == ".jsonl" else _paragraphs(path, lines, label)
    prompts: list[Prompt] = []
    for prompt in found:
        if len(prompts) == MAX_PROMPTS:
            raise OptionError(f"prompts file {path.name!r}: at most {MAX_PROMPTS} prompts are allowed; split it.")
        prompts.append(prompt)
    if not prompts:
        raise OptionError(f"prompts file {path.name!r} is empty; write at least one prompt into it.")
    return prompts


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise OptionError(f"prompts file {str(path)!r} cannot be read ({why}); check the path.") from error
    if len(data) > MAX_FILE_BYTES:
        raise OptionError(f"prompts file {path.name!r}: at most {MAX_FILE_BYTES} bytes are allowed; split it.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _fail(path, line, f"must be UTF-8, but has byte {data[error.start]:#04x}")


def _fail(path: Path, line: int, rule: str) -> NoReturn:
    raise OptionError(f"prompts file {path.name!r}, line {line}: {rule}; correct this line.")


def _paragraphs(path: Path, lines: list[str], label: str) -> Iterator[Prompt]:
    first, part = 1, list[str]()
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            first = first if part else number
            part.append(line)
        elif part:
            yield Prompt(_text(path, first, "prompt", "\n".join(part)), label)
            part = []


def _objects(path: Path, lines: list[str], label: str) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _prompt(path, number, line, label)


def _prompt(path: Path, number: int, line: str, label: str) -> Prompt:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        _fail(path, number, f"must be a JSON object ({error})")
    if not isinstance(raw, dict) or "prompt" not in raw:
        _fail(path, number, 'must be an object with a "prompt"')
    unknown = sorted(set(raw) - set(_KEYS))
    if unknown:
        _fail(path, number, f"has {unknown[0]!r:.40}, but the keys are {', '.join(_KEYS)}")
    completion = raw.get("completion")
    return Prompt(
        text=_text(path, number, "prompt", raw["prompt"]),
        label=_label(path, number, raw.get("label", label)),
        n_predict=_n_predict(path, number, raw.get("n_predict")),
        completion=None if completion is None else _text(path, number, "completion", completion),
    )


def _text(path: Path, number: int, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        _fail(path, number, f"{key} must be text, but is {value!r:.40}")
    if len(value) > MAX_PROMPT_CHARACTERS:
        _fail(path, number, f"{key} has {len(value)} characters, at most {MAX_PROMPT_CHARACTERS} are allowed")
    if any("\ud800" <= character <= "\udfff" for character in value):
        _fail(path, number, f"{key} has half of a surrogate pair")
    return value


def _label(path: Path, number: int, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value.strip()) <= MAX_LABEL_CHARACTERS:
        _fail(path, number, f"label must be text of 1 to {MAX_LABEL_CHARACTERS} characters, but is {value!r:.40}")
    return value.strip()


def _n_predict(path: Path, number: int, value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= MAX_PREDICT_TOKENS):
        _fail(path, number, f"n_predict must be a whole number from 1 to {MAX_PREDICT_TOKENS}, but is {value!r:.40}")
    return value
