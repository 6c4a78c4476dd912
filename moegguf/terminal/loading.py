"""Steps that commands perform before they load a model: they parse values of flags, and
find or pull the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moegguf.errors import LibraryError
from moegguf.generate.request import THINK_LEVELS
from moegguf.terminal.messages import print_message
from moegguf.text import decode_text

if TYPE_CHECKING:
    from moegguf.models.entry import ModelEntry


def parse_think(text: str) -> bool | str:
    """Parses the value of --think: True, False or a level of thinking. Raises
    BadParameter for anything else."""
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    if word not in THINK_LEVELS:
        raise typer.BadParameter(
            f"--think must be true, false or one of {', '.join(THINK_LEVELS)}, but is {text[:40]!r}"
        )
    return word


def parse_format(text: str) -> str | Mapping[str, Any]:
    """Parses the value of --format: "json", or a JSON schema as text or in a file.
    Raises BadParameter for anything else."""
    if text.strip() == "json":
        return "json"
    try:
        source = (
            text
            if text.lstrip().startswith("{")
            else decode_text(Path(text).expanduser().read_bytes())
        )
        schema = json.loads(source)
        if not isinstance(schema, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"--format must be json, a JSON schema or the name of a file with one, but is {text[:60]!r} ({error})"
        ) from None
    return schema


def find_or_pull(name: str) -> ModelEntry:
    """Returns the entry of the model called `name`. If the model is not on this
    machine, and `name` is a name on Hugging Face or in the library, downloads the model
    first. Raises ModelNotFoundError, ModelNameError, ModelFormatError or PullError."""
    from moegguf.errors import ModelNotFoundError
    from moegguf.models.catalog import Catalog
    from moegguf.models.names import fetchable_name, hub_hint

    catalog = Catalog()
    try:
        return catalog.find(name)
    except ModelNotFoundError as error:
        if fetchable_name(name) is None:
            if error.hint:
                raise ModelNotFoundError(f"{error} {hub_hint(name)}") from None
            raise
    from moegguf.models.pull import pull
    from moegguf.terminal.progress import PullProgress

    with PullProgress() as progress:
        return pull(name, catalog, progress.report)


def with_files(
    entry: ModelEntry, mmproj: str | None = None, lora_path: str | None = None
) -> ModelEntry:
    """Returns the model's entry with the projector at `mmproj` and the LoRA adapter at
    `lora_path`. None keeps the entry's own file, if any. Raises ModelFormatError or
    ModelNotFoundError."""
    from moegguf.gguf.projector import read_projector
    from moegguf.models.catalog import with_adapter

    if mmproj is not None:
        entry = replace(
            entry, mmproj=read_projector(os.path.expanduser(mmproj)).path.absolute()
        )
    return entry if lora_path is None else with_adapter(entry, lora_path)


def print_card_note(loading: Mapping[str, Any]) -> None:
    """Prints the reason if this machine has a GPU that moegguf cannot use. Prints
    nothing if the load options choose the CPU."""
    from moegguf.engine.cards import card_note

    chosen = "cpu" if loading.get("n_gpu_layers") == 0 else loading.get("placement")
    with suppress(LibraryError):  # the load raises the same error
        if note := card_note(chosen):
            print_message(note)


def warn_of_long_context(trained: int, requested: int | None) -> None:
    """Prints a warning if the requested context is longer than `trained`, the context
    with which the model was trained. `requested` None or 0: no warning."""
    if requested and requested > trained:
        print_message(
            f"warning: a context of {requested:,} tokens is more than the {trained:,} that the model was trained on."
        )
