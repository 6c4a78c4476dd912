"""Kills processes at random moments while they write contexts to disk, and checks their
answers and stored blocks.

An ordinary run kills QUICK_KILLS processes for each model. `make slow` kills
MOEGGUF_SLOW_KILLS other processes for each model (default: 500).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from answering import DEMO
from own_process import fork_context
from running import TinyModel

from moegguf.engine.kv_block_store import KvBlockStore, stored_blocks
from moegguf.quantities import parse_size

N_KILLS = int(os.environ.get("MOEGGUF_SLOW_KILLS", "500"))
KILLS_OF_A_TEST = 50
N_PROMPTS, N_NEW = 16, 6
# Size limits of stored contexts. Not all blocks of the prompts fit, so old blocks are
# deleted.
STORES = {"demo": "24MiB", "tiny-qwen35moe": "3MiB"}
QUICK_KILLS = 3
# The longest time in seconds between a process's first answer and its kill.
LONGEST_S = 0.5


def prompts(n_vocab: int) -> list[list[int]]:
    """Returns N_PROMPTS random prompts in groups of three.

    The second and third prompts of a group begin with the first 100 and 200 tokens,
    respectively, of the group's first prompt.
    """
    texts = [
        np.random.default_rng(i).integers(5, n_vocab - 5, 300 + 40 * i).tolist()
        for i in range(N_PROMPTS)
    ]
    return [texts[i // 3 * 3][: 100 * (i % 3)] + texts[i] for i in range(N_PROMPTS)]


def answer(
    model: str, folder: str, store: str, order: list[int], out: Connection
) -> None:
    """Loads `model` and sends (index of a prompt, answer as text with exact logprobs)
    for each index of `order`."""
    os.environ["MOEGGUF_HOME"] = folder
    os.environ["MOEGGUF_TRIAL_LOAD"] = "0"
    from moegguf.generate.engine import Engine
    from moegguf.generate.request import Sampling

    sampling = Sampling(temperature=0.0, max_tokens=N_NEW)
    with Engine(
        model, parallel=2, n_ctx=2048, n_threads=1, context_store=store
    ) as engine:
        asked = prompts(engine.llm.n_vocab())
        for i in order:
            (found,) = engine.generate(asked[i], sampling, n_logprobs=5)
            out.send((i, repr(found.error or (found.text, found.logprobs))))


def received(reads: Connection) -> Iterator[tuple[int, str]]:
    """Yields the objects that a process sends, until the connection closes."""
    try:
        while True:
            yield reads.recv()
    except (EOFError, OSError):
        return


def started(
    model: Path, folder: Path, store: str, order: list[int]
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    reads, writes = fork_context().Pipe(duplex=False)
    process = fork_context().Process(
        target=answer, args=(str(model), str(folder), store, order, writes)
    )
    process.start()
    writes.close()
    return process, reads


@dataclass(frozen=True)
class Killed:
    """A model whose processes are killed. `folder` is their MOEGGUF_HOME.

    `store` is the size limit of stored contexts. `expected` maps the index of a prompt
    to its answer by a process that stores no contexts.
    """

    model: Path
    folder: Path
    store: str
    expected: dict[int, str]


@pytest.fixture(scope="module", params=STORES)
def killed(
    request: pytest.FixtureRequest,
    tiny: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Killed:
    model = DEMO if request.param == "demo" else tiny(request.param)
    folder = tmp_path_factory.mktemp("home")
    process, reads = started(model, folder, "0", list(range(N_PROMPTS)))
    expected = dict(received(reads))
    process.join()
    return Killed(model, folder, STORES[request.param], expected)


def kill(each: Killed, seeds: range) -> None:
    """Starts and kills a process for each seed. Checks all answers, and the blocks
    stored at the end."""
    n_answers = 0
    for seed in seeds:
        order = np.random.default_rng(seed).integers(0, N_PROMPTS, 10_000).tolist()
        process, reads = started(each.model, each.folder, each.store, order)
        answers = [reads.recv()]
        time.sleep(random.Random(seed).uniform(0, LONGEST_S))
        process.kill()
        answers += received(reads)
        process.join()
        for i, text in answers:
            assert text == each.expected[i], (
                f"kill {seed}: prompt {i} was answered with other bits"
            )
        n_answers += len(answers)
    contexts = each.folder / "cache" / "contexts"
    store = KvBlockStore(contexts, parse_size(each.store))
    blocks = list(stored_blocks(contexts))
    n_states = sum(block.path.name.endswith("-state") for block in blocks)
    print(f"{n_answers} answers, {len(blocks)} blocks, {n_states} states")
    assert blocks
    assert (n_states > 0) == (each.model != DEMO)
    assert not store.is_off
    assert all(store.read(block.path.name) is not None for block in blocks)


def test_a_few_killed_writers_leave_whole_blocks_and_exact_answers(
    killed: Killed,
) -> None:
    kill(killed, range(N_KILLS, N_KILLS + QUICK_KILLS))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, N_KILLS, KILLS_OF_A_TEST))
def test_killed_writers_leave_whole_blocks_and_exact_answers(
    first: int, killed: Killed
) -> None:
    kill(killed, range(first, min(first + KILLS_OF_A_TEST, N_KILLS)))
