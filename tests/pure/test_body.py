"""Tests request bodies: which are accepted, which are refused and with what message,
and how long a refusal takes."""

import asyncio
import contextlib
import json
import time
import timeit
import tracemalloc
from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from scripted_manager import until
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from moegguf.engine.machine import count_cpus
from moegguf.models.catalog import Catalog
from moegguf.server.common import limits
from moegguf.server.common.body import (
    Bodies,
    Body,
    parse_body,
    parse_object,
    read_bytes,
)
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import Loading, find
from moegguf.server.ollama.chat import ChatRequest


class Part(Body):
    n: int


class Example(Body):
    text: str = ""
    n: Annotated[int | None, Field(ge=0, le=9)] = None
    parts: list[Part] | None = None


def refusal(raw: bytes, kind: type[Body] = Example) -> str:
    with pytest.raises(HttpError) as caught:
        parse_body(raw, kind)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 400
    return str(caught.value)


def test_parse_body_ignores_unknown_fields_and_takes_the_last_of_repeated_keys() -> (
    None
):
    body = parse_body(b'{"text": "a", "other": {"deep": []}, "text": "b"}', Example)
    assert body.text == "b"
    assert not hasattr(body, "other")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb"\ud83d\ude00", "\N{GRINNING FACE}"),
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\uDE00 begins", "\ufffd begins"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\N{GRINNING FACE}"),
        (rb"\ude00\ud83d\n", "\ufffd\ufffd\n"),
        (rb"C:\\ud83d \ud83d", "C:\\ud83d \ufffd"),
        (rb"C:\\\ud83d\ude00 \ud83d", "C:\\\N{GRINNING FACE} \ufffd"),
        (b"\xed\xa0\xbd", "\ufffd"),
    ],
)
def test_parse_body_replaces_half_of_a_surrogate_pair(raw: bytes, text: str) -> None:
    assert parse_body(b'{"text": "' + raw + b'", "n": 5}', Example) == Example(
        text=text, n=5
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"text": "\\ud83d", "n": NaN}', "expected value"),
        (b'{"text": "\\ud83d", "n": 99999999999999999999}', "does not fit in 64 bits"),
        (b'{"text": "\\ud83d", "x": ' + b"[" * 1000 + b"]" * 1000 + b"}", "hex escape"),
        (b'{"text": "\\ud83"}', "escape"),
        *((raw, "missing request body") for raw in (b"", b"  \n", b"\r\n")),
        (b"[1]", "expected a JSON object, not an array"),
        (b"null", "expected a JSON object, not null"),
        (b'"text"', "expected a JSON object, not a string"),
        (b"{", "EOF while parsing"),
        (b'{"text": "' + b"a" * 100, "EOF while parsing a string"),
        (b'{"text": "\xff"}', "invalid unicode code point at line 1 column 11"),
        (b'\xff\xfe{\x00"\x00', "expected value at line 1 column 1"),
        (b'{"n": NaN}', "expected value"),
        (b'{"n": -Infinity}', "invalid number"),
        (b'{"n": 1e999}', "does not fit in 64 bits"),
        (b'{"other": {"n": -0.1E+0400}}', "does not fit in 64 bits"),
        (b'{"n": 18446744073709551616}', "does not fit in 64 bits"),
        (b'{"n": ' + b"9" * 100_000 + b".0}", "does not fit in 64 bits"),
        (b'{"n": "5"}', "n: input should be a valid integer"),
        (b'{"n": true}', "n: input should be a valid integer"),
        (b'{"n": 10}', "n: input should be less than or equal to 9"),
        (b'{"parts": [{"n": 1}, {}]}', "parts.1.n: field required"),
    ],
)
def test_parse_body_names_the_invalid_field_or_position(raw: bytes, words: str) -> None:
    assert words in refusal(raw)


def test_parse_object_limits_nesting_and_ignores_brackets_in_strings() -> None:
    def nested(depth: int) -> bytes:
        return b'{"x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert parse_object(nested(100))
    assert "recursion limit exceeded" in refusal(nested(1000))
    text = '[{"\\' * 1000
    assert parse_object(json.dumps({"x": text}).encode()) == {"x": text}


MIB = 1 << 20
HOSTILE = {
    "deep lists": b"[" * 8 * MIB,
    "many values": b'{"x":[' + b"0," * 4 * MIB + b"0]}",
    "many empty texts": b'"' * 8 * MIB,
    "escapes without end": b'"' + b"\\" * 8 * MIB,
    "a text that does not end": b'{"text":"' + b'\\"' * 3 * MIB,
    "digits": b'{"n":' + b"9" * 8 * MIB + b"}",
    "an exponent": b'{"n":1e' + b"9" * 8 * MIB + b"}",
    "halves of pairs": b'{"text":"' + b"\\ud83d" * (8 * MIB // 6) + b'", "n": 10}',
    "a fraction": b'{"n":0.' + b"9" * 8 * MIB,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_body_is_refused_fast_and_with_little_memory(name: str) -> None:
    raw = HOSTILE[name]
    # A refusal takes about 100 ms on an idle machine. The fastest of five counts, because
    # a busy machine slows down some of them.
    assert (
        min(timeit.repeat(lambda: refusal(raw), timer=time.thread_time, number=1)) < 0.5
    )
    tracemalloc.start()
    try:
        refusal(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * limits.BODY_BYTES


@given(st.binary(max_size=200))
def test_parse_object_reads_or_rejects_any_bytes(raw: bytes) -> None:
    with contextlib.suppress(HttpError):
        parse_object(raw)


finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | st.text(),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(max_size=5), children, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_parse_object_equals_json_loads(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode()) == value
    assert (
        parse_object(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        is not None
    )


def parse(kind: type[Body], **fields: Any) -> Any:
    return parse_body(json.dumps(fields).encode(), kind)


def test_num_thread_is_capped_at_the_number_of_processors() -> None:
    assert (
        parse(Loading, options={"num_thread": 512}).overrides()["n_threads"]
        == count_cpus()
    )
    assert parse(Loading, options={"num_thread": 1}).overrides()["n_threads"] == 1


def test_parse_body_logs_an_unknown_option(caplog: pytest.LogCaptureFixture) -> None:
    parse(ChatRequest, model="x", options={"temprature": 1})
    assert "temprature" in caplog.text


async def test_bodies_limit_total_bytes_until_their_requests_end() -> None:
    go, most = asyncio.Event(), 3 << 20

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_bytes(Request(scope, receive, send))
        await go.wait()

    bodies = Bodies(app, most)

    def request(n_bytes: int) -> asyncio.Task[None]:
        parts = iter([b"x" * (n_bytes // 2)] * 2)

        async def receive() -> dict[str, Any]:
            part = next(parts, None)
            return {
                "type": "http.request",
                "body": part or b"",
                "more_body": part is not None,
            }

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        return asyncio.create_task(bodies(scope, receive, Mock()))

    waiting = [request(1 << 20), request(2 << 20)]
    await until(lambda: bodies.n_bytes == most)
    with pytest.raises(HttpError, match=r"server busy.*3 MiB") as caught:
        await request(2)
    assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
    assert bodies.n_bytes == most, "what was refused is freed"
    go.set()
    await asyncio.gather(*waiting)
    assert bodies.n_bytes == 0
    await request(3 << 20)


def test_find_puts_the_hint_of_an_unknown_name_into_brackets_without_its_full_stop() -> (
    None
):
    with pytest.raises(
        HttpError,
        match=r"^model 'nobody' not found, try pulling it first \(Models of .* from\)$",
    ):
        find(Catalog(), "nobody")
