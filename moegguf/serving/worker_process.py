"""The server's side of one worker: start it, load, send requests, hear of its end. On one event loop.

Every request ends: with the worker's own end, or with a WorkerError when the process dies. Cancelling is a promise
that needs no waiting: a worker that does not stop within CANCEL_GRACE_S is killed. Knows one process; which one, and
whose turn it is, is up to pool.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from moegguf.engine.stats import Stats
from moegguf.errors import MoeggufError, WorkerError
from moegguf.serving.events import Snapshot
from moegguf.serving.wire import EVENTS, MAX_MESSAGE_BYTES, Message, Order, Ready, build, build_error, decode, encode

FAILURE_WORDS = ("ASSERT", "rror", "abort", "what():")


class WorkerConnection(asyncio.Protocol):
    """Cuts what arrives into lines."""

    def __init__(self, on_line: Callable[[bytearray], None], on_lost: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_lost = on_lost
        self._rest = bytearray()

    def data_received(self, data: bytes) -> None:
        searched = len(self._rest)
        self._rest += data
        while (end := self._rest.find(b"\n", searched)) >= 0:
            line = self._rest[:end]
            del self._rest[: end + 1]
            searched = 0
            self._on_line(line)
        if len(self._rest) > MAX_MESSAGE_BYTES:
            self._rest.clear()
            self._on_lost()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()


class PendingRequest:
    """One request that a worker has: its events as they come. `on_end` is called once, when it has `ended`."""

    def __init__(self, on_end: Callable[[], None], on_cancel: Callable[[], asyncio.TimerHandle]) -> None:
        self.ended = False
        self._on_end = on_end
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._overdue: asyncio.TimerHandle | None = None

    async def events(self) -> AsyncIterator[Any]:
        """Events in order, then the value that ends the request. Raises what the worker raised, or WorkerError."""
        while True:
            kind, value = await self._events.get()
            if kind == "error":
                raise value
            yield value
            if kind == "value":
                return

    async def value(self) -> Any:
        """The value at its end; leaving early cancels."""
        try:
            async for value in self.events():
                last = value
            return last
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Asks the worker to stop, and kills it when it does not. Without effect once the request has ended."""
        if self.ended or self._overdue is not None:
            return
        self._overdue = self._on_cancel()

    def put(self, kind: str, value: Any) -> None:
        """An event ("event"), or the end ("value", "error")."""
        self._events.put_nowait((kind, value))
        if kind != "event":
            if self._overdue is not None:
                self._overdue.cancel()
            self.ended = True
            self._on_end()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(text: str) -> str:
    """The line that says most about an end: the last one that speaks of a failure, at most 300 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line[:300] for line in reversed(lines) if any(word in line for word in FAILURE_WORDS)), "")


# -P: a folder named moegguf where the server was started is not this package.
COMMAND = (sys.executable, "-P", "-m", "moegguf.serving.worker")

CANCEL_GRACE_S = 2.0
CLOSE_GRACE_S = 5.0
LAST_WORDS_BYTES = 4096
_DRAIN_S = 1.0  # for what a process wrote before it ended

OnView = Callable[[Snapshot], None]


class LoadStalledError(WorkerError):
    """A worker has read nothing for too long."""


def _nothing() -> None:
    """Nobody wants to know."""


class Process:
    """A worker. `stats` and `decisions` are the last it told. `ended` holds, once it is gone, the error that says
    why; `on_end` is called then, before its requests hear of it."""

    def __init__(self, name: str, on_view: OnView, echo: bool = False) -> None:
        self.name = name
        self._echo = echo
        self.stats = Stats()
        self.decisions: Mapping[str, Any] = {}
        self.ended: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        self.on_end: Callable[[], None] = _nothing
        self._on_view = on_view
        self._lost = asyncio.Event()
        self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._heard = asyncio.Event()  # something was read while loading
        self._on_share: Callable[[float], object] = lambda share: None
        self._requests: dict[int, PendingRequest] = {}
        self._number = 0
        self._reason = ""
        self._words = bytearray()
        self._transport: asyncio.Transport
        self._child: asyncio.subprocess.Process
        self._watcher: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        name: str,
        on_view: OnView,
        *,
        command: Sequence[str] = COMMAND,
        echo: bool = False,
    ) -> Process:
        """A worker that waits for what to load; `echo` passes on what it writes to stderr.

        Raises WorkerError when the system gives no process.
        """
        self, loop = cls(name, on_view, echo), asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                )
        except OSError as error:
            ours.close()
            raise WorkerError(
                f"no process can be started for {name!r} ({error}); end others, then try again."
            ) from None
        self._transport, _ = await loop.create_unix_connection(
            lambda: WorkerConnection(self._take_line, self._lost.set), sock=ours
        )
        self._watcher = loop.create_task(self._watch_over())
        return self

    @property
    def pid(self) -> int:
        return self._child.pid

    async def load(self, order: Order, stall_s: float, on_share: Callable[[float], object]) -> Ready:
        """Loads the model. Raises what loading raises, WorkerError when the process ends, LoadStalledError."""
        self._on_share = on_share
        self.send("load", order=order)
        waiting: set[asyncio.Future[Any]] = {self._loaded, self.ended}
        while True:
            self._heard.clear()
            hearing = asyncio.ensure_future(self._heard.wait())
            try:
                await asyncio.wait(
                    {*waiting, hearing},
                    timeout=None if stall_s == math.inf else stall_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                hearing.cancel()
            told = self._loaded.done() and not self._loaded.cancelled()
            ready = self._loaded.result() if told else None  # why it failed says more than that it ended
            if self.ended.done():
                raise self.ended.result()
            if ready is not None:
                return ready
            if not self._heard.is_set():
                self.kill("")
                raise LoadStalledError(
                    f"loading {self.name!r} has read nothing for {stall_s:g} s; check the disk, or set"
                    " MOEGGUF_LOAD_TIMEOUT to a longer time."
                )

    def request(self, kind: str, on_end: Callable[[], None] = _nothing, **fields: Any) -> PendingRequest:
        """Sends a request. Raises OptionError when it cannot be written, WorkerError when the process is gone."""
        if self.ended.done():
            raise self.ended.result()
        self._number += 1
        line = encode({"kind": kind, "id": self._number, **fields})
        request = self._requests[self._number] = PendingRequest(on_end, functools.partial(self._cancel, self._number))
        self._transport.write(line)
        return request

    def send(self, kind: str, **fields: Any) -> None:
        """A message without an answer; lost when the process is gone."""
        if not self.ended.done():
            self._transport.write(encode({"kind": kind, **fields}))

    def _cancel(self, number: int) -> asyncio.TimerHandle:
        """Asks the worker to stop a request; the timer kills it when it does not."""
        self.send("cancel", id=number)
        late = "it did not stop when it was asked to"
        return asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self.kill, late)

    def kill(self, reason: str) -> None:
        """Ends the process now; `reason` is told to its requests."""
        if not self.ended.done():
            self._reason = self._reason or reason
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Ends the process, kindly at first, and returns when it is gone. Twice is harmless."""
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watcher), grace_s)
            return
        self.kill("it did not end when it was asked to")
        await asyncio.shield(self._watcher)

    def _take_line(self, line: bytearray) -> None:
        try:
            self._take(decode(line))
        except (MoeggufError, KeyError, TypeError) as error:
            self.kill(f"it wrote what nobody understands: {error}")

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "event":
            self._take_event(message)
        elif kind == "end":
            self._take_figures(message)
            request = self._requests.pop(message["id"], None)
            if request is not None and "error" in message:
                request.put("error", build_error(message["error"]))
            elif request is not None:
                request.put("value", message["value"])
        elif kind == "view":
            snapshot = build(Snapshot, message["view"])
            self.stats, self.decisions = snapshot.stats, message["decisions"]
            self._on_view(snapshot)
        else:
            self._take_loading(kind, message)

    def _take_event(self, message: Message) -> None:
        request = self._requests.get(message["id"])
        for name, event in EVENTS.items():
            if name in message and request is not None:
                request.put("event", build(event, message[name]))

    def _take_loading(self, kind: str, message: Message) -> None:
        self._heard.set()
        if self._loaded.done():
            return
        if kind == "loading":
            self._on_share(float(message["share"]))
        elif kind == "ready":
            self._take_figures(message)
            self._loaded.set_result(build(Ready, message["ready"]))
        elif kind == "failed":
            self._loaded.set_exception(build_error(message["error"]))

    def _take_figures(self, message: Message) -> None:
        self.stats, self.decisions = build(Stats, message["stats"]), message["decisions"]

    async def _watch_over(self) -> None:
        """Until the process has ended, whichever way; then every request it had ends."""
        listening = asyncio.ensure_future(self._listen_to_words())
        lost, gone = asyncio.ensure_future(self._lost.wait()), asyncio.ensure_future(self._child.wait())
        await asyncio.wait({lost, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            await asyncio.wait({gone}, timeout=CLOSE_GRACE_S)
            if not gone.done():
                self.kill("it closed its socket")
        code = await gone
        await asyncio.wait({lost, listening}, timeout=_DRAIN_S)
        lost.cancel()
        listening.cancel()
        self._transport.close()
        self._finish(code)

    async def _listen_to_words(self) -> None:
        """What the process writes to stderr: its last words say why it ended."""
        assert self._child.stderr is not None
        while data := await self._child.stderr.read(LAST_WORDS_BYTES):
            if self._echo:
                sys.stderr.write(data.decode(errors="replace"))
            self._words += data
            del self._words[:-LAST_WORDS_BYTES]

    def _finish(self, code: int) -> None:
        error = WorkerError(self._death_message(code))
        self.ended.set_result(error)
        self._loaded.cancel()
        self.on_end()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.put("error", error)

    def _death_message(self, code: int) -> str:
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        why = self._reason or last_words(self._words.decode(errors="replace"))
        return (
            f"the process that held {self.name!r} has ended ({how}{': ' if why else ''}{why});"
            " the next request loads it again."
        )
