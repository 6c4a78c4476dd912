"""Where what is known about a model's routing lies: measurements, trained predictors, its EAM collection.

Looked for in this order: a folder beside the model (`MODEL.gguf.moegguf`), the user's data folder, what ships with the
package (`predictors/NAME`). New knowledge goes beside the model, or to the user's folder where that cannot be written.
Everything is filed under the model's fingerprint, never under its name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import moegguf
from moegguf.controller import collection_file
from moegguf.controller.collection import EamcPair
from moegguf.controller.measured import Measured, read_measured
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.gguf.routers import Routers, read_routers
from moegguf.settings import data_folder

MEASURED = "measured.json"
COLLECTION = "eamc.safetensors"


@dataclass(frozen=True)
class Artifacts:
    """The files about one model: known by its file, or from a trace alone by the fingerprint in it.

    `folder` is looked into first.
    """

    layout: ExpertLayout | None
    filed_under: str = ""
    folder: Path | None = None

    @cached_property
    def fingerprint(self) -> str:
        return self.filed_under or (fingerprint(self.layout) if self.layout else "")

    @property
    def beside(self) -> Path | None:
        """The folder beside the model; None when there is only a trace."""
        if self.layout is None:
            return None
        path = self.layout.shards[0].path
        return path.with_name(path.name + ".moegguf")

    @property
    def of_user(self) -> Path:
        """The model's folder in the user's data folder."""
        return data_folder() / "models" / self.fingerprint

    def folders(self) -> Iterator[Path]:
        """Folders that may hold something, nearest first."""
        yield from (folder for folder in (self.folder, self.beside, self.of_user) if folder is not None)
        for part in map(Path, moegguf.__path__):
            for shipped in (part / "predictors", part.parent / "predictors"):
                yield from (path.parent for path in sorted(shipped.glob(f"*/{MEASURED}")) if self._is_about(path))

    def _is_about(self, measured: Path) -> bool:
        try:
            return read_measured(measured).fingerprint == self.fingerprint
        except OptionError:
            return False

    def find(self, name: str) -> Iterator[Path]:
        """Files of this name, nearest first; whether they are about this model is for the reader to check."""
        return (folder / name for folder in self.folders() if (folder / name).is_file())

    def routers(self) -> Routers:
        """The model's own routers. Raises OptionError when there is only a trace."""
        if self.layout is None:
            raise OptionError("this predictor looks through the model's own routers: name the model, too (--model).")
        return read_routers(self.layout)

    def collection(self, shape: MoeShape) -> EamcPair | None:
        """The nearest EAM collection; a damaged or foreign one is passed over with a warning."""
        for path in self.find(COLLECTION):
            found = collection_file.load(
                path, n_layer=shape.n_layer, n_expert=shape.n_expert, fingerprint=self.fingerprint
            )
            if found is not None:
                return found
        return None

    def keep(self, eamcs: EamcPair) -> None:
        """Saves an EAM collection; a folder that cannot be written is a warning."""
        try:
            collection_file.save(self.folder_to_write() / COLLECTION, eamcs, self.fingerprint)
        except OSError as error:
            warnings.warn(f"the EAM collection was not saved ({error.strerror}); it starts anew.", stacklevel=2)

    def folder_to_write(self) -> Path:
        """Beside the model where that can be written and is not the package itself, else the user's folder."""
        folder = self.beside
        if folder is None or any(folder.is_relative_to(part) for part in moegguf.__path__) or not _writable(folder):
            folder = self.of_user
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def measured(self) -> Measured | None:
        """The nearest measurement of this model; a damaged one is passed over with a warning."""
        for path in self.find(MEASURED):
            try:
                found = read_measured(path)
            except OptionError as error:
                warnings.warn(str(error), stacklevel=2)
                continue
            if found.fingerprint == self.fingerprint:
                return found
        return None


def _writable(folder: Path) -> bool:
    """Whether files can be written there, once it exists."""
    return os.access(folder if folder.is_dir() else folder.parent, os.W_OK)
