"""Models with a recurrent state answer many requests together, and draft, with the tokens of solo answers.

Each sequence has a state of its own. Compared are answers with few slots, in passes of odd widths, after prefixes that
other sequences have computed, after failed passes, and with drafts that are partly wrong, to those of a model with one
sequence, every expert resident and no drafts.
"""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from answering import Answer, Received, Scripted, TinyModel, answers_of, answers_together, ask, endless, running
from eager import Eager
from running import random_prompt

from moegguf.engine.drafts import Draft, Drafts, Source
from moegguf.engine.llama import Llama
from moegguf.engine.memory import DRAFT_TOKENS, kv_bytes
from moegguf.engine.recurrent import ROLLBACK_ARCHS
from moegguf.generate import drafting
from moegguf.generate.request import Request, TokenLogprob
from moegguf.processor import has_kernels, read_processor
from moegguf.quantities import MIB
from moegguf.settings import read_environment
from moegguf.testing.library import arm_fault

pytestmark = pytest.mark.skipif(
    not has_kernels(read_processor(), read_environment().kernels), reason="bits depend on the pass here"
)

HYBRIDS = [
    "tiny-qwen35moe", "tiny-qwen4exp", "tiny-nemotron", "tiny-lfm2moe", "tiny-kimi-linear", "tiny-granitehybrid",
    "tiny-deepseek4",
]  # fmt: skip
N_SEQ = 8
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "flash_attn": None, "verbose": False}
N_BACK = DRAFT_TOKENS[0]


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(request: pytest.FixtureRequest, tiny: TinyModel) -> Iterator[tuple[Llama, Llama]]:
    """A model with eight sequences and room for 40 % of its experts, and the same with one, all resident."""
    path = tiny(request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that bits depend on the pass
        many = Llama(path, n_seq_max=N_SEQ, expert_cache="40%", draft="ngram", context_store=0, **OPTIONS)
    with many, Llama(path, draft="off", context_store=0, **OPTIONS) as one:
        yield many, one


def of_tokens(llm: Llama, tokens: Sequence[int], **options: Any) -> Request:
    options = {"max_tokens": 12, "n_logprobs": 2, "logit_bias": endless(llm), "return_context": True, **options}
    return ask(prompt="", context=tuple(tokens), **options)


def solo(llm: Llama, request: Request) -> list[TokenLogprob]:
    llm.reset()
    return [logprob for delta in Answer(llm, request).deltas() for logprob in delta.logprobs]


def check_same(received: Sequence[Received], expected: Sequence[list[TokenLogprob]]) -> None:
    assert [each.error for each in received] == [None] * len(received)
    assert [each.logprobs for each in received] == list(expected)


def prompts_of(llm: Llama, shared: int = 0) -> list[list[int]]:
    """Prompts of many lengths, which begin with the same tokens."""
    begin = random_prompt(llm, shared, seed=99)
    return [begin + random_prompt(llm, n, seed=n) for n in (1, 7, 150, 33, 64, 65, 2, 100, 20, 5)]


@contextmanager
def undrafted(llm: Llama, drafts: Drafts | None = None) -> Iterator[None]:
    """The block in which nothing is drafted, or these drafts are."""
    llm.drafts, before = drafts, llm.drafts
    try:
        yield
    finally:
        llm.drafts = before


@pytest.mark.parametrize("step_tokens", [None, 13, 29])
def test_answers_together_have_the_bits_of_solo_ones(pair: tuple[Llama, Llama], step_tokens: int | None) -> None:
    many, one = pair
    assert many.n_seq_max == N_SEQ
    requests = [of_tokens(one, tokens) for tokens in prompts_of(one)]
    expected = [solo(one, request) for request in requests]
    many.context.clear()
    script = Scripted()
    with undrafted(many):
        check_same(answers_together(many, requests, script, step_tokens), expected)
    assert max(len(step.sequences) for step in script.steps) == N_SEQ


def test_prompts_that_begin_alike_compute_the_beginning_once(pair: tuple[Llama, Llama]) -> None:
    """A state is copied where it has seen the shared tokens and nothing more."""
    many, one = pair
    requests = [of_tokens(one, tokens) for tokens in prompts_of(one, shared=70)[:5]]
    expected = [solo(one, request) for request in requests]
    many.context.clear()
    with undrafted(many):
        received = answers_together(many, requests)
    check_same(received, expected)
    assert [each.summary.cached_tokens for each in received] == [0, 70, 70, 70, 70]


def test_a_prompt_that_goes_on_from_an_answer_computes_only_what_is_new(pair: tuple[Llama, Llama]) -> None:
    many, one = pair
    first = of_tokens(one, random_prompt(one, 40))
    many.context.clear()
    with undrafted(many), running(many) as loop:
        before = answers_of(loop, [first])[0].summary.context
        followed = of_tokens(one, [*before, 7, 8, 9])
        again = answers_of(loop, [followed]) + answers_of(loop, [first])
    check_same(again, [solo(one, followed), solo(one, first)])
    assert [each.summary.cached_tokens for each in again] == [len(before) - 1, 0]


def test_random_interleavings_give_the_answers_of_solo_requests(pair: tuple[Llama, Llama]) -> None:
    many, one = pair
    random = np.random.default_rng(5)
    shared = random_prompt(one, 60, seed=3)
    requests = []
    for number in range(24):
        tokens = shared[: int(random.integers(0, 60))] + random_prompt(one, int(random.integers(1, 50)), seed=number)
        requests.append(of_tokens(one, tokens, max_tokens=int(random.integers(1, 14))))

    class Some:
        def choose(self, running: tuple[Any, ...]) -> list[Any]:
            return [each for each in running if random.random() < 0.7]

        def ran(self, step: object) -> None:
            pass

    many.context.clear()
    with undrafted(many):
        received = answers_together(many, requests, Some(), step_tokens=int(random.integers(4, 40)))
    check_same(received, [solo(one, request) for request in requests])


def test_an_expert_that_cannot_be_read_ends_one_answer_and_no_state_is_mixed_up(pair: tuple[Llama, Llama]) -> None:
    many, one = pair
    requests = [of_tokens(one, tokens) for tokens in prompts_of(one)[:5]]
    expected = [solo(one, request) for request in requests]
    many.context.clear()

    def fail(step: int) -> None:
        if step == 4:
            arm_fault("read", 1, errno=errno.EIO, sticky=True)

    with undrafted(many):
        received = answers_together(many, requests, Scripted(fail), step_tokens=20)
    assert [each.logprobs == logprobs[: len(each.logprobs)] for each, logprobs in zip(received, expected, strict=True)]
    for each, logprobs in zip(received, expected, strict=True):
        assert each.logprobs == (logprobs if each.error is None else logprobs[: len(each.logprobs)])


class Recalled(Drafts):
    """Drafts from known texts, with wrong tokens among them."""

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
            rest = next((known[len(text) :] for known in self._known if known[: len(text)] == text), [])
            tokens = rest[: min(n_most, widths[0])]
            drafts.append(Draft(Source.MODEL, tuple(t ^ 1 if self._random.random() < 0.2 else t for t in tokens)))
        return drafts

    def accept(self, sequence: int, n: int) -> None:
        pass


@pytest.mark.parametrize("n_together", [1, 3])
def test_drafts_that_are_partly_wrong_change_no_token(
    pair: tuple[Llama, Llama], monkeypatch: pytest.MonkeyPatch, n_together: int
) -> None:
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    many, one = pair
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40}
    requests = [of_tokens(one, random_prompt(one, 30, seed=n), seed=n, **sampled) for n in range(6)]
    expected = [solo(one, request) for request in requests]
    texts = [answer_tokens(one, request) for request in requests]
    if one.layout.arch not in ROLLBACK_ARCHS:
        assert many.drafts is None
        return
    before = many.stats()
    many.context.clear()
    with undrafted(many, Recalled(texts, N_SEQ)):
        for first in range(0, len(requests), n_together):
            received = answers_together(many, requests[first : first + n_together])
            check_same(received, expected[first : first + n_together])
    counted = many.stats() - before
    assert 20 < counted.accepted_tokens < counted.drafted_tokens
    assert sum(each.summary.prompt_tokens for each in received) == 30 * n_together, "nothing is computed again"


def answer_tokens(llm: Llama, request: Request) -> tuple[int, ...]:
    llm.reset()
    answer = Answer(llm, request)
    answer.deltas()
    return answer.summary.context


def test_a_stop_string_leaves_a_state_that_goes_on(pair: tuple[Llama, Llama]) -> None:
    """What follows the stop string in the same pass is taken back."""
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
def test_a_state_that_has_lost_tokens_has_the_bits_of_one_that_never_saw_them(
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


def test_tokens_of_single_passes_are_not_taken_back_by_stale_snapshots(pair: tuple[Llama, Llama]) -> None:
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


@pytest.mark.parametrize("preset", HYBRIDS)
def test_states_and_snapshots_take_what_the_plan_counts(
    tiny: TinyModel, preset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compared with the sizes that llama.cpp logs."""
    options = {**OPTIONS, "n_ctx": 1024, "flash_attn": True, "verbose": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = Llama(tiny(preset), n_seq_max=5, draft="ngram", context_store=0, **options)
    llm.close()
    logged = re.findall(r"(?:KV|RS|state) buffer size = *([0-9.]+) MiB", capfd.readouterr().err)
    assert len(logged) >= 2
    plan, rolls_back = llm.plan, llm.layout.arch in ROLLBACK_ARCHS
    assert plan.n_rs_seq == N_BACK * rolls_back
    assert any(f"at most {N_BACK} tokens" in reason for reason in plan.reasons) == rolls_back
    counted = kv_bytes(llm.layout, plan.kv_tokens, 1, 1, 5, plan.n_rs_seq)
    assert counted == plan.needs.kv_bytes
    rounding = 0.005 * len(logged)
    assert counted / MIB == pytest.approx(sum(map(float, logged)), abs=rounding)
