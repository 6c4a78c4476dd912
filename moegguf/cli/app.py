"""The `moegguf` command: the table of its subcommands.

The command modules import numpy, rich and model libraries only inside their functions,
so that `--help` is fast.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Annotated

import typer

from moegguf.cli.batch import batch
from moegguf.cli.bench import bench
from moegguf.cli.launch import launch
from moegguf.cli.learn import learn
from moegguf.cli.model_commands import (
    budget,
    contexts,
    copy,
    create,
    doctor,
    estimate,
    library,
    list_models,
    ps,
    pull,
    push,
    remove,
    show,
    stop,
)
from moegguf.cli.options import Command, argument
from moegguf.cli.run import RunCommand, run
from moegguf.cli.serve import ServeCommand, serve
from moegguf.cli.top import top
from moegguf.cli.trace import trace
from moegguf.decisions import start_log
from moegguf.errors import MoeggufError
from moegguf.terminal.messages import print_message, run_with_exit_code

VERSION_TIMEOUT_S = 2.0

app = typer.Typer(
    name="moegguf",
    rich_markup_mode=None,  # --help takes a third less time without rich
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    """Handles the flag --version: prints the version of this command, and a warning if
    a running server has another version. Then exits. Does nothing if `requested` is
    False."""
    if not requested:
        return
    from moegguf.chat.client import Client
    from moegguf.package import __version__

    print(f"moegguf {__version__}")
    with suppress(MoeggufError):  # no server is running, or the server returns an error
        server = Client().get("/api/version", VERSION_TIMEOUT_S)
        version = server.get(
            "moegguf", f"Ollama {server.get('version', 'of an unknown version')}"
        )
        if version != __version__:
            print_message(f"warning: the server runs another version: {version}")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-v",
            callback=_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Run Mixture-of-Experts GGUF models whose experts do not fit in fast memory."""
    start_log()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def print_help(
    words: Annotated[
        list[str] | None,
        argument("COMMAND", "A command such as `run` or `trace simulate`."),
    ] = None,
) -> None:
    """Print the help of moegguf, or of a command."""
    app([*(words or []), "--help"], prog_name="moegguf", standalone_mode=False)


command = functools.partial(app.command, cls=Command)
command(cls=RunCommand)(run)
command(short_help="Answer a file of requests.")(batch)
command(cls=ServeCommand, short_help="Serve models over HTTP, with a web page.")(serve)
command("start", cls=ServeCommand, hidden=True)(serve)
command(short_help="Start a coding agent with a model.")(launch)
command(short_help="Fetch a model.")(pull)
command("list")(list_models)
command(short_help="List well-known models, and their speed here.")(library)
command("ls", hidden=True)(list_models)
command()(show)
command("rm", short_help="Remove models.")(remove)
command("cp")(copy)
command(short_help="Create a model from a Modelfile.")(create)
command(hidden=True)(push)
command(short_help="List the models that a server has loaded.")(ps)
command()(stop)
command(short_help="Show or change a loaded model's memory.")(budget)
command(short_help="Watch the experts of loaded models.")(top)
command(short_help="Estimate a model's memory and speed.")(estimate)
command(short_help="Print what a bug report needs.")(doctor)
command(short_help="Measure speed, hit rate, bytes and stalls.")(bench)
command(short_help="Train what the papers' strategies need.")(learn)
app.add_typer(trace, short_help="Record a model's routing, and replay it.")
app.add_typer(contexts, short_help="List or delete contexts that are kept on disk.")
command("help", short_help="Print the help of a command.")(print_help)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command in `arguments` (None: the arguments of the process) and returns
    its exit code. The program `moegguf` calls this function."""
    return run_with_exit_code(
        lambda: app(arguments, prog_name="moegguf", standalone_mode=False)
    )
