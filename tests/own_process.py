"""Calls in a process of their own: a device that ggml has been told of stays known, and models loaded later use it."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

from moegguf.quantities import Link

P = ParamSpec("P")
Result = TypeVar("Result")

LONGEST_S = int(os.environ.get("MOEGGUF_LONGEST_TEST_S", "120")) * 3 // 4  # before the test itself is ended


def suppose_speeds() -> None:
    """From now on this process takes these speeds of any device as measured: that would take most of a test's time."""
    from moegguf.engine.cost import Speeds
    from moegguf.engine.speeds import KnownSpeeds

    speeds = Speeds(4e9, Link(1e9, 1e-5), 4e9, source="supposed by a test")
    KnownSpeeds.known = lambda self, device: speeds  # type: ignore[method-assign]


def measure_small_pools() -> None:
    """From now on this process measures speeds with a few MiB of weights, which caches hold: what is measured does not
    matter to a test, and a pool beyond the caches of a server takes seconds to fill."""
    from moegguf.engine import speeds

    speeds.POOL_BYTES, speeds.CACHES = 4 << 20, 0


def in_own_process(call: Callable[P, Result], *arguments: P.args, **options: P.kwargs) -> Result:
    """The result of a function of a module, or its exception. Speeds of devices are supposed there."""
    return _in_process(suppose_speeds, call, *arguments, **options)


def in_measuring_process(call: Callable[P, Result], *arguments: P.args, **options: P.kwargs) -> Result:
    """The same where speeds of devices are measured."""
    return _in_process(measure_small_pools, call, *arguments, **options)


def _in_process(
    first: Callable[[], None], call: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Result:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), first) as pool:
        return pool.submit(call, *arguments, **options).result(LONGEST_S)
