"""Tests the choice of a policy and predictor from measured hit rates, and the file of
measurements."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegguf.controller.hit_rates import (
    LEAST_GAIN,
    ControllerChoice,
    Measured,
    read_measured,
    write_measured,
)
from moegguf.errors import OptionError

RATES = {
    "lru": {0.1: 0.30, 0.25: 0.50, 0.5: 0.70},
    "next-use": {0.1: 0.36, 0.25: 0.53, 0.5: 0.70},
    "lfu": {0.1: 0.38, 0.25: 0.45, 0.5: 0.60},
}
MEASURED = Measured(
    "ab" * 16, RATES, {"next-use": "skip"}, about={"trace": "t", "tokens": 1000}
)


@pytest.mark.parametrize(
    ("share", "choice"),
    [
        # Lfu is better at the nearest share but worse than LRU at others, so next-use
        # is chosen.
        (0.02, ControllerChoice("next-use", "skip")),
        (0.12, ControllerChoice("next-use", "skip")),
        (0.3, ControllerChoice("next-use", "skip")),
        (0.5, ControllerChoice()),  # no policy is better than LRU at this share
        (1.0, ControllerChoice()),
    ],
)
def test_choose_returns_the_best_policy_at_the_nearest_measured_share(
    share: float, choice: ControllerChoice
) -> None:
    assert MEASURED.choose(share) == choice


def test_choose_ignores_a_gain_within_the_noise_or_without_lru() -> None:
    for gain, policy in ((LEAST_GAIN * 0.9, "lru"), (LEAST_GAIN * 1.1, "lfu")):
        assert (
            Measured("", {"lru": {0.5: 0.5}, "lfu": {0.5: 0.5 + gain}})
            .choose(0.5)
            .policy
            == policy
        )
    for rates in (
        {"lfu": {0.5: 0.9}},
        {},
        {"lru": {0.1: 0.1, 0.5: 0.5}, "lfu": {0.1: 0.9}},
    ):
        assert Measured("", rates).choose(0.5) == ControllerChoice()


def test_range_at_interpolates_and_stays_below_belady() -> None:
    ranges = {"lru": {0.25: (0.3, 0.5), 0.5: (0.6, 0.8)}}
    measured = Measured(
        "", {"lru": {0.5: 0.7}}, ranges=ranges, bound={0.25: 0.6, 0.5: 0.75}
    )
    assert measured.range_at(0.25) == (0.3, 0.5)
    assert measured.range_at(0.375) == pytest.approx((0.45, 0.65))
    assert measured.range_at(0.5) == pytest.approx((0.6, 0.75))
    assert measured.range_at(0.125) == pytest.approx((0.15, 0.25))
    assert measured.range_at(1.0) == (1.0, 1.0)
    assert Measured("", {"lru": {0.5: 0.7}}).range_at(0.5) is None


RATE = st.floats(0, 1)


@given(
    st.dictionaries(
        st.sampled_from(["lru", "a", "b", "c"]),
        st.dictionaries(st.sampled_from([0.1, 0.5]), RATE),
    )
)
def test_choose_never_returns_a_policy_that_loses_to_lru(
    rates: dict[str, dict[float, float]],
) -> None:
    for share in (0.1, 0.2, 0.5, 0.9):
        policy = Measured("", rates).choose(share).policy
        lru = rates.get("lru", {})
        if policy != "lru":
            nearest = min(lru, key=lambda at: abs(at - share))
            assert rates[policy][nearest] > lru[nearest]


def test_a_field_prefetch_of_an_earlier_version_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(good() | {"prefetch": "skip"}))
    assert read_measured(path) == Measured("ab", {"lru": {0.5: 0.5}})
    assert read_measured(path).choose(0.5) == ControllerChoice()


def test_written_measurement_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    write_measured(path, MEASURED)
    assert read_measured(path) == MEASURED
    ranged = Measured(
        "ab", RATES, ranges={"lru": {0.5: (0.25, 0.75)}}, bound={0.5: 0.875}
    )
    write_measured(path, ranged)
    assert read_measured(path) == ranged
    write_measured(path, Measured("cd", {"lru": {0.5: 0.123456789}}))
    assert read_measured(path) == Measured("cd", {"lru": {0.5: 0.12346}})
    assert [found.name for found in tmp_path.iterdir()] == ["measured.json"]


def good() -> dict[str, object]:
    return {
        "version": 1,
        "fingerprint": "ab",
        "hit_rates": {"lru": {"0.5": 0.5}},
        "predictors": {},
        "about": {},
    }


WRONG: list[dict[str, object]] = [
    {"version": 2}, {"version": "1"}, {"hit_rates": []}, {"hit_rates": {"lru": 0.5}},
    {"hit_rates": {"lru": {"half": 0.5}}}, {"hit_rates": {"lru": {"0.5": 1.5}}}, {"hit_rates": {"lru": {"0.5": -0.1}}},
    {"hit_rates": {"lru": {"0.5": float("nan")}}}, {"hit_rates": {"lru": {"0": 0.5}}},
    {"hit_rates": {"lru": {"0.5": None}}}, {"predictors": []}, {"predictors": 3}, {"ranges": {"lru": {"0.5": [0.5]}}},
    {"ranges": {"lru": {"0.5": [0.5, 1.5]}}}, {"bound": {"0.5": 2}},
]  # fmt: skip
OTHERS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"7",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"\x80\x04N.",
)


@pytest.mark.parametrize(
    "data",
    [
        *(json.dumps(good() | wrong).encode() for wrong in WRONG),
        *(
            json.dumps(
                {name: value for name, value in good().items() if name != key}
            ).encode()
            for key in good()
        ),
        *OTHERS,
    ],
    ids=lambda data: repr(data[:90]),
)
def test_read_measured_rejects_files_that_are_not_measurements(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(good()))
    assert read_measured(path).fingerprint == "ab"
    path.write_bytes(data)
    for found in (path, tmp_path, tmp_path / "nothing"):
        with pytest.raises(
            OptionError,
            match=f"{found.name} is not a measurement .* delete it, or measure again",
        ):
            read_measured(found)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_read_measured_rejects_or_reads_flipped_bytes(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    path = tmp_path_factory.mktemp("choice") / "measured.json"
    text = json.dumps(good()).encode()
    path.write_bytes(text[:at] + noise + text[at + len(noise) :])
    with suppress(OptionError):
        read_measured(path).choose(0.5)
