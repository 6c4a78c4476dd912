"""The examples of Ollama's API documentation, as `curl -d` sends them, and those of our own pages, at a real server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_manager import TEMPLATE
from servers import Server

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The location to get the weather for, e.g. Paris"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "format"],
        },
    },
}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "x", "arguments": {"a": "b"}}}]}
OPTIONS = {
    "num_keep": 5, "seed": 42, "num_predict": 20, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7,
    "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5,
    "frequency_penalty": 1.0, "penalize_newline": True, "stop": ["\n", "user:"], "numa": False, "num_ctx": 512,
    "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True, "num_thread": 1, "mirostat": 0,
    "mirostat_tau": 0.8, "mirostat_eta": 0.6, "tfs_z": 0.5, "low_vram": False, "vocab_only": False,
    "use_mlock": False, "logits_all": False, "f16_kv": True, "embedding_only": False,
}  # fmt: skip
SHORT = {"options": {"num_predict": 20, "seed": 101, "temperature": 0, "num_thread": 1}}
TURNS = [
    {"role": "user", "content": "why is the sky blue?"},
    {"role": "assistant", "content": "due to rayleigh scattering."},
    {"role": "user", "content": "how is that different than mie scattering?"},
]
WHY = "Why is the sky blue?"


@pytest.fixture(scope="module")
def models(server: Server) -> Iterator[None]:
    """The names that the examples use."""
    assert server.call("/api/copy", b'{"source": "demo", "destination": "llama3.2"}').text == ""
    server.call("/api/create", {"model": "llama3.1", "from": "tiny", "template": TEMPLATE, "stream": False})
    yield
    for name in ("llama3.2", "llama3.1"):
        reply = server.call("/api/delete", {"model": name}, method="DELETE")
        assert (reply.status, reply.text) == (200, "")


EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("/api/generate", {"prompt": WHY}),
    ("/api/generate", {"prompt": WHY, "stream": False, "options": OPTIONS}),
    ("/api/generate", {"prompt": "[INST] why is the sky blue? [/INST]", "raw": True, "stream": False, **SHORT}),
    ("/api/generate", {"prompt": "Respond using JSON", "format": "json", "stream": False, **SHORT}),
    ("/api/generate", {"prompt": "Respond using JSON", "format": PERSON, "stream": False, **SHORT}),
    ("/api/generate", {}),
    ("/api/generate", {"keep_alive": 0}),
    ("/api/chat", {"messages": TURNS[:1], **SHORT}),
    ("/api/chat", {"messages": TURNS, "stream": False, **SHORT}),
    ("/api/chat", {"messages": TURNS[:1], "stream": False, "format": PERSON, **SHORT}),
    ("/api/chat", {"messages": TURNS[:1], "tools": [WEATHER], "model": "llama3.1", "stream": False, **SHORT}),
    ("/api/chat", {"messages": [*TURNS[:1], CALLING, {"role": "tool", "content": "11 degrees", "tool_name": "x"}],
                   "tools": [WEATHER], "model": "llama3.1", **SHORT}),
    ("/api/chat", {"messages": []}),
    ("/api/chat", {"messages": [], "keep_alive": 0}),
    ("/api/show", {}),
    ("/api/embed", {"input": WHY}),
    ("/api/embed", {"input": [WHY, "Why is the grass green?"]}),
    ("/api/embeddings", {"prompt": "Here is an article about llamas..."}),
]  # fmt: skip


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("path", "body"), EXAMPLES, ids=lambda each: str(each)[:60])
def test_the_examples_are_answered(server: Server, path: str, body: dict[str, Any]) -> None:
    reply = server.call(path, json.dumps({"model": "llama3.2", **body}).encode())
    assert reply.status == 200, reply.text
    last = reply.lines[-1]
    if path in ("/api/chat", "/api/generate"):
        assert last["done"] is True and last["model"] == f"{body.get('model', 'llama3.2')}:latest"
        asks = body.get("prompt") or body.get("messages")
        assert (last.get("eval_count", 0) > 0) == bool(asks)
        if "format" in body:
            answer = last["response"] if path == "/api/generate" else last["message"]["content"]
            assert answer.lstrip().startswith("{")
            assert body["format"] == "json" or last["done_reason"] == "length" or json.loads(answer).keys() == {
                "age", "available",
            }  # fmt: skip


def test_examples_of_the_readme_and_the_servers_page(served: Server) -> None:
    root = Path(__file__).resolve().parents[2]
    text = "".join((root / page).read_text(encoding="utf-8") for page in ("README.md", "docs/server.md"))
    examples = re.findall(r"curl http://127\.0\.0\.1:11434(/\S+) -d '(.*)'", text)
    assert len(examples) >= 2
    for path, body in examples:
        assert served.call(path, body.encode()).status == 200
