"""Explains why a graphics card of this machine is not used, and what to do about it.

`find_cards` finds the cards that the operating system lists. `describe_cards` compares
them with the devices that ggml has found.
"""

from __future__ import annotations

import ctypes as c
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegguf.engine.devices import BackendDevice, all_devices
from moegguf.engine.machine import ROOT, file_text
from moegguf.native import library
from moegguf.settings import read_load_keywords

LEAST_DRIVER = {12: 525, 13: 580}
"""{major version of the CUDA runtime: major version of the oldest NVIDIA driver that
supports it}"""
BACKENDS = {
    "NVIDIA": ("CUDA", "Vulkan"),
    "AMD": ("ROCm", "Vulkan"),
    "Intel": ("SYCL", "Vulkan"),
}
# PCI vendor ids, as sysfs writes them.
AMD, INTEL, NVIDIA = "0x1002", "0x8086", "0x10de"
# AMD GPUs that report less memory, or none, are treated as part of a processor.
LEAST_CARD_BYTES = 2 << 30
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Card:
    """A graphics card or accelerator that the operating system lists."""

    vendor: str  # "NVIDIA", "AMD" or "Intel"
    # Version of NVIDIA's driver; "": not loaded; UNKNOWN: not found, or another vendor.
    driver: str = UNKNOWN
    # False: there is no device node, as in a container without access.
    is_reachable: bool = True


@dataclass(frozen=True)
class Build:
    """The GPU backends and devices that ggml has found in this process."""

    backends: Sequence[str]  # names from BACKENDS
    devices: Sequence[BackendDevice]
    problems: library.BackendProblems
    # Major version of the CUDA runtime; None if it is not loaded.
    cuda: int | None = None


def find_cards(root: Path = ROOT) -> list[Card]:
    """Returns at most one card from each vendor. GPUs that are built into Intel's and
    AMD's processors are left out."""
    found = list(_pci_vendors(root))
    nodes = root / "dev"
    is_reachable = any(nodes.glob("dri/renderD*"))
    cards = [Card("AMD", is_reachable=is_reachable)] if AMD in found else []
    cards += [Card("Intel", is_reachable=is_reachable)] if INTEL in found else []
    version = file_text(root / "proc/driver/nvidia/version")
    if version and any((root / "proc/driver/nvidia/gpus").glob("*")):
        number = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", version)
        driver = number.group() if number else UNKNOWN
        cards.insert(0, Card("NVIDIA", driver, any(nodes.glob("nvidia[0-9]*"))))
    elif (nodes / "dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        # This is WSL: Windows has the driver, and Linux runs inside Windows.
        cards.insert(0, Card("NVIDIA"))
    elif NVIDIA in found:
        cards.insert(0, Card("NVIDIA", driver=""))
    return cards


def _pci_vendors(root: Path) -> Iterator[str]:
    """Yields the PCI vendor id of each display controller and accelerator, except GPUs
    that are built into a processor."""
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        if not file_text(device / "class").startswith(("0x03", "0x12")):
            continue
        vendor = file_text(device / "vendor").strip()
        memory = file_text(device / "mem_info_vram_total").strip()
        # PCI bus 0, as in 0000:00:02.0.
        is_part_of_intel = vendor == INTEL and ":00:" in device.name
        is_part_of_amd = vendor == AMD and (
            not memory.isdigit() or int(memory) < LEAST_CARD_BYTES
        )
        if not is_part_of_intel and not is_part_of_amd:
            yield vendor


def read_build() -> Build:
    """Returns the GPU backends and devices that ggml has found. Raises LibraryError."""
    find = library.ggml().ggml_backend_reg_by_name
    find.restype = c.c_void_p
    names = sorted({name for of_vendor in BACKENDS.values() for name in of_vendor})
    runtime = re.search(r"libcudart\.so\.(\d+)", file_text(Path("/proc/self/maps")))
    return Build(
        [name for name in names if find(name.encode())],
        all_devices(),
        library.backend_problems(),
        int(runtime.group(1)) if runtime else None,
    )


def describe_cards(cards: Sequence[Card], build: Build) -> str:
    """Returns a message about a card, GPU or backend plug-in that is not used, or about
    a GPU whose backend (MUSA) was never tried with moegguf.

    Returns "" if there is nothing to report, for example if ggml has found a GPU of a
    backend other than MUSA.
    """
    own = [device for device in build.devices if device.backend not in ("CPU", "RPC")]
    for device in own:
        if device.kind == "GPU":
            return _describe_untried(device) if device.backend == "MUSA" else ""
    if build.problems.refused:
        return build.problems.refused[0]
    for device in own:
        if device.kind == "integrated GPU":
            return _describe_integrated(device)
    return _describe_card(cards[0], build) if cards else ""


def _describe_card(card: Card, build: Build) -> str:
    is_nvidia = card.vendor == "NVIDIA"
    there = f"This machine has an {card.vendor} card"
    if is_nvidia and not card.driver:
        least = LEAST_DRIVER[13]
        return f"{there}, but NVIDIA's driver is not loaded: install version {least} or newer."
    if is_nvidia:
        there += f" (driver {card.driver})"
    if not card.is_reachable:
        node, option = (
            ("nvidia0", "--gpus all") if is_nvidia else ("dri", "--device /dev/dri")
        )
        return (
            f"{there}, but /dev/{node} is missing: start the container with `{option}`, or load the"
            " card's driver outside of one."
        )
    errors = [re.sub(r"^\w+: ", "", error) for error in build.problems.errors]
    if not errors and not set(build.backends).intersection(BACKENDS[card.vendor]):
        return f"{there}, but this build of moegguf cannot use it: {_install(card)}."
    reason = errors[0] if errors else "it lists no device"
    return f"{there}, but the backend for it does not work ({reason}): {_repair(card, build)}."


def _driver_number(card: Card) -> int:
    """Returns the driver's major version: 580 for 580.65. If the version is unknown,
    returns the highest version in LEAST_DRIVER."""
    if card.driver == UNKNOWN:
        return max(LEAST_DRIVER.values())
    return int(card.driver.partition(".")[0])


def _install(card: Card) -> str:
    if card.vendor != "NVIDIA":
        return 'pip install "moegguf[vulkan]"'
    for cuda, extra in ((13, "cuda"), (12, "cuda12")):
        if _driver_number(card) >= LEAST_DRIVER[cuda]:
            return f'pip install "moegguf[{extra}]"'
    return f'update the driver to {LEAST_DRIVER[13]} or newer, then pip install "moegguf[cuda]"'


def _repair(card: Card, build: Build) -> str:
    if any("failed to load" in error for error in build.problems.errors):
        extra = "cuda" if card.vendor == "NVIDIA" else "vulkan"
        return f'pip install --force-reinstall "moegguf[{extra}]"'
    if card.vendor != "NVIDIA":
        return "`vulkaninfo --summary` has to list the card; install its vendor's Vulkan driver"
    least = LEAST_DRIVER.get(build.cuda or 0, 0)
    if _driver_number(card) >= least:
        return "`nvidia-smi` has to list the card; install the driver again, or restart the machine"
    update = f"CUDA {build.cuda} needs driver {least} or newer; update it"
    is_enough_for_12 = _driver_number(card) >= LEAST_DRIVER[12]
    return f'{update}, or pip install "moegguf[cuda12]"' if is_enough_for_12 else update


def _describe_untried(device: BackendDevice) -> str:
    return (
        f"Nobody has tried moegguf on {device.backend}, the backend of {device.name}: compare an"
        " answer with one of --placement cpu before you rely on it."
    )


def _describe_integrated(device: BackendDevice) -> str:
    return (
        f"{device.name} ({device.description}) is an integrated GPU, which moegguf does not use:"
        " its memory is the machine's RAM, so that copies of experts there save nothing. The CPU"
        " computes; where the whole model fits in memory, llama.cpp itself can compute on that GPU."
    )


def card_note(placement: str | None = None) -> str:
    """Returns the result of `describe_cards` for this machine. Returns "" if the
    placement (the argument, or MOEGGUF_PLACEMENT) is "cpu", or if CUDA_VISIBLE_DEVICES
    hides all devices.

    Raises LibraryError.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", UNKNOWN) in ("", "-1")
    if hidden or (placement or read_load_keywords().get("placement")) == "cpu":
        return ""
    return describe_cards(find_cards(), read_build())
