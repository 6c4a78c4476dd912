"""Tests /metrics: Prometheus' parser accepts the text, and no counter decreases when
models are unloaded."""

from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from recorded_texts import check_recorded
from scripted_manager import EMPTY_PLAN

from moegguf.engine.stats import Stats, TierStats
from moegguf.generate.request import AnswerSummary
from moegguf.server.metrics import COUNTS, TIER_COUNTS, MetricSpec, Totals, exposition
from moegguf.serving.events import LoadedModel


def model(name: str = "demo:latest", pid: int = 1, **fields: Any) -> LoadedModel:
    figures = {"digest": "0" * 64, "n_ctx": 512, "size_bytes": 1000, "vram_bytes": 0, "expires": None, "busy": False,
               "stopping": False, "queue": 0, "n_requests": 0, "stats": Stats(), "plan": EMPTY_PLAN}  # fmt: skip
    return LoadedModel(name=name, pid=pid, **{**figures, **fields})


def samples(text: str) -> dict[tuple[str, str], float]:
    """Parses the text with Prometheus' own parser. Returns the samples, keyed by
    (metric, model).

    The model is "" for a sample without labels. Samples with any label other than
    `model` are left out.
    """
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert family.type == (
                "counter" if sample.name.endswith("_total") else "gauge"
            )
            if sample.labels.keys() <= {"model"}:
                key = sample.name, sample.labels.get("model", "")
                assert key not in found
                found[key] = sample.value
    return found


def fields_of(specs: Iterable[MetricSpec]) -> list[str]:
    return [
        field for spec in specs for field in (spec.fields.values() or (spec.field,))
    ]


def numbered(fields: Iterable[str], first: int) -> dict[str, int]:
    """Returns successive numbers, beginning with `first`, one for each field."""
    return {name: first + i for i, name in enumerate(fields)}


def test_exposition_equals_the_recorded_metrics() -> None:
    """Compares the text with `recorded/metrics.txt`. Each field of a Stats object has a
    different value."""
    totals = Totals()
    for name, n in (("a:latest", 1), ("a:latest", 2), ("b:latest", 4)):
        counts = {"prompt_tokens": 10 * n, "cached_tokens": n, "answer_tokens": 20 * n}
        totals.add(name, AnswerSummary(prompt_s=n, answer_s=2 * n, **counts))
    slots = ("n_slots", "slots_used", "pool_bytes")
    vram, ram = (
        numbered([*fields_of(TIER_COUNTS), *slots], first) for first in (200, 300)
    )
    tiers = (TierStats("VRAM", "CUDA0", **vram), TierStats("RAM", "CUDA0", **ram))
    stats = Stats(
        tiers=tiers,
        **numbered([*fields_of(COUNTS), *slots, "n_experts", "staging_bytes"], 100),
    )
    gone = 2**22 + 1  # no process has this id: Linux's ids are below 2**22
    loaded = [
        model(
            "a:latest", gone, stats=stats, busy=True, n_answering=3, queue=2, n_ctx=7
        ),
        model("b:latest", gone + 1, busy=True, n_answering=1, queue=1),
    ]
    totals.update(loaded)
    text = exposition(totals, loaded)
    assert samples(text)
    check_recorded("metrics", text)
    # No models: only metrics with llama-server's names.
    found = samples(exposition(Totals(), []))
    assert (
        found["llamacpp:prompt_tokens_total", ""]
        == found["llamacpp:predicted_tokens_seconds", ""]
        == 0
    )
    assert not [name for name, _ in found if name.startswith("moegguf_")]


def test_counters_survive_unloading_and_reloading() -> None:
    totals, before = Totals(), {}
    for loaded in (
        [model(stats=Stats(misses=5, n_slots=3))],
        [
            model(stats=Stats(misses=8, n_slots=3)),
            model("b:latest", 2, stats=Stats(misses=1)),
        ],
        [model("b:latest", 2, stats=Stats(misses=2))],
        [],
        [model(pid=3, stats=Stats(misses=4))],
        [model(pid=4, stats=Stats(misses=1))],
    ):
        totals.update(loaded)
        now = samples(exposition(totals, loaded))
        assert all(
            now[name] >= value for name, value in before.items() if "_total" in name[0]
        )
        before = now
    assert before["moegguf_expert_misses_total", "demo:latest"] == 8 + 4 + 1
    assert before["moegguf_expert_misses_total", "b:latest"] == 2
    assert ("moegguf_slots", "b:latest") not in before
