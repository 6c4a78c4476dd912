"""`moegguf contexts`: the computed contexts that are kept on disk, by model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegguf.cli.options import AsJson
from moegguf.errors import ModelNotFoundError

if TYPE_CHECKING:
    from moegguf.engine.context_store import StoredBlock

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
