"""Experts that a device lacks, computed by the CPU: close to exact, counted, and only where that is asked for."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from rpc_device import in_child, in_child_of_two, register
from running import (
    Llama,
    Logits,
    Reference,
    TinyModel,
    devices_of,
    follow_tokens,
    greedy_logits,
    hooks_off,
    random_prompt,
    write_adapter,
)
from waiting import until

from moegguf.engine.stats import Stats
from moegguf.errors import ExpertIOError, GenerationCancelled, OptionError
from moegguf.native import library
from moegguf.native.link_device import link_device
from moegguf.native.store import Computed, StoreOptions, Tier
from moegguf.quantities import Link

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 2, "logits_all": True, "verbose": False}
N_PROMPT, N_NEW = 40, 60
SMALL = {"vram_cache": "40%", "expert_cache": "25%"}
WINDOW_TOKENS = 64  # in which an expert is used twice before it gets a slot on the device
SLOW = Link(1e7, 1e-4)  # nothing is copied because that is faster

# Logits of the tiny models reach 10 to 15; two processors' sums of the same products differ by less than this.
CLOSE = 0.02

Found = tuple[Logits, Stats, Computed, dict[str, Any]]


def behind_a_link(path: Path, link: Link = Link(1e9, 20e-6), **options: Any) -> Llama:
    """A model on a simulated device, with slots there over slots in RAM."""
    store = StoreOptions(device=link_device(link))
    return Llama(path, placement="slots", store=store, **OPTIONS | SMALL | options)


def run(llm: Llama, tokens: list[int]) -> Found:
    """Logits, and what the CPU has computed; figures of the tier in RAM when nothing is under way."""
    assert llm.session is not None
    logits, store = follow_tokens(llm, random_prompt(llm, N_PROMPT), tokens), llm.session.store
    store.drain(10)
    return logits, llm.stats(), store.computed(), store.tier(Tier.RAM)


def tokens_of(logits: Logits) -> list[int]:
    """What was generated behind the prompt."""
    return [int(token) for token in logits[N_PROMPT - 1 : -1].argmax(axis=1)]


def check_close(logits: Logits, exact: Logits) -> None:
    """Every logit is close, and the likeliest token is the same where it leads by more than that."""
    assert np.abs(logits - exact).max() <= CLOSE
    second, first = np.sort(exact, axis=1)[:, -2:].T
    clear = first - second > 2 * CLOSE
    assert clear.sum() > len(exact) // 2
    assert np.array_equal(logits.argmax(axis=1)[clear], exact.argmax(axis=1)[clear])


def check_computed(found: Found) -> None:
    """The CPU has computed misses of layers, and left nothing behind."""
    _, stats, computed, below = found
    assert 0 < computed.misses <= stats.misses
    assert (stats.misses_computed, stats.exact) == (computed.misses, False)
    assert stats.compute_s == computed.compute_ns / 1e9 > 0
    assert (computed.n_layers, computed.note) == (4, "") or computed.n_layers == 3  # its first layer may be dense
    assert computed.compute_bytes_ns > 0
    assert computed.copy_bytes_ns > 0
    assert below["lookups"] == below["hits_ready"] + below["hits_late"] + below["misses"]
    assert below["slots_pinned"] == 0
    assert below["evictions"] > 0


def computed_behind_a_link(path: Path, tokens: list[int], n_ubatch: int) -> Found:
    with behind_a_link(path, misses="compute", n_ubatch=n_ubatch) as llm:
        assert (llm.plan.exact, llm.plan.n_ubatch) == (False, n_ubatch)
        return run(llm, tokens)


@pytest.mark.parametrize(
    ("preset", "quant", "n_ubatch"),
    [
        ("tiny-qwen2moe", "q4_0", 1), ("tiny-qwen2moe", "q4_k_m", 1), ("tiny-qwen3moe", "q8_0", 32),
        ("tiny-mixtral", "q4_0", 1), ("tiny-deepseek2", "q4_k_m", 1),
    ],
)  # fmt: skip
def test_misses_computed_beside_a_device_give_logits_close_to_exact_ones(
    tiny: TinyModel, reference: Reference, preset: str, quant: str, n_ubatch: int
) -> None:
    path = tiny(preset, quant)
    exact = reference(path, n_ubatch=n_ubatch, repack=False, n_prompt=N_PROMPT, n_new=N_NEW)
    found = in_own_process(computed_behind_a_link, path, tokens_of(exact), n_ubatch)
    check_close(found[0], exact)
    check_computed(found)


def computed_beside_rpc(rpc: Path, port: int, path: Path) -> tuple[Logits, Found]:
    register(rpc, port)
    with hooks_off(), Llama(path, n_gpu_layers=-1, n_ubatch=1, **OPTIONS) as llm:
        exact = greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)
    with Llama(path, misses="compute", placement="slots", **OPTIONS | SMALL) as llm:
        return exact, run(llm, tokens_of(exact))


def computed_beside_two_servers(rpc: Path, ports: tuple[int, int], path: Path) -> tuple[Logits, Found]:
    for port in ports:
        register(rpc, port)
    split = {"tensor_split": [1, 1], "n_gpu_layers": -1}
    with hooks_off(), Llama(path, n_ubatch=1, **split, **OPTIONS) as llm:
        exact = greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)
    with Llama(path, misses="compute", placement="slots", **split, **OPTIONS | SMALL) as llm:
        assert llm.session is not None and list(devices_of(llm)) == ["RPC0", "RPC1"]
        return exact, run(llm, tokens_of(exact))


def test_misses_computed_beside_two_devices_give_logits_close_to_exact_ones(tiny: TinyModel) -> None:
    exact, found = in_child_of_two(computed_beside_two_servers, tiny("tiny-qwen2moe", "q4_k_m"))
    check_close(found[0], exact)
    check_computed(found)


def test_misses_computed_beside_another_process_give_logits_close_to_exact_ones(tiny: TinyModel) -> None:
    exact, found = in_child(computed_beside_rpc, tiny("tiny-qwen2moe", "q4_k_m"))
    check_close(found[0], exact)
    check_computed(found)


def exact_ones(path: Path) -> dict[str, Any]:
    """Logits where misses are fetched, and where there are none; and what is said."""
    found: dict[str, Any] = {}
    budgets = {"fetch": SMALL, "compute": SMALL | {"vram_cache": "100%", "n_ubatch": 1}}
    for misses, budget in budgets.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            llm = behind_a_link(path, misses=misses, **budget)
        with llm:
            assert llm.session is not None
            assert llm.plan.exact
            logits, store = greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW), llm.session.store
            said = [str(warning.message) for warning in caught if "misses" in str(warning.message)]
            found[misses] = logits, llm.stats().exact, store.computed().misses, said
    return found


def test_without_misses_that_the_cpu_may_compute_answers_are_exact(tiny: TinyModel, reference: Reference) -> None:
    path = tiny("tiny-qwen2moe")
    exact = reference(path, n_ubatch=1, repack=False, n_prompt=N_PROMPT, n_new=N_NEW)
    found = in_own_process(exact_ones, path)
    for logits, is_exact, n_computed, _ in found.values():
        assert np.array_equal(logits, exact)
        assert is_exact
        assert n_computed == 0
    assert found["fetch"][3] == []
    assert len(found["compute"][3]) == 1
    assert "has no effect, and answers are exact" in found["compute"][3][0]


def test_without_a_device_nothing_is_computed_beside_it(tiny: TinyModel) -> None:
    with pytest.warns(UserWarning, match="has no effect, and answers are exact"):
        llm = Llama(tiny(), expert_cache="40%", misses="compute", n_ctx=64, verbose=False)
    with llm:
        assert llm.plan.exact
        assert llm.session is not None
        with pytest.raises(OptionError, match="slots over slots in RAM"):
            llm.session.store.compute_misses(1)
    with pytest.raises(OptionError, match="misses='guess' is none of fetch, compute"):
        Llama(tiny(), misses="guess", n_ctx=64, verbose=False)


def test_experts_with_biases_are_computed_bit_by_bit_as_the_device_does(tiny: TinyModel, reference: Reference) -> None:
    """The simulated device's kernels are the CPU's: one token's products are the same there."""
    path = tiny("tiny-gpt-oss")
    exact = reference(path, n_ubatch=1, repack=False, n_prompt=N_PROMPT, n_new=N_NEW)
    found = in_own_process(computed_behind_a_link, path, tokens_of(exact), 1)
    assert np.array_equal(found[0], exact)
    check_computed(found)
    assert found[2].n_layers == 4


def with_scales(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in which a layer scales what experts' gate matrices give, and another one what down matrices give."""
    from tools.models import PRESETS, writer
    from tools.models.tensors import QType, Tensor, tensors

    shape = PRESETS["tiny-qwen3moe"]
    names = ("blk.1.ffn_gate_exps.scale", "blk.2.ffn_down_exps.scale")
    scales = [Tensor(name, (shape.n_expert,), QType.F32, 0.0) for name in names]
    monkeypatch.setattr(writer, "tensors", lambda *given: [*tensors(*given), *scales])
    return writer.write_model(path, shape)[0]


def test_experts_with_scales_are_computed_bit_by_bit_as_the_device_does(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_scales(tmp_path / "scales.gguf", monkeypatch)
    exact = reference(path, n_ubatch=1, repack=False, n_prompt=N_PROMPT, n_new=N_NEW)
    found = in_own_process(computed_behind_a_link, path, tokens_of(exact), 1)
    assert np.array_equal(found[0], exact)
    check_computed(found)


def computed_with_adapter(path: Path, adapter: Path, tokens: list[int]) -> Found:
    with behind_a_link(path, misses="compute", lora_path=str(adapter)) as llm:
        return run(llm, tokens)


def test_a_layer_with_an_adapter_on_its_experts_fetches_and_is_named(
    tiny: TinyModel, tmp_path: Path, reference: Reference
) -> None:
    path = tiny("tiny-qwen2moe")
    adapter = write_adapter(tmp_path / "adapter.gguf", "qwen2moe", "blk.1.ffn_gate_exps.weight", (16, 64, 128))
    same = {"n_ubatch": 1, "repack": False, "n_prompt": N_PROMPT, "n_new": N_NEW}
    exact, without = reference(path, **same, lora_path=str(adapter)), reference(path, **same)
    assert np.abs(exact - without).max() > CLOSE
    logits, stats, computed, _ = in_own_process(computed_with_adapter, path, adapter, tokens_of(exact))
    check_close(logits, exact)
    assert stats.misses_computed > 0
    assert computed.n_layers == 3
    assert computed.note == "layer 1 has an adapter or an operation that the CPU does not repeat (MUL_MAT_ID)"


def arrivals(path: Path) -> tuple[list[tuple[int, int]], int]:
    """(tokens since the use before last, those since the last) of experts that came to the device, token by token, and
    how many were used and did not come."""
    came, n_left_out = [], 0
    with behind_a_link(path, SLOW, misses="compute", strategy="lru") as llm:
        assert llm.session is not None
        store = llm.session.store
        last, before, uses = (np.zeros(store.shape, int) for _ in range(3))
        there = np.zeros(store.shape, bool)
        tokens = random_prompt(llm, N_PROMPT + 60)
        same = [tokens[0]] * (WINDOW_TOKENS + 1)  # its experts alone: the others are not used for so long
        one_by_one = [*same, *tokens[N_PROMPT:-30], *same, *tokens[-30:]]
        for passed in (tokens[:N_PROMPT], *([token] for token in one_by_one)):
            llm.eval(passed)
            store.drain(10)
            now, (counted, _), resident = store.counters()["tokens"], store.activity(), store.residency() == 2
            used = counted > uses
            before[used], last[used], uses = last[used], now, counted
            if len(passed) == 1:
                came += [(now - before[key] if before[key] else now, now - last[key]) for key in
                         zip(*np.nonzero(resident & ~there), strict=True)]  # fmt: skip
                n_left_out += int((used & ~resident).sum())
            there = resident
    return came, n_left_out


def test_an_expert_gets_a_slot_on_the_device_after_two_uses_in_64_tokens(tiny: TinyModel) -> None:
    came, n_left_out = in_own_process(arrivals, tiny("tiny-qwen2moe"))
    assert len(came) > 20
    assert n_left_out > 20
    assert all(since_before < WINDOW_TOKENS and since_last == 0 for since_before, since_last in came)


def failing_reads(path: Path, tokens: list[int]) -> tuple[int, list[int], Logits]:
    """How many passes failed, bytes of misses that had come to the device before and after them, and logits when reads
    work again."""
    with behind_a_link(path, SLOW, misses="compute", expert_cache="10%", strategy="lru") as llm:
        assert llm.session is not None
        store, prompt = llm.session.store, random_prompt(llm, N_PROMPT)
        follow_tokens(llm, prompt, [prompt[0]] * (WINDOW_TOKENS + 1))
        copied, n_failed = [store.tier()["bytes_missed"]], 0
        for token in prompt[1:4]:  # what they use was not used for so long: the CPU computes it
            library.arm_fault("read", 1, sticky=True)
            try:
                llm.eval([token])
            except ExpertIOError:
                n_failed += 1
            library.arm_fault("read", 0)
        copied.append(store.tier()["bytes_missed"])
        return n_failed, copied, run(llm, tokens)[0]


def test_a_read_for_the_cpu_that_fails_ends_the_pass_and_the_next_one_reads_again(
    tiny: TinyModel, reference: Reference
) -> None:
    path = tiny("tiny-qwen2moe")
    exact = reference(path, n_ubatch=1, repack=False, n_prompt=N_PROMPT, n_new=N_NEW)
    n_failed, copied, logits = in_own_process(failing_reads, path, tokens_of(exact))
    assert n_failed == 3
    assert copied[0] == copied[1] > 0
    check_close(logits, exact)


def slow_read(path: Path) -> tuple[Stats, Stats]:
    """Figures of a pass whose first read, for experts that the CPU computes, takes two seconds; and of the same token
    once more, whose experts are in RAM then."""
    with behind_a_link(path, SLOW, misses="compute", expert_cache="60%", strategy="lru") as llm:
        assert llm.session is not None
        store, prompt, found = llm.session.store, random_prompt(llm, N_PROMPT), []
        follow_tokens(llm, prompt[:4], [prompt[0]] * (WINDOW_TOKENS + 1))
        for nth in (1, 0):
            library.arm_fault("slow_read", nth)
            store.drain(10)
            before = llm.stats()
            llm.eval(prompt[-1:])
            found.append(llm.stats() - before)
        return found[0], found[1]


def test_waiting_for_the_cpu_is_a_stall_and_for_disk_where_it_waits_for_a_read(tiny: TinyModel) -> None:
    slow, quick = in_own_process(slow_read, tiny("tiny-qwen2moe"))
    assert slow.below is not None and quick.below is not None
    assert slow.misses_computed > 0
    assert slow.tiers[0].stall_s == slow.stall_s
    assert 1 < slow.compute_stall_s < slow.stall_s + 1e-6
    assert slow.below.stall_s > 1
    assert quick.misses > 0
    assert quick.below.misses == quick.below.stall_s == 0


def cancelled(path: Path, tokens: list[int]) -> tuple[float, Logits]:
    """Seconds until a pass ended whose experts are read slowly for the CPU, from when it was cancelled; logits of the
    next run."""
    with behind_a_link(path, SLOW, misses="compute", expert_cache="10%", strategy="lru") as llm:
        assert llm.session is not None
        store, prompt, at_s = llm.session.store, random_prompt(llm, N_PROMPT), [0.0]
        follow_tokens(llm, prompt, [prompt[0]] * (WINDOW_TOKENS + 1))
        library.arm_fault("slow_read", 1, sticky=True)

        def cancel() -> None:
            until(lambda: store.counters()["chunks_reading"])
            at_s[0] = time.monotonic()
            store.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(GenerationCancelled):
            llm.eval(prompt[1:2])
        waited_s = time.monotonic() - at_s[0]
        thread.join()
        library.arm_fault("slow_read", 0)
        store.cancel(False)
        return waited_s, run(llm, tokens)[0]


def test_cancelling_ends_a_pass_that_waits_for_the_cpu(tiny: TinyModel, reference: Reference) -> None:
    path = tiny("tiny-qwen2moe")
    exact = reference(path, n_ubatch=1, repack=False, n_prompt=N_PROMPT, n_new=N_NEW)
    waited_s, logits = in_own_process(cancelled, path, tokens_of(exact))
    assert waited_s < 1.5  # reads take two seconds
    check_close(logits, exact)


def shares(path: Path) -> list[float]:
    """The share of misses that the CPU has computed: as fast as it is, while it is slow, and when it is fast again."""
    found = []  # a copy of an expert takes 2 ms: more than the CPU also among other jobs, less than when it is slow
    with behind_a_link(path, Link(7e6, 20e-6), misses="compute", expert_cache="100%", strategy="lru") as llm:
        assert llm.session is not None
        store, tokens = llm.session.store, iter(random_prompt(llm, 470))
        for _ in range(30):
            llm.eval([next(tokens)])
        for slow, n_tokens in ((0, 30), (1, 100), (0, 300)):
            library.arm_fault("slow_compute", slow, sticky=True)
            for n in range(n_tokens):
                if n == n_tokens // 2:  # averages are those of this half by then
                    before = llm.stats()
                llm.eval([next(tokens)])
            since = llm.stats() - before
            found.append(since.misses_computed / since.misses)
        assert store.computed().compute_bytes_ns > 0
    return found


def test_first_uses_are_copied_where_that_is_faster(tiny: TinyModel) -> None:
    fast, slow, again = in_own_process(shares, tiny("tiny-qwen2moe"))
    assert fast > 0.2
    assert slow < 0.1
    assert again > 2 * slow
