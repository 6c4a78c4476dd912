"""Tests a server's batches with a scripted endpoint: statuses, restarts, cancelling,
full disks and limits."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from batch_files import CHAT, Endpoint, entries, jsonl, request
from scripted_manager import until

from moegguf.errors import BatchFileError, BusyError, StorageError, UnknownIdError
from moegguf.serving.batch import batches
from moegguf.serving.batch.answers import Journal, Requests
from moegguf.serving.batch.batches import Batch, Batches
from moegguf.serving.batch.database import FINAL, Database
from moegguf.serving.batch.files import DESCRIPTION_BYTES
from moegguf.serving.clients import current_owner

NOW_S = 1_800_000_000.0


@asynccontextmanager
async def batches_in(
    folder: Path, endpoint: Any, **options: Any
) -> AsyncIterator[Batches]:
    given = {"max_bytes": 1 << 30, "n_parallel": 4, "window_s": 86400.0, **options}
    async with Batches(folder / "batches", endpoint, **given) as found:
        yield found


def stored(found: Batches, lines: list[Any], purpose: str = "batch") -> str:
    with found.files.new() as file:
        file.write(jsonl(lines))
        return file.finish("requests.jsonl", purpose).id


def content(found: Batches, file_id: str | None) -> list[Any]:
    return entries(found.files.contents(file_id))


async def ended(found: Batches, batch: Batch) -> Batch:
    await until(
        lambda: found.get(batch.id).status in FINAL and batch.id not in found._tasks
    )
    return found.get(batch.id)


def left_in(found: Batches) -> list[Any]:
    """Returns a list with the answers in the database, and the ids of files in the
    folder that the database does not list.

    The list is empty when all batches have ended.
    """
    contents = {path.stem for path in (found.folder / "files").iterdir()}
    return found.files.database.execute("SELECT * FROM answer") + sorted(
        contents - {file.id for file in found.files.all()}
    )


def fill_disk(database: Database) -> int:
    """Limits the database to its current number of pages, as a full disk would. Returns
    the previous limit in pages."""
    ((most,),) = database.execute("PRAGMA max_page_count")
    ((n_pages,),) = database.execute("PRAGMA page_count")
    database.execute(f"PRAGMA max_page_count = {n_pages}")
    return most


async def test_batch_runs_from_creation_to_output_and_error_files(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint()
    async with batches_in(tmp_path, endpoint) as found:
        input_id = stored(
            found, [request("a", "hold"), request("b", "fail"), request("c")]
        )
        batch = found.create(CHAT, input_id, {"key": "value"}, 7200)
        assert (
            batch.status == "validating"
            and batch.expires_at == batch.created_at + 86400
        )
        await until(lambda: batch.counts.done == 2)
        assert (batch.status, batch.total, batch.counts.failed, batch.model) == (
            "in_progress",
            3,
            1,
            "demo",
        )
        # The running batch keeps the requests of the deleted file.
        found.files.delete(input_id)
        endpoint.released.set()
        assert (await ended(found, batch)).status == "completed"
        assert (
            batch.counts.completed,
            batch.counts.failed,
            batch.counts.output_tokens,
        ) == (2, 1, 6)
        assert None not in (
            batch.in_progress_at,
            batch.finalizing_at,
            batch.completed_at,
        )
        assert [
            entry["custom_id"] for entry in content(found, batch.output_file_id)
        ] == ["a", "c"]
        assert [
            entry["custom_id"] for entry in content(found, batch.error_file_id)
        ] == ["b"]
        output = found.files.get(batch.output_file_id or "")
        assert (output.purpose, output.expires_at) == (
            "batch_output",
            output.created_at + 7200,
        )
        assert left_in(found) == []


async def test_invalid_lines_fail_the_batch_and_list_each_error(tmp_path: Path) -> None:
    endpoint = Endpoint()
    lines = [
        request("a"),
        b"nonsense\n",
        request("a"),
        request("b", url="/v1/embeddings"),
    ]
    async with batches_in(tmp_path, endpoint) as found:
        batch = await ended(found, found.create(CHAT, stored(found, lines)))
        assert (batch.status, endpoint.calls, batch.output_file_id) == (
            "failed",
            [],
            None,
        )
        assert [(error["code"], error["line"], error["param"]) for error in batch.errors] == [
            ("invalid_json_line", 2, None), ("duplicate_custom_id", 3, "custom_id"), ("invalid_url", 4, "url"),
        ]  # fmt: skip
        empty = await ended(found, found.create(CHAT, stored(found, [])))
        assert empty.status == "failed" and "no requests" in empty.errors[0]["message"]
        many = await ended(found, found.create(CHAT, stored(found, [b"x\n"] * 500)))
        assert len(many.errors) == 100
        assert left_in(found) == []


async def test_cancelled_batch_keeps_its_finished_answers(tmp_path: Path) -> None:
    endpoint = Endpoint()
    lines = [
        request("a"),
        request("b", "fail"),
        *(request(f"h{i}", "hold") for i in range(9)),
    ]
    async with batches_in(tmp_path, endpoint) as found:
        batch = found.create(CHAT, stored(found, lines))
        await until(lambda: endpoint.running == 4)
        found.cancel(batch)
        assert batch.status == "cancelling" and batch.cancelling_at
        await ended(found, batch)
        assert (batch.status, endpoint.running, endpoint.cancelled) == (
            "cancelled",
            0,
            4,
        )
        assert (batch.counts.completed, batch.counts.failed, batch.total) == (1, 1, 11)
        assert [
            entry["custom_id"] for entry in content(found, batch.output_file_id)
        ] == ["a"]
        codes = [
            (entry["error"] or {}).get("code")
            for entry in content(found, batch.error_file_id)
        ]
        assert codes == [None, *["batch_cancelled"] * 9]


async def test_batch_expires_after_its_window_and_keeps_its_answers(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint()
    async with batches_in(tmp_path, endpoint, window_s=0.3) as found:
        batch = found.create(CHAT, stored(found, [request("a"), request("b", "hold")]))
        batch.expires_at = batch.created_at + 3  # whole seconds
        await until(lambda: endpoint.running == 1)
        # This batch expires before its turn.
        later = found.create(CHAT, stored(found, [request("c")]))
        later.expires_at = batch.created_at + 2
        for each in (batch, later):
            await ended(found, each)
            assert each.status == "expired" and each.expired_at
        assert [
            entry["custom_id"] for entry in content(found, batch.output_file_id)
        ] == ["a"]
        errors = content(found, batch.error_file_id)
        assert [(entry["custom_id"], entry["error"]["code"]) for entry in errors] == [
            ("b", "batch_expired")
        ]
    async with batches_in(tmp_path, endpoint, window_s=float("inf")) as found:
        assert found.create(CHAT, stored(found, [request("a")])).expires_at is None


async def test_restarted_server_continues_batches_of_their_owner(
    tmp_path: Path,
) -> None:
    """Restarts the server while "bob" is the current owner.

    The batches continue, and still belong to "ann", who created them.
    """
    lines = [
        request("a", "first"),
        *(request(f"h{i}", "hold") for i in range(3)),
        request("z", "last"),
    ]
    before, endpoint = Endpoint(), Endpoint()
    async with batches_in(tmp_path, before, n_parallel=2) as found:
        current_owner.set("ann")
        batch = found.create(CHAT, stored(found, lines))
        waiting = found.create(CHAT, stored(found, [request("w", "waiting")]))
        await until(lambda: before.running == 2 and waiting.status == "in_progress")
    assert before.running == 0
    endpoint.released.set()
    current_owner.set("bob")
    async with batches_in(tmp_path, endpoint, n_parallel=2) as found:
        assert found.all() == []
        current_owner.set("ann")
        again = await ended(found, found.get(batch.id))
        assert (again.status, again.counts.completed, again.created_at) == (
            "completed",
            5,
            batch.created_at,
        )
        assert endpoint.texts[:4] == ["hold", "hold", "hold", "last"]
        assert (await ended(found, found.get(waiting.id))).status == "completed"
        assert [
            entry["custom_id"] for entry in content(found, again.output_file_id)
        ] == ["a", "h0", "h1", "h2", "z"]
    async with batches_in(tmp_path, endpoint) as found:
        assert [each.id for each in found.all()] == [waiting.id, batch.id]
        assert len(content(found, found.get(batch.id).output_file_id)) == 5
        assert len(endpoint.calls) == 5 and endpoint.owners == {"ann"}


@pytest.mark.parametrize("status", ["validating", "finalizing", "cancelling"])
async def test_killed_server_continues_a_batch_of_any_status(
    tmp_path: Path, status: str
) -> None:
    async with batches_in(tmp_path, Endpoint()) as found:
        batch = found.create(CHAT, stored(found, [request("a"), request("b", "hold")]))
        await until(lambda: batch.counts.done == 1)
        found._update(batch, status=status)
    endpoint = Endpoint()
    endpoint.released.set()
    async with batches_in(tmp_path, endpoint) as found:
        again = await ended(found, found.get(batch.id))
        assert again.status == ("cancelled" if status == "cancelling" else "completed")
        assert content(found, again.output_file_id)[0]["custom_id"] == "a"
        assert "hi" not in endpoint.texts
        assert left_in(found) == []


async def test_batch_waits_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "DISK_RETRY_S", 0.01)
    endpoint = Endpoint()
    async with batches_in(tmp_path, endpoint) as found:
        batch = found.create(
            CHAT, stored(found, [request("a", "y" * 9000), request("b", "y" * 9000)])
        )
        most = fill_disk(found.files.database)
        room_bytes = found.files.room()
        await until(lambda: len(endpoint.calls) > 4)
        assert batch.status == "in_progress"
        assert found.files.room() == room_bytes, (
            "answers that could not be stored take no space"
        )
        with pytest.raises(StorageError, match=r"disk is full.*make room"):
            found.create(CHAT, batch.input_file_id, {"key": "z" * 9000})
        found.files.database.execute(f"PRAGMA max_page_count = {most}")
        await ended(found, batch)
        assert (batch.status, batch.counts.completed) == ("completed", 2)
        assert len(content(found, batch.output_file_id)) == 2


async def test_storage_limit_counts_answers_of_a_running_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "DISK_RETRY_S", 0.01)
    endpoint = Endpoint()
    async with batches_in(tmp_path, endpoint, max_bytes=60_000) as found:
        ask = [request(str(number), "y" * 8000) for number in range(2)] + [
            request("held", "hold")
        ]
        batch = found.create(CHAT, stored(found, ask))
        await until(lambda: batch.counts.completed == 2)
        taken = 60_000 - found.files.room()
        assert taken > sum(map(len, ask)) + 2 * 8000, (
            "the requests, and two of the answers"
        )
    # The restarted server recounts the bytes of the answers in the database.
    async with batches_in(tmp_path, endpoint, max_bytes=60_000) as found:
        assert 60_000 - found.files.room() == taken
        found.cancel(found.get(batch.id))
        await ended(found, found.get(batch.id))
        assert 0 < 60_000 - found.files.room() - taken < 3 * DESCRIPTION_BYTES, (
            "as much as its two files of answers"
        )


async def test_batch_waits_for_storage_for_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches, "DISK_RETRY_S", 0.01)
    async with batches_in(tmp_path, Endpoint(), max_bytes=50_000) as found:
        input_id = stored(
            found, [request(str(number), "y" * 4000) for number in range(3)]
        )
        other = stored(
            found, [b"x" * (found.files.room() - 11_000 - DESCRIPTION_BYTES)]
        )
        batch = found.create(CHAT, input_id)
        await until(lambda: batch.counts.completed == 1)
        await until(lambda: caplog.text.count(f"{batch.id} waits for") > 1)
        assert (batch.status, batch.counts.completed) == ("in_progress", 1)
        found.files.delete(other)
        assert (await ended(found, batch)).status == "completed"
        assert batch.counts.completed == 3


async def test_create_rejects_unknown_files_wrong_purposes_and_too_many_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_UNFINISHED", 1)
    async with batches_in(tmp_path, Endpoint()) as found:
        for file_id in ("file-none", "../../etc/passwd", ""):
            with pytest.raises(UnknownIdError, match="No such File"):
                found.create(CHAT, file_id)
        with pytest.raises(UnknownIdError, match="No such Batch"):
            found.get("batch_none")
        with pytest.raises(BatchFileError, match="batch_output"):
            found.create(CHAT, stored(found, [request("a")], "batch_output"))
        found.create(CHAT, stored(found, [request("a", "hold")]))
        with pytest.raises(
            BusyError, match="may be unfinished, and this limit is reached"
        ):
            found.create(CHAT, stored(found, [request("a")]))


async def test_second_server_is_refused_the_folder_and_an_idle_one_creates_no_file(
    tmp_path: Path,
) -> None:
    async with batches_in(tmp_path, Endpoint()):
        pass
    assert list(tmp_path.iterdir()) == []
    async with batches_in(tmp_path, Endpoint()) as found:
        stored(found, [request("a")])
        async with batches_in(tmp_path, Endpoint()) as other:
            with pytest.raises(BusyError, match="another process is using"):
                other.all()
            with pytest.raises(BusyError, match="another process is using"):
                _ = other.files
    async with batches_in(tmp_path, Endpoint()) as other:
        assert len(other.files.all()) == 1


async def test_expired_and_unfinished_files_are_removed(tmp_path: Path) -> None:
    now = Mock(return_value=NOW_S)
    async with batches_in(tmp_path, Endpoint(), now=now) as found:
        with found.files.new() as file:
            file.write(b"x")
            short = file.finish("short", "batch", 3600)
        long = stored(found, [b"y"])
        with found.files.new() as file:
            file.write(b"never finished")
        now.return_value += 3601
        with pytest.raises(UnknownIdError):
            found.files.get(short.id)
        assert [file.id for file in found.files.all()] == [long]
    folder = tmp_path / "batches" / "files"
    assert [path.name for path in folder.iterdir()] == [f"{long}.data"]
    (folder / "file-1.data").write_text("of a killed process")
    (folder / ".file-2.data.x").write_text("of a killed process")
    async with batches_in(tmp_path, Endpoint()) as found:
        assert [file.id for file in found.files.all()] == [long]
        assert found.all() == [] and left_in(found) == []


async def test_expired_files_free_their_storage(tmp_path: Path) -> None:
    now = Mock(return_value=NOW_S)
    async with batches_in(tmp_path, Endpoint(), max_bytes=30_000, now=now) as found:
        with found.files.new() as file:
            file.write(b"x" * 20_000)
            file.finish("short", "batch", 3600)
        with pytest.raises(StorageError, match="MOEGGUF_STORAGE_LIMIT"):
            stored(found, [b"y" * 20_000])
        now.return_value += 3601
        long = stored(found, [b"y" * 20_000])
        assert [
            path.stem for path in (tmp_path / "batches" / "files").glob("*.data")
        ] == [long]


async def test_deleted_file_counts_as_storage_while_used_by_a_batch(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint()
    async with batches_in(tmp_path, endpoint, max_bytes=40_000) as found:
        input_id = stored(found, [request("a", "hold " + "x" * 20_000)])
        batches_of_it = [found.create(CHAT, input_id) for _ in range(2)]
        # Two batches share the file, so its bytes are counted once.
        stored(found, [b"y" * 2000])
        await until(lambda: endpoint.running == 1)
        found.files.delete(input_id)
        with pytest.raises(StorageError, match="MOEGGUF_STORAGE_LIMIT"):
            stored(found, [b"y" * 10_000])
    # The restarted server still counts the deleted file, because the batches use it.
    async with batches_in(tmp_path, endpoint, max_bytes=40_000) as found:
        with pytest.raises(StorageError, match="MOEGGUF_STORAGE_LIMIT"):
            stored(found, [b"y" * 10_000])
        for batch in batches_of_it:
            found.cancel(found.get(batch.id))
            await ended(found, batch)
        stored(found, [b"y" * 10_000])


async def test_event_loop_is_not_blocked_while_a_journal_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, n_opened = Endpoint(), 0
    reading, read_on = asyncio.Event(), threading.Event()
    loop, read = asyncio.get_running_loop(), Journal.read

    def slowly(journal: Journal, requests: Requests) -> None:
        nonlocal n_opened
        n_opened += 1
        loop.call_soon_threadsafe(reading.set)
        assert read_on.wait(30), "nothing else ran on the event loop meanwhile"
        read(journal, requests)

    monkeypatch.setattr(Journal, "read", slowly)
    async with batches_in(tmp_path, endpoint) as found:
        batch = found.create(CHAT, stored(found, [request("a"), request("b", "hold")]))
        await reading.wait()
        # Cancelling ends the step that reads the journal. The next step reopens the
        # journal.
        found.cancel(batch)
        await asyncio.sleep(0)
        assert batch.status == "cancelling"
        read_on.set()
        assert (await ended(found, batch)).status == "cancelled"
        assert n_opened == 2
        assert {
            entry["error"]["code"] for entry in content(found, batch.error_file_id)
        } == {"batch_cancelled"}


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
async def test_batch_files_are_readable_only_by_their_owner(
    tmp_path: Path, umask: int
) -> None:
    endpoint, folder = Endpoint(), tmp_path / "batches"

    def rights_of_others() -> list[str]:
        found = {path: path.stat().st_mode for path in (folder, *folder.rglob("*"))}
        return [
            f"{path.name}: {mode:o}" for path, mode in found.items() if mode & 0o077
        ]

    before = os.umask(umask)
    try:
        async with batches_in(tmp_path, endpoint) as found:
            input_id = stored(
                found, [request("a", "hold"), request("b", "fail"), request("c")]
            )
            batch = found.create(CHAT, input_id)
            with found.files.new() as upload:
                upload.write(b"x")
                await until(lambda: batch.counts.done == 2)
                assert rights_of_others() == []
            endpoint.released.set()
            await ended(found, batch)
            assert rights_of_others() == []
        # Makes all files accessible to other users, as files written by older versions
        # may be.
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        (folder / "link").symlink_to(outside := tmp_path / "outside")
        outside.touch()
        outside.chmod(0o644)
        async with batches_in(tmp_path, endpoint) as found:
            assert len(found.all()) == 1
            (folder / "link").unlink()
            assert rights_of_others() == []
            assert outside.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
