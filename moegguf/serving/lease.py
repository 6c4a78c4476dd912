"""A model as the manager knows it, and the use of a model by one request.

A `ManagedModel` has the files, the names that use them, waiting and current requests, expiry, memory and the worker
process. It is state only: it starts, awaits and ends nothing. model_manager.py decides.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from moegguf.engine.memory import DEFAULT_UBATCH_TOKENS
from moegguf.errors import OptionError, WorkerError
from moegguf.generate.request import AnswerSummary, Delta, PromptProgress, Request
from moegguf.gguf.reader import FileVersion
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache
from moegguf.serving.clients import BACKGROUND, current_client, current_owner
from moegguf.serving.events import Done, Event, LoadedModel, LoadedName, LoadOverrides
from moegguf.serving.memory_budget import RAM
from moegguf.serving.wire import Ready, build
from moegguf.serving.worker_process import SentRequest, WorkerProcess
from moegguf.text import to_utf8

if TYPE_CHECKING:
    from moegguf.generate.embedding import Embeddings

MAX_WAIT_S = 30.0  # longest time in which a request in the background comes after all others
BESIDE_ANSWERS = ("tokenize", "pieces", "count", "render")  # messages that a model replies to while it answers others


_tickets = itertools.count(1)


@dataclass(eq=False)
class LeaseRequest:
    """A request that waits for a model and, once granted, uses it.

    While the request waits, `overrides` include the entry's own parameters and the overrides of the last request of its
    name. `keep_alive_s` after `last_used_s` the name gives the model up, if this was its last request.
    """

    entry: ModelEntry
    overrides: LoadOverrides
    keep_alive_s: float
    will_answer: bool = True  # the request generates: a model does this for `n_parallel` requests at once
    ticket: int = field(default_factory=_tickets.__next__)  # order of arrival over all models
    since_s: float = field(default_factory=time.monotonic)
    client: str = field(default_factory=current_client.get)
    load_s: float = 0.0  # duration of the load that the request waited for
    last_used_s: float = 0.0  # the event loop's clock
    granted: asyncio.Future[Any] = field(default_factory=asyncio.Future)
    model: ManagedModel = field(init=False)  # the model that the request waits for

    @property
    def name(self) -> str:
        """The canonical name that was asked for."""
        return self.entry.name

    @property
    def comes_last(self) -> bool:
        """Returns whether the request is in the background, and has not waited for long."""
        return self.client == BACKGROUND and time.monotonic() - self.since_s < MAX_WAIT_S

    def end(self, error: Exception | None = None) -> None:
        """Ends the wait, with `error` where there is one."""
        if not self.granted.done():
            if error is None:
                self.granted.set_result(None)
            else:
                self.granted.set_exception(error)

    def same_load(self, other: LeaseRequest) -> bool:
        """Returns whether both requests need equal files with equal overrides."""
        return self.overrides == other.overrides and self.entry.weights == other.entry.weights


def in_turn(requests: Iterable[LeaseRequest], served: Mapping[str, int]) -> list[LeaseRequest]:
    """Returns the requests in the order in which they are served now.

    The next client is the one that has waited longest since one of its requests began or ended (`served` has the ticket
    of that time). So nobody waits for more than one request of each other client per request of its own. Requests in
    the background come last, until they have waited for MAX_WAIT_S.
    """

    def turn(request: LeaseRequest) -> tuple[bool, int, int]:
        return request.comes_last, max(served.get(request.client, 0), request.ticket), request.ticket

    return sorted(requests, key=turn)


def files_key(entry: ModelEntry) -> str:
    """Equal for entries of the same files."""
    return "\0".join(map(str, entry.all_files))


def process_key(entry: ModelEntry, overrides: LoadOverrides) -> str:
    """Returns a text that is equal for requests which share a process: requests with equal files and load options.

    The context does not count, as the longest context serves all requests.
    """
    n_batch = overrides.n_batch or DEFAULT_UBATCH_TOKENS
    return f"{files_key(entry)}\0{overrides.n_threads}\0{n_batch}\0{overrides.expert_cache}\0{overrides.draft}"


class ManagedModel:
    """Files that are loaded, or that a request waits for. `key`: what identifies it (`process_key`); `entry`: the one
    that it was last measured for; `uses`: the names that use it while it is loaded, in order of their first request,
    each with its last one."""

    def __init__(self, key: str, entry: ModelEntry) -> None:
        self.key = key
        self.entry = entry
        self.task: asyncio.Task[None]  # the manager's, which loads and ends it
        self.files: tuple[FileVersion, ...] = ()  # the files at the time when the model was measured
        self.files_changed = False  # whether a file has changed since then
        self.uses: dict[str, LeaseRequest] = {}
        self.waiting: list[LeaseRequest] = []  # requests in their order of arrival
        self._served: dict[str, int] = {}  # ticket at which a request of a waiting client last began or ended
        self.unloads: set[str] = set()  # names that are to give it up
        self.users: set[LeaseRequest] = set()  # requests that were granted and have not ended
        self.process: WorkerProcess | None = None  # the process that has loaded the model
        self.load_share = 0.0  # share of the file that the process has read so far
        self.ending = asyncio.Event()  # the process is to end, or has ended
        self._timer: asyncio.TimerHandle | None = None
        self.overrides = LoadOverrides()  # overrides of the request that the model was loaded for
        self.ready = Ready(n_ctx=0)
        self.default_n_ctx = 0  # context of a load without overrides
        self.used: dict[str, int] = {}  # bytes by place, reserved from the decision to load until the process has ended
        self.cache_bytes: dict[str, int] = {}  # the part of `used` for slots that are in use, by name of the budget
        self.changing_budget = asyncio.Lock()
        self.asked_budgets: dict[str, ExpertCache] = {}  # while it is loaded; a reload keeps them
        self.last_used_s = 0.0
        self.n_requests = 0

    @property
    def name(self) -> str:
        """The first of the names that use it; of a model that is not loaded, the one it was measured for."""
        return next(iter(self.uses), self.entry.name)

    @property
    def queue(self) -> list[LeaseRequest]:
        """The waiting requests, in the order in which they are served."""
        return in_turn(self.waiting, self._served)

    def grant(self, request: LeaseRequest) -> None:
        """Ends the wait of a request, who uses the model from now on."""
        self.waiting.remove(request)
        self.users.add(request)
        self.n_requests += request.will_answer
        self._note_served(request)
        request.end()

    def release(self, request: LeaseRequest) -> None:
        """Ends the use of the model."""
        self.users.remove(request)
        self._note_served(request)

    def _note_served(self, request: LeaseRequest) -> None:
        if not request.will_answer:  # others are granted beside it
            return
        self._served[request.client] = next(_tickets)
        clients = {other.client for other in self.waiting}  # the tickets of others who come are later
        self._served = {client: ticket for client, ticket in self._served.items() if client in clients}

    def expires_s(self, name: str) -> float:
        """Returns the time at which `name` gives the model up (the event loop's clock).

        The time is inf while requests of that name use the model or wait.
        """
        if any(request.name == name for request in (*self.waiting, *self.users)):
            return math.inf
        return self.uses[name].last_used_s + self.uses[name].keep_alive_s

    def has_others(self, name: str) -> bool:
        """Returns whether other names than `name` use the model, or wait for it."""
        return bool(({request.name for request in self.waiting} | self.uses.keys()) - {name})

    @property
    def answering(self) -> list[LeaseRequest]:
        """Requests that are generating now."""
        return [request for request in self.users if request.will_answer]

    @property
    def is_ready(self) -> bool:
        """True while the model is loaded and is not about to end."""
        return self.process is not None and not self.ending.is_set()

    @property
    def has_room(self) -> bool:
        """True if one more request would be answered at once, if no request waits."""
        return len(self.answering) < self.ready.n_parallel

    @property
    def stopping(self) -> bool:
        """True if the model is being unloaded, or will be once it is unused."""
        return self.ending.is_set() or any(not self.has_others(name) for name in self.unloads)

    def set_timer(self, at_s: float, call: Callable[[], object]) -> None:
        """Calls `call` then (the event loop's clock; inf: never), and not when it was to be called before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at_s == math.inf else asyncio.get_running_loop().call_at(at_s, call)

    def reset(self) -> None:
        """The process has ended: frees the reservation."""
        self.process, self.used, self.n_requests = None, {}, 0
        self.uses, self.unloads, self.ending = {}, set(), asyncio.Event()
        self.set_timer(math.inf, self.reset)

    @property
    def devices(self) -> list[str]:
        """The devices that compute it, while it has memory; none: the CPU does."""
        return [place for place in self.used if place != RAM]

    def places_of(self, budget: str) -> list[str]:
        """Returns the places of a budget, "expert_cache" or "vram_cache"."""
        return [RAM] if budget == "expert_cache" else self.devices or [RAM]

    def set_budgets(self, n_bytes: Mapping[str, int]) -> None:
        """Counts this for slots, by budget; of several devices, each takes a part of the change as large as the part
        that it has."""
        for budget, n in n_bytes.items():
            places, change = self.places_of(budget), n - self.cache_bytes[budget]
            total = sum(self.used[place] for place in places)
            for place in places[1:]:
                part = change * self.used[place] // max(1, total)
                self.used[place] += part
                change -= part
            self.used[places[0]] += change
            self.cache_bytes[budget] = n

    def serves(self, request: LeaseRequest) -> bool:
        """Returns whether the loaded model has the content and context that `request` needs; else it is loaded again.

        A longer context serves a request for a shorter one: the tokens are the same, and a reload would lose what is
        cached.
        """
        if request.entry.weights != self.entry.weights or self.files_changed:
            return False
        if (n_ctx := request.overrides.n_ctx) is None:
            return self.overrides.n_ctx is None or self.ready.n_ctx >= self.default_n_ctx
        # A context longer than the model's own was cut: a request for the same length needs no reload.
        return n_ctx <= max(self.ready.n_ctx, self.overrides.n_ctx or 0)

    def look_at_files(self) -> None:
        """Notes whether a file was written to or replaced since the model was measured. A model whose file is gone
        stays as it is."""
        self.files_changed = any(file.is_changed() for file in self.files)

    def status(self) -> LoadedModel:
        """Returns the current state and the statistics that the process reported last. The model must be loaded."""
        process, now = self.process, datetime.now(UTC)
        assert process is not None
        names = list[LoadedName]()
        for name, use in self.uses.items():
            left_s = min(use.keep_alive_s, self.expires_s(name) - time.monotonic())
            expires = None if left_s == math.inf else now + timedelta(seconds=max(0.0, left_s))
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
            plan=self.ready.plan,
            decisions=process.decisions,
            expert_cache_bytes=self.cache_bytes["expert_cache"],
            vram_cache_bytes=self.cache_bytes["vram_cache"],
            n_parallel=self.ready.n_parallel,
            n_answering=len(self.answering),
            last_answer_tokens=last.answer_tokens,
            last_answer_s=last.answer_s,
        )


class Calls(ABC):
    """The calls that a request may make of a model.

    A call whose process ends before it gave anything is repeated once, with a new process. Every call raises
    WorkerError when the process ends later, or again.
    """

    @abstractmethod
    def _attempt(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        """Yields a worker's reply to a message of this kind: events, then the value. Raises its error, WorkerError."""

    async def events(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        """Yields the events of a request, then its value."""
        has_begun = False
        for is_last in (False, True):
            try:
                async with aclosing(self._attempt(kind, **fields)) as events:
                    async for event in events:
                        has_begun = True
                        yield event
                return
            except WorkerError:
                if has_begun or is_last:
                    raise

    async def value(self, kind: str, **fields: Any) -> Any:
        """The value of a message: of "count" the tokens, of "render" the text of a conversation's prompt. Raises what
        `moegguf.generate.prompt.count_prompt` and `render_prompt` raise."""
        async with aclosing(self.events(kind, **fields)) as events:
            async for value in events:
                last = value
        return last

    async def embed(
        self, inputs: Sequence[Any], *, truncate: bool = True, normalize: bool = True, num_ctx: int | None = None
    ) -> Embeddings:
        """Returns vectors of texts, or of lists of tokens. Raises what `moegguf.generate.embedding.embed` raises."""
        from moegguf.generate.embedding import Embeddings

        fields = {"inputs": list(inputs), "truncate": truncate, "normalize": normalize, "num_ctx": num_ctx}
        fields["client_key"] = current_owner.get()
        return build(Embeddings, await self.value("embed", **fields))

    async def rank(self, query: str, documents: Sequence[str]) -> Embeddings:
        """Returns scores of documents, as vectors of one number. Raises what `moegguf.generate.embedding.rank`
        raises."""
        from moegguf.generate.embedding import Embeddings

        fields = {"query": query, "documents": list(documents), "client_key": current_owner.get()}
        return build(Embeddings, await self.value("rank", **fields))

    async def slot(self, action: str, slot: int, path: str = "", most_bytes: int = 0) -> dict[str, Any]:
        """Saves, restores or erases what a slot of the model holds of the current owner. Returns the counts of
        llama-server's reply. Raises what `moegguf.generate.slots.run_action` raises."""
        fields = {"owner": current_owner.get(), "path": path, "most_bytes": most_bytes}
        return dict(await self.value("slot", action=action, slot=slot, **fields))

    async def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special`: with the BOS token, and with names of special tokens parsed as such."""
        return list(await self.value("tokenize", text=text, special=special))

    async def pieces(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """Returns the bytes of each token, of special ones their names."""
        return build(tuple[bytes, ...], await self.value("pieces", tokens=list(tokens)))

    async def detokenize(self, prompt: Sequence[int | str]) -> str:
        """Returns the text of tokens, and of the texts among them."""
        pieces = iter(await self.pieces([each for each in prompt if isinstance(each, int)]))
        return b"".join(to_utf8(each) if isinstance(each, str) else next(pieces) for each in prompt).decode(
            errors="replace"
        )


class Lease(Calls):
    """The use of a model, inside `async with`, which sets `entry` and `load_s` (time that the last load took for this
    lease, 0 when the model was loaded already).

    The next request is granted as soon as the model has finished an answer, even when this one's reader has not; the
    next call then waits in the queue again. Leaving the block cancels what still runs.
    """

    entry: ModelEntry
    load_s: float

    def __init__(self, acquire: Callable[[], Awaitable[LeaseRequest]], release: Callable[[LeaseRequest], None]) -> None:
        """`acquire` waits for the model; `release` gives back what it gave."""
        self._acquire_model = acquire
        self._release_model = release
        self._acquired: LeaseRequest | None = None
        self._process: WorkerProcess
        self._request: SentRequest | None = None

    async def __aenter__(self) -> Lease:
        await self._acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._request is None or self._request.ended:
            self._release()
        else:
            self._request.cancel()  # released when the worker has stopped

    async def answer(self, request: Request, *, stream: bool = True) -> AsyncGenerator[Event, None]:
        """Yields `PromptProgress` of a long prompt, `Delta`s, and last `Done`. Closing it stops the answer.
        Without `stream` there is one `Delta` with the whole answer.

        Raises what `moegguf.generate.sequence.Sequence.read` gives.
        """
        async with aclosing(self.events("generate", request=request, stream=stream)) as events:
            async for event in events:
                yield self._event(event)

    async def rest(self) -> list[Event]:
        """Returns the events that nobody has read of an answer that was cancelled, up to its end. Raises its error."""
        request = self._request
        return [self._event(event) async for event in request.events()] if request else []

    def _event(self, event: Any) -> Event:
        if isinstance(event, Delta | PromptProgress):
            return event
        summary = self._process.last_summaries[current_owner.get()] = build(AnswerSummary, event)
        return Done(summary, self.load_s, self._process.decisions)

    async def _attempt(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        is_beside = kind in BESIDE_ANSWERS
        if self._acquired is None and (not is_beside or self._process.exited.done()):
            await self._acquire()
        try:
            if is_beside:
                request = self._process.request(kind, **fields)
            elif self._acquired is not None and self._acquired.will_answer:
                request = self._request = self._process.request(kind, self._release, **fields)
            else:
                raise OptionError("this lease was taken with will_answer=False; take another one.")
            try:
                async for event in request.events():
                    yield event
            finally:
                request.cancel()
        except WorkerError:
            self._release()
            raise

    async def _acquire(self) -> None:
        while True:
            self._acquired = request = await self._acquire_model()
            if request.model.process is not None:
                break
            self._release()  # the process ended after the grant
        self._process, self.entry, self.load_s = request.model.process, request.entry, request.load_s

    def _release(self) -> None:
        acquired, self._acquired = self._acquired, None
        if acquired is not None:
            self._release_model(acquired)
