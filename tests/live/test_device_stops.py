"""Tests the cost of layers with slots on a device.

A pass does not copy any adapter to the device. Ids are copied only if an expert has no
slot, or while the store is watched. Remedies, which shorten the device's waits for
experts, do not change a single bit. Prediction in the graph adds no stop and no copy.
"""

import ctypes as c
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import answers_together, ask, endless
from own_process import in_new_process, in_own_process
from rpc_device import on_servers
from running import (
    Llama,
    Logits,
    TinyModel,
    greedy_logits,
    hooks_off,
    share_for,
    write_adapter,
)

from moegguf.controller.prefetch import PrefetchOptions
from moegguf.engine import solver
from moegguf.gguf.experts import read_layout
from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link
from moegguf.testing.link_device import add_link_device, link_figures
from tools.gpu.short_plan import SWITCHES

OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "n_threads": 1,
    "logits_all": True,
    "verbose": False,
}
DEVICE_BYTES = 256 << 20
LINK = Link(8e9, 5e-6)


def strict_devices(n: int) -> list[str]:
    return [
        add_link_device(LINK, memory_bytes=DEVICE_BYTES, strict_seed=1 + i)
        for i in range(n)
    ]


def scheduled(run: Callable[[], object]) -> str:
    """Calls `run`. Returns ggml's log, in which the scheduler names new graphs and
    inputs that it copies to a device.

    The caller sets GGML_SCHED_DEBUG before it loads the model.
    """
    lines: list[str] = []

    @c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
    def keep(_level: int, text: bytes, _data: int | None) -> None:
        lines.append(text.decode())

    base = c.CDLL(str(library.find_library() / "libggml-base.so"))
    base.ggml_log_set(keep, None)
    run()
    base.ggml_log_set(None, None)
    return "".join(lines)


@pytest.mark.parametrize("n_devices", [1, 2])
@on_servers()
def test_an_adapter_on_experts_is_not_copied_to_the_device_in_a_pass(
    path: Path, tmp_path: Path, n_devices: int
) -> None:
    matrix, shape = "blk.3.ffn_gate_exps.weight", (16, 64, 128)
    adapter = write_adapter(tmp_path / "adapter.gguf", "qwen2moe", matrix, shape)
    names = strict_devices(n_devices)
    slots = {"vram_cache": "60%", "expert_cache": "50%", "placement": "slots"}
    options: dict[str, Any] = OPTIONS | {"lora_path": str(adapter), "n_ubatch": 1}
    os.environ["GGML_SCHED_DEBUG"] = "2"
    with Llama(path, store=StoreOptions(staging=0), **slots, **options) as llm:
        logged = scheduled(lambda: llm.eval([1]))
        logits = greedy_logits(llm, n_new=4)
        assert llm.stats().evictions > 0
    del os.environ["GGML_SCHED_DEBUG"]
    assert f"## SPLIT #1: {names[0]}" in logged or f"## SPLIT #0: {names[0]}" in logged
    assert "lora_" not in logged
    with hooks_off(), Llama(path, n_gpu_layers=-1, **options) as llm:
        assert np.array_equal(greedy_logits(llm, n_new=4), logits)
    with hooks_off(), Llama(path, n_gpu_layers=-1, **OPTIONS | {"n_ubatch": 1}) as llm:
        assert not np.array_equal(greedy_logits(llm, n_new=4), logits)


@on_servers()
def test_ids_are_copied_only_with_absent_experts_or_a_watcher(path: Path) -> None:
    os.environ["GGML_SCHED_DEBUG"] = "2"
    [device] = strict_devices(1)
    layout = read_layout(path)

    def evaluate(llm: Llama) -> tuple[str, Logits]:
        """Evaluates one token. Returns the kind of ids in a newly built graph, and the
        logits.

        The kind is "slot" for slot ids, "own" for the router's expert ids, and "" if no
        new graph was built.
        """
        before = llm.stats()
        llm.reset()
        logged = scheduled(lambda: llm.eval([5]))
        counted = llm.stats() - before
        assert (counted.tokens, counted.lookups) == (1, layout.token_cycle_slots)
        used = {kind for kind in ("slot", "own") if f"ffn_moe_{kind}_ids-" in logged}
        assert all(
            f"ffn_moe_{kind}_ids-{il}" in logged
            for kind in used
            for il in range(layout.n_layer)
        )
        return " and ".join(used), llm.scores[0].copy()

    with Llama(
        path,
        vram_cache="100%",
        placement="slots",
        store=StoreOptions(device=device),
        **OPTIONS,
    ) as llm:
        store, results = llm.session.store, list[tuple[str, Logits]]()
        store.drain(10)
        results.append(evaluate(llm))
        store.watch(True)
        results.append(evaluate(llm))
        store.watch(False)
        results.append(evaluate(llm))
        results.append(evaluate(llm))
        store.resize(24)
        results.append(evaluate(llm))
        store.resize(layout.n_expert_total)
        results.append(evaluate(llm))
    assert [used for used, _ in results] == ["own", "slot", "own", "", "slot", ""]
    for _, logits in results[1:]:
        assert np.array_equal(logits, results[0][1])


def logits_with_slots(path: Path, vram: int, ram: int) -> list[Logits]:
    """Returns the logits of three loads on a strict device, two runs of each.

    The loads have few slots and passes of one token, few slots and staged prompts, and
    a slot for every expert.
    """
    [device] = strict_devices(1)
    few = {
        "vram_cache": share_for(path, vram, device),
        "expert_cache": share_for(path, ram, device),
    }
    found = []
    for staging, budgets in ((0, few), (2, few), (0, {"vram_cache": "100%"})):
        store = StoreOptions(device=device, staging=staging)
        with Llama(
            path,
            placement="slots",
            store=store,
            **budgets,
            **OPTIONS | {"n_ubatch": 64},
        ) as llm:
            llm.n_batch = 1 if staging == 0 else 64
            found.append(greedy_logits(llm))
            found.append(greedy_logits(llm))
            assert (llm.stats().evictions > 0) == ("expert_cache" in budgets)
    return found


@pytest.fixture(scope="module")
def without_remedies(tiny: TinyModel) -> list[Logits]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEGGUF_SWITCHES", "0")
        return in_new_process(logits_with_slots, tiny("tiny-mix", "q4_k_m"), 24, 40)


@pytest.mark.parametrize(
    "letters",
    [
        *(pytest.param(letter, marks=pytest.mark.slow) for letter in SWITCHES),
        "abcdefgijk",
    ],
)
def test_remedies_change_no_bit(
    tiny: TinyModel,
    without_remedies: list[Logits],
    monkeypatch: pytest.MonkeyPatch,
    letters: str,
) -> None:
    monkeypatch.setenv(
        "MOEGGUF_SWITCHES", str(sum(SWITCHES[letter] for letter in letters))
    )
    found = in_new_process(logits_with_slots, tiny("tiny-mix", "q4_k_m"), 24, 40)
    for logits, without in zip(found, without_remedies, strict=True):
        assert np.isfinite(logits).all()
        assert np.array_equal(logits, without)


def test_every_remedy_has_a_switch() -> None:
    assert library.load().moegguf_switches() == sum(SWITCHES.values())


def copied(path: Path) -> tuple[int, int, Logits]:
    """Decodes tokens with few slots, without prefetching. Returns the number of copies
    to the device, the number of experts that were copied, and the logits."""
    [device] = strict_devices(1)
    options = {
        "vram_cache": share_for(path, 24, device),
        "expert_cache": "100%",
        "placement": "slots",
    }
    store = StoreOptions(device=device, staging=0, fill=False)
    with Llama(
        path,
        store=store,
        policy="lru",
        prefetch=False,
        **options,
        **OPTIONS | {"n_ubatch": 1},
    ) as llm:
        llm.n_batch = 1
        greedy_logits(llm)  # reads experts into RAM
        before, misses = link_figures(device), llm.session.tiers()["VRAM"]["misses"]
        logits = greedy_logits(llm)
        after = link_figures(device)
        n_copies = (
            after.copies
            - before.copies
            - (after.copies_to_host - before.copies_to_host)
        )
        return n_copies, llm.session.tiers()["VRAM"]["misses"] - misses, logits


def test_one_arena_copies_an_expert_at_once(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = tiny("tiny-qwen2moe", "q4_k_m"), list[tuple[int, int, Logits]]()
    for letters in ("abdefi", "abdefik"):
        monkeypatch.setenv(
            "MOEGGUF_SWITCHES", str(sum(SWITCHES[letter] for letter in letters))
        )
        found.append(in_new_process(copied, path))
    (n_apart, n_experts, apart), (n_together, n_misses, together) = found
    assert n_misses == n_experts > 0 and np.array_equal(apart, together)
    assert 1.5 * n_experts <= n_apart - n_together <= 2 * n_experts


def launches_after_resizes(path: Path) -> None:
    """Asserts that a resize of one model's pool makes only this model's graphs
    invalid."""
    [device] = strict_devices(1)
    options = OPTIONS | {
        "vram_cache": share_for(path, 24, device),
        "expert_cache": "100%",
        "placement": "slots",
    }
    store = StoreOptions(device=device, staging=0)
    with (
        Llama(path, store=store, **options) as other,
        Llama(path, store=store, **options) as llm,
    ):

        def n_new_graphs() -> int:
            """Decodes a token with `llm`. Returns the number of launches that did not
            replay an earlier launch."""
            before = link_figures(device)
            llm.eval([5])
            after = link_figures(device)
            assert after.fault == "" and after.launches > before.launches
            return after.launches - before.launches - (after.replays - before.replays)

        other.eval([5])
        for _ in range(8):
            llm.eval([5])
        assert n_new_graphs() == 0
        other.session.store.resize(20)
        assert n_new_graphs() == 0
        llm.session.store.resize(20)
        assert n_new_graphs() > 0


def test_a_resize_keeps_the_graphs_of_another_model(tiny: TinyModel) -> None:
    in_own_process(launches_after_resizes, tiny())


# Prediction in the graph

N_MEASURED = 12
SKIP = {"predictor": "skip", "prefetch": PrefetchOptions(watchdog=False)}
IN_GRAPH = str(sum(SWITCHES[letter] for letter in "abdefgi"))
INPUTS = str(sum(SWITCHES[letter] for letter in "abdefi"))


@dataclass(frozen=True)
class Predicted:
    """The logits of a run on strict devices, the devices' counts for the last
    N_MEASURED tokens, and the store's counters for all tokens."""

    logits: Logits
    n_launches: int
    n_copies_to_host: int
    counters: dict[str, int]


def run_with_prediction(
    path: Path, options: dict[str, Any], n_devices: int = 1, n_slots: int = 24
) -> Predicted:
    """Evaluates greedy tokens with `n_slots` slots on strict devices, and all experts
    in RAM.

    The measured tokens never wait for the file, so that only the ids of each layer stop
    the device.
    """
    names = strict_devices(n_devices)
    budgets = {
        "vram_cache": share_for(path, n_slots, names[0]),
        "expert_cache": "100%",
        "placement": "slots",
    }
    split = {"n_gpu_layers": -1, "tensor_split": [1, 1]} if n_devices == 2 else {}
    store = StoreOptions(device=names[0] if n_devices == 1 else None, staging=0)
    with Llama(
        path, policy="lru", store=store, **budgets, **split, **options, **OPTIONS
    ) as llm:
        llm.n_batch = 1
        llm.session.store.drain(10)
        found = greedy_logits(llm, n_new=24)
        before = [link_figures(name) for name in names]
        for token in range(N_MEASURED):
            llm.eval([token])
        after = [link_figures(name) for name in names]
        assert [figures.fault for figures in after] == [""] * n_devices
        assert llm.stats().evictions > 0
        return Predicted(
            np.concatenate(
                [found, llm.scores[llm.n_tokens - N_MEASURED : llm.n_tokens]]
            ),
            sum(b.launches - a.launches for a, b in zip(before, after, strict=True)),
            sum(
                b.copies_to_host - a.copies_to_host
                for a, b in zip(before, after, strict=True)
            ),
            llm.session.store.counters(),
        )


def predicted(path: Path, switches: str, *arguments: Any) -> Predicted:
    """Calls `run_with_prediction` in a process with these switches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEGGUF_SWITCHES", switches)
        return in_new_process(run_with_prediction, path, *arguments)


def right(counters: dict[str, int]) -> float:
    """Returns the share of predicted experts that the router chose."""
    return counters["forecast_right"] / counters["forecast_picks"]


def test_prediction_in_the_graph_adds_no_stop_and_no_copy(tiny: TinyModel) -> None:
    path = tiny("tiny-mix", "q4_k_m")
    layers = [each for each in read_layout(path).layers if each.n_expert > 0]
    without = predicted(path, IN_GRAPH, {"predictor": "none"})
    inputs, in_graph = (
        predicted(path, switches, SKIP) for switches in (INPUTS, IN_GRAPH)
    )
    for each in (inputs, in_graph):
        assert np.isfinite(each.logits).all() and np.array_equal(
            each.logits, without.logits
        )
        assert each.n_launches == without.n_launches >= N_MEASURED * len(layers)
        assert each.counters["prefetch_started"] > 0
    assert (
        without.counters["forecast_picks"] == without.counters["prefetch_started"] == 0
    )
    assert in_graph.n_copies_to_host == without.n_copies_to_host
    # The last layer predicts nothing.
    assert inputs.n_copies_to_host - without.n_copies_to_host == N_MEASURED * (
        len(layers) - 1
    )
    n_passes = in_graph.counters["passes"]
    assert inputs.counters["forecast_scored"] == 0
    assert in_graph.counters["forecast_scored"] == n_passes * (len(layers) - 1)
    # Only the rounding of the routers differs.
    assert abs(right(in_graph.counters) - right(inputs.counters)) < 0.02


@pytest.mark.parametrize("preset", ["tiny-gpt-oss", "tiny-deepseek2", "tiny-glm4moe"])
def test_scores_of_other_routers_predict_like_their_inputs(
    tiny: TinyModel, preset: str
) -> None:
    """Tests routers with a bias, with groups, or with a sigmoid."""
    path = tiny(preset)
    inputs, in_graph = (
        predicted(path, switches, SKIP) for switches in (INPUTS, IN_GRAPH)
    )
    assert np.array_equal(in_graph.logits, inputs.logits)
    assert (
        in_graph.counters["forecast_scored"] > 0 == inputs.counters["forecast_scored"]
    )
    assert abs(right(in_graph.counters) - right(inputs.counters)) < 0.03


def test_layers_before_another_device_predict_from_inputs(tiny: TinyModel) -> None:
    path = tiny()
    n_layer = read_layout(path).n_layer
    without, in_graph = (
        predicted(path, IN_GRAPH, each, 2, 36) for each in ({"predictor": "none"}, SKIP)
    )
    assert np.array_equal(in_graph.logits, without.logits)
    assert in_graph.n_launches == without.n_launches
    # The window is two layers. For some layers, one layer in the window is on the other
    # device.
    assert (
        0
        < in_graph.counters["forecast_scored"]
        < in_graph.counters["passes"] * (n_layer - 1)
    )
    assert in_graph.counters["prefetch_started"] > 0


def answer_together(
    path: Path, options: dict[str, Any]
) -> tuple[list[Any], dict[str, int]]:
    """Returns three answers that are decoded together on a strict device, and the
    store's counters.

    Passes of up to four tokens compute from slots, as on CUDA.
    """
    solver.slot_tokens = lambda device: 4  # type: ignore[attr-defined]
    [device] = strict_devices(1)
    budgets = {
        "vram_cache": share_for(path, 32, device),
        "expert_cache": "100%",
        "placement": "slots",
    }
    more = OPTIONS | {"logits_all": False, "n_seq_max": 3, "flash_attn": None}
    with Llama(
        path,
        policy="lru",
        store=StoreOptions(device=device, staging=0),
        **budgets,
        **options,
        **more,
    ) as llm:
        requests = [
            ask(
                prompt="",
                context=(7, 8 + i),
                max_tokens=24,
                n_logprobs=5,
                logit_bias=endless(llm),
            )
            for i in range(3)
        ]
        received = answers_together(llm, requests)
        assert link_figures(device).fault == ""
        return [
            (each.error, each.text, each.logprobs) for each in received
        ], llm.session.store.counters()


def test_scores_of_several_sequences_come_from_the_graph(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny()
    found = {}
    for name, switches, options in (
        ("", IN_GRAPH, {"predictor": "none"}),
        ("in", INPUTS, SKIP),
        ("g", IN_GRAPH, SKIP),
    ):
        monkeypatch.setenv("MOEGGUF_SWITCHES", switches)
        found[name] = in_new_process(answer_together, path, options)
    answers, counters = found["g"]
    assert answers == found[""][0] == found["in"][0]
    assert [error for error, *_ in answers] == [None] * 3
    assert counters["tokens"] > 2 * counters["passes"], "most passes have three tokens"
    assert counters["forecast_scored"] == counters["passes"] * (
        read_layout(path).n_layer - 1
    )
    assert counters["prefetch_started"] > 0
    assert abs(right(counters) - right(found["in"][1])) < 0.03
