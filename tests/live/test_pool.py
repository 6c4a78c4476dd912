"""The pool with real workers: memory comes back, a killed worker costs one answer, and answers stay the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from pooling import in_loop, n_files

from moegguf.errors import BudgetError, WorkerError
from moegguf.generate.request import Delta, GenerationRequest, Sampling, Timing
from moegguf.models.entry import ModelEntry
from moegguf.serving.events import Done, LoadOptions
from moegguf.serving.lease import Lease
from moegguf.serving.manager import ModelManager
from moegguf.serving.memory_budget import measure
from moegguf.settings import Settings

TinyModel = Callable[..., Path]

ONE_THREAD = LoadOptions(n_threads=1)
ENDLESS = GenerationRequest(prompt="once upon a time", sampling=Sampling(seed=7, max_tokens=400))


class Files:
    """A catalog of two tiny models."""

    def __init__(self, tiny: TinyModel) -> None:
        self.paths = {"a": tiny("tiny-qwen2moe"), "b": tiny("tiny-mixtral")}

    def find(self, name: str) -> ModelEntry:
        path = self.paths[name]
        when = datetime(2026, 1, 2, tzinfo=UTC)
        return ModelEntry(f"{name}:latest", "path", (path,), path.stat().st_size, name * 64, when)

    def purpose(self, name: str) -> tuple[int, int]:
        """Bytes a model wishes for, and at least needs."""
        size = measure(self.find(name), ONE_THREAD, Settings(), 8 << 30)
        return size.wanted_bytes, size.least_bytes


@pytest.fixture
def files(tiny: TinyModel) -> Files:
    return Files(tiny)


@asynccontextmanager
async def pool_of(files: Files, **settings: Any) -> AsyncIterator[ModelManager]:
    n_before = n_files()
    async with ModelManager(files, Settings(**{"memory_bytes": 4 << 30, **settings})) as pool:
        yield pool
    assert not [child for child in psutil.Process().children() if "worker" in " ".join(child.cmdline())]
    assert n_files() == n_before


def story(seed: int, n_tokens: int = 16) -> GenerationRequest:
    return GenerationRequest(prompt=f"story {seed}:", sampling=Sampling(seed=seed, max_tokens=n_tokens))


async def told(lease: Lease, ask: GenerationRequest) -> tuple[str, Timing]:
    events = [event async for event in lease.answer(ask)]
    assert isinstance(events[-1], Done)
    return "".join(event.text for event in events if isinstance(event, Delta)), events[-1].timing


async def rest_of(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def ask_for(pool: ModelManager, name: str, ask: GenerationRequest, load: LoadOptions = ONE_THREAD) -> str:
    async with pool.lease(name, load) as lease:
        return (await told(lease, ask))[0]


@in_loop
async def test_a_killed_worker_costs_one_answer(files: Files) -> None:
    async with pool_of(files) as pool:
        expected = await ask_for(pool, "a", story(1))
        async with pool.lease("a") as lease:
            answer = aiter(lease.answer(ENDLESS))
            assert isinstance(await anext(answer), Delta)
            os.kill(lease.loaded.pid, signal.SIGKILL)
            with pytest.raises(WorkerError, match=r"'a:latest'.*SIGKILL.*loads it again"):
                await rest_of(answer)
        assert await ask_for(pool, "a", story(1)) == expected


@in_loop
async def test_one_who_leaves_frees_the_model_within_a_token(files: Files) -> None:
    async with pool_of(files) as pool:
        async with pool.lease("a", ONE_THREAD) as lease:
            async for _ in lease.answer(ENDLESS):
                break
        async with pool.lease("a") as lease:
            assert lease.loaded.n_requests == 2 and lease.load_s == 0
            assert lease.loaded.stats.tokens < 200, "it stopped, by itself, long before its end"


@in_loop
async def test_unloading_ends_the_process(files: Files) -> None:
    async with pool_of(files) as pool:
        loaded = await pool.load("a", ONE_THREAD)
        assert psutil.pid_exists(loaded.pid)
        assert await pool.unload("a")
        assert not psutil.pid_exists(loaded.pid) and pool.loaded() == []


@in_loop
async def test_two_models_in_a_budget_that_holds_one(files: Files) -> None:
    budget = max(files.purpose(name)[0] for name in "ab")
    async with pool_of(files, memory_bytes=budget) as pool:
        expected = {name: await ask_for(pool, name, story(3)) for name in "ab"}
        pids = set()
        for name in "abab":
            assert await ask_for(pool, name, story(3)) == expected[name]
            (model,) = pool.loaded()
            assert model.name == f"{name}:latest" and model.size_bytes <= budget
            pids.add(model.pid)
        assert sum(map(psutil.pid_exists, pids)) == 1


@in_loop
async def test_with_less_memory_fewer_experts_and_the_same_answer(files: Files) -> None:
    async with pool_of(files) as pool:
        expected = await ask_for(pool, "a", story(5, 40))
        everything = pool.loaded()[0]
    purpose, least = files.purpose("a")
    assert purpose == everything.size_bytes
    budget = (purpose + least) // 2
    async with pool_of(files, memory_bytes=budget) as pool:
        assert await ask_for(pool, "a", story(5, 40)) == expected
        (model,) = pool.loaded()
        assert model.plan["n_slots"] < everything.plan["n_slots"] and model.plan["total_bytes"] <= budget
        assert model.stats.misses > 0
    async with pool_of(files, memory_bytes=least - 1) as pool:
        with pytest.raises(BudgetError, match=r"needs at least .*MOEGGUF_MEMORY"):
            await ask_for(pool, "a", story(5))


@in_loop
async def test_many_at_once_get_what_one_alone_gets(files: Files) -> None:
    async with pool_of(files) as pool:
        asked = [("ab"[seed % 2], story(seed // 2)) for seed in range(16)]
        alone = [await ask_for(pool, name, ask) for name, ask in asked]
        assert await asyncio.gather(*(ask_for(pool, name, ask) for name, ask in asked)) == alone


@in_loop
async def test_another_context_loads_it_again(files: Files) -> None:
    async with pool_of(files) as pool:
        pids = {}
        for n_ctx in (512, None, 512, 1024):
            async with pool.lease("a", LoadOptions(n_ctx=n_ctx, n_threads=1)) as lease:
                pids.setdefault(lease.loaded.n_ctx, lease.loaded.pid)
                assert (await told(lease, story(1)))[1].answer_tokens == 16
                assert lease.loaded.n_ctx == (n_ctx or 512)
        assert len(set(pids.values())) == 2


@in_loop
async def test_the_second_turn_reads_only_what_is_new(files: Files) -> None:
    async with pool_of(files) as pool, pool.lease("a", ONE_THREAD) as lease:
        first = GenerationRequest(
            prompt="a long story about a fox and its den", sampling=Sampling(temperature=0, max_tokens=4)
        )
        text, timing = await told(lease, first)
        assert timing.cached_tokens == 0
        again = GenerationRequest(prompt=str(first.prompt) + text + " and more", sampling=first.sampling)
        assert (await told(lease, again))[1].cached_tokens >= timing.prompt_tokens - 1


@in_loop
async def test_vectors_and_tokens_through_a_lease(files: Files) -> None:
    async with pool_of(files) as pool, pool.lease("a", ONE_THREAD) as lease:
        given = await lease.embed(["a text", "another"])
        assert len(given.vectors) == 2 and given.n_tokens > 0
        assert sum(x * x for x in given.vectors[0]) == pytest.approx(1, abs=1e-3)
        assert await lease.detokenize(await lease.tokenize("some text", special=False)) == "some text"


@in_loop
async def test_views_of_a_real_model(files: Files) -> None:
    async with pool_of(files) as pool:
        views = aiter(pool.watch(per_s=20))
        first = asyncio.ensure_future(anext(views))
        await ask_for(pool, "a", story(1))
        view = await first
        assert view.model == "a:latest" and len(view.state) == len(view.layers) * view.n_expert > 0
