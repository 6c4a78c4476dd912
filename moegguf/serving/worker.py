"""A process that holds one model and answers one request at a time: `python -m moegguf.serving.worker FD`.

It is told what to load over the socket that it inherits as FD, and ends when that socket does, so that nothing stays
behind a server that was killed. The main thread loads and computes; a second one reads messages, so that an answer can
be stopped; a third one looks at the experts while someone watches. Knows one model; who asks is up to pool.py.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from moegguf.engine.llama import Llama
from moegguf.engine.vocabulary import to_utf8
from moegguf.errors import MoeggufError
from moegguf.generate.answer import Answer
from moegguf.generate.embedding import embed
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress
from moegguf.quantities import ExpertCache
from moegguf.serving.delta_buffer import INTERVAL_S, DeltaBuffer
from moegguf.serving.events import Snapshot
from moegguf.serving.snapshots import SnapshotSender
from moegguf.serving.wire import MAX_MESSAGE_BYTES, Message, Order, Ready, build, decode, encode, encode_error

END_GRACE_S = 5.0  # for what computes when the server has gone
LET_OUT_S = 0.0005  # after the first piece: the server and its client need a processor to show it
PROGRESS_S = 0.1  # between two reports of loading or of reading a prompt


class Worker:
    """Everything one worker process does, from `run` to the end of its socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._changing = threading.Lock()  # of the three below
        self._running: tuple[int, Answer | Llama] | None = None
        self._cancelled: set[int] = set()
        self._ending = False
        self._llm: Llama | None = None
        self._sender: SnapshotSender | None = None

    def run(self) -> None:
        """Loads what the first message says, then answers until the socket ends."""
        threading.Thread(target=self._listen, name="moegguf-listen", daemon=True).start()
        order = self._orders.get()
        if order is None or not self._load(build(Order, order["order"])):
            return
        try:
            while (message := self._orders.get()) is not None:
                self._answer(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has gone while it was being told something
        finally:
            self._close()

    def _send(self, kind: str, **fields: Any) -> None:
        line = encode({"kind": kind, **fields})
        with self._sending:
            self._link.sendall(line)

    # The reading thread.

    def _listen(self) -> None:
        try:
            with self._link.makefile("rb") as lines:
                while line := lines.readline(MAX_MESSAGE_BYTES):
                    self._take(decode(line))
        finally:
            self._end()

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "cancel":
            self._cancel(message["id"])
        elif kind == "watch" and self._sender is not None:
            self._sender.watch(message["per_s"])
        elif kind in ("tokenize", "detokenize"):
            self._tell_end(message["id"], self._translate, message)
        else:
            self._orders.put(message)

    def _translate(self, message: Message) -> Any:
        # The vocabulary is only read, so this need not wait for the answer that is being written.
        assert self._llm is not None
        if message["kind"] == "tokenize":
            text = to_utf8(message["text"])
            return self._llm.tokenize(text, add_bos=message["special"], special=message["special"])
        vocabulary = self._llm.vocabulary
        vocabulary.check(message["tokens"])
        return b"".join(vocabulary.piece(token, special=True) for token in message["tokens"]).decode(errors="replace")

    def _cancel(self, number: int) -> None:
        with self._changing:
            if self._running is not None and self._running[0] == number:
                self._running[1].cancel()
            else:
                self._cancelled.add(number)  # it may still be in the queue

    def _end(self) -> None:
        """The socket has ended: whatever runs is stopped, and if it does not stop, neither does that."""
        with self._changing:
            self._ending = True
            if self._running is not None:
                self._running[1].cancel()
        self._orders.put(None)
        timer = threading.Timer(END_GRACE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    # The main thread.

    def _load(self, order: Order) -> bool:
        """Loads the model and tells how; false when that failed."""
        try:
            self._llm = llm = open_model(order, self._share_teller())
        except BaseException as error:
            if not self._ending:
                self._send("failed", error=encode_error(error))
            if not isinstance(error, MoeggufError):
                raise
            return False
        self._sender = SnapshotSender(order.name, llm, self._n_written, self._tell_view)
        self._send("ready", ready=Ready(llm.n_ctx(), plan_fields(llm)), **self._figures())
        return True

    def _share_teller(self) -> Callable[[float], bool]:
        told_s = 0.0

        def tell(share: float) -> bool:
            nonlocal told_s
            now = time.monotonic()
            if not self._ending and (now - told_s >= PROGRESS_S or share >= 1):
                told_s = now
                self._send("loading", share=share)
            return not self._ending

        return tell

    def _answer(self, message: Message) -> None:
        kinds = {"generate": self._write, "embed": self._embed}
        self._tell_end(message["id"], kinds[message["kind"]], message)

    def _tell_end(self, number: int, work: Callable[[Message], Any], message: Message) -> None:
        """Does `work` and sends its result or its error, with the figures after it."""
        try:
            outcome = {"value": work(message)}
        except MoeggufError as error:
            outcome = {"error": encode_error(error)}
        except Exception as error:
            traceback.print_exc()
            outcome = {"error": encode_error(error)}
        self._send("end", id=number, **outcome, **self._figures())

    def _write(self, message: Message) -> Any:
        """Sends the pieces of an answer; its timing."""
        number = message["id"]
        answer = Answer(self._model, build(GenerationRequest, message["generation"]))
        stream = message["stream"]
        buffer = DeltaBuffer(lambda delta: self._tell(number, delta), INTERVAL_S if stream else math.inf)
        with self._cancellable(number, answer):
            for number_of_piece, delta in enumerate(answer.deltas(self._progress_teller(number) if stream else None)):
                buffer.put(delta)
                if stream and number_of_piece == 0:
                    time.sleep(LET_OUT_S)
            buffer.flush()
        return answer.timing

    def _embed(self, message: Message) -> Any:
        llm = self._model
        with self._cancellable(message["id"], llm):
            try:
                return embed(llm, message["inputs"], truncate=message["truncate"], normalize=message["normalize"])
            finally:
                llm.resume()

    @contextmanager
    def _cancellable(self, number: int, task: Answer | Llama) -> Iterator[None]:
        with self._changing:
            self._running = number, task
            if number in self._cancelled or self._ending:
                task.cancel()
        try:
            yield
        finally:
            with self._changing:
                self._running = None
                self._cancelled = {other for other in self._cancelled if other > number}

    def _progress_teller(self, number: int) -> Callable[[PromptProgress], None]:
        told_s = time.monotonic()

        def tell(progress: PromptProgress) -> None:
            nonlocal told_s
            now = time.monotonic()
            if now - told_s >= PROGRESS_S:
                told_s = now
                self._tell(number, progress)

        return tell

    def _tell(self, number: int, event: Delta | PromptProgress) -> None:
        self._send("event", id=number, **{type(event).__name__: event})

    @property
    def _model(self) -> Llama:
        assert self._llm is not None
        return self._llm

    def _figures(self) -> Message:
        return {"stats": self._model.stats(), "decisions": self._model.decisions()}

    def _n_written(self) -> int | None:
        """Tokens of the answer that is being written; None when none is."""
        running = self._running
        if running is None:
            return None
        return running[1].timing.answer_tokens if isinstance(running[1], Answer) else 0

    def _tell_view(self, snapshot: Snapshot) -> None:
        self._send("view", snapshot=snapshot, decisions=self._model.decisions())

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._model.close()


def open_model(order: Order, progress: Callable[[float], object]) -> Llama:
    """The model that an order describes. Raises what `Llama` raises."""
    options: dict[str, Any] = {"type_k": order.type_k, "type_v": order.type_v, "n_threads": order.n_threads}
    cache = ExpertCache("auto")
    if order.expert_cache_bytes is not None:
        cache = ExpertCache("bytes", n_bytes=order.expert_cache_bytes)
    return Llama(
        order.path,
        expert_cache=cache,
        n_ctx=order.n_ctx,
        n_batch=order.n_batch,
        n_ubatch=order.n_ubatch,
        flash_attn=order.flash_attn,
        embedding=order.embedding,
        verbose=order.verbose,
        progress=progress,
        **{name: value for name, value in options.items() if value is not None},
    )


def plan_fields(llm: Llama) -> dict[str, Any]:
    """The model's plan, without what it expects of its speed."""
    return {field.name: getattr(llm.plan, field.name) for field in fields(llm.plan) if field.name != "expected"}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server decides what it means
    with socket.socket(fileno=int(sys.argv[1])) as link:
        Worker(link).run()


if __name__ == "__main__":
    main()
