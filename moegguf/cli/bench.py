"""`moegguf bench`: its flags, and the runs that they select. Flags that also exist in llama-bench have the same
names."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moegguf.cli.options import OFTEN, Flag, Given, flags, hub_name
from moegguf.errors import OptionError
from moegguf.options import MEMORY, MODEL, OPTIONS, OUTPUT, RESEARCH, SAMPLING
from moegguf.quantities import parse_expert_cache, parse_size
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.bench.series import BenchedSystem, Outcome, Spec


FLAGS = (
    Flag("model", "-m --model", "MODEL", OFTEN,
         "GGUF file (the first one of a split model) or a name; may be repeated.", []),
    Flag("hf_repo", "-hf --hf-repo", "USER/REPOSITORY[:QUANT]", MODEL, "The same, pulled from Hugging Face.", []),
    Flag("n_prompt", "-p --n-prompt", "N,...", OFTEN, "Tokens of a prompt.", ["512"]),
    Flag("n_gen", "-n --n-gen", "N,...", OFTEN, "Tokens to generate.", ["128"]),
    Flag("pg", "-pg", "PP,TG", SAMPLING, "A prompt and a generation in one test.", []),
    Flag("n_depth", "-d --n-depth", "N,...", SAMPLING, "Tokens before the test, not timed.", ["0"]),
    Flag("parallel", "-np --parallel", "N,...", SAMPLING, "Sequences that are computed together.", ["1"]),
    Flag("repetitions", "-r --repetitions", "N", OFTEN, "Times each test runs in a process.", 5, int, {"min": 1}),
    Flag("text", "--text", "FILE", SAMPLING,
         "Feed this file's tokens; the default, random tokens, gives unrealistic hit rates.",
         None, Path | None, {"exists": True, "dir_okay": False}),
    Flag("greedy", "--greedy", None, SAMPLING,
         "Generate the likeliest token, not random ones; set a prompt length with -d.", False, bool),
    Flag("seed", "--seed", "N", SAMPLING, "Of the random tokens.", 0, int, {"min": 0}),
    Flag("no_warmup", "--no-warmup", None, SAMPLING, "No untimed run before each test.", False, bool),
    Flag("delay_s", "--delay", "SECONDS", SAMPLING, "Seconds before each test.", 0, float, {"min": 0}),
    Flag("n_batch", "-b --batch-size", "N,...", MODEL, "Tokens of one call.", ["2048"]),
    Flag("n_ubatch", "-ub --ubatch-size", "N,...", MODEL, "Tokens of one pass.", ["512"]),
    Flag("type_k", "-ctk --cache-type-k", "TYPE,...", MEMORY, "Type of the K cache.", ["f16"]),
    Flag("type_v", "-ctv --cache-type-v", "TYPE,...", MEMORY, "Type of the V cache.", ["f16"]),
    Flag("n_threads", "-t --threads", "N,...", MODEL, "auto, as without it: the processors this process may use.",
         []),
    Flag("n_gpu_layers", "-ngl --n-gpu-layers", "N,...", MODEL, "Layers on a GPU; -1: all.", ["-1"]),
    Flag("flash_attn", "-fa --flash-attn", "on|off|auto", MODEL, "on, off or auto.", ["auto"]),
    Flag("expert_cache", "--expert-cache", "BUDGET,...", OFTEN,
         'Memory for experts: "auto", "4GiB", "50%".', ["auto"]),
    Flag("readers", "--readers", "N", RESEARCH, "Threads that read experts.", 4, int, {"min": 1}),
    Flag("no_repack", "--no-repack", None, RESEARCH, "Do not repack experts for faster kernels.", False, bool),
    Flag("no_overlap", "--no-overlap", None, RESEARCH,
         "Wait for all of an expert before computing with it.", False, bool),
    Flag("no_sweep", "--no-sweep", None, RESEARCH,
         "Do not fetch the next layer ahead during a prompt.", False, bool),
    Flag("no_direct", "--no-direct", None, RESEARCH, "Read experts through the page cache.", False, bool),
    Flag("placement", "--placement", "WHERE,...", MEMORY,
         "What goes into that memory: auto, layers, slots or cpu; the others alternate with the first as by"
         " --against.", "", str),
    Flag("draft", "--draft", "HOW,...", SAMPLING,
         "Measure greedy answers with drafts: auto, ngram, mtp or off, the others alternating with the first as by"
         " --against; needs --greedy, and a prompt of -d tokens.", "", str),
    Flag("simulate_link", "--simulate-link", "BANDWIDTH[,LATENCY]", RESEARCH,
         'Put layers and slots on a device of this machine\'s own, behind such a link in real time: "24GB/s,35us".',
         None, str | None),
    Flag("simulate_threads", "--simulate-threads", "N", RESEARCH,
         "Threads of that device, so that it is faster than the CPU with fewer (-t); 0: as many.",
         0, int, {"min": 0, "max": 512}),
    Flag("strategy", "--strategy", "NAME,...", RESEARCH,
         "What decides on experts, as in `moegguf run`; the others alternate with the first as by --against.",
         "moegguf", str),
    Flag("warm_start", "--warm-start/--no-warm-start", None, MEMORY,
         "Begin with the experts that earlier runs used most; remember this one's, also of random tokens.",
         False, bool),
    Flag("against", "--against", "SYSTEMS", OFTEN,
         "Alternate with llama.cpp (stock: without patches; mmap, resident: the same build without the cache; a suffix"
         " -plain or -repacked chooses the layout of weights), another strategy, or the first system without one"
         " feature; a wrong name lists them all.", []),
    Flag("rounds", "--rounds", "N", RESEARCH, "Rounds; default 3 with --against, else 1.",
         None, int | None, {"min": 1}),
    Flag("memory_limit", "--memory-limit", "SIZE", MEMORY, "Run each system in a memory cgroup of this size.",
         None, str | None),
    Flag("require_limit", "--require-limit", None, MEMORY, "Fail where no such cgroup can be made.", False, bool),
    Flag("keep_page_cache", "--keep-page-cache", None, MEMORY,
         "Do not drop the file from the page cache before each run.", False, bool),
    Flag("output", "-o --output", "FORMAT", OFTEN, "md, json, jsonl, csv or sql.", "md", str),
    Flag("report", "--report", None, OFTEN,
         "One block to paste: machine, drive, model, and speeds and memory with and without moegguf (-o md).",
         False, bool),
    Flag("bound", "--bound", None, OFTEN,
         "Print also the most tokens/s that file, budget and link allow, and the share reached; takes twice as long.",
         False, bool),
    Flag("verbose", "-v --verbose", None, OUTPUT, "Show llama.cpp's own messages.", False, bool),
    Flag("preset", "--preset", "NAME", RESEARCH,
         "Another measurement: turns (against llama.cpp in short turns), busy (beside busy processes), drafts, server"
         " (its overhead), resume (first tokens of known prompts), eviction or link (parts alone)."),
    Flag("settings", "--set", "NAME=VALUE", RESEARCH, "A setting of the preset; a wrong name lists them.", []),
)  # fmt: skip


_RANGE = re.compile(r"(-?\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?")


def split(values: Iterable[str]) -> list[str]:
    """Returns the values of a flag that can be given several times, each time with one value or with several values
    separated by commas. Leaves out blank values."""
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def parse_ints(values: Iterable[str], flag: str) -> list[int]:
    """Parses whole numbers in llama-bench's forms: "512", "128,256", "64-512*2", "1-8+1". Raises OptionError."""
    numbers: list[int] = []
    for word in split(values):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise OptionError(f"{flag} takes numbers such as 512, 128,256 or 64-512*2, but not {word!r}.")
        at = int(match[1])
        step = int(match[4] or 1)
        is_product = match[3] == "*"
        last = int(match[2]) if match[2] else at
        if at < last and ((is_product and (step < 2 or at < 1)) or step < 1):
            least = "*2 or more, and a first number above 0" if is_product else "+1 or more"
            raise OptionError(f"{flag} {word} never reaches its end; give a step of {least}.")
        numbers.append(at)
        while (at := at * step if is_product else at + step) <= last:
            numbers.append(at)
    return numbers


def parse_pairs(values: Sequence[str]) -> list[tuple[int, int]]:
    """Parses the values of -pg, such as "512,128": the numbers of prompt tokens and generated tokens. Raises
    OptionError."""
    pairs = []
    for value in values:
        numbers = parse_ints([value], "-pg")
        if len(numbers) != 2:
            raise OptionError(f"-pg takes a prompt and a generation such as 512,128, but not {value!r}.")
        pairs.append((numbers[0], numbers[1]))
    return pairs


def parse_tests(
    n_prompt: Sequence[str], n_gen: Sequence[str], pairs: Sequence[str], n_depth: Sequence[str]
) -> list[tuple[int, int, int]]:
    """Returns (n_prompt, n_gen, n_depth) of each test. As in llama-bench, the prompts of each depth come first, then
    its generations, then its pairs. Prompts and generations of 0 tokens are left out."""
    shapes = [(n, 0) for n in parse_ints(n_prompt, "-p") if n]
    shapes += [(0, n) for n in parse_ints(n_gen, "-n") if n]
    shapes += [pair for pair in parse_pairs(pairs) if any(pair)]
    return [(p, n, d) for d, (p, n) in itertools.product(parse_ints(n_depth, "-d"), shapes)]


@flags("vram_cache", "mirror", "policy", "predictor", "prefetch", own=FLAGS)
def bench(*, given: Given, **chosen: Any) -> None:
    """Measure prompt and generation speed, hit rate, bytes, stalls and the share of the link's bound.

    Takes llama-bench's flags and prints its formats. `--against stock` alternates with llama.cpp.
    """
    if chosen["preset"] or chosen["settings"]:
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
        raise OptionError(f"-o takes {', '.join(FORMATS)}, but not {output!r}.")
    strategies = [find_strategy(name).name for name in split([chosen["strategy"]]) or [""]]
    # OWN comes first if it is given, so that the other strategies alternate with it.
    chosen["strategy"], *beside = dict.fromkeys(sorted(strategies, key=lambda name: name != OWN))
    for name, prefix in (("placement", "placed"), ("draft", "draft")):
        first, *others = split([chosen[name]]) or [""]
        chosen[name] = first or None
        beside += [f"{prefix}-{other}" for other in others]
    others = list(dict.fromkeys([*beside, *split(chosen["against"])]))
    limit = _limit(chosen["memory_limit"], chosen["require_limit"])
    caches = split(chosen["expert_cache"])
    for cache in caches:
        parse_expert_cache(cache)
    groups = [make_systems(spec, caches, others, limit) for spec in _specs(chosen, given)]
    rows = _measure(groups, rounds or (3 if others else 1), limit, not chosen["keep_page_cache"])
    typer.echo(_report(rows) if chosen["report"] else FORMATS[output](rows), nl=False)
    if any(row["error"] and row["system"] == chosen["strategy"] for row in rows):
        raise typer.Exit(1)


def _prepare_report(chosen: dict[str, Any]) -> None:
    """Sets the defaults of --report: a comparison with llama.cpp, and a bundled text as input (unless --greedy is
    given). Raises OptionError unless there is exactly one model and the format is md."""
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
    """Runs a preset and prints its results. Raises OptionError for several models, and for flags that presets do not
    accept."""
    from moegguf.bench.presets import run_preset

    taken = ("model", "hf_repo", "output", "preset", "settings")
    others = [flag.flags.split()[-1] for flag in FLAGS if flag.name not in taken and chosen[flag.name] != flag.default]
    others += [OPTIONS[name].flags[0] for name in given]
    if others:
        raise OptionError(f"--preset takes -m, -o and --set, but not {', '.join(others)}.")
    chosen["model"] = chosen["model"] or ["demo"] * (not chosen["hf_repo"])
    model, *more = _models(chosen)
    if more:
        raise OptionError(f"--preset measures one model, but {1 + len(more)} are given.")
    typer.echo(run_preset(chosen["preset"] or "", model, chosen["settings"], chosen["output"]), nl=False)


def _models(chosen: dict[str, Any]) -> list[str]:
    """Returns the paths of the chosen models' first files. Models of --hf-repo are pulled first if they are missing."""
    from moegguf.models.catalog import find_model
    from moegguf.terminal.loading import find_or_pull

    pulled = [str(find_or_pull(hub_name(name)).path) for name in chosen["hf_repo"]]
    return [*(str(find_model(name)) for name in chosen["model"]), *pulled]


def _specs(chosen: dict[str, Any], given: Given) -> list[Spec]:
    """Returns a `Spec` for every combination of the chosen settings. Also prints a warning if other processes keep this
    machine busy. Raises OptionError."""
    from moegguf.bench.series import Spec, Test, combinations
    from moegguf.engine.live_controller import ControllerOptions
    from moegguf.engine.machine import count_cpus, load_warning

    models = _models(chosen)
    if not models:
        raise OptionError("there is no model to measure; name one with -m or -hf.")
    lists: dict[str, Sequence[Any]] = {
        "model": models,
        "n_gpu_layers": parse_ints(chosen["n_gpu_layers"], "-ngl"),
        "n_batch": parse_ints(chosen["n_batch"], "-b"),
        "n_ubatch": parse_ints(chosen["n_ubatch"], "-ub"),
        **{name: split(chosen[name]) for name in ("type_k", "type_v", "flash_attn")},
        "n_threads": parse_ints([text for text in chosen["n_threads"] if text != "auto"], "-t") or [count_cpus()],
    }
    if warning := load_warning():
        print_message(warning)
    ControllerOptions(given.get("policy", "auto"), given.get("predictor"))  # checks both names before anything runs
    tests = parse_tests(chosen["n_prompt"], chosen["n_gen"], chosen["pg"], chosen["n_depth"])
    as_given = (
        "repetitions", "strategy", "placement", "draft", "simulate_link", "simulate_threads", "seed", "delay_s",
        "warm_start", "bound", "verbose",
    )  # fmt: skip
    base = Spec(
        model=models[0],
        tests=tuple(Test(*test, n) for n in parse_ints(chosen["parallel"], "--parallel") for test in tests),
        repack=not chosen["no_repack"],
        store={"readers": chosen["readers"]}
        | {name: False for name in ("overlap", "sweep", "direct") if chosen[f"no_{name}"]},
        feed="greedy" if chosen["greedy"] else "text" if chosen["text"] else "random",
        text=str(chosen["text"]) if chosen["text"] else None,
        warmup=not chosen["no_warmup"],
        **{name: chosen[name] for name in as_given},
        **given,
    )
    return combinations(base, lists)


def _limit(size: str | None, require: bool) -> int | None:
    """Returns the memory limit in bytes, or None if `size` is None. If this machine cannot set the limit, raises
    OptionError if `require` is True; otherwise prints a message and returns None."""
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
    groups: Sequence[Sequence[BenchedSystem]], rounds: int, limit: int | None, drop_cache: bool
) -> list[dict[str, Any]]:
    """Runs all groups and returns their rows of results. After an interrupt, returns the rows of the finished runs."""
    from moegguf.bench.rows import make_rows
    from moegguf.bench.series import ProcessRunner, run_series
    from moegguf.bench.stock import stock_library

    outcomes: list[list[Outcome]] = [[] for _ in groups]
    needs_stock = any(system.spec.system == "stock" for group in groups for system in group)
    runner = ProcessRunner(limit, drop_cache, stock_library(print_message) if needs_stock else None)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM interrupts the runs like Ctrl-C
    try:
        for group, found in zip(groups, outcomes, strict=True):
            for outcome in run_series(group, rounds, runner, print_message):
                found.append(outcome)
    except KeyboardInterrupt:
        print_message("interrupted; printing the finished runs.")
    finally:
        signal.signal(signal.SIGTERM, before)
    return [row for found in outcomes for row in make_rows(found, limit)]
