"""Tests studies of a recorded trace without its model: chosen names, samples, hit rates
and scores."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import random_trace, same

from moegguf.controller.artifacts import MEASURED, Artifacts
from moegguf.controller.hit_rates import ControllerChoice
from moegguf.errors import OptionError, StorageError
from moegguf.native.events import Announcement, Phase
from moegguf.trace.analysis import Row, hit_ranges, sample_sequences
from moegguf.trace.belady import BELADY
from moegguf.trace.format import write
from moegguf.trace.simulate import SimOptions, fitted
from moegguf.trace.trace import Trace
from predictors.study.arrange import arranged
from predictors.study.common import Study
from predictors.study.controls import Oracle
from predictors.study.score import score_named

pytestmark = pytest.mark.usefixtures("user")

TRACE = random_trace(n_sequences=6, n_decode=10, with_inputs=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "t.npz", TRACE)
    return tmp_path / "t.npz"


@pytest.fixture
def analysis(file: Path) -> Study:
    return Study.open(file)


def row(policy: str, share: float, rate: float, predictor: str = "none") -> Row:
    return Row(policy, predictor, share, 10, 0.0, rate)


def test_study_rejects_unknown_names_and_removes_duplicates(analysis: Study) -> None:
    assert analysis.policies(["lfu", "lru", "lfu"]) == ["lfu", "lru"]
    assert analysis.predictors(["none", "previous-token"]) == ["none", "previous-token"]
    for check, names, message in (
        (analysis.policies, ["lru", "lro"], "no policy 'lro'"),
        (analysis.policies, ["all", "lro"], "no policy 'lro'"),
        (analysis.policies, [], "no policy is named; known names: lru"),
        (analysis.predictors, [], "no predictor is named"),
        (
            analysis.predictors,
            ["mlp"],
            r"has to be trained.*; then name the model \(--model\), or the folder",
        ),
        (analysis.predictors, ["skip"], "--model"),
        (analysis.policies, ["static"], "popularity"),
    ):
        with pytest.raises(OptionError, match=message):
            check(names)


def test_study_all_selects_available_names_and_warns_about_others(
    analysis: Study,
) -> None:
    with pytest.warns(UserWarning, match=r"^left out: static \(.*popularity"):
        policies = analysis.policies(["all"])
    assert policies[0] == "lru" and "static" not in policies
    with pytest.warns(
        UserWarning, match=r"^left out: skip.* \(.*--model.*mlp.* \(.*trained"
    ):
        assert set(analysis.predictors(["all", "previous-token"])) == {
            "previous-token",
            "eamc",
        }


def test_score_named_reports_and_scores_each_predictor_in_order(
    analysis: Study,
) -> None:
    reported: list[tuple[str, float]] = []
    names, link = (
        ["previous-token", "none"],
        SimOptions(link_bytes_per_s=1e9, layer_pass_us=100),
    )
    table = score_named(analysis, names, link, lambda *step: reported.append(step))
    assert reported == [("scores: previous-token", 0.0), ("scores: none", 0.5)]
    assert (
        [one.name for one in table.scores]
        == [one.name for one in table.controls]
        == ["previous-token", "none"]
    )
    assert all(one.fetch_rates[1] is None for one in table.scores), (
        "the last token's experts are in the cache"
    )
    assert max(table.distances) < len(analysis.trace.shape.layers) < 8, (
        "none is beyond the last layer"
    )
    accuracy = table.scores[0].means[1].accuracy
    assert accuracy is not None and accuracy > (
        table.controls[0].means[1].accuracy or 0
    )


def kinds(sizes: dict[str, list[int]]) -> Trace:
    """Returns a random trace. `sizes` maps each kind of text to the numbers of decoded
    tokens in its requests."""
    labels = [kind for kind, lengths in sizes.items() for _ in lengths]
    wanted = [length for lengths in sizes.values() for length in lengths]
    whole = random_trace(n_sequences=len(wanted), n_prefill=2, n_decode=max(wanted))
    number = np.concatenate([np.arange(max(wanted) + 1)] * len(wanted))
    passes = np.flatnonzero(number <= np.repeat(wanted, max(wanted) + 1))
    return replace(
        whole.take(passes), header=replace(whole.header, labels=dict(enumerate(labels)))
    )


def test_sample_sequences_takes_whole_requests_of_every_kind_in_turn() -> None:
    trace = kinds({"code": [5, 5, 5], "prose": [9], "chat": [2, 2]})
    # One request of every kind has 5 + 9 + 2 = 16 decoded tokens.
    assert sample_sequences(trace, 1) == sample_sequences(trace, 16) == [0, 3, 4]
    assert sample_sequences(trace, 17) == [0, 3, 4, 1]
    assert sorted(sample_sequences(trace, 10**6)) == trace.sequences()
    analysis = Study(kinds({"code": [5, 5, 5], "prose": [9]}), Artifacts(None, "ab"))
    part = analysis.limited(10)
    assert part.sample_size(analysis) == "2 of 4 requests with 14 of 24 decoded tokens"
    assert set(part.trace.header.labels.values()) == {"code", "prose"}
    assert same(analysis.limited(0).trace, analysis.trace)


def test_arranged_puts_requests_into_another_order() -> None:
    turned = arranged(TRACE, [5, 0, 2])
    assert turned.sequences() == [5, 0, 2]
    assert set(turned.header.labels) == {0, 2, 5}
    for sequence in (5, 0, 2):
        original, rearranged = TRACE.select([sequence]), turned.select([sequence])
        assert same(original, rearranged)
    assert same(arranged(TRACE, TRACE.sequences()), TRACE)
    assert arranged(TRACE, []).n_tokens == 0


def test_save_stores_hit_rates_and_measured_chooses_the_best_pair(
    analysis: Study, user: Path, file: Path, tmp_path: Path
) -> None:
    assert (
        Study.open(file, folder=tmp_path).save([row("lru", 0.5, 0.5)], [])
        == tmp_path / MEASURED
    )
    rates = [
        row("lru", 0.5, 0.5),
        row("lfu", 0.5, 0.6),
        row("lfu", 0.5, 0.7, "eamc"),
        row(BELADY, 0.5, 0.9),
    ]
    path = analysis.save(
        [*rates, *(replace(one, share=0.25, decode_hit_rate=0.3) for one in rates)], []
    )
    assert path == user / "moegguf" / "models" / TRACE.header.fingerprint / MEASURED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = Artifacts(None, TRACE.header.fingerprint).measured()
    assert dict(measured.hit_rates) == {
        "lru": {0.5: 0.5, 0.25: 0.3},
        "lfu": {0.5: 0.7, 0.25: 0.3},
    }
    assert measured.about["requests"] == 6
    assert Artifacts(None, "another").measured() is None
    lasting = analysis.save([one for one in rates if one.policy != BELADY], rates)
    assert lasting == path
    measured = Artifacts(None, TRACE.header.fingerprint).measured()
    assert measured is not None and measured.choose(0.5) == ControllerChoice(
        "lfu", "eamc"
    )
    assert measured.bound == {0.5: 0.9}


def test_save_without_a_folder_to_write_to_raises_storage_error(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(
        StorageError, match=r"the hit rates cannot be saved \(.*taken.*\); make room"
    ):
        Study.open(file, folder=tmp_path / "taken").save([row("lru", 0.5, 0.5)], [])


def test_halves_split_requests_without_overlap_and_with_equal_kinds(
    analysis: Study,
) -> None:
    choosing, reported = analysis.halves()
    parts = [set(part.trace.sequences()) for part in (choosing, reported)]
    assert (
        parts[0] | parts[1] == set(analysis.trace.sequences())
        and not parts[0] & parts[1]
    )
    kinds = [
        {analysis.trace.header.labels[sequence] for sequence in part} for part in parts
    ]
    assert kinds[0] == kinds[1]
    with pytest.raises(
        OptionError, match="needs at least two requests, but is given 1; raise --tokens"
    ):
        replace(analysis, trace=analysis.trace.select([0])).halves()


def test_hit_ranges_include_requests_that_start_with_an_empty_cache(
    analysis: Study,
) -> None:
    behind = [
        one
        for one in analysis.simulate(["lru"], ["none"], [0.5])
        if one.policy != BELADY
    ]
    alone = [
        one
        for each in analysis.each()
        for one in each.simulate(["lru"], ["none"], [0.5])
        if one.policy != BELADY
    ]
    assert len(alone) == len(analysis.trace.sequences())
    rates = [
        span.hit_rate
        for one in (*behind, *alone)
        if one.simulated
        for span in one.simulated.sequences.values()
    ]
    assert hit_ranges([*behind, *alone]) == {
        "lru": {0.5: tuple(np.quantile(rates, (0.01, 0.99)))}
    }
    assert (
        hit_ranges([*behind, *alone])["lru"][0.5][0] < hit_ranges(behind)["lru"][0.5][0]
    )


def test_oracle_is_always_right_and_is_not_part_of_all_predictors(
    analysis: Study,
) -> None:
    table = score_named(analysis, ["oracle"])
    assert {figures.accuracy for figures in table.scores[0].means.values()} == {1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "oracle" not in analysis.predictors(["all"])
    (row, _) = analysis.simulate(["next-use"], ["oracle"], [0.5])
    assert row.predictor == "oracle"


@pytest.mark.parametrize("n_slots", [2, 40])
def test_oracle_predicts_passes_that_a_small_pool_splits(n_slots: int) -> None:
    split, oracle = fitted(TRACE, n_slots), Oracle(TRACE)
    asked = 0
    for event in split.events():
        if isinstance(event, Announcement):
            oracle.announce(event)
            continue
        if len(event.expert_ids) == 1 and event.phase == Phase.DECODE:
            predicted = (
                oracle.predict(event.il, 1)
                if event.il != TRACE.shape.layers[0]
                else None
            )
            if predicted is not None:
                assert set(np.flatnonzero(predicted)) == set(event.expert_ids.ravel())
                asked += 1
        oracle.observe(event)
    assert asked > 20
