"""Tests a real server's Ollama API (/api) with plain HTTP and with the `ollama` Python
client.

Also runs the curl examples of README.md and docs/server.md.
"""

import hashlib
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import ollama
import psutil
import pytest
from fake_manager import TEMPLATE
from servers import Server

ASKED = "What does moegguf do?"
QUESTION = {"role": "user", "content": ASKED}


def test_durations_and_counts_of_an_answer_add_up(server: Server) -> None:
    body = {"model": "demo", "messages": [QUESTION], "options": {"temperature": 0}}
    first = server.call("/api/chat", {**body, "stream": False}).json
    spent = sum(
        first.get(f"{name}_duration", 0) for name in ("load", "prompt_eval", "eval")
    )
    assert 0 < spent <= first["total_duration"]
    turn = [QUESTION, first["message"], {"role": "user", "content": "Why?"}]
    second = server.call("/api/chat", {**body, "messages": turn, "stream": False}).json
    assert second["prompt_cached_count"] >= first["prompt_eval_count"]
    assert (
        second["prompt_eval_count"]
        > first["prompt_eval_count"] + first["eval_count"] - 3
    )


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_empty_request_loads_and_keep_alive_0_unloads(
    server: Server, path: str
) -> None:
    # An earlier test may have loaded it with a longer context.
    server.call(path, {"model": "tiny", "keep_alive": 0})
    loaded = server.call(
        path, {"model": "tiny", "keep_alive": -1, "options": {"num_ctx": 256}}
    ).json
    assert (loaded["done"], loaded["done_reason"], loaded["model"]) == (
        True,
        "load",
        "tiny",
    )
    there = server.loaded()
    # Expires last.
    assert (
        next(iter(there)) == "tiny:latest"
        and there["tiny:latest"]["context_length"] == 256
    )
    assert datetime.fromisoformat(there["tiny:latest"]["expires_at"]).year > 2200
    worker = psutil.Process(there["tiny:latest"]["moe"]["pid"])
    assert worker.memory_info().rss > 0
    asked = {
        "model": "tiny",
        "prompt": "x",
        "options": {"num_ctx": 256, "num_predict": 1},
        "keep_alive": 0,
    }
    # keep_alive 0: unloaded after the answer.
    assert server.call("/api/generate", asked).lines[-1]["done"]
    gone = server.call(path, {"model": "tiny", "keep_alive": 0}).json
    assert (gone["done"], gone["done_reason"]) == (True, "unload")
    assert "tiny:latest" not in server.loaded()
    assert not worker.is_running()  # the process has exited, so its memory is free


def test_show_hides_long_arrays_unless_verbose(server: Server) -> None:
    shown = server.call("/api/show", {"name": "demo"}).json
    assert not shown.keys() & {"tensors", "license", "system", "messages"}
    assert all(
        not isinstance(value, list) or len(value) <= 5
        for value in shown["model_info"].values()
    )
    assert shown["model_info"]["general.parameter_count"] > 1_000_000
    verbose = server.call("/api/show", {"model": "demo", "verbose": True}).json
    assert len(verbose["model_info"]["tokenizer.ggml.tokens"]) > 100
    assert {"name", "type", "shape"} == set(verbose["tensors"][0])
    assert any(
        tensor["name"].endswith("ffn_gate_exps.weight") for tensor in verbose["tensors"]
    )
    assert (
        server.call("/api/show", {"model": "demo", "system": "mine"}).json["system"]
        == "mine"
    )


def test_fields_of_a_created_model_are_shown(server: Server) -> None:
    body = {
        "model": "made", "from": "demo", "system": "Be brief.", "template": TEMPLATE, "license": ["one", "two"],
        "parameters": {"temperature": 0.1, "stop": ["a", "b"]}, "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    steps = server.call("/api/create", body).lines
    try:
        assert steps[-1] == {"status": "success"}
        shown = server.call("/api/show", {"model": "made"}).json
        assert shown["messages"] == body["messages"]
        assert (
            shown["system"] == "Be brief."
            and shown["license"] == "one\ntwo"
            and shown["template"] == TEMPLATE
        )
        assert (
            shown["capabilities"] == ["completion", "tools", "thinking"]
            and shown["details"]["parent_model"]
        )
        assert (
            shown["parameters"].splitlines()[0] == 'stop                           "a"'
        )
        for line in ("SYSTEM", "PARAMETER temperature 0.1", "MESSAGE user", "LICENSE"):
            assert line in shown["modelfile"]
    finally:
        assert (
            server.call("/api/delete", {"name": "made"}, method="DELETE").status == 200
        )


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/create", {"model": "x", "from": "nobody"}, 404, "model 'nobody' not found"),
        ("/api/create", {"model": "x", "from": "demo", "adapters": {"a": "b"}}, 400, "digest"),
        ("/api/create", {"model": "demo", "from": "tiny"}, 400, "already in use"),
        ("/api/pull", {"model": "nobody"}, 404, "hf.co"),
    ],
)  # fmt: skip
def test_refused_creates_and_pulls_have_a_status_and_message(
    server: Server, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    reply = server.call(path, body)
    assert (reply.status, set(reply.json)) == (status, {"error"})
    assert words in reply.error


def test_blobs_are_stored_only_under_their_own_digest(server: Server) -> None:
    data = b"some bytes" * 1000
    good, wrong = (
        f"sha256:{hashlib.sha256(text).hexdigest()}" for text in (data, b"other")
    )
    assert server.call(f"/api/blobs/{good}", method="HEAD").status == 404
    assert server.call(f"/api/blobs/{good}", data).status == 201
    assert server.call(f"/api/blobs/{good}", data).status == 200
    assert server.call(f"/api/blobs/{good}", method="HEAD").status == 200
    mismatch = server.call(f"/api/blobs/{wrong}", data)
    assert mismatch.status == 400 and "digest" in mismatch.error
    assert server.call(f"/api/blobs/{wrong}", method="HEAD").status == 404
    for bad in (
        "sha256:../../etc/passwd",
        "sha256:" + "g" * 64,
        "md5:abc",
        "sha256:%2e%2e%2fx",
    ):
        assert server.call(f"/api/blobs/{bad}", data).status in (400, 404)
    kept = [path.name for path in (server.home / "blobs").iterdir()]
    assert good.replace(":", "-") in kept and not [
        name for name in kept if name.endswith(".partial")
    ]


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=60)


def test_generate_answers_whole_streamed_and_raw(client: ollama.Client) -> None:
    whole = client.generate("demo", ASKED, options={"temperature": 0})
    assert whole.response.startswith("moegguf runs Mixture-of-Experts models")
    parts = list(
        client.generate("demo", ASKED, options={"temperature": 0}, stream=True)
    )
    assert "".join(part.response for part in parts) == whole.response and parts[-1].done
    raw = client.generate(
        "demo", "moegguf runs", raw=True, options={"num_predict": 4, "temperature": 0}
    )
    assert (
        raw.response
        and raw.eval_count == 4
        and raw.done_reason == "length"
        and not raw.context
    )


def test_the_client_gets_an_answer_by_a_schema_and_embeddings(
    client: ollama.Client,
) -> None:
    person = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
    }
    said = client.chat(
        "demo", [QUESTION], format=person, options={"num_predict": 4, "temperature": 0}
    )
    assert (said.message.content or "").lstrip().startswith("{")
    assert len(client.embed("demo", [ASKED, "Who are you?"]).embeddings) == 2


def test_a_refused_delete_keeps_the_model_loaded(server: Server) -> None:
    server.call("/api/generate", {"model": "demo"})
    loaded = server.call("/api/ps").json
    refused = server.call("/api/delete", {"model": "demo"}, method="DELETE")
    assert refused.status == 400 and "ships with moegguf" in refused.text
    assert (
        server.call("/api/ps").json["models"][0]["name"] == loaded["models"][0]["name"]
    )


def test_models_are_copied_and_deleted_and_unknown_ones_get_errors(
    client: ollama.Client, server: Server
) -> None:
    client.copy("demo", "twin")
    assert "twin:latest" in {model.model for model in client.list().models}
    # Ollama's command-line program sends `name` together with an empty `model`.
    gone = server.call("/api/delete", {"model": "", "name": "twin"}, method="DELETE")
    assert gone.status == 200
    assert "twin:latest" not in {model.model for model in client.list().models}
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError):
            list(client.pull("hf.co/nobody/nothing", stream=stream))
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("twin")
    assert (
        caught.value.status_code == 404
        and "model 'twin' not found" in caught.value.error
    )


def test_create_makes_a_model_from_an_uploaded_file(
    client: ollama.Client, tiny: type
) -> None:
    path = tiny("tiny-qwen2moe")
    digest = client.create_blob(path)
    assert digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert client.create_blob(path) == digest
    steps = [
        step.status
        for step in client.create("sent", files={"model.gguf": digest}, stream=True)
    ]
    try:
        assert steps[-1] == "success"
        assert (
            client.generate(
                "sent", "Hi", raw=True, options={"num_predict": 2}
            ).eval_count
            == 2
        )
    finally:
        client.delete("sent")


def test_examples_of_the_readme_and_the_server_page_succeed(served: Server) -> None:
    root = Path(__file__).resolve().parents[2]
    text = "".join(
        (root / page).read_text(encoding="utf-8")
        for page in ("README.md", "docs/server.md")
    )
    examples = re.findall(r"curl http://127\.0\.0\.1:11434(/\S+) -d '(.*)'", text)
    assert len(examples) >= 2
    for path, body in examples:
        assert served.call(path, body.encode()).status == 200


def test_requests_of_copilot_are_answered(server: Server) -> None:
    """Tests the replies that Copilot depends on: a version of at least 0.6.4, the
    capability `tools`, the model's family and context length, and a streamed chat
    completion.
    """
    assert [
        int(part) for part in server.call("/api/version").json["version"].split(".")
    ] >= [0, 6, 4]
    shown = server.call("/api/show", {"model": "demo:latest"}).json
    assert "tools" in shown["capabilities"] and shown["details"]["family"]
    info: dict[str, Any] = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] > 0
    body = {
        "model": "demo:latest",
        "messages": [QUESTION],
        "stream": True,
        "max_tokens": 5,
    }
    assert (
        server.call("/v1/chat/completions", body).text.rstrip().endswith("data: [DONE]")
    )
