"""POST /v1/embeddings: vectors of texts, as numbers or as the bytes of little-endian floats in base64.

Texts may come as tokens. A text that is longer than the context is an error unless `truncate` says otherwise.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.server.common import limits
from moegguf.server.common.body import Body, read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import MAX_TOKEN, KeepAlive, ModelName, Options, keep_alive_s
from moegguf.server.common.streams import WholeResponse

if TYPE_CHECKING:
    import numpy.typing as npt

    from moegguf.generate.embedding import Embeddings

Text = str | list[int]  # as it is, or as its tokens


def is_text(value: Any) -> bool:
    """Text, or tokens, with something in it."""
    if isinstance(value, list):
        return bool(value) and all(type(token) is int and 0 <= token <= MAX_TOKEN for token in value)
    return isinstance(value, str) and value != ""


def list_of_texts(value: Any) -> list[Text]:
    """All forms of `input`: one text or several, each as it is or as tokens."""
    texts = value if isinstance(value, list) and not is_text(value) else [value]
    if not texts or not all(map(is_text, texts)):
        raise ValueError(
            "must be a text, a list of texts, a list of tokens or a list of such lists, none of them empty"
        )
    if len(texts) > limits.INPUTS:
        raise ValueError(f"has {len(texts)} texts, but {limits.INPUTS} are taken at once")
    return texts


class EmbeddingsBody(Body):
    model: ModelName
    input: Annotated[list[Text], BeforeValidator(list_of_texts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    truncate: bool | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


def shortened(vectors: npt.NDArray[np.float32], dimensions: int | None) -> npt.NDArray[np.float32]:
    """The first `dimensions` of each vector, of length 1 again. Shape (n, n_embd) to (n, dimensions)."""
    n_embd = vectors.shape[1]
    if dimensions is None or dimensions == n_embd:
        return vectors
    if dimensions > n_embd:
        raise HttpError(400, f"dimensions: must be at most {n_embd}, as many as the model has, but is {dimensions}")
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def embeddings_object(model: str, found: Embeddings, body: EmbeddingsBody) -> dict[str, Any]:
    vectors = shortened(np.asarray(found.vectors, dtype="<f4").reshape(len(body.input), -1), body.dimensions)
    if body.encoding_format == "base64":
        written: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    else:
        written = vectors.tolist()
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(written)],
        "model": model,
        "usage": {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens},
    }


async def embeddings(request: Request) -> Response:
    body = await read_body(request, EmbeddingsBody)
    return WholeResponse(_embed(request, body))


async def _embed(request: Request, body: EmbeddingsBody) -> dict[str, Any]:
    load, stay_s = (body.options or Options()).load(), keep_alive_s(body.keep_alive)
    async with request.app.state.manager.lease(body.model, load, stay_s) as lease:
        found = await lease.embed(body.input, truncate=bool(body.truncate), normalize=True)
        return embeddings_object(lease.entry.name, found, body)


routes = [Route("/v1/embeddings", embeddings, methods=["POST"])]
