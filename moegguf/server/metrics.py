"""GET /metrics: what models did and do, in Prometheus' text format 0.0.4 as prometheus_client writes it.

`llamacpp:*` are llama-server's names, over all models; `moegguf_*` are per model. A counter never goes down: what a
model had counted when it left stays in its total. Names follow Prometheus: base units, `_total` for counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields

import psutil
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.engine.stats import Stats
from moegguf.generate.request import Timing
from moegguf.serving.events import Done, Event, Loaded


@dataclass(frozen=True)
class Count:
    """A metric of `Stats`' counts: each has a value of the label `by`, or there is only one."""

    name: str
    help: str
    fields: dict[str, str]
    by: str = ""


COUNTS = (
    Count("tokens", "Tokens computed, of prompts and answers.", {"": "tokens"}),
    Count("passes", "Passes through the model.", {"": "passes"}),
    Count("expert_lookups", "Distinct experts that a layer needed in a pass.", {"": "lookups"}),
    Count("expert_hits", "Lookups that found their expert there, or on its way.",
          {"ready": "hits_ready", "late": "hits_late"}, "kind"),
    Count("expert_misses", "Lookups that had to wait for a read of their own.", {"": "misses"}),
    Count("expert_evictions", "Experts that made room for others.", {"": "evictions"}),
    Count("expert_read_bytes", "Bytes of experts read, for a miss or ahead of need.",
          {"miss": "bytes_missed", "prefetch": "bytes_prefetched"}, "cause"),
    Count("expert_reads", "Reads of experts.", {"": "reads"}),
    Count("expert_read_retries", "Reads that were tried again.", {"": "read_retries"}),
    Count("expert_read_errors", "Reads that failed for good.", {"": "read_errors"}),
    Count("expert_prefetches", "Experts asked for ahead of need, and what became of that.",
          {"requested": "prefetch_requested", "started": "prefetch_started", "useful": "prefetch_useful",
           "wasted": "prefetch_wasted", "dropped": "prefetch_dropped"}, "state"),
    Count("stall_seconds", "Time that computing waited for experts.", {"": "stall_s"}),
    Count("read_seconds", "Time that readers spent reading, summed over readers.", {"": "read_s"}),
    Count("eval_seconds", "Time in passes through the model, stalls included.", {"": "eval_s"}),
)  # fmt: skip
FIELDS = tuple(field for count in COUNTS for field in count.fields.values())


@dataclass
class Answered:
    """What a model's finished answers took: tokens and seconds."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    prompt_s: float = 0.0
    answer_s: float = 0.0


class Totals:
    """Counts since the server's start, of models that are loaded and of those that were. Used by one event loop."""

    def __init__(self) -> None:
        self.answered: defaultdict[str, Answered] = defaultdict(Answered)
        self._live: dict[tuple[str, int], Stats] = {}
        self._left: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, model: str, timing: Timing) -> None:
        """An answer has ended."""
        total = self.answered[model]
        total.answers += 1
        total.prompt_tokens += timing.prompt_tokens
        total.cached_tokens += timing.cached_tokens
        total.answer_tokens += timing.answer_tokens
        total.prompt_s += timing.prompt_s
        total.answer_s += timing.answer_s

    def see(self, loaded: Iterable[Loaded]) -> None:
        """Takes note of the models in memory; a process that was there before and is not now has left its counts."""
        now = {(model.name, model.pid): model.stats for model in loaded}
        for name, pid in self._live.keys() - now.keys():
            self._left[name].update(_counts(self._live[name, pid]))
        self._live = now

    def counts(self) -> dict[str, Counter[str]]:
        """By model the sums of `FIELDS`."""
        sums = defaultdict(Counter, {name: Counter(counts) for name, counts in self._left.items()})
        for (name, _), stats in self._live.items():
            sums[name].update(_counts(stats))
        return dict(sorted(sums.items()))


def _counts(stats: Stats) -> dict[str, float]:
    return {field: getattr(stats, field) for field in FIELDS}


def _resident_bytes(pid: int) -> int:
    with suppress(psutil.Error):  # it has left just now
        return int(psutil.Process(pid).memory_info().rss)
    return 0


GAUGES: tuple[tuple[str, str, Callable[[Loaded], float]], ...] = (
    ("slots", "Experts that fit in the cache.", lambda model: model.stats.n_slots),
    ("slots_used", "Experts that are in the cache.", lambda model: model.stats.slots_used),
    ("experts", "Experts of the model, over all layers.", lambda model: model.stats.n_experts),
    ("expert_cache_bytes", "Memory that the cache of experts takes.", lambda model: model.stats.pool_bytes),
    ("planned_bytes", "Memory planned for the model.", lambda model: model.size_bytes),
    ("planned_gpu_bytes", "The part of it on GPUs.", lambda model: model.vram_bytes),
    ("resident_bytes", "Memory that the model's process takes.", lambda model: _resident_bytes(model.pid)),
    ("context_tokens", "Tokens that the context holds.", lambda model: model.n_ctx),
    ("busy", "Whether an answer is being written.", lambda model: model.busy),
    ("requests_waiting", "Requests that wait for the model.", lambda model: model.queue),
)


class Scrape(Collector):
    """The metric families of one scrape, for `generate_latest`. `totals` has seen `loaded`."""

    def __init__(self, totals: Totals, loaded: Iterable[Loaded]) -> None:
        self._answered = dict(sorted(totals.answered.items()))
        self._counts = totals.counts()
        self._loaded = sorted(loaded, key=lambda model: model.name)

    def collect(self) -> Iterator[Metric]:
        """Families without samples are left out."""
        families = (*self._overall(), *self._of_answers(), *self._of_experts(), *self._of_loaded())
        return (family for family in families if family.samples)

    def _overall(self) -> Iterator[Metric]:
        """llama-server's metrics, where a model here has what it measures. Rates are means since the start."""
        total = {
            field.name: sum(getattr(one, field.name) for one in self._answered.values()) for field in fields(Answered)
        }
        n_prompt, prompt_s = total["prompt_tokens"], total["prompt_s"]
        n_answer, answer_s = total["answer_tokens"], total["answer_s"]
        n_passes = sum(counts["passes"] for counts in self._counts.values())
        for name, text, value in (
            ("prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens.", n_prompt),
            ("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache.", total["cached_tokens"]),
            ("prompt_seconds_total", "Total time spent processing prompts.", prompt_s),
            ("tokens_predicted_total", "Number of generation tokens processed.", n_answer),
            ("tokens_predicted_seconds_total", "Total time spent generating tokens.", answer_s),
            ("n_decode_total", "Total number of passes through models.", n_passes),
            ("prompt_tokens_seconds", "Mean prompt throughput in tokens/s.", _rate(n_prompt, prompt_s)),
            ("predicted_tokens_seconds", "Mean generation throughput in tokens/s.", _rate(n_answer, answer_s)),
            ("requests_processing", "Number of requests processing.", sum(model.busy for model in self._loaded)),
            ("requests_deferred", "Number of requests that wait.", sum(model.queue for model in self._loaded)),
        ):
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"llamacpp:{name}", text, value=value)

    def _of_answers(self) -> Iterator[Metric]:
        """What finished answers took, per model."""
        for name, text, field in (
            ("answers_total", "Answers that were finished.", "answers"),
            ("prompt_tokens_total", "Tokens of prompts that were computed.", "prompt_tokens"),
            ("prompt_tokens_cached_total", "Tokens of prompts that the context still held.", "cached_tokens"),
            ("answer_tokens_total", "Tokens of answers.", "answer_tokens"),
            ("prompt_seconds_total", "Time from the prompt to the first token.", "prompt_s"),
            ("answer_seconds_total", "Time from the first token to the last.", "answer_s"),
        ):
            family = CounterMetricFamily(f"moegguf_{name}", text, labels=["model"])
            for model, done in self._answered.items():
                family.add_metric([model], getattr(done, field))
            yield family

    def _of_experts(self) -> Iterator[Metric]:
        """What models counted, per model, since the server's start."""
        for count in COUNTS:
            labels = ["model", count.by] if count.by else ["model"]
            family = CounterMetricFamily(f"moegguf_{count.name}_total", count.help, labels=labels)
            for model, sums in self._counts.items():
                for value, field in count.fields.items():
                    family.add_metric([model, value], sums[field])
            yield family

    def _of_loaded(self) -> Iterator[Metric]:
        """What the models in memory are at this moment."""
        for name, text, value in GAUGES:
            family = GaugeMetricFamily(f"moegguf_{name}", text, labels=["model"])
            for model in self._loaded:
                family.add_metric([model.name], float(value(model)))
            yield family


def _rate(n: float, seconds: float) -> float:
    return n / seconds if seconds else 0.0


def exposition(totals: Totals, loaded: Iterable[Loaded]) -> str:
    """All metrics in the text format 0.0.4. `totals` has seen `loaded`."""
    return generate_latest(Scrape(totals, loaded)).decode()


def note(state: State, model: str, event: Event) -> None:
    """Counts an answer once `event` is its end; what models have counted then is known if they leave before the next
    scrape. `state`: the application's."""
    if isinstance(event, Done):
        state.totals.add(model, event.timing)
        state.totals.see(state.manager.loaded())


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    loaded = request.app.state.manager.loaded()
    totals: Totals = request.app.state.totals
    totals.see(loaded)
    return Response(exposition(totals, loaded), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


routes = [Route("/metrics", metrics, methods=["GET"])]
