"""Tests models with a recurrent state: with batching and drafts, answers have the same
logprobs as solo answers.

Each sequence has its own state. The model has slots for some experts. Tests use passes
of several widths, prefixes that other sequences have evaluated, failed passes, and
partly wrong drafts. The reference is a load of the model with one sequence and without
drafts.
"""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import answering
import numpy as np
import pytest
from answering import (
    Answer,
    Received,
    Scripted,
    TinyModel,
    answers_of,
    answers_together,
    running,
    solo,
    text_of,
)
from eager import Eager
from hybrid_shapes import SHAPES, write_hybrid
from running import random_prompt

from moegguf.engine.drafts import Draft, Drafts, Source
from moegguf.engine.llama import Llama
from moegguf.engine.memory import DRAFT_TOKENS, kv_bytes
from moegguf.engine.recurrent import ROLLBACK_ARCHS, is_stateful
from moegguf.generate import drafting
from moegguf.generate.request import Request, TokenLogprob
from moegguf.gguf.experts import read_layout
from moegguf.processor import has_kernels, read_processor
from moegguf.quantities import MIB
from moegguf.settings import read_environment
from moegguf.testing.library import arm_fault
from tools.models import PRESETS, Shape, write_model

pytestmark = pytest.mark.skipif(
    not has_kernels(read_processor(), read_environment().kernels),
    reason="bits depend on the pass here",
)

HYBRIDS = [
    "tiny-qwen3next", "tiny-qwen35moe", "tiny-qwen4exp", "tiny-nemotron", "tiny-lfm2moe", "tiny-kimi-linear",
    "tiny-bailingmoe3", "tiny-granitehybrid", "tiny-deepseek4",
]  # fmt: skip
N_SEQ = 8
OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "n_threads": 1,
    "flash_attn": None,
    "verbose": False,
}
N_BACK = DRAFT_TOKENS[0]


@pytest.fixture(
    scope="module",
    params=[*HYBRIDS, *(pytest.param(arch, marks=pytest.mark.slow) for arch in SHAPES)],
)
def pair(
    request: pytest.FixtureRequest,
    tiny: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Llama, Llama]]:
    """Loads one model twice and yields both. The first has eight sequences and slots
    for 40 % of the experts. The second has one sequence and the default expert cache,
    which holds all experts.
    """
    if request.param in SHAPES:
        path = write_hybrid(
            tmp_path_factory.mktemp("hybrid") / "model.gguf", request.param
        )
    else:
        path = tiny(request.param)
    with warnings.catch_warnings():
        # Hides warnings about drafts, which depend on the CPU and the model.
        warnings.simplefilter("ignore")
        many = Llama(
            path,
            n_seq_max=N_SEQ,
            expert_cache="40%",
            draft="ngram",
            context_store=0,
            **OPTIONS,
        )
    with many, Llama(path, draft="off", context_store=0, **OPTIONS) as one:
        yield many, one


of_tokens = partial(answering.of_tokens, max_tokens=12)


def check_same(
    received: Sequence[Received], expected: Sequence[list[TokenLogprob]]
) -> None:
    assert [each.error for each in received] == [None] * len(received)
    assert [each.logprobs for each in received] == list(expected)


def prompts_of(llm: Llama, shared: int = 0) -> list[list[int]]:
    """Returns ten random prompts of different lengths. All begin with the same `shared`
    tokens."""
    begin = random_prompt(llm, shared, seed=99)
    return [
        begin + random_prompt(llm, n, seed=n)
        for n in (1, 7, 150, 33, 64, 65, 2, 100, 20, 5)
    ]


@contextmanager
def undrafted(llm: Llama, drafts: Drafts | None = None) -> Iterator[None]:
    """Replaces the model's drafts with `drafts` inside the `with` block. None: nothing
    is drafted."""
    llm.drafts, before = drafts, llm.drafts
    try:
        yield
    finally:
        llm.drafts = before


@pytest.mark.parametrize("step_tokens", [None, 13, 29])
def test_batched_answers_have_the_bits_of_solo_answers(
    pair: tuple[Llama, Llama], step_tokens: int | None
) -> None:
    many, one = pair
    assert many.n_seq_max == N_SEQ
    requests = [of_tokens(one, tokens) for tokens in prompts_of(one)]
    expected = [solo(one, request) for request in requests]
    many.context.clear()
    script = Scripted()
    with undrafted(many):
        check_same(answers_together(many, requests, script, step_tokens), expected)
    assert max(len(step.sequences) for step in script.steps) == N_SEQ


def test_a_shared_beginning_of_prompts_is_computed_once(
    pair: tuple[Llama, Llama],
) -> None:
    """A state can be copied only when its sequence has evaluated exactly the shared
    tokens."""
    many, one = pair
    requests = [of_tokens(one, tokens) for tokens in prompts_of(one, shared=70)[:5]]
    expected = [solo(one, request) for request in requests]
    many.context.clear()
    with undrafted(many):
        received = answers_together(many, requests)
    check_same(received, expected)
    assert [each.summary.cached_tokens for each in received] == [0, 70, 70, 70, 70]


def test_a_prompt_that_continues_an_answer_computes_only_new_tokens(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    first = of_tokens(one, random_prompt(one, 40))
    many.context.clear()
    with undrafted(many), running(many) as loop:
        before = answers_of(loop, [first])[0].summary.context
        followed = of_tokens(one, [*before, 7, 8, 9])
        again = answers_of(loop, [followed]) + answers_of(loop, [first])
    check_same(again, [solo(one, followed), solo(one, first)])
    assert [each.summary.cached_tokens for each in again] == [len(before) - 1, 0]


def test_random_interleavings_give_the_answers_of_solo_requests(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    random = np.random.default_rng(5)
    shared = random_prompt(one, 60, seed=3)
    requests = []
    for number in range(24):
        tokens = shared[: int(random.integers(0, 60))] + random_prompt(
            one, int(random.integers(1, 50)), seed=number
        )
        requests.append(of_tokens(one, tokens, max_tokens=int(random.integers(1, 14))))

    class Some:
        def choose(self, running: tuple[Any, ...]) -> list[Any]:
            return [each for each in running if random.random() < 0.7]

        def ran(self, step: object) -> None:
            pass

    many.context.clear()
    with undrafted(many):
        received = answers_together(
            many, requests, Some(), step_tokens=int(random.integers(4, 40))
        )
    check_same(received, [solo(one, request) for request in requests])


@pytest.mark.slow
def test_eighty_answers_have_the_bits_of_solo_answers(
    pair: tuple[Llama, Llama],
) -> None:
    """Checks drafted answers in passes of several widths, some with a shared
    beginning. All models together generate 1,040 answers."""
    many, one = pair
    random = np.random.default_rng(7)
    begin = random_prompt(one, 90, seed=99)
    n_reused = 0
    for step_tokens in (None, 13, 29, 7):
        requests = [
            of_tokens(
                one,
                begin[: int(random.choice([0, 0, 33, 64, 90]))]
                + random_prompt(one, int(random.integers(1, 200)), seed=number),
                max_tokens=int(random.integers(6, 20)),
            )
            for number in range(20)
        ]
        expected = [solo(one, request) for request in requests]
        many.context.clear()
        received = answers_together(many, requests, Scripted(), step_tokens)
        check_same(received, expected)
        n_reused += sum(each.summary.cached_tokens > 0 for each in received)
    assert n_reused > 0


def test_glm5_sequences_that_share_cells_have_the_bits_of_solo_answers(
    tmp_path: Path,
) -> None:
    """While sequences share cells, llama.cpp does not use pooled keys from the cache,
    but pools all keys again. These keys must be rounded as those in the cache."""
    path = write_hybrid(tmp_path / "model.gguf", "glm5-next")
    one = Llama(path, draft="off", context_store=0, **OPTIONS)
    many = Llama(path, n_seq_max=4, draft="off", context_store=0, **OPTIONS)
    with one, many:
        begin = random_prompt(one, 64, seed=99)
        requests = [
            of_tokens(one, begin + random_prompt(one, n_tokens, seed=n_tokens))
            for n_tokens in (5, 33, 64, 100, 17, 80, 2, 51, 120, 9, 140, 71)
        ]
        expected = [solo(one, request) for request in requests]
        received = answers_together(many, requests, step_tokens=7)
        assert sum(each.summary.cached_tokens == 64 for each in received) > 4
        check_same(received, expected)


@pytest.mark.parametrize("has_whole_window", [True, False])
def test_answers_with_a_sliding_window_have_the_bits_of_solo_answers(
    tiny: TinyModel, has_whole_window: bool
) -> None:
    """All sequences share cells. Without the whole window, llama.cpp reuses cells that
    have left the window."""
    path = tiny("tiny-gemma4")
    window = {"swa_full": has_whole_window, "n_ubatch": 64}
    many = Llama(
        path,
        n_seq_max=4,
        expert_cache="40%",
        draft="ngram",
        context_store=0,
        **OPTIONS | window,
    )
    with many, Llama(path, draft="off", context_store=0, **OPTIONS) as one:
        requests = [of_tokens(one, tokens) for tokens in prompts_of(one, shared=200)]
        expected = [solo(one, request) for request in requests]
        received = answers_together(many, requests, step_tokens=29)
        check_same(received, expected)
        assert sum(each.summary.cached_tokens == 200 for each in received) > 4


def test_a_failed_pass_leaves_no_partial_state(pair: tuple[Llama, Llama]) -> None:
    many, one = pair
    requests = [of_tokens(one, tokens) for tokens in prompts_of(one)[:5]]
    expected = [solo(one, request) for request in requests]
    many.context.clear()

    def fail(step: int) -> None:
        arm_fault("read", 1 if step % 4 == 0 else 0, errno=errno.EIO, sticky=True)

    with undrafted(many):
        received = answers_together(many, requests, Scripted(fail), step_tokens=20)
        arm_fault("read", 0)
        assert any(each.error for each in received)
        for each, logprobs in zip(received, expected, strict=True):
            assert each.logprobs == (
                logprobs if each.error is None else logprobs[: len(each.logprobs)]
            )
        check_same(answers_together(many, requests), expected)


class Recalled(Drafts):
    """Drafts the continuation of known token sequences, with about a fifth of the
    tokens wrong."""

    def __init__(self, known: Sequence[Sequence[int]], n_seq: int) -> None:
        super().__init__(n_seq, N_BACK, (0, 0))
        self._known = [[*text] for text in known]
        self._texts: list[list[int]] = [[] for _ in range(n_seq)]
        self._random = np.random.default_rng(1)

    def set_tokens(self, sequence: int, n_kept: int, tokens: Sequence[int]) -> None:
        super().set_tokens(sequence, n_kept, tokens)
        self._texts[sequence][n_kept:] = tokens

    def draft(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[Draft]:
        drafts = []
        n_most = int(self._random.integers(1, N_BACK + 1))
        for sequence, widths in wanted:
            text = self._texts[sequence]
            rest = next(
                (
                    known[len(text) :]
                    for known in self._known
                    if known[: len(text)] == text
                ),
                [],
            )
            tokens = rest[: min(n_most, widths[0])]
            drafts.append(
                Draft(
                    Source.MODEL,
                    tuple(t ^ 1 if self._random.random() < 0.2 else t for t in tokens),
                )
            )
        return drafts

    def accept(self, sequence: int, n: int) -> None:
        pass


@pytest.mark.parametrize("n_together", [1, 3])
def test_partly_wrong_drafts_change_no_token(
    pair: tuple[Llama, Llama], monkeypatch: pytest.MonkeyPatch, n_together: int
) -> None:
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    many, one = pair
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40}
    requests = [
        of_tokens(one, random_prompt(one, 30, seed=n), seed=n, **sampled)
        for n in range(6)
    ]
    expected = [solo(one, request) for request in requests]
    texts = [answer_tokens(one, request) for request in requests]
    before = many.stats()
    many.context.clear()
    with undrafted(many, Recalled(texts, N_SEQ)):
        for first in range(0, len(requests), n_together):
            received = answers_together(many, requests[first : first + n_together])
            check_same(received, expected[first : first + n_together])
    counted = many.stats() - before
    assert 20 < counted.accepted_tokens < counted.drafted_tokens
    assert sum(each.summary.prompt_tokens for each in received) == 30 * n_together, (
        "nothing is computed again"
    )


def answer_tokens(llm: Llama, request: Request) -> tuple[int, ...]:
    llm.reset()
    answer = Answer(llm, request)
    answer.deltas()
    return answer.summary.context


def test_a_stop_string_within_a_draft_leaves_a_state_to_continue(
    pair: tuple[Llama, Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that were evaluated beyond the stop string are rolled back, so the next
    request reuses the context. With checkpoints, the model goes back to the beginning
    of the draft."""
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    many, one = pair
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    tokens = random_prompt(one, 30)
    whole = Answer(one, of_tokens(one, tokens, **options))
    text = text_of(whole.deltas())
    request = of_tokens(one, tokens, stop=(text[len(text) // 2 :][:3],), **options)
    expected = solo(one, request)
    many.context.clear()
    with (
        undrafted(many, Recalled([whole.summary.context], N_SEQ)),
        running(many) as loop,
    ):
        received = answers_of(loop, [request])
        followed = of_tokens(one, [*received[0].summary.context, 7, 8, 9])
        again = answers_of(loop, [followed])
    check_same(received, [expected])
    assert received[0].summary.stop_string
    check_same(again, [solo(one, followed)])
    n_again = N_BACK if many.context.returns_to_checkpoints else 0
    assert (
        again[0].summary.cached_tokens >= len(received[0].summary.context) - 1 - n_again
    )


N_FULL = 96  # tokens of a full context in the tests of shifts
# A logit bias for a few tokens, so that the text repeats and n-grams draft.
FEW = dict.fromkeys(range(100, 106), 1000.0)


def continued(
    llm: Llama, tokens: Sequence[int], n_new: int, n_keep: int
) -> tuple[list[TokenLogprob], list[list[int]]]:
    """Returns the logprobs of an answer of `n_new` tokens that continues beyond a full
    context, and the tokens of each full context.

    At each shift, a new prompt has the tokens that remain. `n_keep` tokens are kept.
    """
    context, logprobs, contexts = [*tokens], list[TokenLogprob](), list[list[int]]()
    while len(logprobs) < n_new:
        if contexts:
            del context[n_keep : n_keep + (N_FULL - 1 - n_keep) // 2]
        n = min(n_new - len(logprobs), N_FULL - len(context))
        found = solo(llm, of_tokens(llm, context, max_tokens=n, logit_bias=FEW))
        logprobs += found
        context += [each.token for each in found]
        contexts.append([*context])
    return logprobs, contexts


def test_a_shifted_context_has_the_bits_of_a_prompt_of_the_remaining_tokens(
    pair: tuple[Llama, Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model cannot move its cells, so the remaining tokens are evaluated again,
    beside other sequences. The second answer does not fill its context."""
    many, one = pair
    assert not many.context.can_shift
    n_bos = len(one.vocabulary.bos_tokens)
    requests, expected, texts, n_shifts = [], [], list[list[int]](), []
    for n_prompt, n_new, num_keep in ((40, 150, 4), (60, 30, 4), (70, 60, -1)):
        tokens = random_prompt(one, n_prompt, seed=n_prompt)
        requests.append(
            of_tokens(
                one, tokens, max_tokens=n_new, num_keep=num_keep, num_ctx=N_FULL,
                exact=num_keep > 0, logit_bias=FEW,
            )
        )  # fmt: skip
        n_keep = n_prompt if num_keep < 0 else num_keep + n_bos
        logprobs, contexts = continued(one, tokens, n_new, n_keep)
        expected.append(logprobs)
        texts += contexts
        n_shifts.append(len(contexts) - 1)
    assert n_shifts[0] > 1 and n_shifts[1] == 0 and n_shifts[2] > 1
    assert [solo(one, request) for request in requests] == expected
    script = Scripted()
    with undrafted(many):
        many.context.clear()
        received = answers_together(many, requests, script, step_tokens=13)
    check_same(received, expected)
    assert max(len(step.sequences) for step in script.steps) == len(requests)
    assert [each.summary.n_shifts for each in received] == n_shifts
    assert [each.summary.prompt_tokens for each in received] == [40, 60, 70]
    assert [each.summary.finish for each in received] == ["length"] * 3
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    for drafts in (many.drafts, Recalled(texts, N_SEQ)):
        before = many.stats()
        with undrafted(many, drafts):
            many.context.clear()
            check_same(answers_together(many, requests), expected)
        assert (many.stats() - before).accepted_tokens > 0


def test_an_answer_can_be_cancelled_while_its_context_is_evaluated_again(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    options: dict[str, Any] = {"max_tokens": 100, "num_ctx": N_FULL}
    first, second = (
        of_tokens(one, random_prompt(one, n, seed=n), **options) for n in (60, 20)
    )
    expected = [solo(one, request) for request in (first, second)]

    class CancelShifted(Scripted):
        def choose(self, running: tuple[Any, ...]) -> Any:
            for each in running:
                if each.request is first and each.generated and each.n_pending > 1:
                    assert each.summary.n_shifts == 1
                    if each.n_evaluated:
                        loop.cancel(each)
            return super().choose(running)

    many.context.clear()
    with undrafted(many), running(many, CancelShifted(), 13) as loop:
        received = answers_of(loop, [first, second])
    summary = received[0].summary
    assert (summary.finish, summary.answer_tokens) == ("cancelled", N_FULL - 60)
    check_same(received, [expected[0][: N_FULL - 60], expected[1]])


def test_truncate_goes_back_as_far_as_snapshots_reach(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    llm = many.context
    if one.layout.arch not in ROLLBACK_ARCHS:
        pytest.skip("llama.cpp does not roll this state back")
    tokens = random_prompt(one, 40)
    many.context.clear()
    many.eval(tokens)
    assert llm.truncate(40 - N_BACK), "as far as snapshots reach"
    assert not llm.truncate(40 - N_BACK - 1), "once"
    many.eval(tokens)
    assert not llm.truncate(40 - N_BACK - 1), "no further"
    assert many.n_tokens == 0


@pytest.mark.parametrize("n_lost", [1, 3, N_BACK])
def test_a_truncated_state_has_the_bits_of_a_shorter_one(
    pair: tuple[Llama, Llama], n_lost: int
) -> None:
    many, one = pair
    if one.layout.arch not in ROLLBACK_ARCHS:
        pytest.skip("llama.cpp does not roll this state back")
    tokens = random_prompt(one, 140)
    one.reset()
    one.eval([*tokens[: 100 - n_lost], *tokens[120:]])
    many.context.clear()
    many.eval(tokens[:60])
    many.eval(tokens[60:100])
    assert many.context.truncate(100 - n_lost)
    many.eval(tokens[120:])
    assert np.array_equal(many.context.logits(), one.context.logits())


def test_truncate_refuses_stale_snapshots_after_single_token_passes(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    tokens = random_prompt(one, 60)
    many.context.clear()
    many.eval(tokens[:50])
    for token in tokens[50:53]:
        many.eval([token])
    assert not many.context.truncate(51), "its snapshot is of another token"
    assert many.n_tokens == 0
    many.eval(tokens[:51])
    one.reset()
    one.eval(tokens[:51])
    assert np.array_equal(many.context.logits(), one.context.logits())


@pytest.mark.parametrize("preset", [*HYBRIDS, "tiny-gpt-oss", "tiny-gemma4"])
def test_caches_and_states_have_the_planned_bytes(
    tiny: TinyModel, preset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compares the planned bytes with the buffer sizes that llama.cpp logs."""
    options = {**OPTIONS, "n_ctx": 1024, "flash_attn": True, "verbose": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = Llama(
            tiny(preset), n_seq_max=5, draft="ngram", context_store=0, **options
        )
    llm.close()
    logged = re.findall(
        r"(?:KV|RS|state) buffer size = *([0-9.]+) MiB", capfd.readouterr().err
    )
    assert len(logged) >= 2
    plan, rolls_back = llm.plan, llm.layout.arch in ROLLBACK_ARCHS
    assert plan.context.n_rs_seq == N_BACK * rolls_back
    assert (
        any(f"at most {N_BACK} tokens" in reason for reason in plan.reasons)
        == rolls_back
    )
    assert plan.context.n_checkpoints == (is_stateful(llm.layout) and not rolls_back)
    counted = kv_bytes(
        llm.layout,
        plan.context.kv_tokens,
        1,
        1,
        5,
        plan.context.n_rs_seq + plan.context.n_checkpoints,
    )
    assert counted == plan.needs.kv_bytes
    rounding = 0.005 * len(logged)
    assert counted / MIB == pytest.approx(sum(map(float, logged)), abs=rounding)


@pytest.mark.parametrize(
    "preset",
    [
        "tiny-qwen3next",
        "tiny-qwen35moe",
        "tiny-nemotron",
        "tiny-bailingmoe3",
        "tiny-deepseek4",
    ],
)
def test_mtp_heads_draft_and_change_no_token(
    tiny: TinyModel, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    with warnings.catch_warnings():
        # Hides warnings about drafts, which depend on the CPU and the model.
        warnings.simplefilter("ignore")
        llm = Llama(
            tiny(preset),
            n_seq_max=3,
            expert_cache="40%",
            draft="mtp",
            context_store=0,
            **OPTIONS,
        )
    with llm:
        assert llm._drafts.in_use == "mtp"
        rolls_back = llm.layout.arch in ROLLBACK_ARCHS
        assert llm.plan.context.n_rs_seq == N_BACK * rolls_back
        assert llm.context.returns_to_checkpoints == (not rolls_back)
        headless = read_layout(tiny(preset))
        n_bytes = headless.dense_bytes + headless.unused_bytes
        assert llm.plan.needs.dense_bytes >= n_bytes, "the plan counts the heads"
        assert kv_bytes(llm.layout, 256) > kv_bytes(headless, 256)
        prompts = [random_prompt(llm, 40, seed=n) for n in range(3)]
        requests = [
            of_tokens(llm, tokens, temperature=0.3, seed=1, max_tokens=40)
            for tokens in prompts
        ]
        with undrafted(llm):
            expected = [
                answers_together(llm, [request])[0].logprobs for request in requests
            ]
        before = llm.stats()
        for first, n_together in ((0, 1), (1, 1), (2, 1), (0, 3)):
            llm.context.clear()
            received = answers_together(llm, requests[first : first + n_together])
            check_same(received, expected[first : first + n_together])
            assert [each.summary.prompt_tokens for each in received] == [
                40
            ] * n_together
        counted = llm.stats() - before
        assert counted.drafted_tokens > counted.accepted_tokens


@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_model_with_a_state_drafts_and_changes_no_token(
    tiny: TinyModel, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    preset = "tiny-qwen35moe"
    draft = write_model(tmp_path / "draft.gguf", PRESETS[preset], "q4_0", seed=seed)[0]
    options = {"n_seq_max": 3, "expert_cache": "40%", "context_store": 0, **OPTIONS}
    with warnings.catch_warnings():
        # Hides warnings about drafts, which depend on the CPU and the model.
        warnings.simplefilter("ignore")
        llm = Llama(tiny(preset), draft=draft, **options)
    with llm:
        assert llm._drafts.in_use == str(draft)
        requests = [
            of_tokens(llm, random_prompt(llm, 40, seed=n), max_tokens=40)
            for n in range(3)
        ]
        with undrafted(llm):
            expected = [
                answers_together(llm, [request])[0].logprobs for request in requests
            ]
        before = llm.stats()
        for request, logprobs in zip(requests, expected, strict=True):
            llm.context.clear()
            check_same(answers_together(llm, [request]), [logprobs])
        llm.context.clear()
        check_same(answers_together(llm, requests), expected)
        counted = llm.stats() - before
        assert counted.drafted_tokens > 0
        # Both files have the same weights if the seed is 0.
        assert (counted.draft_acceptance > 0.95) == (seed == 0)


@pytest.mark.parametrize(
    "shape",
    [
        replace(PRESETS["tiny-deepseek4"], indexer_head_size=128),
        replace(PRESETS["tiny-glm-flash"], n_lora_q=0),
    ],
    ids=lambda shape: shape.arch,
)
def test_mtp_heads_that_crash_llama_cpp_are_left_out(
    tmp_path: Path, shape: Shape
) -> None:
    path = write_model(tmp_path / "m.gguf", shape, "q4_0")[0]
    layout = read_layout(path)
    assert layout.n_layer_nextn == 0 and layout.unused_bytes > 0
