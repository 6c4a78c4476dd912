"""Tests a simulated device behind a link in real time: its memory, the order of its
work, and the minimum time of copies.

Times are only bounded from below: a copy may be late on a busy machine, but is never
early.
"""

import ctypes as c
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import (
    F16,
    F32,
    MXFP4,
    Q4_0,
    Q4_K,
    Q8_0,
    FakeModel,
    layer_matrices,
    make_model,
)
from own_process import in_own_process
from product import InitParams, load

from moegguf.errors import AllocationError, OptionError
from moegguf.gguf.experts import ExpertLayout, Kind, MoeLayer
from moegguf.native.slot_sizes import (
    matrices_of,
    most_slots,
    padded,
    slot_sizes,
    slot_tokens,
)
from moegguf.native.store import Store, StoreOptions
from moegguf.quantities import Link
from moegguf.testing.link_device import (
    LinkFigures,
    add_link_device,
    link_device,
    link_figures,
)

FREE = Link(1e12)  # a copy takes only the time to write memory
GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU

_POINTERS = (
    "ggml_init", "ggml_new_tensor_1d", "ggml_backend_dev_by_name", "ggml_backend_dev_init", "ggml_backend_dev_get",
    "ggml_backend_dev_buffer_type", "ggml_backend_dev_host_buffer_type", "ggml_backend_buft_alloc_buffer",
    "ggml_backend_buffer_get_base", "ggml_backend_alloc_ctx_tensors_from_buft", "ggml_backend_event_new",
    "ggml_backend_buffer_get_type", "ggml_get_data", "ggml_dup", "ggml_new_graph",
)  # fmt: skip


class Rig:
    """A new device. `close` frees the backends, tensors and host buffers that were
    created with the rig."""

    def __init__(self, link: Link, **options: Any) -> None:
        self.name = add_link_device(link, **options)
        self.ggml = load("ggml", _POINTERS)  # this also loads libggml-base
        self.device = self.call("dev_by_name", self.name.encode())
        self._free: list[Callable[[], object]] = []

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the function ggml_backend_NAME. Integer arguments must be addresses or
        sizes."""
        return getattr(self.ggml, f"ggml_backend_{name}")(
            *(c.c_void_p(a) if isinstance(a, int) else a for a in arguments)
        )

    def backend(self) -> int:
        made: int = self.call("dev_init", self.device, None)
        self._free.append(lambda: self.call("free", made))
        return made

    def event(self) -> int:
        made: int = self.call("event_new", self.device)
        self._free.append(lambda: self.call("event_free", made))
        return made

    def tensor(self, n_bytes: int) -> int:
        """Returns a new F32 tensor of `n_bytes` bytes on the device."""
        context = self.ggml.ggml_init(InitParams(1 << 12, None, True))
        made: int = self.ggml.ggml_new_tensor_1d(
            c.c_void_p(context), F32, c.c_int64(n_bytes // 4)
        )
        buffer = self.call(
            "alloc_ctx_tensors_from_buft",
            context,
            self.call("dev_buffer_type", self.device),
        )
        self._free += [
            lambda: self.call("buffer_free", buffer),
            lambda: self.ggml.ggml_free(c.c_void_p(context)),
        ]
        return made

    def graph(self, n_bytes: int) -> tuple[int, int, int, Callable[[], object]]:
        """Returns a graph that copies an F32 tensor on the device, its source tensor,
        its result tensor, and a function.

        The function frees the memory of both tensors.
        """
        context = self.ggml.ggml_init(InitParams(1 << 20, None, True))
        source: int = self.ggml.ggml_new_tensor_1d(
            c.c_void_p(context), F32, c.c_int64(n_bytes // 4)
        )
        result: int = self.ggml.ggml_dup(c.c_void_p(context), c.c_void_p(source))
        graph: int = self.ggml.ggml_new_graph(c.c_void_p(context))
        self.ggml.ggml_build_forward_expand(c.c_void_p(graph), c.c_void_p(result))
        buffer = self.call(
            "alloc_ctx_tensors_from_buft",
            context,
            self.call("dev_buffer_type", self.device),
        )
        self._free.append(lambda: self.ggml.ggml_free(c.c_void_p(context)))
        return graph, source, result, lambda: self.call("buffer_free", buffer)

    def host_memory(self, n_bytes: int) -> tuple[int, str]:
        """Returns the address of bytes that are all 1 in a host buffer of the device,
        and the buffer type's name."""
        buffer = self.call(
            "buft_alloc_buffer", self.call("dev_host_buffer_type", self.device), n_bytes
        )
        self._free.append(lambda: self.call("buffer_free", buffer))
        base = int(self.call("buffer_get_base", buffer))
        c.memset(base, 1, n_bytes)
        name = self.ggml.ggml_backend_buft_name
        name.restype = c.c_char_p
        return base, name(c.c_void_p(self.call("buffer_get_type", buffer))).decode()

    def there(self, tensor: int, n_bytes: int) -> bool:
        """Returns True if all bytes of the tensor have the value 1, and False if all
        have another value.

        Asserts that all bytes are equal. Reads the tensor's memory through
        /proc/self/mem.
        """
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(self.ggml.ggml_get_data(c.c_void_p(tensor)))
            found = set(memory.read(n_bytes))
        assert len(found) == 1
        return found == {1}

    def close(self) -> None:
        while self._free:
            self._free.pop()()


def elapsed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def what_a_device_is() -> dict[str, Any]:
    count = load("ggml", ()).ggml_backend_dev_count
    before = count()
    assert link_device(FREE) == link_device(FREE) == "LINK0"
    with pytest.raises(OptionError, match="bandwidth above zero"):
        add_link_device(Link(0))
    with pytest.raises(OptionError, match="bandwidth above zero"):
        add_link_device(Link(1e9, -1e-6))
    rig = Rig(FREE)
    is_host = rig.ggml.ggml_backend_buft_is_host
    is_host.restype = c.c_bool
    memory, host_memory = (
        rig.call(name, rig.device)
        for name in ("dev_buffer_type", "dev_host_buffer_type")
    )
    return {
        "added": count() - before, "name": rig.name, "type": rig.call("dev_type", rig.device),
        "memory_is_host": is_host(c.c_void_p(memory)), "host_memory_is_host": is_host(c.c_void_p(host_memory)),
    }  # fmt: skip


def test_link_device_is_a_gpu_with_memory_of_its_own() -> None:
    assert in_own_process(what_a_device_is) == {
        "added": 2, "name": "LINK1", "type": GPU, "memory_is_host": False, "host_memory_is_host": True,
    }  # fmt: skip


def asynchronous_copies(
    pinned: bool, link: Link, strict_seed: int = 0
) -> tuple[str, bool, bool, bool]:
    """Copies bytes to a device, and checks three times whether they have arrived.
    Returns the host buffer's type, and the results of the checks.

    The first check is when the call returns. The second is after waiting for an event
    that was recorded on another stream before the copy. The third is after another
    stream has waited for an event that follows the copy.
    """
    n_bytes = 1 << 20
    rig = Rig(link, pinned=pinned, strict_seed=strict_seed)
    memory, buffer_type = rig.host_memory(n_bytes)
    tensor, event, first, second = (
        rig.tensor(n_bytes),
        rig.event(),
        rig.backend(),
        rig.backend(),
    )
    # The call returns at once, because nothing has recorded this event yet.
    rig.call("event_synchronize", event)
    rig.call("event_record", event, second)
    rig.call("tensor_set_async", first, tensor, memory, 0, n_bytes)
    at_once = rig.there(tensor, n_bytes)
    rig.call("event_synchronize", event)
    of_other = rig.there(tensor, n_bytes)
    rig.call("event_record", event, first)
    rig.call("event_wait", second, event)
    rig.call("synchronize", second)
    finally_there = rig.there(tensor, n_bytes)
    rig.close()
    return buffer_type, at_once, of_other, finally_there


def test_copies_are_asynchronous_only_from_pinned_memory() -> None:
    half_a_second = Link((1 << 20) / 0.5)
    assert in_own_process(asynchronous_copies, True, half_a_second) == (
        "LINK0_Host",
        False,
        False,
        True,
    )
    assert in_own_process(asynchronous_copies, True, FREE, strict_seed=1) == (
        "LINK0_Host",
        False,
        False,
        True,
    )
    assert in_own_process(asynchronous_copies, False, FREE) == ("CPU", True, True, True)


def launches(n: int) -> tuple[list[bool], LinkFigures]:
    """Launches a graph n times behind a copy that takes 0.2 s, then waits for the
    device.

    Returns whether the graph's result was available after each launch and after the
    wait, followed by the device's figures.
    """
    n_bytes = 1 << 20
    rig = Rig(Link(n_bytes / 0.2), strict_seed=1)
    memory, _ = rig.host_memory(n_bytes)
    graph, source, result, free = rig.graph(n_bytes)
    stream, there = rig.backend(), []
    rig.call("tensor_set_async", stream, source, memory, 0, n_bytes)
    for _ in range(n):
        assert rig.call("graph_compute_async", stream, graph) == 0
        there.append(rig.there(result, n_bytes))
    rig.call("synchronize", stream)
    there.append(rig.there(result, n_bytes))
    free()
    rig.close()
    return there, link_figures(rig.name)


def test_strict_device_launches_graphs_behind_copies_and_replays_from_the_third_on() -> (
    None
):
    there, figures = in_own_process(launches, 4)
    assert there == [False] * 4 + [True]
    assert (
        figures.launches,
        figures.replays,
        figures.launches_beside_copies,
        figures.fault,
    ) == (4, 2, 4, "")


def faults_of_users() -> list[str]:
    """Returns the faults that strict devices report after two misuses and after correct
    use.

    In the first misuse, the source of a copy changes before the copy is done. In the
    second, the memory of a graph is freed before the graph is computed. Asserts that a
    device with a fault computes nothing more.
    """
    n_bytes, found = 1 << 16, []
    for misuse in ("source", "memory", ""):
        # This seed delays the launch until a caller waits.
        rig = Rig(FREE, strict_seed=2)
        memory, _ = rig.host_memory(n_bytes)
        graph, source, _, free = rig.graph(n_bytes)
        stream = rig.backend()
        rig.call("tensor_set_async", stream, source, memory, 0, n_bytes)
        if misuse == "source":
            c.memset(memory + n_bytes // 2, 2, 4)
        else:
            rig.call("graph_compute_async", stream, graph)
        if misuse == "memory":
            free()
        rig.call("synchronize", stream)
        if misuse:
            assert rig.call("graph_compute_async", stream, graph) != 0
        rig.close()
        found.append(link_figures(rig.name).fault)
    return found


def test_strict_device_reports_changed_copy_sources_and_freed_memory() -> None:
    source, memory, nothing = in_own_process(faults_of_users)
    assert source == "what was to be copied has changed before it was"
    assert "memory that is not there" in memory
    assert nothing == ""


def copy_times() -> list[float]:
    """Returns the seconds that four kinds of copies take.

    These are one copy, two simultaneous copies in one direction, two in opposite
    directions, and two in one stream.
    """
    n_bytes, link = 1 << 20, Link((1 << 20) / 0.05, 0.02)  # 50 ms and 20 ms
    rig = Rig(link)
    memory, _ = rig.host_memory(n_bytes)
    back = np.zeros(n_bytes, np.uint8)
    first, second, stream = rig.tensor(n_bytes), rig.tensor(n_bytes), rig.backend()

    def both(*calls: tuple[str, int, int]) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda call: rig.call(*call, 0, n_bytes), calls))

    def one_after_another() -> None:
        for tensor in (first, second):
            rig.call("tensor_set_async", stream, tensor, memory, 0, n_bytes)
        rig.call("synchronize", stream)

    times = [
        elapsed_s(lambda: rig.call("tensor_set", first, memory, 0, n_bytes)),
        elapsed_s(
            lambda: both(("tensor_set", first, memory), ("tensor_set", second, memory))
        ),
        elapsed_s(
            lambda: both(
                ("tensor_set", first, memory), ("tensor_get", second, back.ctypes.data)
            )
        ),
        elapsed_s(one_after_another),
    ]
    assert back.all()
    rig.close()
    return times


def test_copies_take_latency_and_share_the_bandwidth_of_one_direction() -> None:
    one, two, there_and_back, in_stream = in_own_process(copy_times)
    assert one >= 0.07
    assert two >= 0.12
    assert there_and_back >= 0.07
    assert in_stream >= 0.14


def store_on_full_device(fake: FakeModel) -> str:
    """Returns the error of a store with 32 slots on a device that has memory for about
    five experts.

    Another store with four slots is open at that time. Asserts that four slots can be
    allocated again afterwards.
    """
    name = add_link_device(FREE, memory_bytes=5 * fake.expert_bytes + (1 << 16))
    options = StoreOptions(device=name)
    first = Store(fake.layout, 4, options)
    message = ""
    try:
        Store(fake.layout, 32, options)
    except AllocationError as error:
        message = str(error)
    first.close()
    Store(fake.layout, 4, options).close()
    return message


def n_arenas(layout: ExpertLayout) -> int:
    """Returns the number of arenas of a pool on a device: one, or one for each kind of
    matrix."""
    return sum(
        bytes_ > 0
        for bytes_ in slot_sizes(layout, on_device=True).stride_bytes.values()
    )


def slots_in_small_buffers(fake: FakeModel) -> tuple[list[int], str]:
    """Returns `most_slots` for 1, 11 and 30 wanted slots on three devices, and the
    error of a pool that is too large.

    The devices are one whose buffers hold 10 slots, one without this limit, and the
    CPU.
    """
    sizes = slot_sizes(fake.layout, on_device=True)
    guard_bytes = sizes.pool_bytes // n_arenas(fake.layout)
    small = add_link_device(
        FREE, most_buffer_bytes=10 * max(sizes.stride_bytes.values()) + guard_bytes
    )
    found = [
        most_slots(fake.layout, name, n)
        for name in (small, add_link_device(FREE), None)
        for n in (1, 11, 30)
    ]
    Store(fake.layout, found[1], StoreOptions(device=small)).close()
    with pytest.raises(AllocationError) as error:
        Store(fake.layout, found[1] + 1, StoreOptions(device=small))
    return found, str(error.value)


def test_pool_fits_the_largest_buffers_and_a_full_device_refuses_a_second(
    tmp_path: Path,
) -> None:
    found, message = in_own_process(slots_in_small_buffers, make_model(tmp_path))
    assert found == [1, 10, 10, 1, 11, 30, 1, 11, 30]
    assert "LINK0 refused" in message
    fake = make_model(tmp_path, n_embd=256, n_ff=256)
    assert "refused" in in_own_process(store_on_full_device, fake)


def most_slots_of(
    fake: FakeModel, layers: list[MoeLayer], wanted: int
) -> list[tuple[int, int]]:
    """Returns, for each layer, the maximum number of slots (up to `wanted`) of its pool
    on a device and on the CPU."""
    device = add_link_device(FREE)
    layouts = [replace(fake.layout, layers=(layer,)) for layer in layers]
    return [
        (most_slots(layout, device, wanted), most_slots(layout, None, wanted))
        for layout in layouts
    ]


def test_device_pool_is_capped_so_that_32_bit_offsets_reach_every_slot(
    tmp_path: Path,
) -> None:
    """Kernels use 32-bit offsets that count blocks of a type.

    An expert matrix of 2048 x 768 values has 2048 * 768 / (values per block) blocks,
    and an arena at most 2^31. If all matrices of an expert are in one arena, a slot has
    the size of three matrices.
    """
    fake = make_model(tmp_path)
    is_packed = n_arenas(fake.layout) == 1
    # Values per block.
    blocks = {F32: 1, F16: 1, Q4_0: 32, Q8_0: 32, MXFP4: 32, Q4_K: 256}
    most = [
        2**31 // (2048 * 768 // n) // (3 if is_packed else 1) for n in blocks.values()
    ]
    kinds: tuple[Kind, ...] = ("gate", "up", "down")
    types = [dict.fromkeys(kinds, ggml_type) for ggml_type in blocks] + [
        {"gate": Q4_K, "up": Q4_K, "down": F16}
    ]
    layers = [
        MoeLayer(0, 128, 8, tuple(layer_matrices(0, of, 2048, 768, 128)))
        for of in types
    ]
    found = in_own_process(most_slots_of, fake, layers, 1 << 20)
    assert found == [(n, 1 << 20) for n in [*most, 873 if is_packed else 1365]]


def slot_tokens_of_a_device() -> int:
    """Returns the maximum number of tokens in a pass with exact products from slots on
    a simulated device."""
    return slot_tokens(link_device(FREE))


def test_slot_tokens_returns_the_limit_of_each_backend() -> None:
    assert in_own_process(slot_tokens_of_a_device) == slot_tokens("none such") == 1
    assert slot_tokens("CUDA7") == 4, (
        "of a card that is only simulated: the least of all cards"
    )
    assert slot_tokens(None) == 2**31 - 1


class Registered(c.Structure):
    """ggml's struct ggml_backend_reg, which describes a backend."""

    _fields_ = [
        ("version", c.c_int),
        *(
            (name, c.c_void_p)
            for name in ("name", "count", "device", "function", "own")
        ),
    ]


def slot_tokens_of_backends(*names: str) -> list[int]:
    """Returns `slot_tokens` of a device of each of these backends. Each backend reports
    8 tokens for every type."""
    ggml, kept = load("ggml", ()), list[Any]()

    def function(value: int, *arguments: Any) -> int:
        kept.append(c.CFUNCTYPE(c.c_void_p, *arguments)(lambda *_: value))
        return int(c.cast(kept[-1], c.c_void_p).value or 0)

    def text(value: str) -> int:
        kept.append(c.create_string_buffer(value.encode()))
        return c.addressof(kept[-1])

    eight = function(8, c.c_void_p, c.c_int)
    for name in names:
        # Struct ggml_backend_device: 15 functions, the backend, and a context.
        device = (c.c_void_p * 17)()
        device[0] = function(text(f"{name}0"), c.c_void_p)
        backend = Registered(
            2, function(text(name), c.c_void_p), function(1, c.c_void_p),
            function(c.addressof(device), c.c_void_p, c.c_size_t), function(eight, c.c_void_p, c.c_char_p),
        )  # fmt: skip
        device[15] = c.addressof(backend)
        kept += [device, backend]
        ggml.ggml_backend_register(c.byref(backend))
    return [slot_tokens(f"{name}0") for name in names]


def test_slot_tokens_above_one_are_only_those_of_cuda_and_rocm() -> None:
    assert in_own_process(
        slot_tokens_of_backends, "CUDA", "ROCm", "MUSA", "Vulkan"
    ) == [8, 8, 1, 1]


def without_padding(fake: FakeModel) -> tuple[int, int]:
    """Returns the size of a slot in bytes on a device that needs padding, and how much
    larger this is than on the CPU.

    Asserts that the device refuses slots without padding.
    """
    device = add_link_device(FREE, strict_seed=1)
    sizes = [
        slot_sizes(padded(fake.layout, [name])).slot_bytes
        for name in (None, "none such", device)
    ]
    Store(fake.layout, 4, StoreOptions(device=device)).close()
    Store.__init__.__globals__["matrices_of"] = lambda layout, _: matrices_of(layout)
    with pytest.raises(OptionError, match="lack the padding that LINK0 reads"):
        Store(fake.layout, 4, StoreOptions(device=device))
    assert sizes[0] == sizes[1]
    return sizes[2], sizes[2] - sizes[0]


def test_device_slots_include_the_row_padding_of_their_device(tmp_path: Path) -> None:
    # Q4_0: 18 bytes for 32 values; Q8_0: 34.
    fake = make_model(tmp_path, n_embd=256, n_ff=64)
    n_bytes, more = in_own_process(without_padding, fake)
    least = 2 * (512 - 256) // 32 * 18 + (512 - 64) // 32 * 34
    assert least <= more < least + 3 * 64 * 17 and n_bytes > more
