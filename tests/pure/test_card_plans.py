"""Plans of two well-known models, of which only the headers are here, for cards with 8 and 16 GB."""

from collections.abc import Callable
from typing import Any

import pytest

from moegguf.engine.cost import HitRates, Speeds
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import Device, Machine, Memory
from moegguf.engine.plan import Plan
from moegguf.engine.solver import make_plan
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.quantities import GIB, MIB, Link
from tools.models import PRESETS, write_sparse_model

GB = 10**9
CONTEXT_BYTES = 400 * MIB  # that a driver keeps for this process on a card that nothing else uses
RAM = Memory(128 * GIB, 120 * GIB, "the machine")

Layouts = Callable[[str], ExpertLayout]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    folder, known = tmp_path_factory.mktemp("sparse"), dict[str, ExpertLayout]()

    def layout(name: str) -> ExpertLayout:
        if name not in known:
            known[name] = read_layout(write_sparse_model(folder / f"{name}.gguf", PRESETS[name], "q4_k_m"))
        return known[name]

    return layout


def card(n_bytes: int, used_bytes: int = CONTEXT_BYTES) -> Device:
    """A card with so much free memory."""
    return Device("CUDA0", 0, n_bytes, n_bytes + used_bytes)


def speeds(cpu_bytes_per_s: float) -> Speeds:
    """Speeds of a fast card behind PCIe 5."""
    return Speeds(1.2e12, Link(50e9, 10e-6), cpu_bytes_per_s, device_node_s=2e-6, source="supposed")


def plan(layout: ExpertLayout, device: Device, cpu_bytes_per_s: float = 45e9, **options: Any) -> Plan:
    spec = LoadSpec(**{"n_ctx": 2048, **options})
    there = Machine(RAM, devices=(device,))
    return make_plan(layout, there, spec, speeds(cpu_bytes_per_s), HitRates(layout).curve())


@pytest.mark.parametrize(
    ("name", "n_bytes", "share"),
    [("qwen1.5-moe-a2.7b", 8 * GB, 0.55), ("qwen3-30b-a3b", 8 * GB, 0.28), ("qwen3-30b-a3b", 16 * GB, 0.70)],
)
def test_a_card_that_nothing_else_uses_has_slots_for_so_many_experts(
    layouts: Layouts, name: str, n_bytes: int, share: float
) -> None:
    layout = layouts(name)
    found = plan(layout, card(n_bytes), placement="slots")
    assert found.n_slots >= share * layout.n_expert_total
    assert found.total_bytes <= n_bytes - 384 * MIB


def test_embeddings_and_bytes_of_the_host_are_planned_in_ram_alone(layouts: Layouts) -> None:
    layout = layouts("qwen3-30b-a3b")
    on_card, on_cpu = plan(layout, card(8 * GB), placement="slots"), plan(layout, card(8 * GB), placement="cpu")
    assert on_cpu.needs.dense_bytes - on_card.needs.dense_bytes == layout.embedding_bytes > 0
    assert on_card.host_bytes > layout.embedding_bytes + on_card.n_ram_slots * on_card.slot_bytes


def test_what_others_use_of_a_card_makes_the_margin_larger_and_only_a_small_one_is_warmed_up(layouts: Layouts) -> None:
    layout = layouts("qwen3-30b-a3b")
    for used_bytes, margin in ((CONTEXT_BYTES, 384 * MIB), (GIB, GIB), (0, GIB)):  # 0: the driver does not know
        device = card(8 * GB, used_bytes)
        found = plan(layout, device, placement="slots")
        assert device.margin == margin
        assert 0 <= found.available_bytes - found.total_bytes - margin < found.slot_bytes
        assert found.warms_up == (margin < GIB)
