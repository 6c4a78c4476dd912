"""The client of `moegguf serve`: its address, its requests, its errors."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from moegguf.chat.client import Client, NoServerError, ServerError
from moegguf.errors import MoeggufError
from moegguf.settings import Host, Settings, parse_host

RESPONSES: dict[str, tuple[int, bytes]] = {
    "/api/ps": (200, b'{"models": []}'),
    "/lines": (200, b'{"a": 1}\n\n{"a": 2}\n'),
    "/faulty": (200, b'{"a": 1}\n{"error": "the process has ended"}\n'),
    "/missing": (404, b'{"error": "model \'x\' not found"}'),
    "/v1/missing": (404, b'{"error": {"message": "no such model", "type": "not_found_error"}}'),
    "/html": (200, b"<html>"),
    "/moved": (302, b""),
    "/cut": (200, b'{"a": 1}\n'),
}


class Handler(BaseHTTPRequestHandler):
    """Responds by path; records requests."""

    requests: list[tuple[str, str, dict[str, str], Any]]

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        sent = json.loads(self.rfile.read(length)) if length else None
        type(self).requests.append((self.command, self.path, dict(self.headers), sent))
        status, body = RESPONSES[self.path]
        self.send_response(status)
        self.send_header("Location", "http://192.0.2.1/")  # of a redirect
        self.send_header("Content-Length", str(len(body) + 90 * (self.path == "/cut")))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 (http.server's name)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")  # must not be used for loopback
    handler = type("Handled", (Handler,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    client = Client(Settings(host=Host(port=server.server_port), api_keys=("s3cret",)))
    client.requests = handler.requests  # type: ignore[attr-defined]
    yield client
    server.shutdown()
    thread.join()
    server.server_close()


def test_get_sends_the_key_and_returns_json(client: Client) -> None:
    assert client.get("/api/ps") == {"models": []}
    method, path, headers, body = client.requests[0]  # type: ignore[attr-defined]
    assert (method, path, body) == ("GET", "/api/ps", None)
    assert headers["Authorization"] == "Bearer s3cret"


def test_post_sends_json_and_returns_the_last_line_and_a_stream_each(client: Client) -> None:
    assert client.post("/lines", {"model": "dämo"}) == {"a": 2}
    assert list(client.stream("/lines")) == list(client.stream("/lines", {"q": 1})) == [{"a": 1}, {"a": 2}]
    method, _, headers, body = client.requests[0]  # type: ignore[attr-defined]
    assert (method, headers["Content-Type"], body) == ("POST", "application/json", {"model": "dämo"})


def test_an_error_line_raises_after_the_lines_before_it(client: Client) -> None:
    lines = client.stream("/faulty")
    assert next(lines) == {"a": 1}
    with pytest.raises(ServerError, match="the process has ended"):
        next(lines)
    with pytest.raises(ServerError, match="the process has ended"):
        client.post("/faulty", {})


@pytest.mark.parametrize(("path", "message"), [("/missing", "model 'x' not found"), ("/v1/missing", "no such model")])
def test_an_http_error_has_the_servers_message_and_status(client: Client, path: str, message: str) -> None:
    with pytest.raises(ServerError, match=message) as caught:
        client.get(path)
    assert caught.value.status == 404
    assert isinstance(caught.value, MoeggufError)


def test_another_program_at_the_address(client: Client) -> None:
    with pytest.raises(ServerError, match="not JSON"):
        client.get("/html")


def test_the_key_follows_no_redirect(client: Client) -> None:
    with pytest.raises(ServerError, match="302"):
        client.get("/moved")


def test_a_cut_response_is_an_error(client: Client) -> None:
    lines = client.stream("/cut")
    assert next(lines) == {"a": 1}
    with pytest.raises(NoServerError, match="lost the connection"):
        client.get("/cut")


def test_no_server_is_one_sentence_with_the_next_step() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        client = Client(Settings(host=Host(port=taken.getsockname()[1])))
        with pytest.raises(NoServerError) as caught:
            client.get("/api/ps")
    assert str(caught.value) == f"no server is running at {client.host.url}; start one with `moegguf serve`."


def test_a_silent_server_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(Settings(host=Host(port=silent.getsockname()[1])))
        with pytest.raises(NoServerError, match="does not answer"):
            client.get("/api/ps", timeout_s=0.05)


@pytest.mark.parametrize(
    ("listens", "url"),
    [
        ("0.0.0.0:8080", "http://127.0.0.1:8080"),
        ("[::]:8080", "http://[::1]:8080"),
        ("https://example.com/ai", "https://example.com:443/ai"),
        ("", "http://127.0.0.1:11434"),
    ],
)
def test_the_address(listens: str, url: str) -> None:
    assert Client(Settings(host=parse_host(listens))).host.url == url
