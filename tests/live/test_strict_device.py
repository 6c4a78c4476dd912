"""Slots on a device that asks of its users what CUDA does: padding behind rows, poison where nothing was written, and
copies that come late and in any order (native/link_device.h)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from running import Llama, Logits, TinyModel, greedy_logits, hooks_off, random_prompt, share_for

from moegguf.gguf.experts import read_layout
from moegguf.native.link_device import add_link_device
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link
from tools.models import PRESETS

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "logits_all": True, "verbose": False}
LINK = Link(8e9, 5e-6)
N_PROMPT, N_NEW = 8, 8
TINY = [name for name in PRESETS if name.startswith("tiny-")]


def resized(path: Path, device: str, staging: int) -> tuple[Logits, Logits]:
    """Logits of plain llama.cpp on the device, and those of slots there over slots in RAM, whose numbers change before
    each pass."""
    layout, rng = read_layout(path), np.random.default_rng(0)
    n_total, n_least = layout.n_expert_total, 2 * layout.n_expert_used + staging * (layout.n_expert + 2)
    n_most, n_ram = n_total * 3 // 4, n_total // 2
    store = StoreOptions(device=device, staging=staging)
    with Llama(
        path, placement="slots", store=store, vram_cache=share_for(path, n_most), expert_cache=share_for(path, n_ram),
        **OPTIONS,
    ) as llm:  # fmt: skip
        n_ubatch, prompt = llm.plan.n_ubatch, random_prompt(llm, N_PROMPT)

        def before_each() -> None:
            vram, ram = (share_for(path, int(rng.integers(*of))) for of in ((n_least, n_most), (1, n_ram)))
            llm.set_budget(vram_cache=vram, expert_cache=ram)

        logits = greedy_logits(llm, prompt, N_NEW, before_each)
        assert llm.stats().evictions > 0
    with hooks_off(), Llama(path, n_gpu_layers=-1, n_ubatch=n_ubatch, **OPTIONS) as llm:
        return greedy_logits(llm, prompt, N_NEW), logits


def differences(paths: list[Path]) -> dict[str, float]:
    """The largest between both, by file and number of staging tensors."""
    device, found = add_link_device(LINK, strict_seed=1), dict[str, float]()
    for path in paths:
        for staging in (0, 1):
            plain, logits = resized(path, device, staging)
            assert np.isfinite(plain).all()
            found[f"{path.stem}, {staging}"] = float(np.abs(logits - plain).max())
    return found


@pytest.mark.parametrize("preset", TINY)
def test_slots_that_are_resized_while_the_model_writes(tiny: TinyModel, preset: str) -> None:
    found = in_own_process(differences, [tiny(preset, quant) for quant in ("q4_0", "q8_0")])
    assert set(found.values()) == {0.0}, found
