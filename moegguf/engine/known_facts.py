"""Keeps facts about a model on this machine in the cache folder, so each fact is
determined only once."""

from __future__ import annotations

import hashlib
import json
import warnings
from contextlib import suppress
from typing import Any, TypeVar

from moegguf.atomic_write import write_atomically
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import header_digest
from moegguf.native import library
from moegguf.processor import read_processor
from moegguf.regular_file import read_regular
from moegguf.settings import cache_folder

Fact = TypeVar("Fact")


class KnownFact:
    """One kind of fact about a model, stored in a file in the cache folder. The fact is
    valid only while the model's headers, the build of the native library, the processor
    and `about` stay the same.

    The fact depends on the processor, because several machines may share a home folder.

    about: other values that the fact depends on; they must be valid in JSON.
    """

    def __init__(self, kind: str, layout: ExpertLayout, about: Any) -> None:
        processor = read_processor()
        model = header_digest(layout.shards)
        depends = [
            library.build_identity(),
            about,
            processor.model,
            sorted(processor.flags),
        ]
        key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[
            :16
        ]
        self._path = cache_folder() / kind / f"{model}-{key}.json"

    def read(self, of: type[Fact]) -> Fact | None:
        """Returns the fact if it has the type `of`; None if it is not known, or the
        file is damaged."""
        with suppress(OSError, ValueError, RecursionError):
            fact = json.loads(read_regular(self._path))
            return fact if isinstance(fact, of) else None
        return None

    def write(self, fact: Any) -> None:
        """Saves a fact. Warns if its file cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(fact).encode())
        except OSError as error:
            warnings.warn(
                f"facts that were measured about this model cannot be saved ({error}), so they are measured again"
                " before each load; make that folder writable, or set MOEGGUF_HOME to another folder.",
                stacklevel=2,
            )
