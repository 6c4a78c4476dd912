"""Tests how layers are divided among devices: as llama.cpp does with a tensor_split,
and by memory without one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from gguf_builder import moe
from hypothesis import given, settings
from hypothesis import strategies as st

from moegguf.controller.shape import MoeShape
from moegguf.engine.cost import Speeds
from moegguf.engine.load_spec import Budgets, LoadSpec
from moegguf.engine.machine import (
    VRAM_MARGIN_BYTES,
    Device,
    Machine,
    Memory,
    margin_bytes,
)
from moegguf.engine.memory import kv_bytes
from moegguf.engine.plan import Plan, slot_bytes
from moegguf.engine.simulated_devices import devices_of
from moegguf.engine.solver import (
    ON_CPU,
    device_of_layers,
    divide_ram_slots,
    host_bytes,
    make_plan,
)
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.native.store import StoreOptions
from moegguf.quantities import GIB, Link, format_bytes_up

RAM = Memory(64 * GIB, 60 * GIB, "the machine")


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ExpertLayout:
    """The layout of a model of 12 layers with 16 experts each, 192 in total. A token
    uses 4 experts of each layer."""
    return read_layout(
        moe(n_layer=12, n_expert=16, n_used=4).write(
            tmp_path_factory.mktemp("split") / "m.gguf"
        )
    )


def devices(*free_bytes: int, name: str = "GPU") -> tuple[Device, ...]:
    return tuple(
        Device(f"{name}{index}", index, free, 64 * GIB)
        for index, free in enumerate(free_bytes)
    )


def machine(*free_bytes: int, name: str = "GPU") -> Machine:
    return Machine(RAM, devices=devices(*free_bytes, name=name))


def budgets(
    vram: str = "auto",
    ram: str | int = "50%",
    n_ctx: int | None = 512,
    staging: int | None = None,
    **others: Any,
) -> LoadSpec:
    given = Budgets.of({"expert_cache": ram, "vram_cache": vram})
    return LoadSpec(n_ctx, budgets=given, store=StoreOptions(staging=staging), **others)


def plan(
    layout: ExpertLayout,
    vram: str,
    ram: str | int = "50%",
    free: tuple[int, ...] = (8 * GIB, 8 * GIB),
    tensor_split: Sequence[float] | None = None,
    name: str = "GPU",
    **split: Any,
) -> tuple[Plan, Sequence[float]]:
    given = tuple(tensor_split) if tensor_split else None
    how = budgets(
        vram,
        ram,
        4096,
        placement="slots",
        tensor_split=given,
        **{"n_gpu_layers": 99, **split},
    )
    planned = make_plan(layout, machine(*free, name=name), how)
    return planned, planned.tensor_split


@pytest.mark.parametrize(
    ("split", "n_gpu_layers", "expected"),
    [
        ([1, 1], -1, [0, 0, 0, 1, 1]),
        ([1, 1], 99, [0, 0, 0, 1, 1]),
        ([3, 1], -1, [0, 0, 0, 0, 0]),
        ([1, 0], -1, [0] * 5),
        ([0, 1], -1, [1] * 5),
        ([1, 1], 4, [ON_CPU, ON_CPU, 0, 0, 1]),
        ([1, 1], 1, [ON_CPU] * 5),
        ([1, 1], 0, [ON_CPU] * 5),
        ([2, 3, 1], -1, [0, 0, 1, 1, 1]),
    ],
)
def test_device_of_layers_equals_llama_cpps_split(
    split: list[float], n_gpu_layers: int, expected: list[int]
) -> None:
    assert device_of_layers(5, split, n_gpu_layers) == expected


@pytest.mark.parametrize("split", [[], [0, 0], [-1, 2], [float("nan"), 1]])
def test_device_of_layers_rejects_an_invalid_tensor_split(split: list[float]) -> None:
    with pytest.raises(OptionError, match="tensor_split"):
        device_of_layers(5, split)


def test_plan_without_a_tensor_split_divides_layers_by_memory(
    layout: ExpertLayout,
) -> None:
    for free, vram, n_layers in (
        ((8 * GIB, 2 * GIB), "25%", [12, 0]), ((8 * GIB, 3 * GIB), "25%", [11, 1]),
        ((2 * GIB, 8 * GIB), "auto", [2, 10]),
        ((8 * GIB,) * 2, "auto,auto", [7, 5]), ((8 * GIB,) * 2, "30%,10%", [10, 2]),
    ):  # fmt: skip
        assert [
            len(part.layers) for part in plan(layout, vram, free=free)[0].devices
        ] == n_layers


def test_single_vram_budget_is_shared_and_a_list_is_kept_per_device(
    layout: ExpertLayout,
) -> None:
    shared, split = plan(layout, "25%")
    # The second device also holds the output matrix, so it has fewer layers.
    assert [len(part.layers) for part in shared.devices] == [7, 5]
    assert [part.n_slots for part in shared.devices] == [28, 20]
    assert device_of_layers(12, split) == [0] * 7 + [1] * 5
    assert (shared.n_slots, shared.n_ram_slots, shared.device) == (48, 96, "GPU0, GPU1")
    listed, _ = plan(layout, "25%,10%", tensor_split=[1, 1])
    assert [part.n_slots for part in listed.devices] == [48, 19]
    assert plan(layout, "25%", tensor_split=[1, 0])[0].device == "GPU0", (
        "the other device has no layers"
    )
    uneven, _ = plan(layout, "25%", tensor_split=[3, 1], free=(8 * GIB, 2 * GIB))
    assert [len(part.layers) for part in uneven.devices] == [10, 2]
    assert sum(part.n_slots for part in uneven.devices) == 48
    alone = make_plan(layout, machine(8 * GIB), budgets("25%", n_gpu_layers=99))
    assert (alone.device, alone.devices, alone.tensor_split) == ("GPU0", (), None)
    for vram, n_staging in (("100%,25%", 1), ("100%,100%", 0)):
        assert plan(layout, vram, tensor_split=[1, 1])[0].supply.n_staging == n_staging


@settings(max_examples=100, deadline=None)
@given(
    vram=st.sampled_from(["auto", "auto,auto", "25%", "60%", "30%,10%", "100%,25%"]),
    free_mib=st.tuples(st.integers(1000, 1300), st.integers(1000, 1300)),
    split=st.sampled_from([None, (1.0, 1.0), (3.0, 1.0)]), staging=st.sampled_from([None, 0]),
)  # fmt: skip
def test_any_split_has_every_layer_once_and_keeps_its_budgets(
    layout: ExpertLayout,
    vram: str,
    free_mib: tuple[int, int],
    split: Any,
    staging: int | None,
) -> None:
    free = tuple(mib << 20 for mib in free_mib)
    try:
        found, _ = plan(layout, vram, free=free, tensor_split=split, staging=staging)
    except BudgetError:
        return
    parts = found.on_devices
    assert sorted(il for part in parts for il in part.layers) == list(range(12))
    assert sum(part.n_slots for part in parts) == found.n_slots
    shares = dict(zip(("GPU0", "GPU1"), vram.split(","), strict=False))
    if len(shares) == 1 and "%" in vram:
        assert found.n_slots <= 192 * int(vram[:-1]) // 100
    for part in parts:
        most = 16 * len(part.layers)
        assert min(4, most) <= part.n_slots <= most
        if not most:
            continue  # a device without layers holds at most the output matrix
        if (share := shares.get(part.name or "", vram)) == "auto":
            assert part.total_bytes <= free[part.name == "GPU1"] - VRAM_MARGIN_BYTES
        elif len(shares) == 2:
            assert part.n_slots <= 192 * int(share[:-1]) // 100


def test_n_gpu_layers_keeps_layers_on_a_gpu_slower_than_the_cpu(
    layout: ExpertLayout,
) -> None:
    slow, one = Speeds(1e6, Link(1e6), 100e9), machine(8 * GIB)
    assert not make_plan(layout, one, budgets("40%"), slow).on_device
    given = budgets("40%", n_gpu_layers=-1)
    assert make_plan(layout, one, given, slow).on_device
    given = replace(given, budgets=Budgets(given.budgets.ram))
    with pytest.raises(
        BudgetError,
        match="leave n_gpu_layers out, so that the CPU can compute every layer",
    ):
        make_plan(layout, machine(1 << 20), given, slow)
    # Neither allows the CPU, even without n_gpu_layers.
    for placement in ("slots", "layers"):
        with pytest.raises(BudgetError) as caught:
            make_plan(
                layout, machine(1 << 20), replace(given, placement=placement), slow
            )
        assert "n_gpu_layers" not in str(caught.value)


def test_kv_cache_size_depends_on_the_memory_that_holds_the_cache(
    layout: ExpertLayout,
) -> None:
    fast, slow = Speeds(1e12, Link(1e12), 1e9), Speeds(1e6, Link(1e6), 100e9)
    layout = replace(layout, hparams=replace(layout.hparams, n_ctx_train=1 << 20))
    how, one, on_both = (
        budgets("auto", "auto", n_ctx=None),
        machine(2 * GIB),
        set[int](),
    )
    for speeds, on_device in ((fast, True), (slow, False)):
        found = make_plan(layout, one, how, speeds)
        assert (found.on_device, found.needs.kv_bytes) == (
            on_device,
            kv_bytes(layout, found.context.kv_tokens),
        )
        on_both.add(found.context.kv_tokens)
    assert len(on_both) == 2


def test_layers_on_the_cpu_share_ram_slots_with_layers_of_devices(
    layout: ExpertLayout,
) -> None:
    mixed, split = plan(
        layout, "25%", 60 * slot_bytes(layout, on_device=True), n_gpu_layers=9
    )
    *on_devices, on_cpu = mixed.devices
    assert [part.layers for part in on_devices] == [(4, 5, 6, 7, 8), (9, 10, 11)]
    assert (on_cpu.name, on_cpu.layers, on_cpu.n_slots, mixed.n_ram_slots) == (
        None,
        (0, 1, 2, 3),
        20,
        40,
    )
    assert device_of_layers(12, split, 9)[:5] == [ON_CPU] * 4 + [0]
    assert mixed.host_bytes >= 60 * mixed.slot_bytes
    on_devices_bytes = (
        sum(part.n_slots for part in on_devices) * mixed.slot_bytes
        + mixed.staging_slots_bytes
    )
    assert (mixed.expert_cache_bytes, mixed.vram_cache_bytes) == (
        60 * mixed.slot_bytes,
        on_devices_bytes,
    )
    one, _ = plan(layout, "25%", free=(8 * GIB,), n_gpu_layers=9)
    assert [part.name for part in one.devices] == ["GPU0", None]
    with pytest.raises(
        BudgetError,
        match=r"expert_cache=.* the CPU needs 4 for its layers .* give at least",
    ):
        plan(layout, "25%", 4 * slot_bytes(layout, on_device=True), n_gpu_layers=9)


def test_plan_rejects_too_small_a_budget_and_warns_about_too_large_a_one(
    layout: ExpertLayout,
) -> None:
    of_one = format_bytes_up(4 * slot_bytes(layout, on_device=True))
    of_both = format_bytes_up(8 * slot_bytes(layout, on_device=True))
    for n, vram, least in (
        (1, f"25%,{slot_bytes(layout, on_device=True)}", f"'{of_one}'."),
        (
            3,
            str(7 * slot_bytes(layout, on_device=True)),
            f"'{of_both}' for 2 devices together.",
        ),
    ):
        with pytest.raises(
            BudgetError,
            match=f"vram_cache='.*' holds {n} experts on GPU1, but a token needs 4",
        ) as few:
            plan(layout, vram, tensor_split=[1, 1])
        assert str(few.value).endswith(f"give at least {least}")
    plan(layout, of_both, tensor_split=[1, 1])
    with pytest.raises(BudgetError, match="3 budgets for 2 devices"):
        plan(layout, "25%,25%,25%")
    with pytest.raises(OptionError, match="1 proportions for 2 devices"):
        plan(layout, "25%", tensor_split=[1])
    tight, _ = plan(layout, "50%", free=(1 << 20, 8 * GIB), tensor_split=[1, 1])
    assert any("on GPU0 are needed" in warning for warning in tight.warnings)


def test_devices_without_room_fall_back_to_the_cpu_unless_requested(
    layout: ExpertLayout,
) -> None:
    small, how = machine(1 << 20, 1 << 20), budgets()
    placed = make_plan(layout, small, how)
    assert (placed.on_device, placed.tensor_split, placed.n_slots) == (False, None, 96)
    assert any("not slots: " in reason for reason in placed.reasons)
    for asked in (
        replace(how, placement="slots"),
        replace(how, budgets=Budgets.of({"vram_cache": "25%,1KiB"})),
    ):
        with pytest.raises(BudgetError):
            make_plan(layout, small, asked)
    assert make_plan(layout, machine(8 * GIB, 8 * GIB), how).device == "GPU0, GPU1"


def test_each_device_counts_the_bytes_of_its_own_layers(layout: ExpertLayout) -> None:
    # Large at first.
    own_bytes = dict.fromkeys(range(12), 1 << 20) | {0: 50 << 20, 1: 30 << 20}
    uneven = replace(
        layout, dense_bytes=layout.dense_bytes + sum(own_bytes.values()),
        layer_dense_bytes={il: n + own_bytes[il] for il, n in layout.layer_dense_bytes.items()},
    )  # fmt: skip
    split: dict[str, Any] = {"tensor_split": [1.0, 1.0], "staging": 0}
    even, found = (plan(of, "25%,25%", **split)[0].devices for of in (layout, uneven))
    more = [
        after.total_bytes - before.total_bytes
        for before, after in zip(even, found, strict=True)
    ]
    for part, n_bytes in zip(found, more, strict=True):
        assert n_bytes == pytest.approx(
            sum(own_bytes[il] for il in part.layers), abs=12
        )
    assert more[0] > 5 * more[1]


def test_slots_that_do_not_fit_one_device_move_to_another(layout: ExpertLayout) -> None:
    size = slot_bytes(layout, on_device=True)
    parts = plan(layout, "25%", tensor_split=[1, 1], staging=0)[0].devices
    beside = [part.total_bytes - part.n_slots * size for part in parts]
    tight = beside[0] + 10 * size, beside[1] + 90 * size
    chosen, _ = plan(layout, "25%", tensor_split=[1, 1], staging=0, free=tight)
    assert [part.n_slots for part in chosen.devices] == [10, 38]
    assert not chosen.warnings
    neither = beside[0] + 10 * size, beside[1] + 10 * size
    kept, _ = plan(layout, "25%", tensor_split=[1, 1], staging=0, free=neither)
    assert sum(part.n_slots for part in kept.devices) == 48 and len(kept.warnings) >= 1
    chosen, _ = plan(layout, "25%", tensor_split=[1, 1], staging=0)
    beside = sum(
        part.total_bytes - part.n_slots * chosen.slot_bytes for part in chosen.devices
    )
    assert (
        beside
        >= chosen.needs.dense_bytes
        + chosen.needs.kv_bytes
        + 2 * chosen.needs.compute_bytes
    )


def test_devices_of_equals_the_devices_of_a_plan(layout: ExpertLayout) -> None:
    """The numbers of slots are the same for every MOEGGUF_SWITCHES, because experts of
    3 MiB need no padding."""
    shape, links = (
        replace(MoeShape.of(layout), expert_bytes=3 << 20),
        (Link(2e9), Link(1e9)),
    )
    counts = list[tuple[list[int], int]]()
    for shares in ((0.25,), (0.5,), (0.25, 0.05), (1.0,)):
        first, second = devices_of(shape, shares, (3.0, 1.0), links)
        assert (first.name, second.name, first.link, second.link) == (
            "CUDA0",
            "CUDA1",
            *links,
        )
        assert (first.layers, second.layers) == (tuple(range(10)), (10, 11))
        assert first.staging == second.staging
        counts.append(([first.n_slots, second.n_slots], first.staging))
    assert counts == [([38, 10], 0), ([50, 13], 1), ([48, 10], 0), ([160, 32], 0)]
    (alone,) = devices_of(shape, (0.9,), (1.0,), ())
    assert (alone.n_slots, alone.staging, alone.link) == (140, 2, None)
    for wrong in (((0.5,) * 3, ()), ((0.5,), links * 2)):
        with pytest.raises(OptionError, match="but --tensor-split has 2"):
            devices_of(shape, wrong[0], (1.0, 1.0), wrong[1])


@pytest.mark.parametrize(("n_on_cpu", "n_below"), [(30, 2), (2, 30), (16, 16), (30, 0)])
def test_divide_ram_slots_gives_both_parts_their_minimum(
    n_on_cpu: int, n_below: int
) -> None:
    for total in range(3, n_on_cpu + n_below + 1):
        on_cpu, below = divide_ram_slots(total, n_on_cpu, n_below, 2)
        assert on_cpu + below == total
        assert 2 <= on_cpu <= n_on_cpu
        assert min(1, n_below) <= below <= n_below


def test_auto_budget_subtracts_other_bytes_in_ram(layout: ExpertLayout) -> None:
    """RAM also holds the weights, context and buffers of layers that run on the CPU."""
    how = budgets("25%", "auto", 4096, placement="slots", n_gpu_layers=9)
    most = make_plan(layout, machine(8 * GIB, 8 * GIB), how)
    beside = most.needs.compute_bytes + margin_bytes(GIB)
    memory = Memory(
        64 * GIB, most.host_bytes - 20 * most.slot_bytes + beside, "the machine"
    )
    assert memory.available_bytes < GIB
    found = make_plan(layout, Machine(memory, devices=devices(8 * GIB, 8 * GIB)), how)
    assert found.n_ram_slots < most.n_ram_slots
    assert (
        host_bytes(layout, found.n_ubatch)
        < found.host_bytes
        <= memory.available_bytes - beside
    )
