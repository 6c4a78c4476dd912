"""Reads the processor's name and instruction sets from the operating system."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

# Instruction sets that the kernels of `native/kernels` need.
NEEDED_FLAGS = {"avx2", "fma", "f16c"}


@dataclass(frozen=True)
class Processor:
    """A processor's name, and its instruction sets, named as in Linux. `flags` is empty
    if the instruction sets are unknown."""

    model: str
    flags: frozenset[str]


def read_processor(
    root: Path = Path("/"), architecture: str = platform.machine()
) -> Processor:
    """Returns the first processor in /proc/cpuinfo. If it has no name, uses the
    machine's name, which some ARM systems list last, or else "unknown CPU".

    On ARM, reads only the line "Features". The line "flags" names instruction sets of
    x86: an emulator that runs ARM programs on an x86 machine may show them the x86
    machine's /proc/cpuinfo.
    """
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    first = dict[str, str]()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip():
            first.setdefault(name.strip(), value.strip())
    model = first.get("model name") or first.get("Model") or "unknown CPU"
    flags = "" if architecture == "aarch64" else first.get("flags", "")
    return Processor(model, frozenset((flags or first.get("Features", "")).split()))


def has_kernels(processor: Processor, chosen: str) -> bool:
    """Returns True if the processor can use the kernels of `native/kernels` and the
    user has not turned them off. `chosen` is the value of MOEGGUF_KERNELS."""
    return chosen != "upstream" and processor.flags >= NEEDED_FLAGS
