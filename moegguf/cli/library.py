"""The commands for models on this machine: pull, list, rm, cp, create. They need no server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegguf.terminal.messages import say

if TYPE_CHECKING:
    from moegguf.models.entry import ModelEntry

Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name, such as hf.co/USER/REPOSITORY:QUANT, or one that `list` shows.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]
Insecure = Annotated[bool, typer.Option("--insecure", hidden=True, help="Accepted, as Ollama has it; no effect.")]


def pull(model: Name, insecure: Insecure = False) -> None:
    """Fetch a model from Hugging Face, or what is missing of it.

    Ctrl-C keeps what arrived; the same command goes on from there.
    """
    from moegguf.models.catalog import Catalog
    from moegguf.models.pull import pull as fetch
    from moegguf.terminal.progress import PullProgress

    with PullProgress() as progress:
        fetch(model, Catalog(), progress.report)


def list_models(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only names that begin like this.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the models on this machine, newest first."""
    from moegguf.models.catalog import Catalog
    from moegguf.terminal.tables import print_entries, print_json

    entries = Catalog().entries(prefix)
    if as_json:
        print_json([_listing(entry) for entry in entries])
        return
    print_entries(entries)


def _listing(entry: ModelEntry) -> dict[str, Any]:
    """An entry as JSON."""
    return {
        "name": entry.name,
        "source": entry.source,
        "size_bytes": entry.size_bytes,
        "digest": entry.digest,
        "modified": entry.modified.isoformat(),
        "files": [str(file) for file in entry.files],
        "mmproj": str(entry.mmproj) if entry.mmproj else None,
        "parent": entry.parent,
    }


def remove(models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names that `list` shows.")]) -> None:
    """Remove models: the name, and its files where nothing else uses them."""
    from moegguf.cli.remote import unload_if_serving
    from moegguf.models.catalog import Catalog

    catalog = Catalog()
    for name in models:
        unload_if_serving(catalog.find(name).name)
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
    """Make a model of a Modelfile: FROM, PARAMETER, SYSTEM, MESSAGE, LICENSE."""
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
    say("success")


def push(model: Name, insecure: Insecure = False) -> None:
    """Not supported: models go to Hugging Face with its own tools."""
    raise typer.BadParameter("push is not supported; upload the GGUF file with `hf upload USER/REPOSITORY FILE`")


def raw_part(model: str, wanted: Sequence[str]) -> str:
    """The text of one part of a model: license, modelfile, parameters, template or system.

    Raises BadParameter when more than one is wanted.
    """
    from moegguf.models.catalog import Catalog
    from moegguf.models.details import details
    from moegguf.models.modelfile import parameter_lines, render

    entry = Catalog().find(model)
    parts = {
        "license": lambda: entry.license or "",
        "modelfile": lambda: render(entry),
        "parameters": lambda: "\n".join(parameter_lines(entry.parameters)),
        "template": lambda: entry.template or details(entry).template or "",
        "system": lambda: entry.system or "",
    }
    if len(wanted) > 1:
        raise typer.BadParameter(f"only one of {', '.join(f'--{part}' for part in parts)} can be given")
    return parts[wanted[0]]()
