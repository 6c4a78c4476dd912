"""Tests of models with sliding windows whose KV cache has, for layers with a window,
only the cells of the window and of a pass.

Each test also holds with cells for the whole context (`swa_full=True`), and compares
with answers in such a context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from answering import TinyModel, prompt_of
from eager import Eager

from moegguf import Engine, EngineAnswer, Llama, Sampling
from moegguf.engine.prefix_cache import BLOCK_TOKENS
from moegguf.engine.sequences import SequenceTokens
from moegguf.generate import drafting
from moegguf.native.events import Phase
from moegguf.processor import has_kernels, read_processor
from moegguf.quantities import MIB
from moegguf.settings import read_environment

pytestmark = [
    pytest.mark.usefixtures("own_home"),
    pytest.mark.skipif(
        not has_kernels(read_processor(), read_environment().kernels),
        reason="bits depend on the pass here",
    ),
]
PRESETS = ["tiny-gpt-oss", "tiny-gemma4"]
N_CTX, N_PROMPT, N_NEW = 2048, 1000, 100
N_UBATCH = 64  # the layers with a window have at most 256 or 512 cells


def engine(model: Path, **options: Any) -> Engine:
    return Engine(
        model,
        **{"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "n_threads": 1, "parallel": 1}
        | options,
    )


def answers(
    engine: Engine, prompts: Sequence[list[int]], **sampling: Any
) -> list[EngineAnswer]:
    wanted = {"temperature": 0.0, "max_tokens": N_NEW, "ignore_eos": True}
    found = engine.generate(
        prompts, Sampling(**wanted | sampling), n_logprobs=20, return_context=True
    )
    assert [each.error for each in found] == [None] * len(prompts)
    return found


def bits(found: Sequence[EngineAnswer]) -> list[Any]:
    return [each.logprobs for each in found]


def fresh(model: Path, prompts: Sequence[list[int]], **sampling: Any) -> list[Any]:
    """Returns the logprobs of answers in contexts with cells for all tokens."""
    with engine(model, context_store=0, draft="off") as whole:
        assert whole.llm.context_params.swa_full
        return [bits(answers(whole, [prompt], **sampling))[0] for prompt in prompts]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("options", [{}, {"n_seq_max": 3}, {"swa_full": True}])
def test_the_plan_counts_the_kv_cache_that_llama_cpp_allocates(
    preset: str, options: Any, tiny: TinyModel, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = Llama(tiny(preset), n_ctx=8192, flash_attn=True, verbose=True, **options)
    llm.close()
    logged = re.findall(r"KV buffer size = *([0-9.]+) MiB", capfd.readouterr().err)
    assert len(logged) == 2
    planned = llm.plan.needs.kv_bytes
    assert planned / MIB == pytest.approx(sum(map(float, logged)), abs=0.01)
    whole = Llama.estimate(
        tiny(preset), n_ctx=8192, flash_attn=True, **options | {"swa_full": True}
    )
    if "swa_full" not in options:
        assert planned < 0.6 * whole.needs.kv_bytes


def test_windows_are_whole_if_no_context_is_stored(tiny: TinyModel) -> None:
    path = tiny("tiny-gpt-oss")
    for options, is_whole in (
        ({}, False), ({"swa_full": True}, True), ({"context_store": 0}, True), ({"logits_all": True}, True),
        ({"context_store": 0, "swa_full": False}, False),
    ):  # fmt: skip
        with Llama(path, verbose=False, **options) as llm:
            assert llm.context_params.swa_full == is_whole


@pytest.mark.parametrize("preset", PRESETS)
def test_a_prompt_with_an_edited_end_continues_from_the_last_kept_block(
    preset: str, tiny: TinyModel
) -> None:
    path, prompt = tiny(preset), prompt_of(N_PROMPT)
    edited = [[*prompt[:-n], *prompt_of(n, seed=n)] for n in (20, 150, 700)]
    expected = fresh(path, edited, max_tokens=8)
    with engine(path) as small:
        assert not small.llm.context_params.swa_full
        for other, wanted in zip(edited, expected, strict=True):
            answers(small, [prompt])
            found = answers(small, [other], max_tokens=8)
            assert bits(found) == [wanted]
            n_same = next(
                i for i, (a, b) in enumerate(zip(prompt, other, strict=True)) if a != b
            )
            assert n_same - found[0].summary.cached_tokens <= BLOCK_TOKENS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plain_prompt_with_an_edited_end_does_not_start_anew(
    preset: str, tiny: TinyModel
) -> None:
    """`Llama.generate` returns to a kept block as the engine does."""
    options: dict[str, Any] = {
        "n_ctx": N_CTX, "n_ubatch": N_UBATCH, "flash_attn": True, "n_threads": 1, "verbose": False,
    }  # fmt: skip
    prompt = prompt_of(N_PROMPT)
    other = [*prompt[:-300], *prompt_of(20, seed=1)]

    def greedy(llm: Llama, tokens: list[int]) -> list[int]:
        steps = llm.generate(tokens, temp=0.0)
        found = [next(steps) for _ in range(8)]
        steps.close()
        return found

    with Llama(tiny(preset), context_store=0, **options) as whole:
        expected = greedy(whole, other)
    with Llama(tiny(preset), **options) as small:
        greedy(small, prompt)
        before = small.stats()
        assert greedy(small, other) == expected
        n_computed = (small.stats() - before).tokens
        assert n_computed < 20 + 8 + 2 * BLOCK_TOKENS


@pytest.mark.parametrize("preset", PRESETS)
def test_prompts_with_the_same_beginning_get_the_bits_of_single_prompts(
    preset: str, tiny: TinyModel
) -> None:
    path, begin = tiny(preset), prompt_of(900)
    prompts = [
        [*begin[: 900 - 300 * (i % 3)], *prompt_of(10 + 3 * i, seed=i)]
        for i in range(9)
    ]
    expected = fresh(path, prompts)
    with engine(path, parallel=4, n_ubatch=512) as small:
        assert bits(answers(small, prompts)) == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_shared_cells_that_leave_a_window_do_not_fill_it(
    preset: str, tiny: TinyModel
) -> None:
    """llama.cpp does not reuse cells that several sequences share."""
    begin, rest = prompt_of(1000), prompt_of(200, seed=1)
    found = []
    for swa_full in (False, True):
        with Llama(
            tiny(preset), n_ctx=N_CTX, n_seq_max=4, n_ubatch=512, n_batch=512, flash_attn=True, verbose=False,
            swa_full=swa_full,
        ) as llm:  # fmt: skip
            context = llm.context

            def evaluate(sequence: int, tokens: list[int], n_past: int) -> bytes:
                chunk = SequenceTokens(sequence, tokens, n_past, 0, Phase.PREFILL)
                rows = context.eval_sequences([chunk])  # noqa: B023
                assert rows is not None, "the cells are full"
                return context.logits(rows[0]).tobytes()  # noqa: B023

            evaluate(1, begin[:500], 0)
            evaluate(1, begin[500:], 500)
            assert context.copy(1, 2, 1000) and context.copy(1, 3, 1000)
            found.append([evaluate(i, rest, 1000) for i in (1, 2, 3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("preset", PRESETS)
def test_rejected_drafts_and_restored_contexts_change_no_bits(
    preset: str, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    path, prompt = tiny(preset), [*prompt_of(40) * 20, *prompt_of(10, seed=1)]
    few = dict.fromkeys(range(100, 106), 1000.0)  # the text repeats
    (expected,) = fresh(path, [prompt], logit_bias=few, temperature=1.0, seed=1)
    for n_from_disk in (0, len(prompt) - 1):
        with engine(path, draft="ngram") as small:
            found = answers(small, [prompt], logit_bias=few, temperature=1.0, seed=1)
            assert bits(found) == [expected]
            assert found[0].summary.disk_tokens == n_from_disk
            stats = small.llm.stats()
            assert stats.drafted_tokens > stats.accepted_tokens > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_a_shifted_context_has_the_bits_of_a_prompt_of_the_remaining_tokens(
    preset: str, tiny: TinyModel
) -> None:
    path, prompt = tiny(preset), prompt_of(N_CTX - 40)
    n_keep = 10
    with engine(path) as small:
        assert not small.llm.context.can_shift
        (found,) = answers(small, [prompt], num_keep=n_keep)
        assert found.summary.n_shifts == 1
        n_keep += len(small.llm.vocabulary.bos_tokens)
    assert found.logprobs is not None
    n_before = N_CTX - len(prompt)
    held = [*prompt, *(each.token for each in found.logprobs[:n_before])]
    del held[n_keep : n_keep + (N_CTX - 1 - n_keep) // 2]
    (after,) = fresh(path, [held], max_tokens=N_NEW - n_before)
    assert found.logprobs[n_before:] == after
