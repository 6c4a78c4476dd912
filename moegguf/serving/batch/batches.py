"""Batches that a server answers. A batch reads a stored file of requests, and stores a
file of answers and a file of errors.

The requests of a new batch are checked immediately. Only one batch at a time is
answered. The batches are in a database, so that a restarted server can continue
unfinished batches. A step that fails because of a disk error is retried later. If a
batch expires or is cancelled, its files contain the answers that were finished by then,
and an error for every other request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from moegguf.atomic_write import OWNER_ONLY, make_private
from moegguf.errors import BatchFileError, BusyError, UnknownIdError
from moegguf.regular_file import open_regular
from moegguf.serving.batch import answers
from moegguf.serving.batch.answers import Counts, Journal, LineError, Requests
from moegguf.serving.batch.database import FINAL, Database, storing
from moegguf.serving.batch.files import FileStore
from moegguf.serving.batch.migration import migrate
from moegguf.serving.clients import current_owner, is_visible

log = logging.getLogger(__name__)
Result = TypeVar("Result")

INPUT_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
DATABASE = "batches.db"
CANCELLABLE = ("validating", "in_progress")
# Maximum number of requests in a batch, the same as OpenAI's limit.
MAX_REQUESTS = 50_000
MAX_UNFINISHED = 1000
MAX_ERRORS = 100
DISK_RETRY_S = 30.0
CANCELLED, EXPIRED = answers.NOT_EXECUTED
NOT_EXECUTED_TEXT = {
    CANCELLED: "This request was not executed, because the batch was cancelled.",
    EXPIRED: "This request could not be executed before the completion window expired.",
}


@dataclass
class Batch:
    """A batch. Most fields are named as in OpenAI's batch objects. Fields that end with
    `_at` are times in seconds since 1970, or None."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    created_ns: int
    expires_at: int | None
    status: str = "validating"
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    # The model of all requests; None: several models, none, or not checked yet.
    model: str | None = None
    total: int = 0  # number of requests
    counts: Counts = field(default_factory=Counts)
    # errors of a failed batch: one for each invalid line (at most MAX_ERRORS), or one
    # for the whole batch
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    # The batch is visible only to this owner's requests (`is_visible`); "": to all
    # requests.
    owner: str = ""


@dataclass(eq=False)
class Batches:
    """The batches and files in a folder. Unfinished batches are answered inside `async
    with`. Only one server at a time can use a folder."""

    folder: Path
    answer: answers.Answer  # answers one request
    _: KW_ONLY
    # Limit on the total size of files, descriptions of files and batches, and stored
    # answers.
    max_bytes: int
    n_parallel: int  # maximum number of requests that are sent at once
    window_s: float  # seconds from a batch's creation until it expires; inf: never
    now: Callable[[], float] = time.time  # returns seconds since 1970

    def __post_init__(self) -> None:
        self._database: Database | None = None
        self._batches: dict[str, Batch] = {}
        # {id of an unfinished batch: its task}.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()  # ids of batches whose task has started to run
        self._turn = asyncio.Lock()  # held by the batch that is being answered
        self._closing = False

    async def __aenter__(self) -> Batches:
        if self.folder.exists():
            try:
                self._open()
            except (BusyError, OSError) as error:
                log.warning("batches are not carried out: %s", error)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._database is not None:
            self._database.close()

    @property
    def files(self) -> FileStore:
        """Returns the store of files. Raises BusyError if another process is using the
        folder or this server is shutting down. Raises StorageError if the folder or its
        database cannot be opened."""
        self._open()
        return self._files

    def _open(self) -> None:
        if self._closing:
            raise BusyError("the server is shutting down; try again later.")
        if self._database is not None:
            return
        with storing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = Database(self.folder / DATABASE, OWNER_ONLY)
            try:
                self._load(database)
            except BaseException:
                database.close()
                raise
        self._database = database
        for batch in self._batches.values():
            self._start(batch)

    def _load(self, database: Database) -> None:
        # older versions let other users of the machine read these files
        for path in (self.folder, *self.folder.rglob("*")):
            make_private(path)
        migrate(self.folder, database, lambda known: _row_of(_batch_of(known)))
        ended = "SELECT batch FROM answer EXCEPT SELECT id FROM batch WHERE needs IS NOT NULL"
        database.execute(f"DELETE FROM answer WHERE batch IN ({ended})")
        self._files = FileStore(
            self.folder / "files", database, self.max_bytes, self.now
        )
        self._batches = {}
        for (about,) in database.execute("SELECT about FROM batch ORDER BY created_ns"):
            batch = _batch_of(json.loads(about))
            self._batches[batch.id] = batch

    # Calls by clients.

    def all(self) -> list[Batch]:
        """Returns the batches that the current request may see, newest first. Raises
        BusyError or StorageError."""
        self._open()
        return [
            batch
            for batch in reversed(self._batches.values())
            if is_visible(batch.owner)
        ]

    def get(self, batch_id: str) -> Batch:
        """Returns the batch with this id. Raises UnknownIdError if there is none that
        the current request may see. Also raises BusyError or StorageError."""
        self._open()
        found = self._batches.get(batch_id)
        if found is None or not is_visible(found.owner):
            raise UnknownIdError(f"No such Batch object: {batch_id:.80}")
        return found

    def create(
        self,
        endpoint: str,
        input_file_id: str,
        metadata: Mapping[str, str] | None = None,
        output_expires_after_s: int | None = None,
    ) -> Batch:
        """Creates a batch from a stored file of requests, and starts it. The client may
        delete the file before the batch has ended.

        Raises BatchFileError for a file whose purpose is not INPUT_PURPOSE. Also raises
        UnknownIdError, BusyError or StorageError.
        """
        known = self.files.get(input_file_id)
        if known.purpose != INPUT_PURPOSE:
            raise BatchFileError(
                f"a batch needs a file with the purpose 'batch', but {input_file_id} has {known.purpose!r}; upload"
                " the file again with that purpose."
            )
        if len(self._tasks) >= MAX_UNFINISHED:
            raise BusyError(
                f"at most {MAX_UNFINISHED} batches may be unfinished, and this limit is reached; try again later."
            )
        now_s = self.now()
        expires_at = (
            None if self.window_s == float("inf") else int(now_s + self.window_s)
        )
        batch = Batch(
            f"batch_{uuid.uuid4().hex[:24]}", endpoint, input_file_id, int(now_s), time.time_ns(), expires_at,
            metadata=None if metadata is None else dict(metadata), output_expires_after_s=output_expires_after_s,
            owner=current_owner.get(),
        )  # fmt: skip
        self._update(batch)
        self._batches[batch.id] = batch
        self._start(batch)
        return batch

    def cancel(self, batch: Batch) -> None:
        """Starts cancelling a batch, whose status must be one of CANCELLABLE. Raises
        StorageError."""
        self._update(batch, status="cancelling", cancelling_at=int(self.now()))
        # A task that has not started finds the new status when it starts.
        if batch.id in self._begun:
            self._tasks[batch.id].cancel()

    # The life of a batch.

    def _start(self, batch: Batch) -> None:
        if batch.status not in FINAL:
            task = asyncio.get_running_loop().create_task(self._carry_out(batch))
            self._tasks[batch.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _carry_out(self, batch: Batch) -> None:
        """Runs the steps of a batch until it has ended or the server closes. Meanwhile
        `current_owner` is the batch's owner.

        Repeats a step after DISK_RETRY_S seconds if it fails with an OSError, for
        example because the disk is full. When the batch has ended, removes its answers
        from the database, and the contents of a deleted file of requests.
        """
        self._begun.add(batch.id)
        current_owner.set(batch.owner)
        next_s = 0.0
        while batch.status not in FINAL:
            delay_s, next_s = next_s, 0.0
            try:
                await asyncio.sleep(delay_s)
                await self._advance(batch)
            except asyncio.CancelledError:
                if self._closing:
                    self._try_update(batch)  # stores the counts
                    raise
                if (task := asyncio.current_task()) is not None:
                    # `cancel` has changed the status, and the next step finishes the
                    # batch.
                    task.uncancel()
            except BatchFileError as error:
                self._fail(batch, [_error_of(LineError("invalid_file", str(error)))])
            except OSError as error:
                next_s = DISK_RETRY_S
                log.warning("%s waits for %.0f s: %s", batch.id, DISK_RETRY_S, error)
            except Exception as error:
                log.error("%s has failed", batch.id, exc_info=error)
                said = "internal error; see the server's log."
                self._fail(batch, [_error_of(LineError("server_error", said))])
        # Files and answers that remain are removed when the folder is next opened.
        with suppress(OSError):
            self._files.remove_unused(batch.input_file_id)
            await _in_thread(Journal(self._files.database, batch.id).remove)
            self._files.count_answers()

    async def _advance(self, batch: Batch) -> None:
        """Carries out the step for a batch's status, and sets the next status.
        `Batches.cancel` interrupts this call."""
        if batch.status == "validating":
            await self._validate(batch)
        elif batch.status == "in_progress":
            try:
                left_s = (
                    None if batch.expires_at is None else batch.expires_at - self.now()
                )
                async with (
                    asyncio.timeout(left_s) as window,
                    self._turn,
                    self._answers(batch) as (requests, journal),
                ):
                    journal.space = self._files.space
                    await answers.answer_requests(
                        requests, journal, self.answer, self.n_parallel, lambda _: None
                    )
            except TimeoutError:
                if not window.expired():
                    raise
                await self._finalize(batch, "expired", EXPIRED)
            else:
                self._update(batch, status="finalizing", finalizing_at=int(self.now()))
        elif batch.status == "finalizing":
            await self._finalize(batch, "completed")
        else:
            await self._finalize(batch, "cancelled", CANCELLED)

    async def _validate(self, batch: Batch) -> None:
        async with self._requests(batch) as requests:
            errors = [
                _error_of(line.error, line.number)
                for line in requests.lines
                if line.error is not None
            ]
            if errors:
                self._fail(batch, errors[:MAX_ERRORS])
                return
            model = requests.models[0] if len(requests.models) == 1 else None
            now = int(self.now())
            self._update(
                batch,
                status="in_progress",
                in_progress_at=now,
                total=len(requests.lines),
                model=model,
            )

    async def _finalize(
        self, batch: Batch, status: str, not_executed: str | None = None
    ) -> None:
        """Stores the file of answers and the file of errors, and sets the batch's final
        status.

        `not_executed`: error code for requests that have no answer; None: every request
        has an answer. The files may briefly exceed the space limit, because the journal
        is removed only after the files are complete.
        """
        async with self._answers(batch) as (requests, journal):
            if not_executed is not None:
                error = LineError(not_executed, NOT_EXECUTED_TEXT[not_executed])
                missing = [
                    line
                    for line in requests.lines
                    if line.number not in journal.answered
                ]

                def append_missing() -> None:
                    with journal.database.transaction():
                        for line in missing:
                            journal.append(
                                line.number, answers.error_entry(requests, line, error)
                            )

                await _in_thread(append_missing)
            output_id = await self._store(batch, journal, "output", True)
            error_id = await self._store(batch, journal, "errors", False)
            now = int(self.now())
            self._update(
                batch, status=status, total=len(requests.lines), counts=journal.counts, output_file_id=output_id,
                error_file_id=error_id, finalizing_at=batch.finalizing_at or now, **{f"{status}_at": now},
            )  # fmt: skip

    async def _store(
        self, batch: Batch, journal: Journal, what: str, succeeded: bool
    ) -> str | None:
        """Stores a file with the output lines of all requests that succeeded, or
        (`succeeded=False`) that failed.

        `what` is part of the file's name and id. Returns the file's id, or None if
        there are no such lines. Calls with equal arguments return equal ids.
        """
        if succeeded not in journal.answered.values():
            return None
        file_id = f"file-{batch.id.removeprefix('batch_')}-{what}"
        about = f"{batch.id}_{what}.jsonl", OUTPUT_PURPOSE, batch.output_expires_after_s
        await _in_thread(
            lambda: self._files.put(file_id, journal.lines((succeeded,)), *about)
        )
        return file_id

    def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        self._try_update(
            batch, status="failed", failed_at=int(self.now()), errors=errors
        )

    @asynccontextmanager
    async def _requests(self, batch: Batch) -> AsyncIterator[Requests]:
        """Context manager that opens and checks the batch's file of requests. Raises
        BatchFileError or OSError."""
        try:
            file = open_regular(self._files.contents(batch.input_file_id))
        except FileNotFoundError:
            raise BatchFileError(
                "the file with the requests of this batch is gone; upload it again, and create another batch."
            ) from None
        with file:
            # The file is checked on a thread, because checking a large file can take
            # seconds.
            yield await _in_thread(
                lambda: Requests(file, (batch.endpoint,), max_requests=MAX_REQUESTS)
            )

    @asynccontextmanager
    async def _answers(self, batch: Batch) -> AsyncIterator[tuple[Requests, Journal]]:
        """Context manager that opens the batch's requests and the journal of its
        answers so far. Raises BatchFileError or OSError."""
        async with self._requests(batch) as requests:
            journal = Journal(self._files.database, batch.id)
            await _in_thread(lambda: journal.read(requests))
            batch.counts = journal.counts
            yield requests, journal

    def _update(self, batch: Batch, **changes: Any) -> None:
        """Changes fields of a batch, first on disk, then in memory. Raises
        StorageError."""
        row = _row_of(replace(batch, **changes))
        self._files.database.execute(
            "INSERT OR REPLACE INTO batch VALUES (?, ?, ?, ?)", *row
        )
        vars(batch).update(changes)

    def _try_update(self, batch: Batch, **changes: Any) -> None:
        try:
            self._update(batch, **changes)
        except OSError as error:
            log.warning("%s could not be written: %s", batch.id, error)
            vars(batch).update(changes)


async def _in_thread(call: Callable[[], Result]) -> Result:
    """Runs `call` on a thread and returns its value. If this coroutine is cancelled,
    `call` still runs to its end before CancelledError is raised."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        raise


def _batch_of(known: Mapping[str, Any]) -> Batch:
    return Batch(**{**known, "counts": Counts(**known["counts"])})


def _row_of(batch: Batch) -> tuple[str, int, str | None, str]:
    needs = None if batch.status in FINAL else batch.input_file_id
    return batch.id, batch.created_ns, needs, json.dumps(asdict(batch))


def _error_of(error: LineError, line: int | None = None) -> dict[str, Any]:
    fields = {"code": error.code, "message": str(error), "param": error.param}
    return {**fields, "line": line}
