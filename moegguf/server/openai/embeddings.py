"""POST /v1/embeddings: vectors of texts, as numbers or as little-endian float32 in base64.

Texts may be given as tokens. A text longer than the context is an error unless `truncate` is true.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.datastructures import State
from starlette.requests import Request

from moegguf.generate.embedding import Embeddings
from moegguf.server.common import limits
from moegguf.server.common.body import parse_body, too_large
from moegguf.server.common.conversation import Json, leases_of
from moegguf.server.common.errors import HttpError
from moegguf.server.common.objects import shorten
from moegguf.server.common.options import Loading, ModelName, are_tokens
from moegguf.server.common.streams import computed
from moegguf.serving.lease import Leases

Text = str | list[int]  # a text, or its tokens


def _list_of_texts(value: Any) -> list[Text]:
    """The texts from any form of `input`. Raises ValueError."""
    texts = value if isinstance(value, list) and not are_tokens(value) else [value]
    if not texts or not all((isinstance(text, str) and text) or are_tokens(text) for text in texts):
        raise ValueError(
            "must be a text, a list of texts, a list of tokens or a list of such lists, none of them empty"
        )
    if len(texts) > limits.INPUTS:
        raise ValueError(f"has {len(texts)} texts, but {limits.INPUTS} are accepted")
    return texts


class _EmbeddingsBody(Loading):
    model: ModelName
    input: Annotated[list[Text], BeforeValidator(_list_of_texts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    truncate: bool | None = None


def _embeddings_object(model: str, found: Embeddings, body: _EmbeddingsBody) -> Json:
    """The reply. Raises HttpError 400 for more dimensions than the model has."""
    vectors = np.asarray(found.vectors, dtype="<f4").reshape(len(body.input), -1)
    n_embd = vectors.shape[1]
    if body.dimensions is not None and body.dimensions > n_embd:
        raise HttpError(400, f"dimensions: must be at most {n_embd}, the model's number, but is {body.dimensions}")
    vectors = shorten(vectors, body.dimensions)
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


async def embeddings(request: Request, body: _EmbeddingsBody) -> Json:
    """A normalized vector per text."""
    return await _embed(leases_of(request), body)


async def whole_embeddings(state: State, leases: Leases, raw: bytes) -> Json:
    """The reply to a body as JSON text. Raises MoeggufError."""
    if len(raw) > limits.BODY_BYTES:
        raise too_large(limits.BODY_BYTES)
    return await _embed(leases, parse_body(raw, _EmbeddingsBody))


async def _embed(leases: Leases, body: _EmbeddingsBody) -> Json:
    async with leases.lease(body.model, body.overrides(), body.keep_alive_s()) as lease:
        found = await lease.embed(body.input, truncate=bool(body.truncate), normalize=True)
        return _embeddings_object(lease.entry.name, found, body)


routes = [computed("/v1/embeddings", _EmbeddingsBody, embeddings)]
