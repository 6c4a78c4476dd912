"""Tests the sentence about a card that cannot be used. Folders imitate a machine's
/dev, /proc and /sys."""

from pathlib import Path

import pytest

from moegguf.engine import cards
from moegguf.engine.cards import Build, Card, card_note, describe_cards, find_cards
from moegguf.engine.devices import BackendDevice
from moegguf.native.library import BackendProblems

NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version: 12\n"
OLD_NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024\n"
GIB = 1 << 30

Files = dict[str, str]


def nvidia(driver: str = NVRM.format("580.65.06"), *, node: bool = True) -> Files:
    of_card = "proc/driver/nvidia/gpus/0000:01:00.0/information"
    files = {"proc/driver/nvidia/version": driver, of_card: "Model: H100\n"}
    return files | ({"dev/nvidia0": "", "dev/nvidiactl": ""} if node else {})


def pci(
    vendor: str,
    address: str = "0000:03:00.0",
    memory_bytes: int | None = None,
    kind: str = "0x030000",
) -> Files:
    folder = f"sys/bus/pci/devices/{address}"
    files = {f"{folder}/vendor": vendor + "\n", f"{folder}/class": kind + "\n"}
    if memory_bytes is not None:
        files[f"{folder}/mem_info_vram_total"] = f"{memory_bytes}\n"
    return files


RENDER = {"dev/dri/renderD128": ""}
WINDOWS = {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}
CPU = BackendDevice(1, "CPU", "a processor", "CPU", "CPU")
CUDA0 = BackendDevice(2, "CUDA0", "NVIDIA H100", "CUDA", "GPU")
RPC0 = BackendDevice(3, "RPC0", "127.0.0.1:50052", "RPC", "GPU")
RADEON_8060S = BackendDevice(
    4, "Vulkan0", "AMD Radeon 8060S", "Vulkan", "integrated GPU"
)
MUSA0 = BackendDevice(5, "MUSA0", "MTT S80", "MUSA", "GPU")
NO_PROBLEM = BackendProblems([], [])
TOO_OLD = "ggml_cuda_init: failed to initialize CUDA: driver version is insufficient for runtime version"
NO_LIBCUDA = "load_backend: failed to load /libggml-cuda.so: libcuda.so.1: cannot open shared object file"
REFUSED = 'moegguf-cuda13 0.0.9 is not used: ...; pip install "moegguf-cuda13==0.1.0".'


def machine(root: Path, files: Files) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def build(
    *devices: BackendDevice,
    backends: str = "",
    error: str = "",
    refused: str = "",
    cuda: int | None = None,
) -> Build:
    problems = BackendProblems([refused] if refused else [], [error] if error else [])
    return Build(backends.split(), [CPU, *devices], problems, cuda)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, []),
        (nvidia(), [Card("NVIDIA", "580.65.06")]),
        (nvidia(OLD_NVRM), [Card("NVIDIA", "470.256.02")]),
        (nvidia("NVRM version: another text\n"), [Card("NVIDIA", "unknown")]),
        (nvidia(node=False), [Card("NVIDIA", "580.65.06", is_reachable=False)]),
        # The driver is loaded, but there is no card.
        ({"proc/driver/nvidia/version": OLD_NVRM}, []),
        (pci("0x10de"), [Card("NVIDIA", driver="")]),
        (pci("0x10de", kind="0x020000"), []),  # an NVIDIA network card
        (WINDOWS, [Card("NVIDIA")]),
        (pci("0x1002", memory_bytes=16 * GIB) | RENDER, [Card("AMD")]),
        (
            pci("0x1002", memory_bytes=192 * GIB, kind="0x120000"),
            [Card("AMD", is_reachable=False)],
        ),
        # Integrated into a processor.
        (pci("0x1002", memory_bytes=GIB // 2) | RENDER, []),
        # Not listed: without a driver, the size of this card's memory is unknown.
        (pci("0x1002") | RENDER, []),
        (pci("0x8086", "0000:00:02.0") | RENDER, []),  # integrated into a processor
        (pci("0x8086") | RENDER, [Card("Intel")]),
        (
            nvidia() | pci("0x8086", "0000:00:02.0") | RENDER,
            [Card("NVIDIA", "580.65.06")],
        ),
    ],
)
def test_find_cards_lists_what_the_system_has(
    tmp_path: Path, files: Files, found: list[Card]
) -> None:
    assert find_cards(machine(tmp_path, files)) == found


UNUSABLE = "but this build of moegguf cannot use it"
INSTALL = 'pip install "moegguf[{}]"'
RADEON = pci("0x1002", memory_bytes=16 * GIB)
OLD = nvidia(NVRM.format("550.54.14"))
VERY_OLD = nvidia(OLD_NVRM)
MACHINES: dict[str, tuple[Files, Build, str]] = {
    "no card": ({}, build(), ""),
    "no card, CUDA": ({}, build(backends="CUDA", error=TOO_OLD, cuda=13), ""),
    "no card, refused plug-in": ({}, build(refused=REFUSED), REFUSED),
    "NVIDIA that computes": (nvidia(), build(CUDA0, backends="CUDA", cuda=13), ""),
    "NVIDIA that computes, refused plug-in": (
        nvidia(),
        build(CUDA0, backends="CUDA", refused=REFUSED),
        "",
    ),
    "NVIDIA without a build": (
        nvidia(),
        build(),
        f"This machine has an NVIDIA card (driver 580.65.06), {UNUSABLE}: {INSTALL.format('cuda')}.",
    ),
    "NVIDIA without a build, old driver": (
        OLD,
        build(),
        f"{UNUSABLE}: {INSTALL.format('cuda12')}.",
    ),
    "NVIDIA without a build, very old driver": (
        VERY_OLD,
        build(),
        f"{UNUSABLE}: update the driver to 580 or newer, then {INSTALL.format('cuda')}.",
    ),
    "NVIDIA without a build beside a remote device": (
        nvidia(),
        build(RPC0),
        f"{INSTALL.format('cuda')}.",
    ),
    "NVIDIA, refused plug-in": (nvidia(), build(refused=REFUSED), REFUSED),
    "NVIDIA with CUDA 13, old driver": (
        OLD,
        build(backends="CUDA", error=TOO_OLD, cuda=13),
        "does not work (failed to initialize CUDA: driver version is insufficient for runtime version):"
        f" CUDA 13 needs driver 580 or newer; update it, or {INSTALL.format('cuda12')}.",
    ),
    "NVIDIA with CUDA 12, very old driver": (
        VERY_OLD,
        build(backends="CUDA", error=TOO_OLD, cuda=12),
        "CUDA 12 needs driver 525 or newer; update it.",
    ),
    "NVIDIA with CUDA that lists none": (
        nvidia(),
        build(backends="CUDA", cuda=13),
        "the backend for it does not work (it lists no device): `nvidia-smi` has to list the card;",
    ),
    "NVIDIA, plug-in that does not load": (
        nvidia(),
        build(error=NO_LIBCUDA),
        'cannot open shared object file): pip install --force-reinstall "moegguf[cuda]".',
    ),
    "NVIDIA, container without it": (
        nvidia(node=False),
        build(),
        "(driver 580.65.06), but /dev/nvidia0 is missing: start the container with `--gpus all`",
    ),
    "NVIDIA without its driver": (
        pci("0x10de"),
        build(),
        "an NVIDIA card, but NVIDIA's driver is not loaded: install version 580 or newer.",
    ),
    "NVIDIA under Windows": (
        WINDOWS,
        build(),
        f"(driver unknown), {UNUSABLE}: {INSTALL.format('cuda')}.",
    ),
    "AMD": (
        RADEON | RENDER,
        build(),
        f"an AMD card, {UNUSABLE}: {INSTALL.format('vulkan')}.",
    ),
    "AMD with Vulkan that lists none": (
        RADEON | RENDER,
        build(backends="Vulkan"),
        "`vulkaninfo --summary` has to list the card",
    ),
    "AMD, container without it": (
        RADEON,
        build(),
        "an AMD card, but /dev/dri is missing: start the container with `--device /dev/dri`",
    ),
    "Intel": (
        pci("0x8086") | RENDER,
        build(),
        f"an Intel card, {UNUSABLE}: {INSTALL.format('vulkan')}.",
    ),
    "integrated": (
        RENDER,
        build(RADEON_8060S, backends="Vulkan"),
        "Vulkan0 (AMD Radeon 8060S) is an integrated GPU, which moegguf does not use",
    ),
    "MUSA": (
        {},
        build(MUSA0),
        "Nobody has tried moegguf on MUSA, the backend of MUSA0",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_describe_cards_returns_one_sentence_for_a_machine_and_a_build(
    tmp_path: Path, name: str
) -> None:
    files, built, text = MACHINES[name]
    said = describe_cards(find_cards(machine(tmp_path, files)), built)
    assert text in said and bool(text) == bool(said)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("placement", "variables", "is_said"),
    [
        (None, {}, True),
        ("auto", {}, True),
        ("cpu", {}, False),
        (None, {"MOEGGUF_PLACEMENT": "cpu"}, False),
        ("slots", {"MOEGGUF_PLACEMENT": "cpu"}, True),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, False),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        (None, {"CUDA_VISIBLE_DEVICES": "0"}, True),
    ],
)
def test_card_note_is_empty_if_the_user_chose_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    placement: str | None,
    variables: Files,
    is_said: bool,
) -> None:
    monkeypatch.delenv("MOEGGUF_PLACEMENT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cards, "find_cards", lambda: [Card("NVIDIA", "580.65")])
    monkeypatch.setattr(cards, "read_build", build)
    assert bool(card_note(placement)) is is_said
