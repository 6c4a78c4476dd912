"""The measurements of a trial: models, memory limits and systems. `small` returns a
rehearsal with tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.case import Case
from tools.models import PRESETS, model_size_bytes

GB = 10**9
RESIDENT, ALL_ON_CPU, OURS = (
    "llama.cpp, all on the device",
    "llama.cpp -cmoe",
    "moegguf",
)
RESIDENT_STORE = "moegguf, a slot for each expert"
SOME_ON_CPU = "llama.cpp -ncmoe"
NO_LIMIT = "-"


@dataclass(frozen=True)
class Model:
    """A model of the trial: a preset of tools/make_model.py, and the memory limits
    {label in a table: bytes}."""

    preset: str
    quant: str
    limits: dict[str, int]

    def file(self, folder: Path) -> Path:
        """Returns the path of the model's file."""
        return folder / f"{self.preset}-{self.quant}.gguf"

    @property
    def n_bytes(self) -> int:
        """Returns the size of the model's tensors in bytes, which is about the size of
        the file."""
        return model_size_bytes(PRESETS[self.preset], self.quant)


@dataclass(frozen=True)
class Rig:
    """The models of a trial, and values for the fields of its cases
    (`tools.gpu.case.Case`)."""

    models: tuple[Model, ...]
    # True: the process allocates all memory above the limit; false: no memory is held.
    hold: bool
    sizes: dict[str, int]
    # Fields of each -ncmoe variant; the table shows the fastest.
    upstream: tuple[dict[str, Any], ...]
    # {name of a moegguf variant in the table: its options}.
    ours: dict[str, dict[str, Any]]

    def cases(
        self, model: Model, folder: Path, device: str, n_threads: int
    ) -> Iterator[tuple[str, Case]]:
        """Yields (name, case) of every measurement of a model; a name is
        limit/system/variant."""
        common: dict[str, Any] = {
            "model": str(model.file(folder)),
            "device": device,
            "hold": self.hold,
            **self.sizes,
        }
        common["n_threads"] = n_threads
        yield f"{NO_LIMIT}/{RESIDENT}/-", Case(system="llama.cpp", **common)
        resident = {"vram_cache": "100%", "placement": "slots"}
        yield (
            f"{NO_LIMIT}/{RESIDENT_STORE}/-",
            Case(system="moegguf", options=resident, **common),
        )
        for label, n_bytes in model.limits.items():
            limited = common | {"limit_bytes": n_bytes}
            yield (
                f"{label}/{ALL_ON_CPU}/-",
                Case(system="llama.cpp", all_on_cpu=True, **limited),
            )
            for variant in self.upstream:
                named = " ".join(f"{name}={value}" for name, value in variant.items())
                yield (
                    f"{label}/{SOME_ON_CPU}/{named}",
                    Case(system="llama.cpp", **limited, **variant),
                )
            for name, options in self.ours.items():
                yield (
                    f"{label}/{name}/-",
                    Case(system="moegguf", options=options, **limited),
                )


# Memory limits that imitate cards of 8 and 16 GiB. The driver and other programs use
# the rest of such a card's memory.
CARDS = {f"{n} GB": n * GB for n in (8, 16)}
FULL = Rig(
    models=(
        Model("qwen3-30b-a3b", "q4_k_m", CARDS),
        Model("qwen1.5-moe-a2.7b", "q4_k_m", {"8 GB": 8 * GB}),
    ),
    hold=True,
    sizes={"n_prompt": 1024, "n_decode": 256, "n_ctx": 2048, "n_ubatch": 512},
    upstream=({"more_on_cpu": -2}, {"more_on_cpu": -1}, {"more_on_cpu": 0}),
    ours={OURS: {}},
)


def small() -> Rig:
    """Returns a rehearsal with tiny models, for a machine without a large GPU. Its
    figures are meaningless."""
    models = []
    for preset in ("tiny-qwen3moe", "tiny-mixtral"):
        n_bytes = model_size_bytes(PRESETS[preset], "q4_0")
        models.append(
            Model(
                preset,
                "q4_0",
                {f"{share} %": n_bytes * share // 100 for share in (70, 85)},
            )
        )
    return Rig(
        models=tuple(models),
        hold=False,
        sizes={"n_prompt": 64, "n_decode": 16, "n_ctx": 256, "n_ubatch": 64},
        upstream=({"more_on_cpu": 0}, {"more_on_cpu": 1}),
        ours={OURS: {}},
    )
