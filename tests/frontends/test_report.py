"""The report's page, from synthetic numbers: complete, valid, escaped, without external resources."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from oracles import Oracle
from traces import random_trace

from predictors.study.accuracy import LinkModel
from predictors.study.report.tables import PolicyTable, Recovery, Report, ScheduleTable, StallTable, TraceSummary
from predictors.study.reuse import reuse
from predictors.study.scoring import score

pytest.importorskip("matplotlib", reason="plots need matplotlib, which is not installed")

from predictors.study.report import findings
from predictors.study.report.page import TITLES, render

VOID = {"meta", "br", "link", "img", "input", "hr"}
HOSTILE = '<script>alert("x")</script> & $\\frac$'


@cache
def synthetic_report() -> Report:
    trace = random_trace(n_sequences=8, n_decode=12)
    budgets = (0.1, 0.25, 0.5)
    rates = {"lru": (0.3, 0.5, 0.7), "lfu": (0.25, 0.45, 0.75), "locality": (0.4, 0.6, 0.8), "belady": (0.5, 0.75, 0.9)}
    predictors = [Oracle(trace, n_wrong=1), Oracle(trace)]
    return Report(
        trace=TraceSummary.of(trace, "2 cores"),
        labels=trace.header.labels,
        reuse=reuse(trace),
        policies=PolicyTable({name: dict(zip(budgets, row, strict=True)) for name, row in rates.items()}),
        scores=score(trace, predictors, (1, 2, 4), LinkModel(1e7, 5, 100), batch_sequences=4),
        stalls=StallTable({"lru": {1: 40, 4: 8, 16: 0}, "locality, skip": {1: 30, 4: 9, 16: 0}}, compute_ms=20),
        recovery=Recovery({"lru": [0.6] * 6 + [0.2, 0.4] + [0.6] * 12}, 6, ("prose", "code"), 0.25),
        schedule=ScheduleTable({8: {"fifo": 12.0, "by path": 9.0}}),
    )


@pytest.fixture(scope="module")
def page() -> str:
    return render(synthetic_report())


class Checker(HTMLParser):
    """Fails on tags that do not close in order; collects ids, tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    return checker


def test_the_page_is_valid_and_has_every_section_with_its_plot_and_its_numbers(page: str) -> None:
    checker = checked(page)
    assert len(checker.ids) == len(set(checker.ids))
    assert set(TITLES) == set(checker.ids)
    assert checker.tags.count("section") == len(TITLES)
    assert checker.tags.count("img") == 8  # two heatmaps, one plot in each of the other sections
    assert checker.tags.count("figcaption") == 8
    assert checker.tags.count("table") >= 10
    assert findings.percent(0.6) in checker.text
    assert "Not measured" not in checker.text


def test_there_are_no_external_resources(page: str) -> None:
    assert not re.search(r"https?:|@import|<script|<link", page)
    assert all(target.startswith(("#", "data:")) for target in re.findall(r'(?:href|src)="([^"]*)', page))


def test_names_from_the_trace_are_escaped() -> None:
    report = synthetic_report()
    hostile = replace(
        report,
        trace=replace(report.trace, model=HOSTILE, kinds={HOSTILE: 2}, hardware=HOSTILE, settings={HOSTILE: HOSTILE}),
        labels=dict.fromkeys(report.labels, HOSTILE),
        policies=PolicyTable({HOSTILE: {0.1: 0.5}, "lru": {0.1: 0.4}, "belady": {0.1: 0.6}}),
        stalls=StallTable({HOSTILE: {1: 3.0}, "lru": {1: 4.0}}),
        recovery=Recovery({HOSTILE: [0.5] * 8}, 4, (HOSTILE, HOSTILE)),
        schedule=ScheduleTable({8: {"fifo": 12.0, HOSTILE: 9.0}}),
    )
    html = render(hostile)
    checker = checked(html)
    assert "<script" not in html
    assert checker.text.count(HOSTILE) >= 8


def assert_nothing_is_measured(html: str) -> None:
    """Only what was recorded has a section; the other parts are named in one sentence."""
    others = [title for name, title in TITLES.items() if name != "recorded"]
    assert html.count("<section>") == 1
    assert f"Not measured in this report: {'; '.join(others)}." in checked(html).text


def test_parts_that_were_not_measured_have_no_section() -> None:
    assert_nothing_is_measured(render(Report(TraceSummary.of(random_trace(n_sequences=1, n_decode=0)))))


def test_one_request_of_few_tokens_makes_a_page() -> None:
    trace = random_trace(n_sequences=1, n_decode=2)
    report = Report(TraceSummary.of(trace), reuse=reuse(trace), scores=score(trace, [Oracle(trace)]))
    assert "Too few tokens or requests" in checked(render(report)).text


def test_conclusions_are_computed() -> None:
    report = synthetic_report()
    assert report.policies is not None and report.stalls is not None
    assert report.recovery is not None and report.schedule is not None and report.scores is not None
    assert report.policies.gap_closed("locality", 0.25) == pytest.approx(0.4)
    assert report.policies.worse_than_baseline("lfu") == [0.1, 0.25]
    policies = " ".join(findings.of_policies(report.policies))
    assert "At 25% of the experts locality closes 40% of the distance" in policies
    assert "LRU (50.0%) and Belady (75.0%): 60.0%." in policies
    assert "Below LRU at one budget or more: lfu." in policies
    stalls = findings.of_stalls(report.stalls)
    assert "At 1 GB/s locality, skip stalls for 30.00 ms per token, lru for 40.00 ms." in stalls
    assert "At 4 GB/s no setting stalls clearly less than lru (8.00 ms per token)." in stalls
    assert report.recovery.recovered_after("lru") == 6  # means: 0.2, 0.3, 0.4, 0.45, 0.48, 0.56, then 0.6
    assert findings.of_schedule(report.schedule)[0].startswith("8 requests per batch, by path: 25.0% fewer experts")
    assert findings.of_scores(report.scores)[0].startswith("1 layer ahead oracle 2 is the most accurate: 100.0%")


def test_lru_as_the_best_policy_is_a_finding() -> None:
    table = PolicyTable({"lru": {0.5: 0.7}, "lfu": {0.5: 0.6}, "belady": {0.5: 0.9}})
    assert findings.of_policies(table)[0] == "At 50% of the experts no policy is better than LRU (70.0%)."
    assert table.gap_closed("lfu", 0.5) == pytest.approx(-0.5)
    assert PolicyTable({"lru": {0.5: 0.7}}).gap_closed("lru", 0.5) is None
