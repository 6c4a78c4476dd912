"""A file of requests in OpenAI's batch format, and its answers, which outlive the process.

A request is a line {"custom_id", "method": "POST", "url", "body"}, checked once and read again when its turn comes:
only its place and what identifies it stay in memory. Until all are answered, the answers are in a database. Each has
the fingerprint of the requests, so that answers to other requests are not taken for these.
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
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moegguf.atomic_write import MODE, write_atomically
from moegguf.errors import BatchFileError
from moegguf.regular_file import open_regular
from moegguf.serving.batch.database import Database, storing
from moegguf.text import in_utf8

MAX_LINE_BYTES = 33 << 20  # the longest body that an endpoint takes, and room for what is around it
MAX_CUSTOM_ID_CHARS = 512
BLOCK_BYTES = 1 << 20
LOAD_OPTIONS = ("num_ctx", "num_thread", "expert_cache", "moe_cache_ram")
_ID = re.compile(r"batch_req_([0-9a-f]{16})_([1-9]\d{0,17})")
ADD_ANSWER = "INSERT INTO answer VALUES (?, ?, ?, ?)"
N_REMOVED = 200  # answers at a time
NOT_EXECUTED = ("batch_cancelled", "batch_expired")  # codes of requests that were not begun
OK = 200
BUSY = (429, 503)
BUSY_RETRY_S = 1.0

Entry = dict[str, Any]


Checked = TypeVar("Checked", bound="_Named")


class LineError(Exception):
    """A line that is no request. `code` and `param` are OpenAI's."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A line of the input. `number` counts all lines from 1; `content_hash`: of its bytes, in this process; `group`:
    equal for requests that one loaded model serves: its name, and options of loading. `model`: None where the body
    names none."""

    number: int
    offset: int
    n_bytes: int
    content_hash: int
    custom_id: str | None
    model: str | None
    group: str
    error: LineError | None


class Requests:
    """The lines of a seekable file in UTF-8 or, with a byte order mark, UTF-16; the caller closes the file.
    `fingerprint`: equal for equal contents and defaults.

    `endpoints`: the urls that a request may have. `defaults`: fields of bodies that lack them.
    """

    def __init__(
        self,
        file: BinaryIO,
        endpoints: Collection[str],
        defaults: Mapping[str, Any] = {},
        *,
        max_requests: int | None = None,
    ) -> None:
        """Reads and checks all lines. Raises BatchFileError for a file without requests or with more than
        `max_requests`."""
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
                raise BatchFileError(f"the file has more than {max_requests:,} requests; split it.")
        if not self.lines:
            raise BatchFileError("the file has no requests; each line is one, as JSON.")
        self.fingerprint = digest.hexdigest()[:16]

    def _line(self, number: int, offset: int, n_bytes: int, raw: bytes | None, seen: dict[str, int]) -> RequestLine:
        custom_id, model, group, error = None, None, "", None
        try:
            parsed = _parse(raw)
            custom_id = _checked(_Named, parsed).custom_id
            if (first := seen.setdefault(custom_id, number)) != number:
                said = f"The custom_id {custom_id!r:.80} is that of line {first} too."
                raise LineError("duplicate_custom_id", said, "custom_id")
            request = _checked(_Request, parsed)
            if request.url not in self._endpoints:
                said = f"'url' must be one of {', '.join(self._endpoints)}, but is {request.url!r:.80}."
                raise LineError("invalid_url", said, "url")
            if request.body.get("stream"):
                said = "'stream' has no meaning in a batch; leave it out."
                raise LineError("unsupported_parameter", said, "body.stream")
            body = self._with_defaults(request.body)
            model, options = body.get("model"), body.get("options")
            options = options if isinstance(options, dict) else {}
            group = json.dumps([model, {name: options[name] for name in LOAD_OPTIONS if name in options}])
        except LineError as found:
            error = found
        named = model if isinstance(model, str) else None
        return RequestLine(number, offset, n_bytes, hash(raw), custom_id, named, group, error)

    def _with_defaults(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._defaults, **{name: value for name, value in body.items() if value is not None}}

    @property
    def models(self) -> list[str]:
        """The models that requests name, in the order of their first request."""
        return list(dict.fromkeys(line.model for line in self.lines if line.model is not None))

    def in_order(self, numbers: Collection[int]) -> list[RequestLine]:
        """Requests without an error, but for those with one of `numbers`; those that need the same loaded model
        together, in the order of their first request."""
        first: dict[str, int] = {}
        for line in self.lines:
            first.setdefault(line.group, line.number)
        left = (line for line in self.lines if line.error is None and line.number not in numbers)
        return sorted(left, key=lambda line: (first[line.group], line.number))

    def read(self, line: RequestLine) -> tuple[str, bytes]:
        """(url, body) of a line without an error. Raises BatchFileError when the file has changed meanwhile."""
        raw = os.pread(self._file.fileno(), line.n_bytes, line.offset)
        if hash(raw) != line.content_hash:
            raise BatchFileError(f"line {line.number} of the requests has changed; start anew.")
        request = json.loads(raw)
        return request["url"], json.dumps(self._with_defaults(request["body"])).encode()

    def id_of(self, line: RequestLine) -> str:
        """The id of the line's answer: the same whenever the same requests are answered."""
        return f"batch_req_{self.fingerprint}_{line.number}"


def _lines(file: BinaryIO, update: Callable[[bytes], object]) -> Iterator[tuple[int, int, bytes | None]]:
    """(offset, bytes, contents) of each line; contents None of a too long one. `update` gets all bytes."""
    offset = file.seek(0)
    while raw := file.readline(MAX_LINE_BYTES + 1):
        update(raw)
        end, n_bytes, is_long = raw, len(raw), len(raw) > MAX_LINE_BYTES
        while is_long and not end.endswith(b"\n") and (end := file.readline(BLOCK_BYTES)):
            update(end)
            n_bytes += len(end)
        yield offset, n_bytes, None if is_long else raw
        offset += n_bytes


def _parse(raw: bytes | None) -> dict[str, Any]:
    """A line as an object. Raises LineError."""
    if raw is None:
        raise LineError("line_too_long", f"This line has more than {MAX_LINE_BYTES >> 20} MiB.")
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError):  # ValueError: not UTF-8, not JSON, or an integer of thousands of digits
        raise LineError("invalid_json_line", "This line is not parseable as valid JSON.") from None
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
    """A line's object, or the part of it that names it. Raises LineError."""
    try:
        return kind.model_validate(request)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if request.get(name) is None:
            raise LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name) from None
        raise LineError(f"invalid_{name}", f"'{name}': {first['msg']}, but is {first['input']!r:.80}.", name) from None


def response_entry(requests: Requests, line: RequestLine, status: int, body: Any) -> Entry:
    """The output line of a request that an endpoint has answered."""
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {"id": requests.id_of(line), "custom_id": line.custom_id, "response": response, "error": None}


def error_entry(requests: Requests, line: RequestLine, error: LineError) -> Entry:
    """The output line of what did not reach an endpoint."""
    told = {"code": error.code, "message": f"line {line.number}: {error}"}
    return {"id": requests.id_of(line), "custom_id": line.custom_id, "response": None, "error": told}


def to_line(entry: Entry) -> bytes:
    """Returns an output line as JSON in UTF-8."""
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def is_answer(entry: Entry) -> bool:
    """Returns whether the request succeeded."""
    return entry["error"] is None and entry["response"]["status_code"] == OK


@dataclass
class Counts:
    """Requests that have ended, and the tokens of their prompts and answers."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return self.completed + self.failed

    def add(self, entry: Entry) -> None:
        """Counts an output line, unless its request was not begun. Its `usage` is in the form of /v1/responses, or of
        the older endpoints."""
        if not is_answer(entry):
            self.failed += (entry["error"] or {}).get("code") not in NOT_EXECUTED
            return
        self.completed += 1
        body = entry["response"]["body"]
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            return
        read = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        written = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
        self.input_tokens += int(usage.get("input_tokens") or usage.get("prompt_tokens") or 0)
        self.output_tokens += int(usage.get("output_tokens") or usage.get("completion_tokens") or 0)
        self.cached_tokens += read.get("cached_tokens", 0)
        self.reasoning_tokens += written.get("reasoning_tokens", 0)


@dataclass
class Journal:
    """The answers so far to some requests, in a database.

    `batch`: the id of the batch in the database. `answered`: the numbers of the lines that have an answer, and whether
    the request succeeded. `take_space` gets the bytes that are to be added, and may raise StorageError.
    """

    database: Database
    batch: str = ""
    answered: dict[int, bool] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    take_space: Callable[[int], object] = lambda n_bytes: None
    _fingerprint: str = ""

    def read(self, requests: Requests) -> None:
        """Reads the answers to `requests` that are there. Raises BatchFileError when they answer other requests,
        StorageError."""
        self._fingerprint = requests.fingerprint
        rows = self.database.execute("SELECT number, requests FROM answer WHERE batch = ?", self.batch)
        for number, fingerprint in rows:
            if fingerprint != requests.fingerprint:
                raise BatchFileError(
                    f"{self.database.path} has answers to other requests: the input, or a default such as --model, has"
                    " changed since. Restore the input to go on, or remove that file to start anew."
                )
            self._note(number, json.loads(self._line(number)))

    def append(self, number: int, entry: Entry) -> None:
        """Adds the answer of a line, which no kill of this process loses when this has returned.

        Raises StorageError; the journal is then as before.
        """
        data = to_line(entry)
        self.take_space(len(data))
        self.database.execute(ADD_ANSWER, self.batch, number, self._fingerprint, data, flush=False)
        self._note(number, entry)

    def _note(self, number: int, entry: Entry) -> None:
        self.answered[number] = is_answer(entry)
        self.counts.add(entry)

    def _line(self, number: int) -> bytes:
        where = "WHERE batch = ? AND number = ?"
        ((line,),) = self.database.execute(f"SELECT line FROM answer {where}", self.batch, number)
        return line

    def lines(self, succeeded: Collection[bool] = (True, False)) -> Iterator[bytes]:
        """The lines of the requests that succeeded, or not, in the order of the requests."""
        for number, has_succeeded in sorted(self.answered.items()):
            if has_succeeded in succeeded:
                yield self._line(number)

    def finish(self, path: Path) -> None:
        """Puts all answers, in the order of the requests, at `path` at once, with the database's mode, and removes
        them here. Raises StorageError; the answers then stay."""
        with storing(path):
            write_atomically(path, self.lines(), stat.S_IMODE(self.database.path.stat().st_mode))
        self.remove()

    def remove(self) -> None:
        """Removes all answers, some at a time, so that other threads need not wait for all. Raises StorageError."""
        some = f"SELECT rowid FROM answer WHERE batch = ? LIMIT {N_REMOVED}"
        while self.database.execute(some, self.batch):
            self.database.execute(f"DELETE FROM answer WHERE rowid IN ({some})", self.batch, flush=False)
        self.answered.clear()


def _answers_in(file: Iterable[bytes]) -> Iterator[tuple[str, int, Entry, bytes]]:
    """(fingerprint of the requests, number of the request's line, answer, line) of each whole line. Raises ValueError
    for one that is no answer."""
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
    """Opens the journal in the database at `path`, after `read`; a database without answers goes at the end.

    Raises BatchFileError for answers to other requests, and when another process has the journal open, StorageError.
    """
    with ExitStack() as opened:
        try:
            database = opened.enter_context(closing(Database(path, MODE)))
            opened.callback(_remove_when_empty, database)
            take_old_journal(database, "", path.with_suffix(""))
        except BlockingIOError:
            raise BatchFileError(f"{path} is in use: another process answers these requests.") from None
        journal = Journal(database)
        journal.read(requests)
        yield journal


def _remove_when_empty(database: Database) -> None:
    if not database.execute("SELECT 1 FROM answer LIMIT 1"):
        database.remove()


def take_old_journal(database: Database, batch: str, path: Path) -> None:
    """Moves the answers from the journal at `path`, a file of lines that older versions wrote, into a database.

    A last line may be torn. Raises BatchFileError for another line that is no answer, BlockingIOError while another
    process has the file, StorageError.
    """
    with suppress(FileNotFoundError), open_regular(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            with database.transaction():
                for fingerprint, number, _, line in _answers_in(file):
                    database.execute(f"{ADD_ANSWER} ON CONFLICT DO NOTHING", batch, number, fingerprint, line)
        except ValueError:
            raise BatchFileError(f"{path} must have an answer in each line; remove that file to start anew.") from None
        path.unlink()


def finished_counts(path: Path, requests: Requests) -> Counts | None:
    """The counts of the file at `path`, which has the answers to all of `requests`; None without a file.

    Raises BatchFileError when there is a file that has not.
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
    """Writes all bytes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


@dataclass(frozen=True)
class Reply:
    """An endpoint's answer: HTTP's status, and the JSON of its body."""

    status: int
    body: Any


Answer = Callable[[str, bytes], Awaitable[Reply]]
"""(url, body as JSON) to the reply of that endpoint. Cancelling it ends the request."""


async def answer_requests(
    requests: Requests, answers: Journal, answer: Answer, n_parallel: int, on_answer: Callable[[Entry], object]
) -> None:
    """Adds the answers that are missing, `n_parallel` requests at a time. `on_answer` gets each answer.

    Requests that need one loaded model are answered one after another, so that models are not swapped back and forth.
    A request that finds the server busy is sent again. When cancelled, requests that have not ended have no answer.

    Raises what `answer` and `answers.append` raise; the other requests are then cancelled.
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
        raise failed.exceptions[0] from None  # the others were cancelled, or failed for the same reason
