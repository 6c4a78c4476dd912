"""Looks up the models that requests name: entry, details, capabilities, and the error for an unknown one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import State

from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.models.catalog import Catalog
from moegguf.models.details import details
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common.errors import HttpError
from moegguf.serving.events import LoadedModel

CAPABILITIES = {"chat": "completion", "generate": "completion"}  # of an operation; others have their own name


def find(catalog: Catalog, name: str, *, even_missing: bool = False) -> ModelEntry:
    """The entry of that name, with `even_missing` also one whose files are missing. Raises HttpError 404 with Ollama's
    message, ModelNameError."""
    try:
        return catalog.find(name, even_missing=even_missing)
    except ModelNotFoundError as error:
        message = f"model {name!r:.200} not found, try pulling it first ({' '.join(str(error).split())})"
        raise HttpError(404, message, "model_not_found") from None


def selected_model(state: State, model: str | None) -> str:
    """The name of the selected model; without one the only loaded model's. Raises HttpError 400 when there is not
    exactly one."""
    if model:
        return model
    loaded: list[LoadedModel] = state.manager.loaded()
    if len(loaded) != 1:
        raise HttpError(400, f"model: is missing, and {len(loaded)} models are loaded; name one")
    return loaded[0].name


def loaded_of(state: State, entry: ModelEntry) -> LoadedModel | None:
    """The model in memory that the entry's name uses, if there is one."""
    loaded: list[LoadedModel] = state.manager.loaded()
    return next((model for model in loaded if entry.name in {each.name for each in model.names}), None)


async def look_up(state: State, model: str | None) -> tuple[ModelEntry, Details]:
    """The entry of the selected model and its details. Raises what `selected_model` and `find` raise,
    ModelFormatError."""
    name = selected_model(state, model)

    def both() -> tuple[ModelEntry, Details]:
        entry = find(state.catalog, name)
        return entry, details(entry)

    return await asyncio.to_thread(both)


def check_capabilities(entry: ModelEntry, known: Details, needs: Mapping[str, bool]) -> None:
    """Raises HttpError 400 with Ollama's message for the first of `needs` ({operation: needed}) the model lacks."""
    for operation, needed in needs.items():
        if needed and CAPABILITIES.get(operation, operation) not in known.capabilities:
            name = entry.name if operation == "tools" else f'"{entry.name}"'
            raise HttpError(400, f"{name} does not support {operation}")


def details_or_none(entry: ModelEntry) -> Details | None:
    """An entry's details, None when its file cannot be read: lists contain such a model without details."""
    try:
        return details(entry)
    except (MoeggufError, OSError):
        return None
