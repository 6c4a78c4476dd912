"""The HTML page of a report: per section findings, plots and tables of their numbers.

The page is one file without external resources. All numbers come from tables.py; this module only formats them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import matplotlib

from moegguf.package import __version__
from moegguf.quantities import format_bytes
from predictors.study.report import findings, plots
from predictors.study.report.findings import percent
from predictors.study.report.tables import Report, TraceSummary
from predictors.study.scoring import ScoreTable

STYLE = """
body { max-width: 47rem; margin: 2rem auto; padding: 0 1.1rem; font: 16px/1.55 system-ui, sans-serif; color: #1d2329; }
h1, li, td { overflow-wrap: anywhere; }
section { padding-top: 1.5rem; margin-top: 1.5rem; border-top: 1px solid #e4e8ec; }
figure { margin: 0 0 1.3rem; overflow-x: auto; }
img { width: 100%; max-width: 42rem; min-width: 22rem; }
figcaption, summary, footer { color: #68727c; font-size: .87rem; }
table { border-collapse: collapse; font-size: .86rem; margin: .5rem 0 .9rem; display: block; overflow-x: auto; }
th, td { padding: .28rem .8rem .28rem 0; border-bottom: 1px solid #e4e8ec; text-align: left; vertical-align: top; }
"""

Row = Sequence[str]
Plot = tuple[str, str]  # image, caption


def write_report(path: Path, report: Report) -> None:
    """Writes the page. Raises OSError when the file cannot be written."""
    path.write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    """The page as HTML."""
    with matplotlib.rc_context(plots.STYLE):
        measured = {name: section for name, part in PARTS.items() if (section := part(report))}
    missing = [title for name, title in TITLES.items() if name in PARTS and name not in measured]
    sections = [_recorded(report.trace, missing), *measured.values()]
    title = escape(f"{report.title}: {report.trace.model}" if report.trace.model else report.title)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{''.join(sections)}"
        f"<footer>moegguf {escape(__version__)}</footer>\n</body>\n</html>\n"
    )


def _section(name: str, sentences: Sequence[str], drawn: Sequence[Plot] = (), tables: str = "") -> str:
    figures = "".join(f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>" for image, caption in drawn)
    heading = f'<h2 id="{name}">{TITLES[name]}</h2>'
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<section>{heading}<ul>{items}</ul>{figures}{tables}</section>\n"


def _table(caption: str, head: Row, rows: Sequence[Row], folded: bool = True) -> str:
    """A table whose first column names its rows; all cells are escaped."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    top = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    table = f"<table>{top}<tbody>{body}</tbody></table>"
    return f"<details><summary>Numbers: {escape(caption)}</summary>{table}</details>" if folded else table


def _recorded(facts: TraceSummary, missing: Sequence[str]) -> str:
    rows = [
        ("model", facts.model or "–"),
        ("routers' fingerprint", facts.fingerprint or "–"),
        ("experts", f"{facts.n_moe_layer} layers of {facts.n_expert}, {facts.n_expert_used} used by a token"),
        ("size of an expert", format_bytes(facts.expert_bytes)),
        ("experts touched by a token", format_bytes(facts.token_bytes)),
        ("requests", str(facts.requests)),
        ("prompt tokens", str(facts.prompt_tokens)),
        ("answer tokens", str(facts.answer_tokens)),
        ("hardware", facts.hardware or "–"),
        *((f"setting: {name}", str(value)) for name, value in facts.settings.items()),
    ]
    kinds = [(kind or "(unnamed)", str(n)) for kind, n in facts.kinds.items()]
    named = ", ".join(f"{n} of {kind}" for kind, n in kinds)
    sentences = [f"{facts.requests} requests ({named}), {facts.answer_tokens} answer tokens."]
    if missing:
        sentences.append(f"Not measured in this report: {'; '.join(missing)}.")
    tables = _table("what was recorded", ("", ""), rows, folded=False)
    return _section("recorded", sentences, (), tables)


def _heat(report: Report) -> str:
    reuse = report.reuse
    if reuse is None or not reuse.counts.size:
        return ""
    caption = "Denser means more use; 1 is the mean over the layer's experts."
    kinds = {sequence: report.labels.get(sequence, "") for sequence in reuse.sequences}
    drawn = [
        (plots.layer_heatmap(reuse), f"All requests together. {caption}"),
        (plots.request_heatmap(reuse, kinds), "One line for each request, one layer; answers only."),
    ]
    total = reuse.counts.sum(axis=0)
    rows = [
        (str(il), str(line.min()), str(line.max()), str(int((line == 0).sum())), percent(float(following)))
        for il, line, following in zip(reuse.layers, total, reuse.next_token, strict=True)
    ]
    head = ("layer", "least used (tokens)", "most used (tokens)", "never used", "kept by the next token")
    return _section("experts", findings.of_heatmaps(reuse), drawn, _table("use by layer", head, rows))


def _reuse(report: Report) -> str:
    reuse = report.reuse
    if reuse is None or not reuse.counts.size:
        return ""
    skews = (
        ("one request", reuse.within),
        ("as many tokens from all requests", reuse.same_size),
        ("all requests", reuse.merged),
    )
    tables = _table(
        "how uneven use is (MoE-Infinity, figure 2)",
        ("", "experts that make up 80% of uses", "entropy (1 is even)"),
        [(name, percent(skew.covering), f"{skew.entropy:.3f}") for name, skew in skews],
    )
    tables += _table(
        "experts already used in the last n tokens",
        ("n", "same request", "another request"),
        [(str(n), percent(share), percent(reuse.windows_other[n])) for n, share in reuse.windows_same.items()],
    )
    tables += _table(
        "tokens since the last use in the request",
        ("tokens", "share of uses"),
        [
            ("first use" if n == 0 else "later" if n < 0 else f"up to {n}", percent(share))
            for n, share in reuse.reuse_distances.items()
        ],
    )
    caption = "Left: share of the experts that a token uses. Right: all uses in an answer, including first uses."
    return _section("reuse", findings.of_reuse(reuse), [(plots.reuse_windows(reuse), caption)], tables)


def _hits(report: Report) -> str:
    table = report.policies
    if table is None or not table.budgets():
        return ""
    budgets = table.budgets()
    rows = [(name, *(percent(rates.get(budget)) for budget in budgets)) for name, rates in table.hit_rates.items()]
    closed = [
        (name, *(percent(table.gap_closed(name, budget)) for budget in budgets))
        for name in table.hit_rates
        if name not in table.offline
    ]
    head = ("policy", *(f"{budget:.0%}" for budget in budgets))
    tables = _table("hit rate by budget (share of all experts)", head, rows)
    tables += _table("distance from LRU to Belady that is closed", head, closed)
    caption = "Belady is the offline bound: no eviction policy is above it. Thick: the best online policy."
    return _section("hits", findings.of_policies(table), [(plots.hit_rates(table, _looks(report)), caption)], tables)


def _scores(report: Report) -> str:
    table = report.scores
    if table is None or not table.scores:
        return ""
    caption = (
        "Share of exactly n_expert_used predicted experts that are used (ProMoE's ACCURACY), mean over layers but the"
        " first. Dashed: the control, the same predictor on routing shuffled within each request."
    )
    return _section("accuracy", findings.of_scores(table), [(plots.accuracy(table), caption)], _score_tables(table))


def _score_tables(table: ScoreTable) -> str:
    n = table.n_expert_used - 1
    rows, controls = [], {control.name: control for control in table.controls}
    for score in table.scores:
        for distance, figures in score.means.items():
            control = controls[score.name].means[distance].accuracy if score.name in controls else None
            batch = (score.batch_accuracy or {}).get(distance)
            moved = figures.moved_per_useful[n]
            shares = (
                figures.coverage, figures.accuracy, control, figures.top_k_hit, figures.at_least_one, batch,
                figures.precision[n], figures.recall[-1], figures.fetch_rate, figures.good_pred,
            )  # fmt: skip
            rows.append((f"{score.name}, {distance}", *map(percent, shares), "–" if moved is None else f"{moved:.2f}"))
    head = (
        "predictor, distance", "answers", "ACCURACY", "control", "all right", "one right",
        f"batch of {table.batch_sequences}", "precision", "recall of twice as many", "FETCHRATE", "GOODPRED",
        f"bytes moved per useful byte, beside LRU of {table.lru_share:.0%}",
    )  # fmt: skip
    link = table.link
    caption = "predictors, over all layers but the first"
    if link is not None:
        caption += (
            f"; link of {link.bytes_per_s / 1e9:g} GB/s, {link.latency_us:g} µs,"
            f" {link.layer_compute_us:g} µs of compute per layer"
        )
    return _table(caption, head, rows)


def _stalls(report: Report) -> str:
    table = report.stalls
    if table is None or not table.speeds():
        return ""
    speeds = table.speeds()
    rows = [
        (name, *("–" if speed not in row else f"{row[speed]:.3f}" for speed in speeds))
        for name, row in table.stall_ms.items()
    ]
    numbers = _table("stall in ms per token, by link", ("setting", *(f"{speed:g} GB/s" for speed in speeds)), rows)
    caption = "Time that computation waits for experts, on a modelled link. Values below 0.01 ms are drawn at 0.01 ms."
    return _section("stall", findings.of_stalls(table), [(plots.stalls(table, _looks(report)), caption)], numbers)


def _recovery(report: Report) -> str:
    table = report.recovery
    if table is None or not any(table.hit_rates.values()):
        return ""
    rows = []
    for name, rates in table.hit_rates.items():
        needed = table.recovered_after(name)
        before, after = rates[: table.change], rates[table.change :]
        means = [percent(sum(part) / len(part) if part else None) for part in (before, after[:10], after)]
        rows.append((name, *means, "–" if needed is None else str(needed)))
    head = ("policy", "before the change", "first 10 after", "all after", "requests to recover")
    caption = f"From {table.kinds[0] or 'one kind of text'} to {table.kinds[1] or 'another'} at the dotted line"
    caption += "." if table.budget is None else f", budget {table.budget:.0%} of the experts."
    drawn = [(plots.recovery(table, _looks(report)), caption)]
    return _section("recovery", findings.of_recovery(table), drawn, _table("hit rate around the change", head, rows))


def _schedule(report: Report) -> str:
    table = report.schedule
    if table is None or not any(table.experts.values()):
        return ""
    orders = list(dict.fromkeys(order for row in table.experts.values() for order in row))
    rows = [
        (str(batch), *(f"{row[order]:.2f}" if order in row else "–" for order in orders))
        for batch, row in table.experts.items()
    ]
    numbers = _table("distinct experts of a pass", ("requests per batch", *orders), rows)
    caption = "Fewer distinct experts per batch mean fewer bytes to fetch for the same tokens."
    return _section("schedule", findings.of_schedule(table), [(plots.schedule(table), caption)], numbers)


def _looks(report: Report) -> dict[str, plots.Look]:
    """Colours and markers of policies and settings, the same in every plot."""
    tables = (
        report.policies and report.policies.hit_rates,
        report.recovery and report.recovery.hit_rates,
        report.stalls and report.stalls.stall_ms,
    )
    return plots.looks(name for table in tables if table for name in table)


TITLES = {
    "recorded": "What was recorded",
    "experts": "Which experts are used",
    "reuse": "Reuse within a request and across requests",
    "hits": "Hit rate against budget",
    "accuracy": "Accuracy of predictions against distance",
    "stall": "Stall against link speed",
    "recovery": "After a change of text",
    "schedule": "Effect of the scheduler",
}
PARTS: dict[str, Callable[[Report], str]] = {
    "experts": _heat,
    "reuse": _reuse,
    "hits": _hits,
    "accuracy": _scores,
    "stall": _stalls,
    "recovery": _recovery,
    "schedule": _schedule,
}
"""{section: its HTML; "" where it was not measured}"""
