"""OpenAI's API over a scripted manager, byte by byte: what the client test cannot provoke."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_manager import FakeCatalog, FakeLease, FakeManager, changed, entry_of, running

from moegguf.engine.stats import Stats
from moegguf.errors import (
    AllocationError,
    BudgetError,
    ExpertIOError,
    MoeggufError,
    WorkerError,
)
from moegguf.generate.request import Delta, PromptProgress, TokenLogprob, ToolCall
from moegguf.models.folder import demo_path
from moegguf.server.app import make_app
from moegguf.settings import Settings

HUB = "hf.co/user/repo-GGUF:Q4_K_M"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def manager() -> FakeManager:
    path = demo_path()
    own = {"parameters": {"temperature": 0.25, "top_k": 7}, "system": "Be kind."}
    return FakeManager(FakeCatalog(entry_of(path), entry_of(path, HUB), entry_of(path, "mine:latest", **own)))


@pytest.fixture
def url(manager: FakeManager) -> Iterator[str]:
    with running(make_app(manager, manager.catalog, Settings())) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


Post = Callable[..., httpx.Response]


@pytest.fixture
def chat(http: httpx.Client) -> Post:
    return lambda **fields: http.post("/v1/chat/completions", json={"model": "demo", "messages": HI, **fields})


def events(text: str) -> list[str]:
    """The data of each server-sent event; fails unless every event is one data line and a blank one."""
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text[:-2].split("\n\n") if event.startswith("data: ")]


def test_a_stream_event_by_event(chat: Post) -> None:
    response = chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, done = events(response.text)
    assert done == "[DONE]"
    chunks = [json.loads(text) for text in told]
    assert {(c["id"], c["created"], c["object"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk", "demo:latest")
    }
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {},
    ]  # fmt: skip
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert chunks[-1]["timings"]["cache_n"] == 2


def test_a_body_without_content_type_is_read(http: httpx.Client) -> None:
    body = json.dumps({"model": "demo", "messages": HI})
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in ({}, form):
        response = http.post("/v1/chat/completions", content=body, headers=headers)
        assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}


def test_prompt_progress_on_request(chat: Post, manager: FakeManager) -> None:
    manager.script = (PromptProgress(10, 2, 6, 0.25), PromptProgress(10, 2, 10, 0.5), Delta(text="x"))
    chunks = [json.loads(text) for text in events(chat(stream=True, return_progress=True).text)[:-1]]
    assert [chunk.get("prompt_progress") for chunk in chunks[:4]] == [
        None,
        {"total": 10, "cache": 2, "processed": 6, "time_ms": 250},
        {"total": 10, "cache": 2, "processed": 10, "time_ms": 500},
        None,
    ]
    assert "prompt_progress" not in chat(stream=True).text


def test_streamed_tool_calls(client: openai.OpenAI, manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegguf.server.common.conversation.check_conversation", lambda *_: None)
    manager.script = (
        Delta(thinking="hm"),
        Delta(tool_calls=(ToolCall("c1", "weather", {"city": "Oslo"}), ToolCall("c2", "weather", {}))),
    )
    with client.chat.completions.stream(model="demo", messages=HI, tools=[WEATHER]) as stream:  # type: ignore[list-item, arg-type]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("c1", "weather", '{"city": "Oslo"}'),
        ("c2", "weather", "{}"),
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.reasoning_content == "hm"  # type: ignore[attr-defined]
    assert manager.requests[0].tools == (WEATHER,)


def test_tools_are_refused_by_a_template_without_tools(chat: Post, manager: FakeManager) -> None:
    response = chat(tools=[WEATHER])
    assert response.status_code == 400
    assert "does not support tools" in response.json()["error"]["message"]
    assert chat(tools=[WEATHER], tool_choice="none").status_code == 200


def test_an_error_in_mid_stream_is_an_event_and_the_clients_error(client: openai.OpenAI, manager: FakeManager) -> None:
    manager.script = (Delta(text="Hel"), ExpertIOError("a read failed"))
    chunks = client.chat.completions.create(model="demo", messages=HI, stream=True)  # type: ignore[call-overload]
    assert [next(chunks).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
    with pytest.raises(openai.APIError, match="a read failed"):
        next(chunks)


@pytest.mark.parametrize(
    ("error", "tries"), [(AllocationError("no room"), 1), (BudgetError("x"), 1), (WorkerError("x"), 3)]
)
def test_permanent_errors_are_not_retried(url: str, manager: FakeManager, error: MoeggufError, tries: int) -> None:
    manager.enter_error = error
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="demo", messages=HI)  # type: ignore[arg-type]
    assert len(manager.leases) == tries


def test_models_are_listed_and_found_by_escaped_and_plain_ids(client: openai.OpenAI, http: httpx.Client) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed.keys() == {"demo:latest", HUB, "mine:latest"}
    assert (listed["demo:latest"].owned_by, listed[HUB].owned_by) == ("library", "user")
    assert client.models.retrieve(HUB) == listed[HUB]
    assert client.models.retrieve("demo").id == "demo:latest"
    facts = http.get(f"/v1/models/{HUB}").json()
    assert facts == http.get("/v1/models/hf.co%2Fuser%2Frepo-GGUF%3AQ4_K_M").json()
    assert facts["context_length"] == facts["meta"]["n_ctx_train"] > 0
    assert facts["meta"]["size"] == demo_path().stat().st_size


def test_an_empty_catalog(manager: FakeManager, http: httpx.Client) -> None:
    manager.catalog.known.clear()
    assert http.get("/v1/models").json() == {"object": "list", "data": []}


def test_an_unreadable_file_is_listed(manager: FakeManager, http: httpx.Client, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    manager.catalog.known["broken:latest"] = entry_of(broken, "broken:latest")
    found = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert found["broken:latest"].keys() == {"id", "object", "created", "owned_by"}


@pytest.mark.parametrize("name", ["nobody", "hf.co/a/b:c", "../../etc/passwd", "/etc/passwd", "%2e%2e", "x" * 600])
def test_unknown_models_are_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as retrieved:
        client.models.retrieve(name)
    assert retrieved.value.code == "model_not_found"


def test_embeddings_in_both_encodings(http: httpx.Client, client: openai.OpenAI, manager: FakeManager) -> None:
    found = client.embeddings.create(model="demo", input=["a", "b"])
    assert [each.embedding for each in found.data] == [pytest.approx([0.6, 0.8, 0.0])] * 2
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (8, 8)
    whole = http.post("/v1/embeddings", json={"model": "demo", "input": "a", "encoding_format": "base64"}).json()
    assert base64.b64decode(whole["data"][0]["embedding"]) == np.array([0.6, 0.8, 0.0], "<f4").tobytes()
    plain = http.post("/v1/embeddings", json={"model": "demo", "input": "a"}).json()
    assert plain["data"] == [{"object": "embedding", "index": 0, "embedding": pytest.approx([0.6, 0.8, 0.0])}]
    assert manager.embedded[0] == (["a", "b"], False, True)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [("a", ["a"]), (["a"], ["a"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), (["a", [1]], ["a", [1]])],
)
def test_all_forms_of_input(http: httpx.Client, manager: FakeManager, given: Any, inputs: list[Any]) -> None:
    assert http.post("/v1/embeddings", json={"model": "demo", "input": given}).status_code == 200
    assert manager.embedded[0][0] == inputs


@pytest.mark.parametrize("given", ["", [], [""], [[]], [1.5], [-1], [True], [2**31], {"a": 1}, None, ["a"] * 2049])
def test_invalid_inputs(http: httpx.Client, given: Any) -> None:
    response = http.post("/v1/embeddings", json={"model": "demo", "input": given})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("input: ")


def test_shortened_vectors_are_normalized(http: httpx.Client) -> None:
    def vector(dimensions: int) -> httpx.Response:
        return http.post("/v1/embeddings", json={"model": "demo", "input": "a", "dimensions": dimensions})

    assert vector(1).json()["data"][0]["embedding"] == pytest.approx([1.0])
    assert vector(3).json()["data"][0]["embedding"] == pytest.approx([0.6, 0.8, 0.0])
    assert vector(4).status_code == 400
    assert "at most 3" in vector(4).json()["error"]["message"]


def test_a_completion_of_text_and_of_tokens(client: openai.OpenAI, manager: FakeManager) -> None:
    said = client.completions.create(model="demo", prompt="Once", echo=True)
    assert (said.choices[0].text, said.object) == ("OnceHello", "text_completion")
    assert said.usage is not None and said.usage.prompt_tokens == 7
    tokens = client.completions.create(model="demo", prompt=[79, 110], echo=True, max_tokens=3)
    assert tokens.choices[0].text == "OnHello"
    client.completions.create(model="demo", prompt=["Once"])
    client.completions.create(model="demo", prompt=[[79]])
    assert [(ask.prompt, ask.context, ask.sampling.max_tokens) for ask in manager.requests] == [
        ("Once", (), 16), ("", (79, 110), 3), ("Once", (), 16), ("", (79,), 16),
    ]  # fmt: skip


def test_a_completion_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="demo", prompt="Once", stream=True, stream_options={"include_usage": True})
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize("prompt", [[], [[]], ["a", []], ["a", 1], {}, 3, [1, "a"], [[1], [-2]], None])
def test_a_completion_of_anything_else_is_refused(http: httpx.Client, prompt: Any) -> None:
    response = http.post("/v1/completions", json={"model": "demo", "prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt: ")


def test_health_reports_read_errors(http: httpx.Client, manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    http.post("/v1/completions", json={"model": "demo", "prompt": "a"})
    assert http.get("/health").json() == {"status": "ok"}
    monkeypatch.setattr("fake_manager.STATS", Stats(read_errors=2))
    assert http.get("/health").json() == {"status": "degraded", "read_errors": {"demo:latest": 2}}


def test_props_of_a_model(http: httpx.Client, manager: FakeManager) -> None:
    assert http.get("/props").status_code == 400
    props = http.get("/props", params={"model": "mine"}).json()
    assert props["default_generation_settings"]["params"]["temperature"] == 0.25
    assert props["is_sleeping"] is True and props["modalities"] == {"vision": False, "audio": False}
    assert props["model_path"] == demo_path().name
    http.post("/v1/completions", json={"model": "demo", "prompt": "a"})
    props = http.get("/props").json()
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == ("demo:latest", 4096)
    assert "{%" in props["chat_template"]


def test_tokenize_and_detokenize(http: httpx.Client, manager: FakeManager) -> None:
    assert http.post("/tokenize", json={"model": "demo", "content": "ab"}).json() == {"tokens": [97, 98]}
    deltas = http.post("/tokenize", json={"content": "a", "with_pieces": True}).json()
    assert deltas == {"tokens": [{"id": 97, "piece": "a"}]}
    assert http.post("/detokenize", json={"tokens": [97, 98]}).json() == {"content": "ab"}
    assert [lease[3] for lease in manager.leases] == [False] * 3  # nobody's answer is waited for
    http.post("/detokenize", json={"tokens": [97], "model": "mine"})
    assert http.post("/tokenize", json={"content": "a"}).status_code == 400  # two models are loaded


def test_metrics_count_answers(http: httpx.Client, chat: Post, manager: FakeManager) -> None:
    manager.timing = changed(prompt_tokens=10, answer_tokens=4)
    chat()
    chat(stream=True)
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/nothing"])
def test_unknown_paths_get_json_in_openais_form(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code in (404, 405)
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_list_of_prompts_gets_a_choice_each(client: openai.OpenAI, manager: FakeManager) -> None:
    manager.timing = changed(finish="length")
    answer = client.completions.create(model="demo", prompt=["one", "two"])
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "Hello", "length"), (1, "Hello", "length"),
    ]  # fmt: skip
    assert [request.prompt for request in manager.requests] == ["one", "two"]
    usage = answer.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (14, 6, 20)
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 4
    figures = answer.model_extra or {}
    assert figures["timings"]["predicted_n"] == 6 and figures["moe"]["lookups"] == 20
    client.completions.create(model="demo", prompt=[[1, 2], [3]])
    assert [request.context for request in manager.requests[2:]] == [(1, 2), (3,)]
    assert len(manager.leases) == 2


def test_a_streamed_list_of_prompts(client: openai.OpenAI, http: httpx.Client, manager: FakeManager) -> None:
    asked: Any = {"model": "demo", "prompt": ["one", "two"], "echo": True, "stream": True}
    *chunks, last = client.completions.create(**asked, stream_options={"include_usage": True})
    told = [[chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index] for index in (0, 1)]
    assert told == [["one", "Hel", "lo", ""], ["two", "Hel", "lo", ""]]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"] * 2
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 6
    plain = [json.loads(text) for text in events(http.post("/v1/completions", json=asked).text)[:-1]]
    assert [("timings" in chunk) for chunk in plain] == [False] * 7 + [True]


def test_an_answer_without_text_is_streamed(http: httpx.Client, chat: Post, manager: FakeManager) -> None:
    manager.script = (PromptProgress(5, 2, 5, 0.25),)
    for prompts in (["one"], ["one", "two"]):
        asked = {"model": "demo", "prompt": prompts, "echo": True, "stream": True}
        response = http.post("/v1/completions", json=asked)
        chunks = [json.loads(text)["choices"][0] for text in events(response.text)[:-1]]
        assert response.status_code == 200
        told = [(chunk["index"], chunk["text"], chunk["finish_reason"]) for chunk in chunks]
        expected = [[(i, prompt, None), (i, "", "stop")] for i, prompt in enumerate(prompts)]
        assert told == [chunk for of_prompt in expected for chunk in of_prompt]
    chunks = [json.loads(text)["choices"][0] for text in events(chat(stream=True).text)[:-1]]
    assert [(chunk["index"], chunk["finish_reason"]) for chunk in chunks] == [(0, None), (0, "stop")]


def test_offsets_of_logprobs_begin_anew_with_each_prompt(http: httpx.Client, manager: FakeManager) -> None:
    manager.script = (Delta(text="ab", logprobs=(TokenLogprob("ab", -1.0), TokenLogprob("c", -1.0))),)
    asked = {"model": "demo", "prompt": ["one", [104, 105]], "echo": True, "logprobs": 0}
    choices = http.post("/v1/completions", json=asked).json()["choices"]
    assert [choice["text"] for choice in choices] == ["oneab", "hiab"]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[3, 5], [2, 4]]


def test_limits_of_lists_of_prompts(http: httpx.Client) -> None:
    many = http.post("/v1/completions", json={"model": "demo", "prompt": ["a"] * 2049})
    assert many.status_code == 400 and "2049 prompts" in many.json()["error"]["message"]
    gap = http.post("/v1/completions", json={"model": "demo", "prompt": [[1]], "suffix": "b"})
    assert gap.status_code == 400 and "suffix" in gap.json()["error"]["message"]


def test_a_client_that_leaves_does_not_wait_for_the_text_of_its_tokens(
    http: httpx.Client, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
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
