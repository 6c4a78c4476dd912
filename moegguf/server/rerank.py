"""POST /v1/rerank: documents in the order of their scores for a query, by a reranker (a model whose pooling is RANK).

The forms are llama-server's: Jina's and Cohere's `documents`, and TEI's `texts`, whose reply is the list alone.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.conversation import leases_of
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import Loading
from moegguf.server.common.streams import WholeResponse
from moegguf.server.llama_server import selected_model

PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")


class RerankBody(Loading):
    """The body. Without `model` it is the only loaded one. `documents`: texts, or objects with a `text`."""

    model: str = Field("", max_length=limits.NAME_CHARS)
    query: Annotated[str, Field(min_length=1)]
    documents: list[str] | None = Field(None, max_length=limits.INPUTS)
    texts: list[str] | None = Field(None, max_length=limits.INPUTS)
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False

    @field_validator("documents", mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        """The texts of Cohere's objects."""
        if not isinstance(given, list):
            return given
        return [each.get("text") if isinstance(each, dict) else each for each in given]


async def rerank(request: Request) -> Response:
    """The documents' scores, the best first."""
    return WholeResponse(_rerank(request, await read_body(request, RerankBody)))


async def _rerank(request: Request, body: RerankBody) -> Any:
    texts = body.texts if body.documents is None else body.documents
    if not texts:
        raise HttpError(400, "documents: a list of texts is missing")
    model = selected_model(request, body.model)
    async with leases_of(request).lease(model, body.overrides(), body.keep_alive_s()) as lease:
        found, name = await lease.rank(body.query, texts), lease.entry.name
    scores = {i: vector[0] for i, vector in enumerate(found.vectors)}
    best = sorted(scores, key=lambda i: -scores[i])[: body.top_n]
    if body.documents is None:
        return [{"index": i, "score": scores[i], **({"text": texts[i]} if body.return_text else {})} for i in best]
    results = [
        {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if body.return_documents else {})
        for i in best
    ]
    usage = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
    return {"model": name, "object": "list", "usage": usage, "results": results}


routes = [Route(path, rerank, methods=["POST"]) for path in PATHS]
