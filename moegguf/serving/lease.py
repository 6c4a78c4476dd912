"""The use of a model by one request (`Lease`): it waits for the model, and calls the
model's worker process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from moegguf.errors import OptionError, WorkerError
from moegguf.generate.request import AnswerSummary, Event, Request
from moegguf.models.entry import ModelEntry
from moegguf.serving.clients import current_owner
from moegguf.serving.managed_model import LeaseRequest
from moegguf.serving.wire import build
from moegguf.serving.worker_process import Call, WorkerProcess

# kinds of messages to which a worker replies while it generates
BESIDE_ANSWERS = ("tokenize", "pieces", "detokenize", "count", "render")


class Calls(ABC):
    """The calls that a request can make to a model's worker process.

    If the process ends before the first event of a call, the call is repeated once,
    with a new process. If the process ends later, or again, the call raises
    WorkerError.
    """

    @abstractmethod
    def _attempt(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        """Yields a worker's reply to a message of this kind: events, then the value.
        Raises the worker's error, or WorkerError if the process fails."""

    async def events(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        """Yields the events of a call, then its value. Repeats the call once, as
        described in the class's docstring."""
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

    def answer(
        self, request: Request, *, stream: bool = True
    ) -> AsyncGenerator[Event, None]:
        """Yields `PromptProgress` for a long prompt, then `Delta`s, and at the end an
        `AnswerSummary`. Without `stream`, there is no progress and one `Delta` at most.
        Closing the generator stops the answer.

        Raises the errors of `moegguf.generate.sequence.Sequence.read`, and WorkerError.
        """
        return self.events("generate", request=request, stream=stream)

    async def value(self, kind: str, **fields: Any) -> Any:
        """Returns the value of a call, whose kinds and fields `moegguf.serving.wire`
        lists. For example, the value of "count" is the number of tokens in a
        conversation's prompt, and the value of "render" is the prompt's text. Raises
        the worker's error, or WorkerError if the process fails."""
        async with aclosing(self.events(kind, **fields)) as events:
            async for value in events:
                last = value
        return last

    async def pieces(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """Returns the bytes of each token. The bytes of a special token are its
        name."""
        return build(tuple[bytes, ...], await self.value("pieces", tokens=list(tokens)))


class Lease(Calls):
    """The use of a model by one request, inside `async with`.

    When the worker has finished an answer, the next request is granted, even if this
    answer has not yet been read to its end. Another answer in this lease waits in the
    queue again. Leaving the block cancels a running answer.
    """

    entry: ModelEntry  # the granted request's entry; set when the model is granted
    # Seconds of the load that the lease waited for; 0: the model was already loaded.
    load_s: float

    def __init__(
        self,
        acquire: Callable[[], Awaitable[LeaseRequest]],
        release: Callable[[LeaseRequest], None],
    ) -> None:
        """`acquire` waits for the model and returns the granted request; `release` ends
        this request."""
        self._acquire_model = acquire
        self._release_model = release
        self._acquired: LeaseRequest | None = None
        self._process: WorkerProcess
        self._call: Call | None = None

    async def __aenter__(self) -> Lease:
        await self._acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._call is None or self._call.ended:
            self._release()
        else:
            # The model is released when the worker has stopped the answer.
            self._call.cancel()

    async def rest(self) -> list[Event]:
        """Returns the unread events of the last answer, up to its end, or an empty list
        if there was no answer. Raises the answer's error."""
        call = self._call
        return [event async for event in call.events()] if call else []

    async def _attempt(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        is_beside = kind in BESIDE_ANSWERS
        if self._acquired is None and (not is_beside or self._process.exited.done()):
            await self._acquire()
        try:
            if is_beside:
                call = self._process.call(kind, **fields)
            elif self._acquired is not None and self._acquired.will_answer:
                on_end = partial(self._on_end, current_owner.get())
                call = self._call = self._process.call(kind, on_end, **fields)
            else:
                raise OptionError(
                    "this lease was taken with will_answer=False; take another one."
                )
            try:
                async for event in call.events():
                    yield event
            finally:
                call.cancel()
        except WorkerError:
            self._release()
            raise

    def _on_end(self, owner: str, value: Any) -> None:
        """Completes the summary of an owner's answer, and ends the use of the model."""
        if isinstance(value, AnswerSummary):
            value.load_s, value.decisions = self.load_s, self._process.decisions
            self._process.last_summaries[owner] = value
        self._release()

    async def _acquire(self) -> None:
        while True:
            self._acquired = request = await self._acquire_model()
            if request.model.process is not None:
                break
            self._release()  # the process has ended since the request was granted
        self._process, self.entry, self.load_s = (
            request.model.process,
            request.entry,
            request.load_s,
        )

    def _release(self) -> None:
        acquired, self._acquired = self._acquired, None
        if acquired is not None:
            self._release_model(acquired)
