"""The requests of a batch: lines of OpenAI's batch input format, checked once and read again when their turn comes.

A line is {"custom_id", "method": "POST", "url", "body"}. Only its place and what identifies it stay in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from moegguf.errors import BatchFileError

MAX_LINE_BYTES = 33 << 20  # the longest body that an endpoint takes, and room for what is around it
MAX_CUSTOM_ID_CHARS = 512
BLOCK_BYTES = 1 << 20
LOAD_OPTIONS = ("num_ctx", "num_thread", "expert_cache", "moe_cache_ram")


class LineError(Exception):
    """Why a line is no request. `code` and `param` are OpenAI's."""

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
    """The lines of a seekable file, which stays open. `fingerprint`: equal for equal contents and defaults.

    `endpoints`: the urls that a request may have. `defaults`: fields of bodies that lack them.
    """

    def __init__(
        self,
        file: BinaryIO,
        endpoints: Collection[str],
        defaults: Mapping[str, Any] = {},
        *,
        max_requests: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reads and checks all lines. `stop` is asked at each line; true ends with BatchFileError.

        Raises BatchFileError for a file without requests or with more than `max_requests`.
        """
        self._file = file
        self._endpoints = endpoints
        self._defaults = dict(defaults)
        self.lines: list[RequestLine] = []
        digest = hashlib.sha256(json.dumps(self._defaults, sort_keys=True).encode())
        seen: dict[str, int] = {}
        for number, (offset, n_bytes, raw) in enumerate(_lines(file, digest.update), 1):
            if stop():
                raise BatchFileError("the batch was stopped while its requests were read.")
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
            request = _parse(raw)
            custom_id = _custom_id_of(request)
            if (first := seen.setdefault(custom_id, number)) != number:
                said = f"The custom_id {custom_id!r:.80} is that of line {first} too."
                raise LineError("duplicate_custom_id", said, "custom_id")
            _check(request, self._endpoints)
            body = self._with_defaults(request["body"])
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

    def groups(self, numbers: Collection[int]) -> list[list[RequestLine]]:
        """Requests without an error, but for those with one of `numbers`; those that need the same loaded model
        together, in the order of their first request."""
        groups: dict[str, list[RequestLine]] = {}
        for line in self.lines:
            if line.error is None:
                groups.setdefault(line.group, []).extend([line] if line.number not in numbers else [])
        return [group for group in groups.values() if group]

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

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


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


def _custom_id_of(request: Mapping[str, Any]) -> str:
    custom_id = _required(request, "custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise LineError("invalid_custom_id", message, "custom_id")
    if any("\ud800" <= letter <= "\udfff" for letter in custom_id):
        raise LineError("invalid_custom_id", "'custom_id' has a surrogate without its pair.", "custom_id")
    return custom_id


def _check(request: Mapping[str, Any], endpoints: Collection[str]) -> None:
    """Raises LineError for what cannot be answered."""
    method, url, body = (_required(request, name) for name in ("method", "url", "body"))
    if method != "POST":
        raise LineError("invalid_method", f"'method' must be \"POST\", but is {method!r:.80}.", "method")
    if not isinstance(url, str) or url not in endpoints:
        raise LineError("invalid_url", f"'url' must be one of {', '.join(endpoints)}, but is {url!r:.80}.", "url")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "'body' must be an object.", "body")
    if body.get("stream"):
        raise LineError("unsupported_parameter", "'stream' has no meaning in a batch; leave it out.", "body.stream")


def _required(request: Mapping[str, Any], name: str) -> Any:
    if request.get(name) is None:
        raise LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    return request[name]
