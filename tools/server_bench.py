"""The server's overhead: `/api/chat` against the same model in process, interleaved, medians.

    python -m tools.server_bench --rounds 30

Starts a server on a free port, loads the model there and here, and sends both the same question in turns: streamed, 200
tokens, a fixed seed so that the answers are equal. Prints the time to the first token and the total time of each, and
the server's overhead. The client is http.client, so that no client library's time is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moegguf import Engine, Llama, Sampling

QUESTION = "Explain in detail how an expert is fetched, step by step."
SAMPLING = Sampling(temperature=1.5, seed=6, max_tokens=200)
START_S = 30.0


@dataclass(frozen=True)
class Run:
    """Seconds from the request to the first text and to the end, and the text."""

    first_s: float
    total_s: float
    text: str


async def in_process(engine: Engine) -> Run:
    """The question through the loop that a worker of the server has."""
    start, first, texts = time.perf_counter(), 0.0, []
    async for piece in engine.stream([{"role": "user", "content": QUESTION}], SAMPLING):
        if piece.text:
            first = first or time.perf_counter() - start
            texts.append(piece.text)
    return Run(first, time.perf_counter() - start, "".join(texts))


def drop_in(llm: Llama) -> Run:
    """The question through `create_chat_completion`, llama-cpp-python's API."""
    start, first, texts = time.perf_counter(), 0.0, []
    llm.reset()  # as in the server, where a seed starts from an empty context
    for chunk in llm.create_chat_completion(
        [{"role": "user", "content": QUESTION}],
        stream=True,
        temperature=SAMPLING.temperature,
        top_p=SAMPLING.top_p,
        top_k=SAMPLING.top_k,
        min_p=SAMPLING.min_p,
        seed=SAMPLING.seed,
        max_tokens=SAMPLING.max_tokens,
    ):
        if text := chunk["choices"][0]["delta"].get("content"):
            first = first or time.perf_counter() - start
            texts.append(text)
    return Run(first, time.perf_counter() - start, "".join(texts))


def over_http(connection: http.client.HTTPConnection, model: str) -> Run:
    """The question through `/api/chat`, streamed, on a persistent connection."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "options": {"temperature": SAMPLING.temperature, "seed": SAMPLING.seed, "num_predict": SAMPLING.max_tokens},
    }
    start, first, texts = time.perf_counter(), 0.0, []
    connection.request("POST", "/api/chat", json.dumps(body))
    response = connection.getresponse()
    while line := response.readline():
        if text := json.loads(line)["message"]["content"]:
            first = first or time.perf_counter() - start
            texts.append(text)
    return Run(first, time.perf_counter() - start, "".join(texts))


@contextmanager
def server() -> Iterator[int]:
    """A server on a free port; yields the port once it answers."""
    command = [sys.executable, "-m", "moegguf", "serve", "--host", "127.0.0.1", "--port", "0", "--context-store", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield int(process.stderr.readline().rsplit(":", 1)[1])
        finally:
            process.terminate()
            process.wait(START_S)


def measure(runs: dict[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    """`rounds` of each, in turns; before each an uncounted run, so that caches and threads are warm."""
    results: dict[str, list[Run]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            results[name].append(run())
    return results


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from moegguf.models.catalog import find_model

    plain: dict[str, Any] = {"n_ctx": 512, "context_store": 0, "draft": "off"}
    with server() as port, Engine(find_model(options.model), parallel=1, **plain) as engine:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        runs = {
            "in process": lambda: asyncio.run(in_process(engine)),
            "create_chat_completion": lambda: drop_in(engine.llm),
            "server": lambda: over_http(connection, options.model),
        }
        results = measure(runs, options.rounds)
    table = {
        name: {
            "first_ms": statistics.median(run.first_s for run in rows) * 1e3,
            "total_ms": statistics.median(run.total_s for run in rows) * 1e3,
            "texts": len({run.text for run in rows}),
            "characters": len(rows[0].text),
        }
        for name, rows in results.items()
    }
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(
            f"{name:24} first {row['first_ms']:7.2f} ms   total {row['total_ms']:7.2f} ms"
            f"   {row['characters']} characters"
        )
    overhead = {
        name: table["server"]["total_ms"] / row["total_ms"] - 1 for name, row in table.items() if name != "server"
    }
    print("server against: " + ", ".join(f"{name} {share:+.1%}" for name, share in overhead.items()))


if __name__ == "__main__":
    main()
