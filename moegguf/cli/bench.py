"""`moegguf bench`: its flags, and the runs that they select. Flags that also exist in
llama-bench have the same names."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moegguf.cli.options import (
    EXISTING_FILE,
    Flag,
    Given,
    flags,
    hub_name,
    memory_flag,
    model_flag,
    output_flag,
    research_flag,
    sampling_flag,
)
from moegguf.errors import OptionError
from moegguf.options import OPTIONS
from moegguf.quantities import parse_size
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.bench.series import BenchedSystem, Outcome, Spec


FLAGS = (
    Flag("--model -m", "MODEL",
        "GGUF file (of a split model, the first file) or a name. May be repeated.", []),
    model_flag("--hf-repo -hf", "USER/REPOSITORY[:QUANT]", "A model on Hugging Face, which is fetched.",
        []),
    Flag("--n-prompt -p", "N,...", "Number of tokens in a prompt.", ["512"]),
    Flag("--n-gen -n", "N,...", "Number of tokens to generate.", ["128"]),
    sampling_flag("-pg", "PP,TG", "Test a prompt of PP tokens followed by TG generated tokens.", []),
    sampling_flag("--n-depth -d", "N,...", "Number of untimed tokens before the test.", ["0"]),
    sampling_flag("--parallel -np", "N,...", "Number of sequences that are computed together.", ["1"]),
    Flag("--repetitions -r", "N", "Number of times that a process runs each test.", 5, int,
        {"min": 1}),
    sampling_flag("--text", "FILE",
        "Use the tokens of this file. The default is random tokens, whose hit rates are unrealistic.",
        None, Path, EXISTING_FILE),
    sampling_flag("--greedy", None,
        "Generate the likeliest token instead of random tokens. Set the prompt's length with -d.", False),
    sampling_flag("--seed", "N", "Seed for the random tokens.", 0, int, {"min": 0}),
    sampling_flag("--no-warmup", None, "Do not run each test once without timing it first.", False),
    sampling_flag("--delay", "SECONDS", "Pause before each test.", 0, float, {"min": 0}),
    model_flag("--batch-size -b", "N,...", "Number of tokens per call.", ["2048"]),
    model_flag("--ubatch-size -ub", "N,...", "Number of tokens per pass.", ["512"]),
    memory_flag("--cache-type-k -ctk", "TYPE,...", "Data type of the K cache.", ["f16"]),
    memory_flag("--cache-type-v -ctv", "TYPE,...", "Data type of the V cache.", ["f16"]),
    model_flag("--threads -t", "N,...",
        "Number of CPU threads.  [default: all processors that this process may use, the same as auto]", []),
    model_flag("--n-gpu-layers -ngl", "N,...", "Number of layers on a GPU. -1: all layers.", ["-1"]),
    model_flag("--flash-attn -fa", "on|off|auto", "Fused (flash) attention.", ["auto"]),
    Flag("--expert-cache", "BUDGET,...",
        'Memory for experts: "auto", "4GiB", "50%".', ["auto"]),
    research_flag("--readers", "N", "Number of threads that read experts.", 4, int, {"min": 1}),
    research_flag("--no-repack", None, "Do not repack experts for faster kernels.", False),
    research_flag("--no-overlap", None,
        "Compute with an expert only after all of it has been read.", False),
    research_flag("--no-sweep", None,
        "Do not fetch the next layer ahead during prompts.", False),
    research_flag("--no-direct", None, "Read experts through the page cache.", False),
    memory_flag("--placement", "WHERE,...",
        "Contents of the GPU memory, as in `run`. Several placements alternate, as with --against.",
        ""),
    sampling_flag("--draft", "HOW,...",
        "Measure greedy answers with drafts: auto, ngram, mtp or off. Several values alternate, as with --against."
        " Needs --greedy, and a prompt of -d tokens.", ""),
    research_flag("--simulate-link", "BANDWIDTH[,LATENCY]",
        'Put layers and slots on a simulated device behind a link of this speed, in real time: "24GB/s,35us".'),
    research_flag("--simulate-threads", "N",
        "Number of threads of the simulated device. With a smaller -t, the device is faster than the CPU. 0: as"
        " many as the CPU has.",
        0, int, {"min": 0, "max": 512}),
    research_flag("--strategy", "NAME,...",
        "What decides which experts are kept and fetched, as in `moegguf run`. Several strategies alternate, as"
        " with --against.",
        "moegguf"),
    memory_flag("--warm-start/--no-warm-start", None,
        "Begin with the experts that earlier runs used most, and remember the experts that this run uses, even for"
        " random tokens.",
        False),
    Flag("--against", "SYSTEMS",
        "Systems to alternate with: llama.cpp (stock: without patches; mmap, resident: this build without the"
        " cache; suffixes -plain and -repacked set the layout of weights), another strategy, or the first system"
        " without one feature. An unknown name lists all of them.", []),
    research_flag("--rounds", "N", "Number of rounds. 3 by default with --against, otherwise 1.",
        None, int, {"min": 1}),
    memory_flag("--memory-limit", "SIZE", "Run each system in a memory cgroup of this size."),
    memory_flag("--require-limit", None, "Fail if no such cgroup can be created.", False),
    memory_flag("--keep-page-cache", None,
        "Do not drop the file from the page cache before each run.", False),
    Flag("--output -o", "FORMAT", "Output format: md, json, jsonl, csv or sql.", "md"),
    Flag("--report", None,
        "Print one block to paste into a report: machine, drive, model, and speeds and memory with and without"
        " moegguf (needs -o md).",
        False),
    Flag("--bound", None,
        "Also print the highest speed that file, budget and link allow, and the share of it that was reached. Takes"
        " twice as long.",
        False),
    output_flag("--verbose -v", None, "Show llama.cpp's own messages.", False),
    research_flag("--preset", "NAME",
        "Run another measurement: turns (short turns with llama.cpp), busy (beside busy processes), drafts, server"
        " (its overhead), resume (first tokens of known prompts), eviction or link (these parts alone)."),
    research_flag("--set", "NAME=VALUE", "A setting of the preset. An unknown name lists all of them.",
        []),
)  # fmt: skip


_RANGE = re.compile(r"(-?\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?")


def split(values: Iterable[str]) -> list[str]:
    """Returns the values of a flag that can be given several times, each time with one
    value or with several values separated by commas. Leaves out blank values."""
    return [
        word.strip() for value in values for word in value.split(",") if word.strip()
    ]


def parse_ints(values: Iterable[str], flag: str) -> list[int]:
    """Parses whole numbers in llama-bench's forms: "512", "128,256", "64-512*2",
    "1-8+1". Raises OptionError for any other text, and for a range whose step never
    reaches its end."""
    numbers: list[int] = []
    for word in split(values):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise OptionError(
                f"{flag} must be whole numbers such as '512', '128,256' or '64-512*2', but contains {word!r}."
            )
        at = int(match[1])
        step = int(match[4] or 1)
        is_product = match[3] == "*"
        last = int(match[2]) if match[2] else at
        if at < last and ((is_product and (step < 2 or at < 1)) or step < 1):
            least = (
                "*2 or more, and a first number above 0" if is_product else "+1 or more"
            )
            raise OptionError(
                f"{flag} {word} never reaches its end; give a step of {least}."
            )
        numbers.append(at)
        while (at := at * step if is_product else at + step) <= last:
            numbers.append(at)
    return numbers


def parse_pairs(values: Sequence[str]) -> list[tuple[int, int]]:
    """Parses the values of -pg, such as "512,128": the numbers of prompt tokens and
    generated tokens. Raises OptionError."""
    pairs = []
    for value in values:
        numbers = parse_ints([value], "-pg")
        if len(numbers) != 2:
            raise OptionError(
                f"-pg must be two numbers of tokens (prompt, answer) such as '512,128', but is {value!r}."
            )
        pairs.append((numbers[0], numbers[1]))
    return pairs


def parse_tests(chosen: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Returns (n_prompt, n_gen, n_depth) of each chosen test. As in llama-bench, the prompts
    of each depth come first, then its generations, then its pairs. Tests with neither
    prompt tokens nor generated tokens are left out."""
    shapes = [(n, 0) for n in parse_ints(chosen["n_prompt"], "-p") if n]
    shapes += [(0, n) for n in parse_ints(chosen["n_gen"], "-n") if n]
    shapes += [pair for pair in parse_pairs(chosen["pg"]) if any(pair)]
    return [
        (p, n, d)
        for d, (p, n) in itertools.product(parse_ints(chosen["n_depth"], "-d"), shapes)
    ]


@flags("vram_cache", "mirror", "policy", "predictor", "prefetch", own=FLAGS)
def bench(*, given: Given, **chosen: Any) -> None:
    """Measure prompt and generation speed, hit rate, bytes, stalls and the share of the
    link's bound.

    Takes llama-bench's flags and prints its formats. `--against stock` alternates with
    llama.cpp.
    """
    if chosen["preset"] or chosen["set"]:
        _run_preset(chosen, given)
        return
    from moegguf.bench.rows import FORMATS
    from moegguf.bench.series import make_systems
    from moegguf.controller.strategies import OWN, find_strategy

    if chosen["report"]:
        _prepare_report(chosen)
    output = chosen["output"]
    rounds = chosen["rounds"]
    if output not in FORMATS:
        raise OptionError(f"-o must be one of {', '.join(FORMATS)}, but is {output!r}.")
    strategies = [
        find_strategy(name).name for name in split([chosen["strategy"]]) or [""]
    ]
    # moegguf's own strategy (OWN) comes first if it is given, so that the other
    # strategies alternate with it.
    chosen["strategy"], *beside = dict.fromkeys(
        sorted(strategies, key=lambda name: name != OWN)
    )
    for name, prefix in (("placement", "placed"), ("draft", "draft")):
        first, *others = split([chosen[name]]) or [""]
        chosen[name] = first or None
        beside += [f"{prefix}-{other}" for other in others]
    others = list(dict.fromkeys([*beside, *split(chosen["against"])]))
    limit = _limit(chosen["memory_limit"], chosen["require_limit"])
    caches = split(chosen["expert_cache"])
    groups = [
        make_systems(spec, caches, others, limit) for spec in _specs(chosen, given)
    ]
    rows = _measure(
        groups, rounds or (3 if others else 1), limit, not chosen["keep_page_cache"]
    )
    typer.echo(_report(rows) if chosen["report"] else FORMATS[output](rows), nl=False)
    if any(row["error"] and row["system"] == chosen["strategy"] for row in rows):
        raise typer.Exit(1)


def _prepare_report(chosen: dict[str, Any]) -> None:
    """Sets the defaults of --report: a comparison with this build's llama.cpp without
    the expert cache, and a bundled text as input (unless --greedy is given). Raises
    OptionError unless there is exactly one model and the format is md."""
    from moegguf.bench.report import TEXT, WITHOUT

    if len(chosen["model"]) + len(chosen["hf_repo"]) != 1 or chosen["output"] != "md":
        raise OptionError(
            "--report measures one model and prints md; name one model with -m or -hf, and leave out other formats"
            " (-o)."
        )
    chosen["against"] = chosen["against"] or [WITHOUT]
    if chosen["text"] is None and not chosen["greedy"]:
        chosen["text"] = TEXT


def _report(rows: list[dict[str, Any]]) -> str:
    from moegguf.bench.report import report
    from moegguf.engine.doctor import diagnose
    from moegguf.gguf.experts import read_layout

    if not rows:
        return ""
    path = rows[0]["model_filename"]
    return report(rows, read_layout(path), diagnose(path))


def _run_preset(chosen: dict[str, Any], given: Given) -> None:
    """Runs a preset and prints its results. The default model is the demo. Raises
    OptionError for several models, and for flags that presets do not accept."""
    from moegguf.bench.presets import run_preset

    taken = ("model", "hf_repo", "output", "preset", "set")
    others = [
        flag.flags.split()[0]
        for flag in FLAGS
        if flag.name not in taken and chosen[flag.name] != flag.default
    ]
    others += [OPTIONS[name].flags[0] for name in given]
    if others:
        raise OptionError(
            f"--preset allows only -m, -o and --set; leave out {', '.join(others)}."
        )
    chosen["model"] = chosen["model"] or ["demo"] * (not chosen["hf_repo"])
    model, *more = _models(chosen)
    if more:
        raise OptionError(
            f"--preset measures one model, but {1 + len(more)} are given."
        )
    typer.echo(
        run_preset(chosen["preset"] or "", model, chosen["set"], chosen["output"]),
        nl=False,
    )


def _models(chosen: dict[str, Any]) -> list[str]:
    """Returns the path of each chosen model; for a split model, the path of its first
    file. Models of --hf-repo are fetched if they are missing."""
    from moegguf.models.catalog import find_model
    from moegguf.terminal.loading import find_or_pull

    pulled = [str(find_or_pull(hub_name(name)).path) for name in chosen["hf_repo"]]
    return [*(str(find_model(name)) for name in chosen["model"]), *pulled]


def _specs(chosen: dict[str, Any], given: Given) -> list[Spec]:
    """Returns a `Spec` for every combination of the chosen settings. Also prints a
    warning if other processes keep this machine busy. Raises OptionError if there is no
    model or a flag has an invalid value."""
    from moegguf.bench.series import Spec, Test, combinations
    from moegguf.engine.live_controller import ControllerOptions
    from moegguf.engine.machine import count_cpus, load_warning

    models = _models(chosen)
    if not models:
        raise OptionError("there is no model to measure; name one with -m or -hf.")
    lists: dict[str, Sequence[Any]] = {
        "model": models,
        "n_gpu_layers": parse_ints(chosen["n_gpu_layers"], "-ngl"),
        "n_batch": parse_ints(chosen["batch_size"], "-b"),
        "n_ubatch": parse_ints(chosen["ubatch_size"], "-ub"),
        "type_k": split(chosen["cache_type_k"]),
        "type_v": split(chosen["cache_type_v"]),
        "flash_attn": split(chosen["flash_attn"]),
        "n_threads": parse_ints(
            [text for text in chosen["threads"] if text != "auto"], "-t"
        )
        or [count_cpus()],
    }
    if warning := load_warning():
        print_message(warning)
    # Checks both names before anything runs.
    ControllerOptions(given.get("policy", "auto"), given.get("predictor"))
    tests = parse_tests(chosen)
    as_given = (
        "repetitions", "strategy", "draft", "simulate_link", "simulate_threads", "seed", "bound", "verbose",
    )  # fmt: skip
    base = Spec(
        model=models[0],
        tests=tuple(
            Test(*test, n)
            for n in parse_ints(chosen["parallel"], "--parallel")
            for test in tests
        ),
        repack=not chosen["no_repack"],
        store={"readers": chosen["readers"]}
        | {
            name: False
            for name in ("overlap", "sweep", "direct")
            if chosen[f"no_{name}"]
        },
        feed="greedy" if chosen["greedy"] else "text" if chosen["text"] else "random",
        text=str(chosen["text"]) if chosen["text"] else None,
        warmup=not chosen["no_warmup"],
        delay_s=chosen["delay"],
        loading=given | {name: chosen[name] for name in ("placement", "warm_start")},
        **{name: chosen[name] for name in as_given},
    )
    return combinations(base, lists)


def _limit(size: str | None, require: bool) -> int | None:
    """Returns the memory limit in bytes, or None if `size` is None. Raises OptionError
    for an invalid size. If this machine cannot set the limit, raises OptionError with
    `require`; otherwise prints a message and returns None."""
    from moegguf.bench.series import limit_fault

    if size is None:
        return None
    try:
        n_bytes = parse_size(size)
    except ValueError as error:
        raise OptionError(f"--memory-limit: {error}.") from None
    fault = limit_fault(n_bytes)
    if fault and require:
        raise OptionError(f"--require-limit: {fault}")
    if fault:
        print_message(f"continuing without a memory limit: {fault}")
    return None if fault else n_bytes


def _measure(
    groups: Sequence[Sequence[BenchedSystem]],
    rounds: int,
    limit: int | None,
    drop_cache: bool,
) -> list[dict[str, Any]]:
    """Runs all groups and returns their rows of results. After an interrupt, returns
    the rows of the finished runs."""
    from moegguf.bench.rows import make_rows
    from moegguf.bench.series import ProcessRunner, run_series
    from moegguf.bench.stock import stock_library

    outcomes: list[list[Outcome]] = [[] for _ in groups]
    needs_stock = any(
        system.spec.system == "stock" for group in groups for system in group
    )
    runner = ProcessRunner(
        limit, drop_cache, stock_library(print_message) if needs_stock else None
    )
    # SIGTERM interrupts the runs like Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for group, found in zip(groups, outcomes, strict=True):
            for outcome in run_series(group, rounds, runner, print_message):
                found.append(outcome)
    except KeyboardInterrupt:
        print_message("interrupted; printing the finished runs.")
    finally:
        signal.signal(signal.SIGTERM, before)
    return [row for found in outcomes for row in make_rows(found, limit)]
