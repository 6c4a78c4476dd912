"""The state of a model in the manager (`ManagedModel`): the files, the names that use
them, waiting and current requests, expiry, memory and the worker process.

model_manager.py starts and stops the processes, and decides when a request is granted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from moegguf.engine.memory import DEFAULT_UBATCH_TOKENS
from moegguf.generate.request import AnswerSummary
from moegguf.gguf.reader import FileVersion
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache
from moegguf.serving.clients import BACKGROUND, current_client, current_owner
from moegguf.serving.events import LoadedModel, LoadedName, LoadOverrides
from moegguf.serving.memory_budget import RAM
from moegguf.serving.wire import Ready

if TYPE_CHECKING:
    from moegguf.engine.plan import Plan
    from moegguf.serving.worker_process import WorkerProcess

# Seconds after which a waiting background request is served like other requests.
MAX_WAIT_S = 30.0

_tickets = itertools.count(1)


@dataclass(eq=False)
class LeaseRequest:
    """A request that waits for a model and, when it is granted, uses the model.

    Before the wait, the manager adds options to `overrides`: parameters of the entry,
    and overrides of the last request with the same name. If no later request with this
    name arrives, the name stops using the model `keep_alive_s` seconds after
    `last_used_s`.
    """

    entry: ModelEntry
    overrides: LoadOverrides
    keep_alive_s: float
    # True if it will generate or embed; up to `n_parallel` such requests use a model at
    # once.
    will_answer: bool = True
    # number that increases in order of arrival, across all models
    ticket: int = field(default_factory=_tickets.__next__)
    since_s: float = field(default_factory=time.monotonic)
    client: str = field(default_factory=current_client.get)
    # Seconds of the load that the request waited for; 0: the model was already loaded.
    load_s: float = 0.0
    last_used_s: float = 0.0  # time of the last use, on the event loop's clock
    granted: asyncio.Future[Any] = field(default_factory=asyncio.Future)
    # The model for which the request waits, or which it uses.
    model: ManagedModel = field(init=False)

    @property
    def name(self) -> str:
        """Returns the canonical name of the requested model."""
        return self.entry.name

    @property
    def comes_last(self) -> bool:
        """True if the request has background priority and has waited for less than
        MAX_WAIT_S."""
        return (
            self.client == BACKGROUND and time.monotonic() - self.since_s < MAX_WAIT_S
        )

    def end(self, error: Exception | None = None) -> None:
        """Ends the wait for the model, unless the wait has already ended. If there is
        an `error`, the waiting caller receives it as an exception."""
        if not self.granted.done():
            if error is None:
                self.granted.set_result(None)
            else:
                self.granted.set_exception(error)

    def same_load(self, other: LeaseRequest) -> bool:
        """Returns True if both requests need files with equal contents
        (`ModelEntry.weights`) and equal load options."""
        return (
            self.overrides == other.overrides
            and self.entry.weights == other.entry.weights
        )


def in_turn(
    requests: Iterable[LeaseRequest], served: Mapping[str, int]
) -> list[LeaseRequest]:
    """Returns the requests in their current serving order.

    Requests are sorted by the later of two times: their arrival, and the last time that
    a request of their client began or ended. `served` maps each waiting client to this
    second time, given as a ticket. Background requests come last until they have waited
    for MAX_WAIT_S.
    """

    def turn(request: LeaseRequest) -> tuple[bool, int, int]:
        return (
            request.comes_last,
            max(served.get(request.client, 0), request.ticket),
            request.ticket,
        )

    return sorted(requests, key=turn)


def files_key(entry: ModelEntry) -> str:
    """Returns a string that is the same for model entries with the same files."""
    return "\0".join(map(str, entry.all_files))


def process_key(entry: ModelEntry, overrides: LoadOverrides) -> str:
    """Returns a string that is the same for requests that share a process: requests
    with equal files and load options.

    The context length is not part of the string, because a longer context also serves
    requests for shorter contexts.
    """
    options = {"n_batch": DEFAULT_UBATCH_TOKENS, **overrides}
    options.pop("n_ctx", None)
    return f"{files_key(entry)}\0{sorted(options.items())}"


class ManagedModel:
    """A model that is loaded, or for which a request waits."""

    def __init__(self, key: str, entry: ModelEntry) -> None:
        self.key = key  # identifies the model (`process_key`)
        # the entry for which the model's memory was measured last; at first, the first
        # request's entry
        self.entry = entry
        # The manager's task that loads and unloads the model.
        self.task: asyncio.Task[None]
        # Versions of the files when the model was measured.
        self.files: tuple[FileVersion, ...] = ()
        # True if a file has changed since the model was measured.
        self.files_changed = False
        # {name that uses the loaded model: last granted request with this name}
        self.uses: dict[str, LeaseRequest] = {}
        # waiting requests in their order of arrival.
        self.waiting: list[LeaseRequest] = []
        # {waiting client: ticket when one of its requests last began or ended}.
        self._served: dict[str, int] = {}
        # Names that stop using the model after their current answer.
        self.unloads: set[str] = set()
        # Requests that were granted and have not been released.
        self.users: set[LeaseRequest] = set()
        # The process that has loaded the model; None: not loaded.
        self.process: WorkerProcess | None = None
        # Share of the model that was read in the current or last load, 0 to 1.
        self.load_share = 0.0
        self.ending = asyncio.Event()  # set when the process must end, or has ended
        self._timer: asyncio.TimerHandle | None = None
        self.overrides: LoadOverrides = {}  # load options of the current or last load
        self.ready = Ready(n_ctx=0)
        self.plan: Plan  # the plan of the current or last load; unset before a load
        # Context length of a load whose request does not set one.
        self.default_n_ctx = 0
        # {RAM or device: bytes}, reserved from the decision to load until the process
        # has ended
        self.used: dict[str, int] = {}
        # {tier: the bytes of `used` that count towards its budget}.
        self.cache_bytes: dict[str, int] = {}
        self.changing_budget = asyncio.Lock()
        # {tier: budget that a client set while the model was loaded}; a reload keeps
        # these budgets
        self.asked_budgets: dict[str, ExpertCache] = {}
        self.last_used_s = 0.0
        self.n_requests = 0

    @property
    def name(self) -> str:
        """Returns the first name that uses the model. If no name uses the model,
        returns the name of its entry."""
        return next(iter(self.uses), self.entry.name)

    @property
    def queue(self) -> list[LeaseRequest]:
        """Returns the waiting requests in their current serving order."""
        return in_turn(self.waiting, self._served)

    def grant(self, request: LeaseRequest) -> None:
        """Ends a request's wait: from now on the request uses the model."""
        self.waiting.remove(request)
        self.users.add(request)
        self.n_requests += request.will_answer
        self._note_served(request)
        request.end()

    def release(self, request: LeaseRequest) -> None:
        """Ends a request's use of the model."""
        self.users.remove(request)
        self._note_served(request)

    def _note_served(self, request: LeaseRequest) -> None:
        # Does not count as a turn, because other requests do not wait for it.
        if not request.will_answer:
            return
        self._served[request.client] = next(_tickets)
        # Only waiting clients need an entry: a later request gets a ticket that is
        # higher than all of these.
        clients = {other.client for other in self.waiting}
        self._served = {
            client: ticket
            for client, ticket in self._served.items()
            if client in clients
        }

    def expires_s(self, name: str) -> float:
        """Returns the time (on the event loop's clock) at which `name` stops using the
        model.

        The time is inf while a request with this name uses the model or waits for it,
        and if the keep-alive time is inf.
        """
        if any(request.name == name for request in (*self.waiting, *self.users)):
            return math.inf
        return self.uses[name].last_used_s + self.uses[name].keep_alive_s

    def has_others(self, name: str) -> bool:
        """Returns True if names other than `name` use the model or wait for it."""
        return bool(
            ({request.name for request in self.waiting} | self.uses.keys()) - {name}
        )

    @property
    def answering(self) -> list[LeaseRequest]:
        """Returns the granted requests that generate or embed."""
        return [request for request in self.users if request.will_answer]

    @property
    def is_ready(self) -> bool:
        """True if the model is loaded and `ending` is not set."""
        return self.process is not None and not self.ending.is_set()

    @property
    def has_room(self) -> bool:
        """True if fewer requests generate or embed than the model can answer at
        once."""
        return len(self.answering) < self.ready.n_parallel

    @property
    def stopping(self) -> bool:
        """True if the model is being unloaded, or will be unloaded after its current
        answers."""
        return self.ending.is_set() or any(
            not self.has_others(name) for name in self.unloads
        )

    def set_timer(self, at_s: float, call: Callable[[], object]) -> None:
        """Cancels the earlier timer and calls `call` at the time `at_s` (on the event
        loop's clock). inf: `call` is never called."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            None if at_s == math.inf else asyncio.get_running_loop().call_at(at_s, call)
        )

    def reset(self) -> None:
        """Clears the state of the load, after the process has ended. The reserved
        memory is treated as free again."""
        self.process, self.used, self.n_requests = None, {}, 0
        self.uses, self.unloads, self.ending = {}, set(), asyncio.Event()
        self.set_timer(math.inf, self.reset)

    @property
    def devices(self) -> list[str]:
        """Returns the names of the devices on which memory is reserved for the model.
        RAM is not a device."""
        return [place for place in self.used if place != RAM]

    def places_of(self, tier: str) -> list[str]:
        """Returns the places (RAM, devices) whose memory the budget of a tier uses."""
        return [RAM] if tier == RAM else self.devices or [RAM]

    def set_budgets(self, n_bytes: Mapping[str, int]) -> None:
        """Changes the bytes that are counted for budgets. `n_bytes`: {tier: bytes}.
        Several devices share a change in proportion to their used bytes."""
        for tier, n in n_bytes.items():
            places, change = self.places_of(tier), n - self.cache_bytes[tier]
            total = sum(self.used[place] for place in places)
            for place in places[1:]:
                part = change * self.used[place] // max(1, total)
                self.used[place] += part
                change -= part
            self.used[places[0]] += change
            self.cache_bytes[tier] = n

    def serves(self, request: LeaseRequest) -> bool:
        """Returns True if the loaded model has the files and the context length that
        `request` needs.

        A longer context also serves a request for a shorter context, because a reload
        would lose cached data.
        """
        if request.entry.weights != self.entry.weights or self.files_changed:
            return False
        own_n_ctx = self.overrides.get("n_ctx", 0)
        if (n_ctx := request.overrides.get("n_ctx")) is None:
            return not own_n_ctx or self.ready.n_ctx >= self.default_n_ctx
        # The loaded context may be shorter than the option `n_ctx`, since the model's
        # own length limits it.
        return n_ctx <= max(self.ready.n_ctx, own_n_ctx)

    def look_at_files(self) -> None:
        """Sets `files_changed` to True if a file was written or replaced since the
        model was measured, otherwise to False. Deleted files are ignored."""
        self.files_changed = any(file.is_changed() for file in self.files)

    def status(self) -> LoadedModel:
        """Returns the state of the model, which must be loaded, with the statistics
        that its process reported last."""
        process, now = self.process, datetime.now(UTC)
        assert process is not None
        names = list[LoadedName]()
        for name, use in self.uses.items():
            left_s = min(use.keep_alive_s, self.expires_s(name) - time.monotonic())
            expires = (
                None
                if left_s == math.inf
                else now + timedelta(seconds=max(0.0, left_s))
            )
            names.append(LoadedName(name, use.entry.digest, expires))
        times = [each.expires for each in names if each.expires is not None]
        last = process.last_summaries.get(current_owner.get(), AnswerSummary())
        return LoadedModel(
            name=self.name,
            names=tuple(names),
            digest=names[0].digest if names else self.entry.digest,
            pid=process.pid,
            n_ctx=self.ready.n_ctx,
            size_bytes=sum(self.used.values()),
            vram_bytes=sum(self.used.values()) - self.used.get(RAM, 0),
            expires=max(times, default=now) if len(times) == len(names) else None,
            busy=bool(self.answering),
            stopping=self.stopping,
            queue=len(self.waiting),
            n_requests=self.n_requests,
            stats=process.stats,
            plan=self.plan,
            decisions=process.decisions,
            cache_bytes=dict(self.cache_bytes),
            n_parallel=self.ready.n_parallel,
            n_answering=len(self.answering),
            last_answer_tokens=last.answer_tokens,
            last_answer_s=last.answer_s,
            last_answer_stats=last.stats,
        )
