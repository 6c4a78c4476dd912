"""The use of a model by one request, and what the request may call meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from moegguf.errors import OptionError
from moegguf.generate.embedding import Embeddings
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing
from moegguf.models.entry import ModelEntry
from moegguf.serving.dispatcher import Dispatcher
from moegguf.serving.events import Done, Event, LoadedModel
from moegguf.serving.managed_model import ManagedModel, Purpose, Waiter
from moegguf.serving.wire import build
from moegguf.serving.worker_process import PendingRequest, WorkerProcess


class Lease:
    """The use of a model, inside `async with`, which sets `entry`, `loaded` (state when the lease was granted) and
    `load_s` (time that loading took for this lease, 0 when the model was loaded already).

    The next request is granted as soon as the model has finished an answer, even when this one's reader has not; the
    next call then waits in the queue again. Leaving the block cancels what still runs. Every call raises WorkerError
    when the process ends.
    """

    entry: ModelEntry
    loaded: LoadedModel
    load_s: float

    def __init__(self, dispatcher: Dispatcher, new_waiter: Callable[[], Awaitable[Waiter]]) -> None:
        self._dispatcher = dispatcher
        self._new_waiter = new_waiter
        self._acquired: tuple[ManagedModel, Waiter] | None = None
        self._process: WorkerProcess
        self._request: PendingRequest | None = None

    async def __aenter__(self) -> Lease:
        waiter = await self._acquire()
        self.entry, self.load_s = waiter.entry, waiter.load_s
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._request is None or self._request.ended:
            self._release()
        else:
            self._request.cancel()  # released when the worker has stopped

    async def answer(self, generation: GenerationRequest, *, stream: bool = True) -> AsyncGenerator[Event, None]:
        """`PromptProgress` of a long prompt, `Delta`s, and last `Done`. Closing it stops the answer within a token.
        Without `stream` there is one `Delta` with the whole answer.

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
        """The tokens of a text; `special`: with the BOS token, and with names of special tokens parsed as such."""
        return list(await self._process.request("tokenize", text=text, special=special).value())

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by name."""
        return str(await self._process.request("detokenize", tokens=list(tokens)).value())

    async def count(self, generation: GenerationRequest) -> int:
        """The tokens of a conversation's prompt. Raises what `moegguf.generate.prompt.count_prompt` raises."""
        return int(await self._process.request("count", generation=generation).value())

    async def _begin(self, kind: str, **fields: Any) -> PendingRequest:
        if self._acquired is None:
            await self._acquire()
        assert self._acquired is not None
        if self._acquired[1].purpose is not Purpose.EXCLUSIVE:
            raise OptionError("this lease was taken with will_answer=False; take another one.")
        self._request = self._process.request(kind, self._release, **fields)
        return self._request

    async def _acquire(self) -> Waiter:
        while True:
            waiter = await self._new_waiter()
            model = await self._dispatcher.acquire(waiter)
            self._acquired = model, waiter
            if model.process is not None:
                break
            self._release()  # the process ended after the grant
        self._process = model.process
        self.loaded = model.status(asyncio.get_running_loop().time())
        return waiter

    def _release(self) -> None:
        acquired, self._acquired = self._acquired, None
        if acquired is not None:
            self._dispatcher.release(*acquired)
