"""Calls functions in other processes, because a device that is registered with ggml
stays registered, and later loads use it.

Most of these processes are forked from a process that has already imported the modules
they need. Imports would take most of a small test's time.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from moegguf.child import child_environment
from moegguf.quantities import Link

P = ParamSpec("P")
Result = TypeVar("Result")

# Seconds for a call: less than the time limit of a test.
LONGEST_S = int(os.environ.get("MOEGGUF_LONGEST_TEST_S", "120")) * 3 // 4
# Modules that the fork server imports in advance. It skips modules that are not on the
# path, as in some test folders. MOEGGUF_LIBRARY may name a build without libllama
# (tools/sanitize.py), with which modules of the engine cannot be imported.
IMPORTED = ["pytest", "moegguf.testing.link_device", "tools.models", "rpc_device"]
if "MOEGGUF_LIBRARY" not in os.environ:
    IMPORTED += ["moegguf.generate.engine", "running", "answering"]


@functools.cache
def fork_context() -> ForkServerContext:
    """Starts the fork server, from which a process is forked for each call.

    OpenBLAS uses one thread there, because a forked process has only one thread.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ, child_environment(OPENBLAS_NUM_THREADS="1")):
        forkserver.ensure_running()
    return context


def suppose_speeds() -> None:
    """Makes this process use fixed speeds for any device from now on. Measuring would
    take most of a test's time."""
    from moegguf.engine.cost import Speeds
    from moegguf.engine.speeds import KnownSpeeds

    speeds = Speeds(4e9, Link(1e9, 1e-5), 4e9, source="supposed by a test")
    KnownSpeeds.known = lambda self, device: speeds  # type: ignore[method-assign]


def measure_small_pools() -> None:
    """Makes this process measure speeds with 4 MiB of weights from now on, although
    they fit into CPU caches.

    Tests do not depend on the measured speeds. A pool larger than the caches of a
    server takes seconds to fill.
    """
    from moegguf.engine import speeds

    speeds.POOL_BYTES, speeds.CACHES = 4 << 20, 0


def in_own_process(
    call: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Result:
    """Calls a function in a new process. Returns the function's result or raises its
    exception.

    The function must be defined at the top level of a module. The process uses fixed
    speeds of devices.
    """
    return _in_process(fork_context(), suppose_speeds, call, *arguments, **options)


def in_new_process(
    call: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Result:
    """Calls a function as `in_own_process` does, but in a process that was not forked
    and loads the library itself.

    The library then reads this process's environment.
    """
    return _in_process(
        multiprocessing.get_context("spawn"),
        suppose_speeds,
        call,
        *arguments,
        **options,
    )


def in_measuring_process(
    call: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Result:
    """Calls a function as `in_own_process` does, but the process measures the speeds of
    devices."""
    return _in_process(fork_context(), measure_small_pools, call, *arguments, **options)


def started_process(call: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Starts a process that calls `call` with a copy of this process's environment.
    Returns the process.

    The process is a daemon: Python terminates it when this process exits.
    """
    process = fork_context().Process(
        target=_with_environment, args=(dict(os.environ), call, *arguments), daemon=True
    )
    process.start()
    return process


def _in_process(
    context: BaseContext,
    first: Callable[[], None],
    call: Callable[P, Result],
    *arguments: P.args,
    **options: P.kwargs,
) -> Result:
    begin = (dict(os.environ), first)
    with ProcessPoolExecutor(1, context, _with_environment, begin) as pool:
        return pool.submit(call, *arguments, **options).result(LONGEST_S)


def _with_environment(
    environment: Mapping[str, str], call: Callable[..., object], *arguments: Any
) -> None:
    """Replaces this process's environment, then calls `call`.

    A forked process would otherwise keep the environment with which the fork server was
    started.
    """
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ |= environment
    call(*arguments)
