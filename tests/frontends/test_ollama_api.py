"""/api on the wire: fields, units, omitted fields, refusals, and keep-alive."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_manager import FakeCatalog, FakeManager, changed, entry_of, running
from pictures import base64_of, png
from servers import Reply, Server, call

from moegguf.generate.request import Delta, TokenLogprob, ToolCall
from moegguf.models.entry import ModelEntry
from moegguf.server.app import make_app
from moegguf.settings import Settings

QUESTION = {"role": "user", "content": "What does moegguf do?"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}"
    "</tool_call>{% endfor %}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)


@dataclass
class Scripted:
    """A server over a fake manager."""

    url: str
    manager: FakeManager

    def call(self, path: str, body: Any = None, **more: Any) -> Reply:
        return call(f"{self.url}{path}", body, **more)

    @property
    def ask(self) -> Any:
        return self.manager.requests[-1]


@pytest.fixture
def entry(tiny: Callable[..., Path]) -> ModelEntry:
    return entry_of(
        tiny("tiny-qwen2moe"),
        system="Be kind.",
        template=TEMPLATE,
        parameters={"temperature": 0.5, "stop": ["END"], "num_predict": 9},
        messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    )


@pytest.fixture
def scripted(entry: ModelEntry, tiny: Callable[..., Path]) -> Iterator[Scripted]:
    """Models `demo` (thinks, calls tools, has defaults) and `plain`."""
    catalog = FakeCatalog(entry, entry_of(tiny("tiny-qwen2moe"), "plain:latest"))
    manager = FakeManager(catalog)
    with running(make_app(manager, catalog, Settings())) as url:  # type: ignore[arg-type]
        yield Scripted(url, manager)


def test_the_version_parses(server: Server) -> None:
    version = server.call("/api/version").json["version"]
    assert re.fullmatch(r"\d+(\.\d+)*", version)
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


def test_a_chat_streams_lines_with_text_then_statistics(scripted: Scripted) -> None:
    reply = scripted.call("/api/chat", {"model": "demo", "messages": [QUESTION]})
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    *deltas, last = reply.lines
    assert [piece["message"] for piece in deltas] == [
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lo"},
    ]
    assert all(piece.keys() == {"model", "created_at", "message", "done"} for piece in deltas)
    assert all(piece["model"] == "demo:latest" and piece["done"] is False for piece in deltas)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert datetime.fromisoformat(last["created_at"]).tzinfo == UTC and last["created_at"].endswith("Z")


def test_statistics_are_nanoseconds_and_all_tokens_of_the_prompt(scripted: Scripted) -> None:
    last = scripted.call("/api/generate", {"model": "demo", "prompt": "x", "stream": False}).json
    assert last["load_duration"] == 125_000_000
    assert (last["prompt_eval_count"], last["prompt_cached_count"]) == (7, 2)
    assert (last["prompt_eval_duration"], last["eval_duration"], last["eval_count"]) == (250_000_000, 500_000_000, 3)
    assert isinstance(last["total_duration"], int) and last["total_duration"] > 0
    assert last["moe"]["hit_rate"] == 0.7 and last["moe"]["stall_duration"] == 500_000_000
    assert last["context"] == [1, 2, 3]
    assert "cut_messages" not in last


def test_zeros_are_omitted_and_what_was_cut_is_counted(scripted: Scripted) -> None:
    cut = {"cut_messages": 2, "cut_tokens": 90}
    scripted.manager.timing = changed(cached_tokens=0, answer_tokens=0, n_shifts=3, finish="length", **cut)
    last = scripted.call("/api/chat", {"model": "demo", "messages": [QUESTION], "stream": False}).json
    assert "eval_count" not in last and "prompt_cached_count" not in last
    assert last.items() >= {**cut, "context_shifts": 3, "done_reason": "length"}.items()


def test_real_statistics_add_up(server: Server) -> None:
    body = {"model": "demo", "messages": [QUESTION], "options": {"temperature": 0}}
    first = server.call("/api/chat", {**body, "stream": False}).json
    spent = sum(first.get(f"{name}_duration", 0) for name in ("load", "prompt_eval", "eval"))
    assert 0 < spent <= first["total_duration"]
    turn = [QUESTION, first["message"], {"role": "user", "content": "Why?"}]
    second = server.call("/api/chat", {**body, "messages": turn, "stream": False}).json
    assert second["prompt_cached_count"] >= first["prompt_eval_count"]
    assert second["prompt_eval_count"] > first["prompt_eval_count"] + first["eval_count"] - 3


def test_thinking_and_tool_calls_have_their_own_fields(scripted: Scripted) -> None:
    call_one, call_two = ToolCall("c1", "add", {"a": 1}), ToolCall("c2", "sub", {})
    scripted.manager.script = [
        Delta(thinking="hm"),
        Delta(text="x"),
        Delta(tool_calls=(call_one,)),
        Delta(tool_calls=(call_two,)),
    ]
    body = {"model": "demo", "messages": [QUESTION], "tools": [tool("add")], "think": True}
    lines = scripted.call("/api/chat", body).lines
    assert lines[0]["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "add", "arguments": {"a": 1}},
        {"index": 1, "name": "sub", "arguments": {}},
    ]
    whole = scripted.call("/api/chat", {**body, "stream": False}).json["message"]
    assert whole == {"role": "assistant", "content": "x", "thinking": "hm", "tool_calls": calls}
    assert scripted.ask.think is True and scripted.ask.tools == (tool("add"),)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def test_logprobs_are_valid_json(scripted: Scripted) -> None:
    scripted.manager.script = [Delta(text="é", logprobs=(TokenLogprob("é", -0.5, (("e", -math.inf),)),))]
    body = {"model": "demo", "prompt": "x", "logprobs": True, "top_logprobs": 1}
    line = scripted.call("/api/generate", body).lines[0]
    other = {"token": "e", "logprob": -9999.0, "bytes": [101]}
    assert line["logprobs"] == [{"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [other]}]
    assert scripted.ask.n_logprobs == 1
    scripted.call("/api/generate", {"model": "demo", "prompt": "x"})
    assert scripted.ask.n_logprobs is None


def test_entry_defaults_yield_to_the_request(scripted: Scripted) -> None:
    scripted.call("/api/chat", {"model": "demo", "messages": [QUESTION], "options": {"num_predict": 4}})
    ask = scripted.ask
    assert [message["content"] for message in ask.messages] == ["Be kind.", "a", "b", QUESTION["content"]]
    assert (ask.sampling.temperature, ask.sampling.max_tokens, ask.sampling.stop) == (0.5, 4, ("END",))
    assert ask.template == TEMPLATE and ask.truncate and ask.shift and ask.sampling.num_keep == 4
    own = {"role": "system", "content": "Be terse."}
    scripted.call(
        "/api/chat",
        {"model": "demo", "messages": [own, QUESTION], "truncate": False, "shift": False, "options": {"num_keep": -1}},
    )
    assert [message["content"] for message in scripted.ask.messages] == ["a", "b", "Be terse.", QUESTION["content"]]
    assert not scripted.ask.truncate and not scripted.ask.shift and scripted.ask.sampling.num_keep == -1


def test_messages_keep_what_templates_use(scripted: Scripted) -> None:
    calling = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}, "index": 0}}]}
    result = {"role": "tool", "content": "3", "tool_name": "add"}
    scripted.call("/api/chat", {"model": "plain", "messages": [QUESTION, calling, result]})
    assert scripted.ask.messages == (
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        result,
    )


def test_generate_with_template_raw_and_suffix(scripted: Scripted) -> None:
    scripted.call("/api/generate", {"model": "demo", "prompt": "x", "system": "S", "context": [1, 2], "template": "T"})
    assert scripted.ask.messages == ({"role": "system", "content": "S"}, {"role": "user", "content": "x"})
    assert scripted.ask.context == (1, 2) and scripted.ask.template == "T"
    last = scripted.call("/api/generate", {"model": "demo", "prompt": "x", "raw": True}).lines[-1]
    assert scripted.ask.prompt == "x" and scripted.ask.messages is None and "context" not in last


@pytest.mark.parametrize("more", [{"template": "t"}, {"system": "s"}, {"context": [1]}])
def test_raw_excludes_template_system_and_context(scripted: Scripted, more: dict[str, Any]) -> None:
    reply = scripted.call("/api/generate", {"model": "demo", "prompt": "x", "raw": True, **more})
    assert (reply.status, reply.error) == (400, "raw mode does not support template, system, or context")


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/api/chat", {"messages": [QUESTION], "think": True}, '"plain:latest" does not support thinking'),
        ("/api/chat", {"messages": [QUESTION], "tools": [tool("x")]}, "plain:latest does not support tools"),
        (
            "/api/chat",
            {"messages": [{**QUESTION, "images": [base64_of(png())]}]},
            '"plain:latest" does not support vision',
        ),
        ("/api/generate", {"prompt": "x", "images": ["aa"]}, '"plain:latest" does not support vision'),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, '"plain:latest" does not support insert'),
    ],
)
def test_missing_capabilities_are_refused_before_loading(
    scripted: Scripted, path: str, more: dict[str, Any], words: str
) -> None:
    reply = scripted.call(path, {"model": "plain", **more})
    assert (reply.status, reply.error) == (400, words)
    assert not scripted.manager.leases


MATRIX = [
    (None, None), (0, 0), ("0", 0), (-1, math.inf), ("-1m", math.inf), (300, 300), ("300", 300), ("5m", 300),
    ("1h30m", 5400), (1.5, 1.5),
]  # fmt: skip


@pytest.mark.parametrize(("given", "seconds"), MATRIX)
def test_keep_alive_in_all_its_forms(scripted: Scripted, given: Any, seconds: float | None) -> None:
    more = {} if given is None else {"keep_alive": given}
    for path, rest in (
        ("/api/chat", {"messages": [QUESTION]}),
        ("/api/generate", {"prompt": "x"}),
        ("/api/embed", {"input": "x"}),
        ("/api/embeddings", {"prompt": "x"}),
    ):
        assert scripted.call(path, {"model": "demo", **rest, **more}).status == 200
        assert scripted.manager.leases[-1][2] == seconds


@pytest.mark.parametrize("given", ["soon", "", "5 minutes", True, [], "nan"])
def test_an_invalid_keep_alive_is_refused(scripted: Scripted, given: Any) -> None:
    assert scripted.call("/api/chat", {"model": "demo", "messages": [QUESTION], "keep_alive": given}).status == 400


def in_memory(server: Server) -> dict[str, Any]:
    return {model["name"]: model for model in server.call("/api/ps").json["models"]}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_empty_request_loads_and_keep_alive_0_unloads(server: Server, path: str) -> None:
    loaded = server.call(path, {"model": "tiny"}).json
    assert (loaded["done"], loaded["done_reason"], loaded["model"]) == (True, "load", "tiny:latest")
    worker = psutil.Process(in_memory(server)["tiny:latest"]["moe"]["pid"])
    assert worker.memory_info().rss > 0
    gone = server.call(path, {"model": "tiny", "keep_alive": 0}).json
    assert (gone["done"], gone["done_reason"]) == (True, "unload")
    assert "tiny:latest" not in in_memory(server)
    assert not worker.is_running()  # so all of its memory is free


def test_keep_alive_0_unloads_after_the_answer(server: Server) -> None:
    last = server.call(
        "/api/generate", {"model": "tiny", "prompt": "x", "options": {"num_predict": 3}, "keep_alive": 0}
    )
    assert last.lines[-1]["done"]
    server.call("/api/generate", {"model": "tiny", "keep_alive": 0})  # waits for it to be gone
    assert "tiny:latest" not in in_memory(server)


def test_for_ever_is_a_far_date(server: Server) -> None:
    server.call("/api/generate", {"model": "tiny", "keep_alive": -1})
    expires = datetime.fromisoformat(in_memory(server)["tiny:latest"]["expires_at"])
    assert expires.year > 2200
    assert next(iter(in_memory(server))) == "tiny:latest"  # longest first
    server.call("/api/generate", {"model": "tiny", "keep_alive": 0})


def test_load_options_reach_the_model(server: Server) -> None:
    server.call("/api/generate", {"model": "tiny", "options": {"num_ctx": 256}})
    assert in_memory(server)["tiny:latest"]["context_length"] == 256
    server.call("/api/generate", {"model": "tiny", "keep_alive": 0})


@pytest.mark.parametrize("num_batch", [1, 64, 2048])
def test_num_batch_of_a_request_changes_no_process(server: Server, num_batch: int) -> None:
    server.call("/api/generate", {"model": "tiny"})
    before = {name: model["moe"]["pid"] for name, model in in_memory(server).items()}
    body = {"model": "tiny", "options": {"num_batch": num_batch, "num_predict": 1}, "stream": False}
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
        ("/api/create", {"model": "x", "from": "demo", "adapters": {"a": "b"}}, 400, "adapters"),
        ("/api/create", {"model": "demo", "from": "tiny"}, 400, "already in use"),
        ("/api/create", {"model": "x", "files": {"a.gguf": "sha256:../../x"}}, 400, "digest"),
        ("/api/copy", {"source": "nobody", "destination": "x"}, 404, "model 'nobody' not found"),
        ("/api/copy", {"source": "demo", "destination": "a b"}, 400, ""),
        ("/api/copy", {"source": "demo"}, 400, "destination"),
        ("/api/show", {"model": "nobody"}, 404, "model 'nobody' not found"),
        ("/api/pull", {"model": "nobody"}, 404, "hf.co"),
        ("/api/push", {"model": "demo"}, 501, "push is not supported"),
        ("/api/embed", {"model": "nobody", "input": "x"}, 404, "model 'nobody' not found"),
        ("/api/chat", {"messages": []}, 400, "model is required"),
        ("/api/chat", {"model": ""}, 400, "model is required"),
    ],
)  # fmt: skip
def test_refusals_have_a_status_and_message(
    server: Server, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    reply = server.call(path, body)
    assert (reply.status, set(reply.json)) == (status, {"error"})
    assert words in reply.error


def test_the_demo_cannot_be_deleted(server: Server) -> None:
    reply = server.call("/api/delete", {"model": "demo"}, method="DELETE")
    assert reply.status == 400 and "ships with moegguf" in reply.error


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


def test_embeddings_of_the_manager_are_passed_on(scripted: Scripted) -> None:
    reply = scripted.call("/api/embed", {"model": "demo", "input": ["a", "b"], "truncate": False}).json
    assert len(reply["embeddings"]) == 2 and reply["prompt_eval_count"] == 8 and reply["load_duration"] == 125_000_000
    assert scripted.manager.embedded[-1] == (["a", "b"], False, True)
    scripted.call("/api/embeddings", {"model": "demo", "prompt": "a"})
    assert scripted.manager.embedded[-1] == (["a"], True, False)
    assert scripted.call("/api/embeddings", {"model": "demo", "prompt": ""}).json == {"embedding": []}
