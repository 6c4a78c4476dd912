"""How many compute threads to use on a machine that other processes use, too.

Compute threads wait for each other after every operation. One of them that shares a processor with another process
makes all wait for slices of the scheduler, hundreds of times a token: fewer threads are then faster, up to a hundred
times for a small model. Counts of involuntary context switches do not tell it: a thread that waits for a descheduled
one sleeps, which is voluntary. The processor time of other processes does, with any number of threads of one's own.

Pure: the caller measures and sets.
"""

from __future__ import annotations

import math

MEMORY_S = 10.0  # a time per token is compared for so long, and then measured again
GAIN = 0.95  # another number than the free processors suggest has to be faster by this factor
LOWER_AT, RAISE_AT = 0.4, 0.25  # of a processor in use by others; between the two nothing changes


class ThreadGovernor:
    """Chooses from 1 to `n_max` threads on `n_cpu` processors, as many as others leave free, while that is faster."""

    def __init__(self, n_cpu: int, n_max: int) -> None:
        self._n_cpu = n_cpu
        self._n_max = n_max
        self._n_free = n_max  # the number that the processors in use by others suggest
        self._token_s: dict[int, tuple[float, float]] = {}  # number of threads: seconds per token, when measured
        self.n_threads = n_max

    def decide(self, now_s: float, others: float, token_s: float | None) -> int:
        """The number of threads from now on.

        `others`: processors that other processes kept busy since the last call. `token_s`: seconds of computation per
        decoded token since then; None when none was decoded.
        """
        self._update_free(others)
        if token_s is not None:
            self._token_s[self.n_threads] = token_s, now_s
        self._token_s = {n: known for n, known in self._token_s.items() if now_s - known[1] < MEMORY_S}
        self.n_threads = self._fastest()
        return self.n_threads

    def _update_free(self, others: float) -> None:
        free = self._n_cpu - others
        at_least, at_most = math.floor(free + RAISE_AT), math.floor(free + LOWER_AT)
        n_free = max(1, min(max(self._n_free, at_least), at_most, self._n_max))
        if n_free != self._n_free:
            self._n_free = n_free
            self._token_s.clear()  # measured beside another load

    def _fastest(self) -> int:
        """The number that others leave free, unless another one was measured to be faster beside the same load."""
        if self._n_free not in self._token_s:
            return self._n_free
        best = min(self._token_s, key=lambda n: self._token_s[n])
        return best if self._token_s[best][0] < GAIN * self._token_s[self._n_free][0] else self._n_free
