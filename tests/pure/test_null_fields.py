"""Tests request bodies of every API with null fields, and with whole numbers written as
8.0.

For each field that may be left out, null has the same effect as leaving the field out.
This holds for the fields of every body class, and for the objects inside a body that
only validators read.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import ValidationError
from recorded_texts import recorded_lines

import moegguf.server.app  # noqa: F401  # its import defines every body class
from moegguf.server import embeddings, llama_server
from moegguf.server.anthropic import messages
from moegguf.server.common.body import Body, integral
from moegguf.server.ollama import chat as ollama
from moegguf.server.openai import chat, completions, responses

HI = [{"role": "user", "content": "hi"}]
# Values of required fields, keyed by the name that clients write.
REQUIRED: dict[str, Any] = {
    "anchor": "created_at", "completion_window": "24h", "content": "a", "destination": "b", "endpoint": "/v1/responses",
    "function": {"name": "f"}, "id": 0, "input": "a", "input_file_id": "f", "input_prefix": "a", "input_suffix": "b",
    "lora": [], "max_tokens": 5, "messages": HI, "mode": "auto", "model": "demo", "name": "f", "names": ["f"],
    "prompt": "a", "purpose": "batch", "query": "q", "role": "user", "scale": 1.0, "schema": {}, "seconds": 3600,
    "source": "a", "text": "a", "tokens": [1],
}  # fmt: skip
TYPES = {
    "Format": "text",
    "ToolChoice": "function",
    "_OutputFormat": "json_schema",
    "_TextBlock": "text",
}
KINDS: dict[str, type[Body]] = {
    "/api/chat": ollama.ChatRequest,
    "/api/embed": embeddings._EmbedRequest,
    "/api/embeddings": embeddings._EmbeddingRequest,
    "/api/generate": ollama._GenerateRequest,
    "/apply-template": llama_server._TemplateBody,
    "/completion": llama_server._NativeCompletionBody,
    "/detokenize": llama_server._DetokenizeBody,
    "/embeddings": embeddings._NativeEmbeddingsBody,
    "/infill": llama_server._InfillBody,
    "/rerank": embeddings._RerankBody,
    "/tokenize": llama_server._TokenizeBody,
    "/v1/chat/completions": chat.ChatBody,
    "/v1/completions": completions.CompletionBody,
    "/v1/embeddings": embeddings.EmbeddingsBody,
    "/v1/messages": messages._MessagesBody,
    "/v1/messages/count_tokens": messages._CountBody,
    "/v1/responses": responses.ResponsesBody,
    "/v1/responses/input_tokens": responses.ResponsesBody,
}
# Names of objects whose keys the client chooses, so the keys are not fields of the API.
DATA = (
    "action", "arguments", "chat_template_kwargs", "input", "input_schema", "logit_bias", "metadata", "parameters",
    "schema",
)  # fmt: skip


# A request body for these paths may contain a JSON schema in `format`.
SCHEMAS = ("/api/chat", "/api/generate", "/completion", "/infill")


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for each in kind.__subclasses__():
        if each.__module__.startswith("moegguf."):
            yield each
            yield from bodies(each)


BODIES = [kind for kind in dict.fromkeys(bodies()) if not inspect.isabstract(kind)]


def names_of(kind: type[Body], name: str) -> list[str]:
    """Returns the names of a field that clients may write."""
    field = kind.model_fields[name]
    alias = field.validation_alias or name
    return [str(choice) for choice in getattr(alias, "choices", [alias])]


def least(kind: type[Body]) -> dict[str, Any]:
    """Returns a body with only the required fields."""
    names = [
        names_of(kind, name)[0]
        for name, field in kind.model_fields.items()
        if field.is_required()
    ]
    return {
        name: TYPES.get(kind.__name__, "enabled") if name == "type" else REQUIRED[name]
        for name in names
    }


@pytest.mark.parametrize(
    "kind", BODIES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}"
)
def test_null_field_is_read_as_an_absent_one(kind: type[Body]) -> None:
    given = least(kind)
    expected = kind.model_validate(given).model_dump()
    for field_name, field in kind.model_fields.items():
        for name in () if field.is_required() else names_of(kind, field_name):
            assert (
                kind.model_validate({**given, name: None}).model_dump() == expected
            ), name


def whole_numbers(
    schema: Any, path: str = "", is_wrapped: bool = False
) -> Iterator[str]:
    """Yields the paths of the integers in a pydantic schema that refuse 8.0, although
    8.0 is a whole number."""
    if isinstance(schema, list | tuple):
        for i, each in enumerate(schema):
            yield from whole_numbers(each, f"{path}[{i}]")
    elif isinstance(schema, dict):
        if schema.get("type") == "int" and not is_wrapped:
            yield path
        choices = [
            choice.get("type")
            for choice in schema.get("choices", ())
            if isinstance(choice, dict)
        ]
        wraps = (
            schema.get("type") == "function-before"
            and schema["function"]["function"] is integral
        )
        for key, each in schema.items():
            if key not in ("keys_schema", "metadata", "serialization") and not (
                key == "choices" and "float" in choices
            ):
                yield from whole_numbers(
                    each, f"{path}.{key}", wraps and key == "schema"
                )


@pytest.mark.parametrize(
    "kind", BODIES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}"
)
def test_whole_number_fields_accept_a_fraction_of_zero(kind: type[Body]) -> None:
    assert list(whole_numbers(kind.__pydantic_core_schema__)) == []


def read(kind: type[Body], given: Any) -> Any:
    """Returns the validated body as a dict, or None if the body is refused."""
    try:
        return kind.model_validate(given).model_dump()
    except ValidationError:
        return None


def objects(value: Any, data: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields each object in a body if its keys are fields of the API.

    Skips objects that are values of the names in `data`, and everything in `output`.
    """
    if isinstance(value, list):
        for each in value:
            yield from objects(each, data)
    elif isinstance(value, dict):
        yield value
        for name, each in value.items():
            # output may be any JSON.
            if not (name in data and isinstance(each, dict)) and name != "output":
                yield from objects(each, data)


RAW = [
    ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f"}, "mode": "auto"},
                              "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}),
    ("/v1/chat/completions", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}},
        "tools": [{"type": "function", "function": {"name": "f", "description": "d"}}]}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "strict": True, "description": "d", "schema": {"type": "object"}}}}),
    ("/v1/chat/completions", {"messages": [
        {"role": "user", "name": "n", "content": [{"type": "text", "text": "x", "annotations": []}]},
        {"role": "assistant", "content": "y", "refusal": "r", "tool_calls": [
            {"id": "1", "type": "custom", "custom": {"name": "g", "input": "text"}}]}]}),
    ("/v1/responses", {"input": [
        {"type": "message", "id": "i", "status": "completed", "role": "user", "content": [
            {"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": [
            {"type": "reasoning_text", "text": "t"}], "encrypted_content": "e"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "o", "id": "i"},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "text"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}},
        {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"type": "function", "name": "f", "description": "d", "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}, "verbosity": "low"}}),
    ("/v1/messages", {"max_tokens": 5, "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "citations": []},
            {"type": "document", "title": "t", "context": "c", "source": {"type": "text", "data": "d"}},
            {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "x"}],
             "citations": {"enabled": True}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "h", "signature": "s"},
            {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "q"}},
            {"type": "tool_use", "id": "2", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2", "is_error": True, "content": [
            {"type": "text", "text": "x"}]}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": {}, "type": "custom"}],
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]}),
]  # fmt: skip


def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (path, body) of each line of bodies.txt, except lines whose body has to be
    expanded first."""
    for line in recorded_lines("bodies", "/"):
        path, body = line.split(" ", 1)
        if " times" not in body and "every field" not in body:
            yield path, json.loads(body)


@pytest.mark.parametrize("source", [RAW, list(recorded())], ids=["own", "recorded"])
def test_null_in_any_object_of_a_body_is_read_as_absent(
    source: list[tuple[str, dict[str, Any]]],
) -> None:
    n_read = 0
    for path, body in source:
        kind = KINDS[path]
        given = {**least(kind), **copy.deepcopy(body)}
        if source is RAW:
            assert read(kind, given) is not None, path
        # llama-server's `json_schema` holds a schema, in which null may be a value, so
        # it is not tested with null.
        schema = given.pop("json_schema", None)
        if schema is not None:
            assert read(kind, {**given, "json_schema": schema}) is not None
        for each in objects(given, (*DATA, *(("format",) if path in SCHEMAS else ()))):
            for name in list(each):
                value = each.pop(name)
                without = read(kind, given)
                each[name] = None
                assert read(kind, given) == without, (
                    f"{path}: {name} of {json.dumps(each)}"
                )
                each[name] = value
                n_read += without is not None
    assert n_read > 20


def test_whole_number_fields_reject_fractions_booleans_and_text() -> None:
    for number in (8.5, True, "8", math.inf):
        assert (
            read(chat.ChatBody, {"model": "demo", "messages": HI, "max_tokens": number})
            is None
        )
    assert (
        read(chat.ChatBody, {"model": "demo", "messages": HI, "max_tokens": 8.0})[
            "max_tokens"
        ]
        == 8
    )
