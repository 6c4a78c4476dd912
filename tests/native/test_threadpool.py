"""Tests the pools of compute threads (`moegguf.engine.threadpool`)."""

import ctypes as c

import pytest

from moegguf.engine.threadpool import Threadpool
from moegguf.errors import AllocationError
from moegguf.native import library


@pytest.mark.parametrize(
    ("n_pools", "option"), [(0, "n_threads"), (1, "n_threads_batch")]
)
def test_a_pool_that_cannot_be_created_names_its_option(
    monkeypatch: pytest.MonkeyPatch, n_pools: int, option: str
) -> None:
    """Replaces ggml's function with one that creates `n_pools` fake pools and then
    fails."""
    left = list(range(1, n_pools + 1))
    freed: list[int] = []
    create = c.CFUNCTYPE(c.c_void_p, c.c_void_p)(
        lambda _params: left.pop() if left else None
    )
    free = c.CFUNCTYPE(None, c.c_void_p)(freed.append)
    addresses = {"ggml_threadpool_new": create, "ggml_threadpool_free": free}
    monkeypatch.setattr(
        library, "cpu_function", lambda name: c.cast(addresses[name], c.c_void_p).value
    )
    with pytest.raises(AllocationError, match=f"give a smaller {option}\\.$"):
        Threadpool(0, 2, 3)
    assert len(freed) == n_pools
