"""/metrics: every line follows Prometheus' grammar, and no counter decreases."""

import re
from collections.abc import Iterable
from typing import Any

from recorded_texts import check_recorded

from moegguf.engine.stats import Stats, TierStats
from moegguf.generate.request import Timing
from moegguf.server.metrics import FIELDS, TIER_FIELDS, Totals, exposition
from moegguf.serving.events import LoadedModel

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})(\{{{LABEL}(?:,{LABEL})*\}})? (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def model(name: str = "demo:latest", pid: int = 1, **fields: Any) -> LoadedModel:
    figures = {"digest": "0" * 64, "n_ctx": 512, "size_bytes": 1000, "vram_bytes": 0, "expires": None, "busy": False,
               "stopping": False, "queue": 0, "n_requests": 0, "stats": Stats()}  # fmt: skip
    return LoadedModel(name=name, pid=pid, **{**figures, **fields})


def samples(text: str) -> dict[str, float]:
    """Every sample by name and labels; fails unless all of `text` is of the format."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert line.split(" ", 3)[2] not in kinds
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind == ("counter" if name.endswith("_total") else "gauge")
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] in kinds
            assert match[1] + (match[2] or "") not in found
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def numbered(fields: Iterable[str], first: int) -> dict[str, int]:
    """Another number for every field."""
    return {name: first + i for i, name in enumerate(fields)}


def test_every_figure_has_its_name_help_and_labels() -> None:
    """`recorded/metrics.txt`, where every number stands for one field."""
    totals = Totals()
    for name, n in (("a:latest", 1), ("a:latest", 2), ("b:latest", 4)):
        counts = {"prompt_tokens": 10 * n, "cached_tokens": n, "answer_tokens": 20 * n}
        totals.add(name, Timing(prompt_s=n, answer_s=2 * n, **counts))
    slots = ("n_slots", "slots_used", "pool_bytes")
    vram, ram = (numbered([*TIER_FIELDS, *slots], first) for first in (200, 300))
    tiers = (TierStats("VRAM", "CUDA0", **vram), TierStats("RAM", "CUDA0", **ram))
    stats = Stats(tiers=tiers, **numbered([*FIELDS, *slots, "n_experts", "staging_bytes"], 100))
    gone = 2**22 + 1  # a process that has ended
    loaded = [
        model("a:latest", gone, stats=stats, busy=True, queue=2, n_ctx=7),
        model("b:latest", gone + 1, busy=True, queue=1),
    ]
    totals.update(loaded)
    text = exposition(totals, loaded)
    samples(text)
    check_recorded("metrics", text)
    found = samples(exposition(Totals(), []))  # without models: llama-server's
    assert found["llamacpp:prompt_tokens_total"] == found["llamacpp:predicted_tokens_seconds"] == 0
    assert not [name for name in found if name.startswith("moegguf_")]


def test_counters_survive_unloading_and_reloading() -> None:
    totals, before = Totals(), {}
    for loaded in (
        [model(stats=Stats(misses=5, n_slots=3))],
        [model(stats=Stats(misses=8, n_slots=3)), model("b:latest", 2, stats=Stats(misses=1))],
        [model("b:latest", 2, stats=Stats(misses=2))],
        [],
        [model(pid=3, stats=Stats(misses=4))],
        [model(pid=4, stats=Stats(misses=1))],
    ):
        totals.update(loaded)
        now = samples(exposition(totals, loaded))
        assert all(now[name] >= value for name, value in before.items() if "_total" in name)
        before = now
    assert before['moegguf_expert_misses_total{model="demo:latest"}'] == 8 + 4 + 1
    assert before['moegguf_expert_misses_total{model="b:latest"}'] == 2
    assert 'moegguf_slots{model="b:latest"}' not in before


def test_names_that_need_escapes_stay_one_line_each() -> None:
    name = 'a\\b"c\nd:latest'
    totals, loaded = Totals(), [model(name)]
    totals.update(loaded)
    found = samples(exposition(totals, loaded))
    assert found['moegguf_expert_misses_total{model="a\\\\b\\"c\\nd:latest"}'] == 0
