"""`moegguf bench`: its flags, which are llama-bench's where that has them, and running what they name."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegguf.cli.options import OFTEN, Given, flags, hub_name, panel
from moegguf.errors import OptionError
from moegguf.options import MEMORY, MODEL, OUTPUT, RESEARCH, SAMPLING
from moegguf.quantities import parse_expert_cache, parse_size

if TYPE_CHECKING:
    from moegguf.bench.series import BenchedSystem, Outcome
    from moegguf.bench.spec import Spec


def _values(panel_: str, names: str, metavar: str, help: str, *default: str) -> tuple[Any, Any]:
    """A flag whose values are separated by commas, or that is given several times."""
    return Annotated[list[str], panel(panel_, *names.split(), metavar=metavar, help=help)], list(default)


def _value(kind: Any, default: Any, panel_: str, name: str, help: str, **settings: Any) -> tuple[Any, Any]:
    return Annotated[kind, panel(panel_, *name.split(), help=help, **settings)], default


def _switch(panel_: str, name: str, help: str) -> tuple[Any, Any]:
    return _value(bool, False, panel_, name, help)


FLAGS = {
    "model": _values(
        OFTEN, "-m --model", "MODEL", "GGUF file (the first one of a split model) or a name; may be repeated."
    ),
    "hf_repo": _values(MODEL, "-hf --hf-repo", "USER/REPOSITORY[:QUANT]", "The same, pulled from Hugging Face."),
    "n_prompt": _values(OFTEN, "-p --n-prompt", "N,...", "Tokens of a prompt.", "512"),
    "n_gen": _values(OFTEN, "-n --n-gen", "N,...", "Tokens to generate.", "128"),
    "pg": _values(SAMPLING, "-pg", "PP,TG", "A prompt and a generation in one test."),
    "n_depth": _values(SAMPLING, "-d --n-depth", "N,...", "Tokens before the test, not timed.", "0"),
    "repetitions": _value(
        int, 5, OFTEN, "-r --repetitions", "Times each test runs in a process.", metavar="N", min=1
    ),
    "text": _value(
        Path | None, None, SAMPLING, "--text",
        "Feed this file's tokens; the default, random tokens, gives unrealistic hit rates.",
        metavar="FILE", exists=True, dir_okay=False,
    ),
    "greedy": _switch(
        SAMPLING, "--greedy", "Generate the likeliest token, not random ones; set a prompt length with -d."
    ),
    "seed": _value(int, 0, SAMPLING, "--seed", "Of the random tokens.", metavar="N", min=0),
    "no_warmup": _switch(SAMPLING, "--no-warmup", "No untimed run before each test."),
    "delay": _value(float, 0, SAMPLING, "--delay", "Seconds before each test.", metavar="SECONDS", min=0),
    "batch": _values(MODEL, "-b --batch-size", "N,...", "Tokens of one call.", "2048"),
    "ubatch": _values(MODEL, "-ub --ubatch-size", "N,...", "Tokens of one pass.", "512"),
    "type_k": _values(MEMORY, "-ctk --cache-type-k", "TYPE,...", "Type of the K cache.", "f16"),
    "type_v": _values(MEMORY, "-ctv --cache-type-v", "TYPE,...", "Type of the V cache.", "f16"),
    "threads": _values(MODEL, "-t --threads", "N,...", "Default: the processors this process may use."),
    "n_gpu_layers": _values(MODEL, "-ngl --n-gpu-layers", "N,...", "Layers on a GPU; -1: all.", "-1"),
    "flash_attn": _values(MODEL, "-fa --flash-attn", "on|off|auto", "on, off or auto.", "auto"),
    "expert_cache": _values(
        OFTEN, "--expert-cache", "BUDGET,...", 'Memory for experts: "auto", "4GiB", "50%".', "auto"
    ),
    "readers": _value(int, 4, RESEARCH, "--readers", "Threads that read experts.", metavar="N", min=1),
    "no_repack": _switch(RESEARCH, "--no-repack", "Do not repack experts for faster kernels."),
    "no_overlap": _switch(RESEARCH, "--no-overlap", "Wait for all of an expert before computing with it."),
    "no_sweep": _switch(RESEARCH, "--no-sweep", "Do not fetch the next layer ahead during a prompt."),
    "no_direct": _switch(RESEARCH, "--no-direct", "Read experts through the page cache."),
    "placement": _value(
        str, "", MEMORY, "--placement",
        "What goes into that memory: auto, layers, slots or cpu; the others alternate with the first as by --against.",
        metavar="WHERE,...",
    ),
    "misses": _value(
        str, "", MEMORY, "--misses",
        "Experts that the GPU lacks: fetch, or compute (on the CPU where that is faster; not exact); the others"
        " alternate with the first as by --against.",
        metavar="HOW,...",
    ),
    "simulate_link": _value(
        str | None, None, RESEARCH, "--simulate-link",
        "Put layers and slots on a device of this machine's own, behind such a link in real time: \"24GB/s,35us\".",
        metavar="BANDWIDTH[,LATENCY]",
    ),
    "simulate_threads": _value(
        int, 0, RESEARCH, "--simulate-threads",
        "Threads of that device, so that it is faster than the CPU with fewer (-t); 0: as many.",
        metavar="N", min=0, max=512,
    ),
    "strategy": _value(
        str, "moegguf", RESEARCH, "--strategy",
        "What decides on experts, as in `moegguf run`; the others alternate with the first as by --against.",
        metavar="NAME,...",
    ),
    "warm_start": _value(
        bool, False, MEMORY, "--warm-start/--no-warm-start",
        "Begin with the experts that earlier runs used most; remember this one's, also of random tokens.",
    ),
    "against": _values(
        OFTEN, "--against", "SYSTEMS",
        "Alternate with llama.cpp itself (mmap, resident; the suffix -plain or -repacked chooses kernels), another"
        " strategy, or the first system without one feature; a wrong name lists them all.",
    ),
    "rounds": _value(
        int | None, None, RESEARCH, "--rounds", "Rounds; default 3 with --against, else 1.", metavar="N", min=1
    ),
    "memory_limit": _value(
        str | None, None, MEMORY, "--memory-limit", "Run each system in a memory cgroup of this size.", metavar="SIZE"
    ),
    "require_limit": _switch(MEMORY, "--require-limit", "Fail where no such cgroup can be made."),
    "keep_page_cache": _switch(
        MEMORY, "--keep-page-cache", "Do not drop the file from the page cache before each run."
    ),
    "output": _value(str, "md", OFTEN, "-o --output", "md, json, jsonl, csv or sql.", metavar="FORMAT"),
    "verbose": _switch(OUTPUT, "-v --verbose", "Show llama.cpp's own messages."),
}  # fmt: skip
"""{name: flag}, those of llama-bench where that has them."""

_RANGE = re.compile(r"(-?\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?")


def split(values: Iterable[str]) -> list[str]:
    """Values given once with commas, or several times."""
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def parse_ints(values: Iterable[str], flag: str) -> list[int]:
    """Whole numbers as llama-bench takes them: "512", "128,256", "64-512*2", "1-8+1". Raises OptionError."""
    numbers: list[int] = []
    for word in split(values):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise OptionError(f"{flag} takes numbers such as 512, 128,256 or 64-512*2, but not {word!r}.")
        numbers += _expand(match, flag)
    return numbers


def _expand(match: re.Match[str], flag: str) -> Iterator[int]:
    at, step = int(match[1]), int(match[4] or 1)
    last = int(match[2]) if match[2] else at
    if at < last and ((match[3] == "*" and (step < 2 or at < 1)) or step < 1):
        raise OptionError(f"{flag} {match[0]} never ends; give a larger step.")
    while at <= last:
        yield at
        at = at * step if match[3] == "*" and at else at + max(1, step)


def parse_pairs(values: Sequence[str]) -> list[tuple[int, int]]:
    """-pg 512,128, a prompt and a generation, any number of times. Raises OptionError."""
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
    """(n_prompt, n_gen, n_depth) of every test in llama-bench's order: prompts, generations, pairs, for each depth."""
    shapes = [(n, 0) for n in parse_ints(n_prompt, "-p") if n]
    shapes += [(0, n) for n in parse_ints(n_gen, "-n") if n]
    shapes += [pair for pair in parse_pairs(pairs) if any(pair)]
    return [(p, n, d) for d, (p, n) in itertools.product(parse_ints(n_depth, "-d"), shapes)]


@flags("vram_cache", "policy", "predictor", "prefetch", own=FLAGS)
def bench(*, given: Given, **chosen: Any) -> None:
    """Measure prompt and generation speed, hit rate, bytes, stalls and the share of the link's bound.

    Takes llama-bench's flags and prints its formats. `--against mmap,resident` alternates with llama.cpp itself.
    """
    from moegguf.cli.bench_format import FORMATS

    if chosen["output"] not in FORMATS:
        raise OptionError(f"-o takes {', '.join(FORMATS)}, but not {chosen['output']!r}.")
    chosen["strategy"], *others = _strategies(chosen["strategy"])
    for name, prefix in (("placement", "placed"), ("misses", "misses")):
        first, *more = split([chosen[name]]) or [""]
        chosen[name] = first or None
        others += [f"{prefix}-{other}" for other in more]
    others = list(dict.fromkeys([*others, *split(chosen["against"])]))
    limit = _limit(chosen["memory_limit"], chosen["require_limit"])
    groups = _groups({**chosen, "given": given}, others, limit)
    rows = _measure(groups, chosen["rounds"] or (3 if others else 1), limit, not chosen["keep_page_cache"])
    typer.echo(FORMATS[chosen["output"]](rows), nl=False)
    if any(row["error"] and row["system"] == chosen["strategy"] for row in rows):
        raise typer.Exit(1)


def _strategies(names: str) -> list[str]:
    """The names in the option, moegguf first where it is among them. Raises OptionError."""
    from moegguf.controller.strategies import OWN, find_strategy

    found = [find_strategy(name).name for name in split([names]) or [""]]
    return list(dict.fromkeys([*(name for name in found if name == OWN), *found]))


def _groups(chosen: dict[str, Any], others: Sequence[str], limit: int | None) -> list[list[BenchedSystem]]:
    """The systems to alternate, for every combination of settings."""
    from moegguf.bench.series import combinations, make_systems
    from moegguf.engine.machine import count_cpus
    from moegguf.models.catalog import find_model
    from moegguf.terminal.loading import find_or_pull

    pulled = [str(find_or_pull(hub_name(name)).path) for name in chosen["hf_repo"]]
    chosen = chosen | {"model": [*(str(find_model(name)) for name in chosen["model"]), *pulled]}
    if not chosen["model"]:
        raise OptionError("there is no model to measure; name one with -m or -hf.")
    caches = split(chosen["expert_cache"])
    for cache in caches:
        parse_expert_cache(cache)
    lists: dict[str, Sequence[Any]] = {
        "model": chosen["model"],
        "n_gpu_layers": parse_ints(chosen["n_gpu_layers"], "-ngl"),
        "n_batch": parse_ints(chosen["batch"], "-b"),
        "n_ubatch": parse_ints(chosen["ubatch"], "-ub"),
        "type_k": split(chosen["type_k"]),
        "type_v": split(chosen["type_v"]),
        "flash_attn": split(chosen["flash_attn"]),
        "n_threads": parse_ints(chosen["threads"], "-t") or [count_cpus()],
    }
    return [make_systems(spec, caches, others, limit) for spec in combinations(_base(chosen), lists)]


def _base(chosen: dict[str, Any]) -> Spec:
    from moegguf.bench.spec import Spec, Test
    from moegguf.engine.live_controller import ControllerOptions

    given = chosen["given"]
    ControllerOptions(given.get("policy", "auto"), given.get("predictor"))  # raises before anything runs
    tests = parse_tests(chosen["n_prompt"], chosen["n_gen"], chosen["pg"], chosen["n_depth"])
    text = chosen["text"]
    switches = {name: False for name in ("overlap", "sweep", "direct") if chosen[f"no_{name}"]}
    return Spec(
        model=chosen["model"][0],
        tests=tuple(Test(*test) for test in tests),
        repack=not chosen["no_repack"],
        repetitions=chosen["repetitions"],
        store={"readers": chosen["readers"]} | switches,
        strategy=chosen["strategy"],
        feed="greedy" if chosen["greedy"] else "text" if text else "random",
        text=str(text) if text else None,
        placement=chosen["placement"],
        misses=chosen["misses"],
        simulate_link=chosen["simulate_link"],
        simulate_threads=chosen["simulate_threads"],
        seed=chosen["seed"],
        warmup=not chosen["no_warmup"],
        delay_s=chosen["delay"],
        warm_start=chosen["warm_start"],
        verbose=chosen["verbose"],
        **given,
    )


def _limit(size: str | None, require: bool) -> int | None:
    """The limit in bytes; None without one, and, with a warning, where none can be set."""
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
        typer.echo(f"continuing without a memory limit: {fault}", err=True)
    return None if fault else n_bytes


def _measure(
    groups: Sequence[Sequence[BenchedSystem]], rounds: int, limit: int | None, drop_cache: bool
) -> list[dict[str, Any]]:
    """Rows of all groups; after an interrupt, of the finished runs."""
    from moegguf.bench.rows import make_rows
    from moegguf.bench.series import ProcessRunner, run_series

    outcomes: list[list[Outcome]] = [[] for _ in groups]
    runner = ProcessRunner(limit, drop_cache)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM cleans up, too
    try:
        for group, found in zip(groups, outcomes, strict=True):
            for outcome in run_series(group, rounds, runner, lambda line: typer.echo(line, err=True)):
                found.append(outcome)
    except KeyboardInterrupt:
        typer.echo("interrupted; printing the finished runs.", err=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    return [row for found in outcomes for row in make_rows(found, limit)]
