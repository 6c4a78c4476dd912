"""Tests states that are read from files into tensors. Every byte is in its place, and a
changed file leaves zeros."""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from own_process import in_own_process
from product import F32, InitParams, load

from moegguf.engine.kv_block_store import About, KVBlocks, KvBlockStore
from moegguf.native import library
from moegguf.quantities import GIB, Link
from moegguf.testing.link_device import add_link_device

N_BLOCKS, HEAD_BYTES = 66, 12
# Bytes of each part of a state; one part is larger than a chunk of 256 KiB.
SIZES = [128] * 1030 + [300_000, 4]
STATE_BYTES = HEAD_BYTES * len(SIZES) + sum(SIZES)


@contextmanager
def tensor_of(device: str) -> Iterator[int]:
    """Yields a tensor on `device` with room for the parts of all states. At first all
    its bytes have the value 1."""
    ggml = load("ggml", ("ggml_init", "ggml_new_tensor_1d", "ggml_backend_dev_by_name", "ggml_backend_dev_buffer_type",
                         "ggml_backend_alloc_ctx_tensors_from_buft"))  # fmt: skip
    context = c.c_void_p(ggml.ggml_init(InitParams(1 << 12, None, True)))
    made = ggml.ggml_new_tensor_1d(context, F32, c.c_int64(N_BLOCKS * sum(SIZES) // 4))
    memory = ggml.ggml_backend_dev_buffer_type(
        c.c_void_p(ggml.ggml_backend_dev_by_name(device.encode()))
    )
    buffer = c.c_void_p(
        ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, c.c_void_p(memory))
    )
    ggml.ggml_backend_tensor_memset(
        c.c_void_p(made), 1, c.c_size_t(0), c.c_size_t(N_BLOCKS * sum(SIZES))
    )
    yield made
    ggml.ggml_backend_buffer_free(buffer)
    ggml.ggml_free(context)


def contents(tensor: int) -> np.ndarray:
    """Returns the bytes of the tensor, [block][byte]."""
    found = np.empty((N_BLOCKS, sum(SIZES)), np.uint8)
    load("ggml", ()).ggml_backend_tensor_get(
        c.c_void_p(tensor),
        c.c_void_p(found.ctypes.data),
        c.c_size_t(0),
        c.c_size_t(found.nbytes),
    )
    return found


def take_state(address: int, tensor: int, block: int) -> list[bytes]:
    """Receives a state as llama.cpp does: for each part, reads the head, and assigns
    the part's bytes a place in the tensor.

    The bytes arrive there when the blocks are filled. Returns the heads.
    """
    lib, heads, offset = library.load(), [], block * sum(SIZES)
    for n_bytes in SIZES:
        head = c.create_string_buffer(HEAD_BYTES)
        assert lib.moegguf_state_read(head, address, HEAD_BYTES)
        heads.append(head.raw)
        assert lib.moegguf_state_put(tensor, offset, address + HEAD_BYTES, n_bytes)
        address, offset = address + HEAD_BYTES + n_bytes, offset + n_bytes
    # No byte of the state is left to read.
    assert not lib.moegguf_state_read(head, address, 1)
    return heads


def fill(folder: Path, wrong: Sequence[int], device: str) -> None:
    """Fills a tensor from files and compares the tensor with the files' states.

    wrong: indices of files that are damaged (even indices) or cut short (odd indices).
    """
    store, random = KvBlockStore(folder, GIB), np.random.default_rng(0)
    states = random.integers(0, 256, (N_BLOCKS, STATE_BYTES), np.uint8)
    names = [f"{block:04x}" for block in range(N_BLOCKS)]
    for name, state in zip(names, states, strict=True):
        store.write(name, About("", 0, 0), [state.data])
    for block in wrong:
        path = store.folder / names[block][:2] / names[block]
        data = path.read_bytes()
        path.write_bytes(data[:-1] if block % 2 else data[:5000] + b"?" + data[5001:])
    begins = np.cumsum([HEAD_BYTES, *(n_bytes + HEAD_BYTES for n_bytes in SIZES[:-1])])
    expected = np.hstack(
        [states[:, begin : begin + n] for begin, n in zip(begins, SIZES, strict=True)]
    )
    expected[list(wrong)] = 0
    with tensor_of(device) as tensor, KVBlocks() as blocks:
        for block, name in enumerate(names):
            file = store.open(name)
            assert file is not None and file.n_bytes == file.begin + STATE_BYTES - (
                block in wrong and block % 2
            )
            file = replace(file, n_bytes=file.begin + STATE_BYTES)
            heads = take_state(blocks.add(file), tensor, block)
            assert (
                block in wrong
                or heads[-1]
                == states[block, begins[-1] - HEAD_BYTES : begins[-1]].tobytes()
            )
        assert blocks.fill() == min([N_BLOCKS, *wrong])
        assert np.array_equal(contents(tensor), expected)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to the block": lambda path: path.symlink_to(path.with_suffix(".moved")),
    "another user's": lambda path: os.chown(
        path.with_suffix(".moved").rename(path), 1, 1
    ),
}


@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN)
def test_fill_leaves_zeros_for_a_pipe_a_link_or_another_users_file(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    if os.geteuid() != 0 and put is FOREIGN["another user's"]:
        pytest.skip("only root gives a file to another user")
    store = KvBlockStore(tmp_path / "contexts", GIB)
    store.write("0000", About("", 0, 0), [bytes(STATE_BYTES)])
    file = store.open("0000")
    assert file is not None
    file.path.rename(file.path.with_suffix(".moved"))
    put(file.path)
    with tensor_of("CPU") as tensor, KVBlocks() as blocks:
        assert not any(any(head) for head in take_state(blocks.add(file), tensor, 0))
        assert blocks.fill() == 0
        assert not contents(tensor)[0].any()


def fill_on_device(folder: Path, wrong: Sequence[int]) -> None:
    fill(folder, wrong, add_link_device(Link(1e12), strict_seed=1))


@pytest.mark.parametrize("wrong", [[], [0], [33, 64]], ids=str)
def test_fill_puts_states_into_their_tensors_and_zeros_for_damaged_files(
    wrong: list[int], tmp_path: Path
) -> None:
    fill(tmp_path / "contexts", wrong, "CPU")


def test_fill_puts_states_into_tensors_of_a_device(tmp_path: Path) -> None:
    in_own_process(fill_on_device, tmp_path / "contexts", [33, 64])


def test_state_address_is_invalid_after_its_blocks_are_closed(tmp_path: Path) -> None:
    store = KvBlockStore(tmp_path / "contexts", GIB)
    store.write("0000", About("", 0, 0), [bytes(STATE_BYTES)])
    file = store.open("0000")
    assert file is not None
    with tensor_of("CPU") as tensor, KVBlocks() as blocks:
        address = blocks.add(file)
        take_state(address, tensor, 0)
    assert not library.load().moegguf_state_read(c.create_string_buffer(1), address, 1)
