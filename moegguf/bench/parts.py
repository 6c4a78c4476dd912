"""Measures individual parts of the store: evictions, and copies over a simulated
link."""

from __future__ import annotations

import ctypes as c
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moegguf.bench.measure import simulated_links
from moegguf.bench.turns import Row
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native import library
from moegguf.native.store import Store, StoreOptions, native_policies
from moegguf.quantities import parse_link
from moegguf.trace.simulate import layout_of

OPTIONS = StoreOptions(repack=False, fill=False, simulate=True, sweep=False)
# Not a native policy: `pass_us` sets new scores for the routed layer before each event.
SCORES = "scores"
# Not a native policy: `pass_us` sets new scores for all layers before each event.
ALL_SCORES = "scores, all"

# A matrix of a Qwen3-30B expert in Q4_0 occupies 884,736 bytes. The next size covers
# the expert's three matrices.
COPY_BYTES = (1 << 12, 1 << 16, 884_736, 2_654_208, 1 << 24)
GGML_TYPE_F32 = 0


class Evictions:
    """A simulated store that receives random single-token routing events, layer by
    layer. Transfers take no time."""

    def __init__(self, shape: MoeShape, n_slots: int, policy: str) -> None:
        self.shape = shape
        self.policy = policy
        self._n_slots = n_slots
        self._rng = np.random.default_rng(0)
        self._scores = self._rng.random(shape.table, np.float32)
        self.store = Store(layout_of(shape), n_slots, OPTIONS)
        if policy not in (SCORES, ALL_SCORES):
            self.store.set_policy(policy)

    def ids(self) -> np.ndarray:
        """Returns random experts for a routing event, shape (n_expert_used,)."""
        return self._rng.permutation(self.shape.n_expert)[
            : self.shape.n_expert_used
        ].astype(np.int32)

    def fits(self) -> bool:
        """Returns whether enough slots are free for all misses of another pass."""
        n_used = self.store.counters()["slots_used"]
        return n_used + self.shape.n_layer * self.shape.n_expert_used <= self._n_slots

    def pass_us(self) -> float:
        """Runs one pass. Returns the time spent in the store's hooks, in microseconds
        per miss."""
        before = self.store.counters()
        for il in range(self.shape.n_layer):
            if self.policy in (SCORES, ALL_SCORES):
                part = il if self.policy == SCORES else slice(None)
                self._scores[part] = self._rng.random(
                    self._scores[part].shape, np.float32
                )
                self.store.set_scores(self._scores)
            self.store.context.acquire(il, self.ids())
        after = self.store.counters()
        return (
            (after["hook_ns"] - before["hook_ns"])
            / 1000
            / max(1, after["misses"] - before["misses"])
        )

    def replay_s(self, n_lookups: int) -> float:
        """Replays about `n_lookups` lookups in one call. Returns the seconds, scaled to
        exactly `n_lookups`."""
        shape = self.shape
        n = n_lookups // shape.n_expert_used
        il = np.arange(n, dtype=np.int32) % shape.n_layer
        few = np.stack([self.ids() for _ in range(4096)])
        ids = few[self._rng.integers(0, len(few), n)]
        start_s = time.perf_counter()
        self.store.context.replay(
            il,
            np.ones(n, np.int32),
            np.full(n, shape.n_expert_used, np.int32),
            ids.ravel(),
        )
        return (time.perf_counter() - start_s) * n_lookups / (n * shape.n_expert_used)


def evictions(
    _: str,
    *,
    slots: int = 10_000,
    layers: int = 64,
    experts: int = 256,
    used: int = 8,
    events: int = 4000,
) -> Iterator[Row]:
    """Yields a row of times for each policy.

    A row contains the time of a miss that gets a free slot, the time of a miss that
    evicts an expert, and their difference, in microseconds (medians over passes).
    Except for the policy ALL_SCORES, it also contains the seconds that a million
    lookups take in one call.
    """
    if slots > (layers - 1) * experts:
        raise OptionError(
            f"slots is {slots}, but at most {(layers - 1) * experts} slots can be filled; give fewer slots."
        )
    shape = MoeShape(
        layers, experts, used, tuple(range(layers)), 64, 1000, expert_bytes=3000
    )
    for policy in (*native_policies(), SCORES, ALL_SCORES):
        bench = Evictions(shape, slots, policy)
        filling = []
        while bench.fits():
            filling.append(bench.pass_us())
        for n in range(4 * layers):
            bench.store.context.acquire(n % layers, bench.ids())
        full = [bench.pass_us() for _ in range(-(-events // layers))]
        bench.store.close()
        row: Row = {
            "policy": policy,
            "miss, free slot us": statistics.median(filling),
            "miss, eviction us": statistics.median(full),
            "an eviction us": statistics.median(full) - statistics.median(filling),
            "1e6 lookups s": "",
        }
        if policy != ALL_SCORES:
            bench = Evictions(shape, slots, policy)
            row["1e6 lookups s"] = bench.replay_s(1_000_000)
            bench.store.close()
        yield row


class _InitParams(c.Structure):
    """The C struct ggml_init_params."""

    _fields_ = [
        ("mem_size", c.c_size_t),
        ("mem_buffer", c.c_void_p),
        ("no_alloc", c.c_bool),
    ]


def device_copies(
    device: str, n_bytes: int, n_at_once: int
) -> list[Callable[[], None]]:
    """Returns `n_at_once` functions. Each function copies `n_bytes` to its own tensor
    on the device, and returns when the copy is complete."""
    library.load()
    ggml = c.CDLL(str(library.find_library() / "libggml.so"))
    for name in (
        "ggml_init",
        "ggml_new_tensor_1d",
        "ggml_backend_dev_by_name",
        "ggml_backend_dev_buffer_type",
        "ggml_backend_alloc_ctx_tensors_from_buft",
    ):
        getattr(ggml, name).restype = c.c_void_p
    buffer_type = ggml.ggml_backend_dev_buffer_type(
        c.c_void_p(ggml.ggml_backend_dev_by_name(device.encode()))
    )
    source = np.ones(n_bytes, np.uint8)

    def copy_into(tensor: int) -> None:
        data = source.ctypes.data_as(c.c_void_p)
        ggml.ggml_backend_tensor_set(
            c.c_void_p(tensor), data, c.c_size_t(0), c.c_size_t(n_bytes)
        )

    copies: list[Callable[[], None]] = []
    for _ in range(n_at_once):
        context = c.c_void_p(ggml.ggml_init(_InitParams(1 << 12, None, True)))
        tensor = ggml.ggml_new_tensor_1d(
            context, GGML_TYPE_F32, c.c_int64(n_bytes // 4)
        )
        ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, c.c_void_p(buffer_type))
        copies.append(functools.partial(copy_into, tensor))
    return copies


def elapsed_s(copies: Sequence[Callable[[], None]]) -> float:
    """Calls all functions at the same time, the first one in this thread and each of
    the others in its own thread. Returns the seconds until all of them have
    returned."""
    threads = [threading.Thread(target=copy) for copy in copies[1:]]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    copies[0]()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


def link_times(
    _: str, *, link: str = "2GB/s,35us", repetitions: int = 100
) -> Iterator[Row]:
    """Measures copies over a simulated link. Yields a row for one copy of each size,
    then for two copies at the same time. A row also contains the time predicted by the
    formula latency + bytes of all copies / bandwidth, and the GB/s at which one thread
    copies within this machine's memory."""
    described = parse_link(link)
    simulated = simulated_links()
    device = simulated.link_device(described)
    memory = simulated.memory_copy_bytes_per_s() / 1e9
    for n_at_once in (1, 2):
        for n_bytes in COPY_BYTES:
            copies = device_copies(device, n_bytes, n_at_once)
            # Not measured: the first copy makes the system allocate the memory pages.
            elapsed_s(copies)
            times = sorted(elapsed_s(copies) for _ in range(repetitions))
            model_s = described.latency_s + n_at_once * n_bytes / described.bytes_per_s
            yield {
                "bytes": n_bytes,
                "at once": n_at_once,
                "model us": model_s * 1e6,
                "median us": statistics.median(times) * 1e6,
                "ratio": statistics.median(times) / model_s,
                "p10": times[repetitions // 10] / model_s,
                "p90": times[-1 - repetitions // 10] / model_s,
                "memory GB/s": memory,
            }
