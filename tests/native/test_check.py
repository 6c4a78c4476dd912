"""Tests the check of the store's bookkeeping. Its error names the broken rule and the
values."""

import pytest
from fake_model import FakeModel, Open

from moegguf.errors import MoeggufError
from moegguf.testing.library import CORRUPTION, corrupt

RULES = {
    "free": r"the rule 'free \+ owned = usable' is broken: \d \+ \d, not 6",
    "pins": r"the rule 'pins >= 0' is broken: slot 0 holds expert \d of layer \d and has -1 pins",
    "map": r"the rule 'the map names the slot of each expert' is broken: slot 0 holds expert \d of layer 0",
    "source": r"the rule 'a borrowed slot is pinned and holds the borrower's expert' is broken: slot 0 has 0 pins",
}


@pytest.mark.parametrize("rule", CORRUPTION)
def test_check_names_the_rule_that_corrupted_bookkeeping_breaks(
    fake: FakeModel, open_store: Open, rule: str
) -> None:
    n_ram_slots = 6 if rule == "source" else 0
    store, _ = open_store(
        fake, 6, n_ram_slots=n_ram_slots, simulate=True, link_bytes_per_s=1.0
    )
    store.prefetch([0, 0], [1, 2])
    store.advance(1)  # one expert is being read
    store.check()
    corrupt(store, rule)
    with pytest.raises(MoeggufError, match=RULES[rule]):
        store.check()


def test_drain_checks_the_bookkeeping(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 6)
    context.acquire(0, [1, 2])
    store.drain()
    corrupt(store, "pins")
    with pytest.raises(MoeggufError, match="has -1 pins"):
        store.drain()


def test_corrupt_rejects_a_rule_that_no_slot_can_break(
    fake: FakeModel, open_store: Open
) -> None:
    store, _ = open_store(fake, 6)
    with pytest.raises(
        MoeggufError, match="no slot is in a state in which this rule could be broken"
    ):
        corrupt(store, "map")
