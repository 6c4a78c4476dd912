"""Prints facts as rich tables or JSON on stdout. Formats only; computes no facts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moegguf.models.entry import ModelEntry
from moegguf.quantities import format_bytes, human_number
from moegguf.terminal.facts import Facts
from moegguf.terminal.units import human_bytes, human_time

PIPE_WIDTH = 400
SHOWN_LINES = 2  # of a system message or a license, as `ollama show` does

Row = tuple[str, str] | tuple[str, str, str]


def print_json(facts: Any) -> None:
    """Indented JSON on stdout, nothing else."""
    print(json.dumps(facts, indent=2, ensure_ascii=False))


def make_console() -> Console:
    """A rich console for stdout."""
    # A pipe has no width; rich's default of 80 would break long paths.
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def print_renderable(console: Console, renderable: Any) -> None:
    """Prints; into a pipe without the trailing spaces of tables."""
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _section(console: Console, title: str, rows: Iterable[Row], right: Sequence[int] = ()) -> None:
    """A title and rows of name, value and an optional remark. Columns in `right` are right-aligned."""
    rows = list(rows)
    table = Table.grid(padding=(0, 3, 0, 0))
    for column in range(max(map(len, rows), default=0)):
        table.add_column(
            justify="right" if column in right else "left",
            no_wrap=column == 0,
            overflow="fold",
            style="dim" * (column == 2),
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_renderable(console, Text(f"  {title}", style="bold"))
    print_renderable(console, Padding(table, (0, 0, 1, 4)))


def print_columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as `ollama list` prints it: a header, four spaces between columns."""
    table = Table(box=None, padding=(0, 4, 0, 0), pad_edge=False, header_style="")
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_renderable(make_console(), table)


def print_model_list(entries: Iterable[ModelEntry]) -> None:
    """The table of `moegguf list` and the chat's /list."""
    rows = []
    for entry in entries:
        size, modified = human_bytes(entry.size_bytes), human_time(entry.modified)
        if entry.missing:
            size, modified = "missing", f"{modified}: {', '.join(map(str, entry.missing))} is no longer there"
        rows.append((entry.name, entry.digest[:12], size, modified))
    print_columns(("NAME", "ID", "SIZE", "MODIFIED"), rows)


def print_library(facts: Iterable[Facts]) -> None:
    """The table of `moegguf library`; a mark behind the names of models that are on this machine."""
    rows = []
    for each in facts:
        sizes = (human_bytes(each[key]) for key in ("size_bytes", "least_bytes", "all_bytes"))
        speed, share = "needs more memory", "-"
        if each["tokens_per_s"]:
            speed, share = f"{two_digits(*each['tokens_per_s'])} t/s", f"{each['expert_share']:.0%}"
        rows.append((each["name"] + " (here)" * each["here"], *sizes, share, speed, each["hub_name"]))
    print_columns(("NAME", "SIZE", "NEEDS", "FOR ALL", "EXPERTS IN MEMORY", "SPEED HERE", "MODEL"), rows)


def _percent_range(low: float, high: float) -> str:
    a, b = f"{low:.0%}", f"{high:.0%}"
    return a if a == b else f"{a} to {b}"


def two_digits(low: float, high: float) -> str:
    """A range of two significant digits: "35,000 to 59,000", "0.31 to 0.54"."""
    texts = [f"{float(f'{value:.2g}'):,.{max(0, 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
             for value in (low, high)]  # fmt: skip
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def print_model(facts: Facts) -> None:
    """The output of `moegguf show`: the model, its experts, tensor types, and what budgets would mean."""
    console, n_active = make_console(), facts["active_parameters"]
    print_renderable(console, Text(facts["title"], style="bold"))
    n_parameters = human_number(facts["parameters"])
    if n_active != facts["parameters"]:
        n_parameters += f", {human_number(n_active)} active for a token"
    files = format_bytes(facts["file_bytes"])
    if len(facts["shards"]) > 1:
        files += f" in {len(facts['shards'])} shards"
    _section(console, "Model", [
        ("architecture", facts["architecture"]),
        ("parameters", n_parameters),
        ("quantization", f"{facts['quantization']} for most"),
        ("context length", f"{facts['context_length']:,} tokens"),
        ("embedding length", f"{facts['embedding_length']:,}"),
        ("layers", str(facts["n_layer"])),
        ("vocabulary", f"{facts['n_vocab']:,} tokens"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
        ("files", files),
        ("path", facts["path"]),
    ])  # fmt: skip
    _section(console, "Capabilities", [(name, "") for name in facts["capabilities"]])
    if facts["experts"]:
        _section(console, "Experts", _expert_rows(facts))
    _print_entry_facts(console, facts)
    types = sorted(facts["types"].items(), key=lambda item: -item[1]["bytes"])
    rows = [(name, format_bytes(t["bytes"]), f"{t['tensors']} tensors") for name, t in types]
    _section(console, "Types", rows, right=(1, 2))
    if facts["budgets"]:
        _print_budgets(console, facts["budgets"])


def _print_entry_facts(console: Console, facts: Facts) -> None:
    """What the catalog entry adds to the files; the first lines of long texts."""
    for part in ("projector", "adapter", "draft"):
        if facts[part]:
            _section(console, part.capitalize(), [("path", facts[part])])
    if facts["parameters_set"]:
        _section(console, "Parameters", [(name, _value_text(value)) for name, value in facts["parameters_set"].items()])
    for title, text in (("System", facts["system"]), ("License", facts["license"])):
        if text:
            _section(console, title, [(line, "") for line in text.strip().splitlines()[:SHOWN_LINES]])
    if "metadata" in facts:
        _section(console, "Metadata", [(name, _value_text(value)) for name, value in facts["metadata"].items()])
        tensors = [(t["name"], t["type"], str(t["shape"])) for t in facts["tensors"]]
        _section(console, "Tensors", tensors)


def _expert_rows(facts: Facts) -> list[Row]:
    experts = facts["experts"]
    small, large = format_bytes(experts["smallest_bytes"]), format_bytes(experts["largest_bytes"])
    share = experts["all_bytes"] / facts["file_bytes"]
    rows: list[Row] = [
        ("layers with experts", f"{experts['layers']} of {facts['n_layer']}"),
        ("experts in a layer", f"{experts['per_layer']}, of which a token uses {experts['used']}"),
        ("shared experts", f"{experts['shared']}, which every token uses" if experts["shared"] else "none"),
        ("one expert", small if small == large else f"{small} to {large}"),
        ("all experts", f"{format_bytes(experts['all_bytes'])} ({share:.0%} of the files)"),
        ("one token touches", f"{format_bytes(experts['token_cycle_bytes'])} ({experts['token_cycle']} experts)"),
        ("everything else", format_bytes(facts["dense_bytes"])),
    ]
    if experts["unused_bytes"]:
        rows.append(("not loaded", f"{format_bytes(experts['unused_bytes'])} of multi-token prediction"))
    return rows


def _print_budgets(console: Console, budgets: list[Facts]) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    for name in ("--expert-cache", "slots", "memory", "hit rate"):
        table.add_column(name, justify="left" if name.startswith("--") else "right", no_wrap=True)
    for row in budgets:
        hits = _percent_range(row["low"], row["high"])
        table.add_row(f"{row['share']:.0%}", f"{row['slots']:,}", format_bytes(row["bytes"]), hits)
    print_renderable(console, Text("  Budgets", style="bold").append(f"  {budgets[0]['basis']}", style="not bold dim"))
    print_renderable(console, Padding(table, (0, 0, 0, 4)))


def print_estimate(facts: Facts) -> None:
    """The output of `moegguf estimate`: memory, expected speed, reasons and warnings."""
    console, plan = make_console(), facts["plan"]
    print_renderable(console, Text(facts["name"], style="bold"))
    title = f"What goes where, with a context of {facts['n_ctx']:,} tokens"
    if facts["n_expert_total"]:
        title += f" and --expert-cache {facts['expert_cache'].replace(' ', '')}"
        device = plan["device"] or plan["layers_on"]
        title += f", on {device} with --vram-cache {facts['vram_cache']}" if device else ""
    _section(console, title, _memory_rows(facts), right=(1,))
    if facts["n_expert_total"]:
        _section(console, "What to expect while it answers", _expectation_rows(facts))
    if facts["placement"]:
        title = "What a device gives: predicted with speeds " + facts["placement"]["speeds"]["source"]
        _section(console, title, _placement_rows(facts["placement"]))
    print_renderable(console, Text("  Why", style="bold"))
    supposed = facts["placement"] if not plan["placement"] else None  # a plan has its own reason
    for reason in [*plan["reasons"], *([supposed["reason"]] if supposed else [])]:
        print_renderable(console, Padding(Text(f"- {reason}"), (0, 0, 0, 4)))
    for warning in plan["warnings"]:
        print_renderable(console, Padding(Text(f"warning: {warning}", style="yellow"), (1, 0, 0, 2)))


def _memory_rows(facts: Facts) -> list[Row]:
    plan, total = facts["plan"], facts["n_expert_total"]
    rows: list[Row] = []
    if total:
        slots = f"{plan['n_slots']:,} of {total:,} experts at a time ({plan['n_slots'] / total:.0%})"
        where = f"experts on {plan['device']}" if plan["device"] else "experts in memory"
        rows.append((where, format_bytes(plan["budget_bytes"]), slots))
    type_k, type_v = facts["cache_types"]
    types = "" if type_k == type_v == "f16" else f"K in {type_k}, V in {type_v}"
    weights = "weights every token uses" + (f" on {plan['layers_on']}" if plan["layers_on"] else "")
    whole = plan["placement"]["chosen"]["n_layers"] if plan["placement"] and not plan["resident"] else 0
    rows += [
        (weights, format_bytes(plan["dense_bytes"]), f"with the experts of {whole} layers" if whole else ""),
        ("context (KV cache)", format_bytes(plan["kv_bytes"]), types),
    ]
    if plan["projector_bytes"]:
        rows.append(("reading images", format_bytes(plan["projector_bytes"]), ""))
    if n := plan["n_staging"]:
        tensors = f"{n} tensors of a layer's experts" if n > 1 else "a tensor of a layer's experts"
        rows.append(("staging prompts", format_bytes(plan["staging_bytes"]), tensors))
    n, left = plan["n_ubatch"], plan["available_bytes"] - plan["total_bytes"]
    rows += [
        ("buffers", format_bytes(plan["compute_bytes"]), f"for {n:,} token{'s' * (n != 1)} of a prompt at a time"),
        ("all of it", format_bytes(plan["total_bytes"]), ""),
        ("free now", format_bytes(plan["available_bytes"]),
         f"{format_bytes(left)} stay free" if left >= 0 else f"{format_bytes(-left)} too few"),
    ]  # fmt: skip
    if plan["layers_on"]:
        rows.append(("RAM beside that", format_bytes(plan["host_bytes"]), "with these experts"))
    if plan["device"]:
        lower = f"with {plan['n_ram_slots']:,} experts that {plan['device']} is filled from"
        rows.append(("RAM beside that", format_bytes(plan["host_bytes"]), lower if plan["n_ram_slots"] else ""))
    if total and not plan["resident"]:
        rows.append(("experts on disk", format_bytes(facts["expert_bytes"]), "read when a token needs them"))
    return rows


def _placement_rows(placement: Facts) -> list[Row]:
    """A row for each placement of experts, the fastest first, and what the prediction rests on."""
    speeds = placement["speeds"]
    rows: list[Row] = [
        (each["text"], f"{two_digits(each['tokens_per_s'], each['tokens_per_s'])} tokens/s", "")
        for each in placement["placements"]
    ]
    in_gb = {name: f"{speeds[f'{name}_bytes_per_s'] / 1e9:.3g} GB/s" for name in ("device", "copies", "cpu", "disk")}
    return [
        *rows,
        ("its memory for experts", format_bytes(placement["device_expert_bytes"]), placement["hit_rates"]),
        ("kernels", f"{in_gb['device']} there, {in_gb['cpu']} on the CPU", speeds["source"]),
        ("copies", f"{in_gb['copies']}, {speeds['copies_us']:.0f} us a layer", f"disk {in_gb['disk']}"),
        ("a stop at a layer", f"{speeds['stop_us']:.0f} us", f"{speeds['cpu_layer_us']:.0f} us to the CPU and back"),
    ]


def _expectation_rows(facts: Facts) -> list[Row]:
    expected, disk = facts["expected"], facts["disk"]
    rows: list[Row] = [("hit rate", _percent_range(expected["hit_low"], expected["hit_high"]), expected["basis"])]
    if not facts["plan"]["resident"]:
        low, high = (format_bytes(round(expected[f"missed_bytes_{end}"])) for end in ("low", "high"))
        read = low if low == high else f"{low} to {high}"
        rows.append(("read for a token", read, f"of {format_bytes(facts['token_cycle_bytes'])} it touches"))
    if disk:
        how = "past the page cache" if disk["past_page_cache"] else "through the page cache"
        rows.append(("disk", f"{disk['bytes_per_s'] / 1e9:.2g} GB/s", f"measured now, {how}"))
    rows.append(("speed", *_speed_text(facts)))
    return rows


def _speed_text(facts: Facts) -> tuple[str, str]:
    """A range of tokens per second, and what it rests on."""
    expected = facts["expected"]
    if expected["tokens_per_s_low"] is None:
        return "not known yet", "it follows from the disk, which is measured once the model is fetched"
    speed = two_digits(expected["tokens_per_s_low"], expected["tokens_per_s_high"])
    memory = f"memory at {expected['memory_bytes_per_s'] / 1e9:.2g} GB/s, measured now"
    if facts["plan"]["resident"]:
        return f"{speed} tokens/s", f"limited by the processor and {memory}: nothing is read after the first use"
    return f"{speed} tokens/s", f"computed from these reads and {memory}"


def print_doctor(sections: dict[str, Facts]) -> None:
    """The output of `moegguf doctor`: sections, one fact per line."""
    console = make_console()
    for title, facts in sections.items():
        rows: list[Row] = [
            (name.replace("_", " ") if name.islower() else name, value) for name, value in _flatten(facts)
        ]
        _section(console, title, rows or [("(none set)", "")])


def _flatten(facts: Facts, prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict) and set(value) == {"error"}:
            yield prefix + name, f"unknown: {value['error']}"
        elif isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name} ")
        elif name.endswith("_bytes"):
            yield prefix + name.removesuffix("_bytes"), format_bytes(value)
        elif name == "bytes_per_s":
            yield prefix + "speed", f"{value / 1e9:.2f} GB/s"
        else:
            yield prefix + name, _value_text(value)


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
