"""Fixtures of the native tests: a fake model on disk, and stores. After a test, stores
are closed and faults are disarmed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, Open, make_model
from hypothesis import Phase, settings
from product import Product

from moegguf.native.store import Store, StoreContext, StoreOptions
from moegguf.testing.library import FAULT, arm_fault

# The profile for tools/fault_check.py: any failing example is enough, so the example
# need not be minimal.
settings.register_profile("no-shrinking", phases=[Phase.explicit, Phase.generate])


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """Disarms every fault after each test."""
    yield
    for kind in FAULT:
        arm_fault(kind, 0)


@pytest.fixture
def fake(tmp_path: Path) -> FakeModel:
    """A model of 4 layers with 8 experts of about 4.5 kB each. A token uses 2 experts
    in each layer, 8 in all."""
    return make_model(tmp_path)


@pytest.fixture
def open_store() -> Iterator[Open]:
    """Yields `open_store(fake, n_slots, **options)`, which returns a store and its
    context.

    Slots are not repacked unless the option `repack` is True. The stores are closed
    after the test.
    """
    opened = list[Store]()

    def open_one(
        fake: FakeModel, n_slots: int, **options: Any
    ) -> tuple[Store, StoreContext]:
        n_ram_slots, mirrors = options.pop("n_ram_slots", 0), options.pop("mirrors", ())
        store = Store(
            fake.layout,
            n_slots,
            StoreOptions(**{"repack": False, **options}),
            n_ram_slots,
            mirrors,
        )
        opened.append(store)
        return store, store.context

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def products(open_store: Open) -> Iterator[list[Product]]:
    """Yields a list to which a test adds its products. They are closed after the test,
    before its stores."""
    made: list[Product] = []
    yield made
    for product in made:
        product.close()
