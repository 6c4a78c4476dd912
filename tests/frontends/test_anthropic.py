"""Tests /v1/messages with the `anthropic` Python client, with real answers and over a
scripted manager."""

import asyncio
from typing import Any

import anthropic
import httpx
import pytest
from fake_manager import HI, FakeManager
from servers import Server

from moegguf.generate.request import Delta, ToolCall

WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
CALLS = Delta(
    tool_calls=(
        ToolCall("c1", "weather", {"city": "Oslo"}),
        ToolCall("c2", "weather", {}),
    )
)


def test_a_request_in_the_form_of_claude_code_is_answered(served: Server) -> None:
    tools = [
        {**WEATHER, "name": f"tool_{i}", "description": "Does a thing."}
        for i in range(20)
    ]
    body = {
        "model": "tools", "max_tokens": 4, "stream": True, "tools": tools, "metadata": {"user_id": "user_1"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=12345;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "options": {"num_ctx": 8192},
    }  # fmt: skip
    beta = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    reply = served.call("/v1/messages?beta=true", body, **beta, **{"x-api-key": "any"})
    assert reply.status == 200 and "event: message_stop" in reply.text


def test_content_blocks_of_an_answer_are_accepted_as_the_next_turns_history(
    url: str, manager: FakeManager
) -> None:
    manager.script = (
        Delta(thinking="hm"),
        Delta(thinking="!"),
        Delta(text="I look."),
        CALLS,
    )
    asked: Any = {"model": "able", "max_tokens": 64, "messages": HI, "tools": [WEATHER]}
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=60
    ) as client:
        with client.messages.stream(**asked) as stream:
            read = [
                block.model_dump(exclude_none=True)
                for block in stream.get_final_message().content
            ]
        whole = client.messages.create(**asked).content
        assert read == [block.model_dump(exclude_none=True) for block in whole]
        turns = [*HI, {"role": "assistant", "content": read}, *HI]
        client.messages.create(**{**asked, "messages": turns})
    answer = (manager.requests[-1].messages or ())[1]
    assert (answer["thinking"], answer["content"], len(answer["tool_calls"])) == (
        "hm!",
        "I look.",
        2,
    )


def test_an_idle_stream_sends_pings(
    http: httpx.Client, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moegguf.server.common.limits.PING_S", 0.02)
    # The event is never set, so the stream waits.
    manager.script = (Delta(text="Hel"), asyncio.Event())
    body = {"model": "demo", "max_tokens": 64, "messages": HI, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        while next(lines) != "event: ping":
            pass
        assert next(lines) == 'data: {"type":"ping"}'
