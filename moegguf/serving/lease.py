"""A model's turn, and what may be asked while one has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from moegguf.errors import OptionError
from moegguf.generate.embedding import Embeddings
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing
from moegguf.models.entry import ModelEntry
from moegguf.serving.dispatcher import Dispatcher
from moegguf.serving.events import Done, Event, Loaded
from moegguf.serving.loaded_model import ManagedModel, Purpose, Waiter
from moegguf.serving.wire import build
from moegguf.serving.worker_process import PendingRequest, Process


class Lease:
    """A model for somebody, inside `async with`. `entry`, `loaded` (figures of when it was given) and `load_s` (what
    loading it took for this lease, 0 when it was there) are known there.

    The turn goes on to the next in line as soon as the model has finished an answer, even when its reader has not;
    asking again waits in line again. Leaving stops what still runs. Every call raises WorkerError when the process
    ends.
    """

    entry: ModelEntry
    loaded: Loaded
    load_s: float

    def __init__(self, scheduler: Dispatcher, new_waiter: Callable[[], Awaitable[Waiter]]) -> None:
        self._scheduler = scheduler
        self._new_waiter = new_waiter
        self._held: tuple[ManagedModel, Waiter] | None = None
        self._process: Process
        self._request: PendingRequest | None = None

    async def __aenter__(self) -> Lease:
        waiter = await self._take()
        self.entry, self.load_s = waiter.entry, waiter.load_s
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._request is None or self._request.ended:
            self._give_back()
        else:
            self._request.cancel()  # the turn goes on once it has stopped

    async def answer(self, generation: GenerationRequest, *, stream: bool = True) -> AsyncGenerator[Event, None]:
        """Progress of a long prompt, pieces of the answer, and last `Done`. Closing it stops the answer within a
        token. Without `stream` there is one piece, with all of it.

        Raises what `moegguf.generate.answer.Answer` raises.
        """
        request = await self._begin("generate", generation=generation, stream=stream)
        try:
            async for event in request.events():
                if isinstance(event, Delta | PromptProgress):
                    yield event
                else:
                    yield Done(build(Timing, event), self.load_s)
        finally:
            request.cancel()

    async def embed(self, inputs: Sequence[Any], *, truncate: bool = True, normalize: bool = True) -> Embeddings:
        """Vectors of texts, or of lists of tokens. Raises what `moegguf.generate.embedding.embed` raises."""
        request = await self._begin("embed", inputs=list(inputs), truncate=truncate, normalize=normalize)
        return build(Embeddings, await request.value())

    async def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special`: with the one that begins a text, and with names of special tokens read as
        such."""
        return list(await self._process.request("tokenize", text=text, special=special).value())

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by their names."""
        return str(await self._process.request("detokenize", tokens=list(tokens)).value())

    async def _begin(self, kind: str, **fields: Any) -> PendingRequest:
        if self._held is None:
            await self._take()
        assert self._held is not None
        if self._held[1].purpose is not Purpose.TURN:
            raise OptionError("this lease was taken with will_answer=False; take another one.")
        self._request = self._process.request(kind, self._give_back, **fields)
        return self._request

    async def _take(self) -> Waiter:
        while True:
            waiter = await self._new_waiter()
            model = await self._scheduler.acquire(waiter)
            self._held = model, waiter
            if model.process is not None:
                break
            self._give_back()  # it has ended since
        self._process = model.process
        self.loaded = model.figures(asyncio.get_running_loop().time())
        return waiter

    def _give_back(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._scheduler.release(*held)
