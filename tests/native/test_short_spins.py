"""Tests the idle OpenMP team and the environment variables that limit spinning.

The team exists while a store has slots in memory, but fewer slots than experts. It
makes the compute threads spin only briefly before they sleep.
"""

import os
import time
from pathlib import Path

import pytest
from fake_model import FakeModel
from own_process import in_own_process

from moegguf.native import library
from moegguf.native.store import Store, StoreOptions

LONGEST_S = 20
SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def more_threads(
    fake: FakeModel, sizes: list[int], simulate: bool, expected: list[int]
) -> list[int] | None:
    """Returns the number of threads that the process has gained after each of several
    steps, not counting the stores' readers.

    The steps open a store of each size, resize the last store to 8 slots, and close all
    stores. Threads start and exit a little later, so each count waits up to 20 s for
    its number in `expected`. Returns None in a build without GNU OpenMP.
    """
    library.load()
    if "libgomp" not in Path("/proc/self/maps").read_text():
        return None
    options = StoreOptions(readers=1, repack=False, simulate=simulate, fill=False)
    before, counts, stores = (
        len(os.listdir("/proc/self/task")),
        list[int](),
        list[Store](),
    )

    def count() -> None:
        n_others, deadline = (
            before + (0 if simulate else len(stores)),
            time.monotonic() + LONGEST_S,
        )
        while (n := len(os.listdir("/proc/self/task")) - n_others) != expected[
            len(counts)
        ]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        counts.append(n)

    for n_slots in sizes:
        stores.append(Store(fake.layout, n_slots, options))
        count()
    stores[-1].resize(8)
    count()
    while stores:
        stores.pop().close()
    count()
    return counts


@pytest.mark.parametrize(
    ("sizes", "simulate", "expected"),
    [
        ([32, 20, 20], False, [0, 2, 2, 2, 0]),
        ([32], False, [0, 2, 0]),
        ([20], True, [0, 0, 0]),
    ],
    ids=["one team for all that can miss", "a resident pool that shrinks", "simulated"],
)
def test_store_that_can_miss_starts_an_idle_openmp_team(
    fake: FakeModel, sizes: list[int], simulate: bool, expected: list[int]
) -> None:
    counts = in_own_process(more_threads, fake, sizes, simulate, expected)
    if counts is None:
        pytest.skip("built without GNU OpenMP")
    assert counts == expected


def spinning(given: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Sets the environment variables `given`, and enters and leaves the block in which
    OpenMP is loaded.

    Returns the spin variables that are set inside the block, and those that are set
    after it.
    """
    os.environ |= given
    with library._short_spins():
        loaded = {name: os.environ[name] for name in SPINNING if name in os.environ}
    return loaded, {name: os.environ[name] for name in SPINNING if name in os.environ}


def test_openmp_loads_with_spin_variables_unless_the_user_set_one() -> None:
    assert in_own_process(spinning, {}) == (library.SPINNING, {})
    assert (
        in_own_process(spinning, {"OMP_WAIT_POLICY": "passive"})
        == ({"OMP_WAIT_POLICY": "passive"},) * 2
    )
