"""Imports routing recorded by another program as a trace, then summarizes and replays
the trace.

Prints the number of requests and tokens in the trace, and the hit rates of two policies
when a quarter of the experts have slots. The routing in this example is made up. The
example saves one file of arrays per request, as the hooks for transformers and vLLM in
docs/testbed.md do.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from moegguf.trace.analysis import TraceAnalysis
from moegguf.trace.importing import ImportOptions, import_trace
from moegguf.trace.summary import summary

N_TOKENS, N_LAYERS, N_EXPERTS = 80, 4, 16


def save_routing(path: Path, seed: int) -> None:
    """Saves the router's logits for a request of 80 tokens. The first 16 tokens are the
    prompt."""
    rng = np.random.default_rng(seed)
    # Neighbouring tokens use similar experts
    drift = np.cumsum(rng.standard_normal((N_TOKENS, N_LAYERS, N_EXPERTS)), axis=0)
    np.savez(path, router_logits=drift.astype(np.float32), n_prompt=16)


def main(folder: Path) -> None:
    files = [folder / f"request{n}.npz" for n in range(3)]
    for seed, file in enumerate(files):
        save_routing(file, seed)
    trace = folder / "trace.npz"
    import_trace(files, trace, ImportOptions(n_expert_used=2, expert_bytes=9 << 20))
    found = summary(TraceAnalysis.open(trace).trace)
    print(f"{found.n_requests} requests, {found.n_tokens} tokens")
    print(f"{found.reuse:.0%} of a token's experts were used by the token before")
    for row in TraceAnalysis.open(trace).simulate(
        ["lru", "next-use"], ["none"], [0.25]
    ):
        print(f"{row.policy}: {row.decode_hit_rate:.0%} hits in {row.n_slots} slots")


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(name))
