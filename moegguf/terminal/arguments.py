"""Parses values typed on the command line or in the chat: thinking level, answer format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from moegguf.generate.request import THINK_LEVELS

MAX_SCHEMA_BYTES = 1 << 20
THINK_SWITCHES = {"true": True, "false": False}


def parse_think(text: str) -> bool | str:
    """True, False or a level. Raises BadParameter for anything else."""
    word = text.strip().lower()
    if word in THINK_SWITCHES:
        return THINK_SWITCHES[word]
    if word not in THINK_LEVELS:
        raise typer.BadParameter(f"--think takes true, false, {', '.join(THINK_LEVELS)}, but is {text[:40]!r}")
    return word


def parse_format(text: str) -> str | Mapping[str, Any]:
    """ "json", or a JSON schema given as text or as a file name. Raises BadParameter for anything else."""
    if text.strip() == "json":
        return "json"
    source = text
    if not text.lstrip().startswith("{"):
        try:
            with Path(text).expanduser().open("rb") as file:
                source = file.read(MAX_SCHEMA_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise typer.BadParameter(
                f"--format takes json, a JSON schema or the name of a file with one, but is {text[:60]!r} ({error})"
            ) from None
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"--format: the schema is not JSON ({error})") from None
    if not isinstance(schema, dict):
        raise typer.BadParameter('--format: a schema is a JSON object, such as \'{"type": "object"}\'')
    return schema
