"""/v1/messages over a scripted manager: every event and object against the types of the `anthropic` client."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageTokensCount
from client_types import check
from fake_manager import HI, FakeManager, changed

from moegguf.generate.request import Delta, ToolCall

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


def test_pings_keep_a_stream_open(url: str, manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegguf.server.common.limits.PING_S", 0.02)
    manager.script = (Delta(text="Hel"), asyncio.Event())  # which nobody sets
    body = {"model": "demo", "max_tokens": 64, "messages": HI, "stream": True}
    with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=30, trust_env=False) as response:
        lines = response.iter_lines()
        while next(lines) != "event: ping":
            pass
        assert next(lines) == 'data: {"type":"ping"}'
