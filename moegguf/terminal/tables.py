"""How figures look: rich tables on stdout, a progress bar on stderr. Knows widths and words, asks nobody for facts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moegguf.engine.estimate import NOTE
from moegguf.models.details import human_number
from moegguf.models.entry import ModelEntry
from moegguf.quantities import format_bytes
from moegguf.terminal.facts import Facts
from moegguf.terminal.units import moment, size

PIPE_WIDTH = 400
SHOWN_LINES = 2  # of a system message or a license, as `ollama show` does

Row = tuple[str, str] | tuple[str, str, str]


def print_json(facts: Any) -> None:
    """Indented JSON on stdout, nothing else."""
    print(json.dumps(facts, indent=2, ensure_ascii=False))


def make_console() -> Console:
    """Of stdout."""
    # A pipe has no width of its own; 80 would break paths that a script looks for.
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def print_part(console: Console, what: Any) -> None:
    """Prints; into a pipe without the spaces that tables end their lines with."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _section(console: Console, title: str, rows: Iterable[Row], right: Sequence[int] = ()) -> None:
    """A title and rows below it: name, value, and perhaps a remark. Columns in `right` hold numbers."""
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
    print_part(console, Text(f"  {title}", style="bold"))
    print_part(console, Padding(table, (0, 0, 1, 4)))


def print_columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as `ollama list` prints it: names above columns, four spaces between."""
    table = Table(box=None, padding=(0, 4, 0, 0), pad_edge=False, header_style="")
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_part(make_console(), table)


def print_entries(entries: Iterable[ModelEntry]) -> None:
    """Models as `moegguf list` and the chat's /list show them."""
    rows = [(e.name, e.digest[:12], size(e.size_bytes), moment(e.modified)) for e in entries]
    print_columns(("NAME", "ID", "SIZE", "MODIFIED"), rows)


def _tokens(n: int) -> str:
    return f"{n:,} token{'s' * (n != 1)}"


def _percent_range(low: float, high: float) -> str:
    a, b = f"{low:.0%}", f"{high:.0%}"
    return a if a == b else f"{a} to {b}"


def _range(low: float, high: float, digits: int = 1) -> str:
    a, b = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return a if a == b else f"{a} to {b}"


def print_show(facts: Facts) -> None:
    """A model: what it is, its experts, its types, and what budgets would mean."""
    console, active = make_console(), facts["active_parameters"]
    print_part(console, Text(facts["name"], style="bold"))
    size = f"{human_number(facts['parameters'])}"
    if active != facts["parameters"]:
        size += f", {human_number(active)} active for a token"
    files = f"{format_bytes(facts['file_bytes'])}"
    if len(facts["shards"]) > 1:
        files += f" in {len(facts['shards'])} shards"
    _section(console, "Model", [
        ("architecture", facts["architecture"]),
        ("parameters", size),
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
    _print_additions(console, facts)
    types = sorted(facts["types"].items(), key=lambda item: -item[1]["bytes"])
    rows = [(name, format_bytes(t["bytes"]), f"{t['tensors']} tensors") for name, t in types]
    _section(console, "Types", rows, right=(1, 2))
    if facts["budgets"]:
        _print_budgets(console, facts["budgets"])


def _print_additions(console: Console, facts: Facts) -> None:
    """What the model's name adds to its files; of long texts the first lines."""
    if facts["projector"]:
        _section(console, "Projector", [("path", facts["projector"])])
    if facts["parameters_set"]:
        _section(console, "Parameters", [(name, _word(value)) for name, value in facts["parameters_set"].items()])
    for title, text in (("System", facts["system"]), ("License", facts["license"])):
        if text:
            _section(console, title, [(line, "") for line in text.strip().splitlines()[:SHOWN_LINES]])
    if "metadata" in facts:
        _section(console, "Metadata", [(name, _word(value)) for name, value in facts["metadata"].items()])
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
        (
            "all experts",
            f"{format_bytes(experts['all_bytes'])} ({share:.0%} of the files)",
        ),
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
        table.add_row(f"{row['share']:.0%}", f"{row['slots']:,}", format_bytes(row["bytes"]), f"{row['hit_rate']:.0%}")
    print_part(console, Text("  Budgets", style="bold").append(f"  {NOTE}; text does better", style="not bold dim"))
    print_part(console, Padding(table, (0, 0, 0, 4)))


def print_estimate(facts: Facts) -> None:
    """What goes where, what to expect, and why."""
    console, plan = make_console(), facts["plan"]
    print_part(console, Text(facts["name"], style="bold"))
    title = f"What goes where, with a context of {facts['n_ctx']:,} tokens"
    if facts["n_expert_total"]:
        title += f" and --expert-cache {facts['expert_cache'].replace(' ', '')}"
    _section(console, title, _memory_rows(facts), right=(1,))
    if facts["n_expert_total"]:
        _section(console, f"What to expect ({NOTE})", _expectation_rows(facts))
    print_part(console, Text("  Why", style="bold"))
    for reason in plan["reasons"]:
        print_part(console, Padding(Text(f"- {reason}"), (0, 0, 0, 4)))
    for warning in plan["warnings"]:
        print_part(console, Padding(Text(f"warning: {warning}", style="yellow"), (1, 0, 0, 2)))


def _memory_rows(facts: Facts) -> list[Row]:
    plan, total = facts["plan"], facts["n_expert_total"]
    rows: list[Row] = []
    if total:
        slots = f"{plan['n_slots']:,} of {total:,} experts at a time ({plan['n_slots'] / total:.0%})"
        rows.append(("experts in memory", format_bytes(plan["budget_bytes"]), slots))
    rows += [
        ("weights every token uses", format_bytes(plan["dense_bytes"]), ""),
        ("context (KV cache)", format_bytes(plan["kv_bytes"]), ""),
        ("buffers", format_bytes(plan["compute_bytes"]), f"for {_tokens(plan['n_ubatch'])} of a prompt at a time"),
        ("all of it", format_bytes(plan["total_bytes"]), ""),
        ("free now", format_bytes(plan["available_bytes"]), _left(plan)),
    ]
    if total and not plan["resident"]:
        rows.append(("experts on disk", format_bytes(facts["expert_bytes"]), "fetched when a token needs them"))
    return rows


def _left(plan: Facts) -> str:
    left = plan["available_bytes"] - plan["total_bytes"]
    return f"{format_bytes(left)} stay free" if left >= 0 else f"{format_bytes(-left)} too few"


def _expectation_rows(facts: Facts) -> list[Row]:
    expected, disk = facts["plan"]["expected"], facts["disk"]
    rows: list[Row] = []
    if facts["plan"]["resident"]:
        return [("hit rate", "100%"), ("speed", "limited by the processor: nothing is read after the first use")]
    rows.append(("hit rate", _percent_range(expected["hit_low"], expected["hit_high"])))
    read = _range(expected["missed_bytes_low"] / 1e6, expected["missed_bytes_high"] / 1e6)
    rows.append(("read for a token", f"{read} MB of {facts['token_cycle_bytes'] / 1e6:,.1f} MB it touches"))
    if disk:
        how = "past the page cache" if disk["past_page_cache"] else "through the page cache"
        rows.append(("disk", f"{disk['bytes_per_s'] / 1e9:.2f} GB/s, measured now, {how}"))
    if expected["tokens_per_s_low"] is not None:
        speed = _range(expected["tokens_per_s_low"], expected["tokens_per_s_high"])
        rows.append(("speed", f"at most {speed} tokens/s by what the disk gives; the processor may allow less"))
    return rows


def print_doctor(sections: dict[str, Facts]) -> None:
    """The sections of a diagnosis, each fact on a line."""
    console = make_console()
    for title, facts in sections.items():
        rows: list[Row] = [(name.replace("_", " ") if name.islower() else name, value) for name, value in _flat(facts)]
        _section(console, title, rows or [("(none set)", "")])


def _flat(facts: Facts, prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict) and set(value) == {"error"}:
            yield prefix + name, f"unknown: {value['error']}"
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        elif name.endswith("_bytes"):
            yield prefix + name.removesuffix("_bytes"), format_bytes(value)
        elif name == "bytes_per_s":
            yield prefix + "speed", f"{value / 1e9:.2f} GB/s"
        else:
            yield prefix + name, _word(value)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class Waiting:
    """Says on a terminal's stderr what is being waited for; silent elsewhere. Gone without a trace when closed."""

    def __init__(self) -> None:
        self._progress: Any = None
        if not sys.stderr.isatty():
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=1.0)
        self._progress.start()

    @property
    def visible(self) -> bool:
        """Whether there is a terminal to show it on."""
        return self._progress is not None

    def show(self, what: str, share: float | None) -> None:
        """`share` from 0 to 1; None while nobody knows."""
        if self._progress is not None:
            self._progress.update(
                self._task, description=what, total=None if share is None else 1.0, completed=share or 0
            )

    def close(self) -> None:
        """Clears the line. Twice is harmless."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
