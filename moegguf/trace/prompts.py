"""Reads prompt files, the input for trace recordings. This module does not use models
or tokenizers.

NAME.jsonl has one object per line: {"prompt": "...", "label": "...", "n_predict": 64,
"completion": "..."}. Only the prompt is required. Any other file is plain text with one
prompt per paragraph; blank lines separate the paragraphs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from moegguf.errors import OptionError
from moegguf.text import decode_text

MAX_LABEL_CHARACTERS = 200

Text = Annotated[str, StringConstraints(pattern=r"\S")]
Label = Annotated[
    str,
    StringConstraints(
        strip_whitespace=True, min_length=1, max_length=MAX_LABEL_CHARACTERS
    ),
]


@dataclass(frozen=True)
class Prompt:
    """A prompt, with an optional answer."""

    text: str
    label: str  # kind of text
    # Maximum number of answer tokens; None: the caller's default, or the whole
    # completion.
    n_predict: int | None = None
    # A given answer, whose tokens are evaluated one by one; None: the model generates
    # an answer
    completion: str | None = None


class _Line(BaseModel, strict=True, extra="forbid"):
    prompt: Text
    label: Label | None = None
    n_predict: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    completion: Text | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Returns the prompts in a file, in order. A prompt without a label gets the file's
    name without its extension.

    Raises OptionError for a file that is missing, not UTF-8 or without prompts, or for
    the first invalid line.
    """
    path = Path(path)
    # Not splitlines(), which would also split at line separators inside JSON strings
    lines = _read_text(path).replace("\r\n", "\n").split("\n")
    label = path.stem[:MAX_LABEL_CHARACTERS] or "text"
    if path.suffix.lower() == ".jsonl":
        found = [
            _prompt(path, number, line, label)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    else:
        paragraphs = groupby(lines, key=lambda line: bool(line.strip()))
        found = [
            Prompt("\n".join(part), label) for filled, part in paragraphs if filled
        ]
    if not found:
        raise OptionError(
            f"prompts file {path.name!r} has no prompt; write at least one into it."
        )
    return found


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise OptionError(
            f"prompts file {str(path)!r} cannot be read ({why}); check the path."
        ) from error
    try:
        return decode_text(data, "strict")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _fail(path, line, f"must be UTF-8, but has byte {data[error.start]:#04x}")


def _fail(path: Path, line: int, rule: str) -> NoReturn:
    raise OptionError(
        f"prompts file {path.name!r}, line {line}: {rule}; correct this line."
    )


def _prompt(path: Path, number: int, line: str, label: str) -> Prompt:
    try:
        read = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = "".join(f"{part}: " for part in first["loc"][:1])
        given = first["input"]
        shown = "" if isinstance(given, dict) else f", but is {given!r:.40}"
        _fail(path, number, f"{key}{first['msg']}{shown}")
    return Prompt(read.prompt, read.label or label, read.n_predict, read.completion)
