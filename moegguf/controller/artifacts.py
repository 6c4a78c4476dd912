"""Finds and saves files about a model's routing: measured hit rates, trained
predictors, the collection of expert activation matrices (EAMs), and the uses of
experts.

Search order: the caller's own folder if one is given, a folder next to the model
(`MODEL.gguf.moegguf`), the model's folder in the user's data folder, the package
(`predictors/NAME`). New files are written to the folder next to the model if it is
writable and outside the package, otherwise to the folder in the user's data folder. A
file belongs to a model if it has the model's fingerprint, a hash of the model's
routers, whatever the model's name is.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from moegguf.controller import weights
from moegguf.controller.collection import Eamc
from moegguf.controller.hit_rates import Measured, read_measured
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.gguf.routers import Routers, read_routers
from moegguf.native.events import Float32s
from moegguf.package import package_folders
from moegguf.settings import data_folder

MEASURED = "measured.json"

T = TypeVar("T")


def learnt_folder(file: Path) -> Path:
    """Returns the folder next to a model's first file for what is learnt about the
    model. The folder may not exist."""
    return file.with_name(file.name + ".moegguf")


@dataclass(frozen=True)
class Artifacts:
    """Finds and saves the files about one model."""

    layout: ExpertLayout | None  # None: there is only a trace, and no model file
    # Fingerprint in the trace; "": it is computed from `layout`.
    trace_fingerprint: str = ""
    # Searched before all other folders; None: there is no such folder.
    folder: Path | None = None
    # True: only `folder` is searched, so that files of earlier runs are not found.
    only_folder: bool = False

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the model's routers in hex digits (`gguf.fingerprint`); ""
        if unknown."""
        return self.trace_fingerprint or (
            fingerprint(self.layout) if self.layout else ""
        )

    @property
    def model_folder(self) -> Path | None:
        """The folder for files next to the model; None if there is only a trace."""
        return learnt_folder(self.layout.shards[0].path) if self.layout else None

    @property
    def user_folder(self) -> Path:
        """The model's folder in the user's data folder."""
        return data_folder() / "models" / self.fingerprint

    def folders(self) -> Iterator[Path]:
        """Yields the folders to search, in search order. Some of them may not exist."""
        if self.folder is not None:
            yield self.folder
        if self.only_folder:
            return
        yield from (
            folder
            for folder in (self.model_folder, self.user_folder)
            if folder is not None
        )
        for part in package_folders():
            for shipped in (part / "predictors", part.parent / "predictors"):
                for path in sorted(shipped.glob(f"*/{MEASURED}")):
                    with suppress(OptionError):
                        if read_measured(path).fingerprint == self.fingerprint:
                            yield path.parent

    def find(self, name: str) -> Iterator[Path]:
        """Yields the existing files with this name in search order. Skips folders that
        cannot be searched. Does not check whether a file belongs to this model."""
        return (folder / name for folder in self.folders() if _is_file(folder / name))

    def routers(self) -> Routers:
        """Reads the model's own routers from its file. Raises OptionError if there is
        only a trace. Otherwise raises the same errors as `read_routers`."""
        if self.layout is None:
            raise OptionError(
                "this predictor needs the routers of the model: name the model, too (--model)."
            )
        return read_routers(self.layout)

    def load(
        self,
        kind: str,
        shape: MoeShape,
        build: Callable[[weights.Weights], T],
        missing: str = "",
    ) -> T | None:
        """Returns `build(weights)` for the first usable file KIND.safetensors in search
        order. Damaged files and files of other models that come earlier are skipped
        with a warning. Returns None if no file is usable. If there is no file at all,
        raises OptionError with the text `missing`, if given."""
        path = None
        for path in self.find(f"{kind}.safetensors"):
            found = weights.load(path, kind, self.fingerprint, shape, build)
            if found is not None:
                return found
        if path is None and missing:
            raise OptionError(missing)
        return None

    def collection(self, shape: MoeShape) -> Eamc | None:
        """Reads the first usable collection of expert activation matrices (EAMs) in
        search order. Skips damaged files and files of other models, with a warning.
        Returns None if there is no usable file."""
        return self.load("eamc", shape, partial(Eamc.from_weights, shape))

    def save_collection(self, shape: MoeShape, saved: weights.Weights) -> None:
        """Saves a collection of expert activation matrices (the result of
        `Eamc.weights()`) atomically, in `writable_folder()`. If writing fails, warns
        and saves nothing."""
        self._save("eamc", "the EAM collection was", shape, saved)

    def uses(self, shape: MoeShape) -> Float32s | None:
        """Returns the saved table (n_layer, n_expert) of expert uses in earlier runs,
        with more weight on later runs. Skips damaged files and files of other models,
        with a warning. Returns None if there is no usable file."""

        def build(saved: weights.Weights) -> Float32s:
            found = saved.array("uses", *shape.table)
            if (found < 0).any():
                raise ValueError("'uses' holds numbers below zero")
            return found

        return self.load("uses", shape, build)

    def save_uses(self, shape: MoeShape, uses: Float32s) -> None:
        """Saves the table (n_layer, n_expert) of expert uses atomically, in
        `writable_folder()`. If writing fails, warns and saves nothing."""
        saved = weights.Weights({"uses": uses})
        self._save("uses", "the uses of experts were", shape, saved)

    def _save(
        self, kind: str, subject: str, shape: MoeShape, saved: weights.Weights
    ) -> None:
        try:
            path = self.writable_folder() / f"{kind}.safetensors"
            weights.save(path, kind, self.fingerprint, shape, saved)
        except OSError as error:
            warnings.warn(
                f"{subject} not saved ({error.strerror}); make room on the disk, or make {error.filename} writable.",
                stacklevel=3,
            )

    def writable_folder(self) -> Path:
        """Returns the folder next to the model if it is writable and outside the
        package, else the user's folder for this model. Creates the folder if it does
        not exist. Raises OSError if that fails."""
        folder = self.model_folder
        if (
            folder is None
            or any(folder.is_relative_to(part) for part in package_folders())
            or not _writable(folder)
        ):
            folder = self.user_folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def measured(self) -> Measured | None:
        """Reads the first measurement of this model in search order. Skips damaged
        files with a warning. Returns None if there is no measurement of this model."""
        for path in self.find(MEASURED):
            try:
                found = read_measured(path)
            except OptionError as error:
                warnings.warn(str(error), stacklevel=2)
                continue
            if found.fingerprint == self.fingerprint:
                return found
        return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        # No warning if the name is too long: such a folder cannot exist.
        if error.errno != errno.ENAMETOOLONG:
            warnings.warn(
                f"{path.parent} is not searched ({error.strerror}); continuing without it.",
                stacklevel=1,
            )
        return False


def _writable(folder: Path) -> bool:
    """Returns whether files can be written to the folder. If the folder does not exist,
    checks its parent."""
    try:
        return os.access(folder if folder.is_dir() else folder.parent, os.W_OK)
    except OSError:
        return False
