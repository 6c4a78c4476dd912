"""Regenerates the results that docs/evidence.md shows. `make evidence` runs this
program, which takes several hours.

    python -m predictors.study.regenerate --model laboratory
    python -m predictors.study.regenerate --model demo --only link-promoe

Makes the model, records the requests and trains the predictors, unless their files
exist. Then runs the steps one after another. A step writes
predictors/results/MODEL/NAME.json: figures, the command, the commit, the machine, and a
key. The key identifies the version of the code, the recording of the reporting
requests, and the settings. A result whose key has not changed is not recomputed (unless
--again is given), so a new run continues an interrupted one. Pages mark a result with a
different key as recorded by an earlier version.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.trace.simulate import slots_of
from predictors.commands import new_parser
from predictors.study import reuse
from predictors.study.arrange import arranged
from predictors.study.cost import cost, costs
from predictors.study.evidence import Bound
from predictors.study.figures import RESULTS, read_result
from predictors.study.papers import (
    ABLATION,
    LINKS,
    WINDOWS,
    Link,
    System,
    Workload,
    ahead,
    collection,
    strategy,
    systems_of,
    write_collections,
)
from predictors.study.scheduling import compare
from predictors.study.score import score_named
from predictors.study.subjects import (
    CARD,
    DEEP,
    DEMO,
    LABORATORY,
    N_WARM,
    SUBJECTS,
    WORK,
    Bench,
    chosen_window,
    recordings,
)
from predictors.study.synthesize import shape_of

# Increase this number whenever a change to the code changes a figure.
# tests/pure/test_replayed_figures.py checks that three figures stay exactly the same.
CODE_VERSION = 2
# Matches a JSON list that contains no list or object; such a list is written on one
# line
LIST = re.compile(r"\[[^][{}]*\]")
SHARES = (0.125, 0.19, 0.25, 0.4, 0.5, 0.64)
SHARE = 0.25
# Number of counted requests in live.py, and in steps that try several settings or
# windows.
N_COUNTED = 12
N_ENTRIES = 120
SCORED_TOKENS = 900
N_GROUPS = 9
# The papers' batch sizes, plus 2 and 4 for ExpertFlow. In the models here a token uses
# several experts of a layer, but in ExpertFlow's Switch models only one.
BATCHES = {"promoe": (1, 2, 4, 8), "expertflow": (2, 4, 8, 16, 32)}
SCHEDULED = (4, 8, 16)
N_SHIFTED = 12  # maximum number of counted requests after the kind of text has changed
SCORED = (
    "popularity",
    "previous-token",
    "token-id",
    "affinity",
    "eamc",
    "skip",
    "mlp",
    "routing-path",
    "expert-mlp",
)
MEMORIES = {f"{share:.3g}": (share, 1.0) for share in (0.125, 0.25, 0.375, 0.5, 0.75)}
PRECISIONS = {
    "16 bits; 12.5 %": (0.125, 1.0), "8 bits; 12.5 %": (0.125, 0.5), "4 bits; 12.5 %": (0.125, 0.25),
    "8 bits; 25 %": (0.25, 0.5), "4 bits; 50 %": (0.5, 0.25),
}  # fmt: skip
Take = Callable[[Bench], dict[str, Any]]


class Step(NamedTuple):
    """A step of the study, which computes one recorded result per subject."""

    take: Take
    # Given a subject's name, returns the settings that its figures depend on.
    settings: Callable[[str], Any]
    # Names of the subjects for which the step is computed by default.
    on: tuple[str, ...] = (DEMO, LABORATORY, DEEP)


def count_reuse(bench: Bench) -> dict[str, Any]:
    """Measures the reuse of experts: how evenly requests use the experts, and how many
    of a token's experts were used by the tokens before it."""
    found = reuse.reuse(bench.reporting.trace)
    used = (found.counts > 0).mean(axis=(1, 2))
    return {
        "requests": len(found.sequences),
        "next_token": round(float(found.next_token.mean()), 4),
        "chance": bench.reporting.trace.shape.n_expert_used
        / bench.reporting.trace.shape.n_expert,
        **{
            name: {
                "covering": round(skew.covering, 4),
                "entropy": round(skew.entropy, 4),
            }
            for name, skew in (
                ("within", found.within),
                ("same_size", found.same_size),
                ("merged", found.merged),
            )
        },
        "used_by_request": [round(float(share), 4) for share in used],
        "windows": {str(n): round(share, 4) for n, share in found.windows_same.items()},
        "windows_of_another": {
            str(n): round(share, 4) for n, share in found.windows_other.items()
        },
    }


def hit_curve(bench: Bench) -> dict[str, Any]:
    """Computes the hit rates of decode passes by policy and share of experts in memory,
    without predictors."""
    names = ["lru", "lfu-decay", "slru", "next-use"]
    rows = bench.reporting.simulate(names, ["none"], SHARES)
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.policy, {})[f"{row.share:g}"] = round(
            row.decode_hit_rate, 4
        )
    return found


def accuracies(bench: Bench) -> dict[str, Any]:
    """Computes the papers' measures of each predictor, at each distance with enough
    predictions. `shuffled` is the accuracy on a copy of the trace with shuffled
    routing."""
    bench.learn(N_ENTRIES)
    study = bench.reporting.limited(SCORED_TOKENS)
    table = score_named(
        study, scored(bench.name), LINKS["promoe"].options(study.trace.shape)
    )
    controls = {one.name: one for one in table.controls}
    return {
        one.name: {
            str(k): {
                "accuracy": _rounded(of.accuracy),
                "all": _rounded(of.top_k_hit),
                "any": _rounded(of.at_least_one),
                "shuffled": _rounded(controls[one.name].means[k].accuracy),
                "batch": _rounded((one.batch_accuracy or {}).get(k)),
                "fetch": _rounded(one.fetch_rates[k]),
                "good": _rounded(one.good_pred(k)),
            }
            for k, of in one.means.items()
            # Leaves out distances at which at most half of the due predictions were
            # made
            if k and of.coverage > 0.5 and of.accuracy is not None
        }
        for one in table.scores
    }


def scored(name: str) -> list[str]:
    """Returns the names of the predictors to score for a subject: SCORED, except
    networks that are not trained for the subject."""
    untrained = {"mlp", "routing-path", "expert-mlp"} - SUBJECTS[name].training.keys()
    return [predictor for predictor in SCORED if predictor not in untrained]


def learned(bench: Bench) -> dict[str, Any]:
    """Returns two figures about ProMoE's networks: the validation accuracy after each
    epoch, averaged over the networks, and the number of weights in one network's
    matrices."""
    facts = bench.mlp_facts
    shape = bench.reporting.trace.shape
    curve = facts["curve"]
    return {
        "weights": facts["n_hidden"] * (shape.n_embd + shape.n_expert),
        "epochs": facts["epochs"],
        "curve": [round(value, 4) for value in curve],
        "last_gain": round(max(curve) - max(curve[:-2]), 4),
    }


def tuned(paper: str) -> Step:
    """Returns the step that chooses the prefetch window of a paper's strategy, for a
    paper that leaves the window open.

    The step chooses the window with the shortest mean time per token on some requests
    of the role `choosing`. Before them, the last requests of the role `learning` warm
    the cache; their times are not counted.
    """

    def take(bench: Bench) -> dict[str, Any]:
        bench.learn(N_ENTRIES)
        learning = bench.learning.trace
        workload = Workload.of(
            bench.choosing, learning.select(learning.sequences()[-N_WARM:]), N_COUNTED
        )
        windows = [
            window for window in WINDOWS[paper] if _is_trained(bench, paper, window)
        ]
        systems = {str(window): ahead(paper, window) for window in windows}
        counted = workload.systems(
            systems, slots_of(bench.choosing.trace.shape, SHARE), LINKS[paper]
        )
        ms = {
            window: round(sum(of["token_ms"]) / len(of["token_ms"]), 3)
            for window, of in counted.items()
        }
        return {"ms": ms, "chosen": int(min(ms, key=lambda window: ms[window]))}

    def settings(name: str) -> Any:
        training = SUBJECTS[name].training.get(strategy(paper).predictor)
        return [N_ENTRIES, N_COUNTED, WINDOWS[paper], vars(LINKS[paper]), training]

    return Step(take, settings)


def _is_trained(bench: Bench, paper: str, window: int) -> bool:
    """Returns True if the paper's predictor can predict `window` layers ahead. Only
    ProMoE's predictor needs networks that were trained for this distance."""
    if paper != "promoe":
        return True
    return window in bench.mlp_facts["windows"]


def _settings(paper: str, *others: Any) -> Callable[[str], Any]:
    """Returns a function that takes a subject's name. The function returns a list: the
    settings of the paper's systems, the paper's link, the training options of the
    predictor, and `others`."""

    def settings(name: str) -> Any:
        systems = systems_of(paper, chosen_window(name, paper))
        found = {system: of.settings() for system, of in systems.items()}
        training = SUBJECTS[name].training.get(systems[paper].predictor)
        return [found, vars(LINKS[paper]), training, *others]

    return settings


def at_link(paper: str, share: float | None) -> Step:
    """Returns the step that replays a paper's strategy and its baselines with the
    paper's link and compute times.

    share: the share of experts in memory. None: as in DuoServe-MoE's pool, there are
    slots for the experts that a token uses in two layers, and only three of the systems
    are replayed.
    """

    def take(bench: Bench) -> dict[str, Any]:
        bench.learn(N_ENTRIES)
        shape = bench.reporting.trace.shape
        n_slots = 2 * shape.n_expert_used if share is None else slots_of(shape, share)
        systems = systems_of(paper, chosen_window(bench.name, paper))
        if share is None:
            systems = {name: systems[name] for name in ("on demand", "lru", paper)}
        found = bench.workload.systems(systems, n_slots, LINKS[paper])
        return {
            "share": share,
            "requests": len(bench.workload.counted),
            "systems": found,
        }

    return Step(take, _settings(paper, share))


def sweep(paper: str, settings: Mapping[str, tuple[float, float]]) -> Step:
    """Returns the step that replays a paper's systems with several settings.

    settings: {name: (share of experts in memory, factor for the paper's transfer time
    of an expert)}.
    """

    def take(bench: Bench) -> dict[str, Any]:
        found = {}
        workload = bench.some(N_COUNTED)
        systems = systems_of(paper, chosen_window(bench.name, paper))
        for name, (share, part) in settings.items():
            n_slots = slots_of(bench.reporting.trace.shape, share)
            found[name] = workload.systems(systems, n_slots, scaled(LINKS[paper], part))
        return {"requests": len(workload.counted), "settings": found}

    return Step(take, _settings(paper, settings))


def scaled(link: Link, part: float) -> Link:
    """Returns the link with the transfer time of an expert multiplied by `part`."""
    return replace(link, expert_us=link.expert_us * part)


def batches(paper: str) -> Step:
    """Returns the step that replays a paper's systems with each batch size in BATCHES.
    There are slots for half of the experts."""

    def take(bench: Bench) -> dict[str, Any]:
        found = {}
        n_slots = slots_of(bench.reporting.trace.shape, 0.5)
        systems = systems_of(paper, chosen_window(bench.name, paper))
        for n in BATCHES[paper]:
            workload = Workload.together(bench.reporting, n, N_GROUPS)
            found[str(n)] = workload.systems(systems, n_slots, LINKS[paper])
        return {"share": 0.5, "groups": N_GROUPS, "settings": found}

    return Step(take, _settings(paper, BATCHES[paper], N_GROUPS))


def scheduler(bench: Bench) -> dict[str, Any]:
    """Compares ExpertFlow's scheduler with other orders of requests: first in, first
    out; random; and an oracle. The figures include the distinct experts per pass, the
    hit rates, and the experts read per token."""
    study = bench.reporting
    found = {}
    slots = {share: slots_of(study.trace.shape, share) for share in (0.25, 0.5)}
    for n in SCHEDULED:
        effects = compare(
            study.trace,
            n,
            partial(study.paths, "routing-path"),
            slots,
            partial(study.policy, "lru"),
        )
        found[str(n)] = {
            of.order: {
                "experts": round(of.experts, 1),
                "us": None if of.us_per_step is None else round(of.us_per_step),
                **{
                    f"hits {share:.0%}": round(replay.decode_hit_rate, 4)
                    for share, replay in of.replays.items()
                },
                **{
                    f"moved {share:.0%}": round(
                        replay.decode.bytes_missed
                        / study.trace.shape.expert_bytes
                        / replay.decode.tokens,
                        2,
                    )
                    for share, replay in of.replays.items()
                },
            }
            for of in effects
        }
    return {"at_once": found}


def bound(bench: Bench) -> dict[str, Any]:
    """Computes, for requests that decode together, the minimum MB per token that any
    eviction policy must read, and the MB per token that the store reads. The routing is
    synthetic."""
    shape = shape_of("qwen3-30b", 24, 60, 4, 5_600_000)
    found = {
        routing: {
            str(n): Bound(routing, n, 384, 534).figures(shape)
            for n in (1, 4, 8, 16, 32)
        }
        for routing in ("random", "qwen3-30b")
    }
    return {"routing": found}


def capacity(bench: Bench) -> dict[str, Any]:
    """Replays MoE-Infinity's strategy with collections of different sizes."""
    found: dict[str, Any] = {}
    for n in (0, 12, 120, 1000):
        bench.learn(n)
        found |= _moe_infinity(bench, bench.workload, str(n))
    return {"share": SHARE, "systems": found}


def _moe_infinity(bench: Bench, workload: Workload, name: str) -> dict[str, Any]:
    """Replays MoE-Infinity's strategy with the most recently written collection.
    Returns {name: figures}."""
    systems = {
        name: systems_of("moe-infinity", chosen_window(bench.name, "moe-infinity"))[
            "moe-infinity"
        ]
    }
    return workload.systems(
        systems, slots_of(workload.study.trace.shape, SHARE), LINKS["moe-infinity"]
    )


def look_up(bench: Bench) -> dict[str, Any]:
    """Measures the time of a layer's look-up in the collection, for two collection
    sizes: median and 99th percentile, in microseconds."""
    found = {}
    trace = bench.learning.trace
    for n in (120, 1000):
        eamc = collection(trace, n)
        of_layer = cost(trace.shape, EamcPredictor(trace.shape, eamc), "moe-infinity")
        found[str(eamc.n_entries)] = [
            round(of_layer.layer, 1),
            round(of_layer.layer_99, 1),
        ]
    return {"us": found}


def shift(bench: Bench) -> dict[str, Any]:
    """Replays MoE-Infinity's strategy on requests of each kind of text. The first
    replay begins with a collection that contains only the other kinds. In the second
    replay, the collection also contains requests of this kind."""
    learning = bench.learning
    found = {}
    labels = learning.trace.header.labels
    for kind in sorted(set(labels.values())):
        others = [s for s in learning.trace.sequences() if labels[s] != kind]
        known = bench.reporting.trace
        known = known.select(
            [s for s in known.sequences() if known.header.labels[s] == kind]
        )
        before = [learning.trace.select(others[-N_ENTRIES:])]
        stream = [s for s in learning.trace.sequences() if labels[s] == kind][
            :N_SHIFTED
        ]
        workload = Workload(
            replace(learning, trace=arranged(learning.trace, stream)), stream
        )
        times = []
        for traces in (before, [*before, known]):
            write_collections(bench.predictors, traces)
            times.append(_moe_infinity(bench, workload, kind)[kind]["token_ms"])
        found[kind] = {"shifted_ms": times[0], "known_ms": times[1]}
    return {"share": SHARE, "kinds": found}


def ablation(bench: Bench) -> dict[str, Any]:
    """Replays the steps of ProMoE's ablation, beginning with the paper's base."""
    n_slots = slots_of(bench.reporting.trace.shape, SHARE)
    return {
        "share": SHARE,
        "systems": bench.workload.systems(
            ablation_systems(bench.name), n_slots, LINKS["promoe"]
        ),
    }


def ablation_systems(name: str) -> dict[str, System]:
    """Returns the systems of ABLATION with the prefetch window that was chosen for the
    subject `name`. If no window was chosen, returns ABLATION unchanged."""
    window = chosen_window(name, "promoe")
    if window is None:
        return ABLATION
    prefetch = ahead("promoe", window).prefetch
    return {
        step: system._replace(prefetch=system.prefetch and prefetch)
        for step, system in ABLATION.items()
    }


def _same(*settings: Any) -> Callable[[str], Any]:
    """Returns a function that returns these settings, whatever the subject."""
    return lambda name: settings


def _trained(*settings: Any) -> Callable[[str], Any]:
    """Returns a function from a subject's name to these settings, combined with the
    options for training the subject's predictors."""
    return lambda name: [*settings, SUBJECTS[name].training]


STEPS: dict[str, Step] = {
    "reuse": Step(count_reuse, _same()),
    "hits": Step(hit_curve, _same(SHARES)),
    "accuracy": Step(accuracies, _trained(N_ENTRIES, SCORED_TOKENS, vars(LINKS["promoe"])), tuple(SUBJECTS)),
    "learned": Step(learned, _trained()),
    **{f"tuned-{paper}": tuned(paper) for paper in WINDOWS},
    "ablation": Step(
        ablation, lambda name: [{step: of.settings() for step, of in ablation_systems(name).items()},
                                vars(LINKS["promoe"]), SUBJECTS[name].training]
    ),
    **{f"link-{paper}": at_link(paper, SHARE) for paper in LINKS},
    "link-promoe-50": at_link("promoe", 0.5),
    "pool-duoserve": at_link("duoserve", None),
    "shares-promoe": sweep("promoe", MEMORIES),
    "precision-promoe": sweep("promoe", PRECISIONS),
    **{f"batches-{paper}": batches(paper) for paper in BATCHES},
    "scheduler": Step(scheduler, _trained(SCHEDULED)),
    "capacity": Step(capacity, _settings("moe-infinity")),
    "look-up": Step(look_up, _same()),
    "shift": Step(shift, _settings("moe-infinity", N_SHIFTED)),
    "bound": Step(bound, _same(), (LABORATORY,)),
    "costs": Step(lambda bench: costs(), _same(), (LABORATORY,)),
}  # fmt: skip


def key_of(name: str, step: str) -> dict[str, Any]:
    """Returns the key of a step for a subject: the version of the code, the digest of
    the recording, and a digest of the settings. A name that is not in STEPS must be
    live-PAPER, a step that is measured in real time."""
    of = (
        STEPS[step].settings(name)
        if step in STEPS
        else vars(LINKS[step.removeprefix("live-")])
    )
    settings = json.dumps(of, sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
    return {"code": CODE_VERSION, "trace": recordings()[name], "settings": digest}


def is_current(result: str) -> bool:
    """Returns True if the result MODEL/STEP is recorded and has the key that a new
    result would have. A recorded card always counts as current."""
    found = read_result(result)
    name, _, step = result.partition("/")
    return found is not None and (
        step == CARD or found.get("key") == key_of(name, step)
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def take_step(step: str, bench: Bench, again: bool) -> None:
    """Computes a step and writes its result. Does nothing if the recorded result is
    current, unless `again` is True."""
    result = f"{bench.name}/{step}"
    if is_current(result) and not again:
        return
    print(f"{result} ...", file=sys.stderr, flush=True)
    command = f"regenerate --model {bench.name} --only {step}"
    write_result(step, bench, command, STEPS[step].take(bench))


def write_result(
    step: str, bench: Bench, command: str, figures: Mapping[str, Any]
) -> None:
    """Writes a result file: the figures of a step, with the command, commit, machine,
    recording and key that produced them."""
    facts = {
        "command": f"python -m predictors.study.{command}",
        "commit": _git("rev-parse", "--short", "HEAD"),
        "machine": _machine(),
        "reporting_trace": recordings()[bench.name],
        "key": key_of(bench.name, step),
        "figures": figures,
    }
    text = LIST.sub(
        lambda found: " ".join(found[0].split()), json.dumps(facts, indent=1)
    )
    path = RESULTS / bench.name / f"{step}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def _machine() -> str:
    cpu = Path("/proc/cpuinfo")
    names = [
        line.split(":")[1].strip()
        for line in cpu.read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def main(given: Sequence[str] | None = None) -> int:
    """Creates the subject's model, recordings and predictors if they are missing, and
    computes the steps. Returns the exit status.
    """
    parser = new_parser(__doc__)
    parser.add_argument(
        "--model", choices=SUBJECTS, default=LABORATORY, help="what figures are about"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help=f"folder for the model and its traces (default: {WORK}/MODEL)",
    )
    parser.add_argument(
        "--only", metavar="NAME,...", help="steps to take (default: all)"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="also where a result with the same key is there",
    )
    args = parser.parse_args(given)
    bench = Bench(args.model, args.work or WORK / args.model)
    bench.prepare()
    every = [name for name, step in STEPS.items() if args.model in step.on]
    for step in args.only.split(",") if args.only else every:
        take_step(step, bench, args.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
