"""Tests /v1/files and /v1/batches with OpenAI's client, and with requests that this
client would not send."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import waiting
from batch_files import CHAT, entries, jsonl, request
from client_types import client_of
from fake_manager import FakeCatalog, FakeManager, entry_of, server_of
from openai.types import Batch

from moegguf.errors import BusyError, WorkerError
from moegguf.generate.request import Delta
from moegguf.models.sources import demo_path
from moegguf.server.common import limits
from moegguf.serving.batch import answers
from moegguf.serving.clients import BACKGROUND, current_client

pytestmark = pytest.mark.usefixtures("home")

FINAL = ("completed", "failed", "expired", "cancelled")
JSON = {"content-type": "application/json"}


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager(
        FakeCatalog(entry_of(demo_path()), entry_of(demo_path(), "other:latest"))
    )


@pytest.fixture
def url(manager: FakeManager) -> Iterator[str]:
    with server_of(manager, upload_bytes=1 << 20, storage_bytes=3 << 20) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def upload(
    client: openai.OpenAI, lines: list[Any], name: str = "requests.jsonl"
) -> str:
    return client.files.create(file=(name, jsonl(lines)), purpose="batch").id


def create(
    client: openai.OpenAI, file_id: str, endpoint: Any = CHAT, **options: Any
) -> Batch:
    return client.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window="24h", **options
    )


def until(
    client: openai.OpenAI, batch: Batch, condition: Callable[[Batch], object]
) -> Batch:
    return waiting.until(
        lambda: condition(found := client.batches.retrieve(batch.id)) and found
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    return until(client, batch, lambda found: found.status in FINAL)


def content(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id
    return entries(client.files.content(file_id).content)


def test_files_are_uploaded_retrieved_listed_and_deleted(client: openai.OpenAI) -> None:
    data = jsonl([request("a", "ünï" * 20_000)])
    made = client.files.create(file=("täst.jsonl", data), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose, made.status, made.expires_at) == (
        "file", len(data), "täst.jsonl", "batch", "processed", None,
    )  # fmt: skip
    assert abs(made.created_at - time.time()) < 60
    assert client.files.retrieve(made.id) == made
    response = client.files.content(made.id)
    assert response.content == data
    soon = client.files.create(
        file=b"x",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert soon.expires_at == soon.created_at + 3600
    assert {file.id for file in client.files.list()} == {made.id, soon.id}
    gone = client.files.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "file")
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            call(made.id)


def test_lists_of_files_and_batches_are_paginated(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    files = [upload(client, [request("a")]) for _ in range(5)]
    listed = [file.id for file in client.files.list(limit=2)]
    assert sorted(listed) == sorted(files)
    assert [file.id for file in client.files.list(order="asc")] == listed[::-1]
    assert list(client.files.list(purpose="batch_output")) == []
    first = http.get("/v1/files?limit=2").json()
    assert (first["object"], first["has_more"], first["last_id"]) == (
        "list",
        True,
        first["data"][1]["id"],
    )
    batches = [create(client, file_id) for file_id in files]
    assert [batch.id for batch in client.batches.list(limit=2)] == [
        batch.id for batch in batches
    ][::-1]
    assert (
        http.get(f"/v1/batches?after={batches[1].id}").json()["data"][0]["id"]
        == batches[0].id
    )
    for query in ("limit=0", "limit=101", "limit=x", "after=batch_none"):
        assert http.get(f"/v1/batches?{query}").status_code == 400
    assert http.get("/v1/files?order=up").status_code == 400


def test_entries_of_a_batch_equal_direct_responses_of_the_endpoint(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    lines = [
        request("a"),
        request("b", model="nothing"),
        request("c", max_tokens="many"),
        request("d", model="other"),
    ]
    batch = create(client, upload(client, lines), metadata={"kind": "test"})
    assert (batch.object, batch.endpoint, batch.completion_window, batch.status) == (
        "batch",
        CHAT,
        "24h",
        "validating",
    )
    assert (
        batch.metadata == {"kind": "test"}
        and batch.expires_at == batch.created_at + 86400
    )
    batch = ended(client, batch)
    assert (
        batch.status == "completed"
        and batch.errors is None
        and batch.completed_at
        and batch.finalizing_at
    )
    counts = batch.request_counts
    assert counts and (counts.total, counts.completed, counts.failed) == (4, 2, 2)
    assert batch.usage and (
        batch.usage.input_tokens,
        batch.usage.output_tokens,
        batch.usage.total_tokens,
    ) == (14, 6, 20)
    assert batch.usage.input_tokens_details.cached_tokens == 4

    def bare(body: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value for name, value in body.items() if name not in ("id", "created")
        }

    answers, errors = (
        content(client, batch.output_file_id),
        content(client, batch.error_file_id),
    )
    for entry, i in ((answers[0], 0), (answers[1], 3), (errors[0], 1), (errors[1], 2)):
        direct = http.post(CHAT, json=lines[i]["body"])
        assert entry["custom_id"] == lines[i]["custom_id"] and entry["error"] is None
        assert entry["response"]["status_code"] == direct.status_code
        assert bare(entry["response"]["body"]) == bare(direct.json())
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output" and output.filename.endswith(
        "_output.jsonl"
    )


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "demo", "prompt": ["one", "two"]}),
        ("/v1/embeddings", {"model": "demo", "input": ["one", "two"]}),
        ("/v1/responses", {"model": "demo", "input": "one"}),
    ],
)
def test_batches_run_on_each_other_endpoint(
    client: openai.OpenAI, endpoint: str, body: dict[str, Any]
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    batch = ended(client, create(client, upload(client, [line]), endpoint))
    (entry,) = content(client, batch.output_file_id)
    assert entry["response"]["body"]["object"] in (
        "text_completion",
        "list",
        "response",
    )
    assert batch.usage and batch.usage.input_tokens


def test_cancel_stops_a_running_batch_and_refuses_a_second_cancel(
    client: openai.OpenAI, manager: FakeManager
) -> None:
    manager.script = (Delta(text="a"), asyncio.Event())
    batch = create(client, upload(client, [request(f"{i}") for i in range(40)]))
    until(client, batch, lambda _: manager.n_running)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    assert manager.n_running == 0
    codes = {entry["error"]["code"] for entry in content(client, batch.error_file_id)}
    assert codes == {"batch_cancelled"}
    with pytest.raises(
        openai.ConflictError, match="Cannot cancel a batch with status 'cancelled'"
    ):
        client.batches.cancel(batch.id)


def test_a_batch_retries_a_full_queue_and_records_a_crash_as_a_500(
    client: openai.OpenAI, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "BUSY_RETRY_S", 0.01)
    manager.enter_error = BusyError("full")
    batch = create(client, upload(client, [request("a")]))
    until(client, batch, lambda _: len(manager.leases) > 3)
    manager.enter_error = WorkerError("the process has ended")
    batch = ended(client, batch)
    (entry,) = content(client, batch.error_file_id)
    assert entry["response"]["status_code"] == 500
    assert entry["response"]["body"]["error"]["message"] == "the process has ended"


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_file_id": None}, {"endpoint": "/v1/moderations"}, {"completion_window": "1h"}, {"metadata": {"a": 1}},
        {"metadata": {"a" * 65: "b"}}, {"metadata": {f"{i}": "" for i in range(17)}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
    ],
)  # fmt: skip
def test_invalid_fields_of_a_batch_get_a_400(
    client: openai.OpenAI, http: httpx.Client, wrong: dict[str, Any]
) -> None:
    right = {
        "input_file_id": upload(client, [request("a")]),
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    response = http.post("/v1/batches", json={**right, **wrong})
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert list(client.batches.list()) == []


def test_unknown_files_and_batches_get_a_404(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    for call in (lambda: create(client, "file-none"), lambda: client.batches.retrieve("batch_none"),
                 lambda: client.batches.cancel("batch_none")):  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="No such"):
            call()
    for path in (
        "/v1/files/..%2f..%2fetc%2fpasswd",
        "/v1/files/.lock",
        "/v1/files/file-%00/content",
    ):
        assert http.get(path).status_code == 404
    assert http.put("/v1/files").status_code == 405


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    extra = "" if filename is None else f'; filename="{filename}"'
    return (
        f'--B\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode()
        + value
        + b"\r\n"
    )


PURPOSE, FILE, END = part("purpose", b"batch"), part("file", b"x", "f"), b"--B--\r\n"
FORM = {"content-type": "multipart/form-data; boundary=B"}


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (200, PURPOSE + FILE + END, FORM),
        (200, FILE + PURPOSE + END + b"after the end", FORM),
        (400, PURPOSE + END, FORM),
        (400, part("purpose", b"fine-tune") + FILE + END, FORM),
        (400, PURPOSE + FILE + FILE + END, FORM),
        (
            400,
            part("expires_after[anchor]", b"created_at") + PURPOSE + FILE + END,
            FORM,
        ),
        (400, b'{"purpose": "batch"}', JSON),
        (400, PURPOSE + FILE + END, {"content-type": "multipart/form-data"}),
        (400, b"".join(part(f"{i}", b"") for i in range(40)) + END, FORM),
        (400, part("purpose", b"x" * (limits.FORM_PART_BYTES + 1)) + FILE + END, FORM),
        (413, PURPOSE + part("file", b"x" * (1 << 20) + b"x", "f") + END, FORM),
        (415, PURPOSE + FILE + END, {**FORM, "content-encoding": "gzip"}),
    ],
)
def test_upload_form_determines_the_status_and_only_a_valid_one_leaves_a_file(
    http: httpx.Client, home: Path, status: int, body: bytes, headers: dict[str, str]
) -> None:
    response = http.post("/v1/files", content=body, headers=headers)
    assert response.status_code == status, response.text
    folder = home / "batches" / "files"
    assert len(list(folder.iterdir())) == (1 if status == 200 else 0)


def test_an_interrupted_upload_leaves_no_file(
    url: str, home: Path, http: httpx.Client
) -> None:
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.putrequest("POST", "/v1/files")
    connection.putheader("content-type", FORM["content-type"])
    connection.putheader("content-length", "100000")
    connection.endheaders(PURPOSE + part("file", b"x" * 5000, "f"))
    folder = home / "batches" / "files"
    waiting.until(
        lambda: (
            folder.exists() and any(path.stat().st_size for path in folder.iterdir())
        )
    )
    connection.close()
    waiting.until(lambda: not list(folder.iterdir()))
    assert http.get("/v1/files").json()["data"] == []


def test_an_upload_to_a_full_disk_gets_a_507_and_leaves_no_file(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    def full(handle: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moegguf.serving.batch.files.write_all", full)
        response = http.post("/v1/files", content=PURPOSE + FILE + END, headers=FORM)
        assert (
            response.status_code == 507
            and "No space left" in response.json()["error"]["message"]
        )
    assert list((home / "batches" / "files").iterdir()) == []
    assert (
        http.post("/v1/files", content=PURPOSE + FILE + END, headers=FORM).status_code
        == 200
    )


def test_a_damaged_batch_database_gives_a_507_and_leaves_chat_working(
    manager: FakeManager, home: Path
) -> None:
    (home / "batches").mkdir(parents=True)
    (home / "batches" / "batches.db").write_bytes(b"no database " * 1000)
    with server_of(manager) as url, httpx.Client(base_url=url) as http:
        for response in (
            http.get("/v1/files"),
            http.get("/v1/batches"),
            http.post("/v1/files", content=b""),
        ):
            assert response.status_code == 507, response.text
        message = http.get("/v1/batches").json()["error"]["message"]
        assert (
            "is damaged (file is not a database)" in message
            and "to start over" in message
        )
        assert http.post(CHAT, json=request("a")["body"]).status_code == 200


def test_files_and_batches_are_visible_to_their_own_api_key_only(
    manager: FakeManager,
) -> None:
    """A client sees the files and batches of its own key, even after a restart, and
    files stored without a key. It sees no files or batches of other keys."""
    with server_of(manager) as url, client_of(url) as nobody:
        old = nobody.files.create(file=b"old", purpose="batch").id
    keys = ("of-ann", "of-bob")
    with server_of(manager, api_keys=keys) as url, client_of(url, "of-ann") as ann:
        file = upload(ann, [request("a")])
        batch = ended(ann, create(ann, file))
        assert batch.status == "completed"
    with (
        server_of(manager, api_keys=keys) as url,
        client_of(url, "of-ann") as ann,
        client_of(url, "of-bob") as bob,
    ):
        assert {each.id for each in ann.files.list()} == {
            old,
            file,
            batch.output_file_id,
        }
        assert ann.batches.retrieve(batch.id).id == batch.id
        assert [each.id for each in bob.files.list()] == [
            old
        ] and not bob.batches.list().data
        output = str(batch.output_file_id)
        for call in (
            *(
                functools.partial(get, each)
                for each in (file, output)
                for get in (bob.files.retrieve, bob.files.delete)
            ),
            *(functools.partial(bob.files.content, each) for each in (file, output)),
            *(
                functools.partial(get, batch.id)
                for get in (bob.batches.retrieve, bob.batches.cancel)
            ),
            lambda: create(bob, file),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert (
            ended(bob, create(bob, upload(bob, [request("b")]))).status == "completed"
        )
    anns, bobs = (request.owner for request in manager.requests)
    assert anns and bobs and anns != bobs


def test_requests_of_batches_and_of_priority_u7_run_in_the_background(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a batch are background requests, and so are requests with the header
    `Priority: u=7` (RFC 9218)."""
    lease, clients = FakeManager.lease, []
    monkeypatch.setattr(
        FakeManager,
        "lease",
        lambda *given, **more: (
            clients.append(current_client.get()) or lease(*given, **more)
        ),
    )
    ended(client, create(client, upload(client, [request("a"), request("b")])))
    assert clients == [BACKGROUND] * 2
    for header, is_background in (
        ("u=7", True),
        ("i, u=7", True),
        ("u=7;x, i", True),
        ("u=3", False),
        ("u=70", False),
    ):
        clients.clear()
        client.chat.completions.create(
            **request("a")["body"], extra_headers={"priority": header}
        )
        assert (clients == [BACKGROUND]) is is_background
