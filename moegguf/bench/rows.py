"""Rows of results: llama-bench's fields, the store's counters, and ratios between systems, paired by round."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from moegguf.bench.series import FLASH_ATTN, BenchedSystem, Outcome, Test, speeds, test_name

Row = dict[str, Any]

# llama-bench's fields, in its order.
FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v",
    "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target",
    "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip
# Of these: the same in every run of a model, as given, and what moegguf has no option for.
_OF_MODEL = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_type", "model_size", "model_n_params",
    "routing",
)  # fmt: skip
_AS_GIVEN = ("n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "repack")
_ALWAYS = {
    "cpu_mask": "0x0", "cpu_strict": False, "poll": 50, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0,
    "no_kv_offload": False, "tensor_split": "0.00", "lazy_mode": "auto", "embeddings": False, "no_host": False,
    "fit_target": 0, "fit_min_ctx": 0,
}  # fmt: skip

# Medians over the repetitions of all rounds.
STORE_FIELDS = (
    "hit_rate", "mb_per_token", "stall_ms_per_token", "hook_ms_per_token", "compute_ms_per_token", "link_gb_per_s",
    "link_bound_pct", "evictions", "staged_mb_per_token", "copies_overlapped_pct", "draft_acceptance",
    "tokens_per_draft_pass", "mb_per_accepted_token",
)  # fmt: skip

OWN_FIELDS = (
    "system", "note", "policy", "predictor", "prefetch", "expert_cache", "vram_cache", "placement", "draft",
    "predicted_ts", "n_slots", "n_ubatch_used", "feed", "routing",
    "rounds",
    "median_ts", *STORE_FIELDS, "link_bound_strict_pct",
    "token_ms_p50", "token_ms_p95", "load_s", "fill_s", "peak_rss_bytes", "cgroup_peak_bytes", "memory_limit_bytes",
    "budget_bytes", "planned_bytes", "error",
)  # fmt: skip

LOCALITY_KEY = "moegguf.locality"  # GGUF metadata: whose published reuse of experts a random model imitates


def imitated_routing(metadata: Mapping[str, object]) -> str:
    """The field `routing`, of a GGUF file's metadata: whose routing its random weights imitate; "" for others."""
    name = metadata.get(LOCALITY_KEY)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,40}", name):
        return ""
    return f"random weights that reuse experts as published of {name} ({LOCALITY_KEY})"


def make_rows(outcomes: Sequence[Outcome], limit_bytes: int | None = None) -> list[Row]:
    """One row per test and system of one group of settings; the compared have `against`, one item per other system."""
    groups: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(id(outcome.system), []).append(outcome)
    if not groups:
        return []
    result = next((outcome.result for outcome in outcomes if not outcome.error), {})
    model = {name: result[name] for name in _OF_MODEL if result}
    others = [group for group in groups.values() if not group[0].system.compared]
    rows: list[Row] = []
    for index, test in enumerate(outcomes[0].system.spec.tests):
        of_test = []
        for group in groups.values():
            system = group[0].system
            row = model | _of_settings(system, test) | _of_process(group, limit_bytes) | _figures(group, index)
            compared = others if system.compared else []
            of_test.append(
                row | {"against": {other[0].system.label: compare(group, other, index) for other in compared}}
            )
        _add_strict_bound(of_test)
        rows += of_test
    return rows


def _of_settings(system: BenchedSystem, test: Test) -> Row:
    spec, is_llama_cpp = system.spec, system.is_llama_cpp
    shape = {"n_prompt": test.n_prompt, "n_gen": test.n_gen, "n_depth": test.n_depth}
    return {
        **_ALWAYS,
        **{name: getattr(spec, name) for name in _AS_GIVEN},
        **{name: "" if is_llama_cpp else getattr(spec, name) or "" for name in ("expert_cache", "vram_cache", "draft")},
        **shape,
        "test": test_name(shape),
        "model_filename": spec.model,
        "flash_attn": FLASH_ATTN[spec.flash_attn],
        "devices": f"simulated link {spec.simulate_link}" if spec.simulate_link else "auto",
        "tensor_buft_overrides": "none" if is_llama_cpp else "experts=moegguf",
        "load_mode": "mmap" if spec.system in ("stock", "mmap") else "none",
        "no_op_offload": int(not is_llama_cpp),
        "system": system.label,
        "note": system.note,
        "feed": spec.feed + (f" {spec.text}" if spec.text else ""),
    }


def _of_process(outcomes: Sequence[Outcome], limit_bytes: int | None) -> Row:
    """Load times (median) and memory (the most) over all rounds."""
    results = [outcome.result for outcome in outcomes if not outcome.error]
    row: Row = {
        "rounds": len(results),
        "memory_limit_bytes": limit_bytes or 0,
        "cgroup_peak_bytes": max(outcome.cgroup_peak_bytes for outcome in outcomes),
        "error": _error(outcomes),
    }
    if not results:
        return row
    gauges = ("n_slots", "n_ubatch_used", "budget_bytes", "planned_bytes", "placement", "predicted_ts")
    return row | {
        **{name: results[0][name] for name in gauges},
        **{name: results[0]["decisions"].get(name, "") for name in ("policy", "predictor", "prefetch")},
        **{name: median(result[name] for result in results) for name in ("load_s", "fill_s")},
        "peak_rss_bytes": max(result["peak_rss_bytes"] for result in results),
    }


def _error(outcomes: Sequence[Outcome]) -> str:
    return next((outcome.error for outcome in outcomes if outcome.error), "")


def _figures(outcomes: Sequence[Outcome], index: int) -> Row:
    """Speed and the store's counters in one test, over all rounds."""
    tests = [outcome.result["tests"][index] for outcome in outcomes if not outcome.error]
    ns = [n for test in tests for n in test["samples_ns"]]
    ts = [speed for test in tests for speed in speeds(test)]
    row: Row = {"samples_ns": ns, "samples_ts": ts}
    if not tests:
        return row
    token_ms = sorted(n / 1e6 for test in tests for sample in test["token_ns"] for n in sample) or [0.0]
    store = [figures for test in tests for figures in test["figures"]]
    return row | {
        "test_time": tests[0]["test_time"],
        "avg_ns": int(mean(ns)),
        "stddev_ns": int(stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": mean(ts),
        "stddev_ts": stdev(ts) if len(ts) > 1 else 0.0,
        "median_ts": median(ts),
        **{name: median(figures[name] for figures in store) for name in STORE_FIELDS if store},
        "token_ms_p50": token_ms[int(0.5 * len(token_ms))],
        "token_ms_p95": token_ms[int(0.95 * len(token_ms))],
    }


def compare(own: Sequence[Outcome], other: Sequence[Outcome], index: int) -> Row:
    """Speed and stall of `own` divided by those of `other` (medians over rounds), and whether the tokens agree."""
    mine, theirs = (
        {outcome.round: outcome.result["tests"][index] for outcome in outcomes if not outcome.error}
        for outcomes in (own, other)
    )
    pairs = [(test, theirs[n]) for n, test in mine.items() if n in theirs]  # of the same round
    row: Row = {"error": _error(other)}
    if not pairs:
        return row
    ratios = [median(speeds(a)) / median(speeds(b)) for a, b in pairs]
    samples = [sample for a, b in pairs for sample in zip(a["tokens"], b["tokens"], strict=True)]
    same = [x == y for a, b in samples for x, y in zip(a, b, strict=True)]
    stalls = [
        [median(figures["stall_ms_per_token"] for figures in test["figures"]) for test in pair]
        for pair in pairs if pair[0]["figures"] and pair[1]["figures"]
    ]  # fmt: skip
    if stalls and all(b > 0 for _, b in stalls):
        row["stall_ratio"] = median(a / b for a, b in stalls)
    return row | {
        "ratio": median(ratios),
        "ratios": ratios,
        "tokens_compared": len(same),
        "tokens_same": sum(same),
        "same_tokens": all(same),
        "same_kernels": own[0].system.spec.repack == other[0].system.spec.repack,
    }


def _add_strict_bound(rows: Sequence[Row]) -> None:
    """Adds the share of the bound max(compute, bytes / link), which experts that are computed as they arrive can reach.

    Compute time is that with every expert resident, so that the time that reader threads take from it counts against
    the run. `link_bound_pct` beside it adds up both times, as if they took turns, with the run's own compute time.
    """
    resident = [
        row for row in rows if "median_ts" in row and (row.get("hit_rate") == 1.0 or row["system"] == "resident")
    ]
    if not resident:
        return
    compute_s = 1 / resident[0]["median_ts"]
    for row in rows:
        if row.get("link_gb_per_s") and row["median_ts"]:
            bound_s = max(compute_s, row["mb_per_token"] / row["link_gb_per_s"] / 1e3)
            row["link_bound_strict_pct"] = 100 * bound_s * row["median_ts"]
