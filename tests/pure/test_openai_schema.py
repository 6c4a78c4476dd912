"""OpenAI's requests as a `GenerationRequest`, and deltas of an answer as OpenAI's objects."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from moegguf.engine.stats import Stats
from moegguf.generate.request import Delta, GenerationRequest, Sampling, Timing, TokenLogprob, ToolCall
from moegguf.models.entry import ModelEntry
from moegguf.server.openai.objects import ChatReply, CompletionReply, usage
from moegguf.server.openai.schema import ChatBody
from moegguf.serving.events import Done, LoadOverrides, join

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "the time", "strict": True}}
HI = [{"role": "user", "content": "hi"}]
DONE = Done(
    Timing(prompt_tokens=8, cached_tokens=2, answer_tokens=4, prompt_s=0.5, answer_s=2.0, total_s=2.5, finish="length",
           stats=Stats(lookups=10, hits_ready=6, hits_late=1, misses=3, bytes_missed=300, tokens=12)),
    load_s=1.5,
)  # fmt: skip


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": HI, **fields})


ENTRY = ModelEntry("m:latest", "own", (Path("m.gguf"),), 1, "0" * 64, datetime(2026, 1, 1, tzinfo=UTC))


def ask(entry: ModelEntry = ENTRY, **fields: Any) -> GenerationRequest:
    return body(**fields).generation(entry)


def complaint(**fields: Any) -> str:
    with pytest.raises(ValidationError) as raised:
        body(**fields)
    return str(raised.value)


def test_text_parts_are_joined_and_developer_becomes_system() -> None:
    said = ask(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "hi", "name": "ann"},
        ]
    )
    assert said.messages == ({"role": "system", "content": "be\nbrief"}, {"role": "user", "content": "hi"})


@pytest.mark.parametrize("kind", ["input_audio", "file"])
def test_other_parts_are_refused(kind: str) -> None:
    assert f"parts of type '{kind}' are not supported" in complaint(
        messages=[{"role": "user", "content": [{"type": kind, kind: {"url": "data:,"}}]}]
    )


@pytest.mark.parametrize("part", [3, {}, {"type": "text"}, {"type": "text", "text": 1}, {"type": 3}, None])
def test_a_part_without_text_is_refused(part: Any) -> None:
    assert "a part must be" in complaint(messages=[{"role": "user", "content": [part]}])


def test_tool_calls_and_results_keep_ids_and_names() -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    said = ask(
        messages=[
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [made], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "unknown", "content": "sun"},
        ]
    )
    assert said.messages is not None
    assert said.messages[1:] == (
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "tool_name": "weather"},
        {"role": "tool", "content": "sun", "tool_call_id": "unknown"},
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '"text"', "[" * 100_000])
def test_invalid_arguments_are_refused(arguments: str) -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    assert "arguments" in complaint(messages=[{"role": "assistant", "tool_calls": [made]}])


def test_tool_choice() -> None:
    both = [WEATHER, CLOCK]
    assert ask(tools=both).tool_choice == "auto"
    assert ask(tools=both).tools == (WEATHER, CLOCK)
    assert ask(tools=both, tool_choice="required").tool_choice == "required"
    assert ask(tools=both, tool_choice={"type": "function", "function": {"name": "clock"}}).tool_choice == "clock"
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    some = ask(tools=both, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert some.tool_choice == "required"
    assert some.tools == (WEATHER,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "names 'x', which is not",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "function is missing"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "parameters"),
        ({"tools": [WEATHER] * 257}, "at most 256"),
        ({"n": 2}, "must be 1, but is 2"),
        ({"n": 10**9}, "must be 1"),
        ({"messages": []}, "at least 1"),
        ({"messages": None}, "messages"),
        ({"model": 3}, "model"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "must be at least 1"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"stop": ["x"] * 65}, "at most 64"),
        ({"stop": 3}, "stop"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "must be a token id"),
        ({"logit_bias": {"5": 200}}, "logit_bias"),
        ({"logit_bias": {"9" * 40: 1}}, "must be a token id"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    assert words in complaint(**fields)


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in ChatBody.model_fields if name not in ("model", "messages")]
    assert body(**dict.fromkeys(names)) == body()


def test_unknown_keys_are_ignored() -> None:
    assert body(service_tier="auto", metadata={"a": "b"}, store=False, user="u") == body()


def test_openais_keys_override_options_and_those_the_entrys() -> None:
    own = replace(ENTRY, parameters={"temperature": 0.2, "top_p": 0.5, "top_k": 7, "num_ctx": 64})
    assert ask().sampling == Sampling()
    assert ask(own).sampling == Sampling(temperature=0.2, top_p=0.5, top_k=7)
    said = ask(own, temperature=0, options={"temperature": 1.0, "top_p": 0.25, "seed": 3})
    assert said.sampling == Sampling(temperature=0, top_p=0.25, top_k=7, seed=3)


def test_overrides() -> None:
    assert body().overrides() == LoadOverrides()
    assert body(options={"num_ctx": 64, "expert_cache": "50%"}).overrides() == LoadOverrides(
        n_ctx=64, expert_cache="50%"
    )


def test_other_sampling_parameters() -> None:
    said = ask(stop="x", seed=5, min_p=0.5, repeat_penalty=1.5, presence_penalty=1, logit_bias={"7": -100})
    assert said.sampling == Sampling(
        stop=("x",), seed=5, min_p=0.5, repeat_penalty=1.5, presence_penalty=1, logit_bias={7: -100}
    )


def test_max_completion_tokens_overrides_max_tokens() -> None:
    assert ask().sampling.max_tokens is None
    assert ask(max_tokens=3).sampling.max_tokens == 3
    assert ask(max_tokens=3, max_completion_tokens=5).sampling.max_tokens == 5
    assert ask(max_tokens=-1, options={"num_predict": 4}).sampling.max_tokens is None
    assert ask(options={"num_predict": 4}).sampling.max_tokens == 4


def test_entry_messages_come_before_the_conversation() -> None:
    own = replace(ENTRY, system="Be kind.", messages=({"role": "user", "content": "a"},), template="{{ messages }}")
    said = ask(own)
    assert said.messages == ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}, *HI)
    assert said.template == "{{ messages }}"
    told = [{"role": "developer", "content": "Be brief."}, *HI]
    assert (ask(own, messages=told).messages or ())[1] == {"role": "system", "content": "Be brief."}


def test_truncate_and_shift_are_off_by_default() -> None:
    """As OpenAI: a prompt that is too long is an error, and an answer ends with the context."""
    assert (ask().truncate, ask().shift) == (False, False)
    assert (ask(truncate=True).truncate, ask(shift=True).shift) == (True, True)


@pytest.mark.parametrize(
    ("given", "continues"),
    [
        ({}, True),
        ({"continue_final_message": True}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
        ({"add_generation_prompt": False}, True),
    ],
)
def test_the_assistants_last_message_is_continued_unless_told_otherwise(given: dict[str, Any], continues: bool) -> None:
    assert ask(**given).continue_final_message is continues
    with pytest.raises(ValueError, match="cannot both be true"):
        ask(continue_final_message=True, add_generation_prompt=True)


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert ask().format is None
    assert ask(response_format={"type": "text"}).format is None
    assert ask(response_format={"type": "json_object"}).format == "json"
    assert ask(response_format={"type": "json_object", "schema": schema}).format == schema
    assert ask(response_format=named).format == schema


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "medium"}, "medium"),
        ({"reasoning": {"effort": "xhigh"}}, "max"),
        ({"think": False, "reasoning_effort": "high"}, False),
        ({"think": "high"}, "high"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, None),
    ],
)
def test_reasoning_effort(fields: dict[str, Any], think: bool | str | None) -> None:
    assert ask(**fields).think is think or ask(**fields).think == think


def test_template_options_and_logprobs_are_passed_on() -> None:
    assert ask(chat_template_kwargs={"a": 1}).template_options == {"a": 1}
    assert ask().n_logprobs is None
    assert ask(top_logprobs=3).n_logprobs is None
    assert ask(logprobs=True).n_logprobs == 0
    assert ask(logprobs=True, top_logprobs=3).n_logprobs == 3
    assert body(logit_bias={"5": -100}).logit_bias == {5: -100}


def reply(**options: Any) -> ChatReply:
    return ChatReply("m:latest", "0123456789abcdef", **{"include_usage": False, "logprobs": False, **options})


CALLS = (ToolCall("c1", "weather", {"city": "Ås"}), ToolCall("c2", "clock", {}))
CHANCE = TokenLogprob("h\u00e9", -0.5, (("x", -1.0), ("\ufffd", -2.0)))


def test_stream_objects_share_id_and_time() -> None:
    answer = reply()
    deltas = [Delta(thinking="hm"), Delta(text="one"), Delta(text="two")]
    objects = [answer.first(), *(c for piece in deltas for c in answer.chunks(piece)), *answer.last(DONE)]
    chunks = [ChatCompletionChunk.model_validate(item) for item in objects]
    assert {(c.id, c.created, c.model, c.object) for c in chunks} == {
        (chunks[0].id, chunks[0].created, "m:latest", "chat.completion.chunk")
    }
    assert [item["choices"][0]["delta"] for item in objects] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": "one"},
        {"content": "two"},
        {},
    ]
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 4 + ["length"]
    assert all("usage" not in item for item in objects)
    assert objects[-1]["timings"]["predicted_per_second"] == 2.0


def whole_of(answer: ChatReply | CompletionReply, deltas: list[Delta]) -> Any:
    """The object of a reply with one choice."""
    answer.add(join(deltas), DONE)
    return answer.whole()


def test_usage_has_a_chunk_of_its_own_on_request() -> None:
    answer = reply(include_usage=True)
    *_, finish, figures = [answer.first(), *answer.last(DONE)]
    assert finish["usage"] is None and finish["choices"][0]["finish_reason"] == "length"
    assert figures["choices"] == []
    assert figures["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert figures["moe"]["hit_rate"] == 0.7 and figures["moe"]["bytes_read"] == 300
    assert "cut_messages" not in figures


def test_tool_calls_are_numbered_over_all_deltas() -> None:
    answer = reply()
    deltas = [c["choices"][0]["delta"] for call in CALLS for c in answer.chunks(Delta(text="so", tool_calls=(call,)))]
    assert deltas[1]["tool_calls"] == [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ås"}'}}
    ]
    assert deltas[3]["tool_calls"][0]["index"] == 1
    assert answer.last(DONE)[0]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_whole_answer() -> None:
    deltas = [Delta(thinking="h"), Delta(thinking="m"), Delta(text="a"), Delta(text="b", logprobs=(CHANCE,))]
    item = whole_of(reply(logprobs=True), deltas)
    whole = ChatCompletion.model_validate(item)
    assert whole.choices[0].message.content == "ab"
    assert item["choices"][0]["message"]["reasoning"] == item["choices"][0]["message"]["reasoning_content"] == "hm"
    assert whole.usage is not None and whole.usage.model_dump(exclude_unset=True) == usage(DONE.timing)
    assert whole.choices[0].finish_reason == "length"
    assert whole.system_fingerprint == "moegguf-0123456789ab"
    (logprob,) = whole.choices[0].logprobs.content or () if whole.choices[0].logprobs else ()
    assert (logprob.token, logprob.bytes) == ("hé", list("hé".encode()))
    assert [(top.token, top.bytes) for top in logprob.top_logprobs] == [("x", [120]), ("\ufffd", None)]


def test_content_is_null_with_tool_calls_only() -> None:
    whole = ChatCompletion.model_validate(whole_of(reply(), [Delta(tool_calls=CALLS)]))
    assert whole.choices[0].message.content is None
    assert json.loads((whole.choices[0].message.tool_calls or [])[0].function.arguments) == {"city": "Ås"}  # type: ignore[union-attr]
    assert whole.choices[0].finish_reason == "tool_calls"


def test_logprobs_are_sent_for_a_delta_without_text() -> None:
    answer = reply(logprobs=True)
    (chunk,) = answer.chunks(Delta(logprobs=(CHANCE,)))
    assert chunk["choices"][0]["delta"] == {}
    assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    thinking, text = answer.chunks(Delta(thinking="h", text="t", logprobs=(CHANCE,)))
    assert thinking["choices"][0]["logprobs"] is not None and text["choices"][0]["logprobs"] is None
    assert reply().chunks(Delta()) == []


def test_a_completion_has_text_offsets() -> None:
    def answer() -> CompletionReply:
        reply = CompletionReply("m:latest", "ab", include_usage=False, logprobs=True)
        reply.echo(["So "])
        return reply

    deltas = [Delta(text="hé", logprobs=(CHANCE,)), Delta(text="hé", logprobs=(CHANCE,))]
    whole = Completion.model_validate(whole_of(answer(), deltas))
    assert whole.choices[0].text == "So héhé"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [3, 5]
    assert whole.choices[0].logprobs.top_logprobs == [{"x": -1.0, "\ufffd": -2.0}] * 2
    streamed = answer()
    objects = [streamed.first(), *(c for piece in deltas for c in streamed.chunks(piece)), *streamed.last(DONE)]
    assert "".join(item["choices"][0]["text"] for item in objects) == "So héhé"
    assert [item["choices"][0]["logprobs"]["text_offset"] for item in objects[1:3]] == [[3], [5]]
    assert {item["object"] for item in objects} == {"text_completion"}


def test_rates_without_tokens_are_zero() -> None:
    last = reply().last(Done(Timing(), load_s=0.0))[0]
    assert last["timings"]["prompt_per_second"] == 0.0 and last["timings"]["predicted_per_token_ms"] == 0.0
    assert last["choices"][0]["finish_reason"] == "stop"
