"""GET /metrics: statistics of all models in Prometheus' text format 0.0.4, written by
prometheus_client.

Metrics `llamacpp:*` have llama-server's names and cover all models together. Metrics
`moegguf_*` have a label with the model, and their names follow the conventions of
Prometheus: base units, and `_total` for counters. Counters do not decrease while the
server runs: the counts of an unloaded model remain in its total.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from starlette.datastructures import State
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from moegguf.engine.stats import Stats, TierStats
from moegguf.generate.request import AnswerSummary
from moegguf.serving.events import Done, Event, LoadedModel

if TYPE_CHECKING:
    from prometheus_client import Metric  # a slow import, which only a scrape needs


class CounterSpec(NamedTuple):
    """A counter metric that is read from fields of `Stats`, `TierStats` or
    `DriveStats`."""

    name: str
    help: str
    fields: Mapping[str, str]  # {value of the label `by`: field of the statistics}
    # Name of a label in addition to the model's; "": there is one field and no such
    # label.
    by: str = ""


COUNTS = (
    CounterSpec("tokens", "Tokens evaluated, in prompts and answers.", {"": "tokens"}),
    CounterSpec("passes", "Passes through all layers of the model.", {"": "passes"}),
    CounterSpec("draft_tokens", "Draft tokens that were verified.", {"": "drafted_tokens"}),
    CounterSpec("draft_accepted_tokens", "Draft tokens that were then also sampled.", {"": "accepted_tokens"}),
    CounterSpec("expert_lookups", "Lookups: distinct experts that layers needed, summed over passes.", {"": "lookups"}),
    CounterSpec("expert_hits", "Lookups that found the expert in a slot (ready) or on its way to one (late).",
          {"ready": "hits_ready", "late": "hits_late"}, "kind"),
    CounterSpec("expert_misses", "Lookups that found the expert neither in a slot nor on its way to one.",
          {"": "misses"}),
    CounterSpec("expert_evictions", "Experts evicted from their slots.", {"": "evictions"}),
    CounterSpec("expert_read_bytes", "Bytes of experts read from files, for misses and prefetches.",
          {"miss": "bytes_missed", "prefetch": "bytes_prefetched"}, "cause"),
    CounterSpec("expert_reads", "Reads of experts from files.", {"": "reads"}),
    CounterSpec("expert_read_retries", "Retries of failed reads.", {"": "read_retries"}),
    CounterSpec("expert_read_errors", "Reads that failed permanently.", {"": "read_errors"}),
    CounterSpec("expert_prefetches", "Prefetches of experts, by outcome.",
          {"requested": "prefetch_requested", "started": "prefetch_started", "useful": "prefetch_useful",
           "late": "prefetch_late", "wasted": "prefetch_wasted", "dropped": "prefetch_dropped"}, "state"),
    CounterSpec("stall_seconds", "Time that computation spent waiting for experts.", {"": "stall_s"}),
    CounterSpec("read_seconds", "Time spent reading, summed over reader threads.", {"": "read_s"}),
    CounterSpec("staged_bytes", "Bytes of experts copied into staging tensors for prompts.", {"": "bytes_staged"}),
    CounterSpec("staging_copy_seconds", "Time spent copying experts into staging tensors.", {"": "staging_copy_s"}),
    CounterSpec("staging_stall_seconds", "Time that layers spent waiting for staging.", {"": "staging_stall_s"}),
    CounterSpec("eval_seconds", "Time spent in passes, including stalls.", {"": "eval_s"}),
)  # fmt: skip

# Fields of `TierStats`, counted for each model, device and tier ("vram", "ram" or
# "cpu").
TIER_COUNTS = (
    CounterSpec("tier_lookups", "Lookups in the tier. RAM below VRAM counts only lookups that missed in VRAM.",
          {"": "lookups"}),
    CounterSpec("tier_hits", "Lookups that found the expert in the tier (ready) or on its way there (late).",
          {"ready": "hits_ready", "late": "hits_late"}, "kind"),
    CounterSpec("tier_misses", "Lookups that found the expert neither in the tier nor on its way there.",
          {"": "misses"}),
    CounterSpec("tier_evictions", "Experts evicted from the tier's slots.", {"": "evictions"}),
    CounterSpec("tier_received_bytes", "Bytes of experts moved into the tier's slots, for misses and prefetches.",
          {"miss": "bytes_missed", "prefetch": "bytes_prefetched"}, "cause"),
    CounterSpec("tier_stall_seconds", "Time spent waiting for experts. For RAM below VRAM: for reads from files.",
          {"": "stall_s"}),
)  # fmt: skip
TIER_LABELS = ("tier", "device")
# Fields of `DriveStats`, counted for each model and each copy of its files ("file",
# "mirror 1", ...).
DRIVE_COUNTS = (
    CounterSpec(
        "drive_read_bytes",
        "Bytes of experts read from a copy of the model's files.",
        {"": "bytes_read"},
    ),
    CounterSpec(
        "drive_reads",
        "Reads of experts from a copy of the model's files.",
        {"": "reads"},
    ),
)

# Rows of name, help text and field of `AnswerSummary`. The exception is "answers",
# which counts the finished answers.
ANSWERS = (
    ("answers", "Finished answers.", "answers"),
    ("prompt_tokens", "Prompt tokens that were evaluated.", "prompt_tokens"),
    (
        "prompt_tokens_cached",
        "Prompt tokens that were reused from memory or disk.",
        "cached_tokens",
    ),
    ("prompt_tokens_disk", "Prompt tokens that were reused from disk.", "disk_tokens"),
    ("answer_tokens", "Tokens in answers.", "answer_tokens"),
    (
        "prompt_seconds",
        "Time from the start of prompt evaluation to the first token of the answer.",
        "prompt_s",
    ),
    (
        "answer_seconds",
        "Time from the first token of the answer to its end.",
        "answer_s",
    ),
)

Family = tuple[str, str, Sequence[str], Sequence[tuple[Sequence[str], float]]]
"""The name, help text and label names of a metric, then pairs of (values of the labels,
number)."""


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
        for _, _, field in ANSWERS:
            self.answers[model][field] += figures[field]

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


def _tiers(
    models: Iterable[tuple[str, Stats]],
) -> list[tuple[tuple[str, ...], TierStats]]:
    """Returns a pair for each tier of each model: the values of its labels (model,
    tier, device), and its statistics."""
    return [
        ((name, tier.name.lower(), tier.device), tier)
        for name, stats in models
        for tier in stats.tiers
    ]


def _resident_bytes(pid: int) -> int:
    with suppress(psutil.Error):  # the process may have just ended
        return int(psutil.Process(pid).memory_info().rss)
    return 0


GAUGES: tuple[tuple[str, str, Callable[[LoadedModel], float]], ...] = (
    ("slots", "Usable slots of the expert cache.", lambda model: model.stats.n_slots),
    ("slots_used", "Slots of the expert cache that hold an expert.", lambda model: model.stats.slots_used),
    ("experts", "Experts in all layers of the model.", lambda model: model.stats.n_experts),
    ("expert_cache_bytes", "Size of the usable slots of the expert cache.", lambda model: model.stats.pool_bytes),
    ("staging_bytes", "Size of the staging tensors for prompts.", lambda model: model.stats.staging_bytes),
    ("planned_bytes", "Memory planned for the model.", lambda model: model.size_bytes),
    ("planned_gpu_bytes", "GPU memory planned for the model.", lambda model: model.vram_bytes),
    ("resident_bytes", "Resident memory of the model's process.", lambda model: _resident_bytes(model.pid)),
    ("context_tokens", "Size of the context, in tokens.", lambda model: model.n_ctx),
    ("busy", "1 if an answer is being generated, otherwise 0.", lambda model: model.busy),
    ("requests_waiting", "Requests waiting for the model.", lambda model: model.queue),
)  # fmt: skip


TIER_GAUGES = (
    ("tier_slots", "Usable slots of the tier.", "n_slots"),
    ("tier_slots_used", "Slots of the tier that hold an expert.", "slots_used"),
    ("tier_bytes", "Size of the usable slots of the tier.", "pool_bytes"),
)


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
            field: sum(one[field] for one in self._answers.values())
            for _, _, field in ANSWERS
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
        for name, text, field in ANSWERS:
            answers = [((model,), done[field]) for model, done in self._answers.items()]
            yield f"moegguf_{name}_total", text, ("model",), answers
        models = [((name,), stats) for name, stats in self._stats]
        tiers = sorted(_tiers(self._stats), key=lambda tier: tier[0])
        drives = [
            ((name, drive.name), drive)
            for name, stats in self._stats
            for drive in stats.drives
        ]
        of_all = (
            ((), COUNTS, models),
            (TIER_LABELS, TIER_COUNTS, tiers),
            (("drive",), DRIVE_COUNTS, drives),
        )
        for labels, counters, figures in of_all:
            for spec in counters:
                names = ("model", *labels, *([spec.by] if spec.by else ()))
                counted = [
                    ((*of, value), getattr(found, field))
                    for of, found in figures
                    for value, field in spec.fields.items()
                ]
                yield f"moegguf_{spec.name}_total", spec.help, names, counted
        for name, text, value in GAUGES:
            yield (
                f"moegguf_{name}",
                text,
                ("model",),
                [((m.name,), float(value(m))) for m in self._loaded],
            )
        present = _tiers((model.name, model.stats) for model in self._loaded)
        for name, text, field in TIER_GAUGES:
            yield (
                f"moegguf_{name}",
                text,
                ("model", *TIER_LABELS),
                [(of, getattr(tier, field)) for of, tier in present],
            )


def exposition(totals: Totals, loaded: Iterable[LoadedModel]) -> str:
    """Returns all metrics in Prometheus' text format 0.0.4."""
    from prometheus_client import generate_latest

    registry: Any = _Scrape(totals, loaded)
    return generate_latest(registry).decode()


def record(state: State, model: str, event: Event) -> None:
    """Counts an answer if `event` is `Done`, and then also updates the statistics of
    all loaded models, since a model may be unloaded before the next scrape. Ignores
    other events. `state` is the application's state."""
    if isinstance(event, Done):
        state.totals.add(model, event.summary)
        state.totals.update(state.manager.loaded())


async def _metrics(request: HttpRequest) -> Response:
    from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

    loaded = request.app.state.manager.loaded()
    totals: Totals = request.app.state.totals
    totals.update(loaded)
    return Response(
        exposition(totals, loaded), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4}
    )


routes = [Route("/metrics", _metrics, methods=["GET"])]
