"""Writes the tables and plots of docs/evidence.md and docs/evidence/ from the recorded
results.

    python -m predictors.study.render

Each table is between `<!-- table: MODEL/NAME -->` and `<!-- end -->`. A test compares
every table with the results. The plots need matplotlib (the extra `lab`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from moegguf.controller.strategies import EVERY_LAYER
from predictors.commands import new_parser
from predictors.study import figures as recorded
from predictors.study.claims import CLAIMS, OPEN, UNTESTED, Claim
from predictors.study.figures import (
    NONE,
    RESULTS,
    NotCountedError,
    figures,
    interval,
    percent,
    read_result,
    speed_of,
    spread,
)
from predictors.study.papers import LINKS, NAMES, WINDOWS
from predictors.study.regenerate import is_current
from predictors.study.subjects import CARD, DEEP, DEMO, LABORATORY, SUBJECTS
from tools.models.locality import LOCALITIES

DOCS = Path(__file__).parents[2] / "docs"
TABLE = re.compile(r"(<!-- table: ([\w/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
EARLIER = "recorded with an earlier version"
COLUMNS = (DEMO, DEEP, LABORATORY)  # models that have a column in the tables of claims
# {the kind of model from which a model was made: title of the made model's column of
# losses}
ORIGINS = {"dense": "loss of the laboratory model", "demo": "loss of the deep model"}
PLOTS = {paper: NAMES[paper] for paper in LINKS} | {
    "promoe-steps": "ProMoE step by step", "laboratory-model": "Laboratory model: LRU hit rates and accuracy of skip"
}  # fmt: skip


def pages() -> list[Path]:
    """Returns the paths of docs/evidence.md and of all pages in docs/evidence/."""
    return [DOCS / "evidence.md", *sorted((DOCS / "evidence").glob("*.md"))]


def rendered(text: str) -> str:
    """Returns the text of a page with every table regenerated from the recorded
    results."""
    return TABLE.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


def table(name: str) -> str:
    """Returns the Markdown of the table with this name.

    A table of one model begins with a note if an earlier version recorded one of its
    results. If a figure of such a table is not recorded, the function returns a message
    instead.
    """
    if name in WHOLE:
        return WHOLE[name]()
    model, _, step = name.partition("/")
    steps = STEPS_OF.get(step, (step,))
    try:
        text = TABLES[step](model) if step in TABLES else systems_table(name)
    except NotCountedError as error:
        return f"{error}"
    return (
        text
        if all(is_current(f"{model}/{one}") for one in steps)
        else f"*{EARLIER.capitalize()}.*\n\n{text}"
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def systems_table(name: str) -> str:
    """Returns the table of a step's systems: hits, times, and speeds relative to the
    bases. For a step with several settings, returns its `settings_table`."""
    if "settings" in figures(name):
        return settings_table(name)
    systems: Mapping[str, Any] = recorded.systems(name)
    bases = [base for base in ("none", "lru") if base in systems] or [
        next(iter(systems))
    ]

    def row(system: str, of: Mapping[str, Any]) -> list[str]:
        beside = [_speed(name, system, base) for base in bases]
        tail = " and ".join(f"{of['percentiles_ms'][p]:.0f}" for p in ("90", "99"))
        first = f"{median(of['prompt_ms']):.0f}"
        found = [
            percent(of["ready"]),
            percent(of["late"]),
            spread(of["token_ms"], 1),
            tail,
            first,
            *beside,
        ]
        if "ahead" not in of:  # results measured in real time do not include `ahead`
            return [system, *found, of["prefetch"]]
        return [
            system,
            *found,
            f"{of['experts']:.1f}",
            _ahead(of["ahead"]),
            f"{of['stall_ms']:.1f}",
        ]

    moved = [
        "experts moved per token",
        "prefetched experts: in time, late, in vain",
        "stall per token, ms",
    ]
    head = ["system", "ready", "on its way", "ms a token", "90th and 99th percentile, ms", "prompt ms",
            *[f"speed relative to {base.partition(',')[0]}{' entries' * base.isdigit()}" for base in bases],
            *(moved if "ahead" in next(iter(systems.values())) else ["prefetching"])]  # fmt: skip
    return markdown(head, [row(*one) for one in systems.items()])


def _speed(name: str, system: str, base: str) -> str:
    """Returns the speed of a system relative to the system `base`, as text with its
    interval."""
    return interval(speed_of(name, system, base))


def _ahead(shares: Sequence[float] | None) -> str:
    return (
        NONE
        if shares is None
        else ", ".join(f"{share:.0%}".replace("%", " %") for share in shares)
    )


def settings_table(name: str) -> str:
    """Returns the table of systems by setting: the share of lookups that found the
    expert ready, and the speed relative to the strategy `none`."""
    settings = figures(name)["settings"]

    def cell(setting: str, system: str) -> str:
        ready = percent(settings[setting][system]["ready"])
        return f"{ready}, {_speed(f'{name}:{setting}', system, 'none')}x"

    names = list(next(iter(settings.values())))
    return markdown(
        ["system", *map(_setting, settings)],
        [
            [system, *[cell(setting, system) for setting in settings]]
            for system in names
        ],
    )


def _setting(name: str) -> str:
    """Returns the column heading of a setting, whose name is a number of requests, a
    share, or bits and a share."""
    if name.isdigit():
        return f"{name} request{'s' * (name != '1')}"
    if "%" in name:
        return f"{name.replace(';', ' per weight,')} of experts in memory"
    return _in_memory(name)


def scheduler_table(model: str) -> str:
    """Returns the table of ExpertFlow's scheduler, with a row for each batch size and
    order of requests. Columns include the distinct experts in a pass and the experts
    moved per token."""
    found = figures(f"{model}/scheduler")["at_once"]
    kinds = ["hits 25%", "moved 25%", "hits 50%", "moved 50%"]

    def row(n: str, order: str, of: Mapping[str, Any]) -> list[str]:
        saved = 1 - of["experts"] / found[n]["fifo"]["experts"]
        cells = [
            percent(of[kind]) if kind.startswith("hits") else f"{of[kind]:.1f}"
            for kind in kinds
        ]
        return [
            n,
            order,
            f"{of['experts']:.1f}",
            percent(saved),
            *cells,
            str(of["us"] or NONE),
        ]

    shares = "with 25 % of experts in memory", "with 50 % of experts in memory"
    head = ["requests per pass", "order", "distinct experts per pass", "experts saved compared with fifo",
            *[f"{kind} {share}" for share in shares for kind in ("hit rate", "experts read per token")],
            "scheduler's time per pass, µs"]  # fmt: skip
    return markdown(
        head, [row(n, *one) for n, orders in found.items() for one in orders.items()]
    )


def bound_table(model: str) -> str:
    """Returns the table of the minimum MB per token that any eviction policy must read
    for requests that decode together, and of the MB that the store reads."""
    rows = [
        [routing, n, f"{of['experts']:.1f}", percent(of["hit_rate"]), f"{of['mb_per_token']:.0f}",
         f"{of['own_mb_per_token']:.0f}", f"{of['own_mb_per_token'] / by_n['1']['own_mb_per_token']:.2f}"]
        for routing, by_n in figures(f"{model}/bound")["routing"].items() for n, of in by_n.items()
    ]  # fmt: skip
    head = ["routing", "requests decoded together", "distinct experts per layer and pass", "highest possible hit rate",
            "fewest MB read per token with any policy", "MB read per token with `next-use`",
            "MB with `next-use` relative to one request"]  # fmt: skip
    return markdown(head, rows)


def shift_table(model: str) -> str:
    """Returns the table of MoE-Infinity's slowdown after the kind of text changes, with
    a row for each new kind."""
    rows = []
    for kind, of in figures(f"{model}/shift")["kinds"].items():
        slower = [a / b for a, b in zip(of["shifted_ms"], of["known_ms"], strict=True)]
        rows.append(
            [
                kind,
                *[
                    f"{ratio:.2f}"
                    for ratio in (
                        slower[0],
                        *[max(slower[i : i + 4]) for i in (1, 5, 8)],
                    )
                ],
            ]
        )
    groups = "requests 2 to 5", "requests 6 to 9", "the last 4 requests"
    head = [
        "new kind of text",
        "slowdown of request 1",
        *[f"largest slowdown in {requests}" for requests in groups],
    ]
    return markdown(head, rows)


def accuracy_table(model: str) -> str:
    """Returns the table of the predictors' accuracies by distance."""
    rows = [
        [name, k, *[percent(of[measure]) for measure in ("accuracy", "all", "good")]]
        for name, by_k in figures(f"{model}/accuracy").items()
        for k, of in by_k.items()
    ]
    head = ["predictor", "predicted how many layers ahead", "predicted experts that the router chose",
            "predictions with all experts right", "GOODPRED"]  # fmt: skip
    return markdown(head, rows)


def hits_table(model: str) -> str:
    """Returns the table of hit rates by policy and share of experts in memory."""
    found = figures(f"{model}/hits")
    shares = list(found["lru"])
    rows = [
        [policy, *[percent(by_share.get(share)) for share in shares]]
        for policy, by_share in found.items()
    ]
    return markdown(
        ["policy", *[f"hit rate with {_in_memory(share)}" for share in shares]], rows
    )


def _in_memory(share: str) -> str:
    return f"{100 * float(share):g} % of experts in memory"


def model_table(model: str) -> str:
    """Returns the table of the model's losses by kind of text. The losses are compared
    with the losses of the model from which this model was made."""
    card = read_result(f"{model}/{CARD}")
    if card is None:
        # Every step first makes the model and its card.
        raise NotCountedError(f"{model}/reuse")
    origin = next(origin for origin in ORIGINS if f"loss_{origin}" in card)
    losses = [
        [
            kind,
            f"{card['heldout_tokens'][kind]:,}",
            f"{before:.2f}",
            f"{card['loss'][kind]:.2f}",
        ]
        for kind, before in card[f"loss_{origin}"].items()
    ]
    loss = f"loss of the {origin} model", ORIGINS[origin]
    return markdown(
        ["kind of held-out text", "tokens", *[f"{of}, nats per token" for of in loss]],
        losses,
    )


def routing_table(model: str) -> str:
    """Returns a table that compares statistics of the model's routing with published
    statistics of other models."""
    reuse = figures(f"{model}/reuse")
    hits = figures(f"{model}/hits")["lru"]
    accuracy = figures(f"{model}/accuracy")["skip"]
    known = LOCALITIES["qwen3-30b"]
    windows = reuse["windows"]
    rows = [
        ["share of a token's experts that the next token also uses", percent(reuse["next_token"]),
         "45 % for Qwen3-30B-A3B; 23 % for GLM-5.3-Flash"],
        ["share of a token's experts that one of the 8 preceding tokens also used", percent(windows["8"]),
         "80 % for Qwen3-30B-A3B"],
        *[[f"LRU hit rate with {_in_memory(share)}", percent(hits[share]), published]
          for share, published in (
              ("0.19", f"hit rate of {known.hit_rates[0.19]:.0%} for Qwen3-30B-A3B; with 20 % in memory, 58 % for"
               " GLM-5.3-Flash"),
              ("0.25", f"with 24 % in memory, hit rate of {known.hit_rates[0.24]:.0%} for Qwen3-30B-A3B; 51 % for"
               " OLMoE"),
              ("0.4", f"{known.hit_rates[0.40]:.0%} for Qwen3-30B-A3B"),
              ("0.64", f"{known.hit_rates[0.64]:.0%} for Qwen3-30B-A3B"))],
        *[[f"accuracy of `skip`, {k} layer{'s' * (k != '1')} ahead", percent(of["accuracy"]),
           {"1": "90.5 % for DeepSeek-V2-Lite", "8": "54.5 % for DeepSeek-V2-Lite"}.get(k, NONE)]
          for k, of in accuracy.items()],
        ["evenness of expert use over all requests (normalised entropy: 1 means uniform)",
         f"{reuse['merged']['entropy']:.2f}",
         "entropy near 1 (MoE-Infinity, figure 2)"],
        ["evenness of expert use within a request (normalised entropy: 1 means uniform)",
         f"{reuse['within']['entropy']:.2f}",
         "use is skewed (MoE-Infinity, figure 2)"],
    ]  # fmt: skip
    head = [
        "statistic",
        f"figure for the {SUBJECTS[model].title}",
        "published figures for other models",
    ]
    return re.sub(r"(\d)%", r"\1 %", markdown(head, rows))


def costs_table(model: str) -> str:
    """Returns the table of prediction times in microseconds, by predictor and model
    shape."""
    found = figures(f"{model}/costs")

    def cells(of: Mapping[str, float]) -> list[str]:
        return [f"{of['before']:.0f}", f"{of['layer']:.0f} ({of['layer_99']:.0f})"]

    rows = [
        [name, *[cell for by_name in found.values() for cell in cells(by_name[name])]]
        for name in next(iter(found.values()))
    ]
    parts = (
        "median prediction time before the first layer of a pass, µs",
        "median prediction time per layer (99th percentile), µs",
    )
    shapes = [
        shape.replace("laboratory", "laboratory model").replace(" x ", " layers of ")
        + " experts"
        for shape in found
    ]
    return markdown(
        ["predictor", *[f"{part}: {shape}" for shape in shapes for part in parts]], rows
    )


def plot(name: str) -> str:
    """Returns the Markdown that embeds the plot with this name."""
    return f"![{PLOTS[name]}]({name}.svg)"


def own_table(model: str) -> str:
    """Returns the table that compares the strategy `moegguf` with `lru` and with each
    paper's strategy. Each row is simulated with the link and compute times of one
    paper."""

    def row(paper: str) -> list[str]:
        pairs = ((paper, "lru"), ("moegguf", "lru"), ("moegguf", paper))
        return [
            NAMES[paper],
            *[_speed(f"{model}/link-{paper}", own, base) + "x" for own, base in pairs],
        ]

    pairs = (
        "the paper's strategy relative to `lru`",
        "`moegguf` relative to `lru`",
        "`moegguf` relative to the paper's",
    )
    head = ["paper", *[f"speed of {pair}" for pair in pairs]]
    return markdown(head, [row(paper) for paper in LINKS])


def tuned_table(model: str) -> str:
    """Returns the table of prefetch windows for the papers in WINDOWS: the chosen
    window, and the ms per token with each window that was tried."""
    found = {paper: figures(f"{model}/tuned-{paper}") for paper in WINDOWS}

    def far(window: str | int) -> str:
        n = int(window)
        return f"{'all' if n >= EVERY_LAYER else n} layer{'s' * (n != 1)} ahead"

    def time(of: Mapping[str, float], window: str) -> str:
        return f"{of[window]:.1f}" if window in of else NONE

    windows = dict.fromkeys(window for of in found.values() for window in of["ms"])
    rows = [
        [
            NAMES[paper],
            far(of["chosen"]),
            *[time(of["ms"], window) for window in windows],
        ]
        for paper, of in found.items()
    ]
    return markdown(
        [
            "paper",
            "fastest distance",
            *[f"ms per token, fetching {far(w)}" for w in windows],
        ],
        rows,
    )


def learned_table(model: str) -> str:
    """Returns the table of ProMoE's networks: validation accuracy after each epoch, and
    number of weights per network."""
    found = figures(f"{model}/learned")
    row = [f"{found['weights']:,}", *[percent(value) for value in found["curve"]]]
    epochs = range(1, len(found["curve"]) + 1)
    return markdown(
        [
            "weights per network",
            *[f"validation accuracy after epoch {n}" for n in epochs],
        ],
        [row],
    )


def claims_table(paper: str) -> str:
    """Returns the table of one paper's claims, with the verdicts on the models in
    COLUMNS and the figures."""
    rows = [
        [f"{claim.text}. {claim.note}" if claim.note else claim.text, *[_judged(claim, model) for model in COLUMNS],
         _confidence(claim)]
        for claim in CLAIMS if claim.paper == paper
    ]  # fmt: skip
    titles = [f"verdict for the {SUBJECTS[model].title}" for model in COLUMNS]
    return markdown(["claim", *titles, "confidence"], map(_from_pages, rows))


def verdicts_table() -> str:
    """Returns the table of all claims, with the verdicts on the models in COLUMNS."""
    rows = [
        [claim.text, *[_verdict(claim, model) for model in COLUMNS], _confidence(claim)]
        for claim in CLAIMS
    ]
    titles = [f"verdict for the {SUBJECTS[model].title}" for model in COLUMNS]
    return markdown(["claim", *titles, "confidence"], rows)


def _confidence(claim: Claim) -> str:
    return NONE if isinstance(claim.judged, str) else claim.confidence


def _judged(claim: Claim, model: str) -> str:
    """Returns the verdict on a claim for a model, with the claim's figures."""
    return f"{_verdict(claim, model)}: {claim.resolved(_judged_model(claim, model))}"


def _verdict(claim: Claim, model: str) -> str:
    """Returns the verdict on a claim for a model. Marks the verdict if an earlier
    version recorded one of the claim's figures."""
    model = _judged_model(claim, model)
    results = [f"{model}/{step}" for step in claim.steps]
    earlier = any(
        read_result(result) is not None and not is_current(result) for result in results
    )
    return f"**{claim.verdict(model)}**{f' ({EARLIER})' if earlier else ''}"


def _judged_model(claim: Claim, model: str) -> str:
    """Returns the model on which a claim is judged: `claim.only_on`, if set, replaces
    the laboratory model."""
    return claim.only_on if claim.only_on and model == LABORATORY else model


def changes_table() -> str:
    """Returns the table of claims for which a current verdict differs from the verdict
    in earlier.json, with the reason."""
    earlier = json.loads((RESULTS / "earlier.json").read_text("utf-8"))
    verdicts = {(claim.paper, claim.text): claim for claim in CLAIMS}
    rows = []
    for one in earlier:
        claim = verdicts[one["paper"], one["claim"]]
        now = {model: _counted_now(claim, model) for model in COLUMNS}
        if any(verdict not in (None, one["verdict"]) for verdict in now.values()):
            found = [verdict or "no current verdict" for verdict in now.values()]
            rows.append(
                [NAMES[claim.paper], claim.text, one["verdict"], *found, one["why"]]
            )
    titles = [f"current verdict, {SUBJECTS[model].title}" for model in COLUMNS]
    return markdown(
        [
            "paper",
            "claim",
            "earlier verdict, laboratory model",
            *titles,
            "reason for the change",
        ],
        rows,
    )


def _counted_now(claim: Claim, model: str) -> str | None:
    """Returns the verdict on a claim for a model. Returns None if the claim is not
    judged, or if not all of its figures were computed with this version of the code."""
    model = _judged_model(claim, model)
    verdict = claim.verdict(model)
    return (
        verdict
        if verdict not in (UNTESTED, OPEN) and _is_counted(claim, model)
        else None
    )


def _is_counted(claim: Claim, model: str) -> bool:
    return all(is_current(f"{model}/{step}") for step in claim.steps)


def _from_pages(row: list[str]) -> list[str]:
    """Returns the row with its links changed from paths relative to docs/ to paths
    relative to docs/evidence/."""
    return [cell.replace("](evidence/", "](") for cell in row]


TABLES: dict[str, Callable[[str], str]] = {
    "accuracy": accuracy_table,
    "model": model_table,
    "own": own_table,
    "routing": routing_table,
    "hits": hits_table,
    "scheduler": scheduler_table,
    "shift": shift_table,
    "bound": bound_table,
    "costs": costs_table,
    "tuned": tuned_table,
    "learned": learned_table,
}
STEPS_OF = {
    "model": (CARD,),
    "own": tuple(f"link-{paper}" for paper in LINKS),
    "routing": ("reuse", "hits", "accuracy"),
    "tuned": tuple(f"tuned-{paper}" for paper in WINDOWS),
}
WHOLE: dict[str, Callable[[], str]] = {
    "claims": verdicts_table,
    "changes": changes_table,
    **{f"claims-{paper}": partial(claims_table, paper) for paper in LINKS},
    **{f"plot-{name}": partial(plot, name) for name in PLOTS},
}


def main() -> int:
    """Writes the pages whose tables have changed, and draws the plots; returns the exit
    status."""
    new_parser(__doc__).parse_args()
    for page in pages():
        text = page.read_text("utf-8")
        if (written := rendered(text)) != text:
            page.write_text(written, encoding="utf-8")
    from predictors.study.evidence_plots import draw

    draw(DOCS / "evidence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
