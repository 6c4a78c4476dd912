"""The commands for a running server: ps, stop and budget."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from urllib.parse import quote

import typer

from moegguf.cli.options import AsJson, Prefix, complete_model
from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.terminal.messages import print_message

VERSION_TIMEOUT_S = 2.0

Loaded = Annotated[str, typer.Argument(autocompletion=complete_model, metavar="MODEL", help="A name that `ps` shows.")]


def print_versions() -> None:
    """Prints this version, and a warning when a running server has another one."""
    from moegguf.chat.client import Client
    from moegguf.package import __version__

    print(f"moegguf {__version__}")
    try:
        server = Client().get("/api/version", VERSION_TIMEOUT_S)
    except MoeggufError:
        return
    version = server.get("moegguf", f"Ollama {server.get('version', 'of an unknown version')}")
    if version != __version__:
        print_message(f"warning: the server has another version: {version}")


def ps(prefix: Prefix = "", as_json: AsJson = False) -> None:
    """List the models that a running server has loaded, and how many tokens of prompts they did not compute again."""
    from moegguf.chat.client import Client
    from moegguf.terminal.tables import print_columns, print_json
    from moegguf.terminal.units import human_bytes, human_time, percent, processor_split

    models = [m for m in Client().get("/api/ps")["models"] if m["name"].lower().startswith(prefix.lower())]
    if as_json:
        print_json(models)
        return
    rows, seen = [], set()  # the memory of names that share a process counts once
    for model in models:
        moe, expires = model.get("moe", {}), datetime.fromisoformat(model["expires_at"])
        never = expires.year > datetime.now().year + 100  # then it is centuries ahead
        until = "Stopping..." if model.get("stopping") else human_time(None if never else expires)
        pid, tokens = moe.get("pid", model["name"]), moe.get("prompt_tokens", {})
        rows.append((
            model["name"], model["digest"][:12], human_bytes(model["size"]) + " (shared)" * (pid in seen),
            processor_split(model["size"], model["size_vram"]), percent(moe.get("expert_share")),
            percent(moe["hit_rate"] if moe.get("lookups") else None), str(model["context_length"]),
            f"{tokens['memory']:,} + {tokens['disk']:,} from disk" if any(tokens.values()) else "-", until,
        ))  # fmt: skip
        seen.add(pid)
    print_columns(("NAME", "ID", "SIZE", "PROCESSOR", "EXPERTS", "HITS", "CONTEXT", "REUSED", "UNTIL"), rows)


def stop(model: Loaded) -> None:
    """Unload a model from a running server."""
    from moegguf.chat.client import Client
    from moegguf.models.names import parse_name

    client, name = Client(), parse_name(model).canonical
    if not any(loaded["name"].lower() == name.lower() for loaded in client.get("/api/ps")["models"]):
        raise ModelNotFoundError(f"couldn't find model {model!r} to stop")
    client.post("/api/generate", {"model": name, "keep_alive": 0})


def budget(
    model: Loaded,
    expert_cache: Annotated[
        str | None,
        typer.Argument(metavar="[BUDGET]", help='In RAM: "50%", "2GiB", or "auto": all that it was loaded with.'),
    ] = None,
    vram_cache: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET",
            help="On the GPU that computes the model, in the same forms. As when loading, prompts are staged in a part"
            " of it, which stays as large as it was.",
        ),
    ] = None,
) -> None:
    """Show or change a loaded model's memory for experts in a running server, also while it answers."""
    from moegguf.chat.client import Client
    from moegguf.quantities import format_bytes, parse_expert_cache

    budgets = {"expert_cache": expert_cache, "vram_cache": vram_cache}
    given = {name: value for name, value in budgets.items() if value is not None}
    for value in given.values():
        parse_expert_cache(value)
    path = f"/budget?model={quote(model, safe='')}"
    now = Client().post("/budget", {"model": model, **given}, method="PUT") if given else Client().get(path)
    parts = [f"{format_bytes(now['expert_cache_bytes'])} for {now['n_slots']} of {now['n_experts']} experts"]
    if now["vram_cache_bytes"]:
        parts[0] += " in RAM"
        parts.insert(0, f"{format_bytes(now['vram_cache_bytes'])} for {now['n_vram_slots']} in VRAM")
        if now["staging_bytes"]:
            parts[0] += f", {format_bytes(now['staging_bytes'])} of it to stage prompts"
    print_message(f"{now['model']}: {', '.join(parts)}, {format_bytes(now['size_bytes'])} in all")


def unload_from_server(name: str) -> None:
    """Unloads a model from a running server; does nothing without a server."""
    from moegguf.chat.client import Client

    try:
        Client().post("/api/generate", {"model": name, "keep_alive": 0})
    except MoeggufError:
        return
