"""Tests confidence intervals of paired measurements, and the verdicts on claims that
are derived from these intervals."""

import numpy as np
import pytest

from predictors.study.claims import FAILS, HOLDS, UNDECIDED, Claim, half
from predictors.study.intervals import (
    Estimate,
    difference_of_means,
    median_ratio,
    paired_estimate,
    ratio_of_means,
)


def test_paired_estimate_of_a_constant_ratio_has_no_width() -> None:
    slow = [10.0, 200.0, 35.0, 80.0]
    fast = [value / 2 for value in slow]
    assert paired_estimate([slow, fast], median_ratio) == Estimate(2, 2, 2)
    assert paired_estimate([slow, fast], ratio_of_means) == Estimate(2, 2, 2)
    assert paired_estimate([slow, fast, fast, slow], median_ratio) == Estimate(
        1.25, 1.25, 1.25
    )


def test_paired_interval_covers_the_true_mean_in_about_19_of_20_samples() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        base = random.lognormal(0, 1, 80)
        found = paired_estimate(
            [base + random.normal(0.1, 0.3, 80), base], difference_of_means
        )
        assert found.low <= found.value <= found.high
        covered += found.low <= 0.1 <= found.high
    assert 0.89 < covered / 200 <= 1


def test_paired_interval_is_narrower_than_an_unpaired_one() -> None:
    random = np.random.default_rng(2)
    base = random.lognormal(0, 1, 80)
    paired = paired_estimate(
        [base * 1.1 + random.normal(0, 0.01, 80), base], ratio_of_means
    )
    unpaired = paired_estimate([random.permutation(base * 1.1), base], ratio_of_means)
    assert paired.high - paired.low < 0.2 * (unpaired.high - unpaired.low)


def test_paired_estimate_depends_on_its_seed_and_one_request_has_no_interval() -> None:
    columns = [[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]]
    assert paired_estimate(columns, median_ratio, seed=3) == paired_estimate(
        columns, median_ratio, seed=3
    )
    assert paired_estimate([[3.0], [2.0]], median_ratio) == Estimate.plain(1.5)
    with pytest.raises(ValueError, match="must have the same requests, but they have"):
        paired_estimate([[1.0, 2.0], [1.0]], median_ratio)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.2, 1.4, HOLDS), (1.0, 1.1, FAILS), (1.1, 1.3, UNDECIDED), (1.165, 1.2, HOLDS)],
)
def test_claim_is_decided_if_its_interval_lies_on_one_side_of_half_the_gain(
    low: float, high: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "predictors.study.claims.estimate_of",
        lambda question, model: Estimate(1.2, low, high),
    )
    assert (
        Claim("promoe", "", (("speed,step,own", half(1.33)),), "").verdict("demo")
        == verdict
    )


def test_half_returns_the_middle_between_the_base_and_the_gain() -> None:
    assert half(1.5) == 1.25
    assert half(0.54, 0.04) == pytest.approx(0.29)
