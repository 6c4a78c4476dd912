"""Which replica a request prefers: the one that holds its conversation, then the one whose experts fit, then the least
loaded. Plain data and arithmetic; `router.py` asks Ray for the facts and tells it the answer.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.generate.request import GenerationRequest
from moegguf.serving.events import ExpertUses
from moegguf.serving.ray.conversation import Conversation

MAX_IMBALANCE = 4  # requests that a preferred replica may have more than the least loaded
SIMILAR = 0.02  # cosines that differ by no more fit alike
MAX_COUNT = 255

Counts = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Eam:
    """An expert activation matrix (MoE-Infinity, section 4.2): how often each expert was used, scaled to bytes.

    `counts`: compressed uint8 (n_layer, n_expert).
    """

    n_layer: int
    n_expert: int
    counts: bytes

    @classmethod
    def of(cls, counts: Counts) -> Eam | None:
        """The matrix of `counts` (n_layer, n_expert); None where nothing was counted."""
        most = float(counts.max(initial=0.0))
        if most <= 0:
            return None
        scaled = np.rint(counts * (MAX_COUNT / most)).astype(np.uint8)
        return cls(scaled.shape[0], scaled.shape[1], zlib.compress(scaled.tobytes(), level=1))

    @classmethod
    def of_uses(cls, uses: ExpertUses) -> Eam | None:
        """The matrix of one request, as its worker counted it; None where nothing was counted."""
        return cls.of(np.frombuffer(uses.counts, np.uint8).reshape(uses.n_layer, uses.n_expert).astype(np.float32))

    def cosine(self, other: Eam) -> float | None:
        """Between the two, over all layers; None for matrices of other models."""
        if (self.n_layer, self.n_expert) != (other.n_layer, other.n_expert):
            return None
        a, b = self._cells(), other._cells()
        return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))

    def _cells(self) -> Counts:
        return np.frombuffer(zlib.decompress(self.counts), np.uint8).astype(np.float32)


@dataclass(frozen=True)
class RoutingRequest:
    """What is known of a request before it is computed. `eam`: of its conversation so far; None: nothing is known."""

    conversation: Conversation = field(default_factory=Conversation)
    eam: Eam | None = None


@dataclass(frozen=True)
class Report:
    """What a replica holds. `sequences`: the prefixes of each sequence in its KV cache, oldest first, of `n_sequences`
    that fit; `eam`: its recent use of experts, None while there was none."""

    n_sequences: int = 1
    sequences: tuple[tuple[str, ...], ...] = ()
    eam: Eam | None = None

    def as_json(self) -> dict[str, Any]:
        """As Ray Serve carries it from `record_routing_stats` to every router."""
        eam = self.eam and [self.eam.n_layer, self.eam.n_expert, base64.b64encode(self.eam.counts).decode()]
        return {"n_sequences": self.n_sequences, "sequences": [list(each) for each in self.sequences], "eam": eam}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """The report in `data`; an empty one before the first."""
        if not data:
            return cls()
        eam = data["eam"] and Eam(data["eam"][0], data["eam"][1], base64.b64decode(data["eam"][2]))
        return cls(data["n_sequences"], tuple(map(tuple, data["sequences"])), eam or None)

    def after(self, later: Sequence[tuple[str, ...]]) -> Report:
        """The report once the replica has also got the requests with the prefixes `later`: the oldest sequences make
        room."""
        sequences = list(self.sequences)
        for prefixes in later:
            # A turn takes the place of its conversation's earlier turns.
            sequences = [each for each in sequences if not (each and each[-1] in prefixes)] + [prefixes]
        return Report(self.n_sequences, tuple(sequences[-self.n_sequences :]), self.eam)


@dataclass(frozen=True)
class Candidate:
    """A replica: what it holds, and its requests (`queue`; None: not known yet, which counts as none)."""

    report: Report = field(default_factory=Report)
    queue: int | None = None


def computes_alone(generation: GenerationRequest) -> bool:
    """Whether a replica computes the request without others, from an empty context which it leaves empty."""
    contents = [message.get("content") for message in generation.messages or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return generation.sampling.exact or any(part.get("type") == "image" for part in parts)


def rank(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[list[int]]:
    """Indices into `candidates` in ranks, preferred ones first; each is in one rank. Within a rank the least loaded is
    taken, of equals the first, and the next rank where all are full.

    A replica with MAX_IMBALANCE more requests than the least loaded is in the last rank: what it holds is worth less
    than the wait.
    """
    least = min((each.queue or 0 for each in candidates), default=0)
    open_to = [i for i, each in enumerate(candidates) if (each.queue or 0) - least < MAX_IMBALANCE]
    holders = _holders(request.conversation, candidates, open_to)
    fitting = _fitting(request.eam, candidates, [i for i in open_to if i not in holders])
    rest = [i for i in range(len(candidates)) if i not in holders and i not in fitting]
    rest.sort(key=lambda i: len(candidates[i].report.sequences))  # a conversation's cache is not given up for another
    return [found for found in (holders, fitting, rest) if found]


def _holders(conversation: Conversation, candidates: Sequence[Candidate], of: Sequence[int]) -> list[int]:
    """Those with the longest beginning of the conversation in their KV cache."""
    shared = {i: _shared_bytes(conversation, candidates[i].report) for i in of}
    most = max(shared.values(), default=0)
    return [i for i in of if most > 0 and shared[i] == most]


def _shared_bytes(conversation: Conversation, report: Report) -> int:
    return max((conversation.shared_bytes(frozenset(each)) for each in report.sequences), default=0)


def _fitting(eam: Eam | None, candidates: Sequence[Candidate], of: Sequence[int]) -> list[int]:
    """Those whose recent use of experts is closest to the request's. None of them where either is not known."""
    if eam is None:
        return []
    reported = {i: report_eam for i in of if (report_eam := candidates[i].report.eam) is not None}
    cosines = {i: cosine for i, other in reported.items() if (cosine := eam.cosine(other)) is not None}
    best = max(cosines.values(), default=0.0)
    return [i for i, cosine in cosines.items() if cosine >= best - SIMILAR]
