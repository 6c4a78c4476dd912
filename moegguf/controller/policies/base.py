"""What an eviction policy is: one that the store carries out natively, or one that computes a score table in Python."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.native.events import Float32s
from moegguf.native.store import NativePolicy

HALF_LIFE_TOKENS = 14.0

LRU = NativePolicy("lru")
"""Least recently used: the store's default."""


@runtime_checkable
class Policy(Protocol):
    """A policy in Python. One method; the store applies floors and pins, and breaks ties by least recent use."""

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """Scores (n_layer, n_expert), the lowest is evicted first; None keeps the last ones.

        Called after each routing event. NaN and infinities count as 0.
        """


AnyPolicy = Policy | NativePolicy


class Locality(NativePolicy):
    """ExpertFlow's predictive locality-aware expert caching with real-time correction (sections 3.2.1 and 3.2.2).

    Keeps the experts predicted for this pass, nearest layers first; evicts mispredicted ones first.

    From the first victim to the last: 1. experts that were predicted for a layer and that its router has not chosen
    (mis-prefetched), unless they are hot; 2. experts that this pass no longer needs: those of layers computed already,
    and those of later layers that are not predicted; 3. predicted experts of layers to come, the farthest first.

    The paper names this order (3.2.2: mis-prefetched ones, then those that have completed) but not the order among
    equals, nor what "locality" means beyond its example (3.2.1: a cache of 8 takes the two nearest of four layers
    whole, and the third as the first completes); the formula, if there was one, is missing from the text available.
    Here it is distance in layers among predicted experts, and decayed frequency among the others. A policy cannot
    distinguish a prefetched expert from one that was resident before, hence the exception for hot experts: without it
    every misprediction evicts one. So without a predictor this is decayed LFU, and no row of ExpertFlow's.

    The store carries it out: it is its next-use policy, given each expert's status (predicted or idle, section 3.1)
    instead of a probability. So correction acts at the very routing event where the router differs, before any victim
    is chosen there.
    """

    __slots__ = ()
    title: ClassVar[str] = "locality"


LOCALITY = Locality(
    "next-use",
    {"half_lives_tokens": (HALF_LIFE_TOKENS,), "weights": (1.0,), "distance_weight": 1.0, "trust": 1.0},
    takes_forecast=True,
)
