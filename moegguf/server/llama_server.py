"""llama-server's own endpoints, for its clients and for health checks.

Where an endpoint needs a model, `model` in the body or query selects it; the default is
the only loaded model.

Models and tokens: /health, /props, /slots, /lora-adapters, /tokenize, /detokenize. The
endpoint /tokenize also accepts vLLM's names of fields, and /tokenizer_info is vLLM's
endpoint, which lm-eval reads. Text: /completion (continues a prompt without a
template), /infill (fills the gap between two texts) and /apply-template (returns the
prompt of a conversation). Both /completion and /infill accept the sampling options of
/v1/completions, and ignore options of unknown samplers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.generate.request import AnswerSummary, Delta, Event, Request, Sampling
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.package import __version__
from moegguf.server.common import limits
from moegguf.server.common.body import (
    Body,
    Whole,
    integral,
    parse_body,
    parse_fields,
    parse_value,
    read_bytes,
    without_nulls,
)
from moegguf.server.common.conversation import Json, Reply, about_prompt, conversation
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import (
    MAX_TOKEN,
    Adapters,
    Name,
    SelectedName,
    Stop,
    Stops,
    Texts,
    check_loaded,
    loaded_of,
    look_up,
    sampling_of,
    scale_of,
    selected_model,
)
from moegguf.server.common.replies import (
    WholeResponse,
    computed,
    dumps,
    event_line,
    logprob_objects,
    present,
)
from moegguf.server.openai import chat
from moegguf.serving.clients import current_owner
from moegguf.serving.events import LoadedModel
from moegguf.serving.lease import Lease
from moegguf.settings import data_folder

MAX_FILES = 256
SLOT_ACTIONS = ("save", "restore", "erase")
SLOT_FILE = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)
# {`finish` of an answer: llama-server's `stop_type`}.
STOP_TYPES = {"stop": "eos", "length": "limit"}

# Models and tokens


async def _health(request: HttpRequest) -> Response:
    """Replies with the status "ok", or with "degraded" and the failed reads of each
    loaded model that had any. Raises HttpError 503 while the models that were named at
    the server's start are being loaded."""
    check_loaded(request.app.state)
    failed = {
        model.name: n
        for model in request.app.state.manager.loaded()
        if (n := model.stats.read_errors)
    }
    return JSONResponse(
        {"status": "degraded", "read_errors": failed} if failed else {"status": "ok"}
    )


def _shared_lease(request: HttpRequest, model: str | None) -> Lease:
    """Returns a lease that does not wait for running answers. Entering the lease loads
    the model if needed."""
    state = request.app.state
    lease: Lease = state.manager.lease(selected_model(state, model), will_answer=False)
    return lease


async def _selected(
    request: HttpRequest,
) -> tuple[ModelEntry, Details, LoadedModel | None]:
    """Returns the entry and the details of the model in `?model=`, by default the only
    loaded model. The third value is the loaded model, or None if the selected model is
    not in memory."""
    entry, known = await look_up(request.app.state, request.query_params.get("model"))
    return entry, known, loaded_of(request.app.state, entry)


async def _props(request: HttpRequest) -> Response:
    entry, known, loaded = await _selected(request)
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": loaded.n_ctx if loaded else 0,
                "is_processing": loaded.busy if loaded else False,
                "params": _sampling_object(sampling_of(entry)),
            },
            "total_slots": loaded.n_parallel if loaded else 1,
            "model_alias": entry.name,
            "model_path": entry.path.name,
            "chat_template": known.template or "",
            **present(chat_template_tool_use=known.tool_template),
            "modalities": {"vision": "vision" in known.capabilities, "audio": False},
            "build_info": f"moegguf-{__version__}",
            "is_sleeping": loaded is None,
        }
    )


async def _slots(request: HttpRequest) -> Response:
    """Replies with a list of llama-server's slots: one for each request that the model
    can answer at once, busy slots first. The list is empty if the model is not loaded.
    With `?fail_on_no_slot=1` raises HttpError 503 if all slots are busy."""
    entry, _, loaded = await _selected(request)
    if loaded is None:
        return JSONResponse([])
    if (
        request.query_params.get("fail_on_no_slot")
        and loaded.n_answering >= loaded.n_parallel
    ):
        raise HttpError("no slot available", 503)
    each = {
        "n_ctx": loaded.n_ctx,
        "speculative": False,
        "params": _sampling_object(sampling_of(entry)),
    }
    return JSONResponse(
        [
            {"id": n, "is_processing": n < loaded.n_answering, **each}
            for n in range(loaded.n_parallel)
        ]
    )


class _SlotBody(Body):
    filename: Annotated[str, Field(max_length=limits.NAME_CHARS)] = ""
    model: Name | None = None


async def _change_slot(request: HttpRequest) -> Response:
    """Saves, restores or erases the computed context in one of llama-server's slots, as
    `?action=` selects. Saved contexts are files in the data folder, in one folder for
    each API key. Clients without a key share a folder."""
    action, slot = request.query_params.get("action"), request.path_params["slot"]
    if action not in SLOT_ACTIONS:
        raise HttpError(
            f"action: must be one of {', '.join(SLOT_ACTIONS)}, but is {action!r:.40}"
        )
    if not (slot.isascii() and slot.isdigit() and len(slot) < 10):
        raise HttpError(
            f"a slot must be a number of at most 9 digits, but is {slot!r:.40}"
        )
    raw = await read_bytes(request)
    body = parse_body(raw, _SlotBody) if raw.strip() else _SlotBody()
    state = request.app.state
    files: dict[str, Any] = {}
    if action != "erase":
        if SLOT_FILE.fullmatch(body.filename) is None:
            rule = "must be 1 to 200 letters, digits and ._- with no dot first"
            raise HttpError(f"filename: {rule}, but is {body.filename!r:.60}")
        folder = data_folder() / "slots"
        used_bytes = await asyncio.to_thread(_bytes_in, folder)
        files["path"] = str(folder / (current_owner.get() or "shared") / body.filename)
        files["most_bytes"] = max(0, state.settings.storage_bytes - used_bytes)
    model = selected_model(state, body.model or request.query_params.get("model"))

    async def work() -> Json:
        start_s = time.perf_counter()
        async with state.manager.lease(model) as lease:
            owner = current_owner.get()
            counts = await lease.value(
                "slot", action=action, slot=int(slot), owner=owner, **files
            )
        reply: Json = {"id_slot": int(slot), **counts}
        if action != "erase":
            work_ms = (time.perf_counter() - start_s) * 1e3
            reply |= {"filename": body.filename, "timings": {f"{action}_ms": work_ms}}
        return reply

    return WholeResponse(work())


def _bytes_in(folder: Path) -> int:
    """Returns the total size in bytes of the files in the direct subfolders of a
    folder, or 0 if the folder does not exist."""
    return sum(path.lstat().st_size for path in folder.glob("*/*"))


def _sampling_object(sampling: Sampling) -> Json:
    """Returns sampling parameters as JSON, with llama-server's names."""
    names = (
        "temperature top_k top_p min_p typical_p repeat_last_n repeat_penalty presence_penalty frequency_penalty"
        " top_n_sigma xtc_probability xtc_threshold dry_multiplier dry_base dry_allowed_length dry_penalty_last_n"
        " mirostat mirostat_tau mirostat_eta ignore_eos"
    )
    return {
        **{name: getattr(sampling, name) for name in names.split()},
        "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "stop": list(sampling.stop),
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
    }


class _TokenizeBody(Body):
    """The body of /tokenize. If `with_pieces` is true, the reply also has the text of
    each token."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: bool = Field(
        False, validation_alias=AliasChoices("add_special", "add_special_tokens")
    )
    parse_special: bool = True
    with_pieces: bool = False
    model: Name | None = None


async def _tokenize(request: HttpRequest, body: _TokenizeBody) -> Json:
    """Replies with the tokens of a text. As in llama-server, `add_special` (default:
    false) adds the tokens that the model puts around a text, such as BOS.
    `parse_special` (default: true) converts the names of special tokens in the text to
    these tokens."""
    async with _shared_lease(request, body.model) as lease:
        tokens = await lease.value(
            "tokenize", text=body.content, special=body.parse_special, add_special=body.add_special,
        )  # fmt: skip
        if not body.with_pieces:
            return {"tokens": tokens}
        pieces = await lease.pieces(tokens)
    return {
        "tokens": [
            {"id": token, "piece": _piece(piece)}
            for token, piece in zip(tokens, pieces, strict=True)
        ]
    }


def _piece(piece: bytes) -> str | list[int]:
    """Returns the text of a token, or a list of its bytes if they are not UTF-8, for
    example if the token is part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


class _DetokenizeBody(Body):
    tokens: list[Annotated[Whole, Field(ge=0, le=MAX_TOKEN)]]
    model: Name | None = None


async def _detokenize(request: HttpRequest, body: _DetokenizeBody) -> Json:
    async with _shared_lease(request, body.model) as lease:
        text = await lease.value("detokenize", prompt=body.tokens)
    return {"content": text, "prompt": text}


async def _tokenizer_info(request: HttpRequest) -> Response:
    """Replies with a model's BOS, EOS and padding tokens, chat template and training
    context length, with vLLM's names. A token that the file does not name is null."""
    entry, known, _ = await _selected(request)

    async def work() -> Json:
        info: Json = {
            "chat_template": known.template,
            "model_max_length": known.n_ctx_train,
        }
        async with _shared_lease(request, entry.name) as lease:
            for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
                token = known.metadata.get(f"tokenizer.ggml.{key}_token_id")
                info[f"{kind}_token"] = (
                    None
                    if token is None
                    else await lease.value("detokenize", prompt=[token])
                )
        return info

    return WholeResponse(work())


# Text


def _biases_of(given: Any) -> Any:
    """Converts `logit_bias`, an object or a list of pairs, to {token id or text: bias}.
    A bias of false becomes -100, so that the token is practically never chosen. Returns
    a value of another type unchanged. Raises ValueError for a bad pair or token id."""
    pairs = given = without_nulls(given)
    if isinstance(given, dict):
        pairs = [
            [int(key) if key.isascii() and key.isdigit() else key, bias]
            for key, bias in given.items()
        ]
    elif not isinstance(given, list):
        return given
    found: dict[int | str, Any] = {}
    for pair in pairs:
        key = integral(pair[0]) if isinstance(pair, list) and len(pair) == 2 else None
        if not isinstance(key, str) and not (
            type(key) is int and 0 <= key <= MAX_TOKEN
        ):
            raise ValueError(
                f"must be pairs (a text or a token id from 0 to {MAX_TOKEN}, then a bias), but has {dumps(pair):.80};"
                " correct this pair"
            )
        found[key] = -100 if pair[1] is False else pair[1]
    return found


class _NativeBody(chat.GenerationBody):
    """The fields that /completion and /infill share.

    The reasoning tags are the texts before and after the model's thinking. The model's
    own tags are used unless both a start tag and an end tag are given. When the
    thinking budget is used up, the first end tag is forced.
    """

    limit = limits.BODY_BYTES
    operation = "generate"

    model: SelectedName = ""
    # maximum number of tokens; -1, -2: no maximum; 0: only evaluates the prompt; None:
    # `max_tokens` applies
    n_predict: Annotated[Whole, Field(ge=-2, le=MAX_ANSWER_TOKENS)] | None = None
    n_keep: Annotated[Whole, Field(ge=-1, le=MAX_ANSWER_TOKENS)] | None = None
    n_probs: chat.TopLogprobs = 0
    logit_bias: Annotated[chat.Biases, BeforeValidator(_biases_of)] = {}
    reasoning_budget_start_tag: Stop = ""
    reasoning_budget_end_tag: Stop = ""
    reasoning_budget_end_tags: Stops = []
    return_tokens: bool = False

    def sampling(self, entry: ModelEntry, most: int | None) -> Sampling:
        sampling = super().sampling(entry, most)
        return (
            sampling if self.n_keep is None else replace(sampling, num_keep=self.n_keep)
        )

    def native_request(self, entry: ModelEntry, **fields: Any) -> Request:
        """Returns a request with the fields that /completion and /infill share, and
        with the given `fields`."""
        opens = self.reasoning_budget_start_tag
        tags = self.reasoning_budget_end_tags or [self.reasoning_budget_end_tag]
        closes = [tag for tag in tags if tag]
        return self.request(
            entry,
            self.max_tokens if self.n_predict is None else self.n_predict,
            think_marks=(opens, *closes) if opens and closes else (),
            n_logprobs=self.n_probs or None,
            prompt_only=self.n_predict == 0,
            return_tokens=self.stream or self.return_tokens,
            **fields,
        )


class _NativeCompletionBody(_NativeBody):
    prompt: Texts

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        return self.for_prompts(self.native_request(entry), self.prompt)


class _ExtraFile(Body):
    text: str
    filename: str = "tmp"


class _InfillBody(_NativeBody):
    """The body of /infill. The gap is between `input_prefix` followed by `prompt`, and
    `input_suffix`."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Annotated[list[_ExtraFile], Field(max_length=MAX_FILES)] = []

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        files = tuple((file.filename, file.text) for file in self.input_extra)
        prompt = self.input_prefix + self.prompt
        return self.repeated(
            self.native_request(
                entry, prompt=prompt, suffix=self.input_suffix, files=files
            )
        )


class _NativeReply(Reply):
    """The reply of /completion and /infill. If it is not streamed, it is one object, or
    a list of objects for several answers."""

    def __post_init__(self) -> None:
        self._prompts = [request.prompt or "" for request in self.requests]
        self._index = 0  # index of the current answer
        self._has_line = False  # True if the current answer contains a newline so far
        self._biases = dict(self.requests[0].sampling.logit_bias)
        self._answers: list[Json] = []

    async def prepare(self, lease: Lease) -> None:
        for i, request in enumerate(self.requests):
            if request.context:
                self._prompts[i] = await lease.value(
                    "detokenize", prompt=request.context
                )
        for text, bias in self.requests[0].sampling.text_bias:
            for token in await lease.value("tokenize", text=text, special=False):
                self._biases[token] = self._biases.get(token, 0.0) + bias

    def lines(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            self._has_line |= "\n" in event.text
            return event_line(
                self._part(
                    event.text, tokens=list(event.tokens), **self._chances(event)
                )
            )
        if isinstance(event, AnswerSummary):
            return event_line(self._end("", event))
        progress = self._part("", prompt_progress=chat.prompt_progress(event))
        return event_line(progress) if self.body.return_progress else b""

    def add(self, delta: Delta, summary: AnswerSummary) -> None:
        self._has_line = "\n" in delta.text
        self._answers.append(
            self._end(delta.text, summary, delta.tokens) | self._chances(delta)
        )

    def whole(self) -> Any:
        return self._answers if len(self.requests) > 1 else self._answers[0]

    def _part(self, content: str, **more: Any) -> Json:
        return {
            "index": self._index,
            "content": content,
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            **more,
        }

    def _chances(self, delta: Delta) -> Json:
        if not self.body.n_probs:
            return {}
        return {
            "completion_probabilities": logprob_objects(delta.logprobs, with_ids=True)
        }

    def _end(
        self, content: str, summary: AnswerSummary, tokens: Sequence[int] = ()
    ) -> Json:
        sampling = self.requests[self._index].sampling
        settings = {
            **_sampling_object(sampling),
            "logit_bias": [
                {"token": token, "bias": bias} for token, bias in self._biases.items()
            ],
            "n_probs": self.body.n_probs,
            "stream": self.body.stream,
        }
        found = self._part(
            content,
            tokens=list(tokens),
            stop=True,
            model=self.name,
            tokens_predicted=summary.answer_tokens,
            tokens_evaluated=summary.whole_prompt_tokens,
            generation_settings=settings,
            prompt=self._prompts[self._index],
            has_new_line=self._has_line,
            truncated=bool(summary.cut_tokens or summary.n_shifts),
            stop_type="word"
            if summary.stop_string
            else STOP_TYPES.get(summary.finish, "none"),
            stopping_word=summary.stop_string,
            tokens_cached=summary.cached_tokens,
            **chat.statistics(summary),
        )
        self._index, self._has_line = self._index + 1, False
        return found


async def _adapters(request: HttpRequest) -> Response:
    """Replies with llama-server's list of LoRA adapters, which contains the model's
    adapter or is empty."""
    entry, *_ = await _selected(request)
    if entry.adapter is None:
        return JSONResponse([])
    state = request.app.state
    scale = (state.lora_scales or {}).get(
        entry.name, state.settings.loading.get("lora_scale", 1.0)
    )
    return JSONResponse(
        [
            {
                "id": 0,
                "path": entry.adapter.name,
                "scale": scale,
                "task_name": "",
                "prompt_prefix": "",
            }
        ]
    )


class _AdaptersBody(Body):
    lora: Adapters


async def _set_adapters(request: HttpRequest) -> Response:
    """Sets the scale of the model's LoRA adapter for requests without `lora`, until the
    server exits. An adapter that the body does not list gets the scale 0. Raises
    HttpError 501 if Ray's replicas answer the requests, because replicas do not share
    scales."""
    scales: dict[str, float] | None = request.app.state.lora_scales
    if scales is None:
        raise HttpError(
            "replicas do not share the scales of LoRA adapters; send `lora` with each request",
            501,
        )
    body = parse_fields({"lora": parse_value(await read_bytes(request))}, _AdaptersBody)
    entry, *_ = await _selected(request)
    scale = scale_of(entry, body.lora)
    if scale is not None:
        scales[entry.name] = scale
    return JSONResponse({"success": True})


class _TemplateBody(chat.ChatBody):
    model: SelectedName = ""


_NativeBody.reply_kind = _NativeReply

routes = [
    Route("/health", _health),
    Route("/props", _props),
    Route("/slots", _slots),
    Route("/slots/{slot}", _change_slot, methods=["POST"]),
    Route("/lora-adapters", _adapters),
    Route("/lora-adapters", _set_adapters, methods=["POST"]),
    computed("/tokenize", _TokenizeBody, _tokenize),
    computed("/detokenize", _DetokenizeBody, _detokenize),
    Route("/tokenizer_info", _tokenizer_info),
    conversation("/completion", _NativeCompletionBody),
    conversation("/completions", _NativeCompletionBody),
    conversation("/infill", _InfillBody),
    about_prompt("/apply-template", _TemplateBody, "render", "prompt"),
]
