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
from functools import partial
from typing import NamedTuple

import numpy as np

from moegguf import Llama
from moegguf.bench.turns import take_turns
from moegguf.native.events import Float32s
from moegguf.native.store import StoreOptions
from moegguf.quantities import parse_link
from moegguf.testing.link_device import link_device, link_figures

PLACEMENTS = ("slots", "slots-mapped")


class Turn(NamedTuple):
    """The results of one turn."""

    tokens_per_s: float
    n_copies: int  # copies to the host
    logits: Float32s  # logits of the last token


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
        n_vocab = models["slots"].n_vocab()
        tokens = np.random.default_rng(0).integers(n_vocab, size=4096).tolist()

        def turn(llm: Llama) -> Turn:
            n_copies = link_figures(device).copies_to_host
            begin = llm.n_tokens
            start_s = time.perf_counter()
            for token in tokens[begin : begin + options.tokens]:
                llm.eval([token])
            seconds = time.perf_counter() - start_s
            n_copies = link_figures(device).copies_to_host - n_copies
            logits = llm.context.logits(-1).copy()
            return Turn(options.tokens / seconds, n_copies, logits)

        calls = {placement: partial(turn, llm) for placement, llm in models.items()}
        take_turns(calls, 2)  # fills the slots; these turns are not measured
        before = {placement: llm.stats() for placement, llm in models.items()}
        turns = take_turns(calls, options.rounds)
        pairs = list(zip(*turns.values(), strict=True))
        assert all(
            np.array_equal(slots.logits, mapped.logits) for slots, mapped in pairs
        )
        for placement, found in turns.items():
            counted = models[placement].stats() - before[placement]
            speeds = [each.tokens_per_s for each in found]
            n_copies = sum(each.n_copies for each in found)
            n_tokens = options.rounds * options.tokens
            print(
                f"{placement:12} {statistics.median(speeds):6.1f} t/s ({min(speeds):.1f} to {max(speeds):.1f}),"
                f" {counted.hits / counted.lookups:.1%} hits, {n_copies / n_tokens:.1f} copies to the host per token"
            )
        ratios = [mapped.tokens_per_s / slots.tokens_per_s for slots, mapped in pairs]
        print(
            f"ratio of neighbouring turns: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
