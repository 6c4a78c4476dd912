"""`moegguf bench`: llama-bench's flags and formats, llama.cpp itself beside moegguf, under a memory limit.

Results go to stdout, progress to stderr. Knows words and flags; what is measured lies in `engine.bench`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from moegguf.config import parse_expert_cache, parse_size
from moegguf.errors import OptionError
from moegguf.faces import bench_options as o

if TYPE_CHECKING:
    from moegguf.engine.bench_series import Entry, Outcome
    from moegguf.engine.bench_spec import Spec


def bench(
    model: o.Models,
    n_prompt: o.Prompts = ["512"],  # noqa: B006 (typer copies defaults)
    n_gen: o.Gens = ["128"],  # noqa: B006
    pg: o.Pairs = [],  # noqa: B006
    n_depth: o.Depths = ["0"],  # noqa: B006
    repetitions: o.Repetitions = 5,
    text: o.Text = None,
    greedy: o.Greedy = False,
    seed: o.Seed = 0,
    no_warmup: o.NoWarmup = False,
    delay: o.Delay = 0,
    batch: o.Batches = ["2048"],  # noqa: B006
    ubatch: o.Ubatches = ["512"],  # noqa: B006
    type_k: o.TypesK = ["f16"],  # noqa: B006
    type_v: o.TypesV = ["f16"],  # noqa: B006
    threads: o.Threads = [],  # noqa: B006
    n_gpu_layers: o.GpuLayers = ["-1"],  # noqa: B006
    flash_attn: o.FlashAttn = ["auto"],  # noqa: B006
    expert_cache: o.Caches = ["auto"],  # noqa: B006
    readers: o.Readers = 4,
    no_repack: o.NoRepack = False,
    no_overlap: o.NoOverlap = False,
    no_sweep: o.NoSweep = False,
    no_direct: o.NoDirect = False,
    policy: o.Policy = "auto",
    predictor: o.Predictor = None,
    prefetch: o.Prefetch = None,
    against: o.Against = [],  # noqa: B006
    ablate: o.Ablate = False,
    rounds: o.Rounds = None,
    memory_limit: o.MemoryLimit = None,
    require_limit: o.RequireLimit = False,
    keep_page_cache: o.KeepPageCache = False,
    output: o.Output = "md",
    verbose: o.Verbose = False,
) -> None:
    """Measure prompt and generation speed, hit rate, bytes, stalls and the share of the link's bound.

    Takes llama-bench's flags and prints its formats. `--against mmap,resident` runs llama.cpp itself in turns with it.
    """
    flags = dict(locals())
    from moegguf.faces.bench_format import FORMATS

    if output not in FORMATS:
        raise OptionError(f"-o takes {', '.join(FORMATS)}, but not {output!r}.")
    rivals = list(dict.fromkeys(o.split(against) + (_ablations(policy, prefetch) if ablate else [])))
    groups = _groups(flags, rivals, limit := _limit(memory_limit, require_limit))
    rows = _measure(groups, rounds or (3 if rivals else 1), limit, not keep_page_cache)
    typer.echo(FORMATS[output](rows), nl=False)
    if any(row["error"] and row["system"] == "moegguf" for row in rows):
        raise typer.Exit(1)


def _ablations(policy: str, prefetch: bool | None) -> list[str]:
    """What to leave out in turn; where nothing is prefetched, leaving that out would be the same run twice."""
    from moegguf.engine.bench_series import WITHOUT

    names = list(WITHOUT)
    if prefetch is False or (prefetch is None and policy != "auto"):
        names.remove("no-prefetch")
        typer.echo("--ablate without no-prefetch: nothing is prefetched unless --prefetch asks for it.", err=True)
    return names


def _groups(flags: dict[str, Any], rivals: Sequence[str], limit: int | None) -> list[list[Entry]]:
    """The systems to run in turns, for every combination of settings."""
    from moegguf.engine.bench_series import entries, settings
    from moegguf.engine.machine import count_cpus
    from moegguf.models.find import find_model

    flags = flags | {"model": [str(find_model(name)) for name in flags["model"]]}
    caches = o.split(flags["expert_cache"])
    for cache in caches:
        parse_expert_cache(cache)
    lists: dict[str, Sequence[Any]] = {
        "model": flags["model"],
        "n_gpu_layers": o.parse_ints(flags["n_gpu_layers"], "-ngl"),
        "n_batch": o.parse_ints(flags["batch"], "-b"),
        "n_ubatch": o.parse_ints(flags["ubatch"], "-ub"),
        "type_k": o.split(flags["type_k"]),
        "type_v": o.split(flags["type_v"]),
        "flash_attn": o.split(flags["flash_attn"]),
        "n_threads": o.parse_ints(flags["threads"], "-t") or [count_cpus()],
    }
    return [entries(spec, caches, rivals, limit) for spec in settings(_base(flags), lists)]


def _base(flags: dict[str, Any]) -> Spec:
    from moegguf.engine.bench_spec import Spec, Test
    from moegguf.engine.steering import Steer

    Steer(flags["policy"], flags["predictor"])  # a name that nobody has is refused before anything runs
    tests = o.parse_tests(flags["n_prompt"], flags["n_gen"], flags["pg"], flags["n_depth"])
    text = flags["text"]
    switches = {name: not flags[f"no_{name}"] for name in ("overlap", "sweep", "direct")}
    return Spec(
        model=flags["model"][0],
        tests=tuple(Test(*test) for test in tests),
        repack=not flags["no_repack"],
        repetitions=flags["repetitions"],
        store={"readers": flags["readers"]} | switches,
        policy=flags["policy"],
        predictor=flags["predictor"],
        prefetch=flags["prefetch"],
        watchdog=not flags["ablate"],
        feed="greedy" if flags["greedy"] else "text" if text else "random",
        text=str(text) if text else None,
        seed=flags["seed"],
        warmup=not flags["no_warmup"],
        delay_s=flags["delay"],
        verbose=flags["verbose"],
    )


def _limit(size: str | None, require: bool) -> int | None:
    """Bytes of the limit; None without one, and where none can be set, which is said."""
    from moegguf.engine.bench_series import limit_fault

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
        typer.echo(f"going on without a memory limit: {fault}", err=True)
    return None if fault else n_bytes


def _measure(
    groups: Sequence[Sequence[Entry]], rounds: int, limit: int | None, drop_cache: bool
) -> list[dict[str, Any]]:
    """Rows of all groups; when interrupted, of what was finished."""
    from moegguf.engine.bench_rows import make_rows
    from moegguf.engine.bench_series import ProcessRunner, run_series

    outcomes: list[list[Outcome]] = [[] for _ in groups]
    runner = ProcessRunner(limit, drop_cache)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was made is removed then, too
    try:
        for group, found in zip(groups, outcomes, strict=True):
            for outcome in run_series(group, rounds, runner, lambda line: typer.echo(line, err=True)):
                found.append(outcome)
    except KeyboardInterrupt:
        typer.echo("interrupted; these are the runs that were finished.", err=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    return [row for found in outcomes for row in make_rows(found, limit)]
