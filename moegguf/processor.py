"""The processor's name and instruction sets, as the operating system knows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NEEDED_FLAGS = {"avx2", "fma", "f16c"}  # the kernels of `native/kernels` need these


@dataclass(frozen=True)
class Processor:
    """A processor's name, and its instruction sets by Linux's names. No flags: they are unknown."""

    model: str
    flags: frozenset[str]


def read_processor(root: Path = Path("/")) -> Processor:
    """The first processor in /proc/cpuinfo."""
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
    """Returns whether this processor computes with the kernels of `native/kernels`. chosen: MOEGGUF_KERNELS."""
    return chosen != "upstream" and processor.flags >= NEEDED_FLAGS
