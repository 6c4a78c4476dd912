"""Records a model's routing, replays it with two policies, and plots it.

Writes routing.npz, routing.png and routing.svg into the folder that the first argument
names (default: the current folder). Prints the number of recorded passes and tokens.
With slots for a quarter of the experts, also prints the hit rates of two policies and
of Belady's optimal policy, which knows the future.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moegguf import Llama
from moegguf.trace.analysis import TraceAnalysis
from moegguf.trace.trace import Trace


def plot(trace: Trace, folder: Path) -> None:
    """Draws how often each expert was used in each layer. Saves the image as
    routing.png and routing.svg."""
    uses = [
        np.bincount(layer[layer >= 0], minlength=trace.shape.n_expert)
        for layer in trace.expert_ids
    ]
    figure = Figure()
    axes = figure.subplots()
    image = axes.imshow(uses, aspect="auto")
    axes.set(xlabel="expert", ylabel="layer with experts")
    figure.colorbar(image, label="tokens")
    for form in ("png", "svg"):
        figure.savefig(folder / f"routing.{form}")


def main(folder: Path) -> None:
    recorded = folder / "routing.npz"
    with Llama("demo", n_ctx=512, trace=recorded, verbose=False) as llm:
        llm.create_chat_completion(
            [{"role": "user", "content": "What is an expert?"}],
            temperature=0,
            max_tokens=60,
        )
    analysis = TraceAnalysis.open(recorded)
    print(f"{analysis.trace.n_pass} passes over {analysis.trace.n_tokens} tokens")
    for row in analysis.simulate(["lru", "next-use"], ["none"], [0.25]):
        print(f"{row.policy}: {row.hit_rate:.0%} hits in {row.n_slots} slots")
    plot(analysis.trace, folder)
    print(f"wrote {folder / 'routing.png'} and routing.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
