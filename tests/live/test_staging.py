"""Prompts staged on a device: the logits of plain llama.cpp there, whatever the sizes of prompts and of both tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from rpc_device import in_child, register
from running import Llama, Logits, TinyModel, hooks_off, random_prompt, share_for
from test_identity import MODELS

from moegguf.gguf.experts import read_layout
from moegguf.native.link_device import add_link_device
from moegguf.native.store import StoreOptions, Tier
from moegguf.quantities import Link

OPTIONS: dict[str, Any] = {"n_ctx": 640, "n_threads": 1, "logits_all": True, "verbose": False}
PROMPTS = (1, 2, 3, 4, 8, 9, 32, 33, 128)
N_NEW = 3
Outcome = tuple[Logits, Logits, dict[str, dict[str, Any]]]


def turns(llm: Llama, prompts: tuple[int, ...], n_turns: int = 1) -> Logits:
    """Logits of prompts of these sizes one after another in one context, each answered with N_NEW greedy tokens."""
    llm.reset()
    for n in range(n_turns):
        for n_tokens in prompts:
            llm.eval(random_prompt(llm, n_tokens, seed=100 * n + n_tokens))
            for _ in range(N_NEW):
                llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
    return llm.scores[: llm.n_tokens].copy()


def compare(path: Path, slots: tuple[int, int], staging: int, prompts: tuple[int, ...], **options: Any) -> Outcome:
    """Logits of plain llama.cpp on the device, those of slots with staging tensors there, and the figures of tiers."""
    all_options = {**OPTIONS, **options}
    with hooks_off(), Llama(path, n_gpu_layers=-1, **all_options) as llm:
        plain = turns(llm, prompts)
    vram, ram = (share_for(path, n) for n in slots)
    store = StoreOptions(staging=staging)
    with Llama(path, vram_cache=vram, expert_cache=ram, store=store, **all_options) as llm:
        assert llm.session is not None
        logits = turns(llm, prompts)
        assert llm.plan.n_ubatch == 512
        llm.session.store.drain(10)
        figures = {tier.name: llm.session.store.tier(tier) for tier in Tier}
        return plain, logits, figures | {"STAGING": llm.session.store.staging()}


def on_rpc(rpc: Path, port: int, *arguments: Any) -> Outcome:
    register(rpc, port)
    return compare(*arguments)


def on_link(*arguments: Any) -> Outcome:
    add_link_device(Link(2e9, 2e-5))
    return compare(*arguments)


def check(outcome: Outcome, evicts_below: bool = True) -> None:
    plain, logits, figures = outcome
    assert np.array_equal(logits, plain)
    staged = figures["STAGING"]
    assert staged["lookups"] == staged["hits_ready"] + staged["hits_late"] + staged["misses"] > 0
    assert staged["bytes_missed"] > 0
    assert figures["COMPUTE"]["evictions"] > 0
    assert figures["LOWER"]["evictions"] > 0 or not evicts_below


def sizes(path: Path) -> tuple[int, int]:
    """Slots on the device, and below it: both too few for all, and at least what a token needs."""
    layout = read_layout(path)
    least = layout.n_expert_used
    return max(least, layout.n_expert_total // 3), max(least, layout.n_expert_total // 4)


@pytest.mark.parametrize("device", ["rpc", "link"])
@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_every_model_and_size_of_prompt(tiny: TinyModel, model: tuple[str, str], device: str) -> None:
    path = tiny(*model)
    run = (path, sizes(path), 2, PROMPTS)
    check(in_child(on_rpc, *run) if device == "rpc" else in_own_process(on_link, *run))


@pytest.mark.parametrize("device", ["rpc", "link"])
@pytest.mark.parametrize("staging", [1, 2, 3])
@pytest.mark.parametrize("slots", [(4, 1), (4, 8), (24, 8), (30, 64)])
def test_few_slots_in_ram_and_any_number_of_tensors(
    tiny: TinyModel, slots: tuple[int, int], staging: int, device: str
) -> None:
    run = (tiny("tiny-qwen2moe", "q4_k_m"), slots, staging, (1, 2, 3, 9, 33, 1, 33, 2, 9, 3))
    check(in_child(on_rpc, *run) if device == "rpc" else in_own_process(on_link, *run), evicts_below=slots[1] < 64)
