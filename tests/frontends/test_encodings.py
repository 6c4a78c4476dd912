"""Every API's encoding of the same answers: byte for byte as in `encodings/`, and by the types of the clients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anthropic.types
import httpx
import ollama
import openai.types.chat
import openai.types.responses
import pytest
from client_types import check, kinds_of
from fake_manager import FUNCTIONS, HI, HUB, FakeManager, changed, entry_of, objects
from recorded import check_recorded

from moegguf.engine.stats import Stats
from moegguf.errors import ExpertIOError
from moegguf.generate.request import Delta, PromptProgress, Timing, TokenLogprob, ToolCall
from moegguf.package import __version__

PROGRESS = (PromptProgress(10, 2, 6, 0.25), PromptProgress(10, 2, 10, 0.5))
CHANCE = TokenLogprob("hé", -0.5, (("x", -1.0), ("\ufffd", float("-inf"))))
CALLS = (ToolCall("c1", "weather", {"city": "Ås"}), ToolCall("c2", "clock", {}))
THINKING = (Delta(thinking="hm"), Delta(thinking="!"))
CUT: dict[str, Any] = {
    "finish": "length", "answer_tokens": 63, "cached_tokens": 0, "cut_messages": 2, "cut_tokens": 90, "n_shifts": 3,
}  # fmt: skip
# Name of the case: the script of the answer, and its timing.
CASES: dict[str, tuple[tuple[Any, ...], Timing]] = {
    "text": ((*PROGRESS, Delta(text="Hel"), Delta(text='lo "é"\n')), changed()),
    "calls": ((*THINKING, Delta(text="I look."), Delta(tool_calls=CALLS)), changed(thinking_tokens=2)),
    "calls alone": ((Delta(tool_calls=CALLS[:1]), Delta(tool_calls=CALLS[1:])), changed()),
    "thinking alone": (THINKING, changed()),
    "logprobs": ((Delta(text="hé", logprobs=(CHANCE,)), Delta(logprobs=(CHANCE,)), Delta(text="z")), changed()),
    "cut": ((Delta(text="Hel"),), changed(**CUT)),
    "stopped": ((Delta(text="Hel"),), changed(stop_string="END")),
    "nothing": (PROGRESS[:1], Timing(stats=Stats())),
    "error": ((Delta(text="Hel"), ExpertIOError("the disk is gone.")), changed()),
}
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
# Name of the file: path, body, and what the case asks for besides.
ASKED: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "ollama-chat": ("/api/chat", {"messages": HI, "tools": TOOLS, "think": True}, {"logprobs": {"logprobs": True}}),
    "ollama-generate": ("/api/generate", {"prompt": "hi"}, {"logprobs": {"logprobs": True}, "text": {"details": True}}),
    "openai-chat": (
        "/v1/chat/completions", {"messages": HI, "tools": TOOLS},
        {"logprobs": {"logprobs": True, "top_logprobs": 2}, "cut": {"stream_options": {"include_usage": True}, "n": 2},
         "calls": {"n": 2}, "text": {"return_progress": True}},
    ),
    "openai-completions": (
        "/v1/completions", {"prompt": "hi"},
        {"logprobs": {"prompt": ["one", [104, 105]], "echo": True, "logprobs": 2},
         "cut": {"prompt": ["one", "two"], "stream_options": {"include_usage": True}},
         "nothing": {"prompt": ["one", "two"], "echo": True},
         "stopped": {"prompt": ["one", "two"], "echo": True, "n": 2}},
    ),
    "llama-completion": (
        "/completion", {"prompt": "hi"},
        {"logprobs": {"n_probs": 2}, "text": {"return_progress": True}, "stopped": {"prompt": ["one", [104, 105]]},
         "cut": {"return_tokens": True, "seed": 3, "logit_bias": [[7, False]]}},
    ),
    "openai-responses": (
        "/v1/responses", {"input": "hi", "tools": [{"type": "function", **function} for function in FUNCTIONS]},
        {"logprobs": {"top_logprobs": 2}, "thinking alone": {"reasoning": {"summary": "auto"}},
         "calls": {"include": ["reasoning.encrypted_content"]}},
    ),
    "anthropic-messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 64,
         "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]},
        {"cut": {"max_tokens": 63}},
    ),
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "ollama-chat": ollama.ChatResponse, "ollama-generate": ollama.GenerateResponse,
    "openai-chat": openai.types.chat.ChatCompletion, "openai-completions": openai.types.Completion,
    "openai-responses": openai.types.responses.Response, "anthropic-messages": anthropic.types.Message,
}  # fmt: skip
STREAMED = WHOLE | {"openai-chat": openai.types.chat.ChatCompletionChunk}
EVENTS = {
    "openai-responses": kinds_of(openai.types.responses.ResponseStreamEvent),
    "anthropic-messages": kinds_of(anthropic.types.RawMessageStreamEvent),
}


CLAUDE = {"anthropic-version": "2023-06-01"}
TEXTS: dict[str, Any] = {"model": "demo", "input": ["a", "b"], "prompt": "a"}
# What has no answer of a model, in order: method, path, body and headers.
OTHERS: list[tuple[str, str, dict[str, Any] | None, dict[str, str]]] = [
    *(("GET", path, None, {}) for path in (
        "/", "/api/version", "/api/tags", "/api/ps", "/v1/models", "/v1/models/demo", f"/v1/models/{HUB}",
        "/v1/models/hf.co%2Fuser%2Frepo-GGUF%3AQ4_K_M", "/health", "/props", "/props?model=able", "/live?once=1",
        *(f"/v1/models/{name}" for name in ("nobody", "hf.co/a/b:c", "../../etc/passwd", "%2e%2e", "x" * 600)),
    )),
    *(("GET", f"/v1/models{query}", None, CLAUDE) for query in (
        "", "?limit=2", "?after_id=able:latest", "?before_id=mine:latest&limit=2", "/demo", "/nobody", "?limit=0",
        "?limit=1001", "?limit=x", "?after_id=nobody", "?after_id=demo:latest&before_id=x",
    )),
    *(("POST", path, TEXTS | more, {}) for path in ("/api/embed", "/v1/embeddings") for more in (
        {}, {"encoding_format": "base64"}, {"dimensions": 1}, {"dimensions": 3}, {"dimensions": 4}, {"input": "a"},
    )),
    *(("POST", "/api/embeddings", {"model": "demo", "prompt": text}, {}) for text in ("a", "")),
    *(("POST", "/tokenize", body, {}) for body in (
        {"content": "ab"}, {"content": "a", "with_pieces": True}, {"content": "a", "model": "able"},
        {"content": "a"},  # two models are loaded
    )),
    ("POST", "/tokenize", {"prompt": "ab", "add_special_tokens": False, "model": "demo"}, {}),
    ("POST", "/detokenize", {"tokens": [97, 98], "model": "demo"}, {}), ("GET", "/tokenizer_info?model=demo", None, {}),
    *(("POST", path, {"messages": HI, "input": "hi", "model": "demo"}, {}) for path in (
        "/v1/messages/count_tokens?beta=true", "/v1/responses/input_tokens",
    )),
    *(("POST", path, {"messages": HI, "input_prefix": "a", "input_suffix": "b", "model": "demo"}, {}) for path in (
        "/apply-template", "/infill",
    )),
    ("POST", "/apply-template", {"messages": HI}, {}), ("POST", "/rerank", {"query": "q", "documents": ["d"]}, {}),
    *(("POST", "/v1/rerank", {"model": "demo", "query": "q", **body}, {}) for body in (
        {"documents": ["dd", {"text": "d"}, "ddd"]}, {"documents": ["d", "dd"], "top_n": 1, "return_documents": True},
        {"texts": ["d", "dd"], "return_text": True}, {"documents": []}, {"documents": [1]},
    )),
    *(("GET", path, None, {}) for path in (
        "/slots?model=demo", "/slots?model=demo&fail_on_no_slot=1", f"/slots?model={HUB}", "/slots", "/props",
        "/health", "/api/ps",
    )),
]  # fmt: skip


def without_chance(text: str) -> str:
    """The text with the same ids, times and durations in every run."""
    text = re.sub(r"\b(msg|resp|rs|fc|chatcmpl|cmpl)([_-])[0-9a-f]{24,32}\b", r"\1\2ID", text)
    text = re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":1', text)
    text = text.replace(__version__, "VERSION")
    text = re.sub(r'"total_duration":\d+', '"total_duration":1', text)
    return re.sub(r'"(created_at|expires_at)":"[^"]+Z"', r'"\1":"TIME"', text)


def shown(reply: httpx.Response) -> str:
    return f"{reply.status_code} {reply.headers['content-type']}\n{without_chance(reply.text).strip()}\n\n"


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_encoded_as_recorded(http: httpx.Client, manager: FakeManager, name: str) -> None:
    path, body, more = ASKED[name]
    told = ""
    for case, (manager.script, manager.timing) in CASES.items():
        for stream in (False, True):
            reply = http.post(path, json={"model": "able", "stream": stream, **body, **more.get(case, {})})
            told += f"# {case}{', streamed' if stream else ''}: {shown(reply)}"
    check_recorded(name, told)


def test_what_has_no_answer_is_encoded_as_recorded(
    http: httpx.Client, manager: FakeManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    manager.catalog.known["broken:latest"] = entry_of(tmp_path / "broken.gguf", "broken:latest")
    told = ""
    for method, path, body, headers in OTHERS:
        told += f"# {method} {path[:80]} {json.dumps(body) if body else ''}{' as Claude' if headers else ''}: "
        told += shown(http.request(method, path, json=body, headers=headers))
    monkeypatch.setattr("fake_manager.STATS", Stats(read_errors=2))
    told += f"# with errors of reading: {shown(http.get('/health'))}"
    manager.catalog.known.clear()
    told += "".join(f"# no models: {shown(http.get('/v1/models', headers=each))}" for each in ({}, CLAUDE))
    check_recorded("others", told)
    assert not any(will_answer for path, *_, will_answer in manager.leases if path == "able:latest")


@pytest.mark.parametrize("name", WHOLE)
def test_answers_have_the_types_of_the_clients_packages(http: httpx.Client, manager: FakeManager, name: str) -> None:
    path, body, more = ASKED[name]
    for case, (manager.script, manager.timing) in CASES.items():
        if case == "error":
            continue
        asked = {"model": "able", **body, **more.get(case, {})}
        check(WHOLE[name], http.post(path, json={**asked, "stream": False}).json())
        for item in objects(http.post(path, json={**asked, "stream": True}).text):
            # The type of a completion knows no unfinished text, nor that of Ollama's a line of progress.
            if "prompt_progress" not in item and name != "openai-completions":
                check(EVENTS[name][item["type"]] if name in EVENTS else STREAMED[name], item)


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_has_its_type_as_its_name(http: httpx.Client, manager: FakeManager, name: str) -> None:
    path, body, _ = ASKED[name]
    for manager.script, manager.timing in CASES.values():
        text = http.post(path, json={"model": "able", "stream": True, **body}).text
        events = [event for event in text.split("\n\n") if event and not event.startswith("{")]
        assert all(re.match(r'event: ([\w.]+)\ndata: \{"type":"\1"', event) for event in events), text
