"""Leases of lower priority: they are granted, but others that wait come first."""

import asyncio
from pathlib import Path

import pytest
from scripted_manager import FakeCatalog, answer_text, generate, in_loop, manager_of, until

from moegguf.errors import ModelNotFoundError
from moegguf.serving import lease
from moegguf.serving.lease import BackgroundLeases


@in_loop
async def test_a_request_waits_for_one_background_request_at_most(tmp_path: Path) -> None:
    catalog = FakeCatalog(tmp_path)
    catalog.add("a")
    ended: list[str] = []
    async with manager_of(catalog) as manager:
        leases = BackgroundLeases(manager)

        async def in_background(prompt: str) -> None:
            async with leases.lease("a") as lease:
                ended.append(await answer_text(lease, prompt))

        async def in_foreground(prompt: str) -> None:
            ended.append(await generate(manager, "a", prompt))

        gate = tmp_path / "gate"
        tasks = [asyncio.create_task(in_background(f"hold {gate}"))]
        await until(lambda: manager.loaded() and manager.loaded()[0].busy)
        tasks += [asyncio.create_task(in_background(f"say b{i}")) for i in range(5)]
        await until(lambda: manager.loaded()[0].queue == 1)
        tasks += [asyncio.create_task(in_foreground(f"say f{i}")) for i in range(3)]
        await until(lambda: manager.loaded()[0].queue == 4)
        gate.touch()
        await asyncio.gather(*tasks)
    assert ended[:2] == ["held", "b0"]
    assert ended[2:5] == ["f0", "f1", "f2"]
    assert sorted(ended[5:]) == ["b1", "b2", "b3", "b4"]


@in_loop
async def test_a_background_request_is_not_starved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MAX_WAIT_S", 0.1)
    catalog = FakeCatalog(tmp_path)
    catalog.add("a")
    async with manager_of(catalog) as manager:
        leases, gates = BackgroundLeases(manager), [tmp_path / "0", tmp_path / "1"]
        others = [asyncio.create_task(generate(manager, "a", f"hold {gate}")) for gate in gates]
        await until(lambda: manager.loaded() and manager.loaded()[0].queue == 1)

        async def in_background() -> str:
            async with leases.lease("a") as lease:
                return await answer_text(lease, "say b")

        task = asyncio.create_task(in_background())
        await until(lambda: manager.loaded()[0].queue == 2)  # it has joined the queue although another waits
        for gate in gates:
            gate.touch()
        assert await task == "b"
        await asyncio.gather(*others)


@in_loop
async def test_an_error_or_a_cancel_gives_the_turn_to_the_next(tmp_path: Path) -> None:
    catalog = FakeCatalog(tmp_path)
    catalog.add("a")
    async with manager_of(catalog) as manager:
        leases = BackgroundLeases(manager)
        with pytest.raises(ModelNotFoundError):
            async with leases.lease("nothing"):
                pass
        gate = tmp_path / "gate"
        other = asyncio.create_task(generate(manager, "a", f"hold {gate}"))
        await until(lambda: manager.loaded() and manager.loaded()[0].busy)

        async def in_background() -> str:
            async with leases.lease("a") as lease:
                return await answer_text(lease, "say b")

        cancelled = asyncio.create_task(in_background())
        await until(lambda: manager.loaded()[0].queue == 1)
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        assert cancelled.cancelled() and manager.loaded()[0].queue == 0
        gate.touch()
        assert await in_background() == "b"
        await other
