"""Tests mapped slots (`--placement slots-mapped`): a strict device looks up slots
itself, and reads experts in RAM.

The logits have the bits of a load with every expert in VRAM. The device stops once per
token instead of once per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import DEMO
from own_process import in_new_process, in_own_process
from running import (
    Llama,
    Logits,
    Meddler,
    TinyModel,
    greedy_logits,
    random_prompt,
    share_for,
)
from test_strict_device import (
    Batches,
    Outcome,
    Scenario,
    add_devices,
    assert_same,
    heads,
    recalled,
    turns,
)

from moegguf.engine import solver
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.native.store import ListenOptions, StoreOptions
from moegguf.testing.link_device import link_figures

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}
N_MEASURED = 12


def compare(path: Path, scenario: Scenario, staging: int = 1, **options: Any) -> None:
    """Compares a scenario's outcome with every expert in VRAM with its outcome with
    mapped slots for 40 % of them.

    Without staging tensors, passes have up to four tokens, and all of them compute from
    mapped slots.
    """
    solver.slot_tokens = lambda device: 4  # type: ignore[attr-defined]
    [name] = add_devices(1)
    store = StoreOptions(device=name, staging=staging)
    options = OPTIONS | ({} if staging else {"n_ubatch": 4}) | options
    with Llama(
        path, vram_cache="100%", placement="slots", store=store, **options
    ) as llm:
        expected = scenario(llm)
    n_slots = int(read_layout(path).n_expert_total * 0.4)
    with Llama(
        path,
        vram_cache=share_for(path, n_slots, name),
        placement="slots-mapped",
        store=store,
        **options,
    ) as llm:
        assert llm.plan.supply.maps and not llm.plan.size_classes
        llm.session.store.drain(60)
        with Meddler(llm.session.store):
            assert_same(scenario(llm), expected)
        counters, tier = llm.session.store.counters(), llm.session.store.tier()
        assert counters["mapped_events"] > 0
        assert counters["mapped_events"] == counters["routing_events"] or staging
        assert (
            counters["lookups"]
            == counters["hits_ready"] + counters["hits_late"] + counters["misses"]
        )
        assert tier["hits_ready"] > 0 and tier["misses"] > 0 and tier["evictions"] > 0
        llm.session.store.check()
    assert link_figures(name).fault == ""


@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-gpt-oss", "tiny-mix"])
@pytest.mark.parametrize("staging", [0, 1])
def test_mapped_slots_have_the_resident_bits(
    tiny: TinyModel, preset: str, staging: int
) -> None:
    """The passes have 1 to 128 tokens, and are partly mapped and partly staged."""
    path = tiny(preset, "q4_k_m" if preset == "tiny-mix" else "q4_0")
    in_own_process(compare, path, turns, staging=staging, logits_all=True)


@pytest.mark.parametrize("staging", [0, 1])
def test_mapped_slots_have_one_size_and_separate_arenas(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, staging: int
) -> None:
    """The remedies size_classes and one_arena are on, but do not apply to mapped
    slots."""
    monkeypatch.setenv("MOEGGUF_SWITCHES", "443")
    in_new_process(compare, tiny("tiny-mix", "q4_k_m"), turns, staging, logits_all=True)


@pytest.mark.parametrize("staging", [0, 1])
def test_sequences_that_join_and_leave_have_the_resident_bits(
    tiny: TinyModel, staging: int
) -> None:
    path = tiny("tiny-mix", "q4_k_m")
    in_own_process(
        compare, path, Batches(3), staging=staging, n_seq_max=3, flash_attn=None
    )


@pytest.mark.filterwarnings("ignore:draft")
def test_right_and_wrong_drafts_have_the_resident_bits() -> None:
    in_own_process(
        compare, DEMO, recalled, n_seq_max=3, n_ctx=768, flash_attn=None, draft="ngram"
    )


def test_drafts_by_mtp_heads_have_the_resident_bits(tiny: TinyModel) -> None:
    in_own_process(
        compare,
        tiny("tiny-glm4moe"),
        heads,
        n_seq_max=2,
        n_ctx=768,
        flash_attn=None,
        draft="mtp",
    )


def resizing(llm: Llama) -> Outcome:
    """Returns the logits of several runs. The slots on the device are resized before
    each evaluation."""
    layout, random = read_layout(Path(llm.model_path)), np.random.default_rng(0)
    n_least, n_most = 4 * layout.n_expert_used + 2, int(layout.n_expert_total * 0.4)

    def resize() -> None:
        if llm.plan.supply.maps:
            n_slots = int(random.integers(n_least, n_most))
            llm.set_budget(
                vram_cache=share_for(Path(llm.model_path), n_slots, llm.plan.device)
            )

    found = [
        greedy_logits(llm, random_prompt(llm, 20), 16, before_each=resize)
        for _ in range(2)
    ]
    return np.concatenate(found)


@pytest.mark.parametrize("staging", [0, 1])
def test_pools_that_change_in_size_have_the_resident_bits(
    tiny: TinyModel, staging: int
) -> None:
    in_own_process(compare, tiny(), resizing, staging=staging, logits_all=True)


def listening(llm: Llama) -> Outcome:
    """Returns the logits of answers without a listener, with one of ids, and with one
    that also receives weights."""
    store, seen = llm.session.store, list[int]()

    def answer() -> Logits:
        return greedy_logits(llm, random_prompt(llm, 20), 16)

    def heard(**kinds: bool) -> Logits:
        store.listen(
            lambda event: seen.append(event.il),
            options=ListenOptions(everything=True, **kinds),
        )
        logits = answer()
        store.listen()
        return logits

    found = [answer(), heard(), heard(weights=True), answer()]
    assert len(seen) % (2 * read_layout(Path(llm.model_path)).n_layer) == 0 < len(seen)
    return np.concatenate(found)


def test_a_listener_receives_the_events_of_mapped_layers(tiny: TinyModel) -> None:
    in_own_process(compare, tiny(), listening, logits_all=True)


# The cost of a token


@dataclass(frozen=True)
class Cost:
    """The logits of tokens, and the counts for the last N_MEASURED of them."""

    logits: Logits
    n_launches: int
    n_copies_to_host: int
    n_mapped: int
    n_events: int


def cost_of(path: Path, placement: str) -> Cost:
    """Evaluates tokens with slots for 40 % of the experts, after every expert has
    arrived in RAM."""
    [name] = add_devices(1)
    n_slots = int(read_layout(path).n_expert_total * 0.4)
    store = StoreOptions(device=name, staging=0)
    options = OPTIONS | {
        "logits_all": True,
        "store": store,
        "policy": "lru",
        "predictor": "none",
    }
    with Llama(
        path,
        vram_cache=share_for(path, n_slots, name),
        expert_cache="100%",
        placement=placement,
        **options,
    ) as llm:
        llm.n_batch = 1
        llm.session.store.drain(10)
        found = greedy_logits(llm, random_prompt(llm, 24), 12)
        before, counted = link_figures(name), llm.session.store.counters()
        for token in range(N_MEASURED):
            llm.eval([token])
        after, counters = link_figures(name), llm.session.store.counters()
        assert after.fault == ""
        return Cost(
            np.concatenate(
                [found, llm.scores[llm.n_tokens - N_MEASURED : llm.n_tokens]]
            ),
            after.launches - before.launches,
            after.copies_to_host - before.copies_to_host,
            counters["mapped_events"] - counted["mapped_events"],
            counters["routing_events"] - counted["routing_events"],
        )


def test_a_token_stops_once_instead_of_once_per_layer(tiny: TinyModel) -> None:
    path = tiny("tiny-mix", "q4_k_m")
    n_layers = sum(layer.n_expert > 0 for layer in read_layout(path).layers)
    slots, mapped = (
        in_new_process(cost_of, path, placement)
        for placement in ("slots", "slots-mapped")
    )
    assert np.isfinite(mapped.logits).all() and np.array_equal(
        mapped.logits, slots.logits
    )
    assert slots.n_events == mapped.n_events == mapped.n_mapped == N_MEASURED * n_layers
    assert slots.n_mapped == 0
    assert slots.n_launches - mapped.n_launches == N_MEASURED * n_layers
    # A token copies the ids of each layer, or the log, and in both cases the logits.
    assert slots.n_copies_to_host - mapped.n_copies_to_host == N_MEASURED * (
        n_layers - 1
    )
    assert mapped.n_copies_to_host == 2 * N_MEASURED


# Loads that are refused


def refused(
    path: Path, error: type[Exception], match: str, n_devices: int = 1, **options: Any
) -> None:
    names = add_devices(n_devices)
    store = StoreOptions(device=names[0] if n_devices == 1 else None, staging=0)
    with pytest.raises(error, match=match):
        Llama(path, placement="slots-mapped", store=store, **OPTIONS | options)


def without_ranges(path: Path) -> None:
    solver.maps = lambda device: False  # type: ignore[attr-defined]
    refused(
        path,
        OptionError,
        "one range of addresses.*LINK0; use placement 'slots'",
        vram_cache="40%",
    )


def few_in_ram(path: Path) -> None:
    refused(
        path,
        BudgetError,
        "for each of .* holds .*give at least",
        vram_cache="40%",
        expert_cache="50%",
    )


def two_devices(path: Path) -> None:
    refused(
        path,
        OptionError,
        "one GPU that computes every layer",
        n_devices=2,
        vram_cache="40%",
    )


@pytest.mark.parametrize("load", [few_in_ram, two_devices, without_ranges])
def test_a_load_without_the_conditions_is_refused(
    tiny: TinyModel, load: Callable[[Path], None]
) -> None:
    in_own_process(load, tiny())


def keep_ram(path: Path) -> None:
    [name] = add_devices(1)
    store = StoreOptions(device=name, staging=0)
    with Llama(
        path, vram_cache="40%", placement="slots-mapped", store=store, **OPTIONS
    ) as llm:
        with pytest.raises(OptionError, match=r"keep their number.*placement 'slots'"):
            llm.set_budget(expert_cache="50%")
        greedy_logits(llm, [1, 2, 3], 2)


def test_slots_in_ram_keep_their_number(tiny: TinyModel) -> None:
    in_own_process(keep_ram, tiny())
