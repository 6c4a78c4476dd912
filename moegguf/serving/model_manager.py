"""The loaded models by name, and which request uses which of them: queues, loads, unloads, expiry. On one event loop.

Every change calls `_dispatch`, which visits all models and starts what is due: grants a request, starts a load, unloads
an idle model. It never waits; loads and unloads run as tasks that call `_dispatch` at their end.

Rules. Names of the same files and load options share a process; an option that a request leaves out is that of the
last request of its name, and a request for a longer context loads the model again. Requests of a model are granted in
turns between clients (`Turns`), of each in order of arrival, as many at once as its process answers together. A full
queue is divided evenly between the clients that need it. A model that is not loaded is loaded when it fits the memory
budget; idle models are unloaded for it, least recently used first; else it gets fewer expert slots; else it waits until
a busy model is idle. A device's memory is counted apart, and a device that has failed is not used again. Loads start in
the order of their oldest request. Requests for loaded models may overtake a load that waits for memory, for OVERTAKE_S
at most. A running answer is never interrupted. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from moegguf.engine.devices import has_gpu, query_gpus
from moegguf.engine.machine import Device
from moegguf.errors import (
    BudgetError,
    BusyError,
    DeviceLostError,
    ModelNotFoundError,
    MoeggufError,
    OptionError,
    WorkerError,
)  # fmt: skip
from moegguf.gguf.reader import FileVersion
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, format_bytes
from moegguf.serving import memory_budget
from moegguf.serving.events import LoadedModel, LoadOverrides, Snapshot
from moegguf.serving.lease import Lease, ManagedModel, State, Waiter, files_key, process_key
from moegguf.serving.wire import build
from moegguf.serving.worker_process import COMMAND, LoadStalledError, WorkerProcess
from moegguf.settings import Settings, read_environment

MAX_CRASHED_LOADS = 3
OVERTAKE_S = 10.0  # so that requests that alternate between two models do not swap them every time
SHUTDOWN_GRACE_S = 5.0


@dataclass(eq=False)
class ModelManager:
    """Models by name, each in its own process: `async with ModelManager(catalog, settings) as manager`.

    Leaving the block gives running answers SHUTDOWN_GRACE_S to finish, then ends every process. All calls belong to
    the event loop that entered it. `command` starts a worker; `measure` computes the memory that a model needs;
    `devices` are the GPUs of this machine now.
    """

    catalog: Catalog
    settings: Settings
    _: KW_ONLY
    command: Sequence[str] = COMMAND
    measure: Callable[..., memory_budget.ModelSize] = memory_budget.measure
    devices: Callable[[], list[Device]] = query_gpus

    def __post_init__(self) -> None:
        self._models: dict[str, ManagedModel] = {}  # loaded or requested, by `process_key`
        self.kept: set[str] = set()  # names whose models stay loaded where a request does not say how long
        self._limits = memory_budget.MemoryLimits(self.settings)
        self._tasks: set[asyncio.Task[None]] = set()
        self._spare: asyncio.Task[WorkerProcess] | None = None  # a process without a model
        self._closed = False
        self._released = asyncio.Event()

    async def __aenter__(self) -> ModelManager:
        self._prepare_process()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                while any(model.users for model in self._models.values()):
                    self._released.clear()
                    await self._released.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        processes = [model.process for model in self._models.values() if model.process is not None]
        if self._spare is not None:
            with suppress(WorkerError, OptionError):
                processes.append(await self._spare)
        await asyncio.gather(*(process.close() for process in processes))
        for model in self._models.values():
            if model.expiry is not None:
                model.expiry.cancel()

    def refuse(self) -> None:
        """Refuses requests from now on, also those that wait; running answers go on."""
        self._closed = True
        for model in self._models.values():
            for waiter in (*model.waiters, *model.unloads):
                waiter.end(_shutting_down())

    def lease(
        self,
        name: str | ModelEntry,
        overrides: LoadOverrides = LoadOverrides(),
        keep_alive_s: float | None = None,
        *,
        will_answer: bool = True,
    ) -> Lease:
        """The use of a model, inside `async with`: loads it if needed and waits in its queue.

        `name`: a name, or its catalog entry. `keep_alive_s`: how long an idle model stays loaded afterwards; None: the
        setting, 0: not at all, inf: for ever. With `will_answer=False` the lease does not wait for answers of other
        requests, and cannot generate or embed.

        Entering raises BusyError, ModelNotFoundError, ModelNameError, ModelFormatError, BudgetError, AllocationError,
        WorkerError.
        """

        async def acquire() -> tuple[ManagedModel, Waiter]:
            entry = await self._find(name)
            default_s = math.inf if entry.name in self.kept else self.settings.keep_alive_s
            waiter = Waiter(entry, overrides, default_s if keep_alive_s is None else keep_alive_s, will_answer)
            return await self._acquire(waiter), waiter

        return Lease(acquire, self._release)

    async def load(
        self, name: str | ModelEntry, overrides: LoadOverrides = LoadOverrides(), keep_alive_s: float | None = None
    ) -> LoadedModel:
        """Loads a model, or restarts the keep-alive time of a loaded one. Raises what entering a lease raises."""
        async with self.lease(name, overrides, keep_alive_s, will_answer=False) as lease:
            return lease.loaded

    async def unload(self, name: str | ModelEntry) -> bool:
        """Ends the use of a model by a name, after its current answer; False when the name used none.

        Returns when the model's process has ended, unless other names use it. Waiting requests load it again. Raises
        ModelNotFoundError, ModelNameError.
        """
        canonical = name if isinstance(name, str) and self._used_by(name) else (await self._find(name)).name
        model = self._used_by(canonical)
        if model is None:
            return False
        waiter = Waiter(replace(model.entry, name=canonical), model.overrides, 0.0)
        model.unloads.append(waiter)
        await self._wait(model, waiter)
        return True

    def loaded(self) -> list[LoadedModel]:
        """Models in memory, latest expiry first. Statistics are as of the last answer or snapshot."""
        now_s, models = self._now(), self._models.values()
        loaded = [m.status(now_s) for m in models if m.state in (State.READY, State.STOPPING) and m.process is not None]
        return sorted(loaded, key=lambda m: m.expires.timestamp() if m.expires else math.inf, reverse=True)

    async def snapshots(self, entry: ModelEntry | None, watch_s: float) -> list[Snapshot]:
        """The experts of the model that `entry` names, while it is loaded: in the process that its name uses, else in
        any of its files. None: of each loaded one, under the first of its names. watch_s: how soon they are asked for
        again at the latest."""
        ready = [model for model in self._models.values() if model.state is State.READY]
        if entry is not None:
            of_name = [model for model in ready if entry.name in model.uses]
            ready = of_name or [model for model in ready if files_key(model.entry) == files_key(entry)]
        found = []
        for model in ready:
            with suppress(MoeggufError):  # it has just ended
                assert model.process is not None
                snapshot = build(Snapshot, await model.process.request("experts", watch_s=watch_s).value())
                found.append(replace(snapshot, model=entry.name if entry else model.name))
        return found

    async def _find(self, name: str | ModelEntry) -> ModelEntry:
        # A lookup reads files, which must not block the event loop; an entry needs none.
        return name if isinstance(name, ModelEntry) else await asyncio.to_thread(self.catalog.find, name)

    def _used_by(self, name: str) -> ManagedModel | None:
        """The model that `name` uses, or for which it is being loaded."""
        for model in self._models.values():
            is_loading = model.state is State.LOADING and any(waiter.name == name for waiter in model.waiters)
            if is_loading or name in model.uses:
                return model
        return None

    async def _acquire(self, waiter: Waiter) -> ManagedModel:
        """Waits until `waiter` may use its model; the caller then calls `_release`. Raises BusyError and the errors of
        loading."""
        if self._closed:
            raise _shutting_down()
        waiter.overrides = self._remembered(waiter)
        key = process_key(waiter.entry, waiter.overrides)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = ManagedModel(key, waiter.entry)
        elif model.waiters or not model.has_room:
            self._make_queue_room(waiter)
        model.wait(waiter)
        model.look_at_files()
        await self._wait(model, waiter)
        return model

    def _make_queue_room(self, waiter: Waiter) -> None:
        """Refuses somebody when the queue is full: of the client with most requests there the newest, where `waiter` is
        of one that has fewer even with it, else `waiter` (longest queue drop: Suter et al., 1998). So nobody can take
        the queue from others, who get an equal share of it where they need that much. Raises BusyError."""
        waiting = [(model, other) for model in self._models.values() for other in model.waiters]
        if len(waiting) < self.settings.max_queue:
            return
        counts = Counter(other.client for _, other in waiting)
        most = max(counts.values(), default=0)
        busy = BusyError("server busy, please try again.  maximum pending requests exceeded")
        if counts[waiter.client] + 1 >= most:
            raise busy
        model, newest = max((pair for pair in waiting if counts[pair[1].client] == most), key=lambda p: p[1].ticket)
        model.waiters.remove(newest)
        newest.end(busy)

    def _remembered(self, waiter: Waiter) -> LoadOverrides:
        """The overrides of `waiter`; where they are None the entry's own parameters, then those of the last request of
        its name. A request that still waits gives no context: it may be too long to be loaded."""
        name, own = waiter.name, LoadOverrides.of(waiter.entry.parameters)
        uses = [model.uses[name].overrides for model in self._models.values() if name in model.uses]
        waiting = [other for model in self._models.values() for other in model.waiters if other.name == name]
        last = max(waiting, key=lambda w: w.ticket, default=None)
        known = uses if last is None else [replace(last.overrides, n_ctx=None), *uses]
        return functools.reduce(LoadOverrides.with_defaults, [own, *known], waiter.overrides)

    async def set_budget(
        self, name: str, expert_cache: ExpertCache | None = None, vram_cache: ExpertCache | None = None
    ) -> LoadedModel:
        """Changes a loaded model's budgets for experts, in RAM and on its device, also while it answers, up to those
        that it was loaded with. None: as it is.

        Raises ModelNotFoundError for a name that uses no loaded model, BudgetError for less than its passes need, for
        more than is free and for a tier that it does not have, BusyError while they are being changed, AllocationError,
        WorkerError.
        """
        model = self._used_by((await self._find(name)).name)
        if model is None:
            raise ModelNotFoundError(f"the model {name!r} is not loaded; a request loads it.")
        asked = {"expert_cache_bytes": expert_cache, "vram_cache_bytes": vram_cache}
        await self._set_budget(model, {name: cache for name, cache in asked.items() if cache is not None})
        return model.status(self._now())

    async def _set_budget(self, model: ManagedModel, given: Mapping[str, ExpertCache]) -> None:
        process, plan = model.process, model.ready.plan
        if process is None or model.state is not State.READY or model.changing_budget:
            raise BusyError(f"{model.name!r} is being loaded, unloaded or given another budget; try again.")
        ram, vram = memory_budget.planned_budgets(plan)
        if "vram_cache_bytes" in given and not vram:
            raise BudgetError(f"{model.name!r} has no slots in VRAM; give expert_cache.")
        if "expert_cache_bytes" in given and vram and not ram:
            raise BudgetError(f"{model.name!r} has every expert in VRAM and none in RAM; give vram_cache.")
        reserved = {"expert_cache_bytes": ram, "vram_cache_bytes": vram}
        n_experts, slot_bytes = process.stats.n_experts, plan.get("slot_bytes", 0)
        wanted: dict[str, Any] = {
            name: memory_budget.expert_cache_within(cache, n_experts, slot_bytes, reserved[name])
            for name, cache in given.items()
        }
        grown = {name: n_bytes - getattr(model, name) for name, n_bytes in wanted.items()}
        for name, n_bytes in grown.items():
            self._check_growth(model, name, n_bytes)
        model.changing_budget = True
        model.grow({name: max(0, n_bytes) for name, n_bytes in grown.items()})  # nobody else gets it meanwhile
        try:
            await process.request("budget", **{**dict.fromkeys(reserved), **wanted}).value()
        except MoeggufError:
            if model.process is process:
                model.grow({name: -max(0, n_bytes) for name, n_bytes in grown.items()})
            raise
        finally:
            model.changing_budget = False
        if model.process is process:
            model.grow({name: min(0, n_bytes) for name, n_bytes in grown.items()})
            model.asked_budgets.update(given)
        self._dispatch()

    def _check_growth(self, model: ManagedModel, name: str, n_bytes: int) -> None:
        where, free = "", self._limits.ram(self._used_bytes()) - self._used_bytes()
        if name == "vram_cache_bytes":
            where = f" on {model.device}"
            free = self._limits.on(model.device) - self._used_on(model.device)
        if n_bytes > max(0, free):
            raise BudgetError(
                f"{format_bytes(n_bytes)} more for experts of {model.name!r}{where} do not fit beside the other models,"
                f" which leave {format_bytes(max(0, free))}; unload one of them (`moegguf stop`), or give less."
            )

    async def _wait(self, model: ManagedModel, waiter: Waiter) -> None:
        self._dispatch()
        try:
            await waiter.granted
        except BaseException:  # also where the request is cancelled
            for queue in (model.waiters, model.unloads):
                if waiter in queue:
                    queue.remove(waiter)
                    self._dispatch()
            self._release(model, waiter)  # it may have been granted just before its task was cancelled
            raise

    def _release(self, model: ManagedModel, waiter: Waiter) -> None:
        """Ends the use of a model. Idempotent."""
        if waiter not in model.users:
            return
        model.users.remove(waiter)
        model.look_at_files()  # a write may be why the answer has ended
        model.last_used_s = self._now()
        if waiter.name in model.uses:
            model.uses[waiter.name].last_used_s = model.last_used_s
        self._released.set()
        self._dispatch()

    # The rules.

    def _dispatch(self) -> None:
        if self._closed:
            return
        for model in self._models.values():
            self._grant_waiters(model)
        self._start_loads()
        for model in list(self._models.values()):
            self._update_expiry(model)
            needed = model.waiters or model.unloads or model.users or model.n_crashed_loads
            if model.state is State.ABSENT and not needed:
                del self._models[model.key]

    def _grant_waiters(self, model: ManagedModel) -> None:
        for waiter in list(model.unloads):
            is_answering = any(other.name == waiter.name for other in model.answering)
            is_shared = model.state is State.READY and model.has_others(waiter.name) and not is_answering
            if model.state is State.ABSENT or is_shared:  # else it is unloaded first
                model.unloads.remove(waiter)
                model.uses.pop(waiter.name, None)
                waiter.end()
        if model.state is not State.READY:
            return
        for waiter in [w for w in model.waiters if not w.will_answer]:
            if not model.stopping and model.serves(waiter):
                self._grant(model, waiter)
        if model.unloads or (model.waiters and not model.serves(model.waiters[0])):
            if not model.users:
                self._start_unload(model)
            return
        while model.has_room and (granted := self._next_of(model)) is not None:
            self._grant(model, granted)

    def _next_of(self, model: ManagedModel) -> Waiter | None:
        """The first waiter that overtakes no load, of those before one that needs another load; None: all do. Turns may
        have put one that came before the load behind one that came after it."""
        loads, since = self._load_queue(), math.inf  # a load that has waited for memory for long is not overtaken
        if loads and not loads[0].measuring:
            oldest = loads[0].oldest_waiter
            since = oldest.ticket if self._now() - oldest.since_s > OVERTAKE_S else math.inf
        for waiter in model.waiters:
            if not model.serves(waiter):
                return None
            if waiter.ticket <= since:
                return waiter
        return None

    def _grant(self, model: ManagedModel, waiter: Waiter) -> None:
        self._use(model, waiter)
        model.last_used_s = self._now()
        model.grant(waiter)

    def _use(self, model: ManagedModel, waiter: Waiter) -> None:
        """Notes that the name of `waiter` uses `model`, and no other one: that of its options before may end."""
        for other in self._models.values():
            if other is not model:
                other.uses.pop(waiter.name, None)
        waiter.last_used_s = self._now()
        model.uses[waiter.name] = waiter

    def _load_queue(self) -> list[ManagedModel]:
        waiting = [m for m in self._models.values() if m.state is State.ABSENT and m.waiters]
        return sorted(waiting, key=lambda m: m.oldest_waiter.ticket)

    def _start_loads(self) -> None:
        for model in self._load_queue():
            if model.measuring:
                return
            if model.measured is None or not model.measured[0].same_load(model.waiters[0]):
                model.measuring = True
                self._spawn(self._measure_model(model, model.waiters[0]))
                return
            if not self._start_load(model, model.measured[1]):
                return

    def _start_load(self, model: ManagedModel, size: memory_budget.ModelSize) -> bool:
        """Starts the load, or unloads idle models for it; False when it has to wait."""
        others = [m for m in self._models.values() if m.state is not State.ABSENT]
        in_memory = []
        for m in sorted(others, key=lambda m: m.last_used_s):
            device_bytes = m.device_bytes if m.device == size.device else 0
            is_stopping = m.state is State.STOPPING
            in_memory.append(memory_budget.MemoryUse(m.key, m.size_bytes, m.idle, is_stopping, device_bytes))
        limit_bytes, on_device = self._limits.ram(self._used_bytes()), self._limits.on(size.device)
        try:
            admission = memory_budget.admit(size, limit_bytes, in_memory, self.settings.max_models, on_device)
        except MoeggufError as error:
            self._fail(model, model.waiters[0], error)
            return True
        for key in admission.unload:
            self._start_unload(self._models[key])
        if not admission.reserve_bytes:
            return False
        model.state, model.size_bytes = State.LOADING, admission.reserve_bytes
        model.device, model.device_bytes = size.device, admission.device_bytes
        self._spawn(self._load(model, model.waiters[0], size))
        return True

    def _used_bytes(self) -> int:
        return sum(model.size_bytes for model in self._models.values())

    def _used_on(self, device: str | None) -> int:
        return sum(model.device_bytes for model in self._models.values() if model.device == device)

    def _fail(self, model: ManagedModel, failed: Waiter, error: Exception) -> None:
        """Ends all waiters that need the same load as `failed`; a load with other options is still tried."""
        for waiter in [w for w in model.waiters if w.same_load(failed)]:
            model.waiters.remove(waiter)
            waiter.end(error)
        model.measured = None
        asyncio.get_running_loop().call_soon(self._dispatch)

    def _update_expiry(self, model: ManagedModel) -> None:
        """Drops the names whose keep-alive time is over, unloads an idle model without names, sets a timer for the
        next."""
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None
        if model.state is not State.READY:
            return
        expires_s = {name: model.expires_s(name) for name in model.uses}
        expired = [name for name, at_s in expires_s.items() if at_s <= self._now()]
        if len(expired) == len(model.uses) and model.idle and not model.waiters:
            self._start_unload(model)
            return
        for name in expired:
            del model.uses[name], expires_s[name]
        next_s = min(expires_s.values(), default=math.inf)
        if next_s != math.inf:
            model.expiry = asyncio.get_running_loop().call_at(next_s, self._dispatch)

    # Tasks.

    async def _measure_model(self, model: ManagedModel, waiter: Waiter) -> None:
        arguments = waiter.entry, waiter.overrides, self.settings, self._limits.ram(self._used_bytes())
        try:
            gpu = await self._find_gpu()
            given = {} if gpu is None else {"gpu": gpu}
            model.files = tuple(FileVersion.now(path) for path in waiter.entry.all_files if path.exists())
            model.look_at_files()
            size = await asyncio.to_thread(self.measure, *arguments, **given)
            model.measured, model.default_n_ctx = (waiter, size), size.default_n_ctx
            model.entry, model.overrides = waiter.entry, waiter.overrides
        except (MoeggufError, OSError) as error:
            asked = isinstance(error, BudgetError) and waiter.overrides.expert_cache is not None
            self._fail(model, waiter, OptionError(str(error)) if asked else error)
        finally:
            model.measuring = False
            self._dispatch()

    async def _find_gpu(self) -> Device | None:
        """The device for the next model, with what it would have free without models; None: the CPU."""
        environment, chosen = read_environment(), self.settings.loading
        if not environment.hooks or chosen.get("placement", environment.placement) == "cpu":
            return None
        if not chosen.get("vram_cache", environment.vram_cache) and (chosen.get("n_gpu_layers") == 0 or not has_gpu()):
            return None
        return self._limits.choose(await asyncio.to_thread(self.devices), self._used_on)

    async def _load(self, model: ManagedModel, waiter: Waiter, size: memory_budget.ModelSize) -> None:
        start_s = self._now()
        try:
            plan = await asyncio.to_thread(size.plan_within, model.size_bytes, model.device_bytes)
            if size.device is not None:
                model.size_bytes, model.device_bytes = plan.host_bytes, plan.total_bytes
            model.process = process = await self._take_process()
            model.ready = await process.load(size.load_config(plan), self.settings.load_timeout_s)
            model.expert_cache_bytes, model.vram_cache_bytes = memory_budget.planned_budgets(model.ready.plan)
            process.on_exit = functools.partial(self._on_process_exit, model, process)
        except WorkerError as error:
            self._note_lost(model, error)
            model.n_crashed_loads += 1
            if model.n_crashed_loads >= MAX_CRASHED_LOADS or isinstance(error, LoadStalledError):
                self._fail(model, waiter, error)
        except (MoeggufError, OSError) as error:
            self._fail(model, waiter, error)
        else:
            model.state, model.n_crashed_loads, model.n_requests = State.READY, 0, 0
            self._use(model, waiter)
            for waiting in model.waiters:
                waiting.load_s = self._now() - start_s
            for name, cache in dict(model.asked_budgets).items():  # a person needs that memory
                try:
                    await self._set_budget(model, {name: cache})
                except MoeggufError:  # the new plan cannot keep it
                    model.asked_budgets.pop(name, None)
        finally:
            if model.state is State.LOADING:
                await self._unload(model)
            else:
                self._dispatch()

    def _prepare_process(self, *expected: str) -> None:
        """Starts a process for the next model, whose modules are imported then. expected: its file, if that is one that
        was used before."""
        if self._spare is None and not self._closed:
            self._spare = asyncio.get_running_loop().create_task(self._new_process(*expected))

    async def _take_process(self) -> WorkerProcess:
        """The spare process, or a new one where that has ended. Raises WorkerError, OptionError."""
        spare, self._spare = self._spare, None
        with suppress(WorkerError, OptionError):
            if spare is not None and not (process := await spare).exited.done():
                return process
        return await self._new_process()

    async def _new_process(self, *expected: str) -> WorkerProcess:
        return await WorkerProcess.start(*expected, command=self.command, echo_stderr=self.settings.debug)

    def _on_process_exit(self, model: ManagedModel, process: WorkerProcess) -> None:
        if model.process is process and model.state is State.READY:  # not on request: it crashed
            self._note_lost(model, process.exited.result())
            model.reset()
            self._dispatch()

    def _note_lost(self, model: ManagedModel, error: WorkerError) -> None:
        if isinstance(error, DeviceLostError) and model.device is not None:
            self._limits.lost.add(model.device)

    def _start_unload(self, model: ManagedModel) -> None:
        if model.state is State.READY:
            model.state = State.STOPPING
            self._prepare_process(str(model.entry.path))
            self._spawn(self._unload(model))

    async def _unload(self, model: ManagedModel) -> None:
        if model.process is not None:
            await model.process.close()
        model.reset()
        self._dispatch()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _shutting_down() -> BusyError:
    return BusyError("the server is shutting down; try again later.")
