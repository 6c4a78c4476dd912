"""A small library of well-known MoE models by short names such as "qwen3:30b": where they are, and how large.

The table library.json says how its facts were checked. A name without a tag means the first model of that name. Reads
no network and no other model.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moegguf.models.names import HUB_HOST, is_hub_name


@dataclass(frozen=True)
class LibraryModel:
    """A model of the library. file: the first one of a split model. n_parameters, n_active: of all experts and of those
    that a token uses, with all other weights. n_layer: layers of the model."""

    name: str
    repository: str
    file: str
    quantization: str
    size_bytes: int
    n_parameters: float
    n_active: float
    n_expert: int
    n_expert_used: int
    n_layer: int

    @property
    def hub_name(self) -> str:
        """Its name on Hugging Face."""
        return f"{HUB_HOST}/{self.repository}:{self.quantization}"

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts: the part of the weights of which a token uses n_expert_used of n_expert."""
        share = (1 - self.n_active / self.n_parameters) / (1 - self.n_expert_used / self.n_expert)
        return round(min(1.0, share) * self.size_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of the routed experts that a token uses."""
        return self.expert_bytes * self.n_expert_used // self.n_expert

    @property
    def dense_bytes(self) -> int:
        """Bytes of all other weights, which every token uses."""
        return self.size_bytes - self.expert_bytes


@functools.cache
def library() -> tuple[LibraryModel, ...]:
    """All models of the library, in the order of its table."""
    table = json.loads(Path(__file__).with_name("library.json").read_text(encoding="utf-8"))
    return tuple(LibraryModel(**dict(zip(table["columns"], row, strict=True))) for row in table["models"])


def find_in_library(text: str) -> LibraryModel | None:
    """The model of this short name, in any case."""
    name = text.lower().removesuffix(":latest")
    return next((model for model in library() if name in (model.name, model.name.partition(":")[0])), None)


def fetchable_name(text: str) -> str | None:
    """The name on Hugging Face that `text` means, by itself or in the library; None where it is no such name."""
    if model := find_in_library(text):
        return model.hub_name
    return text if is_hub_name(text) else None


def nearest_names(text: str, others: Sequence[str] = ()) -> list[str]:
    """Up to three names of the library and among `others` that are written much as `text`."""
    known = [*others, *(model.name for model in library())]
    return list(dict.fromkeys(difflib.get_close_matches(text.lower().removesuffix(":latest"), known, n=3)))
