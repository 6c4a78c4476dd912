"""Tests that drafts do not change any token of an answer.

Many tests compare answers generated without drafts and with partly wrong drafts. These
drafts come from a known answer, with random lengths and with tokens replaced at random.
Other drafts come from n-grams, a draft model or MTP heads.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from answering import (
    DEMO,
    QUESTION,
    Load,
    Received,
    TinyModel,
    answers_together,
    ask,
    endless,
)
from eager import WIDTH, Eager

from moegguf.engine.drafts import Draft, Drafts, Source
from moegguf.engine.llama import Llama
from moegguf.errors import ExpertIOError, MoeggufError, OptionError
from moegguf.generate import drafting
from moegguf.generate.request import Request
from moegguf.gguf.experts import read_layout
from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment

pytestmark = pytest.mark.skipif(
    not has_kernels(read_processor(), read_environment().kernels),
    reason="bits depend on the pass here",
)

CODE = "def area(width, height):\n    return width * height\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name"],
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.2, "seed": 7},
    "grammar": {"temperature": 1.0, "seed": 3, "format": SCHEMA},
    "logprobs": {"temperature": 0.9, "seed": 1, "n_logprobs": 3},
    "thinking budget": {
        "reasoning_budget_tokens": 9,
        "think_marks": ("def", " return width</think>"),
    },
    "penalties": {
        "temperature": 0.7,
        "seed": 2,
        "repeat_penalty": 1.3,
        "presence_penalty": 0.5,
        "repeat_last_n": -1,
    },
    "dry": {
        "temperature": 0.7,
        "seed": 2,
        "dry_multiplier": 0.8,
        "dry_allowed_length": 1,
    },
    "xtc": {
        "temperature": 1.0,
        "seed": 4,
        "xtc_probability": 0.7,
        "xtc_threshold": 0.05,
        "top_n_sigma": 2.0,
    },
    "mirostat": {"temperature": 1.0, "seed": 5, "mirostat": 1, "mirostat_tau": 2.0},
    "mirostat 2": {
        "temperature": 1.0,
        "seed": 6,
        "mirostat": 2,
        "mirostat_tau": 2.0,
        "format": SCHEMA,
    },
}


class Recalled(Drafts):
    """Drafts the continuation of known token sequences, with a random length and about
    a quarter of the tokens wrong."""

    known: list[tuple[int, ...]]
    random: np.random.Generator
    n_accepted: int

    @classmethod
    def begin(cls, undrafted: Sequence[Received]) -> None:
        """Sets the known texts to these answers, and resets the random numbers and the
        count."""
        cls.known = [received.summary.context for received in undrafted]
        cls.random, cls.n_accepted = np.random.default_rng(1), 0

    def __init__(self, n_seq: int) -> None:
        super().__init__(n_seq, WIDTH, (0, 0))
        self._texts: list[list[int]] = [[] for _ in range(n_seq)]

    def set_tokens(self, sequence: int, n_kept: int, tokens: Sequence[int]) -> None:
        super().set_tokens(sequence, n_kept, tokens)
        self._texts[sequence][n_kept:] = tokens

    def draft(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[Draft]:
        drafts = []
        for sequence, n_most in wanted:
            text = self._texts[sequence]
            rest = next(
                (
                    known[len(text) :]
                    for known in self.known
                    if [*known[: len(text)]] == text
                ),
                (),
            )
            n = int(self.random.integers(0, n_most[0] + 1))
            wrong = self.random.random(n) < 0.25
            tokens = [
                token ^ 1 if swap else token
                for token, swap in zip(rest[:n], wrong, strict=False)
            ]
            drafts.append(Draft(Source.MODEL if tokens else Source.NONE, tuple(tokens)))
        return drafts

    def accept(self, sequence: int, n: int) -> None:
        Recalled.n_accepted += n


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "DraftGate", Eager)


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    """Yields the demo model with four sequences and slots for 33 % of the experts."""
    with Llama(
        DEMO,
        n_ctx=256,
        n_seq_max=4,
        expert_cache="33%",
        flash_attn=None,
        draft="ngram",
        verbose=False,
    ) as llm:
        yield llm


def request(number: int = 0, **options: Any) -> Request:
    options = {"max_tokens": 40, **options}
    return ask(prompt=f"{number} {CODE * 2}", return_context=True, **options)


def answered(
    llm: Llama, requests: Sequence[Request], drafts: Drafts | None
) -> list[Received]:
    """Generates answers in a new loop with an empty context. Drafts come from `drafts`;
    if it is None, nothing is drafted.
    """
    llm.context.clear()
    llm.drafts, before = drafts, llm.drafts
    try:
        return answers_together(llm, requests)
    finally:
        llm.drafts = before


def facts(received: Received) -> tuple[Any, ...]:
    """Returns the parts of an answer that do not depend on time or on other answers."""
    summary = received.summary
    return (
        received.text,
        received.logprobs,
        summary.context,
        summary.finish,
        summary.stop_string,
        summary.answer_tokens,
    )


def check_recalled(llm: Llama, requests: Sequence[Request]) -> None:
    """Asserts that answers with partly wrong drafts equal the answers without
    drafts."""
    undrafted = answered(llm, requests, None)
    Recalled.begin(undrafted)
    before = llm.stats()
    drafted = answered(llm, requests, Recalled(llm.n_seq_max))
    counted = llm.stats() - before
    assert [received.error for received in drafted] == [None] * len(requests)
    assert [facts(received) for received in drafted] == [
        facts(received) for received in undrafted
    ]
    assert 0 < counted.accepted_tokens < counted.drafted_tokens, (
        "some were right and some wrong"
    )
    assert counted.accepted_tokens == Recalled.n_accepted
    assert counted.tokens_per_draft_pass > 1


def test_a_stop_string_within_a_draft_ends_the_answer(llm: Llama, eager: None) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    text = answered(llm, [request(**options)], None)[0].text
    check_recalled(llm, [request(**options, stop=(text[-12:-8],))])


def test_batched_answers_with_own_drafts_equal_undrafted_ones(
    llm: Llama, eager: None
) -> None:
    requests = [
        request(number, **options)
        for number, options in enumerate([*KINDS.values(), *KINDS.values()])
    ]
    check_recalled(llm, requests)


def test_a_full_context_shifts_at_the_same_token_with_drafts(
    load: Load, tiny: TinyModel, eager: None
) -> None:
    with load(tiny(), n_ctx=64, flash_attn=None, draft="ngram") as llm:
        check_recalled(
            llm,
            [
                ask(
                    prompt="a b c",
                    return_context=True,
                    max_tokens=90,
                    logit_bias=endless(llm),
                )
            ],
        )


def test_a_full_kv_cache_drops_drafts_before_answers(
    load: Load, tiny: TinyModel, eager: None
) -> None:
    options: dict[str, Any] = {
        "n_ctx": 256,
        "n_seq_max": 3,
        "flash_attn": None,
        "draft": "ngram",
    }
    with load(tiny(), kv_tokens=256, **options) as llm:
        requests = [
            request(number, shift=False, max_tokens=60, logit_bias=endless(llm))
            for number in range(3)
        ]
        check_recalled(llm, requests)


def test_a_read_error_of_a_drafts_expert_fails_no_answer(
    llm: Llama, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = type(llm.context).eval_sequences

    def fail_drafts(context: Any, chunks: Any) -> Any:
        if any(chunk.draft for chunk in chunks):
            raise ExpertIOError("an expert cannot be read")
        return evaluate(context, chunks)

    requests = [request(number, temperature=1.0, seed=number) for number in range(2)]
    undrafted = answered(llm, requests, None)
    monkeypatch.setattr(type(llm.context), "eval_sequences", fail_drafts)
    Recalled.begin(undrafted)
    drafted = answered(llm, requests, Recalled(llm.n_seq_max))
    assert [facts(received) for received in drafted] == [
        facts(received) for received in undrafted
    ]


def test_repetitive_text_is_drafted_by_ngrams(llm: Llama, eager: None) -> None:
    requests = [request(max_tokens=120)]
    undrafted, before = answered(llm, requests, None), llm.stats()
    drafted, counted = answered(llm, requests, llm.drafts), llm.stats() - before
    assert facts(drafted[0]) == facts(undrafted[0])
    assert counted.accepted_tokens > 20 and counted.draft_acceptance > 0.2
    assert counted.bytes_per_accepted_token >= counted.bytes_per_token > 0


def test_ngram_drafts_repeat_the_tokens_after_the_last_match() -> None:
    drafts, text = Drafts(2, 4, (8, 3)), [*range(100, 120), *range(100, 110)]
    drafts.set_tokens(0, 0, text)
    drafts.set_tokens(1, 0, [1, 2, 3])
    assert drafts.draft([(0, [4, 4, 0]), (1, [4, 4, 0])]) == [
        Draft(Source.LONG_NGRAM, (110, 111, 112, 113)),
        Draft(),
    ]
    assert drafts.draft([(0, [0, 2, 0])]) == [Draft(Source.SHORT_NGRAM, (110, 111))]
    drafts.accept(0, 2)
    drafts.set_tokens(0, len(text), [110, 7])
    assert drafts.draft([(0, [4, 4, 0])]) == [Draft()]
    drafts.set_tokens(0, 0, [5])  # another text
    assert drafts.draft([(0, [4, 4, 0])]) == [Draft()]
    with pytest.raises(Exception, match="drafting failed"):
        drafts.set_tokens(0, 9, [1])
    drafts.close()
    drafts.close()


def test_drafts_are_off_for_a_state_without_rollback(
    load: Load, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Llama, "_is_stateful", True, raising=False)
    with (
        pytest.warns(UserWarning, match="cannot go back"),
        load(tiny(), flash_attn=None, draft="ngram") as llm,
    ):
        assert llm.drafts is None


def test_auto_drafts_only_on_batch_invariant_models(
    load: Load, tiny: TinyModel
) -> None:
    with load(tiny(), flash_attn=None, draft="auto") as llm:
        assert llm.batch_invariant and llm.drafts
    with load(tiny(), flash_attn=False, draft="auto") as llm:
        assert llm.drafts is None
    with (
        pytest.warns(UserWarning, match="last bits"),
        load(tiny(), flash_attn=False, draft="ngram") as llm,
    ):
        assert llm.drafts
    with pytest.raises(
        OptionError, match="must be one of auto, off, ngram, mtp, or a model, but is"
    ):
        load(tiny(), draft="maybe")


def test_a_draft_model_drafts_text_without_repetition(eager: None) -> None:
    options: dict[str, Any] = {
        "n_ctx": 256,
        "expert_cache": "50%",
        "flash_attn": None,
        "verbose": False,
    }
    with Llama(DEMO, n_seq_max=2, draft=DEMO, **options) as llm:
        requests = [
            ask(QUESTION, max_tokens=40, return_context=True),
            request(1, temperature=1.0, seed=3),
        ]
        undrafted, before = answered(llm, requests[:1], None), llm.stats()
        drafted, counted = answered(llm, requests[:1], llm.drafts), llm.stats() - before
        assert facts(drafted[0]) == facts(undrafted[0])
        assert counted.accepted_tokens > 20 and counted.draft_acceptance > 0.95, (
            "it guesses its own tokens"
        )
        assert [*map(facts, answered(llm, requests, llm.drafts))] == [
            *map(facts, answered(llm, requests, None))
        ]


def test_a_draft_model_of_another_vocabulary_is_refused(
    load: Load, tiny: TinyModel
) -> None:
    with pytest.raises(MoeggufError, match="vocab"):
        load(tiny(), flash_attn=None, draft=DEMO)


def heads_of(load: Load, path: Any, **options: Any) -> Llama:
    return load(
        path, n_ctx=256, n_seq_max=3, expert_cache="40%", flash_attn=None, **options
    )


@pytest.mark.parametrize("preset", ["tiny-glm4moe", "tiny-glm-flash"])
def test_mtp_heads_draft_and_change_no_token(
    load: Load, tiny: TinyModel, eager: None, preset: str
) -> None:
    path = tiny(preset)
    with heads_of(load, path, draft="auto") as llm:
        assert llm.batch_invariant and llm._drafts.in_use == "mtp"
        heads_bytes = llm.layout.dense_bytes - read_layout(path).dense_bytes
        assert heads_bytes == read_layout(path).unused_bytes > 0
        assert llm.plan.needs.dense_bytes >= llm.layout.dense_bytes, (
            "the plan counts them"
        )
        assert len(llm.layout.layers) == 3, "their experts have no slots"
        requests = [
            request(number, **fields) for number, fields in enumerate(KINDS.values())
        ]
        undrafted = [answered(llm, [each], None)[0] for each in requests]
        before = llm.stats()
        drafted = answered(llm, requests, llm.drafts)
        counted = llm.stats() - before
        assert [*map(facts, drafted)] == [*map(facts, undrafted)]
        assert counted.drafted_tokens > counted.accepted_tokens > 0
    for draft in ("off", "ngram"):
        # The last layer is computed for fewer tokens if no heads are loaded.
        with heads_of(load, path, draft=draft) as plain:
            assert not plain.layout.loads_heads
            assert [*map(facts, answered(plain, requests, None))] == [
                *map(facts, undrafted)
            ]


def test_mtp_heads_continue_after_a_context_computed_without_them(
    load: Load, tiny: TinyModel, eager: None
) -> None:
    with heads_of(load, tiny("tiny-glm4moe"), draft="mtp") as llm:
        requests = [
            request(0, max_tokens=20),
            request(0, max_tokens=30, temperature=1.0, seed=5),
            request(1),
        ]
        undrafted = [answered(llm, [each], None)[0] for each in requests]
        llm.context.clear()
        # The second request reuses the context of the first one.
        for wanted, each in zip(undrafted, requests, strict=True):
            (received,) = answers_together(llm, [each])
            assert facts(received) == facts(wanted)


def test_mtp_drafts_are_refused_for_a_file_without_heads(
    load: Load, tiny: TinyModel
) -> None:
    with pytest.raises(OptionError, match=r"needs prediction heads .* has none"):
        load(tiny(), flash_attn=None, draft="mtp")
