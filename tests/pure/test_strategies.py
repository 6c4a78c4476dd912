"""Strategies by name: what the papers' set, and that parts replace theirs."""

from __future__ import annotations

import pytest

from moegguf.controller.policies import policy_names
from moegguf.controller.predictors import PREDICTORS
from moegguf.controller.prefetch import NO_LIMIT, PrefetchOptions
from moegguf.controller.strategies import EVERY_LAYER, OWN, STRATEGIES, find_strategy
from moegguf.errors import OptionError
from moegguf.native.store import StoreOptions

PAPERS = ("moe-infinity", "promoe", "expertflow", "duoserve")


def test_the_names_are_those_of_the_papers_and_their_baselines() -> None:
    assert list(STRATEGIES) == ["none", "lru", *PAPERS, OWN]
    assert find_strategy("") is find_strategy("moegguf")
    with pytest.raises(OptionError, match="no strategy 'promo'; known are none, lru, moe-infinity"):
        find_strategy("promo")


def test_every_part_is_a_name_that_exists() -> None:
    for strategy in STRATEGIES.values():
        assert strategy.policy in ("auto", *policy_names())
        assert strategy.predictor in (None, *PREDICTORS)


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_prefetching_has_no_limits(name: str) -> None:
    prefetch = STRATEGIES[name].prefetch
    assert isinstance(prefetch, PrefetchOptions)
    assert (prefetch.watchdog, prefetch.budget_bytes, prefetch.least_probability) == (False, NO_LIMIT, 0)


def test_what_the_papers_differ_in() -> None:
    def windows(name: str) -> tuple[int, bool, bool]:
        prefetch = STRATEGIES[name].prefetch
        assert isinstance(prefetch, PrefetchOptions)
        return prefetch.window, prefetch.again, prefetch.by_proximity

    assert windows("moe-infinity") == (EVERY_LAYER, True, True)
    assert windows("promoe") == (4, False, False)
    assert windows("expertflow") == (EVERY_LAYER, False, False)
    assert windows("duoserve") == (1, True, False)
    assert [name for name in PAPERS if STRATEGIES[name].store.chunked] == ["promoe"]
    assert STRATEGIES["none"].store == StoreOptions(overlap=False, sweep=False)
    assert STRATEGIES[OWN].store == STRATEGIES["lru"].store == StoreOptions()


def test_parts_named_by_themselves_replace_the_systems() -> None:
    promoe = STRATEGIES["promoe"]
    assert promoe.parts("auto", None, None) == ("lru", "mlp", promoe.prefetch)
    assert promoe.parts("next-use", None, False) == ("next-use", "mlp", False)
    assert promoe.parts("auto", "skip", True) == ("lru", "skip", promoe.prefetch)
    own = PrefetchOptions(window=1)
    assert promoe.parts("auto", None, own)[2] == own
    assert STRATEGIES[OWN].parts("auto", None, True) == ("auto", None, True)
    assert STRATEGIES["lru"].parts("auto", None, None) == ("lru", "none", False)
