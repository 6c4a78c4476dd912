"""Reads the processor's name and instruction sets from the operating system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NEEDED_FLAGS = {"avx2", "fma", "f16c"}  # instruction sets that the kernels of `native/kernels` need


@dataclass(frozen=True)
class Processor:
    """A processor's name, and its instruction sets by Linux's names. `flags` is empty if the instruction sets are
    unknown."""

    model: str
    flags: frozenset[str]


def read_processor(root: Path = Path("/")) -> Processor:
    """Returns the first processor in /proc/cpuinfo, with the name "unknown CPU" if no name is found."""
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    model, flags = "unknown CPU", frozenset[str]()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            model = value.strip() or model
        elif name.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
            break
    return Processor(model, flags)


def has_kernels(processor: Processor, chosen: str) -> bool:
    """Returns True if the processor can use the kernels of `native/kernels` and the user has not turned them off.
    `chosen` is the value of MOEGGUF_KERNELS."""
    return chosen != "upstream" and processor.flags >= NEEDED_FLAGS
