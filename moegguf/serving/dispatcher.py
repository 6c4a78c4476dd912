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
from moegguf.serving.loaded_model import Holding, State, Waiter, Wish
from moegguf.serving.memory_budget import Limit, Measure, Size, Tenant, judge
from moegguf.serving.subscribers import Watching
from moegguf.serving.wire import Order
from moegguf.serving.worker_process import LoadStalledError, Process
from moegguf.settings import Settings

MOST_DEATHS = 3
OVERTAKE_S = 10.0  # two models that take turns are not swapped for every request


class Scheduler:
    """All models that are loaded or wanted, by canonical name. `command` starts a worker; `measure` says what a model
    needs."""

    def __init__(self, settings: Settings, watching: Watching, command: Sequence[str], measure: Measure) -> None:
        self.holdings: dict[str, Holding] = {}
        self._settings = settings
        self._command = command
        self._measure = measure
        self._watching = watching
        self._limit = Limit(settings)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._released = asyncio.Event()

    # What others ask for.

    async def acquire(self, waiter: Waiter) -> Holding:
        """Waits until `waiter` has its model; whoever asked calls `release`. Raises BusyError, what loading raises."""
        self.check_open()
        holding = self.holdings.get(waiter.entry.name)
        n_waiting = sum(len(known.waiters) for known in self.holdings.values())
        first = holding is None or not (holding.waiters or holding.in_use)
        if n_waiting >= self._settings.max_queue and not first:
            raise BusyError("server busy, please try again.  maximum pending requests exceeded")
        if holding is None:
            holding = self.holdings[waiter.entry.name] = Holding(waiter.entry, waiter.keep_alive_s)
        holding.waiters.append(waiter)
        await self._wait(holding, waiter)
        return holding

    async def stop(self, holding: Holding) -> None:
        """Lets a model leave after the answer that it is writing; returns when its process is gone."""
        waiter = Waiter(holding.entry, holding.load, holding.keep_alive_s, Wish.STOP)
        holding.waiters.insert(0, waiter)
        await self._wait(holding, waiter)

    async def _wait(self, holding: Holding, waiter: Waiter) -> None:
        self.settle()
        try:
            await waiter.granted
        except BaseException:
            if waiter in holding.waiters:
                holding.waiters.remove(waiter)
                self.settle()
            self.release(holding, waiter)  # it was granted in the moment in which its task was cancelled
            raise

    def release(self, holding: Holding, waiter: Waiter) -> None:
        """Gives a model back. Twice is harmless."""
        if holding.holder is waiter:
            holding.holder = None
        elif waiter in holding.visitors:
            holding.visitors.remove(waiter)
        else:
            return
        holding.last_used_s = self._now()
        self._released.set()
        self.settle()

    def check_open(self) -> None:
        """Raises BusyError once it is closed."""
        if self._closed:
            raise BusyError("the server is shutting down; try again later.")

    async def close(self, grace_s: float) -> None:
        """Nobody waits any more; whoever has a model may keep it for `grace_s`; then every process is ended."""
        self._closed = True
        for holding in self.holdings.values():
            for waiter in holding.waiters:
                waiter.fail(BusyError("the server is shutting down; try again later."))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(holding.in_use for holding in self.holdings.values()):
                    self._released.clear()
                    await self._released.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        processes = [holding.process for holding in self.holdings.values() if holding.process is not None]
        await asyncio.gather(*(process.close() for process in processes))
        for holding in self.holdings.values():
            if holding.expiry is not None:
                holding.expiry.cancel()

    # The rules.

    def settle(self) -> None:
        """Does what is due."""
        if self._closed:
            return
        for holding in self.holdings.values():
            self._give_turns(holding)
        self._begin_loads()
        for holding in list(self.holdings.values()):
            self._time_stay(holding)
            if holding.forgotten:
                del self.holdings[holding.name]
        self._watching.settle(self.holdings.values())

    def _give_turns(self, holding: Holding) -> None:
        if holding.state is State.ABSENT:
            for waiter in [w for w in holding.waiters if w.wish is Wish.STOP]:
                holding.waiters.remove(waiter)
                waiter.grant()
        if holding.state is not State.READY:
            return
        for waiter in [w for w in holding.waiters if w.wish is Wish.VISIT]:
            if not holding.stopping and holding.suits(waiter):
                holding.visitors.add(waiter)
                self._grant(holding, waiter)
        if not holding.waiters or holding.holder is not None:
            return
        first = holding.waiters[0]
        if first.wish is Wish.STOP or not holding.suits(first):
            if not holding.visitors:
                self._let_go(holding)
        elif not self._must_yield(first):
            holding.holder = first
            self._grant(holding, first)

    def _grant(self, holding: Holding, waiter: Waiter) -> None:
        holding.waiters.remove(waiter)
        holding.keep_alive_s = waiter.keep_alive_s
        holding.n_requests += waiter.wish is Wish.TURN
        holding.last_used_s = self._now()
        waiter.grant()

    def _must_yield(self, waiter: Waiter) -> bool:
        """A load has waited for room for long, and since before this request came."""
        line = self._line()
        if not line or line[0].measuring:
            return False
        oldest = line[0].oldest_waiter
        return waiter.ticket > oldest.ticket and self._now() - oldest.since_s > OVERTAKE_S

    def _line(self) -> list[Holding]:
        """Models to be loaded, first one first."""
        wanted = [h for h in self.holdings.values() if h.state is State.ABSENT and h.waiters]
        return sorted(wanted, key=lambda h: h.oldest_waiter.ticket)

    def _begin_loads(self) -> None:
        """Loads what is first in line, as long as there is room."""
        for holding in self._line():
            if holding.measuring:
                return
            if not holding.is_measured:
                holding.measuring = True
                self._spawn(self._size_up(holding, holding.waiters[0]))
                return
            if not self._place(holding):
                return

    def _place(self, holding: Holding) -> bool:
        """Begins to load it, or makes room; false when it has to wait."""
        size = holding.size
        assert size is not None
        others = [h for h in self.holdings.values() if h.state is not State.ABSENT]
        others.sort(key=lambda h: h.last_used_s)
        tenants = [Tenant(h.name, h.size_bytes, h.idle, h.state is State.STOPPING) for h in others]
        used_bytes = sum(h.size_bytes for h in others)
        try:
            verdict = judge(size, self._limit.bytes(used_bytes), tenants, self._settings.max_models, holding.name)
        except MoeggufError as error:
            self._fail(holding, holding.waiters[0], error)
            return True
        for name in verdict.leave:
            self._let_go(self.holdings[name])
        if not verdict.take_bytes:
            return False
        holding.state, holding.size_bytes = State.LOADING, verdict.take_bytes
        self._spawn(self._load(holding, holding.waiters[0], size))
        return True

    def _fail(self, holding: Holding, tried: Waiter, error: Exception) -> None:
        """Ends those who wait for the same as `tried`; others may fare better."""
        for waiter in [w for w in holding.waiters if w.asks_the_same(tried)]:
            holding.waiters.remove(waiter)
            waiter.fail(error)
        holding.size = None
        asyncio.get_running_loop().call_soon(self.settle)

    def _time_stay(self, holding: Holding) -> None:
        """Starts the time that an idle model stays, or stops it when it is not idle."""
        if not holding.idle or holding.waiters:
            if holding.expiry is not None:
                holding.expiry.cancel()
                holding.expiry = None
        elif holding.keep_alive_s <= 0:
            self._let_go(holding)
        elif holding.expiry is None and holding.keep_alive_s != math.inf:
            holding.expires_s = self._now() + holding.keep_alive_s
            holding.expiry = asyncio.get_running_loop().call_at(holding.expires_s, self._let_go, holding)

    # What takes time.

    async def _size_up(self, holding: Holding, waiter: Waiter) -> None:
        limit_bytes = self._limit.bytes(sum(h.size_bytes for h in self.holdings.values()))
        try:
            holding.size = await asyncio.to_thread(
                self._measure, waiter.entry, waiter.load, self._settings, limit_bytes
            )
            holding.measured_for, holding.entry, holding.load = waiter, waiter.entry, waiter.load
        except (MoeggufError, OSError) as error:
            self._fail(holding, waiter, error)
        finally:
            holding.measuring = False
            self.settle()

    async def _load(self, holding: Holding, waiter: Waiter, size: Size) -> None:
        start_s = self._now()
        try:
            plan = await asyncio.to_thread(size.plan_within, holding.size_bytes)
            await self._load_process(holding, size.order(plan))
        except WorkerError as error:
            holding.deaths += 1
            if holding.deaths >= MOST_DEATHS or isinstance(error, LoadStalledError):
                self._fail(holding, waiter, error)
        except (MoeggufError, OSError) as error:
            self._fail(holding, waiter, error)
        else:
            holding.state, holding.deaths, holding.n_requests = State.READY, 0, 0
            for waiting in holding.waiters:
                waiting.load_s = self._now() - start_s
        finally:
            if holding.state is State.LOADING:
                await self._forget_process(holding)
            self.settle()

    async def _load_process(self, holding: Holding, order: Order) -> None:
        def on_share(share: float) -> None:
            for waiter in holding.waiters:
                waiter.on_share(share)

        holding.process = process = await Process.start(
            holding.name, self._watching.take, command=self._command, echo=self._settings.debug
        )
        holding.ready = await process.load(order, self._settings.load_timeout_s, on_share)
        process.on_end = lambda: self._take_end(holding, process)

    def _take_end(self, holding: Holding, process: Process) -> None:
        """A process has ended; when nobody asked it to, its model is gone."""
        if holding.process is process and holding.state is State.READY:
            holding.leave()
            self.settle()

    def _let_go(self, holding: Holding) -> None:
        """Ends the process of a model that nobody uses."""
        if holding.state is State.READY:
            holding.state, holding.expiry = State.STOPPING, None
            self._spawn(self._end(holding))

    async def _end(self, holding: Holding) -> None:
        await self._forget_process(holding)
        self.settle()

    async def _forget_process(self, holding: Holding) -> None:
        process = holding.process
        if process is not None:
            await process.close()
        holding.leave()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
