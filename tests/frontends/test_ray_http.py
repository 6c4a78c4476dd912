"""The APIs in front of Ray's replicas, without Ray: what they offer, and what they refuse."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from fake_manager import FakeCatalog, FakeManager, entry_of, running
from servers import call

from moegguf.models.catalog import demo_path
from moegguf.server.app import make_http


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    catalog = FakeCatalog(entry_of(demo_path()))
    with running(make_http(cast(Any, FakeManager(catalog)), cast(Any, catalog))) as found:
        yield found


def test_every_api_answers(url: str) -> None:
    assert call(url + "/").text == "Ollama is running"
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": False, "max_tokens": 5}
    assert call(url + "/api/chat", body).json["message"]["content"] == "Hello"
    assert call(url + "/v1/chat/completions", body).json["choices"][0]["message"]["content"] == "Hello"
    assert call(url + "/v1/messages", body).json["content"][0]["text"] == "Hello"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/pull"), ("POST", "/api/create"), ("POST", "/api/copy"), ("DELETE", "/api/delete"),
     ("POST", f"/api/blobs/sha256:{'a' * 64}"), ("GET", "/metrics"), ("GET", "/live")],
)  # fmt: skip
def test_what_only_moegguf_serve_has_is_refused_with_the_next_step(url: str, method: str, path: str) -> None:
    reply = call(url + path, method=method)
    assert reply.status == 501
    assert any(step in reply.error for step in ("serve deploy", "docs/deployment.md", "moegguf serve"))


def test_without_a_key_only_this_machine_may_use_it(url: str) -> None:
    assert call(url + "/api/tags", host="evil.example").status == 403
    assert call(url + "/api/tags", x_forwarded_for="10.1.2.3").status == 403


@pytest.mark.parametrize("url", [{"MOEGGUF_API_KEY": "secret"}], indirect=True)
def test_with_a_key_any_name_and_proxy_may(url: str) -> None:
    assert call(url + "/api/tags").status == 401
    proxied = {"authorization": "Bearer secret", "host": "models.example", "x_forwarded_for": "10.1.2.3"}
    assert call(url + "/api/tags", **proxied).status == 200
