"""One measurement of a trial, as it is passed to its process (tools/gpu/measure.py)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

N_FIRST = 64  # tokens after the prompt that are measured apart: slots are cold there


@dataclass(frozen=True)
class Case:
    """A system that measures one model within one limit."""

    model: str
    device: str
    system: str  # "llama.cpp" or "moegguf"
    limit_bytes: int | None = None  # limit of the device's memory; None: all of it
    hold: bool = True  # the limit is made by taking the other memory; else it is counted
    more_on_cpu: int = 0  # llama.cpp: layers' experts on the CPU beyond the number that seems to be needed
    all_on_cpu: bool = False  # llama.cpp: every layer's experts on the CPU
    use_mmap: bool = True
    options: dict[str, Any] | None = None  # moegguf: keywords of Llama
    link: str = ""  # link of a simulated device, such as "8GB/s", in place of `device`
    n_prompt: int = 512
    n_prompts: int = 3  # prompts that are timed, after one that is cold
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


def read_parts(text: str) -> dict[str, Any]:
    """Returns the parts of a result as one. `tools.gpu.measure` prints each as soon as it is known, on its own line.

    A line that is no JSON, such as one that was cut off, is passed over.
    """
    result = dict[str, Any]()
    for line in text.splitlines():
        with suppress(ValueError):
            result |= json.loads(line)
    return result
