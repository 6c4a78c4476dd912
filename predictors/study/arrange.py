"""Rearranges traces: splits passes by request, groups tokens into passes, joins two
traces, shuffles routing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moegguf.learning.counts import multi_hot
from moegguf.native.events import Bools, Int32s, Int64s, Phase
from moegguf.trace.trace import TOKEN_AXES, Trace

Indices = Int64s


def used_experts(trace: Trace, tokens: Indices | Bools) -> Bools:
    """Returns a mask of the experts that each of these tokens used: (n_tokens,
    shape.n_moe_layer, n_expert)."""
    return multi_hot(
        trace.expert_ids[:, tokens].transpose(1, 0, 2), trace.shape.n_expert
    )


def arranged(trace: Trace, sequences: Iterable[int]) -> Trace:
    """Returns a trace with the passes of these requests, one request after another in
    the order of `sequences`."""
    place = {
        sequence: number for number, sequence in enumerate(dict.fromkeys(sequences))
    }
    part = separated(trace.select(place))
    places = np.array(
        [place[sequence] for sequence in part.pass_sequence.tolist()], np.int64
    )
    return part.take(np.argsort(places, kind="stable"))


def separated(trace: Trace) -> Trace:
    """Returns a trace in which all tokens of a pass belong to one request and one
    phase.

    A pass with several requests or phases is split into several passes, ordered by
    request.
    """
    if trace.token_sequence is None or trace.n_tokens == 0:
        return trace
    pass_of = np.repeat(np.arange(trace.n_pass), np.diff(trace.pass_start))
    order = np.lexsort((trace.phase_of, trace.sequence_of, pass_of))
    keys = np.stack([pass_of, trace.sequence_of, trace.phase_of])[:, order]
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)]))
    keys[0] = trace.announced_at()[order]
    _, parts = np.unique(keys, axis=1, return_inverse=True)
    part = trace.rearranged(order, starts, pass_of[order][starts], parts.ravel())
    return replace(part, token_sequence=None, token_phase=None)


def joined(trace: Trace, before: Trace) -> Trace:
    """Returns a trace with the passes of `before`, then the passes of `trace`.

    The requests of `before` are renumbered. Both traces must be from the same model,
    and each pass must have only one request.
    """
    first = 1 + max(trace.sequences(), default=-1)
    parts = replace(before, pass_sequence=before.pass_sequence + np.int32(first)), trace
    labels = {
        first + sequence: label for sequence, label in before.header.labels.items()
    } | trace.header.labels
    of_passes = ("pass_sequence", "pass_phase", "pass_first_token", "pass_ns")
    axes = dict.fromkeys(of_passes, 0) | TOKEN_AXES
    both = {name: [getattr(part, name) for part in parts] for name in axes}
    arrays: dict[str, Any] = {
        name: None
        if any(part is None for part in found)
        else np.concatenate(found, axis=axes[name])
        for name, found in both.items()
    }
    starts = np.concatenate([before.pass_start, before.n_tokens + trace.pass_start[1:]])
    return replace(
        trace, header=replace(trace.header, labels=labels), pass_start=starts, **arrays
    )


def grouped(
    trace: Trace, passes: Sequence[Indices], names: Sequence[Int32s] | None = None
) -> Trace:
    """Returns a trace whose passes consist of these tokens (indices into `trace`).

    A pass counts as announced if the ids of all its tokens are known. names: arrays
    with the request of each token, one array per pass; None: each token keeps its
    request in `trace`.
    """
    lengths = [len(tokens) for tokens in passes]
    tokens = np.concatenate([np.empty(0, np.int64), *passes])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    pass_of = np.repeat(np.arange(len(passes)), lengths)
    phases = np.full(len(passes), Phase.PREFILL, np.uint8)
    known = np.ones(len(passes), np.bool_)
    np.maximum.at(phases, pass_of, trace.phase_of[tokens])
    np.logical_and.at(known, pass_of, trace.tokens[tokens] >= 0)
    sequence_of = trace.sequence_of[tokens] if names is None else np.concatenate(names)
    by_token = {"token_sequence": sequence_of, "token_phase": trace.phase_of[tokens]}
    return replace(
        trace,
        pass_sequence=sequence_of[starts[:-1]],
        pass_phase=phases,
        pass_first_token=np.where(known, 0, -1).astype(np.int32),
        pass_ns=np.arange(len(passes), dtype=np.int64),
        pass_start=starts,
        **trace.of_tokens(tokens) | by_token,
    )


def shuffled(trace: Trace, seed: int) -> Trace:
    """Returns a control for predictors: a trace in which the order of a request's
    decoded tokens carries no information.

    In each layer, the expert choices of a request's decoded tokens are permuted among
    these tokens, together with their weights. The tokens, the inputs, and each
    request's number of uses of an expert are unchanged. Choices no longer depend on the
    token, its input, other layers or neighbouring tokens. A predictor that is still
    right has learned only which experts the request uses often.
    """
    rng = np.random.default_rng(seed)
    decode = trace.phase_of == Phase.DECODE
    sequence = trace.sequence_of
    expert_ids = trace.expert_ids.copy()
    weights = None if trace.weights is None else trace.weights.copy()
    for row in range(trace.shape.n_moe_layer):
        here = np.flatnonzero(decode & (trace.expert_ids[row, :, 0] >= 0))
        dealt = here[np.lexsort((rng.random(len(here)), sequence[here]))]
        here = here[np.argsort(sequence[here], kind="stable")]
        expert_ids[row, here] = trace.expert_ids[row, dealt]
        if weights is not None and trace.weights is not None:
            weights[row, here] = trace.weights[row, dealt]
    return replace(trace, expert_ids=expert_ids, weights=weights)


def answered(trace: Trace, n_prompt: Mapping[int, int]) -> Trace:
    """Splits the only pass of each request into a prompt and one decode pass for each
    later token.

    The prompt has n_prompt[sequence] tokens, but at least one and at most all.
    """
    starts = list[int]()
    phases = list[Phase]()
    sequences = list[int]()
    for sequence, start, end in zip(
        trace.pass_sequence.tolist(),
        trace.pass_start[:-1].tolist(),
        trace.pass_start[1:].tolist(),
        strict=True,
    ):
        first = min(start + max(1, n_prompt[sequence]), end)
        starts += [start, *range(first, end)]
        phases += [Phase.PREFILL, *[Phase.DECODE] * (end - first)]
        sequences += [sequence] * (1 + end - first)
    return replace(
        trace,
        pass_sequence=np.array(sequences, np.int32),
        pass_phase=np.array(phases, np.uint8),
        pass_first_token=np.zeros(len(starts), np.int32),
        pass_ns=np.arange(len(starts), dtype=np.int64),
        pass_start=np.array([*starts, trace.n_tokens], np.int64),
    )
