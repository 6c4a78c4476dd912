"""Whose turn it is: order, limits, cancelling, deaths, options. The workers are scripted, the processes real."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from pooling import FakeCatalog, ask, in_loop, pool_of, said, until

from moegguf.errors import (
    BusyError,
    ContextError,
    ModelFormatError,
    ModelNotFoundError,
    MoeggufError,
    OptionError,
    WorkerError,
)
from moegguf.generate.request import Delta, GenerationRequest
from moegguf.serving import worker_process as process
from moegguf.serving.events import Done, LoadOptions
from moegguf.serving.manager import ModelManager


@pytest.fixture
def catalog(tmp_path: Path) -> FakeCatalog:
    catalog = FakeCatalog(tmp_path)
    for name in "abc":
        catalog.add(name)
    return catalog


def waiting(pool: ModelManager) -> int:
    return sum(model.queue for model in pool.loaded())


@in_loop
async def test_a_model_is_loaded_once_and_answers(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        shares: list[float] = []
        catalog.add("d", shares=3)
        assert await ask(pool, "d", "say hello you", on_share=shares.append) == "hello you"
        assert await ask(pool, "d:latest", "say again") == "again"
        assert shares == pytest.approx([1 / 3, 2 / 3, 1])
    assert len(catalog.loads("d")) == 1


@in_loop
async def test_the_last_event_says_what_it_took(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        for first in (True, False):
            async with pool.lease("a") as lease:
                assert lease.entry.name == "a:latest" and lease.loaded.n_ctx == 4096
                events = [event async for event in lease.answer(GenerationRequest(prompt="say x"))]
            assert [type(event) for event in events] == [Delta, Done]
            assert isinstance(events[-1], Done) and events[-1].timing.finish == "stop"
            assert (events[-1].load_s > 0) is first


@in_loop
async def test_requests_of_a_model_are_answered_one_by_one_in_order(catalog: FakeCatalog) -> None:
    begun: list[int] = []
    at_once = 0

    async def request(pool: ModelManager, number: int) -> None:
        nonlocal at_once
        async with pool.lease("a") as lease:
            begun.append(number)
            at_once += 1
            assert at_once == 1
            assert await said(lease, f"say {number}") == str(number)
            at_once -= 1

    async with pool_of(catalog) as pool, asyncio.TaskGroup() as group:
        for number in range(64):
            group.create_task(request(pool, number))
            await asyncio.sleep(0)
    assert begun == sorted(begun)


@in_loop
async def test_more_waiting_requests_than_allowed_are_turned_away(catalog: FakeCatalog, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with pool_of(catalog, max_queue=3) as pool:
        requests = [asyncio.create_task(ask(pool, "a", f"hold {go}"))]
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        for _ in range(3):
            requests.append(asyncio.create_task(ask(pool, "a", f"hold {go}")))
        await until(lambda: waiting(pool) == 3)
        with pytest.raises(BusyError, match=r"server busy, please try again\.  maximum pending requests exceeded"):
            await ask(pool, "a", "say x")
        go.touch()
        assert await asyncio.gather(*requests) == ["held"] * 4
        assert await ask(pool, "a", "say x") == "x"


@in_loop
async def test_one_who_leaves_the_line_is_skipped(catalog: FakeCatalog, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with pool_of(catalog) as pool:
        first = asyncio.create_task(ask(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        second, third = (asyncio.create_task(ask(pool, "a", f"say {word}")) for word in ("two", "three"))
        await until(lambda: waiting(pool) == 2)
        second.cancel()
        await until(lambda: waiting(pool) == 1)
        go.touch()
        assert await third == "three" and await first == "held" and second.cancelled()


@in_loop
async def test_one_who_leaves_while_it_loads_leaves_it_loaded(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        request = asyncio.create_task(ask(pool, "a", "say x"))
        await until(lambda: catalog.loads("a"))
        request.cancel()
        await until(pool.loaded)
        assert await ask(pool, "a", "say y") == "y"
    assert len(catalog.loads("a")) == 1


@pytest.mark.parametrize("way", ["break", "close", "cancel", "raise"])
@in_loop
async def test_whoever_stops_listening_stops_the_answer(catalog: FakeCatalog, tmp_path: Path, way: str) -> None:
    async def leave(pool: ModelManager) -> None:
        async with pool.lease("a") as lease:
            answer = lease.answer(GenerationRequest(prompt=f"hold {tmp_path / 'never'}"))
            async for _ in answer:
                if way == "break":
                    break
                if way == "close":
                    await answer.aclose()
                if way == "cancel":
                    task.cancel()
                if way == "raise":
                    raise ZeroDivisionError

    async with pool_of(catalog) as pool:
        task = asyncio.create_task(leave(pool))
        with contextlib.suppress(asyncio.CancelledError, ZeroDivisionError):
            await task
        pid = pool.loaded()[0].pid
        assert await ask(pool, "a", "say next") == "next"
        assert pool.loaded()[0].pid == pid, "the worker stopped by itself"


@in_loop
async def test_a_worker_that_does_not_stop_is_killed(catalog: FakeCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CANCEL_GRACE_S", 0.02)
    async with pool_of(catalog) as pool:
        async with pool.lease("a") as lease:
            async for _ in lease.answer(GenerationRequest(prompt="hang")):
                break
        assert await ask(pool, "a", "say next") == "next"
    assert len(catalog.loads("a")) == 2


@in_loop
async def test_a_worker_that_is_killed_ends_its_answer_and_nothing_else(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        async with pool.lease("a") as lease:
            second = asyncio.create_task(ask(pool, "a", "say queued"))
            answer = aiter(lease.answer(GenerationRequest(prompt="die")))
            assert await anext(answer) == Delta("last")
            with pytest.raises(WorkerError, match=r"'a:latest'.*SIGKILL.*GGML_ASSERT\(as scripted\).*loads it again"):
                await anext(answer)
        assert await second == "queued"
    assert len(catalog.loads("a")) == 2


@in_loop
async def test_a_lease_whose_worker_died_may_ask_again(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool, pool.lease("a") as lease:
        with pytest.raises(WorkerError):
            await said(lease, "die")
        assert await said(lease, "say x") == "x"


@in_loop
async def test_errors_of_a_model_come_out_typed_and_the_model_stays(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        with pytest.raises(ContextError, match="as scripted"):
            await ask(pool, "a", "fail ContextError")
        with pytest.raises(MoeggufError, match="ZeroDivisionError: as scripted"):
            await ask(pool, "a", "fail ZeroDivisionError")
        assert await ask(pool, "a", "say x") == "x"
    assert len(catalog.loads("a")) == 1


@in_loop
async def test_a_worker_that_dies_while_it_loads_is_tried_again(catalog: FakeCatalog, tmp_path: Path) -> None:
    left = tmp_path / "deaths"
    left.write_text("2")
    catalog.add("d", die=str(left))
    async with pool_of(catalog) as pool:
        assert await ask(pool, "d", "say x") == "x"
    assert len(catalog.loads("d")) == 3


@in_loop
async def test_a_worker_that_always_dies_is_not_tried_for_ever(catalog: FakeCatalog, tmp_path: Path) -> None:
    left = tmp_path / "deaths"
    left.write_text("4")
    catalog.add("d", die=str(left))
    async with pool_of(catalog) as pool:
        results = await asyncio.gather(*(ask(pool, "d", "say x") for _ in range(5)), return_exceptions=True)
        assert [type(result) for result in results] == [WorkerError] * 5
        assert len(catalog.loads("d")) == 3
        with pytest.raises(WorkerError):
            await ask(pool, "d", "say x")
        assert len(catalog.loads("d")) == 4, "one more try for one more request"
        assert await ask(pool, "d", "say x") == "x"


@in_loop
async def test_a_model_that_cannot_be_loaded_tells_all_who_wait_and_is_tried_once(catalog: FakeCatalog) -> None:
    catalog.add("d", fail="ModelFormatError")
    async with pool_of(catalog) as pool:
        results = await asyncio.gather(*(ask(pool, "d", "say x") for _ in range(4)), return_exceptions=True)
        assert [type(result) for result in results] == [ModelFormatError] * 4
        assert len(catalog.loads("d")) == 1 and pool.loaded() == []
        assert await ask(pool, "a", "say x") == "x"


@in_loop
async def test_those_who_ask_for_other_options_get_a_try_of_their_own(catalog: FakeCatalog) -> None:
    catalog.add("d", fail="AllocationError")
    async with pool_of(catalog) as pool:
        loads = [LoadOptions(n_ctx=n) for n in (1024, 1024, 512)]
        results = await asyncio.gather(*(ask(pool, "d", "say x", load) for load in loads), return_exceptions=True)
        assert all(isinstance(result, MoeggufError) for result in results)
        assert [load["n_ctx"] for load in catalog.loads("d")] == [1024, 512]


@in_loop
async def test_a_load_that_reads_nothing_for_too_long_ends(catalog: FakeCatalog) -> None:
    catalog.add("d", stall=True, shares=2)
    async with pool_of(catalog, load_timeout_s=0.1) as pool:
        with pytest.raises(WorkerError, match=r"read nothing for 0.1 s.*MOEGGUF_LOAD_TIMEOUT"):
            await ask(pool, "d", "say x")
        assert len(catalog.loads("d")) <= 1 and pool.loaded() == [], "it was not tried again"


@in_loop
async def test_only_options_that_are_given_and_different_load_it_again(catalog: FakeCatalog) -> None:
    asked = [None, 4096, 1024, None, 1024, 2048]
    async with pool_of(catalog) as pool:
        for n_ctx in asked:
            assert await ask(pool, "a", "say x", LoadOptions(n_ctx=n_ctx)) == "x"
    assert [load["n_ctx"] for load in catalog.loads("a")] == [4096, 1024, 2048]


@in_loop
async def test_other_options_wait_for_those_before_them(catalog: FakeCatalog, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with pool_of(catalog) as pool:
        first = asyncio.create_task(ask(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        second = asyncio.create_task(ask(pool, "a", "say two"))
        await until(lambda: waiting(pool) == 1)
        other = asyncio.create_task(ask(pool, "a", "say other", LoadOptions(n_ctx=64)))
        await until(lambda: waiting(pool) == 2)
        fourth = asyncio.create_task(ask(pool, "a", "say four"))
        await until(lambda: waiting(pool) == 3)
        go.touch()
        assert await asyncio.gather(first, second, other, fourth) == ["held", "two", "other", "four"]
    assert [load["n_ctx"] for load in catalog.loads("a")] == [4096, 64]


@in_loop
async def test_what_a_name_says_of_its_context_holds_where_a_request_is_silent(catalog: FakeCatalog) -> None:
    catalog.change("a", parameters={"num_ctx": 2048, "temperature": 1})
    async with pool_of(catalog) as pool:
        await ask(pool, "a", "say x")
        await ask(pool, "a", "say x", LoadOptions(n_ctx=512))
    assert [load["n_ctx"] for load in catalog.loads("a")] == [2048, 512]


@in_loop
async def test_a_name_that_means_other_files_now_is_loaded_again(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        await ask(pool, "a", "say x")
        catalog.change("a", digest="f" * 64)
        await ask(pool, "a", "say x")
        assert pool.loaded()[0].digest == "f" * 64
    assert len(catalog.loads("a")) == 2


@in_loop
async def test_a_name_nobody_knows(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        for call in (pool.load("x"), pool.unload("x"), ask(pool, "x", "say x")):
            with pytest.raises(ModelNotFoundError):
                await call


@in_loop
async def test_whoever_has_found_the_model_need_not_name_it(catalog: FakeCatalog) -> None:
    entry = catalog.find("a")
    catalog.entries.clear()
    async with pool_of(catalog) as pool:
        assert (await pool.load(entry)).name == "a:latest"
        async with pool.lease(entry) as lease:
            assert await said(lease, "say x") == "x"
        assert await pool.unload(entry) is True


@in_loop
async def test_a_server_that_is_debugged_shows_what_its_workers_write(
    catalog: FakeCatalog, capsys: pytest.CaptureFixture[str]
) -> None:
    for debug in (False, True):
        async with pool_of(catalog, debug=debug) as pool:
            with pytest.raises(WorkerError):
                await ask(pool, "a", "die")
        assert ("GGML_ASSERT(as scripted)" in capsys.readouterr().err) is debug


@in_loop
async def test_visitors_do_not_wait_for_answers_and_cannot_ask_for_one(catalog: FakeCatalog, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with pool_of(catalog) as pool:
        running = asyncio.create_task(ask(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        async with pool.lease("a", will_answer=False) as lease:
            assert await lease.tokenize("ab") == [97, 98]
            with pytest.raises(OptionError, match="will_answer"):
                await said(lease, "say x")
        assert (await pool.load("a")).busy
        go.touch()
        assert await running == "held"


@in_loop
async def test_the_turn_goes_on_when_the_model_is_done_not_when_the_reader_is(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool, pool.lease("a") as lease:
        answer = lease.answer(GenerationRequest(prompt="count 100"))
        assert await anext(aiter(answer)) == Delta("0 ")
        assert await ask(pool, "a", "say next") == "next"
        rest = [event async for event in answer]
        assert len(rest) == 100 and isinstance(rest[-1], Done)
        assert await said(lease, "say again") == "again", "the same lease waits in line again"


@in_loop
async def test_unloading_waits_for_the_answer_and_those_behind_load_again(catalog: FakeCatalog, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with pool_of(catalog) as pool:
        assert await pool.unload("a") is False
        running = asyncio.create_task(ask(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        behind = asyncio.create_task(ask(pool, "a", "say behind"))
        await until(lambda: waiting(pool) == 1)
        unloading = asyncio.create_task(pool.unload("a"))
        await until(lambda: pool.loaded()[0].stopping)
        assert not running.done()
        go.touch()
        assert await unloading is True
        assert await running == "held" and await behind == "behind"
        assert await pool.unload("a") is True and pool.loaded() == []
    assert len(catalog.loads("a")) == 2


@in_loop
async def test_figures_of_what_is_loaded(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        await ask(pool, "a", "say x")
        await ask(pool, "a", "say y")
        (model,) = pool.loaded()
        assert (model.name, model.digest, model.n_ctx, model.size_bytes) == ("a:latest", "a" * 64, 4096, 100 << 20)
        assert (model.busy, model.stopping, model.queue, model.n_requests) == (False, False, 0, 2)
        assert model.stats.tokens == 2 and model.decisions == {"policy": "lru"} and model.plan == {"n_slots": 3}


@in_loop
async def test_closing_lets_answers_finish_and_turns_others_away(catalog: FakeCatalog, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with pool_of(catalog) as pool:
        running = asyncio.create_task(ask(pool, "a", f"hold {go}"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
        behind = asyncio.create_task(ask(pool, "a", "say behind"))
        await until(lambda: waiting(pool) == 1)
        closing = asyncio.create_task(pool.__aexit__())
        with pytest.raises(BusyError, match="shutting down"):
            await behind
        with pytest.raises(BusyError, match="shutting down"):
            await ask(pool, "a", "say x")
        go.touch()
        assert await running == "held"
        await closing


@in_loop
async def test_closing_ends_answers_that_take_too_long(catalog: FakeCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegguf.serving.manager.SHUTDOWN_GRACE_S", 0.02)
    async with pool_of(catalog) as pool:
        running = asyncio.create_task(ask(pool, "a", "hang"))
        await until(lambda: pool.loaded() and pool.loaded()[0].busy)
    with pytest.raises(WorkerError):
        await running


@in_loop
async def test_views_go_to_whoever_watches(catalog: FakeCatalog) -> None:
    async with pool_of(catalog) as pool:
        named, latest = aiter(pool.watch("b", 3)), aiter(pool.watch())
        first = [asyncio.ensure_future(anext(views)) for views in (named, latest)]
        await ask(pool, "a", "say x")
        assert (await first[1]).model == "a:latest" and not first[0].done()
        await ask(pool, "b", "say x")
        view = await first[0]
        assert (view.model, view.n_expert, view.state, view.uses) == ("b:latest", 2, b"\x00\x02", b"\x01\x00")
        assert view.tokens_per_s in (3, 4)
        await named.aclose()  # type: ignore[attr-defined]
    assert [view.model async for view in latest] == ["b:latest"], "and it ends with the pool"


@in_loop
async def test_nothing_is_left_of_many_loads_and_cancels(catalog: FakeCatalog, tmp_path: Path) -> None:
    never = tmp_path / "never"
    async with pool_of(catalog) as pool:
        for _ in range(50):
            await ask(pool, "a", "say x", keep_alive_s=0.0)
            await until(lambda: not pool.loaded())
    async with pool_of(catalog) as pool:
        for _ in range(200):
            async with pool.lease("b") as lease:
                async for _ in lease.answer(GenerationRequest(prompt=f"hold {never}")):
                    break
    assert len(catalog.loads("a")) == 50 and len(catalog.loads("b")) == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
