"""/v1/messages by the `anthropic` Python client, with real answers and over a scripted manager."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageTokensCount
from client_types import check
from fake_manager import HI, FakeManager, changed
from servers import Server

from moegguf.generate.request import Delta, ToolCall

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of the next days.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
CALLS = Delta(tool_calls=(ToolCall("c1", "weather", {"city": "Oslo"}), ToolCall("c2", "weather", {})))
Post = Callable[..., httpx.Response]


def client_of(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with client_of(url) as client:
        yield client


@pytest.fixture
def post(http: httpx.Client) -> Post:
    def post(path: str = "/v1/messages", **fields: Any) -> httpx.Response:
        body = {"model": "able", "max_tokens": 64, "messages": HI, **fields}
        return http.post(path, json={name: value for name, value in body.items() if value is not ...})

    return post


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
def test_a_round_trip_of_tools_with_a_real_model(served: Server, choice: Any) -> None:
    question = {"role": "user", "content": "What does moegguf do?"}
    asked: Any = {"model": "tools", "tools": [WEATHER, CLOCK], "extra_body": {"options": {"seed": 7}}}
    with client_of(served.url) as client:
        with client.messages.stream(**asked, messages=[question], max_tokens=200, tool_choice=choice) as stream:
            first = stream.get_final_message()
        assert first.stop_reason == "tool_use"
        calls = [block for block in first.content if block.type == "tool_use"]
        if choice["type"] == "tool":
            assert calls[0].name == "weather" and isinstance(calls[0].input["days"], int)
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
        turns = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = client.messages.create(**asked, messages=turns, max_tokens=4, tool_choice={"type": "none"})
    assert second.usage.output_tokens <= 4


def test_a_request_as_claude_code_sends_it(served: Server) -> None:
    tools = [{**CLOCK, "name": f"tool_{i}", "description": "Does a thing."} for i in range(20)]
    body = {
        "model": "tools", "max_tokens": 4, "stream": True, "tools": tools, "metadata": {"user_id": "user_1"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=12345;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "options": {"num_ctx": 8192},
    }  # fmt: skip
    beta = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
    reply = served.call("/v1/messages?beta=true", body, **beta, **{"x-api-key": "any"})
    assert reply.status == 200 and "event: message_stop" in reply.text


def test_what_a_client_read_can_be_sent_back(post: Post, manager: FakeManager, client: anthropic.Anthropic) -> None:
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


def test_tokens_are_counted_without_waiting(client: anthropic.Anthropic, post: Post, manager: FakeManager) -> None:
    counted = client.messages.count_tokens(model="able", messages=HI, system="Be brief.", tools=[WEATHER])
    assert counted.input_tokens == 42 and manager.leases[-1][3] is False
    assert (manager.requests[-1].messages or ())[0]["content"] == "Be brief."
    check(MessageTokensCount, post("/v1/messages/count_tokens?beta=true", max_tokens=...).json())


def test_pings_keep_a_stream_open(http: httpx.Client, manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegguf.server.common.limits.PING_S", 0.02)
    manager.script = (Delta(text="Hel"), asyncio.Event())  # which nobody sets
    body = {"model": "demo", "max_tokens": 64, "messages": HI, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        while next(lines) != "event: ping":
            pass
        assert next(lines) == 'data: {"type":"ping"}'
