"""Keeps facts about a model on this machine in the cache folder, so each fact is
determined only once."""

from __future__ import annotations

import hashlib
import json
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moegguf.atomic_write import write_atomically
from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import header_digest
from moegguf.native import library
from moegguf.processor import read_processor
from moegguf.regular_file import read_regular
from moegguf.settings import cache_folder

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class KnownFact:
    """One kind of fact about a model, stored in a file in the cache folder. The fact is
    valid only while the model's headers, the build of the native library, the processor
    and `about` stay the same.

    The fact depends on the processor, because several machines may share a home folder.
    """

    kind: str
    layout: ExpertLayout
    about: Any  # other values that the fact depends on; they must be valid in JSON

    @property
    def _path(self) -> Path:
        """The path of the file. Raises ExpertIOError if the model's files can no longer
        be read."""
        processor = read_processor()
        model = header_digest(self.layout.shards)
        depends = [
            library.build_identity(),
            self.about,
            processor.model,
            sorted(processor.flags),
        ]
        key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[
            :16
        ]
        return cache_folder() / self.kind / f"{model}-{key}.json"

    def read(self, of: type[Fact]) -> Fact | None:
        """Returns the fact if it has the type `of`. Returns None if it is not known,
        the file is damaged, or the model's files can no longer be read."""
        with suppress(OSError, ValueError, RecursionError):
            fact = json.loads(read_regular(self._path))
            return fact if isinstance(fact, of) else None
        return None

    def write(self, fact: Any) -> None:
        """Saves a fact. Warns if its file cannot be written. Does nothing if the
        model's files can no longer be read."""
        try:
            path = self._path
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(fact).encode())
        except ExpertIOError:
            return
        except OSError as error:
            warnings.warn(
                f"facts that were measured about this model cannot be saved ({error}), so they are measured again"
                " before each load; make that folder writable, or set MOEGGUF_HOME to another folder.",
                stacklevel=2,
            )
