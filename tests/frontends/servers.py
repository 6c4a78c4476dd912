"""Starts `moegguf` as a separate process without a terminal, and `moegguf serve` on a
free port and offline."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terminal import moegguf_command

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]
TinyModel = Callable[..., Path]


def environment(**extra: str) -> dict[str, str]:
    """Returns the environment of a command: a few of the caller's variables, `extra`,
    and a MOEGGUF_HOST at which no server listens.

    The checkout is importable in this environment.
    """
    names = (
        "PATH",
        "HOME",
        "MOEGGUF_LIBRARY",
        "LANG",
        "XDG_DATA_HOME",
        "XDG_CACHE_HOME",
        "MOEGGUF_CONTEXT_STORE",
    )
    inherited = {name: value for name, value in os.environ.items() if name in names}
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MOEGGUF_HOST": "127.0.0.1:9",
    }
    return {**inherited, **own, **extra}


def completed(
    command: Sequence[str], stdin: str = "", **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns its exit code, stdout and stderr, read as UTF-8.
    `extra` is added to its environment."""
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        env=environment(**extra),
        timeout=120,
    )


@contextmanager
def started(*arguments: object, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """Yields a `moegguf` process with these arguments, in its own process group.

    Kills the group afterwards if the process is still running.
    """
    with subprocess.Popen(
        moegguf_command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment(**extra),
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


LISTENING = re.compile(r"listening on (http://\S+:(\d+))")


@dataclass(frozen=True)
class Reply:
    """A server's reply. `text` is the whole body."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def error(self) -> str:
        return str(self.json["error"])


@dataclass
class Server:
    """A running server. `home` is its MOEGGUF_HOME, and `models` its MOEGGUF_MODELS."""

    url: str
    pid: int
    process: subprocess.Popen[str]
    home: Path
    models: Path
    stderr_lines: list[str]

    def loaded(self) -> dict[str, Any]:
        """Returns {name: entry of /api/ps} for each model in memory. Models that other
        tests loaded are included."""
        return {model["name"]: model for model in self.call("/api/ps").json["models"]}

    def log(self) -> str:
        """Returns the lines that the server wrote to stderr after its address. They are
        complete once the server has exited.
        """
        return "".join(self.stderr_lines)

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        timeout: float = 60,
        **headers: str,
    ) -> Reply:
        """Sends a request, and returns the reply.

        `body` is sent as JSON with the content type of a form, as `curl -d` does. Bytes
        are sent unchanged.
        """
        return call(
            f"{self.url}{path}", body, method=method, timeout=timeout, **headers
        )


def call(
    url: str,
    body: Any = None,
    *,
    method: str | None = None,
    timeout: float = 60,
    **headers: str,
) -> Reply:
    data = (
        body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    )
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Reply(answer.status, dict(answer.headers), answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, dict(error.headers), error.read().decode())


@contextmanager
def serving(
    folder: Path,
    *arguments: str,
    models: Mapping[str, Path] | None = None,
    n_files: int = 1024,
    **extra: str,
) -> Iterator[Server]:
    """Yields a running server, and stops it afterwards.

    The server's files are in `folder`. models: {name: GGUF file}. Each of these files
    is linked into the server's folder of models. `n_files` limits the server's open
    files.
    """
    home, store = folder / "home", folder / "models"
    for path in (home, store):
        path.mkdir(parents=True, exist_ok=True)
    for name, path in (models or {}).items():
        (store / f"{name}.gguf").symlink_to(path)
    own = {
        "MOEGGUF_HOME": str(home),
        "MOEGGUF_MODELS": str(store),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    own |= {
        "MOEGGUF_LOG_LEVEL": "warning",
        "HF_HOME": str(folder / "hub"),
        "OLLAMA_MODELS": str(folder / "ollama"),
    }
    process = subprocess.Popen(
        [
            "sh",
            "-c",
            f'ulimit -n {n_files}; exec "$@"',
            "sh",
            *moegguf_command("serve", "--port", "0", *arguments),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment(**{**own, **extra}),
        start_new_session=True,
    )
    stderr_lines: list[str] = []
    # Reads continuously, so that a full pipe never blocks the server.
    reader = threading.Thread(
        target=lambda: stderr_lines.extend(process.stderr or ()),
        name="server-stderr",
        daemon=True,
    )
    try:
        url = _address(process)
        reader.start()
        yield Server(url, process.pid, process, home, store, stderr_lines)
        _end(process)
        reader.join(10)
    finally:
        _end(process)


def _address(process: subprocess.Popen[str]) -> str:
    """Returns the URL that the server prints once it is listening."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := LISTENING.search(line):
            return found[1]
    raise AssertionError(f"the server did not start: {''.join(seen)}")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def connected(url: str) -> socket.socket:
    """Returns a TCP connection to a server."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def post(url: str, path: str, body: Any) -> socket.socket:
    """Sends a POST request and returns the connection. The caller reads the reply."""
    connection, data = connected(url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection
