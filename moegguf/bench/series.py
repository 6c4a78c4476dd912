"""Several systems measured in turns: A B C, A B C, each run a process of its own under the same limit.

Before each run the model's pages are dropped from the page cache, so that nobody reads what another has fetched. A run
that the limit kills is a result, not an accident. Knows processes and limits; `bench` knows what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moegguf.bench.limits import LimitError, drop_page_cache, make_group, memory_limit
from moegguf.bench.spec import SYSTEMS, Spec, ggml_type
from moegguf.engine.machine import read_memory
from moegguf.engine.memory import memory_needs
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout

KILLED = "killed by the memory limit"
_KERNELS = {"plain": False, "repacked": True}

# moegguf without one of the things it does: ProMoE's ablation (section 7), and the plain cache.
WITHOUT: dict[str, dict[str, Any]] = {
    "lru": {"policy": "lru", "predictor": "none", "prefetch": False},
    "no-prefetch": {"prefetch": False},
    "no-chunks": {"store": {"chunked": False}},
    "no-preemption": {"store": {"preempt": False}},
    "no-reordering": {"store": {"overlap": False}},
}
_MARGIN_BYTES = 256 << 20

Progress = Callable[[str], object]


@dataclass(frozen=True)
class BenchedSystem:
    """One system with one group of settings. `label` is what the user calls it, `note` how it was run."""

    label: str
    spec: Spec
    note: str = ""

    @property
    def is_rival(self) -> bool:
        return self.spec.system != "moegguf"


@dataclass(frozen=True)
class Outcome:
    """One run: the child's result, or why there is none."""

    entry: BenchedSystem
    round: int
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    cgroup_peak_bytes: int = 0
    page_cache_kept_bytes: int = 0

    @property
    def killed(self) -> bool:
        return self.error == KILLED


Runner = Callable[[BenchedSystem], Outcome]


def run_bytes(layout: ExpertLayout, spec: Spec) -> int:
    """Memory that llama.cpp needs to hold every weight of the model, the KV cache and its buffers."""
    n_ctx = max(test.n_tokens for test in spec.tests)
    beside = memory_needs(layout, n_ctx, spec.n_ubatch, ggml_type(spec.type_k), ggml_type(spec.type_v))
    return layout.expert_bytes + beside.total_bytes(0)


def rival(name: str, base: Spec, layout: ExpertLayout, limit_bytes: int | None) -> BenchedSystem:
    """llama.cpp itself, or moegguf with other kernels: "mmap", "resident", "moegguf", each also "-plain", "-repacked".

    Repacked weights are a copy in memory. Plain "mmap" is llama.cpp's default, which repacks; when that copy does not
    fit, the default would only be killed, and its best is to leave the weights in the file: so it is run like that.

    The names in WITHOUT are moegguf, too, with something left out.

    Raises OptionError for another name.
    """
    if name in WITHOUT:
        changed = WITHOUT[name]
        return BenchedSystem(name, replace(base, **changed | {"store": base.store | changed.get("store", {})}))
    system, _, kernels = name.partition("-")
    if system not in SYSTEMS or kernels not in ("", *_KERNELS):
        raise OptionError(
            "--against knows mmap, resident and moegguf, each also with -plain or -repacked, and"
            f" {', '.join(WITHOUT)}, but not {name!r}."
        )
    repack = _KERNELS.get(kernels, base.repack if system == "moegguf" else True)
    note = f"llama.cpp, {'default kernels' if repack else 'no repack'}" if system != "moegguf" else ""
    if name == "mmap":
        free = limit_bytes or read_memory().available_bytes
        if run_bytes(layout, base) + _MARGIN_BYTES > free:
            repack, note = False, "llama.cpp, no repack: the repacked copy of the weights does not fit"
    return BenchedSystem(name, replace(base, system=system, repack=repack), note)


def settings(base: Spec, lists: dict[str, Sequence[Any]]) -> Iterator[Spec]:
    """Every combination of the listed values, in the order of `lists`, the last one changing fastest."""
    specs = [base]
    for name, values in lists.items():
        specs = [replace(spec, **{name: value}) for spec in specs for value in values]
    yield from specs


def entries(
    base: Spec, expert_caches: Sequence[str], against: Sequence[str], limit_bytes: int | None = None
) -> list[BenchedSystem]:
    """The systems of one group of settings: moegguf with each budget, then the rivals. Raises OptionError."""
    layout = read_layout(base.model)
    kernels = "" if base.repack else "no repack"
    own = [BenchedSystem("moegguf", replace(base, expert_cache=cache), kernels) for cache in expert_caches]
    others = [rival(name, replace(base, expert_cache=expert_caches[0]), layout, limit_bytes) for name in against]
    return own + others


def schedule(group: Sequence[BenchedSystem], rounds: int) -> Iterator[tuple[int, BenchedSystem]]:
    """A B C A B C ..."""
    for n in range(rounds):
        for entry in group:
            yield n, entry


def run_series(
    group: Sequence[BenchedSystem], rounds: int, run: Runner, progress: Progress | None = None
) -> Iterator[Outcome]:
    """Every entry once per round, in turns, each outcome as soon as it is known. One that failed is not tried again."""
    failed: list[BenchedSystem] = []
    for n, entry in schedule(group, rounds):
        if any(entry is other for other in failed):
            continue
        if progress is not None:
            progress(f"round {n + 1}/{rounds}: {_title(entry)}")
        outcome = replace(run(entry), round=n)
        if outcome.error:
            failed.append(entry)
        if progress is not None:
            progress(_summary(outcome))
        yield outcome


def _title(entry: BenchedSystem) -> str:
    cache = "" if entry.is_rival else f" {entry.spec.expert_cache}"
    return entry.label + cache + (f" ({entry.note})" if entry.note else "")


def _summary(outcome: Outcome) -> str:
    if outcome.error:
        return f"  {outcome.error}"
    words = [f"load {outcome.result['load_s']:.1f} s"]
    for test in outcome.result["tests"]:
        n_tokens = test["n_prompt"] + test["n_gen"]
        speeds = [f"{n_tokens / ns * 1e9:.2f}" for ns in test["samples_ns"]]
        words.append(f"{test_name(test)} {' '.join(speeds)} t/s")
    if outcome.page_cache_kept_bytes:
        words.append(f"{outcome.page_cache_kept_bytes >> 20} MiB of the file stayed in the page cache")
    return "\n  ".join(["  " + "; ".join(words), *outcome.result.get("warnings", ())])


def test_name(test: dict[str, Any]) -> str:
    """llama-bench's name of a test: pp512, tg128, pp512+tg128, each with "@ d256" behind it for a depth."""
    parts = [f"pp{test['n_prompt']}" if test["n_prompt"] else "", f"tg{test['n_gen']}" if test["n_gen"] else ""]
    return "+".join(filter(None, parts)) + (f" @ d{test['n_depth']}" if test["n_depth"] else "")


test_name.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test


def limit_fault(limit_bytes: int) -> str:
    """Why no limit can be set here, in one sentence; empty when one can."""
    try:
        make_group(limit_bytes).remove()
    except LimitError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class ProcessRunner:
    """Runs an entry in a child process, with the file's pages dropped, under a limit when there is one."""

    limit_bytes: int | None = None
    drop_cache: bool = True

    def __call__(self, entry: BenchedSystem) -> Outcome:
        paths = [shard.path for shard in read_layout(entry.spec.model).shards]
        kept = drop_page_cache(paths) if self.drop_cache else 0
        command = [sys.executable, "-m", "moegguf.bench.measure", entry.spec.as_json()]
        environment = os.environ | {"MOEGGUF_HOOKS": str(int(not entry.is_rival))}
        with memory_limit(self.limit_bytes) as group:
            done = subprocess.run(
                group.command(command) if group else command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=None if entry.spec.verbose else subprocess.PIPE,
                check=False,
            )
            killed = group is not None and done.returncode != 0 and group.oom_kills > 0
            peak = group.peak_bytes if group else 0
        result = _last_json(done.stdout.decode(errors="replace").splitlines())
        error = KILLED if killed else _failure(result, done)
        return Outcome(entry, 0, {} if error else result, error, peak, kept)


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
