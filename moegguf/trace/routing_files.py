"""Reads routing that other programs have recorded, from files with arrays or tables.

Arrays are in npz, npy or safetensors files, and tables in CSV or JSONL files.

A file with arrays holds one request. It has an array `expert_ids` with the axes (token,
layer, expert of the token), or an array `router_logits` with the axes (token, layer,
expert). `_OPTIONAL` lists the optional arrays. A .npy file holds a single array without
a name: logits if it has floating-point numbers, otherwise expert ids.

A table has a row for each request, position and layer, with the columns `request`,
`position`, `layer` and `experts`, and optionally `token` and `phase`. Values are
checked, and nothing in a file is ever executed.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load as read_tensors

from moegguf.errors import TraceError
from moegguf.native.events import Int64s
from moegguf.regular_file import open_regular
from moegguf.trace.format import HEADER, MAX_TRACE_BYTES, reading

IDS, LOGITS = "expert_ids", "router_logits"
# Names of facts; each is a single number.
_FACTS = ("n_expert", "n_expert_used", "n_layer", "n_vocab", "expert_bytes")
_OPTIONAL = ("tokens", "n_prompt", "layers", *_FACTS)
_COLUMNS = ("request", "position", "layer", "experts")
PHASES = ("prefill", "decode")
# All numbers in a table, and token ids and layer numbers in arrays, must be smaller
# than this.
_MOST = 1 << 31

Ids = Int64s
Arrays = Mapping[str, npt.NDArray[Any]]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Routing:
    """The routing of one request."""

    # Expert ids (n_tokens, n_layers, n_expert_used), or logits (n_tokens, n_layers,
    # n_expert).
    chosen: npt.NDArray[Any]
    tokens: Ids  # (n_tokens,), -1 if unknown
    # Number of tokens of the prompt; None: the file does not state it.
    n_prompt: int | None = None

    @property
    def has_logits(self) -> bool:
        """True if `chosen` has logits, so the experts must still be chosen."""
        return self.chosen.dtype.kind == "f"


@dataclass(frozen=True)
class RoutingFile:
    """The requests in one file, and facts about the model. `facts` may contain `layers`
    (a tuple), and numbers with the names of `MoeShape`'s fields."""

    requests: list[Routing]
    facts: Mapping[str, Any]


def read_routing(path: Path) -> RoutingFile:
    """Reads a file in the format that its suffix indicates. Raises TraceError for a
    file that is missing, damaged, too large or in another format."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise TraceError(
            f"{path.name}: routing is read from {', '.join(_READERS)}, but the name ends in"
            f" {path.suffix or 'no suffix'!r}; save it in one of these formats."
        )
    with reading(path, "the file is damaged or in another format", "save it again"):
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise TraceError(
                f"it has {path.stat().st_size} bytes, but at most {MAX_TRACE_BYTES} are read; divide its"
                " tokens among several files."
            )
        collect, read = reader
        return collect(read(path))


def _npz_arrays(path: Path) -> Arrays:
    with open_regular(path) as file:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            n_bytes = sum(archive.getinfo(name).file_size for name in names)
        if HEADER in names:
            raise TraceError(
                "this is already a moegguf trace; give it to `moegguf trace simulate`."
            )
        if n_bytes > MAX_TRACE_BYTES:
            raise TraceError(
                f"its arrays have {n_bytes} bytes, but at most {MAX_TRACE_BYTES} are read; leave out arrays that are"
                " not needed, or divide the tokens among several files."
            )
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {
                name: arrays[name]
                for name in arrays.files
                if name in (IDS, LOGITS, *_OPTIONAL)
            }


def _npy_arrays(path: Path) -> Arrays:
    with open_regular(path) as file:
        found = np.lib.format.read_array(file, allow_pickle=False)
    return {LOGITS if found.dtype.kind == "f" else IDS: found}


def _safetensors_arrays(path: Path) -> Arrays:
    with open_regular(path) as file:
        return read_tensors(file.read())


def _checked(arrays: Arrays) -> RoutingFile:
    """Returns the one request in a file with arrays. Raises TraceError for the first
    rule that the arrays break."""
    name = IDS if IDS in arrays else LOGITS
    chosen = arrays.get(name)
    if chosen is None:
        raise TraceError(
            f"there must be an array {IDS!r} or {LOGITS!r}, but there is neither; save one of them."
        )
    axes = "(token, layer, expert)"
    if chosen.ndim != 3 or not chosen.size:
        raise TraceError(
            f"{name} must be an array with the axes {axes}, but has the shape {chosen.shape}; reshape or transpose it."
        )
    if chosen.dtype.kind not in ("iu" if name == IDS else "f"):
        kind = "whole numbers" if name == IDS else "floating-point numbers"
        raise TraceError(
            f"{name} must hold {kind}, but its type is {chosen.dtype}; convert it."
        )
    if chosen.dtype.kind == "f" and not np.isfinite(chosen).all():
        raise TraceError(
            f"{name} must hold finite numbers, but some are not; save the logits before any mask."
        )
    n_tokens, n_layers, n_last = chosen.shape
    facts: dict[str, Any] = {
        fact: _number(arrays, fact) for fact in _FACTS if fact in arrays
    }
    _agree(facts, "n_expert_used" if name == IDS else "n_expert", n_last, name)
    if "layers" in arrays:
        facts["layers"] = tuple(
            _vector(
                arrays, "layers", n_layers, f"the {n_layers} layers of {name}"
            ).tolist()
        )
    tokens = np.full(n_tokens, -1, np.int64)
    if "tokens" in arrays:
        tokens = _vector(
            arrays,
            "tokens",
            n_tokens,
            f"the {n_tokens} rows of {name}, whose axes are {axes}",
        )
    n_prompt = _number(arrays, "n_prompt") if "n_prompt" in arrays else None
    return RoutingFile([Routing(chosen, tokens, n_prompt)], facts)


def _agree(facts: dict[str, Any], fact: str, found: int, name: str) -> None:
    """Adds `fact`, whose value `found` was derived from the shape of the array `name`.
    Raises TraceError if `facts` has a different value for `fact`."""
    if facts.setdefault(fact, found) != found:
        raise TraceError(
            f"{fact} is {facts[fact]}, but {name} has {found} of them in its last axis; save both again."
        )


def _number(arrays: Arrays, name: str) -> int:
    found = arrays[name]
    if found.size != 1 or found.dtype.kind not in "iu":
        raise TraceError(
            f"{name} must be one whole number, but is {found.dtype} {found.shape}; save it as one."
        )
    return int(found.reshape(()))


def _vector(arrays: Arrays, name: str, n: int, of: str) -> Ids:
    found = arrays[name]
    if found.shape != (n,) or found.dtype.kind not in "iu":
        raise TraceError(
            f"{name} must be one whole number for each of {of}, but is {found.dtype} {found.shape}; save it in this"
            " form."
        )
    if found.min() < -1 or found.max() >= _MOST:
        raise TraceError(
            f"{name} must be from -1 to {_MOST - 1}, but is {found.min()} to {found.max()}; correct it."
        )
    return found.astype(np.int64)


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with (
        open_regular(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
    ):
        reader = csv.DictReader(text)
        for row in reader:
            yield reader.line_num, row


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with open_regular(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            row = json.loads(text)
            if not isinstance(row, dict):
                raise TraceError(
                    f"line {line} must be a JSON object, but is {text[:40]!r}; write one object in each line."
                )
            yield line, row


def _collected(rows: Iterable[tuple[int, Row]]) -> RoutingFile:
    """Returns the requests in a table, in order of first appearance. Raises TraceError
    for the first rule that a row breaks."""
    numbers: dict[str, int] = {}
    keys = array("q")  # five numbers per row: request, position, layer, token and phase
    experts = array("q")
    n_used = 0
    for line, row in rows:
        if missing := [name for name in _COLUMNS if row.get(name) in (None, "")]:
            raise TraceError(
                f"line {line} must have {', '.join(_COLUMNS)}, but lacks {', '.join(missing)}; add what is missing."
            )
        if None in row:
            raise TraceError(
                f"line {line} has more fields than the header; put spaces between experts."
            )
        request = numbers.setdefault(str(row["request"]), len(numbers))
        used = _expert_list(row["experts"], line)
        n_used = n_used or len(used)
        if len(used) != n_used:
            raise TraceError(
                f"line {line}: each row must have as many experts as the first row ({n_used}), but this one has"
                f" {len(used)}; correct the line."
            )
        token = (
            -1
            if row.get("token") in (None, "")
            else _whole(row["token"], "token", line)
        )
        place = (_whole(row[name], name, line) for name in ("position", "layer"))
        keys.extend((request, *place, token, _phase(row.get("phase"), line)))
        experts.extend(used)
    if not numbers:
        raise TraceError(
            "there must be a row for each request, position and layer, but there are no rows; write them."
        )
    table = np.frombuffer(keys, np.int64).reshape(-1, 5)
    order = np.lexsort((table[:, 2], table[:, 1], table[:, 0]))
    table = table[order]
    ids = np.frombuffer(experts, np.int64).reshape(-1, n_used)[order]
    layers = np.unique(table[:, 2])
    requests = []
    for name, number in numbers.items():
        begin, end = np.searchsorted(table[:, 0], (number, number + 1))
        requests.append(_request(name, table[begin:end], ids[begin:end], layers))
    return RoutingFile(
        requests, {"layers": tuple(layers.tolist()), "n_expert_used": n_used}
    )


def _request(name: str, table: Ids, ids: Ids, layers: Ids) -> Routing:
    """Returns one request from its sorted rows. Raises TraceError if a layer is missing
    at a position or appears twice, or if a row of the prompt comes after a row of the
    answer."""
    n_rows = len(table)
    # One more than the table has, so the error can name a row missing at the end.
    row = np.arange(n_rows + 1)
    expected = np.stack([row // len(layers), layers[row % len(layers)]], axis=1)
    wrong = np.flatnonzero((table[:, 1:3] != expected[:-1]).any(axis=1))
    if len(wrong) or n_rows % len(layers):
        position, layer = expected[wrong[0] if len(wrong) else n_rows]
        raise TraceError(
            f"request {name!r:.60}: positions must count from 0, and each must have one row for each of the"
            f" {len(layers)} layers of the file; position {position}, layer {layer} breaks this rule, so"
            " write the missing rows, or leave out the repeated ones."
        )
    firsts = table[:: len(layers)]
    phases = firsts[:, 4]
    n_prompt = int((phases == 0).sum()) if (phases >= 0).all() else None
    if n_prompt is not None and (phases[n_prompt:] == 0).any():
        raise TraceError(
            f"request {name!r:.60}: positions of prefill must be lower than positions of decode; correct `phase` or"
            " `position`, or give each turn a request of its own."
        )
    return Routing(ids.reshape(len(firsts), len(layers), -1), firsts[:, 3], n_prompt)


def _expert_list(value: Any, line: int) -> list[int]:
    """Returns the experts of a row. `value` is a list, or a string with spaces,
    semicolons or commas between the numbers."""
    parts = (
        value
        if isinstance(value, list)
        else re.split(r"[\s;,]+", str(value).strip().strip("[]"))
    )
    return [_whole(part, "experts", line) for part in parts]


def _whole(value: Any, name: str, line: int) -> int:
    text = str(value).strip()
    if (
        isinstance(value, bool)
        or not re.fullmatch(r"[0-9]{1,10}", text)
        or int(text) >= _MOST
    ):
        raise TraceError(
            f"line {line}: {name} must be a whole number from 0 to {_MOST - 1}, but is {value!r:.40}; correct it."
        )
    return int(text)


def _phase(value: Any, line: int) -> int:
    """Returns the index of a phase in `PHASES`; -1 if the row has none."""
    if value in (None, ""):
        return -1
    if value not in PHASES:
        raise TraceError(
            f"line {line}: phase must be {' or '.join(PHASES)}, but is {value!r:.40}; correct it."
        )
    return PHASES.index(value)


_READERS: dict[str, tuple[Callable[[Any], RoutingFile], Callable[[Path], Any]]] = {
    ".npz": (_checked, _npz_arrays),
    ".npy": (_checked, _npy_arrays),
    ".safetensors": (_checked, _safetensors_arrays),
    ".csv": (_collected, _csv_rows),
    ".jsonl": (_collected, _jsonl_rows),
}
"""{suffix: (function that checks what the other function reads, function that reads a
file)}."""
