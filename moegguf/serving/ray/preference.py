"""The replica that a request prefers: the replica that its conversation went to, then the least loaded one.

This module knows nothing of Ray: application.py asks Ray for the facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from moegguf.generate.request import Request
from moegguf.serving.wire import encode

DIGEST_BYTES = 8
MAX_CONVERSATIONS = 4096  # most conversations that are remembered with their replica
BEGINNING = 256  # characters of a prompt, or tokens of a context, that tell one from another
MAX_IMBALANCE = 4  # requests that a preferred replica may have more than the least loaded


def conversation_of(request: Request) -> str:
    """Returns a hash that all turns of a conversation have in common.

    The hash is made of the owner, the options that templates write before the first message, and the messages up to the
    user's first one. Raises OptionError for values that JSON cannot hold.
    """
    parts: dict[str, Any] = {
        "owner": request.owner,
        "template": request.template,
        "options": request.template_options,
        "tools": list(request.tools) if request.tool_choice != "none" else [],
        "think": request.think,
    }
    if request.messages is None:
        context, prompt = list(request.context or ()), request.prompt or ""
        parts["begins"] = context[:BEGINNING] or prompt[:BEGINNING]
    else:
        roles = [message.get("role") for message in request.messages]
        parts["begins"] = request.messages[: roles.index("user") + 1 if "user" in roles else None]
    return hashlib.blake2b(encode(parts), digest_size=DIGEST_BYTES).hexdigest()


def rank(holder: int | None, queues: Sequence[int]) -> list[list[int]]:
    """Indices into `queues`, the requests of each replica, in ranks, preferred ones first. Within a rank the least
    loaded is taken, of equals the first, and the next rank where all are full.

    `holder`, to which the conversation went before, comes first, unless it has MAX_IMBALANCE more requests than the
    least loaded: what it holds is worth less than the wait.
    """
    preferred = [] if holder is None or queues[holder] - min(queues) >= MAX_IMBALANCE else [holder]
    rest = [i for i in range(len(queues)) if i not in preferred]
    return [found for found in (preferred, rest) if found]
