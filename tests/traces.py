"""Synthetic traces with structure: a hidden state per token, routed by hidden router
matrices.

Equal arguments give equal traces. The state has a part for the topic (label and
sequence), a part for the token, and a part that drifts slowly from token to token. It
changes a little from layer to layer. Therefore popularity is uneven, labels prefer
certain experts, neighbouring tokens share experts, layers predict each other, and token
ids determine some experts.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Phase, RoutingEvent
from moegguf.trace.trace import Trace, TraceHeader
from predictors.study.arrange import grouped

SMALL = MoeShape(
    n_layer=6,
    n_expert=16,
    n_expert_used=2,
    layers=(1, 2, 3, 4, 5),
    n_embd=32,
    n_vocab=64,
    expert_bytes=1000,
)
# Weights of the state's parts.
LABEL, SEQUENCE, TOKEN, DRIFT, LAYER = 0.7, 0.4, 0.8, 0.6, 0.25


def hidden_routers(shape: MoeShape, seed: int) -> Float32s:
    """Returns the router matrices (len(shape.layers), n_expert, n_embd) of
    `random_trace(shape, seed=seed)`."""
    rng = np.random.default_rng([seed, 1])
    size = (len(shape.layers), shape.n_expert, shape.n_embd)
    return (rng.standard_normal(size) / np.sqrt(shape.n_embd)).astype(np.float32)


def random_trace(
    shape: MoeShape | None = None,
    *,
    n_sequences: int = 4,
    n_prefill: int = 8,
    n_decode: int = 24,
    seed: int = 0,
    structure: float = 0.8,
    with_inputs: bool = False,
    with_weights: bool = True,
    n_labels: int = 2,
) -> Trace:
    """Returns a trace of sequences one after another.

    Each has a prefill pass and then n_decode passes of one token. The last layer of a
    prefill pass contains only the last token. With n_prefill=0 there is no prefill
    pass. With a `structure` of 0 the states are only noise, and with 1 they contain no
    noise. The routing is exactly the top-k of `hidden_routers @ inputs`, even if the
    trace leaves out the inputs. Sequence i has label "kind<i % n_labels>".
    """
    shape = shape or SMALL
    rng = np.random.default_rng([seed, 0])
    label_of = np.arange(n_sequences) % n_labels
    per_sequence = n_prefill + n_decode
    tokens = _tokens(shape, rng, label_of, n_labels, per_sequence)
    inputs = _states(shape, rng, tokens, label_of, n_labels, structure)
    expert_ids, weights = _route(shape, hidden_routers(shape, seed), inputs)
    lengths = ([n_prefill] if n_prefill else []) + [1] * n_decode
    phases = ([Phase.PREFILL] if n_prefill else []) + [Phase.DECODE] * n_decode
    skipped = np.tile(np.arange(per_sequence) < n_prefill - 1, n_sequences)
    expert_ids[-1, skipped], weights[-1, skipped], inputs[-1, skipped] = -1, 0, 0
    n_pass = len(lengths) * n_sequences
    return Trace(
        shape=shape,
        header=TraceHeader(
            "random",
            f"{seed:032x}",
            {i: f"kind{label}" for i, label in enumerate(label_of)},
        ),
        pass_sequence=np.repeat(np.arange(n_sequences, dtype=np.int32), len(lengths)),
        pass_phase=np.tile(np.array(phases, np.uint8), n_sequences),
        pass_first_token=np.zeros(n_pass, np.int32),
        pass_ns=np.arange(n_pass, dtype=np.int64) * 1_000_000,
        pass_start=np.concatenate(
            [[0], np.cumsum(np.tile(lengths, n_sequences))]
        ).astype(np.int64),
        tokens=tokens.ravel(),
        expert_ids=expert_ids,
        weights=weights if with_weights else None,
        inputs=inputs if with_inputs else None,
    )


def batched() -> Trace:
    """Returns a trace with the prompts of 4 requests in one pass, then 6 passes with
    one token of each request.

    The last pass also contains the prompt of one more request.
    """
    n_sequences, n_decode = 4, 6
    trace = random_trace(
        n_sequences=n_sequences + 1, n_prefill=3, n_decode=n_decode, with_inputs=True
    )
    of = [
        np.flatnonzero(trace.sequence_of == sequence)
        for sequence in range(n_sequences + 1)
    ]
    prompts = np.concatenate([tokens[:3] for tokens in of[:-1]])
    steps = [
        np.array([tokens[3 + step] for tokens in of[:-1]]) for step in range(n_decode)
    ]
    # The last layer is computed for the third token of this prompt, and for the tokens
    # of all other requests.
    steps[-1] = np.concatenate([of[-1][:3], steps[-1]])
    return grouped(trace, [prompts, *steps])


def routed(
    il: int,
    *tokens: int | Sequence[int],
    pass_: int = 0,
    sequence: int = 0,
    phase: Phase = Phase.DECODE,
    first_token: int = 0,
    inputs: Sequence[Sequence[float]] | None = None,
) -> RoutingEvent:
    """Returns an event of layer `il`. tokens: the experts of one token, or a list of
    experts for each token."""
    ids = [list(token) for token in tokens if not isinstance(token, int)] or [
        list(tokens)
    ]
    vectors = None if inputs is None else np.array(inputs, np.float32)
    expert_ids = np.array(ids, np.int32).reshape(len(ids), len(ids[0]))
    return RoutingEvent(
        pass_, 0, sequence, phase, first_token, il, expert_ids, None, vectors
    )


def same(one: Trace, other: Trace) -> bool:
    """Returns True if two traces are equal to the last bit, types included."""
    for field in dataclasses.fields(Trace):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            if (
                not isinstance(b, np.ndarray)
                or a.dtype != b.dtype
                or a.shape != b.shape
                or a.tobytes() != b.tobytes()
            ):
                return False
        elif a != b:
            return False
    return True


def _tokens(
    shape: MoeShape,
    rng: np.random.Generator,
    label_of: npt.NDArray[np.int64],
    n_labels: int,
    per_sequence: int,
) -> npt.NDArray[np.int32]:
    """Returns token ids (n_sequences, per_sequence).

    They are Zipf-distributed, and each label has its own frequent ids.
    """
    share = 1 / np.arange(1, shape.n_vocab + 1)
    favourites = np.stack([rng.permutation(shape.n_vocab) for _ in range(n_labels)])
    ranks = rng.choice(
        shape.n_vocab, size=(len(label_of), per_sequence), p=share / share.sum()
    )
    return favourites[label_of[:, None], ranks].astype(np.int32)


def _states(
    shape: MoeShape,
    rng: np.random.Generator,
    tokens: npt.NDArray[np.int32],
    label_of: npt.NDArray[np.int64],
    n_labels: int,
    structure: float,
) -> npt.NDArray[np.float16]:
    """Returns the inputs of the routers, (len(shape.layers), n_tokens, n_embd)."""
    n_sequences, per_sequence = tokens.shape
    drift = rng.standard_normal((n_sequences, per_sequence, shape.n_embd))
    for t in range(1, per_sequence):
        drift[:, t] = 0.9 * drift[:, t - 1] + np.sqrt(1 - 0.9**2) * drift[:, t]
    state = (
        DRIFT * drift
        + TOKEN * rng.standard_normal((shape.n_vocab, shape.n_embd))[tokens]
    )
    state += LABEL * rng.standard_normal((n_labels, 1, shape.n_embd))[label_of]
    state += SEQUENCE * rng.standard_normal((n_sequences, 1, shape.n_embd))
    state = state.reshape(-1, shape.n_embd)
    out = np.empty((len(shape.layers), len(state), shape.n_embd), np.float16)
    for row in range(len(shape.layers)):
        turn = rng.standard_normal((shape.n_embd, shape.n_embd)) / np.sqrt(shape.n_embd)
        state = (state + LAYER * np.tanh(state @ turn)) / np.sqrt(1 + LAYER**2)
        out[row] = structure * state + (1 - structure) * rng.standard_normal(
            state.shape
        )
    return out


def _route(
    shape: MoeShape, routers: Float32s, inputs: npt.NDArray[np.float16]
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]:
    """Returns the chosen expert ids, best first, and the softmax of their logits.

    Both arrays have the shape (len(shape.layers), n_tokens, n_expert_used).
    """
    logits = np.einsum("rtd,red->rte", inputs.astype(np.float32), routers)
    expert_ids = np.argsort(-logits, axis=2, kind="stable")[:, :, : shape.n_expert_used]
    chosen = np.exp(np.take_along_axis(logits, expert_ids, axis=2))
    return expert_ids.astype(np.int16), (
        chosen / chosen.sum(axis=2, keepdims=True)
    ).astype(np.float16)
