"""Calls in a process of their own: a device that ggml has been told of stays known, and models loaded later use it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

LONGEST_S = int(os.environ.get("MOEGGUF_LONGEST_TEST_S", "120")) * 3 // 4  # before the test itself is ended


def in_own_process(call: Callable[P, Result], *arguments: P.args, **options: P.kwargs) -> Result:
    """The result of a function of a module, or its exception."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments, **options).result(LONGEST_S)
