"""`moegguf trace`: record how a model routes, replay it with other policies, judge predictors, draw it all.

Results go to stdout, progress to stderr. Knows words, tables and flags; the work is in `engine.record` and
`engine.study`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegguf.errors import OptionError
from moegguf.faces.messages import say

if TYPE_CHECKING:
    from moegguf.engine.study import Study

trace = typer.Typer(
    name="trace",
    help="Record how a model routes; replay, judge and draw it.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

File = Annotated[Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, help="A recorded trace.")]
Policies = Annotated[list[str], typer.Option("--policy", help="Policies, with commas; all: every one there is.")]
Predictors = Annotated[list[str], typer.Option("--predictor", help="Predictors, with commas; all: every one there is.")]
Shares = Annotated[str, typer.Option("--expert-cache", metavar="SHARES", help="Shares of all experts, with commas.")]
ModelFile = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The model, for predictors that use its routers.")
]
Folder = Annotated[
    Path | None, typer.Option("--predictors", file_okay=False, exists=True, help="Folder of trained predictors.")
]
LinkSpeed = Annotated[
    float | None, typer.Option("--link", min=1e-6, metavar="GB/S", help="Speed of the modelled link to the experts.")
]
Latency = Annotated[float, typer.Option("--latency", min=0, metavar="US", help="Of one transfer on that link.")]
Compute = Annotated[float, typer.Option("--layer-compute", min=0, metavar="US", help="Compute time of one layer.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]

DEFAULT_SHARES = "10%,25%,50%,75%"


@trace.command()
def record(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, `demo`, or a name.")],
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            exists=True,
            dir_okay=False,
            help="Prompts: .jsonl (prompt, label, n_predict, completion) or plain text, one per paragraph.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace to write.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=0, metavar="N", help="To generate.")] = 128,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Also the vectors that enter the router: training needs them.")
    ] = False,
    expert_cache: Annotated[
        str | None, typer.Option("--expert-cache", metavar="BUDGET", help="Memory for them.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Who stays while recording.")] = "lru",
    predictor: Annotated[str | None, typer.Option(help="Who comes next while recording.")] = None,
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Decisions act at a fixed place, so that a replay repeats them exactly.")
    ] = False,
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, metavar="N")] = None,
    ctx: Annotated[int | None, typer.Option("--ctx", "-c", min=1, metavar="TOKENS")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T")] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N")] = 0,
) -> None:
    """Run MODEL over prompts and write down which experts every token was routed to."""
    from moegguf.engine.models import find_model
    from moegguf.engine.prompts import read_prompts
    from moegguf.engine.record import RecordOptions, record
    from moegguf.experts import read_layout
    from moegguf.faces.display import Waiting
    from moegguf.faces.run import context_size, silence

    path, questions = find_model(model), read_prompts(prompts)
    silence()
    with Waiting() as waiting:
        stats = record(
            path,
            questions,
            out,
            RecordOptions(max_tokens, inputs, temperature, seed),
            progress=lambda done, of: waiting.show(f"prompt {done + 1} of {of}", done / of),
            expert_cache=expert_cache,
            policy=policy,
            predictor=predictor,
            lockstep=lockstep,
            n_ctx=context_size(read_layout(path).hparams.n_ctx_train, ctx),
            n_threads=threads,
            verbose=False,
        )
    size_mb = out.stat().st_size / 1e6
    say(f"{out}: {len(questions)} requests, {stats.tokens} tokens, {size_mb:.1f} MB; hit rate {stats.hit_rate:.1%}")


def _study(path: Path, model: str | None, folder: Path | None) -> Study:
    from moegguf.engine.models import find_model
    from moegguf.engine.study import Study

    return Study.open(path, find_model(model) if model else None, folder)


def split(values: list[str]) -> list[str]:
    """Names given once with commas, or several times."""
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def parse_shares(text: str) -> list[float]:
    """ "10%,25%" as shares. Raises OptionError."""
    shares = []
    for word in split([text]):
        try:
            share = float(word.removesuffix("%")) / 100 if word.endswith("%") else float(word)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise OptionError(f"--expert-cache takes shares such as 10%,25%,50%, but not {word!r}.")
        shares.append(share)
    return shares


@trace.command()
def simulate(
    file: File,
    policy: Policies = ["all"],  # noqa: B006 (typer copies defaults)
    predictor: Predictors = ["none"],  # noqa: B006
    expert_cache: Shares = DEFAULT_SHARES,
    model: ModelFile = None,
    predictors: Folder = None,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    layer_compute: Compute = 0.0,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Act on predictions; with a modelled link.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result beside the model: what `--policy auto` goes by.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay TRACE with other policies and budgets: the same store and controller as live, no model and no disk."""
    from moegguf.engine.study import Timing
    from moegguf.faces.trace_tables import print_json, print_simulation

    study = _study(file, model, predictors)
    timing = Timing(link * 1e9, latency, layer_compute) if link else None
    results = study.simulate(
        study.policies(split(policy)), split(predictor), parse_shares(expert_cache), timing, prefetch, say
    )
    if save:
        say(f"saved {study.save(results)}")
    print_json(results) if as_json else print_simulation(results)


@trace.command()
def score(
    file: File,
    predictor: Predictors = ["all"],  # noqa: B006
    model: ModelFile = None,
    predictors: Folder = None,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    layer_compute: Compute = 1000.0,
    as_json: AsJson = False,
) -> None:
    """Judge predictors on TRACE by the measures of each paper, beside the same trace with its order destroyed."""
    from moegguf.engine.study import Timing
    from moegguf.faces.trace_tables import print_json, print_score

    study = _study(file, model, predictors)
    timing = Timing(link * 1e9, latency, layer_compute) if link else None
    table = study.score(study.predictors(split(predictor)), timing)
    print_json(table) if as_json else print_score(table)


@trace.command()
def report(
    file: File,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")],
    expert_cache: Shares = DEFAULT_SHARES,
    model: ModelFile = None,
    predictors: Folder = None,
    layer_compute: Compute = 1000.0,
) -> None:
    """Write one page about TRACE: heatmaps, reuse, hit rates with Belady's bound, accuracy, stalls, recovery."""
    from moegguf.faces.report import write_report

    study = _study(file, model, predictors)
    write_report(out, study.report(parse_shares(expert_cache), layer_compute, say))
    say(f"wrote {out}")
