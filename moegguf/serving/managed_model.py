"""The files of a model as the manager has them: the names that use them, waiting and current requests, expiry,
memory, worker process.

State only: nothing here starts, awaits or ends anything; model_manager.py decides.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from moegguf.engine.budgets import DEFAULT_UBATCH_TOKENS
from moegguf.gguf.reader import FileVersion
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache
from moegguf.serving.clients import current_client
from moegguf.serving.events import LoadedModel, LoadedName, LoadOverrides
from moegguf.serving.memory_budget import ModelSize
from moegguf.serving.wire import Ready
from moegguf.serving.worker_process import WorkerProcess

MOST_CLIENTS = 1024  # of one turn: who comes later is of the next


class Turns:
    """The turns of clients in one queue: who sends many requests at once does not hold up who sends one.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996) with requests of equal cost: a request's turn is one after the
    last of its client, or the turn that is being served where that is later. Requests are served by turn, within a turn
    in order of arrival, so that nobody waits for more than one request of each other client per request of its own. The
    clients that were served in the present turn are remembered.
    """

    def __init__(self) -> None:
        self._served = 0
        self._in_turn: set[str] = set()

    def take(self, client: str, last: int | None) -> int:
        """The turn of a request that has just arrived. last: the last turn of the client's requests that still wait;
        None: there is none. So requests that were cancelled while they waited cost no turns."""
        least = self._served + (client in self._in_turn)
        return least if last is None else max(least, last + 1)

    def serve(self, client: str, turn: int) -> None:
        """A request of this client and turn is served."""
        if turn > self._served:
            self._served = turn
            self._in_turn.clear()
        if turn == self._served:
            self._in_turn.add(client)
        if len(self._in_turn) > MOST_CLIENTS:
            self._served += 1
            self._in_turn.clear()


_tickets = itertools.count(1)


class State(Enum):
    """The state of a model's process."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(eq=False)
class Waiter:
    """A request that waits for a model and, once granted, uses it; or one for its end. `overrides`: of the request;
    once it waits with the entry's own parameters, and those of the last request of its name. `keep_alive_s`: from
    `last_used_s` on; then its name gives the model up, if this was the last request. `will_answer`: it generates, of
    which a model does a number at once; else it uses the model beside that. `ticket`: order of arrival over all models;
    `turn`: of its `client` among others that wait for the model (`Turns`)."""

    entry: ModelEntry
    overrides: LoadOverrides
    keep_alive_s: float
    will_answer: bool = True
    ticket: int = field(default_factory=_tickets.__next__)
    since_s: float = field(default_factory=time.monotonic)
    client: str = field(default_factory=current_client.get)
    turn: int = 0
    load_s: float = 0.0  # duration of the load that it waited for
    last_used_s: float = 0.0  # the event loop's clock
    granted: asyncio.Future[Any] = field(default_factory=asyncio.Future)

    @property
    def name(self) -> str:
        """The canonical name that was asked for."""
        return self.entry.name

    def end(self, error: Exception | None = None) -> None:
        """Ends the wait, with `error` where there is one."""
        if not self.granted.done():
            if error is None:
                self.granted.set_result(None)
            else:
                self.granted.set_exception(error)

    def same_load(self, other: Waiter) -> bool:
        """Whether both need the same files with the same overrides."""
        return self.overrides == other.overrides and self.entry.weights == other.entry.weights


def files_key(entry: ModelEntry) -> str:
    """Equal for entries of the same files."""
    return "\0".join(map(str, entry.all_files))


def process_key(entry: ModelEntry, overrides: LoadOverrides) -> str:
    """Equal for requests that share a process: those of the same files and load options, but for the context, of which
    a longer one serves all."""
    n_batch = overrides.n_batch or DEFAULT_UBATCH_TOKENS
    return f"{files_key(entry)}\0{overrides.n_threads}\0{n_batch}\0{overrides.expert_cache}\0{overrides.draft}"


class ManagedModel:
    """Files that are loaded, or that a request waits for. `key`: what identifies it (`process_key`); `entry`: the one
    that it was last measured for; `uses`: the names that use it while it is loaded, in order of their first request,
    each with its last one."""

    def __init__(self, key: str, entry: ModelEntry) -> None:
        self.key = key
        self.entry = entry
        self.files: tuple[FileVersion, ...] = ()  # as they were when it was measured
        self.overwritten = False  # one of them, since then
        self.uses: dict[str, Waiter] = {}
        self.state = State.ABSENT
        self.waiters: list[Waiter] = []  # in the order in which they are served
        self.unloads: list[Waiter] = []  # who wait until their name has given it up
        self._turns = Turns()
        self.users: set[Waiter] = set()  # who were granted and have not ended
        self.expiry: asyncio.TimerHandle | None = None
        self.process: WorkerProcess | None = None
        self.overrides = LoadOverrides()  # of the waiter that it was loaded for
        self.ready = Ready(n_ctx=0)
        self.default_n_ctx = 0  # of a load without overrides
        self.measured: tuple[Waiter, ModelSize] | None = None  # for the load of that request
        self.measuring = False
        self.size_bytes = 0  # reserved from the decision to load until the process has ended
        self.expert_cache_bytes = 0  # of them, for slots that are in use
        self.device: str | None = None  # that computes it; None: the CPU
        self.device_bytes = 0  # reserved there, likewise
        self.vram_cache_bytes = 0
        self.changing_budget = False
        self.asked_budgets: dict[str, ExpertCache] = {}  # while it is loaded, by name of the field; a reload keeps them
        self.last_used_s = 0.0
        self.n_requests = 0
        self.n_crashed_loads = 0  # in succession

    @property
    def name(self) -> str:
        """The first of the names that use it; of a model that is not loaded, the one it was measured for."""
        return next(iter(self.uses), self.entry.name)

    def wait(self, waiter: Waiter) -> None:
        """Adds a waiter, behind those of its turn and of turns before."""
        own = [known for known in self.waiters if known.client == waiter.client and known.will_answer]
        waiter.turn = self._turns.take(waiter.client, max((known.turn for known in own), default=None))
        insort(self.waiters, waiter, key=lambda known: (known.turn, known.ticket))

    def grant(self, waiter: Waiter) -> None:
        """Ends the wait of a waiter, who uses the model from now on."""
        self.waiters.remove(waiter)
        self.users.add(waiter)
        self.n_requests += waiter.will_answer
        if waiter.will_answer:  # others are granted beside it
            self._turns.serve(waiter.client, waiter.turn)
        waiter.end()

    def expires_s(self, name: str) -> float:
        """When `name` gives the model up (the event loop's clock); inf while requests of that name use it or wait."""
        if any(waiter.name == name for waiter in (*self.waiters, *self.users)):
            return math.inf
        return self.uses[name].last_used_s + self.uses[name].keep_alive_s

    def has_others(self, name: str) -> bool:
        """Whether other names than `name` use it, or wait for it."""
        return bool(({waiter.name for waiter in self.waiters} | self.uses.keys()) - {name})

    @property
    def answering(self) -> list[Waiter]:
        """Who have an answer computed."""
        return [waiter for waiter in self.users if waiter.will_answer]

    @property
    def has_room(self) -> bool:
        """Whether one more request would be answered at once, if none waits."""
        return len(self.answering) < self.ready.n_parallel if self.state is State.READY else not self.users

    @property
    def idle(self) -> bool:
        """Whether it is loaded and unused."""
        return self.state is State.READY and not self.users

    @property
    def oldest_waiter(self) -> Waiter:
        """The waiter that arrived first. Raises ValueError without waiters."""
        return min(self.waiters, key=lambda waiter: waiter.ticket)

    @property
    def stopping(self) -> bool:
        """Whether it is being unloaded, or will be once it is unused."""
        return self.state is State.STOPPING or any(not self.has_others(waiter.name) for waiter in self.unloads)

    def reset(self) -> None:
        """The process has ended: frees the reservation."""
        self.state, self.process, self.measured, self.size_bytes = State.ABSENT, None, None, 0
        self.device, self.device_bytes = None, 0
        self.uses = {}

    def grow(self, n_bytes: Mapping[str, int]) -> None:
        """Counts so much more for slots: "expert_cache_bytes" in RAM, "vram_cache_bytes" on the device."""
        self.expert_cache_bytes += n_bytes.get("expert_cache_bytes", 0)
        self.size_bytes += n_bytes.get("expert_cache_bytes", 0)
        self.vram_cache_bytes += n_bytes.get("vram_cache_bytes", 0)
        self.device_bytes += n_bytes.get("vram_cache_bytes", 0)

    def serves(self, waiter: Waiter) -> bool:
        """Whether the loaded model has the content and context that `waiter` needs; else it is loaded again.

        A longer context serves a request for a shorter one: the tokens are the same, and a reload would lose what is
        cached.
        """
        if waiter.entry.weights != self.entry.weights or self.overwritten:
            return False
        if (n_ctx := waiter.overrides.n_ctx) is None:
            return self.overrides.n_ctx is None or self.ready.n_ctx >= self.default_n_ctx
        # A context longer than the model's own was cut: a request for the same length needs no reload.
        return n_ctx <= max(self.ready.n_ctx, self.overrides.n_ctx or 0)

    def look_at_files(self) -> None:
        """Notes whether one was written to since the model was measured: its content may be neither old nor new."""
        self.overwritten = any(file.is_overwritten() for file in self.files)

    def status(self, loop_time_s: float) -> LoadedModel:
        """Its current state and statistics, as last reported by its process. It must be loaded."""
        process, now = self.process, datetime.now(UTC)
        assert process is not None
        names = list[LoadedName]()
        for name, use in self.uses.items():
            left_s = min(use.keep_alive_s, self.expires_s(name) - loop_time_s)
            expires = None if left_s == math.inf else now + timedelta(seconds=max(0.0, left_s))
            names.append(LoadedName(name, use.entry.digest, expires))
        times = [each.expires for each in names if each.expires is not None]
        return LoadedModel(
            name=self.name,
            names=tuple(names),
            digest=names[0].digest if names else self.entry.digest,
            pid=process.pid,
            n_ctx=self.ready.n_ctx,
            size_bytes=self.size_bytes + self.device_bytes,
            vram_bytes=self.device_bytes,
            expires=max(times, default=now) if len(times) == len(names) else None,
            busy=bool(self.answering),
            stopping=self.stopping,
            queue=len(self.waiters),
            n_requests=self.n_requests,
            stats=process.stats,
            plan=self.ready.plan,
            decisions=process.decisions,
            expert_cache_bytes=self.expert_cache_bytes,
            vram_cache_bytes=self.vram_cache_bytes,
            n_parallel=self.ready.n_parallel,
            n_answering=len(self.answering),
            last_answer_tokens=process.last_timing.answer_tokens,
            last_answer_s=process.last_timing.answer_s,
        )
