"""/api/embed and the deprecated /api/embeddings: vectors of texts."""

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
from moegguf.server.common.lookup import find
from moegguf.server.common.objects import shorten, to_ns
from moegguf.server.common.streams import WholeResponse, computed
from moegguf.server.ollama.schema import EmbeddingsRequest, EmbedRequest

TOO_LONG = "the input length exceeds the context length"


async def embed(request: Request) -> Response:
    """A normalized vector per text of a list, empty ones too; without a text, only loads the model."""
    start_ns = time.perf_counter_ns()
    body = await read_body(request, EmbedRequest)
    texts = [text for text in (body.input,) if text] if isinstance(body.input, str) else body.input or []

    async def work() -> dict[str, Any]:
        name, vectors, n_tokens, load_s = await compute(request, body, texts, normalize=True)
        durations = {"total_duration": time.perf_counter_ns() - start_ns, "load_duration": to_ns(load_s)}
        counts = {**durations, "prompt_eval_count": n_tokens}
        return {
            "model": name,
            "embeddings": shorten(vectors, body.dimensions).tolist(),
            **{key: value for key, value in counts.items() if value},
        }

    return WholeResponse(work())


async def embeddings(request: Request, body: EmbeddingsRequest) -> dict[str, Any]:
    """One vector, not normalized; empty without text, which only loads the model."""
    _, vectors, _, _ = await compute(request, body, [body.prompt] if body.prompt else [], normalize=False)
    return {"embedding": vectors[0].tolist() if len(vectors) else []}


async def compute(
    request: Request, body: EmbedRequest | EmbeddingsRequest, texts: list[str], *, normalize: bool
) -> tuple[str, np.ndarray, int, float]:
    """(name, vectors (n_texts, n_embd), n_tokens, load_s). Raises HttpError 404, 400 for a text that is too long."""
    state = request.app.state
    entry = await asyncio.to_thread(find, state.catalog, body.model)
    truncate = not (isinstance(body, EmbedRequest) and body.truncate is False)
    async with state.manager.lease(entry, body.overrides(), body.keep_alive_s()) as lease:
        if not texts:
            return entry.name, np.empty((0, 0), np.float32), 0, lease.load_s
        try:
            found = await lease.embed(texts, truncate=truncate, normalize=normalize)
        except ContextError as error:
            raise HttpError(400, f"{TOO_LONG} ({error})") from None
        return entry.name, np.asarray(found.vectors, np.float32), found.n_tokens, lease.load_s


routes = [Route("/api/embed", embed, methods=["POST"]), computed("/api/embeddings", EmbeddingsRequest, embeddings)]
