"""A `ModelManager` over scripted workers (fake_worker.py) and a catalog of models that
have only a size."""

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import Memory
from moegguf.engine.memory import ContextPlan
from moegguf.engine.plan import MemoryPlan, Plan
from moegguf.errors import ModelNotFoundError
from moegguf.generate.request import Delta, Request
from moegguf.models.entry import ModelEntry
from moegguf.serving.events import NO_OVERRIDES, LoadOverrides
from moegguf.serving.lease import Lease
from moegguf.serving.memory_budget import RAM, LoadConfig, ModelSize, Room
from moegguf.serving.model_manager import ModelManager
from moegguf.serving.worker_process import Workers
from moegguf.settings import Settings


async def until(condition: Callable[[], object]) -> None:
    """Waits until the condition is true."""
    while not condition():
        await asyncio.sleep(0.002)


COMMAND = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_worker.py")))
MIB = 1 << 20

EMPTY_PLAN = Plan((MemoryPlan(None, (), 0, 0),), 0, 0, 0, ContextPlan(0), 0)
"""The plan of a model without experts."""


class FakeCatalog:
    """A catalog of models such as `a:latest`. Each has a script for the worker, a
    wanted size and a minimum size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, ModelEntry] = {}
        self.sizes: dict[str, tuple[int, int]] = {}

    def add(
        self, name: str, wanted_mib: int = 100, minimum_mib: int = 100, **script: Any
    ) -> None:
        script.setdefault("log", str(self.folder / f"{name}.log"))
        path = Path(json.dumps(script))
        when = datetime(2026, 1, 2, tzinfo=UTC)
        self.entries[name] = ModelEntry(
            f"{name}:latest", "path", (path,), wanted_mib * MIB, name * 64, when
        )
        self.sizes[f"{name}:latest"] = wanted_mib * MIB, minimum_mib * MIB

    def change(self, name: str, **fields: Any) -> None:
        self.entries[name] = replace(self.entries[name], **fields)

    def find(self, name: str) -> ModelEntry:
        try:
            return self.entries[name.removesuffix(":latest")]
        except KeyError:
            raise ModelNotFoundError(
                f"there is no model named {name!r}; try 'a'."
            ) from None

    def measure(
        self,
        entry: ModelEntry,
        overrides: LoadOverrides,
        settings: Settings,
        memory: Memory,
        _gpus: Any,
    ) -> ModelSize:
        def plan(room: Room) -> Plan:
            context = ContextPlan(overrides.get("n_ctx", 4096))
            ram = MemoryPlan(None, (0,), 1, room[RAM], memory.available_bytes)
            return Plan((ram,), room[RAM], room[RAM], 1, context, 1)

        def load_config(chosen: Plan) -> LoadConfig:
            return LoadConfig(entry.name, str(entry.path), LoadSpec(), chosen)

        wanted, minimum = self.sizes[entry.name]
        return ModelSize({RAM: wanted}, {RAM: minimum}, plan, load_config, 4096)

    def loads(self, name: str) -> list[dict[str, Any]]:
        """Returns what the worker has logged about each load of a model: the fields of
        its `LoadConfig`, in load order."""
        log = self.folder / f"{name}.log"
        return (
            [json.loads(line) for line in log.read_text().splitlines()]
            if log.exists()
            else []
        )


@asynccontextmanager
async def manager_of(
    catalog: FakeCatalog, **settings: Any
) -> AsyncIterator[ModelManager]:
    """Yields a manager. Asserts afterwards that no additional process or open file is
    left."""
    children, files = len(psutil.Process().children()), n_files()
    settings.setdefault("memory_bytes", 1000 * MIB)
    workers = Workers(command=COMMAND, echo_stderr=settings.get("debug", False))
    async with ModelManager(
        catalog, Settings(**settings), workers=workers, measure=catalog.measure
    ) as manager:
        yield manager
    assert len(psutil.Process().children()) == children
    assert n_files() <= files


def n_files() -> int:
    """Counts open file descriptors after a garbage collection. Returns 0 on a system
    without /proc."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


async def answer_text(lease: Lease, prompt: str) -> str:
    """Requests the answer to a prompt. Returns the texts of its deltas, joined by
    spaces."""
    events = [event async for event in lease.answer(Request(prompt=prompt))]
    return " ".join(event.text for event in events if isinstance(event, Delta))


async def generate(
    manager: ModelManager,
    name: str,
    prompt: str,
    overrides: LoadOverrides = NO_OVERRIDES,
    **options: Any,
) -> str:
    """Acquires a model, requests an answer, and releases the model. Returns the
    text."""
    async with manager.lease(name, overrides, **options) as lease:
        return await answer_text(lease, prompt)


async def begun(manager: ModelManager, name: str, gate: Path) -> asyncio.Task[str]:
    """Begins an answer that ends when the file `gate` exists.

    Waits until a model is busy, and returns the answer's task.
    """
    task = asyncio.create_task(generate(manager, name, f"hold {gate}"))
    await until(lambda: manager.loaded() and manager.loaded()[0].busy)
    return task
