"""The `moegguf` command: the table of its subcommands.

Command modules import numpy, rich and model libraries inside their functions only, so that `--help` stays fast.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moegguf.cli import model_commands, server_commands
from moegguf.cli.batch import batch
from moegguf.cli.bench import bench
from moegguf.cli.contexts import contexts
from moegguf.cli.options import Command
from moegguf.cli.run import RunCommand, run
from moegguf.cli.serve import ServeCommand, serve
from moegguf.cli.top import top
from moegguf.cli.trace import trace
from moegguf.terminal.messages import run_with_exit_code

app = typer.Typer(
    name="moegguf",
    help="Run Mixture-of-Experts GGUF models whose experts do not fit in fast memory.",
    rich_markup_mode=None,  # rich would take a third of the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        server_commands.print_versions()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run Mixture-of-Experts GGUF models whose experts do not fit in fast memory."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(cls=RunCommand)(run)
app.command(cls=Command, short_help="Answer a file of requests.")(batch)
app.command(cls=ServeCommand)(serve)
app.command("start", cls=ServeCommand, hidden=True)(serve)
app.command()(model_commands.pull)
app.command("list")(model_commands.list_models)
app.command()(model_commands.library)
app.command("ls", hidden=True)(model_commands.list_models)
app.command()(model_commands.show)
app.command("rm")(model_commands.remove)
app.command("cp")(model_commands.copy)
app.command()(model_commands.create)
app.command(hidden=True)(model_commands.push)
app.command()(server_commands.ps)
app.command()(server_commands.stop)
app.command()(server_commands.budget)
app.command()(top)
app.command(cls=Command)(model_commands.estimate)
app.command()(model_commands.doctor)
app.command(cls=Command, short_help="Measure speed, hit rate, bytes and stalls.")(bench)
app.add_typer(trace)
app.add_typer(contexts)


def main(arguments: list[str] | None = None) -> int:
    """The entry point: runs a command and returns its exit code."""
    return run_with_exit_code(lambda: app(arguments, prog_name="moegguf", standalone_mode=False))


if __name__ == "__main__":
    sys.exit(main())
