"""Prints facts about the machine, the library and the card as JSON: `python -m
tools.gpu.facts`."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from moegguf.engine.devices import all_devices
from moegguf.engine.machine import count_cpus
from moegguf.native import library
from moegguf.processor import read_processor

CARD = (
    "name", "memory.total", "compute_cap", "driver_version", "pcie.link.gen.max", "pcie.link.gen.current",
    "pcie.link.width.max", "pcie.link.width.current", "clocks.max.sm", "clocks.sm", "clocks.mem",
)  # fmt: skip
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def card(fields: tuple[str, ...] = CARD) -> dict[str, str]:
    """Returns nvidia-smi's values of these fields for the first card. Raises OSError,
    subprocess.CalledProcessError."""
    command = [
        "nvidia-smi",
        "--id=0",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader",
    ]
    line = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()
    return dict(zip(fields, (cell.strip() for cell in line.split(",")), strict=True))


def built_in_switches() -> int:
    """Returns the bits of the experimental changes that this library can switch on; 0
    if it has no switches."""
    function = getattr(library.load(), "moegguf_switches", None)
    return int(function()) if function else 0


def facts() -> dict[str, Any]:
    """Returns the facts about the machine, the library, its devices and the first
    NVIDIA card."""
    found: dict[str, Any] = {
        "CPU": read_processor().model,
        "threads": count_cpus(),
        "last cache": LAST_CACHE.read_text().strip()
        if LAST_CACHE.exists()
        else "unknown",
        "memory, GB": round(psutil.virtual_memory().total / 1e9),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "devices": [f"{device.name}: {device.description}" for device in all_devices()],
        "switches": built_in_switches(),
    }
    try:
        return found | card()
    except (OSError, subprocess.CalledProcessError) as error:
        return found | {"card": f"none ({error})"}


if __name__ == "__main__":
    print(json.dumps(facts()))
