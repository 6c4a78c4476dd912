"""Tests `moegguf batch` with and without a server, after a stop or a kill, and with a
changed file of requests."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from batch_files import CHAT, entries, jsonl, request, requests_in
from servers import Command, Server, TinyModel, serving, started
from waiting import until

from moegguf.serving.batch.answers import Requests, open_journal, response_entry

# Number of requests, large enough that the first answers arrive long before the last.
N = 60
ALONE = {"MOEGGUF_HOST": "127.0.0.1:9", "OMP_NUM_THREADS": "1"}


def question(i: int, **body: Any) -> dict[str, Any]:
    return request(
        f"q{i}", f"What is an expert? {i}", **{"max_tokens": 6, "seed": i, **body}
    )


def written(tmp_path: Path, lines: list[Any]) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(jsonl(lines))
    return path


def texts(found: list[Any]) -> list[str]:
    return [
        entry["response"]["body"]["choices"][0]["message"]["content"] for entry in found
    ]


def wait_for(process: subprocess.Popen[str], database: Path, n_answers: int) -> None:
    """Waits until the database's write-ahead log has more than `n_answers` answers.
    Fails if the process exits before that.
    """
    log = Path(f"{database}-wal")

    def has_more() -> bool:
        return (
            log.exists()
            and len(set(re.findall(rb"batch_req_\w+", log.read_bytes()))) > n_answers
        )

    until(lambda: process.poll() is not None or has_more(), 60)
    assert process.poll() is None, process.communicate()


def test_batch_without_a_server_answers_a_file_and_reports_failures(
    here: Command, tmp_path: Path
) -> None:
    lines = [question(0, model=None), question(1), b"nonsense\n", question(2, model="nothing"),
             request("e", url="/v1/completions", prompt="moegguf is", max_tokens=4)]  # fmt: skip
    path = written(tmp_path, lines)
    done = here("batch", path, "-m", "demo", **ALONE)
    assert (done.returncode, done.stdout) == (1, "")
    found = entries(tmp_path / "requests.answers.jsonl")
    assert [entry["custom_id"] for entry in found] == ["q0", "q1", None, "q2", "e"]
    assert [(entry["response"] or {}).get("status_code") for entry in found] == [
        200,
        200,
        None,
        404,
        200,
    ]
    assert all(texts(found[:2]))
    assert re.search(r"^3 of 5 answered, 2 failed · .*tokens/s · \d+ tokens read, \d+ written · .*\.answers\.jsonl$",
                     done.stderr, re.MULTILINE)  # fmt: skip
    before = (tmp_path / "requests.answers.jsonl").read_bytes()
    partial = tmp_path / "requests.answers.jsonl.partial"
    # An older version leaves such a file if it is killed between its last two steps.
    partial.write_bytes(before)
    again = here("batch", path, "-m", "demo", **ALONE)
    assert again.returncode == 1 and "nothing to do" in again.stderr
    assert (
        tmp_path / "requests.answers.jsonl"
    ).read_bytes() == before and not partial.exists()
    other = here("batch", path, "-m", "other", **ALONE)
    assert (
        other.returncode == 1
        and "does not hold the answers to these requests" in other.stderr
    )


def test_batch_by_a_server_gives_the_texts_of_a_local_batch(
    here: Command, server: Server, tmp_path: Path
) -> None:
    path = written(tmp_path, [question(i, model="demo") for i in range(6)])
    served = here(
        "batch",
        path,
        "-o",
        tmp_path / "served",
        "--parallel",
        3,
        MOEGGUF_HOST=server.url,
    )
    assert served.returncode == 0, served.stderr
    assert "demo:latest" in server.loaded()
    server.call("/api/generate", {"model": "demo", "keep_alive": 0})
    alone = here(
        "batch", path, "-o", tmp_path / "here", "--local", MOEGGUF_HOST=server.url
    )
    assert alone.returncode == 0 and "demo:latest" not in server.loaded()
    assert texts(entries(tmp_path / "served")) == texts(entries(tmp_path / "here"))
    bad = question(1, max_tokens="many")
    done = here("batch", written(tmp_path, [bad]), "-o", "-", MOEGGUF_HOST=server.url)
    (entry,) = entries(done.stdout.encode())
    assert (done.returncode, entry["response"]["body"]) == (
        1,
        server.call(CHAT, bad["body"]).json,
    )


def test_batch_reads_stdin_and_writes_stdout_or_a_file(
    moegguf: Command, tmp_path: Path
) -> None:
    text = jsonl([question(i) for i in range(3)]).decode()
    done = moegguf("batch", "-", stdin=text, **ALONE)
    assert done.returncode == 0 and len(entries(done.stdout.encode())) == 3
    assert re.search(r"^3 of 3 answered ·", done.stderr, re.MULTILINE)
    done = moegguf("batch", "-", "-o", tmp_path / "answers", stdin=text, **ALONE)
    assert (done.returncode, done.stdout) == (0, "") and len(
        entries(tmp_path / "answers")
    ) == 3


def test_batch_loads_a_model_from_a_path_that_is_not_utf8(
    here: Command, tmp_path: Path, tiny: TinyModel
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "m.gguf").symlink_to(tiny())
    path = written(folder, [question(0, model=None)])
    done = here("batch", path, "-m", folder / "m.gguf", **ALONE)
    assert done.returncode == 0, done.stderr
    assert texts(entries(folder / "requests.answers.jsonl"))


@contextmanager
def fifo(folder: Path) -> Iterator[tuple[Path, int]]:
    os.mkfifo(path := folder / "pipe")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reader
    os.close(reader)


@contextmanager
def descriptor_of_a_socket(_: Path) -> Iterator[tuple[Path, int]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Path(f"/dev/fd/{theirs.fileno()}"), ours.fileno()


@contextmanager
def descriptor_of_a_file(folder: Path) -> Iterator[tuple[Path, int]]:
    with (folder / "file").open("w+b") as file:
        file.write(b"before\n")
        file.flush()
        yield (
            Path(f"/proc/self/fd/{file.fileno()}"),
            os.open(folder / "file", os.O_RDONLY),
        )


@pytest.mark.parametrize("made", [fifo, descriptor_of_a_socket, descriptor_of_a_file])
def test_batch_writes_to_a_pipe_or_descriptor_without_other_files(
    tmp_path: Path, here: Command, made: Any
) -> None:
    path = written(tmp_path, [question(i) for i in range(2)])
    with made(tmp_path) as (target, reader):
        before = sorted(tmp_path.iterdir())
        done = here("batch", path, "-o", target, **ALONE)
        assert done.returncode == 0, done.stderr
        assert len(entries(os.read(reader, 1 << 20).removeprefix(b"before\n"))) == 2
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("pipe", "no process reads it"),
        ("/dev/fd/987", "Bad file descriptor"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_batch_into_an_unwritable_target_fails_and_leaves_no_file(
    tmp_path: Path, here: Command, target: str, why: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = written(tmp_path, [b"nonsense\n"])
    before = sorted(tmp_path.iterdir())
    done = here("batch", path, "-o", tmp_path / target, **ALONE)
    assert done.returncode == 1 and why in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_batch_of_requests_from_a_pipe_writes_answers_to_stdout(
    tmp_path: Path, here: Command
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    Thread(target=pipe.write_bytes, args=[jsonl([question(0)])], daemon=True).start()
    done = here("batch", pipe, **ALONE)
    assert (done.returncode, len(entries(done.stdout.encode()))) == (0, 1)
    assert list(tmp_path.iterdir()) == [pipe]


def test_the_answers_file_has_the_mode_of_the_umask(
    tmp_path: Path, here: Command
) -> None:
    before = os.umask(0o077)
    try:
        here(
            "batch",
            written(tmp_path, [b"nonsense\n"]),
            "-o",
            tmp_path / "answers",
            **ALONE,
        )
    finally:
        os.umask(before)
    assert (tmp_path / "answers").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_batch_resumes_from_its_journal(
    tmp_path: Path, moegguf: Command, number: signal.Signals
) -> None:
    path = written(tmp_path, [question(i, max_tokens=10) for i in range(N)])
    partial, target = tmp_path / "answers.partial.db", tmp_path / "answers"
    with started("batch", path, "-o", target, "--parallel", 2, **ALONE) as process:
        wait_for(process, partial, 3)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    if number == signal.SIGINT:
        assert re.search(
            rf"stopped: \d+ of {N} are answered; the same command goes on\n", stderr
        )
        assert "Traceback" not in stderr
    with (
        path.open("rb") as file,
        open_journal(partial, Requests(file, (CHAT,))) as journal,
    ):
        seen = entries(b"".join(journal.lines()))
    assert len(seen) >= 3
    done = moegguf("batch", path, "-o", target, **ALONE)
    assert (
        done.returncode == 0
        and f"continuing: {len(seen)} of {N} are answered" in done.stderr
    )
    found = entries(target)
    assert [entry["custom_id"] for entry in found] == [f"q{i}" for i in range(N)]
    assert all(entry in found for entry in seen)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "answers",
        "requests.jsonl",
    ]


def test_a_batch_resumes_locally_after_its_server_is_killed(
    tmp_path: Path, moegguf: Command
) -> None:
    path, target = (
        written(tmp_path, [question(i, max_tokens=20) for i in range(30)]),
        tmp_path / "answers",
    )
    with (
        serving(tmp_path / "first") as server,
        started(
            "batch", path, "-o", target, "--parallel", 2, MOEGGUF_HOST=server.url
        ) as process,
    ):
        wait_for(process, tmp_path / "answers.partial.db", 3)
        os.killpg(server.pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert (
        process.returncode == 1
        and "the same command goes on" in stderr
        and "error: " in stderr
    )
    done = moegguf("batch", path, "-o", target, **ALONE)
    assert done.returncode == 0, done.stderr
    assert [entry["response"]["status_code"] for entry in entries(target)] == [200] * 30


def test_batch_refuses_a_journal_in_use_or_of_changed_requests(
    tmp_path: Path, here: Command
) -> None:
    target, partial = tmp_path / "answers", tmp_path / "answers.partial.db"
    with requests_in(
        tmp_path / "requests.jsonl", [question(i) for i in range(4)]
    ) as requests:
        with open_journal(partial, requests) as journal:
            journal.append(1, response_entry(requests, requests.lines[0], 200, {}))
            second = here("batch", tmp_path / "requests.jsonl", "-o", target, **ALONE)
            assert second.returncode == 1
            assert "try again when the process has ended" in " ".join(
                second.stderr.split()
            )
        changed = here(
            "batch",
            written(tmp_path, [question(i) for i in range(5)]),
            "-o",
            target,
            **ALONE,
        )
        assert changed.returncode == 1 and "has changed since" in changed.stderr
        with open_journal(partial, requests) as journal:
            assert list(journal.answered) == [1]
