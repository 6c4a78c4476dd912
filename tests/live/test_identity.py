"""Tests that logits do not depend on pool size, reader threads, split files, repacking,
switches, scores or prefetches.

Also tests adapters, concurrent models, and the order in which shared and routed experts
are computed.
"""

import ctypes as c
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import (
    N_PROMPT,
    Load,
    Meddler,
    Reference,
    TinyModel,
    greedy_logits,
    share_for,
    write_adapter,
)

from moegguf.engine.llama import Llama
from moegguf.gguf.experts import read_layout
from moegguf.native import library
from moegguf.native.store import StoreContext, StoreOptions

MODELS = [
    ("tiny-qwen2moe", "q4_0"), ("tiny-qwen2moe", "q8_0"), ("tiny-qwen3moe", "q8_0"), ("tiny-mixtral", "q4_k_m"),
    ("tiny-deepseek2", "q4_0"), ("tiny-deepseek2", "q4_k_m"), ("tiny-mix", "q4_k_m"),
    ("tiny-gemma4", "q4_0"),
]  # fmt: skip
TWO_MODELS = [("tiny-qwen2moe", "q4_0"), ("tiny-mix", "q4_k_m")]
SIZES = ("minimum", "one layer", "40%", "all")
READERS = [(1, 1), (2, 3), (4, 1)]  # (reader threads, files of the split)
ALL_OFF = {
    "chunked": False,
    "preempt": False,
    "overlap": False,
    "sweep": False,
    "direct": False,
}
# Only some combinations of these values run here. tests/native/test_store_model.py
# combines switches, reader threads and pool sizes.
POOLS = [
    (model, size, (m + s) % 2 == 0)
    for m, model in enumerate(MODELS)
    for s, size in enumerate(SIZES)
]
WAYS = [
    (model, *READERS[(m + n) % len(READERS)], switches)
    for m, model in enumerate(TWO_MODELS)
    for n, switches in enumerate([{}, *({name: False} for name in ALL_OFF), ALL_OFF])
]


def slots_of(path: Path, size: str) -> int:
    layout = read_layout(path)
    return {
        "minimum": layout.n_expert_used,
        "one layer": layout.n_expert,
        "40%": layout.n_expert_total * 2 // 5,
        "all": layout.n_expert_total,
    }[size]


def check_that_it_acted(llm: Llama, *, n_slots: int) -> None:
    """Asserts that the store looked up and prefetched experts, and evicted some unless
    every expert has a slot.

    Equal logits would otherwise prove nothing.
    """
    stats, info = llm.stats(), llm.session.store.info()
    assert info["n_slots"] == n_slots
    assert stats.lookups == stats.hits_ready + stats.hits_late + stats.misses > 0
    assert stats.prefetch_started > 0
    assert stats.tokens == llm.n_tokens
    assert (stats.evictions > 0) == (n_slots < info["n_experts"])
    assert stats.read_errors == 0


def run_and_compare(
    load: Load,
    reference: Reference,
    path: Path,
    size: str,
    store: StoreOptions,
    **options: Any,
) -> None:
    n_slots = slots_of(path, size)
    llm = load(path, expert_cache=share_for(path, n_slots), store=store, **options)
    with Meddler(llm.session.store) as meddler:
        logits = greedy_logits(llm, before_each=meddler.meddle)
    check_that_it_acted(llm, n_slots=n_slots)
    # A model with a pool smaller than a layer processes a prompt in smaller passes, in
    # which kernels sum in another order. The reference therefore uses the same
    # n_ubatch.
    same = {"n_ubatch": llm.plan.n_ubatch, "repack": store.repack}
    assert np.isfinite(logits).all()
    assert np.array_equal(logits, reference(path, **same)), (
        "differs from MOEGGUF_HOOKS=0"
    )
    assert np.array_equal(logits, reference(path, resident=True, **same)), (
        "differs from every expert resident"
    )


@pytest.mark.parametrize(("model", "size", "repack"), POOLS, ids=str)
def test_logits_are_identical_for_every_model_and_pool_size(
    tiny: TinyModel,
    load: Load,
    reference: Reference,
    model: tuple[str, str],
    size: str,
    repack: bool,
) -> None:
    # The background fill is off if every expert has a slot, because it would leave
    # nothing to prefetch.
    store = StoreOptions(repack=repack, readers=2, fill=size != "all")
    run_and_compare(load, reference, tiny(*model), size, store)


@pytest.mark.parametrize(("model", "readers", "n_split", "switches"), WAYS, ids=str)
def test_logits_are_identical_for_every_store_switch_and_reader_count(
    tiny: TinyModel,
    load: Load,
    reference: Reference,
    model: tuple[str, str],
    readers: int,
    n_split: int,
    switches: dict[str, bool],
) -> None:
    path = tiny(*model, n_split=n_split)
    run_and_compare(
        load, reference, path, "40%", StoreOptions(readers=readers, **switches)
    )


def test_logits_are_identical_with_two_compute_threads(
    tiny: TinyModel, load: Load, reference: Reference
) -> None:
    run_and_compare(load, reference, tiny(), "40%", StoreOptions(), n_threads=2)


def test_logits_are_identical_in_small_passes(
    tiny: TinyModel, load: Load, reference: Reference
) -> None:
    run_and_compare(
        load, reference, tiny(), "40%", StoreOptions(), n_ubatch=24, n_batch=64
    )


def test_logits_are_identical_over_two_thousand_tokens(
    tiny: TinyModel, load: Load, reference: Reference
) -> None:
    path, n_new = tiny(), 2000
    llm = load(path, expert_cache="40%", n_ctx=2304)
    with Meddler(llm.session.store) as meddler:
        logits = greedy_logits(llm, n_new=n_new, before_each=meddler.meddle)
    check_that_it_acted(llm, n_slots=llm.plan.n_slots)
    assert len(logits) == N_PROMPT + n_new
    assert np.array_equal(logits, reference(path, n_new=n_new, n_ctx=2304))


def test_two_models_in_two_threads_give_their_own_logits(
    tiny: TinyModel, load: Load, reference: Reference
) -> None:
    paths = [tiny(*model) for model in TWO_MODELS]
    models = [load(path, expert_cache="40%") for path in paths]
    with ThreadPoolExecutor() as pool:
        for logits, path in zip(pool.map(greedy_logits, models), paths, strict=True):
            assert np.array_equal(logits, reference(path))
    assert all(model.stats().evictions > 0 for model in models)


def test_an_adapter_on_experts_gives_the_logits_of_llama_cpp(
    tiny: TinyModel, load: Load, reference: Reference, tmp_path: Path
) -> None:
    path = tiny("tiny-qwen2moe")
    adapter = write_adapter(
        tmp_path / "adapter.gguf",
        "qwen2moe",
        "blk.1.ffn_gate_exps.weight",
        (16, 64, 128),
    )
    options: dict[str, Any] = {"n_ubatch": 1, "lora_path": adapter, "lora_scale": 0.5}
    llm = load(path, expert_cache="40%", store=StoreOptions(repack=False), **options)
    logits = greedy_logits(llm)
    assert llm.stats().evictions > 0
    assert np.array_equal(logits, reference(path, repack=False, **options))
    assert np.abs(logits - reference(path, n_ubatch=1, repack=False)).max() > 0.01


PROMPT = [5, 9, 2, 11]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which models loaded later append the names of graph nodes, in
    the order of computation."""
    base, hook = (
        c.CDLL(str(library.find_library() / "libggml-base.so")),
        library.load().moegguf_eval,
    )
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = c.c_char_p, [c.c_void_p]
    names: list[str] = []

    @c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
    def note(tensor: int, ask: bool, store: int) -> bool:
        if ask:
            names.append(base.ggml_get_name(tensor).decode())
        return bool(hook(tensor, ask, store))

    monkeypatch.setattr(
        StoreContext, "eval_callback", lambda _: c.cast(note, c.c_void_p).value
    )
    return names


@pytest.mark.parametrize("n_tokens", [1, 4])
def test_the_shared_expert_is_computed_before_the_routed_experts(
    load: Load, tiny: TinyModel, computed: list[str], n_tokens: int
) -> None:
    path = tiny("tiny-qwen2moe", "q4_0")
    few, all_resident = load(path, expert_cache="30%"), load(path, expert_cache="100%")
    all_resident.session.store.watch(True)  # type: ignore[union-attr]  # so that its layers have nodes for slot ids, too
    computed.clear()
    for llm in (few, all_resident):
        llm.eval(PROMPT[:n_tokens])
    ordered, plain = computed[: len(computed) // 2], computed[len(computed) // 2 :]
    assert sorted(ordered) == sorted(plain)
    for il in range(few.session.layout.n_layer):  # type: ignore[union-attr]
        names = [
            f"ffn_moe_slot_ids-{il}",
            f"ffn_shexp-{il}",
            f"ffn_moe_up-{il}",
            f"ffn_moe_down-{il}",
        ]
        assert [ordered.index(name) for name in names] == sorted(
            ordered.index(name) for name in names
        )
        assert plain.index(f"ffn_moe_down-{il}") < plain.index(f"ffn_shexp-{il}"), (
            "llama.cpp's own order"
        )
    assert np.array_equal(few.scores[:n_tokens], all_resident.scores[:n_tokens])
