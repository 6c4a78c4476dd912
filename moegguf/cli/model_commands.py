"""The commands for models on this machine: pull, list, show, rm, cp, create, estimate, doctor; and those for computed
contexts that are kept on disk. They need no server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegguf.cli.options import OFTEN, AsJson, Flag, Given, Insecure, Model, Prefix, complete_model, flags
from moegguf.errors import ModelNotFoundError
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.engine.context_store import StoredBlock

Name = Annotated[
    str,
    typer.Argument(
        autocompletion=complete_model,
        metavar="MODEL",
        help="A name of `library`, or such as hf.co/USER/REPOSITORY:QUANT.",
    ),
]


def pull(model: Name, insecure: Insecure = False) -> None:
    """Fetch a model of the library or of Hugging Face, or what is missing of it.

    Ctrl-C keeps what was downloaded; the same command resumes.
    """
    from moegguf.models.catalog import Catalog
    from moegguf.models.pull import pull as fetch
    from moegguf.terminal.progress import PullProgress

    with PullProgress() as progress:
        fetch(model, Catalog(), progress.report)


def list_models(prefix: Prefix = "", as_json: AsJson = False) -> None:
    """List the models on this machine, newest first."""
    from moegguf.models.catalog import Catalog
    from moegguf.terminal.facts import list_facts
    from moegguf.terminal.tables import print_json, print_model_list

    entries = Catalog().entries(prefix)
    print_json([list_facts(entry) for entry in entries]) if as_json else print_model_list(entries)


def library(prefix: Prefix = "", as_json: AsJson = False) -> None:
    """List well-known models by short names: which would run here, and how fast."""
    from moegguf.engine.machine import load_warning
    from moegguf.terminal.facts import library_facts
    from moegguf.terminal.tables import print_json, print_library

    facts = library_facts(prefix)
    if as_json:
        print_json(facts)
        return
    print_library(facts)
    print_message(
        "\nNEEDS: memory to run it at all. FOR ALL: with every expert in memory. SPEED HERE: estimated from this"
        "\nmachine's free memory, processors and disk now. `moegguf run NAME` fetches a model and runs it."
    )
    if warning := load_warning():
        print_message(warning)


SHOWN = {
    "license": "its license", "modelfile": "a Modelfile that recreates it", "parameters": "its parameters",
    "template": "its chat template", "system": "its system message",
}  # fmt: skip
SHOW_FLAGS = (
    *(Flag(name, f"--{name}", None, OFTEN, f"Only {what}.", False, bool) for name, what in SHOWN.items()),
    Flag("verbose", "--verbose -v", None, OFTEN, "All metadata and tensors, too.", False, bool),
)


@flags(own=SHOW_FLAGS)
def show(model: Model, as_json: AsJson = False, *, given: Given, **chosen: Any) -> None:
    """Describe a model and its experts."""
    from moegguf.models.catalog import Catalog
    from moegguf.models.details import details, parameters_of
    from moegguf.models.modelfile import parameter_lines
    from moegguf.terminal.facts import model_facts
    from moegguf.terminal.tables import print_json, print_model

    wanted = [name for name in SHOWN if chosen[name]]
    if len(wanted) > 1:
        raise typer.BadParameter(f"only one of {', '.join(f'--{name}' for name in SHOWN)} can be given")
    if not wanted:
        facts = model_facts(model, verbose=chosen["verbose"])
        print_json(facts) if as_json else print_model(facts)
        return
    catalog = Catalog()
    entry = catalog.find(model)
    parts: dict[str, Callable[[], str | None]] = {
        "license": lambda: entry.license,
        "modelfile": lambda: catalog.modelfile(entry),
        "parameters": lambda: "\n".join(parameter_lines(parameters_of(entry))),
        "template": lambda: entry.template or details(entry).template,
        "system": lambda: entry.system,
    }
    typer.echo((parts[wanted[0]]() or "").rstrip("\n"))


def remove(
    models: Annotated[
        list[str], typer.Argument(autocompletion=complete_model, metavar="MODEL...", help="Names that `list` shows.")
    ],
) -> None:
    """Remove models: the name, and its files where nothing else uses them."""
    from moegguf.cli.server_commands import unload_from_server
    from moegguf.models.catalog import Catalog

    catalog = Catalog()
    for name in models:
        unload_from_server(catalog.find(name, even_missing=True).name)
        catalog.remove(name)
        print(f"deleted '{name}'")


def copy(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A name that `list` shows.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="Another name for it.")],
) -> None:
    """Give a model another name; no bytes are copied."""
    from moegguf.models.catalog import Catalog

    Catalog().copy(source, destination)
    print(f"copied '{source}' to '{destination}'")


def create(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The new name.")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="MODELFILE", help="`-` reads stdin.  [default: Modelfile]")
    ] = None,
) -> None:
    """Create a model from a Modelfile: FROM, PARAMETER, SYSTEM, MESSAGE, LICENSE."""
    from moegguf.models.catalog import Catalog
    from moegguf.models.modelfile import parse

    path = file or Path("Modelfile")
    if str(path) == "-":
        text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    elif path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        raise typer.BadParameter(f"there is no file {str(path)!r}; write one that begins with FROM, or give --file")
    Catalog().create(model, parse(text))
    print_message("success")


def push(model: Name, insecure: Insecure = False) -> None:
    """Not supported: upload models with Hugging Face's own tools."""
    raise typer.BadParameter("push is not supported; upload the GGUF file with `hf upload USER/REPOSITORY FILE`")


DEVICE_FLAGS = (
    Flag("device_memory", "--device-memory", "SIZE", OFTEN, "What a device of so much memory would give."),
    Flag("device_bandwidth", "--device-bandwidth", "SIZE/s", OFTEN, "Of that memory, such as 448GB/s."),
    Flag("link", "--link", "SIZE/s[,LATENCY]", OFTEN, "Between host and device: 24GB/s is PCIe 4 x16."),
)


@flags("expert_cache", "n_ctx", "vram_cache", "placement", "type_k", "type_v", own=DEVICE_FLAGS)
def estimate(model: Model, as_json: AsJson = False, *, given: Given, **chosen: Any) -> None:
    """Estimate memory and speed before loading; of a model on Hugging Face before it is fetched.

    With --device-memory, --device-bandwidth and --link also where experts would go on a machine with such a device.
    """
    from moegguf.engine.machine import load_warning
    from moegguf.terminal.facts import SupposedDevice, estimate_model
    from moegguf.terminal.tables import print_estimate, print_json

    device = SupposedDevice.parse(*(chosen[flag.name] for flag in DEVICE_FLAGS))
    facts = estimate_model(model, device=device, **given)
    if as_json:
        print_json(facts)
        return
    print_estimate(facts)
    if warning := load_warning():
        print_message(warning)


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Measures the disk that this model is on.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a bug report needs: CPU, memory, disk speed, build, backends."""
    from moegguf.engine.doctor import diagnose
    from moegguf.terminal.tables import print_doctor, print_json

    facts = diagnose(model)
    print_json(facts) if as_json else print_doctor(facts)


contexts = typer.Typer(name="contexts", help="List the computed contexts that are kept on disk, or delete them.")


@contexts.callback(invoke_without_command=True)
def list_contexts(context: typer.Context, as_json: AsJson = False) -> None:
    """List the computed contexts that are kept on disk, by model, or delete them (`clear`)."""
    if context.invoked_subcommand is not None:
        return
    from datetime import UTC, datetime

    from moegguf.terminal.tables import print_columns, print_json
    from moegguf.terminal.units import human_bytes, human_time

    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "blocks": len(blocks),
            "longest_tokens": max(block.about.n_tokens for block in blocks),
            "tokens": sum(block.about.n_own_tokens for block in blocks),
            "bytes": sum(block.n_bytes for block in blocks),
            "used": datetime.fromtimestamp(max(block.used_s for block in blocks), UTC),
        }
        for model, blocks in _by_model().items()
    ]
    if as_json:
        print_json([row | {"used": row["used"].isoformat()} for row in rows])
        return
    print_columns(
        ("MODEL", "TOKENS", "LONGEST", "SIZE", "USED"),
        (
            (row["model"], f"{row['tokens']:,}", f"{row['longest_tokens']:,}", human_bytes(row["bytes"]),
             human_time(row["used"]))
            for row in rows
        ),
    )  # fmt: skip


@contexts.command()
def clear(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model that `moegguf contexts` lists; all without one.")
    ] = None,
) -> None:
    """Delete the contexts of a model, or all. A running model keeps those that it has in memory."""
    from moegguf.terminal.units import human_bytes

    found = _by_model()
    if model is not None and model not in found:
        raise ModelNotFoundError(f"no contexts of {model!r} are kept; `moegguf contexts` lists the models.")
    blocks = [block for name, each in found.items() if model in (None, name) for block in each]
    for block in blocks:
        block.path.unlink(missing_ok=True)
    typer.echo(f"deleted {human_bytes(sum(block.n_bytes for block in blocks))} of contexts")


def _by_model() -> dict[str, list[StoredBlock]]:
    from moegguf.engine.context_store import default_folder, stored_blocks

    found: dict[str, list[StoredBlock]] = {}
    for block in stored_blocks(default_folder()):
        found.setdefault(block.about.model, []).append(block)
    return dict(sorted(found.items()))
