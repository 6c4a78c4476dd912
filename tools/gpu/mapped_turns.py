"""Compares mapped slots with slots on a simulated device, in short turns that alternate
(docs/gpu.md, "Mapped slots").

One process loads the model with both placements. RAM holds every expert before the
first turn. Both placements decode the same tokens, and the logits of every token must
be equal.

    python tools/gpu/mapped_turns.py model.gguf --link 4GB/s,10us --share 25%
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack

import numpy as np

from moegguf import Llama
from moegguf.engine.stats import Stats
from moegguf.native.store import StoreOptions
from moegguf.quantities import parse_link
from moegguf.testing.link_device import link_device, link_figures

PLACEMENTS = ("slots", "slots-mapped")


def main() -> None:
    """Runs the turns, and prints a line for each placement: median, smallest and
    largest tokens per second, and counts per token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument(
        "--link",
        default="4GB/s,10us",
        help="bandwidth and latency of the simulated link",
    )
    parser.add_argument(
        "--share", default="25%", help="share of the experts with a slot on the device"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a turn")
    options = parser.parse_args()
    device = link_device(parse_link(options.link), 1)
    with ExitStack() as stack:
        models = {
            placement: stack.enter_context(
                Llama(
                    options.model, vram_cache=options.share, expert_cache="100%", placement=placement, n_threads=1,
                    n_ctx=4096, store=StoreOptions(device=device), draft="off", context_store=0, verbose=False,
                )
            )
            for placement in PLACEMENTS
        }  # fmt: skip
        for llm in models.values():
            assert llm.session is not None
            llm.session.store.drain()
        tokens = (
            np.random.default_rng(0)
            .integers(models["slots"].n_vocab(), size=4096)
            .tolist()
        )
        speeds: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
        stops = dict.fromkeys(PLACEMENTS, 0)
        before: dict[str, Stats] = {}
        # The first two rounds only fill the slots.
        for number in range(options.rounds + 2):
            begin, logits = number * options.tokens, []
            for placement in PLACEMENTS[:: 1 if number % 2 else -1]:
                llm = models[placement]
                if number == 2:
                    before[placement] = llm.stats()
                copies, start_s = (
                    link_figures(device).copies_to_host,
                    time.perf_counter(),
                )
                for token in tokens[begin : begin + options.tokens]:
                    llm.eval([token])
                if number >= 2:
                    speeds[placement].append(
                        options.tokens / (time.perf_counter() - start_s)
                    )
                    stops[placement] += link_figures(device).copies_to_host - copies
                logits.append(llm.context.logits(-1).copy())
            assert np.array_equal(logits[0], logits[1])
        for placement, found in speeds.items():
            counted, n = (
                models[placement].stats() - before[placement],
                options.rounds * options.tokens,
            )
            print(
                f"{placement:12} {statistics.median(found):6.1f} t/s ({min(found):.1f} to {max(found):.1f}),"
                f" {counted.hits / counted.lookups:.1%} hits, {stops[placement] / n:.1f} copies to the host per token"
            )
        ratios = [
            mapped / slots for slots, mapped in zip(*speeds.values(), strict=True)
        ]
        print(
            f"ratio of neighbouring turns: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
