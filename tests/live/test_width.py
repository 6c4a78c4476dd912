"""Tests on the CPU that the bits of logits depend neither on the width of passes, nor
on threads, nor on other sequences.

Also tests the automatic number of threads.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from answering import DEMO, TinyModel
from running import Llama, Logits, greedy_logits, hooks_off, random_prompt

from moegguf.engine import threadpool
from moegguf.engine.machine import ProcessorUse
from moegguf.engine.sequences import SequenceTokens
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment
from tools.models import PRESETS, QUANTS

N_TOKENS, N_CELLS = 60, 256

needs_kernels = pytest.mark.skipif(
    not has_kernels(read_processor(), read_environment().kernels),
    reason="bits depend on the pass here",
)


@pytest.fixture(scope="module", params=["100%", "40%"])
def llm(request: pytest.FixtureRequest) -> Iterator[Llama]:
    """The demo with every expert resident, or with slots for 40 %."""
    with Llama(
        DEMO,
        n_ctx=N_CELLS,
        n_seq_max=3,
        expert_cache=request.param,
        flash_attn=True,
        verbose=False,
    ) as llm:
        yield llm


def tokens_of(llm: Llama, seed: int, n: int) -> list[int]:
    return [
        int(token)
        for token in np.random.default_rng(seed).integers(5, llm.n_vocab() - 5, n)
    ]


def logits(llm: Llama) -> bytes:
    """Returns the logits of the last token of the last pass."""
    return bytes(
        np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    )


def computed(llm: Llama, tokens: list[int], n_past: int, sequence: int = 0) -> bytes:
    phase = Phase.DECODE if len(tokens) == 1 else Phase.PREFILL
    llm.context.eval_sequences(
        [SequenceTokens(sequence, tokens, n_past, sequence, phase)]
    )
    return logits(llm)


def in_passes(llm: Llama, tokens: list[int], widths: list[int]) -> dict[int, bytes]:
    """Returns the logits after each pass, keyed by the number of tokens evaluated so
    far."""
    found, n_past = {}, 0
    for width in widths:
        found[n_past + width] = computed(llm, tokens[n_past : n_past + width], n_past)
        n_past += width
    return found


@pytest.fixture
def alone(llm: Llama) -> dict[int, bytes]:
    """Returns the logits after each token. The tokens are evaluated one by one in an
    empty context."""
    llm.context.clear()
    return in_passes(llm, tokens_of(llm, 1, N_TOKENS), [1] * N_TOKENS)


@needs_kernels
@pytest.mark.parametrize(
    "widths", [[60], [1, 59], [7, 1, 33, 2, 17], [16, 16, 16, 12], [31, 29]]
)
def test_a_prompt_of_the_demo_has_equal_bits_at_any_pass_width(
    llm: Llama, alone: dict[int, bytes], widths: list[int]
) -> None:
    llm.context.clear()
    for n, found in in_passes(llm, tokens_of(llm, 1, N_TOKENS), widths).items():
        assert found == alone[n], f"after {n} tokens"


TINY = sorted(name for name in PRESETS if name.startswith("tiny-"))


@needs_kernels
@pytest.mark.parametrize(
    ("preset", "quant"),
    [(preset, "q4_k_m") for preset in TINY]
    + [("tiny-mixtral", quant) for quant in QUANTS],
)
def test_every_model_has_equal_bits_at_any_pass_width(
    tiny: TinyModel, preset: str, quant: str
) -> None:
    with Llama(
        tiny(preset, quant), n_ctx=N_CELLS, n_seq_max=2, flash_attn=True, verbose=False
    ) as llm:
        tokens = tokens_of(llm, 1, N_TOKENS)
        one_by_one = in_passes(llm, tokens, [1] * N_TOKENS)
        for widths in [60], [7, 1, 33, 2, 17]:
            llm.context.clear()
            for n, found in in_passes(llm, tokens, widths).items():
                assert found == one_by_one[n], (
                    f"after {n} tokens, in passes of {widths}"
                )


@needs_kernels
def test_other_sequences_in_pass_and_cache_change_no_bit(
    llm: Llama, alone: dict[int, bytes]
) -> None:
    llm.context.clear()
    tokens, others = tokens_of(llm, 1, N_TOKENS), tokens_of(llm, 2, 80)
    computed(llm, others[:50], 0, sequence=1)
    # A pass with both sequences, then one with sequence 1 alone.
    for n in range(0, 30, 3):
        llm.context.eval_sequences(
            [
                SequenceTokens(
                    1,
                    others[50 + n : 52 + n],
                    50 + n,
                    1,
                    Phase.PREFILL,
                    wants_logits=False,
                ),
                SequenceTokens(0, tokens[n : n + 3], n, 0, Phase.PREFILL),
            ]
        )
        assert logits(llm) == alone[n + 3]
        llm.context.eval_sequences(
            [SequenceTokens(1, others[52 + n : 53 + n], 52 + n, 1, Phase.DECODE)]
        )
    # Frees cells before and between the cells of sequence 0.
    llm.context.truncate(0, sequence=1)
    for n in range(30, N_TOKENS):
        assert computed(llm, tokens[n : n + 1], n) == alone[n + 1], (
            f"after {n + 1} tokens"
        )


@needs_kernels
def test_a_prefix_copied_from_another_sequence_has_equal_bits(
    llm: Llama, alone: dict[int, bytes]
) -> None:
    llm.context.clear()
    tokens = tokens_of(llm, 1, N_TOKENS)
    computed(llm, tokens[:41], 0, sequence=2)
    assert llm.context.copy(2, 0, 37)
    computed(llm, tokens_of(llm, 3, 9), 41, sequence=2)
    for n in range(37, N_TOKENS):
        assert computed(llm, tokens[n : n + 1], n) == alone[n + 1], (
            f"after {n + 1} tokens"
        )


N_KV = 520  # flash attention splits the sums over 512 or more cells into parts


def logits_with(counts: list[int], **options: Any) -> Logits:
    """Evaluates N_KV random tokens and six greedy tokens. Returns the logits of the
    greedy tokens.

    Each evaluation uses the next thread count of `counts`, in a cycle.
    """
    with Llama(
        DEMO, n_ctx=1024, n_threads=3, logits_all=True, verbose=False, **options
    ) as llm:
        set_n_threads, context, turns = (
            library.llama_cpp().llama_set_n_threads,
            llm._ctx.ctx,
            itertools.cycle(counts),
        )

        def next_count() -> None:
            n_threads = next(turns)
            set_n_threads(context, n_threads, n_threads)

        return greedy_logits(llm, random_prompt(llm, N_KV), 6, next_count)[N_KV:]


@pytest.mark.parametrize("flash_attn", [False, True], ids=["plain", "flash"])
def test_changing_thread_counts_change_no_bit(flash_attn: bool) -> None:
    with hooks_off():
        expected = logits_with([3], flash_attn=flash_attn)
        assert not flash_attn or np.array_equal(
            logits_with([3], flash_attn=None), expected
        ), "the CPU has it"
    assert (
        np.array_equal(logits_with([3], expert_cache="50%"), expected) is not flash_attn
    ), "off is the default"
    for counts in ([3], [1], [2, 1, 3]):
        assert np.array_equal(
            logits_with(counts, flash_attn=flash_attn, expert_cache="50%"), expected
        ), counts


def test_the_automatic_thread_count_follows_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = 1.0
    monkeypatch.setattr(threadpool, "PERIOD_S", 0.0)
    monkeypatch.setattr(ProcessorUse, "others", lambda _self: others)
    monkeypatch.setattr("moegguf.engine.load.count_cpus", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    with Llama(DEMO, n_ctx=64, verbose=False) as llm:
        assert llm.stats().n_threads == 2
        llm.eval([5, 6, 7])
        assert (
            llm.stats().n_threads
            == library.llama_cpp().llama_n_threads(llm._ctx.ctx)
            == 1
        )
        others = 0.0
        llm.eval([8])
        assert (
            llm.stats().n_threads
            == library.llama_cpp().llama_n_threads(llm._ctx.ctx)
            == 2
        )


@pytest.mark.parametrize("options", [{"n_threads": 2}, {"n_threads_batch": 2}])
def test_given_thread_counts_are_kept(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threadpool, "PERIOD_S", 0.0)
    monkeypatch.setattr(ProcessorUse, "others", lambda _self: 64.0)
    with Llama(DEMO, n_ctx=64, verbose=False, **options) as llm:
        before = llm.stats().n_threads
        llm.eval([5, 6, 7])
        llm.eval([8])
        assert llm.stats().n_threads == before == llm.n_threads


def test_load_during_idle_time_leaves_the_thread_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threadpool, "PERIOD_S", 0.0)
    # Any time between two passes is treated as idle.
    monkeypatch.setattr(threadpool, "IDLE_S", 0.0)
    monkeypatch.setattr(ProcessorUse, "others", lambda _self: 64.0)
    monkeypatch.setattr("moegguf.engine.load.count_cpus", lambda: 2)
    with Llama(DEMO, n_ctx=64, verbose=False) as llm:
        llm.eval([5, 6, 7])
        llm.eval([8])
        assert llm.stats().n_threads == 2
