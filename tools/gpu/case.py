"""One measurement of a trial, as it is passed to its process (tools/gpu/measure.py)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """What is measured. limit_bytes: of the device's memory; None: all of it. hold: whether the limit is made by taking
    the rest; else by counting.

    llama.cpp: more_on_cpu layers' experts more (fewer: negative) on the CPU than seem to fit, all of them with
    all_on_cpu, none without a limit. moegguf: what `options` gives to Llama.
    """

    model: str
    device: str
    system: str
    limit_bytes: int | None = None
    hold: bool = True
    more_on_cpu: int = 0
    all_on_cpu: bool = False
    use_mmap: bool = True
    options: dict[str, Any] | None = None
    n_prompt: int = 512
    n_decode: int = 192
    n_ctx: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1

    def as_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case in the text of `as_json`."""
        return cls(**json.loads(text))
