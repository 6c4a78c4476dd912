"""Rows of `moegguf bench` as llama-bench prints them (md, json, jsonl, csv, sql), followed by moegguf's own fields.

Scripts that read llama-bench's output by column name can read this. Formats rows only.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from io import StringIO

from moegguf.bench.rows import FIELDS, OWN_FIELDS, Row
from moegguf.bench.series import KILLED

_NAMES = (*FIELDS, *OWN_FIELDS, "against")


def _texts(row: Row) -> list[str]:
    """The row's values in the order of _NAMES; `against` as "mmap=9.812;resident=0.331"."""
    ratios = (
        f"{name}=" + (f"{found['ratio']:.3f}" if "ratio" in found else "") for name, found in row["against"].items()
    )
    values = [row.get(name, "") for name in _NAMES[:-1]]
    values = [int(value) if isinstance(value, bool) else value for value in values]
    return [*(f"{value:.6f}" if isinstance(value, float) else str(value) for value in values), ";".join(ratios)]


def _as_csv(rows: Sequence[Row]) -> str:
    """A header, then a line per row with every value quoted."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerow(_NAMES)
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(map(_texts, rows))
    return out.getvalue()


def _as_sql(rows: Sequence[Row]) -> str:
    """Statements that make the table `llama_bench`, as llama-bench calls it, unless it exists, and insert the rows."""
    types = {bool: "INTEGER", int: "INTEGER", float: "REAL"}
    firsts = {name: next((row[name] for row in rows if row.get(name) not in (None, "")), "") for name in _NAMES}
    columns = ",\n".join(f"  {name} {types.get(type(value), 'TEXT')}" for name, value in firsts.items())
    inserts = ""
    for row in rows:
        values = ("'" + text.replace("'", "''") + "'" if text else "NULL" for text in _texts(row))
        inserts += f"INSERT INTO llama_bench ({', '.join(_NAMES)}) VALUES ({', '.join(values)});\n"
    return f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n\n{inserts}"


def _object(row: Row) -> Row:
    named = {name: row.get(name) for name in (*FIELDS, *OWN_FIELDS)}
    return named | {name: row[name] for name in ("samples_ns", "samples_ts", "against")}


Column = tuple[str, int, Callable[[Row], str]]
"""Title, least width (negative: left-aligned), and the text of a row."""

# Columns of the table that are there when a row differs from llama-bench's default.
_UNUSUAL = {
    "n_batch": (2048, 7, "n_batch"), "n_ubatch": (512, 8, "n_ubatch"), "type_k": ("f16", 6, "type_k"),
    "type_v": ("f16", 6, "type_v"), "flash_attn": (-1, 3, "fa"),
}  # fmt: skip
# The store's figures: title, field, factor, decimals.
_STORE_FIGURES = (
    ("hit %", "hit_rate", 100, 1),
    ("MB/token", "mb_per_token", 1, 2),
    ("stall ms", "stall_ms_per_token", 1, 2),
    ("hook ms", "hook_ms_per_token", 1, 3),
    ("link %", "link_bound_pct", 1, 1),
    ("strict %", "link_bound_strict_pct", 1, 1),
)
_DRAFT_FIGURES = (
    ("accepted %", "draft_acceptance", 100, 1),
    ("tokens/pass", "tokens_per_draft_pass", 1, 2),
    ("MB/accepted", "mb_per_accepted_token", 1, 2),
)


def _plain(name: str, width: int, title: str) -> Column:
    return title, width, lambda row: str(int(row[name]) if isinstance(row[name], bool) else row.get(name, ""))


def _figure(title: str, name: str, factor: float, digits: int, width: int = 8) -> Column:
    return title, width, lambda row: f"{row[name] * factor:.{digits}f}" if name in row else ""


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    lines = [[cell(row) for _, _, cell in columns] for row in rows]
    padded = []
    for (title, width, _), *cells in zip(columns, *lines, strict=True):
        n = max(abs(width), len(title), *map(len, cells))
        rule = "-" * (n - 1) + ("-" if width < 0 else ":")
        padded.append([cell.ljust(n) if width < 0 else cell.rjust(n) for cell in (title, rule, *cells)])
    return [f"| {' | '.join(cells)} |" for cells in zip(*padded, strict=True)]


def _main_table(rows: Sequence[Row]) -> list[str]:
    def size(row: Row) -> str:
        mib = row.get("model_size", 0) / (1 << 20)
        return f"{mib:.2f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"

    def count(row: Row) -> str:
        n = row.get("model_n_params", 0)
        return f"{n / 1e6:.2f} M" if n < 10**9 else f"{n / 1e9:.2f} B"

    def speed(row: Row) -> str:
        return f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}" if "avg_ts" in row else _failed(row)

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
    columns += [_plain("system", -8, "system"), _plain("expert_cache", 6, "cache"), _plain("test", 15, "test")]
    columns += [("t/s", 20, speed), _figure("median", "median_ts", 1, 2)]
    shown = _STORE_FIGURES + (_DRAFT_FIGURES if any(row.get("draft") for row in rows) else ())
    columns += [_figure(*figure) for figure in shown if any(figure[1] in row for row in rows)]
    return _table(columns, rows)


def _failed(row: Row) -> str:
    return KILLED if row["error"] == KILLED else "failed"


def _process_table(rows: Sequence[Row]) -> list[str]:
    """Load time and memory of each system, once."""
    keys = ("model_filename", "system", "expert_cache", "n_threads", "n_ubatch")
    seen = {tuple(row[key] for key in keys): row for row in reversed(rows) if "load_s" in row}
    mib = 1 / (1 << 20)
    columns: list[Column] = [
        _plain("system", -7, "system"),
        _plain("expert_cache", 6, "cache"),
        _figure("load s", "load_s", 1, 2),
        _figure("peak MiB", "peak_rss_bytes", mib, 0),
        _figure("cgroup peak", "cgroup_peak_bytes", mib, 0, 11),
        ("experts MiB", 11, lambda row: f"{row['budget_bytes'] * mib:.0f}" if row["budget_bytes"] else ""),
        ("planned MiB", 11, lambda row: f"{row['planned_bytes'] * mib:.0f}" if row["planned_bytes"] else ""),
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
        _plain("test", 10, "test"),
        _plain("cache", 6, "cache"),
        _plain("other", -15, f"{compared} against"),
        ("ratio", 8, lambda pair: f"{pair['ratio']:.3f}x" if "ratio" in pair else ""),
        ("each round", -10, lambda pair: " ".join(f"{ratio:.3f}" for ratio in pair.get("ratios", []))),
        ("stall", 8, lambda pair: f"{pair['stall_ratio']:.3f}x" if "stall_ratio" in pair else ""),
        ("same tokens", -11, _same_tokens),
    ]
    if not any("stall_ratio" in pair for pair in pairs):  # llama.cpp has no stall figures
        del columns[5]
    return ["", *_table(columns, pairs)] if pairs else []


def _same_tokens(pair: Row) -> str:
    if "ratio" not in pair:
        return _failed(pair)
    answer, kernels = "yes" if pair["same_tokens"] else "no", "" if pair["same_kernels"] else " (other kernels)"
    return f"{answer}, {pair['tokens_same']} of {pair['tokens_compared']}{kernels}"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = {f"{row['system']}: {row['note']}" for row in rows if row["note"]}
    notes |= {
        f"{row['system']} {row['expert_cache']}: {row['error']}" for row in rows if row["error"] not in ("", KILLED)
    }
    deciding: dict[str, dict[str, None]] = {}  # each combination, and the systems that used it
    for row in rows:
        if row.get("policy") and row["expert_cache"]:
            settings = f"policy {row['policy']}, predictor {row['predictor']}, prefetch {row['prefetch']}"
            deciding.setdefault(settings, {})[f"{row['system']} {row['expert_cache']}"] = None
    policies = [f"{settings}: {'; '.join(names)}" for settings, names in deciding.items()]
    limits = sorted({row["memory_limit_bytes"] for row in rows})
    memory = [f"memory limit: {n >> 20} MiB" if n else "memory limit: none" for n in limits]
    feeds = sorted({f"tokens: {row['feed']}" for row in rows})
    routings = sorted({f"routing: {row['routing']}" for row in rows if row.get("routing")})
    return ["", *sorted(notes), *policies, *memory, *feeds, *routings]


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
