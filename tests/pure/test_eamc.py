"""PredictEAM: the paper's figure 5, phases apart, the end of a request, recovery after a change of text kind."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from reference_predictors import EamcPredictor
from traces import random_trace, routed

from moegguf.controller.collection import Eamc, EamcPair
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Phase, RoutingEvent

FOUR = MoeShape(n_layer=4, n_expert=2, n_expert_used=1, layers=(0, 1, 2, 3))

# Figure 5, before layer proximity. The printed numbers imply: four layers of two experts, l = 1 (R2 has dispatched);
# the two matched EAMs are summed as raw counts. The third EAM, of a request of one token, agrees on the seen rows as
# well (all three cosines are 1) and is not among the matched: the number of tokens decides.
ONE_TOKEN = [[0, 1], [1, 0], [1, 0], [1, 0]]
MATCHED = [[0, 2], [2, 0], [2, 0], [0, 2]], [[0, 3], [3, 0], [0, 3], [1, 2]]
AGGREGATED = [[0, 1], [1, 0], [0.4, 0.6], [0.2, 0.8]]


def announced(sequence: int, phase: Phase = Phase.DECODE) -> Announcement:
    return Announcement(sequence, phase, np.zeros(1, np.int32))


def figure_5() -> EamcPredictor:
    decode = Eamc.from_state(np.array([ONE_TOKEN, *MATCHED], np.float32))
    return EamcPredictor(FOUR, EamcPair(Eamc(4, 2), decode), n_matches=2)


def test_figure_5() -> None:
    predictor = figure_5()
    predictor.announce(announced(0))
    predictor.observe(routed(0, 1))
    predictor.observe(routed(1, 0))
    probabilities = [predictor.predict(il, il - 1) for il in range(4)]
    np.testing.assert_allclose(np.array(probabilities), AGGREGATED, rtol=1e-6)


def test_the_request_in_progress_is_left_out() -> None:
    predictor = EamcPredictor(FOUR)
    predictor.observe(routed(2, 1))
    predictor.observe(routed(0, 1, pass_=1))
    assert predictor.predict(2, 2) is None


def test_prefill_and_decode_do_not_match_each_other() -> None:
    predictor = figure_5()
    predictor.observe(routed(0, 1, phase=Phase.PREFILL))
    assert predictor.predict(2, 2) is None
    predictor.observe(routed(0, 1, pass_=1))
    assert predictor.predict(2, 2) is not None


def test_a_request_joins_the_collection_when_the_next_one_begins() -> None:
    predictor = EamcPredictor(FOUR)
    for pass_, phase in enumerate((Phase.PREFILL, Phase.DECODE, Phase.DECODE)):
        for il in range(4):
            predictor.observe(routed(il, il % 2, pass_=pass_, phase=phase))
    assert predictor.eamcs.prefill.n_entries == predictor.eamcs.decode.n_entries == 0
    predictor.observe(routed(0, 0, pass_=3, sequence=1))
    np.testing.assert_array_equal(predictor.eamcs.prefill.state, [[[1, 0], [0, 1], [1, 0], [0, 1]]])
    np.testing.assert_array_equal(predictor.eamcs.decode.state, [[[2, 0], [0, 2], [2, 0], [0, 2]]])
    np.testing.assert_allclose(predictor.predict(3, 3), [0, 1])


def test_an_announcement_ends_a_request_too_but_once_only() -> None:
    predictor = EamcPredictor(FOUR)
    predictor.announce(announced(0))
    predictor.observe(routed(0, 1))
    predictor.announce(announced(0))
    predictor.observe(routed(0, 1, pass_=1))
    predictor.announce(announced(1))
    assert predictor.eamcs.decode.n_entries == 1
    assert predictor.predict(0, 1) is None  # a new request, without counts
    predictor.observe(routed(0, 1, pass_=2, sequence=1))
    predictor.learned(predictor._history)
    predictor.learned(predictor._history)
    assert predictor.eamcs.decode.state.sum() == 3 and predictor.eamcs.decode.n_entries == 2


def test_before_the_first_event_of_a_pass_nothing_is_predicted() -> None:
    predictor = figure_5()
    predictor.announce(announced(0))
    predictor.observe(routed(3, 1))
    predictor.announce(announced(0))
    assert predictor.predict(3, 4) is predictor.predict(2, 3) is None


@pytest.mark.parametrize(
    "ids", [np.array([[-1, -1]]), np.array([[7, 9]]), np.zeros((0, 2)), np.array([[1, -1]])], ids=str
)
def test_valid_ids_of_invalid_events_are_used(ids: npt.NDArray[np.int64]) -> None:
    predictor = figure_5()
    for il in (0, 9, -3):
        predictor.observe(RoutingEvent(0, 0, 0, Phase.DECODE, 0, il, ids.astype(np.int32)))
    assert predictor.predict(17, 1) is None
    found = predictor.predict(2, 1)
    assert found is None or found.sum() == pytest.approx(1)


def hits_by_request(predictor: EamcPredictor, kinds: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Share of each request's decode experts among the predicted, one layer ahead; 60 requests of each kind."""
    trace = random_trace(n_sequences=120, n_prefill=0, n_decode=12, seed=3, n_labels=2)
    k = trace.shape.n_expert_used
    rates = []
    for sequence in (s for kind in kinds for s in range(kind, 120, 2)):
        hits = total = 0
        for p in np.flatnonzero(trace.pass_sequence == sequence).tolist():
            for il, chosen in zip(trace.shape.layers, trace.expert_ids[:, p].astype(np.int32), strict=True):
                guess = predictor.predict(il, 1)
                if il != trace.shape.layers[0]:
                    hits += 0 if guess is None else np.isin(np.argsort(-guess)[:k], chosen).sum()
                    total += k
                predictor.observe(RoutingEvent(p, 0, sequence, Phase.DECODE, 0, il, chosen[None]))
        rates.append(hits / total)
    return np.array(rates)


def test_a_collection_below_capacity_recovers_within_50_requests_after_a_change_of_text_kind() -> None:
    """Hit share of requests 25 to 50 after the change, against that of a predictor that never saw the old kind."""
    shape = random_trace(n_sequences=1).shape
    changed, fresh = (
        hits_by_request(EamcPredictor(shape, EamcPair.empty(*shape.table, 120)), kinds) for kinds in ((0, 1), (1,))
    )
    assert fresh[0] < fresh[25:50].mean()  # it improves
    assert changed[85:110].mean() > 0.9 * fresh[25:50].mean()
