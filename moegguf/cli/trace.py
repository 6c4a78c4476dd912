"""`moegguf trace`: record how a model routes, replay it with other policies, judge predictors, draw it all.

Results go to stdout, progress to stderr. Knows words, tables and flags; the work is in `bench.record`
and `trace.analysis`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from moegguf.cli.bench import split
from moegguf.errors import OptionError
from moegguf.terminal.messages import say

if TYPE_CHECKING:
    from moegguf.trace.analysis import Progress, Timing, TraceAnalysis

trace = typer.Typer(
    name="trace",
    help="Record routing; replay, judge and draw it.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, `demo`, or a name in MOEGGUF_MODELS.")]
PromptsFile = Annotated[
    Path,
    typer.Option(
        "--prompts",
        exists=True,
        dir_okay=False,
        help="A .jsonl with a prompt a line (prompt, label, n_predict, completion), or plain text, one a paragraph.",
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--expert-cache", metavar="BUDGET", help='Memory for experts while recording: "auto", "50%" or "4GiB".'
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", dir_okay=False, metavar="FILE", help="The file to write.")]
File = Annotated[Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, help="A recorded trace.")]
Policies = Annotated[
    list[str], typer.Option("--policy", metavar="NAMES", help="Policies, with commas; all: every one there is.")
]
Predictors = Annotated[
    list[str], typer.Option("--predictor", metavar="NAMES", help="Predictors, with commas; all: every one there is.")
]
Shares = Annotated[
    str,
    typer.Option("--expert-cache", metavar="SHARES", help="How many of all experts there is room for, with commas."),
]
ModelFile = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The recorded model, for predictors that use its routers."),
]
Folder = Annotated[
    Path | None,
    typer.Option("--predictors", metavar="FOLDER", file_okay=False, exists=True, help="Where trained predictors lie."),
]
LinkSpeed = Annotated[
    float | None, typer.Option("--link", min=1e-6, metavar="GB/S", help="Speed of a modelled link to the experts.")
]
Latency = Annotated[float, typer.Option("--latency", min=0, metavar="US", help="Of one transfer on that link.")]
Compute = Annotated[
    float, typer.Option("--layer-compute", min=0, metavar="US", help="What a layer computes for a token, with --link.")
]
Tokens = Annotated[
    int,
    typer.Option(
        "--tokens", min=0, metavar="N", help="Replay and score whole requests with about N decoded tokens; 0: all."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]

DEFAULT_SHARES = "10%,25%,50%,75%"
DEFAULT_TOKENS = 2500  # enough for figures of a percent, and done in a minute or two


@contextmanager
def progressing() -> Iterator[Progress]:
    """Shows progress: a bar on a terminal; elsewhere a line for every stage."""
    from moegguf.terminal.tables import Waiting

    last = ""

    def show(what: str, share: float) -> None:
        nonlocal last
        if interrupted.is_set():  # Ctrl-C while C called back into Python: its KeyboardInterrupt was lost there
            raise KeyboardInterrupt
        waiting.show(what, share)
        stage, _, detail = what.partition(":")
        if detail and stage != last and not waiting.visible:
            say(f"{stage} ...")
        last = stage

    with noticing_interrupts() as interrupted, Waiting() as waiting:
        yield show


@contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C raises KeyboardInterrupt as ever, and is remembered."""
    interrupted = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def check_writable(out: Path, *sources: Path) -> None:
    """Raises OptionError when `out` cannot become a file, before hours went into it."""
    if not out.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {str(out.parent)!r} for --out; make it first.")
    if out.exists() and any(out.samefile(source) for source in sources):
        raise OptionError(f"--out {str(out)!r} would overwrite what is read; give another file.")


def parse_shares(text: str) -> list[float]:
    """ "10%,25%" as shares, each once. Raises OptionError."""
    shares = []
    for word in split([text]) or [text]:
        try:
            share = float(word.removesuffix("%")) / 100 if word.endswith("%") else float(word)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise OptionError(f"--expert-cache takes shares such as 10%,25%,50%, each above 0%, but not {word!r}.")
        shares.append(share)
    return list(dict.fromkeys(shares))


def _study(path: Path, model: str | None, folder: Path | None) -> TraceAnalysis:
    from moegguf.models.catalog import find_model
    from moegguf.trace.analysis import TraceAnalysis

    return TraceAnalysis.open(path, find_model(model) if model else None, folder)


def _timing(link: float | None, latency: float, layer_compute: float) -> Timing | None:
    from moegguf.trace.analysis import Timing

    return Timing(link * 1e9, latency, layer_compute) if link else None


@trace.command(short_help="Run a model, write down its routing.")
def record(
    model: Model,
    prompts: PromptsFile,
    out: Out,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            "-n",
            min=0,
            metavar="N",
            help="Longest answer, where a prompt does not say; 0: prompts only.",
        ),
    ] = 128,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Also the vectors that enter the routers: training and skip need them.")
    ] = False,
    expert_cache: Cache = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Which experts stay while recording.")] = "lru",
    predictor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which experts come next while recording.  [default: none]")
    ] = None,
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Decisions act at a fixed place, so that a replay repeats them; slow.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, metavar="N", help="CPU threads.  [default: all allowed]")
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option("--ctx", "-c", min=1, metavar="TOKENS", help="Context size.  [default: the model's, up to 4096]"),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N", help="Repeats the answers.")] = 0,
) -> None:
    """Run MODEL over prompts and write down which experts every token was routed to.

    Each prompt is a request of its own. Stopped with Ctrl-C, it leaves no file.
    """
    from moegguf.bench.record import RecordOptions, record
    from moegguf.gguf.experts import read_layout
    from moegguf.models.catalog import find_model
    from moegguf.quantities import format_bytes
    from moegguf.terminal.loading import context_of, silence
    from moegguf.trace.prompts import read_prompts

    check_writable(out, prompts)
    path, questions = find_model(model), read_prompts(prompts)
    silence()
    with progressing() as progress:
        stats = record(
            path,
            questions,
            out,
            RecordOptions(max_tokens, inputs, temperature, seed),
            progress=progress,
            expert_cache=expert_cache,
            policy=policy,
            predictor=predictor,
            lockstep=lockstep,
            n_ctx=context_of(read_layout(path), ctx),
            n_threads=threads,
            verbose=False,
        )
    size = format_bytes(out.stat().st_size)
    say(f"{out}: {len(questions)} request(s), {stats.tokens} tokens, {size}; hit rate {stats.hit_rate:.1%}")


@trace.command(short_help="Replay with other policies and budgets.")
def simulate(
    file: File,
    policy: Policies = ["all"],  # noqa: B006 (typer copies defaults)
    predictor: Predictors = ["none"],  # noqa: B006
    expert_cache: Shares = DEFAULT_SHARES,
    tokens: Tokens = 0,
    model: ModelFile = None,
    predictors: Folder = None,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    layer_compute: Compute = 0.0,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Act on predictions; with --link.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result beside the model: what `--policy auto` goes by.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay TRACE with other policies and budgets: the same store and controller as live, no model and no disk."""
    from moegguf.cli.trace_tables import print_simulation
    from moegguf.terminal.tables import print_json
    from moegguf.trace.report import plain

    shares, whole = parse_shares(expert_cache), _study(file, model, predictors)
    study = whole.limited(tokens)
    with progressing() as progress:
        results = study.simulate(
            split(policy), split(predictor), shares, _timing(link, latency, layer_compute), prefetch, progress
        )
    if as_json:
        print_json(plain(results))
    else:
        print_simulation(results, study.used(whole))
    if save:
        say(f"saved {study.save(results)}")


@trace.command(short_help="Judge predictors.")
def score(
    file: File,
    predictor: Predictors = ["all"],  # noqa: B006
    tokens: Tokens = DEFAULT_TOKENS,
    model: ModelFile = None,
    predictors: Folder = None,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    layer_compute: Compute = 1000.0,
    as_json: AsJson = False,
) -> None:
    """Judge predictors on TRACE by the measures of each paper, beside the same trace with its order destroyed."""
    from moegguf.cli.trace_tables import print_score
    from moegguf.terminal.tables import print_json
    from moegguf.trace.report import plain

    whole = _study(file, model, predictors)
    study = whole.limited(tokens)
    with progressing() as progress:
        table = study.score(split(predictor), _timing(link, latency, layer_compute), progress)
    if as_json:
        print_json(plain(table) | {"used": study.used(whole)})
    else:
        print_score(table, study.used(whole))


@trace.command(short_help="Draw it all on one page.")
def report(
    file: File,
    out: Out,
    expert_cache: Shares = DEFAULT_SHARES,
    tokens: Tokens = DEFAULT_TOKENS,
    model: ModelFile = None,
    predictors: Folder = None,
    layer_compute: Compute = 1000.0,
) -> None:
    """Write one page about TRACE: heatmaps, reuse, hit rates with Belady's bound, accuracy, stalls, recovery.

    Every policy and predictor is replayed: that takes a minute or two, and longer with more --tokens.
    """
    from moegguf.cli.report.page import write_report
    from moegguf.cli.report.svg import require_matplotlib
    from moegguf.engine.machine import read_machine
    from moegguf.trace.analysis import build_report

    require_matplotlib()
    check_writable(out, file)
    shares, study = parse_shares(expert_cache), _study(file, model, predictors)
    say(f"replaying and scoring {study.limited(tokens).used(study)}")
    with progressing() as progress:
        found = build_report(study, shares, layer_compute, tokens, read_machine().cpu_model, progress)
    write_report(out, found)
    say(f"wrote {out}")
