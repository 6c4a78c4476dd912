"""Formats one measurement as a short text for posts that compare machines: `moegguf
bench --report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moegguf.bench.rows import Row
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import fingerprint, header_digest
from moegguf.options import BUDGETS
from moegguf.quantities import format_bytes

Facts = Mapping[str, Any]

# Default source of the tokens that a report's tests use.
TEXT = Path(__file__).parents[1] / "demo/README.md"
WITHOUT = "mmap"  # llama.cpp in moegguf's build, without the expert cache
DIGEST_DIGITS = 12


def report(
    rows: Sequence[Row], layout: ExpertLayout, doctor: Mapping[str, Facts]
) -> str:
    """Returns Markdown text about one model: machine, drive, file and build, then a
    table with the figures of each system.

    `rows` come from `make_rows`, with the same tests for each system. `doctor` holds
    the sections that `diagnose` returns.
    """
    systems = list(dict.fromkeys(row["system"] for row in rows))
    titles = (f"llama.cpp ({name})" if name == WITHOUT else name for name in systems)
    lines = [("", *titles), ("---",) * (1 + len(systems))]
    tests = list(dict.fromkeys(row["test"] for row in rows))
    by_key = {(row["test"], row["system"]): row for row in rows}
    for test in tests:
        of_systems = [by_key[test, name] for name in systems]
        title = _title(of_systems[0])
        lines.append((f"{title}, t/s", *map(_speed, of_systems)))
        if any("bound_by" in row for row in rows):
            lines.append((f"{title}, t/s at most", *map(_bound, of_systems)))
    of_systems = [by_key[tests[-1], name] for name in systems]
    lines.append(("hit rate of the last test", *map(_share, of_systems)))
    lines.append(("peak memory", *map(_peak, of_systems)))
    lines.append(("load", *map(_load, of_systems)))
    facts = [f"- {name}: {text}" for name, text in _facts(rows, layout, doctor)]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(
        [
            f"**moegguf {doctor['moegguf'].get('version')}: {layout.name}**",
            "",
            *facts,
            "",
            *table,
            "",
        ]
    )


def _facts(
    rows: Sequence[Row], layout: ExpertLayout, doctor: Mapping[str, Facts]
) -> list[tuple[str, str]]:
    machine, disk, build, row = (
        doctor["machine"],
        doctor["disk"],
        doctor["build"],
        rows[0],
    )
    memory = machine["memory"]
    cards = [
        each["description"]
        for name, each in doctor["devices"].items()
        if name != "CPU" and "description" in each
    ]
    limit = (
        f", limited to {format_bytes(row['memory_limit_bytes'])}"
        if row["memory_limit_bytes"]
        else ""
    )
    drive = disk.get("error") or f"{disk['bytes_per_s'] / 1e9:.2f} GB/s, " + (
        "past the page cache" if disk["past_page_cache"] else "through the page cache"
    )
    slots = f"{row.get('n_slots', 0):,} of {layout.n_expert_total:,}"
    digests = f"file {header_digest(layout.shards)[:DIGEST_DIGITS]}, routers {fingerprint(layout)[:DIGEST_DIGITS]}"
    return [
        ("machine", f"{machine['cpu']}, {machine['cpus_allowed']} CPUs ({row['n_threads']} threads),"
                    f" {format_bytes(memory['total_bytes'])} RAM{limit}; GPU: {', '.join(cards) or 'none'}"),
        ("drive", drive),
        ("model", f"{row.get('model_type', layout.arch)}, {format_bytes(layout.n_bytes)}; {digests}"),
        ("memory for experts", f"{row[BUDGETS['RAM']]}, {slots} experts"),
        ("build", f"llama.cpp {build.get('llama.cpp pin', '-')}; {doctor['moegguf'].get('system', '-')}"),
        ("input", _input(row["feed"])),
    ]  # fmt: skip


def _input(feed: str) -> str:
    """Returns a row's `feed` without the folder of its text file, which may contain the
    user's name."""
    kind, _, path = feed.partition(" ")
    if path == str(TEXT):
        return f"{kind} of the demo's README"
    return f"{kind} {Path(path).name}".rstrip()


def _title(row: Row) -> str:
    words = [f"prompt of {row['n_prompt']}"] if row["n_prompt"] else []
    words += [f"answer of {row['n_gen']}"] if row["n_gen"] else []
    together = f", {row['n_parallel']} together" if row["n_parallel"] > 1 else ""
    return (
        " and ".join(words)
        + (f" after {row['n_depth']}" if row["n_depth"] else "")
        + together
    )


def _speed(row: Row) -> str:
    return (
        f"{row['median_ts']:.2f}" if "median_ts" in row else f"failed: {row['error']}"
    )


def _bound(row: Row) -> str:
    return (
        f"{row['bound_ts']:.2f} ({row['bound_reached_pct']:.0f} % reached)"
        if "bound_by" in row
        else "-"
    )


def _share(row: Row) -> str:
    return f"{row['hit_rate']:.0%}" if "hit_rate" in row else "-"


def _peak(row: Row) -> str:
    return format_bytes(row["peak_rss_bytes"]) if row.get("peak_rss_bytes") else "-"


def _load(row: Row) -> str:
    return f"{row['load_s']:.1f} s" if "load_s" in row else "-"
