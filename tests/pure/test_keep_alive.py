"""How long a model stays, and who leaves when memory is short. The workers are scripted, the processes real."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pooling import FakeCatalog, ask, in_loop, pool_of, said, until

from moegguf.errors import BudgetError
from moegguf.serving import dispatcher as scheduler
from moegguf.serving.manager import ModelManager


@pytest.fixture
def catalog(tmp_path: Path) -> FakeCatalog:
    return FakeCatalog(tmp_path)


def names(pool: ModelManager) -> set[str]:
    return {model.name[0] for model in pool.loaded()}


def left_s(pool: ModelManager) -> float:
    (model,) = pool.loaded()
    return math.inf if model.expires is None else (model.expires - datetime.now(UTC)) / timedelta(seconds=1)


@in_loop
async def test_each_request_says_how_long_its_model_stays(catalog: FakeCatalog) -> None:
    catalog.add("a")
    async with pool_of(catalog, keep_alive_s=100) as pool:
        for given, expected in ((None, 100), (20.0, 20), (math.inf, math.inf), (None, 100), (7.5, 7.5)):
            await ask(pool, "a", "say x", keep_alive_s=given)
            assert left_s(pool) == expected or expected - 2 < left_s(pool) <= expected
            await pool.load("a", keep_alive_s=50)
            assert 48 < left_s(pool) <= 50, "loading what is there says it anew"
        await ask(pool, "a", "say x", keep_alive_s=0.0)
        await until(lambda: not pool.loaded())


@in_loop
async def test_a_model_leaves_when_its_time_is_over_and_not_before(catalog: FakeCatalog) -> None:
    catalog.add("a")
    catalog.add("b")
    async with pool_of(catalog) as pool:
        await pool.load("b", keep_alive_s=math.inf)
        await ask(pool, "a", "say x", keep_alive_s=0.05)
        assert names(pool) == {"a", "b"}
        await until(lambda: names(pool) == {"b"})


@in_loop
async def test_no_time_passes_while_it_is_used(catalog: FakeCatalog, tmp_path: Path) -> None:
    catalog.add("a")
    go = tmp_path / "go"
    async with pool_of(catalog) as pool:
        await ask(pool, "a", "say x", keep_alive_s=0.01)
        async with pool.lease("a", keep_alive_s=0.01) as lease:
            await asyncio.sleep(0.05)
            assert await said(lease, "say x") == "x"
            held = asyncio.create_task(ask(pool, "a", f"hold {go}", keep_alive_s=0.0))
            behind = asyncio.create_task(ask(pool, "a", "say behind", keep_alive_s=60))
            await until(lambda: pool.loaded()[0].queue == 1)
        go.touch()
        assert await asyncio.gather(held, behind) == ["held", "behind"]
        assert 58 < left_s(pool) <= 60, "the one behind needs it, and says for how long"
    assert len(catalog.loads("a")) <= 2


@in_loop
async def test_the_least_recently_used_idle_model_leaves_first(catalog: FakeCatalog) -> None:
    for name in "abcd":
        catalog.add(name, 400, 400)
    async with pool_of(catalog, memory_bytes=1000 << 20) as pool:
        await ask(pool, "a", "say x")
        await ask(pool, "b", "say x")
        await ask(pool, "a", "say x")
        await ask(pool, "c", "say x")
        assert names(pool) == {"a", "c"}
        await ask(pool, "d", "say x")
        assert names(pool) == {"c", "d"}


@in_loop
async def test_no_more_leave_than_must(catalog: FakeCatalog) -> None:
    for name, size in (("a", 200), ("b", 300), ("c", 400), ("d", 500)):
        catalog.add(name, size, size)
    async with pool_of(catalog, memory_bytes=1000 << 20) as pool:
        for name in "abcd":
            await ask(pool, name, "say x")
        assert names(pool) == {"c", "d"}


@in_loop
async def test_beside_a_busy_model_another_takes_fewer_experts(catalog: FakeCatalog, tmp_path: Path) -> None:
    catalog.add("a", 600, 600)
    catalog.add("b", 800, 200)
    go = tmp_path / "go"
    async with pool_of(catalog, memory_bytes=1000 << 20) as pool:
        held = asyncio.create_task(ask(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        assert await ask(pool, "b", "say x") == "x"
        assert sum(model.size_bytes for model in pool.loaded()) == 1000 << 20
        go.touch()
        await held
    assert catalog.loads("b")[0]["expert_cache_bytes"] == 400 << 20


@in_loop
async def test_a_model_that_does_not_fit_waits_for_a_busy_one(catalog: FakeCatalog, tmp_path: Path) -> None:
    catalog.add("a", 600, 600)
    catalog.add("b", 800, 500)
    go = tmp_path / "go"
    async with pool_of(catalog, memory_bytes=1000 << 20) as pool:
        held = asyncio.create_task(ask(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        other = asyncio.create_task(ask(pool, "b", "say x"))
        later = asyncio.create_task(ask(pool, "a", "say later"))
        await until(lambda: pool.loaded()[0].queue == 1)
        assert not other.done()
        go.touch()
        assert await asyncio.gather(held, later, other) == ["held", "later", "x"]
        assert names(pool) == {"b"}
    assert len(catalog.loads("a")) == 1, "the later request went first: a was there"


@in_loop
async def test_others_do_not_go_first_for_ever(
    catalog: FakeCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "OVERTAKE_S", 0.0)
    catalog.add("a", 600, 600)
    catalog.add("b", 800, 500)
    go, done = tmp_path / "go", list[str]()

    async def request(pool: ModelManager, name: str, prompt: str) -> None:
        done.append(await ask(pool, name, prompt))

    async with pool_of(catalog, memory_bytes=1000 << 20) as pool, asyncio.TaskGroup() as group:
        group.create_task(request(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        group.create_task(request(pool, "a", "say earlier"))
        await until(lambda: pool.loaded()[0].queue == 1)
        group.create_task(request(pool, "b", "say other"))
        await asyncio.sleep(0.02)
        group.create_task(request(pool, "a", "say later"))
        await until(lambda: pool.loaded()[0].queue == 2)
        go.touch()
    assert done == ["held", "earlier", "other", "later"]
    assert len(catalog.loads("a")) == 2


@in_loop
async def test_a_model_that_never_fits_is_an_error_with_numbers(catalog: FakeCatalog) -> None:
    catalog.add("a", 2000, 1500)
    catalog.add("b")
    async with pool_of(catalog, memory_bytes=1000 << 20) as pool:
        await ask(pool, "b", "say x")
        with pytest.raises(BudgetError, match=r"'a:latest' needs at least 1.46GiB.* 1000MiB.*MOEGGUF_MEMORY"):
            await ask(pool, "a", "say x")
        assert names(pool) == {"b"}, "nobody left for it"
        assert await ask(pool, "b", "say x") == "x"


@in_loop
async def test_at_most_so_many_models(catalog: FakeCatalog) -> None:
    for name in "abc":
        catalog.add(name)
    async with pool_of(catalog, max_models=2) as pool:
        for name in "abc":
            await ask(pool, name, "say x")
            assert len(pool.loaded()) <= 2
        assert names(pool) == {"b", "c"}


@in_loop
async def test_many_requests_for_more_models_than_fit_are_all_answered(catalog: FakeCatalog) -> None:
    for name in "abcd":
        catalog.add(name, 400, 400)
    async with pool_of(catalog, memory_bytes=1000 << 20) as pool:
        asked = [(name, f"say {name}{i}") for i in range(8) for name in "abcd"]
        answers = await asyncio.gather(*(ask(pool, name, prompt) for name, prompt in asked))
        assert answers == [prompt.removeprefix("say ") for _, prompt in asked]
