"""/api/show: metadata of a model, without loading it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.gguf.reader import read_gguf
from moegguf.models.details import details
from moegguf.models.entry import Details, ModelEntry
from moegguf.models.modelfile import parameter_lines
from moegguf.server.common.body import read_body
from moegguf.server.common.lookup import find
from moegguf.server.ollama.objects import details_object, time_text
from moegguf.server.ollama.schema import ShowRequest

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

SHORT_ARRAY = 5  # longer ones are shown empty without `verbose`
HIDDEN = ("general.name", "tokenizer.chat_template")  # in other fields of the reply


async def show(request: Request) -> Response:
    """The metadata; with `verbose` also long arrays and all tensors."""
    body = await read_body(request, ShowRequest)
    return JSONResponse(await asyncio.to_thread(show_object, request.app.state.catalog, body))


def show_object(catalog: Catalog, body: ShowRequest) -> dict[str, Any]:
    """The reply. Raises HttpError 404, ModelNameError, ModelFormatError."""
    entry = find(catalog, body.model_name)
    known = details(entry)
    system = body.system or entry.system
    found: dict[str, Any] = {
        "modelfile": catalog.modelfile(entry),
        "parameters": "\n".join(parameter_lines(entry.parameters)),
        "template": known.template or "",
        "details": details_object(known, entry.parent),
        "model_info": model_info(entry, known, verbose=bool(body.verbose)),
        "capabilities": list(known.capabilities),
        "modified_at": time_text(entry.modified),
    }
    if entry.license:
        found["license"] = entry.license
    if system:
        found["system"] = system
    if entry.mmproj:
        found["projector_info"] = json_metadata(read_gguf(entry.mmproj).metadata, verbose=False)
    if body.verbose:
        found["tensors"] = list(tensors(entry.files))
    return found


def model_info(entry: ModelEntry, known: Details, *, verbose: bool) -> dict[str, Any]:
    """The keys of the GGUF header, and the number of parameters as `general.parameter_count`."""
    long = long_arrays(entry.path) if verbose else {}
    shown = {key: value for key, value in {**known.metadata, **long}.items() if key not in HIDDEN}
    return json_metadata(shown, verbose=verbose) | {"general.parameter_count": known.n_parameters}


def json_metadata(metadata: Mapping[str, Any], *, verbose: bool) -> dict[str, Any]:
    """Metadata as JSON: infinite numbers become null; long arrays are empty without `verbose`."""
    return {key: _json_value(value, verbose) for key, value in metadata.items()}


def _json_value(value: Any, verbose: bool) -> Any:
    if isinstance(value, tuple | list):
        return [_json_value(each, verbose) for each in value] if verbose or len(value) <= SHORT_ARRAY else []
    return None if isinstance(value, float) and not math.isfinite(value) else value


def long_arrays(path: Path) -> dict[str, list[Any]]:
    """The arrays that `read_gguf` does not keep, such as the tokens of the vocabulary."""
    from gguf import GGUFReader

    names = read_gguf(path).arrays  # also validates the file for the other reader
    fields = GGUFReader(path).fields
    return {name: fields[name].contents() for name in names if name in fields}


def tensors(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Name, type and shape of all tensors, ne0 first."""
    for file in files:
        for tensor in read_gguf(file).tensors:
            yield {"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape)}


routes = [Route("/api/show", show, methods=["POST"])]
