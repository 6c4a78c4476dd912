"""Regenerates what docs/evidence.md rests on: `make evidence`, some hours.

    python -m predictors.study.regenerate --work build/evidence
    python -m predictors.study.regenerate --work build/evidence --only link-promoe

Makes the laboratory model, records the requests, trains the predictors, then takes one step after another, each of
which writes predictors/results/NAME.json: figures, the command, the commit, the machine, what they were counted on.
What is there already for the same recording is left out, so an interrupted run goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.trace.format import read, write
from moegguf.trace.simulate import slots_of
from predictors.study import reuse
from predictors.study.accuracy import LinkModel
from predictors.study.arrange import arranged
from predictors.study.common import Study
from predictors.study.cost import cost, costs
from predictors.study.evidence import Bound
from predictors.study.figures import RESULTS, read_result
from predictors.study.papers import ABLATION, BASELINES, LINKS, Workload, collection, routing_digest, write_collections
from predictors.study.requests import ROLES
from predictors.study.scheduling import compare
from predictors.study.score import score_named
from predictors.study.synthesize import shape_of

LIST = re.compile(r"\[[^][{}]*\]")  # of numbers, on one line
SHARES = (0.125, 0.19, 0.25, 0.4, 0.5, 0.64)
N_WARM = 4
N_COUNTED = 12
N_ENTRIES = 120
SCORED_TOKENS = 900
N_GROUPS = 9
BATCHES = (1, 2, 4, 8)
SCHEDULED = (4, 8, 16)
N_SHIFTED = 12  # requests after a change of the kind
TRAINING = {
    "popularity": (),
    "affinity": (),
    "token-id": (),
    "mlp": ("windows=4", "n_hidden=128", "epochs=3"),
    "routing-path": ("epochs=4",),
    "expert-mlp": ("hidden=512,256,128,64,64,64", "epochs=4"),
}
SCORED = ("popularity", "previous-token", "token-id", "affinity", "eamc", "skip", "mlp", "routing-path", "expert-mlp")
BASES = ("none", "lru", "moegguf")
Step = Callable[["Bench"], dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """The folder with the model, its traces and its predictors."""

    work: Path

    @property
    def model(self) -> Path:
        """The laboratory model."""
        return self.work / "lab.gguf"

    @property
    def predictors(self) -> Path:
        """What was trained, and collections."""
        return self.work / "predictors"

    def trace(self, role: str) -> Path:
        """A recording."""
        return self.work / f"{role}.trace"

    @cached_property
    def learning(self) -> Study:
        """The requests that were learned from."""
        return self._study("learning")

    @cached_property
    def reporting(self) -> Study:
        """The requests that figures are about."""
        return self._study("reporting")

    @cached_property
    def routing(self) -> str:
        """What identifies the recording that figures are about."""
        return routing_digest(self.reporting.trace)

    @cached_property
    def workload(self) -> Workload:
        """Of those, the ones that are replayed with predictions."""
        return Workload.of(self.reporting, N_WARM, N_COUNTED)

    def _study(self, role: str) -> Study:
        return Study.open(self.trace(role), self.model, self.predictors)

    def learn(self, n_entries: int) -> None:
        """Gives MoE-Infinity a collection of so many requests."""
        write_collections(self.predictors, [self.learning.trace], n_entries)

    def prepare(self) -> None:
        """Makes what is missing. Raises CalledProcessError."""
        self.predictors.mkdir(parents=True, exist_ok=True)
        if not self.model.exists():
            run("recipes.make_lab_model", "-o", str(self.model))
            shutil.copy(self.model.with_suffix(".json"), RESULTS / "laboratory-model.json")
        if not all(self.trace(role).exists() for role in ROLES):
            run("predictors.study.requests", "record", str(self.model), "-o", str(self.work))
        few = self.trace("few")  # scoring takes long
        if not few.exists():
            trace = read(self.trace("choosing"))
            write(few, trace.select(trace.sequences()[:1]))
        for name, settings in TRAINING.items():
            if not (self.predictors / f"{name}.safetensors").exists():
                options = [word for setting in settings for word in ("--set", setting)]
                traces = str(self.trace("learning")), "--heldout-trace", str(few)
                of = "--model", str(self.model), "--predictor", name, "--out", str(self.predictors)
                run("predictors.train.predictor", *traces, *of, *options)


def run(module: str, *words: str) -> None:
    """Runs a command of this repository. Raises CalledProcessError."""
    print(f"python -m {module} {' '.join(words)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", module, *words], check=True)


def count_reuse(bench: Bench) -> dict[str, Any]:
    """How unevenly experts are used within a request and over all, and how soon again."""
    found = reuse.reuse(bench.reporting.trace)
    used = (found.counts > 0).mean(axis=(1, 2))
    return {
        "requests": len(found.sequences),
        "next_token": round(float(found.next_token.mean()), 4),
        "chance": bench.reporting.trace.shape.n_expert_used / bench.reporting.trace.shape.n_expert,
        **{
            name: {"covering": round(skew.covering, 4), "entropy": round(skew.entropy, 4)}
            for name, skew in (("within", found.within), ("same_size", found.same_size), ("merged", found.merged))
        },
        "used_by_request": [round(float(share), 4) for share in used],
        "windows": {str(n): round(share, 4) for n, share in found.windows_same.items()},
        "windows_of_another": {str(n): round(share, 4) for n, share in found.windows_other.items()},
    }


def hit_curve(bench: Bench) -> dict[str, Any]:
    """Hit rates while decoding, by policy and share of the experts, without predictions; Belady's bound."""
    names = ["lru", "lfu-decay", "slru", "next-use"]
    rows = bench.reporting.simulate(names, ["none"], SHARES)
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.policy, {})[f"{row.share:g}"] = round(row.decode_hit_rate, 4)
    return found


def accuracies(bench: Bench) -> dict[str, Any]:
    """Of each predictor at each distance what it is right about, by the papers' measures, and shuffled."""
    bench.learn(N_ENTRIES)
    times = LINKS["promoe"]
    expert_bytes = bench.reporting.trace.shape.expert_bytes
    link = LinkModel(expert_bytes / times.expert_us * 1e6, layer_compute_us=times.layer_us)
    table = score_named(bench.reporting.limited(SCORED_TOKENS), SCORED, link)
    controls = {one.name: one for one in table.controls}
    return {
        one.name: {
            str(k): {
                "accuracy": _rounded(of.accuracy),
                "all": _rounded(of.top_k_hit),
                "any": _rounded(of.at_least_one),
                "shuffled": _rounded(controls[one.name].means[k].accuracy),
                "batch": _rounded((one.batch_accuracy or {}).get(k)),
                "fetch": _rounded(of.fetch_rate),
                "good": _rounded(of.good_pred),
            }
            for k, of in one.means.items()
            if k and of.coverage > 0.5 and of.accuracy is not None  # of the layers
        }
        for one in table.scores
    }


def at_link(paper: str, share: float) -> Step:
    """A paper's strategy and its bases at the paper's times."""

    def step(bench: Bench) -> dict[str, Any]:
        if paper == "moe-infinity":
            bench.learn(N_ENTRIES)
        baselines = BASELINES.get(paper, {})
        link = LINKS[paper]
        names = (*BASES, paper)
        found = bench.workload.strategies(names, share, link) | bench.workload.systems(baselines, share, link)
        return {"share": share, "source": link.source, "requests": len(bench.workload.counted), "systems": found}

    return step


def sweep(paper: str, settings: Mapping[str, tuple[float, float]]) -> Step:
    """The same with {name: (share of the experts in memory, part of the paper's time that an expert takes)}."""

    def step(bench: Bench) -> dict[str, Any]:
        found = {}
        base = LINKS[paper]
        for name, (share, part) in settings.items():
            link = replace(base, expert_us=base.expert_us * part)
            of = bench.workload.strategies(("none", "moegguf", paper), share, link)
            found[name] = of | bench.workload.systems(BASELINES[paper], share, link)
        return {"requests": len(bench.workload.counted), "settings": found}

    return step


def batches(paper: str) -> Step:
    """A paper's strategy and its bases with half of the experts in memory, so many requests at once."""

    def step(bench: Bench) -> dict[str, Any]:
        found = {}
        for n in BATCHES:
            requests = bench.reporting.trace.sequences()[: n * (N_GROUPS + 1)]
            study = replace(bench.reporting, trace=bench.reporting.trace.select(requests))
            workload = Workload.together(study, n)
            found[str(n)] = workload.strategies(("none", "moegguf", paper), 0.5, LINKS[paper])
        return {"share": 0.5, "groups": N_GROUPS, "settings": found}

    return step


def scheduler(bench: Bench) -> dict[str, Any]:
    """Experts of a pass, by who shares it: ExpertFlow's scheduler by its network's paths, and bounds."""
    study = bench.reporting
    found = {}
    slots = {share: slots_of(study.trace.shape, share) for share in (0.25, 0.5)}
    for n in SCHEDULED:
        effects = compare(study.trace, n, partial(study.paths, "routing-path"), slots, partial(study.policy, "lru"))
        found[str(n)] = {
            of.order: {
                "experts": round(of.experts, 1),
                "us": None if of.us_per_step is None else round(of.us_per_step),
                **{f"hits {share:.0%}": round(replay.decode_hit_rate, 4) for share, replay in of.replays.items()},
                **{
                    f"moved {share:.0%}": round(
                        replay.decode.bytes_missed / study.trace.shape.expert_bytes / replay.decode.tokens, 2
                    )
                    for share, replay in of.replays.items()
                },
            }
            for of in effects
        }
    return {"at_once": found}


def bound(bench: Bench) -> dict[str, Any]:
    """What requests that decode together must read, and what the store reads, on routing that is made up."""
    shape = shape_of("qwen3-30b", 24, 60, 4, 5_600_000)
    found = {
        routing: {str(n): Bound(routing, n, 384, 534).figures(shape) for n in (1, 4, 8, 16, 32)}
        for routing in ("random", "qwen3-30b")
    }
    return {"routing": found}


def capacity(bench: Bench) -> dict[str, Any]:
    """MoE-Infinity with collections of different sizes."""
    found: dict[str, Any] = {}
    for n in (0, 12, 120, 1000):
        bench.learn(n)
        found |= {str(n): bench.workload.strategies(["moe-infinity"], 0.25, LINKS["moe-infinity"])["moe-infinity"]}
    return {"share": 0.25, "systems": found}


def look_up(bench: Bench) -> dict[str, Any]:
    """Microseconds of one query of the collection, at each layer: the median, and the 99th percentile."""
    found = {}
    trace = bench.learning.trace
    for n in (120, 1000):
        eamc = collection(trace, n)
        of_layer = cost(trace.shape, EamcPredictor(trace.shape, eamc), "moe-infinity")
        found[str(eamc.n_entries)] = [round(of_layer.layer, 1), round(of_layer.layer_99, 1)]
    return {"us": found}


def shift(bench: Bench) -> dict[str, Any]:
    """MoE-Infinity after the kind of text has changed, beside itself with a collection that knew the kind already."""
    learning = bench.learning
    link = LINKS["moe-infinity"]
    found = {}
    labels = learning.trace.header.labels
    for kind in sorted(set(labels.values())):
        others = [s for s in learning.trace.sequences() if labels[s] != kind]
        known = bench.reporting.trace
        known = known.select([s for s in known.sequences() if known.header.labels[s] == kind])
        before = [learning.trace.select(others[-N_ENTRIES:])]
        stream = [s for s in learning.trace.sequences() if labels[s] == kind][:N_SHIFTED]
        workload = Workload(replace(learning, trace=arranged(learning.trace, stream)), stream)
        times = []
        for traces in (before, [*before, known]):
            write_collections(bench.predictors, traces)
            times.append(workload.strategies(["moe-infinity"], 0.25, link)["moe-infinity"]["token_ms"])
        found[kind] = {"shifted_ms": times[0], "known_ms": times[1]}
    return {"share": 0.25, "kinds": found}


def ablation(bench: Bench) -> dict[str, Any]:
    """ProMoE, step by step from the paper's base."""
    return {"share": 0.25, "systems": bench.workload.systems(ABLATION, 0.25, LINKS["promoe"])}


STEPS: dict[str, Step] = {
    "reuse": count_reuse,
    "hits": hit_curve,
    "accuracy": accuracies,
    "ablation": ablation,
    **{f"link-{paper}": at_link(paper, 0.25) for paper in LINKS},
    "link-promoe-50": at_link("promoe", 0.5),
    "shares-promoe": sweep("promoe", {f"{share:.3g}": (share, 1) for share in (0.125, 0.25, 0.375, 0.5, 0.75)}),
    "precision-promoe": sweep("promoe", {"16 bits; 12.5 %": (0.125, 1), "8 bits; 12.5 %": (0.125, 0.5),
                                         "4 bits; 12.5 %": (0.125, 0.25), "8 bits; 25 %": (0.25, 0.5),
                                         "4 bits; 50 %": (0.5, 0.25)}),
    "batches-promoe": batches("promoe"),
    "batches-expertflow": batches("expertflow"),
    "scheduler": scheduler,
    "bound": bound,
    "capacity": capacity,
    "look-up": look_up,
    "shift": shift,
    "costs": lambda bench: costs(),
}  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def take_step(name: str, bench: Bench, again: bool) -> None:
    """Takes a step and writes its result, unless it is there for the same recording."""
    known = read_result(name)
    if known and known["reporting_trace"] == bench.routing and not again:
        return
    print(f"{name} ...", file=sys.stderr, flush=True)
    write_result(name, bench, f"regenerate --only {name}", STEPS[name](bench))


def write_result(name: str, bench: Bench, command: str, figures: Mapping[str, Any]) -> None:
    """Records figures with what they came about by."""
    result = {
        "command": f"python -m predictors.study.{command}",
        "commit": _git("rev-parse", "--short", "HEAD"),
        "machine": _machine(),
        "reporting_trace": bench.routing,
        "figures": figures,
    }
    text = LIST.sub(lambda found: " ".join(found[0].split()), json.dumps(result, indent=1))
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _machine() -> str:
    cpu = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main(given: Sequence[str] | None = None) -> int:
    """Takes the steps; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/evidence"), help="folder for the model and its traces")
    parser.add_argument("--only", default=",".join(STEPS), metavar="NAME,...", help="steps to take")
    parser.add_argument("--again", action="store_true", help="also where a result is there")
    args = parser.parse_args(given)
    bench = Bench(args.work)
    bench.prepare()
    for name in args.only.split(","):
        take_step(name, bench, args.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
