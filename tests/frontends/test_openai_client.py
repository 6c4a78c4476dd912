"""The `openai` Python client, sync and async, against `moegguf serve`: every supported call."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion
from servers import Server

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


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> ChatCompletion:
    """The demo's whole answer to ASKED."""
    return client.chat.completions.create(**ASKED)


def text_of(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def test_a_stream_is_the_whole_answer(client: openai.OpenAI, whole: ChatCompletion) -> None:
    chunks = list(client.chat.completions.create(**ASKED, stream=True))
    assert {(chunk.id, chunk.created) for chunk in chunks} == {(chunks[0].id, chunks[0].created)}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(whole)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def tokens_of(usage: CompletionUsage) -> tuple[int, int]:
    """Tokens of the prompt and of the answer; more of a prompt that was asked before is cached."""
    return usage.prompt_tokens, usage.completion_tokens


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


def test_llama_servers_endpoints_give_the_same(client: openai.OpenAI, whole: ChatCompletion, served: Server) -> None:
    prompt = served.call("/apply-template", {"model": "demo", "messages": ASKED["messages"]}).json["prompt"]
    tokens = served.call("/tokenize", {"model": "demo", "content": prompt}).json["tokens"]
    assert whole.usage is not None and len(tokens) == whole.usage.prompt_tokens
    body = {"model": "demo", "prompt": prompt, "n_predict": 5, "temperature": 0, "return_tokens": True}
    found = served.call("/completion", body).json
    asked: Any = {"model": "demo", "prompt": prompt, "max_tokens": 5, "temperature": 0}
    assert found["content"] == client.completions.create(**asked).choices[0].text
    assert served.call("/detokenize", {"model": "demo", "tokens": found["tokens"]}).json["content"] == found["content"]
    assert found["prompt"] == prompt and (found["stop_type"], found["tokens_predicted"]) == ("limit", 5)


def test_the_tokens_of_prompts_have_logprobs_without_an_answer(client: openai.OpenAI, served: Server) -> None:
    tokens = served.call("/tokenize", {"model": "demo", "content": "moegguf runs experts"}).json["tokens"]
    asked: Any = {"model": "demo", "max_tokens": 0, "logprobs": 1, "echo": True, "temperature": 0}
    found = client.completions.create(**asked, prompt=[tokens, tokens[:3]])
    assert found.usage is not None and tokens_of(found.usage)[:2] == (len(tokens) + 3, 0)
    for choice, given in zip(found.choices, (tokens, tokens[:3]), strict=True):
        told: Any = choice.logprobs
        assert "".join(told.tokens) == choice.text and choice.finish_reason == "length"
        assert [told.text_offset[n] for n in (0, 2)] == [0, len("".join(told.tokens[:2]))]
        assert told.token_logprobs[0] is told.top_logprobs[0] is None and len(told.tokens) == len(given)
    streamed = list(client.completions.create(**{**asked, "max_tokens": 2}, prompt="moegguf runs experts", stream=True))
    logprobs: list[Any] = [choice.logprobs for chunk in streamed for choice in chunk.choices if choice.logprobs]
    assert logprobs[0].token_logprobs == found.choices[0].logprobs.token_logprobs  # type: ignore[union-attr]
    assert logprobs[1].text_offset[0] == len("moegguf runs experts")


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


def test_embeddings_in_base64_by_default_and_as_numbers(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model="demo", input=["one", "two"])
    plain = client.embeddings.create(model="demo", input=["one", "two"], encoding_format="float")
    assert [each.embedding for each in packed.data] == [pytest.approx(each.embedding, abs=1e-7) for each in plain.data]
    assert packed.usage == plain.usage and packed.usage.prompt_tokens > 0
    vector = packed.data[0].embedding
    assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-4)
    short = client.embeddings.create(model="demo", input="one", dimensions=4).data[0].embedding
    assert len(short) == 4 and sum(x * x for x in short) == pytest.approx(1, abs=1e-4)


RESPONSE: Any = {"model": "tools", "input": "What does moegguf do?", "extra_body": {"seed": 7}}
FUNCTIONS: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]


def test_a_response_whole_and_streamed(client: openai.OpenAI, whole: ChatCompletion) -> None:
    asked: Any = {**RESPONSE, "model": "demo"}
    found = client.responses.create(**asked)
    assert found.output_text == text_of(whole) and found.status == "completed"
    assert found.usage is not None and whole.usage is not None
    assert found.usage.input_tokens == whole.usage.prompt_tokens
    assert (
        client.responses.input_tokens.count(model="demo", input=asked["input"]).input_tokens == found.usage.input_tokens
    )
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.completed" and last.response.output_text == found.output_text
    cut = client.responses.create(**asked, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_round_trip_of_calls_in_responses(client: openai.OpenAI) -> None:
    asked: Any = {**RESPONSE, "tools": FUNCTIONS, "reasoning": {"effort": "none"}}
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
