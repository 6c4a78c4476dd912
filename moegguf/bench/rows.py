"""Builds result rows: llama-bench's fields, the store's counters, and ratios of systems
in the same round.

Rows are printed in llama-bench's formats (md, json, jsonl, csv, sql). Scripts that read
llama-bench's output by column name can therefore also read these rows.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from statistics import mean, median, stdev
from typing import Any

from moegguf.bench import bound
from moegguf.bench.series import (
    FLASH_ATTN,
    KILLED,
    BenchedSystem,
    Outcome,
    Test,
    speeds,
    test_name,
)
from moegguf.engine.stats import Stats
from moegguf.options import BUDGETS

Row = dict[str, Any]

# llama-bench's fields, in llama-bench's order.
FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v",
    "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target",
    "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip
# Three groups of fields. Fields in _OF_MODEL are taken from one run, for all rows.
# Fields in _AS_GIVEN are the user's options. Fields in _ALWAYS are constant, because
# `moegguf bench` has no option for them.
_OF_MODEL = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_type", "model_size", "model_n_params",
    "routing",
)  # fmt: skip
_AS_GIVEN = (
    "n_batch",
    "n_ubatch",
    "n_threads",
    "type_k",
    "type_v",
    "n_gpu_layers",
    "repack",
)
_ALWAYS = {
    "cpu_mask": "0x0", "cpu_strict": False, "poll": 50, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0,
    "no_kv_offload": False, "tensor_split": "0.00", "lazy_mode": "auto", "embeddings": False, "no_host": False,
    "fit_target": 0, "fit_min_ctx": 0,
}  # fmt: skip


def store_figures(stats: Stats, link_bytes_per_s: float) -> dict[str, float]:
    """Returns the figures about the store in one repetition, from its counters and the
    file's read speed. The value in a row is the median over the repetitions of all
    rounds."""
    bound_share = stats.link_bound_share(link_bytes_per_s) if link_bytes_per_s else 0.0
    n_tokens = max(1, stats.tokens)
    return {
        "hit_rate": stats.hit_rate,
        "mb_per_token": stats.bytes_per_token / 1e6,
        "stall_ms_per_token": stats.stall_per_token_s * 1e3,
        "hook_ms_per_token": stats.hook_per_token_s * 1e3,
        "compute_ms_per_token": (stats.eval_s - stats.stall_s) / n_tokens * 1e3,
        "link_gb_per_s": link_bytes_per_s / 1e9,
        "link_bound_pct": bound_share * 100,
        "evictions": stats.evictions,
        "staged_mb_per_token": stats.bytes_staged / n_tokens / 1e6,
        "copies_overlapped_pct": stats.staging_overlap * 100,
        "draft_acceptance": stats.draft_acceptance,
        "tokens_per_draft_pass": stats.tokens_per_draft_pass,
        "mb_per_accepted_token": stats.bytes_per_accepted_token / 1e6,
    }


# {figure: the title of its column, the factor by which the column multiplies the
# figure, and the number of decimal places}
FIGURE_COLUMNS = {
    "hit_rate": ("hit %", 100, 1), "mb_per_token": ("MB/token", 1, 2), "stall_ms_per_token": ("stall ms", 1, 2),
    "hook_ms_per_token": ("hook ms", 1, 3), "link_bound_pct": ("link %", 1, 1),
    "draft_acceptance": ("accepted %", 100, 1), "tokens_per_draft_pass": ("tokens/pass", 1, 2),
    "mb_per_accepted_token": ("MB/accepted", 1, 2),
}  # fmt: skip
OF_DRAFTS = ("draft_acceptance", "tokens_per_draft_pass", "mb_per_accepted_token")

OWN_FIELDS = (
    "system", "note", "policy", "predictor", "prefetch", *BUDGETS.values(), "placement", "draft",
    "predicted_ts", "n_slots", "n_ubatch_used", "feed", "routing", "n_parallel",
    "rounds",
    "median_ts", *store_figures(Stats(), 0.0), *bound.FIGURES, "bound_by",
    "token_ms_p50", "token_ms_p95", "load_s", "fill_s", "peak_rss_bytes", "cgroup_peak_bytes", "memory_limit_bytes",
    "budget_bytes", "planned_bytes", "error",
)  # fmt: skip

# GGUF key in a file with random weights: name of the model whose published expert reuse
# the weights imitate
LOCALITY_KEY = "moegguf.locality"


def imitated_routing(metadata: Mapping[str, object]) -> str:
    """Returns the text of the field `routing`. The text names the model whose routing
    the random weights of a GGUF file imitate. Returns "" if the metadata have no such
    name, or an unusual one."""
    name = metadata.get(LOCALITY_KEY)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,40}", name):
        return ""
    return f"random weights that reuse experts as published of {name} ({LOCALITY_KEY})"


def make_rows(outcomes: Sequence[Outcome], limit_bytes: int | None = None) -> list[Row]:
    """Returns one row for each test and system of one group of settings. In moegguf's
    rows, the field `against` holds the ratios to each system of `--against`. In the
    rows of these other systems it is empty."""
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
        for group in groups.values():
            system = group[0].system
            row = (
                model
                | _of_settings(system, test)
                | _of_process(group, limit_bytes)
                | _figures(group, index)
            )
            compared = others if system.compared else []
            rows.append(
                row
                | {
                    "against": {
                        other[0].system.label: compare(group, other, index)
                        for other in compared
                    }
                }
            )
    return rows


def _of_settings(system: BenchedSystem, test: Test) -> Row:
    spec = system.spec
    is_llama_cpp = system.is_llama_cpp
    shape = asdict(test)
    return {
        **_ALWAYS,
        **{name: getattr(spec, name) for name in _AS_GIVEN},
        "draft": "" if is_llama_cpp else spec.draft or "",
        **{
            option: "" if is_llama_cpp else spec.loading.get(option, "")
            for option in BUDGETS.values()
        },
        **shape,
        "test": test_name(shape),
        "model_filename": spec.model,
        "flash_attn": FLASH_ATTN[spec.flash_attn],
        "devices": f"simulated link {spec.simulate_link}"
        if spec.simulate_link
        else "auto",
        "tensor_buft_overrides": "none" if is_llama_cpp else "experts=moegguf",
        "load_mode": "mmap" if spec.system in ("stock", "mmap") else "none",
        "no_op_offload": int(not is_llama_cpp),
        "system": system.label,
        "note": system.note,
        "feed": spec.feed + (f" {spec.text}" if spec.text else ""),
    }


def _of_process(outcomes: Sequence[Outcome], limit_bytes: int | None) -> Row:
    """Returns the fields about a system's processes, such as load times (median over
    all rounds) and peak memory (maximum over all rounds)."""
    results = [outcome.result for outcome in outcomes if not outcome.error]
    row: Row = {
        "rounds": len(results),
        "memory_limit_bytes": limit_bytes or 0,
        "cgroup_peak_bytes": max(outcome.cgroup_peak_bytes for outcome in outcomes),
        "error": _error(outcomes),
    }
    if not results:
        return row
    gauges = (
        "n_slots",
        "n_ubatch_used",
        "budget_bytes",
        "planned_bytes",
        "placement",
        "predicted_ts",
    )
    return row | {
        **{name: results[0][name] for name in gauges},
        **{
            name: results[0]["decisions"].get(name, "")
            for name in ("policy", "predictor", "prefetch")
        },
        **{
            name: median(result[name] for result in results)
            for name in ("load_s", "fill_s")
        },
        "peak_rss_bytes": max(result["peak_rss_bytes"] for result in results),
    }


def _error(outcomes: Sequence[Outcome]) -> str:
    return next((outcome.error for outcome in outcomes if outcome.error), "")


def _figures(outcomes: Sequence[Outcome], index: int) -> Row:
    """Returns a system's speed and store figures in one test, over all rounds."""
    tests = list(_tests(outcomes, index).values())
    ns = [n for test in tests for n in test["samples_ns"]]
    ts = [speed for test in tests for speed in speeds(test)]
    row: Row = {"samples_ns": ns, "samples_ts": ts}
    if not tests:
        return row
    token_ms = sorted(
        n / 1e6 for test in tests for sample in test["token_ns"] for n in sample
    ) or [0.0]
    store = [figures for test in tests for figures in test["figures"]]
    figures = {
        name: median(each[name] for each in store)
        for name in (store[0] if store else ())
    }
    if bound.FIGURES[0] in figures:
        row["bound_by"] = bound.bound_by(figures)
    return row | {
        "test_time": tests[0]["test_time"],
        "avg_ns": int(mean(ns)),
        "stddev_ns": int(stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": mean(ts),
        "stddev_ts": stdev(ts) if len(ts) > 1 else 0.0,
        "median_ts": median(ts),
        **figures,
        "token_ms_p50": token_ms[int(0.5 * len(token_ms))],
        "token_ms_p95": token_ms[int(0.95 * len(token_ms))],
    }


def _tests(outcomes: Sequence[Outcome], index: int) -> dict[int, Row]:
    """Returns {round: results of one test} for the runs that did not fail."""
    return {
        outcome.round: outcome.result["tests"][index]
        for outcome in outcomes
        if not outcome.error
    }


def _stall_ms(test: Row) -> float:
    return median(figures["stall_ms_per_token"] for figures in test["figures"])


def compare(own: Sequence[Outcome], other: Sequence[Outcome], index: int) -> Row:
    """Returns the speed of `own` relative to `other` in the same round (median over
    rounds), and whether both systems chose the same tokens. Also returns the relative
    stall, if both have stall figures and `other` stalled in every round. If no round
    succeeded for both systems, returns only `other`'s error."""
    theirs = _tests(other, index)
    # pairs from the same round.
    pairs = [(test, theirs[n]) for n, test in _tests(own, index).items() if n in theirs]
    row: Row = {"error": _error(other)}
    if not pairs:
        return row
    ratios = [median(speeds(a)) / median(speeds(b)) for a, b in pairs]
    same: list[bool] = []
    for a, b in pairs:
        for mine, others in zip(a["tokens"], b["tokens"], strict=True):
            same += [x == y for x, y in zip(mine, others, strict=True)]
    stalls = [
        (_stall_ms(a), _stall_ms(b)) for a, b in pairs if a["figures"] and b["figures"]
    ]
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


_NAMES = (*FIELDS, *OWN_FIELDS, "against")


def _texts(row: Row) -> list[str]:
    """Returns the row's values as strings in the order of _NAMES, with `against` as
    "mmap=9.812;resident=0.331"."""
    ratios = (
        f"{name}=" + (f"{found['ratio']:.3f}" if "ratio" in found else "")
        for name, found in row["against"].items()
    )
    return [*(_text(row.get(name, ""), 6) for name in _NAMES[:-1]), ";".join(ratios)]


def _text(value: object, digits: int = 3) -> str:
    """Returns a value as text: a float with `digits` decimal places, and True as 1."""
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return str(int(value) if isinstance(value, bool) else value)


def _as_csv(rows: Sequence[Row]) -> str:
    """Returns CSV: a header, then a line for each row with every value quoted."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerow(_NAMES)
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
        map(_texts, rows)
    )
    return out.getvalue()


def _as_sql(rows: Sequence[Row]) -> str:
    """Returns SQL that creates the table `llama_bench` (llama-bench's name), if it is
    missing, and inserts the rows."""
    types = {bool: "INTEGER", int: "INTEGER", float: "REAL"}
    firsts = {
        name: next((row[name] for row in rows if row.get(name) not in (None, "")), "")
        for name in _NAMES
    }
    columns = ",\n".join(
        f"  {name} {types.get(type(value), 'TEXT')}" for name, value in firsts.items()
    )
    inserts = ""
    for row in rows:
        values = (
            "'" + text.replace("'", "''") + "'" if text else "NULL"
            for text in _texts(row)
        )
        inserts += f"INSERT INTO llama_bench ({', '.join(_NAMES)}) VALUES ({', '.join(values)});\n"
    return f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n\n{inserts}"


def _object(row: Row) -> Row:
    names = (*FIELDS, *OWN_FIELDS, "samples_ns", "samples_ts", "against")
    return {name: row.get(name) for name in names}


Column = tuple[str, int, Callable[[Row], str]]
"""Title, minimum width (negative: left-aligned), and a function that returns a row's
text for this column."""

# Columns that are shown only if some row differs from llama-bench's default. {field:
# (default, width, title)}
_UNUSUAL = {
    "n_batch": (2048, 7, "n_batch"), "n_ubatch": (512, 8, "n_ubatch"), "type_k": ("f16", 6, "type_k"),
    "type_v": ("f16", 6, "type_v"), "flash_attn": (-1, 3, "fa"),
}  # fmt: skip


def _plain(name: str, width: int, title: str = "") -> Column:
    return title or name, width, lambda row: _text(row[name])


def _figure(
    title: str, name: str, width: int = 8, factor: float = 1, digits: int = 2
) -> Column:
    return (
        title,
        width,
        lambda row: f"{row[name] * factor:.{digits}f}" if name in row else "",
    )


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    lines = [[cell(row) for _, _, cell in columns] for row in rows]
    padded = []
    for (title, width, _), *cells in zip(columns, *lines, strict=True):
        n = max(abs(width), len(title), *map(len, cells))
        rule = "-" * (n - 1) + ("-" if width < 0 else ":")
        padded.append(
            [
                cell.ljust(n) if width < 0 else cell.rjust(n)
                for cell in (title, rule, *cells)
            ]
        )
    return [f"| {' | '.join(cells)} |" for cells in zip(*padded, strict=True)]


def as_table(rows: Sequence[Row]) -> str:
    """Returns a text table with a column for each key. There must be at least one row,
    and all rows must have the same keys."""
    columns = [
        _plain(name, -1 if isinstance(value, str) else 1)
        for name, value in rows[0].items()
    ]
    return "\n".join(_table(columns, rows)) + "\n"


def _main_table(rows: Sequence[Row]) -> list[str]:
    def size(row: Row) -> str:
        mib = row.get("model_size", 0) / (1 << 20)
        return f"{mib:.2f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"

    def count(row: Row) -> str:
        n = row.get("model_n_params", 0)
        return f"{n / 1e6:.2f} M" if n < 10**9 else f"{n / 1e9:.2f} B"

    def speed(row: Row) -> str:
        return (
            f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
            if "avg_ts" in row
            else _failed(row)
        )

    columns: list[Column] = [
        ("model", -30, lambda row: str(row.get("model_type", row["model_filename"]))),
        ("size", 10, size),
        ("params", 10, count),
        ("backend", -10, lambda row: str(row.get("backends", ""))),
    ]
    if any(row.get("backends", "CPU") != "CPU" for row in rows):
        columns.append(_plain("n_gpu_layers", 3, "ngl"))
    columns.append(_plain("n_threads", 7, "threads"))
    for name, (default, width, title) in _UNUSUAL.items():
        if any(row[name] != default for row in rows):
            columns.append(_plain(name, width, title))
    if len({row["repack"] for row in rows}) > 1 or not rows[0]["repack"]:
        columns.append(_plain("repack", 3, "rpk"))
    columns += [
        _plain("system", -8),
        _plain("expert_cache", 6, "cache"),
        _plain("test", 15),
    ]
    columns += [("t/s", 20, speed), _figure("median", "median_ts")]
    left_out = () if any(row.get("draft") for row in rows) else OF_DRAFTS
    for name, (title, factor, digits) in FIGURE_COLUMNS.items():
        if name not in left_out and any(name in row for row in rows):
            columns.append(_figure(title, name, 8, factor, digits))
    return _table(columns, rows)


def _failed(row: Row) -> str:
    return KILLED if row["error"] == KILLED else "failed"


def _process_table(rows: Sequence[Row]) -> list[str]:
    """Returns a table of load time and memory, with one line for each combination of
    model, system, budget, number of threads and n_ubatch. Rows without a load time are
    left out."""
    keys = ("model_filename", "system", "expert_cache", "n_threads", "n_ubatch")
    seen = {
        tuple(row[key] for key in keys): row
        for row in reversed(rows)
        if "load_s" in row
    }
    mib = 1 / (1 << 20)
    columns: list[Column] = [
        _plain("system", -7),
        _plain("expert_cache", 6, "cache"),
        _figure("load s", "load_s"),
        _figure("peak MiB", "peak_rss_bytes", 8, mib, 0),
        _figure("cgroup peak", "cgroup_peak_bytes", 11, mib, 0),
        (
            "experts MiB",
            11,
            lambda row: (
                f"{row['budget_bytes'] * mib:.0f}" if row["budget_bytes"] else ""
            ),
        ),
        (
            "planned MiB",
            11,
            lambda row: (
                f"{row['planned_bytes'] * mib:.0f}" if row["planned_bytes"] else ""
            ),
        ),
    ]
    return ["", *_table(columns, list(reversed(seen.values())))] if seen else []


def _ratio_table(rows: Sequence[Row]) -> list[str]:
    compared = next((row["system"] for row in rows if row["against"]), "")
    pairs = [
        {"test": row["test"], "cache": row["expert_cache"], "other": name, **found}
        for row in rows
        for name, found in row["against"].items()
    ]
    columns: list[Column] = [
        _plain("test", 10),
        _plain("cache", 6),
        _plain("other", -15, f"{compared} against"),
        ("ratio", 8, lambda pair: f"{pair['ratio']:.3f}x" if "ratio" in pair else ""),
        (
            "each round",
            -10,
            lambda pair: " ".join(f"{ratio:.3f}" for ratio in pair.get("ratios", [])),
        ),
        (
            "stall",
            8,
            lambda pair: f"{pair['stall_ratio']:.3f}x" if "stall_ratio" in pair else "",
        ),
        ("same tokens", -11, _same_tokens),
    ]
    # The column is left out if there are no stall ratios, for example against plain
    # llama.cpp
    if not any("stall_ratio" in pair for pair in pairs):
        del columns[5]
    return ["", *_table(columns, pairs)] if pairs else []


def _same_tokens(pair: Row) -> str:
    if "ratio" not in pair:
        return _failed(pair)
    answer = "yes" if pair["same_tokens"] else "no"
    kernels = "" if pair["same_kernels"] else " (other kernels)"
    return f"{answer}, {pair['tokens_same']} of {pair['tokens_compared']}{kernels}"


def _bound_table(rows: Sequence[Row]) -> list[str]:
    """Returns a table of speeds, their bounds and the times that determine the bounds,
    followed by lines that explain the columns. The table is narrow enough for a
    terminal."""
    bounded = [row for row in rows if "bound_by" in row]
    if not bounded:
        return []
    named = len({row["system"] for row in bounded}) > 1

    def system(row: Row) -> str:
        return (
            f"{row['system']} {row['expert_cache']}"
            if named
            else str(row["expert_cache"])
        )

    columns: list[Column] = [
        _plain("test", 1),
        ("system" if named else "cache", 1, system),
        _figure("t/s", "median_ts", 1),
        _figure("bound", "bound_ts", 1),
        ("reached", 1, lambda row: f"{row['bound_reached_pct']:.0f} %"),
        _figure("read", "bound_read_ms_per_token", 1, digits=3),
        _figure("compute", "bound_compute_ms_per_token", 1, digits=3),
    ]
    lines = [
        "bound: the most tokens/s that this file, budget and link allow",
        f"read: ms a token for the bytes that any eviction must read, at {_gb_per_s(bounded, 'link')}",
        "compute: ms a token without waiting for experts",
    ]
    if any(row["bound_copy_ms_per_token"] for row in bounded):
        columns.append(_figure("copy", "bound_copy_ms_per_token", 1, digits=3))
        lines.append("copy: ms a token for the fewest bytes that the device lacks")
    if any(row["bound_weights_ms_per_token"] for row in bounded):
        columns.append(_figure("weights", "bound_weights_ms_per_token", 1, digits=3))
        lines.append(
            f"weights: ms a token for reading them from memory, at {_gb_per_s(bounded, 'bound_memory')}"
        )
    return ["", *_table(columns, bounded), "", *lines]


def _gb_per_s(rows: Sequence[Row], name: str) -> str:
    """Formats a speed's median over the rows with three significant digits and
    "GB/s"."""
    return f"{median(row[f'{name}_gb_per_s'] for row in rows):.3g} GB/s"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = {f"{row['system']}: {row['note']}" for row in rows if row["note"]}
    notes |= {
        f"{row['system']} {row['expert_cache']}: {row['error']}"
        for row in rows
        if row["error"] not in ("", KILLED)
    }
    # {policy, predictor and prefetch of a run: the systems and budgets that used them}
    deciding: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("policy") and row["expert_cache"]:
            settings = f"policy {row['policy']}, predictor {row['predictor']}, prefetch {row['prefetch']}"
            deciding.setdefault(settings, {})[
                f"{row['system']} {row['expert_cache']}"
            ] = None
    policies = [
        f"{settings}: {'; '.join(names)}" for settings, names in deciding.items()
    ]
    limits = sorted({row["memory_limit_bytes"] for row in rows})
    memory = [
        f"memory limit: {n >> 20} MiB" if n else "memory limit: none" for n in limits
    ]
    feeds = sorted({f"tokens: {row['feed']}" for row in rows})
    routings = sorted(
        {f"routing: {row['routing']}" for row in rows if row.get("routing")}
    )
    return ["", *sorted(notes), *policies, *memory, *feeds, *routings]


def as_markdown(rows: Sequence[Row]) -> str:
    """Returns llama-bench's table with the store's figures, then load time and memory,
    ratios, bounds, notes and the build. Returns "" if there are no rows."""
    if not rows:
        return ""
    build = next(
        (row for row in rows if "build_commit" in row),
        {"build_commit": "unknown", "build_number": 0},
    )
    lines = [
        *_main_table(rows),
        *_process_table(rows),
        *_ratio_table(rows),
        *_bound_table(rows),
        *_notes(rows),
    ]
    return (
        "\n".join(
            [*lines, "", f"build: {build['build_commit']} ({build['build_number']})"]
        )
        + "\n"
    )


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "md": as_markdown,
    "json": lambda rows: json.dumps(list(map(_object, rows)), indent=2) + "\n",
    "jsonl": lambda rows: "".join(json.dumps(_object(row)) + "\n" for row in rows),
    "csv": _as_csv,
    "sql": _as_sql,
}
