"""A pool without processes: scripted answers, and a real HTTP server over it in this process.

`FakePool` has the calls of `moegguf.serving.manager.Pool`; what it says is set beforehand, faults and waits included,
and what it was asked is kept. `running(app)` serves any ASGI application on a free port of loopback.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from moegguf.engine.stats import Stats
from moegguf.errors import ModelNotFoundError
from moegguf.generate.embedding import Embeddings
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing
from moegguf.models.entry import ModelEntry
from moegguf.server.common.transport import Protocol
from moegguf.serving.events import Done, Event, Loaded, LoadOptions, Snapshot

STATS = Stats(tokens=3, lookups=10, hits_ready=6, hits_late=1, misses=3, bytes_missed=3000, stall_s=0.5, eval_s=1.0)
TIMING = Timing(
    prompt_tokens=5, cached_tokens=2, answer_tokens=3, prompt_s=0.25, answer_s=0.5, total_s=0.75, stats=STATS,
    answer_stats=STATS, context=(1, 2, 3),
)  # fmt: skip


def entry_of(path: Path, name: str = "demo:latest", **changes: Any) -> ModelEntry:
    """An entry for a real file, so that its headers can be read."""
    modified = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return ModelEntry(name, "demo", (path,), path.stat().st_size, "ab" * 32, modified, **changes)


class FakeCatalog:
    """`find` and `entries` over a few entries."""

    def __init__(self, *entries: ModelEntry) -> None:
        self.known = {entry.name: entry for entry in entries}

    def entries(self, prefix: str = "") -> list[ModelEntry]:
        return [entry for name, entry in self.known.items() if name.startswith(prefix)]

    def find(self, name: str) -> ModelEntry:
        found = self.known.get(name) or self.known.get(f"{name}:latest")
        if found is None:
            raise ModelNotFoundError(f"there is no model named {name!r}.")
        return found


@dataclass
class FakeLease:
    """`script`: what `answer` yields; an exception in it is raised, an `asyncio.Event` waited for."""

    pool: FakePool
    entry: ModelEntry
    load_s: float = 0.125
    loaded: Loaded = field(init=False)

    def __post_init__(self) -> None:
        self.loaded = self.pool.figures(self.entry)

    async def answer(self, ask: GenerationRequest, *, stream: bool = True) -> AsyncIterator[Event]:
        self.pool.asks.append(ask)
        self.pool.n_running += 1
        try:
            for step in self.pool.script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    await asyncio.sleep(0)
                    yield step
            yield Done(self.pool.timing, self.load_s)
        finally:
            self.pool.n_running -= 1
            self.pool.n_ended += 1

    async def embed(self, inputs: Sequence[Any], *, truncate: bool = True, normalize: bool = True) -> Embeddings:
        self.pool.embedded.append((list(inputs), truncate, normalize))
        import numpy as np

        return Embeddings(vectors=np.array([[0.6, 0.8, 0.0]] * len(inputs), np.float32), n_tokens=4 * len(inputs))

    async def tokenize(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


class FakePool:
    """See the module. `entering` is raised instead of giving a lease."""

    def __init__(self, catalog: FakeCatalog, script: Sequence[Any] = ()) -> None:
        self.catalog = catalog
        self.script: Sequence[Any] = script or (PromptProgress(5, 2, 5, 0.25), Delta(text="Hel"), Delta(text="lo"))
        self.timing = TIMING
        self.entering: Exception | None = None
        self.asks: list[GenerationRequest] = []
        self.leases: list[tuple[str, LoadOptions, float | None, bool]] = []
        self.embedded: list[tuple[list[Any], bool, bool]] = []
        self.there: dict[str, ModelEntry] = {}
        self.views: list[Snapshot] = []
        self.n_running = 0
        self.n_ended = 0

    async def __aenter__(self) -> FakePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @asynccontextmanager
    async def lease(
        self,
        model: str | ModelEntry,
        load: LoadOptions = LoadOptions(),
        keep_alive_s: float | None = None,
        *,
        will_answer: bool = True,
        on_share: Any = None,
    ) -> AsyncIterator[FakeLease]:
        entry = self.catalog.find(model) if isinstance(model, str) else model
        self.leases.append((entry.name, load, keep_alive_s, will_answer))
        if self.entering:
            raise self.entering
        self.there[entry.name] = entry
        yield FakeLease(self, entry)
        if keep_alive_s == 0:
            self.there.pop(entry.name, None)

    async def load(
        self, name: str, load: LoadOptions = LoadOptions(), keep_alive_s: float | None = None, *, on_share: Any = None
    ) -> Loaded:
        async with self.lease(name, load, keep_alive_s, will_answer=False) as lease:
            return lease.loaded

    async def unload(self, name: str) -> bool:
        return self.there.pop(self.catalog.find(name).name, None) is not None

    def figures(self, entry: ModelEntry) -> Loaded:
        expires = datetime.now(UTC) + timedelta(seconds=300)
        return Loaded(entry.name, entry.digest, 1234, 4096, 10_000, 0, expires, False, False, 0, 1, STATS)

    def loaded(self) -> list[Loaded]:
        return [self.figures(entry) for entry in self.there.values()]

    async def watch(self, name: str | None = None, per_s: float = 4.0) -> AsyncIterator[Snapshot]:
        for view in self.views:
            yield view


@contextmanager
def running(app: ASGIApp) -> Iterator[str]:
    """The URL of `app`, served by a thread of this process; it has stopped afterwards."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=Protocol, log_config=None, lifespan="on", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="test-server")
    started = threading.Event()
    startup = server.startup

    async def startup_told(sockets: Any = None) -> None:
        try:
            await startup(sockets)
        finally:
            started.set()

    server.startup = startup_told  # type: ignore[method-assign]
    thread.start()
    try:
        assert started.wait(30) and server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        with suppress(RuntimeError):
            thread.join(30)


def changed(timing: Timing = TIMING, **changes: Any) -> Timing:
    """`timing` with other figures."""
    return dataclasses.replace(timing, **changes)
