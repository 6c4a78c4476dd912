"""Prefixes of a conversation as hashes: a chain over its messages, so that equal hashes mean equal beginnings.

The answer is left out: clients send it back changed (without thinking, with other ids), and the next turn still begins
with everything up to the last message before it. Does not know tokens: an equal beginning is one of the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from moegguf.generate.request import GenerationRequest
from moegguf.serving.wire import encode

DIGEST_BYTES = 8
FIRST_CUT_BYTES = 256  # within a message, hashes at this length and every doubling of it


@dataclass(frozen=True)
class Prefix:
    """A beginning of a conversation: its hash, and its length in bytes."""

    digest: str
    n_bytes: int


@dataclass(frozen=True)
class Conversation:
    """What a request shares with others. `prefixes`: shortest first. `least_bytes`: a shared beginning of so many is
    more than a system message: it has the first message of the user, or half of all."""

    prefixes: tuple[Prefix, ...] = ()
    least_bytes: int = 0

    def shared_bytes(self, digests: frozenset[str]) -> int:
        """The bytes of the longest prefix among `digests`; 0 for one that is too short to matter."""
        longest = max((prefix.n_bytes for prefix in self.prefixes if prefix.digest in digests), default=0)
        return longest if longest >= self.least_bytes else 0


def conversation_of(request: GenerationRequest) -> Conversation:
    """The prefixes of a request. Raises OptionError for what JSON cannot hold."""
    chain, n_bytes, prefixes, first_user_end = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, [], 0
    chain.update(_head(request))
    for role, part in _parts(request):
        for piece in _pieces(part):
            chain.update(piece)
            n_bytes += len(piece)
            prefixes.append(Prefix(chain.copy().hexdigest(), n_bytes))
        if role == "user" and not first_user_end:
            first_user_end = n_bytes
    least_bytes = min(first_user_end or n_bytes, (n_bytes + 1) // 2)
    return Conversation(tuple(prefixes), least_bytes)


def _head(request: GenerationRequest) -> bytes:
    """What templates write before the first message."""
    return encode(
        {
            "template": request.template,
            "options": request.template_options,
            "tools": list(request.tools) if request.tool_choice != "none" else [],
            "think": request.think,
        }
    )


def _parts(request: GenerationRequest) -> Iterator[tuple[str, bytes]]:
    """(role, bytes) of each message; of a prompt, the tokens before it and its text."""
    if request.messages is not None:
        for message in request.messages:
            yield str(message.get("role")), encode(message)
        return
    if request.context:
        yield "context", encode({"context": request.context})
    yield "prompt", (request.prompt or "").encode(errors="surrogatepass")


def _pieces(part: bytes) -> Iterator[bytes]:
    """`part`, cut at FIRST_CUT_BYTES and every doubling of it."""
    start, end = 0, FIRST_CUT_BYTES
    while end < len(part):
        yield part[start:end]
        start, end = end, 2 * end
    yield part[start:]
