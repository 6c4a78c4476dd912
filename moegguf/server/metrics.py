"""GET /metrics: what models did and do, for Prometheus, in its text format 0.0.4.

`llamacpp:*` are llama-server's names, over all models; `moegguf_*` are per model. A counter never goes down: what a
model had counted when it left stays in its total. Names follow Prometheus: base units, `_total` for counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.engine.stats import Stats
from moegguf.generate.request import Timing
from moegguf.serving.events import Done, Event, Loaded

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[dict[str, str], float]


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


def family(name: str, kind: Literal["counter", "gauge"], text: str, samples: Iterable[Sample]) -> Iterator[str]:
    """The lines of one metric; none when nothing is known of it."""
    written = [f"{name}{_braces(labels)} {_number(value)}" for labels, value in samples]
    if written:
        yield f"# HELP {name} {_escaped(text)}"
        yield f"# TYPE {name} {kind}"
        yield from written


def _braces(labels: dict[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def overall(totals: Totals, loaded: Iterable[Loaded]) -> Iterator[str]:
    """llama-server's metrics, where a model here has what it measures. Rates are means since the start."""
    answered, models = list(totals.answered.values()), list(loaded)
    n_prompt, prompt_s = sum(one.prompt_tokens for one in answered), sum(one.prompt_s for one in answered)
    n_answer, answer_s = sum(one.answer_tokens for one in answered), sum(one.answer_s for one in answered)
    n_cached = sum(one.cached_tokens for one in answered)
    n_passes = sum(counts["passes"] for counts in totals.counts().values())
    yield from _one("prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens.", n_prompt)
    yield from _one("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache.", n_cached)
    yield from _one("prompt_seconds_total", "Total time spent processing prompts.", prompt_s)
    yield from _one("tokens_predicted_total", "Number of generation tokens processed.", n_answer)
    yield from _one("tokens_predicted_seconds_total", "Total time spent generating tokens.", answer_s)
    yield from _one("n_decode_total", "Total number of passes through models.", n_passes)
    yield from _one("prompt_tokens_seconds", "Mean prompt throughput in tokens/s.", _rate(n_prompt, prompt_s))
    yield from _one("predicted_tokens_seconds", "Mean generation throughput in tokens/s.", _rate(n_answer, answer_s))
    yield from _one("requests_processing", "Number of requests processing.", sum(model.busy for model in models))
    yield from _one("requests_deferred", "Number of requests that wait.", sum(model.queue for model in models))


def _one(name: str, text: str, value: float) -> Iterator[str]:
    return family(f"llamacpp:{name}", "counter" if name.endswith("_total") else "gauge", text, [({}, value)])


def _rate(n: float, seconds: float) -> float:
    return n / seconds if seconds else 0.0


def of_answers(totals: Totals) -> Iterator[str]:
    """What finished answers took, per model."""
    for name, text, field in (
        ("answers_total", "Answers that were finished.", "answers"),
        ("prompt_tokens_total", "Tokens of prompts that were computed.", "prompt_tokens"),
        ("prompt_tokens_cached_total", "Tokens of prompts that the context still held.", "cached_tokens"),
        ("answer_tokens_total", "Tokens of answers.", "answer_tokens"),
        ("prompt_seconds_total", "Time from the prompt to the first token.", "prompt_s"),
        ("answer_seconds_total", "Time from the first token to the last.", "answer_s"),
    ):
        samples = [({"model": model}, getattr(done, field)) for model, done in sorted(totals.answered.items())]
        yield from family(f"moegguf_{name}", "counter", text, samples)


def of_experts(totals: Totals) -> Iterator[str]:
    """What models counted, per model, since the server's start."""
    counts = totals.counts()
    for count in COUNTS:
        samples = [
            ({"model": model, **({count.by: value} if count.by else {})}, sums[field])
            for model, sums in counts.items()
            for value, field in count.fields.items()
        ]
        yield from family(f"moegguf_{count.name}_total", "counter", count.help, samples)


def of_loaded(loaded: Iterable[Loaded]) -> Iterator[str]:
    """What the models in memory are at this moment."""
    models = sorted(loaded, key=lambda model: model.name)
    for name, text, values in (
        ("slots", "Experts that fit in the cache.", [model.stats.n_slots for model in models]),
        ("slots_used", "Experts that are in the cache.", [model.stats.slots_used for model in models]),
        ("experts", "Experts of the model, over all layers.", [model.stats.n_experts for model in models]),
        ("expert_cache_bytes", "Memory that the cache of experts takes.", [model.stats.pool_bytes for model in models]),
        ("planned_bytes", "Memory planned for the model.", [model.size_bytes for model in models]),
        ("planned_gpu_bytes", "The part of it on GPUs.", [model.vram_bytes for model in models]),
        ("resident_bytes", "Memory that the model's process takes.", [_resident_bytes(model.pid) for model in models]),
        ("context_tokens", "Tokens that the context holds.", [model.n_ctx for model in models]),
        ("busy", "Whether an answer is being written.", [model.busy for model in models]),
        ("requests_waiting", "Requests that wait for the model.", [model.queue for model in models]),
    ):
        samples = [({"model": model.name}, float(value)) for model, value in zip(models, values, strict=True)]
        yield from family(f"moegguf_{name}", "gauge", text, samples)


def _resident_bytes(pid: int) -> int:
    with suppress(psutil.Error):  # it has left just now
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def exposition(totals: Totals, loaded: Iterable[Loaded]) -> str:
    """All metrics, as Prometheus reads them."""
    models = list(loaded)
    families = (overall(totals, models), of_answers(totals), of_experts(totals), of_loaded(models))
    return "".join(f"{line}\n" for lines in families for line in lines)


def note(state: State, model: str, event: Event) -> None:
    """Counts an answer once `event` is its end; what models have counted then is known if they leave before the next
    scrape. `state`: the application's."""
    if isinstance(event, Done):
        state.totals.add(model, event.timing)
        state.totals.see(state.manager.loaded())


async def metrics(request: Request) -> Response:
    loaded = request.app.state.manager.loaded()
    totals: Totals = request.app.state.totals
    totals.see(loaded)
    return Response(exposition(totals, loaded), headers={"content-type": CONTENT_TYPE})


routes = [Route("/metrics", metrics, methods=["GET"])]
