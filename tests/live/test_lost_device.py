"""A server's models on a device: what is counted there, and one that vanishes: a typed error, and the next answer from
the CPU."""

import asyncio
import multiprocessing
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rpc_device import server
from running import TinyModel
from scripted_manager import in_loop

from moegguf.engine.devices import query_gpus
from moegguf.engine.machine import Device
from moegguf.errors import BudgetError, DeviceLostError
from moegguf.generate.request import Delta, GenerationRequest, Sampling
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.serving.events import LoadOverrides
from moegguf.serving.model_manager import ModelManager
from moegguf.serving.worker_process import device_failure
from moegguf.settings import Settings

# A worker on a machine with such a device, while it is there.
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
QUESTION = GenerationRequest(prompt="once upon a time", sampling=Sampling(seed=7, max_tokens=24))
LONG = GenerationRequest(prompt="once upon a time", sampling=Sampling(seed=7, max_tokens=400))
ONE_THREAD = LoadOverrides(n_threads=1)
GPU = Device("RPC0", 0, 6 << 30, 8 << 30)
TESTS = Path(__file__).resolve().parents[1]


class OneModel:
    """A catalog of one model, by any name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, name: str) -> ModelEntry:
        when = datetime(2026, 1, 2, tzinfo=UTC)
        return ModelEntry("a:latest", "path", (self.path,), self.path.stat().st_size, "a" * 64, when)


async def text_of(manager: ModelManager, generation: GenerationRequest) -> str:
    async with manager.lease("a", ONE_THREAD) as lease:
        return "".join([event.text async for event in lease.answer(generation) if isinstance(event, Delta)])


@asynccontextmanager
async def manager_with_device(path: Path, n_parallel: int = 1) -> AsyncIterator[ModelManager]:
    """A manager whose workers compute the model on a device in a process of its own, with MOEGGUF_VRAM_CACHE there."""
    with server() as (rpc, port):
        command = (sys.executable, "-P", "-c", WORKER, str(TESTS), str(TESTS / "live"), str(rpc), str(port))
        settings = Settings(n_ctx=512, memory_bytes=4 << 30, n_parallel=n_parallel)
        async with ModelManager(OneModel(path), settings, command=command, devices=lambda: [GPU]) as manager:
            yield manager


@in_loop
async def test_a_device_that_vanishes_costs_one_answer(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "40%")
    async with manager_with_device(tiny("tiny-qwen2moe", "q4_0")) as manager:
        expected = await text_of(manager, QUESTION)
        (loaded,) = manager.loaded()
        plan = loaded.plan
        assert plan["device"] == "RPC0" and [tier.name for tier in loaded.stats.tiers] == ["VRAM", "RAM"]
        assert loaded.vram_bytes == plan["total_bytes"]
        assert loaded.size_bytes == plan["total_bytes"] + plan["host_bytes"]
        slot_bytes, n_slots = plan["slot_bytes"], plan["n_slots"]
        fewer = ExpertCache("bytes", n_bytes=(n_slots - 5) * slot_bytes)
        small = await manager.set_budget("a", vram_cache=fewer, expert_cache=parse_expert_cache("30%"))
        assert loaded.vram_bytes - small.vram_bytes == 5 * slot_bytes
        assert small.expert_cache_bytes == int(0.3 * 64) * slot_bytes
        assert await text_of(manager, QUESTION) == expected
        assert [tier.n_slots for tier in manager.loaded()[0].stats.tiers] == [n_slots - 5, 19]
        async with manager.lease("a", ONE_THREAD) as lease:
            answer = aiter(lease.answer(LONG))
            await anext(answer)
            (device,) = multiprocessing.active_children()
            device.kill()
            with pytest.raises(DeviceLostError, match=r"the device that computed the model failed \(.*RPC.*without"):
                async for _ in answer:
                    pass
        assert len(await text_of(manager, QUESTION)) > 0
        (loaded,) = manager.loaded()
        assert loaded.plan["device"] is None and loaded.vram_bytes == 0
        assert [tier.name for tier in loaded.stats.tiers] == ["RAM"]
        with pytest.raises(BudgetError, match="has no slots in VRAM"):
            await manager.set_budget("a", vram_cache=fewer)


@in_loop
async def test_a_server_counts_whole_layers_on_a_device(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "50%")
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "layers")
    async with manager_with_device(tiny("tiny-qwen2moe", "q4_0")) as manager:
        expected = await text_of(manager, QUESTION)
        (loaded,) = manager.loaded()
        plan = loaded.plan
        assert (plan["layers_on"], plan["device"], plan["placement"]["chosen"]["n_layers"]) == ("RPC0", None, 2)
        assert loaded.vram_bytes == plan["total_bytes"]
        assert loaded.size_bytes == plan["total_bytes"] + plan["host_bytes"]
        assert (loaded.expert_cache_bytes, loaded.vram_cache_bytes) == (plan["budget_bytes"], 0)
        small = await manager.set_budget("a", expert_cache=parse_expert_cache("60%"))
        assert small.stats.n_experts == 32 and small.expert_cache_bytes < loaded.expert_cache_bytes
        assert await text_of(manager, QUESTION) == expected
        with pytest.raises(BudgetError, match="has no slots in VRAM"):
            await manager.set_budget("a", vram_cache=parse_expert_cache("30%"))


@in_loop
async def test_four_answers_at_once_from_slots(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VRAM_CACHE": "30%", "PLACEMENT": "slots"}.items():
        monkeypatch.setenv(f"MOEGGUF_{name}", value)
    async with manager_with_device(tiny("tiny-gpt-oss"), n_parallel=4) as manager:
        asked = [replace(QUESTION, prompt=f"once upon a time {n}") for n in range(4)]
        texts = await asyncio.gather(*(text_of(manager, question) for question in asked))
        assert all(texts)
        (loaded,) = manager.loaded()
        assert loaded.plan["device"] == "RPC0"
        assert loaded.stats.passes < sum(24 + len(question.prompt) for question in asked)  # some were for several


def test_a_devices_failure_is_found_in_a_log() -> None:
    log = (
        "loading\nmoegguf: the device failed: CUDA error. This process ends; run again.\n/x/ggml-cuda.cu:98: CUDA error"
    )
    assert device_failure(log) == "CUDA error"
    assert device_failure("/x/ggml.c:5: GGML_ASSERT(n > 0) failed") == ""


@in_loop
async def test_a_server_without_the_gpu_of_its_budget_says_so(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_VRAM_CACHE", "40%")
    async with ModelManager(OneModel(tiny()), Settings(n_ctx=512), devices=list) as manager:
        with pytest.raises(BudgetError, match="sees none"):
            await manager.load("a", ONE_THREAD)


def test_the_devices_of_this_machine_are_asked_in_a_process_of_their_own() -> None:
    assert all(isinstance(device, Device) for device in query_gpus())
