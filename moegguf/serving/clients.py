"""The client of the request that is being handled. Frontends set it; queues, contexts, files and batches read it."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from functools import cache

SALT = b"moegguf owner"
ROUNDS = 100_000  # some 30 ms for each key that is tried to find the one of an owner

BACKGROUND = "background"
current_client: ContextVar[str] = ContextVar("current_client", default="")
"""Whose turn the request takes. Empty: nobody that frontends know; BACKGROUND: of all who come after others."""

current_owner: ContextVar[str] = ContextVar("current_owner", default="")
"""To whom belongs what the request computes and stores: an `owner_of`. Empty: to all who send no key."""


def is_visible(owner: str) -> bool:
    """Returns whether the request may read what this owner has stored. An owner without a key shares with everybody."""
    return owner in ("", current_owner.get())


@cache
def owner_of(key: str) -> str:
    """The name of a key's owner, 32 hexadecimal digits: the same on each server and after a restart, and no way back to
    a key that cannot be guessed."""
    return hashlib.pbkdf2_hmac("sha256", key.encode(), SALT, ROUNDS, 16).hex()
