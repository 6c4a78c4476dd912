"""Tests many concurrent clients: each answer equals a single client's answer, and a
full queue refuses requests.

`python -m tools.load_test` makes similar checks for a minute or for thousands of
requests. The variable MOEGGUF_REQUESTS sets the number of requests in the memory growth
test (default: 48).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from servers import Server, serving

from tools.load_test import Outcome, Question, Run, lines, memory_of, processes_of

CLIENTS, QUEUE = 12, 12
N_REQUESTS = int(os.environ.get("MOEGGUF_REQUESTS", "48"))


@pytest.fixture(scope="module")
def busy_server(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]
) -> Iterator[Server]:
    """Yields a server whose queue holds QUEUE requests, with `demo` and `tiny` loaded.

    Each model uses one compute thread: more threads would spin on shared cores.
    """
    models = {"tiny": tiny()}
    with serving(
        tmp_path_factory.mktemp("many"), models=models, MOEGGUF_MAX_QUEUE=str(QUEUE)
    ) as found:
        for name in ("demo", "tiny"):
            body = {
                "model": name,
                "keep_alive": -1,
                "options": {"num_thread": 1, "num_ctx": 8192},
            }
            assert found.call("/api/generate", body).status == 200
        yield found


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=60, limits=limits, trust_env=False
    ) as client:
        yield client


def run_load(
    server: Server, clients: int, seconds: float, requests: int | None = None
) -> Outcome:
    """Runs a load test in which all clients send the same three questions to the demo
    model.

    First, a single client sends the questions. Its answers are the expected answers.
    """

    async def run() -> Outcome:
        questions = [Question("What is a hit?", seed, 6) for seed in (1, 2)] + [
            Question("Who are you?", 3, 6)
        ]
        async with client_of(server) as client:
            test = Run(client, "demo", questions, clients)
            await test.record_expected()
            return await test.run_clients(seconds, requests)

    return asyncio.run(run())


def test_many_clients_get_the_answers_of_a_single_client(busy_server: Server) -> None:
    outcome = run_load(busy_server, CLIENTS, seconds=60, requests=3 * CLIENTS)
    assert outcome.passed, "\n".join(lines(outcome))
    assert outcome.answers == 3 * CLIENTS and outcome.busy == 0
    assert len(outcome.first_s) == outcome.answers


def test_requests_beyond_the_queue_limit_are_refused_as_busy(
    busy_server: Server,
) -> None:
    outcome = run_load(busy_server, 2 * CLIENTS, seconds=2)
    assert outcome.passed, "\n".join(lines(outcome))
    assert outcome.busy > 0 and outcome.answers > 0


def test_memory_stays_flat_over_many_requests(busy_server: Server) -> None:
    """Tests a server that processes one request of a model at a time.

    tests/live/test_batching.py tests the memory of passes with many sequences.
    """
    sizes = list[int]()
    (server, *workers) = processes_of(httpx.URL(busy_server.url).port or 0)
    for _ in range(4):
        assert run_load(busy_server, 8, seconds=3600, requests=N_REQUESTS // 4).passed
        sizes.append(sum(memory_of([server, *workers]).values()))
    assert sizes[-1] - sizes[1] < 8 << 20, sizes
