"""What every API promises of an answer, over a scripted manager; test_encodings.py has its forms."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fake_manager import FUNCTIONS, HI, FakeManager, objects
from servers import post
from waiting import until

from moegguf import errors
from moegguf.generate.request import Delta, PromptProgress, ToolCall
from moegguf.serving.events import LoadOverrides

Json = dict[str, Any]

TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CALLS = [ToolCall(f"call-of-{function['name']}", function["name"], {}) for function in FUNCTIONS]


@dataclass(frozen=True)
class Dialect:
    """An API. `end`: in the last line of a complete stream; `one_call`: what asks for one call at most."""

    path: str
    question: Json
    end: str
    tools: Json = field(default_factory=dict)
    one_call: Json = field(default_factory=dict)

    @property
    def form(self) -> str:
        """Whose form errors have."""
        if self.path == "/completion":
            return "llama"
        return "ollama" if self.path.startswith("/api") else "anthropic" if "messages" in self.path else "openai"


DIALECTS = (
    Dialect("/api/chat", {"messages": HI}, '"done":true', {"tools": TOOLS}),
    Dialect("/api/generate", {"prompt": "hi"}, '"done":true'),
    Dialect(
        "/v1/chat/completions", {"messages": HI}, "data: [DONE]", {"tools": TOOLS}, {"parallel_tool_calls": False},
    ),
    Dialect("/v1/completions", {"prompt": "hi"}, "data: [DONE]"),
    Dialect("/completion", {"prompt": "hi"}, '"stop":true'),
    Dialect(
        "/v1/responses", {"input": "hi"}, '"type":"response.completed"',
        {"tools": [{"type": "function", **function} for function in FUNCTIONS]}, {"parallel_tool_calls": False},
    ),
    Dialect(
        "/v1/messages", {"messages": HI, "max_tokens": 64}, '"type":"message_stop"',
        {"tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
)  # fmt: skip
EACH = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
WITH_TOOLS = pytest.mark.parametrize(
    "dialect", [dialect for dialect in DIALECTS if dialect.tools], ids=lambda dialect: dialect.path
)
WHOLE_OR_STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(http: httpx.Client) -> Ask:
    return lambda dialect, **more: http.post(dialect.path, json={"model": "demo", **dialect.question, **more})


@WITH_TOOLS
@WHOLE_OR_STREAM
def test_only_the_first_call_is_sent_where_one_is_wanted(
    ask: Ask, manager: FakeManager, dialect: Dialect, stream: bool
) -> None:
    for manager.script in ([Delta(tool_calls=(call,)) for call in CALLS], [Delta(tool_calls=tuple(CALLS))]):
        both = ask(dialect, model="able", stream=stream, **dialect.tools).text
        assert 0 < both.index(CALLS[0].id) < both.index(CALLS[1].id)
        if dialect.one_call:
            one = ask(dialect, model="able", stream=stream, **dialect.tools, **dialect.one_call).text
            assert CALLS[0].id in one and CALLS[1].id not in one


@WITH_TOOLS
def test_tools_need_a_template_that_knows_them(ask: Ask, manager: FakeManager, dialect: Dialect) -> None:
    manager.catalog.known["plain:latest"] = replace(manager.catalog.find("demo"), name="plain:latest", template="plain")
    refused = ask(dialect, model="plain", **dialect.tools)
    assert refused.status_code == 400 and "plain:latest does not support tools" in refused.text
    assert not manager.leases


FAULTS: list[tuple[Exception, int]] = [
    (errors.ContextError("too long"), 400),
    (errors.CapabilityError("cannot"), 400),
    (errors.SchemaError("no"), 400),
    (errors.TemplateError("no"), 400),
    (errors.BusyError("busy"), 503),
    (errors.BudgetError("no"), 500),
    (errors.AllocationError("no"), 500),
    (errors.WorkerError("died"), 500),
    (errors.ExpertIOError("the disk is gone"), 500),
    (MemoryError(), 500),
    (ValueError("a secret"), 500),
]


TYPES = {400: "invalid_request_error", 404: "not_found_error", 500: "api_error", 503: "api_error"}


def check_error(dialect: Dialect, body: Json, status: int, code: str | None = None) -> None:
    """Fails unless the error has the form of the API, with the type of a status, and OpenAI's code."""
    if dialect.form == "ollama":
        assert body.keys() == {"error"} and isinstance(body["error"], str)
    elif dialect.form == "openai":
        assert body["error"].keys() == {"message", "type", "param", "code"} and body["error"]["param"] is None
        assert (body["error"]["type"], body["error"]["code"]) == (TYPES[status], code)
    elif dialect.form == "llama":
        kind = {500: "server_error", 503: "unavailable_error"}.get(status, TYPES[status])
        assert body["error"].keys() == {"code", "message", "type"}
        assert (body["error"]["type"], body["error"]["code"]) == (kind, status)
    else:
        assert body.keys() == {"type", "error"} and body["type"] == "error"
        assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == (
            "overloaded_error" if status == 503 else TYPES[status]
        )


@EACH
@WHOLE_OR_STREAM
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault[0]).__name__)
def test_an_error_before_the_first_byte_has_its_own_status(
    ask: Ask, manager: FakeManager, dialect: Dialect, stream: bool, fault: tuple[Exception, int]
) -> None:
    error, status = fault
    for entering, script in ((error, ()), (None, (error,))):
        manager.enter_error, manager.script = entering, script
        response = ask(dialect, stream=stream)
        assert response.status_code == (529 if status == 503 and dialect.form == "anthropic" else status)
        assert response.headers["content-type"].startswith("application/json")
        code = "context_length_exceeded" if isinstance(error, errors.ContextError) else None
        check_error(dialect, response.json(), status, code)
        assert "secret" not in response.text
        assert ("retry-after" in response.headers) == (status == 503)
        lasting = isinstance(error, errors.BudgetError | errors.AllocationError | MemoryError)
        assert (response.headers.get("x-should-retry") == "false") == lasting
    assert manager.n_running == 0


@EACH
@pytest.mark.parametrize("fault", [errors.WorkerError("the process has ended."), RuntimeError("a bug")], ids=repr)
def test_an_error_in_mid_stream_is_the_last_object(
    ask: Ask, manager: FakeManager, dialect: Dialect, fault: Exception
) -> None:
    manager.script = [Delta(text="Hel"), fault]
    response = ask(dialect, stream=True)
    last = objects(response.text)[-1]
    assert response.status_code == 200 and '"Hel"' in response.text
    assert dialect.end not in response.text and "a bug" not in response.text
    if dialect.path == "/v1/responses":
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    else:
        check_error(dialect, last, 500)


@EACH
@WHOLE_OR_STREAM
def test_a_disconnect_cancels_the_answer(url: str, manager: FakeManager, dialect: Dialect, stream: bool) -> None:
    manager.script = [PromptProgress(5, 2, 5, 0.25), Delta(text="Hel"), asyncio.Event()]  # which nobody sets
    for n in range(1, 4):
        with post(url, dialect.path, {"model": "demo", **dialect.question, "stream": stream}) as connection:
            if stream:
                assert b"200 OK" in connection.recv(50)
            until(lambda: manager.n_running == 1)
        until(lambda n=n: manager.n_ended == n)  # type: ignore[misc]
        assert manager.n_running == 0


@EACH
def test_defaults_of_the_name_yield_to_the_request(ask: Ask, manager: FakeManager, dialect: Dialect) -> None:
    own = {"options": {"top_p": 0.5}} if dialect.form == "ollama" else {"top_p": 0.5, "options": {"top_p": 0.75}}
    assert ask(dialect, model="mine", **own).status_code == 200
    (request,) = manager.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 0.5)
    if request.messages is not None:
        assert request.messages == ({"role": "system", "content": "Be kind."}, *HI)


@EACH
def test_a_file_says_how_it_is_sampled(ask: Ask, manager: FakeManager, dialect: Dialect) -> None:
    """The demo's file asks for temperature 0."""
    warmer = {"options": {"temperature": 0.5}} if dialect.form == "ollama" else {"temperature": 0.5}
    for more in ({}, warmer):
        assert ask(dialect, **more).status_code == 200
    assert [request.sampling.temperature for request in manager.requests] == [0.0, 0.5]


@EACH
def test_load_options_and_keep_alive(ask: Ask, manager: FakeManager, dialect: Dialect) -> None:
    ask(dialect, options={"num_ctx": 128}, keep_alive="5m")
    ask(dialect, keep_alive=-1)
    ask(dialect)
    assert manager.leases == [
        ("demo:latest", LoadOverrides(n_ctx=128), 300.0, True),
        ("demo:latest", LoadOverrides(), float("inf"), True),
        ("demo:latest", LoadOverrides(), None, True),
    ]
    assert ask(dialect, keep_alive="soon").status_code == 400


@EACH
def test_an_unknown_model_is_not_found(ask: Ask, manager: FakeManager, dialect: Dialect) -> None:
    response = ask(dialect, model="nobody")
    assert response.status_code == 404 and "'nobody' not found" in response.text
    check_error(dialect, response.json(), 404, "model_not_found")
    assert not manager.leases
