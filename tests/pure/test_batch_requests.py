"""Requests of a batch: which lines are some, why others are not, and how they are grouped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batch_files import CHAT, jsonl, request, requests_in

from moegguf.errors import BatchFileError
from moegguf.serving.batch import requests as module

BAD: list[tuple[str, Any]] = [
    ("invalid_json_line", b"nonsense\n"),
    ("invalid_json_line", b'{"custom_id": "torn\n'),
    ("invalid_json_line", b"\xff\xfe\n"),
    ("invalid_json_line", b"[" * 200_000 + b"\n"),
    ("invalid_json_line", b'{"custom_id": ' + b"9" * 5000 + b"}\n"),
    ("invalid_json_line", ["a list"]),
    ("missing_required_parameter", {}),
    ("missing_required_parameter", {"custom_id": "x"}),
    ("missing_required_parameter", {"custom_id": "x", "method": "POST", "url": CHAT}),
    ("invalid_custom_id", request(7)),
    ("invalid_custom_id", request("")),
    ("invalid_custom_id", request("x" * 600)),
    ("invalid_custom_id", request("\ud800")),
    ("invalid_method", {**request("x"), "method": "GET"}),
    ("invalid_method", {**request("x"), "method": ["POST"]}),
    ("invalid_url", {**request("x"), "url": "/v1/moderations"}),
    ("invalid_url", {**request("x"), "url": {"a": 1}}),
    ("invalid_body", {**request("x"), "body": "text"}),
    ("unsupported_parameter", request("x", stream=True)),
    ("duplicate_custom_id", request("first")),
]


@pytest.mark.parametrize(("code", "line"), BAD)
def test_a_line_that_is_no_request_is_an_error_of_that_line(tmp_path: Path, code: str, line: Any) -> None:
    with requests_in(tmp_path / "r", [request("first"), line, request("last")]) as requests:
        assert [found.error and found.error.code for found in requests.lines] == [None, code, None]
        assert str(requests.lines[1].error)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 300)
    for n in (300, 5000, 3 << 20):
        with requests_in(tmp_path / "r", [request("a"), b"x" * n + b"\n", request("b")]) as requests:
            assert [line.custom_id for line in requests.lines] == ["a", None, "b"]
            assert requests.lines[1].error and requests.lines[1].error.code == "line_too_long"
            assert json.loads(requests.read(requests.lines[2])[1])["model"] == "demo"
    with requests_in(tmp_path / "r", [request("a"), b"x" * 5000]) as requests:  # without an end
        assert len(requests.lines) == 2


def test_every_request_is_read_again_as_it_was(tmp_path: Path) -> None:
    made = [request("a", "ünï\u2028"), request("b", url="/v1/embeddings", input=[1.5, None]), request("c", top_k=None)]
    text = b"\xef\xbb\xbf" + b"\r\n".join(jsonl([line]).rstrip() for line in made) + b"\r\n\r\n  \n"
    with requests_in(tmp_path / "r", [text]) as requests:
        assert [line.number for line in requests.lines] == [1, 2, 3]
        for line, given in zip(requests.lines, made, strict=True):
            url, body = requests.read(line)
            kept = {name: value for name, value in given["body"].items() if value is not None}
            assert (url, json.loads(body)) == (given["url"], kept)


def test_defaults_are_for_what_is_lacking(tmp_path: Path) -> None:
    lines = [request("a", model=None), request("b", model="own")]
    with requests_in(tmp_path / "r", lines, defaults={"model": "m"}) as requests:
        assert [json.loads(requests.read(line)[1])["model"] for line in requests.lines] == ["m", "own"]
        assert requests.models == ["m", "own"]
    with requests_in(tmp_path / "r", lines) as other:
        assert other.models == ["own"] and other.fingerprint != requests.fingerprint


def test_the_fingerprint_is_of_every_byte(tmp_path: Path) -> None:
    def fingerprint(*lines: Any) -> str:
        with requests_in(tmp_path / "r", lines) as requests:
            return requests.fingerprint

    assert fingerprint(request("a")) == fingerprint(request("a"))
    assert len({fingerprint(request("a")), fingerprint(request("b")), fingerprint(request("a"), b"\n")}) == 3


def test_requests_of_one_loaded_model_are_together(tmp_path: Path) -> None:
    lines = [
        request(f"{i}", model="ab"[i % 2], options={"num_ctx": 512, "seed": i} if i == 5 else None) for i in range(6)
    ]
    with requests_in(tmp_path / "r", lines) as requests:
        groups = [[line.custom_id for line in group] for group in requests.groups({1, 4})]
        assert groups == [["2", "4"], ["1"], ["5"]]


def test_an_empty_file_and_too_many_requests_are_refused(tmp_path: Path) -> None:
    for lines in ([], [b"\n \n"]):
        with pytest.raises(BatchFileError, match="no requests"):
            requests_in(tmp_path / "r", lines)
    with pytest.raises(BatchFileError, match="more than 1 requests"):
        requests_in(tmp_path / "r", [request("a"), request("b")], max_requests=1)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with requests_in(path, [request("a"), request("b")]) as requests:
        path.write_bytes(jsonl([request("c"), request("b")]))
        with pytest.raises(BatchFileError, match=r"line 1 .* changed"):
            requests.read(requests.lines[0])
        path.write_bytes(b"")
        with pytest.raises(BatchFileError, match=r"line 2 .* changed"):
            requests.read(requests.lines[1])
