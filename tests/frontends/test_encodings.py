"""Every API's encoding of the same answers: byte for byte as in `encodings/`, and by the types of the clients.

`MOEGGUF_RECORD=1 pytest tests/frontends/test_encodings.py` writes the files anew; read the difference.
"""

from __future__ import annotations

import os
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
from fake_manager import FUNCTIONS, HI, FakeManager, changed, objects

from moegguf.engine.stats import Stats
from moegguf.errors import ExpertIOError
from moegguf.generate.request import Delta, PromptProgress, Timing, TokenLogprob, ToolCall

FOLDER = Path(__file__).with_name("encodings")
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
        {"logprobs": {"logprobs": True, "top_logprobs": 2}, "cut": {"stream_options": {"include_usage": True}},
         "text": {"return_progress": True}},
    ),
    "openai-completions": (
        "/v1/completions", {"prompt": "hi"},
        {"logprobs": {"prompt": ["one", [104, 105]], "echo": True, "logprobs": 2},
         "cut": {"prompt": ["one", "two"], "stream_options": {"include_usage": True}},
         "nothing": {"prompt": ["one", "two"], "echo": True}},
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


def without_chance(text: str) -> str:
    """The text with the same ids, times and durations in every run."""
    text = re.sub(r"\b(msg|resp|rs|fc|chatcmpl|cmpl)([_-])[0-9a-f]{24,32}\b", r"\1\2ID", text)
    text = re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":1', text)
    return re.sub(
        r'"created_at":"[^"]+Z"', '"created_at":"TIME"', re.sub(r'"total_duration":\d+', '"total_duration":1', text)
    )


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_encoded_as_recorded(http: httpx.Client, manager: FakeManager, name: str) -> None:
    path, body, more = ASKED[name]
    told = ""
    for case, (manager.script, manager.timing) in CASES.items():
        for stream in (False, True):
            reply = http.post(path, json={"model": "able", "stream": stream, **body, **more.get(case, {})})
            told += f"# {case}{', streamed' if stream else ''}: {reply.status_code} {reply.headers['content-type']}\n"
            told += without_chance(reply.text).strip() + "\n\n"
    file = FOLDER / f"{name}.txt"
    if os.environ.get("MOEGGUF_RECORD"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(told, encoding="utf-8")
    assert told == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ASKED)
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
