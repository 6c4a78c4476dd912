"""A `ModelManager` without processes: scripted answers, and a real HTTP server over it
in this process.

`FakeManager` has the methods of `ModelManager` that the server calls. A test sets its
answers, errors and waits, and reads the recorded requests. `server_of(manager)` serves
a manager on a free loopback port, and `running(app)` does the same for any ASGI
application.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvicorn
import uvicorn.server
from scripted_manager import EMPTY_PLAN
from starlette.applications import Starlette
from starlette.types import ASGIApp

from moegguf.engine.stats import Stats
from moegguf.errors import ModelNotFoundError
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    Embeddings,
    Event,
    PromptProgress,
    Request,
)
from moegguf.models.catalog import demo_path
from moegguf.models.entry import ModelEntry
from moegguf.server.app import make_app
from moegguf.server.serve import Protocol, QuietServer, listen
from moegguf.serving.events import (
    NO_OVERRIDES,
    LoadedModel,
    LoadedName,
    LoadOverrides,
    Snapshot,
)
from moegguf.settings import Host, Settings

HUB = "hf.co/user/repo-GGUF:Q4_K_M"
HI: Any = [{"role": "user", "content": "hi"}]
FUNCTIONS: Any = [
    {"name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("weather", "clock")
]
# A chat template that renders tools, calls and thinking.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}"
    "</tool_call>{% endfor %}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)
STATS = Stats(
    tokens=3,
    lookups=10,
    hits_ready=6,
    hits_late=1,
    misses=3,
    bytes_missed=3000,
    stall_s=0.5,
    eval_s=1.0,
)
TIMING = AnswerSummary(
    prompt_tokens=5, cached_tokens=2, answer_tokens=3, prompt_s=0.25, answer_s=0.5, total_s=0.75, stats=STATS,
    answer_stats=STATS, context=(1, 2, 3),
)  # fmt: skip


def entry_of(path: Path, name: str = "demo:latest", **changes: Any) -> ModelEntry:
    """Returns the catalog entry of an existing file, so that the server can read the
    file's header."""
    modified = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return ModelEntry(
        name, "demo", (path,), path.stat().st_size, "ab" * 32, modified, **changes
    )


class FakeCatalog:
    """A catalog of a few entries, with only the methods `find` and `entries`."""

    def __init__(self, *entries: ModelEntry) -> None:
        self.known = {entry.name: entry for entry in entries}

    def entries(self, prefix: str = "") -> list[ModelEntry]:
        return [entry for name, entry in self.known.items() if name.startswith(prefix)]

    def find(self, name: str, *, even_missing: bool = False) -> ModelEntry:
        found = self.known.get(name) or self.known.get(f"{name}:latest")
        if found is None:
            raise ModelNotFoundError(f"there is no model named {name!r}.")
        return found


@dataclass
class FakeLease:
    """A lease whose `answer` yields the items of the manager's `script`.

    Exceptions in the script are raised instead, and asyncio events are awaited.
    """

    manager: FakeManager
    entry: ModelEntry
    load_s: float = 0.125

    async def answer(
        self, request: Request, *, stream: bool = True
    ) -> AsyncIterator[Event]:
        self.manager.requests.append(request)
        self.manager.n_running += 1
        try:
            for step in self.manager.script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    await asyncio.sleep(0)
                    yield step
            yield replace(self.manager.summary, load_s=self.load_s)
        finally:
            self.manager.n_running -= 1
            self.manager.n_ended += 1

    async def value(self, kind: str, **fields: Any) -> Any:
        manager = self.manager
        match kind:
            case "count" | "render":
                manager.requests.append(fields["request"])
                return {"count": 42, "render": "rendered"}[kind]
            case "embed":
                inputs = list(fields["inputs"])
                options = (fields["truncate"], fields.get("normalize", True))
                manager.embedded.append((inputs, *options))
                manager.num_ctx = fields["num_ctx"]
                vectors = np.array([[0.6, 0.8, 0.0]] * len(inputs), np.float32)
                return Embeddings(vectors=vectors, n_tokens=4 * len(inputs))
            case "rank":
                n_query, documents = len(fields["query"]), fields["documents"]
                scores = [[n_query + 0.5 * len(each)] for each in documents]
                return Embeddings(scores, n_tokens=4 * len(documents))
            case "tokenize":
                added = fields.get("add_special", False)
                return [*[1] * added, *fields["text"].encode(), *[2] * added]
            case "detokenize":
                return "".join(
                    each if isinstance(each, str) else chr(each % 128)
                    for each in fields["prompt"]
                )
            case "slot":
                action, slot, owner = map(fields.pop, ("action", "slot", "owner"))
                manager.slots.append((action, slot, owner, fields))
                return {
                    "save": {"n_saved": 5, "n_written": 99},
                    "restore": {"n_restored": 5},
                    "erase": {"n_erased": 5},
                }[action]
        raise ValueError(kind)

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [bytes([token % 256]) for token in tokens]


class FakeManager:
    """A scripted manager. The module docstring describes it. If `enter_error` is set,
    it is raised when a lease is entered."""

    def __init__(self, catalog: FakeCatalog, script: Sequence[Any] = ()) -> None:
        self.catalog = catalog
        self.script: Sequence[Any] = script or (
            PromptProgress(5, 2, 5, 0.25),
            Delta(text="Hel"),
            Delta(text="lo"),
        )
        self.summary = TIMING
        self.enter_error: Exception | None = None
        self.requests: list[Request] = []
        self.leases: list[tuple[str, LoadOverrides, float | None, bool]] = []
        self.embedded: list[tuple[list[Any], bool, bool]] = []
        # The calls that act on KV slots, in order.
        self.slots: list[tuple[str, int, str, dict[str, Any]]] = []
        # The option num_ctx of the last call of embed().
        self.num_ctx: int | None = None
        self.there: dict[str, ModelEntry] = {}
        # The snapshot of each model's experts, with counts since the model was loaded.
        self.now: dict[str, Snapshot] = {}
        # {model: the loaded fraction, from 0 to 1}, for models that are being loaded.
        self.shares: dict[str, float] = {}
        self.n_running = 0
        self.n_ended = 0

    async def __aenter__(self) -> FakeManager:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @asynccontextmanager
    async def lease(
        self,
        model: str | ModelEntry,
        overrides: LoadOverrides = NO_OVERRIDES,
        keep_alive_s: float | None = None,
        *,
        will_answer: bool = True,
    ) -> AsyncIterator[FakeLease]:
        entry = self.catalog.find(model) if isinstance(model, str) else model
        self.leases.append((entry.name, overrides, keep_alive_s, will_answer))
        if self.enter_error:
            raise self.enter_error
        self.there[entry.name] = entry
        try:
            yield FakeLease(self, entry)
        finally:
            if keep_alive_s == 0:
                self.there.pop(entry.name, None)

    async def load(
        self,
        name: str,
        overrides: LoadOverrides = NO_OVERRIDES,
        keep_alive_s: float | None = None,
    ) -> LoadedModel:
        async with self.lease(
            name, overrides, keep_alive_s, will_answer=False
        ) as lease:
            return self.status(lease.entry)

    async def unload(self, name: str) -> bool:
        return self.there.pop(self.catalog.find(name).name, None) is not None

    def status(self, entry: ModelEntry) -> LoadedModel:
        expires = datetime.now(UTC) + timedelta(seconds=300)
        names = (LoadedName(entry.name, entry.digest, expires),)
        return LoadedModel(
            entry.name,
            entry.digest,
            1234,
            4096,
            10_000,
            0,
            expires,
            False,
            False,
            0,
            1,
            STATS,
            EMPTY_PLAN,
            names=names,
        )

    def loaded(self) -> list[LoadedModel]:
        return [self.status(entry) for entry in self.there.values()]

    def loading(self) -> dict[str, float]:
        return self.shares

    async def snapshots(
        self, entry: ModelEntry | None, watch_s: float
    ) -> list[Snapshot]:
        return [
            snapshot
            for name, snapshot in self.now.items()
            if entry is None or entry.name == name
        ]


def added(earlier: Snapshot | None, later: Snapshot) -> Snapshot:
    """Returns the snapshot `later` with the counts of `earlier` added to its own
    counts.

    The counts in `later` have 8 bits each; the counts in `earlier` and in the result
    have 32. earlier: None if `later` is the first snapshot.
    """
    counts = {}
    for name in ("uses", "loads"):
        counts[name] = np.frombuffer(getattr(later, name), np.uint8).astype(np.uint32)
        if earlier is not None:
            counts[name] += np.frombuffer(getattr(earlier, name), np.uint32)
    return replace(
        later, uses=counts["uses"].tobytes(), loads=counts["loads"].tobytes()
    )


SNAPSHOT = Snapshot(
    model="demo:latest", layers=(0, 2), n_expert=3, state=bytes([2, 0, 1, 2, 2, 0]), uses=bytes([3, 0, 0, 255, 1, 0]),
    loads=bytes([1, 0, 0, 0, 0, 0]), stats=Stats(tokens=7, lookups=10, hits_ready=9, misses=1), busy=True,
    seconds=4.0, answer_tokens=7,
)  # fmt: skip


class FedManager(FakeManager):
    """A manager whose snapshots a test passes to `send`. `n_asked` counts the calls to
    `snapshots`."""

    def __init__(self, *names: str) -> None:
        super().__init__(
            FakeCatalog(
                *(entry_of(demo_path(), name) for name in names or ("demo:latest",))
            )
        )
        self.n_asked = 0

    async def snapshots(
        self, entry: ModelEntry | None, watch_s: float
    ) -> list[Snapshot]:
        self.n_asked += 1
        return await super().snapshots(entry, watch_s)

    def send(self, snapshot: Snapshot) -> None:
        self.now[snapshot.model] = added(self.now.get(snapshot.model), snapshot)

    def put_in_memory(self, name: str = "demo:latest") -> None:
        self.there[name] = self.catalog.find(name)


class BusyManager(FakeManager):
    """A manager with one model that never stops generating. Each snapshot has one more
    token than the previous one, and a hit rate of 0.9.
    """

    def __init__(self) -> None:
        super().__init__(FakeCatalog(entry_of(demo_path())))
        self.there["demo:latest"] = self.catalog.find("demo")

    async def snapshots(
        self, entry: ModelEntry | None, watch_s: float
    ) -> list[Snapshot]:
        before = self.now.get("demo:latest")
        n = before.stats.tokens + 1 if before else 1
        stats = Stats(tokens=n, lookups=10 * n, hits_ready=9 * n, misses=n)
        self.now["demo:latest"] = added(
            before, replace(SNAPSHOT, stats=stats, seconds=n / 12.5, answer_tokens=n)
        )
        return await super().snapshots(entry, watch_s)


def objects(text: str) -> list[dict[str, Any]]:
    """Returns the JSON objects of a stream in the form of JSON Lines or server-sent
    events."""
    lines = [
        line.removeprefix("data: ")
        for line in text.splitlines()
        if line.startswith(("data: {", "{"))
    ]
    return [json.loads(line) for line in lines]


class ShortSleeps:
    """The module `asyncio` with a `sleep` of at most 5 ms.

    uvicorn notices the end of a server, and of the server's connections, after sleeping
    for 0.1 seconds. In the tests here, these sleeps would take longer than the
    requests.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


uvicorn.server.asyncio = ShortSleeps()  # type: ignore[attr-defined]


@contextmanager
def running(app: ASGIApp) -> Iterator[str]:
    """Yields the URL of `app`. A thread of this process serves it until the `with`
    block ends."""
    options: Any = {
        "log_config": None,
        "lifespan": "on",
        "proxy_headers": False,
        "timeout_graceful_shutdown": 1,
    }
    config = uvicorn.Config(app, http=Protocol, **options)
    listener, started = listen(Host(port=0)), threading.Event()

    # When the server shuts down, streams send their last event even if a page is still
    # reading them, as in the real server.
    def on_end() -> None:
        if isinstance(app, Starlette) and hasattr(app.state, "ending"):
            app.state.ending.set()

    server = QuietServer(config, listener, started.set, on_end)
    server.capture_signals = nullcontext  # type: ignore[method-assign]  # the server does not run on the main thread
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def server_of(manager: FakeManager, **settings: Any) -> AbstractContextManager[str]:
    """Returns a context manager that runs a server over `manager` in this process, and
    yields the server's URL.

    `settings` are fields of `Settings`. By default, the server stores no responses.
    """
    made = Settings(**{"responses_age_s": 0.0, **settings})
    return running(make_app(cast(Any, manager), cast(Any, manager.catalog), made))


def changed(summary: AnswerSummary = TIMING, **changes: Any) -> AnswerSummary:
    """Returns the summary with these fields replaced."""
    return replace(summary, **changes)
