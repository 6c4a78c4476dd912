"""A Hugging Face hub on loopback: repositories in memory, the endpoints that
huggingface_hub calls, and faults on request.

Point HF_ENDPOINT at `FakeHub.url`. The answers are like the real hub's. The list of a
repository's files includes their sizes and digests. The reply to HEAD includes the
file's commit and linked ETag. GET redirects to a storage address that supports ranges.
Most errors about repositories and files include an X-Error-Code.
"""

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

CHUNK = 1 << 14
OTHERS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE", "MOEGGUF_MODELS",
)  # fmt: skip

Fault = Callable[["Handler", bytes], None]
"""Type of a function that answers one GET of a file's bytes instead of the hub's normal
reply."""


@dataclass
class FakeRepo:
    """One repository."""

    name: str
    files: dict[str, bytes]
    private: bool = False
    gated: bool = False
    # True: files have a SHA-256, as in large file storage. False: they have only git's
    # hash.
    large: bool = True
    # Files that the hub lists, but reports as missing when a client requests them.
    hidden: set[str] = field(default_factory=set)
    # {path: {"size" or "sha256": a wrong value that the hub reports}}.
    stated: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        content = "".join(
            f"{path} {hashlib.sha1(data).hexdigest()}\n"
            for path, data in sorted(self.files.items())
        )
        return hashlib.sha1(content.encode()).hexdigest()

    def sha256(self, path: str) -> str:
        return (
            self.stated.get(path, {}).get("sha256")
            or hashlib.sha256(self.files[path]).hexdigest()
        )

    def size(self, path: str) -> int:
        return self.stated.get(path, {}).get("size") or len(self.files[path])

    def git_hash(self, path: str) -> str:
        data = self.files[path]
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def etag(self, path: str) -> str:
        return self.sha256(path) if self.large else self.git_hash(path)

    def listing(self) -> dict[str, Any]:
        siblings = []
        for path in self.files:
            sibling: dict[str, Any] = {
                "rfilename": path,
                "size": self.size(path),
                "blobId": self.git_hash(path),
            }
            if self.large:
                sibling["lfs"] = {
                    "sha256": self.sha256(path),
                    "size": self.size(path),
                    "pointerSize": 134,
                }
            siblings.append(sibling)
        return {
            "_id": "1",
            "id": self.name,
            "sha": self.commit,
            "private": self.private,
            "siblings": siblings,
        }


class FakeHub:
    """A fake hub with its repositories."""

    TOKEN = "hf_" + "s" * 20

    def __init__(self) -> None:
        self.repos: dict[str, FakeRepo] = {}
        # (method, path, Range) of each GET and HEAD. Range is "" if the request has no
        # such header.
        self.requests: list[tuple[str, str, str]] = []
        self.tokens: list[str] = []
        # {path: answers to the next GETs of the file's bytes, one for each GET}.
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        # (status, headers) of the replies to the next requests for any repository's
        # list of files.
        self.listing_faults: list[tuple[int, dict[str, str]]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.hub = self  # type: ignore[attr-defined]
        self.thread = threading.Thread(
            target=self.server.serve_forever,
            kwargs={"poll_interval": 0.02},
            daemon=True,
        )
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def storage_url(self) -> str:
        """The hub's URL with another host name, because the real hub's storage is on
        another host. Clients do not send tokens there."""
        return f"http://localhost:{self.server.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> FakeRepo:
        self.repos[name.lower()] = repo = FakeRepo(name, files, **options)
        return repo

    def environment(self, home: Path) -> dict[str, str]:
        """Returns environment variables that make a process use this hub, and keep its
        models and caches below `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "MOEGGUF_HOME": str(home / "moegguf"),
            "OLLAMA_MODELS": str(home / "ollama"),
        }

    def gets(self, path: str) -> list[str]:
        """Returns the Range headers of all GETs of a file's bytes; "" for a GET without
        this header."""
        return [
            span
            for method, asked, span in self.requests
            if method == "GET" and asked.endswith(f"/storage/{path}")
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        """Replies with a read-only access token, as if in exchange for the refresh
        token in the request."""
        # The body of the request is not read, so the connection cannot be used again.
        self.close_connection = True
        self.say(
            200,
            body=json.dumps(
                {"access_token": self.hub.TOKEN, "expires_in": 1 << 20}
            ).encode(),
        )

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        try:
            if parts[:2] == ["api", "models"]:
                self.listing("/".join(parts[2:4]))
            elif len(parts) > 3 and parts[2] in ("resolve", "storage"):
                self.file(
                    "/".join(parts[:2]),
                    parts[2],
                    "/".join(parts[4 if parts[2] == "resolve" else 3 :]),
                )
            elif parts[0] == "round":
                self.say(302, {"Location": path})
            else:
                self.say(404)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def refused(self, repo: FakeRepo | None) -> bool:
        """Returns True after sending an error response, if the caller may not see the
        repository or the caller's token is wrong."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.tokens.append(token)
        if token and token != self.hub.TOKEN:
            self.say(
                401, {"X-Error-Message": "Invalid credentials in Authorization header"}
            )
        elif repo is None or (repo.private and not token):
            self.say(
                404 if token else 401,
                {
                    "X-Error-Code": "RepoNotFound",
                    "X-Error-Message": "Repository not found",
                },
            )
        else:
            return False
        return True

    def listing(self, name: str) -> None:
        if self.hub.listing_faults:
            status, headers = self.hub.listing_faults.pop(0)
            return self.say(status, headers)
        repo = self.hub.repos.get(name.lower())
        if not self.refused(repo):
            self.say(
                200,
                {"Content-Type": "application/json"},
                json.dumps(repo.listing()).encode(),
            )

    def file(self, name: str, place: str, path: str) -> None:
        repo = self.hub.repos.get(name.lower())
        if place == "storage":
            data, faults = repo.files[path], self.hub.faults[path]
            return faults.pop(0)(self, data) if faults else self.send_bytes(data)
        if self.refused(repo):
            return
        headers = {"X-Repo-Commit": repo.commit}
        if repo.gated:
            headers |= {
                "X-Error-Code": "GatedRepo",
                "X-Error-Message": "Access to this model is restricted",
            }
            return self.say(403 if self.headers.get("Authorization") else 401, headers)
        if path not in repo.files or path in repo.hidden:
            return self.say(
                404,
                headers
                | {
                    "X-Error-Code": "EntryNotFound",
                    "X-Error-Message": "Entry not found",
                },
            )
        headers |= {
            "X-Linked-Etag": f'"{repo.etag(path)}"',
            "X-Linked-Size": str(repo.size(path)),
        }
        headers |= {
            "ETag": f'"{repo.etag(path)}"',
            "Location": f"{self.hub.storage_url}/{name}/storage/{path}",
        }
        self.say(302, headers)

    def send_bytes(self, data: bytes) -> None:
        """Sends all of `data`, or the range that the request names.

        Sends status 416 if the range begins after the end of `data`.
        """
        span = self.headers.get("Range", "")
        if not span:
            return self.say(200, {"Accept-Ranges": "bytes"}, data)
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
        if start >= len(data):
            return self.say(416, {"Content-Range": f"bytes */{len(data)}"})
        self.say(
            206,
            {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"},
            data[start:end],
        )

    def say(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            for at in range(0, len(body), CHUNK):
                self.wfile.write(body[at : at + CHUNK])


def cut_after(n_bytes: int) -> Fault:
    """Returns a fault that closes the connection after n_bytes of the requested
    bytes."""

    def fault(handler: Handler, data: bytes) -> None:
        start = int(
            handler.headers.get("Range", "bytes=0-")
            .removeprefix("bytes=")
            .split("-")[0]
        )
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(data) - start))
        if start:
            handler.send_header(
                "Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"
            )
        handler.end_headers()
        handler.wfile.write(data[start : start + n_bytes])
        handler.close_connection = True

    return fault


def status(code: int, **headers: str) -> Fault:
    """Returns a fault that sends a status and headers, but no bytes."""
    return lambda handler, _: handler.say(
        code, {name.replace("_", "-"): value for name, value in headers.items()}
    )


def other_bytes(data: bytes) -> Fault:
    """Returns a fault that sends `data`, or the requested range of it, instead of the
    file's bytes."""
    return lambda handler, _: handler.send_bytes(data)


def without_ranges(handler: Handler, data: bytes) -> None:
    """Sends the whole file, and ignores the range of the request."""
    handler.say(200, {}, data)


def endless(handler: Handler, data: bytes) -> None:
    """Sends more bytes than the file contains, in chunks, without a length."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for part in (data, *[b"x" * CHUNK] * 64):
        handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    handler.close_connection = True


def redirect_loop(handler: Handler, _: bytes) -> None:
    handler.say(302, {"Location": "/round/and/round"})


@dataclass
class Gate:
    """A fault that sends `n_bytes` bytes, sets `reached`, and waits for `open` before
    it sends the rest.

    It waits at most 60 seconds.
    """

    n_bytes: int
    reached: threading.Event = field(default_factory=threading.Event)
    open: threading.Event = field(default_factory=threading.Event)

    def __call__(self, handler: Handler, data: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: self.n_bytes])
        self.reached.set()
        self.open.wait(60)
        handler.wfile.write(data[self.n_bytes :])


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.close()


@contextmanager
def hub_in_use(home: Path) -> Iterator[FakeHub]:
    """Yields a hub that this process uses. The process keeps its models, caches and
    tokens below `home` and does not find any others."""
    with running_hub() as hub, pytest.MonkeyPatch.context() as patch:
        for name in OTHERS:
            patch.delenv(name, raising=False)
        for name, value in hub.environment(home).items():
            patch.setenv(name, value)
        # huggingface_hub has already read these paths from the environment.
        for name in ("token", "stored_tokens"):
            patch.setattr(constants, f"HF_{name.upper()}_PATH", str(home / "hf" / name))
        yield hub
