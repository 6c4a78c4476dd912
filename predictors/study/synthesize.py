"""Generates random traces of any shape, for simulations without a model. The traces
reuse experts about as much as a real model does.

    python -m predictors.study.synthesize --locality qwen3-30b --layers 48 -o routing.npz

A hit rate from such a trace is not a measurement of any model.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from math import exp, sqrt
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from moegguf.cli.trace import check_writable
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import Float32s, Phase
from moegguf.quantities import parse_size
from moegguf.terminal.messages import print_message
from moegguf.trace.format import write
from moegguf.trace.trace import Trace, TraceHeader
from tools.models.locality import Locality, find_locality, popularity


def shape_of(
    name: str,
    n_layer: int,
    n_expert: int | None = None,
    n_expert_used: int | None = None,
    expert_bytes: int = 1 << 20,
) -> MoeShape:
    """Returns a shape with experts in every layer. If n_expert or n_expert_used is
    None, the published number of the model `name` is used. Raises OptionError."""
    locality = find_locality(name)
    n_expert = n_expert or locality.n_expert
    n_expert_used = n_expert_used or locality.n_expert_used
    if n_expert_used > n_expert:
        raise OptionError(
            f"a token can use at most all {n_expert} experts of a layer, but not {n_expert_used}."
        )
    return MoeShape(
        n_layer,
        n_expert,
        n_expert_used,
        tuple(range(n_layer)),
        expert_bytes=expert_bytes,
    )


def synthesize(
    name: str, shape: MoeShape, n_tokens: int, seed: int = 0, n_requests: int = 1
) -> Trace:
    """Generates a trace of requests with `n_tokens` decoded tokens each.

    Experts are reused about as much as in the model `name` (`LOCALITIES`). A layer's
    popular experts are the same in all requests, but each request has its own topic.
    Layers are independent of each other. The shape may have a different number of
    experts than the model. Hit rates at a given share of experts stay about the same,
    as long as a token uses the same share of experts as in the model. Raises
    OptionError.
    """
    locality = find_locality(name)
    rng = np.random.default_rng(seed)
    layers = [
        _choices(locality, shape, n_tokens, n_requests, rng) for _ in shape.layers
    ]
    n_all = n_tokens * n_requests
    return Trace(
        shape=shape,
        header=TraceHeader(
            f"synthetic routing as of {locality.model}",
            settings={"locality": name, "seed": seed},
        ),
        pass_sequence=np.repeat(np.arange(n_requests, dtype=np.int32), n_tokens),
        pass_phase=np.full(n_all, Phase.DECODE, np.uint8),
        # Passes are not announced, because the token ids are unknown.
        pass_first_token=np.full(n_all, -1, np.int32),
        pass_ns=np.arange(n_all, dtype=np.int64),
        pass_start=np.arange(n_all + 1, dtype=np.int64),
        tokens=np.full(n_all, -1, np.int32),
        expert_ids=np.stack(layers),
    )


def _choices(
    locality: Locality,
    shape: MoeShape,
    n_tokens: int,
    n_requests: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.int16]:
    """Draws the experts that each token uses in one layer, the largest logits first:
    (n_requests * n_tokens, n_expert_used)."""
    popular = sqrt(locality.constant) * popularity(shape.n_expert, rng)
    size = (n_tokens, shape.n_expert)
    found = []
    for _ in range(n_requests):
        logits = popular + sqrt(locality.own) * rng.standard_normal(size, np.float32)
        logits += sqrt(locality.slow) * _slow(locality.memory_tokens, size, rng)
        found.append(
            np.argsort(-logits, axis=1)[:, : shape.n_expert_used].astype(np.int16)
        )
    return np.concatenate(found)


def _slow(
    memory_tokens: float, size: tuple[int, int], rng: np.random.Generator
) -> Float32s:
    """Draws random processes that change slowly along the first axis: AR(1) with
    variance 1. Their autocorrelation falls by a factor of e in `memory_tokens`
    steps."""
    kept = exp(-1 / memory_tokens)
    values = rng.standard_normal(size, np.float32)
    values[1:] *= sqrt(1 - kept * kept)
    for before, value in pairwise(values):
        value += kept * before
    return values


Layers = Annotated[
    int, typer.Option(min=1, max=4096, metavar="N", help="Layers with experts.")
]
Experts = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=32767,
        metavar="N",
        help="Experts per layer.  [default: that model's]",
    ),
]
Used = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Experts per layer and token.  [default: that model's]"
    ),
]


def main(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", dir_okay=False, metavar="FILE", help="The file to write."
        ),
    ],
    locality: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Whose published reuse: qwen3-30b, glm, olmoe or mixtral.",
        ),
    ],
    layers: Layers = 24,
    experts: Experts = None,
    used: Used = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, metavar="N", help="Decoded tokens of a request."
        ),
    ] = 1024,
    requests: Annotated[
        int, typer.Option(min=1, max=10_000, metavar="N", help="Requests.")
    ] = 1,
    expert_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of one expert, for a modelled link.")
    ] = "1MiB",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed.")] = 0,
) -> None:
    """Write a trace of random routing that is reused from token to token as published
    of a real model."""
    check_writable(out)
    try:
        expert_bytes = parse_size(expert_size)
    except ValueError as error:
        raise OptionError(f"--expert-size: {error}.") from None
    made = synthesize(
        locality,
        shape_of(locality, layers, experts, used, expert_bytes),
        tokens,
        seed,
        requests,
    )
    write(out, made)
    print_message(f"{out}: {made.n_tokens} tokens, {made.header.model}")


if __name__ == "__main__":
    from predictors.study.common import run

    sys.exit(run(main))
