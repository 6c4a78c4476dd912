"""Every API's bodies, and what the model is asked, or the refusal: `recorded/bodies.txt` has both.

A line there is a path and fields of its body besides those of BASE. "... N times" after an item of a list, or at the
end of a text, repeats it; "every field" stands for all of chat's. A new line gets its outcome by MOEGGUF_RECORD=1.
"""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_manager import HI, TEMPLATE, FakeManager, entry_of
from gguf_builder import U32, moe
from pictures import base64_of, png
from recorded_texts import check_recorded, recorded_lines

from moegguf.generate.request import GenerationRequest, Sampling
from moegguf.models.own_store import BlobStore
from moegguf.models.sources import demo_path
from moegguf.server.common import limits
from moegguf.server.openai.chat import ChatBody

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PICTURE = base64_of(png(2, 2))
BASE: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "x"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/completion": {"prompt": "x"},
    "/infill": {"model": "gap", "input_prefix": "a", "input_suffix": "b"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 64},
}
TIMES = re.compile(r"(.*)\.\.\. (\d+) times")


def expanded(value: Any) -> Any:
    """The value with what is repeated."""
    if isinstance(value, list):
        found: list[Any] = []
        for each in value:
            times = TIMES.fullmatch(each) if isinstance(each, str) else None
            found += found[-1:] * (int(times[2]) - 1) if times and not times[1] else [expanded(each)]
        return found
    if isinstance(value, dict) and "every field" in value:
        return dict.fromkeys(ChatBody.model_fields.keys() - {"model", "messages"})
    if isinstance(value, dict):
        return {name: expanded(each) for name, each in value.items()}
    times = TIMES.fullmatch(value) if isinstance(value, str) else None
    return times[1] * int(times[2]) if times else value


def changes(value: Any, default: Any) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    told = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: each for name, each in told.items() if each != getattr(default, name)}


def asked(manager: FakeManager) -> Iterator[str]:
    """What reached the model."""
    for request in manager.requests:
        sampling = changes(request.sampling, Sampling())
        told = changes(request, GenerationRequest()) | ({"sampling": sampling} if sampling else {})
        yield json.dumps(told, ensure_ascii=False)
    for inputs, truncate, normalize in manager.embedded:
        yield json.dumps([inputs, {"truncate": truncate, "normalize": normalize}])
    for _, overrides, keep_alive_s, _ in manager.leases:
        load = changes(overrides, type(overrides)())
        if load or keep_alive_s is not None:
            yield f"loaded with {load}, for {keep_alive_s} s"


def told(http: httpx.Client, manager: FakeManager) -> Iterator[str]:
    for line in recorded_lines("bodies", "/"):
        path, body = line.split(" ", 1)
        for kept in (manager.requests, manager.embedded, manager.leases):
            kept.clear()  # type: ignore[attr-defined]
        own = expanded(json.loads(body.replace("PICTURE", PICTURE)))
        reply = http.post(path, json={"model": "able", "stream": False, **BASE.get(path, {}), **own})
        yield line
        found = reply.json()
        error = (found.get("error") if isinstance(found, dict) else None) or ""
        message = error if isinstance(error, str) else error["message"]
        yield from (f"    {line}" for line in ([f"{reply.status_code}: {message}"] if message else asked(manager)))


def test_what_is_asked_or_the_refusal_is_as_recorded(http: httpx.Client, manager: FakeManager, tmp_path: Path) -> None:
    path = demo_path()
    assert path is not None
    parameters = {"temperature": 0.2, "top_p": 0.5, "top_k": 7, "num_ctx": 64, "stop": ["END"]}
    own = entry_of(path, "own:latest", system="Be kind.", messages=TURNS, parameters=parameters, template=TEMPLATE)
    manager.catalog.known[own.name] = own
    gap = moe().add("tokenizer.ggml.fim_pre_token_id", U32, 5).write(tmp_path / "gap.gguf")
    manager.catalog.known["gap:latest"] = entry_of(gap, "gap:latest")
    text = "\n".join(told(http, manager)) + "\n"
    text = text.replace(json.dumps(TEMPLATE), '"TEMPLATE"').replace(PICTURE, "PICTURE")
    check_recorded("bodies", text)


@pytest.mark.parametrize(
    ("path", "kind", "begin"),
    [
        ("/api/chat", "application/json", b"{"),
        ("/v1/files", "multipart/form-data; boundary=x", b"--x\r\n"),
        (f"/api/blobs/sha256:{64 * '0'}", "application/octet-stream", b"GGUF"),
    ],
)
def test_a_body_that_stalls_is_refused(
    url: str, manager: FakeManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, kind: str, begin: bytes
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    monkeypatch.setattr(limits, "READ_S", 0.05)
    monkeypatch.setattr(manager.catalog, "blobs", BlobStore(), raising=False)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 99\r\n\r\n"
        connection.sendall(head.encode() + begin)
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 408")
