"""What a template may spend: work, in characters looked at or made, and time. Knows no templates."""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any

from jinja2.utils import Namespace

MAX_TEXT = 16 << 20  # characters of one value, and of the whole output
ITEM = 8  # what an element of a list costs, in characters
CLOCK_STEP = 20_000  # cost between two looks at the clock


class LimitError(Exception):
    """The template has used up what it was given: work, time or room."""


class Purse:
    """What a template may still spend. `with` makes it the one of this thread's running template."""

    def __init__(self, cost: int, seconds: float) -> None:
        self.left = cost
        self._deadline = time.monotonic() + seconds
        self._look_at = cost - CLOCK_STEP

    def pay(self, cost: int) -> None:
        """Raises LimitError when it is empty or the time is over."""
        self.left -= cost
        if self.left < self._look_at:
            self._look_at = self.left - CLOCK_STEP
            if self.left < 0:
                raise LimitError("it computes too much")
            if time.monotonic() > self._deadline:
                raise LimitError("it takes too long")

    def __enter__(self) -> Purse:
        _running.purse = self
        return self

    def __exit__(self, *_: object) -> None:
        del _running.purse


_running = threading.local()


def pay(cost: int) -> None:
    """From the purse of the template that runs on this thread."""
    _running.purse.pay(cost)


def left() -> int:
    return int(_running.purse.left)


_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def weigh(value: Any) -> Any:
    """Pays for looking at all of a value once, as if shared parts were copies, and returns it."""
    if isinstance(value, str):
        pay(len(value) + 1)
    elif isinstance(value, dict):
        pay(ITEM)
        for key, item in value.items():
            weigh(key)
            weigh(item)
    elif isinstance(value, _CONTAINERS):
        pay(ITEM)
        for item in value:
            weigh(item)
    elif isinstance(value, Namespace):
        weigh(value._Namespace__attrs)
    else:
        pay(1)
    return value


def size_of(value: Any) -> int:
    """What `weigh` pays."""
    with Purse(1 << 62, float("inf")) as purse:
        weigh(value)
    return (1 << 62) - purse.left


def weigh_length(value: Any) -> Any:
    """Pays for a copy of a value's outermost level, and returns it."""
    pay(len(value) * (1 if isinstance(value, str) else ITEM) if hasattr(value, "__len__") else 1)
    return value


def room_for(n_characters: int) -> None:
    """Pays for a text that is about to be made."""
    if n_characters > MAX_TEXT:
        raise LimitError(f"it makes a text of more than {MAX_TEXT} characters")
    pay(n_characters)
