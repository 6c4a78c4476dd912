"""What of a prompt goes into a context that cannot hold all of it.

Of a conversation whole messages are left out, the oldest first; then the beginning of the longest one. Of other
prompts, and of a full context, the first tokens stay and the older half of the others goes, as in llama.cpp. Does not
know models or templates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

from moegguf.generate.request import Message

ANSWER_DIVISOR = 8  # a truncated conversation leaves an eighth of the context to the answer
MESSAGE_TOKENS = 8  # a template's marks around a message, roughly

Token = TypeVar("Token")


def n_after_shift(n_ctx: int, n_keep: int) -> int:
    """Tokens left of a full context of `n_ctx` when all but the first `n_keep` were halved; at least one goes."""
    n_keep = min(max(n_keep, 0), n_ctx - 1)
    return n_ctx - max((n_ctx - n_keep) // 2, 1)


def cut_middle(tokens: Sequence[Token], n_ctx: int, n_keep: int) -> list[Token]:
    """The first `n_keep` tokens of a prompt that is too long, and the last ones that fit beside them after a shift.

    `tokens` may be those of its ends only, and fewer.
    """
    n_keep = min(max(n_keep, 0), n_ctx - 1)
    n_last = n_after_shift(n_ctx, n_keep) - n_keep
    return [*tokens[:n_keep], *tokens[max(n_keep, len(tokens) - n_last) :]]


class Conversation:
    """The messages of a conversation and the places at which it may begin: never between a call and its results.

    System messages and the last message of the user stay wherever it begins.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        roles = [message.get("role") for message in messages]
        self._last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        self.begins = [
            i for i, role in enumerate(roles) if role == "user" or (role == "assistant" and i > self._last_user)
        ]

    @property
    def fixed(self) -> list[Message]:
        """What every choice keeps, with an empty message of the user in place of the last."""
        system = [message for message in self._messages if message.get("role") == "system"]
        return [*system, {"role": "user", "content": ""}]

    def kept(self, begin: int) -> list[Message]:
        """The messages when it begins at `begin`."""
        return [
            message
            for i, message in enumerate(self._messages)
            if i >= begin or i == self._last_user or message.get("role") == "system"
        ]

    def steady_begin(self, n_tokens: Sequence[int], room: int) -> int:
        """Where to begin so that about `room` tokens suffice. `n_tokens`: of each message, 0 for system messages.

        The same as at its earlier turns, as long as there is room; then it moves so far that half of the room becomes
        free. A prompt mostly begins like the one before, whose tokens are in the context.
        """
        if not self.begins:
            return 0
        sums = [0, *accumulate(n_tokens)]
        at_begins = [sums[begin] for begin in self.begins]
        begin = 0
        for end in [*(i + 1 for i in self.begins if i <= self._last_user), len(n_tokens)]:
            if sums[end] - sums[begin] > room:
                i = bisect_left(at_begins, sums[end] - room // 2)
                begin = max(begin, min(self.begins[min(i, len(self.begins) - 1)], end - 1))
        return begin


def longest(messages: Sequence[Message]) -> int | None:
    """The message with the longest text, except system messages; None when no other has a text."""
    sizes = {
        i: len(message["content"])
        for i, message in enumerate(messages)
        if message.get("role") != "system" and isinstance(message.get("content"), str) and message["content"]
    }
    return max(sizes, key=lambda i: sizes[i], default=None)


def first_that_fits(choices: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of `choices` that fits, by binary search: if one fits, so do those after it."""
    low, high = 0, len(choices)
    while low < high:
        middle = (low + high) // 2
        if fits(choices[middle]):
            high = middle
        else:
            low = middle + 1
    return choices[low] if low < len(choices) else None
