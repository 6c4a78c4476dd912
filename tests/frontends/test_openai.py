"""Tests OpenAI's APIs with the `openai` Python client, against real servers and a
scripted manager.

The last test checks the field `exact`: concurrent requests do not change a single bit
of such an answer.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from client_types import client_of
from fake_manager import FUNCTIONS, HI, FakeManager, changed
from servers import Server, serving

from moegguf import Engine, Sampling
from moegguf.generate.request import Delta, ToolCall

ASKED: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What does moegguf do?"}],
    "seed": 7,
}
PROPERTIES = {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}}
FORECAST = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": PROPERTIES,
        "required": [*PROPERTIES],
    },
}
TOOLS: Any = [
    {"type": "function", "function": each} for each in (FORECAST, FUNCTIONS[1])
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[openai.OpenAI]:
    with client_of(served.url) as client:
        yield client


def test_a_required_tool_call_has_arguments_by_the_schema(
    client: openai.OpenAI,
) -> None:
    asked = {
        **ASKED,
        "model": "tools",
        "tools": TOOLS,
        "tool_choice": WEATHER,
        "reasoning_effort": "none",
    }
    answer = client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "weather" and call.id
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_llama_server_endpoints_agree_with_openai_endpoints(
    client: openai.OpenAI, served: Server
) -> None:
    whole = client.chat.completions.create(**ASKED)
    prompt = served.call(
        "/apply-template", {"model": "demo", "messages": ASKED["messages"]}
    ).json["prompt"]
    tokens = served.call("/tokenize", {"model": "demo", "content": prompt}).json[
        "tokens"
    ]
    assert whole.usage is not None and len(tokens) == whole.usage.prompt_tokens
    body = {
        "model": "demo",
        "prompt": prompt,
        "n_predict": 5,
        "temperature": 0,
        "return_tokens": True,
    }
    found = served.call("/completion", body).json
    asked: Any = {"model": "demo", "prompt": prompt, "max_tokens": 5, "temperature": 0}
    assert found["content"] == client.completions.create(**asked).choices[0].text
    assert (
        served.call("/detokenize", {"model": "demo", "tokens": found["tokens"]}).json[
            "content"
        ]
        == found["content"]
    )
    assert found["prompt"] == prompt and (
        found["stop_type"],
        found["tokens_predicted"],
    ) == ("limit", 5)


def test_several_choices_use_successive_seeds_and_one_prompt(
    client: openai.OpenAI,
) -> None:
    asked: Any = {
        "model": "demo",
        "prompt": "moegguf is",
        "max_tokens": 6,
        "logprobs": 0,
        "temperature": 0.8,
    }
    alone = [client.completions.create(**asked, seed=7 + i) for i in range(3)]
    texts = [each.choices[0].text for each in alone]
    assert len(set(texts)) > 1
    several = client.completions.create(**asked, seed=7, n=3)
    assert [(choice.index, choice.text) for choice in several.choices] == list(
        enumerate(texts)
    )
    assert several.usage is not None and alone[0].usage is not None
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(
        each.usage.completion_tokens for each in alone if each.usage
    )
    scores = [
        sum(found) / len(found)
        for each in alone
        for found in [each.choices[0].logprobs.token_logprobs]
    ]  # type: ignore
    ranked = sorted(texts, key=lambda text: scores[texts.index(text)], reverse=True)
    best = client.completions.create(
        **{**asked, "logprobs": None}, seed=7, n=2, best_of=3
    )
    assert [choice.text for choice in best.choices] == ranked[:2] and best.choices[
        0
    ].logprobs is None
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        **{**ASKED, "n": 2, "max_tokens": 6}, stream=True
    ):
        for part in chunk.choices:
            streamed[part.index] = streamed.get(part.index, "") + (
                part.delta.content or ""
            )
    whole = client.chat.completions.create(**{**ASKED, "n": 2, "max_tokens": 6})
    assert (
        streamed == {choice.index: choice.message.content for choice in whole.choices}
        and len(streamed) == 2
    )


def test_metrics_count_answers_of_every_api(
    http: httpx.Client, manager: FakeManager
) -> None:
    manager.summary = changed(prompt_tokens=10, answer_tokens=4)
    for stream in (False, True):
        http.post(
            "/v1/chat/completions",
            json={"model": "demo", "messages": HI, "stream": stream},
        )
    http.post("/v1/completions", json={"model": "demo", "prompt": "a"})
    http.post("/api/chat", json={"model": "demo", "messages": HI})
    http.post(
        "/api/chat",
        json={"model": "demo", "messages": HI, "stream": False, "keep_alive": 0},
    )
    response = http.get("/metrics")
    assert (
        response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    )
    lines = response.text.splitlines()
    assert "llamacpp:prompt_tokens_total 50.0" in lines
    assert "llamacpp:tokens_predicted_total 20.0" in lines
    assert 'moegguf_answers_total{model="demo:latest"} 5.0' in lines
    # Unloading keeps it.
    assert 'moegguf_expert_lookups_total{model="demo:latest"} 10.0' in lines
    assert not [line for line in lines if line.startswith("moegguf_slots{")]


FUNCTION: Any = {"type": "function", "strict": True, **FUNCTIONS[0]}


def test_items_of_a_streamed_response_are_accepted_as_input(
    url: str, http: httpx.Client, manager: FakeManager
) -> None:
    calls = (ToolCall("c1", "weather", {"city": "Oslo"}), ToolCall("c2", "weather", {}))
    manager.script = (
        Delta(thinking="hm"),
        Delta(text="Hel"),
        Delta(text="lo"),
        Delta(tool_calls=calls),
    )
    asked: Any = {
        "model": "able",
        "input": "hi",
        "tools": [FUNCTION],
        "include": ["reasoning.encrypted_content"],
    }
    with client_of(url) as client, client.responses.stream(**asked) as stream:
        texts = [
            event.delta
            for event in stream
            if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert texts == ["Hel", "lo"] and final.output_text == "Hello"
    output = [item.model_dump(exclude_none=True) for item in final.output]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    http.post("/v1/responses", json={"model": "able", "input": output})
    (answer,) = manager.requests[-1].messages or ()
    assert answer["thinking"] == "hm" and answer["content"] == "Hello"
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [
        {"city": "Oslo"},
        {},
    ]
    kept = {
        name: value
        for name, value in output[0].items()
        if name in ("id", "type", "encrypted_content")
    }
    items = [{**kept, "summary": []}, {"role": "user", "content": "on"}]
    http.post("/v1/responses", json={"model": "able", "input": items})
    assert (manager.requests[-1].messages or ())[0]["thinking"] == "hm"


MESSAGES: Any = ASKED["messages"]
N_TOKENS = 24


def chances(server: Server) -> list[float]:
    """Requests an answer with the field `exact`. Returns the log probability of each of
    its tokens."""
    asked: Any = {
        "model": "demo",
        "messages": MESSAGES,
        "temperature": 0,
        "logprobs": True,
        "max_tokens": N_TOKENS,
    }
    with client_of(server.url) as client:
        found = (
            client.chat.completions.create(**asked, extra_body={"exact": True})
            .choices[0]
            .logprobs
        )
    return [each.logprob for each in found.content or ()]


def test_an_exact_answer_beside_others_has_the_bits_of_a_lone_request(
    tmp_path: Path,
) -> None:
    with Engine("demo", parallel=1, n_ctx=512) as engine:
        (answer,) = engine.chat(
            MESSAGES, Sampling(temperature=0, max_tokens=N_TOKENS), n_logprobs=0
        )
    alone = [logprob.logprob for logprob in answer.logprobs]
    others = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_tokens": 60,
    }
    own = {"MOEGGUF_CONTEXT_LENGTH": "512"}
    with (
        serving(tmp_path, "--parallel", "4", **own) as parallel,
        ThreadPoolExecutor(6) as threads,
    ):
        beside = [
            threads.submit(parallel.call, "/v1/chat/completions", {**others, "seed": i})
            for i in range(6)
        ]
        found = chances(parallel)
        assert all(reply.result().status == 200 for reply in beside)
    assert found == alone
