"""Measures a served model: the server's overhead, and the time to the first token when
the context of a long prompt is reused."""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moegguf.bench.turns import Row, take_turns
from moegguf.child import child_command, child_environment
from moegguf.engine.llama import Llama
from moegguf.errors import MoeggufError
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling
from moegguf.gguf.experts import read_layout

QUESTION = [
    {
        "role": "user",
        "content": "Explain in detail how an expert is fetched, step by step.",
    }
]
SAMPLING = Sampling(temperature=1.5, seed=6, max_tokens=200)
ANSWER_TOKENS = 16
REPLY_S = 3600
# Number of last lines of a server's messages in the error for a server that does not
# start.
SHOWN_LINES = 5


class Server:
    """A running `moegguf serve` on a free port. This object is also a client that keeps
    one connection open and uses one model."""

    def __init__(self, model: Path, context_store: str, **environment: str) -> None:
        self.model = model.stem
        own = {"MOEGGUF_MODELS": str(model.parent), **environment}
        self._process = subprocess.Popen(
            [
                *child_command("moegguf"),
                "serve",
                "--host",
                "127.0.0.1:0",
                "--context-store",
                context_store,
            ],
            env=child_environment(**own),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        last = deque[str](maxlen=SHOWN_LINES)
        for line in self._process.stderr:
            if "listening on " in line:
                break
            last.append(line.strip())
        else:
            self._process.communicate()
            why = (
                " ".join(last).rstrip(".")
                or f"exit code {self._process.returncode} and no message"
            )
            raise MoeggufError(
                f"the server exited before it accepted connections: {why}; correct the cause, and run the preset again."
            )
        # a server whose messages nobody reads stops when the pipe is full
        threading.Thread(
            target=deque, args=(self._process.stderr, 0), daemon=True
        ).start()
        port = (
            line.partition("listening on ")[2].split()[0].rstrip(",").rpartition(":")[2]
        )
        self._connection = http.client.HTTPConnection(
            "127.0.0.1", int(port), timeout=REPLY_S
        )

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        """Sends a POST request with the model's name and `body`. Returns the
        response."""
        self._connection.request(
            "POST", path, json.dumps({"model": self.model, **body})
        )
        return self._connection.getresponse()

    def kill(self) -> None:
        """Kills the server and its child processes, unless the server has exited."""
        if self._process.poll() is not None:
            return
        server = psutil.Process(self._process.pid)
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)
        self._process.wait()


@dataclass(frozen=True)
class Answer:
    """A streamed answer and its times, measured from the start of the request."""

    first_s: float  # seconds until the first text
    total_s: float  # seconds until the end
    text: str


def timed(way: Callable[[], Iterator[str]]) -> Answer:
    """Calls `way` and joins the pieces of text that it yields. Returns the text, the
    seconds until the first piece that is not empty, and the seconds until the end."""
    start_s = time.perf_counter()
    first_s = 0.0
    text = ""
    for piece in way():
        text += piece
        if text and not first_s:
            first_s = time.perf_counter() - start_s
    return Answer(first_s, time.perf_counter() - start_s, text)


def in_process(engine: Engine) -> Iterator[str]:
    """Yields the pieces of an answer that is generated in this process, by the code
    that a server's worker runs."""
    with asyncio.Runner() as runner:
        pieces = engine.stream(QUESTION, SAMPLING)
        while piece := runner.run(anext(pieces, None)):
            yield piece.text


def drop_in(llm: Llama) -> Iterator[str]:
    """Yields the pieces of an answer from `create_chat_completion`, a method of
    llama-cpp-python's API."""
    llm.reset()  # empties the context, so that the whole prompt is evaluated
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    sampling = {name: getattr(SAMPLING, name) for name in names}
    for chunk in llm.create_chat_completion(QUESTION, stream=True, **sampling):
        yield chunk["choices"][0]["delta"].get("content") or ""


def over_http(server: Server) -> Iterator[str]:
    """Yields the pieces of an answer from `/api/chat`."""
    options = {
        "temperature": SAMPLING.temperature,
        "seed": SAMPLING.seed,
        "num_predict": SAMPLING.max_tokens,
    }
    response = server.post("/api/chat", {"messages": QUESTION, "options": options})
    while line := response.readline():
        yield json.loads(line)["message"]["content"]


def overhead(model: str, *, rounds: int = 30) -> Iterator[Row]:
    """Yields a row for each of three ways to get an answer: from an Engine, from
    `create_chat_completion`, and over HTTP.

    A row contains the median time to the first text and the median total time. The
    server's overhead in a row is the total time over HTTP divided by the row's own
    total time, minus 1. All answers have the same seed, so the number of different
    texts should be 1. Each measured answer follows an unmeasured answer of the same
    kind.
    """
    plain: dict[str, Any] = {"n_ctx": 512, "context_store": 0, "draft": "off"}
    with Engine(model, parallel=1, **plain) as engine, ExitStack() as stack:
        server = Server(Path(model), "0")
        stack.callback(server.kill)
        ways = {
            "in process": partial(in_process, engine),
            "create_chat_completion": partial(drop_in, engine.llm),
            "server": partial(over_http, server),
        }

        def second_answer(way: Callable[[], Iterator[str]]) -> Answer:
            timed(way)
            return timed(way)

        answers = take_turns(
            {name: partial(second_answer, way) for name, way in ways.items()}, rounds
        )
    total_s = {
        name: statistics.median(answer.total_s for answer in found)
        for name, found in answers.items()
    }
    for name, found in answers.items():
        yield {
            "way": name,
            "first ms": statistics.median(answer.first_s for answer in found) * 1e3,
            "total ms": total_s[name] * 1e3,
            "server's overhead": total_s["server"] / total_s[name] - 1,
            "texts": len({answer.text for answer in found}),
            "characters": len(found[0].text),
        }


def complete(server: Server, tokens: Sequence[int]) -> tuple[Row, list[Any]]:
    """Requests a completion of `tokens`. Returns figures about the completion's first
    token, and the logprobs of all its tokens."""
    body = {
        "prompt": tokens,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 5,
        "stream": True,
    }
    start_s = time.perf_counter()
    first_s = 0.0
    chunks: list[Any] = []
    others = b""
    for line in server.post("/v1/completions", body):
        if line.startswith(b"data: {"):
            first_s = first_s or time.perf_counter() - start_s
            chunks.append(json.loads(line[6:]))
        else:
            others += line
    if not chunks or "timings" not in chunks[-1]:
        reason = others.decode(errors="replace").strip() or json.dumps(chunks[-1:])
        raise MoeggufError(
            f"the server did not complete the prompt, but sent {reason[:500]}; correct the cause."
        )
    timings = chunks[-1]["timings"]
    figures = {
        "first token s": first_s,
        "without loading s": timings["prompt_ms"] / 1e3,
        "computed": timings["prompt_n"],
        "reused": timings["cache_n"],
    }
    # Collected over all events, because the number of tokens in one event depends on
    # timing.
    logprobs: list[Any] = []
    for choice in (
        choice
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("logprobs")
    ):
        logprobs += zip(
            choice["logprobs"]["tokens"],
            choice["logprobs"]["top_logprobs"],
            strict=True,
        )
    return figures, [list(pair) for pair in logprobs]


def resume(model: str, *, tokens: int = 16_000, folder: str = "") -> Iterator[Row]:
    """Yields a row about the first token of an answer in each of five cases.

    In the first case the whole prompt is evaluated. In the next three its context is
    reused: from memory, after the model has been unloaded, and after the server and the
    worker have been killed. The last case is another question with the same beginning.
    If `folder` already holds the contexts of an earlier call, the prompt is not
    evaluated in the first case either. Raises MoeggufError if another answer to this
    prompt has logprobs that differ from the first answer's.
    """
    n_vocab = read_layout(model).n_vocab
    prompt = np.random.default_rng(0).integers(1000, n_vocab - 1000, tokens).tolist()
    other = [
        *prompt[: tokens - 100],
        *np.random.default_rng(1).integers(1000, 2000, 60).tolist(),
    ]
    with ExitStack() as stack:
        home = Path(
            folder
            or stack.enter_context(tempfile.TemporaryDirectory(prefix="contexts-"))
        )
        known = home / "answer.json"
        expected: list[Any] | None = (
            json.loads(known.read_text()) if known.exists() else None
        )

        def started() -> Server:
            sizes = {
                "MOEGGUF_HOME": str(home),
                "MOEGGUF_CONTEXT_LENGTH": str(tokens + 256),
            }
            server = Server(Path(model), "16GiB", MOEGGUF_TRIAL_LOAD="0", **sizes)
            stack.callback(server.kill)
            return server

        def step(way: str, server: Server) -> Row:
            figures, logprobs = complete(server, prompt)
            if expected is not None and logprobs != expected:
                raise MoeggufError(
                    f"{way}: this answer and the first one have different logprobs; report this as a bug."
                )
            known.write_text(json.dumps(logprobs))
            return {"way": way, **figures}

        server = started()
        yield step("computed" if expected is None else "after kill -9", server)
        expected = json.loads(known.read_text())
        yield step("from memory", server)
        server.post("/api/generate", {"keep_alive": 0}).read()
        yield step("after unloading", server)
        server.kill()
        server = started()
        yield step("after kill -9", server)
        server.kill()
        yield {"way": "another question", **complete(started(), other)[0]}
