"""What the controller survives: policies and predictors that fail, talk nonsense or take too long."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_store import (
    AMPLE,
    SHAPE,
    Counting,
    Notes,
    Saying,
    announcement,
    controller,
    first_two,
    routed,
    run_pass,
    run_passes,
)

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.native.events import Float32s


class Bad(Counting):
    """A policy that does `act` at its third gate."""

    name = "bad"

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        good = super().scores(history, forecast)
        return self.act() if self.calls == 3 else good


def raises() -> Any:
    raise ZeroDivisionError("mine")


BAD_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raises, "raised ZeroDivisionError: mine"),
    "flat": (lambda: np.zeros(16, np.float32), r"the shape \(16,\), not \(4, 4\)"),
    "transposed": (lambda: np.zeros((4, 5), np.float32), r"the shape \(4, 5\)"),
    "number": (lambda: 1.0, r"the shape \(\)"),
    "slow": (lambda: time.sleep(0.06), r"took 0\.\d s at one routing event"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_policy_is_dropped_with_one_warning_and_lru_goes_on(kind: str) -> None:
    act, why = BAD_ANSWERS[kind]
    notes, policy = Notes(), Bad(act)
    steering = controller(policy, Saying(first_two), notes, prefetch=AMPLE, slowest_s=0.05)
    with pytest.warns(UserWarning, match=f"the policy bad .*{why}.*; going on with LRU") as caught:
        run_passes(steering, range(3))
    assert len(caught) == 1
    assert policy.calls == 3
    assert notes.named("scores") == [1.0, 2.0, None]
    assert steering.policy is None
    assert len(notes.named("prefetch")) > 3  # the predictor is not to blame


@pytest.mark.parametrize("where", ["announce", "observe", "predict"])
def test_a_predictor_that_raises_is_dropped_with_one_warning(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, policy, predictor = Notes(), Counting(), Saying(first_two)
    steering = controller(policy, predictor, notes, prefetch=AMPLE)
    run_pass(steering)
    n_fetched = len(notes.named("prefetch"))
    monkeypatch.setattr(predictor, where, lambda *_: raises())
    with pytest.warns(
        UserWarning, match="the predictor saying raised ZeroDivisionError: mine; going on with"
    ) as caught:
        run_passes(steering, range(1, 4))
    assert len(caught) == 1
    assert policy.calls == 12
    assert len(notes.named("scores")) == 12
    assert len(notes.named("prefetch")) <= n_fetched + 1
    assert not steering.may_prefetch


NONSENSE: dict[str, Callable[[int], Any]] = {
    "long": lambda il: np.zeros(5, np.float32),
    "table": lambda il: np.zeros(SHAPE.table, np.float32),
    "nan": lambda il: np.array([0, np.nan, 0, 0], np.float32),
    "text": lambda il: "no",
    "slow": lambda il: time.sleep(0.06),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_predictor_that_talks_nonsense_is_dropped_with_one_warning(kind: str) -> None:
    notes, policy = Notes(), Counting()
    steering = controller(policy, Saying(NONSENSE[kind]), notes, prefetch=AMPLE, slowest_s=0.05)
    with pytest.warns(UserWarning, match="the predictor saying .*; going on without it") as caught:
        run_passes(steering, range(3))
    assert len(caught) == 1
    assert policy.calls == 9  # the policy is not to blame
    assert notes.named("prefetch") == []
    assert all(known == [] for _, known in policy.seen)


def test_what_a_dropped_predictor_said_is_forgotten() -> None:
    policy = Counting()
    predictor = Saying(first_two)
    steering = controller(policy, predictor)
    steering.announce(announcement())
    steering.observe(routed(1))
    predictor.answer = lambda il: raises()
    with pytest.warns(UserWarning, match="going on without it"):
        steering.observe(routed(2))
    run_pass(steering, pass_=1)
    assert [known for _, known in policy.seen] == [[2, 3], [], [], [], []]


def test_likelihoods_out_of_range_are_cut_off_and_harm_nobody() -> None:
    notes = Notes()
    wild = Saying(lambda il: np.array([7, -7, np.inf, -np.inf], np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_pass(controller(Counting(), wild, notes, prefetch=AMPLE))
    assert notes.named("prefetch")[0] == [(1, 0), (1, 2), (2, 0), (2, 2)]


def test_stopped_while_it_is_at_work_it_ends_in_silence() -> None:
    notes = Notes()
    steering = controller(Bad(lambda: [steering.stop(), raises()]), None, notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_pass(steering)
    assert notes.named("scores") == [1.0, 2.0]
