"""Runs one measurement: `python -m tools.gpu.measure '<case as JSON>'` prints a JSON
object for each part.

moegguf and plain llama.cpp use the same build and the same calls: load, prompts, then
greedy decoding token by token. Each timed part begins after the store's pending work
has finished. If the case has `hold` and a limit, the process first allocates the
device's memory above the limit, to imitate a smaller card.
"""

from __future__ import annotations

import ctypes as c
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moegguf.bench.measure import greedy_token, open_result
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.engine.devices import find_gpus
from moegguf.engine.llama import Llama
from moegguf.engine.machine import Device
from moegguf.engine.memory import kv_bytes
from moegguf.errors import MoeggufError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.quantities import parse_link
from moegguf.testing.link_device import add_link_device
from tools.gpu.case import N_FIRST, Case

SPARE_BYTES = 1 << 30  # estimate for compute buffers and the driver's own memory
# Counters of the store.
COUNTED = ("hook_ns", "stall_ns", "forecast_scored", "prefetch_started")
# Counters of each tier.
COUNTED_THERE = ("stall_ns", "stream_waits", "copy_ns", "misses", "evictions")
# Counted by tools/gpu/calls.cpp, in this order.
CALLS = ("graph launches", "copies", "synchronisations", "event waits")


class _Override(c.Structure):
    """The C struct llama_model_tensor_buft_override."""

    _fields_ = [("pattern", c.c_char_p), ("buft", c.c_void_p)]


class Upstream(Llama):
    """Plain llama.cpp (MOEGGUF_HOOKS=0) with the experts of the first `n_cpu_moe`
    layers on the CPU, as with -ncmoe."""

    def __init__(self, path: str, n_cpu_moe: int, **options: Any) -> None:
        buffer_type = library.ggml().ggml_backend_cpu_buffer_type
        buffer_type.restype = c.c_void_p
        patterns = [
            rb"blk\.%d\.ffn_(up|down|gate_up|gate)_(ch|)exps" % il
            for il in range(n_cpu_moe)
        ]
        self._overrides = (_Override * (n_cpu_moe + 1))(
            *(_Override(text, buffer_type()) for text in patterns)
        )
        super().__init__(path, **options)

    def _attach_model(self, params: Any) -> None:
        super()._attach_model(params)
        params.tensor_buft_overrides = c.addressof(self._overrides)


class Held:
    """Allocates device memory until at most `keep_free_bytes` are free. The memory
    stays allocated until the process exits.
    """

    def __init__(self, device: Device, keep_free_bytes: int) -> None:
        ggml = library.ggml()
        for name, arguments in {
            "ggml_backend_dev_by_name": [c.c_char_p],
            "ggml_backend_dev_buffer_type": [c.c_void_p],
            "ggml_backend_buft_get_max_size": [c.c_void_p],
            "ggml_backend_buft_alloc_buffer": [c.c_void_p, c.c_size_t],
        }.items():
            getattr(ggml, name).restype = c.c_void_p
            getattr(ggml, name).argtypes = arguments
        ggml.ggml_backend_buft_get_max_size.restype = c.c_size_t
        buffer_type = ggml.ggml_backend_dev_buffer_type(
            ggml.ggml_backend_dev_by_name(device.name.encode())
        )
        largest = min(ggml.ggml_backend_buft_get_max_size(buffer_type), 16 << 30)
        while (rest := find_gpus(device.name)[0].free_bytes - keep_free_bytes) > 0:
            if not ggml.ggml_backend_buft_alloc_buffer(buffer_type, min(rest, largest)):
                raise MemoryError(
                    f"{device.name} refused {rest} bytes that are to be held."
                )


def expert_room_bytes(case: Case, layout: ExpertLayout) -> int:
    """Returns how many bytes within the memory limit remain for experts, after dense
    weights, KV cache and, with `hold`, buffers."""
    assert case.limit_bytes is not None
    spare = SPARE_BYTES if case.hold else 0
    return max(
        0, case.limit_bytes - layout.dense_bytes - kv_bytes(layout, case.n_ctx) - spare
    )


def n_cpu_moe(case: Case, layout: ExpertLayout) -> int:
    """Returns the value for -ncmoe: the number of leading layers whose experts
    llama.cpp runs on the CPU.

    Layers without experts are counted, too.
    """
    if case.all_on_cpu:
        return layout.n_layer
    if case.limit_bytes is None:
        return 0
    on_device = (
        expert_room_bytes(case, layout) * len(layout.layers) // layout.expert_bytes
    )
    return max(0, min(layout.n_layer, layout.n_layer - on_device + case.more_on_cpu))


def load(case: Case) -> Llama:
    """Loads the model with the options of the case. The caller has set MOEGGUF_HOOKS
    for the case's system."""
    options: dict[str, Any] = {
        "n_ctx": case.n_ctx, "n_batch": case.n_ctx, "n_ubatch": case.n_ubatch, "n_threads": case.n_threads,
        "n_gpu_layers": -1, "verbose": case.system == "llama.cpp",
    }  # fmt: skip
    if case.system == "llama.cpp":
        layout = read_layout(case.model)
        return Upstream(
            case.model, n_cpu_moe(case, layout), use_mmap=case.use_mmap, **options
        )
    given = dict(case.options or {})
    if isinstance(limits := given.get("prefetch"), dict):
        given["prefetch"] = PrefetchOptions(**limits)
    if case.limit_bytes is not None and not case.hold:
        given["vram_cache"] = expert_room_bytes(case, read_layout(case.model))
    return Llama(
        case.model,
        store=StoreOptions(device=case.device),
        **{"vram_cache": "auto"} | given | options,
    )


def settle(llm: Llama) -> None:
    """Waits for the store's pending transfers to finish, so that they do not slow down
    the next timed part."""
    if llm.session is not None:
        llm.session.store.drain()


def read(llm: Llama, prompt: Sequence[int]) -> float:
    """Evaluates a prompt from an empty context. Returns the seconds until the first
    token of the answer is known."""
    settle(llm)
    llm.reset()
    start = time.perf_counter()
    llm.eval(prompt)
    greedy_token(llm)
    return time.perf_counter() - start


def decode(llm: Llama, n_tokens: int) -> tuple[list[int], float]:
    """Decodes greedily. Returns the tokens, and the total time in seconds."""
    settle(llm)
    tokens = []
    start = time.perf_counter()
    for _ in range(n_tokens):
        tokens.append(greedy_token(llm))
        llm.eval(tokens[-1:])
    return tokens, time.perf_counter() - start


Counts = dict[str, dict[str, int]]


def counts(llm: Llama) -> Counts:
    """Returns the current counters by source: each CUDA call, the store, each tier, and
    the staging tensors."""
    found = Counts()
    if (calls := getattr(c.CDLL(None), "moegguf_calls", None)) is not None:
        sums = (c.c_uint64 * (2 * len(CALLS)))()
        calls(sums)
        for i, name in enumerate(CALLS):
            found[name] = {"n": sums[2 * i], "ns": sums[2 * i + 1]}
    if llm.session is None:
        return found
    of_store = llm.session.store.counters()
    found["store"] = {name: of_store[name] for name in COUNTED}
    staged = llm.session.store.staging()
    for name, tier in (
        llm.session.tiers() | ({"staging": staged} if staged else {})
    ).items():
        found[name] = {field: tier[field] for field in (*COUNTED_THERE, "lookups")}
        found[name]["hits"] = tier["hits_ready"] + tier["hits_late"]
        found[name]["bytes"] = tier["bytes_missed"] + tier["bytes_prefetched"]
    return found


def figures(
    before: Counts, after: Counts, n_tokens: int
) -> dict[str, dict[str, float | None]]:
    """Returns the growth of each counter between two readings, per token, and the hit
    rate of each source that counts lookups."""
    found = dict[str, dict[str, float | None]]()
    for place, now in after.items():
        grown = {name: value - before[place][name] for name, value in now.items()}
        found[place] = {
            f"{name}_per_token": value / n_tokens for name, value in grown.items()
        }
        if lookups := grown.get("lookups"):
            found[place]["hit_rate"] = grown["hits"] / lookups
    return found


def is_complete(llm: Llama) -> bool | None:
    """Returns True if the number of used slots equals the number of experts; None for
    plain llama.cpp."""
    if llm.session is None:
        return None
    info = llm.session.store.info()
    return bool(info["slots_used"] == info["n_experts"])


def slots_share(llm: Llama) -> float | None:
    """Returns the number of slots divided by the number of experts; None for plain
    llama.cpp."""
    if llm.session is None:
        return None
    info = llm.session.store.info()
    return float(info["n_slots_usable"] / info["n_experts"])


def predictions(llm: Llama) -> dict[str, Any]:
    """Returns the chosen placement. Also returns the predicted tokens per second of
    answers and of prompts, for each placement and for the "chosen" one. Empty if the
    plan compared no placements.
    """
    decided = getattr(llm.plan, "placement", None) if llm.session is not None else None
    if decided is None:
        return {}
    every = {each.kind: each for each in decided.placements}
    every["chosen"] = decided.chosen
    return {
        "placement": decided.chosen.kind,
        "predicted": {kind: each.tokens_per_s for kind, each in every.items()},
        "predicted_prompts": {
            kind: each.prompt_tokens_per_s for kind, each in every.items()
        },
    }


def device_of(case: Case) -> str:
    """Returns ggml's name for the case's device. If the case has a link, adds a
    simulated device and returns its name."""
    return add_link_device(parse_link(case.link)) if case.link else case.device


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Measures the case and yields each part of the result as soon as it is known.
    Propagates errors from `load`, and raises MemoryError.
    """
    case = replace(case, device=device_of(case))
    device = find_gpus(case.device)[0]
    if case.hold and case.limit_bytes is not None:
        Held(device, case.limit_bytes)
    free_before = find_gpus(case.device)[0].free_bytes
    start = time.perf_counter()
    with load(case) as llm:
        plan = llm.plan if llm.session is not None else None
        yield {
            "load_s": time.perf_counter() - start,
            "n_cpu_moe": len(llm._overrides) - 1 if isinstance(llm, Upstream) else None,
            "reasons": list(plan.reasons) if plan else [],
            **predictions(llm),
            "n_ubatch": plan.n_ubatch if plan else case.n_ubatch,
            "slots_share": slots_share(llm),
        }
        random = np.random.default_rng(0)
        cold, *prompts = random.integers(
            0, llm.n_vocab(), (1 + case.n_prompts, case.n_prompt)
        ).tolist()
        # The first prompt also loads the kernels and reads experts into RAM.
        yield {"cold_prompt_tokens_per_s": case.n_prompt / read(llm, cold)}
        settle(llm)
        before = counts(llm)
        is_filled = is_complete(llm)
        speeds = [case.n_prompt / read(llm, prompt) for prompt in prompts]
        yield {
            "prompt_tokens_per_s": statistics.median(speeds),
            "prompts_tokens_per_s": speeds,
            "prompt": figures(before, counts(llm), case.n_prompts * case.n_prompt),
            "complete": is_filled,
        }
        tokens = list[int]()
        for part, n_tokens in (("first", N_FIRST), ("steady", case.n_decode)):
            before = counts(llm)
            decoded, seconds = decode(llm, n_tokens)
            tokens += decoded
            yield {
                f"{part}_tokens_per_s": n_tokens / seconds,
                part: figures(before, counts(llm), n_tokens),
                "tokens": tokens,
                "device_bytes": free_before - find_gpus(case.device)[0].free_bytes,
            }


def main(arguments: Sequence[str]) -> None:
    """Prints each part of the result as one line of JSON, as soon as it is known. If a
    MoeggufError or MemoryError occurs, prints the error as the last line."""
    out = open_result()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in run(Case.from_json(arguments[0])):
                print(json.dumps(part), file=out, flush=True)
    except (MoeggufError, MemoryError) as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
