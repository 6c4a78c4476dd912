"""The client and the owner of the current request. The HTTP server and batches set
both; Ray's replicas set only the client. Queues read the client; worker calls, files,
batches and responses read the owner."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from functools import cache

SALT = b"moegguf owner"
# Hashing a key takes about 30 ms, so that guessing the key of an owner is slow.
ROUNDS = 100_000

BACKGROUND = "background"
current_client: ContextVar[str] = ContextVar("current_client", default="")
"""The client whose turn the current request takes in a queue. "" stands for all clients
that the frontends cannot distinguish. BACKGROUND stands for all requests of low
priority."""

current_owner: ContextVar[str] = ContextVar("current_owner", default="")
"""The owner of the data that the current request computes and stores, as `owner_of`
returns it. "" stands for all clients that send no valid API key."""


def is_visible(owner: str) -> bool:
    """Returns True if the current request may read data that this owner has stored. All
    requests may read data that was stored without a key (`owner` is "")."""
    return owner in ("", current_owner.get())


@cache
def owner_of(key: str) -> str:
    """Returns the owner that belongs to an API key: a hash of the key in 32 hexadecimal
    digits. The hash is the same on every server and after a restart, and does not
    reveal the key."""
    return hashlib.pbkdf2_hmac("sha256", key.encode(), SALT, ROUNDS, 16).hex()
