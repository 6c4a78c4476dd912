"""Every API's encoding of the same answers: byte for byte as in `recorded/`, and by the types of the clients."""

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
from fake_manager import FUNCTIONS, HI, FakeManager, changed, entry_of, objects
from recorded_texts import check_recorded, recorded_lines

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
ASKING = re.compile(r"# ([A-Z]+) (\S+) (\{.*\})?( as Claude)?: \d{3} .*")
"""A line of others.txt, of what has no answer: method, path, body, and whether as Anthropic's clients send it."""


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
    for line in recorded_lines("others", "# "):
        if asked := ASKING.fullmatch(line):
            method, path, body, claude = asked.groups()
            found = http.request(method, path, json=body and json.loads(body), headers=CLAUDE if claude else {})
            told += f"# {method} {path} {body or ''}{claude or ''}: {shown(found)}"
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
