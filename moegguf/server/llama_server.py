"""llama-server's own endpoints about models and tokens, for its clients and for health checks: /health, /props, /slots,
/tokenize, /detokenize; with vLLM's names too, and its /tokenizer_info, which lm-eval tokenizes by. And /v1/rerank:
documents in the order of their scores for a query, by a reranker (a model whose pooling is RANK), in llama-server's
forms: Jina's and Cohere's `documents`, and TEI's `texts`, whose reply is the list alone.

llama-server has one model; here `model` in the body or query selects it, by default the only loaded one.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.generate.request import Sampling
from moegguf.models.entry import Details, ModelEntry
from moegguf.package import __version__
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.conversation import leases_of
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import loaded_of, look_up, selected_model
from moegguf.server.common.options import MAX_TOKEN, Loading, ModelName, options_of
from moegguf.server.common.streams import WholeResponse, computed
from moegguf.serving.events import LoadedModel
from moegguf.serving.lease import Lease


async def health(request: Request) -> Response:
    """Always 200; `degraded` lists models with read errors of experts."""
    failed = {model.name: model.stats.read_errors for model in request.app.state.manager.loaded()}
    failed = {name: n for name, n in failed.items() if n}
    if not failed:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "degraded", "read_errors": failed})


def shared_lease(request: Request, model: str | None) -> Lease:
    """A lease that does not wait for answers of other requests; loads the model if needed."""
    state = request.app.state
    lease: Lease = state.manager.lease(selected_model(state, model), will_answer=False)
    return lease


async def props(request: Request) -> Response:
    """Properties of a model, without loading it: of `?model=`, or of the only loaded one."""
    entry, known, loaded = await _selected(request)
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": loaded.n_ctx if loaded else 0,
                "is_processing": loaded.busy if loaded else False,
                "params": sampling_object(options_of(None, entry).sampling()),
            },
            "total_slots": loaded.n_parallel if loaded else 1,
            "model_alias": entry.name,
            "model_path": entry.path.name,
            "chat_template": entry.template or known.template or "",
            "modalities": {"vision": "vision" in known.capabilities, "audio": False},
            "build_info": f"moegguf-{__version__}",
            "is_sleeping": loaded is None,
        }
    )


async def _selected(request: Request) -> tuple[ModelEntry, Details, LoadedModel | None]:
    """The model of `?model=`, or the only loaded one; and its state, if it is loaded."""
    entry, known = await look_up(request.app.state, request.query_params.get("model"))
    return entry, known, loaded_of(request.app.state, entry)


async def slots(request: Request) -> Response:
    """The requests that a model answers at once, the busy ones first; 503 with `?fail_on_no_slot=1` where all are
    busy."""
    entry, _, loaded = await _selected(request)
    if loaded is None:
        return JSONResponse([])
    if request.query_params.get("fail_on_no_slot") and loaded.n_answering >= loaded.n_parallel:
        raise HttpError(503, "no slot available")
    params = sampling_object(options_of(None, entry).sampling())
    each = {"n_ctx": loaded.n_ctx, "speculative": False, "params": params}
    return JSONResponse([{"id": n, "is_processing": n < loaded.n_answering, **each} for n in range(loaded.n_parallel)])


def sampling_object(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters by llama-server's names."""
    names = "temperature top_k top_p min_p typical_p repeat_last_n repeat_penalty presence_penalty frequency_penalty"
    return {
        **{name: getattr(sampling, name) for name in names.split()},
        "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "stop": list(sampling.stop),
    }


class TokenizeBody(Body):
    """The body of /tokenize. `with_pieces`: with the text of each token."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: bool | None = Field(None, validation_alias=AliasChoices("add_special", "add_special_tokens"))
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: ModelName | None = None


async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
    """The tokens of a text. llama-server: `add_special` adds BOS, `parse_special` parses names of special tokens."""
    special = body.parse_special is not False
    async with shared_lease(request, body.model) as lease:
        tokens = await lease.tokenize(body.content, special=special)
        bos = await lease.tokenize("", special=True)  # BOS, if the model has it
        if special and not body.add_special:
            tokens = tokens[len(bos) :]
        elif body.add_special and not special:
            tokens = [*bos, *tokens]
        if not body.with_pieces:
            return {"tokens": tokens}
        pieces = [await lease.detokenize([token]) for token in tokens]
    return {"tokens": [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]}


class _DetokenizeBody(Body):
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]]
    model: ModelName | None = None


async def _detokenize(request: Request, body: _DetokenizeBody) -> dict[str, Any]:
    async with shared_lease(request, body.model) as lease:
        text = await lease.detokenize(body.tokens)
    return {"content": text, "prompt": text}


async def tokenizer_info(request: Request) -> Response:
    """The special tokens and the chat template of `?model=`, or of the only loaded model, by vLLM's names."""
    entry, known = await look_up(request.app.state, request.query_params.get("model"))

    async def work() -> dict[str, Any]:
        template = entry.template or known.template
        info: dict[str, Any] = {"chat_template": template, "model_max_length": known.n_ctx_train}
        async with shared_lease(request, entry.name) as lease:
            for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
                token = known.metadata.get(f"tokenizer.ggml.{key}_token_id")
                info[f"{kind}_token"] = None if token is None else await lease.detokenize([token])
        return info

    return WholeResponse(work())


RERANK_PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")


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


async def rerank(request: Request, body: RerankBody) -> Any:
    """The documents' scores, the best first."""
    texts = body.texts if body.documents is None else body.documents
    if not texts:
        raise HttpError(400, "documents: a list of texts is missing")
    model = selected_model(request.app.state, body.model)
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


routes = [
    Route("/health", health, methods=["GET"]),
    Route("/props", props, methods=["GET"]),
    Route("/slots", slots, methods=["GET"]),
    computed("/tokenize", TokenizeBody, tokenize),
    computed("/detokenize", _DetokenizeBody, _detokenize),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    *(computed(path, RerankBody, rerank) for path in RERANK_PATHS),
]
