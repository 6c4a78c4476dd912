"""Tests the database of batches: folders from older versions, kills at random moments,
damage, other processes."""

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from batch_files import CHAT, Endpoint, entries, jsonl, request, requests_in
from crashing import run
from scripted_manager import until

from moegguf.errors import BusyError, StorageError
from moegguf.serving.batch.answers import open_journal
from moegguf.serving.batch.batches import Batches
from moegguf.serving.batch.database import FINAL, VERSION, Database
from moegguf.serving.batch.migration import DAMAGED
from moegguf.serving.clients import current_owner

# Batches of the last moegguf version that stored them without a database.
OLD = Path(__file__).parents[1] / "recorded" / "batches"
DONE, RUNNING, WAITING = (
    "batch_495fb70aaab34d00968874b9",
    "batch_f0c7898272bb442d9c0b5a4b",
    "batch_3199e7261b83429eb3565108",
)
UPLOADED, KEPT = "file-e0279802e0ce4671a50ff8ce", "file-f4db530794d344f59940eff2"
THEN_S = 1_795_900_000.0  # a time before the uploaded file expires
N_KILLS = int(os.environ.get("BATCH_KILLS", "8"))
N_REQUESTS = 40
N_PARALLEL = 3


def batches_in(folder: Path, endpoint: Endpoint) -> Batches:
    return Batches(
        folder,
        endpoint,
        max_bytes=1 << 30,
        n_parallel=N_PARALLEL,
        window_s=float("inf"),
        now=Mock(return_value=THEN_S),
    )


def old_folder(tmp_path: Path) -> Path:
    """Copies the older version's folder of batches into the test's folder. Returns the
    copy's path."""
    return shutil.copytree(OLD / "batches", tmp_path / "batches")


async def test_older_folder_is_imported_with_all_files_and_its_batches_continue(
    tmp_path: Path,
) -> None:
    folder, endpoint = old_folder(tmp_path), Endpoint()
    old_answers = entries(
        (folder / RUNNING / "answers.jsonl").read_bytes().rpartition(b"\n")[0]
    )
    outputs = {
        path.name: path.read_bytes() for path in (folder / "files").glob("*put.data")
    }
    endpoint.released.set()
    current_owner.set("ann")
    async with batches_in(folder, endpoint) as found:
        assert [batch.id for batch in found.all()] == [WAITING, RUNNING, DONE]
        done = found.get(DONE)
        assert (done.status, done.counts.completed, done.metadata) == (
            "completed",
            2,
            {"key": "value"},
        )
        files = {
            file.id: (file.filename, file.expires_at) for file in found.files.all()
        }
        assert files[UPLOADED] == ("done.jsonl", 1798467117) and files[KEPT] == (
            "kept.jsonl",
            None,
        )
        assert done.output_file_id in files and done.error_file_id in files
        await until(
            lambda: all(
                found.get(batch).status in FINAL for batch in (RUNNING, WAITING)
            )
        )
        running = found.get(RUNNING)
        assert (running.status, running.counts.completed, running.counts.failed) == (
            "completed",
            4,
            1,
        )
        answers = [
            each
            for name in (running.output_file_id, running.error_file_id)
            for each in entries(found.files.contents(name))
        ]
        assert all(answer in answers for answer in old_answers) and len(answers) == 5
        assert endpoint.texts == ["hold"] * 3 + ["first", "fail"] + ["hold"] * 3
        assert outputs == {
            name: (folder / "files" / name).read_bytes() for name in outputs
        }
    names = {path.name for path in folder.iterdir()}
    assert names == {"batches.db", "files"} and not list(
        (folder / "files").glob("*.json")
    )


async def test_damaged_parts_of_an_older_folder_are_kept_beside_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, endpoint = old_folder(tmp_path), Endpoint()
    endpoint.released.set()
    broken = [
        folder / f"{WAITING}.json",
        folder / "files" / f"{KEPT}.json",
        folder / RUNNING / "answers.jsonl",
    ]
    for path in broken:
        path.write_bytes(b"damaged\n")
    contents = [folder / WAITING / "requests.jsonl", folder / "files" / f"{KEPT}.data"]
    expected = {
        path.relative_to(folder): path.read_bytes() for path in (*broken, *contents)
    }
    current_owner.set("ann")
    async with batches_in(folder, endpoint) as found:
        assert [batch.id for batch in found.all()] == [RUNNING, DONE]
        assert KEPT not in {file.id for file in found.files.all()}
        await until(lambda: found.get(RUNNING).status in FINAL)
        assert found.get(RUNNING).counts.done == 5, (
            "all requests of the damaged journal are answered again"
        )
    assert expected == {
        path: (folder / DAMAGED / path).read_bytes() for path in expected
    }
    assert all(
        f"{path} of an older version is damaged" in caplog.text for path in broken
    )


def test_kill_during_the_import_of_an_older_folder_loses_nothing(
    tmp_path: Path,
) -> None:
    assert int(run("batches", old_folder(tmp_path))) >= 10


async def test_folder_locked_by_an_older_server_is_not_imported(tmp_path: Path) -> None:
    folder = old_folder(tmp_path)
    holder = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, folder / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout and process.stdout.readline()
        async with batches_in(folder, Endpoint()) as found:
            with pytest.raises(BusyError, match="another process is using"):
                found.all()
        process.kill()
    assert (folder / f"{DONE}.json").exists()
    async with batches_in(folder, Endpoint()) as found:
        current_owner.set("ann")
        assert len(found.all()) == 3


def test_open_journal_imports_an_older_journal(tmp_path: Path) -> None:
    shutil.copy(OLD / "answers.partial", tmp_path)
    *old, _ = (OLD / "answers.partial").read_bytes().splitlines(keepends=True)
    with (
        requests_in(tmp_path / "requests", entries(OLD / "requests.jsonl")) as requests,
        open_journal(tmp_path / "answers.partial.db", requests) as journal,
    ):
        assert list(journal.answered.items()) == [(1, True), (2, False)]
        assert list(journal.lines()) == old
        with (
            pytest.raises(BusyError, match="another process"),
            open_journal(journal.database.path, requests),
        ):
            pass


def test_open_journal_raises_storage_error_for_an_older_journal_that_is_no_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "answers.partial").mkdir()
    with (
        requests_in(tmp_path / "requests", entries(OLD / "requests.jsonl")) as requests,
        pytest.raises(StorageError, match=r"answers\.partial .*not a regular file"),
        open_journal(tmp_path / "answers.partial.db", requests),
    ):
        pass


def test_transaction_that_raises_is_rolled_back(tmp_path: Path) -> None:
    database = Database(tmp_path / "db", 0o600)
    add = "INSERT INTO answer VALUES ('', ?, '', 'x')"

    def fail() -> None:
        with database.transaction():
            database.execute(add, 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with database.transaction():
        database.execute(add, 2)
    assert database.execute("SELECT number FROM answer") == [(2,)]
    database.close()


def test_database_in_an_unwritable_folder_raises_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "db"
    Database(path, 0o600).close()
    refused = sqlite3.OperationalError("attempt to write a readonly database")
    with (
        patch("sqlite3.connect", side_effect=refused),
        pytest.raises(StorageError, match="its folder writable"),
    ):
        Database(path, 0o600)


def test_locked_database_rejects_another_process_and_stays_unchanged(
    tmp_path: Path,
) -> None:
    code = "import sys; from pathlib import Path; from moegguf.serving.batch.database import *\n"
    code += "try: Database(Path(sys.argv[1]), 0o600)\nexcept BusyError as error: print(error)"
    database = Database(tmp_path / "db", 0o600)
    database.execute("INSERT INTO answer VALUES ('', 1, '', 'x')")
    done = subprocess.run(
        [sys.executable, "-c", code, database.path], capture_output=True, text=True
    )
    assert f"another process is using {database.path}" in done.stdout, done.stderr
    assert database.execute("SELECT number FROM answer") == [(1,)]
    database.close()


@pytest.mark.parametrize("damage", ["text", "newer", "page", "folder"])
async def test_unreadable_database_raises_storage_error_and_stays_unchanged(
    tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "batches"
    async with batches_in(folder, Endpoint()) as found:
        with found.files.new() as file:
            file.write(jsonl([request("a")]))
            file.finish("a", "batch")
    path = folder / "batches.db"
    if damage == "text":
        path.write_bytes(b"no database " * 1000)
    elif damage == "newer":
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version = {VERSION + 1}")
        connection.close()
    elif damage == "page":
        path.write_bytes(
            path.read_bytes()[:4096] + b"\xff" * (path.stat().st_size - 4096)
        )
    else:
        path.unlink()
        path.mkdir()
    before = path.read_bytes() if path.is_file() else b""
    async with batches_in(folder, Endpoint()) as found:
        for call in (
            found.all,
            lambda: found.files,
            lambda: found.create(CHAT, "file-none"),
        ):
            with pytest.raises(
                StorageError,
                match=r"batches\.db .*(to start over|to start with an empty one|make room)",
            ):
                call()
    assert before == (path.read_bytes() if path.is_file() else b"")
    assert list((folder / "files").glob("*.data")), (
        "the contents are there when the database is put back"
    )


KILLED = """
import asyncio, json, sys
from pathlib import Path
from moegguf.serving.batch.answers import Reply
from moegguf.serving.batch.batches import Batches

async def answer(url, body):
    text = json.loads(body)["messages"][-1]["content"]
    with open(sys.argv[2], "a") as log:
        log.write(text + chr(10))
    await asyncio.sleep(0.001)
    return Reply(200, {"text": text})

async def main():
    async with Batches(Path(sys.argv[1]), answer, max_bytes=1 << 30, n_parallel=3, window_s=float("inf")) as found:
        print("open", flush=True)
        while True:
            if all(batch.status == "completed" for batch in found.all()):
                with found.files.new() as file:
                    for i in range(%d):
                        body = {"messages": [{"role": "user", "content": str(i)}]}
                        line = {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
                        file.write(json.dumps(line).encode() + b"\\n")
                    made = file.finish("requests", "batch").id
                batch = found.create("/v1/chat/completions", made)
                found.files.delete(made)
                print(batch.id, flush=True)
            await asyncio.sleep(0.002)

asyncio.run(main())
"""


def test_kill_of_the_server_neither_loses_nor_repeats_an_answer(tmp_path: Path) -> None:
    """Starts a server N_KILLS times and kills it at a random moment. Afterwards, every
    batch has exactly one copy of each answer."""
    folder, dice = tmp_path / "batches", random.Random(1)
    command = [sys.executable, "-c", KILLED % N_REQUESTS, folder, tmp_path / "log"]
    acknowledged: set[str] = set()
    for _ in range(N_KILLS):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout and process.stdout.readline() == "open\n", (
                process.communicate()
            )
            time.sleep(dice.uniform(0.0, 0.2))
            assert process.poll() is None, process.communicate()
            process.send_signal(signal.SIGKILL)
            output, _ = process.communicate()
        acknowledged |= {line for line in output.splitlines() if len(line) == len(DONE)}

    async def finish() -> dict[str, list[str]]:
        async with batches_in(folder, Endpoint()) as found:
            await until(lambda: not found._tasks)
            assert all(batch.status in FINAL for batch in found.all())
            assert found.files.database.execute("SELECT * FROM answer") == []
            assert {file.id for file in found.files.all()} == {
                path.stem for path in (folder / "files").iterdir()
            }
            outputs = {
                batch.id: entries(found.files.contents(batch.output_file_id or ""))
                for batch in found.all()
            }
            return {
                batch: [entry["custom_id"] for entry in output]
                for batch, output in outputs.items()
            }

    answers = asyncio.run(finish())
    assert acknowledged and acknowledged <= set(answers)
    assert all(
        answer == [str(i) for i in range(N_REQUESTS)] for answer in answers.values()
    )
    n_computed = len((tmp_path / "log").read_bytes().splitlines())
    assert n_computed <= N_REQUESTS * len(answers) + N_PARALLEL * N_KILLS, (
        "answers that were stored are not made again"
    )
    print(
        f"{N_KILLS} kills, {len(answers)} batches, {N_REQUESTS * len(answers)} answers, {n_computed} computed"
    )
