"""Compares the logits of several sequences between moegguf with slots for some experts
and plain llama.cpp.

`python -m tools.gpu.batches '<case as JSON>'` runs the same passes twice, in two
processes. Sequences join one after another, one sequence is replaced, and some passes
contain several tokens of each sequence. For each number of sequences, the program
prints as JSON whether both systems' logits are bit-identical.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moegguf.bench.measure import open_result
from moegguf.engine.llama import Llama
from moegguf.engine.sequences import SequenceTokens
from moegguf.native.events import Phase
from moegguf.native.store import StoreOptions
from tools.gpu.case import Case, read_parts
from tools.gpu.measure import device_of

N_SEQUENCES = (3, 9)
N_PASSES = 48
# Tokens in the first prompt, and by how many tokens each prompt is longer than the one
# before.
N_PROMPT, LONGER = 20, 7
# Tokens per sequence in every third pass, as if drafted tokens were verified.
N_GUESSED = 4


def schedule(
    n_sequences: int, random: np.random.Generator, n_vocab: int
) -> Iterator[list[SequenceTokens]]:
    """Yields the tokens of each pass. In every second pass a sequence joins, until all
    have joined. Halfway, a new sequence replaces the first."""
    length = [0] * n_sequences
    for n in range(N_PASSES):
        chunks = list[SequenceTokens]()
        for sequence in range(min(n_sequences, n // 2 + 1)):
            if sequence == 0 and n == N_PASSES // 2:
                length[0] = 0
            n_tokens = N_GUESSED if n % 3 == 0 else 1
            if length[sequence] == 0:
                n_tokens = N_PROMPT + LONGER * sequence
            phase = Phase.DECODE if length[sequence] else Phase.PREFILL
            tokens = random.integers(0, n_vocab, n_tokens).tolist()
            chunks.append(
                SequenceTokens(sequence, tokens, length[sequence], sequence, phase)
            )
            length[sequence] += n_tokens
        yield chunks


def digests(llm: Llama, n_sequences: int) -> list[str]:
    """Returns a SHA-256 digest of each pass's logits."""
    found = list[str]()
    llm.context.clear()
    for chunks in schedule(
        n_sequences, np.random.default_rng(n_sequences), llm.n_vocab()
    ):
        for chunk in chunks:
            if chunk.n_past == 0:
                llm.context.truncate(0, chunk.sequence)
        rows = llm.context.eval_sequences(chunks)
        assert rows is not None, "the context has room for all sequences"
        found.append(
            hashlib.sha256(
                b"".join(llm.context.logits(row).tobytes() for row in rows)
            ).hexdigest()
        )
    return found


def compute(case: Case) -> dict[str, Any]:
    """Loads the model and runs the passes for each number of sequences. Returns {number
    of sequences: digests}, with "n_ubatch" and, for moegguf, "evictions".

    The caller has set MOEGGUF_HOOKS for the system. Propagates errors from `Llama`.
    """
    case = replace(case, device=device_of(case))
    options: dict[str, Any] = {
        "n_ctx": case.n_ctx, "n_batch": case.n_ctx, "n_ubatch": case.n_ubatch, "n_threads": case.n_threads,
        "n_seq_max": max(N_SEQUENCES), "n_gpu_layers": -1, "verbose": False,
    }  # fmt: skip
    if case.system == "moegguf":
        options |= {
            "store": StoreOptions(device=case.device),
            "placement": "slots",
            **(case.options or {}),
        }
    with Llama(case.model, **options) as llm:
        counted = (
            {name: tier["evictions"] for name, tier in llm.session.tiers().items()}
            if llm.session
            else {}
        )
        found: dict[str, Any] = {str(n): digests(llm, n) for n in N_SEQUENCES}
        if llm.session is not None:
            tiers = llm.session.tiers()
            found["evictions"] = sum(
                tiers[name]["evictions"] - before for name, before in counted.items()
            )
        return found | {
            "n_ubatch": llm.plan.n_ubatch if llm.session is not None else case.n_ubatch
        }


def child(case: Case) -> dict[str, Any]:
    """Runs `compute` in a child process and returns its result. Raises RuntimeError if
    the process fails."""
    hooks = {"MOEGGUF_HOOKS": "1" if case.system == "moegguf" else "0"}
    command = [sys.executable, "-m", "tools.gpu.batches", "--one", case.as_json()]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | hooks, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{case.system} ended with exit status {done.returncode}")
    return read_parts(done.stdout)


def print_item(item: str, unit: str, value: float) -> None:
    """Prints a result as one line of JSON."""
    print(json.dumps({"item": item, "unit": unit, "value": value}), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Prints the comparison of both systems, or, with --one, the digests of one
    system."""
    if arguments[0] == "--one":
        out = open_result()
        warnings.simplefilter("ignore")
        found = compute(Case.from_json(arguments[1]))
        print(json.dumps(found), file=out, flush=True)
        return
    case = Case.from_json(arguments[0])
    ours = child(replace(case, system="moegguf"))
    plain = child(replace(case, system="llama.cpp", n_ubatch=ours["n_ubatch"]))
    for n in map(str, N_SEQUENCES):
        same = sum(one == other for one, other in zip(ours[n], plain[n], strict=True))
        print_item(f"{n} sequences, bits are equal", "bool", float(same == N_PASSES))
        print_item(f"{n} sequences, passes that differ", "number", N_PASSES - same)
    print_item("experts evicted meanwhile", "number", ours["evictions"])


if __name__ == "__main__":
    main(sys.argv[1:])
