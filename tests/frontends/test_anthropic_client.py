"""The `anthropic` Python client against `moegguf serve`: every supported call, with real answers."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, Usage
from servers import Server

ASKED: Any = {
    "model": "demo", "max_tokens": 200, "messages": [{"role": "user", "content": "What does moegguf do?"}],
    "extra_body": {"options": {"seed": 7}},
}  # fmt: skip
TOOLS: Any = [
    {
        "name": "weather",
        "description": "The weather of the next days.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_tokens(usage: Usage) -> int:
    """Those that were evaluated and those of the cache, which has more of a prompt that was asked before."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stream_is_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        started = [event.message.usage for event in stream if event.type == "message_start"]
        final = stream.get_final_message()
    assert text_of(final) == text_of(whole) and final.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(final.usage) == prompt_tokens(started[0]) == prompt_tokens(whole.usage)
    assert started[0].output_tokens == 0
    raw = list(client.messages.create(**ASKED, stream=True))
    assert [raw[0].type, raw[-1].type] == ["message_start", "message_stop"]


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
def test_a_round_trip_of_tools(client: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {**ASKED, "model": "tools", "tools": TOOLS, "max_tokens": 200}
    with client.messages.stream(**asked, tool_choice=choice) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    if choice["type"] == "tool":
        assert calls[0].name == "weather" and isinstance(calls[0].input["days"], int)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
    turns = [*ASKED["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(**{**asked, "messages": turns, "max_tokens": 4}, tool_choice={"type": "none"})
    assert second.usage.output_tokens <= 4


def test_a_request_as_claude_code_sends_it(served: Server) -> None:
    tools = [{**TOOLS[1], "name": f"tool_{i}", "description": "Does a thing."} for i in range(20)]
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
