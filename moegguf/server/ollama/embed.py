"""/api/embed and the older /api/embeddings: vectors of texts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.errors import ContextError
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.figures import ns
from moegguf.server.common.lookup import find
from moegguf.server.common.options import Options, keep_alive_s
from moegguf.server.common.streams import WholeResponse
from moegguf.server.ollama.schema import EmbeddingsRequest, EmbedRequest

TOO_LONG = "the input length exceeds the context length"


async def embed(request: Request) -> Response:
    """A vector of length 1 for each text; without a text the model is loaded."""
    begun_ns = time.perf_counter_ns()
    body = await read_body(request, EmbedRequest)
    given = [body.input] if isinstance(body.input, str) else body.input or []
    texts = given if any(given) else []

    async def work() -> dict[str, Any]:
        name, vectors, n_tokens, load_s = await compute(request, body, texts, normalize=True)
        durations = {"total_duration": time.perf_counter_ns() - begun_ns, "load_duration": ns(load_s)}
        counts = {**durations, "prompt_eval_count": n_tokens}
        return {
            "model": name,
            "embeddings": shortened(vectors, body.dimensions).tolist(),
            **{key: value for key, value in counts.items() if value},
        }

    return WholeResponse(work())


async def embeddings(request: Request) -> Response:
    """One vector as the model gives it; empty without a text, when the model is loaded."""
    body = await read_body(request, EmbeddingsRequest)
    texts = [body.prompt] if body.prompt else []

    async def work() -> dict[str, Any]:
        _, vectors, _, _ = await compute(request, body, texts, normalize=False)
        return {"embedding": vectors[0].tolist() if len(vectors) else []}

    return WholeResponse(work())


async def compute(
    request: Request, body: EmbedRequest | EmbeddingsRequest, texts: list[str], *, normalize: bool
) -> tuple[str, np.ndarray, int, float]:
    """(name, vectors (n_texts, n_embd), tokens, seconds of loading). Raises HttpError 404, 400 for a text too long."""
    state = request.app.state
    entry = await asyncio.to_thread(find, state.catalog, body.model_name)
    truncate = not (isinstance(body, EmbedRequest) and body.truncate is False)
    load, stay_s = (body.options or Options()).load(), keep_alive_s(body.keep_alive)
    async with state.manager.lease(entry, load, stay_s) as lease:
        if not texts:
            return entry.name, np.empty((0, 0), np.float32), 0, lease.load_s
        try:
            found = await lease.embed(texts, truncate=truncate, normalize=normalize)
        except ContextError as error:
            raise HttpError(400, f"{TOO_LONG} ({error})") from None
        return entry.name, np.asarray(found.vectors, np.float32), found.n_tokens, lease.load_s


def shortened(vectors: np.ndarray, n_dimensions: int | None) -> np.ndarray:
    """The first dimensions of each vector (n, n_embd), of length 1 again."""
    if not n_dimensions or not len(vectors) or n_dimensions >= vectors.shape[1]:
        return vectors
    cut = vectors[:, :n_dimensions]
    length = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.asarray(cut / np.where(length > 0, length, 1))


routes = [
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embeddings, methods=["POST"]),
]
