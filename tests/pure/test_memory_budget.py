"""Tests which models are unloaded to make room for another, when a load has to wait,
and plans for less memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gguf_builder import U32, moe
from hypothesis import given
from hypothesis import strategies as st
from own_process import in_own_process

from moegguf.engine import load_spec
from moegguf.engine.cost import Speeds
from moegguf.engine.devices import find_gpus
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import Device, Memory
from moegguf.engine.memory import computes_embeddings
from moegguf.engine.plan import Plan, slot_bytes
from moegguf.engine.speeds import KnownSpeeds
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.models.sources import file_entry
from moegguf.native.slot_sizes import padded
from moegguf.quantities import Link, parse_expert_cache
from moegguf.serving import memory_budget
from moegguf.serving.memory_budget import (
    RAM,
    Admission,
    LoadConfig,
    MemoryUse,
    ModelSize,
    admit,
    expert_cache_within,
    measure,
)
from moegguf.serving.wire import build, encode
from moegguf.settings import Settings
from moegguf.testing.link_device import add_link_device

GIB = 1 << 30


def size(wanted: int, minimum: int) -> ModelSize:
    return ModelSize({RAM: wanted}, {RAM: minimum}, cast(Any, None), cast(Any, None))


def reserve(ram: int, **on_devices: int) -> Admission:
    return Admission({RAM: ram, **on_devices})


def used(name: str, ram: int, idle: bool, on_device: int = 0) -> MemoryUse:
    return MemoryUse(name, {RAM: ram, "GPU": on_device}, idle)


@pytest.mark.parametrize(
    ("wanted", "minimum", "models", "admission"),
    [
        (50, 10, [], reserve(50)), (200, 10, [], reserve(100)), (50, 10, [("a", 40, True)], reserve(50)),
        (80, 10, [("a", 40, True)], Admission(unload=("a",))),
        (80, 10, [("a", 40, True), ("b", 30, True)], Admission(unload=("a", "b"))),
        (60, 10, [("a", 40, True), ("b", 30, True)], Admission(unload=("a",))),
        (60, 10, [("a", 40, False), ("b", 30, True)], Admission(unload=("b",))),
        (80, 10, [("a", 40, False)], reserve(60)), (80, 70, [("a", 40, False)], Admission()),
        (80, 70, [("a", 40, False), ("b", 10, True)], Admission()),
        # Three at most.
        (5, 5, [("a", 1, True), ("b", 1, True), ("c", 1, True)], Admission(unload=("a",))),
        (5, 5, [("a", 1, False), ("b", 1, False), ("c", 1, False)], Admission()),
    ],
)  # fmt: skip
def test_admit_reserves_memory_or_unloads_idle_models(
    wanted: int, minimum: int, models: list[tuple[Any, ...]], admission: Admission
) -> None:
    assert (
        admit(size(wanted, minimum), {RAM: 100}, [used(*model) for model in models], 3)
        == admission
    )
    with pytest.raises(
        BudgetError, match=r"the model needs at least 2.00GiB.* 1.00GiB"
    ):
        admit(size(3 * GIB, 2 * GIB), {RAM: GIB}, [used(*model) for model in models], 3)


@pytest.mark.parametrize(
    ("wanted", "models", "admission"),
    [
        # Only the GPU's memory is short, so the model on the CPU stays loaded.
        (
            (10, 80),
            [("cpu", 40, True, 0), ("gpu", 5, True, 40)],
            Admission(unload=("gpu",)),
        ),
        (
            (80, 10),
            [("gpu", 5, True, 40), ("cpu", 40, True, 0)],
            Admission(unload=("gpu", "cpu")),
        ),
        ((10, 80), [("cpu", 40, True, 0), ("gpu", 5, False, 40)], reserve(10, GPU=60)),
        ((10, 80), [("cpu", 40, True, 0), ("gpu", 5, False, 95)], Admission()),
        ((10, 50), [("gpu", 5, False, 40)], reserve(10, GPU=50)),
    ],
)
def test_admit_unloads_models_for_the_memory_that_is_short(
    wanted: tuple[int, int],
    models: list[tuple[str, int, bool, int]],
    admission: Admission,
) -> None:
    on_device = replace(
        size(*wanted),
        wanted={RAM: wanted[0], "GPU": wanted[1]},
        minimum={RAM: 10, "GPU": 10},
    )
    uses = [used(*model) for model in models]
    assert admit(on_device, {RAM: 100, "GPU": 100}, uses) == admission
    with pytest.raises(BudgetError, match=r"at least .* on GPU"):
        admit(on_device, {RAM: 100, "GPU": 9}, uses)


@given(
    st.integers(1, 150), st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=6), st.integers(1, 7),
)  # fmt: skip
def test_admit_keeps_the_memory_and_model_limits(
    wanted: int, minimum: int, others: list[tuple[int, bool]], max_models: int
) -> None:
    wanted = max(wanted, minimum)
    models, n_used = list[MemoryUse](), 0
    for i, (n_bytes, idle) in enumerate(others):
        if n_used + n_bytes <= 100:
            models.append(used(str(i), n_bytes, idle))
            n_used += n_bytes
    admission = admit(size(wanted, minimum), {RAM: 100}, models, max_models)
    unloaded = [m for m in models if m.name in admission.unload]
    assert all(m.idle for m in unloaded)
    assert not (admission.reserve and admission.unload)
    if admission.reserve:
        assert (
            minimum <= admission.reserve[RAM] <= wanted
            and n_used + admission.reserve[RAM] <= 100
        )
        assert len(models) < max_models
    elif admission.unload:
        assert n_used - sum(m.used[RAM] for m in unloaded) + minimum <= 100
        assert len(models) - len(unloaded) < max_models
    else:
        busy = [m for m in models if not m.idle]
        assert sum(m.used[RAM] for m in busy) + minimum > 100 or len(busy) >= max_models


def test_memory_limit_is_the_setting_or_the_free_memory() -> None:
    free = [10 * GIB]

    def memory() -> Memory:
        return Memory(16 * GIB, free[0], "the machine")

    assert (
        memory_budget.MemoryLimits(Settings(memory_bytes=GIB), memory).of(RAM, 5 * GIB)
        == GIB
    )
    limit = memory_budget.MemoryLimits(Settings(), memory)
    at_start = limit.of(RAM, 0)
    assert at_start == 10 * GIB - GIB // 2
    free[0] = 7 * GIB
    assert limit.of(RAM, 4 * GIB) == at_start, "our models took it, not other programs"
    free[0] = 2 * GIB
    assert 5 * GIB < limit.of(RAM, 4 * GIB) < 6 * GIB, "other programs took the rest"
    free[0] = 0
    assert limit.of(RAM, 0) == 0


def test_plan_within_less_memory_chooses_batch_and_slots_together(path: Path) -> None:
    """Checks about 20 amounts of memory, starting at the minimum.

    Each has a plan that fits, and the worker receives this plan.
    """
    found = measure(
        file_entry(path, "path", "m"),
        {},
        Settings(loading={"placement": "cpu"}),
        memory_of(64 * GIB),
    )
    whole = found.plan_within(found.wanted)
    assert (
        whole.resident
        and whole.n_ubatch == 512
        and whole.total_bytes == found.wanted[RAM]
    )
    least, most = found.minimum[RAM], found.wanted[RAM]
    plans = [
        found.plan_within({RAM: n_bytes})
        for n_bytes in range(least, most, (most - least) // 20)
    ]
    for i, plan in enumerate(plans):
        assert plan.total_bytes <= least + i * ((most - least) // 20)
        assert found.load_config(plan).plan == plan
    assert plans[0].n_ubatch < plans[-1].n_ubatch


STOPS_ARE_SLOW = Speeds.supposed(448e9, Link(24e9, 1e-3), 2e8)
GPU = Device("GPU0", 0, 32 * GIB, 64 * GIB)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes loads assume that the machine has a GPU, with the speeds STOPS_ARE_SLOW
    instead of measured ones."""
    monkeypatch.setattr(load_spec, "has_gpu", lambda: True)
    monkeypatch.setattr(KnownSpeeds, "speeds_apart", lambda *_: STOPS_ARE_SLOW)


def memory_of(n_bytes: int) -> Memory:
    """Returns a Memory of n_bytes in total, all of it free."""
    return Memory(n_bytes, n_bytes, "a test", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a model with 6 layers of 16 experts each, top-4."""
    return moe(n_layer=6, n_expert=16, n_used=4).write(tmp_path / "m.gguf")


def measure_on_gpu(path: Path, **loading: Any) -> ModelSize:
    settings, memory = Settings(loading=loading), memory_of(16 * GIB)
    return measure(
        file_entry(path, "path", "m"), {"n_ctx": 512}, settings, memory, lambda: [GPU]
    )


def sent(found: ModelSize, plan: Plan) -> Plan | None:
    """Returns the plan as a worker receives it: encoded as JSON and decoded again."""
    return build(LoadConfig, json.loads(encode(vars(found.load_config(plan))))).plan


def test_plan_within_places_slots_on_a_device_and_the_worker_gets_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "slots")
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "75%")
    found = measure_on_gpu(
        moe(n_layer=12, n_expert=16, n_used=4).write(tmp_path / "m.gguf")
    )
    ram, vram = found.wanted[RAM], found.wanted["GPU0"]
    plan = found.plan_within(found.wanted)
    assert (plan.host_bytes, plan.total_bytes, plan.device) == (ram, vram, "GPU0")
    assert plan.supply.n_staging > 0 and sent(found, plan) == plan
    for n_bytes, on_device in (
        (ram, vram - 1),
        (ram - 1, vram),
        (found.minimum[RAM], found.minimum["GPU0"]),
    ):
        less = found.plan_within({RAM: n_bytes, "GPU0": on_device})
        assert (
            less.device == "GPU0"
            and less.host_bytes <= n_bytes
            and less.total_bytes <= on_device
        )
        assert less.budget_bytes + less.supply.staging_bytes <= 144 * plan.slot_bytes


@pytest.mark.parametrize("choice", ["layers", "auto"])
def test_plan_within_counts_whole_layers_on_their_device(
    path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setattr(KnownSpeeds, "speeds_apart", lambda *_: STOPS_ARE_SLOW)
    monkeypatch.setenv("MOEGGUF_PLACEMENT", choice)
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "50%")
    found = measure_on_gpu(path)
    plan = found.plan_within(found.wanted)
    assert plan.layers_on == "GPU0" and plan.placement is not None
    assert plan.placement.chosen.n_layers == 3 and plan.whole_layers == (3, 4, 5)
    assert (found.wanted[RAM], found.wanted["GPU0"]) == (
        plan.host_bytes,
        plan.total_bytes,
    )
    assert sent(found, plan) == plan
    fewer = found.plan_within({RAM: plan.host_bytes, "GPU0": found.minimum["GPU0"]})
    assert fewer.total_bytes <= found.minimum["GPU0"]
    # Slots stay on the device with "auto".
    assert (fewer.device is None) == (choice == "layers")


def test_model_fastest_on_the_cpu_takes_no_memory_of_a_device(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Speeds.supposed(1e6, Link(1e6), 38e9)
    monkeypatch.setattr(KnownSpeeds, "speeds_apart", lambda *_: slow)
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "auto")
    found = measure_on_gpu(path)
    plan = found.plan_within(found.wanted)
    assert list(found.wanted) == [RAM]
    assert not plan.on_device and plan.vram_cache_bytes == 0
    whole = measure_on_gpu(path, n_gpu_layers=-1)
    assert "GPU0" in whole.wanted, "as was asked for"


def test_n_gpu_layers_counts_a_part_of_the_layers_on_the_device(path: Path) -> None:
    half, most = (measure_on_gpu(path, n_gpu_layers=n) for n in (3, 5))
    assert 0 < half.wanted["GPU0"] < most.wanted["GPU0"]
    plan = half.plan_within(half.wanted)
    assert half.load_config(plan).spec.n_gpu_layers == 3
    assert plan.tensor_split and sent(half, plan) == plan


@pytest.mark.parametrize("loading", [{}, {"n_ctx": 4096}])
def test_default_context_is_the_context_of_a_load_that_sets_none(
    tmp_path: Path, loading: dict[str, Any]
) -> None:
    """The length is the solver's, or the server's own if there is one."""
    model = moe(n_layer=6, n_expert=16, n_used=4, skip_kv=("context_length",))
    model.add("qwen2moe.context_length", U32, 1 << 20)
    entry = file_entry(model.write(tmp_path / "m.gguf"), "path", "m")
    gpu, settings = replace(GPU, free_bytes=2 * GIB), Settings(loading=loading)
    for overrides in ({}, {"n_ctx": 512}):
        found = measure(entry, overrides, settings, memory_of(GIB), lambda: [gpu])
        assert found.default_n_ctx == loading.get("n_ctx", 32768)


def test_planned_budgets_count_the_slots_of_layers_on_the_cpu_for_ram(
    path: Path,
) -> None:
    found = measure_on_gpu(path, n_gpu_layers=4, vram_cache="25%", expert_cache="50%")
    plan = found.plan_within(found.wanted)
    (on_gpu, in_ram), size = plan.memories, plan.slot_bytes
    assert in_ram.n_slots > 0 and in_ram.n_below > 0
    budgets = plan.cache_bytes
    assert budgets["RAM"] == (in_ram.n_slots + in_ram.n_below) * size == 48 * size
    assert budgets["VRAM"] == on_gpu.n_slots * size + plan.staging_slots_bytes


def test_measure_rejects_a_placement_that_contradicts_n_gpu_layers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for placement, n in (("cpu", -1), ("layers", 3)):
        with pytest.raises(
            OptionError, match=f"placement '{placement}' .*n_gpu_layers (is )?{n}"
        ):
            measure_on_gpu(path, placement=placement, n_gpu_layers=n)
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "50%,25%")
    with pytest.raises(BudgetError, match="2 budgets for 1 devices"):
        measure_on_gpu(path)


@pytest.mark.parametrize(
    ("pooling_type", "embedding", "expected"),
    [
        (1, None, True),
        (0, None, False),
        (None, None, False),
        (1, False, False),
        (None, True, True),
    ],
)
def test_the_option_embedding_overrides_the_pooling_type(
    pooling_type: int | None, embedding: bool | None, expected: bool
) -> None:
    metadata = {} if pooling_type is None else {"bert.pooling_type": pooling_type}
    layout: Any = SimpleNamespace(arch="bert", metadata=metadata)
    assert computes_embeddings(layout, LoadSpec(embedding=embedding)) is expected


@pytest.mark.parametrize(
    ("budget", "n_bytes"),
    [("auto", 400), ("50%", 400), ("25%", 250), ("100%", 400), ("30 B", 30), ("4GiB", 400),
     # A budget of less than one slot is not rounded, so that a later error repeats the
     # user's value.
     ("7 B", 7), ("0.5%", 5)],
)  # fmt: skip
def test_expert_cache_within_rounds_to_whole_slots_of_the_loaded_model(
    budget: str, n_bytes: int
) -> None:
    assert expert_cache_within(parse_expert_cache(budget), 100, 10, 400) == n_bytes
    with pytest.raises(BudgetError, match="no experts"):
        expert_cache_within(parse_expert_cache("50%"), 0, 0, 0)


def test_parallel_sequences_share_a_kv_cache_of_kv_tokens(path: Path) -> None:
    entry = file_entry(path, "path", "m")

    def kv_tokens(limit_bytes: int, **settings: Any) -> tuple[int, int]:
        given = Settings(loading={"n_parallel": 8, "placement": "cpu", **settings})
        size = measure(entry, {"n_ctx": 4096}, given, memory_of(limit_bytes))
        plan = size.plan_within(size.wanted)
        assert plan.context.n_ctx == 4096
        return plan.context.kv_tokens, plan.needs.kv_bytes

    ample = kv_tokens(64 * GIB)
    with pytest.warns(
        UserWarning,
        match="kv_tokens=1 cannot hold one context of 4096 tokens, so 4096 are kept",
    ):
        one = kv_tokens(64 * GIB, kv_tokens=1)
    assert ample == (8 * 4096, 8 * one[1]) and one[0] == 4096, (
        "a context of one sequence fits always"
    )
    assert kv_tokens(64 * GIB, kv_tokens=10_000)[0] == 10_240
    assert kv_tokens(64 * GIB, kv_tokens=1 << 20)[0] == 8 * 4096, (
        "no more than all can use"
    )


def least_on_a_padding_device(path: Path) -> None:
    name = add_link_device(Link(1e9), memory_bytes=GIB, strict_seed=1)
    (gpu,) = find_gpus(name)
    layout = read_layout(path)
    slot = slot_bytes(padded(layout, [name]))
    assert slot > slot_bytes(layout)
    for placement in ("slots", "auto"):
        settings = Settings(
            loading={"n_ctx": 512, "placement": placement, "vram_cache": "50%"}
        )
        found = measure(
            file_entry(path, "path", "a"), {}, settings, memory_of(GIB), lambda: [gpu]
        )
        least = found.plan_within(found.minimum)
        assert (
            least.device == name
            and least.slot_bytes == slot
            and least.device_slots >= layout.n_expert_used
        )


@pytest.mark.parametrize("preset", ["tiny-mix", "tiny-qwen2moe"])
def test_minimum_of_a_device_counts_its_padded_slots(
    preset: str, tiny: Callable[..., Path]
) -> None:
    in_own_process(least_on_a_padding_device, tiny(preset, "q4_k_m"))
