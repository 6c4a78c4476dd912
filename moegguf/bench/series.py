"""Runs the systems of a measurement in turns, A B C A B C, and defines the options of a
measurement. Each run is a separate process, under the memory limit if one is set.

Unless `ProcessRunner.drop_cache` is False, the model's pages are dropped from the page
cache before each run, so that no run benefits from pages that another run has read.
After a run that fails, for example because the limit killed it, its system is not run
again and its rows contain the error. The module bench/measure.py measures one run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moegguf.bench.memory_limit import (
    LimitError,
    drop_page_cache,
    make_group,
    memory_limit,
)
from moegguf.child import child_command, child_environment
from moegguf.controller.strategies import OWN, STRATEGIES, find_strategy
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import MARGIN_BYTES, read_memory
from moegguf.engine.memory import Sizes, pad_context
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import ggml_type
from moegguf.native.store import STAGING_TENSORS
from moegguf.options import BUDGETS, DRAFTS, PLACEMENTS
from moegguf.quantities import parse_link

SYSTEMS = ("moegguf", "stock", "mmap", "resident")
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}  # {option: value of llama.cpp's parameter}
CHOICES = {
    "system": SYSTEMS,
    "feed": ("random", "text", "greedy"),
    "flash_attn": tuple(FLASH_ATTN),
}
KILLED = "killed by the memory limit"

# The names of all strategies except moegguf's own, whose name is already a system's
# name.
DECIDING = [name for name in STRATEGIES if name != OWN]
VARIANTS: dict[str, dict[str, Any]] = {
    # Variants with one feature off. ProMoE's early preemption consists of two features
    # here. Misses are read before all prefetches (off in "no-demand-first"), and a
    # routing event drops the stale prefetches of its layer (off in "no-dropping").
    # ProMoE's reordered inference (off in "no-reordering") computes expert by expert,
    # and begins with the experts that have slots.
    "no-prefetch": {"loading": {"prefetch": False}},
    "no-chunks": {"store": {"chunked": False}},
    "no-demand-first": {"store": {"demand_first": False}},
    "no-dropping": {"store": {"preempt": False}},
    "no-reordering": {"store": {"overlap": False}},
    # ProMoE's ablation (figures 13 and 14) begins with an LRU cache that waits for all
    # experts of a layer (the strategy "none") and adds one feature after another.
    # "step-prefetch" adds prefetching, "step-chunks" reads prefetches in chunks, and
    # "step-preemption" adds early preemption. Adding reordered inference then results
    # in ProMoE.
    "step-prefetch": {
        "store": dict.fromkeys(("chunked", "demand_first", "preempt", "overlap"), False)
    },
    "step-chunks": {
        "store": dict.fromkeys(("demand_first", "preempt", "overlap"), False)
    },
    "step-preemption": {"store": {"overlap": False}},
    # Variants that change how a device processes prompts. With "no-staging", a pass has
    # no more tokens than the slots can serve. With "staging-N", prompts use N staging
    # tensors instead of the planned number.
    "no-staging": {"store": {"staging": 0}},
    **{
        f"staging-{n}": {"store": {"staging": n}} for n in range(1, STAGING_TENSORS + 1)
    },
    # Variants that change only --placement or only --draft.
    **{f"placed-{choice}": {"loading": {"placement": choice}} for choice in PLACEMENTS},
    **{f"draft-{choice}": {"draft": choice} for choice in DRAFTS},
}

Progress = Callable[[str], object]


@dataclass(frozen=True)
class Test:
    """A test with `n_parallel` sequences that are evaluated together. Each of its three
    token counts may be 0, but not both n_prompt and n_gen."""

    # Number of timed prompt tokens per sequence, which are evaluated together.
    n_prompt: int
    # Number of timed tokens per sequence that are evaluated one by one after the
    # prompt.
    n_gen: int
    n_depth: int = 0  # number of tokens per sequence before the timed ones
    n_parallel: int = 1

    @property
    def n_tokens(self) -> int:
        """The number of tokens that the context of a sequence must hold, timed or
        not."""
        return self.n_depth + self.n_prompt + self.n_gen

    @property
    def n_measured(self) -> int:
        """The total number of timed tokens of all sequences."""
        return self.n_parallel * (self.n_prompt + self.n_gen)


@dataclass(frozen=True)
class Spec:
    """The options of one measurement process, which receives them as JSON.

    system: "moegguf", or one of three forms of llama.cpp. "stock" is llama.cpp without
    patches (bench/stock.py). "mmap" is moegguf's build without the expert cache, with
    the file mapped. "resident" is moegguf's build with every weight in memory.

    strategy: a name in controller.strategies. `store`, and a policy, a predictor or
    prefetching in `loading`, replace parts of the strategy.

    repack: True: weights are stored in the layout of the CPU's fastest kernels.

    feed: "random" tokens as in llama-bench, tokens of the file `text` ("text"), or the
    model's own most probable tokens in the decoding steps ("greedy").

    loading: other keywords of `Llama`, with values that JSON can express: budgets,
    placement, mirrors, a warm start, and parts of the strategy.

    draft: as in `Llama`. Greedy answers are then timed as a whole; None: each decoding
    step is timed.

    simulate_link: a link such as "24GB/s,35us" to a simulated device, which runs on
    `simulate_threads` threads (0: the same number as the CPU). Without a budget for
    GPUs and a placement, the layers run on the device, which also holds the slots.
    """

    model: str
    tests: tuple[Test, ...]
    system: str = "moegguf"
    repack: bool = True
    loading: dict[str, Any] = field(default_factory=dict)
    repetitions: int = 5
    n_threads: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_gpu_layers: int = -1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    store: dict[str, Any] = field(default_factory=dict)
    strategy: str = "moegguf"
    feed: str = "random"
    text: str | None = None
    draft: str | None = None
    simulate_link: str | None = None
    simulate_threads: int = 0
    seed: int = 0
    warmup: bool = True
    delay_s: float = 0.0
    bound: bool = False  # also computes the bound of each test (bench/bound.py)
    verbose: bool = False

    @property
    def n_parallel(self) -> int:
        """The number of sequences that the context must hold."""
        return max(test.n_parallel for test in self.tests)

    @property
    def sizes(self) -> dict[str, Any]:
        """The keywords of `Llama` for the context and the passes."""
        n_ctx = pad_context(max(test.n_tokens for test in self.tests))
        return {
            "n_ctx": n_ctx,
            "n_seq_max": self.n_parallel,
            "kv_tokens": self.n_parallel * n_ctx,
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "type_k": ggml_type(self.type_k),
            "type_v": ggml_type(self.type_v),
            "flash_attn": {"on": True, "off": False, "auto": None}[self.flash_attn],
        }

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise OptionError(
                    f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(known)}."
                )
        if not self.tests or any(test.n_prompt + test.n_gen < 1 for test in self.tests):
            raise OptionError(
                "there is nothing to measure; give -p, -n or -pg a number above zero."
            )
        if any(test.n_parallel < 1 for test in self.tests):
            raise OptionError(
                f"--parallel must be at least 1, but is {min(test.n_parallel for test in self.tests)}."
            )
        if self.simulate_link is not None:
            parse_link(self.simulate_link)
        LoadSpec.of(self.loading | self.sizes)
        if self.draft is not None and self.feed != "greedy":
            raise OptionError(
                "--draft needs answers of the model's own choice, not random tokens; add --greedy, and set the prompt's"
                " length with -d."
            )
        if self.draft is not None and (self.bound or self.n_parallel > 1):
            raise OptionError(
                "--draft measures one answer, whose passes differ each time; leave --bound and --parallel out."
            )
        bare = next(
            (
                test.n_gen
                for test in self.tests
                if test.n_gen and not test.n_depth + test.n_prompt
            ),
            0,
        )
        if self.draft is not None and bare:
            raise OptionError(
                f"--draft measures answers to a prompt, but the test of {bare} answer tokens (-n) has no prompt; give"
                " the prompt's length with -d, or give -n 0 and -pg."
            )
        for name, least in {
            "repetitions": 1,
            "n_threads": 0,
            "n_batch": 1,
            "n_ubatch": 1,
        }.items():
            if getattr(self, name) < least:
                raise OptionError(
                    f"{name} is {getattr(self, name)}, but must be at least {least}."
                )

    def as_json(self) -> str:
        """Returns the options as the JSON text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Parses the text that `as_json` returned. Raises OptionError for values that
        are not allowed."""
        values = json.loads(text)
        tests = tuple(Test(**test) for test in values["tests"])
        return cls(**values | {"tests": tests})


@dataclass(frozen=True)
class BenchedSystem:
    """One system with one group of settings."""

    label: str  # name on the command line, or the strategy of a system with `compared`
    spec: Spec
    note: str = ""  # details of the run, printed below the table
    # True: this system's rows contain ratios to each system without `compared`.
    compared: bool = False

    @property
    def is_llama_cpp(self) -> bool:
        """Returns whether the system is llama.cpp without the expert cache."""
        return self.spec.system != "moegguf"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run: the result, or the error that ended it."""

    system: BenchedSystem
    round: int
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    cgroup_peak_bytes: int = 0  # peak memory of the cgroup; 0 without a memory limit
    # Bytes of the file that were still cached after its pages had been dropped.
    page_cache_kept_bytes: int = 0


Runner = Callable[[BenchedSystem], Outcome]


def resident_bytes(layout: ExpertLayout, spec: Spec) -> int:
    """Returns the planned total size, in bytes, of all weights, the KV cache of all
    sequences and llama.cpp's buffers."""
    sizes = Sizes.of(layout, LoadSpec.of({**spec.sizes, "draft": "off"}))
    return layout.expert_bytes + sizes.needs(layout, spec.n_ubatch).total_bytes


def compared_system(
    name: str, base: Spec, layout: ExpertLayout, limit_bytes: int | None
) -> BenchedSystem:
    """Returns the system for a name of `--against`. Possible names are "stock", "mmap",
    "resident" and "moegguf", each also with "-plain" or "-repacked", and the names in
    VARIANTS and DECIDING.

    Repacked weights are a copy in memory. "stock" and "mmap" load with llama.cpp's
    default, which repacks. If the copy does not fit into memory, llama.cpp would be
    killed. These systems then do not repack, and the weights stay in the file. Raises
    OptionError for an unknown name.
    """
    if name in DECIDING:
        store = {
            key: value
            for key, value in base.store.items()
            if key not in find_strategy(name).switches
        }
        loading = {
            key: value
            for key, value in base.loading.items()
            if key not in ("policy", "predictor", "prefetch")
        }
        return BenchedSystem(
            name, replace(base, strategy=name, store=store, loading=loading)
        )
    if name in VARIANTS:
        changed = VARIANTS[name]
        return BenchedSystem(
            name,
            replace(
                base,
                store=base.store | changed.get("store", {}),
                loading=base.loading | changed.get("loading", {}),
                draft=changed.get("draft", base.draft),
            ),
        )
    system, _, kernels = name.partition("-")
    if system not in SYSTEMS or kernels not in ("", "plain", "repacked"):
        raise OptionError(
            f"--against must name stock, mmap, resident or moegguf (each also with -plain or -repacked), or one of"
            f" {', '.join([*DECIDING, *VARIANTS])}, but names {name!r}."
        )
    if system == "moegguf":
        return BenchedSystem(
            name,
            replace(
                base,
                system=system,
                repack=kernels == "repacked" if kernels else base.repack,
            ),
        )
    repack = kernels != "plain"
    how = "no repack" if kernels == "plain" else "default kernels"
    if name in ("mmap", "stock"):
        free = limit_bytes or read_memory().available_bytes
        if resident_bytes(layout, base) + MARGIN_BYTES > free:
            repack = False
            how = "no repack: the repacked copy of the weights does not fit"
    llama_cpp = "llama.cpp without patches" if system == "stock" else "llama.cpp"
    return BenchedSystem(
        name, replace(base, system=system, repack=repack), f"{llama_cpp}, {how}"
    )


def combinations(base: Spec, lists: dict[str, Sequence[Any]]) -> list[Spec]:
    """Returns copies of `base` with every combination of the listed values, in the
    order of `lists`. The last list changes fastest."""
    return [
        replace(base, **dict(zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
    ]


def make_systems(
    base: Spec,
    expert_caches: Sequence[str],
    against: Sequence[str],
    limit_bytes: int | None = None,
) -> list[BenchedSystem]:
    """Returns the systems of one group of settings: moegguf with each budget, then the
    systems that `against` names.

    Raises OptionError.
    """
    layout = read_layout(base.model)
    kernels = "" if base.repack else "no repack"
    specs = [
        replace(base, loading=base.loading | {BUDGETS["RAM"]: cache})
        for cache in expert_caches
    ]
    own = [BenchedSystem(base.strategy, spec, kernels, True) for spec in specs]
    return own + [
        compared_system(name, own[0].spec, layout, limit_bytes) for name in against
    ]


def run_series(
    group: Sequence[BenchedSystem], rounds: int, run: Runner, progress: Progress
) -> Iterator[Outcome]:
    """Runs every system once in each round: A B C A B C. Yields each outcome as soon as
    it is known. A system that failed is not run again."""
    failed: list[BenchedSystem] = []
    for n, system in itertools.product(range(rounds), group):
        if any(system is other for other in failed):
            continue
        cache = "" if system.is_llama_cpp else f" {system.spec.loading[BUDGETS['RAM']]}"
        progress(
            f"round {n + 1}/{rounds}: {system.label}{cache}"
            + (f" ({system.note})" if system.note else "")
        )
        outcome = replace(run(system), round=n)
        if outcome.error:
            failed.append(system)
        progress(_summary(outcome))
        yield outcome


def _summary(outcome: Outcome) -> str:
    if outcome.error:
        return f"  {outcome.error}"
    parts = [f"load {outcome.result['load_s']:.1f} s"]
    for test in outcome.result["tests"]:
        parts.append(
            f"{test_name(test)} {' '.join(f'{speed:.2f}' for speed in speeds(test))} t/s"
        )
    if outcome.page_cache_kept_bytes:
        parts.append(
            f"{outcome.page_cache_kept_bytes >> 20} MiB of the file stayed in the page cache"
        )
    return "\n  ".join(["  " + "; ".join(parts), *outcome.result.get("warnings", ())])


def speeds(test: dict[str, Any]) -> list[float]:
    """Returns the tokens per second of each repetition."""
    n_tokens = test["n_parallel"] * (test["n_prompt"] + test["n_gen"])
    return [n_tokens / ns * 1e9 for ns in test["samples_ns"]]


def test_name(test: dict[str, Any]) -> str:
    """Returns llama-bench's name for a test: pp512, tg128, pp512+tg128. A depth adds
    the suffix " @ d256". Eight sequences evaluated together add the prefix "8x "."""
    together = f"{test['n_parallel']}x " if test["n_parallel"] > 1 else ""
    parts = [
        f"pp{test['n_prompt']}" if test["n_prompt"] else "",
        f"tg{test['n_gen']}" if test["n_gen"] else "",
    ]
    return (
        together
        + "+".join(filter(None, parts))
        + (f" @ d{test['n_depth']}" if test["n_depth"] else "")
    )


test_name.__test__ = False  # type: ignore[attr-defined]  # not a pytest test


def environment_of(spec: Spec, stock: Path | None = None) -> dict[str, str]:
    """Returns the environment of a process that measures a system. `stock` is the
    folder of unpatched llama.cpp."""
    environment = child_environment(MOEGGUF_HOOKS=str(int(spec.system == "moegguf")))
    if spec.system == "stock":
        # No trial load, because it would test moegguf's store
        environment |= {"MOEGGUF_LIBRARY": str(stock), "MOEGGUF_TRIAL_LOAD": "0"}
    return environment


def limit_fault(limit_bytes: int) -> str:
    """Returns the reason why no memory limit can be set on this machine; "" if a limit
    can be set."""
    try:
        make_group(limit_bytes).remove()
    except LimitError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class ProcessRunner:
    """Runs a system in a child process, under a memory limit if `limit_bytes` is given.
    First drops the model's pages from the page cache, unless `drop_cache` is False.

    stock: the folder with the libraries of unpatched llama.cpp, if one of the systems
    needs them.
    """

    limit_bytes: int | None = None
    drop_cache: bool = True
    stock: Path | None = None

    def __call__(self, system: BenchedSystem) -> Outcome:
        paths = [shard.path for shard in read_layout(system.spec.model).shards]
        kept = drop_page_cache(paths) if self.drop_cache else 0
        command = [*child_command("moegguf.bench.measure"), system.spec.as_json()]
        with memory_limit(self.limit_bytes) as group:
            done = subprocess.run(
                group.command(command) if group else command,
                env=environment_of(system.spec, self.stock),
                stdout=subprocess.PIPE,
                stderr=None if system.spec.verbose else subprocess.PIPE,
                check=False,
            )
            killed = group is not None and done.returncode != 0 and group.oom_kills > 0
            peak = group.peak_bytes if group else 0
        lines = [
            line
            for line in done.stdout.decode(errors="replace").splitlines()
            if line.startswith("{")
        ]
        result = json.loads(lines[-1]) if lines else {}
        error = KILLED if killed else _failure(result, done)
        return Outcome(system, 0, {} if error else result, error, peak, kept)


def _failure(result: dict[str, Any], done: subprocess.CompletedProcess[bytes]) -> str:
    if "error" in result:
        return str(result["error"])
    if done.returncode == 0 and result:
        return ""
    last = (done.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
    ended = (
        f"signal {-done.returncode}"
        if done.returncode < 0
        else f"exit status {done.returncode}"
    )
    return f"the process ended with {ended}" + (f": {last[0]}" if last else "")
