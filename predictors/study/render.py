"""Writes the tables and plots of docs/evidence.md and docs/evidence/ from the recorded results.

    python -m predictors.study.render

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; a test holds that every one is what the results say.
The plots need matplotlib (the extra `lab`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from predictors.study.claims import CLAIMS, Claim
from predictors.study.papers import LINKS, ratios, spread
from predictors.study.regenerate import read_result
from tools.models.locality import LOCALITIES

DOCS = Path(__file__).parents[2] / "docs"
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"\{([^}]+)\}")
NAMES = {"moe-infinity": "MoE-Infinity", "promoe": "ProMoE", "expertflow": "ExpertFlow", "duoserve": "DuoServe-MoE"}
NONE = "–"


def pages() -> list[Path]:
    """The pages that hold tables."""
    return [DOCS / "evidence.md", *sorted((DOCS / "evidence").glob("*.md"))]


def rendered(text: str) -> str:
    """The page with every table as the results say. Raises KeyError for a table that is not known."""
    return TABLE.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


def table(name: str) -> str:
    """Markdown."""
    if name in TABLES:
        return TABLES[name]()
    return systems_table(name)


def figures(step: str) -> dict[str, Any]:
    """What a step counted. Raises KeyError where nothing is recorded."""
    found = read_result(step)
    if found is None:
        raise KeyError(f"no result of {step}: make evidence")
    return dict(found["figures"])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float | None) -> str:
    """One decimal."""
    return NONE if share is None else f"{share:.1%}".replace("%", " %")


def systems_table(step: str) -> str:
    """Systems of one step: hits, what they wait and move, and how fast beside the bases, over requests."""
    if read_result(step) is None:
        return f"Not counted yet: `python -m predictors.study.regenerate --only {step}`."
    systems: Mapping[str, Any] = figures(step)["systems"]
    bases = [base for base in ("none", "lru") if base in systems] or [next(iter(systems))]

    def row(name: str, of: Mapping[str, Any]) -> list[str]:
        beside = [spread(ratios(systems[base], of)) for base in bases]
        ready = percent(of["hits"] - of["late"] if of["late"] < of["hits"] else 0.0)
        in_vain = percent(None if of["useful"] is None else 1 - of["useful"])
        return [name, ready, percent(of["late"]), f"{of['stall_ms']:.1f}", spread(of["token_ms"], 1), *beside,
                f"{of['experts']:.1f}", in_vain]  # fmt: skip

    head = ["system", "ready", "on its way", "stall ms", "ms a token", *[f"against {base}" for base in bases],
            "experts moved a token", "of those fetched ahead, in vain"]  # fmt: skip
    return markdown(head, [row(*one) for one in systems.items()])


def accuracy_table() -> str:
    """Predictors by distance."""
    rows = [
        [name, k, *[percent(of[measure]) for measure in ("accuracy", "shuffled", "all", "any", "batch")]]
        for name, by_k in figures("accuracy").items()
        for k, of in by_k.items()
    ]
    return markdown(["predictor", "layers ahead", "right", "shuffled", "all right", "one right", "batch of 8"], rows)


def hits_table() -> str:
    """Hit rates by policy and share."""
    found = figures("hits")
    shares = list(found["lru"])
    rows = [[policy, *[percent(by_share.get(share)) for share in shares]] for policy, by_share in found.items()]
    return markdown(["policy", *[f"{float(share):.3g}".replace("0.", ".") for share in shares]], rows)


def model_table() -> str:
    """The card: losses by kind of text, and answers."""
    card = read_result("laboratory-model")
    assert card is not None
    losses = [
        [kind, f"{card['heldout_tokens'][kind]:,}", f"{dense:.2f}", f"{card['loss'][kind]:.2f}"]
        for kind, dense in card["loss_dense"].items()
    ]
    head = ["text held out", "tokens", "loss of the dense model, nats per token", "of its experts"]
    answers = [f"> {question}\n>\n> {' '.join(answer.split())}" for question, answer in card["answers"].items()]
    return "\n\n".join([markdown(head, losses), "Some answers of it:", *answers])


def routing_table() -> str:
    """Statistics of routing beside those published."""
    reuse, hits, accuracy = figures("reuse"), figures("hits")["lru"], figures("accuracy")["skip"]
    known = LOCALITIES["qwen3-30b"]
    windows = reuse["windows"]
    rows = [
        ["a token's experts that the next one uses too", percent(reuse["next_token"]),
         "45 % Qwen3-30B-A3B, 23 % GLM-5.3-Flash"],
        ["used within the 8 tokens before", percent(windows["8"]), "80 % Qwen3-30B-A3B"],
        *[[f"LRU hits with {float(share):.0%} in memory".replace("%", " %"), percent(hits[share]), published]
          for share, published in (
              ("0.19", f"{known.hit_rates[0.19]:.0%} Qwen3-30B-A3B, 58 % (of 20 %) GLM-5.3-Flash"),
              ("0.25", f"{known.hit_rates[0.24]:.0%} Qwen3-30B-A3B, 51 % OLMoE"),
              ("0.4", f"{known.hit_rates[0.40]:.0%} Qwen3-30B-A3B"),
              ("0.64", f"{known.hit_rates[0.64]:.0%} Qwen3-30B-A3B"))],
        *[[f"skip right, {k} layers ahead", percent(of["accuracy"]), {"1": "90.5 % DeepSeek-V2-Lite",
           "8": "54.5 % DeepSeek-V2-Lite"}.get(k, NONE)] for k, of in accuracy.items()],
        ["evenness of use over all requests (entropy, 1 is even)", f"{reuse['merged']['entropy']:.2f}",
         "near 1 (MoE-Infinity, figure 2)"],
        ["the same within a request", f"{reuse['within']['entropy']:.2f}", "skewed (MoE-Infinity, figure 2)"],
    ]  # fmt: skip
    return re.sub(r"(\d)%", r"\1 %", markdown(["", "here", "published"], rows))


def own_table() -> str:
    """moegguf's default beside LRU and each paper's strategy, at that paper's times."""

    def row(paper: str) -> list[str]:
        systems = figures(f"link-{paper}")["systems"]
        pairs = (("lru", paper), ("lru", "moegguf"), (paper, "moegguf"))
        return [NAMES[paper], *[spread(ratios(systems[base], systems[own])) + "x" for base, own in pairs]]

    head = ["at the times of", "its strategy against `lru`", "`moegguf` against `lru`", "`moegguf` against it"]
    return markdown(head, [row(paper) for paper in LINKS if read_result(f"link-{paper}")])


def claims_table(paper: str | None = None) -> str:
    """All claims, or those of one paper."""
    rows = [
        [*([] if paper else [NAMES.get(claim.paper, claim.paper)]), claim.text, f"**{claim.verdict}**",
         claim.confidence or NONE, resolved(claim)]
        for claim in CLAIMS if paper in (None, claim.paper)
    ]  # fmt: skip
    if paper:
        rows = list(map(_from_pages, rows))
    return markdown([*([] if paper else ["paper"]), "claim", "verdict", "confidence", "figure"], rows)


def resolved(claim: Claim) -> str:
    """The claim's figure with what was recorded."""
    return FIGURE.sub(lambda found: value_of(found[1]), claim.figure)


def _from_pages(row: list[str]) -> list[str]:
    """Links as the pages in the folder need them."""
    return [cell.replace("](evidence/", "](") for cell in row]


def value_of(asked: str) -> str:
    """What `KIND,STEP,...` asks for: `speed` and `stall` of a system against another, or against the first; the `tail`
    of its requests; a `share`, a `number` or a `spread` by keys."""
    kind, step, *keys = asked.split(",")
    found = figures(step)
    if kind == "speed":
        base = found["systems"][keys[1] if keys[1:] else next(iter(found["systems"]))]
        return spread(ratios(base, found["systems"][keys[0]])) + "x"
    if kind == "stall":
        base, own = (found["systems"][name]["stall_ms"] for name in (keys[1], keys[0]))
        return f"{base / own:.2f}x"
    if kind == "tail":
        times = sorted(found["systems"][keys[0]]["token_ms"])
        return f"{times[-1] / times[len(times) // 2]:.2f}x"
    if kind == "spread":
        return spread([100 * value for value in _at(found, keys)], 0) + " %"
    value = _at(found, keys)
    return percent(value) if kind == "share" else f"{value:.2f}".rstrip("0").rstrip(".")


def _at(found: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        found = found[key]
    return found


TABLES: dict[str, Callable[[], str]] = {
    "claims": claims_table,
    **{f"claims-{paper}": partial(claims_table, paper) for paper in LINKS},
    "accuracy": accuracy_table,
    "model": model_table,
    "own": own_table,
    "routing": routing_table,
    "hits": hits_table,
}


def main() -> int:
    """Writes what differs; returns the exit status."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in pages():
        text = page.read_text("utf-8")
        if (written := rendered(text)) != text:
            page.write_text(written, encoding="utf-8")
    from predictors.study.evidence_plots import draw

    draw(DOCS / "evidence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
