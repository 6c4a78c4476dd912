"""The `moegguf` command: what there is and who does it. What a command does is in the module it names.

Nothing heavy is imported before a command runs: `moegguf --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moegguf.cli import library, remote
from moegguf.cli.bench import bench
from moegguf.cli.run import Cache, Model, RunCommand, run
from moegguf.cli.serve import serve
from moegguf.cli.top import top
from moegguf.cli.trace import trace
from moegguf.terminal.messages import guarded

app = typer.Typer(
    name="moegguf",
    help="Run Mixture-of-Experts GGUF models whose experts do not fit in fast memory.",
    add_completion=False,
    rich_markup_mode=None,  # rich would be a third of the time that --help takes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Ctx = Annotated[
    int | None, typer.Option("--ctx", "-c", min=1, metavar="TOKENS", help="Context size.  [default: what fits]")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]


def _version(wanted: bool) -> None:
    if wanted:
        remote.print_versions()
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
app.command()(serve)
app.command("start", hidden=True)(serve)
app.command()(library.pull)
app.command("list")(library.list_models)
app.command("ls", hidden=True)(library.list_models)


@app.command()
def show(
    model: Model,
    license_text: Annotated[bool, typer.Option("--license", help="Only its license.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Only a Modelfile that makes it again.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Only its parameters.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Only its chat template.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Only its system message.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All metadata and tensors, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Describe a model and its experts."""
    from moegguf.terminal.facts import show_model
    from moegguf.terminal.tables import print_json, print_show

    flags = {
        "license": license_text, "modelfile": modelfile, "parameters": parameters, "template": template,
        "system": system,
    }  # fmt: skip
    if wanted := [name for name, given in flags.items() if given]:
        typer.echo(library.raw_part(model, wanted).rstrip("\n"))
        return
    facts = show_model(model, verbose=verbose)
    print_json(facts) if as_json else print_show(facts)


app.command("rm")(library.remove)
app.command("cp")(library.copy)
app.command()(library.create)
app.command(hidden=True)(library.push)
app.command()(remote.ps)
app.command()(remote.stop)
app.command()(top)


@app.command()
def estimate(model: Model, expert_cache: Cache = None, ctx: Ctx = None, as_json: AsJson = False) -> None:
    """Say what would go where and what to expect, before loading."""
    from moegguf.terminal.facts import estimate_model
    from moegguf.terminal.tables import print_estimate, print_json

    facts = estimate_model(model, expert_cache, ctx)
    print_json(facts) if as_json else print_estimate(facts)


@app.command()
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


app.command(short_help="Measure speed, hit rate, bytes and stalls.")(bench)
app.add_typer(trace)


def main(arguments: list[str] | None = None) -> int:
    """The entry point: runs a command and returns its exit code."""
    return guarded(lambda: app(arguments, prog_name="moegguf", standalone_mode=False))


if __name__ == "__main__":
    sys.exit(main())
