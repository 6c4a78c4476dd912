"""Tests names that refer to the same files and share one worker process.

The tests check when the model is reloaded, when the process exits, and how the
statistics are counted.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_manager import FakeCatalog, begun, generate, manager_of, until

from moegguf.engine.stats import Stats
from moegguf.server.metrics import Totals
from moegguf.serving.model_manager import ModelManager


@pytest.fixture
def catalog(tmp_path: Path) -> FakeCatalog:
    """A catalog with `a`, and with `b` and `c`, which share its files. `b` has a system
    message, and `c` has a context of 8192."""
    catalog = FakeCatalog(tmp_path)
    catalog.add("a")
    add_persona(catalog, "b", system="Be brief.")
    add_persona(catalog, "c", parameters={"num_ctx": 8192})
    return catalog


def add_persona(catalog: FakeCatalog, name: str, **overrides: Any) -> None:
    base = catalog.entries["a"]
    catalog.entries[name] = replace(base, name=f"{name}:latest", **overrides)
    catalog.sizes[f"{name}:latest"] = catalog.sizes["a:latest"]


def names(manager: ModelManager) -> list[str]:
    return [each.name[0] for model in manager.loaded() for each in model.names]


@pytest.mark.parametrize(
    ("personas", "requests", "loads", "left"),
    [
        ({}, "abab", [("a", 4096)], "ab"),
        ({}, "acaba", [("a", 4096), ("c", 8192)], None),
        ({"d": {"num_ctx": 512}, "e": {"expert_cache": "10%"}}, "daead",
         [("d", 512), ("a", 4096), ("e", 4096)], None),
        ({"d": {"num_thread": 1}, "e": {"num_thread": 2}, "f": {"num_batch": 64}}, "defdefad",
         [("d", 4096), ("e", 4096), ("f", 4096), ("a", 4096)], "adef"),
    ],
    ids=["one process", "a longer context serves every name", "a name does not take over options of another",
         "names with other options do not reload each other"],
)  # fmt: skip
async def test_names_of_one_file_share_a_process_unless_their_options_differ(
    catalog: FakeCatalog, personas: dict[str, dict[str, Any]], requests: str, loads: list[tuple[str, int]],
    left: str | None,
) -> None:  # fmt: skip
    for name, parameters in personas.items():
        add_persona(catalog, name, parameters=parameters)
    async with manager_of(catalog) as manager:
        for name in requests:
            assert await generate(manager, name, f"say {name}") == name
        assert left is None or sorted(names(manager)) == list(left)
        assert sum(model.n_requests for model in manager.loaded()) <= len(requests)
        for model in manager.loaded():
            entries = [catalog.entries[each.name[0]] for each in model.names]
            assert [each.digest for each in model.names] == [
                entry.digest for entry in entries
            ]
    assert [(load["name"][0], load["n_ctx"]) for load in catalog.loads("a")] == loads


async def test_reload_keeps_earlier_options_of_the_name(catalog: FakeCatalog) -> None:
    async with manager_of(catalog) as manager:
        await generate(manager, "b", "say x", {"n_ctx": 1024})
        await generate(manager, "b", "say x", {"n_batch": 64})
        await until(lambda: len(manager.loaded()) == 1)
        assert names(manager) == ["b"] and manager.loaded()[0].n_ctx == 1024
        await generate(manager, "b", "say x")
        await generate(manager, "b", "say x", {"n_ctx": 2048})
        assert manager.loaded()[0].n_ctx == 2048
    assert len(catalog.loads("a")) == 3


async def test_simultaneous_requests_share_one_load_with_combined_options(
    catalog: FakeCatalog,
) -> None:
    asked = [{"n_threads": 1, "n_ctx": 8192}, {}, {"n_batch": 64}, {}]
    async with manager_of(catalog) as manager:
        pair = [generate(manager, "a", "say x", overrides) for overrides in asked[:2]]
        assert await asyncio.gather(*pair) == ["x", "x"]
        assert len(catalog.loads("a")) == 1
        pair = [generate(manager, "b", "say x", overrides) for overrides in asked[2:]]
        assert await asyncio.gather(*pair) == ["x", "x"]
    assert [load["n_ctx"] for load in catalog.loads("a")] == [8192, 4096]


async def test_snapshots_read_the_process_that_a_name_uses(
    catalog: FakeCatalog,
) -> None:
    add_persona(catalog, "d", parameters={"num_thread": 1})
    async with manager_of(catalog) as manager:
        for name in "ad":
            await generate(manager, name, "say x")
        processes = [model.process for model in manager._models.values()]
        before = [process.stats.tokens for process in processes if process]
        assert [
            snapshot.model for snapshot in await manager.snapshots(catalog.find("d"), 1)
        ] == ["d:latest"]
        asked = [
            n < process.stats.tokens
            for n, process in zip(before, processes, strict=True)
            if process
        ]
        assert asked == [False, True], "the fake worker counts requests as tokens"


async def test_process_ends_when_its_last_name_is_unloaded(
    catalog: FakeCatalog,
) -> None:
    async with manager_of(catalog) as manager:
        for name in "ab":
            await generate(manager, name, "say x")
        pid = manager.loaded()[0].pid
        assert await manager.unload("a") is True
        assert names(manager) == ["b"] and manager.loaded()[0].pid == pid
        assert await manager.unload("a") is False, (
            "it is not loaded under that name any more"
        )
        del catalog.entries["b"]
        assert await manager.unload("b:latest") is True and manager.loaded() == []


async def test_unload_of_a_busy_name_waits_and_keeps_other_names(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with manager_of(catalog) as manager:
        held = await begun(manager, "a", go)
        behind = asyncio.create_task(generate(manager, "b", "say b"))
        await until(lambda: manager.loaded()[0].queue == 1)
        unloading = asyncio.create_task(manager.unload("a:latest"))
        await asyncio.sleep(0)
        assert not manager.loaded()[0].stopping
        go.touch()
        assert await asyncio.gather(held, unloading, behind) == ["held", True, "b"]
        assert names(manager) == ["b"]
    assert len(catalog.loads("a")) == 1


async def test_unload_of_an_idle_name_does_not_wait_for_another_name(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with manager_of(catalog) as manager:
        await generate(manager, "b", "say x")
        held = await begun(manager, "a", go)
        async with asyncio.timeout(20):
            assert await manager.unload("b") is True
        assert names(manager) == ["a"] and not held.done()
        go.touch()
        assert await held == "held"


async def test_each_name_has_its_own_keep_alive_time(catalog: FakeCatalog) -> None:
    async with manager_of(catalog) as manager:
        await generate(manager, "a", "say x", keep_alive_s=0.05)
        await generate(manager, "b", "say x", keep_alive_s=100)
        pid = manager.loaded()[0].pid
        await until(lambda: names(manager) == ["b"])
        await generate(manager, "a", "say x", keep_alive_s=0.0)
        assert names(manager) == ["b"] and manager.loaded()[0].pid == pid
        await generate(manager, "b", "say x", keep_alive_s=0.0)
        await until(lambda: not manager.loaded())


async def test_totals_count_each_process_once(catalog: FakeCatalog) -> None:
    totals = Totals()
    async with manager_of(catalog) as manager:
        for name in "ab":
            await generate(manager, name, "say x")
            totals.update(manager.loaded())
        (model,) = manager.loaded()
        totals.update([replace(model, stats=Stats(tokens=10))])
        assert {name: stats.tokens for name, stats in totals.stats.items()} == {
            "a:latest": 10
        }
        totals.update([replace(model, name="b:latest", stats=Stats(tokens=15))])
        totals.update([])
        totals.update([replace(model, pid=1, name="b:latest", stats=Stats(tokens=3))])
        counted = {name: stats.tokens for name, stats in totals.stats.items()}
        assert counted == {"a:latest": 10, "b:latest": 8}
