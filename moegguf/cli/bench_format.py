"""Rows of `moegguf bench` as llama-bench prints them (md, json, jsonl, csv, sql), followed by moegguf's own fields.

Scripts that read llama-bench's output by column name can read this. Formats rows only.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

from moegguf.bench.rows import FIELDS, OWN_FIELDS, Row
from moegguf.bench.series import KILLED

_WIDTHS = {
    "model": -30, "t/s": 20, "size": 10, "params": 10, "n_gpu_layers": 3, "n_threads": 7, "n_batch": 7, "n_ubatch": 8,
    "type_k": 6, "type_v": 6, "flash_attn": 3, "test": 15, "repack": 3, "backend": -10, "system": -8, "expert_cache": 6,
}  # fmt: skip
_TITLES = {"n_gpu_layers": "ngl", "n_threads": "threads", "flash_attn": "fa", "repack": "rpk", "expert_cache": "cache"}

# Shown in the table when a row differs from llama-bench's default.
_DEFAULTS = {"n_batch": 2048, "n_ubatch": 512, "type_k": "f16", "type_v": "f16", "flash_attn": -1}

# Title, field, factor, decimals: the store's figures.
_STORE_COLUMNS = (
    ("hit %", "hit_rate", 100, 1),
    ("MB/token", "mb_per_token", 1, 2),
    ("stall ms", "stall_ms_per_token", 1, 2),
    ("hook ms", "hook_ms_per_token", 1, 3),
    ("link %", "link_bound_pct", 1, 1),
    ("strict %", "link_bound_strict_pct", 1, 1),
)
_DRAFT_COLUMNS = (
    ("accepted %", "draft_acceptance", 100, 1),
    ("tokens/pass", "tokens_per_draft_pass", 1, 2),
    ("MB/accepted", "mb_per_accepted_token", 1, 2),
)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['ratio']:.3f}" if "ratio" in found else ""


_COLUMNS = (*FIELDS, *OWN_FIELDS, "against")


def _texts(row: Row) -> list[str]:
    """The row's values in the order of _COLUMNS; `against` as "mmap=9.812;resident=0.331"."""
    ratios = ";".join(f"{name}={_ratio(found)}" for name, found in row["against"].items())
    return [*(_number(row.get(name, "")) for name in _COLUMNS[:-1]), ratios]


def _as_csv(rows: Sequence[Row]) -> str:
    """A header, then a line per row with every value quoted."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerow(_COLUMNS)
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(map(_texts, rows))
    return out.getvalue()


def _sql_type(name: str, rows: Sequence[Row]) -> str:
    value = next((row[name] for row in rows if row.get(name) not in (None, "")), "")
    return {bool: "INTEGER", int: "INTEGER", float: "REAL"}.get(type(value), "TEXT")


def _as_sql(rows: Sequence[Row]) -> str:
    """Statements that make the table `llama_bench`, as llama-bench calls it, unless it exists, and insert the rows."""
    columns = ",\n".join(f"  {name} {_sql_type(name, rows)}" for name in _COLUMNS)
    names = ", ".join(_COLUMNS)
    inserts = ""
    for row in rows:
        values = ("'" + text.replace("'", "''") + "'" if text else "NULL" for text in _texts(row))
        inserts += f"INSERT INTO llama_bench ({names}) VALUES ({', '.join(values)});\n"
    return f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n\n{inserts}"


def _object(row: Row) -> dict[str, Any]:
    named = {name: row.get(name) for name in (*FIELDS, *OWN_FIELDS)}
    return named | {name: row[name] for name in ("samples_ns", "samples_ts", "against")}


def _cell(name: str, row: Row) -> str:
    if name == "model":
        return str(row.get("model_type", row["model_filename"]))
    if name == "size":
        mib = row.get("model_size", 0) / (1 << 20)
        return f"{mib:.2f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"
    if name == "params":
        n = row.get("model_n_params", 0)
        return f"{n / 1e6:.2f} M" if n < 10**9 else f"{n / 1e9:.2f} B"
    if name == "backend":
        return str(row.get("backends", ""))
    if name == "t/s":
        if "avg_ts" in row:
            return f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
        return KILLED if row["error"] == KILLED else "failed"
    value = row.get(name, "")
    return str(int(value) if isinstance(value, bool) else value)


def _columns(rows: Sequence[Row]) -> list[str]:
    names = ["model", "size", "params", "backend"]
    if any(row.get("backends", "CPU") != "CPU" for row in rows):
        names.append("n_gpu_layers")
    names.append("n_threads")
    names += [name for name, default in _DEFAULTS.items() if any(row[name] != default for row in rows)]
    if len({row["repack"] for row in rows}) > 1 or not rows[0]["repack"]:
        names.append("repack")
    return [*names, "system", "expert_cache", "test", "t/s"]


def _table(titles: Sequence[str], widths: Sequence[int], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table whose columns have at least these `widths`; negative ones are left-aligned."""
    longest = (max(map(len, cells)) for cells in zip(titles, *lines, strict=True))
    cells_of = [max(n, abs(width)) for n, width in zip(longest, widths, strict=True)]
    pads = [str.ljust if width < 0 else str.rjust for width in widths]
    rule = ["-" * (n - 1) + ("-" if width < 0 else ":") for n, width in zip(cells_of, widths, strict=True)]
    padded = (map(lambda pad, cell, n: pad(cell, n), pads, cells, cells_of) for cells in (titles, rule, *lines))
    return [f"| {' | '.join(cells)} |" for cells in padded]


def _main_table(rows: Sequence[Row]) -> list[str]:
    names = _columns(rows)
    shown = _STORE_COLUMNS + (_DRAFT_COLUMNS if any(row.get("draft") for row in rows) else ())
    store = [column for column in shown if any(column[1] in row for row in rows)]
    titles = [*(_TITLES.get(name, name) for name in names), "median", *(title for title, *_ in store)]
    widths = [*(_WIDTHS.get(name, 10) for name in names), 8, *(8 for _ in store)]
    lines = []
    for row in rows:
        speed = f"{row['median_ts']:.2f}" if "median_ts" in row else ""
        of_store = (f"{row[field] * factor:.{digits}f}" if field in row else "" for _, field, factor, digits in store)
        lines.append([*(_cell(name, row) for name in names), speed, *of_store])
    return _table(titles, widths, lines)


def _tokens_cell(found: dict[str, Any]) -> str:
    if "ratio" not in found:
        return KILLED if found["error"] == KILLED else "failed"
    share = f"{found['tokens_same']} of {found['tokens_compared']}"
    answer = "yes" if found["same_tokens"] else "no"
    return f"{answer}, {share}" + ("" if found["same_kernels"] else " (other kernels)")


def _ratio_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        for name, found in row["against"].items():
            ratio = _ratio(found) and _ratio(found) + "x"
            each = " ".join(f"{ratio:.3f}" for ratio in found.get("ratios", []))
            stall = f"{found['stall_ratio']:.3f}x" if "stall_ratio" in found else ""
            lines.append([row["test"], row["expert_cache"], name, ratio, each, stall, _tokens_cell(found)])
    compared = next((str(row["system"]) for row in rows if row["against"]), "moegguf")
    columns = [("test", 10), ("cache", 6), (f"{compared} against", -15), ("ratio", 8), ("each round", -10)]
    columns += [("stall", 8), ("same tokens", -11)]
    if not any(line[5] for line in lines):  # llama.cpp has no stall figures
        columns, lines = columns[:5] + columns[6:], [line[:5] + line[6:] for line in lines]
    titles, widths = zip(*columns, strict=True)
    return ["", *_table(titles, widths, lines)] if lines else []


def _process_table(rows: Sequence[Row]) -> list[str]:
    """Load time and memory of each system, once."""
    seen: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        if "load_s" not in row:
            continue
        key = (row["model_filename"], row["system"], row["expert_cache"], row["n_threads"], row["n_ubatch"])
        mib = [f"{row[name] / (1 << 20):.0f}" for name in ("peak_rss_bytes", "cgroup_peak_bytes")]
        plan = [f"{row[name] / (1 << 20):.0f}" if row[name] else "" for name in ("budget_bytes", "planned_bytes")]
        seen.setdefault(key, [row["system"], row["expert_cache"], f"{row['load_s']:.2f}", *mib, *plan])
    titles = ("system", "cache", "load s", "peak MiB", "cgroup peak", "experts MiB", "planned MiB")
    return ["", *_table(titles, (-7, 6, 8, 8, 11, 11, 11), list(seen.values()))] if seen else []


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = {f"{row['system']}: {row['note']}" for row in rows if row["note"]}
    notes |= {
        f"{row['system']} {row['expert_cache']}: {row['error']}" for row in rows if row["error"] not in ("", KILLED)
    }
    limits = {row["memory_limit_bytes"] for row in rows}
    memory = [f"memory limit: {n >> 20} MiB" if n else "memory limit: none" for n in sorted(limits)]
    feeds = sorted({f"tokens: {row['feed']}" for row in rows})
    routings = sorted({f"routing: {row['routing']}" for row in rows if row.get("routing")})
    return ["", *sorted(notes), *_policies(rows), *memory, *feeds, *routings]


def _policies(rows: Sequence[Row]) -> list[str]:
    """Each combination of policy, predictor and prefetch, and the systems that used it."""
    systems: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("policy") and row["expert_cache"]:
            settings = f"policy {row['policy']}, predictor {row['predictor']}, prefetch {row['prefetch']}"
            systems.setdefault(settings, {})[f"{row['system']} {row['expert_cache']}"] = None
    return [f"{settings}: {'; '.join(names)}" for settings, names in systems.items()]


def as_markdown(rows: Sequence[Row]) -> str:
    """llama-bench's table with the store's figures, then load time and memory, ratios, notes and the build."""
    if not rows:
        return ""
    build = next((row for row in rows if "build_commit" in row), {"build_commit": "unknown", "build_number": 0})
    lines = [*_main_table(rows), *_process_table(rows), *_ratio_table(rows), *_notes(rows)]
    return "\n".join([*lines, "", f"build: {build['build_commit']} ({build['build_number']})"]) + "\n"


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "md": as_markdown,
    "json": lambda rows: json.dumps(list(map(_object, rows)), indent=2) + "\n",
    "jsonl": lambda rows: "".join(json.dumps(_object(row)) + "\n" for row in rows),
    "csv": _as_csv,
    "sql": _as_sql,
}
