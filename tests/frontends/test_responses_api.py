"""/v1/responses over a scripted manager: every event and object against the types of the `openai` client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from client_types import check
from fake_manager import FakeManager
from openai.types.responses import Response

from moegguf.generate.request import Delta, ToolCall

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
CALLS = Delta(tool_calls=(ToolCall("c1", "weather", {"city": "Oslo"}), ToolCall("c2", "weather", {})))
Post = Callable[..., httpx.Response]


@pytest.fixture
def post(http: httpx.Client) -> Post:
    return lambda **fields: http.post("/v1/responses", json={"model": "able", "input": "hi", **fields})


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_a_whole_response_echoes_what_was_asked(post: Post, manager: FakeManager) -> None:
    asked = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 9, "temperature": 0.5, "user": "me",
        "tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False, "truncation": "auto", "reasoning": {"effort": "low"}, "store": True,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    }  # fmt: skip
    found = post(**asked).json()
    check(Response, found)
    for name in ("instructions", "metadata", "max_output_tokens", "temperature", "user", "tool_choice", "truncation"):
        assert found[name] == asked[name]
    assert found["store"] is False and found["parallel_tool_calls"] is False
    assert [tool["name"] for tool in found["tools"]] == ["weather"]
    assert found["text"] == asked["text"]
    (request,) = manager.requests
    assert request.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    assert request.truncate and request.think == "low" and request.tool_choice == "weather"
    assert request.format == {"type": "object"} and request.sampling.max_tokens == 9
    assert request.tools[0]["function"]["name"] == "weather"


def test_what_the_client_reads_from_a_stream_can_be_sent_back(
    post: Post, manager: FakeManager, client: openai.OpenAI
) -> None:
    manager.script = (Delta(thinking="hm"), Delta(text="Hel"), Delta(text="lo"), CALLS)
    asked: Any = {"model": "able", "input": "hi", "tools": [WEATHER], "include": ["reasoning.encrypted_content"]}
    with client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts == ["Hel", "lo"] and final.output_text == "Hello"
    output = [item.model_dump(exclude_none=True) for item in final.output]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    post(input=output)
    (answer,) = manager.requests[-1].messages or ()
    assert answer["thinking"] == "hm" and answer["content"] == "Hello"
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"city": "Oslo"}, {}]
    kept = {name: value for name, value in output[0].items() if name in ("id", "type", "encrypted_content")}
    post(input=[{**kept, "summary": []}, {"role": "user", "content": "on"}])
    assert (manager.requests[-1].messages or ())[0]["thinking"] == "hm"


def test_a_conversation_of_items(post: Post, manager: FakeManager) -> None:
    call = {"type": "function_call", "id": "fc_1", "arguments": '{"city": "Oslo"}', "name": "weather"}
    items = [
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {**call, "call_id": "a"},
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "yes"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "no"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABother"},
        {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1",
         "content": [{"type": "output_text", "text": "Both.", "annotations": []}]},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    assert post(instructions="Be brief.", input=items).status_code == 200
    made = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert manager.requests[0].messages == (
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **made}, {"id": "b", **made}]},
        {"role": "tool", "content": "yes", "tool_call_id": "a", "tool_name": "weather"},
        {"role": "tool", "content": "no", "tool_call_id": "b", "tool_name": "weather"},
        {"role": "assistant", "content": "Both."},
        {"role": "user", "content": "Thanks."},
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "not stored"),
    ({"conversation": "conv_1"}, "not stored"),
    ({"prompt": {"id": "p"}}, "send instructions"),
    ({"background": True}, "background"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"id": "msg_1"}]}, "not stored"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "not stored"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "computer_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]}, "data:image"),
    ({"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "a part must be"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "clock"}}, "clock"),
    ({"tool_choice": {"type": "web_search"}}, "web_search"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "schema"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_is_not_supported_is_refused_with_the_reason(post: Post, fields: dict[str, Any], reason: str) -> None:
    response = post(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and reason in error["message"]


def test_input_tokens(client: openai.OpenAI, manager: FakeManager) -> None:
    assert client.responses.input_tokens.count(model="demo", input="hi").input_tokens == 42
    assert manager.leases[-1][3] is False  # does not wait for answers
