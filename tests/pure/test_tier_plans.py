"""Tests plans with two tiers: slots on a GPU, slots in RAM, and refused budgets."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import moe
from hypothesis import given, settings
from hypothesis import strategies as st

from moegguf.engine.devices import find_gpus
from moegguf.engine.load import plan_here
from moegguf.engine.load_spec import Budgets, LoadSpec
from moegguf.engine.machine import VRAM_MARGIN_BYTES, Device, Machine, Memory
from moegguf.engine.plan import Plan, slot_bytes, staging_bytes
from moegguf.engine.solver import host_bytes, make_plan
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.native.store import StoreOptions
from moegguf.quantities import GIB, parse_expert_cache

RAM = Memory(64 * GIB, 60 * GIB, "the machine")


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ExpertLayout:
    """The layout of a model of 6 layers with 16 experts each, 96 in total. A token uses
    4 experts of each layer."""
    return read_layout(
        moe(n_layer=6, n_expert=16, n_used=4).write(
            tmp_path_factory.mktemp("tiers") / "m.gguf"
        )
    )


def plan(
    layout: ExpertLayout, vram: str | int, ram: str | int, memory: Memory = RAM, staging: int | None = None,
    gpu: Device | None = None, vram_bytes: int = 32 * GIB, **sizes: Any,
) -> Plan:  # fmt: skip
    machine = Machine(memory, devices=(gpu or Device("GPU0", 0, vram_bytes, 64 * GIB),))
    budgets = Budgets.of({"expert_cache": ram, "vram_cache": vram})
    store = StoreOptions(staging=staging)
    return make_plan(
        layout,
        machine,
        LoadSpec(
            **{"n_ctx": 4096, **sizes}, budgets=budgets, placement="slots", store=store
        ),
    )


# A plain number: slots.
budgets = (
    st.just("auto") | st.integers(1, 100).map(lambda n: f"{n}%") | st.integers(1, 110)
)


@settings(max_examples=150, deadline=None)
@given(
    vram=budgets,
    ram=budgets,
    free_mib=st.integers(1000, 1400),
    staging=st.sampled_from([None, 0, 1, 2]),
)
def test_any_plan_of_two_tiers_keeps_its_budgets(
    layout: ExpertLayout,
    vram: str | int,
    ram: str | int,
    free_mib: int,
    staging: int | None,
) -> None:
    size, free = slot_bytes(layout, on_device=True), free_mib << 20
    of_vram, of_ram = (
        cache if isinstance(cache, str) else cache * size for cache in (vram, ram)
    )
    held, in_ram = (
        cache if isinstance(cache, int) else 96 if cache == "auto" else int(cache[:-1]) * 96 // 100
        for cache in (vram, ram)
    )  # fmt: skip
    try:
        p = plan(layout, of_vram, of_ram, staging=staging, vram_bytes=free)
    except BudgetError as error:
        said = str(error)
        assert held < 4 or in_ram < 1 or vram == "auto"
        assert re.search(
            "(vram|expert)_cache=.*give at least|limited by the device GPU0.*give vram_cache a size",
            said,
        )
        return
    assert (
        p.device == "GPU0"
        and 4 <= p.n_slots <= min(96, held)
        and p.resident == (p.n_slots == 96)
    )
    assert p.n_ram_slots == (0 if p.resident else min(96, in_ram))
    assert p.host_bytes == p.n_ram_slots * size + host_bytes(layout, p.n_ubatch)
    assert (
        p.total_bytes
        == p.budget_bytes
        + p.needs.dense_bytes
        + p.needs.kv_bytes
        + p.needs.compute_bytes
        + p.supply.staging_bytes
    )
    assert p.supply.staging_bytes == (
        staging_bytes(layout, p.supply.n_staging) if p.supply.n_staging else 0
    )
    assert (
        staging is not None or p.budget_bytes + p.supply.staging_bytes <= held * size
    ), "a budget holds staging tensors, too"
    assert not (p.resident and p.supply.n_staging) and p.supply.n_staging in (
        (0, 1, 2) if staging is None else (0, staging)
    )
    assert vram != "auto" or p.total_bytes <= free - VRAM_MARGIN_BYTES
    assert any("none is kept in RAM" in reason for reason in p.reasons) == p.resident
    told = f"computed on GPU0, with slots for {p.n_slots} of their 96 experts"
    assert p.resident or any(told in reason for reason in p.reasons)


def test_plan_stages_prompts_if_staging_takes_little_of_the_budget(
    layout: ExpertLayout,
) -> None:
    staged, small = plan(layout, "90%", "auto"), plan(layout, "9%", "auto")
    n_staged = math.ceil(staging_bytes(layout, 1) / slot_bytes(layout, on_device=True))
    assert (
        staged.n_slots,
        staged.supply.n_staging,
        staged.n_ubatch,
        staged.supply.streams,
    ) == (86 - n_staged, 1, 512, True)
    assert any(
        "staged in 1 tensor of a layer's experts" in reason for reason in staged.reasons
    )
    assert (
        small.n_slots,
        small.supply.n_staging,
        small.supply.staging_bytes,
        small.n_ubatch,
    ) == (8, 0, 0, 1)
    asked = plan(layout, "9%", "auto", staging=2)
    assert (asked.n_slots, asked.supply.n_staging, asked.n_ubatch) == (8, 2, 512)
    with pytest.raises(
        OptionError, match="staging must be a number of tensors from 0 to 2, but is 3"
    ):
        plan(layout, "90%", "auto", staging=3)


def test_plan_stages_small_budgets_if_a_request_costs_less(tmp_path: Path) -> None:
    layout = read_layout(
        moe(n_layer=12, n_expert=16, n_used=2).write(tmp_path / "m.gguf")
    )
    size, tensor_bytes = slot_bytes(layout, on_device=True), staging_bytes(layout, 1)
    n_staged = math.ceil(tensor_bytes / size)
    cycle, above = 24 + n_staged, plan(layout, (24 + n_staged) * size, "auto")
    # More than the share of a budget that two staging tensors may occupy.
    assert tensor_bytes > 0.25 * cycle * size
    assert (
        above.n_slots,
        above.supply.n_staging,
        above.n_ubatch,
        above.supply.slot_tokens,
    ) == (24, 1, 512, 1)
    below = plan(layout, (cycle - 1) * size, "auto")
    assert (below.n_slots, below.supply.n_staging, below.n_ubatch) == (cycle - 1, 0, 1)
    assert any(
        "read 1 token at a time instead of 512: experts in slots" in reason
        for reason in below.reasons
    )
    # No staging tensor fits alongside slots for the experts of one token.
    for n_slots in (2, 5, n_staged + 1):
        assert plan(layout, n_slots * size, "auto").n_ubatch == 1
    tiny = plan(layout, (n_staged + 2) * size, "auto")
    assert (tiny.n_slots, tiny.supply.n_staging, tiny.n_ubatch) == (2, 1, 512)


def test_plan_without_staging_limits_passes_to_the_devices_window(
    layout: ExpertLayout,
) -> None:
    cuda = Device("CUDA0", 0, 32 * GIB, 64 * GIB)
    for n_slots, n_ubatch in ((4, 1), (8, 2), (16, 4), (90, 4)):
        p = plan(
            layout,
            n_slots * slot_bytes(layout, on_device=True),
            "auto",
            staging=0,
            gpu=cuda,
        )
        assert (p.n_slots, p.n_ubatch, p.supply.slot_tokens) == (n_slots, n_ubatch, 4)
    assert plan(layout, "100%", "auto", staging=0).n_ubatch == 512


def test_plan_does_not_stage_if_the_tensors_do_not_fit(layout: ExpertLayout) -> None:
    enough = plan(layout, "90%", "auto", n_ubatch=512).total_bytes
    for n_bytes, n_staging in ((enough, 1), (enough - 1, 0)):
        assert (
            plan(
                layout, "90%", "auto", vram_bytes=n_bytes, n_ubatch=512
            ).supply.n_staging
            == n_staging
        )


def test_plan_keeps_a_ram_budget_above_the_free_memory_with_a_warning(
    layout: ExpertLayout,
) -> None:
    p = plan(
        layout,
        "50%",
        90 * slot_bytes(layout, on_device=True),
        Memory(GIB, 1 << 20, "the machine"),
    )
    assert p.n_ram_slots == 90
    assert any("of RAM are needed" in warning for warning in p.warnings)


def test_vram_budget_without_a_gpu_is_refused(layout: ExpertLayout) -> None:
    with pytest.raises(BudgetError, match=r"placement other than .*sees none"):
        find_gpus()
    with pytest.raises(BudgetError, match="sees none"):
        plan_here(layout, LoadSpec.of({"vram_cache": "auto"}))
    assert plan_here(layout, LoadSpec.of({"vram_cache": ""})).device is None
    with pytest.raises(BudgetError, match=r"^vram_cache is 'much'"):
        parse_expert_cache("much", "VRAM")
