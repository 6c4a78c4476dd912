"""The compute threads of one context: a ggml thread pool, and the choice of how many of
its threads run.

Without this pool, a build without OpenMP would create and destroy threads for every
part of a graph. The expert hook splits the graph at every layer, so a tiny model would
run at a tenth of its speed. OpenMP keeps its own threads between parts. With OpenMP,
the pool only fixes the number of parts that sums are divided into
(patches/fixed-partitions.patch). So results have the same bits when fewer threads run.
"""

from __future__ import annotations

import ctypes as c
import math
import time
from collections.abc import Callable
from pathlib import Path

from moegguf.decisions import log_decision
from moegguf.engine.machine import ProcessorUse
from moegguf.errors import AllocationError
from moegguf.native import library

# Room for a struct ggml_threadpool_params (ggml.h), which only ggml reads: at least 528
# bytes.
PARAMS_BYTES = 1024
# Minimum seconds between decisions; the system counts CPU time in steps of 0.01 s.
PERIOD_S = 0.25
# The measured processor use is ignored after this many seconds without a pass.
IDLE_S = 0.25
MEMORY_S = 10.0  # seconds for which a measured time per token remains valid
# a different number of threads is used if its time per token is below this share of the
# time with as many threads as free processors
GAIN = 0.95
# use of a processor by other processes, as a share: above 0.4 the processor loses its
# compute thread, and below 0.25 it regains one
LOWER_AT, RAISE_AT = (0.4, 0.25)


class Threadpool:
    """The compute threads of one context, for single tokens and for batches. The
    constructor attaches the threads to the context. Close this object after the
    context.

    Raises AllocationError if the threads cannot be created.
    """

    def __init__(self, context: int, n_threads: int, n_threads_batch: int) -> None:
        self._free = c.CFUNCTYPE(None, c.c_void_p)(
            library.cpu_function("ggml_threadpool_free")
        )
        self._pools: list[int] = []
        single = self._create(n_threads, "n_threads")
        batch = (
            single
            if n_threads_batch == n_threads
            else self._create(n_threads_batch, "n_threads_batch")
        )
        llama = library.llama_cpp().llama_cpp._lib
        llama.llama_attach_threadpool.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
        llama.llama_attach_threadpool(context, single, batch)

    def _create(self, n_threads: int, option: str) -> int:
        """Creates a pool of `n_threads` threads. `option`: the name of the option that
        sets this number, for the error message."""
        new = c.CFUNCTYPE(c.c_void_p, c.c_void_p)(
            library.cpu_function("ggml_threadpool_new")
        )
        base = c.CDLL(str(next(Path(library.find_library()).glob("libggml-base.*"))))
        params = c.create_string_buffer(PARAMS_BYTES)
        base.ggml_threadpool_params_init(params, n_threads)
        pool: int | None = new(c.addressof(params))
        if not pool:
            self.close()
            raise AllocationError(
                f"{n_threads} compute threads cannot be created; give a smaller {option}."
            )
        self._pools.append(pool)
        return pool

    def close(self) -> None:
        """Stops the threads. A second call does nothing."""
        while self._pools:
            self._free(self._pools.pop())


class ThreadGovernor:
    """Chooses the number of threads: the number of free processors, or another one that
    was measured to be faster.

    The number is from 1 to `n_max`, on `n_cpu` processors. This class only computes:
    the caller measures, and sets the number.

    Compute threads wait for each other after every operation. If one of them shares a
    processor with another process, all of them wait for the scheduler's time slices,
    hundreds of times per token. Fewer threads are then faster, up to a hundred times
    for a small model. Counts of involuntary context switches do not show this, because
    a thread that waits for a descheduled one sleeps voluntarily. The CPU time that
    other processes use shows the conflict, however many threads the context itself
    uses.
    """

    def __init__(self, n_cpu: int, n_max: int) -> None:
        self._n_cpu = n_cpu
        self._n_max = n_max
        # Number of threads derived from the number of free processors.
        self._n_free = n_max
        # {number of threads: (seconds per token, time of the measurement)}
        self._token_s: dict[int, tuple[float, float]] = {}
        self.n_threads = n_max

    def decide(self, now_s: float, others: float, token_s: float | None) -> int:
        """Returns the number of threads to use from now on.

        `others`: processors that other processes kept busy since the last call.
        `token_s`: seconds of computation per decoded token since the last call; None if
        this was not measured.
        """
        free = self._n_cpu - others
        at_least = math.floor(free + RAISE_AT)
        at_most = math.floor(free + LOWER_AT)
        n_free = max(1, min(max(self._n_free, at_least), at_most, self._n_max))
        if n_free != self._n_free:
            self._n_free = n_free
            # The known times were measured under a different load.
            self._token_s.clear()
        if token_s is not None:
            self._token_s[self.n_threads] = token_s, now_s
        known = self._token_s = {
            n: found
            for n, found in self._token_s.items()
            if now_s - found[1] < MEMORY_S
        }
        self.n_threads = self._n_free
        # A different number of threads may have been measured to be faster under this
        # load.
        if self._n_free in known:
            best = min(known, key=lambda n: known[n])
            if known[best][0] < GAIN * known[self._n_free][0]:
                self.n_threads = best
        return self.n_threads


class GovernedThreads:
    """Adapts a context's number of compute threads to the processors that other
    processes leave free.

    stall_s: returns the seconds that the context has waited for experts so far.
    """

    def __init__(self, context: int, n_max: int, stall_s: Callable[[], float]) -> None:
        self._context = context
        self._stall_s = stall_s
        self._use = ProcessorUse()
        self._governor = ThreadGovernor(self._use.n_cpu, n_max)
        self._set_n_threads = library.llama_cpp().llama_set_n_threads
        self._decoded: list[float] | None = []
        self._stalled_s = stall_s()
        self._begun_s = time.perf_counter()
        self._ended_s = self._begun_s  # end of the last pass

    @property
    def n_threads(self) -> int:
        """The number of threads last chosen for passes."""
        return self._governor.n_threads

    def before_pass(self) -> None:
        """Chooses the number of threads again if the last choice is at least PERIOD_S
        old. After an idle period, only restarts the measurement of other processes."""
        now_s = time.perf_counter()
        if now_s - self._begun_s < PERIOD_S:
            return
        stalled_s = self._stall_s()
        others = self._use.others()
        before = self.n_threads
        if now_s - self._ended_s < IDLE_S:
            # Compute time per token in seconds; None after a pass of several tokens, or
            # without a pass.
            token_s = None
            if self._decoded:
                token_s = max(
                    sum(self._decoded) - (stalled_s - self._stalled_s), 0.0
                ) / len(self._decoded)
            n_threads = self._governor.decide(now_s, others, token_s)
            if n_threads != before:
                self._set_n_threads(self._context, n_threads, n_threads)
                log_decision(
                    "threads_changed",
                    n_threads=n_threads,
                    before=before,
                    others=round(others, 2),
                    token_s=token_s,
                )
        self._decoded = []
        self._stalled_s = stalled_s
        self._begun_s = now_s

    def after_pass(self, n_tokens: int, seconds: float) -> None:
        """Records the end of a pass, which took `seconds`. Only passes of one token are
        measured: any other pass (0 tokens: an unknown number) discards the measurement
        until the next choice of threads."""
        self._ended_s = time.perf_counter()
        if n_tokens != 1:
            self._decoded = None
        elif self._decoded is not None:
            self._decoded.append(seconds)
