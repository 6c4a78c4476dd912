"""OpenAI's requests as a `GenerationRequest`, and deltas of an answer as OpenAI's objects."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moegguf.generate.request import GenerationRequest, Sampling
from moegguf.models.entry import ModelEntry
from moegguf.server.openai.schema import ChatBody
from moegguf.serving.events import LoadOverrides

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "the time", "strict": True}}
HI = [{"role": "user", "content": "hi"}]


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
