"""Reads files of requests in OpenAI's batch format, sends the requests to an endpoint,
and stores the answers.

A request is a line {"custom_id", "method": "POST", "url", "body"}. `Requests` checks
the lines and keeps facts about them, but no bodies: a body is reread when its request
is sent. While a batch is unfinished, its answers are in a database. Each answer is
stored with the requests' fingerprint, so that answers to other requests are recognized.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moegguf.atomic_write import MODE, write_atomically
from moegguf.errors import BatchFileError
from moegguf.options import LOAD_PARAMETERS
from moegguf.regular_file import open_regular
from moegguf.serving.batch.database import Database, storing
from moegguf.text import in_utf8

# Maximum size of a line: the largest body that an endpoint accepts (32 MiB), plus 1
# MiB.
MAX_LINE_BYTES = 33 << 20
MAX_CUSTOM_ID_CHARS = 512
BLOCK_BYTES = 1 << 20
_ID = re.compile(r"batch_req_([0-9a-f]{16})_([1-9]\d{0,17})")
ADD_ANSWER = "INSERT INTO answer VALUES (?, ?, ?, ?)"
N_REMOVED = 200  # maximum number of answers that one statement deletes
# error codes of requests that had no answer when their batch was cancelled or expired
NOT_EXECUTED = ("batch_cancelled", "batch_expired")
OK = 200
BUSY = (429, 503)
BUSY_RETRY_S = 1.0

Entry = dict[str, Any]


Checked = TypeVar("Checked", bound="_Named")


class LineError(Exception):
    """An error of a request that gets no reply from an endpoint. `code` and `param` are
    fields of OpenAI's error objects."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A line of a file of requests, without the request's body."""

    number: int  # line number, counted from 1; empty lines count too
    # Position of the line in the file (in its copy, if the file is in UTF-16), in
    # bytes.
    offset: int
    n_bytes: int
    # Python's hash of the line's bytes, which differs from process to process.
    content_hash: int
    custom_id: str | None
    # model in the body or the defaults; None: no name, or the line is invalid.
    model: str | None
    # model and load options as JSON, so that requests of a group can share a loaded
    # model; "": an invalid line
    group: str
    error: LineError | None  # reason why the line is invalid; None: the line is valid


class Requests:
    """The requests in a seekable file, in UTF-8 or (with a byte order mark) in UTF-16.
    The caller closes the file.

    `endpoints` are the urls that a request may have. `defaults` are fields for bodies
    in which they are missing or null. Files with equal contents and defaults have equal
    `fingerprint`s.
    """

    def __init__(
        self,
        file: BinaryIO,
        endpoints: Collection[str],
        defaults: Mapping[str, Any] = {},
        *,
        max_requests: int | None = None,
    ) -> None:
        """Reads and checks all lines. An invalid line does not raise an exception;
        instead, its `RequestLine` has an `error`.

        Raises BatchFileError if all lines are blank, or if more than `max_requests`
        lines are not blank (None: no limit).
        """
        self._file = file = in_utf8(file)
        self._endpoints = endpoints
        self._defaults = dict(defaults)
        self.lines: list[RequestLine] = []
        digest = hashlib.sha256(json.dumps(self._defaults, sort_keys=True).encode())
        seen: dict[str, int] = {}
        for number, (offset, n_bytes, raw) in enumerate(_lines(file, digest.update), 1):
            if raw is None or raw.strip():
                self.lines.append(self._line(number, offset, n_bytes, raw, seen))
            if max_requests is not None and len(self.lines) > max_requests:
                raise BatchFileError(
                    f"the file has more than {max_requests:,} requests; split it."
                )
        if not self.lines:
            raise BatchFileError(
                "the file has no requests; write one request, as JSON, into each line."
            )
        self.fingerprint = digest.hexdigest()[:16]

    def _line(
        self,
        number: int,
        offset: int,
        n_bytes: int,
        raw: bytes | None,
        seen: dict[str, int],
    ) -> RequestLine:
        custom_id, model, group, error = None, None, "", None
        try:
            parsed = _parse(raw)
            custom_id = _checked(_Named, parsed).custom_id
            if (first := seen.setdefault(custom_id, number)) != number:
                said = f"The custom_id {custom_id!r:.80} is already used in line {first}; give each line its own."
                raise LineError("duplicate_custom_id", said, "custom_id")
            request = _checked(_Request, parsed)
            if request.url not in self._endpoints:
                said = f"'url' must be one of {', '.join(self._endpoints)}, but is {request.url!r:.80}."
                raise LineError("invalid_url", said, "url")
            if request.body.get("stream"):
                said = "'stream' must not be true in a batch; leave it out."
                raise LineError("unsupported_parameter", said, "body.stream")
            body = self._with_defaults(request.body)
            model, options = body.get("model"), body.get("options")
            options = options if isinstance(options, dict) else {}
            group = json.dumps(
                [
                    model,
                    {
                        name: options[name]
                        for name in LOAD_PARAMETERS
                        if name in options
                    },
                ]
            )
        except LineError as found:
            error = found
        named = model if isinstance(model, str) else None
        return RequestLine(
            number, offset, n_bytes, hash(raw), custom_id, named, group, error
        )

    def _with_defaults(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **self._defaults,
            **{name: value for name, value in body.items() if value is not None},
        }

    @property
    def models(self) -> list[str]:
        """Returns the names of the models in valid requests, each once, in the order of
        each model's first request."""
        return list(
            dict.fromkeys(line.model for line in self.lines if line.model is not None)
        )

    def in_order(self, numbers: Collection[int]) -> list[RequestLine]:
        """Returns the valid requests whose line numbers are not in `numbers`. Requests
        of one `group` come one after another."""
        first: dict[str, int] = {}
        for line in self.lines:
            first.setdefault(line.group, line.number)
        left = (
            line
            for line in self.lines
            if line.error is None and line.number not in numbers
        )
        return sorted(left, key=lambda line: (first[line.group], line.number))

    def read(self, line: RequestLine) -> tuple[str, bytes]:
        """Returns (url, body) of a valid request. The body is JSON and includes the
        defaults. Raises BatchFileError if the line has changed since the check."""
        raw = os.pread(self._file.fileno(), line.n_bytes, line.offset)
        if hash(raw) != line.content_hash:
            raise BatchFileError(
                f"line {line.number} of the requests was changed; restore it, or start over."
            )
        request = json.loads(raw)
        return request["url"], json.dumps(self._with_defaults(request["body"])).encode()

    def id_of(self, line: RequestLine) -> str:
        """Returns the id of the answer to a line. The id depends only on `fingerprint`
        and the line's number."""
        return f"batch_req_{self.fingerprint}_{line.number}"


def _lines(
    file: BinaryIO, update: Callable[[bytes], object]
) -> Iterator[tuple[int, int, bytes | None]]:
    """Yields (offset, number of bytes, contents) of each line. The contents are None
    for a line of more than MAX_LINE_BYTES. Passes all bytes of the file to `update`, in
    parts."""
    offset = file.seek(0)
    while raw := file.readline(MAX_LINE_BYTES + 1):
        update(raw)
        end, n_bytes, is_long = raw, len(raw), len(raw) > MAX_LINE_BYTES
        while (
            is_long and not end.endswith(b"\n") and (end := file.readline(BLOCK_BYTES))
        ):
            update(end)
            n_bytes += len(end)
        yield offset, n_bytes, None if is_long else raw
        offset += n_bytes


def _parse(raw: bytes | None) -> dict[str, Any]:
    """Parses a line as a JSON object. `raw` is None for a line that is too long. Raises
    LineError."""
    if raw is None:
        raise LineError(
            "line_too_long",
            f"This line has more than {MAX_LINE_BYTES >> 20} MiB; shorten it.",
        )
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError):
        # ValueError: not UTF-8, invalid JSON, or an integer with thousands of digits.
        raise LineError(
            "invalid_json_line", "This line is not parseable as valid JSON."
        ) from None
    if not isinstance(request, dict):
        raise LineError("invalid_json_line", "This line is JSON, but not an object.")
    return request


class _Named(BaseModel):
    model_config = ConfigDict(strict=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]


class _Request(_Named):
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def _checked(kind: type[Checked], request: Mapping[str, Any]) -> Checked:
    """Validates a line's JSON object as a `kind`. Raises LineError for the first
    invalid field."""
    try:
        return kind.model_validate(request)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if request.get(name) is None:
            raise LineError(
                "missing_required_parameter",
                f"Missing required parameter: '{name}'.",
                name,
            ) from None
        raise LineError(
            f"invalid_{name}",
            f"'{name}': {first['msg']}, but is {first['input']!r:.80}.",
            name,
        ) from None


def response_entry(
    requests: Requests, line: RequestLine, status: int, body: Any
) -> Entry:
    """Returns the output line for a request to which an endpoint has replied, with
    success or with an error."""
    response = {
        "status_code": status,
        "request_id": f"req_{uuid.uuid4().hex}",
        "body": body,
    }
    return {
        "id": requests.id_of(line),
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }


def error_entry(requests: Requests, line: RequestLine, error: LineError) -> Entry:
    """Returns the output line with an error for a request that has no reply from an
    endpoint."""
    told = {"code": error.code, "message": f"line {line.number}: {error}"}
    return {
        "id": requests.id_of(line),
        "custom_id": line.custom_id,
        "response": None,
        "error": told,
    }


def to_line(entry: Entry) -> bytes:
    """Encodes an output line as JSON in UTF-8, with a newline at its end. Unpaired
    surrogates become "?"."""
    return (
        json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )
        + b"\n"
    )


def is_answer(entry: Entry) -> bool:
    """Returns True if the request succeeded (status 200)."""
    return entry["error"] is None and entry["response"]["status_code"] == OK


@dataclass
class Counts:
    """The numbers of completed and failed requests, and the completed requests' token
    counts."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def done(self) -> int:
        """Returns the number of completed and failed requests."""
        return self.completed + self.failed

    def add(self, entry: Entry) -> None:
        """Counts the request of an output line, unless its error code is in
        NOT_EXECUTED."""
        if not is_answer(entry):
            self.failed += (entry["error"] or {}).get("code") not in NOT_EXECUTED
            return
        self.completed += 1
        body = entry["response"]["body"]
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            return
        # OpenAI's older endpoints have other names than /v1/responses.
        usage = {
            name.replace("prompt", "input").replace("completion", "output"): count
            for name, count in usage.items()
        }
        read = usage.get("input_tokens_details") or {}
        written = usage.get("output_tokens_details") or {}
        self.input_tokens += int(usage.get("input_tokens") or 0)
        self.output_tokens += int(usage.get("output_tokens") or 0)
        self.cached_tokens += read.get("cached_tokens", 0)
        self.reasoning_tokens += written.get("reasoning_tokens", 0)


@dataclass
class Journal:
    """The answers stored so far for one batch, in a database."""

    database: Database
    # Id of the batch in the database; "" if the database has only one batch.
    batch: str = ""
    # {line number: True if the line's request succeeded}
    answered: dict[int, bool] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    # returns the context in which an answer is stored, for the size of its line in
    # bytes; may raise StorageError
    space: Callable[[int], AbstractContextManager[object]] = nullcontext
    _fingerprint: str = ""

    def read(self, requests: Requests) -> None:
        """Reads the answers that were stored earlier.

        Raises BatchFileError if one of them is damaged or belongs to other requests,
        and StorageError if the database cannot be read.
        """
        self._fingerprint = requests.fingerprint
        rows = self.database.execute(
            "SELECT number, requests FROM answer WHERE batch = ?", self.batch
        )
        for number, fingerprint in rows:
            if fingerprint != requests.fingerprint:
                raise BatchFileError(
                    f"{self.database.path} has answers to other requests: the input, or a default such as --model, has"
                    " changed since. Restore the input to continue, or remove that file to start over."
                )
            try:
                self._note(number, json.loads(self._line(number)))
            except (ValueError, KeyError, TypeError):
                raise BatchFileError(
                    f"{self.database.path} has a damaged answer to line {number}; remove that file to start over."
                ) from None

    def append(self, number: int, entry: Entry) -> None:
        """Stores the answer to a line. Once this method has returned, the answer is
        kept even if this process is killed, unless a transaction is open.

        Raises StorageError; the journal is then unchanged.
        """
        data = to_line(entry)
        with self.space(len(data)):
            self.database.execute(
                ADD_ANSWER, self.batch, number, self._fingerprint, data, flush=False
            )
        self._note(number, entry)

    def _note(self, number: int, entry: Entry) -> None:
        self.answered[number] = is_answer(entry)
        self.counts.add(entry)

    def _line(self, number: int) -> bytes:
        where = "WHERE batch = ? AND number = ?"
        ((line,),) = self.database.execute(
            f"SELECT line FROM answer {where}", self.batch, number
        )
        return line

    def lines(self, succeeded: Collection[bool] = (True, False)) -> Iterator[bytes]:
        """Yields output lines in the order of the requests: of successful requests if
        `succeeded` contains True, of failed requests if it contains False."""
        for number, has_succeeded in sorted(self.answered.items()):
            if has_succeeded in succeeded:
                yield self._line(number)

    def finish(self, path: Path) -> None:
        """Writes all answers, in the order of the requests, to the file `path`, then
        removes them from the database.

        The file is replaced atomically and gets the database's file mode. Raises
        StorageError. If the file cannot be written, the database keeps the answers.
        """
        with storing(path):
            write_atomically(
                path, self.lines(), stat.S_IMODE(self.database.path.stat().st_mode)
            )
        self.remove()

    def remove(self) -> None:
        """Removes all answers of the batch from the database. Each statement deletes at
        most N_REMOVED answers, so that other threads can use the database in between.
        Raises StorageError."""
        some = f"SELECT rowid FROM answer WHERE batch = ? LIMIT {N_REMOVED}"
        while self.database.execute(some, self.batch):
            self.database.execute(
                f"DELETE FROM answer WHERE rowid IN ({some})", self.batch, flush=False
            )
        self.answered.clear()


def _answers_in(file: Iterable[bytes]) -> Iterator[tuple[str, int, Entry, bytes]]:
    """Yields (fingerprint of the requests, number of the request's line, answer, raw
    line) for each line of a file of answers. Stops at a line without a newline. Raises
    ValueError for any other line that is not an answer."""
    for raw in file:
        if not raw.endswith(b"\n"):
            return
        try:
            entry = json.loads(raw)
            found = _ID.fullmatch(entry["id"])
            is_answer(entry)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError("no answer") from error
        if found is None:
            raise ValueError("no answer")
        yield found[1], int(found[2]), entry, raw


@contextmanager
def open_journal(path: Path, requests: Requests) -> Iterator[Journal]:
    """Context manager that opens the journal in the database at `path` and reads its
    answers. At the end, removes the database if it has no answers. Also imports the
    answers from a file that an older version wrote.

    Raises BatchFileError if an answer belongs to other requests, or if a complete line
    of the older version's file is not an answer. Raises BusyError if another process
    has the database open or has locked that file, and StorageError for other errors of
    the disk or database.
    """
    with closing(Database(path, MODE)) as database:
        try:
            take_old_journal(database, "", path.with_suffix(""))
            journal = Journal(database)
            journal.read(requests)
            yield journal
        finally:
            if not database.execute("SELECT 1 FROM answer LIMIT 1"):
                database.remove()


def take_old_journal(database: Database, batch: str, path: Path) -> None:
    """Moves the answers from the file at `path`, which an older version wrote, into a
    database. Does nothing if there is no such file. An incomplete last line is dropped.

    Raises BatchFileError if a complete line is not an answer, BusyError if another
    process has locked the file, and StorageError for other errors of the disk or
    database.
    """
    with storing(path), suppress(FileNotFoundError), open_regular(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            with database.transaction():
                for fingerprint, number, _, line in _answers_in(file):
                    database.execute(
                        f"{ADD_ANSWER} ON CONFLICT DO NOTHING",
                        batch,
                        number,
                        fingerprint,
                        line,
                    )
        except ValueError:
            raise BatchFileError(
                f"{path} must have an answer in each line; remove that file to start over."
            ) from None
        path.unlink()


def finished_counts(path: Path, requests: Requests) -> Counts | None:
    """Returns the counts of a finished file of answers at `path`, or None if there is
    no file.

    Raises BatchFileError if the file does not have exactly the answers to `requests`,
    in the same order.
    """
    if not path.exists():
        return None
    counts, numbers = Counts(), list[int]()
    with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
        for fingerprint, number, entry, _ in _answers_in(file):
            numbers.append(number if fingerprint == requests.fingerprint else 0)
            counts.add(entry)
        if numbers == [line.number for line in requests.lines]:
            return counts
    raise BatchFileError(
        f"{path} exists, but does not hold the answers to these requests; remove it, or name another file."
    )


def write_all(handle: int, data: bytes) -> None:
    """Writes all of `data` to a file descriptor. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


@dataclass(frozen=True)
class Reply:
    """An endpoint's reply: the HTTP status, and the JSON body as Python values."""

    status: int
    body: Any


Answer = Callable[[str, bytes], Awaitable[Reply]]
"""A function that sends a request (url, body as JSON) to an endpoint and returns the
reply. Cancelling the call ends the request."""


async def answer_requests(
    requests: Requests,
    answers: Journal,
    answer: Answer,
    n_parallel: int,
    on_answer: Callable[[Entry], object],
) -> None:
    """Answers the requests that have no stored answer, at most `n_parallel` at a time.
    Stores each output line, then calls `on_answer` with its entry.

    Invalid lines get their errors first. Requests start group by group (model and load
    options), to avoid repeated loads. While the reply has a status in BUSY, the request
    is retried. If this call is cancelled, unfinished requests stay unanswered.

    Raises the first error of `requests.read`, `answer`, `answers.append` or
    `on_answer`; all other requests are then cancelled.
    """

    def add(line: RequestLine, entry: Entry) -> None:
        answers.append(line.number, entry)
        on_answer(entry)

    async def work() -> None:
        for line in pending:
            url, body = requests.read(line)
            while (reply := await answer(url, body)).status in BUSY:
                await asyncio.sleep(BUSY_RETRY_S)
            add(line, response_entry(requests, line, reply.status, reply.body))

    for line in requests.lines:
        if line.error is not None and line.number not in answers.answered:
            add(line, error_entry(requests, line, line.error))
    left = requests.in_order(answers.answered)
    pending = iter(left)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(n_parallel, len(left))):
                tasks.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # errors of other tasks are not reported
