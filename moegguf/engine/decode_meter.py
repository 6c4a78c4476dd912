"""Speed and hit rate of single tokens, apart from prompts: what a placement's prediction is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moegguf.engine.devices import Device
from moegguf.engine.known_speeds import LEAST_TOKENS, KnownSpeeds
from moegguf.engine.placement import is_off
from moegguf.engine.session import Session

COLD_TOKENS = 64  # after a load; slots are empty, and their misses no model's


@dataclass(frozen=True)
class _Lookups:
    """Counts of the tier that layers compute with."""

    lookups: int = 0
    hits: int = 0

    def __add__(self, other: _Lookups) -> _Lookups:
        return _Lookups(self.lookups + other.lookups, self.hits + other.hits)

    def __sub__(self, other: _Lookups) -> _Lookups:
        return _Lookups(self.lookups - other.lookups, self.hits - other.hits)


class DecodeMeter:
    """Of one loaded model whose experts were placed. Not counted: prompts, and the first tokens after the load."""

    def __init__(self, session: Session, known: KnownSpeeds, device: Device, n_threads: int) -> None:
        self._session = session
        self._known = known
        self._speeds_of = device, n_threads, session.store.options.repack
        self._n_seen = self.n_tokens = 0
        self._seconds = 0.0
        self._others = _Lookups()  # of what is not counted

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens counted; 0 before there are any."""
        return self.n_tokens / self._seconds if self._seconds else 0.0

    def timed(self, call: Callable[[], Any], n_tokens: int) -> Any:
        """The result of `call`, which evaluates so many tokens."""
        self._n_seen += n_tokens
        if n_tokens != 1 or self._n_seen <= COLD_TOKENS:
            before = self._lookups()
            try:
                return call()
            finally:
                self._others += self._lookups() - before
        start = time.perf_counter()
        result = call()
        self._seconds += time.perf_counter() - start
        self.n_tokens += 1
        return result

    def _lookups(self) -> _Lookups:
        counters = self._session.store.counters()
        return _Lookups(counters["lookups"], counters["hits_ready"] + counters["hits_late"])

    def close(self) -> None:
        """Remembers the hit rate, and what was reached of the predicted speed; where that was off, old speeds are
        measured again at the next load instead."""
        plan = self._session.plan
        if self.n_tokens < LEAST_TOKENS or plan.placement is None:
            return
        found, info = self._lookups() - self._others, self._session.store.info()
        if not info["resident"] and found.lookups:
            share = info["n_slots_usable"] / info["n_experts"]
            self._known.add_hits(share, found.hits, found.lookups, self.n_tokens)
        chosen = plan.placement.chosen
        off = is_off(self.tokens_per_s, chosen.tokens_per_s)
        if not off or not self._known.forget_speeds(*self._speeds_of):
            reached = self.tokens_per_s * chosen.correction / chosen.tokens_per_s
            self._known.add_run(*self._speeds_of, chosen.kind, reached, self.n_tokens)
