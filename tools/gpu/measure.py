"""One measurement in a process of its own: `python -m tools.gpu.measure '<case as JSON>'` prints one line of JSON.

moegguf and llama.cpp itself are the same build, called the same way: load, a prompt, then tokens one by one, the
likeliest each time. A process that imitates a smaller card first takes all but so much of the device's memory.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from moegguf.bench.measure import greedy_token
from moegguf.engine.devices import find_gpus
from moegguf.engine.llama import Llama
from moegguf.engine.machine import Device
from moegguf.engine.memory import kv_bytes
from moegguf.errors import MoeggufError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.native import library
from moegguf.native.store import StoreOptions
from tools.gpu.case import Case

N_FIRST = 64  # tokens after the prompt that are told apart: slots are cold there
SPARE_BYTES = 1 << 30  # compute buffers, and what drivers take: for a first guess of what fits


class _Override(c.Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = [("pattern", c.c_char_p), ("buft", c.c_void_p)]


class Upstream(Llama):
    """llama.cpp itself (MOEGGUF_HOOKS=0), with the experts of the first layers on the CPU: llama.cpp's -ncmoe."""

    def __init__(self, path: str, n_cpu_moe: int, **options: Any) -> None:
        buffer_type = library.ggml().ggml_backend_cpu_buffer_type
        buffer_type.restype = c.c_void_p
        patterns = [rb"blk\.%d\.ffn_(up|down|gate_up|gate)_(ch|)exps" % il for il in range(n_cpu_moe)]
        self._overrides = (_Override * (n_cpu_moe + 1))(*(_Override(text, buffer_type()) for text in patterns))
        super().__init__(path, **options)

    def _attach_model(self, params: Any) -> None:
        super()._attach_model(params)
        params.tensor_buft_overrides = c.addressof(self._overrides)


class Held:
    """Memory of a device that nobody else has, until the process ends."""

    def __init__(self, device: Device, keep_free_bytes: int) -> None:
        ggml = library.ggml()
        for name, arguments in {
            "ggml_backend_dev_by_name": [c.c_char_p],
            "ggml_backend_dev_buffer_type": [c.c_void_p],
            "ggml_backend_buft_get_max_size": [c.c_void_p],
            "ggml_backend_buft_alloc_buffer": [c.c_void_p, c.c_size_t],
        }.items():
            getattr(ggml, name).restype, getattr(ggml, name).argtypes = c.c_void_p, arguments
        ggml.ggml_backend_buft_get_max_size.restype = c.c_size_t
        buffer_type = ggml.ggml_backend_dev_buffer_type(ggml.ggml_backend_dev_by_name(device.name.encode()))
        largest = min(ggml.ggml_backend_buft_get_max_size(buffer_type), 16 << 30)
        while (rest := find_gpus(device.name)[0].free_bytes - keep_free_bytes) > 0:
            if not ggml.ggml_backend_buft_alloc_buffer(buffer_type, min(rest, largest)):
                raise MemoryError(f"{device.name} refused {rest} bytes that are to be held.")


def expert_room_bytes(case: Case, layout: ExpertLayout) -> int:
    """What the limit leaves for experts on the device, beside dense weights, context and buffers."""
    assert case.limit_bytes is not None
    spare = SPARE_BYTES if case.hold else 0
    return max(0, case.limit_bytes - layout.dense_bytes - kv_bytes(layout, case.n_ctx) - spare)


def n_cpu_moe(case: Case, layout: ExpertLayout) -> int:
    """Layers whose experts llama.cpp computes on the CPU, counted from the first layer, with experts or without."""
    if case.all_on_cpu:
        return layout.n_layer
    if case.limit_bytes is None:
        return 0
    on_device = expert_room_bytes(case, layout) * len(layout.layers) // layout.expert_bytes
    return max(0, min(layout.n_layer, layout.n_layer - on_device + case.more_on_cpu))


def load(case: Case) -> Llama:
    """The model as the case wants it. MOEGGUF_HOOKS has been set for its system."""
    options: dict[str, Any] = {
        "n_ctx": case.n_ctx, "n_batch": case.n_ctx, "n_ubatch": case.n_ubatch, "n_threads": case.n_threads,
        "n_gpu_layers": -1, "verbose": case.system == "llama.cpp",
    }  # fmt: skip
    if case.system == "llama.cpp":
        layout = read_layout(case.model)
        return Upstream(case.model, n_cpu_moe(case, layout), use_mmap=case.use_mmap, **options)
    given = dict(case.options or {})
    if case.limit_bytes is not None and not case.hold:
        given["vram_cache"] = expert_room_bytes(case, read_layout(case.model))
    return Llama(case.model, store=StoreOptions(device=case.device), **{"vram_cache": "auto"} | given | options)


def read(llm: Llama, prompt: Sequence[int]) -> float:
    """Seconds until the first token of an answer to the prompt is known."""
    llm.reset()
    start = time.perf_counter()
    llm.eval(prompt)
    greedy_token(llm)
    return time.perf_counter() - start


def decode(llm: Llama, n_tokens: int) -> tuple[list[int], float]:
    """The tokens, and seconds."""
    tokens, start = [], time.perf_counter()
    for _ in range(n_tokens):
        tokens.append(greedy_token(llm))
        llm.eval(tokens[-1:])
    return tokens, time.perf_counter() - start


def hits(llm: Llama) -> dict[str, tuple[int, int, int]]:
    """(hits, lookups, bytes that came) of each tier so far."""
    if llm.session is None:
        return {}
    return {
        name: (
            tier["hits_ready"] + tier["hits_late"], tier["lookups"], tier["bytes_missed"] + tier["bytes_prefetched"]
        )
        for name, tier in llm.session.tiers().items()
    }  # fmt: skip


def _figures(before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]], n: int) -> dict[str, Any]:
    changes = {name: np.subtract(after[name], before[name]).tolist() for name in after}
    return {
        name: {"hit_rate": hit / lookups if lookups else None, "bytes_per_token": n_bytes / n}
        for name, (hit, lookups, n_bytes) in changes.items()
    }


def predictions(llm: Llama) -> dict[str, float]:
    """Tokens per second that the cost model gives each placement here, and "chosen"; empty where nothing is decided."""
    decided = getattr(llm.plan, "placement", None) if llm.session is not None else None
    if decided is None:
        return {}
    every = {placement.kind: placement.tokens_per_s for placement in decided.placements}
    return every | {"chosen": decided.chosen.tokens_per_s}


def run(case: Case) -> dict[str, Any]:
    """The measurement. Raises what loading raises."""
    device = find_gpus(case.device)[0]
    if case.hold and case.limit_bytes is not None:
        Held(device, case.limit_bytes)
    free_before, start = find_gpus(case.device)[0].free_bytes, time.perf_counter()
    with load(case) as llm:
        load_s = time.perf_counter() - start
        other, prompt = np.random.default_rng(0).integers(0, llm.n_vocab(), (2, case.n_prompt)).tolist()
        cold_prompt_s = read(llm, other)  # kernels are loaded when they are first used, and experts come into RAM
        prompt_s, after_prompt = read(llm, prompt), hits(llm)
        first, first_s = decode(llm, N_FIRST)
        after_first = hits(llm)
        steady, steady_s = decode(llm, case.n_decode)
        return {
            "load_s": load_s,
            "cold_prompt_tokens_per_s": case.n_prompt / cold_prompt_s,
            "prompt_tokens_per_s": case.n_prompt / prompt_s,
            "first_tokens_per_s": N_FIRST / first_s,
            "steady_tokens_per_s": case.n_decode / steady_s,
            "first": _figures(after_prompt, after_first, N_FIRST),
            "steady": _figures(after_first, hits(llm), case.n_decode),
            "tokens": first + steady,
            "device_bytes": free_before - find_gpus(case.device)[0].free_bytes,
            "n_cpu_moe": len(llm._overrides) - 1 if isinstance(llm, Upstream) else None,
            "reasons": list(llm.plan.reasons) if llm.session is not None else [],
            "predicted": predictions(llm),
            "n_ubatch": llm.plan.n_ubatch if llm.session is not None else case.n_ubatch,
        }


def main(arguments: Sequence[str]) -> None:
    """Prints the result, or the error, as JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of the result
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run(Case.from_json(arguments[0]))
    except (MoeggufError, MemoryError) as error:
        result = {"error": str(error)}
    print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
