"""Two minutes of load on a server: many clients of every API, killed workers, and
changing budgets. Some clients disconnect before their answer ends. The test does not
run by default; `make soak` runs it. MOEGGUF_SOAK sets the seconds.

The test checks that

- every answer is equal to the answer that a single client receives;
- no more answers are lost than the killed workers can have been generating;
- apart from the errors of lost answers, clients receive no error other than "busy";
- memory stays within the budget;
- no process or temporary file is left over.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from frontends.servers import Server, serving

from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment
from tools.load_test import (
    DIALECTS,
    MOST_GROWTH_MB,
    Question,
    Run,
    lines,
    questions_of,
    watch_memory,
)

SECONDS = float(os.environ.get("MOEGGUF_SOAK", "120"))
CLIENTS, MAX_TOKENS = 64, 24
# A prompt whose answer repeats text, so that parts of it are drafted.
REPETITIVE = "Repeat this: " + "moegguf runs Mixture-of-Experts models. " * 8
CANCELS = 0.15  # share of the requests that the client cancels
# The shortest and the longest time in seconds between two kills, and between two
# changes of the budget.
KILL_S, BUDGET_S = (4.0, 9.0), (0.5, 2.0)
BUDGETS = ("auto", "25%", "40%", "60%", "100%")
MEMORY = 512 << 20  # bytes of memory for all models together
# Bytes of a worker without its model: Python, libraries, and the vocabulary for answer
# constraints.
PROCESS_BYTES = 200 << 20
REFUSED = (404, 503)  # statuses of a budget change while the model is being reloaded

# Answers are generated one at a time if the CPU lacks batch-invariant kernels.
PARALLEL = 8 if has_kernels(read_processor(), read_environment().kernels) else 1


class Meddler:
    """Kills workers and changes the demo's budget at random times, and watches the
    memory of workers.

    Each of these methods runs until its task is cancelled.
    """

    def __init__(self, run: Run) -> None:
        self._client, self._outcome, self._dice = (
            run.client,
            run.outcome,
            random.Random(2),
        )
        self.budgets, self.refused = list[int](), 0
        # (resident bytes, size of the model) of workers that used too much memory.
        self.over: list[Any] = []

    async def _loaded(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = (await self._client.get("/api/ps")).json()[
            "models"
        ]
        return models

    async def kill(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(*KILL_S))
            for model in await self._loaded():
                with suppress(ProcessLookupError):
                    os.kill(model["moe"]["pid"], signal.SIGKILL)
                    self._outcome.kills += 1

    async def change_budgets(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(*BUDGET_S))
            body = {"model": "demo", "expert_cache": self._dice.choice(BUDGETS)}
            reply = await self._client.put("/budget", json=body)
            if reply.status_code == 200:
                found = reply.json()
                self.budgets.append(found["expert_cache_bytes"])
                assert (
                    0 < found["expert_cache_bytes"] <= found["max_expert_cache_bytes"]
                ), found
            else:
                assert (
                    reply.status_code in REFUSED
                    or "worker process has ended" in reply.text
                ), reply.text
                self.refused += 1

    async def watch_memory(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            for model in await self._loaded():
                with suppress(psutil.Error):
                    used = psutil.Process(model["moe"]["pid"]).memory_info().rss
                    if used > model["size"] + PROCESS_BYTES or model["size"] > MEMORY:
                        self.over.append((used, model["size"]))


def port_of(server: Server) -> int:
    return httpx.URL(server.url).port or 0


async def soak(server: Server) -> tuple[Run, Meddler]:
    async with httpx.AsyncClient(
        base_url=server.url,
        timeout=SECONDS + 120,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as client:
        questions = questions_of(list(DIALECTS), 1, MAX_TOKENS)
        questions += [
            Question(REPETITIVE, 99, 4 * MAX_TOKENS, dialect) for dialect in DIALECTS
        ]
        run = Run(client, "demo", questions, CLIENTS, CANCELS)
        await run.record_expected()
        meddler = Meddler(run)
        # The set of workers changes; the server's own memory is checked below.
        run.outcome.most_growth_mb = math.inf
        work = (
            meddler.kill(),
            meddler.change_budgets(),
            meddler.watch_memory(),
            watch_memory(run, port_of(server), 1.0),
        )
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await run.run_clients(SECONDS)
        finally:
            failed = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in failed:
            task.result()
        return run, meddler


def processes_in(home: Path) -> list[str]:
    """Returns the id and command line of each process whose MOEGGUF_HOME is `home`,
    whatever its parent.

    Leaves out zombies.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get("MOEGGUF_HOME") == str(home)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def files_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()
    }


def test_a_server_survives_load_kills_and_budget_changes(tmp_path: Path) -> None:
    temporary, home = tmp_path / "temporary", tmp_path / "home"
    temporary.mkdir()
    shared = set(os.listdir("/dev/shm"))
    options = (
        "--parallel",
        str(PARALLEL),
        "--memory",
        str(MEMORY),
        "--expert-cache",
        "50%",
        "--draft",
        "auto",
    )
    settings = {
        "MOEGGUF_CONTEXT_STORE": "64MiB",
        "TMPDIR": str(temporary),
        "MOEGGUF_LOG_FORMAT": "json",
    }
    with serving(tmp_path, *options, **settings) as server:
        body = {"model": "demo", "keep_alive": -1, "options": {"num_thread": 1}}
        assert server.call("/api/generate", body).status == 200
        run, meddler = asyncio.run(soak(server))
        assert len(processes_in(home)) > 1
        connections = psutil.Process(server.pid).net_connections()
        n_left = sum(
            connection.status == psutil.CONN_ESTABLISHED for connection in connections
        )
        metrics = server.call("/metrics").text
    outcome, figures = (
        run.outcome,
        {name: line for line in metrics.splitlines() for name in [line.split(" ")[0]]},
    )
    print("\n".join(lines(outcome)))
    print(
        f"budgets          {len(meddler.budgets)} changes, {meddler.refused} refused while it was loaded anew"
    )
    for name, line in figures.items():
        if "draft" in name and not name.startswith("#"):
            print(line)
    assert outcome.passed, "\n".join(lines(outcome))
    assert outcome.kills and outcome.cancelled and len(set(meddler.budgets)) > 1
    assert outcome.lost <= outcome.kills * PARALLEL
    assert not meddler.over, meddler.over
    of_server = [memory["server"] for memory in outcome.memory_bytes]
    assert of_server[-1] - of_server[len(of_server) // 2] < MOST_GROWTH_MB * 1e6, (
        of_server
    )
    # One connection is left: it reads the metrics.
    assert n_left <= 1, "connections of clients that left"
    assert not processes_in(home)
    assert set(os.listdir("/dev/shm")) <= shared and files_in(temporary) == set()
    left = {name for name in files_in(home) if not name.startswith("cache/contexts/")}
    assert not {name for name in left if name.endswith((".tmp", ".part"))}, left
    records = [
        json.loads(line) for line in server.log().splitlines() if line.startswith("{")
    ]
    assert not [record for record in records if "exception" in record]
