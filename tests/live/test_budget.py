"""Budgets that cannot be, that are too small, and that change while the model writes."""

import re
import warnings
from typing import Any

import numpy as np
import pytest
from running import Llama, Load, Reference, TinyModel, greedy_logits, random_prompt, share_for

from moegguf.errors import BudgetError
from moegguf.native.store import StoreOptions

N_BEFORE, N_AFTER = 12, 20


@pytest.mark.parametrize("budget", [1, "1KiB", "5%"])
def test_a_budget_below_the_minimum_states_one_that_works(tiny: TinyModel, load: Load, budget: Any) -> None:
    path = tiny("tiny-mixtral", "q4_k_m")  # 5 % of its 24 experts is one, and a token needs two
    with pytest.raises(BudgetError, match="needs 2 in a layer") as caught:
        Llama(path, expert_cache=budget, verbose=False)
    stated = re.search(r"at least '([^']+)'", str(caught.value))
    assert stated
    with pytest.warns(UserWarning, match="below one token's experts"):
        llm = load(path, expert_cache=stated[1])
    assert llm.plan.n_slots == 2
    assert np.isfinite(greedy_logits(llm, n_new=4)).all()


def test_enough_for_everything_warns_of_nothing(tiny: TinyModel, load: Load) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = load(tiny(), expert_cache="1GiB")
    assert llm.plan.resident
    assert llm.stats().n_slots == llm.stats().n_experts == 64


@pytest.mark.parametrize("switch", [True, False], ids=["repacked", "plain"])
@pytest.mark.parametrize("first", ["100%", "60%"])
@pytest.mark.parametrize("second", ["one layer", "40%"])
def test_a_budget_shrunk_while_writing_changes_no_token(
    tiny: TinyModel, load: Load, reference: Reference, first: str, second: str, switch: bool
) -> None:
    from moegguf.native.store import StoreOptions

    path = tiny()
    n_slots = {"one layer": 16, "40%": 25}[second]
    llm = load(path, expert_cache=first, store=StoreOptions(repack=switch))
    expected = reference(path, repack=switch)[: 200 + N_BEFORE + N_AFTER + N_AFTER]
    llm.eval(random_prompt(llm))
    before = llm.stats()
    for n in range(N_BEFORE + N_AFTER):
        if n == N_BEFORE:
            assert llm.stats().slots_used > n_slots
            llm.set_expert_cache(share_for(path, n_slots))
        llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
        if n >= N_BEFORE:
            stats = llm.stats()
            assert stats.slots_used <= n_slots, "the budget has to be met within one token"
            assert stats.n_slots == n_slots
            assert stats.pool_bytes == share_for(path, n_slots)
    assert np.array_equal(llm.scores[: llm.n_tokens], expected)
    assert (llm.stats() - before).evictions > 0
    llm.set_expert_cache(first)
    assert np.array_equal(greedy_logits(llm), expected)
    assert llm.stats().slots_used > n_slots


def test_shrinking_gives_memory_back(tiny: TinyModel, load: Load) -> None:
    path = tiny("tiny-mix", "q8_0")
    llm = load(path, expert_cache="100%")
    greedy_logits(llm, n_new=1)
    llm.session.store.drain()
    full = resident_bytes()
    llm.set_expert_cache("25%")
    given_back = full - resident_bytes()
    assert given_back > llm.plan.budget_bytes // 2


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_shrinking_below_what_a_pass_may_need_is_refused(tiny: TinyModel, load: Load) -> None:
    path = tiny()
    # it cannot stream, and no slot is filled when slots are counted
    llm = load(path, expert_cache="40%", store=StoreOptions(overlap=False), prefetch=False)
    with pytest.raises(BudgetError, match="at least") as caught:
        llm.set_expert_cache(share_for(path, 8))
    stated = re.search(r"at least '([^']+)'", str(caught.value))
    assert stated
    llm.set_expert_cache(stated[1])
    with pytest.raises(BudgetError):
        llm.set_expert_cache(1)
    greedy_logits(llm)
    assert 16 <= llm.stats().slots_used == llm.stats().n_slots < llm.plan.n_slots
