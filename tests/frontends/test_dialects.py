"""Tests every API over a scripted manager.

Each answer must equal a file in `recorded/` byte for byte, after ids and times are
replaced, and fit the types of the official clients. Each request body in
`recorded/bodies.txt` must lead to the recorded request to the model, or to the recorded
error.

A line of bodies.txt contains a path and the body fields that are added to BASE. "... N
times" repeats the preceding list item, or the text that precedes it in the same string.
"every field" stands for all fields of a chat body. With MOEGGUF_RECORD=1, the files are
rewritten with the outcome of each line.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import anthropic.types
import httpx
import ollama
import openai.types.chat
import openai.types.responses
import pytest
from client_types import check, kinds_of
from fake_manager import (
    FUNCTIONS,
    HI,
    TEMPLATE,
    FakeManager,
    changed,
    entry_of,
    objects,
    running,
    server_of,
)
from gguf_builder import STR, U32, moe
from pictures import base64_of, png
from recorded_texts import check_recorded, recorded_lines
from servers import connected, post
from waiting import until

from moegguf import errors
from moegguf.engine.stats import Stats
from moegguf.errors import ExpertIOError
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    PromptProgress,
    Request,
    Sampling,
    TokenChance,
    TokenLogprob,
    ToolCall,
)
from moegguf.gguf.chat_template import CHATML
from moegguf.models.own_store import BlobStore
from moegguf.models.sources import demo_path
from moegguf.package import __version__
from moegguf.server.app import make_app
from moegguf.server.common import limits
from moegguf.server.openai.chat import ChatBody
from moegguf.settings import Settings

Json = dict[str, Any]

TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FUNCTION: Json = {"type": "function", "strict": True, **FUNCTIONS[0]}
SCHEMA: Json = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
ECHOED: Json = {
    "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 9, "temperature": 0.5, "user": "me",
    "tools": [FUNCTION, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False, "truncation": "auto", "reasoning": {"effort": "low"}, "store": True,
    "text": {"format": SCHEMA, "verbosity": "low"},
}  # fmt: skip
"""Fields of a request to /v1/responses.

The whole response repeats all of them except `store` and the tool of an unknown type.
"""
CALLS = (ToolCall("c1", "weather", {"city": "Ås"}), ToolCall("c2", "clock", {}))


@dataclass(frozen=True)
class Dialect:
    """An API: its path, the fields of request bodies, and the client's types for
    answers."""

    # The name of the API's file in recorded/.
    name: str
    path: str
    question: Json
    # A string in the last line of a complete stream.
    end: str
    tools: Json = field(default_factory=dict)
    # Fields that allow at most one tool call.
    one_call: Json = field(default_factory=dict)
    # {name of a case in CASES: additional fields for this case}.
    cases: dict[str, Json] = field(default_factory=dict)
    # The client's type for an answer that is not streamed; None: not checked.
    whole: Any = None
    # The client's type for one part of a stream. None: parts are not checked, or
    # `kinds` has their types.
    parts: Any = None
    # {value of a part's field `type`: the client's type for this part}, if an API has
    # several types of parts.
    kinds: Json = field(default_factory=dict)

    @property
    def form(self) -> str:
        """Returns the name of the API's family, such as "openai". All APIs in a family
        report errors in the same form."""
        return self.name.split("-")[0]


DIALECTS = (
    Dialect(
        "ollama-chat", "/api/chat", {"messages": HI}, '"done":true', {"tools": TOOLS},
        cases={"logprobs": {"logprobs": True}}, whole=ollama.ChatResponse, parts=ollama.ChatResponse,
    ),
    Dialect(
        "ollama-generate", "/api/generate", {"prompt": "hi"}, '"done":true',
        cases={"logprobs": {"logprobs": True}, "text": {"details": True}},
        whole=ollama.GenerateResponse, parts=ollama.GenerateResponse,
    ),
    Dialect(
        "openai-chat", "/v1/chat/completions", {"messages": HI}, "data: [DONE]", {"tools": TOOLS},
        {"parallel_tool_calls": False},
        {"logprobs": {"logprobs": True, "top_logprobs": 2}, "cut": {"stream_options": {"include_usage": True}, "n": 2},
         "calls": {"n": 2}, "text": {"return_progress": True}},
        openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk,
    ),
    Dialect(
        "openai-completions", "/v1/completions", {"prompt": "hi"}, "data: [DONE]",
        cases={
            "logprobs": {"prompt": ["one", [104, 105]], "echo": True, "logprobs": 2},
            "cut": {"prompt": ["one", "two"], "stream_options": {"include_usage": True}},
            "nothing": {"prompt": ["one", "two"], "echo": True},
            "stopped": {"prompt": ["one", "two"], "echo": True, "n": 2},
        },
        # Parts are not checked, because this type requires a finish reason, which most
        # parts lack
        whole=openai.types.Completion,
    ),
    Dialect(
        "llama-completion", "/completion", {"prompt": "hi"}, '"stop":true',
        cases={
            "logprobs": {"n_probs": 2}, "text": {"return_progress": True}, "stopped": {"prompt": ["one", [104, 105]]},
            "cut": {"return_tokens": True, "seed": 3, "logit_bias": [[7, False]]},
        },
    ),
    Dialect(
        "openai-responses", "/v1/responses", {"input": "hi"}, '"type":"response.completed"',
        {"tools": [{"type": "function", **function} for function in FUNCTIONS]}, {"parallel_tool_calls": False},
        {"logprobs": {"top_logprobs": 2}, "thinking alone": {"reasoning": {"summary": "auto"}},
         "calls": {"include": ["reasoning.encrypted_content"]}, "text": ECHOED},
        openai.types.responses.Response, kinds=kinds_of(openai.types.responses.ResponseStreamEvent),
    ),
    Dialect(
        "anthropic-messages", "/v1/messages", {"messages": HI, "max_tokens": 64}, '"type":"message_stop"',
        {"tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"cut": {"max_tokens": 63}},
        anthropic.types.Message, kinds=kinds_of(anthropic.types.RawMessageStreamEvent),
    ),
)  # fmt: skip
EACH = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
WITH_TOOLS = pytest.mark.parametrize(
    "dialect",
    [dialect for dialect in DIALECTS if dialect.tools],
    ids=lambda dialect: dialect.path,
)
WHOLE_OR_STREAM = pytest.mark.parametrize(
    "stream", [False, True], ids=["whole", "stream"]
)


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(http: httpx.Client) -> Ask:
    return lambda dialect, **more: http.post(
        dialect.path, json={"model": "demo", **dialect.question, **more}
    )


@WITH_TOOLS
@WHOLE_OR_STREAM
def test_options_for_one_call_send_only_the_first_tool_call(
    ask: Ask, manager: FakeManager, dialect: Dialect, stream: bool
) -> None:
    first, second = (f'"{call.id}"' for call in CALLS)
    for manager.script in (
        [Delta(tool_calls=(call,)) for call in CALLS],
        [Delta(tool_calls=CALLS)],
    ):
        both = ask(dialect, model="able", stream=stream, **dialect.tools).text
        assert 0 < both.index(first) < both.index(second)
        if dialect.one_call:
            one = ask(
                dialect,
                model="able",
                stream=stream,
                **dialect.tools,
                **dialect.one_call,
            ).text
            assert first in one and second not in one


@WITH_TOOLS
def test_tools_with_a_template_that_ignores_them_get_a_400(
    ask: Ask, manager: FakeManager, dialect: Dialect
) -> None:
    manager.catalog.known["plain:latest"] = replace(
        manager.catalog.find("demo"), name="plain:latest", template="plain"
    )
    refused = ask(dialect, model="plain", **dialect.tools)
    assert (
        refused.status_code == 400
        and "plain:latest does not support tools" in refused.text
    )
    assert not manager.leases


FAULTS: list[tuple[Exception, int]] = [
    (errors.ContextError("too long"), 400),
    (errors.CapabilityError("cannot"), 400),
    (errors.SchemaError("no"), 400),
    (errors.OptionError("the prompt is empty"), 400),
    (errors.TemplateError("no"), 400),
    (errors.BusyError("busy"), 503),
    (errors.QueueFullError(retry_after_s=7), 429),
    (errors.BudgetError("no"), 500),
    (errors.AllocationError("no"), 500),
    (errors.WorkerError("died"), 500),
    (errors.ExpertIOError("the disk is gone"), 500),
    (MemoryError(), 500),
    (ValueError("a secret"), 500),
]


TYPES = {
    400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 500: "api_error", 503: "api_error",
}  # fmt: skip
OWN_STATUSES = {("anthropic", 503): 529, ("ollama", 429): 503}


def check_error(
    dialect: Dialect, body: Json, status: int, code: str | None = None
) -> None:
    """Fails unless the body is an error in the API's form, with the error type for this
    status.

    code: the expected code in OpenAI's APIs.
    """
    if dialect.form == "ollama":
        assert body.keys() == {"error"} and isinstance(body["error"], str)
    elif dialect.form == "openai":
        assert (
            body["error"].keys() == {"message", "type", "param", "code"}
            and body["error"]["param"] is None
        )
        assert (body["error"]["type"], body["error"]["code"]) == (TYPES[status], code)
    elif dialect.form == "llama":
        kind = {500: "server_error", 503: "unavailable_error"}.get(
            status, TYPES[status]
        )
        assert body["error"].keys() == {"code", "message", "type"}
        assert (body["error"]["type"], body["error"]["code"]) == (kind, status)
    else:
        assert body.keys() == {"type", "error"} and body["type"] == "error"
        assert body["error"].keys() == {"type", "message"} and body["error"][
            "type"
        ] == ("overloaded_error" if status == 503 else TYPES[status])


@EACH
@WHOLE_OR_STREAM
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault[0]).__name__)
def test_errors_before_the_first_byte_have_a_status_of_their_type(
    ask: Ask,
    manager: FakeManager,
    dialect: Dialect,
    stream: bool,
    fault: tuple[Exception, int],
) -> None:
    error, status = fault
    for entering, script in ((error, ()), (None, (error,))):
        manager.enter_error, manager.script = entering, script
        response = ask(dialect, stream=stream)
        assert response.status_code == OWN_STATUSES.get((dialect.form, status), status)
        assert response.headers["content-type"].startswith("application/json")
        codes = {
            errors.ContextError: "context_length_exceeded",
            errors.QueueFullError: "rate_limit_exceeded",
        }
        check_error(dialect, response.json(), status, codes.get(type(error)))
        assert "secret" not in response.text
        assert response.headers.get("retry-after") == {503: "1", 429: "7"}.get(status)
        lasting = isinstance(
            error, errors.BudgetError | errors.AllocationError | MemoryError
        )
        assert (response.headers.get("x-should-retry") == "false") == lasting
    assert manager.n_running == 0


@EACH
@WHOLE_OR_STREAM
def test_a_disconnect_cancels_the_answer(
    url: str, manager: FakeManager, dialect: Dialect, stream: bool
) -> None:
    # The event is never set.
    manager.script = [PromptProgress(5, 2, 5, 0.25), Delta(text="Hel"), asyncio.Event()]
    for n in range(1, 4):
        with post(
            url, dialect.path, {"model": "demo", **dialect.question, "stream": stream}
        ) as connection:
            if stream:
                assert b"200 OK" in connection.recv(50)
            until(lambda: manager.n_running == 1)
        until(lambda n=n: manager.n_ended == n)  # type: ignore[misc]
        assert manager.n_running == 0


@EACH
def test_options_of_a_request_override_the_models_defaults(
    ask: Ask, manager: FakeManager, dialect: Dialect
) -> None:
    own = (
        {"options": {"top_p": 0.5}}
        if dialect.form == "ollama"
        else {"top_p": 0.5, "options": {"top_p": 0.75}}
    )
    assert ask(dialect, model="mine", **own).status_code == 200
    (request,) = manager.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 0.5)
    if request.messages is not None:
        assert request.messages == ({"role": "system", "content": "Be kind."}, *HI)


@EACH
def test_load_options_and_keep_alive_reach_the_lease(
    ask: Ask, manager: FakeManager, dialect: Dialect
) -> None:
    ask(dialect, options={"num_ctx": 128}, keep_alive="5m")
    ask(dialect, keep_alive=-1)
    ask(dialect)
    assert manager.leases == [
        ("demo:latest", {"n_ctx": 128}, 300.0, True),
        ("demo:latest", {}, float("inf"), True),
        ("demo:latest", {}, None, True),
    ]
    assert ask(dialect, keep_alive="soon").status_code == 400


@EACH
def test_an_unknown_model_gets_a_404(
    ask: Ask, manager: FakeManager, dialect: Dialect
) -> None:
    response = ask(dialect, model="nobody")
    assert response.status_code == 404 and "'nobody' not found" in response.text
    check_error(dialect, response.json(), 404, "model_not_found")
    assert not manager.leases


PROGRESS = (PromptProgress(10, 2, 6, 0.25), PromptProgress(10, 2, 10, 0.5))
CHANCE = TokenLogprob(
    7,
    "hé".encode(),
    -0.5,
    (TokenChance(8, b"x", -1.0), TokenChance(9, b"\xc3", float("-inf"))),
)
THINKING = (Delta(thinking="hm"), Delta(thinking="!"))
CUT: dict[str, Any] = {
    "finish": "length", "answer_tokens": 63, "cached_tokens": 0, "cut_messages": 2, "cut_tokens": 90, "n_shifts": 3,
}  # fmt: skip
# {name of the case: (script of the answer, its summary)}.
CASES: dict[str, tuple[tuple[Any, ...], AnswerSummary]] = {
    "text": ((*PROGRESS, Delta(text="Hel"), Delta(text='lo "é"\n')), changed()),
    "calls": (
        (*THINKING, Delta(text="I look."), Delta(tool_calls=CALLS)),
        changed(thinking_tokens=2),
    ),
    "calls alone": (
        (Delta(tool_calls=CALLS[:1]), Delta(tool_calls=CALLS[1:])),
        changed(),
    ),
    "thinking alone": (THINKING, changed()),
    "logprobs": (
        (
            Delta(text="hé", logprobs=(CHANCE,)),
            Delta(logprobs=(CHANCE,)),
            Delta(text="z"),
        ),
        changed(),
    ),
    "cut": ((Delta(text="Hel"),), changed(**CUT)),
    "full": ((Delta(text="Hel"),), changed(finish="length", answer_tokens=63)),
    "stopped": ((Delta(text="Hel"),), changed(stop_string="END")),
    "nothing": (PROGRESS[:1], AnswerSummary(stats=Stats())),
    "error": ((Delta(text="Hel"), ExpertIOError("the disk is gone.")), changed()),
}
CLAUDE = {"anthropic-version": "2023-06-01"}
ASKING = re.compile(r"# ([A-Z]+) (\S+) ([{[].*[]}])?( as Claude)?: \d{3} .*")
"""Matches the first line of each request recorded in others.txt: the request, then the
status of its reply.

None of these requests makes a model generate an answer. The groups are the method, the
path, the body, and " as Claude" if the request has the headers of Anthropic's clients.
"""


def without_chance(text: str) -> str:
    """Returns the text with ids, times, some durations and the version replaced, so
    that every run yields the same text."""
    text = re.sub(
        r"\b(msg|resp|rs|fc|chatcmpl|cmpl)([_-])[0-9a-f]{24,32}\b", r"\1\2ID", text
    )
    text = re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":1', text)
    text = text.replace(__version__, "VERSION")
    text = re.sub(r'"(total|load)_duration":[1-9]\d*', r'"\1_duration":1', text)
    return re.sub(r'"(created_at|expires_at)":"[^"]+Z"', r'"\1":"TIME"', text)


def shown(reply: httpx.Response) -> str:
    return f"{reply.status_code} {reply.headers['content-type']}\n{without_chance(reply.text).strip()}\n\n"


@EACH
def test_encoded_answers_equal_the_recorded_ones_and_fit_client_types(
    ask: Ask, manager: FakeManager, dialect: Dialect
) -> None:
    told, thinks = "", {"think": True} if dialect.name == "ollama-chat" else {}
    for case, (manager.script, manager.summary) in CASES.items():
        more = {
            "model": "able",
            **dialect.tools,
            **thinks,
            **dialect.cases.get(case, {}),
        }
        whole, streamed = (
            ask(dialect, **more, stream=stream) for stream in (False, True)
        )
        told += f"# {case}: {shown(whole)}# {case}, streamed: {shown(streamed)}"
        if case != "error":
            check(dialect.whole or Any, whole.json())
            for item in objects(streamed.text):
                # The client's types have no field for progress.
                if "prompt_progress" not in item:
                    check(
                        dialect.kinds[item["type"]]
                        if dialect.kinds
                        else dialect.parts or Any,
                        item,
                    )
    check_recorded(dialect.name, told)


def test_other_endpoints_reply_as_recorded(
    http: httpx.Client,
    manager: FakeManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    manager.catalog.known["broken:latest"] = entry_of(
        tmp_path / "broken.gguf", "broken:latest"
    )
    told = ""
    for line in recorded_lines("others", "# "):
        if asked := ASKING.fullmatch(line):
            method, path, body, claude = asked.groups()
            found = http.request(
                method,
                path,
                json=body and json.loads(body),
                headers=CLAUDE if claude else {},
            )
            told += f"# {method} {path} {body or ''}{claude or ''}: {shown(found)}"
    monkeypatch.setattr("fake_manager.STATS", Stats(read_errors=2))
    told += f"# with errors of reading: {shown(http.get('/health'))}"
    manager.catalog.known.clear()
    told += "".join(
        f"# no models: {shown(http.get('/v1/models', headers=each))}"
        for each in ({}, CLAUDE)
    )
    check_recorded("others", told)
    assert not any(
        will_answer for path, *_, will_answer in manager.leases if path == "able:latest"
    )


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_a_server_that_preloads_models_replies_503_until_they_are_loaded(
    manager: FakeManager, path: str
) -> None:
    app = make_app(cast(Any, manager), cast(Any, manager.catalog), Settings())
    loading = app.state.preloading = Future[None]()
    with running(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        for reply in (
            client.get(path),
            client.post("/completion", json={"prompt": "hi"}),
        ):
            error = {
                "code": 503,
                "message": "Loading model",
                "type": "unavailable_error",
            }
            assert (reply.status_code, reply.json()) == (503, {"error": error})
        assert (
            client.post(
                "/completion", json={"prompt": "hi", "model": "demo"}
            ).status_code
            == 200
        )
        loading.set_result(None)
        assert client.get(path).json() == {"status": "ok"}
        assert client.post("/completion", json={"prompt": "hi"}).status_code == 200


@pytest.mark.parametrize(
    ("add_special", "tokens"), [(None, [104, 105]), (True, [1, 104, 105, 2])]
)
@pytest.mark.parametrize("parse_special", [None, True, False])
def test_tokenize_adds_the_tokens_around_a_text_only_with_add_special(
    http: httpx.Client,
    add_special: bool | None,
    tokens: list[int],
    parse_special: bool | None,
) -> None:
    body = {
        "content": "hi",
        "model": "demo",
        "parse_special": parse_special,
        "add_special": add_special,
    }
    assert http.post("/tokenize", json=body).json() == {"tokens": tokens}


@WITH_TOOLS
@WHOLE_OR_STREAM
def test_a_lone_surrogate_in_arguments_becomes_a_replacement_character(
    ask: Ask, manager: FakeManager, dialect: Dialect, stream: bool
) -> None:
    manager.script = [
        Delta(tool_calls=(ToolCall("c1", "weather", {"city": "cut \ud83d"}),))
    ]
    reply = ask(dialect, model="able", stream=stream, **dialect.tools)
    assert reply.status_code == 200 and "cut \ufffd" in reply.text


def test_an_adapter_is_listed_with_its_scale(manager: FakeManager) -> None:
    demo = manager.catalog.known["demo:latest"]
    manager.catalog.known["tuned:latest"] = replace(
        demo, name="tuned:latest", adapter=Path("/files/tuned.gguf")
    )
    with (
        server_of(manager, loading={"lora_scale": 0.5}) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        assert client.get("/lora-adapters?model=demo").json() == []
        (found,) = client.get("/lora-adapters?model=tuned").json()
        assert (found["id"], found["path"], found["scale"]) == (0, "tuned.gguf", 0.5)


def test_lora_scale_of_a_request_overrides_the_scale_of_the_server(
    manager: FakeManager,
) -> None:
    demo = manager.catalog.known["demo:latest"]
    manager.catalog.known["tuned:latest"] = replace(
        demo, name="tuned:latest", adapter=Path("/files/tuned.gguf")
    )

    with (
        server_of(manager) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):

        def scale_of(
            model: str, path: str = "/v1/chat/completions", **fields: Any
        ) -> float | None:
            body = {
                "model": model,
                "messages": HI,
                "prompt": "hi",
                "max_tokens": 4,
                **fields,
            }
            assert client.post(path, json=body).status_code == 200
            return manager.requests[-1].lora_scale

        assert scale_of("tuned") is None
        assert scale_of("tuned", lora=[{"id": 0, "scale": 0.25}]) == 0.25
        assert scale_of("tuned", lora=[]) == 0.0, "an adapter that is not in the list"
        assert client.post(
            "/lora-adapters?model=tuned", json=[{"id": 0, "scale": 2}]
        ).json() == {"success": True}
        assert client.get("/lora-adapters?model=tuned").json()[0]["scale"] == 2.0
        for path in (
            "/v1/chat/completions",
            "/completion",
            "/api/chat",
            "/v1/messages",
        ):
            assert scale_of("tuned", path) == 2.0
        assert scale_of("demo") is None and scale_of("demo", lora=[]) is None
        for body, status in (
            ([{"id": 1, "scale": 1}], 400), ([{"id": 0}], 400), ([{"id": 0, "scale": 1e9}], 400), ({}, 400),
            ([], 200),
        ):  # fmt: skip
            assert (
                client.post("/lora-adapters?model=tuned", json=body).status_code
                == status
            )
        assert scale_of("tuned") == 0.0
        refused = client.post(
            "/completion",
            json={"model": "demo", "prompt": "x", "lora": [{"id": 0, "scale": 1}]},
        )
        assert (
            refused.status_code == 400
            and "demo:latest has no adapter with id 0"
            in refused.json()["error"]["message"]
        )


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PICTURE = base64_of(png(2, 2))
BASE: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "x"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/completion": {"prompt": "x"},
    "/infill": {"model": "gap", "input_prefix": "a", "input_suffix": "b"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 64},
}
TIMES = re.compile(r"(.*)\.\.\. (\d+) times")


def expanded(value: Any) -> Any:
    """Returns the value with all repetitions expanded, and with the fields in place of
    "every field"."""
    if isinstance(value, list):
        found: list[Any] = []
        for each in value:
            times = TIMES.fullmatch(each) if isinstance(each, str) else None
            found += (
                found[-1:] * (int(times[2]) - 1)
                if times and not times[1]
                else [expanded(each)]
            )
        return found
    if isinstance(value, dict) and "every field" in value:
        return dict.fromkeys(ChatBody.model_fields.keys() - {"model", "messages"})
    if isinstance(value, dict):
        return {name: expanded(each) for name, each in value.items()}
    times = TIMES.fullmatch(value) if isinstance(value, str) else None
    return times[1] * int(times[2]) if times else value


def changes(value: Any, default: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass object that differ from the fields of
    `default`."""
    told = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: each for name, each in told.items() if each != getattr(default, name)}


def asked(manager: FakeManager) -> Iterator[str]:
    """Yields the requests, the texts to embed and the load options that reached the
    manager, each as a line of text."""
    for request in manager.requests:
        sampling = changes(request.sampling, Sampling())
        told = changes(request, Request()) | (
            {"sampling": sampling} if sampling else {}
        )
        yield json.dumps(told, ensure_ascii=False)
    for inputs, truncate, normalize in manager.embedded:
        within = {"num_ctx": manager.num_ctx} if manager.num_ctx else {}
        yield json.dumps(
            [inputs, {"truncate": truncate, "normalize": normalize, **within}]
        )
    for _, overrides, keep_alive_s, _ in manager.leases:
        if overrides or keep_alive_s is not None:
            yield f"loaded with {dict(overrides)}, for {keep_alive_s} s"


def told(http: httpx.Client, manager: FakeManager) -> Iterator[str]:
    for line in recorded_lines("bodies", "/"):
        path, body = line.split(" ", 1)
        for kept in (manager.requests, manager.embedded, manager.leases):
            kept.clear()  # type: ignore[attr-defined]
        own = expanded(json.loads(body.replace("PICTURE", PICTURE)))
        reply = http.post(
            path, json={"model": "able", "stream": False, **BASE.get(path, {}), **own}
        )
        yield line
        found = reply.json()
        error = (found.get("error") if isinstance(found, dict) else None) or ""
        message = error if isinstance(error, str) else error["message"]
        yield from (
            f"    {line}"
            for line in (
                [f"{reply.status_code}: {message}"] if message else asked(manager)
            )
        )


def test_parsed_bodies_and_refusals_equal_the_recorded_ones(
    http: httpx.Client, manager: FakeManager, tmp_path: Path
) -> None:
    path = demo_path()
    assert path is not None
    parameters = {
        "temperature": 0.2,
        "top_p": 0.5,
        "top_k": 7,
        "num_ctx": 64,
        "stop": ["END"],
    }
    own = entry_of(
        path,
        "own:latest",
        system="Be kind.",
        messages=TURNS,
        parameters=parameters,
        template=TEMPLATE,
    )
    manager.catalog.known[own.name] = own
    gap = (
        moe()
        .add("tokenizer.ggml.fim_pre_token_id", U32, 5)
        .write(tmp_path / "gap.gguf")
    )
    manager.catalog.known["gap:latest"] = entry_of(gap, "gap:latest")
    text = "\n".join(told(http, manager)) + "\n"
    text = text.replace(json.dumps(TEMPLATE), '"TEMPLATE"').replace(PICTURE, "PICTURE")
    check_recorded("bodies", text)


DEFAULT, WITH_TOOLS = "{{ messages }}", "{{ messages }}{{ tools }}<think></think>"
ABLE = ["completion", "tools", "thinking"]
TEMPLATES_OF_A_FILE: dict[
    str, tuple[dict[str, str], str | None, tuple[str, str | None, list[str]]]
] = {
    "one": ({"": DEFAULT}, None, (DEFAULT, None, ["completion"])),
    "two": ({"": DEFAULT, ".tool_use": WITH_TOOLS}, None, (DEFAULT, WITH_TOOLS, ABLE)),
    "for tools only": ({".tool_use": WITH_TOOLS}, None, (WITH_TOOLS, WITH_TOOLS, ABLE)),
    "of another name": ({".other": WITH_TOOLS}, None, (CHATML, None, ["completion"])),
    "none": ({}, None, (CHATML, None, ["completion"])),
    "another one": (
        {"": DEFAULT, ".tool_use": WITH_TOOLS},
        DEFAULT,
        (DEFAULT, None, ["completion"]),
    ),
}
"""{case: (templates in the file, template of the entry, expected)}. Templates in the
file are {end of the metadata key: template}.

`expected` has the chat template and the template for tools in /props, and the
capabilities in the list of models.
"""


@pytest.mark.parametrize("kind", TEMPLATES_OF_A_FILE)
def test_listed_templates_and_capabilities_match_the_templates_of_prompts(
    http: httpx.Client, manager: FakeManager, tmp_path: Path, kind: str
) -> None:
    texts, own, (template, tool_template, capabilities) = TEMPLATES_OF_A_FILE[kind]
    model = moe(skip_kv=("tokenizer.chat_template",))
    for name, text in texts.items():
        model.add(f"tokenizer.chat_template{name}", STR, text)
    manager.catalog.known["t:latest"] = entry_of(
        model.write(tmp_path / "t.gguf"), "t:latest", template=own
    )
    listed = {
        model["name"]: model["capabilities"]
        for model in http.get("/api/tags").json()["models"]
    }
    assert listed["t:latest"] == capabilities
    properties = http.get("/props?model=t").json()
    assert (properties["chat_template"], properties.get("chat_template_tool_use")) == (
        template,
        tool_template,
    )
    asked = {"model": "t", "messages": HI, "tools": TOOLS}
    assert (http.post("/api/chat", json=asked).status_code == 200) == (
        "tools" in capabilities
    )


@pytest.mark.parametrize(
    ("path", "kind", "begin"),
    [
        ("/api/chat", "application/json", b"{"),
        ("/v1/files", "multipart/form-data; boundary=x", b"--x\r\n"),
        (f"/api/blobs/sha256:{64 * '0'}", "application/octet-stream", b"GGUF"),
    ],
)
def test_a_stalled_body_gets_a_408(
    url: str,
    manager: FakeManager,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    path: str,
    kind: str,
    begin: bytes,
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    monkeypatch.setattr(limits, "READ_S", 0.05)
    monkeypatch.setattr(manager.catalog, "blobs", BlobStore(), raising=False)
    with connected(url) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 99\r\n\r\n"
        connection.sendall(head.encode() + begin)
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 408")
