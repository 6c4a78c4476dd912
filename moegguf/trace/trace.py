"""Recorded routing in memory: the tokens of each pass, and the experts that the router
chose for them.

A trace yields the events of the recorded run (`events`). Methods reduce a trace to some
requests, or rearrange its tokens for control experiments. The file format is in
format.py, the recorder in recorder.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import (
    Announcement,
    Bools,
    Int32s,
    Int64s,
    Phase,
    RoutingEvent,
)

MAX_TEXT = 4096  # maximum number of characters in a label, a name or a setting

Setting = str | int | float

TOKEN_AXES = {
    "tokens": 0,
    "token_sequence": 0,
    "token_phase": 0,
    "expert_ids": 1,
    "weights": 1,
    "inputs": 1,
}
"""{array of a `Trace` with an entry for each token: the axis of the tokens}."""


@dataclass(frozen=True)
class TraceHeader:
    """Facts about the recorded model, run and requests."""

    model: str = ""  # name of the model
    # Hex digits for the model's routers (`moegguf.gguf.fingerprint`); "" if unknown.
    fingerprint: str = ""
    labels: dict[int, str] = field(default_factory=dict)  # {request: kind of text}
    # Facts about the recorded run: options and counters.
    settings: dict[str, Setting] = field(default_factory=dict)

    def check_model(self, fingerprint: str) -> None:
        """Raises OptionError unless the trace was recorded from the model with this
        fingerprint."""
        if not self.fingerprint:
            raise OptionError(
                "the trace does not state from which model it was recorded; import it again with --model FILE.gguf."
            )
        if self.fingerprint != fingerprint:
            raise OptionError(
                f"the trace was recorded from another model ({self.model or 'unnamed'}); name that model, or record"
                " this one."
            )


@dataclass(frozen=True, eq=False)
class Trace:
    """Routing of n_pass passes over n_tokens tokens, in the order in which they were
    evaluated.

    An announcement contains the tokens of one or more passes, and comes before they are
    evaluated. pass_sequence, pass_phase, pass_first_token and pass_ns have the same
    meaning as the fields `sequence`, `phase`, `first_token` and `time_ns` of
    `RoutingEvent`.

    If passes have tokens of several requests or phases, token_sequence and token_phase
    hold the request and phase of each token. pass_sequence and pass_phase then belong
    to the whole announcement. Otherwise token_sequence and token_phase are None.
    `sequence_of` and `phase_of` work in both cases.
    """

    shape: MoeShape
    header: TraceHeader
    pass_sequence: Int32s  # (n_pass,) number of the request
    pass_phase: npt.NDArray[np.uint8]  # (n_pass,) see `Phase`
    # (n_pass,) index of the pass's first token in its announcement; -1: not announced.
    pass_first_token: Int32s
    # (n_pass,) time of the pass's first routing event, in ns; 0 if imported.
    pass_ns: Int64s
    # (n_pass + 1,) pass p has tokens[pass_start[p]:pass_start[p + 1]].
    pass_start: Int64s
    tokens: Int32s  # (n_tokens,) -1: unknown
    # (n_moe_layer, n_tokens, n_expert_used); -1: no expert.
    expert_ids: npt.NDArray[np.int16]
    # Router weights that multiply the experts' outputs, in the shape of expert_ids
    weights: npt.NDArray[np.float16] | None = None
    # (n_moe_layer, n_tokens, n_embd) inputs of routers; 0: not recorded.
    inputs: npt.NDArray[np.float16] | None = None
    token_sequence: Int32s | None = None  # (n_tokens,) request of each token
    token_phase: npt.NDArray[np.uint8] | None = None  # (n_tokens,) phase of each token

    @property
    def n_pass(self) -> int:
        """The number of passes."""
        return len(self.pass_sequence)

    @property
    def n_tokens(self) -> int:
        """The number of tokens in all passes."""
        return len(self.tokens)

    @property
    def sequence_of(self) -> Int32s:
        """An array (n_tokens,) with the request of each token."""
        if self.token_sequence is not None:
            return self.token_sequence
        return np.repeat(self.pass_sequence, np.diff(self.pass_start))

    @property
    def phase_of(self) -> npt.NDArray[np.uint8]:
        """An array (n_tokens,) with the phase of each token."""
        return (
            np.repeat(self.pass_phase, np.diff(self.pass_start))
            if self.token_phase is None
            else self.token_phase
        )

    def sequences(self) -> list[int]:
        """Returns the numbers of the requests in the trace, in order of first
        appearance."""
        of = self.pass_sequence if self.token_sequence is None else self.token_sequence
        return list(dict.fromkeys(of.tolist()))

    def by_kind(self) -> list[list[int]]:
        """Returns a list for each kind of text, with the numbers of its requests.
        Requests without a label form a kind of their own."""
        kinds: dict[str, list[int]] = {}
        for sequence in self.sequences():
            label = self.header.labels.get(sequence, "")
            kinds.setdefault(label, []).append(sequence)
        return list(kinds.values())

    def select(self, sequences: Iterable[int]) -> Trace:
        """Returns a trace with only the tokens of these requests."""
        wanted = set(sequences)
        labels = {
            sequence: label
            for sequence, label in self.header.labels.items()
            if sequence in wanted
        }
        part = self.keep(np.isin(self.sequence_of, list(wanted)))
        return replace(part, header=replace(self.header, labels=labels))

    def decode(self) -> Trace:
        """Returns a trace with only the decoded tokens. Passes without decoded tokens
        are left out."""
        return self.keep(self.phase_of == Phase.DECODE)

    def keep(self, wanted: Bools) -> Trace:
        """Returns a trace with only the tokens for which `wanted` (n_tokens,) is True.
        Passes without tokens are left out."""
        starts = np.concatenate([[0], np.cumsum(wanted)])[self.pass_start]
        passes = np.flatnonzero(np.diff(starts))
        if np.array_equal(
            starts[passes + 1] - starts[passes], np.diff(self.pass_start)[passes]
        ):
            return self.take(passes)  # a faster way, because only whole passes are kept
        tokens = np.flatnonzero(wanted)
        return self.rearranged(
            tokens, starts[:-1][passes], passes, self.announced_at()[tokens]
        )

    def announced_at(self) -> Int64s:
        """Returns an array (n_tokens,): for each token, the index in the trace of the
        first token of its announcement. Tokens of a pass that was not announced have a
        negative number, which differs from pass to pass."""
        announced = np.where(
            self.pass_first_token < 0, -1, self.pass_start[:-1] - self.pass_first_token
        )
        unknown = -1 - np.arange(self.n_pass)
        return np.repeat(
            np.where(announced < 0, unknown, announced), np.diff(self.pass_start)
        )

    def rearranged(
        self, tokens: Int64s, starts: Int64s, passes: Int64s, announcements: Int64s
    ) -> Trace:
        """Returns a trace with the tokens at the indices `tokens`, in this order,
        divided into new passes. `starts` holds the index in `tokens` of the first token
        of each new pass. For each new pass, `passes` holds the number of the old pass
        whose time the new pass gets.

        announcements (len(tokens),): equal numbers for tokens that are announced
        together.
        """
        known = self.announced_at()[tokens[starts]] >= 0
        _, firsts, group = np.unique(
            announcements, return_index=True, return_inverse=True
        )
        phases = np.full(len(firsts), Phase.PREFILL, np.uint8)
        np.maximum.at(phases, group, self.phase_of[tokens])
        return replace(
            self,
            pass_sequence=self.sequence_of[tokens][firsts][group[starts]],
            pass_phase=phases[group[starts]],
            pass_first_token=np.where(known, _ranks(group)[starts], -1).astype(
                np.int32
            ),
            pass_ns=self.pass_ns[passes],
            pass_start=np.append(starts, len(tokens)).astype(np.int64),
            **self.of_tokens(tokens),
        )

    def take(self, passes: Int64s) -> Trace:
        """Returns a trace with only these passes, in this order."""
        lengths = np.diff(self.pass_start)[passes]
        starts = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]
        )
        tokens = np.repeat(self.pass_start[passes] - starts[:-1], lengths) + np.arange(
            starts[-1]
        )
        return replace(
            self,
            pass_sequence=self.pass_sequence[passes],
            pass_phase=self.pass_phase[passes],
            pass_first_token=self.pass_first_token[passes],
            pass_ns=self.pass_ns[passes],
            pass_start=starts,
            **self.of_tokens(tokens),
        )

    def of_tokens(self, tokens: Int64s) -> dict[str, Any]:
        """Returns {name: array} for the arrays of this trace with one entry per token.
        The arrays have only the entries at the indices `tokens`, in this order. Arrays
        that the trace lacks are None."""
        arrays = {name: getattr(self, name) for name in TOKEN_AXES}
        return {
            name: None if array is None else array.take(tokens, TOKEN_AXES[name])
            for name, array in arrays.items()
        }

    def events(self) -> Iterator[Announcement | RoutingEvent]:
        """Yields the announcements and routing events of the recorded run, in order.
        `pass_` starts at 0.

        Announcements are reconstructed from their passes. If the trace lacks a pass of
        an announcement, the announcement's later passes are treated as unannounced
        (first_token -1). The arrays of an event may be views of the trace, so callers
        must not change them.
        """
        used = self.used()
        computed = self.computed()
        announcements = self._announcements()
        announced: dict[int, int] = {}  # {request: last pass of its last announcement}
        several = False
        for p in range(self.n_pass):
            sequence = int(self.pass_sequence[p])
            phase = Phase(int(self.pass_phase[p]))
            time_ns = int(self.pass_ns[p])
            if p in announcements:
                last, announcement = announcements[p]
                announced[sequence] = last
                several = announcement.sequences is not None
                yield announcement
            first = (
                int(self.pass_first_token[p])
                if p <= announced.get(sequence, -1)
                else -1
            )
            start = int(self.pass_start[p])
            end = int(self.pass_start[p + 1])
            expert_ids = self.expert_ids[:, start:end].astype(np.int32)
            weights = (
                None
                if self.weights is None
                else self.weights[:, start:end].astype(np.float32)
            )
            sequences, phases = (
                (self.sequence_of, self.phase_of)
                if several and first >= 0
                else (None, None)
            )
            for row, il in enumerate(self.shape.layers):
                n = computed[p][row]
                k = used[row]
                if n == 0:
                    continue
                # The pass's last n tokens, if it has only one request.
                here: Any = slice(end - start - n, end - start)
                if self.token_sequence is not None and n < end - start:
                    here = np.flatnonzero(self.expert_ids[row, start:end, 0] >= 0)
                inputs = None if self.inputs is None else self.inputs[row, start:][here]
                yield RoutingEvent(
                    p, time_ns, sequence, phase, first, il, expert_ids[row, here, :k],
                    None if weights is None else weights[row, here, :k],
                    inputs.astype(np.float32) if inputs is not None and inputs[0].any() else None,
                    None if sequences is None else sequences[start:end][here],
                    None if phases is None else phases[start:end][here].astype(np.int32),
                )  # fmt: skip

    def used(self) -> list[int]:
        """Returns the number of experts that a token uses, for each MoE layer; 0 for a
        layer without any."""
        if self.n_tokens == 0:
            return [0] * self.shape.n_moe_layer
        return (self.expert_ids >= 0).any(axis=1).sum(axis=1).tolist()

    def computed(self) -> list[list[int]]:
        """Returns the number of tokens for which a layer was computed, as [pass][index
        of the MoE layer]."""
        sums = np.zeros((self.shape.n_moe_layer, self.n_tokens + 1), np.int64)
        np.cumsum(self.expert_ids[:, :, 0] >= 0, axis=1, out=sums[:, 1:])
        return np.diff(sums[:, self.pass_start], axis=1).T.tolist()

    def _announcements(self) -> dict[int, tuple[int, Announcement]]:
        """Returns {first pass of an announcement: (last pass of this announcement, the
        announcement)}."""
        parts: dict[int, list[int]] = {}
        # {request: (first pass, phase and next first_token of its unfinished
        # announcement)}
        open_: dict[int, tuple[int, int, int]] = {}
        lengths = np.diff(self.pass_start).tolist()
        facts = zip(
            self.pass_sequence.tolist(),
            self.pass_phase.tolist(),
            self.pass_first_token.tolist(),
            strict=True,
        )
        for p, (sequence, phase, first) in enumerate(facts):
            begun, begun_phase, expected = open_.get(sequence, (-1, -1, -1))
            if first == 0:
                begun = p
                parts[p] = [p]
            elif first > 0 and first == expected and phase == begun_phase:
                parts[begun].append(p)
            else:
                open_.pop(sequence, None)
                continue
            open_[sequence] = begun, phase, first + lengths[p]
        return {
            begun: (passes[-1], self._announcement(passes))
            for begun, passes in parts.items()
        }

    def _announcement(self, passes: list[int]) -> Announcement:
        """Returns the announcement of the tokens in these passes."""
        at = np.concatenate(
            [np.arange(self.pass_start[p], self.pass_start[p + 1]) for p in passes]
        )
        sequence = int(self.pass_sequence[passes[0]])
        phase = Phase(int(self.pass_phase[passes[0]]))
        announcement = Announcement(sequence, phase, self.tokens[at])
        if self.token_sequence is None:
            return announcement
        sequences = self.sequence_of[at]
        phases = self.phase_of[at].astype(np.int32)
        if (sequences == sequences[0]).all() and (phases == phases[0]).all():
            return announcement
        outputs = (self.expert_ids[-1, at, 0] >= 0).astype(np.int32)
        return announcement._replace(
            sequences=sequences, phases=phases, outputs=outputs
        )


def _ranks(groups: Int64s) -> Int64s:
    """Returns an array (n,): for each element, the number of earlier elements of its
    group."""
    order = np.argsort(groups, kind="stable")
    firsts = (
        np.flatnonzero(np.concatenate([[True], np.diff(groups[order]) != 0]))
        if len(groups)
        else groups
    )
    ranks = np.empty_like(groups)
    ranks[order] = np.arange(len(groups)) - np.repeat(
        firsts, np.diff(np.append(firsts, len(groups)))
    )
    return ranks
