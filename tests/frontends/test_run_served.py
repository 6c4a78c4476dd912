"""`moegguf run` beside a running server: the server answers when it has the model, as a model loaded here would."""

import http.server
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, TinyModel
from servers import Server

DEMO = ("run", "demo", "What does moegguf do?", "--temperature", 0, "-n", 8)


@pytest.fixture(autouse=True)
def _unload(server: Server) -> Any:
    """No model is loaded before and after a test, also of those that other tests have left."""
    for name in loaded(server):
        server.call("/api/generate", {"model": name, "keep_alive": 0})
    yield
    server.call("/api/generate", {"model": "demo", "keep_alive": 0})


def loaded(server: Server) -> list[str]:
    return [model["name"] for model in server.call("/api/ps").json["models"]]


def labels(stderr: str) -> list[str]:
    return [line.partition(":")[0] for line in stderr.splitlines()]


def test_the_server_answers_and_it_looks_the_same(here: Command, server: Server) -> None:
    served = here(*DEMO, "-v", "--keepalive", "9m", MOEGGUF_HOST=server.url)
    assert (served.returncode, loaded(server)) == (0, ["demo:latest"]), served.stderr
    alone = here(*DEMO, "-v", "--local", MOEGGUF_HOST=server.url)
    assert served.stdout == alone.stdout
    assert labels(served.stderr) == [*labels(alone.stderr), "answered by"]
    assert re.search(rf"answered by: +{server.url}\n", served.stderr)
    quiet = here(*DEMO, "--format", "json", "--system-prompt", "Be brief.", MOEGGUF_HOST=server.url)
    assert (quiet.returncode, quiet.stderr) == (0, "") and quiet.stdout.startswith("{")
    assert server.call("/api/ps").json["models"][0]["moe"]["pid"]


def test_what_only_works_here_stays_here(here: Command, server: Server, tiny: TinyModel, tmp_path: Path) -> None:
    for option in (("--local",), ("--expert-cache", "50%"), ("-t", "1"), ("--policy", "lru"), ("--no-prefetch",)):
        assert here(*DEMO, *option, MOEGGUF_HOST=server.url).returncode == 0
    assert here("run", tiny(), "x", "-n", 2, MOEGGUF_HOST=server.url).returncode == 0
    own = {"MOEGGUF_HOME": str(tmp_path), "MOEGGUF_HOST": server.url}
    here("cp", "demo", "unknown-to-the-server", **own)
    assert here("run", "unknown-to-the-server", "x", "-n", 2, **own).returncode == 0
    assert loaded(server) == []


def test_errors_of_the_server_are_errors_of_the_command(here: Command, server: Server) -> None:
    done = here("run", "demo", "hello", "--think", MOEGGUF_HOST=server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*does not support thinking.*\n", done.stderr)
    for name in ("nothing-of-that-name", "~nobody-of-that-name/x", "x" * 300):
        done = here("run", name, "hello", MOEGGUF_HOST=server.url)
        assert (done.returncode, done.stdout) == (1, "") and "unexpected" not in done.stderr


def test_options_mean_the_same_there(here: Command, server: Server) -> None:
    ask = ("run", "demo", "count " * 220, "--temperature", 0, "--ctx", 256, "-n", 60, "-v")
    full = [here(*ask, "--no-context-shift", *more, MOEGGUF_HOST=server.url) for more in ((), ("--local",))]
    assert full[0].stdout == full[1].stdout and "answered by" in full[0].stderr
    assert "the context was full" in here(*ask, MOEGGUF_HOST=server.url).stderr
    here("run", "demo", "x", "-n", 2, "--ctx", 0, MOEGGUF_HOST=server.url)
    own = server.call("/api/show", {"model": "demo"}).json["model_info"]
    length = own[f"{own['general.architecture']}.context_length"]
    assert server.call("/api/ps").json["models"][0]["context_length"] == length


def test_what_was_left_out_is_said_and_the_shift_can_be_off(here: Command, server: Server) -> None:
    options = ("-c", 256, "-n", 300, "--format", '{"type": "string", "minLength": 4000}')
    done = here("run", "demo", "word " * 400, *options, MOEGGUF_HOST=server.url)
    assert done.returncode == 0 and re.fullmatch(
        r"prompt cut: \d+ tokens left out\nthe context was full.*: the model no longer knows the older half\n",
        done.stderr,
    )
    done = here("run", "demo", "hello", *options, "--no-context-shift", MOEGGUF_HOST=server.url)
    assert (done.returncode, done.stderr) == (0, "")


class Ollama(http.server.BaseHTTPRequestHandler):
    """Another program with the same API."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "0.33.0"}')

    def log_message(self, *_: Any) -> None:
        pass


def test_another_server_is_not_asked(here: Command) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ollama) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        done = here(*DEMO, MOEGGUF_HOST=f"127.0.0.1:{other.server_port}")
        other.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
