"""The manager with real workers: memory is freed, a killed worker costs one answer, and answers stay the same."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import share_for
from scripted_manager import in_loop, n_files

from moegguf.errors import BudgetError, ExpertIOError, ModelNotFoundError
from moegguf.generate.request import Delta, GenerationRequest, Sampling, Timing
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.serving.events import Done, LoadOverrides
from moegguf.serving.lease import Lease
from moegguf.serving.memory_budget import measure
from moegguf.serving.model_manager import ModelManager
from moegguf.settings import Settings
from tools.models import PRESETS, write_model

TinyModel = Callable[..., Path]

ONE_THREAD = LoadOverrides(n_threads=1)
ENDLESS = GenerationRequest(prompt="once upon a time", sampling=Sampling(seed=7, max_tokens=400))


class Files:
    """A catalog of two tiny models."""

    def __init__(self, tiny: TinyModel) -> None:
        self.paths = {"a": tiny("tiny-qwen2moe"), "b": tiny("tiny-mixtral")}

    def find(self, name: str) -> ModelEntry:
        path = self.paths[name]
        when = datetime(2026, 1, 2, tzinfo=UTC)
        return ModelEntry(f"{name}:latest", "path", (path,), path.stat().st_size, name * 64, when)

    def size_bytes(self, name: str, n_ctx: int | None = None) -> tuple[int, int]:
        """Wanted and minimum bytes of a model."""
        size = measure(self.find(name), ONE_THREAD, Settings(n_ctx=n_ctx), 8 << 30)
        return size.wanted_bytes, size.minimum_bytes


@pytest.fixture
def files(tiny: TinyModel) -> Files:
    return Files(tiny)


@asynccontextmanager
async def running_manager(files: Files, **settings: Any) -> AsyncIterator[ModelManager]:
    n_before = n_files()
    async with ModelManager(files, Settings(**{"memory_bytes": 4 << 30, **settings})) as manager:
        yield manager
    assert not [child for child in psutil.Process().children() if "worker" in " ".join(child.cmdline())]
    assert n_files() <= n_before


def story(seed: int, n_tokens: int = 16) -> GenerationRequest:
    return GenerationRequest(prompt=f"story {seed}:", sampling=Sampling(seed=seed, max_tokens=n_tokens))


async def answer_and_timing(lease: Lease, generation: GenerationRequest) -> tuple[str, Timing]:
    events = [event async for event in lease.answer(generation)]
    assert isinstance(events[-1], Done)
    return "".join(event.text for event in events if isinstance(event, Delta)), events[-1].timing


async def rest_of(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def generate(
    manager: ModelManager, name: str, generation: GenerationRequest, overrides: LoadOverrides = ONE_THREAD
) -> str:
    async with manager.lease(name, overrides) as lease:
        return (await answer_and_timing(lease, generation))[0]


@in_loop
async def test_a_file_that_is_overwritten_ends_the_answer_and_is_loaded_anew(files: Files, tmp_path: Path) -> None:
    before, after, served = files.paths["a"], tmp_path / "after.gguf", tmp_path / "served.gguf"
    write_model(after, PRESETS["tiny-qwen2moe"], seed=1)
    assert after.stat().st_size == before.stat().st_size
    few = replace(ONE_THREAD, expert_cache=parse_expert_cache("40%"))
    shutil.copy(before, served)
    files.paths = {"before": before, "after": after, "served": served}
    async with running_manager(files) as manager:
        old, new = [await generate(manager, name, story(3), few) for name in ("before", "after")]
        assert old != new
        assert await generate(manager, "served", story(3), few) == old
        async with manager.lease("served", few) as lease:
            answer = lease.answer(ENDLESS)
            await anext(answer)
            shutil.copy(after, served)  # in place
            with pytest.raises(ExpertIOError, match=r"served\.gguf' was written to after the model was loaded"):
                await rest_of(answer)
        assert await generate(manager, "served", story(3), few) == new
        shutil.copy(before, served)
        assert await generate(manager, "served", story(3), few) == old


@in_loop
async def test_a_budget_that_changes_beside_answers_frees_memory_and_changes_no_text(files: Files) -> None:
    async with running_manager(files, n_ctx=512) as manager:
        expected = await generate(manager, "a", story(5, 40))
        (full,) = manager.loaded()
        slot_bytes, n_slots = full.plan["slot_bytes"], full.plan["n_slots"]
        assert full.expert_cache_bytes == n_slots * slot_bytes
        least = ExpertCache("bytes", n_bytes=(n_slots // 2 + 1) * slot_bytes - 1)
        small = await manager.set_budget("a", least)
        assert small.expert_cache_bytes == n_slots // 2 * slot_bytes
        assert full.size_bytes - small.size_bytes == full.expert_cache_bytes - small.expert_cache_bytes
        changed = asyncio.create_task(generate(manager, "a", story(5, 40)))
        for share in ("100%", "50%", "auto", "60%"):
            await manager.set_budget("a", parse_expert_cache(share))
        assert await changed == await generate(manager, "a", story(5, 40)) == expected
        (now,) = manager.loaded()
        assert now.stats.n_slots == now.expert_cache_bytes // slot_bytes == int(0.6 * n_slots)
        with pytest.raises(BudgetError, match="at least"):
            await manager.set_budget("a", ExpertCache("bytes", n_bytes=slot_bytes))
        assert manager.loaded()[0].size_bytes == now.size_bytes
        with pytest.raises(ModelNotFoundError, match="not loaded"):
            await manager.set_budget("b", least)


@in_loop
async def test_a_budget_asked_for_in_a_run_is_kept_where_a_longer_context_loads_again(files: Files) -> None:
    async with running_manager(files, n_ctx=512) as manager:
        full = await manager.load("a", ONE_THREAD)
        small = await manager.set_budget("a", parse_expert_cache("50%"))
        again = await manager.load("a", replace(ONE_THREAD, n_ctx=1024))
        assert (again.n_ctx, again.pid != full.pid) == (1024, True)
        (now,) = manager.loaded()
        assert now.expert_cache_bytes == small.expert_cache_bytes < now.plan["budget_bytes"] == full.expert_cache_bytes
        assert await generate(manager, "a", story(5, 4))
        assert manager.loaded()[0].stats.n_slots * now.plan["slot_bytes"] == small.expert_cache_bytes
        back = await manager.set_budget("a", parse_expert_cache("100%"))
        assert back.expert_cache_bytes == full.expert_cache_bytes
        await manager.set_budget("a", parse_expert_cache("50%"))
        await manager.unload("a")
        fresh = await manager.load("a", ONE_THREAD)
        assert fresh.expert_cache_bytes == full.expert_cache_bytes


@in_loop
async def test_a_budget_grows_only_into_what_other_models_leave(files: Files) -> None:
    shrunk_bytes = share_for(files.paths["a"], 38)  # of 64 slots: 40 % and a part stay
    memory_bytes = sum(files.size_bytes(name, n_ctx=512)[0] for name in "ab") - shrunk_bytes // 2
    async with running_manager(files, n_ctx=512, memory_bytes=memory_bytes) as manager:
        await manager.load("a", ONE_THREAD)
        await manager.set_budget("a", parse_expert_cache("40%"))
        await manager.load("b", ONE_THREAD)
        assert len(manager.loaded()) == 2
        with pytest.raises(BudgetError, match="beside the other models"):
            await manager.set_budget("a", parse_expert_cache("100%"))
        await manager.unload("b")
        full = await manager.set_budget("a", parse_expert_cache("100%"))
        assert full.expert_cache_bytes == full.plan["budget_bytes"]


@in_loop
async def test_two_models_in_a_budget_that_holds_one(files: Files) -> None:
    budget = max(files.size_bytes(name)[0] for name in "ab")
    async with running_manager(files, memory_bytes=budget) as manager:
        expected = {name: await generate(manager, name, story(3)) for name in "ab"}
        pids = set()
        for name in "abab":
            assert await generate(manager, name, story(3)) == expected[name]
            (model,) = manager.loaded()
            assert model.name == f"{name}:latest" and model.size_bytes <= budget
            pids.add(model.pid)
        assert sum(map(psutil.pid_exists, pids)) == 1


@in_loop
async def test_with_less_memory_fewer_experts_and_the_same_answer(files: Files) -> None:
    async with running_manager(files, n_ctx=512) as manager:
        expected = await generate(manager, "a", story(5, 40))
        everything = manager.loaded()[0]
    wanted, minimum = files.size_bytes("a", n_ctx=512)
    assert wanted == everything.size_bytes
    budget = minimum + everything.plan["n_slots"] // 2 * everything.plan["slot_bytes"]
    async with running_manager(files, n_ctx=512, memory_bytes=budget) as manager:
        assert await generate(manager, "a", story(5, 40)) == expected
        (model,) = manager.loaded()
        assert model.plan["n_slots"] < everything.plan["n_slots"] and model.plan["total_bytes"] <= budget
        assert model.stats.misses > 0
    async with running_manager(files, n_ctx=512, memory_bytes=minimum - 1) as manager:
        with pytest.raises(BudgetError, match=r"needs at least .*MOEGGUF_MEMORY"):
            await generate(manager, "a", story(5))
