"""Rows of results: llama-bench's fields, the store's counters, and ratios between systems, paired by round."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from moegguf.bench.series import BenchedSystem, Outcome, test_name
from moegguf.bench.spec import FLASH_ATTN, Test

Row = dict[str, Any]

# llama-bench's fields, in its order.
FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v",
    "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target",
    "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip

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

_LOAD_MODES = {"moegguf": "none", "stock": "mmap", "mmap": "mmap", "resident": "none"}


def imitated_routing(metadata: Mapping[str, object]) -> str:
    """The field `routing`, of a GGUF file's metadata: whose routing its random weights imitate; "" for others."""
    name = metadata.get(LOCALITY_KEY)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,40}", name):
        return ""
    return f"random weights that reuse experts as published of {name} ({LOCALITY_KEY})"


# Of llama-bench's options those that this has not, as they always are here.
_ALWAYS = {
    "cpu_mask": "0x0", "cpu_strict": False, "poll": 50, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0,
    "no_kv_offload": False, "tensor_split": "0.00", "lazy_mode": "auto", "embeddings": False, "no_host": False,
    "fit_target": 0, "fit_min_ctx": 0,
}  # fmt: skip
_AS_GIVEN = ("n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "repack")


def _fixed(system: BenchedSystem) -> Row:
    """Fields that depend on the settings only."""
    spec = system.spec
    own = {name: getattr(spec, name) or "" for name in ("expert_cache", "vram_cache", "draft")}
    return {
        **_ALWAYS,
        **{name: getattr(spec, name) for name in _AS_GIVEN},
        **(dict.fromkeys(own, "") if system.is_llama_cpp else own),
        "model_filename": spec.model,
        "flash_attn": FLASH_ATTN[spec.flash_attn],
        "devices": f"simulated link {spec.simulate_link}" if spec.simulate_link else "auto",
        "tensor_buft_overrides": "none" if system.is_llama_cpp else "experts=moegguf",
        "load_mode": _LOAD_MODES[spec.system],
        "no_op_offload": int(not system.is_llama_cpp),
        "system": system.label,
        "note": system.note,
        "feed": spec.feed + (f" {spec.text}" if spec.text else ""),
    }


def speeds(test: Row) -> list[float]:
    """Tokens per second of each repetition."""
    return [(test["n_prompt"] + test["n_gen"]) / ns * 1e9 for ns in test["samples_ns"]]


def _tests(outcomes: Iterable[Outcome], index: int) -> list[Row]:
    return [outcome.result["tests"][index] for outcome in outcomes if not outcome.error]


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _figures(tests: Sequence[Row]) -> Row:
    """Speed and the store's counters, over all rounds."""
    ns = [n for test in tests for n in test["samples_ns"]]
    ts = [speed for test in tests for speed in speeds(test)]
    token_ms = [n / 1e6 for test in tests for sample in test["token_ns"] for n in sample]
    store = [figures for test in tests for figures in test["figures"]]
    return {
        "test_time": tests[0]["test_time"],
        "avg_ns": int(mean(ns)),
        "stddev_ns": int(stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": mean(ts),
        "stddev_ts": stdev(ts) if len(ts) > 1 else 0.0,
        "median_ts": median(ts),
        **{name: median(figures[name] for figures in store) for name in STORE_FIELDS if store},
        "token_ms_p50": _percentile(token_ms, 0.5),
        "token_ms_p95": _percentile(token_ms, 0.95),
        "samples_ns": ns,
        "samples_ts": ts,
    }


def _process(outcomes: Sequence[Outcome], limit_bytes: int | None) -> Row:
    """Load times (median) and memory (the most) over all rounds."""
    results = [outcome.result for outcome in outcomes if not outcome.error]
    row: Row = {
        "rounds": len(results),
        "memory_limit_bytes": limit_bytes or 0,
        "cgroup_peak_bytes": max((outcome.cgroup_peak_bytes for outcome in outcomes), default=0),
        "error": next((outcome.error for outcome in outcomes if outcome.error), ""),
    }
    if not results:
        return row
    gauges = ("n_slots", "n_ubatch_used", "budget_bytes", "planned_bytes", "placement", "predicted_ts")
    return row | {
        **{name: results[0][name] for name in gauges},
        **{name: results[0]["decisions"].get(name, "") for name in ("policy", "predictor", "prefetch")},
        "load_s": median(result["load_s"] for result in results),
        "fill_s": median(result["fill_s"] for result in results),
        "peak_rss_bytes": max(result["peak_rss_bytes"] for result in results),
    }


def _description(outcomes: Iterable[Outcome]) -> Row:
    """The build and the model, from the first run that ended without an error."""
    names = (
        "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_type", "model_size",
        "model_n_params", "routing",
    )  # fmt: skip
    result = next((outcome.result for outcome in outcomes if not outcome.error), {})
    return {name: result[name] for name in names if result}


def _pairs(own: Sequence[Outcome], other: Sequence[Outcome], index: int) -> list[tuple[Row, Row]]:
    """The same test in the same rounds."""
    by_round = {outcome.round: outcome.result["tests"][index] for outcome in other if not outcome.error}
    return [
        (outcome.result["tests"][index], by_round[outcome.round])
        for outcome in own
        if not outcome.error and outcome.round in by_round
    ]


def _stall_ms(test: Row) -> float:
    return median(figures["stall_ms_per_token"] for figures in test["figures"])


def compare(own: Sequence[Outcome], other: Sequence[Outcome], index: int) -> Row:
    """Speed and stall of `own` divided by those of `other` (medians over rounds), and whether the tokens agree."""
    pairs = _pairs(own, other, index)
    row: Row = {"error": next((outcome.error for outcome in other if outcome.error), "")}
    if not pairs:
        return row
    ratios = [median(speeds(a)) / median(speeds(b)) for a, b in pairs]
    tokens = [
        (x, y)
        for a, b in pairs
        for ours, theirs in zip(a["tokens"], b["tokens"], strict=True)
        for x, y in zip(ours, theirs, strict=True)
    ]
    stalls = [(_stall_ms(a), _stall_ms(b)) for a, b in pairs if a["figures"] and b["figures"]]
    if stalls and all(theirs > 0 for _, theirs in stalls):
        row["stall_ratio"] = median(ours / theirs for ours, theirs in stalls)
    return row | {
        "ratio": median(ratios),
        "ratios": ratios,
        "tokens_compared": len(tokens),
        "tokens_same": sum(x == y for x, y in tokens),
        "same_tokens": all(x == y for x, y in tokens),
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


def _by_system(outcomes: Iterable[Outcome]) -> dict[int, list[Outcome]]:
    groups: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(id(outcome.system), []).append(outcome)
    return groups


def make_rows(outcomes: Sequence[Outcome], limit_bytes: int | None = None) -> list[Row]:
    """One row per test and system of one group of settings; the compared have `against`, one item per other system."""
    groups = list(_by_system(outcomes).values())
    if not groups:
        return []
    tests: tuple[Test, ...] = groups[0][0].system.spec.tests
    description = _description(outcomes)
    rows: list[Row] = []
    for index, test in enumerate(tests):
        shape = {"n_prompt": test.n_prompt, "n_gen": test.n_gen, "n_depth": test.n_depth}
        of_test = [description | _row(group, groups, index, limit_bytes) | shape for group in groups]
        for row in of_test:
            row["test"] = test_name(row)
        _add_strict_bound(of_test)
        rows += of_test
    return rows


def _row(group: Sequence[Outcome], groups: Sequence[Sequence[Outcome]], index: int, limit_bytes: int | None) -> Row:
    """One system in one test, with ratios to every other system when it is the compared one."""
    system = group[0].system
    row = _fixed(system) | _process(group, limit_bytes) | {"samples_ns": [], "samples_ts": [], "against": {}}
    if done := _tests(group, index):
        row |= _figures(done)
    if system.compared:
        others = [other for other in groups if not other[0].system.compared]
        row["against"] = {other[0].system.label: compare(group, other, index) for other in others}
    return row
