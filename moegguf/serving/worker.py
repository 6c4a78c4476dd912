"""A process that loads one model and answers requests, several at once: `python -m
moegguf.serving.worker FD`.

Messages arrive on the socket inherited as FD. The process exits when the socket closes,
so that no worker outlives a killed server. The main thread loads the model and runs
`BatchLoop`. A second thread reads messages, so that an answer can be cancelled. Other
threads reply to messages that need no pass, because a template may render slowly and a
change of the budget waits for a pass to end. The manager (model_manager.py) decides
which requests are sent.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from moegguf.decisions import DecisionHandler, start_log
from moegguf.engine.llama import Llama
from moegguf.errors import MoeggufError
from moegguf.generate import sandbox_pool
from moegguf.generate.batching import BatchLoop
from moegguf.generate.call_format import answer_format
from moegguf.generate.embedding import embed, rank
from moegguf.generate.prompt import count_prompt, render_prompt, template_of
from moegguf.generate.request import AnswerSummary, Delta, PromptProgress, Request, join
from moegguf.generate.sequence import Sequence, Task
from moegguf.generate.slots import run_action
from moegguf.generate.template_forms import forms_of
from moegguf.gguf.experts import read_layout
from moegguf.serving import wire
from moegguf.serving.events import Snapshot
from moegguf.serving.expert_uses import ExpertUses
from moegguf.serving.memory_budget import LoadConfig
from moegguf.text import to_utf8

# Seconds within which a running computation must stop after the socket has closed.
EXIT_GRACE_S = 5.0
# Minimum seconds between two messages with an answer's text, except the last.
DELTA_S = 0.02
PROGRESS_S = 0.1  # minimum seconds between two messages about progress, except the last
# Number of threads for replies, so that a slow template does not delay other replies.
MAX_REPLIES = 32


class Outbox:
    """Sends lines over `connection` in order. Lines inside a `one_call` block are sent
    together at its end.

    Each system call wakes the server and its client on processors that the model's
    threads need, and releases the interpreter's lock. With 16 answers at once, one call
    for each token took a tenth of the time between two passes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        # Lines to send at the end of a `one_call` block; None outside of it.
        self._held: list[bytes] | None = None

    def put(self, line: bytes) -> None:
        """Sends a line after all earlier lines, or keeps it until a `one_call` block
        ends. Raises OSError if the socket is closed."""
        with self._lock:
            if self._held is None:
                self._connection.sendall(line)
            else:
                self._held.append(line)

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Context manager that sends all lines put inside it with one system call. Only
        one thread may use this method at a time. Lines of other threads also wait for
        the end of the block, so the block must be short. Raises OSError if the socket
        is closed."""
        with self._lock:
            self._held = []
        try:
            yield
        finally:
            with self._lock:
                held, self._held = self._held, None
                if held:
                    self._connection.sendall(b"".join(held))


@dataclass
class Events:
    """Sends the events of one answer to the server. Implements `AnswerEvents`.

    Deltas are joined until DELTA_S has passed: 50 updates per second are enough for a
    display. Without `stream`, no progress is sent, and all deltas are joined into one
    at the end.
    """

    stream: bool
    send: Callable[[Delta | PromptProgress], None]  # sends an event
    # Sends the end of the answer.
    end: Callable[[AnswerSummary, Exception | None], object]
    clock: Callable[[], float] = time.monotonic  # returns seconds

    def __post_init__(self) -> None:
        self._pending: list[Delta] = []
        self._tick_delta = every(DELTA_S, -math.inf, self.clock)
        self._tick_progress = every(PROGRESS_S, self.clock(), self.clock)

    def on_progress(self, progress: PromptProgress) -> None:
        """Sends the progress of a prompt if `stream` is set, at most once in
        PROGRESS_S. The end of the prompt is always sent."""
        if self.stream and (
            self._tick_progress() or progress.n_done == progress.n_tokens
        ):
            self.send(progress)

    def on_delta(self, delta: Delta) -> None:
        """Sends pending deltas and this one. Without `stream`, or if less than DELTA_S
        has passed since the last message, keeps the delta for later."""
        self._pending.append(delta)
        if self.stream and self._tick_delta():
            self._flush()

    def on_end(self, summary: AnswerSummary, error: Exception | None) -> None:
        """Sends the pending deltas, unless there is an error. Then sends the end of the
        answer."""
        if error is None:
            self._flush()
        self.end(summary, error)

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            self.send(join(pending))


def every(
    interval_s: float, last_s: float, clock: Callable[[], float] = time.monotonic
) -> Callable[[], bool]:
    """Returns a function that returns True at most once per interval. `last_s`: the
    time from which the first interval is counted."""

    def tick() -> bool:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s < interval_s:
            return False
        last_s = now_s
        return True

    return tick


def _tokenize(
    llm: Llama, text: str, special: bool = True, add_special: bool = False
) -> list[int]:
    """Returns the tokens of a string. `special`: True to recognize names of special
    tokens. `add_special`: True to add the tokens that the model puts around a text,
    such as BOS and EOS."""
    return llm.tokenize(to_utf8(text), add_bos=add_special, special=special)


def _pieces(llm: Llama, tokens: list[int]) -> list[bytes]:
    """Returns the bytes of each token. The bytes of a special token are its name."""
    llm.vocabulary.check(tokens)
    return [llm.vocabulary.piece(token, special=True) for token in tokens]


def _detokenize(llm: Llama, prompt: list[int | str]) -> str:
    """Returns the text of a list of tokens and strings, joined. Invalid UTF-8 is
    replaced by U+FFFD."""
    return b"".join(
        to_utf8(each) if isinstance(each, str) else _pieces(llm, [each])[0]
        for each in prompt
    ).decode(errors="replace")


def _learn_forms(path: str) -> None:
    """Renders test conversations with a model's chat templates to learn their format.
    The worker calls this during a load, so that the first request need not wait for
    it."""
    layout = read_layout(path)
    for with_tools in (False, True):
        template = template_of(layout, with_tools=with_tools)
        with suppress(sandbox_pool.LimitedError):
            forms_of(template)
            answer_format(template).learn()


VALUES: Mapping[str, Callable[..., Any]] = {
    "tokenize": _tokenize, "pieces": _pieces, "detokenize": _detokenize, "count": count_prompt,
    "render": render_prompt, "budget": Llama.set_budget, "embed": embed, "rank": rank,
}  # fmt: skip
"""{kind of a message: function that computes the value of the reply from the model and
the message's other fields}"""
# Kinds of messages that `BatchLoop` runs as tasks while it generates no answer.
COMPUTED = ("embed", "rank", "slot")


class Worker:
    """The work of one worker process: reads messages from the server, loads a model,
    and answers requests."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._replies = ThreadPoolExecutor(MAX_REPLIES, "moegguf-reply")
        # {id of a message: its unfinished work}.
        self._work: dict[int, Sequence | Task] = {}
        self._work_lock = threading.RLock()
        self._closing = False
        self._loop: BatchLoop | None = None
        self._model: Llama  # set by `_load`
        self._uses: ExpertUses | None = None
        self._name = ""
        self._start_s = self._watched_until_s = time.monotonic()

    def run(self, expected: Iterable[str] = ()) -> None:
        """Loads the model of the first message, then answers requests until the socket
        closes.

        expected: model files whose headers are read before the first message, so that
        loading them is faster.
        """
        lines = self._connection.makefile("rb")
        sandbox_pool.start()
        for path in expected:
            with suppress(MoeggufError):
                read_layout(path)
        first = lines.readline(wire.MAX_MESSAGE_BYTES)
        threading.Thread(
            target=self._read_messages,
            args=(lines,),
            name="moegguf-messages",
            daemon=True,
        ).start()
        if not first or not self._load(wire.decode(first)):
            return
        # The socket was closed during the load, when there was no loop to close.
        if self._closing:
            self._answers.close()
        try:
            self._answers.run()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has closed the socket
        finally:
            self._model.close()

    @property
    def _answers(self) -> BatchLoop:
        assert self._loop is not None  # the server sends requests only after the load
        return self._loop

    def _send(self, kind: str, **fields: Any) -> None:
        self._outbox.put(wire.encode({"kind": kind, **fields}))

    # Methods of the thread that reads messages. (`_experts` runs on a thread for
    # replies.)

    def _read_messages(self, lines: BufferedReader) -> None:
        try:
            with lines:
                while line := lines.readline(wire.MAX_MESSAGE_BYTES):
                    self._on_message(wire.decode(line))
        finally:
            # No more messages will arrive: cancels all work, and exits if the work does
            # not stop in time.
            self._closing = True
            if self._loop is not None:
                self._loop.close()
            timer = threading.Timer(EXIT_GRACE_S, os._exit, (1,))
            timer.daemon = True
            timer.start()

    def _on_message(self, message: wire.Message) -> None:
        kind, number = message.pop("kind"), message.pop("id")
        if kind == "cancel":
            with self._work_lock:
                work = self._work.get(number)
            if work is not None:
                self._answers.cancel(work)
            return
        try:
            if "request" in message:
                message["request"] = wire.build(Request, message["request"])
        except MoeggufError as error:
            self._end(number, None, error)
            return
        if kind == "generate":
            self._generate(number, **message)
        elif kind in COMPUTED:
            client_key = message.pop("client_key", "")
            compute = functools.partial(self._reply, number, kind, message)
            fail = functools.partial(self._end, number, None)
            task = Task(
                compute,
                self._model.cancel,
                fail,
                client_key,
                keeps_context=kind == "slot",
            )
            # `_end` waits for this lock, so the task is in `_work` before it ends.
            with self._work_lock:
                self._work[number] = self._answers.submit_task(task)
        else:
            self._replies.submit(self._reply, number, kind, message)

    def _generate(self, number: int, request: Request, stream: bool) -> None:
        """Submits a request to the loop that generates answers."""

        def send(event: Delta | PromptProgress) -> None:
            self._send("event", id=number, **wire.named(event))

        events = Events(stream, send, functools.partial(self._end, number))
        # `_end` waits for this lock, so the answer is in `_work` before it ends.
        with self._work_lock:
            self._work[number] = self._answers.submit(request, events)

    def _experts(self, watch_s: float, client_key: str | None = None) -> Snapshot:
        """Returns a snapshot of the experts, with the uses of one client or (None) of
        all clients.

        For at least `watch_s` seconds, uses are counted even in layers whose experts
        are all in slots, which makes these layers slower.
        """
        llm, loop, now_s = self._model, self._answers, time.monotonic()
        layers, n_expert = list[int](), 0
        state = uses = loads = b""
        if llm.session is not None and self._uses is not None:
            if watch_s:
                self._watched_until_s = max(self._watched_until_s, now_s + watch_s)
                llm.session.store.watch(True)
            layers = [layer.il for layer in llm.layout.layers]
            n_expert = llm.layout.n_expert
            state, uses, loads = (
                each[layers].tobytes() for each in self._uses.maps(client_key)
            )
        return Snapshot(
            self._name,
            tuple(layers),
            n_expert,
            state,
            uses,
            loads,
            llm.stats(),
            loop.n_running > 0,
            now_s - self._start_s,
            loop.n_answer_tokens,
        )

    # Methods that load the model, and methods that any thread calls to send something.

    def _load(self, message: wire.Message) -> bool:
        """Loads the model that the message names, and replies. Returns False if the
        load has failed with a MoeggufError. Raises other errors after the reply."""
        tick, number = every(PROGRESS_S, -math.inf), message["id"]

        def on_progress(share: float) -> bool:
            if not self._closing and (tick() or share == 1):
                self._send("event", id=number, LoadProgress=wire.LoadProgress(share))
            return not self._closing

        try:
            config = wire.build(LoadConfig, message["config"])
            # Both threads then use this layout, instead of reading the header twice.
            read_layout(config.path)
            self._replies.submit(_learn_forms, config.path)
            self._model = llm = open_model(config, on_progress)
        except BaseException as error:
            # Every error that ends a load is sent, unless the socket is closed.
            if not self._closing:
                self._send("end", id=number, error=wire.encode_error(error))
            if not isinstance(error, MoeggufError):
                raise
            return False
        self._uses = ExpertUses(llm.session) if llm.session is not None else None
        on_pass = (
            self._uses.begin_pass if self._uses is not None else lambda client_key: None
        )
        self._loop = BatchLoop(llm, together=self._outbox.one_call, on_pass=on_pass)
        self._name, self._start_s = config.name, time.monotonic()
        self._end(number, wire.Ready(llm.n_ctx(), llm.n_seq_max), None)
        return True

    def send_warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Sends a Python warning to the server. Replaces `warnings.showwarning`."""
        with suppress(OSError):  # the server has closed the socket
            self._send("warning", text=" ".join(str(message).split()))

    def send_decision(self, decision: Mapping[str, Any]) -> None:
        """Sends a decision of the engine to the server, which writes it to its log."""
        with suppress(OSError):  # the server has closed the socket
            self._send("decision", fields={"model": self._name, **decision})

    def _reply(self, number: int, kind: str, fields: wire.Message) -> None:
        value: Any = None
        failure = None
        try:
            if kind == "experts":
                value = self._experts(**fields)
            elif kind == "slot":
                value = run_action(self._model, self._answers.places, **fields)
            else:
                value = VALUES[kind](self._model, **fields)
        except Exception as error:
            failure = error
        self._end(number, value, failure)

    def _end(self, request_id: int, value: Any, error: Exception | None) -> None:
        """Sends the end of a request: its value, or its error if there is one, and the
        current statistics."""
        if error is not None and not isinstance(error, MoeggufError):
            traceback.print_exception(error)
        outcome = (
            wire.named(value) if error is None else {"error": wire.encode_error(error)}
        )
        with self._work_lock:
            self._work.pop(request_id, None)
        llm = self._model
        if llm.session is not None and time.monotonic() > self._watched_until_s:
            llm.session.store.watch(False)
        statistics = {"stats": llm.stats(), "decisions": llm.decisions()}
        self._send("end", id=request_id, **outcome, **statistics)


def open_model(config: LoadConfig, progress: Callable[[float], object]) -> Llama:
    """Loads the model of `config` with its plan. Calls `progress` with the share that
    was read; if this returns False, the load stops. Raises the errors of `Llama`."""
    planned = config.spec, config.plan
    return Llama(config.path, planned=planned, progress=progress, **config.options)


def main() -> None:
    """Runs a worker. The first command-line argument is the file descriptor of its
    socket. Any further arguments are model files that the worker will probably load."""
    # Ctrl-C reaches the whole process group; the server handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        worker = Worker(connection)
        warnings.showwarning = worker.send_warning
        start_log(DecisionHandler(worker.send_decision))
        worker.run(sys.argv[2:])
    sys.stderr.flush()
    os._exit(0)  # everything is closed; freeing the rest would only delay the exit


if __name__ == "__main__":
    main()
