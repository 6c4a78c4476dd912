"""The cost model of placements against published figures, and the choice between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf_builder import moe

from moegguf.engine.placement import DeviceSpeeds, HitCurve, ModelBytes, Placement, Planner, published_curve
from moegguf.engine.plan import slot_bytes
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.native.abi import SpeedsStruct
from moegguf.native.speeds import best_of
from moegguf.quantities import GIB, Link

QWEN3_30B = ModelBytes(48, int(16.35 * GIB), 1_100_000_000, 900_000_000)  # Q4_K_M, with 8k tokens of KV cache
MIXTRAL = ModelBytes(32, int(25.4 * GIB), 6_830_000_000, 1_000_000_000)
RTX_3070 = DeviceSpeeds.supposed(448e9, Link(24e9), 38e9)  # x16 beside DDR4


def planner(model: ModelBytes, speeds: DeviceSpeeds, share: float, hit_rate: float) -> Planner:
    """With a share of the experts in the device's memory, and slots there that hit so often."""
    return Planner(model, speeds, HitCurve({share: hit_rate}, "put in"), int(share * model.expert_bytes))


def by_kind(found: Planner) -> dict[str, Placement]:
    return {placement.kind: placement for placement in found.placements()}


@pytest.mark.parametrize(
    ("memory", "link", "cpu", "share", "hit_rate", "layers", "slots"),
    [
        (272e9, 12.5e9, 55e9, 0.30, 0.86, 41, 40),  # 4060 x8, DDR5
        (448e9, 24e9, 38e9, 0.30, 0.86, 38, 67),  # 3070 x16, DDR4
        (360e9, 24e9, 38e9, 0.55, 0.95, 48, 80),  # 3060, DDR4
        (504e9, 24e9, 55e9, 0.55, 0.95, 67, 99),  # 4070, DDR5
    ],
)
def test_predictions_for_qwen3_30b(
    memory: float, link: float, cpu: float, share: float, hit_rate: float, layers: float, slots: float
) -> None:
    found = by_kind(planner(QWEN3_30B, DeviceSpeeds.supposed(memory, Link(link), cpu), share, hit_rate))
    assert found["slots"].tokens_per_s == pytest.approx(slots, rel=0.03)
    assert found["layers"].tokens_per_s == pytest.approx(layers, rel=0.07)  # whole layers only, and rounded speeds


def test_misses_that_the_cpu_computes_beside_copies_cost_less_and_are_not_exact() -> None:
    fetching = planner(QWEN3_30B, RTX_3070, 0.3, 0.86)
    computing = replace(fetching, computes_misses=True)
    fetched, computed = (by_kind(found) for found in (fetching, computing))
    missed_bytes, n_layers = 0.14 * QWEN3_30B.token_bytes, QWEN3_30B.n_layer * (1 - 0.86**8)
    saved_s = missed_bytes / 24e9 - missed_bytes / (24e9 + 38e9) - n_layers * RTX_3070.cpu_layer_s
    for kind, sooner_s in (("slots", saved_s), ("layers", 0.0), ("cpu", 0.0)):
        expected_s = 1 / fetched[kind].tokens_per_s - sooner_s
        assert 1 / computed[kind].tokens_per_s == pytest.approx(expected_s)
        assert (fetched[kind].exact, computed[kind].exact) == (True, kind != "slots")
    assert str(computed["slots"]).endswith("misses computed by the CPU, too: not exact")
    assert by_kind(replace(computing, device_bytes=QWEN3_30B.expert_bytes))["resident"].exact


@pytest.mark.parametrize(("share", "slots"), [(0.16, 4), (0.33, 6), (0.80, 18)])
def test_large_experts_go_in_whole_layers(share: float, slots: float) -> None:
    found = planner(MIXTRAL, RTX_3070, share, share + 0.04)
    assert by_kind(found)["slots"].tokens_per_s < slots
    assert found.plan().chosen.kind == "layers"


def test_small_experts_go_in_slots_and_the_reason_names_figures_and_source() -> None:
    plan = Planner(QWEN3_30B, RTX_3070, published_curve(128, 8), 5 * GIB).plan()
    assert plan.chosen.kind == "slots"
    assert plan.placements[0] == plan.chosen
    assert f"{plan.chosen.tokens_per_s:.0f} tokens/s" in plan.reason
    assert "published for Qwen3-30B-A3B (kekzl/imp#1359)" in plan.reason


@pytest.mark.parametrize(("choice", "kind"), [("layers", "layers"), ("slots", "slots"), ("cpu", "cpu")])
def test_a_forced_placement_is_taken_and_the_reason_says_so(choice: str, kind: str) -> None:
    plan = planner(QWEN3_30B, RTX_3070, 0.3, 0.86).plan(choice)  # type: ignore[arg-type]
    assert plan.chosen.kind == kind
    assert plan.reason.endswith(f"placement {choice!r} was asked for")


def test_when_everything_fits_only_the_cpu_remains_beside_it() -> None:
    found = Planner(QWEN3_30B, RTX_3070, published_curve(128, 8), 17 * GIB)
    plan = found.plan()
    assert [placement.kind for placement in plan.placements] == ["resident", "cpu"]
    assert plan.chosen.tokens_per_s == pytest.approx(0.65 * 448e9 / 2e9)
    assert "every expert fits" in plan.reason


def test_a_device_below_one_layer_leaves_experts_on_the_cpu() -> None:
    small = Planner(QWEN3_30B, RTX_3070, published_curve(128, 8), 10 << 20)
    found = by_kind(small)
    assert set(found) == {"layers", "slots", "cpu"}
    assert (found["layers"].n_layers, str(found["layers"])) == (0, "no whole layer")
    assert small.plan().chosen == found["layers"]  # everything but experts is faster there


def test_a_device_that_not_even_dense_weights_fit_on_is_not_used() -> None:
    full = Planner(QWEN3_30B, RTX_3070, published_curve(128, 8), -1)
    assert full.plan().chosen.kind == "cpu"
    for forced in ("layers", "slots"):
        with pytest.raises(BudgetError, match=f"placement '{forced}'.*or take placement 'cpu'"):
            full.plan(forced)


def test_what_neither_memory_holds_is_read_from_the_disk() -> None:
    enough = planner(QWEN3_30B, RTX_3070, 0.3, 0.86)
    for kind, of_enough in by_kind(enough).items():
        short = by_kind(replace(enough, ram_bytes=QWEN3_30B.expert_bytes // 4))[kind]
        assert short.tokens_per_s < 0.5 * of_enough.tokens_per_s, kind
        more = by_kind(replace(enough, ram_bytes=QWEN3_30B.expert_bytes // 2))[kind]
        assert short.tokens_per_s < more.tokens_per_s <= of_enough.tokens_per_s
    assert by_kind(replace(enough, ram_bytes=QWEN3_30B.expert_bytes)) == by_kind(enough)


def test_misses_of_a_layer_cost_a_latency_once_and_stops_and_nodes_cost_time() -> None:
    found = planner(QWEN3_30B, RTX_3070, 0.3, 0.86)
    late = replace(RTX_3070, copies=Link(24e9, 1e-3))
    extra_s = 1 / by_kind(replace(found, speeds=late))["slots"].tokens_per_s - 1 / by_kind(found)["slots"].tokens_per_s
    assert extra_s == pytest.approx(48 * (1 - 0.86**8) * 1e-3)
    nodes = replace(RTX_3070, device_node_s=2e-6)
    model = replace(QWEN3_30B, n_layer_all=48)
    base, slow = (by_kind(replace(found, model=model, speeds=speeds))["slots"] for speeds in (RTX_3070, nodes))
    assert 1 / slow.tokens_per_s - 1 / base.tokens_per_s == pytest.approx(48 * (30 + 16) * 2e-6)


def test_a_kind_that_a_budget_does_not_allow_is_passed_over() -> None:
    found = Planner(QWEN3_30B, RTX_3070, published_curve(128, 8), 5 * GIB)
    first = found.plan().chosen.kind
    assert found.plan(without={first}).chosen.kind != first


def test_whole_layers_are_counted_by_their_own_bytes_from_the_last() -> None:
    model = ModelBytes(4, 100, 10, 0, 2, 4, layer_bytes=(10, 20, 30, 40))
    found = Planner(model, RTX_3070, HitCurve({0.5: 0.6}, "put in"), 69)
    assert by_kind(found)["layers"].n_layers == 1  # of the mean size there would be two
    assert by_kind(replace(found, device_bytes=70))["layers"].n_layers == 2
    for placement in replace(found, device_bytes=95).placements():
        if placement.slot_bytes:
            assert placement.slot_bytes == 95 - model.of_last(placement.n_layers)
    alike = replace(model, layer_bytes=())
    assert by_kind(replace(found, model=alike))["layers"].n_layers == 2
    on_cpu_s = {n: 10 * (1 - model.of_last(n) / 100) / RTX_3070.cpu_bytes_per_s + (4 - n) * 60e-6 for n in (1, 2)}
    one, two = (by_kind(replace(found, device_bytes=n))["layers"] for n in (69, 70))
    assert 1 / one.tokens_per_s - 1 / two.tokens_per_s == pytest.approx(on_cpu_s[1] - on_cpu_s[2], rel=1e-3)


def test_slots_count_by_the_size_of_the_largest_expert_that_they_may_hold() -> None:
    model = ModelBytes(4, 100, 10, 0, 2, 4, layer_bytes=(20, 20, 20, 40), slots_bytes=160)
    curve = HitCurve({0.5: 0.6, 0.8: 0.9}, "put in")
    found = Planner(model, RTX_3070, curve, 80, ram_bytes=80)
    of_all = by_kind(found)["slots"]
    assert of_all.hit_rate == pytest.approx(0.6)  # half of 160 bytes of slots, though 80 % of the experts' bytes
    assert "resident" not in by_kind(replace(found, device_bytes=159))
    assert "resident" in by_kind(replace(found, device_bytes=160))
    alike = replace(found, model=replace(model, slots_bytes=0))
    assert 1 / by_kind(found)["cpu"].tokens_per_s > 1 / by_kind(alike)["cpu"].tokens_per_s  # more is read from the disk


def test_a_slot_holds_the_largest_expert(tmp_path: Path) -> None:
    layout = read_layout(moe(n_layer=3, n_expert=4).write(tmp_path / "m.gguf"))
    assert ModelBytes.of(layout).slots_bytes == 12 * slot_bytes(layout)
    last = layout.layers[2]
    larger = tuple(replace(m, ne0=2 * m.ne0, expert_bytes=2 * m.expert_bytes) for m in last.matrices)
    mixed = replace(layout, layers=(*layout.layers[:2], replace(last, matrices=larger)))
    small, large = slot_bytes(layout), slot_bytes(mixed)
    assert large > 1.5 * small
    assert ModelBytes.of(mixed).slots_bytes == 12 * large


def test_hit_curves() -> None:
    curve = published_curve(128, 8)
    assert curve.at(0) == 0 and curve.at(1) == curve.at(2) == 1
    assert curve.at(0.18) == pytest.approx(0.706)
    unknown = published_curve(7, 3)
    assert unknown.source.startswith("not known for this model; conservative")
    assert unknown.at(0.25) <= curve.at(0.25)


def test_of_several_turns_of_measuring_each_figure_is_the_best() -> None:
    first = SpeedsStruct(cpu_bytes_per_ns=2, cpu_op_ns=5, device_bytes_per_ns=9, copy_bytes_per_ns=1, copy_ns=10)
    second = SpeedsStruct(cpu_bytes_per_ns=3, cpu_op_ns=6, device_bytes_per_ns=8, copy_bytes_per_ns=2, copy_ns=70)
    few, many = (best_of([first, second], n_bytes) for n_bytes in (50, 200))
    assert (few.cpu_bytes_per_ns, few.cpu_op_ns, few.device_bytes_per_ns) == (3, 5, 9)
    assert (few.copy_bytes_per_ns, few.copy_ns) == (1, 10)  # both of one turn: the soonest for so many bytes
    assert (many.copy_bytes_per_ns, many.copy_ns) == (2, 70)


@pytest.mark.parametrize("speeds", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_speeds_that_cannot_be_are_refused(speeds: tuple[float, float, float]) -> None:
    with pytest.raises(OptionError, match="above zero"):
        DeviceSpeeds.supposed(speeds[0], Link(speeds[1]), speeds[2])


def test_a_placement_that_does_not_exist_is_refused() -> None:
    with pytest.raises(OptionError, match="auto, layers, slots, cpu"):
        planner(QWEN3_30B, RTX_3070, 0.3, 0.86).plan("gpu")  # type: ignore[arg-type]
