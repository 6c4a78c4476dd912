"""Load test of a running server: checks every answer to many concurrent clients, and
measures latencies.

    python -m tools.load_test --clients 64 --seconds 60 [--url http://127.0.0.1:11434] [--model demo] [--json]

A single client sends every question first. Then N clients send the questions repeatedly
and read streamed answers. Each answer must equal the single client's answer for the
same seed. If the model is not batch-invariant, one answer in several thousand may
differ on a server with --parallel. The first differing answer is printed. --dialects
sends the questions in the formats of several APIs. `make soak` runs this test together
with kills, disconnects and budget changes.

The exit status is 1 if an answer differs, or if a request fails although the server is
not busy. It is also 1 if no answer arrives, or if memory of the server and its workers
grows by more than --most-growth MB in the second half. Memory should stay constant over
2,000 requests:

    python -m tools.load_test --requests 2000 --seconds 3600 --max-tokens 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import psutil

QUESTIONS = (
    "What does moegguf do?", "Who are you?", "How do I set the memory budget?", "What is an expert?",
    "What is a hit?", "Could you explain what a slot is?", "Does it change the output?", "What is the capital of Rome?",
)  # fmt: skip
# HTTP timeout, which must be long enough to cover the time in the server's queue.
TIMEOUT_S = 600.0
# Memory readings during a run without --requests; fewer if the run takes less than 10
# s.
MEMORY_SAMPLES = 20
# Part of the error that the server sends if a worker dies mid-answer.
WORKER_ENDED = "worker process has ended"
MOST_GROWTH_MB = 16  # default limit on memory growth in the second half of a run


Json = dict[str, Any]
Part = tuple[str, str, int | None]
"""The contents of one object of a stream: text, finish reason ("" before the answer's
end), number of tokens.

The number counts the whole answer. Objects without this count have None.
"""


@dataclass(frozen=True)
class Question:
    """A question with a fixed seed, so that its answers can be compared. `dialect` is a
    key of DIALECTS."""

    text: str
    seed: int
    max_tokens: int
    dialect: str = "openai"

    def body(self, model: str) -> Json:
        """Returns the JSON body of the request."""
        return {"model": model, "stream": True, **DIALECTS[self.dialect].fields(self)}


@dataclass(frozen=True)
class Dialect:
    """A streaming API: `fields` creates the fields of a request's body, and `read`
    reads one object of the stream."""

    path: str
    fields: Callable[[Question], Json]
    read: Callable[[Json], Part]


def _messages(question: Question) -> Json:
    return {"messages": [{"role": "user", "content": question.text}]}


def _read_openai(chunk: Json) -> Part:
    choice: Json = next(iter(chunk["choices"]), {"delta": {}, "finish_reason": None})
    n_tokens = chunk["usage"]["completion_tokens"] if chunk.get("usage") else None
    return choice["delta"].get("content") or "", choice["finish_reason"] or "", n_tokens


def _read_anthropic(event: Json) -> Part:
    if event["type"] == "message_delta":
        return "", event["delta"]["stop_reason"], event["usage"]["output_tokens"]
    return event.get("delta", {}).get("text", ""), "", None


def _read_ollama(line: Json) -> Part:
    return (
        line["message"]["content"],
        line.get("done_reason", ""),
        line.get("eval_count"),
    )


def _read_llama(chunk: Json) -> Part:
    return chunk["content"], chunk.get("stop_type", ""), chunk.get("tokens_predicted")


DIALECTS: Mapping[str, Dialect] = {
    "openai": Dialect(
        "/v1/chat/completions",
        lambda q: {
            **_messages(q), "seed": q.seed, "max_tokens": q.max_tokens, "stream_options": {"include_usage": True},
        },
        _read_openai,
    ),
    "anthropic": Dialect(
        "/v1/messages",
        lambda q: {**_messages(q), "max_tokens": q.max_tokens, "options": {"seed": q.seed}},
        _read_anthropic,
    ),
    "ollama": Dialect(
        "/api/chat",
        lambda q: {**_messages(q), "options": {"seed": q.seed, "num_predict": q.max_tokens}},
        _read_ollama,
    ),
    "llama": Dialect(
        "/completion", lambda q: {"prompt": q.text, "seed": q.seed, "n_predict": q.max_tokens}, _read_llama
    ),
}  # fmt: skip


@dataclass
class Answer:
    """One answer. `at_s` holds the arrival time of each part that has text, in seconds
    after the request was sent."""

    text: str = ""
    finish_reason: str = ""
    n_tokens: int = 0
    at_s: list[float] = field(default_factory=list)

    @property
    def content(self) -> tuple[str, str, int]:
        """Returns the text, finish reason and number of tokens, which must not depend
        on timing."""
        return self.text, self.finish_reason, self.n_tokens


@dataclass
class Outcome:
    """The counts and measurements of a run. Each memory sample has two sizes: the
    server's, and the total of its workers."""

    clients: int
    seconds: float = 0.0
    answers: int = 0
    wrong: int = 0
    first_wrong: str = ""  # text with the first wrong answer and the expected one
    busy: int = 0
    busy_without_retry_after: int = 0
    cancelled: int = 0  # answers that the client cancelled
    lost: int = 0  # requests that failed because their worker's process exited
    # Number of workers that the caller of this module killed during the run.
    kills: int = 0
    resets: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    n_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    memory_bytes: list[dict[str, int]] = field(default_factory=list)
    most_growth_mb: float = MOST_GROWTH_MB

    @property
    def growth_bytes(self) -> int:
        """Returns the growth in bytes from the middle memory sample to the last; 0 with
        fewer than three samples."""
        sizes = [sum(each.values()) for each in self.memory_bytes]
        return sizes[-1] - sizes[len(sizes) // 2] if len(sizes) > 2 else 0

    @property
    def passed(self) -> bool:
        """True if there were answers and no faults, and memory grew by at most
        `most_growth_mb`.

        A lost answer is a fault unless the caller has killed workers. Cancelled answers
        are not faults. A busy server is a fault only if its reply has no Retry-After.
        """
        faults = (
            self.wrong or self.resets or self.errors or self.busy_without_retry_after
        )
        faults = faults or (self.lost and not self.kills)
        return (
            self.answers > 0
            and not faults
            and self.growth_bytes <= self.most_growth_mb * 1e6
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures as a dict, with percentiles instead of the lists of
        times."""
        figures = asdict(self)
        del figures["first_s"], figures["between_s"]
        return {
            **figures,
            "growth_bytes": self.growth_bytes,
            "first_ms": percentiles_ms(self.first_s),
            "between_ms": percentiles_ms(self.between_s),
            "tokens_per_s": self.n_tokens / self.seconds if self.seconds else 0.0,
        }


def percentiles_ms(times_s: Sequence[float]) -> dict[str, float]:
    """Returns p50, p90, p99 and the maximum in milliseconds; empty with fewer than two
    times."""
    if len(times_s) < 2:
        return {}
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    return {
        "p50": cuts[49] * 1e3,
        "p90": cuts[89] * 1e3,
        "p99": cuts[98] * 1e3,
        "max": max(times_s) * 1e3,
    }


class BusyServer(Exception):  # noqa: N818 (a state of the server, not a fault)
    """Raised if the server replies with status 429 or 503, with or without a
    Retry-After header."""

    def __init__(self, has_retry_after: bool) -> None:
        super().__init__()
        self.has_retry_after = has_retry_after


async def request_answer(
    client: httpx.AsyncClient,
    model: str,
    question: Question,
    most_parts: int | None = None,
) -> Answer:
    """Requests one streamed answer and returns it.

    `most_parts`: the client disconnects after `most_parts` + 1 parts with text, and the
    answer so far is returned. None: the whole answer is read. Raises BusyServer,
    RuntimeError for any other error that the server reports, and httpx's errors.
    """
    answer = Answer()
    start = time.perf_counter()
    dialect = DIALECTS[question.dialect]
    async with client.stream(
        "POST", dialect.path, json=question.body(model)
    ) as response:
        if response.status_code in (429, 503):
            raise BusyServer("retry-after" in response.headers)
        if response.status_code != 200:
            raise RuntimeError(
                f"{response.status_code} {(await response.aread()).decode()[:200]}"
            )
        n_tokens = None
        async for line in response.aiter_lines():
            if not (line := line.removeprefix("data: ")).startswith("{"):
                continue
            chunk = json.loads(line)
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"])[:200])
            text, reason, n_now = dialect.read(chunk)
            n_tokens = n_now if n_tokens is None else n_tokens
            answer.text += text
            answer.at_s += [time.perf_counter() - start] if text else []
            answer.finish_reason = reason or answer.finish_reason
            if most_parts is not None and len(answer.at_s) > most_parts:
                return answer
    if n_tokens is None or not answer.finish_reason:
        raise httpx.RemoteProtocolError("the stream ended before the answer")
    answer.n_tokens = n_tokens
    return answer


class Run:
    """A run of N concurrent clients, limited by time and optionally by the number of
    requests.

    `cancels` is the share of requests in which the client disconnects after one to four
    parts of the answer.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        questions: Sequence[Question],
        clients: int,
        cancels: float = 0.0,
    ) -> None:
        self.client = client
        self.model = model
        self.questions = questions
        self._cancels = cancels
        self._dice = random.Random(1)
        self.outcome = Outcome(clients)
        self.expected: dict[Question, tuple[str, str, int]] = {}

    async def record_expected(self) -> None:
        """Sends each question twice from a single client, and records the answer as
        expected.

        Raises RuntimeError if the two answers differ. Propagates errors from
        `request_answer`.
        """
        for question in self.questions:
            first, second = [
                (await request_answer(self.client, self.model, question)).content
                for _ in range(2)
            ]
            if first != second:
                raise RuntimeError(
                    f"a single client gets two answers to {question}: {first} and {second}"
                )
            self.expected[question] = first

    async def run_clients(self, seconds: float, requests: int | None = None) -> Outcome:
        """Runs all clients at once. No new request is sent after `seconds` seconds, or
        after `requests` requests in total."""
        start = time.perf_counter()
        self._end_s = start + seconds
        self._n_left = requests
        await asyncio.gather(
            *(self._client(number) for number in range(self.outcome.clients))
        )
        self.outcome.seconds = time.perf_counter() - start
        return self.outcome

    async def _client(self, number: int) -> None:
        while time.perf_counter() < self._end_s and self._may_send():
            await self._check_answer(self.questions[number % len(self.questions)])
            number += 1

    def _may_send(self) -> bool:
        if self._n_left is not None:
            self._n_left -= 1
            return self._n_left >= 0
        return True

    async def _check_answer(self, question: Question) -> None:
        outcome = self.outcome
        most_parts = (
            self._dice.randrange(4) if self._dice.random() < self._cancels else None
        )
        try:
            answer = await request_answer(self.client, self.model, question, most_parts)
        except BusyServer as busy:
            outcome.busy += 1
            outcome.busy_without_retry_after += not busy.has_retry_after
        except httpx.HTTPError:
            # The connection was refused, reset, cut off or timed out.
            outcome.resets += 1
        except RuntimeError as error:
            if WORKER_ENDED in str(error):
                outcome.lost += 1
            else:
                outcome.errors[str(error)] += 1
        else:
            expected = self.expected[question]
            if is_part := not answer.n_tokens:
                outcome.cancelled += 1
            else:
                outcome.answers += 1
            if (
                not expected[0].startswith(answer.text)
                if is_part
                else answer.content != expected
            ):
                outcome.wrong += 1
                outcome.first_wrong = (
                    outcome.first_wrong or f"{answer.content}, in place of {expected}"
                )
            outcome.n_tokens += answer.n_tokens
            outcome.first_s += answer.at_s[:1]
            outcome.between_s += [
                after - before for before, after in pairwise(answer.at_s)
            ]


def processes_of(port: int) -> list[psutil.Process]:
    """Returns a process that is listening on a local port, followed by all its
    descendants; [] if no such process is found."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(
                c.status == psutil.CONN_LISTEN and c.laddr.port == port
                for c in process.net_connections()
            ):
                return [process, *process.children(recursive=True)]
    return []


def memory_of(processes: Sequence[psutil.Process]) -> dict[str, int]:
    """Returns the resident bytes of the server (the first process), and of its workers
    (all others) together."""
    sizes = [0, 0]
    for number, process in enumerate(processes):
        with suppress(psutil.Error):
            sizes[min(number, 1)] += process.memory_info().rss
    return {"server": sizes[0], "workers": sizes[1]}


async def watch_memory(run: Run, port: int, every_s: float) -> None:
    """Records the memory of the server and its workers every `every_s` seconds, until
    the task is cancelled or no process is listening on `port`."""
    while processes := processes_of(port):
        run.outcome.memory_bytes.append(memory_of(processes))
        await asyncio.sleep(every_s)


def questions_of(
    dialects: Sequence[str], first_seed: int, max_tokens: int
) -> list[Question]:
    """Returns each of QUESTIONS in each dialect. The questions have the seeds
    `first_seed`, `first_seed` + 1 and so on."""
    numbered = list(enumerate(QUESTIONS, first_seed))
    return [
        Question(text, seed, max_tokens, dialect)
        for seed, text in numbered
        for dialect in dialects
    ]


async def measure(options: argparse.Namespace) -> Outcome:
    """Runs the whole test with the options of the command line."""
    questions = questions_of(options.dialects, options.seed, options.max_tokens)
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=options.clients
    )
    async with httpx.AsyncClient(
        base_url=options.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        run = Run(client, options.model, questions, options.clients)
        run.outcome.most_growth_mb = options.most_growth
        await run.record_expected()
        port = httpx.URL(options.url).port or 80
        every_s = (
            1.0 if options.requests else max(options.seconds / MEMORY_SAMPLES, 0.5)
        )
        watcher = asyncio.create_task(watch_memory(run, port, every_s))
        try:
            outcome = await run.run_clients(options.seconds, options.requests)
        finally:
            watcher.cancel()
        outcome.memory_bytes.append(memory_of(processes_of(port)))
        return outcome


def lines(outcome: Outcome) -> Iterator[str]:
    """Yields the lines of the printed report."""
    figures = outcome.as_dict()
    yield f"clients          {outcome.clients} for {outcome.seconds:.1f} s"
    yield f"answers          {outcome.answers} checked, {outcome.wrong} wrong; {figures['tokens_per_s']:.0f} tokens/s"
    if outcome.first_wrong:
        yield f"first wrong      {outcome.first_wrong}"
    yield f"busy (503)       {outcome.busy}, {outcome.busy_without_retry_after} of them without Retry-After"
    yield f"cancelled        {outcome.cancelled}"
    yield f"lost             {outcome.lost}, with {outcome.kills} workers that were killed"
    yield f"resets           {outcome.resets}"
    for error, n in outcome.errors.items():
        yield f"error            {n} x {error}"
    for name, key in (("first token", "first_ms"), ("between chunks", "between_ms")):
        yield f"{name:<17}" + " · ".join(
            f"{cut} {value:.1f} ms" for cut, value in figures[key].items()
        )
    for name in ("server", "workers"):
        sizes = [memory[name] / 1e6 for memory in outcome.memory_bytes]
        yield f"{name + ' memory':<17}{sizes[0]:.1f} MB before, {sizes[-1]:.1f} MB after, {max(sizes):.1f} MB at most"
    yield f"growth           {outcome.growth_bytes / 1e6:.1f} MB in the second half"


def main() -> int:
    """Runs the test with the command line's options. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:11434", help="the server")
    parser.add_argument("--model", default="demo", help="a model of that server")
    parser.add_argument(
        "--clients", type=int, default=64, help="number of concurrent clients"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="duration")
    parser.add_argument(
        "--requests", type=int, help="stop after this number, if that comes first"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of the first question; each further one adds 1",
    )
    parser.add_argument(
        "--dialects",
        nargs="+",
        choices=DIALECTS,
        default=["openai"],
        help="APIs to use",
    )
    parser.add_argument(
        "--most-growth",
        type=float,
        default=MOST_GROWTH_MB,
        metavar="MB",
        help="of memory",
    )
    parser.add_argument(
        "--json", action="store_true", help="all figures as JSON on stdout"
    )
    options = parser.parse_args()
    outcome = asyncio.run(measure(options))
    print(json.dumps(outcome.as_dict()) if options.json else "\n".join(lines(outcome)))
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
