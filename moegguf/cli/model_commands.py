"""The commands for models on this machine: pull, list, show, rm, cp, create, estimate, doctor. They need no server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from moegguf.cli.options import AsJson, Given, Insecure, Model, Prefix, complete_model, flags
from moegguf.terminal.messages import print_message

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
    from moegguf.terminal.library import library_facts
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


def show(
    model: Model,
    license_text: Annotated[bool, typer.Option("--license", help="Only its license.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Only a Modelfile that recreates it.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Only its parameters.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Only its chat template.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Only its system message.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All metadata and tensors, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Describe a model and its experts."""
    from moegguf.terminal.facts import model_facts
    from moegguf.terminal.tables import print_json, print_model

    flags = {
        "license": license_text, "modelfile": modelfile, "parameters": parameters, "template": template,
        "system": system,
    }  # fmt: skip
    if parts := [name for name, given in flags.items() if given]:
        typer.echo(_model_part(model, parts).rstrip("\n"))
        return
    facts = model_facts(model, verbose=verbose)
    print_json(facts) if as_json else print_model(facts)


def _model_part(model: str, wanted: Sequence[str]) -> str:
    """The text of one part of a model. Raises BadParameter when more than one is wanted."""
    from moegguf.models.catalog import Catalog
    from moegguf.models.details import details, parameters_of
    from moegguf.models.modelfile import parameter_lines

    catalog = Catalog()
    entry = catalog.find(model)
    parts = {
        "license": lambda: entry.license or "",
        "modelfile": lambda: catalog.modelfile(entry),
        "parameters": lambda: "\n".join(parameter_lines(parameters_of(entry))),
        "template": lambda: entry.template or details(entry).template or "",
        "system": lambda: entry.system or "",
    }
    if len(wanted) > 1:
        raise typer.BadParameter(f"only one of {', '.join(f'--{part}' for part in parts)} can be given")
    return parts[wanted[0]]()


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


@flags("expert_cache", "n_ctx", "vram_cache", "placement", "type_k", "type_v")
def estimate(
    model: Model,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", metavar="SIZE", help="What a device of so much memory would give.")
    ] = None,
    device_bandwidth: Annotated[
        str | None, typer.Option("--device-bandwidth", metavar="SIZE/s", help="Of that memory, such as 448GB/s.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="SIZE/s[,LATENCY]", help="Between host and device: 24GB/s is PCIe 4 x16."),
    ] = None,
    as_json: AsJson = False,
    *,
    given: Given,
) -> None:
    """Estimate memory and speed before loading; of a model on Hugging Face before it is fetched.

    With --device-memory, --device-bandwidth and --link also where experts would go on a machine with such a device.
    """
    from moegguf.engine.machine import load_warning
    from moegguf.terminal.facts import SupposedDevice, estimate_model
    from moegguf.terminal.tables import print_estimate, print_json

    device = SupposedDevice.parse(device_memory, device_bandwidth, link)
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
