"""Failing predictors on a running model: the same tokens, one warning, no delay."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from running import Llama, Load, Logits, Own, Reference, TinyModel, count_scores, greedy_logits, random_prompt

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.gguf.experts import read_layout
from moegguf.native.events import Float32s, RoutingEvent

TIGHT: dict[str, Any] = {"expert_cache": "30%", "n_ubatch": 4}
N_PROMPT, N_NEW = 24, 16
EAGER = PrefetchOptions(budget_bytes=1 << 30, least_probability=0.01, watchdog=False)


def logits_of(llm: Llama) -> Logits:
    return greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)


@pytest.fixture
def expected(tiny: TinyModel, reference: Reference) -> Logits:
    return reference(tiny(), n_ubatch=4, n_prompt=N_PROMPT, n_new=N_NEW)


class FailingPredictor(Predictor):
    """Predicts `answer(il)`."""

    name: ClassVar[str] = "failing"

    def __init__(self, shape: MoeShape, answer: Callable[[MoeShape], Any]) -> None:
        super().__init__(shape, reach=9)
        self.answer, self.calls = answer, 0

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.calls += 1
        return self.answer(self.shape)


def fails(shape: MoeShape) -> Any:
    raise IndexError("expert 1000000")


def test_a_failing_predictor_is_one_warning(own: Own, load: Load, expected: Logits) -> None:
    predictor = FailingPredictor(MoeShape.of(read_layout(own())), fails)
    llm = load(own(), policy="lfu", predictor=predictor, prefetch=EAGER, lockstep=True, **TIGHT)
    given = count_scores(llm)
    with pytest.warns(UserWarning, match="the predictor failing .*; going on without it") as caught:
        assert np.array_equal(logits_of(llm), expected)
    assert len(caught) == predictor.calls == 1
    figures = llm.decisions()
    assert (figures["policy"], figures["predictor"], figures["prefetch"]) == ("lfu", "none", "off")
    assert sum(given) > 0  # the policy goes on


def test_a_predictor_that_is_always_wrong_costs_no_bit(own: Own, load: Load, expected: Logits) -> None:
    class Wrong(FailingPredictor):
        def observe(self, event: RoutingEvent) -> None:
            self.wrong = 1.0 - np.isin(np.arange(self.shape.n_expert), event.expert_ids)

    predictor = Wrong(MoeShape.of(read_layout(own())), lambda shape: predictor.wrong if predictor.calls > 2 else None)
    llm = load(own(), policy="locality", predictor=predictor, prefetch=EAGER, lockstep=True, **TIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(logits_of(llm), expected)
    assert llm.stats().prefetch_started > 0


def test_closing_waits_for_no_queue_of_a_slow_predictor(own: Own, load: Load, expected: Logits, tmp_path: Path) -> None:
    slow = FailingPredictor(MoeShape.of(read_layout(own())), lambda shape: time.sleep(0.15))
    llm = load(own(), policy="lfu", predictor=slow, prefetch=PrefetchOptions(window=1), trace=tmp_path / "t", **TIGHT)
    assert np.array_equal(logits_of(llm), expected)
    assert 0 < slow.calls < 40  # of 88 and more
    begin = time.monotonic()
    llm.close()
    assert time.monotonic() - begin < 3
