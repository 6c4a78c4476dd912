"""Tests plans: slot sizes computed by hand, minimum and maximum budgets, free memory,
and the reasons in a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_builder as build
import pytest
from gguf_builder import Q4_K_T, Q6_K_T, U32, moe
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moegguf.controller.hit_rates import (
    PUBLISHED,
    Measured,
    interpolate,
    typical_hit_rate,
)
from moegguf.engine.cost import (
    HitRates,
    ModelBytes,
    Speeds,
    prompt_tokens_per_s,
    request_cost,
    touched_bytes,
)
from moegguf.engine.load_spec import Budgets, LoadSpec
from moegguf.engine.machine import MARGIN_BYTES, Machine, Memory, margin_bytes
from moegguf.engine.memory import (
    Sizes,
    choose_context,
    kv_bytes,
    logits_tokens,
    pass_bytes,
    slot_work_bytes,
)
from moegguf.engine.plan import Plan, slot_bytes
from moegguf.engine.recurrent import recurrent_layers, row_bytes, state_bytes
from moegguf.engine.solver import best_fit, make_plan
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.native.slot_sizes import slot_sizes
from moegguf.native.store import StoreOptions
from moegguf.quantities import ExpertCache, format_bytes, parse_expert_cache, parse_size

MIB, GIB = 1 << 20, 1 << 30
PLENTY = Memory(64 * GIB, 60 * GIB, "the machine")


def layout_of(folder: Path, **kwargs: Any) -> ExpertLayout:
    return read_layout(moe(**kwargs).write(folder / "m.gguf"))


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ExpertLayout:
    """The layout of a model of 6 layers with 16 experts each, 96 in total. A token uses
    4 experts of each layer, 24 in total."""
    return layout_of(tmp_path_factory.mktemp("plan"), n_layer=6, n_expert=16, n_used=4)


def plan(
    layout: ExpertLayout,
    budget: str | int | ExpertCache,
    memory: Memory = PLENTY,
    streams: bool = True,
    **sizes: Any,
) -> Plan:
    store = StoreOptions(overlap=streams)
    spec = LoadSpec(
        **{"n_ctx": 4096, "n_batch": 4096, **sizes},
        budgets=Budgets(parse_expert_cache(budget)),
        store=store,
    )
    return make_plan(layout, Machine(memory), spec)


def test_slot_strides_are_whole_blocks_of_every_type(tmp_path: Path) -> None:
    mixed = moe(n_embd=256, n_ff=512, types=(Q4_K_T, Q4_K_T, Q6_K_T))
    mixed.tensors = [
        build.Tensor(t.name, t.shape, Q4_K_T)
        if t.name == "blk.1.ffn_down_exps.weight"
        else t
        for t in mixed.tensors
    ]
    layout = read_layout(mixed.write(tmp_path / "m.gguf"))
    strides = slot_sizes(layout).stride_bytes
    q4, q6 = 256 * 512 // 256 * 144, 256 * 512 // 256 * 210
    assert strides["gate"] == strides["up"] == -(-q4 // 576) * 576  # lcm(64, 144)
    assert strides["down"] == -(-q6 // 20160) * 20160  # lcm(64, 144, 210)
    assert slot_bytes(layout) == sum(strides.values())
    for matrix in layout.matrices:
        assert strides[matrix.kind] >= matrix.expert_bytes


def test_plan_with_enough_memory_gives_every_expert_a_slot(
    layout: ExpertLayout,
) -> None:
    for budget in ("auto", "100%", "1GiB"):
        p = plan(layout, budget)
        assert p.n_slots == 96 and p.resident and p.n_ubatch == 512 and not p.warnings
        assert p.budget_bytes == 96 * p.slot_bytes
        assert (
            p.total_bytes
            == p.budget_bytes
            + p.needs.dense_bytes
            + p.needs.kv_bytes
            + p.needs.compute_bytes
        )
    made = plan(layout, "auto")
    beside = made.total_bytes - made.budget_bytes
    assert (
        made.needs.compute_bytes
        > Sizes(made.context.n_ctx).needs(layout, made.n_ubatch).compute_bytes
    ), "slots have work memory"
    assert f"{format_bytes(beside)} go to weights" in made.reasons[0]


@pytest.mark.parametrize(
    ("slots", "n_ubatch"), [(4, 1), (7, 1), (8, 2), (15, 3), (16, 512), (17, 512)]
)
def test_plan_without_streaming_limits_n_ubatch_to_the_slots(
    layout: ExpertLayout, slots: int, n_ubatch: int
) -> None:
    p = plan(layout, slots * slot_bytes(layout), streams=False)
    assert p.n_ubatch == n_ubatch and not p.supply.streams
    assert any("at a time instead of 512" in reason for reason in p.reasons) == (
        n_ubatch < 512
    )
    assert plan(
        layout, slots * slot_bytes(layout), n_ubatch=2, streams=False
    ).n_ubatch == min(n_ubatch, 2)


def long_context(layout: ExpertLayout, budget: str = "25%", **options: Any) -> Plan:
    """Returns a plan for a context of 8,192 tokens, with attention that may be fused.
    `options` override these settings."""
    return plan(
        layout,
        budget,
        **{"n_ctx": 8192, "n_batch": None, "flash_attn": None, **options},
    )


def test_plan_uses_longer_passes_if_experts_have_no_slot(layout: ExpertLayout) -> None:
    p = long_context(layout)
    assert 512 < p.n_ubatch <= 4096 and p.context.n_batch == p.n_ubatch
    assert any(
        f"{p.n_ubatch} tokens at a time instead of 512: a long prompt" in reason
        for reason in p.reasons
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"budget": "100%"}, "every expert has a slot"),
        # The size of the attention scores grows with the pass if flash attention is
        # off.
        ({"flash_attn": False}, "attention is not fused"),
        ({"n_batch": 512}, "neither the context nor a batch"),
        ({"n_ubatch": 512}, "as given"),
        ({"n_ctx": 512}, "neither the context nor a batch"),
    ],
    ids=str,
)
def test_plan_keeps_512_tokens_per_pass_and_states_the_reason(
    layout: ExpertLayout, options: dict[str, Any], why: str
) -> None:
    p = long_context(layout, **options)
    assert p.n_ubatch == 512 and not any("instead of" in reason for reason in p.reasons)
    (reason,) = [
        reason
        for reason in p.reasons
        if reason.startswith("a prompt is read 512 tokens at a time: ")
    ]
    assert why in reason


@pytest.mark.parametrize("flash_attn", [None, True])
def test_plan_counts_attention_scores_of_grok_for_any_flash_attn(
    layout: ExpertLayout, flash_attn: bool | None
) -> None:
    grok = replace(layout, arch="grok")
    separate = Sizes(8192, spec=LoadSpec(flash_attn=False)).needs(grok, 512)
    assert (
        Sizes(8192, spec=LoadSpec(flash_attn=flash_attn)).needs(grok, 512) == separate
    )
    assert (
        separate.compute_bytes
        > Sizes(8192, spec=LoadSpec(flash_attn=True)).needs(layout, 512).compute_bytes
    )


def test_plan_uses_no_longer_pass_that_exceeds_the_memory_margin(
    layout: ExpertLayout,
) -> None:
    needs = Sizes(8192, spec=LoadSpec(flash_attn=True)).needs(layout, 512, 48)
    free = needs.total_bytes + 48 * slot_bytes(layout)
    p = long_context(layout, memory=Memory(64 * GIB, free, "x"))
    assert p.n_ubatch == 512
    assert any(
        "a longer one does not fit into the free memory" in reason
        for reason in p.reasons
    )


def test_plan_counts_logits_for_64_tokens_or_for_all_of_a_pass(
    layout: ExpertLayout,
) -> None:
    large = replace(layout, n_vocab=262_144)
    few, every = (
        Sizes(512).needs(large, 512),
        Sizes(512, spec=LoadSpec(logits_all=True)).needs(large, 512),
    )
    assert every.compute_bytes - few.compute_bytes == 4 * large.n_vocab * (512 - 64)
    assert logits_tokens(large, 1) == 64
    assert logits_tokens(large, 100) == 100
    assert 4 * large.n_vocab * logits_tokens(large, 1) == 64 << 20


def test_plan_of_a_dense_model_has_no_slots(tmp_path: Path) -> None:
    g = moe("llama", skip_kv=("expert_count", "expert_used_count"))
    g.tensors = [t for t in g.tensors if "exps" not in str(t.name)]
    p = plan(read_layout(g.write(tmp_path / "m.gguf")), "auto", Memory(GIB, 0, "x"))
    assert (
        p.n_slots == p.budget_bytes == p.slot_bytes == 0
        and p.resident
        and p.n_ubatch == 512
    )
    assert "plain llama.cpp" in p.reasons[0]


@settings(max_examples=200, deadline=None)
# 3 experts, one fewer than a token needs in a layer.
@example(mode="fraction", n_bytes=1, percent=4, free=1 << 33, n_ubatch=512)
@given(
    mode=st.sampled_from(["auto", "bytes", "fraction"]), n_bytes=st.integers(1, 1 << 22), percent=st.integers(1, 100),
    free=st.one_of(st.integers(0, 1 << 33), st.integers(1 << 26, 1 << 29)), n_ubatch=st.integers(1, 4096),
)  # fmt: skip
def test_any_plan_keeps_its_budget_and_minimum(
    layout: ExpertLayout,
    mode: Any,
    n_bytes: int,
    percent: int,
    free: int,
    n_ubatch: int,
) -> None:
    size = slot_bytes(layout)
    cache = ExpertCache(
        mode, fraction=percent / 100, n_bytes=n_bytes if mode == "bytes" else 0
    )
    held = {"bytes": n_bytes // size, "fraction": percent * 96 // 100}.get(mode)
    try:
        p = plan(
            layout, cache, Memory(64 * GIB, free, "cgroup v2 /x"), n_ubatch=n_ubatch
        )
    except BudgetError as error:
        said = str(error)
        least = said.rsplit("at least ", 1)[1].split(" for experts")[0].strip("'.")
        assert 4 * size <= parse_size(least) + 1, (
            "the minimum are a layer's experts of one token"
        )
        if held is not None:
            assert (
                held < 4
                and f"expert_cache='{cache}'" in said
                and format_bytes(4 * size) in said
            )
            assert plan(layout, parse_size(least)).n_slots >= 4
        else:
            assert "limited by cgroup v2 /x" in said
        return
    assert 4 <= p.n_slots <= 96 and 1 <= p.n_ubatch <= n_ubatch and p.supply.streams
    assert p.resident == (p.n_slots == 96) and p.budget_bytes == p.n_slots * size
    assert (
        p.total_bytes
        == p.budget_bytes
        + p.needs.dense_bytes
        + p.needs.kv_bytes
        + p.needs.compute_bytes
    )
    for words, expected in (
        ("cgroup v2 /x", p.total_bytes > free),
        ("below one token's", p.n_slots < 24),
    ):
        assert sum(words in text for text in p.warnings) == expected
    if held is not None:
        assert p.n_slots == min(96, held)
        return
    left = free - margin_bytes(free) - p.total_bytes
    assert left >= 0 and any("cgroup v2 /x" in reason for reason in p.reasons)
    if p.n_slots < 96 and p.n_ubatch == n_ubatch:
        assert left < size + slot_work_bytes(layout, n_ubatch), (
            "no memory is left unused"
        )


def test_kv_bytes_equals_sizes_computed_by_hand(tmp_path: Path) -> None:
    plain = layout_of(tmp_path, n_layer=2, n_embd=64, n_head=4)
    assert kv_bytes(plain, 256) == 256 * 2 * (64 + 64) * 2
    assert kv_bytes(plain, 257) == 512 * 2 * (64 + 64) * 2
    assert kv_bytes(plain, 256, type_k=8, type_v=8) == 256 * 2 * (34 * 2 + 34 * 2)
    uneven = moe(n_layer=2, skip_kv=("attention.head_count_kv",))
    uneven.add_array("qwen2moe.attention.head_count_kv", U32, [2, 1]).add(
        "qwen2moe.attention.key_length", U32, 32
    )
    # The V rows of all layers are as wide as the widest one.
    assert kv_bytes(read_layout(uneven.write(tmp_path / "m.gguf")), 256) == 256 * 2 * (
        32 * 2 + 32 * 1 + 2 * 16 * 2
    )
    latent = moe("deepseek2", n_layer=2, skip_kv=("attention.head_count_kv",))
    lengths = {
        "key_length": 40,
        "key_length_mla": 24,
        "value_length_mla": 16,
        "kv_lora_rank": 32,
        "head_count_kv": 1,
    }
    for key, value in lengths.items():
        latent.add(f"deepseek2.attention.{key}", U32, value)
    latent.add("deepseek2.rope.dimension_count", U32, 8)
    assert (
        kv_bytes(read_layout(latent.write(tmp_path / "m.gguf")), 256)
        == 256 * 2 * 40 * 2
    )


def test_kv_bytes_counts_states_and_snapshots_of_recurrent_layers(
    tmp_path: Path,
) -> None:
    g = moe("qwen35moe", n_layer=4)
    for key, value in {
        "inner_size": 128,
        "state_size": 16,
        "conv_kernel": 4,
        "group_count": 1,
    }.items():
        g.add(f"qwen35moe.ssm.{key}", U32, value)
    layout = read_layout(g.write(tmp_path / "m.gguf"))
    state = 3 * 4 * (128 * 16 + 3 * (128 + 2 * 16))
    one_layer = kv_bytes(layout_of(tmp_path, n_layer=2), 256) // 2
    assert state_bytes(layout) == state and recurrent_layers(layout) == {0, 1, 2}
    assert kv_bytes(layout, 256) == one_layer + state
    assert kv_bytes(layout, 256, n_seq_max=3, n_rs_seq=4) == one_layer + 3 * 5 * state


@pytest.mark.parametrize(
    ("free", "n_seq_max", "draft", "n_rs_seq"),
    [
        ("1GiB", 1, "ngram", 8),
        ("1GiB", 1, "off", 0),
        ("1MiB", 1, "ngram", 4),
        ("1MiB", 8, "ngram", 0),
    ],
)
def test_choose_context_plans_snapshots_for_drafts_if_memory_allows(
    tmp_path: Path, free: str, n_seq_max: int, draft: str, n_rs_seq: int
) -> None:
    g = (
        moe("qwen35moe", n_layer=4)
        .add("qwen35moe.ssm.inner_size", U32, 64)
        .add("qwen35moe.ssm.state_size", U32, 16)
    )
    layout = read_layout(g.write(tmp_path / "m.gguf"))
    assert state_bytes(layout) == 12 << 10
    spec = LoadSpec(n_ctx=256, n_seq_max=n_seq_max, draft=draft)
    sizes = choose_context(layout, Sizes.of(layout, spec), parse_size(free))
    assert (sizes.n_rs_seq, sizes.n_seq_max) == (n_rs_seq, n_seq_max)
    expected = (
        f"a draft has at most {n_rs_seq} tokens" if n_rs_seq else "nothing is drafted"
    )
    assert any(expected in reason for reason in sizes.reasons) == (draft != "off")


@pytest.mark.parametrize(
    ("free", "n_seq_max", "draft", "n_checkpoints"),
    [("1GiB", 1, "ngram", 1), ("1GiB", 1, "off", 0), ("1MiB", 1, "ngram", 1), ("1MiB", 8, "ngram", 0),
     ("1TiB", 129, "ngram", 0)],
)  # fmt: skip
def test_choose_context_plans_a_checkpoint_where_states_have_no_snapshots(
    tmp_path: Path, free: str, n_seq_max: int, draft: str, n_checkpoints: int
) -> None:
    g = (
        moe("qwen3next", n_layer=4)
        .add("qwen3next.ssm.inner_size", U32, 64)
        .add("qwen3next.ssm.state_size", U32, 16)
    )
    layout = read_layout(g.write(tmp_path / "m.gguf"))
    spec = LoadSpec(n_ctx=256, n_seq_max=n_seq_max, draft=draft)
    sizes = choose_context(layout, Sizes.of(layout, spec), parse_size(free))
    assert (sizes.n_rs_seq, sizes.n_checkpoints) == (0, n_checkpoints)
    expected = "returns to a saved state" if n_checkpoints else "nothing is drafted"
    assert any(expected in reason for reason in sizes.reasons) == (draft != "off")


def test_pass_bytes_grow_with_batch_and_context_and_cost_falls_with_slots(
    layout: ExpertLayout,
) -> None:
    assert (
        pass_bytes(layout, 4096, 512)
        > pass_bytes(layout, 4096, 64)
        > pass_bytes(layout, 512, 64)
    )
    assert pass_bytes(layout, 1 << 16, 512, flash_attn=True) < pass_bytes(
        layout, 1 << 16, 512
    )
    assert pass_bytes(layout, 256, 512) >= 512 * layout.n_vocab * 4
    assert row_bytes(2, 33) == 36
    assert request_cost(layout, 60, 64) < request_cost(layout, 40, 64)
    assert request_cost(layout, 40, 256) < request_cost(layout, 40, 32)
    assert best_fit(layout, [(40, 64), (41, 63)]) == (40, 64), (
        "about equal: the larger pass"
    )


def test_plan_chooses_batch_and_slots_together(layout: ExpertLayout) -> None:
    """Buffers for 512 tokens leave too little room for a layer's experts. A smaller
    pass leaves enough room."""
    size = slot_bytes(layout)
    large = Sizes(4096).needs(layout, 512)
    # Only 5 slots fit alongside the buffers of passes of 512 tokens.
    free = large.total_bytes + MARGIN_BYTES + 5 * size
    p = plan(layout, "auto", Memory(64 * GIB, free, "x"))
    small = Sizes(4096).needs(layout, 64, p.n_slots)
    assert small.total_bytes + p.budget_bytes <= free - MARGIN_BYTES
    assert p.n_slots == layout.n_expert_total and 64 <= p.n_ubatch < 512
    (reason,) = [reason for reason in p.reasons if "at a time instead of 512" in reason]
    assert "more memory for experts" in reason
    assert free - MARGIN_BYTES - p.total_bytes < size + (p.n_ubatch * 1024**2), (
        "no memory is left unused"
    )
    free = Sizes(4096).needs(layout, 512).total_bytes + MARGIN_BYTES - MIB
    assert plan(layout, "auto", Memory(64 * GIB, free, "x")).n_ubatch < 512


def test_plan_counts_the_row_lists_of_each_slot(layout: ExpertLayout) -> None:
    size, n_ubatch = slot_bytes(layout) + slot_work_bytes(layout, 4096), 4096
    needs = Sizes(4096).needs(layout, n_ubatch)
    for n_slots in (40, 90):
        free = needs.total_bytes + MARGIN_BYTES + n_slots * size
        p = plan(layout, "auto", Memory(64 * GIB, free, "x"), n_ubatch=n_ubatch)
        assert p.n_slots == n_slots


def test_plan_keeps_a_given_n_ubatch_and_fits_the_pass_to_a_given_budget(
    layout: ExpertLayout,
) -> None:
    size, needs = slot_bytes(layout), Sizes(4096).needs(layout, 256)
    memory = Memory(
        64 * GIB,
        needs.total_bytes + MARGIN_BYTES + 20 * (size + slot_work_bytes(layout, 256)),
        "x",
    )
    assert plan(layout, "auto", memory, n_ubatch=256).n_ubatch == 256
    assert (
        plan(layout, "auto", memory).n_slots
        > plan(layout, "auto", memory, n_ubatch=256).n_slots
    )
    for budget in ("30%", "100%"):
        assert (
            plan(layout, budget, Memory(64 * GIB, MIB, "x"), n_ubatch=256).n_ubatch
            == 256
        )
    free = Sizes(4096).needs(layout, 128, 48).total_bytes + 48 * slot_bytes(layout)
    p = plan(layout, "50%", Memory(64 * GIB, free, "x"))
    assert (
        p.n_ubatch == 128 and not p.warnings and "would not fit" in " ".join(p.reasons)
    )


def trained_on(layout: ExpertLayout, n_ctx: int) -> ExpertLayout:
    return replace(layout, hparams=replace(layout.hparams, n_ctx_train=n_ctx))


def test_auto_context_is_the_largest_in_a_tenth_of_the_free_memory(
    layout: ExpertLayout,
) -> None:
    long = trained_on(layout, 131072)
    chosen = {
        free: plan(long, "auto", Memory(64 * GIB, free, "x"), n_ctx=None)
        for free in (GIB, 4 * GIB, 60 * GIB)
    }
    sizes = [p.context.n_ctx for p in chosen.values()]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] == 131072
    for free, p in chosen.items():
        assert p.total_bytes + MARGIN_BYTES <= free
        assert any("--ctx" in reason for reason in p.reasons) == (
            p.context.n_ctx < 131072
        )
    assert plan(trained_on(layout, 700), "auto", n_ctx=None).context.n_ctx == 768
    assert plan(long, "auto", n_ctx=0).context.n_ctx == 131072
    assert plan(long, "auto", n_ctx=300).context.n_ctx == 512


def test_auto_context_takes_at_most_a_quarter_of_a_given_budget(
    layout: ExpertLayout,
) -> None:
    long = trained_on(layout, 131072)
    for budget in (16 * slot_bytes(long), 64 * slot_bytes(long)):
        p = plan(long, f"{budget}", n_ctx=None)
        assert p.needs.kv_bytes <= budget // 4 or p.context.n_ctx == 4096
        assert p.context.n_ctx < plan(long, "auto", n_ctx=None).context.n_ctx


def test_auto_context_leaves_room_for_a_given_budget_and_for_experts(
    layout: ExpertLayout,
) -> None:
    long = trained_on(layout, 131072)
    free = (
        Sizes(1024).needs(long, 1, 96).total_bytes
        + 96 * slot_bytes(long)
        + MARGIN_BYTES
    )
    p = plan(long, "100%", Memory(64 * GIB, free, "x"), n_ctx=None)
    assert p.context.n_ctx <= 1024 and not p.warnings
    free = Sizes(512).needs(long, 8).total_bytes + MARGIN_BYTES + 30 * slot_bytes(long)
    p = plan(long, "auto", Memory(64 * GIB, free, "x"), n_ctx=None)
    assert 512 <= p.context.n_ctx < 4096 and p.n_slots >= layout.n_expert


def test_range_at_returns_published_rates_or_measured_ones_below_belady(
    layout: ExpertLayout,
) -> None:
    known = HitRates(layout)
    ranges = [known.range_at(n) for n in range(24, 97)]
    for n, found in zip(range(24, 96), ranges, strict=False):
        curves = [interpolate(curve.rates, n / 96) for curve in PUBLISHED]
        assert (found.low, found.high) == (min(curves), max(curves))
    assert [r.low for r in ranges] == sorted(r.low for r in ranges)
    assert known.range_at(23).low == 0 and known.range_at(96).low == 1
    half = known.range_at(48)
    assert (
        "not measured on this model" in half.basis
        and "other shapes: OLMoE (reported by JustVugg/colibri)" in half.basis
    )
    assert half.low < typical_hit_rate(layout, 48) < half.high
    measured = Measured(
        "ab",
        {"lru": {0.5: 0.6}},
        about={"ranges": 69},
        ranges={"lru": {0.5: (0.55, 0.8)}},
        bound={0.5: 0.75},
    )
    found = HitRates(layout, measured).range_at(48)
    assert (found.low, found.high) == (0.55, 0.75) and "69 requests" in found.basis
    assert (
        "not measured"
        in HitRates(layout, replace(measured, ranges={})).range_at(48).basis
    )


def test_expect_prefers_rates_published_for_the_models_shape(tmp_path: Path) -> None:
    found = HitRates(layout_of(tmp_path, n_layer=2, n_expert=128, n_used=8)).expect(64)
    assert "of its shape: Qwen3-30B-A3B (reported by kekzl/imp)" in found.basis
    curve = next(curve for curve in PUBLISHED if curve.n_expert == 128)
    assert found.hit_low == found.hit_high == interpolate(curve.rates, 0.25)


def test_prompt_speed_is_limited_by_reading_or_computing(layout: ExpertLayout) -> None:
    def speed(
        disk_bytes_per_s: float, read: float, n_ubatch: int = 512, n_prompt: int = 512
    ) -> float:
        model, speeds = ModelBytes.of(layout), Speeds.of_cpu(10e9, disk_bytes_per_s)
        return prompt_tokens_per_s(
            layout, model, speeds, n_ubatch, 1.0, True, read=read, n_prompt=n_prompt
        )

    assert speed(1e15, read=1.0) == speed(1e3, read=0.0)
    assert speed(1e3, read=0.5) == pytest.approx(
        512 / (0.5 * touched_bytes(layout, 512) / 1e3)
    )
    assert speed(1e3, 0.5, n_ubatch=2048, n_prompt=4096) > 3.9 * speed(
        1e3, 0.5, n_ubatch=512, n_prompt=4096
    )


def test_expect_returns_missed_bytes_and_a_range_of_speeds(
    layout: ExpertLayout,
) -> None:
    e = HitRates(layout).expect(48, Speeds.of_cpu(10e9, 1e9))
    assert (
        e.missed_bytes_high
        == round(layout.token_cycle_bytes * (1 - e.hit_low))
        >= e.missed_bytes_low
    )
    assert e.tokens_per_s_low is not None and e.tokens_per_s_high is not None
    assert 0 < e.tokens_per_s_low < e.tokens_per_s_high
    faster = HitRates(layout).expect(48, Speeds.of_cpu(10e9, 2e9)).tokens_per_s_high
    assert faster is not None and faster > e.tokens_per_s_high
    assert e.reads_tokens_per_s == 1e9 / e.missed_bytes_low
    assert e.computing_tokens_per_s is not None
    bound = min(e.reads_tokens_per_s, e.computing_tokens_per_s)
    assert e.tokens_per_s_high < bound
    assert HitRates(layout).expect(48).tokens_per_s_low is None
    whole = HitRates(layout).expect(96, Speeds.of_cpu(10e9, 1e9))
    assert whole.reads_tokens_per_s is None
    assert whole.computing_tokens_per_s == whole.tokens_per_s_high
    assert (whole.hit_low, whole.missed_bytes_high) == (
        1.0,
        0,
    ) and whole.tokens_per_s_low


def test_expect_uses_a_hit_rate_that_answers_reached_with_about_these_slots(
    layout: ExpertLayout,
) -> None:
    known, plain = HitRates(layout, of_answers={0.5: 0.43, 0.98: 0.9}), HitRates(layout)
    for n_slots in (46, 48, 50):
        found = known.expect(n_slots)
        assert found.hit_low == found.hit_high == known.curve().at(n_slots / 96)
        assert found.missed_bytes_low == round(
            layout.token_cycle_bytes * (1 - found.hit_low)
        )
        assert found.basis == "reached by answers of this model on this machine"
    assert known.expect(48).hit_low == 0.43
    for n_slots in (30, 60, 96):
        assert known.expect(n_slots) == plain.expect(n_slots)


@given(
    free_mib=st.integers(1, 1 << 14),
    n_ctx=st.sampled_from([256, 1024, 8192]),
    n_seq=st.integers(1, 64),
)
@settings(max_examples=50)
def test_choose_context_divides_kv_tokens_among_sequences(
    layout: ExpertLayout, free_mib: int, n_ctx: int, n_seq: int
) -> None:
    def chosen(mib: int) -> int:
        return (
            choose_context(layout, Sizes(n_ctx, n_seq_max=n_seq), mib * MIB).kv_tokens
            or 0
        )

    n_tokens = chosen(free_mib)
    assert n_ctx <= n_tokens <= n_ctx * n_seq and n_tokens % 256 == 0
    assert n_tokens <= chosen(2 * free_mib), "more memory, no fewer tokens"
    assert chosen(1 << 20) == n_ctx * n_seq
    if n_tokens > max(n_ctx, 4096):
        assert kv_bytes(layout, n_tokens) <= free_mib * MIB // 4
