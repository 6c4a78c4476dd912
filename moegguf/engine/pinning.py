"""Remembers that the system refused pinned memory for a model's slots in RAM, so that
the next plan uses the speed of copies from pageable memory.

A load is not planned again after a refusal. Pinning has then taken up to a minute, the
slots have been allocated, and the process that loads the model received its plan from
the owner of the memory.
"""

from __future__ import annotations

from moegguf.engine.known_facts import KnownFact
from moegguf.engine.machine import ROOT, file_text
from moegguf.gguf.experts import ExpertLayout


def note_pinning(layout: ExpertLayout, n_bytes: int, is_refused: bool) -> None:
    """Saves whether the system refused to pin `n_bytes` for this model. A success with
    at least as many bytes as were refused before deletes the refusal."""
    known = refused_bytes(layout)
    if is_refused and (not known or n_bytes < known):
        _fact(layout).write(n_bytes)
    elif known and n_bytes >= known and not is_refused:
        _fact(layout).write(0)


def refused_bytes(layout: ExpertLayout) -> int:
    """Returns the smallest number of bytes that the system has refused to pin for this
    model since it was started; 0 if it has refused nothing."""
    return _fact(layout).read(int) or 0


def _fact(layout: ExpertLayout) -> KnownFact:
    return KnownFact(
        "pinning", layout, file_text(ROOT / "proc/sys/kernel/random/boot_id").strip()
    )
