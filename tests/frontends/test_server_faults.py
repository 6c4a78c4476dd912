"""Tests a server with faulty requests, clients that disconnect, killed workers, and
signals that stop the server."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ollama
import psutil
import pytest
from fake_hub import Gate, running_hub
from fake_manager import FakeManager
from servers import Server, call, connected, post, serving
from waiting import until

from moegguf.generate.request import Delta
from moegguf.server import serve

QUESTION = {"role": "user", "content": "What does moegguf do?"}
ENDLESS = {
    "format": {"type": "string", "minLength": 100_000},
    "options": {"num_ctx": 32768, "num_predict": 30_000},
}
LONG = {
    "model": "tiny",
    "prompt": "x",
    "raw": True,
    "options": {"num_ctx": 4096, "num_predict": 4000},
}


def test_an_unread_stream_does_not_block_the_model(
    url: str, manager: FakeManager
) -> None:
    # 5 MB: more than a socket's buffers hold.
    manager.script = [Delta(text="x" * 1000)] * 5000
    connection = post(url, "/api/chat", {"model": "demo", "messages": [QUESTION]})
    try:
        until(lambda: manager.n_ended == 1)
    finally:
        connection.close()


def test_an_unexpected_error_is_logged_with_the_status_of_its_reply(
    url: str,
    manager: FakeManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(manager, "loaded", lambda: 1 // 0)
    with caplog.at_level("INFO", "moegguf"):
        assert call(f"{url}/api/ps").status == 500
        (line,) = until(
            lambda: [text for text in caplog.messages if "GET /api/ps" in text]
        )
    assert "GET /api/ps 500 " in line


def test_a_killed_worker_ends_all_its_streams_with_an_error(tmp_path: Path) -> None:
    together = threading.Barrier(9, timeout=60)
    endless = {"type": "string", "minLength": 100_000}
    with serving(tmp_path, "--parallel", "8", MOEGGUF_CONTEXT_LENGTH="2048") as server:
        client = ollama.Client(host=server.url)

        def stream(n: int) -> str:
            parts = client.generate(
                "demo",
                f"{n}",
                stream=True,
                format=endless,
                options={"num_predict": 30_000},
            )
            next(parts)
            together.wait()
            with pytest.raises(ollama.ResponseError) as error:
                for _ in parts:
                    pass
            return error.value.error

        left = client.generate(
            "demo", "x", stream=True, format=endless, options={"num_predict": 30_000}
        )
        next(left)
        left.close()  # cancels a pass, which llama.cpp logs as an error
        with ThreadPoolExecutor(8) as threads:
            streams = [threads.submit(stream, n) for n in range(8)]
            together.wait()
            os.kill(
                server.call("/api/ps").json["models"][0]["moe"]["pid"], signal.SIGKILL
            )
            said = {each.result(60) for each in streams}
        assert len(said) == 1 and "(killed by SIGKILL);" in said.pop()
        again = {
            "model": "demo",
            "prompt": "x",
            "options": {"num_predict": 2},
            "stream": False,
        }
        assert server.call("/api/generate", again).json["eval_count"] > 0


@pytest.mark.parametrize("budget", ["2%", "0", 0, -1, "50", 50, "7 B", "lots", "1KiB"])
def test_invalid_budgets_get_a_400(server: Server, budget: str | int) -> None:
    assert (
        server.call("/api/generate", {"model": "demo", "keep_alive": 60}).status == 200
    )
    reply = server.call(
        "/budget", {"model": "demo", "expert_cache": budget}, method="PUT"
    )
    assert reply.status == 400 and "expert_cache" in reply.error
    assert ('did you mean "50%"' in reply.error) == (str(budget) == "50")
    asked = {
        "model": "demo",
        "prompt": "x",
        "options": {"expert_cache": budget, "num_predict": 1},
    }
    for path in ("/api/generate", "/api/embed"):
        reply = server.call(path, {**asked, "input": "x", "stream": False})
        assert reply.status == 400 and "expert_cache" in reply.error
    assert (
        server.call(
            "/api/generate", {"model": "demo", "prompt": "x", "stream": False}
        ).status
        == 200
    )


def test_budgets_of_missing_tiers_and_models_are_refused(server: Server) -> None:
    server.call("/api/generate", {"model": "demo", "keep_alive": 60})
    reply = server.call("/budget", {"model": "demo", "vram_cache": "50%"}, method="PUT")
    assert reply.status == 400 and "no slots in VRAM" in reply.error
    for name in ("nobody", "tiny-that-is-not-there"):
        reply = server.call(
            "/budget", {"model": name, "expert_cache": "50%"}, method="PUT"
        )
        assert (
            reply.status == 404
            and "path" not in reply.error
            and "MOEGGUF" not in reply.error
        )


def test_a_content_length_of_a_gigabyte_gets_a_413_before_the_body(
    server: Server,
) -> None:
    with connected(server.url) as connection:
        head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n"
        connection.sendall(head + b"x" * 1000)
        assert b" 413 " in connection.recv(100)


NAMES = [
    "../../etc/passwd", "/etc/passwd", "..", "a\0b", "%2e%2e/%2e%2e/etc/passwd", "x" * 10_000, "a/../b", "ａ．．／ｂ",
    "C:\\x", "demo:../x", "sha256:../../x", "~root/x", "file:///etc/passwd", "hf.co/../x/y", ".", "a b",
    "{{x}}", "-x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_paths_as_model_names_are_refused(server: Server, name: str) -> None:
    for path, body in (
        ("/api/chat", {"model": name, "messages": [QUESTION]}),
        ("/api/show", {"model": name}),
        ("/api/create", {"model": name, "from": "demo"}),
        ("/api/create", {"model": "x", "from": name}),
        ("/api/copy", {"source": "demo", "destination": name}),
    ):
        reply = server.call(path, body)
        assert reply.status in (400, 404), (path, reply.text)
    names = {model["name"] for model in server.call("/api/tags").json["models"]}
    assert {"demo:latest", "tiny:latest"} <= names and not {
        f"{name}:latest",
        name,
        "x:latest",
    } & names


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_time_and_its_streams_with_an_error(
    tmp_path: Path, tiny: Callable[..., Path], signal_number: int
) -> None:
    with serving(tmp_path, models={"tiny": tiny("tiny-qwen2moe")}) as server:
        running = post(server.url, "/api/generate", {**LONG, **ENDLESS})
        assert b"200 OK" in running.recv(50)
        queued = post(server.url, "/api/generate", LONG)
        until(lambda: server.call("/api/ps").json["models"][0]["moe"]["queue"] == 1)
        worker, begun = (
            server.call("/api/ps").json["models"][0]["moe"]["pid"],
            time.monotonic(),
        )
        server.process.send_signal(signal_number)
        check_ended(running, queued)
        assert server.process.wait(15) == 0
        assert time.monotonic() - begun < 11
        until(lambda: not psutil.pid_exists(worker))
    assert server.log() == ""


def test_downloads_get_an_error_when_the_server_ends(tmp_path: Path) -> None:
    gate, name = Gate(1 << 20), "hf.co/user/repo-GGUF:Q8_0"
    with running_hub() as hub:
        hub.add("user/repo-GGUF", {"x-Q8_0.gguf": b"GGUF" + bytes(4 << 20)})
        hub.faults["x-Q8_0.gguf"] = [gate] * 2
        try:
            with serving(
                tmp_path, **{**hub.environment(tmp_path), "HF_HUB_OFFLINE": "0"}
            ) as server:
                streamed = post(server.url, "/api/pull", {"model": name})
                assert b"200 OK" in streamed.recv(50)
                whole = post(server.url, "/api/pull", {"model": name, "stream": False})
                assert gate.reached.wait(20)
                server.process.send_signal(signal.SIGTERM)
                check_ended(streamed, whole)
                assert server.process.wait(15) == 0
            assert server.log() == ""
        finally:
            gate.open.set()
    kept = [path.stat().st_size for path in tmp_path.rglob("*.incomplete")]
    assert kept and max(kept) > 0  # the next pull resumes from this partial file


def check_ended(streamed: socket.socket, whole: socket.socket) -> None:
    """Asserts that both connections end with the error message that the server is
    shutting down.

    `streamed` is a stream that has begun; its last JSON line is this error. The reply
    `whole` has status 503.
    """
    ended, reply = (
        {"error": "the server is shutting down; try again later."},
        rest(whole),
    )
    assert reply.startswith(b"HTTP/1.1 503") and b"application/json" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2]) == ended
    assert (
        json.loads(
            [line for line in rest(streamed).splitlines() if line.startswith(b"{")][-1]
        )
        == ended
    )


def rest(connection: socket.socket) -> bytes:
    """Returns all bytes that arrive until the server closes the connection. Then closes
    the client's end, too."""
    connection.settimeout(20)
    with connection, connection.makefile("rb") as file:
        return file.read()


def test_connections_beyond_the_descriptors_are_refused_without_cpu_time(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, n_files=64) as server:
        process = psutil.Process(server.pid)
        connections = [connected(server.url) for _ in range(120)]
        before = process.cpu_times()
        until(lambda: process.num_fds() >= 30)
        for _ in range(10):
            threading.Event().wait(0.1)
        used = process.cpu_times()
        assert used.user + used.system - before.user - before.system < 0.5
        for connection in connections:
            # The server has already closed some connections beyond its limit.
            with contextlib.suppress(OSError):
                connection.sendall(
                    b"GET /api/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
        replies = []
        for connection in connections:
            with contextlib.suppress(OSError):
                replies.append(rest(connection))
        assert sum(reply.startswith(b"HTTP/1.1 200") for reply in replies) >= 20
        refused = [reply for reply in replies if reply.startswith(b"HTTP/1.1 503")]
        assert refused and all(
            b'{"error":"too many connections' in reply for reply in refused
        )
        assert server.call("/api/version").status == 200
    assert server.log() == ""


def test_a_warning_of_a_worker_is_logged_once(tmp_path: Path) -> None:
    """The server logs a warning once, although two loads of the model cause it."""
    contexts = tmp_path / "home" / "cache" / "contexts"
    contexts.parent.mkdir(parents=True)
    contexts.write_text("a file in place of the folder")
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "How are you? " * 100}],
        "max_tokens": 1,
    }
    with serving(
        tmp_path, MOEGGUF_CONTEXT_STORE="100MiB", MOEGGUF_LOG_FORMAT="json"
    ) as server:
        for _ in range(2):
            assert server.call("/v1/chat/completions", body).status == 200
            server.call("/api/generate", {"model": "demo", "keep_alive": 0})
    lines = [
        json.loads(line) for line in server.log().splitlines() if line.startswith("{")
    ]
    (warning,) = [line for line in lines if line["level"] == "warning"]
    assert warning["message"].startswith(
        f"demo:latest: contexts are not kept on disk: {contexts}: "
    )


def test_an_idle_server_ends_promptly_on_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        idle = connected(server.url)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - begun < 5
        idle.close()
    assert server.log() == ""


def test_disconnects_leave_no_open_descriptors(url: str, manager: FakeManager) -> None:
    process = psutil.Process()
    manager.script = [Delta(text="x"), asyncio.Event()]
    before = process.num_fds()
    for n in range(1, 201):
        connection = post(url, "/api/chat", {"model": "demo", "messages": [QUESTION]})
        connection.recv(50)
        connection.close()
        until(lambda n=n: manager.n_ended >= n)  # type: ignore[misc]
    until(lambda: process.num_fds() <= before + 5)
    assert manager.n_running == 0


def test_stalled_headers_of_a_second_request_close_the_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "HEADERS_S", 0.1)
    request, received = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b""
    with connected(url) as connection:
        connection.sendall(request)
        while not received.endswith(b"Ollama is running"):
            received += connection.recv(1000)
        connection.sendall(request[:20])  # the rest of the headers never arrives
        assert rest(connection) == b""
