"""Models by the names that requests give: what they are and can do, and the error for one that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.models.details import details
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common.errors import HttpError

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

COMPLETING = {"chat": "completion", "generate": "completion"}  # calls that need the same capability


def find(catalog: Catalog, name: str) -> ModelEntry:
    """The model of that name. Raises HttpError 404 in Ollama's words, ModelNameError."""
    try:
        return catalog.find(name)
    except ModelNotFoundError as error:
        message = f"model {name!r:.200} not found, try pulling it first ({' '.join(str(error).split())})"
        raise HttpError(404, message, "model_not_found") from None


async def look_up(catalog: Catalog, name: str) -> tuple[ModelEntry, Details]:
    """A model and what its headers say. Raises what `find` raises, ModelFormatError."""

    def both() -> tuple[ModelEntry, Details]:
        entry = find(catalog, name)
        return entry, details(entry)

    return await asyncio.to_thread(both)


def check_able(entry: ModelEntry, known: Details, needs: Mapping[str, bool]) -> None:
    """Raises HttpError 400 for the first of `needs` ({what: needed}) that the model cannot do, in Ollama's words."""
    for what, needed in needs.items():
        if needed and COMPLETING.get(what, what) not in known.capabilities:
            name = entry.name if what == "tools" else f'"{entry.name}"'
            raise HttpError(400, f"{name} does not support {what}")


def details_or_none(entry: ModelEntry) -> Details | None:
    """What an entry's headers say, None when they cannot be read: a list shows such a model all the same."""
    try:
        return details(entry)
    except (MoeggufError, OSError):
        return None
