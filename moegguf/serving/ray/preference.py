"""Ranks replicas for a request: first the replica that has the request's conversation,
unless it is too busy.

This module does not use Ray. application.py supplies the facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from moegguf.generate.request import Request
from moegguf.serving.wire import encode

DIGEST_BYTES = 8
MAX_CONVERSATIONS = 4096  # maximum number of conversations whose replica is remembered
# Number of leading characters of a prompt, or tokens of a context, that identify a
# conversation.
BEGINNING = 256
# A replica with this many requests more than the least loaded replica is not preferred.
MAX_IMBALANCE = 4


def conversation_of(request: Request) -> str:
    """Returns a hash that is the same for all turns of a conversation whose beginning
    and options do not change.

    The hash covers the owner, the options that templates write before the first
    message, and the messages up to the user's first message. Without messages it covers
    the beginning of the context or prompt. Raises OptionError for values that JSON
    cannot express.
    """
    parts: dict[str, Any] = {
        "owner": request.owner,
        "template": request.template,
        "options": request.template_options,
        "tools": list(request.tools),
        "think": request.think,
    }
    if request.messages is None:
        context, prompt = list(request.context or ()), request.prompt or ""
        parts["begins"] = context[:BEGINNING] or prompt[:BEGINNING]
    else:
        roles = [message.get("role") for message in request.messages]
        parts["begins"] = request.messages[
            : roles.index("user") + 1 if "user" in roles else None
        ]
    return hashlib.blake2b(encode(parts), digest_size=DIGEST_BYTES).hexdigest()


def rank(holder: int | None, queues: Sequence[int]) -> list[list[int]]:
    """Returns the indices of replicas, grouped into ranks, preferred replicas first.
    `queues` has each replica's number of requests.

    Ray chooses the least loaded replica of the first rank in which not all are full,
    and the first of equally loaded replicas. `holder` is the index of the replica that
    has the conversation, or None. This replica is the first rank, unless it has at
    least MAX_IMBALANCE more requests than the least loaded replica: then waiting would
    cost more than recomputing. All other replicas are one rank.
    """
    preferred = (
        []
        if holder is None or queues[holder] - min(queues) >= MAX_IMBALANCE
        else [holder]
    )
    rest = [i for i in range(len(queues)) if i not in preferred]
    return [found for found in (preferred, rest) if found]
