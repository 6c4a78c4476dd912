"""The parameters of one measurement, passed as JSON to the process that does the
measuring (tools/gpu/measure.py or tools/gpu/batches.py)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

# Tokens at the start of an answer, timed separately because many experts are not yet in
# slots.
N_FIRST = 64


@dataclass(frozen=True)
class Case:
    """One measurement: a system (moegguf or llama.cpp), a model, a memory limit and
    sizes."""

    model: str
    device: str
    system: str  # "llama.cpp" or "moegguf"
    limit_bytes: int | None = None  # device memory that may be used; None: all of it
    # True: the process allocates all memory above the limit; false: no memory is held.
    hold: bool = True
    # llama.cpp: added to the estimated number of layers whose experts are on the CPU.
    more_on_cpu: int = 0
    all_on_cpu: bool = False  # llama.cpp: the experts of every layer are on the CPU
    use_mmap: bool = True
    # moegguf: keyword arguments of Llama; a dict for `prefetch` has fields of
    # `PrefetchOptions`
    options: dict[str, Any] | None = None
    # link speed ("8GB/s") of a simulated device that is used instead of `device`; "":
    # not simulated.
    link: str = ""
    n_prompt: int = 512
    # Number of timed prompts, after one cold prompt that is not counted.
    n_prompts: int = 3
    n_decode: int = 192
    n_ctx: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1

    def as_json(self) -> str:
        """Returns the fields as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Returns the case from the output of `as_json`."""
        return cls(**json.loads(text))


def read_parts(text: str) -> dict[str, Any]:
    """Returns the JSON objects in the lines of a process's output, merged into one.

    Skips lines that are not JSON, such as the last line of a process that was killed.
    """
    result = dict[str, Any]()
    for line in text.splitlines():
        with suppress(ValueError):
            result |= json.loads(line)
    return result
