"""llama.cpp computing on a device whose memory is not host memory, with the experts' slots there as well."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rpc_device import in_child, register
from running import N_NEW, Llama, Logits, Meddler, TinyModel, greedy_logits, hooks_off, share_for

from moegguf.native.store import StoreOptions


def on_rpc(rpc: Path, port: int, path: Path, n_slots: int, shrink_to: int) -> tuple[Logits, Logits, dict[str, int]]:
    """Logits of plain llama.cpp with every layer on the device, those of a store there, and the store's figures.

    The store shrinks to `shrink_to` slots while tokens are generated.
    """
    device = register(rpc, port)
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False, "n_gpu_layers": 99}
    with hooks_off(), Llama(path, **options) as llm:
        assert llm.session is None
        plain = greedy_logits(llm)
    with Llama(path, expert_cache=share_for(path, n_slots), store=StoreOptions(device=device), **options) as llm:
        assert llm.session is not None
        store, passes = llm.session.store, count()

        def before_each() -> None:
            meddler.meddle()
            if next(passes) == N_NEW // 2:
                store.resize(shrink_to)

        with Meddler(store) as meddler:
            logits = greedy_logits(llm, before_each=before_each)
        return plain, logits, {**store.info(), **store.counters()}


@pytest.mark.parametrize(("n_slots", "shrink_to"), [(24, 24), (30, 17), (64, 40)])
@pytest.mark.parametrize("quant", ["q4_0", "q4_k_m"])
def test_slots_on_a_device_give_the_logits_of_that_device(
    tiny: TinyModel, quant: str, n_slots: int, shrink_to: int
) -> None:
    plain, logits, figures = in_child(on_rpc, tiny("tiny-qwen2moe", quant), n_slots, shrink_to)
    assert np.array_equal(logits, plain)
    assert figures["n_slots_usable"] == shrink_to
    assert figures["n_repacked"] == 0
    assert figures["bytes_prefetched"] > 0
    assert figures["evictions"] > 0
