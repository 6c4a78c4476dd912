"""Prints facts as tables or JSON on stdout. This module only formats: facts.py collects
the facts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moegguf.engine.cost import DEVICE_NODE_S, PROMPT_TOKENS, format_speed
from moegguf.models.entry import ModelEntry
from moegguf.options import BUDGETS
from moegguf.quantities import format_bytes, human_bytes, human_number, human_time
from moegguf.terminal.facts import Facts
from moegguf.text import without_surrogates

PIPE_WIDTH = 400
NARROW_BETWEEN = 2  # spaces between columns in a narrow terminal
# Lines of a system message or a license that are shown, as in `ollama show`.
SHOWN_LINES = 2

Row = tuple[str, ...]


def print_json(facts: Any) -> None:
    """Prints facts on stdout as indented JSON. NaN and infinity become null, and
    invalid characters are replaced."""
    from pydantic_core import to_jsonable_python

    plain = to_jsonable_python(
        facts, inf_nan_mode="null", fallback=lambda array: array.tolist()
    )
    print(without_surrogates(json.dumps(plain, indent=2, ensure_ascii=False)))


def print_renderable(renderable: Any, least_width: int = 0) -> None:
    """Prints a rich object on stdout, without trailing spaces if stdout is not a
    terminal. Lines are laid out for at least `least_width` characters; a narrower
    terminal breaks longer lines itself."""
    # A pipe has no width, and rich's default of 80 would break long paths.
    console = Console(
        highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH
    )
    if console.width < least_width:
        console.width = least_width
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _section(title: str, rows: Iterable[Row], right: Sequence[int] = ()) -> None:
    """Prints a title, and below it rows of cells: usually a name, a value and an
    optional remark. The third column is dim. The columns whose indices are in `right`
    are right-aligned."""
    rows = list(rows)
    table = Table.grid(padding=(0, 3, 0, 0))
    for column in range(max(map(len, rows), default=0)):
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(
            justify=justify,
            no_wrap=column == 0,
            overflow="fold",
            style="dim" * (column == 2),
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_renderable(Text(f"  {title}", style="bold"))
    print_renderable(Padding(table, (0, 0, 1, 4)))


def print_columns(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    between: int = 4,
    n_left: int | None = None,
    style: str = "",
    drop: Sequence[str] = (),
) -> None:
    """Prints a table with a header, as `ollama list` does. The text of a cell is never
    shortened.

    between: spaces between columns.

    n_left: number of columns that are left-aligned (None: all columns). Further columns
    are right-aligned.

    style: style of the header.

    drop: names of columns that are left out, one after another in this order, until the
    table fits the terminal. If leaving out all of them is not enough, the table is too
    wide.
    """
    lines = [list(header), *map(list, rows)]
    widths = {
        name: max(cell_len(line[column]) for line in lines)
        for column, name in enumerate(header)
    }
    room = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    dropped = iter(drop)
    while (needed := sum(widths.values()) + between * (len(widths) - 1)) > room:
        if between > NARROW_BETWEEN:
            between = NARROW_BETWEEN
        elif (name := next(dropped, None)) is not None:
            del widths[name]
        else:
            break
    table = Table(
        box=None, padding=(0, between, 0, 0), pad_edge=False, header_style=style
    )
    kept = [column for column, name in enumerate(header) if name in widths]
    for column in kept:
        is_left = n_left is None or column < n_left
        table.add_column(
            header[column], justify="left" if is_left else "right", no_wrap=True
        )
    for line in lines[1:]:
        table.add_row(*(Text(line[column]) for column in kept))
    print_renderable(table, needed)


def print_model_list(entries: Iterable[ModelEntry]) -> None:
    """Prints the table of `moegguf list`, and of the command /list in a chat."""
    rows = []
    for entry in entries:
        size = human_bytes(entry.size_bytes)
        modified = human_time(entry.modified)
        if entry.missing:
            size = "missing"
            modified = (
                f"{modified}: {', '.join(map(str, entry.missing))} is no longer there"
            )
        rows.append((entry.name, entry.digest[:12], size, modified))
    print_columns(
        ("NAME", "ID", "SIZE", "MODIFIED"), rows, drop=("ID", "MODIFIED", "SIZE")
    )


def print_library(facts: Iterable[Facts]) -> None:
    """Prints the table of `moegguf library`. A star follows the name of the model that
    fits best. The names of models on this machine end with "(here)"."""
    rows = []
    for each in facts:
        sizes = (
            human_bytes(each[key]) for key in ("size_bytes", "least_bytes", "all_bytes")
        )
        share = "-"
        speed = "too little memory"
        if each["tokens_per_s"]:
            speed = f"{two_digits(*each['tokens_per_s'])} t/s"
            share = f"{each['expert_share']:.0%}"
        name = each["name"] + " *" * each["fits_best"] + " (here)" * each["here"]
        rows.append((name, *sizes, share, speed, each["hub_name"]))
    header = ("NAME", "SIZE", "NEEDS", "FOR ALL", "IN MEMORY", "SPEED HERE", "MODEL")
    print_columns(header, rows, drop=("MODEL", "FOR ALL", "IN MEMORY", "NEEDS", "SIZE"))


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def two_digits(low: float, high: float) -> str:
    """Formats a range with two significant digits: "35,000 to 59,000", "0.31 to 0.54".
    If both ends have the same text, returns that text once."""
    return _range(*(format_speed(value) if value > 0 else "0" for value in (low, high)))


def print_model(facts: Facts) -> None:
    """Prints the output of `moegguf show`: the model, its experts, tensor types, hit
    rates for some budgets, and the facts of the catalog entry. Only the first lines of
    the system message and the license are shown."""
    print_renderable(Text(facts["title"], style="bold"))
    n_parameters = human_number(facts["parameters"])
    n_active = facts["active_parameters"]
    if n_active != facts["parameters"]:
        n_parameters += f", {human_number(n_active)} active for a token"
    files = format_bytes(facts["file_bytes"])
    if len(facts["shards"]) > 1:
        files += f" in {len(facts['shards'])} shards"
    _section("Model", [
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
    _section("Capabilities", [(name, "") for name in facts["capabilities"]])
    if facts["experts"]:
        _section("Experts", _expert_rows(facts))
    if facts["learnt"]:
        _section("Learnt", map(_learnt_row, facts["learnt"]))
    for part in ("projector", "adapter", "draft"):
        if facts[part]:
            _section(part.capitalize(), [("path", facts[part])])
    for title, values in (
        ("Parameters", facts["parameters_set"]),
        ("Metadata", facts.get("metadata")),
    ):
        if values:
            _section(
                title, [(name, _value_text(value)) for name, value in values.items()]
            )
    for title, text in (("System", facts["system"]), ("License", facts["license"])):
        if text:
            _section(
                title, [(line, "") for line in text.strip().splitlines()[:SHOWN_LINES]]
            )
    if "tensors" in facts:
        _section(
            "Tensors",
            [(t["name"], t["type"], str(t["shape"])) for t in facts["tensors"]],
        )
    types = sorted(facts["types"].items(), key=lambda item: -item[1]["bytes"])
    rows = [
        (name, format_bytes(t["bytes"]), f"{t['tensors']} tensors") for name, t in types
    ]
    _section("Types", rows, right=(1, 2))
    if facts["budgets"]:
        title = f"Budgets, with hit rates {facts['budgets'][0]['basis']}"
        _section(title, _budget_rows(facts["budgets"]), right=(1, 2, 3))


def _expert_rows(facts: Facts) -> Iterator[Row]:
    experts = facts["experts"]
    share = experts["all_bytes"] / facts["file_bytes"]
    yield "layers with experts", f"{experts['layers']} of {facts['n_layer']}"
    yield (
        "experts in a layer",
        f"{experts['per_layer']}; a token uses {experts['used']}",
    )
    yield (
        "shared experts",
        f"{experts['shared']}, which every token uses" if experts["shared"] else "none",
    )
    yield (
        "one expert",
        _range(
            format_bytes(experts["smallest_bytes"]),
            format_bytes(experts["largest_bytes"]),
        ),
    )
    yield (
        "all experts",
        f"{format_bytes(experts['all_bytes'])} ({share:.0%} of the files)",
    )
    yield (
        "one token touches",
        f"{format_bytes(experts['token_cycle_bytes'])} ({experts['token_cycle']} experts)",
    )
    yield "everything else", format_bytes(facts["dense_bytes"])
    if facts["row_table_bytes"]:
        yield (
            "read by row",
            f"{format_bytes(facts['row_table_bytes'])}, which stay in the file",
        )
    if experts["unused_bytes"]:
        yield (
            "not loaded",
            f"{format_bytes(experts['unused_bytes'])} of multi-token prediction",
        )


def _learnt_row(learnt: Facts) -> Row:
    about = [] if learnt["tokens"] is None else [f"{learnt['tokens']:,} tokens"]
    if learnt["right"] is not None:
        about.append(f"{learnt['right']:.0%} right")
    return learnt["predictor"], f"for {learnt['strategy']}", ", ".join(about)


def _budget_rows(budgets: list[Facts]) -> Iterator[Row]:
    yield "--expert-cache", "memory", "hit rate", "slots"
    for row in budgets:
        hits = _range(f"{row['low']:.0%}", f"{row['high']:.0%}")
        yield (
            f"{row['share']:.0%}",
            format_bytes(row["bytes"]),
            hits,
            f"{row['slots']:,}",
        )


def print_estimate(facts: Facts) -> None:
    """Prints the output of `moegguf estimate`: memory, expected speed, reasons and
    warnings."""
    plan = facts["plan"]
    print_renderable(Text(facts["name"], style="bold"))
    title = f"What goes where, with a context of {facts['n_ctx']:,} tokens"
    if facts["n_expert_total"]:
        ram, vram = (facts[option] for option in BUDGETS.values())
        title += f" and --expert-cache {ram.replace(' ', '')}"
        device = plan["device"] or plan["layers_on"]
        title += (
            f", on {device} with --vram-cache {vram.replace(' ', '')}" if device else ""
        )
    _section(title, _memory_rows(facts), right=(1,))
    if facts["n_expert_total"]:
        _section("What to expect while it answers", _expectation_rows(facts))
    if facts["cpu"]:
        gain = facts["cpu"]["assumed_prompt_gain"]
        prompts = f"prompts {gain} times as fast" if gain else "prompts as timed before"
        title = f"Speed on the CPU (assumed: memory is the limit; {prompts})"
        _section(title, _placement_rows(facts["cpu"]), right=(1, 2, 3))
        if facts["expected"]["reads_tokens_per_s"]:
            print_renderable(Padding(Text(_bound_text(facts)), (0, 0, 1, 4)))
    if facts["placement"]:
        title = (
            "Speed with a device, predicted from speeds "
            + facts["placement"]["speeds"]["source"]
        )
        _section(title, _placement_rows(facts["placement"]), right=(1, 2, 3))
        _section("Basis of these predictions", _speed_rows(facts["placement"]))
    print_renderable(Text("  Why", style="bold"))
    # The plan's reasons already include the reason for its own placement.
    supposed = facts["placement"] if not plan["placement"] else None
    about = [supposed["reason"], *supposed["refused"]] if supposed else []
    reasons = Table.grid(padding=(0, 1, 0, 0))
    for reason in [*plan["reasons"], *about]:
        reasons.add_row("-", Text(reason))
    print_renderable(Padding(reasons, (0, 0, 0, 4)))
    for warning in plan["warnings"]:
        print_renderable(
            Padding(Text(f"warning: {warning}", style="yellow"), (1, 0, 0, 2))
        )


def _memory_rows(facts: Facts) -> Iterator[Row]:
    plan = facts["plan"]
    total = facts["n_expert_total"]
    device = plan["device"]
    layers_on = plan["layers_on"]
    if total:
        slots = f"{plan['n_slots']:,} of {total:,} experts at a time ({plan['n_slots'] / total:.0%})"
        yield (
            f"experts on {device}" if device else "experts in memory",
            format_bytes(plan["budget_bytes"]),
            slots,
        )
    whole = (
        plan["placement"]["chosen"]["n_layers"]
        if plan["placement"] and not plan["resident"]
        else 0
    )
    weights = "weights every token uses" + (f" on {layers_on}" if layers_on else "")
    yield (
        weights,
        format_bytes(plan["dense_bytes"]),
        f"with the experts of {whole} layers" if whole else "",
    )
    if facts["row_table_bytes"]:
        yield (
            "tables read by row",
            format_bytes(facts["row_table_bytes"]),
            "in the file, not in memory",
        )
    k, v = facts["cache_types"]
    types = "" if k == v == "f16" else f"K in {k}, V in {v}"
    yield "context (KV cache)", format_bytes(plan["kv_bytes"]), types
    if plan["projector_bytes"]:
        yield "reading images", format_bytes(plan["projector_bytes"]), ""
    if n := plan["n_staging"]:
        tensors = (
            f"{n} tensors of a layer's experts"
            if n > 1
            else "a tensor of a layer's experts"
        )
        yield "staging prompts", format_bytes(plan["staging_bytes"]), tensors
    n = plan["n_ubatch"]
    left = plan["available_bytes"] - plan["total_bytes"]
    yield (
        "buffers",
        format_bytes(plan["compute_bytes"]),
        f"for {n:,} token{'s' * (n != 1)} of a prompt at a time",
    )
    yield "all of it", format_bytes(plan["total_bytes"]), ""
    rest = (
        f"{format_bytes(left)} stay free"
        if left >= 0
        else f"{format_bytes(-left)} too few"
    )
    yield "free now", format_bytes(plan["available_bytes"]), rest
    if device or layers_on:
        lower = (
            f"with {plan['n_ram_slots']:,} experts that {device} is filled from"
            if plan["n_ram_slots"]
            else ""
        )
        beside = "with these experts" if layers_on else lower
        yield "RAM beside that", format_bytes(plan["host_bytes"]), beside
    if total and not plan["resident"]:
        yield (
            "experts on disk",
            format_bytes(facts["expert_bytes"]),
            "read when a token needs them",
        )


def _bound_text(facts: Facts) -> str:
    """Returns the highest speed of answers on the CPU as text. Reads and computation
    would overlap completely at this speed, so the slower of the two limits it."""
    expected = facts["expected"]
    speeds = [expected[f"{name}_tokens_per_s"] for name in ("reads", "computing")]
    most, reads, computing = (two_digits(n, n) for n in (min(speeds), *speeds))
    return (
        f"at most {most} tokens/s of an answer: reads at {facts['disk']['bytes_per_s'] / 1e9:.2g} GB/s allow"
        f" {reads} with a hit rate of {expected['hit_high']:.0%}, computing allows {computing}"
    )


def _placement_rows(placement: Facts) -> Iterator[Row]:
    """Yields the header, then a row for each placement of experts, in the order of
    `placement["placements"]`.

    A row has the speeds of a typical prompt, of a longer prompt if the context is long
    enough, and of the answer.
    """
    n_long = placement["placements"][0]["long_prompt_tokens"]
    columns = {
        "prompt_tokens_per_s": "prompt",
        "long_prompt_tokens_per_s": f"of {n_long:,}",
        "tokens_per_s": "answer",
    }
    if n_long <= PROMPT_TOKENS:
        del columns["long_prompt_tokens_per_s"]
    yield "tokens/s", *columns.values()
    for each in placement["placements"]:
        yield each["text"], *(two_digits(each[name], each[name]) for name in columns)


def _speed_rows(placement: Facts) -> Iterator[Row]:
    """Yields rows with the speeds and hit rates from which the placements' speeds are
    predicted."""
    speeds = placement["speeds"]
    device, cpu, disk = (
        f"{speeds[f'{name}_bytes_per_s'] / 1e9:.3g} GB/s"
        for name in ("device", "cpu", "disk")
    )
    link = f"{speeds['copies']['bytes_per_s'] / 1e9:.3g} GB/s"
    if latency_s := speeds["copies"]["latency_s"]:
        link += f", {latency_s * 1e6:.0f} us a layer"
    to_cpu = f"{speeds['cpu_layer_s'] * 1e6:.0f} us to the CPU and back"
    yield (
        "memory for experts",
        format_bytes(placement["device_bytes"]),
        placement["hit_rates"],
    )
    yield "kernels", f"{device} on the device, {cpu} on the CPU", speeds["source"]
    yield "copies", link, f"disk {disk}"
    yield "a stop at a layer", f"{speeds['stop_s'] * 1e6:.0f} us", to_cpu
    is_assumed = speeds["device_node_s"] == DEVICE_NODE_S
    yield (
        "a small operation",
        f"{speeds['device_node_s'] * 1e6:.2g} us on the device, {speeds['cpu_node_s'] * 1e6:.2g} us on the CPU",
        "assumed, from speeds of an H100 and an H200" if is_assumed else "",
    )


def _expectation_rows(facts: Facts) -> Iterator[Row]:
    """Yields rows with the expected hit rate, the bytes read per token, the disk's
    speed if it was measured, and the range of tokens per second. A model that is
    entirely in memory has no row for bytes read. The remarks name the sources of these
    numbers."""
    expected = facts["expected"]
    disk = facts["disk"]
    resident = facts["plan"]["resident"]
    yield (
        "hit rate",
        _range(f"{expected['hit_low']:.0%}", f"{expected['hit_high']:.0%}"),
        expected["basis"],
    )
    if not resident:
        read = _range(
            *(
                format_bytes(round(expected[f"missed_bytes_{end}"]))
                for end in ("low", "high")
            )
        )
        yield (
            "read for a token",
            read,
            f"of {format_bytes(facts['token_cycle_bytes'])} it touches",
        )
    if disk:
        how = (
            "past the page cache"
            if disk["past_page_cache"]
            else "through the page cache"
        )
        yield "disk", f"{disk['bytes_per_s'] / 1e9:.2g} GB/s", f"measured now, {how}"
    if expected["tokens_per_s_low"] is None:
        yield (
            "speed",
            "not known yet",
            "it follows from the disk, which is measured once the model is fetched",
        )
        return
    basis = f"memory at {expected['memory_bytes_per_s'] / 1e9:.2g} GB/s, measured now"
    basis = (
        f"limited by the processor and {basis}; nothing is read after its first use"
        if resident
        else f"computed from these reads and {basis}"
    )
    yield (
        "speed",
        f"{two_digits(expected['tokens_per_s_low'], expected['tokens_per_s_high'])} tokens/s",
        basis,
    )


def print_doctor(sections: dict[str, Facts]) -> None:
    """Prints the output of `moegguf doctor`: sections with one fact per line."""
    for title, facts in sections.items():
        rows = [
            (name.replace("_", " ") if name.islower() else name, value)
            for name, value in _flatten(facts)
        ]
        _section(title, rows or [("(none set)", "")])


def _flatten(facts: Facts, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict) and set(value) == {"error"}:
            yield prefix + name, f"unknown: {value['error']}"
        elif isinstance(value, dict) and set(value) == {"path", "size_bytes"}:
            yield (
                prefix + name,
                f"{format_bytes(value['size_bytes'])} in {value['path']}",
            )
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
    if value is None or value == []:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
