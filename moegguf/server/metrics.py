"""GET /metrics: statistics of all models in Prometheus' text format 0.0.4, written by
prometheus_client.

Metrics `llamacpp:*` have llama-server's names and cover all models together. Metrics
`moegguf_*` have a label with the model, and their names follow the conventions of
Prometheus: base units, and `_total` for counters. Counters do not decrease while the
server runs: the counts of an unloaded model remain in its total.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from starlette.datastructures import State
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from moegguf.engine.stats import Stats
from moegguf.generate.request import AnswerSummary, Event
from moegguf.serving.events import LoadedModel

if TYPE_CHECKING:
    from prometheus_client import Metric  # a slow import, which only a scrape needs


class MetricSpec(NamedTuple):
    """A metric that is read from the fields of statistics."""

    name: str  # name without the prefix moegguf_, and without _total
    help: str
    field: str = ""  # field of the statistics; "": `fields` has several
    # Name of a label in addition to the label of the model; "": there is no such label.
    by: str = ""
    fields: Mapping[str, str] = {}  # {value of the label `by`: field of the statistics}


COUNTS = (
    MetricSpec("tokens", "Tokens evaluated, in prompts and answers.", "tokens"),
    MetricSpec("passes", "Passes through all layers of the model.", "passes"),
    MetricSpec("draft_tokens", "Draft tokens that were verified.", "drafted_tokens"),
    MetricSpec("draft_accepted_tokens", "Draft tokens that were then also sampled.", "accepted_tokens"),
    MetricSpec("expert_lookups", "Lookups: distinct experts that layers needed, summed over passes.", "lookups"),
    MetricSpec("expert_hits", "Lookups that found the expert in a slot (ready) or on its way to one (late).",
               by="kind", fields={"ready": "hits_ready", "late": "hits_late"}),
    MetricSpec("expert_misses", "Lookups that found the expert neither in a slot nor on its way to one.",
               "misses"),
    MetricSpec("expert_evictions", "Experts evicted from their slots.", "evictions"),
    MetricSpec("expert_read_bytes", "Bytes of experts read from files, for misses and prefetches.",
               by="cause", fields={"miss": "bytes_missed", "prefetch": "bytes_prefetched"}),
    MetricSpec("expert_reads", "Reads of experts from files.", "reads"),
    MetricSpec("expert_read_retries", "Retries of failed reads.", "read_retries"),
    MetricSpec("expert_read_errors", "Reads that failed permanently.", "read_errors"),
    MetricSpec("expert_prefetches", "Prefetches of experts, by outcome.",
               by="state",
               fields={"requested": "prefetch_requested", "started": "prefetch_started", "useful": "prefetch_useful",
                       "late": "prefetch_late", "wasted": "prefetch_wasted", "dropped": "prefetch_dropped"}),
    MetricSpec("stall_seconds", "Time that computation spent waiting for experts.", "stall_s"),
    MetricSpec("read_seconds", "Time spent reading, summed over reader threads.", "read_s"),
    MetricSpec("staged_bytes", "Bytes of experts copied into staging tensors for prompts.", "bytes_staged"),
    MetricSpec("staging_copy_seconds", "Time spent copying experts into staging tensors.", "staging_copy_s"),
    MetricSpec("staging_stall_seconds", "Time that layers spent waiting for staging.", "staging_stall_s"),
    MetricSpec("eval_seconds", "Time spent in passes, including stalls.", "eval_s"),
)  # fmt: skip

# Fields of `TierStats`, counted for each model, device and tier ("vram", "ram" or
# "cpu").
TIER_COUNTS = (
    MetricSpec("tier_lookups", "Lookups in the tier. RAM below VRAM counts only lookups that missed in VRAM.",
               "lookups"),
    MetricSpec("tier_hits", "Lookups that found the expert in the tier (ready) or on its way there (late).",
               by="kind", fields={"ready": "hits_ready", "late": "hits_late"}),
    MetricSpec("tier_misses", "Lookups that found the expert neither in the tier nor on its way there.",
               "misses"),
    MetricSpec("tier_evictions", "Experts evicted from the tier's slots.", "evictions"),
    MetricSpec("tier_received_bytes", "Bytes of experts moved into the tier's slots, for misses and prefetches.",
               by="cause", fields={"miss": "bytes_missed", "prefetch": "bytes_prefetched"}),
    MetricSpec("tier_stall_seconds", "Time spent waiting for experts. For RAM below VRAM: for reads from files.",
               "stall_s"),
)  # fmt: skip
TIER_LABELS = ("tier", "device")
# Fields of `DriveStats`, counted for each model and each copy of its files ("file",
# "mirror 1", ...).
DRIVE_COUNTS = (
    MetricSpec("drive_read_bytes", "Bytes of experts read from a copy of the model's files.", "bytes_read"),
    MetricSpec("drive_reads", "Reads of experts from a copy of the model's files.", "reads"),
)  # fmt: skip

# Fields of `AnswerSummary`, counted for each model. The exception is "answers", the
# number of finished answers.
ANSWERS = (
    MetricSpec("answers", "Finished answers.", "answers"),
    MetricSpec("prompt_tokens", "Prompt tokens that were evaluated.", "prompt_tokens"),
    MetricSpec("prompt_tokens_cached", "Prompt tokens that were reused from memory or disk.", "cached_tokens"),
    MetricSpec("prompt_tokens_disk", "Prompt tokens that were reused from disk.", "disk_tokens"),
    MetricSpec("answer_tokens", "Tokens in answers.", "answer_tokens"),
    MetricSpec("prompt_seconds", "Time from the start of prompt evaluation to the first token of the answer.",
               "prompt_s"),
    MetricSpec("answer_seconds", "Time from the first token of the answer to its end.", "answer_s"),
)  # fmt: skip

# Fields of a `LoadedModel` and of its `stats`; `_figures` adds "resident_bytes".
GAUGES = (
    MetricSpec("slots", "Usable slots of the expert cache.", "n_slots"),
    MetricSpec("slots_used", "Slots of the expert cache that hold an expert.", "slots_used"),
    MetricSpec("experts", "Experts in all layers of the model.", "n_experts"),
    MetricSpec("expert_cache_bytes", "Size of the usable slots of the expert cache.", "pool_bytes"),
    MetricSpec("staging_bytes", "Size of the staging tensors for prompts.", "staging_bytes"),
    MetricSpec("planned_bytes", "Memory planned for the model.", "size_bytes"),
    MetricSpec("planned_gpu_bytes", "GPU memory planned for the model.", "vram_bytes"),
    MetricSpec("resident_bytes", "Resident memory of the model's process.", "resident_bytes"),
    MetricSpec("context_tokens", "Size of the context, in tokens.", "n_ctx"),
    MetricSpec("busy", "1 if an answer is being generated, otherwise 0.", "busy"),
    MetricSpec("requests_waiting", "Requests waiting for the model.", "queue"),
)  # fmt: skip
TIER_GAUGES = (
    MetricSpec("tier_slots", "Usable slots of the tier.", "n_slots"),
    MetricSpec("tier_slots_used", "Slots of the tier that hold an expert.", "slots_used"),
    MetricSpec("tier_bytes", "Size of the usable slots of the tier.", "pool_bytes"),
)  # fmt: skip

Family = tuple[str, str, Sequence[str], Sequence[tuple[Sequence[str], float]]]
"""The name, help text and label names of a metric, then pairs of (values of the labels,
number)."""
Figures = list[tuple[tuple[str, ...], Mapping[str, Any]]]
"""Pairs of (values of the labels, {field: number})."""


class Totals:
    """Counts since the server's start, of loaded and unloaded models. `add` and
    `update` must be called on one event loop. `stats` maps each model to the summed
    statistics of its processes."""

    def __init__(self) -> None:
        self.answers: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self.stats: defaultdict[str, Stats] = defaultdict(Stats)
        self._last: dict[int, Stats] = {}  # {pid: last statistics of a running worker}

    def add(self, model: str, summary: AnswerSummary) -> None:
        """Adds the counts of a finished answer from `model`."""
        figures = {"answers": 1, **vars(summary)}
        for spec in ANSWERS:
            self.answers[model][spec.field] += figures[spec.field]

    def prompt_tokens(self, model: str) -> dict[str, int]:
        """Returns, for a model's finished answers, the numbers of prompt tokens that
        were computed, reused from memory, and read from disk."""
        known: Mapping[str, float] = self.answers.get(model, {})
        cached, disk = (
            int(known.get(field, 0)) for field in ("cached_tokens", "disk_tokens")
        )
        return {
            "computed": int(known.get("prompt_tokens", 0)),
            "memory": cached - disk,
            "disk": disk,
        }

    def update(self, loaded: Iterable[LoadedModel]) -> None:
        """Adds the growth of each loaded model's statistics since the last call, under
        the model's first name."""
        before, self._last = self._last, {}
        for model in loaded:
            self.stats[model.name] += model.stats - before.get(model.pid, Stats())
            self._last[model.pid] = model.stats


def _tiers(models: Iterable[tuple[str, Stats]]) -> Figures:
    """Returns the figures of each tier of each model. Their labels are the model, the
    tier and the device."""
    return [
        ((name, tier.name.lower(), tier.device), vars(tier))
        for name, stats in models
        for tier in stats.tiers
    ]


def _figures(model: LoadedModel) -> Mapping[str, Any]:
    """Returns the present figures of a loaded model."""
    resident_bytes = 0
    with suppress(psutil.Error):  # the process may have just ended
        resident_bytes = psutil.Process(model.pid).memory_info().rss
    return {**vars(model.stats), **vars(model), "resident_bytes": resident_bytes}


class _Scrape:
    """A registry for `generate_latest` with the metrics of one scrape. Metric families
    without samples are left out."""

    def __init__(self, totals: Totals, loaded: Iterable[LoadedModel]) -> None:
        self._answers = dict(sorted(totals.answers.items()))
        self._stats = sorted(totals.stats.items())
        self._loaded = sorted(loaded, key=lambda model: model.name)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, text, labels, samples in (
            *self._llama_server_metrics(),
            *self._own_metrics(),
        ):
            family = (
                CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            )(name, text, labels=labels)
            for values, number in samples:
                family.add_metric(values, number)
            if family.samples:
                yield family

    def _llama_server_metrics(self) -> Iterator[Family]:
        """Yields llama-server's metrics that apply here. Rates are means since the
        server's start."""
        total = {
            spec.field: sum(one[spec.field] for one in self._answers.values())
            for spec in ANSWERS
        }
        n_prompt, prompt_s = total["prompt_tokens"], total["prompt_s"]
        n_answer, answer_s = total["answer_tokens"], total["answer_s"]
        n_passes = sum(stats.passes for _, stats in self._stats)
        sums = (n_prompt, prompt_s), (n_answer, answer_s)
        prompt_rate, rate = (n / seconds if seconds else 0.0 for n, seconds in sums)
        for name, text, value in (
            (
                "prompt_tokens_total",
                "Number of prompt tokens processed, excluding cached tokens.",
                n_prompt,
            ),
            (
                "prompt_tokens_cached_total",
                "Number of prompt tokens reused from the cache.",
                total["cached_tokens"],
            ),
            ("prompt_seconds_total", "Total time spent processing prompts.", prompt_s),
            ("tokens_predicted_total", "Number of tokens generated.", n_answer),
            (
                "tokens_predicted_seconds_total",
                "Total time spent generating tokens.",
                answer_s,
            ),
            ("n_decode_total", "Total number of passes through models.", n_passes),
            (
                "prompt_tokens_seconds",
                "Mean prompt throughput in tokens/s.",
                prompt_rate,
            ),
            (
                "predicted_tokens_seconds",
                "Mean generation throughput in tokens/s.",
                rate,
            ),
            (
                "requests_processing",
                "Number of requests being answered.",
                sum(m.n_answering for m in self._loaded),
            ),
            (
                "requests_deferred",
                "Number of waiting requests.",
                sum(model.queue for model in self._loaded),
            ),
        ):
            yield f"llamacpp:{name}", text, (), [((), value)]

    def _own_metrics(self) -> Iterator[Family]:
        """Yields the counters since the server's start, then the gauges of the loaded
        models."""
        answers: Figures = [((name,), done) for name, done in self._answers.items()]
        models: Figures = [((name,), vars(stats)) for name, stats in self._stats]
        tiers = sorted(_tiers(self._stats), key=lambda tier: tier[0])
        drives: Figures = [
            ((name, drive.name), vars(drive))
            for name, stats in self._stats
            for drive in stats.drives
        ]
        loaded: Figures = [((model.name,), _figures(model)) for model in self._loaded]
        present = _tiers((model.name, model.stats) for model in self._loaded)
        for specs, labels, figures, suffix in (
            (ANSWERS, (), answers, "_total"),
            (COUNTS, (), models, "_total"),
            (TIER_COUNTS, TIER_LABELS, tiers, "_total"),
            (DRIVE_COUNTS, ("drive",), drives, "_total"),
            (GAUGES, (), loaded, ""),
            (TIER_GAUGES, TIER_LABELS, present, ""),
        ):
            for spec in specs:
                names = ("model", *labels, *([spec.by] if spec.by else ()))
                samples = [
                    ((*of, value), float(found[field]))
                    for of, found in figures
                    for value, field in (spec.fields or {"": spec.field}).items()
                ]
                yield f"moegguf_{spec.name}{suffix}", spec.help, names, samples


def exposition(totals: Totals, loaded: Iterable[LoadedModel]) -> str:
    """Returns all metrics in Prometheus' text format 0.0.4."""
    from prometheus_client import generate_latest

    registry: Any = _Scrape(totals, loaded)
    return generate_latest(registry).decode()


def record(state: State, model: str, event: Event) -> None:
    """Counts an answer if `event` is `AnswerSummary`, and then also updates the statistics of
    all loaded models, since a model may be unloaded before the next scrape. Ignores
    other events. `state` is the application's state."""
    if isinstance(event, AnswerSummary):
        state.totals.add(model, event)
        state.totals.update(state.manager.loaded())


async def _metrics(request: HttpRequest) -> Response:
    from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

    loaded = request.app.state.manager.loaded()
    totals: Totals = request.app.state.totals
    totals.update(loaded)
    return Response(
        exposition(totals, loaded), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4}
    )


routes = [Route("/metrics", _metrics)]
