"""Tests the model manager: order of requests, limits, cancelling, crashes, load options
and background leases.

Workers are scripted, and their processes are real.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from scripted_manager import (
    FakeCatalog,
    answer_text,
    begun,
    generate,
    manager_of,
    until,
)

from moegguf.errors import (
    BudgetError,
    BusyError,
    ModelFormatError,
    ModelNotFoundError,
    OptionError,
    QueueFullError,
    WorkerError,
)
from moegguf.generate.request import AnswerSummary, Delta, Request
from moegguf.serving import managed_model, worker_process
from moegguf.serving.clients import BACKGROUND, current_client
from moegguf.serving.model_manager import ModelManager


@pytest.fixture
def catalog(tmp_path: Path) -> FakeCatalog:
    catalog = FakeCatalog(tmp_path)
    for name in "abc":
        catalog.add(name)
    return catalog


def waiting(manager: ModelManager) -> int:
    return sum(model.queue for model in manager.loaded())


async def test_answer_ends_with_done_and_loaded_reports_the_state(
    catalog: FakeCatalog,
) -> None:
    async with manager_of(catalog) as manager:
        for first in (True, False):
            async with manager.lease("a") as lease:
                assert (
                    lease.entry.name == "a:latest" and manager.loaded()[0].n_ctx == 4096
                )
                events = [
                    event async for event in lease.answer(Request(prompt="say x"))
                ]
            assert [type(event) for event in events] == [Delta, AnswerSummary]
            assert isinstance(events[-1], AnswerSummary) and events[-1].finish == "stop"
            assert (events[-1].load_s > 0) is first
        (model,) = manager.loaded()
        assert (model.name, model.digest, model.n_ctx, model.size_bytes) == (
            "a:latest",
            "a" * 64,
            4096,
            100 << 20,
        )
        assert (model.busy, model.stopping, model.queue, model.n_requests) == (
            False,
            False,
            0,
            2,
        )
        assert (
            model.stats.tokens == 2
            and model.decisions["policy"] == "lru"
            and model.plan.n_slots == 1
        )


async def test_budget_error_of_a_request_is_an_option_error(
    catalog: FakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        catalog, "measure", Mock(side_effect=BudgetError("it holds 1 experts"))
    )
    async with manager_of(catalog) as manager:
        with pytest.raises(BudgetError, match="1 experts"):
            await manager.load("a")
        with pytest.raises(OptionError, match="1 experts"):
            await manager.load("a", {"expert_cache": "2%"})


async def test_lease_grants_as_many_requests_as_the_worker_runs_in_parallel(
    catalog: FakeCatalog,
) -> None:
    catalog.add("d", n_parallel=3)
    async with manager_of(catalog) as manager:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(manager.lease("d"))
            fourth = asyncio.create_task(generate(manager, "d", "say x"))
            await until(lambda: waiting(manager) == 1)
            unload = asyncio.create_task(manager.unload("d"))
            await until(lambda: manager.loaded()[0].stopping)
            assert manager.loaded()[0].busy and not unload.done()
        assert await unload
        assert await fourth == "x"
    assert len(catalog.loads("d")) == 2


async def test_full_queue_drops_requests_of_the_client_with_the_most(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    go, answered, refused, told = (
        tmp_path / "go",
        list[str](),
        list[str](),
        set[tuple[str, int]](),
    )

    async def request(manager: ModelManager, client: str, word: str) -> None:
        current_client.set(client)
        try:
            answered.append(await generate(manager, "a", f"say {word}"))
        except QueueFullError as full:
            refused.append(word)
            told.add((str(full), full.retry_after_s))

    async with (
        manager_of(catalog, max_queue=4) as manager,
        asyncio.TaskGroup() as group,
    ):

        async def send(client: str, word: str) -> None:
            before = waiting(manager), len(refused)
            group.create_task(request(manager, client, word))
            await until(lambda: (waiting(manager), len(refused)) != before)

        held = group.create_task(generate(manager, "a", f"hold {go}"))
        await until(lambda: manager.loaded() and manager.loaded()[0].busy)
        for number in range(5):
            await send("many", f"many{number}")
        assert refused == ["many4"], "the queue is full"
        for client, word in (
            ("one", "one0"),
            ("one", "one1"),
            ("one", "one2"),
            ("other", "other0"),
            ("many", "many5"),
        ):
            await send(client, word)
        assert refused == ["many4", "many3", "many2", "one2", "one1", "many5"], (
            "each has its share, the oldest first"
        )
        assert waiting(manager) == 4
        go.touch()
        await held
    assert sorted(answered) == ["many0", "many1", "one0", "other0"]
    assert told == {
        ("server busy, please try again.  maximum pending requests exceeded", 1)
    }


async def test_queue_full_error_suggests_a_tenth_of_the_longest_wait_up_to_a_minute(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with manager_of(catalog, max_queue=1) as manager:
        held = asyncio.create_task(generate(manager, "a", f"hold {go}"))
        await until(lambda: manager.loaded() and manager.loaded()[0].busy)
        waits = asyncio.create_task(generate(manager, "a", "say late"))
        await until(lambda: waiting(manager) == 1)
        (first,) = (
            request for model in manager._models.values() for request in model.waiting
        )
        for waited_s, retry_s in ((0, 1), (200, 20), (9000, 60)):
            first.since_s = time.monotonic() - waited_s
            with pytest.raises(QueueFullError) as refused:
                await generate(manager, "a", "say no")
            assert refused.value.retry_after_s == retry_s
        go.touch()
        await asyncio.gather(held, waits)


async def test_request_cancelled_during_a_load_leaves_the_model_loaded(
    catalog: FakeCatalog,
) -> None:
    async with manager_of(catalog) as manager:
        request = asyncio.create_task(generate(manager, "a", "say x"))
        await until(lambda: catalog.loads("a"))
        request.cancel()
        await until(manager.loaded)
        assert await generate(manager, "a", "say y") == "y"
    assert len(catalog.loads("a")) == 1


async def test_load_reports_its_progress(catalog: FakeCatalog) -> None:
    catalog.add("d", fractions=4)
    seen = list[tuple[str, float, float]]()
    async with manager_of(catalog) as manager:
        manager.on_load = lambda entry, share, seconds: seen.append(
            (entry.name, share, seconds)
        )
        await manager.load("d")
    assert [(name, share) for name, share, _ in seen] == [
        ("d:latest", part / 4) for part in (1, 2, 3, 4)
    ]
    assert all(0 <= seconds < 60 for *_, seconds in seen)


async def test_rest_returns_the_end_of_an_interrupted_answer(
    catalog: FakeCatalog,
) -> None:
    async with manager_of(catalog) as manager, manager.lease("a") as lease:
        answer = lease.answer(Request(prompt="slowly tick"))
        assert isinstance(await anext(answer), Delta)
        await answer.aclose()
        for _ in range(2):
            *_, last = await lease.rest()
            assert isinstance(last, AnswerSummary) and last.finish == "cancelled"


async def test_summary_has_the_seconds_of_the_load_and_the_decisions_of_the_worker(
    catalog: FakeCatalog,
) -> None:
    summaries = []
    async with manager_of(catalog) as manager:
        for _ in range(2):
            async with manager.lease("a") as lease:
                request = Request(prompt="say x")
                *_, last = [event async for event in lease.answer(request)]
                assert isinstance(last, AnswerSummary)
                summaries.append(last)
    assert summaries[0].load_s > 0 and summaries[1].load_s == 0
    assert [each.decisions["policy"] for each in summaries] == ["lru", "lru"]


@pytest.mark.parametrize("ending", ["break", "close", "cancel", "raise"])
async def test_closing_the_answer_iterator_stops_the_answer(
    catalog: FakeCatalog, tmp_path: Path, ending: str
) -> None:
    async def stop_reading(manager: ModelManager) -> None:
        async with manager.lease("a") as lease:
            answer = lease.answer(Request(prompt=f"hold {tmp_path / 'never'}"))
            async for _ in answer:
                if ending == "break":
                    break
                if ending == "close":
                    await answer.aclose()
                if ending == "cancel":
                    task.cancel()
                if ending == "raise":
                    raise ZeroDivisionError

    async with manager_of(catalog) as manager:
        task = asyncio.create_task(stop_reading(manager))
        with contextlib.suppress(asyncio.CancelledError, ZeroDivisionError):
            await task
        pid = manager.loaded()[0].pid
        assert await generate(manager, "a", "say next") == "next"
        assert manager.loaded()[0].pid == pid, "the worker stopped by itself"
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_worker_that_does_not_stop_is_killed(
    catalog: FakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "CANCEL_GRACE_S", 0.02)
    async with manager_of(catalog) as manager:
        async with manager.lease("a") as lease:
            async for _ in lease.answer(Request(prompt="hang")):
                break
        assert await generate(manager, "a", "say next") == "next"
    assert len(catalog.loads("a")) == 2


@pytest.mark.parametrize("debug", [False, True])
async def test_killed_worker_fails_only_its_running_answer(
    catalog: FakeCatalog, capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    async with manager_of(catalog, debug=debug) as manager:
        async with manager.lease("a") as lease:
            second = asyncio.create_task(generate(manager, "a", "say queued"))
            answer = aiter(lease.answer(Request(prompt="die")))
            assert await anext(answer) == Delta("last")
            with pytest.raises(
                WorkerError,
                match=r"model's worker process.*SIGKILL.*GGML_ASSERT\(as scripted\).*loads the model again",
            ):
                await anext(answer)
            assert await answer_text(lease, "say again") == "again", "the same lease"
        assert await second == "queued"
    assert len(catalog.loads("a")) == 2
    assert ("GGML_ASSERT(as scripted)" in capsys.readouterr().err) is debug


async def test_request_whose_worker_died_before_any_output_is_repeated_once(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    async with manager_of(catalog) as manager:
        pid = (await manager.load("a")).pid
        os.kill(pid, signal.SIGKILL)
        assert await generate(manager, "a", "say x") == "x", "the exit is not known yet"
        async with (
            manager.lease("a") as lease,
            manager.lease("a", will_answer=False) as shared,
        ):
            os.kill(manager.loaded()[0].pid, signal.SIGKILL)
            assert await shared.value("tokenize", text="ab") == [97, 98]
            assert await answer_text(lease, "say y") == "y"
        left = tmp_path / "left"
        left.write_text("1")
        async with manager.lease("a") as lease:
            assert lease.load_s == 0
            assert await answer_text(lease, f"die-silently {left}") == "alive"
            assert lease.load_s > 0, "it was loaded again"
        left.write_text("2")
        with pytest.raises(WorkerError, match="SIGKILL"):
            await generate(manager, "a", f"die-silently {left}")
        assert left.read_text() == "0", "once"
    assert len(catalog.loads("a")) == 5


async def test_crashed_load_fails_its_waiters_and_the_next_request_loads_again(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    left = tmp_path / "deaths"
    left.write_text("1")
    catalog.add("d", die=str(left))
    async with manager_of(catalog) as manager:
        results = await asyncio.gather(
            *(generate(manager, "d", "say x") for _ in range(5)), return_exceptions=True
        )
        assert [type(result) for result in results] == [WorkerError] * 5
        assert len(catalog.loads("d")) == 1
        assert await generate(manager, "d", "say x") == "x"


async def test_failed_load_is_tried_once_for_each_set_of_options(
    catalog: FakeCatalog,
) -> None:
    catalog.add("d", fail="ModelFormatError")
    async with manager_of(catalog) as manager:
        asked = [
            generate(manager, "d", "say x", {"n_ctx": n}) for n in (1024, 1024, 512)
        ]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [
            ModelFormatError
        ] * 3 and manager.loaded() == []
        assert [load["n_ctx"] for load in catalog.loads("d")] == [1024, 512]
        assert await generate(manager, "a", "say x") == "x"


async def test_loading_returns_the_share_read_by_model_name(
    catalog: FakeCatalog,
) -> None:
    catalog.add("d", stall=True, fractions=2)
    async with manager_of(catalog) as manager:
        assert manager.loading() == {}
        asked = asyncio.ensure_future(generate(manager, "d", "say x"))
        await until(lambda: list(manager.loading().values()) == [1.0])
        assert [name.partition(":")[0] for name in manager.loading()] == ["d"]
        asked.cancel()


async def test_load_without_progress_times_out(catalog: FakeCatalog) -> None:
    catalog.add("d", stall=True, fractions=2)
    async with manager_of(catalog, load_timeout_s=0.1) as manager:
        with pytest.raises(
            WorkerError, match=r"nothing was read for 0.1 s.*MOEGGUF_LOAD_TIMEOUT"
        ):
            await generate(manager, "d", "say x")
        assert len(catalog.loads("d")) <= 1 and manager.loaded() == [], (
            "it was not tried again"
        )


@pytest.mark.parametrize(
    ("asked", "process"),
    [
        ([{"n_ctx": n} for n in (1024, None, 512, 1024, 2048, 4096, 1024)], [0, 0, 0, 0, 4, 5, 5]),
        (
            [{"expert_cache": cache, "n_batch": n} for cache, n in (
                ("50%", None), (None, None), ("50%", 512), ("25%", None), (None, 512), (None, 256), (None, None)
            )],
            [0, 0, 0, 3, 3, 5, 5],
        ),
    ],
    ids=["a longer context", "other options"],
)  # fmt: skip
async def test_model_is_reloaded_only_for_options_that_the_worker_lacks(
    catalog: FakeCatalog, asked: list[dict[str, Any]], process: list[int]
) -> None:
    async with manager_of(catalog) as manager:
        pids = [
            (
                await manager.load(
                    "a",
                    {
                        name: value
                        for name, value in options.items()
                        if value is not None
                    },
                )
            ).pid
            for options in asked
        ]
    assert [pids.index(pid) for pid in pids] == process


async def test_cancelled_waiter_is_skipped_and_a_reload_waits_for_earlier_requests(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with manager_of(catalog) as manager:
        tasks = [await begun(manager, "a", go)]
        for word, n_ctx in (
            ("two", None),
            ("cancelled", None),
            ("other", 8192),
            ("four", None),
        ):
            tasks.append(
                asyncio.create_task(
                    generate(
                        manager, "a", f"say {word}", {"n_ctx": n_ctx} if n_ctx else {}
                    )
                )
            )
            await until(lambda: waiting(manager) == len(tasks) - 1)
        cancelled = tasks.pop(2)
        cancelled.cancel()
        await until(lambda: waiting(manager) == 3)
        go.touch()
        assert (
            await asyncio.gather(*tasks) == ["held", "two", "other", "four"]
            and cancelled.cancelled()
        )
    assert [load["n_ctx"] for load in catalog.loads("a")] == [4096, 8192]


async def test_model_with_changed_weights_is_loaded_again(catalog: FakeCatalog) -> None:
    async with manager_of(catalog) as manager:
        await generate(manager, "a", "say x")
        catalog.change("a", weights="f" * 64)
        await generate(manager, "a", "say x")
        assert manager.loaded()[0].digest == "f" * 64
    assert len(catalog.loads("a")) == 2


@pytest.mark.parametrize("beside", ["adapter", "mmproj", "draft"])
async def test_model_is_reloaded_for_a_replaced_adapter_mmproj_or_draft_file(
    catalog: FakeCatalog, tmp_path: Path, beside: str
) -> None:
    file, other = tmp_path / "beside.gguf", tmp_path / "other.gguf"
    file.write_text("one")
    other.write_text("two")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    catalog.change("a", **{beside: file})
    async with manager_of(catalog) as manager:
        for n_loads in (1, 2, 2):
            await generate(manager, "a", "say x")
            assert len(catalog.loads("a")) == n_loads
            (other if other.exists() else file).rename(
                file if other.exists() else other
            )


async def test_manager_rejects_an_unknown_name_and_accepts_an_entry(
    catalog: FakeCatalog,
) -> None:
    entry = catalog.find("a")
    catalog.entries.clear()
    async with manager_of(catalog) as manager:
        for call in (
            manager.load("a"),
            manager.unload("a"),
            generate(manager, "a", "say x"),
        ):
            with pytest.raises(ModelNotFoundError):
                await call
        assert (await manager.load(entry)).name == "a:latest"
        async with manager.lease(entry) as lease:
            assert await answer_text(lease, "say x") == "x"
        assert await manager.unload(entry) is True


async def test_shared_lease_does_not_wait_for_answers_and_cannot_generate(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with manager_of(catalog) as manager:
        running = await begun(manager, "a", go)
        async with manager.lease("a", will_answer=False) as lease:
            assert await lease.value("tokenize", text="ab") == [97, 98]
            with pytest.raises(OptionError, match="will_answer"):
                await answer_text(lease, "say x")
        assert (await manager.load("a")).busy
        go.touch()
        assert await running == "held"


async def test_model_is_released_when_the_answer_is_computed_although_unread(
    catalog: FakeCatalog,
) -> None:
    async with manager_of(catalog) as manager, manager.lease("a") as lease:
        answer = lease.answer(Request(prompt="count 100"))
        assert await anext(aiter(answer)) == Delta("0 ")
        assert await generate(manager, "a", "say next") == "next"
        rest = [event async for event in answer]
        assert len(rest) == 100 and isinstance(rest[-1], AnswerSummary)
        assert await answer_text(lease, "say again") == "again", (
            "the same lease waits in the queue again"
        )


async def test_unload_waits_for_the_running_answer_and_waiters_load_again(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with manager_of(catalog) as manager:
        assert await manager.unload("a") is False
        running = await begun(manager, "a", go)
        behind = asyncio.create_task(generate(manager, "a", "say behind"))
        await until(lambda: waiting(manager) == 1)
        unloading = asyncio.create_task(manager.unload("a"))
        await until(lambda: manager.loaded()[0].stopping)
        assert not running.done()
        go.touch()
        assert await unloading is True
        assert await running == "held" and await behind == "behind"
        assert await manager.unload("a") is True and manager.loaded() == []
    assert len(catalog.loads("a")) == 2


async def test_close_lets_answers_finish_within_a_grace_time_and_refuses_waiters(
    catalog: FakeCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    async with manager_of(catalog) as manager:
        running = await begun(manager, "a", go)
        behind = asyncio.create_task(generate(manager, "a", "say behind"))
        await until(lambda: waiting(manager) == 1)
        closing = asyncio.create_task(manager.__aexit__())
        for refused in (behind, generate(manager, "a", "say x")):
            with pytest.raises(BusyError, match="shutting down"):
                await refused
        go.touch()
        assert await running == "held"
        await closing
    monkeypatch.setattr("moegguf.serving.model_manager.SHUTDOWN_GRACE_S", 0.02)
    async with manager_of(catalog) as manager:
        running = asyncio.create_task(generate(manager, "a", "hang"))
        await until(lambda: manager.loaded() and manager.loaded()[0].busy)
    with pytest.raises(WorkerError):
        await running


async def test_snapshots_show_the_experts_of_loaded_models(
    catalog: FakeCatalog,
) -> None:
    async with manager_of(catalog) as manager:
        assert await manager.snapshots(None, 1) == []
        for name in "ab":
            await generate(manager, name, "say x")
        assert [snapshot.model for snapshot in await manager.snapshots(None, 1)] == [
            "a:latest",
            "b:latest",
        ]
        [snapshot] = await manager.snapshots(catalog.find("b"), 1)
        assert (snapshot.model, snapshot.n_expert, snapshot.state) == (
            "b:latest",
            2,
            b"\x00\x02",
        )
        assert snapshot.since(None).uses == b"\x00\x00"
        await manager.unload("b")
        assert await manager.snapshots(catalog.find("b"), 1) == []


async def test_unload_during_a_failing_load_raises_no_error(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    catalog.add("d", wait=str(tmp_path / "go"), fail="ModelFormatError")
    async with manager_of(catalog) as manager:
        loading = asyncio.create_task(generate(manager, "d", "say x"))
        await until(lambda: catalog.loads("d"))
        # A canonical name needs no look-up.
        unloading = asyncio.create_task(manager.unload("d:latest"))
        await asyncio.sleep(0)
        (tmp_path / "go").touch()
        with pytest.raises(ModelFormatError):
            await loading
        assert await unloading is True and manager.loaded() == []


@pytest.mark.parametrize(("max_wait_s", "first"), [(60.0, "f0 f1 f2"), (0.0, "b0 f0")])
async def test_background_requests_come_last_for_a_limited_time(
    catalog: FakeCatalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_wait_s: float,
    first: str,
) -> None:
    monkeypatch.setattr(managed_model, "MAX_WAIT_S", max_wait_s)
    ended: list[str] = []

    async def note(answer: Coroutine[Any, Any, str]) -> None:
        ended.append(await answer)

    async with manager_of(catalog) as manager:
        gate = tmp_path / "gate"
        current_client.set("a")
        other = await begun(manager, "a", gate)
        current_client.set(BACKGROUND)
        tasks = [
            asyncio.create_task(note(generate(manager, "a", f"say b{i}")))
            for i in range(5)
        ]
        await until(lambda: waiting(manager) == 5)
        current_client.set("b")
        tasks += [
            asyncio.create_task(note(generate(manager, "a", f"say f{i}")))
            for i in range(3)
        ]
        await until(lambda: waiting(manager) == 8)
        gate.touch()
        await asyncio.gather(other, *tasks)
    assert " ".join(ended).startswith(first) and sorted(ended) == [
        *(f"b{i}" for i in range(5)),
        "f0",
        "f1",
        "f2",
    ]
