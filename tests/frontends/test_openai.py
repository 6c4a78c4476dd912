"""OpenAI's APIs by the `openai` Python client, with real answers and over a scripted manager; and `exact`."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from client_types import check
from fake_manager import FUNCTIONS, HI, FakeManager, changed
from openai.types.responses import Response
from servers import Server, serving

from moegguf import Engine, Sampling
from moegguf.errors import AllocationError, BudgetError, MoeggufError, WorkerError
from moegguf.generate.request import Delta, ToolCall

ASKED: Any = {"model": "demo", "messages": [{"role": "user", "content": "What does moegguf do?"}], "seed": 7}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[openai.OpenAI]:
    with client_of(served.url) as client:
        yield client


def test_a_required_tool_call(client: openai.OpenAI) -> None:
    asked = {**ASKED, "model": "tools", "tools": TOOLS, "tool_choice": WEATHER, "reasoning_effort": "none"}
    answer = client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "weather" and call.id
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)
    assert answer.choices[0].finish_reason == "tool_calls"

    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].function is not None and deltas[0].function.name == "weather"
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_llama_servers_endpoints_give_the_same(client: openai.OpenAI, served: Server) -> None:
    whole = client.chat.completions.create(**ASKED)
    prompt = served.call("/apply-template", {"model": "demo", "messages": ASKED["messages"]}).json["prompt"]
    tokens = served.call("/tokenize", {"model": "demo", "content": prompt}).json["tokens"]
    assert whole.usage is not None and len(tokens) == whole.usage.prompt_tokens
    body = {"model": "demo", "prompt": prompt, "n_predict": 5, "temperature": 0, "return_tokens": True}
    found = served.call("/completion", body).json
    asked: Any = {"model": "demo", "prompt": prompt, "max_tokens": 5, "temperature": 0}
    assert found["content"] == client.completions.create(**asked).choices[0].text
    assert served.call("/detokenize", {"model": "demo", "tokens": found["tokens"]}).json["content"] == found["content"]
    assert found["prompt"] == prompt and (found["stop_type"], found["tokens_predicted"]) == ("limit", 5)


def test_several_choices_have_seeds_that_follow_and_one_prompt(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "moegguf is", "max_tokens": 6, "logprobs": 0, "temperature": 0.8}
    alone = [client.completions.create(**asked, seed=7 + i) for i in range(3)]
    texts = [each.choices[0].text for each in alone]
    assert len(set(texts)) > 1
    several = client.completions.create(**asked, seed=7, n=3)
    assert [(choice.index, choice.text) for choice in several.choices] == list(enumerate(texts))
    assert several.usage is not None and alone[0].usage is not None
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone if each.usage)
    scores = [sum(found) / len(found) for each in alone for found in [each.choices[0].logprobs.token_logprobs]]  # type: ignore
    ranked = sorted(texts, key=lambda text: scores[texts.index(text)], reverse=True)
    best = client.completions.create(**{**asked, "logprobs": None}, seed=7, n=2, best_of=3)
    assert [choice.text for choice in best.choices] == ranked[:2] and best.choices[0].logprobs is None
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(**{**ASKED, "n": 2, "max_tokens": 6}, stream=True):
        for part in chunk.choices:
            streamed[part.index] = streamed.get(part.index, "") + (part.delta.content or "")
    whole = client.chat.completions.create(**{**ASKED, "n": 2, "max_tokens": 6})
    assert streamed == {choice.index: choice.message.content for choice in whole.choices} and len(streamed) == 2


def test_a_round_trip_of_calls_in_responses(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    asked: Any = {"model": "tools", "tools": tools, "reasoning": {"effort": "none"}, "extra_body": {"seed": 7}}
    choice: Any = {"type": "function", "name": "weather"}
    items: Any = [{"role": "user", "content": "Will it rain?"}]
    for _ in range(2):
        first = client.responses.create(**{**asked, "input": items}, tool_choice=choice)
        calls = [item for item in first.output if item.type == "function_call"]
        assert calls and isinstance(json.loads(calls[0].arguments)["days"], int)
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    last = client.responses.create(**{**asked, "input": items}, tool_choice="none", max_output_tokens=4)
    assert last.usage is not None and last.usage.output_tokens <= 4


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
    with client_of(url) as client, client.responses.stream(**asked) as stream:
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


MESSAGES: Any = ASKED["messages"]
N_TOKENS = 24


def by_openai(server: Server) -> list[float]:
    asked: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0, "logprobs": True, "max_tokens": N_TOKENS}
    with client_of(server.url) as client:
        found = client.chat.completions.create(**asked, extra_body={"exact": True}).choices[0].logprobs
    return [each.logprob for each in found.content or ()]


def by_ollama(server: Server) -> list[float]:
    options = {"temperature": 0, "num_predict": N_TOKENS, "exact": True}
    found = ollama.Client(server.url).chat("demo", MESSAGES, logprobs=True, options=options)
    return [each.logprob for each in found.logprobs or ()]


def test_an_exact_answer_has_the_bits_of_a_request_alone_among_others(tmp_path: Path) -> None:
    with Engine("demo", parallel=1, n_ctx=512) as engine:
        (answer,) = engine.chat(MESSAGES, Sampling(temperature=0, max_tokens=N_TOKENS), n_logprobs=0)
    alone = [logprob.logprob for logprob in answer.logprobs]
    others = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 60}
    with (
        serving(tmp_path, "--parallel", "4", MOEGGUF_CONTEXT_LENGTH="512") as parallel,
        ThreadPoolExecutor(6) as threads,
    ):
        for ask in (by_openai, by_ollama):
            beside = [threads.submit(parallel.call, "/v1/chat/completions", {**others, "seed": i}) for i in range(6)]
            found = ask(parallel)
            assert all(reply.result().status == 200 for reply in beside)
            assert found == alone[: len(found)] and len(found) == len(alone)
