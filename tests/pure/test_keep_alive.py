"""Tests keep-alive times, turn-taking between clients, and which models are unloaded
when memory is short.

Workers are scripted, and their processes are real.
"""

import asyncio
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_manager import (
    FakeCatalog,
    answer_text,
    begun,
    generate,
    manager_of,
    until,
)

from moegguf.serving import model_manager
from moegguf.serving.clients import current_client
from moegguf.serving.managed_model import LeaseRequest, ManagedModel
from moegguf.serving.model_manager import ModelManager

# The event loop of the futures in Queue, where no manager runs.
LOOP = asyncio.new_event_loop()


@pytest.fixture
def catalog(tmp_path: Path) -> FakeCatalog:
    return FakeCatalog(tmp_path)


def names(manager: ModelManager) -> set[str]:
    return {model.name[0] for model in manager.loaded()}


def left_s(manager: ModelManager) -> float:
    (model,) = manager.loaded()
    return (
        math.inf
        if model.expires is None
        else (model.expires - datetime.now(UTC)) / timedelta(seconds=1)
    )


async def test_each_request_sets_the_keep_alive_time(catalog: FakeCatalog) -> None:
    catalog.add("a")
    async with manager_of(catalog, keep_alive_s=100) as manager:
        for given, expected in (
            (None, 100),
            (20.0, 20),
            (math.inf, math.inf),
            (None, 100),
            (7.5, 7.5),
        ):
            await generate(manager, "a", "say x", keep_alive_s=given)
            assert (
                left_s(manager) == expected
                or expected - 2 < left_s(manager) <= expected
            )
            await manager.load("a", keep_alive_s=50)
            assert 48 < left_s(manager) <= 50, (
                "loading a loaded model restarts the time"
            )
        await generate(manager, "a", "say x", keep_alive_s=0.0)
        await until(lambda: not manager.loaded())


async def test_keep_alive_time_does_not_run_while_a_model_is_used(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    catalog.add("a")
    go = tmp_path / "go"
    async with manager_of(catalog) as manager:
        await generate(manager, "a", "say x", keep_alive_s=0.01)
        async with manager.lease("a", keep_alive_s=0.01) as lease:
            # A timer with the earlier keep-alive time would expire during this sleep.
            await asyncio.sleep(0.02)
            assert await answer_text(lease, "say x") == "x"
            held = asyncio.create_task(
                generate(manager, "a", f"hold {go}", keep_alive_s=0.0)
            )
            behind = asyncio.create_task(
                generate(manager, "a", "say behind", keep_alive_s=60)
            )
            await until(lambda: manager.loaded() and manager.loaded()[0].queue == 1)
        go.touch()
        assert await asyncio.gather(held, behind) == ["held", "behind"]
        assert 58 < left_s(manager) <= 60, "the waiting request sets the time"
    assert len(catalog.loads("a")) <= 3, (
        "a slow machine unloads it between the requests"
    )


async def test_least_recently_used_idle_model_is_unloaded_first_and_logged(
    catalog: FakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr(
        model_manager, "log_decision", lambda event, **of: logged.append((event, of))
    )
    for name in "abcd":
        catalog.add(name, 400, 400)
    async with manager_of(catalog, memory_bytes=1000 << 20) as manager:
        await generate(manager, "a", "say x")
        await generate(manager, "b", "say x")
        await generate(manager, "a", "say x")
        await generate(manager, "c", "say x")
        assert names(manager) == {"a", "c"}
        await generate(manager, "d", "say x")
        assert names(manager) == {"c", "d"}
        await manager.unload("c")
        await generate(manager, "d", "say x", {"n_ctx": 8192})
    assert [(event, *list(of.values())[:2]) for event, of in logged] == [
        ("model_unloaded", "b:latest", "c:latest"),
        ("model_unloaded", "a:latest", "d:latest"),
        ("model_stopped", "c:latest", True),
        ("model_stopped", "d:latest", False),
    ]


async def test_model_loaded_beside_a_busy_one_gets_fewer_slots(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    catalog.add("a", 600, 600)
    catalog.add("b", 800, 200)
    go = tmp_path / "go"
    async with manager_of(catalog, memory_bytes=1000 << 20) as manager:
        held = await begun(manager, "a", go)
        assert await generate(manager, "b", "say x") == "x"
        assert sum(model.size_bytes for model in manager.loaded()) == 1000 << 20
        go.touch()
        await held
    assert catalog.loads("b")[0]["plan"]["slot_bytes"] == 400 << 20


async def test_model_that_does_not_fit_waits_for_a_busy_one(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    catalog.add("a", 600, 600)
    catalog.add("b", 800, 500)
    go = tmp_path / "go"
    async with manager_of(catalog, memory_bytes=1000 << 20) as manager:
        held = await begun(manager, "a", go)
        other = asyncio.create_task(generate(manager, "b", "say x"))
        later = asyncio.create_task(generate(manager, "a", "say later"))
        await until(lambda: manager.loaded()[0].queue == 1)
        assert not other.done()
        go.touch()
        assert await asyncio.gather(held, later, other) == ["held", "later", "x"]
        assert names(manager) == {"b"}
    assert len(catalog.loads("a")) == 1, (
        "the later request overtook the load: a was loaded"
    )


async def test_requests_queued_before_a_load_are_answered_before_that_load(
    catalog: FakeCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_manager, "OVERTAKE_S", 0.0)
    catalog.add("a", 600, 600)
    catalog.add("b", 800, 500)
    go, done = tmp_path / "go", list[str]()

    async def request(
        manager: ModelManager, client: str, name: str, prompt: str
    ) -> None:
        current_client.set(client)
        done.append(await generate(manager, name, prompt))

    async with (
        manager_of(catalog, memory_bytes=1000 << 20) as manager,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(request(manager, "many", "a", f"hold {go}"))
        await until(lambda: manager.loaded() and manager.loaded()[0].busy)
        for number in range(2):
            group.create_task(request(manager, "many", "a", f"say many{number}"))
        await until(lambda: manager.loaded()[0].queue == 2)
        group.create_task(request(manager, "many", "b", "say other"))
        # The size of b is known, and its load waits for memory.
        await until(lambda: manager._short)
        # If clients took turns, this request would come before many1; but it arrived
        # after b's load began to wait.
        group.create_task(request(manager, "one", "a", "say later"))
        await until(lambda: manager.loaded()[0].queue == 3)
        go.touch()
    assert done == ["held", "many0", "many1", "other", "later"]
    assert len(catalog.loads("a")) == 2
    assert len(catalog.loads("b")) == 1


class Queue:
    """Requests that wait for one model."""

    def __init__(self) -> None:
        self.model = ManagedModel("", cast(Any, None))
        self.tickets: list[int] = []

    def add(self, client: str) -> None:
        request = LeaseRequest(
            cast(Any, None), {}, 0.0, client=client, granted=asyncio.Future(loop=LOOP)
        )
        self.model.waiting.append(request)
        self.tickets.append(request.ticket)

    def serve(self) -> tuple[int, str]:
        """Serves the next request from beginning to end. Returns its number in the
        order of `add`, and its client."""
        first = self.model.queue[0]
        self.model.grant(first)
        self.model.release(first)
        return self.tickets.index(first.ticket), first.client


def test_idle_clients_save_no_turns_and_cancelled_requests_cost_none() -> None:
    queue = Queue()
    queue.add("idle")
    queue.serve()
    for _ in range(20):
        queue.add("busy")
        queue.serve()
    for client in ("busy", "idle", "third"):
        queue.add(client)
    assert [queue.serve()[1] for _ in range(3)] == ["busy", "idle", "third"], (
        "as they came"
    )
    for _ in range(500):
        queue.add("hasty")
    queue.serve()
    queue.model.waiting.clear()
    for client in ("hasty", "other", "hasty"):
        queue.add(client)
    assert [queue.serve()[1] for _ in range(3)] == ["hasty", "other", "hasty"], (
        "cancelled requests cost nothing"
    )
    assert not queue.model._served, "of those who wait only"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
def test_queue_lets_each_other_client_overtake_a_request_at_most_once(
    steps: list[tuple[int, int]],
) -> None:
    queue, n_overtaken = Queue(), dict[int, dict[str, int]]()
    for number, (client, n_served) in enumerate(steps):
        own = sum(request.client == str(client) for request in queue.model.waiting)
        queue.add(str(client))
        n_overtaken[number] = dict.fromkeys(map(str, range(5)), own + 1)
        for _ in range(min(n_served, len(queue.model.waiting))):
            _, served = queue.serve()
            for request in queue.model.waiting:
                if request.client != served:
                    left = n_overtaken[queue.tickets.index(request.ticket)]
                    left[served] -= 1
                    assert left[served] >= -1
