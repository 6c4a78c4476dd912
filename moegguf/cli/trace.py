"""`moegguf trace`: record a model's routing, and replay it with other policies and budgets.

Results go to stdout, progress to stderr. Flags and tables only; the work is in `bench.record` and `trace.analysis`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from moegguf.cli.bench import split
from moegguf.cli.options import AsJson, Command, Given, flags
from moegguf.errors import OptionError
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.trace.analysis import Progress, Row, TraceAnalysis
    from moegguf.trace.simulate import SimOptions

trace = typer.Typer(name="trace", rich_markup_mode=None)


@trace.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Record a model's routing; replay it with other policies and budgets."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, `demo`, or a name in MOEGGUF_MODELS.")]
PromptsFile = Annotated[
    Path,
    typer.Option(
        "--prompts",
        exists=True,
        dir_okay=False,
        help="A .jsonl with a prompt per line (prompt, label, n_predict, completion), or text, one per paragraph.",
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", "-n", min=0, metavar="N", help="Longest answer, unless the prompt sets one; 0: prompts only."
    ),
]
RecordCtx = Annotated[
    int | None,
    typer.Option("--ctx", "-c", min=1, metavar="TOKENS", help="Context size.  [default: the model's, up to 4096]"),
]
Out = Annotated[Path, typer.Option("--out", "-o", dir_okay=False, metavar="FILE", help="The file to write.")]
File = Annotated[Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, help="A recorded trace.")]
Policies = Annotated[
    list[str],
    typer.Option(
        "--policy",
        metavar="NAMES",
        help="Policies, separated by commas, or all; with --vram-cache also vram=NAME,ram=NAME.  [default: all]",
    ),
]
Strategies = Annotated[
    list[str],
    typer.Option(
        "--strategy",
        metavar="NAMES",
        help="Whole strategies, separated by commas, or all: none, lru, moe-infinity, promoe, expertflow, duoserve,"
        " moegguf. --policy, --predictor and --prefetch then name one part that replaces theirs.",
    ),
]
Predictors = Annotated[
    list[str],
    typer.Option("--predictor", metavar="NAMES", help="Predictors, separated by commas, or all.  [default: none]"),
]
Shares = Annotated[
    str,
    typer.Option("--expert-cache", metavar="SHARES", help="Pool sizes as shares of all experts, separated by commas."),
]
VramShares = Annotated[
    str | None,
    typer.Option(
        "--vram-cache",
        metavar="SHARES",
        help="A GPU's memory for experts, as shares of all, separated by commas; --expert-cache is RAM below it."
        " Prompts are staged in a part of it. With --tensor-split of all GPUs, or of each.  [default: no GPU]",
    ),
]
DeviceLink = Annotated[
    list[str],
    typer.Option(
        "--device-link", metavar="LINK", help="A modelled link from RAM to the GPU: 24GB/s,35us; one for each."
    ),
]
TensorSplit = Annotated[
    str | None, typer.Option("--tensor-split", "-ts", metavar="N,N", help="Layers of several GPUs, in proportion: 3,1.")
]
ModelFile = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The recorded model, for predictors that use its routers."),
]
Folder = Annotated[
    Path | None,
    typer.Option("--predictors", metavar="FOLDER", file_okay=False, exists=True, help="Folder of trained predictors."),
]
LinkSpeed = Annotated[
    float | None, typer.Option("--link", min=1e-6, metavar="GB/S", help="Speed of a modelled link to the experts.")
]
Latency = Annotated[float, typer.Option("--latency", min=0, metavar="US", help="Of one transfer on that link.")]
Compute = Annotated[
    float,
    typer.Option("--layer-compute", min=0, metavar="US", help="Compute time per layer and token on the modelled link."),
]
Tokens = Annotated[
    int, typer.Option("--tokens", min=0, metavar="N", help="Replay whole requests with about N decoded tokens; 0: all.")
]

DEFAULT_SHARES = "10%,25%,50%,75%"


@contextmanager
def showing_progress() -> Iterator[Progress]:
    """Yields a progress callback: a bar on a terminal, elsewhere a line per stage."""
    from moegguf.terminal.progress import ProgressBar

    last, interrupted = "", False

    def show(step: str, share: float) -> None:
        nonlocal last
        if interrupted:  # a KeyboardInterrupt in a callback from C is lost
            raise KeyboardInterrupt
        bar.show(step, share)
        stage, _, detail = step.partition(":")
        if detail and stage != last and not bar.visible:
            print_message(f"{stage} ...")
        last = stage

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with ProgressBar() as bar:
            yield show
    finally:
        signal.signal(signal.SIGINT, before)


def check_writable(out: Path, *sources: Path) -> None:
    """Raises OptionError when `out` cannot be written, before any work is done."""
    if not out.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {str(out.parent)!r} for --out; make it first.")
    if out.exists() and any(out.samefile(source) for source in sources):
        raise OptionError(f"--out {str(out)!r} would overwrite an input file; give another name.")


def parse_shares(text: str, option: str = "--expert-cache", of_each: bool = False) -> list[float]:
    """ "10%,25%" as shares: without duplicates, but where they are `of_each` of several. Raises OptionError."""
    shares = []
    for word in split([text]) or [text]:
        try:
            share = float(word.removesuffix("%")) / 100 if word.endswith("%") else float(word)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise OptionError(f"{option} takes shares such as 10%,25%,50%, each above 0%, but not {word!r}.")
        shares.append(share)
    return shares if of_each else list(dict.fromkeys(shares))


def _parse_tensor_split(text: str | None) -> list[float]:
    try:
        return [float(word) for word in text.split(",")] if text is not None else []
    except ValueError:
        raise OptionError(f"--tensor-split takes proportions such as 3,1, but not {text!r}.") from None


def _sim_options(link: float | None, latency: float, layer_compute: float) -> SimOptions:
    """Options of a replay; without a link in GB/s transfers take no time."""
    from moegguf.trace.simulate import SimOptions

    return SimOptions(link_bytes_per_s=(link or 0) * 1e9, link_latency_s=latency / 1e6, layer_compute_us=layer_compute)


@trace.command(cls=Command, short_help="Record the routing of a model.")
@flags("expert_cache", "n_threads", "draft")
def record(
    model: Model,
    prompts: PromptsFile,
    out: Out,
    max_tokens: MaxTokens = 128,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Also record the routers' input vectors, which training and skip need.")
    ] = False,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Eviction policy while recording.")] = "lru",
    predictor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Predictor while recording.  [default: none]")
    ] = None,
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Apply decisions at fixed points, so that a replay repeats them; slow.")
    ] = False,
    ctx: RecordCtx = None,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    *,
    given: Given,
) -> None:
    """Run MODEL over prompts and record which experts every token was routed to.

    Each prompt is a separate request. Ctrl-C writes no file.
    """
    from moegguf.bench.record import RecordOptions, record
    from moegguf.gguf.experts import read_layout
    from moegguf.models.catalog import find_model
    from moegguf.quantities import format_bytes
    from moegguf.settings import read_settings
    from moegguf.terminal.loading import context_size, silence_llama_log
    from moegguf.trace.prompts import read_prompts

    check_writable(out, prompts)
    path, prompt_list = find_model(model), read_prompts(prompts)
    silence_llama_log()
    with showing_progress() as progress:
        stats = record(
            path,
            prompt_list,
            out,
            RecordOptions(max_tokens, inputs, temperature, seed),
            progress=progress,
            policy=policy,
            predictor=predictor,
            lockstep=lockstep,
            n_ctx=context_size(read_layout(path), ctx),
            flash_attn=read_settings().flash_attention,
            verbose=False,
            **given,
        )
    size = format_bytes(out.stat().st_size)
    print_message(f"{out}: {len(prompt_list)} request(s), {stats.tokens} tokens, {size}; hit rate {stats.hit_rate:.1%}")


@trace.command(cls=Command, short_help="Replay with other policies and budgets.")
def simulate(
    file: File,
    strategy: Strategies = [],
    policy: Policies = [],
    predictor: Predictors = [],
    expert_cache: Shares = DEFAULT_SHARES,
    vram_cache: VramShares = None,
    tokens: Tokens = 0,
    model: ModelFile = None,
    predictors: Folder = None,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    device_link: DeviceLink = [],
    tensor_split: TensorSplit = None,
    layer_compute: Compute = 0.0,
    prefetch: Annotated[
        bool | None, typer.Option("--prefetch/--no-prefetch", help="Act on predictions; with --link.")
    ] = None,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Save beside the model what `auto` chooses by, half of the requests; the others are reported, one"
            " behind the other, and for `estimate` also each from an empty cache.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay TRACE with other policies and budgets: the same store and controller as live, no model and no disk.

    With --vram-cache layers compute on a GPU, with experts there over experts in RAM; with --tensor-split on several.
    """
    from moegguf.cli.trace_tables import print_simulation, print_tiers
    from moegguf.controller.prefetch import PrefetchOptions
    from moegguf.engine.simulated_devices import simulated_budgets
    from moegguf.models.catalog import find_model
    from moegguf.plain import plain
    from moegguf.terminal.tables import print_json
    from moegguf.trace.analysis import TraceAnalysis

    shares = parse_shares(expert_cache)
    full = TraceAnalysis.open(file, find_model(model) if model else None, predictors)
    analysis, options = full.limited(tokens), _sim_options(link, latency, layer_compute)
    if not strategy:
        options = replace(options, prefetch=PrefetchOptions() if prefetch else None)
    if vram_cache is not None:
        if save or strategy:
            raise OptionError("--save and --strategy are about slots in RAM alone: leave out --vram-cache.")
        parts = _tier_policies(policy), split(predictor) if predictor else ["none"]
        of_vram = parse_shares(vram_cache, "--vram-cache", of_each=tensor_split is not None)
        budgets = simulated_budgets(analysis.trace.shape, of_vram, _parse_tensor_split(tensor_split), device_link)
        with showing_progress() as progress:
            results = analysis.simulate_tiers(*parts, budgets, shares, options, progress)
        print_json(plain(results)) if as_json else print_tiers(results, analysis.sample_size(full))
        return
    of_gpus = {"--device-link": bool(device_link), "--tensor-split": tensor_split is not None}
    of_gpus["--policy vram=NAME,ram=NAME"] = any("=" in text for text in policy)
    for flag, given in of_gpus.items():
        if given:
            raise OptionError(f"{flag} is about GPUs, whose share of the experts is missing: --vram-cache.")
    if save and strategy:
        raise OptionError("--save is for policies and predictors, from which `auto` chooses, not for --strategy.")
    choosing, reported = analysis.halves() if save else (analysis, analysis)
    with showing_progress() as progress:
        results = _simulated(reported, strategy, policy, predictor, shares, options, prefetch, progress)
        if save:
            chosen_by = _simulated(choosing, strategy, policy, predictor, shares, options, prefetch, progress)
            alone = [
                row
                for request in reported.each()
                for row in _simulated(request, strategy, policy, predictor, shares, options, prefetch, progress)
            ]
    if as_json:
        print_json(plain(results))
    else:
        print_simulation(results, reported.sample_size(full))
    if save:
        path = choosing.save(chosen_by, results, alone)
        print_message(f"saved {path}: auto chooses by {choosing.sample_size(full)}; reported are others")


def _tier_policies(texts: list[str]) -> list[str]:
    """Policies of two tiers: a text with an "=" is one, of others each name."""
    return [name for text in texts for name in ([text] if "=" in text else split([text]))] or ["all"]


def _simulated(
    analysis: TraceAnalysis,
    strategies: list[str],
    policies: list[str],
    predictors: list[str],
    shares: list[float],
    options: SimOptions,
    prefetch: bool | None,
    progress: Progress,
) -> list[Row]:
    """The replays of strategies, or else of all policies with all predictors named."""
    named, ahead = split(policies), split(predictors)
    if not strategies:
        named, ahead = named if policies else ["all"], ahead if predictors else ["none"]
        return analysis.simulate(named, ahead, shares, options, progress)
    if len(named) > 1 or len(ahead) > 1:
        raise OptionError("beside --strategy, --policy and --predictor take one name each, which replaces its own.")
    parts = named[0] if named else "auto", ahead[0] if ahead else None
    return analysis.simulate_strategies(split(strategies), shares, options, *parts, prefetch, progress)
