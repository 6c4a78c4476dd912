"""libmoegguf-drafts: tokens that may come next, by llama.cpp's own speculative code. Loaded only where drafts are used.

It guesses, and verifies nothing. For one thread.
"""

from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from moegguf.errors import MoeggufError
from moegguf.native import library


class Source(IntEnum):
    """Where a draft comes from, in the order in which they are asked: what followed the last tokens earlier in the same
    sequence (many of them, or few), or a draft context. `NONE`: there is no draft."""

    LONG_NGRAM = 0
    SHORT_NGRAM = 1
    MODEL = 2
    NONE = 3


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next in a sequence."""

    source: Source = Source.NONE
    tokens: tuple[int, ...] = ()


class _Config(c.Structure):
    _fields_ = [
        ("key", c.c_int32 * 2), ("n_seq", c.c_int32), ("n_max", c.c_int32), ("target", c.c_void_p),
        ("draft", c.c_void_p), ("heads", c.c_int32),
    ]  # fmt: skip


class _Request(c.Structure):
    _fields_ = [
        ("sequence", c.c_int32), ("n_max", c.c_int32 * Source.NONE), ("source", c.c_int32), ("n", c.c_int32),
        ("tokens", c.c_void_p),
    ]  # fmt: skip


@functools.cache
def _library() -> c.CDLL:
    library.llama_cpp()  # which has loaded libllama
    loaded = library.open_part("moegguf-drafts")
    for name in ("open", "set_tokens", "draft", "evaluated", "accept"):
        function = getattr(loaded, f"drafts_{name}")
        function.restype, function.errcheck = c.c_char_p, _check
    return loaded


def _check(reason: bytes | None, *_: object) -> None:
    if reason is not None:
        raise MoeggufError(f"drafting failed: {reason.decode(errors='replace')}")


class Drafts:
    """Drafts of up to `n_max` tokens for the sequences of a context.

    keys: tokens of the long and the short n-gram that have to repeat. target, draft: addresses of llama_contexts, which
    must outlive this; 0: none. heads: `draft` is of the heads that the target's model has. `least_key`: tokens that
    repeat wherever there is a draft; 0: none have to. Raises MoeggufError, as all methods do, also where their
    vocabularies differ.
    """

    def __init__(
        self, n_seq: int, n_max: int, keys: tuple[int, int], target: int = 0, draft: int = 0, heads: bool = False
    ) -> None:
        self._library, self._handle, self.n_max = _library(), c.c_void_p(), n_max
        self.least_key = 0 if draft else min(keys)
        config = _Config((c.c_int32 * 2)(*keys), n_seq, n_max, target, draft, heads)
        self._library.drafts_open(c.byref(config), c.byref(self._handle))
        self._requests = (_Request * n_seq)()
        self._tokens = np.zeros((n_seq, n_max), np.int32)

    def set_tokens(self, sequence: int, n_kept: int, tokens: Sequence[int]) -> None:
        """A sequence has these tokens after its first `n_kept`; 0: it is another text."""
        new = np.asarray(tokens, np.int32)
        self._library.drafts_set_tokens(self._handle, sequence, n_kept, new.ctypes, len(new))

    def draft(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[Draft]:
        """A draft for each of some sequences, with the most tokens that each source (but `NONE`) may give."""
        for row, (request, (sequence, n_most)) in enumerate(zip(self._requests, wanted, strict=False)):
            request.sequence, request.n_max[:] = sequence, n_most
            request.tokens = self._tokens[row].ctypes.data
        self._library.drafts_draft(self._handle, self._requests, len(wanted))
        return [
            Draft(Source(request.source), tuple(self._tokens[row, : request.n].tolist()))
            for row, request in enumerate(self._requests[: len(wanted)])
        ]

    def evaluated(self, batch: c.Structure) -> None:
        """The target has just evaluated this llama_batch: its heads, if these draft, do so, too."""
        self._library.drafts_evaluated(self._handle, c.byref(batch))

    def accept(self, sequence: int, n: int) -> None:
        """So many tokens of the sequence's last draft came next."""
        self._library.drafts_accept(self._handle, sequence, n)

    def close(self) -> None:
        """Twice is harmless."""
        handle, self._handle = self._handle, c.c_void_p()
        self._library.drafts_close(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
