"""The use of a model by one request, and what the request may call meanwhile; of lower priority where nobody waits."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Protocol

from moegguf.errors import OptionError, WorkerError
from moegguf.generate.embedding import Embeddings
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing
from moegguf.models.entry import ModelEntry
from moegguf.serving.events import Done, Event, LoadedModel
from moegguf.serving.managed_model import ManagedModel, Waiter
from moegguf.serving.wire import build
from moegguf.serving.worker_process import PendingRequest, WorkerProcess


class Calls(ABC):
    """What a request may ask of a model besides answers."""

    @abstractmethod
    def events(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        """What the worker answers to a message of this kind: events, then the value. Raises its error, WorkerError."""

    async def value(self, kind: str, **fields: Any) -> Any:
        """The value of a message."""
        async with aclosing(self.events(kind, **fields)) as events:
            async for value in events:
                last = value
        return last

    async def embed(self, inputs: Sequence[Any], *, truncate: bool = True, normalize: bool = True) -> Embeddings:
        """Vectors of texts, or of lists of tokens. Raises what `moegguf.generate.embedding.embed` raises."""
        fields = {"inputs": list(inputs), "truncate": truncate, "normalize": normalize}
        return build(Embeddings, await self.value("embed", **fields))

    async def rank(self, query: str, documents: Sequence[str]) -> Embeddings:
        """Scores of documents, as vectors of one number. Raises what `moegguf.generate.embedding.rank` raises."""
        return build(Embeddings, await self.value("embed", inputs=list(documents), query=query))

    async def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special`: with the BOS token, and with names of special tokens parsed as such."""
        return list(await self.value("tokenize", text=text, special=special))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by name."""
        return str(await self.value("detokenize", tokens=list(tokens)))

    async def count(self, generation: GenerationRequest) -> int:
        """The tokens of a conversation's prompt. Raises what `moegguf.generate.prompt.count_prompt` raises."""
        return int(await self.value("count", generation=generation))

    async def render(self, generation: GenerationRequest) -> str:
        """The text of a conversation's prompt. Raises what `moegguf.generate.prompt.render_prompt` raises."""
        return str(await self.value("render", generation=generation))


class Lease(Calls):
    """The use of a model, inside `async with`, which sets `entry`, `loaded` (state when the lease was granted) and
    `load_s` (time that the last load took for this lease, 0 when the model was loaded already).

    The next request is granted as soon as the model has finished an answer, even when this one's reader has not; the
    next call then waits in the queue again. Leaving the block cancels what still runs.

    A call whose process ends before it gave anything is repeated once, with a new process. Every call raises
    WorkerError when the process ends later, or again.
    """

    entry: ModelEntry
    loaded: LoadedModel
    load_s: float

    def __init__(
        self, acquire: Callable[[], Awaitable[tuple[ManagedModel, Waiter]]], release: Callable[..., None]
    ) -> None:
        """`acquire` waits for the model; `release` gives back what it gave."""
        self._acquire_model = acquire
        self._release_model = release
        self._acquired: tuple[ManagedModel, Waiter] | None = None
        self._process: WorkerProcess
        self._request: PendingRequest | None = None

    async def __aenter__(self) -> Lease:
        await self._acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._request is None or self._request.ended:
            self._release()
        else:
            self._request.cancel()  # released when the worker has stopped

    async def answer(self, generation: GenerationRequest, *, stream: bool = True) -> AsyncGenerator[Event, None]:
        """`PromptProgress` of a long prompt, `Delta`s, and last `Done`. Closing it stops the answer within a token.
        Without `stream` there is one `Delta` with the whole answer.

        Raises what `moegguf.generate.answer.BatchedAnswer.read` gives.
        """
        async with aclosing(self.events("generate", generation=generation, stream=stream)) as events:
            async for event in events:
                if isinstance(event, Delta | PromptProgress):
                    yield event
                else:
                    self._process.last_timing = build(Timing, event)
                    yield Done(self._process.last_timing, self.load_s, self._process.decisions)

    async def events(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        """The events of a request, then its value; sent once more when the process ends before the first of them."""
        beside_answers = kind in ("tokenize", "detokenize", "count", "render")
        has_events = is_repeated = False
        while True:
            if self._acquired is None and (is_repeated or not beside_answers):
                await self._acquire()
            try:
                if beside_answers:
                    request = self._process.request(kind, **fields)
                else:
                    assert self._acquired is not None
                    if not self._acquired[1].will_answer:
                        raise OptionError("this lease was taken with will_answer=False; take another one.")
                    request = self._request = self._process.request(kind, self._release, **fields)
                try:
                    async for event in request.events():
                        has_events = True
                        yield event
                    return
                finally:
                    request.cancel()
            except WorkerError:
                if has_events or is_repeated:
                    raise
                is_repeated = True
                self._release()  # of a request that could not be sent

    async def _acquire(self) -> None:
        while True:
            self._acquired = model, waiter = await self._acquire_model()
            if model.process is not None:
                break
            self._release()  # the process ended after the grant
        self._process, self.entry, self.load_s = model.process, waiter.entry, waiter.load_s
        self.loaded = model.status(asyncio.get_running_loop().time())

    def _release(self) -> None:
        acquired, self._acquired = self._acquired, None
        if acquired is not None:
            self._release_model(*acquired)


MAX_WAIT_S = 30.0
POLL_S = 0.02


class Leases(Protocol):
    """The part of a manager that is needed here."""

    def lease(self, *arguments: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
        """The use of a model by one request (`ModelManager.lease`)."""

    def loaded(self) -> list[LoadedModel]:
        """The models in memory."""


class BackgroundLeases:
    """`lease` as `ModelManager` has it, for requests in the background.

    At most one of them is in the queue of a model, so that another request waits for one of them at most, besides those
    that are computed already. It joins the queue while no other request waits, and after MAX_WAIT_S all the same: a
    busy server still answers a request in the background from time to time.
    """

    def __init__(self, manager: Leases) -> None:
        self._manager = manager
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def lease(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        """A lease of the manager, inside `async with`. Raises what entering that raises."""
        async with AsyncExitStack() as stack:
            async with self._turn:
                until_s = time.monotonic() + MAX_WAIT_S
                while any(model.queue for model in self._manager.loaded()) and time.monotonic() < until_s:
                    await asyncio.sleep(POLL_S)
                entered = await stack.enter_async_context(self._manager.lease(*arguments, **options))
            yield entered
