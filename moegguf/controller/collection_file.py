"""EAM collections on disk: safetensors with a checksum, written atomically.

A damaged or foreign file is ignored with one warning, and the collection starts empty. A file is never executed.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

import moegguf
from moegguf.atomic_write import write_atomically
from moegguf.controller.collection import CAPACITY, Eamc, EamcPair
from moegguf.controller.history import Counts

FORMAT_VERSION = "1"
_PHASES = ("prefill", "decode")
_KINDS = (np.uint8, np.uint16, np.float32)

_Arrays = dict[str, npt.NDArray[np.generic]]


def save(path: Path, eamcs: EamcPair, fingerprint: str) -> None:
    """Writes both collections for the model with this fingerprint; atomically.

    Raises OSError (disk full, no permission); an existing file is then unchanged, and no temporary file remains.
    """
    arrays: _Arrays = {phase: _narrowed(getattr(eamcs, phase).state) for phase in _PHASES}
    facts = {
        "format": "moegguf-eamc",
        "version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "n_layer": str(eamcs.decode.n_layer),
        "n_expert": str(eamcs.decode.n_expert),
        "created_by": f"moegguf {moegguf.__version__}",
    }
    data = to_safetensors(arrays, {**facts, "sha256": _digest(arrays, facts)})
    write_atomically(path, data)


def load(path: Path, *, n_layer: int, n_expert: int, fingerprint: str, capacity: int = CAPACITY) -> EamcPair | None:
    """The collections saved for this model, of each the last `capacity` entries; None when there is no such file.

    None too, with one UserWarning naming the reason, when the file is damaged, of another version or of another model.
    """
    if not path.exists():
        return None
    try:
        arrays = _read(path, n_layer, n_expert, fingerprint)
        pairs = [Eamc.from_state(_checked(arrays[phase], n_layer, n_expert), capacity) for phase in _PHASES]
    except (OSError, ValueError, SafetensorError) as error:
        message = f"ignored the collection of expert activations {path}: {error}; starting with an empty one"
        warnings.warn(message, UserWarning, stacklevel=2)
        return None
    return EamcPair(*pairs)


def _read(path: Path, n_layer: int, n_expert: int, fingerprint: str) -> _Arrays:
    if not path.is_file():
        raise ValueError("not a regular file")
    with safe_open(path, framework="numpy") as file:
        facts = dict(file.metadata() or {})
        checksum = facts.pop("sha256", None)
        if facts.get("format") != "moegguf-eamc" or checksum is None:
            raise ValueError("not a collection, or without a checksum")
        if facts.get("version") != FORMAT_VERSION:
            raise ValueError(f"its version is {facts.get('version')!r}, not {FORMAT_VERSION!r}")
        if facts.get("fingerprint") != fingerprint:
            raise ValueError(f"it belongs to another model ({facts.get('fingerprint')!r}, not {fingerprint!r})")
        if (facts.get("n_layer"), facts.get("n_expert")) != (str(n_layer), str(n_expert)):
            raise ValueError(f"it is for {facts.get('n_layer')} layers of {facts.get('n_expert')} experts")
        if sorted(file.keys()) != sorted(_PHASES):
            raise ValueError(f"it holds {sorted(file.keys())}, not {sorted(_PHASES)}")
        arrays: _Arrays = {phase: file.get_tensor(phase) for phase in _PHASES}
    if _digest(arrays, facts) != checksum:
        raise ValueError("its checksum does not match")
    return arrays


def _checked(array: npt.NDArray[np.generic], n_layer: int, n_expert: int) -> Counts:
    if array.dtype not in _KINDS or array.ndim != 3 or array.shape[1:] != (n_layer, n_expert):
        raise ValueError(f"a table of {array.dtype} {array.shape} is not (n, {n_layer}, {n_expert}) counts")
    counts = array.astype(np.float32)
    if not (np.isfinite(counts).all() and counts.min(initial=0) >= 0):
        raise ValueError("some counts are negative or not finite")
    return counts


def _narrowed(counts: Counts) -> npt.NDArray[np.generic]:
    """The same numbers in the smallest type that holds them exactly."""
    for kind in _KINDS[:-1]:
        if counts.max(initial=0) <= np.iinfo(kind).max and np.array_equal(counts, np.trunc(counts)):
            return counts.astype(kind)
    return np.ascontiguousarray(counts)


def _digest(arrays: _Arrays, facts: dict[str, str]) -> str:
    """sha256 over all bytes of the tensors, and over the metadata."""
    about = {phase: [str(array.dtype), *array.shape] for phase, array in arrays.items()}
    digest = hashlib.sha256(json.dumps([facts, about], sort_keys=True).encode())
    for phase in _PHASES:
        digest.update(np.ascontiguousarray(arrays[phase]).tobytes())
    return digest.hexdigest()
