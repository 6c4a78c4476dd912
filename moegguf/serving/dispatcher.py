"""Who may use which model when: the rules, on one event loop.

Whatever changes calls `settle`, which goes over all models and does what is due: give a turn, begin a load, let an
idle model leave. It never waits; loads and ends run as tasks that settle again when they are done.

The rules. Requests of a model are answered one by one, in the order they came. A model that is not there is loaded
when there is room within the budget; idle models leave for it, least recently used first; else it takes fewer experts;
else it waits until one that is busy becomes idle. Loads wait in the order of their oldest request. Requests for loaded
models may go before a load that waits for room, for OVERTAKE_S at most. Nothing interrupts an answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from moegguf.errors import BusyError, MoeggufError, WorkerError
from moegguf.serving.loaded_model import ManagedModel, Purpose, State, Waiter
from moegguf.serving.memory_budget import Limit, LoadedModel, Measure, Size, admit
from moegguf.serving.subscribers import Subscribers
from moegguf.serving.wire import Order
from moegguf.serving.worker_process import LoadStalledError, Process
from moegguf.settings import Settings

MOST_DEATHS = 3
OVERTAKE_S = 10.0  # two models that take turns are not swapped for every request


class Dispatcher:
    """All models that are loaded or wanted, by canonical name. `command` starts a worker; `measure` says what a model
    needs."""

    def __init__(self, settings: Settings, subscribers: Subscribers, command: Sequence[str], measure: Measure) -> None:
        self.managed_models: dict[str, ManagedModel] = {}
        self._settings = settings
        self._command = command
        self._measure = measure
        self._subscribers = subscribers
        self._limit = Limit(settings)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._released = asyncio.Event()

    # What others ask for.

    async def acquire(self, waiter: Waiter) -> ManagedModel:
        """Waits until `waiter` has its model; whoever asked calls `release`. Raises BusyError, what loading raises."""
        self.check_open()
        model = self.managed_models.get(waiter.entry.name)
        n_waiting = sum(len(known.waiters) for known in self.managed_models.values())
        first = model is None or not (model.waiters or model.in_use)
        if n_waiting >= self._settings.max_queue and not first:
            raise BusyError("server busy, please try again.  maximum pending requests exceeded")
        if model is None:
            model = self.managed_models[waiter.entry.name] = ManagedModel(waiter.entry, waiter.keep_alive_s)
        model.waiters.append(waiter)
        await self._wait(model, waiter)
        return model

    async def stop(self, model: ManagedModel) -> None:
        """Lets a model leave after the answer that it is writing; returns when its process is gone."""
        waiter = Waiter(model.entry, model.load, model.keep_alive_s, Purpose.STOP)
        model.waiters.insert(0, waiter)
        await self._wait(model, waiter)

    async def _wait(self, model: ManagedModel, waiter: Waiter) -> None:
        self.settle()
        try:
            await waiter.granted
        except BaseException:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
                self.settle()
            self.release(model, waiter)  # it was granted in the moment in which its task was cancelled
            raise

    def release(self, model: ManagedModel, waiter: Waiter) -> None:
        """Gives a model back. Twice is harmless."""
        if model.holder is waiter:
            model.holder = None
        elif waiter in model.visitors:
            model.visitors.remove(waiter)
        else:
            return
        model.last_used_s = self._now()
        self._released.set()
        self.settle()

    def check_open(self) -> None:
        """Raises BusyError once it is closed."""
        if self._closed:
            raise BusyError("the server is shutting down; try again later.")

    async def close(self, grace_s: float) -> None:
        """Nobody waits any more; whoever has a model may keep it for `grace_s`; then every process is ended."""
        self._closed = True
        for model in self.managed_models.values():
            for waiter in model.waiters:
                waiter.fail(BusyError("the server is shutting down; try again later."))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(model.in_use for model in self.managed_models.values()):
                    self._released.clear()
                    await self._released.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        processes = [model.process for model in self.managed_models.values() if model.process is not None]
        await asyncio.gather(*(process.close() for process in processes))
        for model in self.managed_models.values():
            if model.expiry is not None:
                model.expiry.cancel()

    # The rules.

    def settle(self) -> None:
        """Does what is due."""
        if self._closed:
            return
        for model in self.managed_models.values():
            self._give_turns(model)
        self._begin_loads()
        for model in list(self.managed_models.values()):
            self._time_stay(model)
            if model.forgotten:
                del self.managed_models[model.name]
        self._subscribers.settle(self.managed_models.values())

    def _give_turns(self, model: ManagedModel) -> None:
        if model.state is State.ABSENT:
            for waiter in [w for w in model.waiters if w.purpose is Purpose.STOP]:
                model.waiters.remove(waiter)
                waiter.grant()
        if model.state is not State.READY:
            return
        for waiter in [w for w in model.waiters if w.purpose is Purpose.VISIT]:
            if not model.stopping and model.suits(waiter):
                model.visitors.add(waiter)
                self._grant(model, waiter)
        if not model.waiters or model.holder is not None:
            return
        first = model.waiters[0]
        if first.purpose is Purpose.STOP or not model.suits(first):
            if not model.visitors:
                self._let_go(model)
        elif not self._must_yield(first):
            model.holder = first
            self._grant(model, first)

    def _grant(self, model: ManagedModel, waiter: Waiter) -> None:
        model.waiters.remove(waiter)
        model.keep_alive_s = waiter.keep_alive_s
        model.n_requests += waiter.purpose is Purpose.TURN
        model.last_used_s = self._now()
        waiter.grant()

    def _must_yield(self, waiter: Waiter) -> bool:
        """A load has waited for room for long, and since before this request came."""
        line = self._line()
        if not line or line[0].measuring:
            return False
        oldest = line[0].oldest_waiter
        return waiter.ticket > oldest.ticket and self._now() - oldest.since_s > OVERTAKE_S

    def _line(self) -> list[ManagedModel]:
        """Models to be loaded, first one first."""
        wanted = [h for h in self.managed_models.values() if h.state is State.ABSENT and h.waiters]
        return sorted(wanted, key=lambda h: h.oldest_waiter.ticket)

    def _begin_loads(self) -> None:
        """Loads what is first in line, as long as there is room."""
        for model in self._line():
            if model.measuring:
                return
            if not model.is_measured:
                model.measuring = True
                self._spawn(self._size_up(model, model.waiters[0]))
                return
            if not self._place(model):
                return

    def _place(self, model: ManagedModel) -> bool:
        """Begins to load it, or makes room; false when it has to wait."""
        size = model.size
        assert size is not None
        others = [h for h in self.managed_models.values() if h.state is not State.ABSENT]
        others.sort(key=lambda h: h.last_used_s)
        loaded = [LoadedModel(h.name, h.size_bytes, h.idle, h.state is State.STOPPING) for h in others]
        used_bytes = sum(h.size_bytes for h in others)
        try:
            admission = admit(size, self._limit.bytes(used_bytes), loaded, self._settings.max_models, model.name)
        except MoeggufError as error:
            self._fail(model, model.waiters[0], error)
            return True
        for name in admission.leave:
            self._let_go(self.managed_models[name])
        if not admission.take_bytes:
            return False
        model.state, model.size_bytes = State.LOADING, admission.take_bytes
        self._spawn(self._load(model, model.waiters[0], size))
        return True

    def _fail(self, model: ManagedModel, tried: Waiter, error: Exception) -> None:
        """Ends those who wait for the same as `tried`; others may fare better."""
        for waiter in [w for w in model.waiters if w.asks_the_same(tried)]:
            model.waiters.remove(waiter)
            waiter.fail(error)
        model.size = None
        asyncio.get_running_loop().call_soon(self.settle)

    def _time_stay(self, model: ManagedModel) -> None:
        """Starts the time that an idle model stays, or stops it when it is not idle."""
        if not model.idle or model.waiters:
            if model.expiry is not None:
                model.expiry.cancel()
                model.expiry = None
        elif model.keep_alive_s <= 0:
            self._let_go(model)
        elif model.expiry is None and model.keep_alive_s != math.inf:
            model.expires_s = self._now() + model.keep_alive_s
            model.expiry = asyncio.get_running_loop().call_at(model.expires_s, self._let_go, model)

    # What takes time.

    async def _size_up(self, model: ManagedModel, waiter: Waiter) -> None:
        limit_bytes = self._limit.bytes(sum(h.size_bytes for h in self.managed_models.values()))
        try:
            model.size = await asyncio.to_thread(self._measure, waiter.entry, waiter.load, self._settings, limit_bytes)
            model.measured_for, model.entry, model.load = waiter, waiter.entry, waiter.load
        except (MoeggufError, OSError) as error:
            self._fail(model, waiter, error)
        finally:
            model.measuring = False
            self.settle()

    async def _load(self, model: ManagedModel, waiter: Waiter, size: Size) -> None:
        start_s = self._now()
        try:
            plan = await asyncio.to_thread(size.plan_within, model.size_bytes)
            await self._load_process(model, size.order(plan))
        except WorkerError as error:
            model.deaths += 1
            if model.deaths >= MOST_DEATHS or isinstance(error, LoadStalledError):
                self._fail(model, waiter, error)
        except (MoeggufError, OSError) as error:
            self._fail(model, waiter, error)
        else:
            model.state, model.deaths, model.n_requests = State.READY, 0, 0
            for waiting in model.waiters:
                waiting.load_s = self._now() - start_s
        finally:
            if model.state is State.LOADING:
                await self._forget_process(model)
            self.settle()

    async def _load_process(self, model: ManagedModel, order: Order) -> None:
        def on_share(share: float) -> None:
            for waiter in model.waiters:
                waiter.on_share(share)

        model.process = process = await Process.start(
            model.name, self._subscribers.take, command=self._command, echo=self._settings.debug
        )
        model.ready = await process.load(order, self._settings.load_timeout_s, on_share)
        process.on_end = lambda: self._take_end(model, process)

    def _take_end(self, model: ManagedModel, process: Process) -> None:
        """A process has ended; when nobody asked it to, its model is gone."""
        if model.process is process and model.state is State.READY:
            model.leave()
            self.settle()

    def _let_go(self, model: ManagedModel) -> None:
        """Ends the process of a model that nobody uses."""
        if model.state is State.READY:
            model.state, model.expiry = State.STOPPING, None
            self._spawn(self._end(model))

    async def _end(self, model: ManagedModel) -> None:
        await self._forget_process(model)
        self.settle()

    async def _forget_process(self, model: ManagedModel) -> None:
        process = model.process
        if process is not None:
            await process.close()
        model.leave()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
