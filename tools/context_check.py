"""Checks contexts on disk: `kills` ends processes at random moments while they write, `resume` measures first tokens.

    python -m tools.context_check kills --count 500
    python -m tools.context_check resume MODEL.gguf --tokens 16000 [--folder F]

`kills`: each process, forked from this one, answers prompts with a folder that all of them use, new ones and known ones
in turn, until it is killed; every answer has to be that of a process without the folder, and every block has to be
readable at the end.
`resume`: a server computes a prompt, and gives the same answer from memory, after the model was unloaded, and after
server and worker were killed; then another question with the same beginning. With a folder of an earlier call nothing
is computed again: the answer is to be that of then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

N_PROMPTS, N_NEW, STORE = 16, 6, "24MiB"  # room for some of the prompts' blocks: others leave
READY = "listening on "


def prompts(n_vocab: int) -> list[list[int]]:
    """Some begin alike."""
    texts = [np.random.default_rng(i).integers(5, n_vocab - 5, 300 + 40 * i).tolist() for i in range(N_PROMPTS)]
    return [texts[i // 3 * 3][: 100 * (i % 3)] + texts[i] for i in range(N_PROMPTS)]


def answers(model: str, store: str, seed: int) -> Iterator[tuple[int, str]]:
    """(index of a prompt, what is answered with all of its bits) for ever, in an order by `seed`; each once where it is
    negative."""
    from moegguf.generate.engine import Engine
    from moegguf.generate.request import Sampling

    sampling = Sampling(temperature=0.0, max_tokens=N_NEW)
    with Engine(model, parallel=2, n_ctx=2048, n_threads=1, context_store=store) as engine:
        asked = prompts(engine.llm.n_vocab())
        order = np.random.default_rng(seed).integers(0, N_PROMPTS, 10_000) if seed >= 0 else np.arange(N_PROMPTS)
        for i in order:
            (found,) = engine.generate(asked[i], sampling, n_logprobs=5)
            yield int(i), repr(found.error or (found.text, found.logprobs))


def forked(model: str, store: str, seed: int) -> tuple[int, IO[str]]:
    """A process that writes the answers, a line each; its id, and what it writes. Its modules are imported before."""
    import moegguf.generate.engine  # noqa: F401

    reads, writes = os.pipe()
    if pid := os.fork():
        os.close(writes)
        return pid, os.fdopen(reads)
    os.close(reads)
    with os.fdopen(writes, "w") as out:
        for answer in answers(model, store, seed):
            print(json.dumps(answer), file=out, flush=True)
    os._exit(0)


def kills(model: str, count: int, longest_s: float, folder: Path) -> str:
    """What `count` killed processes have shown, in a sentence. Raises AssertionError for a wrong answer or block."""
    from moegguf.engine.kv_block_store import KvBlockStore, stored_blocks
    from moegguf.quantities import parse_size

    os.environ.update(MOEGGUF_HOME=str(folder), MOEGGUF_TRIAL_LOAD="0")
    contexts, n_answers, n_writing = folder / "cache" / "contexts", 0, 0
    pid, lines_of = forked(model, "0", -1)
    expected = dict(map(json.loads, lines_of))
    os.waitpid(pid, 0)
    for n in range(count):
        pid, lines_of = forked(model, STORE, n)
        with lines_of:
            first = lines_of.readline()
            time.sleep(random.Random(n).uniform(0, longest_s))
            os.kill(pid, signal.SIGKILL)
            n_writing += any(contexts.glob(".block.*"))
            lines = [first, *lines_of]
            os.waitpid(pid, 0)
        for i, answer in (json.loads(line) for line in lines if line.endswith("\n")):
            assert answer == expected[i], f"kill {n}: prompt {i} was answered with other bits"
            n_answers += 1
        if n % 50 == 49:
            print(f"{n + 1} kills, {n_answers} answers", flush=True)
    store = KvBlockStore(contexts, parse_size(STORE))
    blocks = list(stored_blocks(contexts))
    assert not store.is_off and all(store.read(block.path.name) is not None for block in blocks)
    return f"{count} kills, {n_writing} within a write: {n_answers} answers, all right; {len(blocks)} blocks, all whole"


class Server:
    """`moegguf serve` with one model; `kill` ends it and its worker at once."""

    def __init__(self, model: Path, n_ctx: int, folder: Path) -> None:
        own = {"MOEGGUF_HOME": str(folder), "MOEGGUF_MODELS": str(model.parent), "MOEGGUF_CONTEXT_LENGTH": str(n_ctx)}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "moegguf.cli.app", "serve", "--port", "0", "--context-store", "16GiB"],
            env=os.environ | own | {"MOEGGUF_TRIAL_LOAD": "0"}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._child.stderr is not None
        line = next(line for line in self._child.stderr if READY in line)
        self._url, self._model = line.partition(READY)[2].split()[0].rstrip(","), model.stem

    def ask(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Seconds to the first token, tokens of the prompt that were computed and reused, and all logprobs."""
        body = {"prompt": tokens, "max_tokens": 16, "temperature": 0, "logprobs": 5, "stream": True}
        start_s, first_s, chunks = time.perf_counter(), 0.0, list[Any]()
        with self._post("/v1/completions", body) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.perf_counter() - start_s
                    chunks.append(json.loads(line[6:]))
        timings = chunks[-1]["timings"]
        logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
        return {
            "first_s": first_s, "prompt_s": timings["prompt_ms"] / 1e3, "computed": timings["prompt_n"],
            "reused": timings["cache_n"], "logprobs": logprobs,
        }  # fmt: skip

    def unload(self) -> None:
        """Unloads the model."""
        self._post("/api/generate", {"keep_alive": 0}).read()

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        processes = [psutil.Process(self._child.pid), *psutil.Process(self._child.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)
        self._child.wait()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": self._model, **body}).encode()
        return urllib.request.urlopen(urllib.request.Request(self._url + path, data), timeout=3600)


def resume(model: Path, n_tokens: int, folder: Path) -> None:
    """Prints a line for each way to come to the first token. Raises AssertionError for other logprobs."""
    from moegguf.gguf.experts import read_layout

    tokens = np.random.default_rng(0).integers(1000, read_layout(model).n_vocab - 1000, n_tokens).tolist()
    other = [*tokens[: n_tokens - 100], *np.random.default_rng(1).integers(1000, 2000, 60).tolist()]
    server, known = Server(model, n_tokens + 256, folder), folder / "answer.json"
    try:
        if known.exists():
            wanted = json.loads(known.read_text())
            assert _report("after kill -9", server.ask(tokens)) == wanted
        else:
            wanted = _report("computed", server.ask(tokens))
            known.write_text(json.dumps(wanted))
        assert _report("from memory", server.ask(tokens)) == wanted
        server.unload()
        assert _report("after unloading", server.ask(tokens)) == wanted
        server.kill()
        server = Server(model, n_tokens + 256, folder)
        assert _report("after kill -9", server.ask(tokens)) == wanted
        server.kill()
        server = Server(model, n_tokens + 256, folder)
        _report("another question", server.ask(other))
        print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} processors")
    finally:
        server.kill()


def _report(what: str, found: dict[str, Any]) -> Any:
    print(
        f"{what:<17} first token {found['first_s']:7.2f} s (without loading {found['prompt_s']:7.2f} s), prompt tokens"
        f" computed {found['computed']:>6}, reused {found['reused']:>6}",
        flush=True,
    )
    return found["logprobs"]


def main() -> None:
    """Runs one of the two."""
    from moegguf.models.catalog import find_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "resume"))
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file")
    parser.add_argument("--count", type=int, default=500, help="processes to kill")
    parser.add_argument("--longest", type=float, default=0.5, help="seconds from a first answer to the kill, at most")
    parser.add_argument("--tokens", type=int, default=16_000, help="of the prompt")
    parser.add_argument("--folder", type=Path, help="of contexts, for `resume`, which stays")
    given = parser.parse_args()
    model = Path(find_model(given.model)).resolve()
    with tempfile.TemporaryDirectory(prefix="contexts-") as folder:
        if given.what == "kills":
            print(kills(str(model), given.count, given.longest, Path(folder)))
        else:
            resume(model, given.tokens, given.folder or Path(folder))


if __name__ == "__main__":
    main()
