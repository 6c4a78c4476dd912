"""llama.cpp computing on a device behind a simulated link, with the experts' slots there: the CPU's own bits."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from running import N_NEW, Llama, Logits, Meddler, Reference, TinyModel, greedy_logits, share_for

from moegguf.native.link_device import add_link_device
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link


def behind_a_link(path: Path, n_slots: int, shrink_to: int, n_ubatch: int) -> tuple[Logits, dict[str, int]]:
    """Logits with every layer on the device and `n_slots` slots, later `shrink_to`, there; the store's figures."""
    device = add_link_device(Link(2e9, 20e-6), strict_seed=1)
    store = StoreOptions(device=device)
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False, "n_gpu_layers": 99}
    with Llama(path, expert_cache=share_for(path, n_slots, device), store=store, n_ubatch=n_ubatch, **options) as llm:
        assert llm.session is not None
        of_llm, passes = llm.session.store, count()

        def before_each() -> None:
            meddler.meddle()
            if next(passes) == N_NEW // 2:
                of_llm.resize(shrink_to)

        with Meddler(of_llm) as meddler:
            logits = greedy_logits(llm, before_each=before_each)
        return logits, {**of_llm.info(), **of_llm.counters()}


@pytest.mark.parametrize(("n_slots", "shrink_to"), [(24, 24), (30, 17), (64, 40)])
@pytest.mark.parametrize("quant", ["q4_0", "q4_k_m"])
def test_slots_behind_a_link_give_the_logits_of_the_cpu_with_every_expert_resident(
    tiny: TinyModel, reference: Reference, quant: str, n_slots: int, shrink_to: int
) -> None:
    path = tiny("tiny-qwen2moe", quant)
    logits, figures = in_own_process(behind_a_link, path, n_slots, shrink_to, 4)
    assert np.array_equal(logits, reference(path, n_ubatch=4, repack=False))
    assert figures["n_slots_usable"] == shrink_to
    assert figures["n_repacked"] == 0
    assert figures["evictions"] > 0
