"""Which replica a request prefers: the one that holds its conversation, then the least loaded. Plain data and
arithmetic; application.py asks Ray for the facts and tells it the answer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from moegguf.generate.request import GenerationRequest
from moegguf.serving.wire import encode

DIGEST_BYTES = 8
FIRST_CUT_BYTES = 256  # within a message, hashes at this length and every doubling of it
MAX_IMBALANCE = 4  # requests that a preferred replica may have more than the least loaded


@dataclass(frozen=True)
class Conversation:
    """What a request shares with others: hashes in a chain over its messages, so that equal ones mean equal beginnings.
    The answer is left out: clients send it back changed (without thinking, with other ids), and the next turn still
    begins with everything up to the last message before it.

    `digests`: of its beginnings, shortest first. `n_least`: a shared beginning of so many is more than a system
    message: it has the first message of the user, or half of all."""

    digests: tuple[str, ...] = ()
    n_least: int = 1

    def n_shared(self, held: Sequence[str]) -> int:
        """How many beginnings are among those of a sequence; 0 for too few to matter."""
        n = sum(digest in held for digest in self.digests)
        return n if n >= self.n_least else 0


def conversation_of(request: GenerationRequest) -> Conversation:
    """The beginnings of a request. Raises OptionError for what JSON cannot hold."""
    head = {  # whose request it is, and what templates write before the first message
        "owner": request.owner,
        "template": request.template,
        "options": request.template_options,
        "tools": list(request.tools) if request.tool_choice != "none" else [],
        "think": request.think,
    }
    parts = [(str(message.get("role")), encode(message)) for message in request.messages or ()]
    if request.messages is None:
        context = [("context", encode({"context": request.context}))] if request.context else []
        parts = [*context, ("prompt", (request.prompt or "").encode(errors="surrogatepass"))]
    chain, digests, lengths, n_with_user = hashlib.blake2b(encode(head), digest_size=DIGEST_BYTES), [], [0], 0
    for role, part in parts:
        start, end = 0, FIRST_CUT_BYTES
        while start == 0 or start < len(part):
            chain.update(part[start:end])
            digests.append(chain.copy().hexdigest())
            lengths.append(lengths[-1] + len(part[start:end]))
            start, end = end, 2 * end
        if role == "user" and not n_with_user:
            n_with_user = len(digests)
    n_half = bisect_left(lengths, lengths[-1] / 2)
    return Conversation(tuple(digests), max(1, min(n_with_user or len(digests), n_half)))


Sequences = tuple[tuple[str, ...], ...]
"""The beginnings of each sequence in a replica's KV cache, by what it was sent, oldest first."""


def after(held: Sequences, conversation: Conversation, n_sequences: int) -> Sequences:
    """What a replica with so many sequences holds once it has also got a request: the oldest make room."""
    # A turn takes the place of its conversation's earlier turns.
    return (*(each for each in held if each[-1] not in conversation.digests), conversation.digests)[-n_sequences:]


@dataclass(frozen=True)
class Candidate:
    """A replica: what it holds, and its requests (`queue`; None: not known yet, which counts as none)."""

    held: Sequences = ()
    queue: int | None = None


def rank(conversation: Conversation, candidates: Sequence[Candidate]) -> list[list[int]]:
    """Indices into `candidates` in ranks, preferred ones first; each is in one rank. Within a rank the least loaded is
    taken, of equals the first, and the next rank where all are full.

    A replica with MAX_IMBALANCE more requests than the least loaded is in the last rank: what it holds is worth less
    than the wait.
    """
    least = min((each.queue or 0 for each in candidates), default=0)
    shared = {
        i: max(map(conversation.n_shared, each.held), default=0)
        for i, each in enumerate(candidates)
        if (each.queue or 0) - least < MAX_IMBALANCE
    }
    most = max(shared.values(), default=0)
    holders = [i for i, n in shared.items() if n == most > 0]
    rest = [i for i in range(len(candidates)) if i not in holders]
    rest.sort(key=lambda i: len(candidates[i].held))  # a conversation's cache is not given up for another
    return [found for found in (holders, rest) if found]
