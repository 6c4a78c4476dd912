"""Reads and writes files of trained predictors, EAM collections and expert uses:
safetensors, with facts as JSON in the header.

Reading a file cannot execute code, unlike reading a pickle. A file is ignored, with one
warning, if it is damaged, too large, or made for another model, shape or version. A
file without an array or fact that its reader needs is ignored in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from moegguf.atomic_write import write_atomically
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

FORMAT_VERSION = 1
MAX_FILE_BYTES = 4 << 30
# Keys whose values must be the same in the file and the model.
SHAPE_KEYS = ("n_layer", "n_expert", "n_expert_used", "layers", "n_embd", "n_vocab")

Arrays = Mapping[str, npt.NDArray[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """The arrays in a file, such as the trained arrays of a predictor, and facts about
    them."""

    arrays: Arrays
    # {name: JSON value}, such as options of the training run or the meaning of the
    # arrays
    facts: Mapping[str, Any] = field(default_factory=dict)

    def array(self, name: str, *shape: int) -> Float32s:
        """Returns the array `name` as float32. Raises ValueError if it is missing, has
        the wrong shape or holds numbers that are not finite."""
        found = self.arrays.get(name)
        if found is None or found.shape != shape:
            what = "is missing" if found is None else f"has {found.shape}"
            raise ValueError(f"'{name}' must have the shape {shape}, but {what}")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise ValueError(f"'{name}' holds numbers that are not finite")
        return np.ascontiguousarray(found, np.float32)


def save(
    path: str | os.PathLike[str],
    predictor: str,
    fingerprint: str,
    shape: MoeShape,
    weights: Weights,
) -> None:
    """Writes the file atomically. Raises OSError; an existing file is then unchanged,
    and no temporary file remains.

    `predictor` is the name of the predictor, or of another kind of file, such as
    "uses". `fingerprint` identifies the model's routers (`gguf.fingerprint`).
    """
    path = Path(path)
    arrays = {
        name: np.ascontiguousarray(array) for name, array in weights.arrays.items()
    }
    head: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "predictor": predictor,
        "fingerprint": fingerprint,
        "shape": asdict(shape),
        "facts": dict(weights.facts),
    }
    head["sha256"] = _checksum(head, arrays)
    data = serialize(arrays, metadata={"moegguf": json.dumps(head, sort_keys=True)})
    write_atomically(path, data)


def read_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the facts in a file's header. Returns an empty dict, without a warning,
    if they cannot be read. Does not check anything else in the file."""
    try:
        with safe_open(path, "numpy") as file:
            facts = json.loads((file.metadata() or {})["moegguf"])["facts"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError):
        return {}
    return facts if isinstance(facts, dict) else {}


def load(
    path: str | os.PathLike[str],
    predictor: str,
    fingerprint: str,
    shape: MoeShape,
    build: Callable[[Weights], T],
) -> T | None:
    """Returns `build(weights)` for the file's weights. Returns None, after one warning,
    if the file cannot be used.

    `build` must raise ValueError, TypeError or KeyError if arrays or facts do not fit
    the model. `Weights.array` raises ValueError for an array that does not fit.
    """
    try:
        return build(_read(Path(path), predictor, fingerprint, shape))
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        RecursionError,
        SafetensorError,
    ) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        warnings.warn(
            f"the file {str(path)!r} is not used: {why}; continuing without it.",
            stacklevel=2,
        )
        return None


def _read(path: Path, predictor: str, fingerprint: str, shape: MoeShape) -> Weights:
    n_bytes = path.stat().st_size
    if n_bytes > MAX_FILE_BYTES:
        raise ValueError(
            f"it must have at most {MAX_FILE_BYTES} bytes, but has {n_bytes}; make it again with `moegguf learn`"
        )
    with safe_open(path, "numpy") as file:
        head = json.loads((file.metadata() or {}).get("moegguf", "null"))
        if not isinstance(head, dict):
            raise ValueError(
                "it was written by an old version of moegguf or by another program; make it again with `moegguf learn`"
            )
        of_model = json.loads(json.dumps(asdict(shape)))
        expected = {
            "version": FORMAT_VERSION,
            "predictor": predictor,
            "fingerprint": fingerprint,
            **{key: of_model[key] for key in SHAPE_KEYS},
        }
        of_file = head.get("shape")
        given = of_file | head if isinstance(of_file, dict) else head
        for key, value in expected.items():
            if given.get(key) != value:
                raise ValueError(
                    f"its {key} must be {value!r:.80}, but is {given.get(key)!r:.80}; make it for this model with"
                    " `moegguf learn`"
                )
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = head.get("facts")
    if head.pop("sha256", None) != _checksum(head, arrays) or not isinstance(
        facts, dict
    ):
        raise ValueError(
            "its contents do not match their checksum, so it is damaged; make it again with `moegguf learn`"
        )
    return Weights(arrays, facts)


def _checksum(head: Mapping[str, Any], arrays: Arrays) -> str:
    """Returns the SHA-256, in hex digits, of the header without its checksum and of the
    names, types, shapes and bytes of the arrays."""
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
