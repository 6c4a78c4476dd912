"""The commands for models that are or can be on this machine: pull, list, library,
show, rm, cp, create, estimate.

Further commands are doctor, `contexts` for computed contexts on disk, and for models in
a running server ps, stop and budget.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from moegguf.cli.options import (
    AsJson,
    Flag,
    Given,
    Insecure,
    Model,
    Prefix,
    argument,
    flags,
    model_argument,
)
from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.terminal.messages import print_message
from moegguf.text import decode_text, to_utf8

if TYPE_CHECKING:
    from moegguf.engine.kv_block_store import StoredBlock

Name = Annotated[
    str, model_argument("A name of `library`, or such as hf.co/USER/REPOSITORY:QUANT.")
]
Loaded = Annotated[str, model_argument("A name from `moegguf ps`.")]


def pull(model: Name, insecure: Insecure = False) -> None:
    """Fetch a model from the library or from Hugging Face, or only its missing files.

    Ctrl-C keeps the downloaded data; the same command then resumes.
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
    if as_json:
        print_json([list_facts(entry) for entry in entries])
    elif entries or not prefix:
        print_model_list(entries)
    else:
        print_message(
            f"No name of a model on this machine begins with {prefix!r}; `moegguf list` lists all of them."
        )


def library(prefix: Prefix = "", as_json: AsJson = False) -> None:
    """List well-known models by short name, with the expected speed on this machine."""
    from moegguf.engine.machine import load_warning
    from moegguf.terminal.facts import READING_TOKENS_PER_S, library_facts
    from moegguf.terminal.tables import print_json, print_library

    facts = library_facts(prefix)
    if as_json:
        print_json(facts)
        return
    if not facts:
        print_message(
            f"No name of the library begins with {prefix!r}; `moegguf library` lists all of them."
        )
        return
    print_library(facts)
    print_message("")
    for best in (each for each in facts if each["fits_best"]):
        is_fluent = best["tokens_per_s"][1] >= READING_TOKENS_PER_S
        print_message(
            "* fits best: the largest that answers as fast as one reads."
            if is_fluent
            else "* the fastest of these; none answers as fast as one reads."
        )
    print_message(
        "NEEDS: memory to run it at all. FOR ALL: with every expert in memory. IN"
        "\nMEMORY: experts that fit now. SPEED HERE: estimated from memory, processors"
        "\nand disk now. `moegguf run NAME` fetches a model and runs it; --json prints"
        "\nevery column."
    )
    if warning := load_warning():
        print_message(warning)


SHOWN = {
    "license": "its license", "modelfile": "a Modelfile that recreates it", "parameters": "its parameters",
    "template": "its chat template", "system": "its system message",
}  # fmt: skip
SHOW_FLAGS = (
    *(Flag(f"--{name}", None, f"Only {what}.", False) for name, what in SHOWN.items()),
    Flag("--verbose -v", None, "Also print all metadata and tensors.", False),
)


@flags(own=SHOW_FLAGS)
def show(model: Model, as_json: AsJson = False, *, given: Given, **chosen: Any) -> None:
    """Describe a model and its experts."""
    from moegguf.models.catalog import Catalog
    from moegguf.models.details import details, parameters_of
    from moegguf.models.recipe import parameter_lines
    from moegguf.terminal.facts import model_facts
    from moegguf.terminal.tables import print_json, print_model

    wanted = [name for name in SHOWN if chosen[name]]
    if len(wanted) > 1:
        raise typer.BadParameter(
            f"only one of {', '.join(f'--{name}' for name in wanted)} can be given; keep one"
        )
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
    models: Annotated[list[str], model_argument("Names from `moegguf list`.")],
) -> None:
    """Remove models: their names, and the files that no other name uses."""
    from moegguf.chat.client import Client
    from moegguf.models.catalog import Catalog, check_removable

    catalog = Catalog()
    for name in models:
        check_removable(entry := catalog.find(name, even_missing=True))
        body = {"model": entry.name, "keep_alive": 0}
        # The request fails if no server is running, or if the server does not have the
        # model.
        with suppress(MoeggufError):
            Client().post("/api/generate", body)
        catalog.remove(name)
        print(f"deleted '{name}'")


def copy(
    source: Annotated[str, model_argument("A name from `moegguf list`.", "SOURCE")],
    destination: Annotated[str, argument("DESTINATION", "The new name.")],
) -> None:
    """Give a model another name. No data is copied."""
    from moegguf.models.catalog import Catalog

    Catalog().copy(source, destination)
    print(f"copied '{source}' to '{destination}'")


def create(
    model: Annotated[str, argument("MODEL", "Name of the new model.")],
    file: Annotated[
        typer.FileBinaryRead,
        typer.Option(
            "--file", "-f", metavar="MODELFILE", help="The Modelfile. - reads stdin."
        ),
    ] = "Modelfile",  # type: ignore[assignment]  # the file's name: typer opens the file
) -> None:
    """Create a model from a Modelfile: FROM, PARAMETER, SYSTEM, MESSAGE, LICENSE."""
    from moegguf.models.catalog import Catalog
    from moegguf.models.recipe import parse

    Catalog().create(model, parse(decode_text(file.read())))
    print_message("success")


def push(model: Name, insecure: Insecure = False) -> None:
    """Not supported: upload models with Hugging Face's own tools."""
    raise typer.BadParameter(
        "push is not supported; upload the GGUF file with `hf upload USER/REPOSITORY FILE`"
    )


DEVICE_FLAGS = (
    Flag(
        "--device-memory",
        "SIZE",
        "Free memory of a device to predict for, such as 24GB.",
    ),
    Flag("--device-bandwidth", "SIZE/s", "Bandwidth of that memory, such as 448GB/s."),
    Flag(
        "--link",
        "SIZE/s[,LATENCY]",
        "Link to the device (24GB/s: PCIe 4 x16); LATENCY: a stop at a layer.",
    ),
)


PLANNED = (
    "expert_cache", "n_ctx", "vram_cache", "placement", "n_gpu_layers", "n_parallel", "kv_tokens", "type_k", "type_v",
    "draft", "mmproj", "lora_path", "n_threads", "strategy", "mirror",
)  # fmt: skip
"""Options that change the estimated memory or speed of a model."""


@flags(*PLANNED, own=DEVICE_FLAGS)
def estimate(
    model: Model, as_json: AsJson = False, *, given: Given, **chosen: Any
) -> None:
    """Estimate the memory and speed of a model without loading it, or fetching it from
    Hugging Face.

    --device-memory, --device-bandwidth and --link together describe a device that this
    machine may lack. The estimate then also shows where experts would be placed, and
    the speeds.
    """
    from moegguf.engine.machine import load_warning
    from moegguf.terminal.facts import SupposedDevice, estimate_model
    from moegguf.terminal.loading import print_card_note
    from moegguf.terminal.tables import print_estimate, print_json

    device = SupposedDevice.parse(*(chosen[flag.name] for flag in DEVICE_FLAGS))
    facts = estimate_model(model, given, device)
    if as_json:
        print_json(facts)
        return
    print_estimate(facts)
    print_card_note(given)
    if warning := load_warning():
        print_message(warning)


Measured = Annotated[str | None, model_argument("Measure the disk of this model.")]


Checked = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Run the demo model with few slots, and check the expert store's bookkeeping.",
    ),
]


def doctor(
    model: Measured = None, as_json: AsJson = False, check: Checked = False
) -> None:
    """Print what a bug report needs: CPU, memory, disk speed, build, backends. With
    --check, check the expert store."""
    from moegguf.engine.doctor import check_store, diagnose
    from moegguf.terminal.tables import print_doctor, print_json

    if check:
        print(check_store())
        return
    facts = diagnose(model)
    print_json(facts) if as_json else print_doctor(facts)


contexts = typer.Typer(
    name="contexts",
    help="List the computed contexts that are kept on disk, or delete them.",
)


@contexts.callback(invoke_without_command=True)
def list_contexts(context: typer.Context, as_json: AsJson = False) -> None:
    """List the computed contexts that are kept on disk, by model, or delete them with
    `clear`."""
    if context.invoked_subcommand is not None:
        return
    from moegguf.quantities import human_bytes, human_time, utc_time
    from moegguf.terminal.tables import print_columns, print_json

    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "blocks": len(blocks),
            "longest_tokens": max(block.about.n_tokens for block in blocks),
            "tokens": sum(block.about.n_own_tokens for block in blocks),
            "bytes": sum(block.n_bytes for block in blocks),
            "used": utc_time(max(block.used_s for block in blocks)),
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
        drop=("LONGEST", "USED", "TOKENS"),
    )  # fmt: skip


@contexts.command()
def clear(
    model: Annotated[
        str | None,
        argument("MODEL", "A model's name, or its line in `moegguf contexts`."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Delete the contexts of all models.")
    ] = False,
) -> None:
    """Delete a model's contexts, or with --all every model's. A loaded model keeps the
    contexts that are in memory."""
    if every == (model is not None):
        given = f"{model!r} and --all are both" if every else "neither is"
        raise typer.BadParameter(
            f"give either a MODEL that `moegguf contexts` lists, or --all, but {given} given"
        )
    from moegguf.quantities import human_bytes

    found = _by_model()
    if model is not None and model not in found:
        from moegguf.models.catalog import Catalog

        given = model
        with suppress(ModelNotFoundError):
            model = Catalog().find(model).path.stem
        if model not in found:
            raise ModelNotFoundError(
                f"no contexts of {given!r} are kept; `moegguf contexts` lists the models."
            )
    blocks = [
        block for name, each in found.items() if model in (None, name) for block in each
    ]
    for block in blocks:
        block.path.unlink(missing_ok=True)
    typer.echo(
        f"deleted {human_bytes(sum(block.n_bytes for block in blocks))} of contexts"
    )


def _by_model() -> dict[str, list[StoredBlock]]:
    from moegguf.engine.kv_block_store import default_folder, stored_blocks

    found: dict[str, list[StoredBlock]] = {}
    for block in stored_blocks(default_folder()):
        found.setdefault(block.about.model, []).append(block)
    return dict(sorted(found.items()))


def ps(prefix: Prefix = "", as_json: AsJson = False) -> None:
    """List the models that a running server has loaded, and in a wide terminal the
    number of prompt tokens that they reused."""
    from moegguf.chat.client import Client
    from moegguf.quantities import human_bytes, human_time, percent, processor_split
    from moegguf.terminal.tables import print_columns, print_json

    models = [
        m
        for m in Client().get("/api/ps")["models"]
        if m["name"].lower().startswith(prefix.lower())
    ]
    if as_json:
        print_json(models)
        return
    # seen: processes that already have a row; further rows of a process are marked
    # "(shared)".
    rows, seen = [], set()
    for model in models:
        moe, expires = model.get("moe", {}), datetime.fromisoformat(model["expires_at"])
        # "never" is sent as a date centuries in the future.
        never = expires.year > datetime.now().year + 100
        until = (
            "Stopping..."
            if model.get("stopping")
            else human_time(None if never else expires)
        )
        pid, tokens = moe.get("pid", model["name"]), moe.get("prompt_tokens", {})
        rows.append((
            model["name"], model["digest"][:12], human_bytes(model["size"]) + " (shared)" * (pid in seen),
            processor_split(model["size"], model["size_vram"]), percent(moe.get("expert_share")),
            percent(moe["hit_rate"] if moe.get("lookups") else None), str(model["context_length"]),
            f"{tokens['memory']:,} + {tokens['disk']:,} from disk" if any(tokens.values()) else "-", until,
        ))  # fmt: skip
        seen.add(pid)
    header = (
        "NAME",
        "ID",
        "SIZE",
        "PROCESSOR",
        "EXPERTS",
        "HITS",
        "CONTEXT",
        "REUSED",
        "UNTIL",
    )
    print_columns(
        header,
        rows,
        drop=(
            "ID",
            "REUSED",
            "HITS",
            "CONTEXT",
            "EXPERTS",
            "PROCESSOR",
            "UNTIL",
            "SIZE",
        ),
    )


def stop(model: Loaded) -> None:
    """Unload a model from a running server."""
    from moegguf.chat.client import Client
    from moegguf.models.names import parse_name

    client, name = Client(), parse_name(model).canonical
    if not any(
        loaded["name"].lower() == name.lower()
        for loaded in client.get("/api/ps")["models"]
    ):
        raise ModelNotFoundError(
            f"couldn't find model {model!r} to stop; `moegguf ps` lists the loaded models."
        )
    client.post("/api/generate", {"model": name, "keep_alive": 0})


def budget(
    model: Loaded,
    expert_cache: Annotated[
        str | None,
        argument(
            "BUDGET", 'RAM for experts: "50%", "2GiB", or "auto" (as much as at load).'
        ),
    ] = None,
    vram_cache: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET",
            help="GPU memory for experts, in the same forms. A part of it may stage prompts, as at load; this part"
            " keeps its size.",
        ),
    ] = None,
) -> None:
    """Show or change the memory for a loaded model's experts in a running server, even
    while the model answers."""
    from moegguf.chat.client import Client
    from moegguf.quantities import format_bytes

    budgets = {"expert_cache": expert_cache, "vram_cache": vram_cache}
    given = {name: value for name, value in budgets.items() if value is not None}
    path = f"/budget?model={quote(to_utf8(model), safe='')}"
    now = (
        Client().post("/budget", {"model": model, **given}, method="PUT")
        if given
        else Client().get(path)
    )
    if not now["n_experts"]:
        print_message(f"{now['model']} has no experts, so it has no memory for them.")
        return
    parts = [
        f"{format_bytes(now['expert_cache_bytes'])} for {now['n_slots']} of {now['n_experts']} experts"
    ]
    if now["vram_cache_bytes"]:
        parts[0] += " in RAM"
        parts.insert(
            0,
            f"{format_bytes(now['vram_cache_bytes'])} for {now['n_vram_slots']} in VRAM",
        )
        if now["staging_bytes"]:
            parts[0] += f", {format_bytes(now['staging_bytes'])} of it to stage prompts"
    for part, name in ((-1, "expert_cache"), (0, "vram_cache")):
        if name in given and now[f"{name}_bytes"] >= now[f"max_{name}_bytes"]:
            parts[part] += ", the most that it was loaded with"
    print_message(
        f"{now['model']}: {', '.join(parts)}, {format_bytes(now['size_bytes'])} in all"
    )
