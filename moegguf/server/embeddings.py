"""Endpoints that compute embeddings of texts, and endpoints that rank documents by
their scores for a query.

Embeddings: OpenAI's /v1/embeddings, Ollama's /api/embed and the deprecated
/api/embeddings, and llama-server's /embeddings. At OpenAI's and llama-server's
endpoints a text may also be a list of tokens. OpenAI's endpoint replies with numbers,
or with little-endian float32 in base64.

A text that is too long for the model is truncated if `truncate` is true, and is an
error if it is false. `truncate` is false by default at /v1/embeddings and true at
/api/embed. Ollama's /api/embeddings always truncates, and llama-server's /embeddings
never does.

/v1/rerank needs a reranker, which is a model whose pooling type is RANK. The endpoint
accepts what llama-server accepts: a list `documents` as in Jina's and Cohere's APIs, or
a list `texts` as in TEI. The reply to a body with only `texts` is a JSON list.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, AliasChoices, Field, field_validator
from starlette.datastructures import State
from starlette.requests import Request as HttpRequest

from moegguf.generate.request import Embeddings
from moegguf.server.common import limits
from moegguf.server.common.body import Whole
from moegguf.server.common.conversation import Json
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import (
    Loading,
    Name,
    SelectedName,
    Text,
    Texts,
    find,
    sampling_of,
    selected_model,
)
from moegguf.server.common.replies import computed, to_ns
from moegguf.server.ollama.chat import ModelBody
from moegguf.serving.clients import current_owner

NATIVE_MOST = 32760.0
_Inputs = Annotated[list[str], Field(max_length=limits.INPUTS)]
RERANK_PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")


def _shorten(
    vectors: npt.NDArray[np.float32], n_dimensions: int
) -> npt.NDArray[np.float32]:
    """Cuts each vector to its first `n_dimensions` elements and scales it to length 1;
    a zero vector stays zero. The shape changes from (n, n_embd) to (n, n_dimensions).
    Returns the vectors unchanged if `n_dimensions` is 0 or at least n_embd, or if
    there are no vectors."""
    if not n_dimensions or not len(vectors) or n_dimensions >= vectors.shape[1]:
        return vectors
    cut = vectors[:, :n_dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)


# OpenAI's


def _check_texts(texts: list[Text]) -> list[Text]:
    if not all(texts):
        raise ValueError(
            "each text must have at least one character; leave empty texts out"
        )
    return texts


class EmbeddingsBody(Loading):
    """The body of /v1/embeddings."""

    limit: ClassVar[int] = limits.BODY_BYTES

    model: Name
    input: Annotated[Texts, AfterValidator(_check_texts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Whole, Field(ge=1, le=1 << 20)] = 0  # 0: all dimensions
    truncate: bool = False

    async def whole_reply(self, state: State) -> Json:
        """Returns the reply, with a normalized vector for each text. Raises HttpError
        400 if `dimensions` is larger than the number of dimensions of the model's
        vectors."""
        found, _ = await _embed_texts(
            state, self.model, self, self.input, truncate=self.truncate
        )
        vectors = np.asarray(found.vectors, dtype="<f4").reshape(len(self.input), -1)
        n_embd = vectors.shape[1]
        if self.dimensions > n_embd:
            raise HttpError(
                f"dimensions: must be at most {n_embd}, as in the model's vectors, but is {self.dimensions}"
            )
        vectors = _shorten(vectors, self.dimensions)
        written: list[Any] = vectors.tolist()
        if self.encoding_format == "base64":
            written = [
                base64.b64encode(vector.astype("<f4").tobytes()).decode()
                for vector in vectors
            ]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": each}
                for i, each in enumerate(written)
            ],
            "model": self.model,
            "usage": {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens},
        }


# Ollama's


class _EmbedRequest(ModelBody, Loading):
    input: str | _Inputs = ""
    truncate: bool = True
    dimensions: Annotated[Whole, Field(ge=0, le=1 << 20)] = 0


async def _embed(request: HttpRequest, body: _EmbedRequest) -> Json:
    """Replies with a normalized vector for each text. Texts in a list may be empty. If
    `input` is absent or is an empty string or list, loads the model and replies with an
    empty list."""
    texts = (
        [text for text in (body.input,) if text]
        if isinstance(body.input, str)
        else body.input
    )
    found, load_ns = await _compute(
        request, body, texts, truncate=body.truncate, normalize=True
    )
    return {
        "model": body.model,
        "embeddings": _shorten(
            np.asarray(found.vectors, np.float32), body.dimensions
        ).tolist(),
        "total_duration": body.age_ns,
        "load_duration": load_ns,
        "prompt_eval_count": found.n_tokens,
    }


class _EmbeddingRequest(ModelBody, Loading):
    prompt: str = ""


async def _embedding(request: HttpRequest, body: _EmbeddingRequest) -> Json:
    """Replies with the vector of one text, not normalized. If the text is missing or
    empty, loads the model and replies with an empty vector."""
    texts = [body.prompt] if body.prompt else []
    found, _ = await _compute(request, body, texts, truncate=True, normalize=False)
    return {
        "embedding": np.asarray(found.vectors, np.float32)[0].tolist() if texts else []
    }


async def _compute(
    request: HttpRequest,
    body: _EmbedRequest | _EmbeddingRequest,
    texts: list[str],
    **options: bool,
) -> tuple[Embeddings, int]:
    """Returns the vectors of texts, and the time that finding and loading the model
    took, in nanoseconds. `options` are fields of the call "embed". Raises HttpError 404
    if there is no such model, and the errors of `moegguf.generate.embedding.embed`."""
    state = request.app.state
    entry = await asyncio.to_thread(find, state.catalog, body.model)
    found_ns = body.age_ns
    found, load_s = await _embed_texts(state, entry, body, texts, **options)
    return found, found_ns + to_ns(load_s)


async def _embed_texts(
    state: State, model: Any, body: Loading, texts: list[Any], **options: Any
) -> tuple[Embeddings, float]:
    """Returns the vectors of texts, and the time that loading the model took, in
    seconds (0 if it was already loaded). `model` is a name or an entry, and `options`
    are fields of the call "embed". If there are no texts, the model is only loaded."""
    async with state.manager.lease(
        model, body.overrides(), body.keep_alive_s()
    ) as lease:
        num_ctx = sampling_of(lease.entry, body.options).num_ctx
        if not texts:
            return Embeddings([], 0), lease.load_s
        options |= {"inputs": texts, "num_ctx": num_ctx}
        found = await lease.value("embed", client_key=current_owner.get(), **options)
        return found, lease.load_s


# llama-server's


class _NativeEmbeddingsBody(Loading):
    """The body of /embeddings. Each vector is divided by its p-norm with p =
    `embd_normalize`. -1 leaves vectors unchanged. 0 scales each vector so that its
    largest absolute value is NATIVE_MOST."""

    model: SelectedName = ""
    input: Annotated[Texts, AfterValidator(_check_texts)] = Field(
        validation_alias=AliasChoices("input", "content")
    )
    embd_normalize: Annotated[Whole, Field(ge=-1, le=1 << 20)] = 2


async def _native_embeddings(
    request: HttpRequest, body: _NativeEmbeddingsBody
) -> list[Json]:
    """Replies with one vector for each text. Each vector is wrapped in a list, because
    llama-server can also send one vector for each token."""
    model, power = selected_model(request.app.state, body.model), body.embd_normalize
    found, _ = await _embed_texts(
        request.app.state, model, body, body.input, truncate=False, normalize=False
    )
    vectors = np.asarray(found.vectors, np.float64)
    if power >= 0:
        norms = np.linalg.norm(vectors, ord=power or np.inf, axis=1, keepdims=True)
        vectors /= np.where(norms > 0, norms if power else norms / NATIVE_MOST, 1)
    return [
        {"index": i, "embedding": [vector]} for i, vector in enumerate(vectors.tolist())
    ]


class _RerankBody(Loading):
    """The body of /v1/rerank. An empty `model` selects the only loaded model.
    `documents` are strings, or objects with a string under `text`."""

    model: SelectedName = ""
    query: Annotated[str, Field(min_length=1)]
    documents: _Inputs = []
    texts: _Inputs = []
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False

    @field_validator("documents", mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        return [each.get("text") if isinstance(each, dict) else each for each in given]


async def _rerank(request: HttpRequest, body: _RerankBody) -> Any:
    """Replies with the scores of the documents for the query, best first. If the body
    has `top_n`, the reply has only the best `top_n` documents."""
    texts = body.documents or body.texts
    if not texts:
        raise HttpError(
            "documents: a list of texts is missing or empty; send one with at least one text"
        )
    model = selected_model(request.app.state, body.model)
    async with request.app.state.manager.lease(
        model, body.overrides(), body.keep_alive_s()
    ) as lease:
        fields = {"query": body.query, "documents": texts}
        found = await lease.value("rank", client_key=current_owner.get(), **fields)
        name = body.model or lease.entry.name
    scores = {i: vector[0] for i, vector in enumerate(found.vectors)}
    best = sorted(scores, key=lambda i: -scores[i])[: body.top_n]
    if not body.documents:
        return [
            {
                "index": i,
                "score": scores[i],
                **({"text": texts[i]} if body.return_text else {}),
            }
            for i in best
        ]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": texts[i]}} if body.return_documents else {})
        for i in best
    ]
    usage = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
    return {"model": name, "object": "list", "usage": usage, "results": results}


routes = [
    computed(
        "/v1/embeddings",
        EmbeddingsBody,
        lambda request, body: body.whole_reply(request.app.state),
    ),
    computed("/api/embed", _EmbedRequest, _embed),
    computed("/api/embeddings", _EmbeddingRequest, _embedding),
    computed("/embeddings", _NativeEmbeddingsBody, _native_embeddings),
    *(computed(path, _RerankBody, _rerank) for path in RERANK_PATHS),
]
