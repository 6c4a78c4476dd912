"""Many clients at once: every answer equals that of a single client, and requests beyond the queue get 503.

The short form of `python -m tools.load_test`, which does this for a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from servers import Server, serving

from tools.load_test import Heard, Outcome, Question, Run, ask, lines, percentiles_ms

CLIENTS, QUEUE = 12, 12
ENDS = "<|endoftext|><|im_start|><|im_end|>"


@pytest.fixture(scope="module")
def busy_server(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Iterator[Server]:
    """A server where QUEUE requests may wait. Models compute with one thread: two would spin while others share the
    cores."""
    models = {"tiny": tiny()}
    with serving(tmp_path_factory.mktemp("many"), models=models, MOEGGUF_MAX_QUEUE=str(QUEUE)) as found:
        for name in ("demo", "tiny"):
            body = {"model": name, "keep_alive": -1, "options": {"num_thread": 1, "num_ctx": 8192}}
            assert found.call("/api/generate", body).status == 200
        yield found


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, trust_env=False) as client:
        yield client


def flood(server: Server, clients: int, seconds: float, requests: int | None = None) -> Outcome:
    """All clients send the same few questions to the demo, whose answers one client has recorded before."""

    async def run() -> Outcome:
        questions = [Question("What is a hit?", seed, 6) for seed in (1, 2)] + [Question("Who are you?", 3, 6)]
        async with client_of(server) as client:
            test = Run(client, "demo", questions, clients)
            await test.learn()
            return await test.flood(seconds, requests)

    return asyncio.run(run())


def test_every_answer_is_that_of_a_single_client(busy_server: Server) -> None:
    outcome = flood(busy_server, CLIENTS, seconds=60, requests=3 * CLIENTS)
    assert outcome.good, "\n".join(lines(outcome))
    assert outcome.answers == 3 * CLIENTS and outcome.busy == 0
    assert len(outcome.first_s) == outcome.answers


def test_beyond_max_queue_requests_are_refused(busy_server: Server) -> None:
    outcome = flood(busy_server, 2 * CLIENTS, seconds=2)
    assert outcome.good, "\n".join(lines(outcome))
    assert outcome.busy > 0 and outcome.answers > 0


def test_waiting_requests_are_served_after_a_disconnect(busy_server: Server) -> None:
    """One request runs, QUEUE wait, the next is refused; when the first disconnects, the waiting ones run."""
    question = Question("Go on.", 1, 4)

    async def run() -> None:
        async with client_of(busy_server) as client:
            ends = (await client.post("/tokenize", json={"model": "tiny", "content": ENDS})).json()["tokens"]
            endless = {**Question("Go on.", 1, 8000).body("tiny"), "logit_bias": dict.fromkeys(map(str, ends), -100)}
            async with client.stream("POST", "/v1/chat/completions", json=endless) as first:
                received = first.aiter_lines()
                while "content" not in await anext(received):
                    pass
                waiting = [asyncio.create_task(ask(client, "tiny", question)) for _ in range(QUEUE)]
                await until_waiting(client, QUEUE)
                refused = await client.post("/v1/chat/completions", json=question.body("tiny"))
                assert refused.status_code == 503 and refused.headers["retry-after"]
                assert "server busy" in refused.json()["error"]["message"]
                assert not any(task.done() for task in waiting)
            heard = await asyncio.gather(*waiting)
            assert len({each.said for each in heard}) == 1

    asyncio.run(run())


async def until_waiting(client: httpx.AsyncClient, n: int) -> None:
    """Until so many requests wait, as the server counts them."""
    line = f'moegguf_requests_waiting{{model="tiny:latest"}} {n}.0'
    async with asyncio.timeout(30):
        while line not in (await client.get("/metrics")).text:
            pass


def test_an_outcome_reports_failures() -> None:
    outcome = Outcome(2, seconds=1, answers=3, first_s=[0.1, 0.2], between_s=[0.01, 0.02])
    outcome.memory_bytes = [{"server": 1_000_000, "workers": 2_000_000}]
    assert outcome.good
    assert "1.0 MB before" in "\n".join(lines(outcome))
    assert not Outcome(2).good
    for fault in ("wrong", "resets", "busy_without_retry_after"):
        assert not Outcome(2, answers=3, **{fault: 1}).good  # type: ignore[arg-type]
    assert percentiles_ms([0.001] * 99 + [1.0])["p50"] == pytest.approx(1.0)
    assert percentiles_ms([]) == {}
    assert Heard("a", "stop", 1).said == ("a", "stop", 1)
