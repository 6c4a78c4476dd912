"""Tests prompts that are staged on a device: logits equal plain llama.cpp's for several
prompt and pool sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from rpc_device import in_child
from running import Llama, Logits, TinyModel, hooks_off, random_prompt, share_for
from test_identity import MODELS

from moegguf.engine.devices import gpus
from moegguf.engine.plan import mean_slot_bytes, size_classes, slot_bytes, staging_bytes
from moegguf.gguf.experts import read_layout
from moegguf.native.store import StoreOptions, Tier
from moegguf.quantities import Link
from moegguf.testing.link_device import add_link_device

OPTIONS: dict[str, Any] = {
    "n_ctx": 320,
    "n_threads": 1,
    "logits_all": True,
    "verbose": False,
}
PROMPTS = (1, 2, 3, 4, 8, 9, 32, 33, 128)
SOME_PROMPTS = (1, 3, 8, 33, 128)
N_NEW = 2
Outcome = tuple[Logits, dict[str, dict[str, Any]]]


def turns(llm: Llama, prompts: tuple[int, ...]) -> Logits:
    """Evaluates random prompts of these sizes in one context, each followed by N_NEW
    greedy tokens.

    Returns the logits of all these tokens.
    """
    llm.reset()
    for n_tokens in prompts:
        llm.eval(random_prompt(llm, n_tokens, seed=n_tokens))
        for _ in range(N_NEW):
            llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
    return llm.scores[: llm.n_tokens].copy()


def all_options() -> dict[str, Any]:
    """Returns options that put every layer on the device or, with two devices, half of
    the layers on each."""
    return {
        **OPTIONS,
        "n_gpu_layers": -1,
        **({"tensor_split": [1, 1]} if len(gpus()) > 1 else {}),
    }


def on(device: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in another process and returns the result.

    The process has an RPC device ("rpc"), two RPC devices ("two"), or a strict device
    behind a simulated link ("link").
    """
    if device == "link":
        return in_own_process(behind_a_link, call, arguments)
    return in_child(call, *arguments, n_servers=2 if device == "two" else 1)


def behind_a_link(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    add_link_device(Link(2e9, 2e-5), strict_seed=1)
    return call(*arguments)


def compare(
    path: Path, sizes: list[tuple[int, int]], staging: int, prompts: tuple[int, ...]
) -> tuple[Logits, list[Outcome]]:
    """Returns the logits of plain llama.cpp on the device, and the outcomes with slots
    and staging tensors.

    `sizes` lists pairs: the number of slots on the device, and in RAM. For each pair,
    an outcome contains the logits and the figures.
    """
    options, outcomes, device = all_options(), [], gpus()[0].name
    with hooks_off(), Llama(path, **options) as llm:
        plain = turns(llm, prompts)
    for slots in sizes:
        vram, ram = (share_for(path, n, device) for n in slots)
        store = StoreOptions(staging=staging)
        with Llama(
            path, vram_cache=vram, expert_cache=ram, store=store, **options
        ) as llm:
            logits = turns(llm, prompts)
            assert (llm.plan.n_ubatch, llm.plan.supply.n_staging) == (512, staging)
            stats = llm.stats()
            assert stats.bytes_staged > 0
            assert 0 <= stats.staging_overlap <= 1
            llm.session.store.drain(10)
            figures = {tier.name: llm.session.store.tier(tier) for tier in Tier}
            outcomes.append(
                (logits, figures | {"STAGING": llm.session.store.staging()})
            )
    return plain, outcomes


def run_on(device: str, *arguments: Any) -> list[dict[str, dict[str, Any]]]:
    """Calls `compare` on a device. Returns the figures for each pair of slot counts.

    Asserts that logits are equal, that prompts were staged, and that the device evicted
    experts.
    """
    plain, outcomes = on(device, compare, *arguments)
    for logits, figures in outcomes:
        assert np.array_equal(logits, plain)
        staged = figures["STAGING"]
        assert (
            staged["lookups"]
            == staged["hits_ready"] + staged["hits_late"] + staged["misses"]
            > 0
        )
        assert staged["bytes_missed"] > 0
        assert figures["COMPUTE"]["evictions"] > 0
    return [figures for _, figures in outcomes]


@pytest.mark.parametrize("device", ["rpc", "link"])
@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_staged_prompts_of_every_model_and_size_give_the_plain_logits(
    tiny: TinyModel, model: tuple[str, str], device: str
) -> None:
    path = tiny(*model)
    layout = read_layout(path)
    few = [
        max(layout.n_expert_used, layout.n_expert_total // share) for share in (3, 4)
    ]
    for figures in run_on(device, path, [tuple(few)], 2, PROMPTS):
        assert figures["RAM"]["evictions"] > 0
        assert figures["STAGING"]["bytes_prefetched"] > 0


@pytest.mark.parametrize("device", ["rpc", "link", "two"])
@pytest.mark.parametrize("staging", [1, 2])
def test_staged_prompts_with_few_ram_slots_give_the_plain_logits(
    tiny: TinyModel, staging: int, device: str
) -> None:
    least = 8 if device == "two" else 4
    sizes = [(least, 1), (least, 8), (30, 64)]
    found = run_on(
        device,
        tiny("tiny-qwen2moe", "q4_k_m"),
        sizes,
        staging,
        (1, 2, 3, 9, 33, 1, 33, 2),
    )
    for figures in found[:-1]:
        assert figures["RAM"]["evictions"] > 0


def small_budgets(path: Path, sizes: list[int]) -> list[tuple[bool, int, int, int]]:
    """Returns one outcome for each number of experts in `sizes`, which determines the
    budget.

    An outcome has four values: whether the logits equal plain llama.cpp's in passes of
    equal width, this width, the number of staging tensors, and the bytes copied to
    them.
    """
    options, device, outcomes, plain = (
        all_options(),
        gpus()[0].name,
        [],
        dict[int, Logits](),
    )
    for n_ubatch in (1, 512):
        with hooks_off(), Llama(path, n_ubatch=n_ubatch, **options) as llm:
            plain[n_ubatch] = turns(llm, SOME_PROMPTS)
    for n_slots in sizes:
        with Llama(
            path,
            vram_cache=share_for(path, n_slots, device),
            expert_cache="30%",
            **options,
        ) as llm:
            logits, plan = turns(llm, SOME_PROMPTS), llm.plan
            held_bytes = plan.budget_bytes + plan.supply.staging_bytes
            assert held_bytes <= n_slots * plan.device_slot_bytes, (
                f"{n_slots} slots: {plan}"
            )
            assert llm.stats().evictions > 0, f"{n_slots} slots: {plan}"
            same = np.array_equal(logits, plain[plan.n_ubatch])
            outcomes.append(
                (same, plan.n_ubatch, plan.supply.n_staging, llm.stats().bytes_staged)
            )
    return outcomes


@pytest.mark.parametrize("device", ["rpc", "link", "two"])
def test_small_budgets_stage_prompts_or_use_single_token_passes(
    tiny: TinyModel, device: str
) -> None:
    path = tiny("tiny-qwen2moe", "q4_k_m")
    layout = read_layout(path)
    n_devices, classes = (2 if device == "two" else 1), size_classes(layout)
    size = slot_bytes(layout) if n_devices == 2 else mean_slot_bytes(layout, classes)
    # Number of slots with the bytes of one staging tensor.
    tensor = -(-staging_bytes(layout, 1) // size)
    cycle = layout.token_cycle_slots
    # the second size is two slots too small for staging tensors; the third has two more
    # slots per device than needed
    sizes = [
        n_devices * layout.n_expert_used,
        cycle + n_devices * tensor - 2,
        cycle + n_devices * (tensor + 2),
    ]
    outcomes = on(device, small_budgets, path, sizes)
    assert [found[:3] for found in outcomes] == [
        (True, 1, 0),
        (True, 1, 0),
        (True, 512, 1),
    ]
    assert [found[3] > 0 for found in outcomes] == [False, False, True]
