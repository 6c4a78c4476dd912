"""Tests the cost model of placements against published figures, and the choice of a
placement."""

from dataclasses import replace
from typing import Any

import pytest
from gguf_builder import moe

from moegguf.controller.hit_rates import HitCurve, published_curve
from moegguf.engine.cost import ModelBytes, Placement, Speeds, cpu_s, layers_s, slots_s
from moegguf.engine.load_spec import Budgets, LoadSpec
from moegguf.engine.machine import VRAM_MARGIN_BYTES, Device, Machine, Memory
from moegguf.engine.memory import Sizes
from moegguf.engine.plan import Plan, slot_bytes
from moegguf.engine.solver import Task, make_plan, plan_layers
from moegguf.engine.speeds import best_of
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.native import abi
from moegguf.native.store import StoreOptions
from moegguf.quantities import GIB, Link

# Q4_K_M, with 8k tokens of KV cache.
QWEN3_30B = ModelBytes(48, 1_100_000_000, 900_000_000, n_layer_all=48)
MIXTRAL = ModelBytes(32, 6_830_000_000, 1_000_000_000)
# A card behind x16 beside DDR4. Small operations take no time on the card, because they
# would take longer than everything else in a small model.
RTX_3070 = replace(Speeds.supposed(448e9, Link(24e9), 38e9), device_node_s=0.0)


@pytest.mark.parametrize(
    ("memory", "link", "cpu", "share", "hit_rate", "layers", "slots"),
    [
        (272e9, 12.5e9, 55e9, 0.30, 0.86, 36, 34),  # 4060 x8, DDR5
        (448e9, 24e9, 38e9, 0.30, 0.86, 32, 52),  # 3070 x16, DDR4
        (360e9, 24e9, 38e9, 0.55, 0.95, 39, 59),  # 3060, DDR4
        (504e9, 24e9, 55e9, 0.55, 0.95, 51, 69),  # 4070, DDR5
    ],
)
def test_cost_model_predicts_the_speeds_in_the_documentation(
    memory: float,
    link: float,
    cpu: float,
    share: float,
    hit_rate: float,
    layers: float,
    slots: float,
) -> None:
    # The device holds only whole layers, and the speeds are rounded.
    speeds, n_whole = Speeds.supposed(memory, Link(link), cpu), int(share * 48)
    assert 1 / slots_s(QWEN3_30B, speeds, hit_rate) == pytest.approx(slots, rel=0.02)
    assert 1 / layers_s(
        QWEN3_30B, speeds, 48 - n_whole, 1 - n_whole / 48
    ) == pytest.approx(layers, rel=0.02)


@pytest.mark.parametrize(("share", "slots"), [(0.16, 4), (0.33, 6), (0.80, 18)])
def test_cost_model_prefers_whole_layers_for_large_experts(
    share: float, slots: float
) -> None:
    n_whole = int(share * 32)
    with_slots, with_layers = (
        slots_s(MIXTRAL, RTX_3070, share + 0.04),
        layers_s(MIXTRAL, RTX_3070, 32 - n_whole, 1 - n_whole / 32),
    )
    assert 1 / with_slots < slots
    assert with_layers < with_slots


def test_cost_model_adds_disk_time_for_bytes_outside_memory() -> None:
    for seconds in (
        lambda share: cpu_s(QWEN3_30B, RTX_3070, share),
        lambda share: layers_s(QWEN3_30B, RTX_3070, 24, 0.5, share),
        lambda share: slots_s(QWEN3_30B, RTX_3070, 0.86, share),
    ):
        assert seconds(0.1) - seconds(0.0) == pytest.approx(
            0.1 * QWEN3_30B.token_bytes / 1e9
        )


def test_cost_model_adds_one_latency_per_missing_layer_and_time_per_node() -> None:
    late = replace(RTX_3070, copies=Link(24e9, 1e-3))
    extra_s = slots_s(QWEN3_30B, late, 0.86) - slots_s(QWEN3_30B, RTX_3070, 0.86)
    assert extra_s == pytest.approx(48 * (1 - 0.86**8) * 1e-3)
    nodes = replace(RTX_3070, device_node_s=2e-6)
    extra_s = slots_s(QWEN3_30B, nodes, 0.86) - slots_s(QWEN3_30B, RTX_3070, 0.86)
    assert extra_s == pytest.approx(48 * (30 + 16) * 2e-6)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ExpertLayout:
    """The layout of a model of 8 layers with 16 experts each, 128 in total. A token
    uses 4 experts of each layer."""
    path = tmp_path_factory.mktemp("placed") / "m.gguf"
    return read_layout(
        moe(n_layer=8, n_expert=16, n_used=4, n_embd=256, n_ff=256).write(path)
    )


AMPLE = Memory(64 * GIB, 60 * GIB, "the machine")


def planned(
    layout: ExpertLayout,
    share: float | None,
    speeds: Speeds = RTX_3070,
    memory: Memory = AMPLE,
    **options: Any,
) -> Plan:
    """Plans for a device with room for a share of the experts and everything else.

    If the share is None, the device has only half the room that everything else needs.
    """
    needs = Sizes(512, on_device=True).needs(layout, 64).total_bytes + VRAM_MARGIN_BYTES
    free = (
        needs // 2
        if share is None
        else needs + int(share * layout.n_expert_total) * slot_bytes(layout)
    )
    device = Device("GPU0", 0, free, 64 * GIB)
    how = LoadSpec(512, n_ubatch=64, store=StoreOptions(staging=0), **options)
    return make_plan(
        layout,
        Machine(memory, devices=(device,)),
        how,
        speeds,
        HitCurve({0.5: 0.9}, "put in"),
    )


def by_kind(found: Plan) -> dict[str, Placement]:
    return {placement.kind: placement for placement in found.placement.placements}


def test_plan_takes_the_fastest_placement_and_states_figures_and_source(
    layout: ExpertLayout,
) -> None:
    slow_cpu, slow_link = (
        replace(RTX_3070, cpu_bytes_per_s=1e6),
        replace(RTX_3070, copies=Link(1e6)),
    )
    for speeds, kind in ((slow_cpu, "slots"), (slow_link, "layers")):
        found = planned(layout, 0.5, speeds)
        placement = found.placement
        assert placement is not None and placement.chosen.kind == kind
        assert placement.placements[0] == placement.chosen
        assert (found.device, found.layers_on) == (
            ("GPU0", None) if kind == "slots" else (None, "GPU0")
        )
        assert placement.reason in found.reasons and "tokens/s" in placement.reason
    assert "(hit rates put in)" in planned(layout, 0.5, slow_cpu).placement.reason  # type: ignore[union-attr]
    assert not planned(
        layout, 0.5, replace(slow_link, device_bytes_per_s=1e6)
    ).on_device


@pytest.mark.parametrize("choice", ["layers", "slots"])
def test_plan_takes_a_forced_placement(layout: ExpertLayout, choice: Any) -> None:
    found = planned(layout, 0.5, placement=choice).placement
    assert found is not None and found.chosen.kind == choice


def test_plan_of_a_resident_model_compares_only_the_cpu(layout: ExpertLayout) -> None:
    found = planned(layout, 1.1)
    assert found.resident and set(by_kind(found)) == {"resident", "cpu"}
    assert found.placement is not None and "every expert fits" in found.placement.reason
    device = Device("GPU0", 0, 32 * GIB, 64 * GIB)
    found = make_plan(
        layout, Machine(AMPLE, devices=(device,)), LoadSpec(placement="slots")
    )
    assert found.on_device and found.placement is None


def test_plan_uses_a_small_device_for_the_parts_that_fit(layout: ExpertLayout) -> None:
    found = planned(layout, 0.5, budgets=Budgets.of({"vram_cache": slot_bytes(layout)}))
    assert set(by_kind(found)) == {"layers", "cpu"}
    assert (by_kind(found)["layers"].n_layers, str(by_kind(found)["layers"])) == (
        0,
        "no whole layer",
    )
    # Weights other than experts are computed faster on the GPU.
    assert found.layers_on == "GPU0"
    assert any("not slots: " in reason for reason in found.reasons)
    small = replace(RTX_3070, cpu_bytes_per_s=1e6)
    assert not planned(layout, None, small, budgets=Budgets()).device
    with pytest.raises(BudgetError, match="limited by the device GPU0"):
        planned(layout, None, placement="slots")


def test_less_ram_makes_every_placement_slower(layout: ExpertLayout) -> None:
    enough = by_kind(planned(layout, 0.3))
    for kind, short in by_kind(
        planned(layout, 0.3, budgets=Budgets.of({"expert_cache": "20%"}))
    ).items():
        assert short.tokens_per_s < 0.8 * enough[kind].tokens_per_s, kind


def test_plan_layers_fills_whole_layers_from_the_last_by_their_own_bytes(
    layout: ExpertLayout,
) -> None:
    last = layout.layers[-1]
    larger = replace(
        last,
        matrices=tuple(
            replace(m, expert_bytes=2 * m.expert_bytes) for m in last.matrices
        ),
    )
    own_bytes = last.n_expert * last.expert_bytes
    uneven = replace(
        layout,
        layers=(*layout.layers[:-1], larger),
        expert_bytes=layout.expert_bytes + own_bytes,
    )
    for of, n_bytes, whole in (
        (layout, 2 * own_bytes, (6, 7)), (layout, 2 * own_bytes - 1, (7,)),
        (uneven, 2 * own_bytes, (7,)), (uneven, 2 * own_bytes - 1, ()), (uneven, 100 * own_bytes, tuple(range(1, 8))),
    ):  # fmt: skip
        device = Device("GPU0", 0, 32 * GIB, 64 * GIB)
        budgets = Budgets.of(
            {"expert_cache": 2 * of.expert_bytes, "vram_cache": n_bytes}
        )
        how = LoadSpec(512, n_ubatch=64, placement="layers", budgets=budgets)
        found = plan_layers(
            Task(of, Machine(AMPLE, devices=(device,)), Sizes.of(of, how))
        )
        assert (found.whole_layers, found.n_slots) == (
            whole,
            sum(x.n_expert for x in of.layers if x.il not in whole),
        )


def test_published_curve_interpolates_and_falls_back_to_the_middle_curve() -> None:
    curve = published_curve(128, 8)
    assert curve.at(0) == 0 and curve.at(1) == curve.at(2) == 1
    assert curve.at(0.18) == pytest.approx(0.706)
    unknown = published_curve(7, 3)
    assert unknown.source.startswith(
        "not known for this model; the middle of those published: Qwen3.6"
    )
    assert unknown.at(0.25) <= curve.at(0.25)


def test_best_of_takes_the_best_value_of_each_figure() -> None:
    first = abi.Speeds(cpu_bytes_per_ns=2, cpu_op_ns=5, device_bytes_per_ns=9)
    second = abi.Speeds(cpu_bytes_per_ns=3, cpu_op_ns=6, device_bytes_per_ns=8)
    for kind in ("copy", "pageable"):
        for turn, bytes_per_ns, ns in ((first, 1, 10), (second, 2, 70)):
            setattr(turn, f"{kind}_bytes_per_ns", bytes_per_ns)
            setattr(turn, f"{kind}_ns", ns)
    few, many = (best_of([first, second], n_bytes) for n_bytes in (50, 200))
    assert (few.cpu_bytes_per_ns, few.cpu_op_ns, few.device_bytes_per_ns) == (3, 5, 9)
    # Both copy figures come from the measurement with the shortest time to copy
    # `n_bytes`.
    assert (
        (few.copy_bytes_per_ns, few.copy_ns)
        == (few.pageable_bytes_per_ns, few.pageable_ns)
        == (1, 10)
    )
    assert (
        (many.copy_bytes_per_ns, many.copy_ns)
        == (many.pageable_bytes_per_ns, many.pageable_ns)
        == (2, 70)
    )


@pytest.mark.parametrize("speeds", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_speeds_reject_zero_and_load_spec_rejects_unknown_placements(
    speeds: tuple[float, float, float],
) -> None:
    with pytest.raises(OptionError, match="speeds must be above 0"):
        Speeds.supposed(speeds[0], Link(speeds[1]), speeds[2])
    with pytest.raises(OptionError, match="auto, layers, slots, slots-mapped, cpu"):
        LoadSpec.of({"placement": "gpu"})
