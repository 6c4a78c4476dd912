"""The examples of Ollama's docs/api.md and of the README as `curl -d` sends them: JSON without its Content-Type."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Reply, Server

TOOLS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer <tool_call>{...}</tool_call>.{% endif %}assistant: "
)
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
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
WHY = "Why is the sky blue?"


@pytest.fixture(scope="module")
def curl(server: Server) -> Iterator[Callable[..., Reply]]:
    """`curl(path, text)` with the names that the examples use."""
    for name in ("llama3.2", "mistral"):
        server.call("/api/copy", {"source": "demo", "destination": name})
    server.call("/api/copy", {"source": "tiny", "destination": "llama3.1"})
    server.call("/api/create", {"model": "tooled", "from": "tiny", "template": TOOLS_TEMPLATE, "stream": False})

    def call(path: str, text: str = "", **more: Any) -> Reply:
        return server.call(path, text.encode() or None, **more)

    yield call
    for name in ("llama3.2", "mistral", "llama3.1", "tooled"):
        assert server.call("/api/delete", {"model": name}, method="DELETE").status == 200


def test_generate_streaming(curl: Callable[..., Reply]) -> None:
    reply = curl("/api/generate", '{"model": "llama3.2", "prompt": "Why is the sky blue?"}')
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    assert all({"model", "created_at", "response", "done"} <= line.keys() for line in reply.lines)
    last = reply.lines[-1]
    assert last["done"] and last["response"] == "" and last["eval_count"] > 0 and last["done_reason"] == "stop"


def test_generate_without_streaming(curl: Callable[..., Reply]) -> None:
    reply = curl(
        "/api/generate", '{\n  "model": "llama3.2",\n  "prompt": "Why is the sky blue?",\n  "stream": false\n}'
    )
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert reply.json["response"] and reply.json["done"] is True


def test_generate_with_a_suffix(curl: Callable[..., Reply]) -> None:
    text = '{"model": "mistral", "prompt": "def compute_gcd(a, b):", "suffix": "    return result", "stream": false}'
    reply = curl("/api/generate", text)  # the demo has no tokens for it
    assert (reply.status, reply.error) == (400, '"mistral:latest" does not support insert')


@pytest.mark.parametrize("kind", ["json", PERSON])
def test_generate_json_mode_and_structured_outputs(curl: Callable[..., Reply], kind: Any) -> None:
    body = {"model": "llama3.1", "prompt": "Respond using JSON", "format": kind, "stream": False}
    reply = curl("/api/generate", json.dumps({**body, "options": {"num_predict": 40, "seed": 1}}))
    assert reply.json["response"].lstrip().startswith("{")
    if kind is PERSON and reply.json["done_reason"] == "stop":
        assert set(json.loads(reply.json["response"])) == {"age", "available"}


def test_generate_with_images(curl: Callable[..., Reply]) -> None:
    reply = curl("/api/generate", '{"model": "llama3.2", "prompt": "What is in it?", "images": ["iVBORw0KGgo="]}')
    assert (reply.status, reply.error) == (400, '"llama3.2:latest" does not support vision')


def test_generate_raw_and_reproducible(curl: Callable[..., Reply]) -> None:
    text = (
        '{"model": "mistral", "prompt": "[INST] why? [/INST]", "raw": true, "stream": false,'
        ' "options": {"seed": 101, "num_predict": 20}}'
    )
    first, second = (curl("/api/generate", text).json for _ in range(2))
    assert first["response"] == second["response"] and "context" not in first


def test_generate_with_every_option(curl: Callable[..., Reply]) -> None:
    options = {
        "num_keep": 5, "seed": 42, "num_predict": 20, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7,
        "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5,
        "frequency_penalty": 1.0, "penalize_newline": True, "stop": ["\n", "user:"], "numa": False, "num_ctx": 512,
        "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True, "num_thread": 1, "mirostat": 0,
        "mirostat_tau": 0.8, "mirostat_eta": 0.6, "tfs_z": 0.5, "low_vram": False, "vocab_only": False,
        "use_mlock": False, "logits_all": False, "f16_kv": True, "embedding_only": False,
    }  # fmt: skip
    body = {"model": "llama3.2", "prompt": WHY, "stream": False, "options": options}
    reply = curl("/api/generate", json.dumps(body))
    assert reply.status == 200 and 0 < reply.json["eval_count"] <= 20
    assert curl("/api/generate", json.dumps(body)).json["response"] == reply.json["response"]


@pytest.mark.parametrize(("path", "more"), [("/api/generate", ""), ("/api/chat", ', "messages": []')])
def test_load_and_unload(curl: Callable[..., Reply], path: str, more: str) -> None:
    loaded = curl(path, f'{{"model": "llama3.2"{more}}}').json
    assert loaded["done"] and loaded["done_reason"] == "load"
    gone = curl(path, f'{{"model": "llama3.2"{more}, "keep_alive": 0}}').json
    assert gone["done"] and gone["done_reason"] == "unload"


def test_chat_streaming_and_not(curl: Callable[..., Reply]) -> None:
    text = '{"model": "llama3.2", "messages": [{"role": "user", "content": "why is the sky blue?"}]%s}'
    reply = curl("/api/chat", text % "")
    assert reply.lines[0]["message"]["role"] == "assistant" and reply.lines[-1]["done"]
    whole = curl("/api/chat", text % ', "stream": false').json
    assert whole["message"]["content"] and whole["total_duration"] > 0


def test_chat_with_history_and_seed(curl: Callable[..., Reply]) -> None:
    messages = [
        {"role": "user", "content": "why is the sky blue?"},
        {"role": "assistant", "content": "due to rayleigh scattering."},
        {"role": "user", "content": "how is that different than mie scattering?"},
    ]
    body = {"model": "llama3.2", "messages": messages, "stream": False}
    body["options"] = {"seed": 101, "temperature": 0, "num_predict": 20}
    assert len({curl("/api/chat", json.dumps(body)).json["message"]["content"] for _ in range(2)}) == 1


def test_chat_structured_outputs(curl: Callable[..., Reply]) -> None:
    message = {"role": "user", "content": "Ollama is 22 years old and busy. Return a JSON object."}
    options = {"temperature": 0, "num_predict": 40}
    body = {"model": "llama3.1", "messages": [message], "stream": False, "format": PERSON, "options": options}
    assert curl("/api/chat", json.dumps(body)).json["message"]["content"].lstrip().startswith("{")


def test_chat_with_images(curl: Callable[..., Reply]) -> None:
    message = {"role": "user", "content": "what is in this image?", "images": ["iVBORw0KGgo="]}
    reply = curl("/api/chat", json.dumps({"model": "llama3.2", "messages": [message]}))
    assert (reply.status, reply.error) == (400, '"llama3.2:latest" does not support vision')


def test_chat_with_tools(curl: Callable[..., Reply]) -> None:
    body: dict[str, Any] = {
        "model": "llama3.2",
        "messages": [{"role": "user", "content": "What is the weather today in Paris?"}],
        "stream": False,
        "tools": [WEATHER],
        "options": {"num_predict": 20},
    }
    reply = curl("/api/chat", json.dumps(body))
    assert (reply.status, reply.error) == (400, "llama3.2:latest does not support tools")
    reply = curl("/api/chat", json.dumps({**body, "model": "tooled"}))
    assert reply.status == 200 and reply.json["message"]["role"] == "assistant"
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "x", "arguments": {"a": "b"}}}]}
    more = [*body["messages"], calling, {"role": "tool", "content": "11 degrees", "tool_name": "x"}]
    assert curl("/api/chat", json.dumps({**body, "model": "tooled", "messages": more})).status == 200


def test_create_from_a_name_and_from_files(curl: Callable[..., Reply]) -> None:
    text = '{"model": "mario", "from": "llama3.2", "system": "You are Mario from Super Mario Bros."}'
    assert curl("/api/create", text).lines[-1] == {"status": "success"}
    assert curl("/api/delete", '{"model": "mario"}', method="DELETE").status == 200
    digest = f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
    assert curl(f"/api/blobs/{digest}", method="HEAD").status == 404
    assert curl(f"/api/blobs/{digest}", "other weights").status == 400
    assert curl("/api/create", json.dumps({"model": "mine", "files": {"test.gguf": digest}})).status == 404
    assert curl(f"/api/blobs/{digest}", "weights").status == 201
    assert curl("/api/create", json.dumps({"model": "mine", "files": {"test.gguf": digest}})).status == 400


def test_quantize_is_refused(curl: Callable[..., Reply]) -> None:
    reply = curl("/api/create", '{"model": "q", "from": "llama3.2", "quantize": "q4_K_M"}')
    assert reply.status == 400 and "quantize" in reply.error


def test_list_show_ps_and_version(curl: Callable[..., Reply]) -> None:
    names = [model["name"] for model in curl("/api/tags").json["models"]]
    assert {"llama3.2:latest", "mistral:latest", "demo:latest"} <= set(names)
    shown = curl("/api/show", '{"model": "llama3.2"}').json
    assert {"modelfile", "parameters", "template", "details", "model_info", "capabilities"} <= shown.keys()
    curl("/api/generate", '{"model": "mistral"}')
    running = {model["name"]: model for model in curl("/api/ps").json["models"]}
    assert running["mistral:latest"].keys() >= {"model", "size", "digest", "details", "expires_at", "size_vram"}
    assert curl("/api/version").json["version"]


def test_copy_and_delete(curl: Callable[..., Reply]) -> None:
    assert curl("/api/copy", '{"source": "llama3.2", "destination": "llama3-backup"}').text == ""
    reply = curl("/api/delete", '{"model": "llama3-backup"}', method="DELETE")
    assert (reply.status, reply.text) == (200, "")
    assert curl("/api/delete", '{"model": "llama3-backup"}', method="DELETE").status == 404


def test_pull_and_push(curl: Callable[..., Reply]) -> None:
    assert "error" in curl("/api/pull", '{"model": "llama3.9"}').json
    assert curl("/api/push", '{"model": "mattw/pygmalion:latest"}').json == {"error": "push is not supported"}


def test_embed_one_and_many(curl: Callable[..., Reply]) -> None:
    one = curl("/api/embed", '{"model": "llama3.1", "input": "Why is the sky blue?"}').json
    assert len(one["embeddings"]) == 1 and one["prompt_eval_count"] > 0
    many = curl(
        "/api/embed", '{"model": "llama3.1", "input": ["Why is the sky blue?", "Why is the grass green?"]}'
    ).json
    assert len(many["embeddings"]) == 2
    assert many["embeddings"][0] == pytest.approx(one["embeddings"][0], abs=1e-4)
    old = curl("/api/embeddings", '{"model": "llama3.1", "prompt": "Here is an article about llamas..."}').json
    assert len(old["embedding"]) == len(one["embeddings"][0])


def test_examples_of_the_readme_and_the_servers_page(served: Server) -> None:
    root = Path(__file__).resolve().parents[2]
    text = "".join((root / page).read_text(encoding="utf-8") for page in ("README.md", "docs/server.md"))
    examples = re.findall(r"curl http://127\.0\.0\.1:11434(/\S+) -d '(.*)'", text)
    assert len(examples) >= 2
    for path, body in examples:
        assert served.call(path, body.encode()).status == 200
