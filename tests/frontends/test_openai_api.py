"""OpenAI's API over a scripted manager, byte by byte: what the client test cannot provoke."""

import asyncio
import json
import threading
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest
from client_types import check
from fake_manager import FUNCTIONS, HI, FakeLease, FakeManager, changed
from openai.types.responses import Response

from moegguf.errors import AllocationError, BudgetError, MoeggufError, WorkerError
from moegguf.generate.request import Delta, ToolCall


@pytest.mark.parametrize(
    ("error", "tries"), [(AllocationError("no room"), 1), (BudgetError("x"), 1), (WorkerError("x"), 3)]
)
def test_permanent_errors_are_not_retried(url: str, manager: FakeManager, error: MoeggufError, tries: int) -> None:
    manager.enter_error = error
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="demo", messages=HI)  # type: ignore[arg-type]
    assert len(manager.leases) == tries


def test_metrics_count_answers(http: httpx.Client, manager: FakeManager) -> None:
    manager.timing = changed(prompt_tokens=10, answer_tokens=4)
    for stream in (False, True):
        http.post("/v1/chat/completions", json={"model": "demo", "messages": HI, "stream": stream})
    http.post("/v1/completions", json={"model": "demo", "prompt": "a"})
    http.post("/api/chat", json={"model": "demo", "messages": HI})
    http.post("/api/chat", json={"model": "demo", "messages": HI, "stream": False, "keep_alive": 0})
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    assert "llamacpp:prompt_tokens_total 50.0" in lines
    assert "llamacpp:tokens_predicted_total 20.0" in lines
    assert 'moegguf_answers_total{model="demo:latest"} 5.0' in lines
    assert 'moegguf_expert_lookups_total{model="demo:latest"} 10.0' in lines  # though the model has left
    assert not [line for line in lines if line.startswith("moegguf_slots{")]


def test_a_client_that_leaves_waits_for_no_text(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def never(*_: Any) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    monkeypatch.setattr(FakeLease, "detokenize", never)
    body = json.dumps({"model": "demo", "prompt": [104], "echo": True})
    with closing(HTTPConnection(http.base_url.host, http.base_url.port)) as connection:
        connection.request("POST", "/v1/completions", body)
        assert begun.wait(30)
    assert cancelled.wait(30)


FUNCTION: Any = {"type": "function", "strict": True, **FUNCTIONS[0]}


def test_a_whole_response_echoes_what_was_asked(http: httpx.Client) -> None:
    asked = {
        "model": "able", "input": "hi",
        "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 9, "temperature": 0.5, "user": "me",
        "tools": [FUNCTION, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False, "truncation": "auto", "reasoning": {"effort": "low"}, "store": True,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    }  # fmt: skip
    found = http.post("/v1/responses", json=asked).json()
    check(Response, found)
    for name in ("instructions", "metadata", "max_output_tokens", "temperature", "user", "tool_choice", "truncation"):
        assert found[name] == asked[name]
    assert found["store"] is False and found["parallel_tool_calls"] is False
    assert [tool["name"] for tool in found["tools"]] == ["weather"]
    assert found["text"] == asked["text"]


def test_what_the_client_reads_from_a_streamed_response_can_be_sent_back(
    url: str, http: httpx.Client, manager: FakeManager
) -> None:
    calls = (ToolCall("c1", "weather", {"city": "Oslo"}), ToolCall("c2", "weather", {}))
    manager.script = (Delta(thinking="hm"), Delta(text="Hel"), Delta(text="lo"), Delta(tool_calls=calls))
    asked: Any = {"model": "able", "input": "hi", "tools": [FUNCTION], "include": ["reasoning.encrypted_content"]}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    with client, client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts == ["Hel", "lo"] and final.output_text == "Hello"
    output = [item.model_dump(exclude_none=True) for item in final.output]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    http.post("/v1/responses", json={"model": "able", "input": output})
    (answer,) = manager.requests[-1].messages or ()
    assert answer["thinking"] == "hm" and answer["content"] == "Hello"
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"city": "Oslo"}, {}]
    kept = {name: value for name, value in output[0].items() if name in ("id", "type", "encrypted_content")}
    items = [{**kept, "summary": []}, {"role": "user", "content": "on"}]
    http.post("/v1/responses", json={"model": "able", "input": items})
    assert (manager.requests[-1].messages or ())[0]["thinking"] == "hm"
