"""Tests the upper limit of the speed that `moegguf bench --bound` prints.

The minimum number of expert reads is computed by hand, or by a search over all victims.
Other tests compute the speed that bytes, links and waits allow.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import hand_made
from test_bench_rows import MMAP, OUTCOMES, OWN, SPEC, result

from moegguf.bench.bound import FIGURES, LeastBytes, LinkSpeeds, bound_by, bound_figures
from moegguf.bench.report import report
from moegguf.bench.rows import FORMATS, make_rows
from moegguf.bench.series import Outcome, Spec, Test
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout
from moegguf.trace.belady import Lookups, belady, fewest_bytes, least_misses

Test.__test__ = False  # type: ignore[attr-defined]


def lookups_of(events: list[list[int]], n_expert: int = 4) -> Lookups:
    """Returns the look-ups of several passes through one layer. Each list in `events`
    holds the experts of one pass."""
    widest = max(map(len, events))
    shape = MoeShape(1, n_expert, widest, (0,))
    trace = hand_made(
        shape, [[[event + [-1] * (widest - len(event))] for event in events]]
    )
    return Lookups.of(trace)


def test_least_misses_bypasses_slots_for_an_expert_used_once() -> None:
    lookups = lookups_of([[0], [1], [2], [0], [1], [3]])
    assert least_misses(lookups, 2).tolist() == [0, 1, 2, 3]
    assert belady(lookups, 2).lookups - belady(lookups, 2).hits == 5, (
        "without bypass expert 1 makes room for 2"
    )


def test_least_misses_does_not_count_experts_resident_at_the_start() -> None:
    lookups = lookups_of([[0], [1], [2], [0], [1], [3]])
    assert least_misses(lookups, 2, [1, 3]).tolist() == [0, 2, 3]
    assert least_misses(lookups, 4, [0, 1, 2, 3]).tolist() == []


def test_least_misses_accepts_passes_with_more_experts_than_slots() -> None:
    lookups = lookups_of([[0, 1, 2], [0, 1, 2]])
    assert len(least_misses(lookups, 1)) == 5, (
        "one of the three stays for the second pass"
    )
    assert least_misses(lookups, 0).tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(OptionError, match="needs 3 experts"):
        belady(lookups, 2)


def test_fewest_bytes_keeps_a_large_expert_and_reads_small_ones() -> None:
    """Three reads are necessary. If expert 0 stays in its slot, all three are reads of
    small experts."""
    lookups = lookups_of([[0], [1], [2], [1], [0]])
    key_bytes = np.array([100, 1, 1, 1])
    assert key_bytes[least_misses(lookups, 1, [0])].sum() == 102
    assert fewest([{0}, {1}, {2}, {1}, {0}], 1, {0}, key_bytes.tolist()) == 3
    assert fewest_bytes(lookups, 1, np.array([0]), key_bytes) == 3


def fewest(
    events: list[set[int]],
    n_slots: int,
    resident: set[int],
    costs: Sequence[int] = (1, 1, 1, 1, 1),
) -> int:
    """Returns the minimum cost of reads, found by trying all possible contents of the
    slots after each event."""
    best = {frozenset(resident): 0}
    for event in events:
        after: dict[frozenset[int], int] = {}
        for held, reads in best.items():
            known = sorted(held | event)
            for n in range(min(n_slots, len(known)) + 1):
                for kept in map(frozenset, combinations(known, n)):
                    cost = reads + sum(costs[expert] for expert in event - held)
                    after[kept] = min(after.get(kept, 1 << 30), cost)
        best = after
    return min(best.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=7
    ),
    st.integers(0, 4),
    st.sets(st.integers(0, 4)),
    st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
def test_least_misses_and_fewest_bytes_agree_with_a_search_over_all_victims(
    events: list[set[int]], n_slots: int, held: set[int], sizes: list[int]
) -> None:
    resident = set(sorted(held)[:n_slots])
    lookups = lookups_of([sorted(event) for event in events], 5)
    n_reads = fewest(events, n_slots, resident)
    assert len(least_misses(lookups, n_slots, resident)) == n_reads
    at_start = np.array(sorted(resident), np.int64)
    assert fewest_bytes(lookups, n_slots, at_start, np.full(5, 7)) == 7 * n_reads
    n_bytes = fewest_bytes(lookups, n_slots, at_start, np.array(sizes))
    assert min(sizes) * n_reads <= n_bytes <= fewest(events, n_slots, resident, sizes)


def test_bound_figures_take_the_longest_of_reading_copying_and_computing() -> None:
    """Ten tokens take 2 s, or 200 ms each. Waits take 0.5 s in total, so computing a
    token takes 150 ms."""
    slow = bound_figures(
        LeastBytes(8_000_000, 0, 40_000_000), LinkSpeeds(5e6, 0, 400e6), 10, 2.0, 0.5
    )
    assert list(slow) == list(FIGURES)
    assert slow["bound_read_mb_per_token"] == pytest.approx(0.8)
    assert slow["bound_read_ms_per_token"] == pytest.approx(160)
    assert slow["bound_compute_ms_per_token"] == pytest.approx(150)
    assert slow["bound_weights_ms_per_token"] == pytest.approx(10)
    assert slow["bound_ts"] == pytest.approx(6.25)
    assert slow["bound_reached_pct"] == pytest.approx(80)
    assert bound_by(slow) == "reads"
    fast = bound_figures(LeastBytes(8_000_000), LinkSpeeds(10e6), 10, 2.0, 0.5)
    assert (bound_by(fast), fast["bound_reached_pct"]) == (
        "computing",
        pytest.approx(75),
    )
    device = bound_figures(
        LeastBytes(8_000_000, 20_000_000), LinkSpeeds(10e6, 10e6), 10, 2.0, 0.5
    )
    assert (bound_by(device), device["bound_copy_ms_per_token"]) == (
        "copies",
        pytest.approx(200),
    )


def test_bound_figures_without_reads_are_bound_by_computing() -> None:
    resident = bound_figures(LeastBytes(0), LinkSpeeds(0), 10, 2.0, 0.0)
    assert (bound_by(resident), resident["bound_ts"]) == ("computing", pytest.approx(5))
    assert resident["bound_reached_pct"] == pytest.approx(100)


def bounded(seconds: float) -> dict[str, Any]:
    """Returns `result(seconds)` with the bound's figures added to both tests."""
    found = result(seconds)
    for test in found["tests"]:
        n_tokens = 2 * (test["n_prompt"] + test["n_gen"])
        figures = bound_figures(
            LeastBytes(6_000_000, 0, 10**9),
            LinkSpeeds(1.5e9, 0, 20e9),
            n_tokens,
            seconds,
            0.1,
        )
        test["figures"] = [each | figures for each in test["figures"]]
    return found


def test_make_rows_includes_the_bound_in_a_table_of_80_columns() -> None:
    rows = make_rows([Outcome(OWN, 0, bounded(0.5))])
    objects = json.loads(FORMATS["json"](rows))
    assert all(
        row["bound_by"] == "computing" and 0 < row["bound_reached_pct"] < 100
        for row in objects
    )
    assert objects[0]["bound_read_mb_per_token"] == pytest.approx(0.75)
    page = FORMATS["md"](rows).splitlines()
    (title,) = [
        n for n, line in enumerate(page) if "reached" in line and line.startswith("|")
    ]
    lines = page[title : page.index("", page.index("", title) + 1)]
    assert max(map(len, lines)) <= 80
    assert (
        lines[0].split()
        == "| test | cache | t/s | bound | reached | read | compute | weights |".split()
    )
    assert (
        lines[2].split()
        == "| pp4 | 50% | 8.00 | 20.00 | 80 % | 0.500 | 50.000 | 6.250 |".split()
    )
    assert any("at 1.5 GB/s" in line for line in lines) and any(
        "at 20 GB/s" in line for line in lines
    )


def test_make_rows_without_bounds_have_empty_fields_and_no_table() -> None:
    rows = make_rows(OUTCOMES)
    assert json.loads(FORMATS["json"](rows))[0]["bound_ts"] is None
    assert "reached" not in FORMATS["md"](rows)


def test_make_rows_sums_and_names_parallel_sequences() -> None:
    spec = replace(SPEC, tests=(Test(4, 0, n_parallel=8),))
    together = result(0.5)
    together["tests"] = [{**together["tests"][0], "n_parallel": 8}]
    (row,) = make_rows([Outcome(replace(OWN, spec=spec), 0, together)])
    assert (row["test"], row["n_parallel"], row["median_ts"]) == ("8x pp4", 8, 64.0)
    assert Spec.from_json(spec.as_json()) == spec and spec.n_parallel == 8


@pytest.mark.parametrize(
    "changes", [{"bound": True}, {"tests": (Test(0, 4, 4, 2),)}], ids=str
)
def test_spec_rejects_drafts_with_a_bound_or_several_sequences(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(OptionError, match="--draft"):
        replace(SPEC, draft="auto", feed="greedy", **changes)


def test_spec_rejects_drafts_of_an_answer_without_a_prompt() -> None:
    for depth, prompt in ((4, 0), (0, 4)):
        assert (
            replace(
                SPEC, draft="auto", feed="greedy", tests=(Test(prompt, 8, depth),)
            ).draft
            == "auto"
        )
    for draft in ("auto", "off"):
        with pytest.raises(
            OptionError,
            match=r"the test of 8 answer tokens \(-n\) has no prompt; give .* -d, or",
        ):
            replace(SPEC, draft=draft, feed="greedy", tests=(Test(4, 0), Test(0, 8)))


def test_spec_rejects_fewer_than_one_sequence() -> None:
    with pytest.raises(OptionError, match="--parallel"):
        replace(SPEC, tests=(Test(4, 0, n_parallel=0),))


def test_report_has_the_bound_below_each_speed(tiny: Callable[..., Path]) -> None:
    rows = make_rows(
        [Outcome(OWN, 0, bounded(0.5)), Outcome(MMAP, 0, result(5.0, store=False))]
    )
    doctor: dict[str, Any] = {
        "machine": {
            "cpu": "A CPU",
            "cpus_allowed": 2,
            "memory": {"total_bytes": 1 << 34},
        },
        "disk": {"bytes_per_s": 1e9, "past_page_cache": True},
        "build": {},
        "devices": {},
        "moegguf": {},
    }
    lines = report(rows, read_layout(tiny()), doctor).splitlines()
    speeds = [line for line in lines if "t/s" in line]
    assert speeds[:2] == [
        "| prompt of 4, t/s | 8.00 | 0.80 |",
        "| prompt of 4, t/s at most | 20.00 (80 % reached) | - |",
    ]  # fmt: skip
