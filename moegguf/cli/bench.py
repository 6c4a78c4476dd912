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


Values = list[str]

Models = Annotated[
    Values,
    panel(
        OFTEN,
        "-m", "--model", metavar="MODEL", help="GGUF file (the first one of a split model) or a name; may be repeated."
    ),
]
HubModels = Annotated[
    Values,
    panel(MODEL, "-hf", "--hf-repo", metavar="USER/REPOSITORY[:QUANT]", help="The same, pulled from Hugging Face."),
]
Prompts = Annotated[Values, panel(OFTEN, "-p", "--n-prompt", metavar="N,...", help="Tokens of a prompt.")]
Gens = Annotated[Values, panel(OFTEN, "-n", "--n-gen", metavar="N,...", help="Tokens to generate.")]
Pairs = Annotated[Values, panel(SAMPLING, "-pg", metavar="PP,TG", help="A prompt and a generation in one test.")]
Depths = Annotated[
    Values, panel(SAMPLING, "-d", "--n-depth", metavar="N,...", help="Tokens before the test, not timed.")
]
Repetitions = Annotated[
    int, panel(OFTEN, "-r", "--repetitions", metavar="N", min=1, help="Times each test runs in a process.")
]
Text = Annotated[
    Path | None,
    panel(
        SAMPLING,
        "--text",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Feed this file's tokens; the default, random tokens, gives unrealistic hit rates.",
    ),
]
Greedy = Annotated[
    bool,
    panel(SAMPLING, "--greedy", help="Generate the likeliest token, not random ones; set a prompt length with -d."),
]
Seed = Annotated[int, panel(SAMPLING, "--seed", metavar="N", min=0, help="Of the random tokens.")]
NoWarmup = Annotated[bool, panel(SAMPLING, "--no-warmup", help="No untimed run before each test.")]
Delay = Annotated[float, panel(SAMPLING, "--delay", metavar="SECONDS", min=0, help="Seconds before each test.")]

Batches = Annotated[Values, panel(MODEL, "-b", "--batch-size", metavar="N,...", help="Tokens of one call.")]
Ubatches = Annotated[Values, panel(MODEL, "-ub", "--ubatch-size", metavar="N,...", help="Tokens of one pass.")]
TypesK = Annotated[Values, panel(MEMORY, "-ctk", "--cache-type-k", metavar="TYPE,...", help="Type of the K cache.")]
TypesV = Annotated[Values, panel(MEMORY, "-ctv", "--cache-type-v", metavar="TYPE,...", help="Type of the V cache.")]
Threads = Annotated[
    Values, panel(MODEL, "-t", "--threads", metavar="N,...", help="Default: the processors this process may use.")
]
GpuLayers = Annotated[Values, panel(MODEL, "-ngl", "--n-gpu-layers", metavar="N,...", help="Layers on a GPU; -1: all.")]
FlashAttn = Annotated[Values, panel(MODEL, "-fa", "--flash-attn", metavar="on|off|auto", help="on, off or auto.")]
Caches = Annotated[
    Values, panel(OFTEN, "--expert-cache", metavar="BUDGET,...", help='Memory for experts: "auto", "4GiB", "50%".')
]
Placement = Annotated[
    str,
    panel(
        MEMORY,
        "--placement",
        metavar="WHERE,...",
        help="What goes into that memory: auto, layers, slots or cpu; the others alternate with the first as by"
        " --against.",
    ),
]
Misses = Annotated[
    str,
    panel(
        MEMORY,
        "--misses",
        metavar="HOW,...",
        help="Experts that the GPU lacks: fetch, or compute (on the CPU where that is faster; not exact); the others"
        " alternate with the first as by --against.",
    ),
]
Readers = Annotated[int, panel(RESEARCH, "--readers", metavar="N", min=1, help="Threads that read experts.")]
NoRepack = Annotated[
    bool,
    panel(RESEARCH, "--no-repack", help="Do not repack experts for faster kernels."),
]
NoOverlap = Annotated[bool, panel(RESEARCH, "--no-overlap", help="Wait for all of an expert before computing with it.")]
NoSweep = Annotated[bool, panel(RESEARCH, "--no-sweep", help="Do not fetch the next layer ahead during a prompt.")]
NoDirect = Annotated[bool, panel(RESEARCH, "--no-direct", help="Read experts through the page cache.")]
SimulateLink = Annotated[
    str | None,
    panel(
        RESEARCH,
        "--simulate-link",
        metavar="BANDWIDTH[,LATENCY]",
        help='Put layers and slots on a device of this machine\'s own, behind such a link in real time: "24GB/s,35us".',
    ),
]
SimulateThreads = Annotated[
    int,
    panel(
        RESEARCH,
        "--simulate-threads",
        metavar="N",
        min=0,
        max=512,
        help="Threads of that device, so that it is faster than the CPU with fewer (-t); 0: as many.",
    ),
]

Strategy = Annotated[
    str,
    panel(
        RESEARCH,
        "--strategy",
        metavar="NAME,...",
        help="What decides on experts, as in `moegguf run`; the others alternate with the first as by --against.",
    ),
]
WarmStart = Annotated[
    bool,
    panel(
        MEMORY,
        "--warm-start/--no-warm-start",
        help="Begin with the experts that earlier runs used most; remember this one's, also of random tokens.",
    ),
]

Against = Annotated[
    Values,
    panel(
        OFTEN,
        "--against",
        metavar="SYSTEMS",
        help="Alternate with llama.cpp itself (mmap, resident; the suffix -plain or -repacked chooses kernels), another"
        " strategy, or the first system without one feature; a wrong name lists them all.",
    ),
]
Rounds = Annotated[
    int | None, panel(RESEARCH, "--rounds", metavar="N", min=1, help="Rounds; default 3 with --against, else 1.")
]
MemoryLimit = Annotated[
    str | None, panel(MEMORY, "--memory-limit", metavar="SIZE", help="Run each system in a memory cgroup of this size.")
]
RequireLimit = Annotated[bool, panel(MEMORY, "--require-limit", help="Fail where no such cgroup can be made.")]
KeepPageCache = Annotated[
    bool, panel(MEMORY, "--keep-page-cache", help="Do not drop the file from the page cache before each run.")
]
Output = Annotated[str, panel(OFTEN, "-o", "--output", metavar="FORMAT", help="md, json, jsonl, csv or sql.")]
Verbose = Annotated[bool, panel(OUTPUT, "-v", "--verbose", help="Show llama.cpp's own messages.")]

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


@flags("vram_cache", "policy", "predictor", "prefetch")
def bench(
    model: Models = [],
    hf_repo: HubModels = [],
    n_prompt: Prompts = ["512"],
    n_gen: Gens = ["128"],
    pg: Pairs = [],
    n_depth: Depths = ["0"],
    repetitions: Repetitions = 5,
    text: Text = None,
    greedy: Greedy = False,
    seed: Seed = 0,
    no_warmup: NoWarmup = False,
    delay: Delay = 0,
    batch: Batches = ["2048"],
    ubatch: Ubatches = ["512"],
    type_k: TypesK = ["f16"],
    type_v: TypesV = ["f16"],
    threads: Threads = [],
    n_gpu_layers: GpuLayers = ["-1"],
    flash_attn: FlashAttn = ["auto"],
    expert_cache: Caches = ["auto"],
    readers: Readers = 4,
    no_repack: NoRepack = False,
    no_overlap: NoOverlap = False,
    no_sweep: NoSweep = False,
    no_direct: NoDirect = False,
    placement: Placement = "",
    misses: Misses = "",
    simulate_link: SimulateLink = None,
    simulate_threads: SimulateThreads = 0,
    strategy: Strategy = "moegguf",
    warm_start: WarmStart = False,
    against: Against = [],
    rounds: Rounds = None,
    memory_limit: MemoryLimit = None,
    require_limit: RequireLimit = False,
    keep_page_cache: KeepPageCache = False,
    output: Output = "md",
    verbose: Verbose = False,
    *,
    given: Given,
) -> None:
    """Measure prompt and generation speed, hit rate, bytes, stalls and the share of the link's bound.

    Takes llama-bench's flags and prints its formats. `--against mmap,resident` alternates with llama.cpp itself.
    """
    chosen = dict(locals())
    from moegguf.cli.bench_format import FORMATS

    if output not in FORMATS:
        raise OptionError(f"-o takes {', '.join(FORMATS)}, but not {output!r}.")
    chosen["strategy"], *beside = _strategies(strategy)
    placed = split([placement])
    chosen["placement"] = placed[0] if placed else None
    missed = split([misses])
    chosen["misses"] = missed[0] if missed else None
    replaced = [*(f"placed-{name}" for name in placed[1:]), *(f"misses-{name}" for name in missed[1:])]
    others = list(dict.fromkeys([*beside, *replaced, *split(against)]))
    groups = _groups(chosen, others, limit := _limit(memory_limit, require_limit))
    rows = _measure(groups, rounds or (3 if others else 1), limit, not keep_page_cache)
    typer.echo(FORMATS[output](rows), nl=False)
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
