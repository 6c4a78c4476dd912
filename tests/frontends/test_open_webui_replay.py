"""What Open WebUI and VS Code Copilot send and read, replayed against a real server."""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from servers import Server

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} <tool_call></tool_call>{% endif %}assistant: "
)


@pytest.fixture
def tooled(server: Server) -> Iterator[str]:
    """A model that calls tools, by its full name."""
    assert server.call("/api/create", {"model": "tooled", "from": "demo", "template": TEMPLATE}).status == 200
    yield "tooled:latest"
    assert server.call("/api/delete", {"model": "tooled"}, method="DELETE").status == 200


def test_open_webui(server: Server) -> None:
    """version, tags, ps, show, chat as a stream, and the unload of its admin page."""
    assert server.call("/").text == "Ollama is running"
    version = server.call("/api/version").json["version"]
    assert tuple(map(int, re.sub(r"^v|-.*", "", version).split("."))) > (0, 1)
    tags = {model["model"]: model for model in server.call("/api/tags").json["models"]}
    name = "demo:latest"  # it appends the tag itself
    assert tags[name]["digest"] and all(":" in each for each in tags)
    assert isinstance(server.call("/api/ps").json["models"], list)
    assert server.call("/api/show", {"model": name}).json["model_info"]

    body = {
        "model": name,
        "messages": [{"role": "user", "content": "What does moegguf do?"}],
        "stream": True,
        "options": {"temperature": 0.8, "num_ctx": 512, "stop": []},
        "keep_alive": "5m",
    }
    reply = server.call("/api/chat", body, Content_Type="application/json", Accept="text/event-stream")
    last = reply.lines[-1]
    rate = round(last["eval_count"] / (last["eval_duration"] / 10_000_000) * 100, 2)
    assert rate > 0 and last["prompt_eval_duration"] > 0 and last["total_duration"] > 0
    assert "".join(line["message"]["content"] for line in reply.lines)

    there = {model["model"]: model for model in server.call("/api/ps").json["models"]}
    assert datetime.fromisoformat(there[name]["expires_at"]).tzinfo is not None
    gone = server.call("/api/generate", {"model": name, "keep_alive": 0, "prompt": ""})
    assert gone.status == 200 and gone.json["done_reason"] == "unload"
    assert name not in {model["model"] for model in server.call("/api/ps").json["models"]}


def test_copilot(server: Server, tooled: str) -> None:
    """It wants 0.6.4, `tools` among the capabilities, and the context's length."""
    parts = [int(part) for part in server.call("/api/version").json["version"].split(".")]
    assert parts >= [0, 6, 4]
    assert tooled in {model["model"] for model in server.call("/api/tags").json["models"]}
    shown = server.call("/api/show", {"model": tooled}).json
    assert "tools" in shown["capabilities"]
    info: dict[str, Any] = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 2048
    assert shown["details"]["family"]
    body = {"model": tooled, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5}
    reply = server.call("/v1/chat/completions", body)
    assert reply.status == 200 and reply.text.rstrip().endswith("data: [DONE]")


def test_the_command_of_ollama(server: Server) -> None:
    """HEAD first; `name` beside an empty `model` in pull and delete; DELETE with a body."""
    assert server.call("/", method="HEAD").status == 200
    assert server.call("/api/version", method="HEAD").status == 200
    assert server.call("/api/tags", method="HEAD").status == 200
    assert server.call("/api/copy", {"source": "demo", "destination": "other"}).status == 200
    body = json.dumps({"model": "", "name": "other"}).encode()
    assert server.call("/api/delete", body, method="DELETE", Content_Type="application/json").status == 200
    missing = server.call("/api/show", {"model": "other", "name": ""})
    assert missing.status == 404 and "not found" in missing.error
    assert server.call("/api/me", {}).status == 404
