"""/api of a real server: on the wire, by the `ollama` Python client, and the examples of the documentation."""

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import ollama
import psutil
import pytest
from fake_manager import FUNCTIONS, TEMPLATE
from servers import Server

ASKED = "What does moegguf do?"
QUESTION = {"role": "user", "content": ASKED}


def test_real_statistics_add_up(server: Server) -> None:
    body = {"model": "demo", "messages": [QUESTION], "options": {"temperature": 0}}
    first = server.call("/api/chat", {**body, "stream": False}).json
    spent = sum(first.get(f"{name}_duration", 0) for name in ("load", "prompt_eval", "eval"))
    assert 0 < spent <= first["total_duration"]
    turn = [QUESTION, first["message"], {"role": "user", "content": "Why?"}]
    second = server.call("/api/chat", {**body, "messages": turn, "stream": False}).json
    assert second["prompt_cached_count"] >= first["prompt_eval_count"]
    assert second["prompt_eval_count"] > first["prompt_eval_count"] + first["eval_count"] - 3


def in_memory(server: Server) -> dict[str, Any]:
    return {model["name"]: model for model in server.call("/api/ps").json["models"]}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_empty_request_loads_and_keep_alive_0_unloads(server: Server, path: str) -> None:
    server.call(path, {"model": "tiny", "keep_alive": 0})  # other tests load it with a longer context
    loaded = server.call(path, {"model": "tiny", "keep_alive": -1, "options": {"num_ctx": 256}}).json
    assert (loaded["done"], loaded["done_reason"], loaded["model"]) == (True, "load", "tiny:latest")
    there = in_memory(server)
    assert next(iter(there)) == "tiny:latest" and there["tiny:latest"]["context_length"] == 256  # the longest first
    assert datetime.fromisoformat(there["tiny:latest"]["expires_at"]).year > 2200
    worker = psutil.Process(there["tiny:latest"]["moe"]["pid"])
    assert worker.memory_info().rss > 0
    asked = {"model": "tiny", "prompt": "x", "options": {"num_ctx": 256, "num_predict": 1}, "keep_alive": 0}
    assert server.call("/api/generate", asked).lines[-1]["done"]  # unloads it after the answer
    gone = server.call(path, {"model": "tiny", "keep_alive": 0}).json
    assert (gone["done"], gone["done_reason"]) == (True, "unload")
    assert "tiny:latest" not in in_memory(server)
    assert not worker.is_running()  # so all of its memory is free


def test_num_batch_of_a_request_changes_no_process(server: Server) -> None:
    server.call("/api/generate", {"model": "tiny"})
    before = {name: model["moe"]["pid"] for name, model in in_memory(server).items()}
    body = {"model": "tiny", "options": {"num_batch": 64, "num_predict": 1}, "stream": False}
    assert server.call("/api/generate", {**body, "prompt": "x", "raw": True}).status == 200
    assert server.call("/api/embed", {**body, "input": "x"}).status == 200
    assert server.call("/v1/chat/completions", {**body, "messages": [QUESTION]}).status == 200
    assert {name: model["moe"]["pid"] for name, model in in_memory(server).items()} == before
    server.call("/api/generate", {"model": "tiny", "keep_alive": 0})


def test_show_hides_long_arrays_unless_verbose(server: Server) -> None:
    shown = server.call("/api/show", {"name": "demo"}).json
    assert "tensors" not in shown and "license" not in shown and "system" not in shown
    assert all(not isinstance(value, list) or len(value) <= 5 for value in shown["model_info"].values())
    assert shown["model_info"]["general.parameter_count"] > 1_000_000
    verbose = server.call("/api/show", {"model": "demo", "verbose": True}).json
    assert len(verbose["model_info"]["tokenizer.ggml.tokens"]) > 100
    assert {"name", "type", "shape"} == set(verbose["tensors"][0])
    assert any(tensor["name"].endswith("ffn_gate_exps.weight") for tensor in verbose["tensors"])
    assert server.call("/api/show", {"model": "demo", "system": "mine"}).json["system"] == "mine"


def test_created_fields_are_shown_and_recreate_the_model(server: Server) -> None:
    body = {
        "model": "made", "from": "demo", "system": "Be brief.", "template": TEMPLATE, "license": ["one", "two"],
        "parameters": {"temperature": 0.1, "stop": ["a", "b"]}, "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    steps = server.call("/api/create", body).lines
    try:
        assert steps[-1] == {"status": "success"}
        shown = server.call("/api/show", {"model": "made"}).json
        assert shown["system"] == "Be brief." and shown["license"] == "one\ntwo" and shown["template"] == TEMPLATE
        assert shown["capabilities"] == ["completion", "tools", "thinking"] and shown["details"]["parent_model"]
        assert shown["parameters"].splitlines()[0] == 'stop                           "a"'
        for line in ("SYSTEM", "PARAMETER temperature 0.1", "MESSAGE user", "LICENSE"):
            assert line in shown["modelfile"]
    finally:
        assert server.call("/api/delete", {"name": "made"}, method="DELETE").status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/create", {"model": "x"}, 400, "neither 'from' or 'files'"),
        ("/api/create", {"model": "x", "from": "nobody"}, 404, "model 'nobody' not found"),
        ("/api/create", {"model": "x", "from": "demo", "quantize": "q4_K_M"}, 400, "quantize"),
        ("/api/create", {"model": "x", "from": "demo", "adapters": {"a": "b"}}, 400, "digest"),
        ("/api/create", {"model": "demo", "from": "tiny"}, 400, "already in use"),
        ("/api/copy", {"source": "demo"}, 400, "destination"),
        ("/api/show", {"model": "nobody"}, 404, "model 'nobody' not found"),
        ("/api/pull", {"model": "nobody"}, 404, "hf.co"),
        ("/api/push", {"model": "demo"}, 501, "push is not supported"),
    ],
)  # fmt: skip
def test_refusals_have_a_status_and_message(
    server: Server, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    reply = server.call(path, body)
    assert (reply.status, set(reply.json)) == (status, {"error"})
    assert words in reply.error


def test_blobs_are_kept_by_their_digest_only(server: Server) -> None:
    data = b"some bytes" * 1000
    good, wrong = (f"sha256:{hashlib.sha256(text).hexdigest()}" for text in (data, b"other"))
    assert server.call(f"/api/blobs/{good}", method="HEAD").status == 404
    assert server.call(f"/api/blobs/{good}", data).status == 201
    assert server.call(f"/api/blobs/{good}", data).status == 200
    assert server.call(f"/api/blobs/{good}", method="HEAD").status == 200
    mismatch = server.call(f"/api/blobs/{wrong}", data)
    assert mismatch.status == 400 and "digest" in mismatch.error
    assert server.call(f"/api/blobs/{wrong}", method="HEAD").status == 404
    for bad in ("sha256:../../etc/passwd", "sha256:" + "g" * 64, "md5:abc", "sha256:%2e%2e%2fx"):
        assert server.call(f"/api/blobs/{bad}", data).status in (400, 404)
    kept = [path.name for path in (server.home / "blobs").iterdir()]
    assert good.replace(":", "-") in kept and not [name for name in kept if name.endswith(".partial")]


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=60)


def test_generate_whole_streamed_and_raw(client: ollama.Client) -> None:
    whole = client.generate("demo", ASKED, options={"temperature": 0})
    assert whole.response.startswith("moegguf runs Mixture-of-Experts models")
    parts = list(client.generate("demo", ASKED, options={"temperature": 0}, stream=True))
    assert "".join(part.response for part in parts) == whole.response and parts[-1].done
    raw = client.generate("demo", "moegguf runs", raw=True, options={"num_predict": 4, "temperature": 0})
    assert raw.response and raw.eval_count == 4 and raw.done_reason == "length" and not raw.context


def test_copy_and_delete(client: ollama.Client, server: Server) -> None:
    client.copy("demo", "twin")
    assert "twin:latest" in {model.model for model in client.list().models}
    gone = server.call("/api/delete", {"model": "", "name": "twin"}, method="DELETE")  # as the command of Ollama does
    assert gone.status == 200
    assert "twin:latest" not in {model.model for model in client.list().models}
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError):
            list(client.pull("hf.co/nobody/nothing", stream=stream))
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("twin")
    assert caught.value.status_code == 404 and "model 'twin' not found" in caught.value.error


def test_a_model_is_made_from_an_uploaded_file(client: ollama.Client, tiny: type) -> None:
    path = tiny("tiny-qwen2moe")
    digest = client.create_blob(path)
    assert digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert client.create_blob(path) == digest
    steps = [step.status for step in client.create("sent", files={"model.gguf": digest}, stream=True)]
    try:
        assert steps[-1] == "success"
        assert client.generate("sent", "Hi", raw=True, options={"num_predict": 2}).eval_count == 2
    finally:
        client.delete("sent")


PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
WEATHER = {"type": "function", "function": FUNCTIONS[0]}
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


@pytest.mark.usefixtures("models")
def test_what_copilot_asks_for(server: Server) -> None:
    """0.6.4, `tools` among the capabilities, and the context's length."""
    assert [int(part) for part in server.call("/api/version").json["version"].split(".")] >= [0, 6, 4]
    shown = server.call("/api/show", {"model": "llama3.1:latest"}).json
    assert "tools" in shown["capabilities"] and shown["details"]["family"]
    info: dict[str, Any] = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] > 0
    body = {"model": "llama3.1:latest", "messages": TURNS[:1], "stream": True, "max_tokens": 5}
    assert server.call("/v1/chat/completions", body).text.rstrip().endswith("data: [DONE]")
