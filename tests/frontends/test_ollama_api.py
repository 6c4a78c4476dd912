"""/api on the wire: fields, units, omitted fields, refusals, and keep-alive."""

from datetime import datetime
from typing import Any

import psutil
import pytest
from fake_manager import TEMPLATE
from servers import Server

QUESTION = {"role": "user", "content": "What does moegguf do?"}


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


def test_ps_has_the_digest_and_details_of_tags(server: Server) -> None:
    server.call("/api/generate", {"model": "demo"})
    listed = {model["name"]: model for model in server.call("/api/tags").json["models"]}
    there = in_memory(server)["demo:latest"]
    assert there["digest"] == listed["demo:latest"]["digest"]
    assert there["details"].items() <= listed["demo:latest"]["details"].items()
    assert there["size"] > there["size_vram"] >= 0
    assert set(there["moe"]) >= {"hit_rate", "bytes_read", "pid"}


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
        ("/api/create", {"model": "x", "files": {"a.gguf": "sha256:../../x"}}, 400, "digest"),
        ("/api/copy", {"source": "nobody", "destination": "x"}, 404, "model 'nobody' not found"),
        ("/api/copy", {"source": "demo", "destination": "a b"}, 400, ""),
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
    import hashlib

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
