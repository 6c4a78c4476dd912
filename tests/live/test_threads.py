"""Compute threads: bits do not depend on how many of them compute, and the number follows the load."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import Llama, Logits, greedy_logits, hooks_off, random_prompt

from moegguf.engine import threadpool
from moegguf.engine.machine import ProcessorUse
from moegguf.engine.threadpool import ThreadGovernor
from moegguf.native import library

DEMO = Path(__file__).resolve().parents[2] / "moegguf/demo/moegguf-demo-Q4_0.gguf"
N_KV = 520  # flash attention divides the sums over 512 or more


def logits(counts: list[int], **options: Any) -> Logits:
    """Logits from a long context on, computed with the numbers of threads of `counts` in turn."""
    with Llama(DEMO, n_ctx=1024, n_threads=3, logits_all=True, verbose=False, **options) as llm:
        set_n_threads, context, turns = library.llama_cpp().llama_set_n_threads, llm._ctx.ctx, itertools.cycle(counts)

        def next_count() -> None:
            n_threads = next(turns)
            set_n_threads(context, n_threads, n_threads)

        return greedy_logits(llm, random_prompt(llm, N_KV), 6, next_count)[N_KV:]


@pytest.mark.parametrize("flash_attn", [False, True], ids=["plain", "flash"])
def test_threads_that_come_and_go_change_no_bit(flash_attn: bool) -> None:
    with hooks_off():
        expected = logits([3], flash_attn=flash_attn)
        assert not flash_attn or np.array_equal(logits([3], flash_attn=None), expected), "the CPU has it"
    assert np.array_equal(logits([3], expert_cache="50%"), expected) is not flash_attn, "off is the default"
    for counts in ([3], [1], [2, 1, 3]):
        assert np.array_equal(logits(counts, flash_attn=flash_attn, expert_cache="50%"), expected), counts


def test_the_number_of_threads_follows_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    others = 1.0
    monkeypatch.setattr(threadpool, "PERIOD_S", 0.0)
    monkeypatch.setattr(ProcessorUse, "others", lambda _self: others)
    monkeypatch.setattr("moegguf.engine.load.count_cpus", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    with Llama(DEMO, n_ctx=64, verbose=False) as llm:
        assert llm.stats().n_threads == 2
        llm.eval([5, 6, 7])
        assert llm.stats().n_threads == library.llama_cpp().llama_n_threads(llm._ctx.ctx) == 1
        others = 0.0
        llm.eval([8])
        assert llm.stats().n_threads == library.llama_cpp().llama_n_threads(llm._ctx.ctx) == 2


def test_what_others_did_in_idle_time_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threadpool, "PERIOD_S", 0.0)
    monkeypatch.setattr(threadpool, "IDLE_S", 0.0)  # all time between two passes is idle
    monkeypatch.setattr(ProcessorUse, "others", lambda _self: 64.0)
    monkeypatch.setattr("moegguf.engine.load.count_cpus", lambda: 2)
    with Llama(DEMO, n_ctx=64, verbose=False) as llm:
        llm.eval([5, 6, 7])
        llm.eval([8])
        assert llm.stats().n_threads == 2


@pytest.mark.parametrize("options", [{"n_threads": 2}, {"n_threads_batch": 2}])
def test_numbers_that_are_given_stay(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threadpool, "PERIOD_S", 0.0)
    monkeypatch.setattr(ProcessorUse, "others", lambda _self: 64.0)
    with Llama(DEMO, n_ctx=64, verbose=False, **options) as llm:
        before = llm.stats().n_threads
        llm.eval([5, 6, 7])
        llm.eval([8])
        assert llm.stats().n_threads == before == llm.n_threads


def test_only_decoding_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' waiting for experts would be subtracted from its time."""
    token_s: list[float | None] = []
    monkeypatch.setattr(ThreadGovernor, "decide", lambda _self, _now_s, _others, s: token_s.append(s) or 1)
    monkeypatch.setattr("moegguf.engine.load.count_cpus", lambda: 2)
    with Llama(DEMO, n_ctx=64, verbose=False) as llm:
        for other in (lambda: None, lambda: llm.eval([5, 6]), lambda: llm.context.evaluate(int)):
            monkeypatch.setattr(threadpool, "PERIOD_S", 1e9)
            llm.eval([5])
            other()
            monkeypatch.setattr(threadpool, "PERIOD_S", 0.0)
            llm.eval([6])
    assert token_s[0] and token_s[1:] == [None, None]
