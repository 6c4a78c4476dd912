"""Tests stored responses (/v1/responses): OpenAI's client continues, retrieves and
deletes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from client_types import client_of
from fake_manager import FUNCTIONS, FakeManager, running, server_of

from moegguf.generate.request import Delta, ToolCall
from moegguf.server import llama_server
from moegguf.server import openai as openai_api
from moegguf.server.app import make_app
from moegguf.settings import Settings

pytestmark = pytest.mark.usefixtures("home")

TOOLS: Any = [{"type": "function", "strict": True, **FUNCTIONS[0]}]


@pytest.fixture
def url(manager: FakeManager) -> Iterator[str]:
    with server_of(manager, responses_age_s=60.0) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def told(manager: FakeManager) -> list[dict[str, Any]]:
    return [dict(message) for message in manager.requests[-1].messages or ()]


def test_a_response_continues_its_predecessor_without_its_instructions(
    client: openai.OpenAI, manager: FakeManager
) -> None:
    first = client.responses.create(model="demo", input="one", instructions="Be brief.")
    assert first.previous_response_id is None
    second = client.responses.create(
        model="demo",
        input="two",
        previous_response_id=first.id,
        instructions="Be kind.",
    )
    assert second.previous_response_id == first.id
    client.responses.create(model="demo", input="three", previous_response_id=second.id)
    hello = {"role": "assistant", "content": "Hello"}
    turns = [
        {"role": "user", "content": "one"},
        hello,
        {"role": "user", "content": "two"},
        hello,
    ]
    assert told(manager) == [*turns, {"role": "user", "content": "three"}]


def test_a_streamed_response_with_calls_continues_with_their_output(
    client: openai.OpenAI, manager: FakeManager
) -> None:
    manager.script = (
        Delta(thinking="hm"),
        Delta(tool_calls=(ToolCall("c1", "weather", {"city": "Ås"}),)),
    )
    stream = client.responses.create(
        model="able", input="weather?", tools=TOOLS, stream=True
    )
    (last,) = (event.response for event in stream if event.type == "response.completed")
    output: Any = [{"type": "function_call_output", "call_id": "c1", "output": "rain"}]
    client.responses.create(
        model="able", input=output, previous_response_id=last.id, tools=TOOLS
    )
    call = {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Ås"}}}
    assert told(manager) == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {
            "role": "tool",
            "content": "rain",
            "tool_call_id": "c1",
            "tool_name": "weather",
        },
    ]


def test_a_response_is_retrieved_counted_and_deleted(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    first = client.responses.create(model="demo", input="one", metadata={"a": "b"})
    assert client.responses.retrieve(first.id) == first
    counted = http.post("/v1/responses/input_tokens", json={
        "model": "demo", "input": "two", "previous_response_id": first.id,
    })  # fmt: skip
    assert counted.json()["input_tokens"] == 42
    assert http.delete(f"/v1/responses/{first.id}").json() == {
        "id": first.id,
        "object": "response",
        "deleted": True,
    }
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            model="demo", input="two", previous_response_id=first.id
        )
    assert refused.value.code == "previous_response_not_found"


def test_a_response_with_store_false_is_not_stored(
    client: openai.OpenAI, home: Path, manager: FakeManager
) -> None:
    response = client.responses.create(model="demo", input="one", store=False)
    assert response.model_dump()["store"] is False and not (home / "responses").exists()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    stored = client.responses.create(model="demo", input="one").model_dump()
    assert stored["store"] is True
    manager.script = (Delta(text="x"), ValueError("a fault"))
    with pytest.raises(openai.InternalServerError):
        client.responses.create(
            model="demo", input="fails", previous_response_id=stored["id"]
        )


def test_without_an_age_limit_no_response_is_stored(
    manager: FakeManager, home: Path
) -> None:
    with server_of(manager) as url, client_of(url) as client:
        assert (
            client.responses.create(model="demo", input="one").model_dump()["store"]
            is False
        )
    assert not (home / "responses").exists()


def test_a_restarted_server_continues_responses_of_their_own_key_only(
    manager: FakeManager,
) -> None:
    keys: Any = {"api_keys": ("of-ann", "of-bob"), "responses_age_s": 60.0}
    with server_of(manager, **keys) as url, client_of(url, "of-ann") as ann:
        first = ann.responses.create(model="demo", input="one")
    with (
        server_of(manager, **keys) as url,
        client_of(url, "of-ann") as ann,
        client_of(url, "of-bob") as bob,
    ):
        assert ann.responses.retrieve(first.id).id == first.id
        for call in (bob.responses.retrieve, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(first.id)
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(
                model="demo", input="two", previous_response_id=first.id
            )
        ann.responses.create(model="demo", input="two", previous_response_id=first.id)
        assert len(told(manager)) == 3


def test_an_application_of_several_processes_stores_no_responses_or_scales(
    manager: FakeManager,
) -> None:
    routes = [*openai_api.routes, *llama_server.routes]
    app = make_app(cast(Any, manager), cast(Any, manager.catalog), Settings(), routes)
    with running(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        body = {"model": "demo", "input": "one"}
        assert client.post("/v1/responses", json=body).json()["store"] is False
        refused = client.post(
            "/v1/responses", json={**body, "previous_response_id": "resp_1"}
        )
        assert (
            refused.status_code == 400
            and "whole conversation" in refused.json()["error"]["message"]
        )
        assert client.post("/lora-adapters?model=demo", json=[]).status_code == 501
