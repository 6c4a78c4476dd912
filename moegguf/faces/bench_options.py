"""The flags of `moegguf bench`: their names, help and how their values are read. llama-bench's where it has them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moegguf.errors import OptionError


def _option(panel: str, *names: str, help: str = "", **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def _test(*names: str, help: str = "", **settings: Any) -> Any:
    return _option("Tests", *names, help=help, **settings)


def _setting(*names: str, help: str = "", **settings: Any) -> Any:
    return _option("Settings (several values with commas)", *names, help=help, **settings)


def _versus(*names: str, help: str = "", **settings: Any) -> Any:
    return _option("Comparison and output", *names, help=help, **settings)


Words = list[str]

Models = Annotated[
    Words, _test("-m", "--model", help="GGUF file (the first one of a split model) or a name; may be repeated.")
]
Prompts = Annotated[Words, _test("-p", "--n-prompt", help="Tokens of a prompt.")]
Gens = Annotated[Words, _test("-n", "--n-gen", help="Tokens to generate.")]
Pairs = Annotated[Words, _test("-pg", metavar="PP,TG", help="A prompt and a generation in one test.")]
Depths = Annotated[Words, _test("-d", "--n-depth", help="Tokens before the test, not timed.")]
Repetitions = Annotated[int, _test("-r", "--repetitions", min=1, help="Times each test runs in a process.")]
Text = Annotated[
    Path | None,
    _test(
        "--text",
        exists=True,
        dir_okay=False,
        help="Feed this file's tokens; the hit rate of random ones, the default, says little.",
    ),
]
Greedy = Annotated[
    bool, _test("--greedy", help="Generation goes on with its own likeliest token; give it a prompt with -d.")
]
Seed = Annotated[int, _test("--seed", min=0, help="Of the random tokens.")]
NoWarmup = Annotated[bool, _test("--no-warmup", help="No untimed run before each test.")]
Delay = Annotated[float, _test("--delay", min=0, help="Seconds before each test.")]

Batches = Annotated[Words, _setting("-b", "--batch-size", help="Tokens of one call.")]
Ubatches = Annotated[Words, _setting("-ub", "--ubatch-size", help="Tokens of one pass.")]
TypesK = Annotated[Words, _setting("-ctk", "--cache-type-k", help="Type of the K cache.")]
TypesV = Annotated[Words, _setting("-ctv", "--cache-type-v", help="Type of the V cache.")]
Threads = Annotated[Words, _setting("-t", "--threads", help="Default: the processors this process may use.")]
GpuLayers = Annotated[Words, _setting("-ngl", "--n-gpu-layers", help="Layers on a GPU; -1: all.")]
FlashAttn = Annotated[Words, _setting("-fa", "--flash-attn", help="on, off or auto.")]
Caches = Annotated[Words, _setting("--expert-cache", help='Memory for experts: "auto", "4GiB", "50%".')]
Readers = Annotated[int, _setting("--readers", min=1, help="Threads that read experts.")]
NoRepack = Annotated[
    bool, _setting("--no-repack", help="Experts as in the file, not as the fastest kernels like them.")
]
NoOverlap = Annotated[bool, _setting("--no-overlap", help="Wait for all of an expert before computing with it.")]
NoSweep = Annotated[bool, _setting("--no-sweep", help="A prompt does not fetch the next layer ahead.")]
NoDirect = Annotated[bool, _setting("--no-direct", help="Read experts through the page cache.")]

Policy = Annotated[
    str, _setting("--policy", help="Who stays: a policy of `moegguf trace simulate`, or auto: the measured best.")
]
Predictor = Annotated[str | None, _setting("--predictor", help="Who comes next: a predictor, or none.")]
Prefetch = Annotated[
    bool | None, _setting("--prefetch/--no-prefetch", help="Fetch ahead what the predictor says, while that pays.")
]

Ablate = Annotated[
    bool,
    _versus(
        "--ablate",
        help="In turns with moegguf as asked for: without prefetch, chunks, early preemption, reordering; plain LRU."
        " Prefetching is then on whether it pays or not.",
    ),
]
Against = Annotated[
    Words,
    _versus(
        "--against",
        metavar="SYSTEMS",
        help="In turns: llama.cpp itself (mmap, resident; -plain or -repacked behind a name picks its kernels), or"
        " lru: moegguf with the plain cache.",
    ),
]
Rounds = Annotated[int | None, _versus("--rounds", min=1, help="Turns; default 3 with --against, else 1.")]
MemoryLimit = Annotated[
    str | None, _versus("--memory-limit", metavar="SIZE", help="Run each system in a memory cgroup of this size.")
]
RequireLimit = Annotated[bool, _versus("--require-limit", help="Fail where no such cgroup can be made.")]
KeepPageCache = Annotated[
    bool, _versus("--keep-page-cache", help="Do not drop the file from the page cache before each run.")
]
Output = Annotated[str, _versus("-o", "--output", help="md, json, jsonl or csv.")]
Verbose = Annotated[bool, _versus("-v", "--verbose", help="Show llama.cpp's own messages.")]

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
