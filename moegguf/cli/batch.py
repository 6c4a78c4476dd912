"""`moegguf batch`: a file of requests in OpenAI's batch format, answered by a running
server or by models loaded here.

Each answer is stored when it is complete. If a command that writes a file of answers is
stopped or killed, running the same command again continues its work. Progress and the
summary go to stderr.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from moegguf.atomic_write import DESCRIPTOR, can_be_replaced
from moegguf.cli.options import (
    Flag,
    Given,
    argument,
    flags,
    loading_options,
    model_flag,
)
from moegguf.errors import BatchFileError, MoeggufError
from moegguf.options import MAX_BATCH_PARALLEL, OF_EVERY_LOAD
from moegguf.terminal.loading import find_or_pull
from moegguf.terminal.messages import EXIT_FAILURE, EXIT_INTERRUPTED, print_message
from moegguf.terminal.progress import Spinner, duration
from moegguf.text import without_surrogates

if TYPE_CHECKING:
    from moegguf.chat.client import Client
    from moegguf.models.entry import ModelEntry
    from moegguf.serving.batch.answers import Answer, Counts, Entry, Journal, Requests
    from moegguf.settings import Settings

    Answering = AbstractAsyncContextManager[Answer]

WriteLine = Callable[[bytes], object]
"""A function that writes one line of the answers immediately."""

STANDARD = "-"
ANSWERS_SUFFIX = ".answers.jsonl"
JOURNAL_SUFFIX = ".partial.db"
# Lowest limit on simultaneous requests to models loaded here, unless --parallel is
# given.
MODELS_PARALLEL = 32
# Minimum number of seconds between two lines of progress if no progress bar can be
# shown.
LINE_S = 10.0

LOADING = (*OF_EVERY_LOAD, "n_ctx", "kv_tokens", "mirror")
"""Options of a load for which this command has flags."""
RequestFile = Annotated[
    str,
    argument(
        "REQUESTS",
        'File with one request per line: {"custom_id", "method": "POST", "url": "/v1/chat/completions",'
        ' "body"}. - reads stdin.',
    ),
]
FLAGS = (
    Flag("--output -o", "FILE",
        "File for the answers, a pipe, or - for stdout.  [default: NAME.answers.jsonl beside REQUESTS; stdout if"
        " REQUESTS is a pipe]"),
    Flag("--model -m", "MODEL", "Model for requests that do not name one."),
    Flag("--parallel", "N",
        "Requests to answer at once.  [default: MOEGGUF_BATCH_PARALLEL, or 16; for models loaded here, at"
        " least 32]",
        None, int, {"min": 1, "max": MAX_BATCH_PARALLEL}),
    model_flag("--local", None,
        "Load models here even if a server is running. Options of loading imply --local.", False),
)  # fmt: skip


@flags(*LOADING, own=FLAGS)
def batch(requests: RequestFile, *, given: Given, **chosen: Any) -> int:
    """Answer a file of requests in OpenAI's batch format.

    A running server that has the models answers after its other clients; otherwise, the
    models are loaded here. After an interruption, the same command continues. Until the
    end, answers are in FILE.partial.db. The exit code is 1 if a request failed, and its
    line has the reason.
    """
    from moegguf.chat.client import running_server
    from moegguf.server.batches import ENDPOINTS
    from moegguf.serving.batch.answers import Requests, finished_counts
    from moegguf.settings import n_parallel, read_settings

    settings, model, parallel = read_settings(), chosen["model"], chosen["parallel"]
    here = chosen["local"] or bool(given)
    settings = replace(settings, loading=loading_options(given, LOADING))
    target = _output_path(requests, chosen["output"])
    with ExitStack() as opened:
        write_line = (
            None
            if target is not None
            else opened.enter_context(_open_stream(chosen["output"]))
        )
        file = opened.enter_context(_open_requests(requests))
        found = Requests(
            file,
            ENDPOINTS,
            {} if model is None else {"model": without_surrogates(model)},
        )
        answers = opened.enter_context(_open_answers(target, found))
        if target is not None and (done := finished_counts(target, found)) is not None:
            # A process that was killed just before its end may have left a journal.
            answers.remove()
            print_message(
                f"{target} has all {len(found.lines):,} answers already; nothing to do."
            )
            return EXIT_FAILURE if done.failed else 0
        client = None if here else running_server(found.models)
        n_at_once = parallel or settings.batch_parallel
        if client is not None:
            answering: Answering = _answers_of_server(client)
        else:
            given_models = []
            if model is not None:
                entry, name = find_or_pull(model), without_surrogates(model)
                # Requests contain the name without surrogates, so the model is also
                # found by this name.
                given_models = [replace(entry, name=name)] if name != model else []
            n_at_once = parallel or max(n_at_once, n_parallel(), MODELS_PARALLEL)
            n_needed = max(1, min(len(found.lines), n_at_once))
            settings = replace(
                settings, loading={**settings.loading, "n_parallel": n_needed}
            )
            answering = _answers_of_models_here(settings, given_models)
        return _answer_to_end(found, target, write_line, answers, n_at_once, answering)


def _output_path(requests: str, output: str | None) -> Path | None:
    """Returns the path of the file for all answers, or None if each answer is written
    immediately to stdout, a pipe or a device. Raises BadParameter if the path is a
    folder, is in a missing folder, or is the file of requests."""
    source = Path(requests).expanduser()
    if output == STANDARD or (
        output is None and (requests == STANDARD or not can_be_replaced(source))
    ):
        return None
    path = Path(output).expanduser() if output else source.with_suffix(ANSWERS_SUFFIX)
    if path.is_dir() or not path.parent.is_dir():
        raise typer.BadParameter(
            f"{path} cannot hold the answers, because it is a folder or its folder is missing; name another"
            " file, or create its folder",
            param_hint="--output",
        )
    if (
        requests != STANDARD
        and path.exists()
        and source.exists()
        and path.samefile(source)
    ):
        raise typer.BadParameter(
            f"{path} is the file of requests; name another file for the answers",
            param_hint="--output",
        )
    return path if can_be_replaced(path) else None


@contextmanager
def _open_stream(output: str | None) -> Iterator[WriteLine]:
    """Opens the output for answers: stdout, a descriptor of this process, a device, or
    a pipe that another process reads. Yields a function that writes a line to the
    output. Raises BatchFileError if the output cannot be opened."""
    from moegguf.serving.batch.answers import write_all
    from moegguf.serving.batch.database import storing

    if output is None or output == STANDARD:
        yield _write_to_stdout
        return
    path = Path(output).expanduser()
    try:
        handle = _open_for_writing(path)
    except OSError as error:
        why = "no process reads it" if error.errno == errno.ENXIO else error.strerror
        raise BatchFileError(
            f"cannot write answers to {path} ({why}); name a file, a pipe that a process reads, or - for stdout."
        ) from None

    def write_line(line: bytes) -> None:
        with storing(path):
            write_all(handle, line)

    try:
        yield write_line
    finally:
        os.close(handle)


def _write_to_stdout(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _open_for_writing(path: Path) -> int:
    """Opens a pipe or a device for writing, without waiting for a reader. If `path`
    stands for a descriptor of this process, duplicates the descriptor, because the path
    of a socket cannot be opened. Raises OSError for a block device, for a descriptor
    that is open only for reading, and if the path cannot be opened."""
    if named := DESCRIPTOR.fullmatch(os.path.abspath(path)):
        number = (
            ("stdin", "stdout", "stderr").index(named[1]) if named[1] else int(named[2])
        )
        handle = os.dup(number)
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            os.close(handle)
            raise OSError(errno.EBADF, "it is open for reading only")
        return handle
    if stat.S_ISBLK(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is a disk")
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(handle, True)
    return handle


def _open_requests(path: str) -> BinaryIO:
    """Opens the file of requests. Stdin, or a file that is not seekable (such as a
    pipe), is first copied to a temporary file. Raises BatchFileError if the requests
    cannot be read."""
    try:
        source: BinaryIO = (
            sys.stdin.buffer if path == STANDARD else Path(path).expanduser().open("rb")
        )
    except OSError as error:
        raise BatchFileError(
            f"cannot read {path} ({error.strerror}); check the path."
        ) from None
    if path != STANDARD and source.seekable():
        return source
    try:
        copy: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        shutil.copyfileobj(source, copy)
    except OSError as error:
        raise BatchFileError(
            f"{path} cannot be copied to a temporary file ({error.strerror}); make room in the temporary folder, set"
            " TMPDIR to another folder, or give a file."
        ) from None
    return copy


@contextmanager
def _open_answers(target: Path | None, requests: Requests) -> Iterator[Journal]:
    """Context manager that opens the journal (the database of finished answers) in the
    folder of `target`. Without `target`, the journal is in a temporary folder. Raises
    BatchFileError or StorageError."""
    from moegguf.serving.batch.answers import open_journal

    with (
        tempfile.TemporaryDirectory()
        if target is None
        else nullcontext(target.parent) as folder
    ):
        name = "stdout" if target is None else target.name
        with open_journal(Path(folder, name + JOURNAL_SUFFIX), requests) as journal:
            yield journal


@asynccontextmanager
async def _answers_of_server(client: Client) -> AsyncIterator[Answer]:
    """Yields a function that sends a request to a server and returns the reply. The
    requests have the lowest priority, so the server answers other clients first. There
    is no time limit."""
    import httpx2

    from moegguf.chat.client import not_json
    from moegguf.serving.batch.answers import Reply

    headers = {**client.headers, "Content-Type": "application/json", "Priority": "u=7"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    proxies = not client.host.is_loopback
    async with httpx2.AsyncClient(
        headers=headers, limits=limits, timeout=None, trust_env=proxies
    ) as session:

        async def answer(url: str, body: bytes) -> Reply:
            try:
                reply = await session.post(client.host.url + url, content=body)
                return Reply(reply.status_code, reply.json())
            except httpx2.HTTPError:
                raise client.no_server() from None
            except ValueError:
                raise not_json() from None

        yield answer


@asynccontextmanager
async def _answers_of_models_here(
    settings: Settings, given: Sequence[ModelEntry]
) -> AsyncIterator[Answer]:
    """Yields a function that answers a request with a model that this command loads.
    The entries in `given` replace entries of the catalog with the same names."""
    from moegguf.models.catalog import Catalog
    from moegguf.server.batches import new_state, reply_in_process
    from moegguf.serving.model_manager import ModelManager

    catalog = Catalog(given=given)
    async with ModelManager(catalog, settings) as manager:
        yield partial(reply_in_process, new_state(manager, catalog, settings))


def _progress_text(now: Counts, before: Counts, n_total: int, seconds: float) -> str:
    """Returns the progress as text: "117 of 1,000 answered, 3 failed · 45 tokens/s ·
    1m57s left".

    The speed counts the tokens of answers, or the tokens of prompts if the answers have
    no tokens. `before`: the counts at the start, `seconds` ago.
    """
    failed = f", {now.failed:,} failed" if now.failed else ""
    parts = [f"{now.done - now.failed:,} of {n_total:,} answered{failed}"]
    n_tokens = (
        now.output_tokens - before.output_tokens
        or now.input_tokens - before.input_tokens
    )
    # A refused request has no tokens, and says nothing about the time of the others.
    if n_tokens and (n_new := now.done - before.done) and seconds > 0:
        parts.append(f"{n_tokens / seconds:,.0f} tokens/s")
        n_left = n_total - now.done
        parts += [f"{duration(round(n_left * seconds / n_new))} left"] if n_left else []
    return " · ".join(parts)


def _answer_to_end(
    requests: Requests,
    target: Path | None,
    write_line: WriteLine | None,
    answers: Journal,
    n_parallel: int,
    answering: Answering,
) -> int:
    """Answers the requests that have no answer yet. Returns the exit code: 0,
    EXIT_FAILURE if a request failed, or EXIT_INTERRUPTED after Ctrl-C. Writes all
    answers to the file `target` at the end, or each answer immediately with
    `write_line`. Raises a MoeggufError that stops the whole batch."""
    from moegguf.serving.batch.answers import answer_requests, to_line

    n_total, counts, before = (
        len(requests.lines),
        answers.counts,
        replace(answers.counts),
    )
    start_s = said_s = time.monotonic()
    if counts.done:
        print_message(f"continuing: {counts.done:,} of {n_total:,} are answered")

    def text() -> str:
        return _progress_text(counts, before, n_total, time.monotonic() - start_s)

    def report(entry: Entry | None = None) -> None:
        nonlocal said_s
        if entry is not None and write_line is not None:
            write_line(to_line(entry))
        if bar.visible:
            bar.show(text(), counts.done / n_total)
        elif time.monotonic() - said_s >= LINE_S and counts.done < n_total:
            said_s = time.monotonic()
            print_message(text())

    async def answer_all() -> None:
        report()
        async with answering as answer:
            await answer_requests(requests, answers, answer, n_parallel, report)

    try:
        with Spinner() as bar:
            asyncio.run(answer_all())
    except (KeyboardInterrupt, MoeggufError) as error:
        again = "" if target is None else "; the same command goes on"
        print_message(f"stopped: {counts.done:,} of {n_total:,} are answered{again}")
        if isinstance(error, MoeggufError):
            raise
        return EXIT_INTERRUPTED
    tokens = f"{counts.input_tokens:,} tokens read, {counts.output_tokens:,} written"
    where = "" if target is None else f" · {target}"
    print_message(
        f"{text()} · {tokens} · {duration(round(time.monotonic() - start_s))}{where}"
    )
    if target is not None:
        answers.finish(target)
    return EXIT_FAILURE if counts.failed else 0
