"""`moegguf trace`: record a model's routing or import it, and replay it with other
policies and budgets.

Results go to stdout, progress to stderr. This module has the flags; `bench.record`,
`trace.importing` and `trace.analysis` do the work, and `trace_tables` prints the
tables.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegguf.atomic_write import can_be_replaced
from moegguf.cli.bench import parse_ints, split
from moegguf.cli.options import (
    EXISTING_FILE,
    AsJson,
    Command,
    Flag,
    Given,
    argument,
    flags,
    model_argument,
)
from moegguf.controller.own_classes import names_file
from moegguf.errors import OptionError
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.native.store import DeviceSlots
    from moegguf.trace.analysis import Progress, Row, TraceAnalysis

trace = typer.Typer(name="trace", rich_markup_mode=None)


@trace.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Record a model's routing or import it; replay it with other policies and
    budgets."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Model = Annotated[
    str, model_argument("A GGUF file, `demo`, or a name in MOEGGUF_MODELS.")
]
Files = Annotated[
    list[Path], argument("FILES", "Files with recorded routing.", **EXISTING_FILE)
]
File = Annotated[Path, argument("TRACE", "A recorded trace.", **EXISTING_FILE)]

RECORD_FLAGS = (
    Flag("--prompts", "FILE",
        "A .jsonl file with one prompt per line (prompt, label, n_predict, completion), or a text file with one"
        " prompt per paragraph.",
        ..., Path, EXISTING_FILE),
    Flag("--out -o", "FILE", "The file to write.", ..., Path, {"dir_okay": False}),
    Flag("--max-tokens -n", "N",
        "Maximum length of an answer in tokens, unless the prompt sets one. 0: prompts only.", 128, int, {"min": 0}),
    Flag("--inputs", None,
        "Also record the routers' input vectors, which training and the predictor skip need.", False),
    Flag("--policy", "NAME",
        "Policy that decides which experts are evicted during the recording: a name, auto, or FILE.py:CLASS for a"
        " class that you wrote.", "lru"),
    Flag("--predictor", "NAME",
        "Predictor of experts during the recording: a name such as skip or eamc, or FILE.py:CLASS for a class that you"
        " wrote.  [default: the predictor measured with the policy, else none]"),
    Flag("--lockstep", None,
        "Apply decisions at fixed points, so that a replay can repeat them. Slow.", False),
    Flag("--ctx -c", "TOKENS", "Context length in tokens.  [default: the model's, up to 4096]", None,
        int, {"min": 1}),
    Flag("--temperature", "T", "Randomness of the answers. 0: always the likeliest token.", 0.8,
        float, {"min": 0.0}),
    Flag("--seed", "N", "Random seed.", 0),
)  # fmt: skip
IMPORT_FLAGS = (
    Flag("--out -o", "FILE", "The trace to write.", ..., Path, {"dir_okay": False}),
    Flag("--model", "MODEL",
        "The recorded model as GGUF, whose shape the trace gets in place of the following."),
    Flag("--experts", "N", "Number of experts per layer.", None, int, {"min": 1}),
    Flag("--used", "N", "Number of experts that a token uses in a layer.", None, int, {"min": 1}),
    Flag("--layers", "N,...",
        "Indices of the layers with experts, such as 1-26.  [default: from 0 on]"),
    Flag("--expert-size", "SIZE", "Size of one expert, such as 9MiB."),
    Flag("--prompt-tokens", "N", "Number of prompt tokens, for files that do not state it.",
        1, int, {"min": 0}),
)  # fmt: skip
FORMATS = ("table", "csv", "json")
# Load options of every command that records routing.
LOADING = ("expert_cache", "n_threads")
SIMULATE_FLAGS = (
    Flag("--strategy", "NAMES",
        "Strategies, separated by commas, or all: none, lru, moe-infinity, promoe, expertflow, duoserve, moegguf."
        " Each of --policy, --predictor and --prefetch then replaces one part of a strategy.", []),
    Flag("--policy", "NAMES",
        "Policies, separated by commas, or all: names, FILE.py:CLASS, or with --vram-cache also vram=NAME,ram=NAME."
        "  [default: all]", []),
    Flag("--predictor", "NAMES",
        "Predictors, separated by commas, or all: names, or FILE.py:CLASS.  [default: none]", []),
    Flag("--expert-cache", "SHARES",
        "Pool sizes as shares of all experts, separated by commas.", "10%,25%,50%,75%"),
    Flag("--vram-cache", "SHARES",
        "GPU memory for experts, as shares of all experts, separated by commas. --expert-cache is then the RAM"
        " below it. A part of this memory stages prompts. With --tensor-split: the share of all GPUs, or one share"
        " per GPU.  [default: no GPU]"),
    Flag("--tokens", "N",
        "Replay whole requests with about N decoded tokens in total. 0: all requests.", 0, int, {"min": 0}),
    Flag("--model", "MODEL", "The recorded model, for predictors that use its routers."),
    Flag("--predictors", "FOLDER", "Folder with trained predictors.",
        None, Path, {"file_okay": False, "exists": True}),
    Flag("--link", "GB/S", "Speed of a simulated link to the experts.",
        None, float, {"min": 1e-6}),
    Flag("--latency", "US", "Latency of one transfer on that link.", 0.0, float, {"min": 0}),
    Flag("--device-link", "LINK",
        "A simulated link from RAM to the GPU, such as 24GB/s,35us. May be repeated, once per GPU.", []),
    Flag("--tensor-split -ts", "N,N",
        "Proportions in which several GPUs share the layers, such as 3,1."),
    Flag("--layer-compute", "US",
        "Compute time per layer and token with a simulated link.", 0.0, float, {"min": 0}),
    Flag("--prefetch/--no-prefetch", None,
        "Fetch the predicted experts. Without --link, every expert that is fetched ahead arrives in time.", None,
        bool),
    Flag("--output -o", "FORMAT", "Output format: table, csv (with all counters) or json.", "table"),
    Flag("--save", None,
        "Use half of the requests to choose what `auto` uses, and save the choice beside the model. Report the"
        " other half, in sequence and, for `estimate`, each request also from an empty cache.", False),
)  # fmt: skip


@contextmanager
def showing_progress() -> Iterator[Progress]:
    """Context manager that yields a callback. The callback shows progress: one changing
    line on a terminal, otherwise a line for each stage."""
    from moegguf.terminal.progress import Spinner

    last = ""
    interrupted = False

    def show(step: str, share: float) -> None:
        nonlocal last
        if interrupted:  # re-raised, since an exception in a callback from C is lost
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
        with Spinner() as bar:
            yield show
    finally:
        signal.signal(signal.SIGINT, before)


def check_writable(out: Path, *sources: Path) -> None:
    """Raises OptionError if the folder of `out` does not exist, if `out` exists but is
    not a regular file, or if `out` is one of `sources`. Called before any work is
    done."""
    if not out.absolute().parent.is_dir():
        raise OptionError(
            f"there is no folder {str(out.parent)!r} for --out; create it first."
        )
    if not can_be_replaced(out):
        raise OptionError(
            f"--out must name a file, but {str(out)!r} is not a regular file; give a file's path, not a folder, pipe or"
            " device."
        )
    if out.exists() and any(out.samefile(source) for source in sources):
        raise OptionError(
            f"--out {str(out)!r} would overwrite an input file; give another name."
        )


def parse_shares(
    text: str, option: str = "--expert-cache", of_each: bool = False
) -> list[float]:
    """Parses shares such as "10%,25%" or "0.1". Removes duplicates unless `of_each` is
    True, which means that each share belongs to one of several devices. Raises
    OptionError for a share that is not above 0% and up to 100%."""
    shares = []
    for word in split([text]) or [text]:
        try:
            share = (
                float(word.removesuffix("%")) / 100
                if word.endswith("%")
                else float(word)
            )
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise OptionError(
                f"{option} must be shares such as '10%,25%,50%', each above 0% and up to 100%, but contains {word!r}."
            )
        shares.append(share)
    return shares if of_each else list(dict.fromkeys(shares))


@trace.command(cls=Command, short_help="Record the routing of a model.")
@flags(*LOADING, "draft", own=RECORD_FLAGS)
def record(model: Model, *, given: Given, **chosen: Any) -> None:
    """Run MODEL on prompts and record the experts that every token is routed to.

    Each prompt is a separate request. Ctrl-C writes no file.
    """
    from moegguf.bench.record import RecordOptions, record
    from moegguf.gguf.experts import read_layout
    from moegguf.models.catalog import find_model
    from moegguf.quantities import format_bytes
    from moegguf.terminal.loading import warn_of_long_context
    from moegguf.trace.prompts import read_prompts

    out = chosen["out"]
    prompts = chosen["prompts"]
    check_writable(out, prompts)
    path = find_model(model)
    prompt_list = read_prompts(prompts)
    layout = read_layout(path)
    warn_of_long_context(layout.hparams.n_ctx_train, chosen["ctx"])
    with showing_progress() as progress:
        stats = record(
            path,
            prompt_list,
            out,
            RecordOptions(
                *(
                    chosen[name]
                    for name in ("max_tokens", "inputs", "temperature", "seed")
                )
            ),
            progress=progress,
            n_ctx=chosen["ctx"] or None,
            **{name: chosen[name] for name in ("policy", "predictor", "lockstep")},
            **given,
        )
    size = format_bytes(out.stat().st_size)
    print_message(
        f"{out}: {len(prompt_list)} request(s), {stats.tokens} tokens, {size}; hit rate {stats.hit_rate:.1%}"
    )


@trace.command(
    "import", cls=Command, short_help="Convert routing that another program recorded."
)
@flags(own=IMPORT_FLAGS)
def import_(files: Files, *, given: Given, **chosen: Any) -> None:
    """Convert routing that transformers, vLLM or another program recorded in FILES to a
    trace.

    An array file (.npz, .npy, .safetensors) holds one request, and a table (.csv,
    .jsonl) any number of requests. See docs/testbed.md.
    """
    from moegguf.models.catalog import find_model
    from moegguf.quantities import parse_size
    from moegguf.trace.importing import ImportOptions, import_trace

    out = chosen["out"]
    check_writable(out, *files)
    layers = chosen["layers"]
    size = chosen["expert_size"]
    try:
        expert_bytes = parse_size(size) if size else None
    except ValueError as error:
        raise OptionError(f"--expert-size: {error}.") from None
    options = ImportOptions(
        find_model(chosen["model"]) if chosen["model"] else None,
        chosen["experts"],
        chosen["used"],
        tuple(parse_ints([layers], "--layers")) if layers else None,
        expert_bytes,
        chosen["prompt_tokens"],
    )
    made = import_trace(files, out, options)
    print_message(f"{out}: {len(made.sequences())} request(s), {made.n_tokens} tokens")


@trace.command(cls=Command, short_help="Print a summary of a trace.")
def show(file: File, as_json: AsJson = False) -> None:
    """Print the shape of TRACE, its requests, and their reuse of experts."""
    from moegguf.cli.trace_tables import print_summary
    from moegguf.terminal.tables import print_json
    from moegguf.trace.format import read
    from moegguf.trace.summary import summary

    found = summary(read(file))
    print_json(found) if as_json else print_summary(found)


@trace.command(cls=Command, short_help="Replay with other policies and budgets.")
@flags(own=SIMULATE_FLAGS)
def simulate(
    file: File, as_json: AsJson = False, *, given: Given, **chosen: Any
) -> None:
    """Replay TRACE with other policies and budgets. The store and the controller are
    the real ones; there is no model and no disk. Every expert has the average size of
    the model's experts.

    With --vram-cache, a simulated GPU has a cache of experts above the cache in RAM.
    With --tensor-split, several GPUs share the layers.
    """
    from moegguf.cli.trace_tables import as_csv, print_simulation, print_tiers
    from moegguf.controller.prefetch import PrefetchOptions
    from moegguf.models.catalog import find_model
    from moegguf.terminal.tables import print_json
    from moegguf.trace.analysis import TraceAnalysis
    from moegguf.trace.simulate import SimOptions

    model = chosen["model"]
    output = "json" if as_json else chosen["output"]
    strategies = split(chosen["strategy"])
    save = chosen["save"]
    prefetch = chosen["prefetch"]
    # A value with "=" has the policies of two tiers (vram=NAME,ram=NAME), so its comma
    # does not separate values.
    policies = [
        name
        for text in chosen["policy"]
        for name in ([text] if "=" in text else split([text]))
    ]
    predictors = split(chosen["predictor"])
    _check(chosen, strategies, policies, predictors)
    shares = parse_shares(chosen["expert_cache"])
    full = TraceAnalysis.open(
        file, find_model(model) if model else None, chosen["predictors"]
    )
    analysis = full.limited(chosen["tokens"])
    options = SimOptions(
        link_bytes_per_s=(chosen["link"] or 0) * 1e9,  # 0: transfers take no time
        link_latency_s=chosen["latency"] / 1e6,
        layer_compute_us=chosen["layer_compute"],
    )
    if not strategies:
        options = replace(options, prefetch=PrefetchOptions() if prefetch else None)

    def print_rows(
        rows: list[Row], as_table: Callable[[list[Row], str], None], used: str
    ) -> None:
        if output == "csv":
            typer.echo(as_csv(rows), nl=False)
        elif output == "json":
            print_json(rows)
        else:
            as_table(rows, used)

    named = (
        policies if chosen["policy"] else ["all"],
        predictors if chosen["predictor"] else ["none"],
    )
    if chosen["vram_cache"] is not None:
        with showing_progress() as progress:
            rows = analysis.simulate_tiers(
                *named, _device_budgets(analysis, chosen), shares, options, progress
            )
        print_rows(rows, print_tiers, analysis.sample_size(full))
        return
    choosing, reported = analysis.halves() if save else (analysis, analysis)
    with showing_progress() as progress:

        def replayed(of: TraceAnalysis) -> list[Row]:
            if not strategies:
                return of.simulate(*named, shares, options, progress)
            parts = (
                policies[0] if policies else "auto",
                predictors[0] if predictors else None,
            )
            return of.simulate_strategies(
                strategies, shares, options, *parts, prefetch, progress
            )

        results = replayed(reported)
        if save:
            chosen_by = replayed(choosing)
            alone = [row for request in reported.each() for row in replayed(request)]
    print_rows(results, print_simulation, reported.sample_size(full))
    if save:
        path = choosing.save(chosen_by, results, alone)
        print_message(
            f"saved {path}: auto chooses by {choosing.sample_size(full)}; reported are others"
        )


def _check(
    chosen: Mapping[str, Any],
    strategies: list[str],
    policies: list[str],
    predictors: list[str],
) -> None:
    """Raises OptionError for an unknown output format, for options that exclude each
    other, and for options that need another option."""
    if chosen["output"] not in FORMATS:
        raise OptionError(
            f"-o must be one of {', '.join(FORMATS)}, but is {chosen['output']!r:.40}."
        )
    if chosen["save"] and any(map(names_file, (*policies, *predictors))):
        raise OptionError(
            "--save measures for `auto`, which chooses built-in policies and predictors; leave out FILE.py:CLASS."
        )
    if chosen["vram_cache"] is not None:
        if chosen["save"] or strategies:
            raise OptionError(
                "--save and --strategy apply only to slots in RAM; leave out --vram-cache."
            )
        return
    of_gpus = {
        "--device-link": bool(chosen["device_link"]),
        "--tensor-split": chosen["tensor_split"] is not None,
    }
    of_gpus["--policy vram=NAME,ram=NAME"] = any("=" in name for name in policies)
    for flag in (flag for flag, is_given in of_gpus.items() if is_given):
        raise OptionError(
            f"{flag} applies to simulated GPUs, but no share of the experts is given for them; give --vram-cache."
        )
    if chosen["save"] and strategies:
        raise OptionError(
            "--save measures the policies and predictors from which `auto` chooses; leave out --strategy."
        )
    if strategies and (len(policies) > 1 or len(predictors) > 1):
        raise OptionError(
            "--policy and --predictor each replace one part of a strategy (--strategy); give at most one name to each."
        )


def _device_budgets(
    analysis: TraceAnalysis, chosen: Mapping[str, Any]
) -> dict[float, tuple[DeviceSlots, ...]]:
    from moegguf.engine.simulated_devices import simulated_budgets

    proportions = chosen["tensor_split"]
    try:
        split_of = (
            [float(word) for word in proportions.split(",")]
            if proportions is not None
            else []
        )
    except ValueError:
        raise OptionError(
            f"--tensor-split must be proportions such as '3,1', but is {proportions!r}."
        ) from None
    shares = parse_shares(
        chosen["vram_cache"], "--vram-cache", of_each=proportions is not None
    )
    return simulated_budgets(
        analysis.trace.shape, shares, split_of, chosen["device_link"]
    )
