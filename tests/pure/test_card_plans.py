"""Tests plans of Qwen1.5-MoE and Qwen3-30B-A3B for cards with 8 and 16 GB. The model
files contain headers but no weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moegguf.engine.cost import HitRates, ModelBytes, Speeds, slots_s
from moegguf.engine.load import plan_load
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import Device, Machine, Memory
from moegguf.engine.memory import kv_bytes
from moegguf.engine.pinning import note_pinning
from moegguf.engine.plan import Plan, divide_slots, slot_bytes
from moegguf.engine.run_hits import RunHits, read_run_hits
from moegguf.engine.solver import make_plan
from moegguf.engine.speeds import cpu_pool_bytes
from moegguf.engine.stats import Stats
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.quantities import GIB, MIB, Link
from moegguf.terminal.facts import SupposedDevice, estimate_model
from tools.gpu.measure import n_cpu_moe
from tools.gpu.short_plan import CARD, SHALLOW, steps
from tools.models import PRESETS, write_sparse_model

GB = 10**9
# Memory that the driver uses for one process on a card without other users.
CONTEXT_BYTES = 400 * MIB
RAM = Memory(128 * GIB, 120 * GIB, "the machine")

Layouts = Callable[[str], ExpertLayout]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    folder, known = tmp_path_factory.mktemp("sparse"), dict[str, ExpertLayout]()

    def layout(name: str) -> ExpertLayout:
        if name not in known:
            known[name] = read_layout(
                write_sparse_model(folder / f"{name}.gguf", PRESETS[name], "q4_k_m")
            )
        return known[name]

    return layout


def card(n_bytes: int, used_bytes: int = CONTEXT_BYTES) -> Device:
    """Returns a card with `n_bytes` of free memory and `used_bytes` of memory in
    use."""
    return Device("CUDA0", 0, n_bytes, n_bytes + used_bytes)


def speeds(cpu_bytes_per_s: float) -> Speeds:
    """Returns the speeds of a fast card behind PCIe 5, and of a CPU that reads
    `cpu_bytes_per_s` bytes per second."""
    return Speeds(
        1.2e12,
        Link(50e9, 10e-6),
        cpu_bytes_per_s,
        device_node_s=2e-6,
        source="supposed",
    )


def plan(
    layout: ExpertLayout, device: Device, cpu_bytes_per_s: float = 45e9, **options: Any
) -> Plan:
    spec = LoadSpec(**{"n_ctx": 2048, **options})
    there = Machine(RAM, devices=(device,))
    return make_plan(
        layout, there, spec, speeds(cpu_bytes_per_s), HitRates.of(layout).curve()
    )


@pytest.mark.parametrize(
    ("name", "n_bytes", "share", "of_default_context"),
    [
        ("qwen1.5-moe-a2.7b", 8 * GB, 63.3, 57.1),
        ("qwen3-30b-a3b", 8 * GB, 31.2, 28.9),
        ("qwen3-30b-a3b", 16 * GB, 76.8, 69.8),
    ],
)
def test_plan_of_an_unused_card_has_slots_for_the_documented_share(
    layouts: Layouts, name: str, n_bytes: int, share: float, of_default_context: float
) -> None:
    layout = layouts(name)
    for n_ctx, percent in ((2048, share), (None, of_default_context)):
        found = plan(layout, card(n_bytes), placement="slots", n_ctx=n_ctx)
        assert round(100 * found.n_slots / layout.n_expert_total, 1) == percent
        assert found.total_bytes <= n_bytes - 384 * MIB


@pytest.mark.parametrize(
    ("name", "memory_bytes_per_s", "share", "measured"),
    [
        ("qwen3-30b-a3b", 4800e9, 0.23, 95),  # H200
        ("qwen3-30b-a3b", 4800e9, 0.65, 133),
        ("qwen3-30b-a3b", 4800e9, 1.0, 220),
        ("qwen3-30b-a3b", 3350e9, 1.0, 227),  # H100
        ("qwen1.5-moe-a2.7b", 3350e9, 1.0, 307),
    ],
)
def test_supposed_speeds_predict_about_the_measured_answer_speed(
    layouts: Layouts,
    name: str,
    memory_bytes_per_s: float,
    share: float,
    measured: float,
) -> None:
    layout = layouts(name)
    hit_rate = HitRates(layout).curve().at(share)
    supposed = Speeds.supposed(memory_bytes_per_s, Link(50e9), 60e9)
    seconds = slots_s(
        ModelBytes.of(layout, kv_bytes(layout, 2048) // 2), supposed, hit_rate
    )
    assert 1 / seconds == pytest.approx(measured, rel=0.25)


def test_estimate_plans_a_supposed_card_like_an_unused_one(layouts: Layouts) -> None:
    layout = layouts("qwen1.5-moe-a2.7b")
    path = str(layout.shards[0].path)
    found = plan(layout, card(8 * GB), placement="slots", n_seq_max=4)
    options = {"n_ctx": 2048, "n_parallel": 4, "placement": "cpu"}
    for memory, kinds in (("8GB", {"slots", "layers", "cpu"}), ("1.4GB", {"cpu"})):
        device = SupposedDevice.parse(memory, "3300GB/s", "50GB/s,30us")
        placement = estimate_model(path, options, device)["placement"]
        bytes_of = {
            each["kind"]: each["slot_bytes"] for each in placement["placements"]
        }
        assert bytes_of.keys() == kinds
        assert bytes_of.get("slots", found.budget_bytes) == found.budget_bytes
        refused = {reason.partition(":")[0] for reason in placement["refused"]}
        assert refused == {f"not {kind}" for kind in {"slots", "layers"} - kinds}


@pytest.mark.parametrize(
    ("name", "n_bytes", "least"),
    [
        ("qwen1.5-moe-a2.7b", 8 * GB, 1.09),
        ("qwen3-30b-a3b", 8 * GB, 1.07),
        ("qwen3-30b-a3b", 16 * GB, 1.07),
    ],
)
def test_slots_of_two_sizes_leave_memory_for_more_slots(
    layouts: Layouts,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    n_bytes: int,
    least: float,
) -> None:
    layout = layouts(name)
    found = plan(layout, card(n_bytes), placement="slots")
    small, large = found.size_classes
    assert sorted((*small, *large)) == [layer.il for layer in layout.layers]
    sizes = [slot_bytes(layout.only(of), on_device=True) for of in (small, large)]
    n_each = divide_slots(layout, found.size_classes, found.n_slots)
    assert n_each[0] / n_each[1] == pytest.approx(len(small) / len(large), rel=0.01)
    taken = sum(n * size for n, size in zip(n_each, sizes, strict=True))
    assert (
        sizes[0] < sizes[1]
        and abs(taken - found.budget_bytes) < found.n_slots + sizes[1]
    )
    monkeypatch.setattr("moegguf.engine.solver.has_size_classes", lambda: False)
    without = plan(layout, card(n_bytes), placement="slots")
    assert (
        not without.size_classes
        and without.budget_bytes == without.n_slots * without.slot_bytes
    )
    assert (
        found.n_ubatch == without.n_ubatch
        and found.supply.n_staging == without.supply.n_staging
    )
    assert found.n_slots >= least * without.n_slots
    assert found.vram_cache_bytes <= without.vram_cache_bytes + without.slot_bytes


def test_caches_of_the_short_run_give_the_named_shares_of_experts_a_slot(
    tmp_path: Path,
) -> None:
    preset, quant, n_layer = CARD.models[SHALLOW]
    shape = replace(PRESETS[preset], n_layer=n_layer)
    layout = read_layout(write_sparse_model(tmp_path / "model.gguf", shape, quant))
    for share, budget in CARD.caches.items():
        spec = LoadSpec.of(
            {"vram_cache": budget, "n_ctx": 2048, "n_ubatch": 512, "placement": "slots"}
        )
        machine = Machine(RAM, devices=(card(139 * GB),))
        found = make_plan(
            layout, machine, spec, speeds(150e9), HitRates.of(layout).curve()
        )
        assert found.n_ubatch == 512 and found.supply.n_staging > 0
        assert found.n_slots / layout.n_expert_total == pytest.approx(
            share / 100, abs=0.005
        )


def test_short_run_compares_three_numbers_of_layers_on_the_cpu(
    layouts: Layouts, tmp_path: Path
) -> None:
    layout = layouts("qwen1.5-moe-a2.7b")
    (step,) = (step for step in steps(CARD, tmp_path, 16) if step.name == "Q2")
    cases = [part.case for part in step.parts if part.name.startswith("llama.cpp")]
    assert [n_cpu_moe(case, layout) for case in cases if case] == [7, 6, 5]


def test_plan_counts_embeddings_and_host_bytes_only_in_ram(layouts: Layouts) -> None:
    layout = layouts("qwen3-30b-a3b")
    on_card, on_cpu = (
        plan(layout, card(8 * GB), placement="slots"),
        plan(layout, card(8 * GB), placement="cpu"),
    )
    assert on_cpu.needs.dense_bytes == on_card.needs.dense_bytes == layout.dense_bytes
    assert on_card.host_bytes > on_card.n_ram_slots * on_card.slot_bytes


def test_margin_grows_with_memory_used_by_others_and_disables_the_warm_up(
    layouts: Layouts,
) -> None:
    layout = layouts("qwen3-30b-a3b")
    # 0: the driver reports all memory of the card as free.
    for used_bytes, margin in ((CONTEXT_BYTES, 384 * MIB), (GIB, GIB), (0, GIB)):
        device = card(8 * GB, used_bytes)
        found = plan(layout, device, placement="slots")
        assert device.margin == margin
        assert (
            0 <= found.available_bytes - found.total_bytes - margin < found.slot_bytes
        )
        assert found.warms_up == (margin < GIB)


def test_plan_of_an_unknown_shape_uses_the_middle_curve_and_chooses_slots(
    layouts: Layouts,
) -> None:
    layout = layouts("qwen1.5-moe-a2.7b")
    found = plan(layout, card(8 * GB), 60e9).placement
    assert found is not None and found.chosen.kind == "slots"
    assert found.hit_rates.startswith(
        "not known for this model; the middle of those published: Qwen3.6"
    )


def test_saved_hit_rate_counts_for_about_the_same_share_of_slots(
    layouts: Layouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    layout = layouts("qwen1.5-moe-a2.7b")
    answer = Stats(
        passes=256,
        lookups=1000,
        hits_ready=400,
        hits_late=20,
        n_slots=800,
        slots_used=800,
        n_experts=1440,
    )
    hits = RunHits(layout)
    for ignored in (
        {"passes": 8},
        {"slots_used": 700},
        {"n_slots": 1440, "slots_used": 1440},
    ):
        hits.add(replace(answer, **ignored))
    hits.save()
    assert read_run_hits(layout) == {}
    hits.add(answer)
    hits.add(replace(answer, hits_ready=420))
    hits.save()
    assert read_run_hits(layout) == {0.56: pytest.approx(0.43)}
    found = plan(layout, card(8 * GB), 60e9).placement
    assert (
        found is not None
        and found.chosen.kind == "layers"
        and "corrected by answers on this machine" in found.reason
    )
    curve = HitRates.of(layout).curve()
    assert (
        curve.at(0.56) == pytest.approx(0.43)
        and curve.at(0.49) > 0.7
        and curve.at(1.0) == 1
    )


def test_refused_pinning_makes_later_plans_expect_pageable_copies(
    layouts: Layouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    layout, there = layouts("qwen3-30b-a3b"), Machine(RAM, devices=(card(8 * GB),))
    measured = replace(speeds(45e9), pageable=Link(2e9))

    def planned() -> Plan:
        return plan_load(layout, LoadSpec(n_ctx=2048), there, lambda _: measured)

    pinned = planned()
    ram_bytes = pinned.n_ram_slots * pinned.slot_bytes
    note_pinning(layout, ram_bytes + 1, is_refused=True)
    assert pinned.device == "CUDA0" and planned() == pinned
    note_pinning(layout, ram_bytes, is_refused=True)
    pageable = planned()
    assert pageable.device is None and pageable.placement is not None
    assert pageable.placement.speeds.copies == measured.pageable
    assert (
        "copies from pageable memory are expected, at 2.0 GB/s" in pageable.reasons[-1]
    )
    note_pinning(layout, ram_bytes - 1, is_refused=False)
    assert planned() == pageable
    note_pinning(layout, ram_bytes, is_refused=False)
    assert planned() == pinned


@pytest.mark.parametrize("cpu_bytes_per_s", [45e9, 60e9, 80e9])
def test_plan_with_prompts_prefers_slots_over_layers(
    layouts: Layouts, cpu_bytes_per_s: float
) -> None:
    found = plan(layouts("qwen1.5-moe-a2.7b"), card(8 * GB), cpu_bytes_per_s)
    assert (
        found.placement is not None
        and found.device == "CUDA0"
        and not found.whole_layers
    )
    slots, layers = found.placement.placements[:2]
    assert (slots.kind, layers.kind) == ("slots", "layers")
    assert slots.prompt_tokens_per_s > 2 * layers.prompt_tokens_per_s
    assert (
        "of a prompt and" in found.placement.reason
        and "an answer of 256" in found.placement.reason
    )


def test_cpu_pool_bytes_is_four_caches_up_to_a_quarter_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "size"
    monkeypatch.setattr("moegguf.engine.speeds.LAST_CACHE", cache)
    assert cpu_pool_bytes(64 * GIB) == 96 * MIB
    cache.write_text("307200K")
    assert cpu_pool_bytes(64 * GIB) == 1200 * MIB
    assert cpu_pool_bytes(2 * GIB) == 512 * MIB
