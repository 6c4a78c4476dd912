"""Processes that are killed at random moments while they write contexts to disk: no answer has other bits, and every
block that is left is whole. Slow: `make slow` runs it. MOEGGUF_SLOW_KILLS sets the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from answering import DEMO

from moegguf.engine.kv_block_store import KvBlockStore, stored_blocks
from moegguf.quantities import parse_size

N_KILLS = int(os.environ.get("MOEGGUF_SLOW_KILLS", "500"))
KILLS_OF_A_TEST = 50
N_PROMPTS, N_NEW = 16, 6
STORE = "24MiB"  # holds some of the prompts' blocks, so that others leave
LONGEST_S = 0.5  # from a first answer to the kill
SPAWN = multiprocessing.get_context("forkserver")


def prompts(n_vocab: int) -> list[list[int]]:
    """Returns prompts of which some begin alike."""
    texts = [np.random.default_rng(i).integers(5, n_vocab - 5, 300 + 40 * i).tolist() for i in range(N_PROMPTS)]
    return [texts[i // 3 * 3][: 100 * (i % 3)] + texts[i] for i in range(N_PROMPTS)]


def answer(folder: str, store: str, order: list[int], out: Connection) -> None:
    """Sends (index of a prompt, its answer with all bits) for each index of `order`."""
    os.environ["MOEGGUF_HOME"] = folder
    os.environ["MOEGGUF_TRIAL_LOAD"] = "0"
    from moegguf.generate.engine import Engine
    from moegguf.generate.request import Sampling

    sampling = Sampling(temperature=0.0, max_tokens=N_NEW)
    with Engine(str(DEMO), parallel=2, n_ctx=2048, n_threads=1, context_store=store) as engine:
        asked = prompts(engine.llm.n_vocab())
        for i in order:
            (found,) = engine.generate(asked[i], sampling, n_logprobs=5)
            out.send((i, repr(found.error or (found.text, found.logprobs))))


def received(reads: Connection) -> Iterator[tuple[int, str]]:
    """Yields what a process has sent, until it ends."""
    try:
        while True:
            yield reads.recv()
    except (EOFError, OSError):
        return


def started(folder: Path, store: str, order: list[int]) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    reads, writes = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=answer, args=(str(folder), store, order, writes))
    process.start()
    writes.close()
    return process, reads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    SPAWN.set_forkserver_preload(["moegguf.generate.engine"])
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, str]:
    """Answers of a process that keeps no contexts."""
    process, reads = started(folder, "0", list(range(N_PROMPTS)))
    answers = dict(received(reads))
    process.join()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, N_KILLS, KILLS_OF_A_TEST))
def test_killed_writers_leave_whole_blocks_and_right_answers(
    first: int, folder: Path, expected: dict[int, str]
) -> None:
    n_answers = 0
    for seed in range(first, min(first + KILLS_OF_A_TEST, N_KILLS)):
        order = np.random.default_rng(seed).integers(0, N_PROMPTS, 10_000).tolist()
        process, reads = started(folder, STORE, order)
        answers = [reads.recv()]
        time.sleep(random.Random(seed).uniform(0, LONGEST_S))
        process.kill()
        answers += received(reads)
        process.join()
        for i, text in answers:
            assert text == expected[i], f"kill {seed}: prompt {i} was answered with other bits"
        n_answers += len(answers)
    contexts = folder / "cache" / "contexts"
    store = KvBlockStore(contexts, parse_size(STORE))
    blocks = list(stored_blocks(contexts))
    print(f"{n_answers} answers, {len(blocks)} blocks")
    assert blocks
    assert not store.is_off
    assert all(store.read(block.path.name) is not None for block in blocks)
