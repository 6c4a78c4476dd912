"""/v1/messages over a scripted manager: every event and object against the types of the `anthropic` client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageTokensCount, ModelInfo
from anthropic.types.shared import ErrorResponse
from client_types import check
from fake_manager import HI, FakeManager, changed, entry_of, running

from moegguf.errors import BusyError, ExpertIOError
from moegguf.generate.request import Delta, ToolCall
from moegguf.models.details import details
from moegguf.models.folder import demo_path
from moegguf.server.app import make_app
from moegguf.settings import Settings

WEATHER: Any = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}
CALLS = Delta(tool_calls=(ToolCall("c1", "weather", {"city": "Oslo"}), ToolCall("c2", "weather", {})))
Post = Callable[..., httpx.Response]


@pytest.fixture
def post(http: httpx.Client) -> Post:
    def post(path: str = "/v1/messages", **fields: Any) -> httpx.Response:
        body = {"model": "able", "max_tokens": 64, "messages": HI, **fields}
        return http.post(path, json={name: value for name, value in body.items() if value is not ...})

    return post


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_what_the_client_reads_from_a_stream_can_be_sent_back(
    post: Post, manager: FakeManager, client: anthropic.Anthropic
) -> None:
    manager.script = (Delta(thinking="hm"), Delta(thinking="!"), Delta(text="I look."), CALLS)
    with client.messages.stream(model="able", max_tokens=64, messages=HI, tools=[WEATHER]) as stream:
        final = stream.get_final_message()
    assert [block.model_dump(exclude_none=True) for block in final.content] == post(tools=[WEATHER]).json()["content"]
    post(messages=[*HI, {"role": "assistant", "content": [block.model_dump() for block in final.content]}, *HI])
    answer = (manager.requests[-1].messages or ())[1]
    assert (answer["thinking"], answer["content"], len(answer["tool_calls"])) == ("hm!", "I look.", 2)


def test_a_full_context_is_another_reason_than_max_tokens(post: Post, manager: FakeManager) -> None:
    manager.timing = changed(finish="length", answer_tokens=63)
    assert post().json()["stop_reason"] == "model_context_window_exceeded"


def test_a_request_in_every_detail(post: Post, manager: FakeManager) -> None:
    schema = {"type": "object", "properties": {}}
    response = post(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=a5145;"},
            {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "And brief."},
        ],
        tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}}, {"type": "web_search_20250305", "name": "search"}],
        tool_choice={"type": "tool", "name": "weather"}, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024}, metadata={"user_id": "me"}, service_tier="auto",
        exact=True,
        output_config={"format": {"type": "json_schema", "schema": schema}}, context_management={"edits": []},
    )  # fmt: skip
    assert response.status_code == 200
    (request,) = manager.requests
    assert request.messages == ({"role": "system", "content": "You are kind.\nAnd brief."}, *HI)
    function = {"name": "weather", "description": "Tells it.", "parameters": WEATHER["input_schema"]}
    assert request.tools == ({"type": "function", "function": function},)
    assert request.tool_choice == "weather" and request.format == schema
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.stop, sampling.max_tokens, sampling.exact) == (("END",), 64, True)
    assert request.think is True


def test_tool_results(post: Post, manager: FakeManager) -> None:
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
    turn = [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."}, {**use, "id": "a"}, {**use, "id": "b"},
    ]  # fmt: skip
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "down"}]},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "And now?"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}, "title": "T"},
    ]
    assert post(messages=[*HI, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]).is_success
    assert (manager.requests[0].messages or ())[2:] == (
        {"role": "tool", "content": "rain", "tool_call_id": "a", "tool_name": "weather"},
        {"role": "tool", "content": "Error:\ndown", "tool_call_id": "b", "tool_name": "weather"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "user", "content": "And now?\nT\nD"},
    )


@pytest.mark.parametrize(("choice", "wanted"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices(post: Post, manager: FakeManager, choice: str, wanted: str) -> None:
    manager.script = (CALLS,)
    found = post(tools=[WEATHER], tool_choice={"type": choice, "disable_parallel_tool_use": True}).json()
    assert manager.requests[0].tool_choice == wanted and len(found["content"]) == 1


def test_thinking_is_off_unless_asked_for(post: Post, manager: FakeManager) -> None:
    asked: list[dict[str, Any]] = [
        {}, {"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
        {"thinking": {"type": "enabled"}, "model": "demo"},  # which cannot, and that is no reason to refuse
    ]  # fmt: skip
    for fields in asked:
        assert post(**fields).status_code == 200
    assert [request.think for request in manager.requests] == [False, True, False, "max", False]


def test_tokens_are_counted_without_waiting(client: anthropic.Anthropic, post: Post, manager: FakeManager) -> None:
    counted = client.messages.count_tokens(model="able", messages=HI, system="Be brief.", tools=[WEATHER])
    assert counted.input_tokens == 42 and manager.leases[-1][3] is False
    assert (manager.requests[-1].messages or ())[0]["content"] == "Be brief."
    check(MessageTokensCount, post("/v1/messages/count_tokens?beta=true", max_tokens=...).json())


def test_errors_as_the_client_raises_them(client: anthropic.Anthropic, manager: FakeManager) -> None:
    asked: Any = {"model": "demo", "max_tokens": 64, "messages": HI}
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**{**asked, "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**asked, "max_tokens": 0})
    manager.script = (Delta(text="Hel"), ExpertIOError("the disk is gone."))
    with pytest.raises(anthropic.APIStatusError, match="the disk is gone"):
        list(client.messages.create(**asked, stream=True))
    manager.enter_error = BusyError("full")
    with pytest.raises(anthropic.InternalServerError) as raised:
        client.messages.create(**asked)
    assert raised.value.status_code == 529


def test_pings_keep_a_stream_open(url: str, manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegguf.server.anthropic.messages.MessageStream.ping_s", 0.02)
    manager.script = (Delta(text="Hel"), asyncio.Event())  # which nobody sets
    body = {"model": "demo", "max_tokens": 64, "messages": HI, "stream": True}
    with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=30, trust_env=False) as response:
        lines = response.iter_lines()
        while next(lines) != "event: ping":
            pass
        assert next(lines) == 'data: {"type":"ping"}'


def image(source: Any) -> Any:
    return {"type": "image", "source": source}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": ...}, "max_tokens"),
    ({"messages": []}, "messages: list should have at least 1 item, but has 0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video"),
    ({"messages": [{"role": "user", "content": [image({"type": "file", "file_id": "f"})]}]}, "base64"),
    ({"messages": [{"role": "user", "content": [image({"type": "base64", "data": "AAAA"})]}]}, "PNG"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "clock"}}, "clock"),
    ({"temperature": "hot"}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_is_not_supported_is_refused_with_the_reason(post: Post, fields: dict[str, Any], reason: str) -> None:
    response = post(**fields)
    assert response.status_code == 400, response.text
    check(ErrorResponse, response.json())
    assert reason in response.json()["error"]["message"]


def test_the_key_may_come_in_either_header(manager: FakeManager) -> None:
    settings = Settings(api_key="secret")
    body = {"model": "demo", "max_tokens": 8, "messages": HI}
    with running(make_app(manager, manager.catalog, settings)) as url:  # type: ignore[arg-type]
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert httpx.post(f"{url}/v1/messages", json=body, headers=headers, trust_env=False).status_code == 200
        refused = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "wrong"}, trust_env=False)
    assert refused.status_code == 401
    check(ErrorResponse, refused.json())
    assert refused.json()["error"]["type"] == "authentication_error"


def test_models_are_listed_in_pages_for_anthropics_clients(
    client: anthropic.Anthropic, url: str, manager: FakeManager
) -> None:
    for n in range(4):
        manager.catalog.known[f"more{n}:latest"] = entry_of(demo_path(), f"more{n}:latest")
    names = [entry.name for entry in manager.catalog.entries()]
    page = client.models.list(limit=2)
    assert (page.first_id, page.last_id, page.has_more) == (names[0], names[1], True)
    assert [model.id for model in page] == [model.id for model in client.models.list()] == names
    before = client.models.list(before_id=names[3], limit=2)
    assert ([model.id for model in before.data], before.has_more) == (names[1:3], True)
    found = client.models.retrieve("demo")
    assert found.id == "demo:latest" and found == next(model for model in page if model.id == found.id)
    assert found.max_input_tokens == details(entry_of(demo_path())).n_ctx_train
    with httpx.Client(base_url=url, headers={"anthropic-version": "2023-06-01"}, trust_env=False) as http:
        whole = http.get("/v1/models").json()
        assert whole.keys() == {"data", "has_more", "first_id", "last_id"}
        check(list[ModelInfo], whole["data"])
        for query in ("limit=0", "limit=1001", "limit=x", "after_id=nobody", "after_id=demo:latest&before_id=x"):
            refused = http.get(f"/v1/models?{query}")
            assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error", query
        unknown = http.get("/v1/models/nobody")
        assert unknown.status_code == 404
        check(ErrorResponse, unknown.json())
        manager.catalog.known.clear()
        assert http.get("/v1/models").json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert httpx.get(f"{url}/v1/models").json() == {"object": "list", "data": []}  # others get OpenAI's form
