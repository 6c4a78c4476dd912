"""Several systems measured in turns: A B C, A B C, each run a process of its own under the same memory limit.

Before each run the model's pages are dropped from the page cache, so that no run reads what another has cached. A run
killed by the limit is a result, not an error. What is measured is in bench/measure.py.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moegguf.bench.memory_limit import LimitError, drop_page_cache, make_group, memory_limit
from moegguf.bench.spec import SYSTEMS, Spec
from moegguf.child import child_command, child_environment
from moegguf.controller.strategies import OWN, STRATEGIES, find_strategy
from moegguf.engine.machine import read_memory
from moegguf.engine.memory import MARGIN_BYTES, memory_needs
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import ggml_type
from moegguf.native.store import STAGING_TENSORS
from moegguf.options import DRAFTS, PLACEMENTS

KILLED = "killed by the memory limit"
_KERNELS = {"plain": False, "repacked": True}

DECIDING = [name for name in STRATEGIES if name != OWN]  # "moegguf" is the program

# One feature off. ProMoE's early preemption has two parts: misses are read before all prefetches ("no-demand-first"),
# and stale prefetches of the layer are dropped ("no-dropping"). Its reordered inference is computing by expert, those
# that are there first.
WITHOUT: dict[str, dict[str, Any]] = {
    "no-prefetch": {"prefetch": False},
    "no-chunks": {"store": {"chunked": False}},
    "no-demand-first": {"store": {"demand_first": False}},
    "no-dropping": {"store": {"preempt": False}},
    "no-reordering": {"store": {"overlap": False}},
}

# ProMoE's ablation (figures 13 and 14) adds feature after feature to an LRU cache that waits for a layer's experts (the
# strategy "none"): prefetching alone, in chunks, with early preemption. Reordered inference makes it whole.
STEPS: dict[str, dict[str, Any]] = {
    "step-prefetch": {"store": dict.fromkeys(("chunked", "demand_first", "preempt", "overlap"), False)},
    "step-chunks": {"store": dict.fromkeys(("demand_first", "preempt", "overlap"), False)},
    "step-preemption": {"store": {"overlap": False}},
}
# Prompts on a device: as many tokens at once as have slots, or through so many tensors, whatever a plan would take.
ON_DEVICE: dict[str, dict[str, Any]] = {
    "no-staging": {"store": {"staging": 0}},
    **{f"staging-{n}": {"store": {"staging": n}} for n in range(1, STAGING_TENSORS + 1)},
}
# The same with another --placement, or other drafts.
ELSEWHERE: dict[str, dict[str, Any]] = {
    **{f"placed-{choice}": {"placement": choice} for choice in PLACEMENTS},
    **{f"draft-{choice}": {"draft": choice} for choice in DRAFTS},
}
VARIANTS = WITHOUT | STEPS | ON_DEVICE | ELSEWHERE

Progress = Callable[[str], object]


@dataclass(frozen=True)
class BenchedSystem:
    """One system with one group of settings.

    label: its name on the command line. note: how it was run. compared: the others are compared with it.
    """

    label: str
    spec: Spec
    note: str = ""
    compared: bool = False

    @property
    def is_llama_cpp(self) -> bool:
        """Whether it is llama.cpp without the expert cache."""
        return self.spec.system != "moegguf"


@dataclass(frozen=True)
class Outcome:
    """One run: the child's result, or the error that ended it."""

    system: BenchedSystem
    round: int
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    cgroup_peak_bytes: int = 0
    page_cache_kept_bytes: int = 0


Runner = Callable[[BenchedSystem], Outcome]


def resident_bytes(layout: ExpertLayout, spec: Spec) -> int:
    """Bytes that llama.cpp needs for every weight of the model, the KV cache and its buffers."""
    n_ctx = max(test.n_tokens for test in spec.tests)
    beside = memory_needs(layout, n_ctx, spec.n_ubatch, ggml_type(spec.type_k), ggml_type(spec.type_v))
    return layout.expert_bytes + beside.total_bytes(0)


def compared_system(name: str, base: Spec, layout: ExpertLayout, limit_bytes: int | None) -> BenchedSystem:
    """The system that `--against` names: "stock", "mmap", "resident", "moegguf", each also "-plain", "-repacked"; or of
    VARIANTS, or of `controller.strategies`, as a whole.

    Repacked weights are a copy in memory. "stock" and "mmap" load as llama.cpp's default, which repacks; when that copy
    does not fit, the weights stay in the file instead, as the default would be killed. Raises OptionError for another
    name.
    """
    if name in DECIDING:
        store = {key: value for key, value in base.store.items() if key not in find_strategy(name).switches}
        return BenchedSystem(
            name, replace(base, strategy=name, policy="auto", predictor=None, prefetch=None, store=store)
        )
    if name in VARIANTS:
        changed = VARIANTS[name]
        return BenchedSystem(name, replace(base, **changed | {"store": base.store | changed.get("store", {})}))
    system, _, kernels = name.partition("-")
    if system not in SYSTEMS or kernels not in ("", *_KERNELS):
        raise OptionError(
            "--against takes stock, mmap, resident and moegguf, each also with -plain or -repacked, and"
            f" {', '.join([*DECIDING, *VARIANTS])}, but not {name!r}."
        )
    repack = _KERNELS.get(kernels, base.repack if system == "moegguf" else True)
    llama_cpp = "llama.cpp without patches" if system == "stock" else "llama.cpp"
    note = f"{llama_cpp}, {'default kernels' if repack else 'no repack'}" if system != "moegguf" else ""
    if name in ("mmap", "stock"):
        free = limit_bytes or read_memory().available_bytes
        if resident_bytes(layout, base) + MARGIN_BYTES > free:
            repack, note = False, f"{llama_cpp}, no repack: the repacked copy of the weights does not fit"
    return BenchedSystem(name, replace(base, system=system, repack=repack), note)


def combinations(base: Spec, lists: dict[str, Sequence[Any]]) -> Iterator[Spec]:
    """Every combination of the listed values, in the order of `lists`, the last one changing fastest."""
    specs = [base]
    for name, values in lists.items():
        specs = [replace(spec, **{name: value}) for spec in specs for value in values]
    yield from specs


def make_systems(
    base: Spec, expert_caches: Sequence[str], against: Sequence[str], limit_bytes: int | None = None
) -> list[BenchedSystem]:
    """The systems of one group of settings: moegguf with each budget, then those of `against`. Raises OptionError."""
    layout = read_layout(base.model)
    kernels = "" if base.repack else "no repack"
    own = [BenchedSystem(base.strategy, replace(base, expert_cache=cache), kernels, True) for cache in expert_caches]
    return own + [compared_system(name, own[0].spec, layout, limit_bytes) for name in against]


def run_series(
    group: Sequence[BenchedSystem], rounds: int, run: Runner, progress: Progress | None = None
) -> Iterator[Outcome]:
    """Every system once per round: A B C A B C, each outcome as soon as it is known. A failed one is not run again."""
    failed: list[BenchedSystem] = []
    for n, system in itertools.product(range(rounds), group):
        if any(system is other for other in failed):
            continue
        if progress is not None:
            progress(f"round {n + 1}/{rounds}: {_title(system)}")
        outcome = replace(run(system), round=n)
        if outcome.error:
            failed.append(system)
        if progress is not None:
            progress(_summary(outcome))
        yield outcome


def _title(system: BenchedSystem) -> str:
    cache = "" if system.is_llama_cpp else f" {system.spec.expert_cache}"
    return system.label + cache + (f" ({system.note})" if system.note else "")


def _summary(outcome: Outcome) -> str:
    if outcome.error:
        return f"  {outcome.error}"
    parts = [f"load {outcome.result['load_s']:.1f} s"]
    for test in outcome.result["tests"]:
        n_tokens = test["n_prompt"] + test["n_gen"]
        speeds = [f"{n_tokens / ns * 1e9:.2f}" for ns in test["samples_ns"]]
        parts.append(f"{test_name(test)} {' '.join(speeds)} t/s")
    if outcome.page_cache_kept_bytes:
        parts.append(f"{outcome.page_cache_kept_bytes >> 20} MiB of the file stayed in the page cache")
    return "\n  ".join(["  " + "; ".join(parts), *outcome.result.get("warnings", ())])


def test_name(test: dict[str, Any]) -> str:
    """llama-bench's name of a test: pp512, tg128, pp512+tg128, each with a suffix " @ d256" for a depth."""
    parts = [f"pp{test['n_prompt']}" if test["n_prompt"] else "", f"tg{test['n_gen']}" if test["n_gen"] else ""]
    return "+".join(filter(None, parts)) + (f" @ d{test['n_depth']}" if test["n_depth"] else "")


test_name.__test__ = False  # type: ignore[attr-defined]  # not a pytest test


def limit_fault(limit_bytes: int) -> str:
    """The reason why no limit can be set on this machine; empty when one can."""
    try:
        make_group(limit_bytes).remove()
    except LimitError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class ProcessRunner:
    """Runs a system in a child process, with the file's pages dropped, under a limit when there is one. stock: the
    folder with the libraries of llama.cpp without patches, where one of the systems needs them."""

    limit_bytes: int | None = None
    drop_cache: bool = True
    stock: Path | None = None

    def __call__(self, system: BenchedSystem) -> Outcome:
        paths = [shard.path for shard in read_layout(system.spec.model).shards]
        kept = drop_page_cache(paths) if self.drop_cache else 0
        command = [*child_command("moegguf.bench.measure"), system.spec.as_json()]
        environment = child_environment(MOEGGUF_HOOKS=str(int(not system.is_llama_cpp)))
        if system.spec.system == "stock":
            environment |= {"MOEGGUF_LIBRARY": str(self.stock), "MOEGGUF_TRIAL_LOAD": "0"}  # a trial tries the store
        with memory_limit(self.limit_bytes) as group:
            done = subprocess.run(
                group.command(command) if group else command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=None if system.spec.verbose else subprocess.PIPE,
                check=False,
            )
            killed = group is not None and done.returncode != 0 and group.oom_kills > 0
            peak = group.peak_bytes if group else 0
        result = _last_json(done.stdout.decode(errors="replace").splitlines())
        error = KILLED if killed else _failure(result, done)
        return Outcome(system, 0, {} if error else result, error, peak, kept)


def _last_json(lines: Iterable[str]) -> dict[str, Any]:
    for line in reversed(list(lines)):
        if line.startswith("{"):
            return dict(json.loads(line))
    return {}


def _failure(result: dict[str, Any], done: subprocess.CompletedProcess[bytes]) -> str:
    if "error" in result:
        return str(result["error"])
    if done.returncode == 0 and result:
        return ""
    last = (done.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return f"the process ended with {ended}" + (f": {last[0]}" if last else "")
