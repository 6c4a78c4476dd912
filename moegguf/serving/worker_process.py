"""The server's side of one worker process: start, load, requests, exit. Runs on one
event loop.

Every call ends: with the worker's reply, or with a WorkerError when the process exits.
Cancelling a call returns immediately. A worker that does not stop a cancelled call in
time (`cancel_grace_s`) is killed, but not while it also has calls that are not
cancelled. model_manager.py decides which requests are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moegguf.child import child_command, child_environment, kill_child
from moegguf.decisions import log_decision
from moegguf.engine.stats import Stats
from moegguf.errors import DeviceLostError, MoeggufError, OptionError, WorkerError
from moegguf.generate.request import AnswerSummary
from moegguf.serving import wire
from moegguf.settings import read_environment

if TYPE_CHECKING:
    from moegguf.serving.memory_budget import LoadConfig

log = logging.getLogger(__name__)

COMMAND = child_command("moegguf.serving.worker")

CANCEL_GRACE_S = 2.0
CLOSE_GRACE_S = 5.0
STDERR_TAIL_BYTES = 4096
FAILURE_MARKS = ("ASSERT", "rror", "abort", "what():")
# llama.cpp logs this for a cancelled pass.
CANCELLED_PASS = "compute_async failed with error 1"
MAX_FAILURE_CHARS = 300
DEVICE_FAILURE_MARK = "moegguf: the device failed:"
_LOST = (
    "a device that ran the model failed ({}); the next request loads the model again, without any of the devices on"
    " which it ran."
)
OnLoad = Callable[[float], object]
_DRAIN_S = 1.0  # seconds for reading the last output of a process after its exit


def ignore(*_: object) -> None:
    """Does nothing."""


class Call:
    """A message that was sent to a worker, and the events of its reply. Calls `on_end` once with
    the value or the error, when `ended` becomes True."""

    def __init__(
        self, process: WorkerProcess, number: int, on_end: Callable[[Any], object]
    ) -> None:
        self.ended = self.cancelled = False
        self._process = process
        self._number = number
        self._on_end = on_end
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._kill_timer: asyncio.TimerHandle | None = None

    async def events(self) -> AsyncGenerator[Any]:
        """Yields the events of the call in order, then its value. Raises the
        worker's error, or WorkerError if the process fails."""
        while True:
            kind, value = await self._events.get()
            if kind != "event":
                # Kept for a reader that was interrupted and then resumes.
                self._events.put_nowait((kind, value))
            if kind == "error":
                raise value
            yield value
            if kind == "end":
                return

    async def value(self) -> Any:
        """Returns the value of the call. Raises the worker's error, or WorkerError
        if the process fails."""
        return [event async for event in self.events()][-1]

    def cancel(self) -> None:
        """Cancels the call, and later kills the worker if it does not stop. Has no
        effect if the call has ended."""
        if not (self.ended or self.cancelled):
            self.cancelled = True
            self._process.send("cancel", id=self._number)
            self._kill_later()

    def _kill_later(self) -> None:
        later = asyncio.get_running_loop().call_later
        self._kill_timer = later(self._process.cancel_grace_s, self._kill)

    def _kill(self) -> None:
        """Kills a process that has not stopped this call. Tries again later if the
        process has calls that are not cancelled, since one of them may be in a long
        pass."""
        if all(call.cancelled for call in self._process.calls.values()):
            self._process.kill("it did not stop after a cancel")
        else:
            self._kill_later()

    def put(self, kind: str, value: Any) -> None:
        """Adds an event (`kind` is "event"), or ends the call with its value
        ("end") or error ("error")."""
        self._events.put_nowait((kind, value))
        if kind != "event":
            if self._kill_timer is not None:
                self._kill_timer.cancel()
            self.ended = True
            self._on_end(value)


def failure_line(text: str) -> str:
    """Returns the last line of a log that reports a failure, cut to MAX_FAILURE_CHARS,
    or an empty string. Lines about a cancelled pass are ignored."""
    for line in map(str.strip, reversed(text.splitlines())):
        is_failure = any(mark in line for mark in FAILURE_MARKS)
        if is_failure and not line.endswith(CANCELLED_PASS):
            return line[:MAX_FAILURE_CHARS]
    return ""


def device_failure(text: str) -> str:
    """Returns the first sentence about a failed device, which native/api.cpp writes
    into the log, or an empty string."""
    _, _, said = text.partition(DEVICE_FAILURE_MARK)
    return said.partition(". ")[0].strip()[:MAX_FAILURE_CHARS]


class WorkerProcess:
    """A worker process. Its errors do not name a model, since several names may use the
    process."""

    def __init__(
        self, echo_stderr: bool = False, cancel_grace_s: float = CANCEL_GRACE_S
    ) -> None:
        self._echo_stderr = echo_stderr
        # Seconds within which a cancelled call must end.
        self.cancel_grace_s = cancel_grace_s
        # Called with each warning of the process, as one line.
        self.on_warning: Callable[[str], object] = log.warning
        self.stats = Stats()  # statistics that the process reported last
        # {owner: summary of the owner's last answer}.
        self.last_summaries: dict[str, AnswerSummary] = {}
        # decisions that the process reported last.
        self.decisions: Mapping[str, Any] = {}
        # set when the process has ended; the value is the error that describes the exit
        self.exited: asyncio.Future[WorkerError] = (
            asyncio.get_running_loop().create_future()
        )
        # Called after the exit, before the calls get the error.
        self.on_exit: Callable[[], None] = ignore
        self.calls: dict[int, Call] = {}  # {id: unfinished call}
        self._last_id = 0
        self._kill_reason = ""
        self._stderr_tail = bytearray()
        self._writer: asyncio.StreamWriter
        self._child: asyncio.subprocess.Process
        self._supervisor: asyncio.Task[None]

    @classmethod
    async def start(
        cls, *expected: str, command: Sequence[str] | None = None, **options: Any
    ) -> WorkerProcess:
        """Starts a worker, which then waits for `load`.

        expected: files of models, whose headers the worker reads while it waits.
        command: the worker's program; None: COMMAND. options: keyword arguments of the
        constructor.

        Raises WorkerError if the system cannot start a process, and OptionError for an
        invalid environment variable.
        """
        read_environment()  # raises here for variables that the worker could not read
        self = cls(**options)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = await asyncio.create_subprocess_exec(
                    *(command or COMMAND),
                    str(theirs.fileno()),
                    *expected,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    env=child_environment(),
                )
        except OSError as error:
            ours.close()
            raise WorkerError(
                f"no process can be started for the model ({error}); end other processes, then try again."
            ) from None
        reader, self._writer = await asyncio.open_unix_connection(
            sock=ours, limit=wire.MAX_MESSAGE_BYTES
        )
        self._supervisor = asyncio.create_task(self._supervise(reader))
        return self

    @property
    def pid(self) -> int:
        """Returns the process id of the worker."""
        return self._child.pid

    async def load(
        self, config: LoadConfig, stall_s: float, on_progress: OnLoad = ignore
    ) -> wire.Ready:
        """Loads a model. Calls `on_progress` with the share of the model that has been
        read so far. Raises the errors of loading, and WorkerError if the process exits.
        Kills the process and raises WorkerError after `stall_s` seconds without
        progress."""
        events = self.call("load", config=config).events()
        try:
            while True:
                event = await asyncio.wait_for(
                    anext(events), None if stall_s == math.inf else stall_s
                )
                if isinstance(event, wire.Ready):
                    return event
                on_progress(event.share)
        except TimeoutError:
            self.kill("")
            raise WorkerError(
                f"nothing was read for {stall_s:g} s while loading the model; check the disk, or set"
                " MOEGGUF_LOAD_TIMEOUT to a longer time."
            ) from None

    def call(
        self, kind: str, on_end: Callable[[Any], object] = ignore, **fields: Any
    ) -> Call:
        """Sends a message. Raises OptionError if the message cannot be encoded, and
        WorkerError if the process has ended."""
        if self.exited.done():
            raise self.exited.result()
        number = self._last_id = self._last_id + 1
        self._writer.write(wire.encode({"kind": kind, "id": number, **fields}))
        call = self.calls[number] = Call(self, number, on_end)
        return call

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message that has no reply. Does nothing if the process has ended."""
        if not self.exited.done():
            self._writer.write(wire.encode({"kind": kind, **fields}))

    def kill(self, reason: str) -> None:
        """Kills the process. Its pending calls fail with an error that contains the
        `reason` of the first kill, unless the process has reported a failed device."""
        if not self.exited.done():
            self._kill_reason = self._kill_reason or reason
            kill_child(self._child)

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Closes the socket and waits for the process to exit. Kills the process if it
        does not exit within `grace_s` seconds. May be called again."""
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._supervisor), grace_s)
            return
        self.kill("it did not exit after its socket was closed")
        await asyncio.shield(self._supervisor)

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        """Handles messages until the connection ends. An invalid message kills the
        process. An incomplete last line comes from a killed worker and is ignored."""
        with contextlib.suppress(OSError):
            try:
                while (line := await reader.readline()).endswith(b"\n"):
                    self._on_message(wire.decode(line))
            except (MoeggufError, ValueError, KeyError, TypeError) as error:
                # ValueError: the line is too long.
                self.kill(f"it sent an invalid message: {error}")

    def _on_message(self, message: wire.Message) -> None:
        kind = message["kind"]
        if kind == "warning":
            self.on_warning(message["text"])
            return
        if kind == "decision":
            log_decision(**message["fields"])
            return
        if "stats" in message:
            self.stats, self.decisions = (
                wire.build(Stats, message["stats"]),
                message["decisions"],
            )
        call = self.calls.get(message["id"])
        if kind == "end":
            self.calls.pop(message["id"], None)
        if call is None:
            return
        if "error" in message:
            call.put("error", wire.build_error(message["error"]))
        else:
            call.put(kind, wire.build_named(message))

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        """Waits for the process to exit, then ends all its calls with an error.
        Kills a process that closes its socket but does not exit."""
        reading = asyncio.ensure_future(self._read_stderr())
        lost, exited = (
            asyncio.ensure_future(self._read_messages(reader)),
            asyncio.ensure_future(self._child.wait()),
        )
        await asyncio.wait({lost, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            await asyncio.wait({exited}, timeout=CLOSE_GRACE_S)
            if not exited.done():
                self.kill("it closed its socket")
        code = await exited
        await asyncio.wait({lost, reading}, timeout=_DRAIN_S)
        lost.cancel()
        reading.cancel()
        self._writer.close()
        self._finish(code)

    async def _read_stderr(self) -> None:
        """Reads the process's stderr and keeps its last bytes, for the error message
        after a crash."""
        assert self._child.stderr is not None
        while data := await self._child.stderr.read(STDERR_TAIL_BYTES):
            if self._echo_stderr:
                sys.stderr.write(data.decode(errors="replace"))
            self._stderr_tail += data
            del self._stderr_tail[:-STDERR_TAIL_BYTES]

    def _finish(self, code: int) -> None:
        said = self._stderr_tail.decode(errors="replace")
        names = {each.value: each.name for each in signal.Signals}
        how = (
            f"killed by {names.get(-code, -code)}" if code < 0 else f"exit code {code}"
        )
        why = ": ".join(
            filter(None, (how, self._kill_reason or failure_line(said)))
        ).rstrip(".")
        error = WorkerError(
            f"the model's worker process has ended ({why}); the next request loads the model again."
        )
        if lost := device_failure(said):
            error = DeviceLostError(_LOST.format(lost))
        self.exited.set_result(error)
        self.on_exit()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.put("error", error)


class Workers:
    """Starts worker processes. Keeps a spare process without a model, so that the next
    load does not wait for Python to import modules."""

    def __init__(self, **options: Any) -> None:
        """options: keyword arguments of `WorkerProcess.start`."""
        self._options = options
        self._spare: asyncio.Task[WorkerProcess] | None = None

    async def prepare(self, *expected: str) -> None:
        """Starts the spare process, unless there is one. `expected`: model files that
        the process will probably load. A failure to start is ignored."""
        if self._spare is None:
            self._spare = asyncio.create_task(
                WorkerProcess.start(*expected, **self._options)
            )
            await asyncio.wait({self._spare})

    async def take(self) -> WorkerProcess:
        """Returns the spare process if it is alive, otherwise starts a new process.
        Raises WorkerError or OptionError."""
        spare, self._spare = self._spare, None
        with contextlib.suppress(WorkerError, OptionError):
            if spare is not None and not (process := await spare).exited.done():
                return process
        return await WorkerProcess.start(**self._options)

    async def close(self) -> None:
        """Stops the spare process, if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(WorkerError, OptionError):
                await (await spare).close(0)
