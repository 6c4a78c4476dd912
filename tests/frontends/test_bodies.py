"""Every API's bodies: what the model is asked, or the refusal, as `encodings/bodies.txt` has it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_manager import FUNCTIONS, HI, TEMPLATE, FakeManager, entry_of
from gguf_builder import U32, moe
from pictures import base64_of, png
from recorded import check_recorded

from moegguf.generate.request import GenerationRequest, Sampling
from moegguf.models.blobs import BlobStore
from moegguf.models.folder import demo_path
from moegguf.server.common import limits
from moegguf.server.openai.schema import ChatBody

Bodies = list[dict[str, Any]]

WEATHER, CLOCK = ({"type": "function", "function": function} for function in FUNCTIONS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TERSE = {"role": "system", "content": "Be terse."}
PICTURE = base64_of(png(2, 2))
URL = f"data:image/png;base64,{PICTURE}"


def user(*parts: Any) -> dict[str, Any]:
    """A message of parts as the only one."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def call(arguments: Any = '{"city": "Oslo"}', **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments, **more}}


def choice(name: str = "clock") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


SAMPLING: Bodies = [
    {"temperature": 0, "top_p": 0.25, "top_k": 3, "min_p": 0.5, "typical_p": 0.5, "seed": 5, "stop": ["x"],
     "repeat_penalty": 1.5, "repeat_last_n": 5, "presence_penalty": 1, "frequency_penalty": 2, "exact": True},
    *({name: wrong} for name, wrongs in {
        "temperature": ["hot", -1, True], "top_p": [1.5], "top_k": [2**40], "seed": ["x"], "repeat_penalty": [0],
        "stop": [3, ["x"] * 65, ["x" * 10_000], [1]], "exact": ["much"],
    }.items() for wrong in wrongs),
]  # fmt: skip
OPTIONS: Bodies = [
    *SAMPLING,
    {"num_ctx": 4096.0, "num_thread": 0, "num_predict": -1, "seed": -1, "stop": ["a", ""], "moe_cache_ram": "1GiB",
     "tfs_z": 1, "mirostat": 0, "use_mlock": True, "num_gpu": None, "num_batch": 7, "num_keep": -1},
    {"seed": -2, "num_thread": 1, "expert_cache": "50%", "temprature": 1},
    *({name: wrong} for name, wrongs in {
        "num_predict": [-3, 10**9], "num_ctx": [-1, 10**12], "num_batch": [0], "num_thread": [100_000],
        "expert_cache": ["lots", -1, "50"], "stop": ["one"],
    }.items() for wrong in wrongs),
]  # fmt: skip
CHAT: Bodies = [
    {}, dict.fromkeys(sorted(ChatBody.model_fields.keys() - {"model", "messages"})),
    {"model": 3}, {"model": ""}, {"model": "nobody"}, {"stream": "yes"}, {"messages": []}, {"messages": None},
    {"service_tier": "auto", "metadata": {"a": "b"}, "store": False, "user": "u"}, {"model": "own"},
    {"model": "own", "messages": [{**TERSE, "role": "developer"}, *HI], "temperature": 0, "top_k": 9,
     "options": {"temperature": 1.0, "top_p": 0.25, "seed": 3}},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
                  {"role": "user", "content": "hi", "name": "ann"}]},
    user({"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": URL}}),
    *(user(part) for part in (
        3, {}, None, {"type": "text"}, {"type": "text", "text": 1}, {"type": 3}, {"type": "input_audio"},
        {"type": "image_url"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
    )),
    {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call()], "reasoning_content": "hm"},
                  {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                  {"role": "tool", "tool_call_id": "unknown", "content": "sun"},
                  {"role": "function", "name": "f", "content": "x"}]},
    *({"messages": [{"role": "assistant", "tool_calls": [call(wrong)]}]} for wrong in ("{", "[1]", "3", '"text"')),
    {"tools": [WEATHER, CLOCK]}, {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
    {"tools": [WEATHER, CLOCK], "tool_choice": choice()},
    {"tools": [WEATHER, CLOCK], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice("weather")]}}},
    {"tools": [WEATHER, CLOCK], "tool_choice": "none", "model": "demo"}, {"tools": [WEATHER], "model": "demo"},
    {"tool_choice": "required"}, {"tools": [WEATHER], "tool_choice": choice()},
    *({"tools": [WEATHER], "tool_choice": wrong} for wrong in (
        {"type": "function"}, {"type": "custom"}, {"type": "allowed_tools", "allowed_tools": {}}, {}, "some")),
    {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, {"tools": [WEATHER] * 257},
    {"tools": [{"type": "function", "function": {"name": ""}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
    *SAMPLING, {"stop": "x"}, {"logit_bias": {"7": -100}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 200}},
    {"logit_bias": {"9" * 40: 1}}, {"n": 1}, {"n": 2, "seed": 2**32 - 1}, {"n": 0}, {"n": 10**9},
    {"max_tokens": 3}, {"max_tokens": 0},
    {"max_tokens": 3, "max_completion_tokens": 5}, {"max_completion_tokens": -5}, {"max_tokens": 2**40},
    {"max_tokens": -1, "options": {"num_predict": 4}}, {"options": {"num_predict": 4, "num_ctx": 64}},
    {"truncate": True, "shift": True}, {"continue_final_message": False}, {"add_generation_prompt": True},
    {"continue_final_message": True, "add_generation_prompt": True}, {"add_generation_prompt": False},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}}, {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema"}}, {"reasoning_effort": "none"}, {"reasoning_effort": "minimal"},
    {"reasoning_effort": "huge"}, {"reasoning": {"effort": "xhigh"}}, {"think": False, "reasoning_effort": "high"},
    {"think": "high"}, {"think": True, "model": "demo"}, {"chat_template_kwargs": {"enable_thinking": False, "a": 1}},
    {"chat_template_kwargs": {"enable_thinking": "no"}}, {"top_logprobs": 3}, {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21},
]  # fmt: skip
COMPLETIONS: Bodies = [
    {},
    {"model": "own"},
    {"prompt": [79, 110], "max_tokens": 3},
    {"prompt": ["a", "b"]},
    {"prompt": [[1, 2], [3]]},
    {"suffix": "z"},
    {"prompt": [[1]], "suffix": "b"},
    {"prompt": ["a"] * 2049},
    *({"best_of": 2, **more} for more in ({}, {"n": 2}, {"n": 3}, {"stream": True}, {"prompt": ["a"] * 1025})),
    {"logprobs": 21},
    {"logprobs": 1, "echo": True, "max_tokens": 0, "truncate": True},
    {"logprobs": 1, "echo": True, "suffix": "z"},
    *({"prompt": wrong} for wrong in ([], [[]], ["a", []], ["a", 1], {}, 3, [1, "a"], [[1], [-2]], None)),
]
NATIVE: Bodies = [
    {"n_predict": 0, "n_keep": -1}, {"n_predict": -1, "n_probs": 3, "return_tokens": True}, {"n_predict": -3},
    {"prompt": [1, 2]}, {"prompt": ["a", [3]], "n": 2, "seed": 5}, {"prompt": [1, "a"]}, {"model": "own"},
    {"logit_bias": [[5, False], [6, 2.5]]}, {"logit_bias": {"5": 1}}, {"logit_bias": [[5]]}, {"logit_bias": [["a", 1]]},
    {"json_schema": SCHEMA}, {"grammar": "root ::= x"}, {"grammar": ""}, {"stop": "x", "mirostat": 1},
]  # fmt: skip
INFILL: Bodies = [
    {}, {"prompt": "c", "input_extra": [{"text": "t"}, {"text": "u", "filename": "f"}]}, {"input_suffix": ""},
    {"input_suffix": None}, {"input_extra": [{"text": 1}]}, {"input_extra": [{"text": "t"}] * 257}, {"model": "demo"},
]  # fmt: skip
EMBEDDINGS: Bodies = [
    *({"input": given} for given in ("a", ["a"], [1, 2], [[1, 2], [3]], ["a", [1]])),
    *({"input": wrong} for wrong in ("", [], [""], [[]], [1.5], [-1], [True], [2**31], {"a": 1}, None, ["a"] * 2049)),
    {"input": "a", "truncate": True},
    {"input": "a", "dimensions": 4},
    {"input": "a", "encoding_format": "x"},
]
ASKING = {"type": "function_call", "id": "fc_1", "arguments": '{"city": "Oslo"}', "name": "weather"}
FUNCTION = {"type": "function", **FUNCTIONS[0], "strict": True}
RESPONSES: Bodies = [
    {}, {"model": "own"}, {"instructions": "Be brief.", "max_output_tokens": 9, "truncation": "auto", "store": True},
    {"tools": [FUNCTION, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "weather"}},
    {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}},
    {"reasoning": {"effort": "low"}, "top_logprobs": 2}, {"include": ["message.output_text.logprobs"]},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"}},
    {"text": {"format": {"type": "json_object"}}}, {"text": {"format": {"type": "json_schema", "name": "n"}}},
    {"instructions": "Be brief.", "input": [
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {**ASKING, "call_id": "a"}, {**ASKING, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "yes"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "no"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABother"},
        {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1",
         "content": [{"type": "output_text", "text": "Both.", "annotations": []}]},
        {"role": "user", "content": "Thanks."}]},
    {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"prompt": {"id": "p"}}, {"background": True},
    {"input": []}, {"input": None}, {"input": [{"id": "msg_1"}]}, {"input": [{"type": "item_reference", "id": "m"}]},
    {"input": [{"type": "computer_call", "id": "x"}]}, {"max_output_tokens": 0}, {"tool_choice": "required"},
    *({"input": [{"role": "user", "content": [part]}]} for part in (
        {"type": "input_file", "file_id": "f"}, {"type": "input_image", "image_url": "http://x/y.png"},
        {"type": "input_image", "file_id": "f"}, {"type": [], "text": "x"})),
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "clock"}},
    {"tool_choice": {"type": "web_search"}},
]  # fmt: skip
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": FUNCTIONS[0]["parameters"]}
USE = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
MESSAGES: Bodies = [
    {}, {"model": "own"}, {"messages": []}, {"max_tokens": None}, {"max_tokens": 0}, {"options": {"top_p": 2}},
    {"system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=a5145;"},
        {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "And brief."}],
     "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}, {"type": "web_search_20250305", "name": "search"}],
     "tool_choice": {"type": "tool", "name": "weather"}, "temperature": 0.5, "top_p": 0.25, "top_k": 3,
     "stop_sequences": ["END"], "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "me"},
     "service_tier": "auto", "exact": True, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
     "context_management": {"edits": []}},
    {"messages": [*HI, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."}, {**USE, "id": "a"}, {**USE, "id": "b"}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "no"}]},
            {"type": "tool_result", "tool_use_id": "c"}, {"type": "text", "text": "And now?"},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}, "title": "T"}]}]},
    *({"tools": [TOOL], "tool_choice": {"type": kind}} for kind in ("auto", "any", "none")),
    {"tool_choice": {"type": "any"}}, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "clock"}},
    {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}, {"temperature": "hot"}, {"exact": "much"},
    {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}}, {"messages": [{"role": "tool"}]},
    {"thinking": {"type": "enabled"}, "model": "demo"},  # which cannot: no reason to refuse
    *(user(part) for part in (
        {"type": "video"}, {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
        {"type": "image", "source": {"type": "base64", "data": PICTURE}})),
]  # fmt: skip
OLLAMA: Bodies = [
    {"model": "own", "messages": [TERSE, *HI], "truncate": False, "shift": False, "options": {"num_keep": -1}},
    {"messages": [*HI, {"role": "assistant", "tool_calls": [
        {"function": {"name": "add", "arguments": {"a": 1}, "index": 0}}]},
                  {"role": "tool", "content": "3", "tool_name": "add"}]},
    {"model": "own"}, {"model": None}, {"model": None, "name": "able"}, {"think": True}, {"think": "loud"},
    {"think": True, "model": "demo"}, {"tools": [WEATHER]}, {"tools": [{"type": "function"}]}, {"format": "xml"},
    {"format": "json"}, {"format": SCHEMA}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2},
    {"top_logprobs": 21}, {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"content": "x"}]},
    {"messages": [{**HI[0], "images": [PICTURE]}]},
    *({"keep_alive": given} for given in (0, "0", -1, "-1m", 300, "5m", "1h30m", 1.5)),
    *({"keep_alive": wrong} for wrong in ("soon", "", "5 minutes", True, [1], "nan")),
    *({"options": options} for options in OPTIONS),
]  # fmt: skip
GENERATE: Bodies = [
    {"model": "own"}, {"template": "{{ .Prompt }}"}, {"system": "S", "context": [1, 2], "template": "T"}, {"raw": True},
    {"suffix": "y"}, {"suffix": "y", "raw": True}, {"images": [PICTURE]}, {"images": [PICTURE], "raw": True},
    {"raw": True, "system": "s"}, {"raw": True, "template": "t"}, {"raw": True, "context": [1]},
]  # fmt: skip
ASKED: dict[str, tuple[dict[str, Any], Bodies]] = {
    "/api/chat": ({"messages": HI}, OLLAMA),
    "/api/generate": ({"prompt": "x"}, GENERATE),
    "/api/embed": ({}, [{"input": "a"}, {"input": ["a"], "truncate": False, "keep_alive": "5m"}, {"input": [1]}]),
    "/api/embeddings": ({}, [{"prompt": "a"}, {"prompt": ""}]),
    "/v1/chat/completions": ({"messages": HI}, CHAT),
    "/v1/completions": ({"prompt": "x"}, COMPLETIONS),
    "/completion": ({"prompt": "x"}, NATIVE),
    "/infill": ({"model": "gap", "input_prefix": "a", "input_suffix": "b"}, INFILL),
    "/v1/embeddings": ({}, EMBEDDINGS),
    "/v1/responses": ({"input": "hi"}, RESPONSES),
    "/v1/messages": ({"messages": HI, "max_tokens": 64}, MESSAGES),
}


def changes(value: Any, default: Any) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    told = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: each for name, each in told.items() if each != getattr(default, name)}


def asked(manager: FakeManager) -> Iterator[str]:
    """What reached the model."""
    for request in manager.requests:
        sampling = changes(request.sampling, Sampling())
        told = changes(request, GenerationRequest()) | ({"sampling": sampling} if sampling else {})
        yield json.dumps(told, ensure_ascii=False)
    for inputs, truncate, normalize in manager.embedded:
        yield json.dumps([inputs, {"truncate": truncate, "normalize": normalize}])
    for _, overrides, keep_alive_s, _ in manager.leases:
        load = changes(overrides, type(overrides)())
        if load or keep_alive_s is not None:
            yield f"loaded with {load}, for {keep_alive_s} s"


def told(http: httpx.Client, manager: FakeManager) -> Iterator[str]:
    for path, (base, bodies) in ASKED.items():
        for body in bodies:
            for kept in (manager.requests, manager.embedded, manager.leases):
                kept.clear()  # type: ignore[attr-defined]
            reply = http.post(path, json={"model": "able", "stream": False, **base, **body})
            written = json.dumps(body, ensure_ascii=False)
            yield f"{path} {written if len(written) < 2000 else written[:60] + '...'}"
            found = reply.json()
            error = (found.get("error") if isinstance(found, dict) else None) or ""
            message = error if isinstance(error, str) else error["message"]
            yield from (f"    {line}" for line in ([f"{reply.status_code}: {message}"] if message else asked(manager)))


def test_what_the_model_is_asked_or_the_refusal_is_as_recorded(
    http: httpx.Client, manager: FakeManager, tmp_path: Path
) -> None:
    path = demo_path()
    assert path is not None
    parameters = {"temperature": 0.2, "top_p": 0.5, "top_k": 7, "num_ctx": 64, "stop": ["END"]}
    own = entry_of(path, "own:latest", system="Be kind.", messages=TURNS, parameters=parameters, template=TEMPLATE)
    manager.catalog.known[own.name] = own
    gap = moe().add("tokenizer.ggml.fim_pre_token_id", U32, 5).write(tmp_path / "gap.gguf")
    manager.catalog.known["gap:latest"] = entry_of(gap, "gap:latest")
    text = "\n".join(told(http, manager)) + "\n"
    text = text.replace(json.dumps(TEMPLATE), '"TEMPLATE"').replace(PICTURE, "PICTURE")
    check_recorded("bodies", text)


@pytest.mark.parametrize(
    ("path", "kind", "begin"),
    [
        ("/api/chat", "application/json", b"{"),
        ("/v1/files", "multipart/form-data; boundary=x", b"--x\r\n"),
        (f"/api/blobs/sha256:{64 * '0'}", "application/octet-stream", b"GGUF"),
    ],
)
def test_a_body_that_stalls_is_refused(
    url: str, manager: FakeManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, kind: str, begin: bytes
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    monkeypatch.setattr(limits, "READ_S", 0.05)
    monkeypatch.setattr(manager.catalog, "blobs", BlobStore(), raising=False)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 99\r\n\r\n"
        connection.sendall(head.encode() + begin)
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 408")
