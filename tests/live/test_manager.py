"""Tests the model manager with real workers, some on a device: changed files, budgets,
and a lost device."""

import asyncio
import multiprocessing
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from rpc_device import server
from running import TinyModel, share_for
from scripted_manager import n_files

from moegguf.engine.machine import Device, Memory
from moegguf.errors import (
    BudgetError,
    DeviceLostError,
    ExpertIOError,
    ModelNotFoundError,
)
from moegguf.generate.request import Delta, Request, Sampling
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.serving.events import LoadOverrides
from moegguf.serving.memory_budget import measure
from moegguf.serving.model_manager import ModelManager
from moegguf.serving.worker_process import Workers
from moegguf.settings import Settings
from tools.models import PRESETS, write_model

ONE_THREAD = {"n_threads": 1}
ENDLESS = Request(prompt="once upon a time", sampling=Sampling(seed=7, max_tokens=400))


class Files:
    """A catalog of files."""

    def __init__(self, **paths: Path) -> None:
        self.paths = paths

    def find(self, name: str) -> ModelEntry:
        path = self.paths[name]
        when = datetime(2026, 1, 2, tzinfo=UTC)
        return ModelEntry(
            f"{name}:latest", "path", (path,), path.stat().st_size, name * 64, when
        )

    def size_bytes(self, name: str, n_ctx: int | None = None) -> tuple[int, int]:
        """Returns the wanted and the minimum RAM of a load, in bytes, on a machine with
        8 GiB."""
        size = measure(
            self.find(name),
            ONE_THREAD,
            Settings(loading={"n_ctx": n_ctx}),
            Memory(8 << 30, 8 << 30, "a test", 0),
        )
        return size.wanted["RAM"], size.minimum["RAM"]


@pytest.fixture
def files(tiny: TinyModel) -> Files:
    return Files(a=tiny("tiny-qwen2moe"), b=tiny("tiny-mixtral"))


@asynccontextmanager
async def running_manager(files: Files, **settings: Any) -> AsyncIterator[ModelManager]:
    n_before = n_files()
    loading = {
        name: settings.pop(name) for name in ("n_ctx", "n_parallel") if name in settings
    }
    given = Settings(**{"memory_bytes": 4 << 30, "loading": loading, **settings})
    async with ModelManager(files, given) as manager:
        yield manager
    assert not [
        child
        for child in psutil.Process().children()
        if "worker" in " ".join(child.cmdline())
    ]
    assert n_files() <= n_before


def story(seed: int, n_tokens: int = 16) -> Request:
    return Request(
        prompt=f"story {seed}:", sampling=Sampling(seed=seed, max_tokens=n_tokens)
    )


async def generate(
    manager: ModelManager,
    name: str,
    request: Request,
    overrides: LoadOverrides = ONE_THREAD,
) -> str:
    async with manager.lease(name, overrides) as lease:
        return "".join(
            [
                event.text
                async for event in lease.answer(request)
                if isinstance(event, Delta)
            ]
        )


@dataclass(frozen=True)
class Versions:
    """Two model files of equal size, `before` and `after`, their answers `old` and
    `new`, and the options of a load."""

    before: Path
    after: Path
    options: LoadOverrides
    old: str
    new: str


@pytest.fixture(scope="module", params=["40%", "100%"])
def versions(
    tiny: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Versions:
    before, after = (
        tiny("tiny-qwen2moe"),
        tmp_path_factory.mktemp("versions") / "after.gguf",
    )
    write_model(after, PRESETS["tiny-qwen2moe"], seed=1)
    assert after.stat().st_size == before.stat().st_size
    options = {**ONE_THREAD, "expert_cache": parse_expert_cache(request.param)}

    async def texts() -> list[str]:
        async with running_manager(Files(before=before, after=after)) as manager:
            return [
                await generate(manager, name, story(3), options)
                for name in ("before", "after")
            ]

    old, new = asyncio.run(texts())
    assert old != new
    return Versions(before, after, options, old, new)


@pytest.mark.parametrize("versions", ["40%"], indirect=True)
async def test_an_overwritten_file_ends_the_answer_and_is_reloaded(
    versions: Versions, tmp_path: Path
) -> None:
    served, options = tmp_path / "served.gguf", versions.options
    shutil.copy(versions.before, served)
    async with running_manager(Files(served=served)) as manager:
        assert await generate(manager, "served", story(3), options) == versions.old
        async with manager.lease("served", options) as lease:
            answer = lease.answer(ENDLESS)
            await anext(answer)
            shutil.copy(versions.after, served)  # overwrites the file in place
            with pytest.raises(
                ExpertIOError,
                match=r"served\.gguf' was written to after the model was loaded",
            ):
                _ = [event async for event in answer]
        assert await generate(manager, "served", story(3), options) == versions.new
        shutil.copy(versions.before, served)
        assert await generate(manager, "served", story(3), options) == versions.old


def overwrite_and_hide(served: Path, after: Path) -> None:
    """Overwrites `served` in place with the bytes of `after`, and restores its
    modification time."""
    before = served.stat()
    shutil.copyfile(after, served)
    os.utime(served, ns=(before.st_atime_ns, before.st_mtime_ns))


def overwrite_and_link(served: Path, after: Path) -> None:
    overwrite_and_hide(served, after)
    os.link(served, served.with_suffix(".link"))


def replace_and_hide(served: Path, after: Path) -> None:
    before, other = served.stat(), served.with_suffix(".other")
    shutil.copyfile(after, other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(served)


@pytest.mark.parametrize(
    "change", [overwrite_and_hide, overwrite_and_link, replace_and_hide]
)
async def test_a_changed_file_of_equal_size_and_time_is_reloaded(
    versions: Versions, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    served, options = tmp_path / "served.gguf", versions.options
    shutil.copy(versions.before, served)
    async with running_manager(Files(served=served)) as manager:
        assert await generate(manager, "served", story(3), options) == versions.old
        change(served, versions.after)
        assert await generate(manager, "served", story(3), options) == versions.new
        # The file is renamed and renamed back, which changes its change time but not
        # its contents.
        served.rename(served.with_suffix(".gone"))
        served.with_suffix(".gone").rename(served)
        assert await generate(manager, "served", story(3), options) == versions.new


async def test_set_budget_during_answers_frees_memory_and_changes_no_text(
    files: Files,
) -> None:
    async with running_manager(files, n_ctx=512) as manager:
        expected = await generate(manager, "a", story(5, 40))
        (full,) = manager.loaded()
        slot_bytes, n_slots = full.plan.slot_bytes, full.plan.n_slots
        assert full.cache_bytes["RAM"] == n_slots * slot_bytes
        least = ExpertCache("bytes", n_bytes=(n_slots // 2 + 1) * slot_bytes - 1)
        small = await manager.set_budget("a", least)
        assert small.cache_bytes["RAM"] == n_slots // 2 * slot_bytes
        assert (
            full.size_bytes - small.size_bytes
            == full.cache_bytes["RAM"] - small.cache_bytes["RAM"]
        )
        changed = asyncio.create_task(generate(manager, "a", story(5, 40)))
        for share in ("100%", "50%", "auto", "60%"):
            await manager.set_budget("a", parse_expert_cache(share))
        assert await changed == await generate(manager, "a", story(5, 40)) == expected
        (now,) = manager.loaded()
        assert (
            now.stats.n_slots
            == now.cache_bytes["RAM"] // slot_bytes
            == int(0.6 * n_slots)
        )
        with pytest.raises(BudgetError, match="at least"):
            await manager.set_budget("a", ExpertCache("bytes", n_bytes=slot_bytes))
        assert manager.loaded()[0].size_bytes == now.size_bytes
        with pytest.raises(ModelNotFoundError, match="not loaded"):
            await manager.set_budget("b", least)


async def test_a_set_budget_survives_a_reload_for_a_longer_context(
    files: Files,
) -> None:
    async with running_manager(files, n_ctx=512) as manager:
        full = await manager.load("a", ONE_THREAD)
        small = await manager.set_budget("a", parse_expert_cache("50%"))
        again = await manager.load("a", {**ONE_THREAD, "n_ctx": 1024})
        assert (again.n_ctx, again.pid != full.pid) == (1024, True)
        (now,) = manager.loaded()
        assert (
            now.cache_bytes["RAM"]
            == small.cache_bytes["RAM"]
            < now.plan.budget_bytes
            == full.cache_bytes["RAM"]
        )
        assert await generate(manager, "a", story(5, 4))
        assert (
            manager.loaded()[0].stats.n_slots * now.plan.slot_bytes
            == small.cache_bytes["RAM"]
        )
        back = await manager.set_budget("a", parse_expert_cache("100%"))
        assert back.cache_bytes["RAM"] == full.cache_bytes["RAM"]
        await manager.set_budget("a", parse_expert_cache("50%"))
        await manager.unload("a")
        fresh = await manager.load("a", ONE_THREAD)
        assert fresh.cache_bytes["RAM"] == full.cache_bytes["RAM"]


async def test_set_budget_grows_only_into_memory_free_of_other_models(
    files: Files,
) -> None:
    # Shrinking to 40 % frees at least 38 of the 64 slots.
    shrunk_bytes = share_for(files.paths["a"], 38)
    memory_bytes = (
        sum(files.size_bytes(name, n_ctx=512)[0] for name in "ab") - shrunk_bytes // 2
    )
    async with running_manager(files, n_ctx=512, memory_bytes=memory_bytes) as manager:
        await manager.load("a", ONE_THREAD)
        await manager.set_budget("a", parse_expert_cache("40%"))
        await manager.load("b", ONE_THREAD)
        assert len(manager.loaded()) == 2
        with pytest.raises(BudgetError, match="are free for models"):
            await manager.set_budget("a", parse_expert_cache("100%"))
        await manager.unload("b")
        full = await manager.set_budget("a", parse_expert_cache("100%"))
        assert full.cache_bytes["RAM"] == full.plan.budget_bytes


async def test_less_memory_gives_fewer_slots_and_the_same_answer(files: Files) -> None:
    async with running_manager(files, n_ctx=512) as manager:
        expected = await generate(manager, "a", story(5, 40))
        everything = manager.loaded()[0]
    wanted, minimum = files.size_bytes("a", n_ctx=512)
    assert wanted == everything.size_bytes
    budget = minimum + everything.plan.n_slots // 2 * everything.plan.slot_bytes
    async with running_manager(files, n_ctx=512, memory_bytes=budget) as manager:
        assert await generate(manager, "a", story(5, 40)) == expected
        (model,) = manager.loaded()
        assert (
            model.plan.n_slots < everything.plan.n_slots
            and model.plan.total_bytes <= budget
        )
        assert model.stats.misses > 0
    async with running_manager(files, n_ctx=512, memory_bytes=minimum - 1) as manager:
        with pytest.raises(BudgetError, match=r"needs at least .*MOEGGUF_MEMORY"):
            await generate(manager, "a", story(5))


# The program of a worker process. It registers the device of the RPC server whose port
# is in its arguments. If the server has exited, the worker has no device.
WORKER = """
import socket, sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from moegguf.serving import worker
import rpc_device
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[4])), 1).close()
    rpc_device.register(Path(sys.argv[3]), int(sys.argv[4]))
except OSError:
    pass
sys.argv[1:] = sys.argv[5:]
worker.main()
"""
QUESTION = Request(prompt="once upon a time", sampling=Sampling(seed=7, max_tokens=24))
GPU = Device("RPC0", 0, 6 << 30, 8 << 30)
TESTS = Path(__file__).resolve().parents[1]


@asynccontextmanager
async def manager_with_device(
    path: Path, n_parallel: int = 1
) -> AsyncIterator[ModelManager]:
    """Yields a manager whose workers may use the device of an RPC server in another
    process."""
    with server() as (rpc, port):
        command = (
            sys.executable,
            "-P",
            "-c",
            WORKER,
            str(TESTS),
            str(TESTS / "live"),
            str(rpc),
            str(port),
        )
        settings = Settings(
            memory_bytes=4 << 30, loading={"n_ctx": 512, "n_parallel": n_parallel}
        )
        workers = Workers(command=command)
        async with ModelManager(
            Files(a=path), settings, workers=workers, devices=lambda: [GPU]
        ) as manager:
            yield manager


async def test_a_lost_device_ends_one_answer_and_the_cpu_takes_over(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "40%")
    async with manager_with_device(tiny("tiny-qwen2moe", "q4_0")) as manager:
        expected = await generate(manager, "a", QUESTION)
        (loaded,) = manager.loaded()
        plan = loaded.plan
        assert plan.device == "RPC0" and [tier.name for tier in loaded.stats.tiers] == [
            "VRAM",
            "RAM",
        ]
        assert loaded.vram_bytes == plan.total_bytes
        assert loaded.size_bytes == plan.total_bytes + plan.host_bytes
        slot_bytes, n_slots = plan.slot_bytes, plan.n_slots
        fewer = ExpertCache("bytes", n_bytes=(n_slots - 5) * slot_bytes, tier="VRAM")
        small = await manager.set_budget("a", fewer, parse_expert_cache("30%"))
        assert loaded.vram_bytes - small.vram_bytes == 5 * slot_bytes
        assert small.cache_bytes["RAM"] == int(0.3 * 64) * slot_bytes
        assert await generate(manager, "a", QUESTION) == expected
        assert [tier.n_slots for tier in manager.loaded()[0].stats.tiers] == [
            n_slots - 5,
            19,
        ]
        async with manager.lease("a", ONE_THREAD) as lease:
            answer = aiter(lease.answer(ENDLESS))
            await anext(answer)
            (device,) = multiprocessing.active_children()
            device.kill()
            with pytest.raises(
                DeviceLostError,
                match=r"a device that ran .* \(.*RPC.*without any of the devices",
            ):
                async for _ in answer:
                    pass
        assert len(await generate(manager, "a", QUESTION)) > 0
        (loaded,) = manager.loaded()
        assert loaded.plan.device is None and loaded.vram_bytes == 0
        assert [tier.name for tier in loaded.stats.tiers] == ["RAM"]
        with pytest.raises(BudgetError, match="has no slots in VRAM"):
            await manager.set_budget("a", fewer)


async def test_memory_of_whole_layers_on_a_device_is_counted(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "50%")
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "layers")
    async with manager_with_device(tiny("tiny-qwen2moe", "q4_0")) as manager:
        expected = await generate(manager, "a", QUESTION)
        (loaded,) = manager.loaded()
        plan = loaded.plan
        assert (plan.layers_on, plan.device, plan.placement.chosen.n_layers) == (
            "RPC0",
            None,
            2,
        )
        assert loaded.vram_bytes == plan.total_bytes
        assert loaded.size_bytes == plan.total_bytes + plan.host_bytes
        assert loaded.cache_bytes == {"RAM": plan.budget_bytes, "VRAM": 0}
        small = await manager.set_budget("a", parse_expert_cache("60%"))
        assert (
            small.stats.n_experts == 32
            and small.cache_bytes["RAM"] < loaded.cache_bytes["RAM"]
        )
        assert await generate(manager, "a", QUESTION) == expected
        with pytest.raises(BudgetError, match="has no slots in VRAM"):
            await manager.set_budget("a", parse_expert_cache("30%", "VRAM"))


async def test_four_concurrent_answers_share_passes_with_slots_in_vram(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VRAM_CACHE": "30%", "PLACEMENT": "slots"}.items():
        monkeypatch.setenv(f"MOEGGUF_{name}", value)
    async with manager_with_device(tiny("tiny-gpt-oss"), n_parallel=4) as manager:
        asked = [replace(QUESTION, prompt=f"once upon a time {n}") for n in range(4)]
        texts = await asyncio.gather(
            *(generate(manager, "a", question) for question in asked)
        )
        assert all(texts)
        (loaded,) = manager.loaded()
        assert loaded.plan.device == "RPC0"
        # Some passes were shared.
        assert loaded.stats.passes < sum(
            24 + len(question.prompt) for question in asked
        )


async def test_a_vram_budget_without_a_gpu_raises_budget_error(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "40%")
    async with ModelManager(
        Files(a=tiny()), Settings(loading={"n_ctx": 512}), devices=list
    ) as manager:
        with pytest.raises(BudgetError, match="sees none"):
            await manager.load("a", ONE_THREAD)
