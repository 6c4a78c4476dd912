"""Manages the loaded models and the requests for them: queues, loads, unloads, expiry.
Runs on one event loop.

Each model has a task (`_live`), which starts with its first request. The task waits for
memory, loads the model, and stops the process when `ending` is set. The task repeats
this while requests wait, then ends. Every change calls `_dispatch`, which never waits.
`_dispatch` grants requests for loaded models, ends idle models that have expired or
must be reloaded, and wakes the tasks that wait for a change.

Rules:
- Names with equal files and load options share a process. An option that neither a request nor the entry sets comes
  from the last request of the name. A request for a longer context than the loaded one causes a reload.
- Clients take turns with their requests for a model (`in_turn`). Its process answers several requests at once, up to
  a limit. The answers of one client are granted in the order of its requests.
- A full queue is divided evenly between the clients that need it.
- A model is loaded when it fits into the memory budget. To make room, idle models are unloaded, least recently used
  first. If this is not enough, the model gets fewer expert slots. If it does not fit even with the fewest slots, it
  waits until a busy model is idle.
- The memory of each device is counted separately. A device that has failed is not used again.
- Loads get memory in the order in which they became due. Requests for loaded models may overtake a load that waits
  for memory, for OVERTAKE_S at most.
- No request interrupts another request's answer.

This module does not handle HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from moegguf.decisions import log_decision
from moegguf.engine.devices import query_gpus
from moegguf.engine.machine import Device
from moegguf.errors import (
    BudgetError,
    BusyError,
    DeviceLostError,
    ModelNotFoundError,
    MoeggufError,
    OptionError,
    QueueFullError,
)  # fmt: skip
from moegguf.gguf.reader import FileVersion
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry
from moegguf.options import BUDGETS
from moegguf.quantities import ExpertCache, format_bytes
from moegguf.serving import memory_budget
from moegguf.serving.clients import current_owner
from moegguf.serving.events import (
    NO_OVERRIDES,
    LoadedModel,
    LoadOverrides,
    Snapshot,
    load_overrides,
)
from moegguf.serving.lease import Lease
from moegguf.serving.managed_model import (
    LeaseRequest,
    ManagedModel,
    files_key,
    process_key,
)
from moegguf.serving.memory_budget import RAM
from moegguf.serving.worker_process import CLOSE_GRACE_S, Workers, ignore
from moegguf.settings import Settings

log = logging.getLogger(__name__)

# Seconds for which other requests may overtake a waiting load, so that models are
# swapped less often.
OVERTAKE_S = 10.0
SHUTDOWN_GRACE_S = 5.0
# a refused client should retry after this share of the longest wait in the queue (at
# least 1 s, at most MAX_RETRY_S)
FREED = 0.1
MAX_RETRY_S = 60.0


def _log_warning(name: str, text: str) -> None:
    log.warning("%s: %s", name, text)


@dataclass(eq=False)
class ModelManager:
    """Loads models and grants requests for them: `async with ModelManager(catalog,
    settings) as manager`.

    When the block ends, running answers have SHUTDOWN_GRACE_S to finish, then every
    process is ended. All calls must come from the event loop that entered the block.
    """

    catalog: Catalog
    settings: Settings
    _: KW_ONLY
    # Starts worker processes. None: the manager creates this object.
    workers: Workers | None = None
    # Computes the memory that a model needs.
    measure: Callable[..., memory_budget.ModelSize] = memory_budget.measure
    # Lists the GPUs of this machine with their current free memory.
    devices: Callable[[], list[Device]] = query_gpus
    # Called while a model is read: with its entry, the share that was read, and the
    # seconds since loading began.
    on_load: Callable[[ModelEntry, float, float], object] = ignore
    # Called with the name of a model and the text of a warning from its process.
    on_warning: Callable[[str, str], object] = _log_warning

    def __post_init__(self) -> None:
        # {process_key: model that is loaded or requested}.
        self._models: dict[str, ManagedModel] = {}
        # Names whose models have no default limit on their idle time.
        self.kept: set[str] = set()
        self._limits = memory_budget.MemoryLimits(self.settings)
        # Held for the model whose load waits for memory.
        self._admission = asyncio.Lock()
        self._short: ManagedModel | None = None  # the model whose load waits for memory
        self._workers = self.workers or Workers(echo_stderr=self.settings.debug)
        # (name of a model, warning) that was already reported.
        self._warned: set[tuple[str, str]] = set()
        self._closed = False
        # Set and immediately cleared at every change, to wake all waiting tasks.
        self._changed = asyncio.Event()

    async def __aenter__(self) -> ModelManager:
        await self._workers.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                while any(model.users for model in self._models.values()):
                    await self._changed.wait()
        tasks = [model.task for model in self._models.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._workers.close()

    def refuse(self) -> None:
        """Refuses all new and waiting requests from now on. Running answers
        continue."""
        self._closed = True
        for request in self._waiting:
            request.end(_shutting_down())
        self._dispatch()

    def lease(
        self,
        name: str | ModelEntry,
        overrides: LoadOverrides = NO_OVERRIDES,
        keep_alive_s: float | None = None,
        *,
        will_answer: bool = True,
    ) -> Lease:
        """Returns a lease for use in `async with`. Entering it loads the model if
        needed, and waits in the model's queue.

        `name`: a name, or its catalog entry. `keep_alive_s`: seconds that the idle
        model stays loaded after the lease. None: the setting, or forever for names in
        `kept`; 0: not at all; inf: forever. With `will_answer=False` the lease does not
        wait for running answers, and cannot generate or embed.

        Entering raises BusyError, ModelNotFoundError, ModelNameError, ModelFormatError,
        BudgetError, OptionError, AllocationError or WorkerError.
        """

        acquire = functools.partial(
            self._acquire, name, overrides, keep_alive_s, will_answer
        )
        return Lease(acquire, self._release)

    async def load(
        self,
        name: str | ModelEntry,
        overrides: LoadOverrides = NO_OVERRIDES,
        keep_alive_s: float | None = None,
    ) -> LoadedModel:
        """Loads a model, or restarts the keep-alive time of a loaded model, and returns
        its state. Raises the errors of entering a lease."""
        entry = await self._find(name)
        async with self.lease(entry, overrides, keep_alive_s, will_answer=False):
            return next(
                model.status()
                for model in self._models.values()
                if entry.name in model.uses
            )

    async def unload(self, name: str | ModelEntry) -> bool:
        """Stops a name's use of its model, after the name's current answers. Returns
        False if the name used no model.

        If no other name uses the model or waits for it, the model's process exits
        before this method returns. Waiting requests reload the model. Raises
        ModelNotFoundError or ModelNameError, and BusyError at shutdown.
        """
        canonical = (
            name
            if isinstance(name, str) and self._used_by(name)
            else (await self._find(name)).name
        )
        model = self._used_by(canonical)
        if model is None:
            return False
        model.unloads.add(canonical)
        self._dispatch()
        while canonical in model.unloads:
            if self._closed:
                raise _shutting_down()
            await self._changed.wait()
        return True

    def loaded(self) -> list[LoadedModel]:
        """Returns the models in memory, latest expiry first. Their statistics are the
        last ones that their processes sent."""
        loaded = [
            model.status()
            for model in self._models.values()
            if model.process is not None
        ]
        return sorted(
            loaded,
            key=lambda m: m.expires.timestamp() if m.expires else math.inf,
            reverse=True,
        )

    def loading(self) -> dict[str, float]:
        """Returns {name that is waiting for a load in progress: share of the model read
        so far, 0 to 1}."""
        return {
            request.name: model.load_share
            for model in self._models.values()
            if model.process is None and model.used
            for request in model.waiting
        }

    async def snapshots(
        self, entry: ModelEntry | None, watch_s: float
    ) -> list[Snapshot]:
        """Returns snapshots of the experts of the loaded model that `entry` uses, or
        (None) of all loaded models.

        If no loaded model is in use under the entry's name, returns snapshots of all
        loaded models with the entry's files. With the setting `tells_clients_apart`,
        the snapshots count only the requests of the current client.

        watch_s: for this many seconds, workers count all uses; the caller should call
        again before this time ends.
        """
        client_key = current_owner.get() if self.settings.tells_clients_apart else None
        ready = [model for model in self._models.values() if model.is_ready]
        if entry is not None:
            of_name = [model for model in ready if entry.name in model.uses]
            ready = of_name or [
                model for model in ready if files_key(model.entry) == files_key(entry)
            ]
        found = []
        for model in ready:
            with suppress(MoeggufError):  # the process may end before it replies
                assert model.process is not None
                snapshot = await model.process.call(
                    "experts", watch_s=watch_s, client_key=client_key
                ).value()
                found.append(
                    replace(snapshot, model=entry.name if entry else model.name)
                )
        return found

    async def _find(self, name: str | ModelEntry) -> ModelEntry:
        # A lookup reads files, so it runs on a thread and does not block the event
        # loop.
        return (
            name
            if isinstance(name, ModelEntry)
            else await asyncio.to_thread(self.catalog.find, name)
        )

    def _used_by(self, name: str) -> ManagedModel | None:
        """Returns the model that `name` uses, or that is being loaded for `name`."""
        for model in self._models.values():
            is_loading = model.process is None and bool(model.used)
            if name in model.uses or (
                is_loading and any(request.name == name for request in model.waiting)
            ):
                return model
        return None

    @property
    def _waiting(self) -> list[LeaseRequest]:
        return [request for model in self._models.values() for request in model.waiting]

    async def _acquire(
        self,
        name: str | ModelEntry,
        overrides: LoadOverrides,
        keep_alive_s: float | None,
        will_answer: bool,
    ) -> LeaseRequest:
        """Returns a new request when it may use its model. `lease` describes the
        arguments. The caller must call `_release` after the use. Raises BusyError and the
        errors of loading."""
        entry = await self._find(name)
        if self._closed:
            raise _shutting_down()
        if keep_alive_s is None:
            keep_alive_s = (
                math.inf if entry.name in self.kept else self.settings.keep_alive_s
            )
        request = LeaseRequest(entry, overrides, keep_alive_s, will_answer)
        request.overrides = self._remembered(request)
        key = process_key(request.entry, request.overrides)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = ManagedModel(key, request.entry)
            model.task = asyncio.create_task(self._live(model))
        elif model.waiting or not model.has_room:
            self._make_queue_room(request)
        model.waiting.append(request)
        request.model = model
        model.look_at_files()
        self._dispatch()
        try:
            await request.granted
        except BaseException:  # includes a cancellation of the request
            if request in model.waiting:
                model.waiting.remove(request)
                self._dispatch()
            # Needed if the request was granted just before the cancellation.
            self._release(request)
            raise
        return request

    def _make_queue_room(self, request: LeaseRequest) -> None:
        """Refuses a request when the queue is full (longest queue drop: Suter et al.,
        1998).

        If another client has more waiting requests than the client of `request` would
        have, the newest request of the client with the most requests is refused.
        Otherwise `request` is refused, and QueueFullError is raised. So the clients
        share the queue evenly.
        """
        waiting = self._waiting
        if len(waiting) < self.settings.max_queue:
            return
        counts = Counter(other.client for other in waiting)
        most = max(counts.values(), default=0)
        waited_s = max((time.monotonic() - w.since_s for w in waiting), default=0.0)
        busy = QueueFullError(
            retry_after_s=round(min(max(waited_s * FREED, 1), MAX_RETRY_S))
        )
        if counts[request.client] + 1 >= most:
            raise busy
        newest = max(
            (other for other in waiting if counts[other.client] == most),
            key=lambda other: other.ticket,
        )
        newest.model.waiting.remove(newest)
        newest.end(busy)

    def _remembered(self, request: LeaseRequest) -> LoadOverrides:
        """Returns the load options of `request`. Missing options come from the entry's
        parameters, then from the newest waiting request with this name, then from the
        name's last granted request. A waiting request's context length is not used,
        since it may be too long to be loaded."""
        name = request.name
        sources = [request.overrides, load_overrides(request.entry.parameters)]
        waiting = [other for other in self._waiting if other.name == name]
        if waiting:
            newest = dict(max(waiting, key=lambda w: w.ticket).overrides)
            newest.pop("n_ctx", None)
            sources.append(newest)
        sources += [
            model.uses[name].overrides
            for model in self._models.values()
            if name in model.uses
        ]
        return dict(ChainMap(*map(dict, sources)))

    async def set_budget(self, name: str, *budgets: ExpertCache) -> LoadedModel:
        """Changes a loaded model's budgets for experts, in RAM and on its devices. The
        model may be answering.

        The maximum of a budget is its value at the model's load. A tier without a
        budget here keeps its own.

        Raises ModelNotFoundError for a name that uses no model. Raises BudgetError for
        less than the model's passes need, for more than is free, and for a tier that
        the model does not have. Raises BusyError while the model is being loaded or
        unloaded. Also raises AllocationError or WorkerError.
        """
        model = self._used_by((await self._find(name)).name)
        if model is None:
            raise ModelNotFoundError(
                f"the model {name!r} is not loaded; send it a prompt, which loads it."
            )
        async with model.changing_budget:
            await self._set_budget(model, {cache.tier: cache for cache in budgets})
        return model.status()

    async def _set_budget(
        self, model: ManagedModel, given: Mapping[str, ExpertCache]
    ) -> None:
        process = model.process
        if process is None or not model.is_ready:
            raise BusyError(
                f"the budgets of {model.name!r} cannot change while the model is being loaded or unloaded; try again."
            )
        plan = model.plan
        reserved = plan.cache_bytes
        has_slots = [tier for tier, n_bytes in reserved.items() if n_bytes]
        for tier in given.keys() - has_slots if has_slots else ():
            raise BudgetError(
                f"{BUDGETS[tier]} changes the slots in {tier}, but {model.name!r} has no slots in {tier}; set"
                f" {BUDGETS[has_slots[0]]} instead."
            )
        n_experts = process.stats.n_experts
        sizes = {"RAM": plan.slot_bytes, "VRAM": plan.device_slot_bytes}
        wanted: dict[str, Any] = {
            tier: memory_budget.expert_cache_within(
                cache, n_experts, sizes[tier], reserved[tier]
            )
            for tier, cache in given.items()
        }
        before = {tier: model.cache_bytes[tier] for tier in wanted}
        for tier, n_bytes in wanted.items():
            self._check_growth(model, model.places_of(tier), n_bytes - before[tier])
        # Reserves memory for growth.
        model.set_budgets({tier: max(before[tier], wanted[tier]) for tier in wanted})
        now = wanted
        try:
            await process.call(
                "budget", **{BUDGETS[tier]: n_bytes for tier, n_bytes in wanted.items()}
            ).value()
        except MoeggufError:
            now = before
            raise
        finally:
            if model.process is process:
                model.set_budgets(now)
        model.asked_budgets.update(given)
        self._dispatch()

    def _check_growth(
        self, model: ManagedModel, places: Sequence[str], n_bytes: int
    ) -> None:
        free_bytes = sum(
            max(0, self._limit(place) - self._used(place)) for place in places
        )
        if n_bytes > free_bytes:
            where = ", ".join(places)
            raise BudgetError(
                f"{format_bytes(n_bytes)} more for experts of {model.name!r} in {where} do not fit, because only"
                f" {format_bytes(free_bytes)} are free for models; unload another model (`moegguf stop`), or set a"
                " smaller budget."
            )

    def _release(self, request: LeaseRequest) -> None:
        """Ends a request's use of a model. Has no effect if the use has already
        ended."""
        model = request.model
        if request not in model.users:
            return
        model.release(request)
        model.look_at_files()  # the answer may have failed because a file was changed
        model.last_used_s = time.monotonic()
        if request.name in model.uses:
            model.uses[request.name].last_used_s = model.last_used_s
        self._dispatch()

    # The rules.

    def _dispatch(self) -> None:
        if not self._closed:
            for model in self._models.values():
                if model.is_ready:
                    self._give_up_names(model)
                    self._grant_waiting(model)
                    self._update_expiry(model)
        self._changed.set()
        self._changed.clear()

    def _give_up_names(self, model: ManagedModel) -> None:
        """Removes each name in `unloads` from the model, if the name has no running
        answer and other names use the model or wait for it.

        If there are no other names, `_grant_waiting` unloads the model.
        """
        for name in list(model.unloads):
            if model.has_others(name) and not any(
                request.name == name for request in model.answering
            ):
                model.unloads.remove(name)
                model.uses.pop(name, None)

    def _grant_waiting(self, model: ManagedModel) -> None:
        for request in [w for w in model.waiting if not w.will_answer]:
            if not model.stopping and model.serves(request):
                self._grant(model, request)
        if model.unloads or (model.waiting and not model.serves(model.queue[0])):
            if not model.users:
                model.ending.set()
                log_decision(
                    "model_stopped",
                    name=model.entry.name,
                    asked=bool(model.unloads),
                    files_changed=model.files_changed,
                )
            return
        while model.has_room and (granted := self._next_of(model)) is not None:
            self._grant(model, granted)

    def _next_of(self, model: ManagedModel) -> LeaseRequest | None:
        """Returns the request that is granted next, or None.

        Requests queued behind a request that needs another load have to wait. After a
        load of another model has waited for OVERTAKE_S, only requests that arrived
        before the oldest request for that load are granted. Such a request may be
        anywhere in the queue, since the queue is sorted by `in_turn`, not by arrival.
        """
        # Ticket of a load that must not be overtaken; inf: there is none.
        since = math.inf
        if self._short is not None:
            due = (request for request in self._short.waiting if not request.comes_last)
            oldest = min(due, key=lambda request: request.ticket, default=None)
            if oldest is not None and time.monotonic() - oldest.since_s > OVERTAKE_S:
                since = oldest.ticket
        for request in model.queue:
            if not model.serves(request):
                return None
            if request.ticket <= since:
                return request
        return None

    def _grant(self, model: ManagedModel, request: LeaseRequest) -> None:
        self._use(model, request)
        model.last_used_s = time.monotonic()
        model.grant(request)

    def _use(self, model: ManagedModel, request: LeaseRequest) -> None:
        """Makes `model` the only model that the name of `request` uses. A model with
        earlier options may then be unloaded."""
        for other in self._models.values():
            if other is not model:
                other.uses.pop(request.name, None)
        request.last_used_s = time.monotonic()
        model.uses[request.name] = request

    def _used(self, place: str) -> int:
        return sum(model.used.get(place, 0) for model in self._models.values())

    def _limit(self, place: str) -> int:
        return self._limits.of(place, self._used(place))

    def _update_expiry(self, model: ManagedModel) -> None:
        """Unloads an idle model whose names have all expired (their keep-alive time is
        over). Otherwise removes the expired names, and sets the timer for the next
        expiry."""
        expires_s = {name: model.expires_s(name) for name in model.uses}
        expired = [name for name, at_s in expires_s.items() if at_s <= time.monotonic()]
        if len(expired) == len(model.uses) and not model.users and not model.waiting:
            model.ending.set()
            log_decision("model_expired", name=model.entry.name)
            return
        for name in expired:
            del model.uses[name], expires_s[name]
        model.set_timer(min(expires_s.values(), default=math.inf), self._dispatch)

    # The task of a model.

    async def _live(self, model: ManagedModel) -> None:
        """Loads a model and later unloads it, and repeats this while requests wait for
        the model. Removes the model at the end."""
        while model.waiting:
            request = None
            try:
                async with self._admission:
                    if not model.waiting:
                        break
                    request = model.queue[0]
                    size = await self._measure_model(model, request)
                    if not await self._reserve(model, request, size):
                        continue
                await self._run(model, request, size)
            except Exception as error:  # even after a bug, no request may wait forever
                for failed in [
                    w
                    for w in model.waiting
                    if request is not None and w.same_load(request)
                ]:
                    # Requests with other load options still wait for their load.
                    model.waiting.remove(failed)
                    failed.end(error)
            finally:
                model.reset()
                self._dispatch()
        del self._models[model.key]

    async def _measure_model(
        self, model: ManagedModel, request: LeaseRequest
    ) -> memory_budget.ModelSize:
        used = {
            place: self._used(place)
            for other in self._models.values()
            for place in other.used
        }
        model.files = tuple(filter(None, map(FileVersion.now, request.entry.all_files)))
        model.look_at_files()
        try:
            size = await asyncio.to_thread(
                self.measure,
                request.entry,
                request.overrides,
                self.settings,
                self._limits.ram(self._used(RAM)),
                lambda: self._limits.gpus(self.devices(), used),
            )
        except BudgetError as error:
            if request.overrides.keys().isdisjoint(BUDGETS.values()):
                raise
            raise OptionError(str(error)) from None
        model.entry, model.overrides, model.default_n_ctx = (
            request.entry,
            request.overrides,
            size.default_n_ctx,
        )
        return size

    async def _reserve(
        self, model: ManagedModel, request: LeaseRequest, size: memory_budget.ModelSize
    ) -> bool:
        """Waits until memory for the load is reserved, and unloads idle models for it.
        Returns False if the load is no longer needed, because the next request needs
        another load or no request waits. Raises BudgetError."""
        try:
            while model.waiting and model.queue[0].same_load(request):
                others = sorted(
                    (m for m in self._models.values() if m.used),
                    key=lambda m: m.last_used_s,
                )
                in_memory = [
                    memory_budget.MemoryUse(
                        m.key, m.used, m.ending.is_set() or (m.is_ready and not m.users)
                    )
                    for m in others
                ]
                limits = {place: self._limit(place) for place in size.wanted}
                admission = memory_budget.admit(
                    size, limits, in_memory, self.settings.max_models
                )
                if admission.reserve:
                    model.used = dict(admission.reserve)
                    return True
                for key in admission.unload:
                    other = self._models[key]
                    other.ending.set()
                    log_decision(
                        "model_unloaded",
                        name=other.entry.name,
                        for_model=model.entry.name,
                        short_bytes=dict(admission.short),
                    )
                self._short = model
                await self._changed.wait()
            return False
        finally:
            self._short = None
            self._dispatch()

    async def _run(
        self, model: ManagedModel, request: LeaseRequest, size: memory_budget.ModelSize
    ) -> None:
        """Runs a worker process with the model, from its load until `ending` is set."""
        start_s = time.monotonic()
        model.plan = plan = await asyncio.to_thread(size.plan_within, model.used)
        if model.devices:
            model.used = memory_budget.bytes_of(plan)
        process = await self._workers.take()
        process.on_warning = functools.partial(self._warn, model)
        grace_s = 0.0

        model.load_share = 0.0

        def on_progress(share: float) -> None:
            model.load_share = share
            self.on_load(model.entry, share, time.monotonic() - start_s)

        try:
            model.ready = await process.load(
                size.load_config(plan), self.settings.load_timeout_s, on_progress
            )
            grace_s = CLOSE_GRACE_S
            model.cache_bytes = plan.cache_bytes
            process.on_exit = functools.partial(self._on_process_exit, model)
            model.process = process
            self._use(model, request)
            for waiting in model.waiting:
                waiting.load_s = time.monotonic() - start_s
            async with model.changing_budget:
                # Keeps budgets that a client has set.
                for tier, cache in dict(model.asked_budgets).items():
                    try:
                        await self._set_budget(model, {tier: cache})
                    except MoeggufError:  # the new plan may not allow this budget
                        model.asked_budgets.pop(tier, None)
            self._dispatch()
            await model.ending.wait()
            await self._workers.prepare(str(model.entry.path))
        finally:
            await process.close(grace_s)
            if isinstance(process.exited.result(), DeviceLostError):
                self._limits.lost.update(model.devices)

    def _warn(self, model: ManagedModel, text: str) -> None:
        """Calls `on_warning` with a warning from a model's process, unless this warning
        was already reported for the model's name."""
        if (model.name, text) not in self._warned:
            self._warned.add((model.name, text))
            self.on_warning(model.name, text)

    def _on_process_exit(self, model: ManagedModel) -> None:
        model.process = None
        model.ending.set()


def _shutting_down() -> BusyError:
    return BusyError("the server is shutting down; try again later.")
