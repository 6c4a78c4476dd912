"""What was found out about a model here, kept in the cache folder, so that it is found out once.

A file for each model, by its header, has a fact under a key of everything else that it depends on; facts of another
build of the native library are forgotten. Where the folder cannot be written, facts are kept in this process.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import Any, TypeVar

from moegguf.atomic_write import write_atomically
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import header_digest
from moegguf.native import library
from moegguf.processor import read_processor
from moegguf.settings import cache_folder

Fact = TypeVar("Fact")
_unwritten: dict[tuple[str, str], Any] = {}  # of this process


class KnownFact:
    """One fact of a kind. about: what it depends on beside the model, the build and the processor, as JSON has it."""

    def __init__(self, kind: str, layout: ExpertLayout, about: Any) -> None:
        self._path = cache_folder() / kind / f"{header_digest(layout.shards)}.json"
        processor = read_processor()  # a home folder may be shared between machines
        text = json.dumps([about, processor.model, sorted(processor.flags)], sort_keys=True)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, of: type[Fact]) -> Fact | None:
        """The fact, of a type; None where it is not known, or the file is damaged."""
        fact = _unwritten.get((str(self._path), self._key), self._load().get(self._key))
        return fact if isinstance(fact, of) else None

    def _load(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            data = json.loads(self._path.read_bytes())
            if data["library"] == library.build_identity():
                return dict(data["facts"])
        return {}

    def write(self, fact: Any) -> OSError | None:
        """Keeps a fact; returns why only this process does, the first time that this is so."""
        data = {"library": library.build_identity(), "facts": {**self._load(), self._key: fact}}
        _unwritten.pop((str(self._path), self._key), None)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(data).encode())
        except OSError as error:
            is_first = not _unwritten
            _unwritten[str(self._path), self._key] = fact
            return error if is_first else None
        return None
