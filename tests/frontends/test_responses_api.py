"""/v1/responses over a scripted manager: every event and object against the types of the `openai` client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from client_types import check, kinds_of, named_events
from fake_manager import FakeCatalog, FakeManager, changed, entry_of, running
from openai.types.responses import Response, ResponseStreamEvent

from moegguf.errors import ExpertIOError
from moegguf.generate.request import Delta, PromptProgress, TokenLogprob, ToolCall
from moegguf.models.folder import demo_path
from moegguf.server.app import make_app
from moegguf.settings import Settings

KINDS = kinds_of(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
CALLS = Delta(tool_calls=(ToolCall("c1", "weather", {"city": "Oslo"}), ToolCall("c2", "weather", {})))
Post = Callable[..., httpx.Response]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> FakeManager:
    monkeypatch.setattr("moegguf.server.common.conversation.check_conversation", lambda *_: None)
    return FakeManager(FakeCatalog(entry_of(demo_path()), entry_of(demo_path(), "mine:latest", system="Be kind.")))


@pytest.fixture
def url(manager: FakeManager) -> Iterator[str]:
    with running(make_app(manager, manager.catalog, Settings())) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        yield lambda **fields: client.post("/v1/responses", json={"model": "demo", "input": "hi", **fields})


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def types_of(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_stream_event_by_event(post: Post) -> None:
    events = named_events(post(stream=True), KINDS)
    assert types_of(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == [] and events[3]["part"]["text"] == ""
    final = events[-1]["response"]
    assert final["id"] == events[0]["response"]["id"] and final["status"] == "completed"
    assert final["output"][0] == events[-2]["item"]
    assert final["output"][0]["content"][0]["text"] == "Hello"
    assert final["usage"] == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 10,
    }  # fmt: skip


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


@pytest.mark.parametrize("summary", [None, "auto"])
def test_thinking_text_and_calls_are_items(post: Post, manager: FakeManager, summary: str | None) -> None:
    manager.script = (Delta(thinking="hm"), Delta(thinking="!"), Delta(text="I look."), CALLS)
    manager.timing = changed(thinking_tokens=2)
    asked = {"tools": [WEATHER], "reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    events = named_events(post(stream=True, **asked), KINDS)
    part = ("reasoning_summary_part", "reasoning_summary_text") if summary else ("content_part", "reasoning_text")
    assert types_of(events)[2:9] == [
        "output_item.added", f"{part[0]}.added", f"{part[1]}.delta", f"{part[1]}.delta", f"{part[1]}.done",
        f"{part[0]}.done", "output_item.done",
    ]  # fmt: skip
    assert types_of(events)[-5:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    assert final["output"][2]["arguments"] == '{"city": "Oslo"}' and final["output"][2]["call_id"] == "c1"
    assert final["output"][0]["summary" if summary else "content"][0]["text"] == "hm!"
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    whole = post(**asked).json()
    check(Response, whole)
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in final["output"]]

    post(input=["text", *final["output"]][1:])  # what clients send back
    (answer,) = manager.requests[-1].messages or ()
    assert answer["thinking"] == "hm!" and answer["content"] == "I look."
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"city": "Oslo"}, {}]
    kept = {name: value for name, value in final["output"][0].items() if name in ("id", "type", "encrypted_content")}
    post(input=[{**kept, "summary": []}, {"role": "user", "content": "on"}])
    assert (manager.requests[-1].messages or ())[0]["thinking"] == "hm!"


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


def test_the_end_of_tokens_is_incomplete(post: Post, manager: FakeManager) -> None:
    manager.timing = changed(finish="length")
    events = named_events(post(stream=True), KINDS)
    assert types_of(events)[-1] == "incomplete"
    final = events[-1]["response"]
    assert final["status"] == "incomplete" and final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete"


def test_an_answer_without_text_has_an_empty_message(post: Post, manager: FakeManager) -> None:
    manager.script = (Delta(thinking="hm"),)
    assert [item["type"] for item in post().json()["output"]] == ["reasoning", "message"]


def test_logprobs(post: Post, manager: FakeManager) -> None:
    logprob = TokenLogprob("a", -0.5, (("a", -0.5), ("\ufffd", float("-inf"))))
    manager.script = (Delta(text="a", logprobs=(logprob,)), Delta(text="b", logprobs=(logprob,)))
    events = named_events(post(stream=True, top_logprobs=2), KINDS)
    told = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in told] == ["a", "a"] and told[0]["top_logprobs"][1]["bytes"] == []
    assert manager.requests[0].n_logprobs == 2
    assert post().json()["output"][0]["content"][0]["logprobs"] == []


def test_an_error_in_the_middle_of_a_stream(post: Post, manager: FakeManager, client: openai.OpenAI) -> None:
    manager.script = (PromptProgress(9, 0, 9, 0.1), Delta(text="Hel"), ExpertIOError("the disk is gone."))
    events = named_events(post(stream=True), KINDS)
    assert types_of(events)[-1] == "failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the disk is gone."}
    assert [event.type for event in client.responses.create(model="demo", input="hi", stream=True)][
        -1
    ] == "response.failed"


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


def test_the_clients_own_helper_follows_the_stream(client: openai.OpenAI, manager: FakeManager) -> None:
    manager.script = (Delta(thinking="hm"), Delta(text="Hel"), Delta(text="lo"), CALLS)
    with client.responses.stream(model="demo", input="hi", tools=[WEATHER]) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts == ["Hel", "lo"] and final.output_text == "Hello"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
