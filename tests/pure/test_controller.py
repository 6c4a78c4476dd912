"""The controller with a store that only takes notes: what it does, in which order, and what it survives."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from moegguf.controller.controller import Controller, ControllerOptions
from moegguf.controller.history import History
from moegguf.controller.policies.base import Outlook, Policy
from moegguf.controller.policies.lru import Lru
from moegguf.controller.policies.sparsity import SparsityAware
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, Gate, Phase

SHAPE = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(1, 2, 3), expert_bytes=100)
AMPLE = PrefetchOptions(window=2, budget_bytes=10_000)


class Notes:
    """A store's actions, noted with their order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []
        self.stall_ns = 0
        self.there = np.zeros(SHAPE.table, np.uint8)

    def set_scores(self, scores: Float32s | None) -> None:
        self.done.append(("scores", None if scores is None else float(np.asarray(scores)[1, 0])))

    def prefetch(self, il: Any, experts: Any) -> None:
        self.done.append(("prefetch", list(zip(il.tolist(), experts.tolist(), strict=True))))

    def residency(self) -> np.ndarray[Any, Any]:
        return self.there

    def counters(self) -> dict[str, int]:
        return {"stall_ns": self.stall_ns}

    def named(self, name: str) -> list[Any]:
        return [what for kind, what in self.done if kind == name]


class Counting:
    """A policy whose scores count its calls."""

    name = "counting"

    def __init__(self, notes: Notes | None = None) -> None:
        self.calls = 0
        self.seen: list[tuple[int, list[int]]] = []
        self.notes = notes

    def scores(self, history: History, outlook: Outlook) -> Float32s | None:
        self.calls += 1
        self.seen.append((history.il, outlook.known()))
        if self.notes is not None:
            self.notes.done.append(("policy", history.il))
        return np.full(SHAPE.table, self.calls, np.float32)


class Saying(Predictor):
    """Answers `answer(il)` for every layer ahead, and notes what it heard."""

    name: ClassVar[str] = "saying"

    def __init__(self, answer: Callable[[int], Any], notes: Notes | None = None) -> None:
        super().__init__(SHAPE, reach=3)
        self.answer, self.notes = answer, notes or Notes()

    def announce(self, announcement: Announcement) -> None:
        self.notes.done.append(("announce", announcement.sequence))

    def observe(self, gate: Gate) -> None:
        self.notes.done.append(("observe", gate.il))

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.notes.done.append(("predict", (il, distance)))
        return self.answer(il)


def first_two(il: int) -> Float32s:
    return np.array([0.9, 0.8, 0, 0], np.float32)


def controller(
    policy: Policy | None = None, predictor: Predictor | None = None, notes: Notes | None = None, **options: Any
) -> Controller:
    """Without a watchdog unless asked for."""
    made = ControllerOptions(**{"watchdog": False, **options})
    return Controller(SHAPE, policy or Lru(), predictor or NoPrediction(SHAPE), notes or Notes(), made)


def announcement(phase: Phase = Phase.DECODE, sequence: int = 0, n_tokens: int = 1) -> Announcement:
    return Announcement(0, sequence, phase, np.zeros(n_tokens, np.int32))


def gate(il: int, *experts: int, phase: Phase = Phase.DECODE, pass_: int = 0, sequence: int = 0) -> Gate:
    return Gate(pass_, 0, 0, sequence, phase, 0, il, np.array([experts or (0, 1)], np.int32))


def run_pass(of: Controller, phase: Phase = Phase.DECODE, pass_: int = 0, sequence: int = 0) -> None:
    of.announce(announcement(phase, sequence))
    for il in SHAPE.layers:
        of.observe(gate(il, phase=phase, pass_=pass_, sequence=sequence))


def test_on_a_gate_it_remembers_asks_scores_and_fetches_in_this_order() -> None:
    notes = Notes()
    steering = controller(Counting(notes), Saying(first_two, notes), notes, prefetch=AMPLE)
    steering.announce(announcement())
    assert notes.done == [
        ("announce", 0), ("predict", (1, 1)), ("predict", (2, 2)), ("prefetch", [(1, 0), (1, 1), (2, 0), (2, 1)]),
    ]  # fmt: skip
    notes.done.clear()
    steering.observe(gate(1))
    assert notes.done == [
        ("observe", 1), ("predict", (2, 1)), ("predict", (3, 2)), ("policy", 1), ("scores", 1.0),
        ("prefetch", [(3, 0), (3, 1)]),
    ]  # fmt: skip
    assert steering.history.last_use[1].tolist() == [1, 1, -1, -1]


def test_the_policy_sees_what_is_foretold() -> None:
    policy = Counting()
    run_pass(controller(policy, Saying(first_two)))
    assert policy.seen == [(1, [2, 3]), (2, [3]), (3, [])]


def test_without_prefetching_nothing_is_fetched_and_the_whole_pass_is_foretold() -> None:
    notes = Notes()
    run_pass(controller(Counting(), Saying(first_two, notes), notes))
    assert notes.named("prefetch") == []
    assert notes.named("predict")[:3] == [(1, 1), (2, 2), (3, 3)]


def test_scores_act_in_decode_only_and_a_prompt_clears_them_once() -> None:
    notes, policy = Notes(), Counting()
    steering = controller(policy, None, notes)
    run_pass(steering, Phase.PREFILL)
    assert notes.done == []
    run_pass(steering, Phase.DECODE, pass_=1)
    assert notes.named("scores") == [4.0, 5.0, 6.0]
    run_pass(steering, Phase.PREFILL, pass_=2, sequence=1)
    assert notes.named("scores")[3:] == [None]
    run_pass(steering, Phase.DECODE, pass_=3, sequence=1)
    assert policy.calls == 12  # it hears of prompts, too


def test_prompts_are_not_prefetched_for() -> None:
    notes = Notes()
    run_pass(controller(None, Saying(first_two), notes, prefetch=AMPLE), Phase.PREFILL)
    assert notes.named("prefetch") == []


def test_a_policy_that_learns_requests_hears_where_one_ends() -> None:
    policy = SparsityAware(SHAPE)
    steering = controller(policy)
    for sequence in range(3):
        for n, phase in enumerate((Phase.PREFILL, Phase.DECODE, Phase.DECODE)):
            run_pass(steering, phase, pass_=3 * sequence + n, sequence=sequence)
    assert (policy.eamcs.prefill.n_entries, policy.eamcs.decode.n_entries) == (2, 2)


def test_none_leaves_the_last_scores_in_force() -> None:
    notes = Notes()
    run_pass(controller(Lru(), None, notes))
    assert notes.done == []


def test_layers_without_experts_are_none_of_its_business() -> None:
    steering = controller(Counting())
    steering.observe(gate(0))
    assert steering.history.clock == steering.gates == 0


class Bad(Counting):
    """A policy that does `act` at its third gate."""

    name = "bad"

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def scores(self, history: History, outlook: Outlook) -> Float32s | None:
        good = super().scores(history, outlook)
        return self.act() if self.calls == 3 else good


def raises() -> Any:
    raise ZeroDivisionError("mine")


BAD_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raises, "raised ZeroDivisionError: mine"),
    "flat": (lambda: np.zeros(16, np.float32), r"the shape \(16,\), not \(4, 4\)"),
    "transposed": (lambda: np.zeros((4, 5), np.float32), r"the shape \(4, 5\)"),
    "number": (lambda: 1.0, r"the shape \(\)"),
    "slow": (lambda: time.sleep(0.06), r"took 0\.\d s at one gate"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_policy_is_dropped_with_one_warning_and_lru_goes_on(kind: str) -> None:
    act, why = BAD_ANSWERS[kind]
    notes, policy = Notes(), Bad(act)
    steering = controller(policy, Saying(first_two), notes, prefetch=AMPLE, slowest_s=0.05)
    with pytest.warns(UserWarning, match=f"the policy bad .*{why}.*; going on with LRU") as caught:
        for pass_ in range(3):
            run_pass(steering, pass_=pass_)
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
    with pytest.warns(UserWarning, match="the predictor saying raised ZeroDivisionError: mine; going on with") as caught:
        for pass_ in range(1, 4):
            run_pass(steering, pass_=pass_)
    assert len(caught) == 1
    assert policy.calls == 12
    assert len(notes.named("scores")) == 12
    assert len(notes.named("prefetch")) <= n_fetched + 1
    assert not steering.acts


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
        for pass_ in range(3):
            run_pass(steering, pass_=pass_)
    assert len(caught) == 1
    assert policy.calls == 9  # the policy is not to blame
    assert notes.named("prefetch") == []
    assert all(known == [] for _, known in policy.seen)


def test_what_a_dropped_predictor_said_is_forgotten() -> None:
    policy = Counting()
    predictor = Saying(first_two)
    steering = controller(policy, predictor)
    steering.announce(announcement())
    steering.observe(gate(1))
    predictor.answer = lambda il: raises()
    with pytest.warns(UserWarning):
        steering.observe(gate(2))
    run_pass(steering, pass_=1)
    assert [known for _, known in policy.seen] == [[2, 3], [], [], [], []]


def test_likelihoods_out_of_range_are_cut_off_and_harm_nobody() -> None:
    notes = Notes()
    wild = Saying(lambda il: np.array([7, -7, np.inf, -np.inf], np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_pass(controller(Counting(), wild, notes, prefetch=AMPLE))
    assert notes.named("prefetch")[0] == [(1, 0), (1, 2), (2, 0), (2, 2)]


def test_stopped_it_hears_nothing() -> None:
    notes, policy = Notes(), Counting()
    steering = controller(policy, Saying(first_two, notes), notes, prefetch=AMPLE)
    steering.stop()
    run_pass(steering)
    assert notes.done == []
    assert policy.calls == steering.gates == 0


def test_stopped_while_it_is_at_work_it_ends_in_silence() -> None:
    notes = Notes()
    steering = controller(Bad(lambda: [steering.stop(), raises()]), None, notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_pass(steering)
    assert notes.named("scores") == [1.0, 2.0]


def test_the_watchdog_keeps_prefetching_only_while_it_lowers_the_stall() -> None:
    for saved_ns, stays in ((300, True), (-300, False)):
        notes = Notes()
        steering = controller(None, Saying(first_two), notes, prefetch=AMPLE, watchdog=True)
        assert steering.watchdog is not None
        assert not steering.prefetching
        n_trial = 2 * steering.watchdog.options.turns * steering.watchdog.options.turn_tokens
        for pass_ in range(n_trial + 10):
            run_pass(steering, pass_=pass_)
            notes.stall_ns += 1000 - saved_ns * steering.prefetching
        assert steering.watchdog.trials == 1
        assert steering.prefetching == stays
        assert steering.acts


def test_the_watchdog_does_not_count_the_stall_of_prompts() -> None:
    notes = Notes()
    steering = controller(None, Saying(first_two), notes, prefetch=AMPLE, watchdog=True)
    for request in range(60):
        run_pass(steering, Phase.PREFILL, pass_=9 * request, sequence=request)
        notes.stall_ns += 10**9
        for n in range(8):
            run_pass(steering, pass_=9 * request + 1 + n, sequence=request)
            notes.stall_ns += 700 if steering.prefetching else 1000
    assert steering.watchdog is not None
    assert steering.watchdog.last_gain == pytest.approx(0.3, abs=0.01)


def test_judging_acts_on_nothing() -> None:
    notes = Notes()
    steering = controller(Lru(), Saying(first_two), notes, judge=True)
    for pass_ in range(3):
        run_pass(steering, pass_=pass_)
    assert notes.done == []
    assert steering.judge is not None
    assert steering.judge.table().means[1].accuracy == 1.0  # experts 0 and 1, at every gate


def test_its_time_is_counted_by_the_gate() -> None:
    steering = controller(Counting())
    run_pass(steering)
    assert steering.gates == 3
    assert 0 < steering.seconds < 1
