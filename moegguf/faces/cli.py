"""The `moegguf` command: options and wiring. What a command does is in the module it names.

Nothing heavy is imported before a command runs: `moegguf --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moegguf import __version__
from moegguf.faces.bench import bench
from moegguf.faces.messages import guarded
from moegguf.faces.trace import trace

app = typer.Typer(
    name="moegguf",
    help="Run Mixture-of-Experts GGUF models whose experts do not fit in fast memory.",
    add_completion=False,
    rich_markup_mode=None,  # rich would be a third of the time that --help takes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A GGUF file (of a split model the first), `demo`, or a name in MOEGGUF_MODELS."
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--expert-cache",
        metavar="BUDGET",
        help='Memory for experts: "auto", a share of them such as "50%", or a size such as "4GiB".'
        "  [default: MOEGGUF_EXPERT_CACHE, or auto]",
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option("--ctx", "-c", min=1, metavar="TOKENS", help="Context size.  [default: the model's, up to 4096]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]


Policy = Annotated[
    str,
    typer.Option(
        "--policy", metavar="NAME", help="Which experts stay: auto (what was measured to be best, else lru) or a name."
    ),
]
Predictor = Annotated[
    str | None,
    typer.Option(
        "--predictor", metavar="NAME", help="Which experts come next, such as skip or eamc.  [default: as measured]"
    ),
]
Prefetch = Annotated[
    bool | None,
    typer.Option("--prefetch/--no-prefetch", help="Fetch predicted experts ahead while that saves time."),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moegguf {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run Mixture-of-Experts GGUF models whose experts do not fit in fast memory."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    model: Model,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="The question; what is piped in goes before it.")
    ] = None,
    expert_cache: Cache = None,
    policy: Policy = "auto",
    predictor: Predictor = None,
    prefetch: Prefetch = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", min=1, metavar="N", help="CPU threads.  [default: all allowed]"),
    ] = None,
    ctx: Ctx = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Longest answer.  [default: until it ends]"),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeats an answer.  [default: random]")] = None,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, show_default=False, help="Statistics on stderr; twice: llama.cpp's log too."
        ),
    ] = 0,
) -> int:
    """Answer PROMPT on stdout; without one, chat.

    Everything that is not the answer goes to stderr.
    """
    from moegguf.engine.answer import Sampling
    from moegguf.faces import run as face

    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)
    options = face.LoadOptions(expert_cache, threads, ctx, verbose, policy, predictor, prefetch)
    return face.run(model, prompt or [], options, sampling)


@app.command()
def estimate(model: Model, expert_cache: Cache = None, ctx: Ctx = None, as_json: AsJson = False) -> None:
    """Say what would go where and what to expect, before loading."""
    from moegguf.faces.describe import estimate_model
    from moegguf.faces.display import print_estimate, print_json

    facts = estimate_model(model, expert_cache, ctx)
    print_json(facts) if as_json else print_estimate(facts)


@app.command()
def show(model: Model, as_json: AsJson = False) -> None:
    """Describe a model and its experts."""
    from moegguf.faces.describe import show_model
    from moegguf.faces.display import print_json, print_show

    facts = show_model(model)
    print_json(facts) if as_json else print_show(facts)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Measures the disk that this model is on.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a bug report needs: CPU, memory, disk speed, build, backends."""
    from moegguf.engine.doctor import diagnose
    from moegguf.faces.display import print_doctor, print_json

    facts = diagnose(model)
    print_json(facts) if as_json else print_doctor(facts)


app.command(short_help="Measure speed, hit rate, bytes and stalls.")(bench)
app.add_typer(trace)


def main(arguments: list[str] | None = None) -> int:
    """The entry point: runs a command and returns its exit code."""
    return guarded(lambda: app(arguments, prog_name="moegguf", standalone_mode=False))


if __name__ == "__main__":
    sys.exit(main())
