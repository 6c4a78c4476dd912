"""Tests the files of a batch: its request lines and its journal.

The journal keeps one answer per request, even if the disk fills up, and refuses answers
to changed requests.
"""

import errno
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from batch_files import CHAT, Endpoint, entries, jsonl, request, requests_in

from moegguf import atomic_write
from moegguf.errors import BatchFileError, StorageError
from moegguf.serving.batch import answers
from moegguf.serving.batch.answers import (
    Journal,
    Requests,
    answer_requests,
    finished_counts,
    open_journal,
    response_entry,
    to_line,
)


def journal_of(tmp_path: Path, requests: Requests) -> AbstractContextManager[Journal]:
    return open_journal(tmp_path / "answers.partial.db", requests)


async def answered(
    tmp_path: Path,
    lines: list[Any],
    endpoint: Any,
    n_parallel: int = 4,
    *,
    disk_bytes: int = 1 << 30,
) -> list[Any]:
    """Answers `lines` as a batch, and returns the objects in the finished file.

    The database may grow to `disk_bytes`.
    """
    with (
        requests_in(tmp_path / "requests", lines) as requests,
        journal_of(tmp_path, requests) as journal,
    ):
        journal.database.execute(f"PRAGMA max_page_count = {disk_bytes // 4096}")
        await answer_requests(
            requests, journal, endpoint, n_parallel, lambda entry: None
        )
        journal.finish(tmp_path / "answers")
    return entries(tmp_path / "answers")


async def test_batch_output_has_one_entry_per_line_in_openais_format(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint()
    lines = [
        request("a", "one"),
        b"nonsense\n",
        request("b", "fail"),
        request("a"),
        request("c", "three"),
    ]
    found = await answered(tmp_path, lines, endpoint)
    assert [set(entry) for entry in found] == [
        {"id", "custom_id", "response", "error"}
    ] * 5
    assert [entry["custom_id"] for entry in found] == ["a", None, "b", "a", "c"]
    assert [(entry["response"] or {}).get("status_code") for entry in found] == [
        200,
        None,
        400,
        None,
        200,
    ]
    assert [(entry["error"] or {}).get("code") for entry in found] == [
        None, "invalid_json_line", None, "duplicate_custom_id", None,
    ]  # fmt: skip
    assert found[0]["response"]["body"]["text"] == "one"
    assert len({entry["id"] for entry in found}) == 5
    assert (
        len({entry["response"]["request_id"] for entry in found if entry["response"]})
        == 3
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers", "requests"]
    with requests_in(tmp_path / "requests", lines) as requests:
        counts = finished_counts(tmp_path / "answers", requests)
        assert finished_counts(tmp_path / "others", requests) is None
        (tmp_path / "answers").write_bytes(jsonl(found[:4]))
        with pytest.raises(BatchFileError, match="does not hold the answers"):
            finished_counts(tmp_path / "answers", requests)
    assert (
        counts.completed,
        counts.failed,
        counts.output_tokens,
        counts.cached_tokens,
    ) == (2, 3, 6, 2)


async def test_batch_groups_requests_by_model_and_limits_parallel_requests(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint()
    await answered(
        tmp_path, [request(f"{i}", model="abc"[i % 3]) for i in range(30)], endpoint, 4
    )
    assert [body["model"] for _, body in endpoint.calls] == ["a"] * 10 + ["b"] * 10 + [
        "c"
    ] * 10
    assert endpoint.most == 4


def test_journal_imports_old_lines_up_to_a_torn_last_line(tmp_path: Path) -> None:
    old = tmp_path / "answers.partial"
    with requests_in(
        tmp_path / "requests", [request(f"{i}") for i in range(3)]
    ) as requests:
        found = [
            to_line(response_entry(requests, line, 200, {"text": "ü"}))
            for line in requests.lines
        ]
        whole = b"".join(found)
        ends = [len(b"".join(found[:n])) for n in range(1, 4)]
        for n_bytes in {
            0,
            1,
            len(whole) // 2,
            *ends,
            *(end - 1 for end in ends),
            *(end + 1 for end in ends[:2]),
        }:
            old.write_bytes(whole[:n_bytes])
            n_whole = sum(end <= n_bytes for end in ends)
            for _ in range(2):
                with journal_of(tmp_path, requests) as journal:
                    assert list(journal.answered) == [1, 2, 3][:n_whole]
                    assert list(journal.lines()) == found[:n_whole]
                    assert not old.exists()
            with journal_of(tmp_path, requests) as journal:
                journal.remove()
            assert [path.name for path in tmp_path.iterdir()] == ["requests"]


def test_journal_rejects_and_keeps_answers_to_other_requests(tmp_path: Path) -> None:
    old, target = tmp_path / "answers.partial", tmp_path / "answers"
    with (
        requests_in(tmp_path / "requests", [request("a"), request("b")]) as requests,
        journal_of(tmp_path, requests) as journal,
    ):
        journal.append(1, response_entry(requests, requests.lines[0], 200, {}))
        kept = list(journal.lines())
    with requests_in(tmp_path / "requests", [request("a"), request("c")]) as changed:
        with (
            pytest.raises(BatchFileError, match="has changed since"),
            journal_of(tmp_path, changed),
        ):
            pass
        for text in (
            b"hello\n",
            b"[]\n",
            b'{"id": 3}\n',
            b'{"id": "batch_req_0_1"}\n',
            kept[0] + b"hello\n",
        ):
            old.write_bytes(text)
            target.write_bytes(text)
            with (
                pytest.raises(BatchFileError, match="remove that file"),
                journal_of(tmp_path, changed),
            ):
                pass
            with pytest.raises(BatchFileError):
                finished_counts(target, changed)
            assert old.read_bytes() == target.read_bytes() == text
    old.unlink()
    with (
        requests_in(tmp_path / "requests", [request("a"), request("b")]) as requests,
        journal_of(tmp_path, requests) as journal,
    ):
        assert list(journal.lines()) == kept


async def test_full_disk_raises_storage_error_and_keeps_stored_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [request(f"{i}", "x" * 5000) for i in range(10)]
    with pytest.raises(StorageError, match=r"disk is full.*kept"):
        await answered(tmp_path, lines, Endpoint(), disk_bytes=64 << 10)
    with (
        requests_in(tmp_path / "requests", lines) as requests,
        journal_of(tmp_path, requests) as journal,
    ):
        kept = entries(b"".join(journal.lines()))
    assert 1 <= len(kept) < 10
    # The disk is full when the finished file is written.
    with monkeypatch.context() as patch:
        patch.setattr(
            atomic_write,
            "locked_temporary",
            lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")),
        )
        with pytest.raises(StorageError, match="full"):
            await answered(tmp_path, lines, Endpoint())
    endpoint = Endpoint()
    found = await answered(tmp_path, lines, endpoint)
    assert not endpoint.calls and [entry["custom_id"] for entry in found] == [
        f"{i}" for i in range(10)
    ]
    assert {json.dumps(entry) for entry in kept} <= {
        json.dumps(entry) for entry in found
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers", "requests"]


BAD: list[tuple[str, Any]] = [
    ("invalid_json_line", b"nonsense\n"),
    ("invalid_json_line", b"[" * 200_000 + b"\n"),
    ("invalid_json_line", ["a list"]),
    ("missing_required_parameter", {}),
    ("missing_required_parameter", {"custom_id": "x", "method": "POST", "url": CHAT}),
    ("invalid_custom_id", request(7)),
    ("invalid_custom_id", request("\ud800")),
    ("invalid_method", {**request("x"), "method": "GET"}),
    ("invalid_url", {**request("x"), "url": "/v1/moderations"}),
    ("invalid_body", {**request("x"), "body": "text"}),
    ("unsupported_parameter", request("x", stream=True)),
    ("duplicate_custom_id", request("first")),
]


@pytest.mark.parametrize(("code", "line"), BAD)
def test_invalid_line_is_an_error_of_that_line_only(
    tmp_path: Path, code: str, line: Any
) -> None:
    with requests_in(
        tmp_path / "r", [request("first"), line, request("last")]
    ) as requests:
        assert [found.error and found.error.code for found in requests.lines] == [
            None,
            code,
            None,
        ]
        assert str(requests.lines[1].error)


def test_too_long_line_is_skipped_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_LINE_BYTES", 300)
    for n in (300, 5000, 3 << 20):
        with requests_in(
            tmp_path / "r", [request("a"), b"x" * n + b"\n", request("b")]
        ) as requests:
            assert [line.custom_id for line in requests.lines] == ["a", None, "b"]
            assert (
                requests.lines[1].error
                and requests.lines[1].error.code == "line_too_long"
            )
            assert json.loads(requests.read(requests.lines[2])[1])["model"] == "demo"
    # The last line has no line feed.
    with requests_in(tmp_path / "r", [request("a"), b"x" * 5000]) as requests:
        assert len(requests.lines) == 2


def test_requests_read_returns_each_request_unchanged_except_null_fields(
    tmp_path: Path,
) -> None:
    made = [
        request("a", "ünï\u2028"),
        request("b", url="/v1/embeddings", input=[1.5, None]),
        request("c", top_k=None),
    ]
    text = (
        b"\xef\xbb\xbf"
        + b"\r\n".join(jsonl([line]).rstrip() for line in made)
        + b"\r\n\r\n  \n"
    )
    with requests_in(tmp_path / "r", [text]) as requests:
        assert [line.number for line in requests.lines] == [1, 2, 3]
        for line, given in zip(requests.lines, made, strict=True):
            url, body = requests.read(line)
            kept = {
                name: value
                for name, value in given["body"].items()
                if value is not None
            }
            assert (url, json.loads(body)) == (given["url"], kept)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_requests_accept_bom_utf_16_and_crlf(tmp_path: Path, encoding: str) -> None:
    lines = [request("a", "café"), request("b", "z" * 100_000)]
    (tmp_path / "requests").write_bytes(
        jsonl(lines).decode().replace("\n", "\r\n").encode(encoding)
    )
    with (tmp_path / "requests").open("rb") as file:
        requests = Requests(file, (CHAT,))
        found = [json.loads(requests.read(line)[1]) for line in requests.lines]
    assert [line.custom_id for line in requests.lines] == ["a", "b"]
    assert found == [line["body"] for line in lines]


def test_requests_apply_defaults_and_fingerprint_every_byte(tmp_path: Path) -> None:
    lines = [request("a", model=None), request("b", model="own")]
    with requests_in(tmp_path / "r", lines, defaults={"model": "m"}) as requests:
        assert [
            json.loads(requests.read(line)[1])["model"] for line in requests.lines
        ] == ["m", "own"]
        assert requests.models == ["m", "own"]
    with requests_in(tmp_path / "r", lines) as other:
        assert other.models == ["own"] and other.fingerprint != requests.fingerprint

    def fingerprint(*lines: Any) -> str:
        with requests_in(tmp_path / "r", lines) as requests:
            return requests.fingerprint

    assert fingerprint(request("a")) == fingerprint(request("a"))
    assert (
        len(
            {
                fingerprint(request("a")),
                fingerprint(request("b")),
                fingerprint(request("a"), b"\n"),
            }
        )
        == 3
    )


def test_in_order_groups_requests_that_need_the_same_loaded_model(
    tmp_path: Path,
) -> None:
    lines = [
        request(
            f"{i}",
            model="ab"[i % 2],
            options={"num_ctx": 512, "seed": i} if i == 5 else None,
        )
        for i in range(6)
    ]
    with requests_in(tmp_path / "r", lines) as requests:
        assert [line.custom_id for line in requests.in_order({1, 4})] == [
            "2",
            "4",
            "1",
            "5",
        ]


def test_requests_reject_an_empty_file_and_too_many_lines(tmp_path: Path) -> None:
    for lines in ([], [b"\n \n"]):
        with pytest.raises(BatchFileError, match="no requests"):
            requests_in(tmp_path / "r", lines).__enter__()
    with pytest.raises(BatchFileError, match="more than 1 requests"):
        requests_in(
            tmp_path / "r", [request("a"), request("b")], max_requests=1
        ).__enter__()


def test_requests_read_detects_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with requests_in(path, [request("a"), request("b")]) as requests:
        path.write_bytes(jsonl([request("c"), request("b")]))
        with pytest.raises(BatchFileError, match=r"line 1 .* changed"):
            requests.read(requests.lines[0])
        path.write_bytes(b"")
        with pytest.raises(BatchFileError, match=r"line 2 .* changed"):
            requests.read(requests.lines[1])


@pytest.mark.parametrize("damaged", [b"{", b"[]\n", b'{"error": null}\n'])
async def test_damaged_stored_answer_raises_batch_file_error(
    tmp_path: Path, damaged: bytes
) -> None:
    with requests_in(tmp_path / "requests", [request("a", "one")]) as requests:
        with journal_of(tmp_path, requests) as journal:
            await answer_requests(requests, journal, Endpoint(), 1, lambda entry: None)
            journal.database.execute("UPDATE answer SET line = ?", damaged)
        with (
            pytest.raises(
                BatchFileError, match="has a damaged answer to line 1; remove that file"
            ),
            journal_of(tmp_path, requests),
        ):
            pass
