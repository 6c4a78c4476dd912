"""Train a predictor on recorded routing, and score it on held-out requests.

    python -m predictors.train.predictor T.trace --model MODEL.gguf --predictor mlp --out predictors/demo

`moegguf learn` runs the same training. Here, the training uses the papers' sizes,
unless `--set` changes one of the predictor's `Options`, as in `--set windows=1,4 --set
n_hidden=128`. Writes NAME.safetensors, and NAME.json with the figures of the card and a
manifest: the data, options, seeds and software of the training run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moegguf.controller import weights as weights_file
from moegguf.controller.artifacts import Artifacts
from moegguf.controller.predictors import make_predictor
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.weights import Weights
from moegguf.gguf.experts import read_layout
from moegguf.learning.counts import COUNTED
from moegguf.learning.learn import TRAINERS
from moegguf.learning.splitting import held_out
from moegguf.trace import format as trace_file
from moegguf.trace.trace import Trace
from predictors.commands import new_parser
from predictors.study.asked import asked
from predictors.study.scoring import ScoreTable, score

DISTANCES = (1, 2, 4, 8)
Figure = dict[str, dict[int, float | None]]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "trace", type=Path, help="routing recorded with inputs (mlp) or without"
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="the GGUF file it was recorded from"
    )
    parser.add_argument(
        "--predictor", choices=sorted({*COUNTED, *TRAINERS}), required=True
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the weights and the figures"
    )
    parser.add_argument(
        "--heldout",
        type=float,
        default=0.2,
        help="share of each kind's requests held out",
    )
    parser.add_argument(
        "--heldout-trace",
        type=Path,
        help="score on this trace instead; train on all of the other",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="which requests are held out"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="change a training option",
    )
    return parser.parse_args(given)


def options(predictor: str, settings: Sequence[str]) -> Any:
    """Returns the predictor's `Options` with these settings. Each value is converted to
    the type of the option's default. Returns None if the predictor has no options.
    Raises SystemExit for an unknown option."""
    kind = None if predictor in COUNTED else TRAINERS[predictor].Options
    defaults = {} if kind is None else asdict(kind())
    changed = dict(setting.partition("=")[::2] for setting in settings)
    for name in changed.keys() - defaults.keys():
        raise SystemExit(
            f"{predictor} has no option {name!r}; it has {', '.join(defaults) or 'none'}."
        )
    return kind and kind(
        **{name: parse_setting(defaults[name], text) for name, text in changed.items()}
    )


def parse_setting(default: Any, text: str) -> Any:
    """Returns the text as a value of the default's type. The items of a tuple are
    separated by commas."""
    if isinstance(default, tuple):
        return tuple(type(default[0])(part) for part in text.split(","))
    return type(default)(text)


def split(args: argparse.Namespace) -> tuple[Trace, Trace]:
    """Returns the trace to train on and the trace to score on. With --heldout-trace
    these are two files. Otherwise, the requests of one file are split."""
    trace = trace_file.read(args.trace)
    if args.heldout_trace:
        return trace, trace_file.read(args.heldout_trace)
    heldout = held_out(trace, args.heldout, args.seed)
    return trace.select(set(trace.sequences()) - set(heldout)), trace.select(heldout)


def train(args: argparse.Namespace, training: Trace) -> Weights:
    """Trains the predictor. Returns its arrays, and facts about the training."""
    chosen = options(args.predictor, args.set)
    count = COUNTED.get(args.predictor)
    start = time.monotonic()
    found = (
        count(training)
        if count
        else TRAINERS[args.predictor].train(training, chosen, report_step)
    )
    facts = {
        **found.facts,
        "requests": len(training.sequences()),
        "tokens": training.n_tokens,
        "kinds": sorted(set(training.header.labels.values())),
        "minutes": round((time.monotonic() - start) / 60, 2),
    }
    return Weights(found.arrays, facts)


def report_step(step: str, share: float) -> None:
    """Prints the progress of a training run in percent, and the description of a
    step."""
    print(f"{share:4.0%} {step}", flush=True)


def manifest(
    args: argparse.Namespace, training: Trace, heldout: Trace
) -> dict[str, Any]:
    """Returns the facts needed to repeat a training run: options, digests of the data,
    seeds, software. The facts contain no times or paths."""
    options = [
        "--predictor",
        args.predictor,
        "--heldout",
        f"{args.heldout:g}",
        "--seed",
        str(args.seed),
    ]
    options += [word for setting in args.set for word in ("--set", setting)]
    return {
        "tool": "predictors/train/predictor.py",
        "options": options,
        "trained_on": data_of(args.trace, training),
        "scored_on": data_of(args.heldout_trace or args.trace, heldout),
        "software": {"numpy": np.__version__},
    }


def data_of(path: Path, part: Trace) -> dict[str, Any]:
    """Describes a trace file: its digest, the settings of its recording, and the
    requests that were used."""
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "recorded_with": dict(part.header.settings),
        "requests": part.sequences(),
        "tokens": part.n_tokens,
        "kinds": dict(
            Counter(
                part.header.labels.get(sequence, "") for sequence in part.sequences()
            )
        ),
    }


def evaluate(name: str, heldout: Trace, sources: Artifacts) -> ScoreTable:
    """Measures the predictor on held-out requests. If the trace has inputs, also
    measures the predictor `skip`."""
    names = [name] if heldout.inputs is None else [name, "skip"]
    predictors: list[Predictor] = [
        asked(partial(make_predictor, name, heldout.shape, sources)) for name in names
    ]
    if isinstance(predictors[0], NoPrediction):
        raise SystemExit(
            f"the {name} weights just written cannot be loaded; see the warning above."
        )
    return score(heldout, predictors, distances=DISTANCES)


def figures(table: ScoreTable) -> Figure:
    """Returns ProMoE's ACCURACY by predictor and distance. A name with ", shuffled" is
    the predictor's control on the shuffled trace."""
    rows = [(found.name, found) for found in table.scores]
    rows += [(f"{found.name}, shuffled", found) for found in table.controls]
    return {
        name: {k: mean.accuracy for k, mean in found.means.items() if k > 0}
        for name, found in rows
    }


def report(accuracy: Figure) -> None:
    """Prints the table."""
    print(
        f"{'ACCURACY on held-out requests':<32}"
        + "".join(f"{f'k={k}':>8}" for k in DISTANCES)
    )
    for name, by_k in accuracy.items():
        cells = (
            "-" if (found := by_k.get(k)) is None else f"{found:.1%}" for k in DISTANCES
        )
        print(f"{name:<32}" + "".join(f"{cell:>8}" for cell in cells))


def main(given: Sequence[str] | None = None) -> None:
    """Trains and saves a predictor. Then loads it as the engine does, and measures
    it."""
    args = arguments(given)
    training, heldout = split(args)
    layout = read_layout(args.model)
    sources = Artifacts(layout, folder=args.out, only_folder=True)
    if {training.header.fingerprint, heldout.header.fingerprint} != {
        sources.fingerprint
    }:
        raise SystemExit(
            f"{args.trace} was not recorded from {args.model}: their fingerprints differ."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.predictor}.safetensors"
    weights = train(args, training)
    weights_file.save(
        path, args.predictor, sources.fingerprint, training.shape, weights
    )
    accuracy = figures(evaluate(args.predictor, heldout, sources))
    report(accuracy)
    facts = {
        "predictor": args.predictor,
        "model": training.header.model,
        "fingerprint": sources.fingerprint,
        "file_bytes": path.stat().st_size,
        "training": dict(weights.facts),
        "heldout": {
            "requests": len(heldout.sequences()),
            "tokens": heldout.n_tokens,
            "accuracy": accuracy,
        },
        "manifest": manifest(args, training, heldout),
    }
    path.with_suffix(".json").write_text(
        json.dumps(facts, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
