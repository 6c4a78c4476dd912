"""Leases of lower priority: for requests that nobody waits for, such as those of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from moegguf.serving.events import LoadedModel

MAX_WAIT_S = 30.0
POLL_S = 0.02


class Leases(Protocol):
    """The part of a manager that is needed here."""

    def lease(self, *arguments: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
        """The use of a model by one request (`ModelManager.lease`)."""

    def loaded(self) -> list[LoadedModel]:
        """The models in memory."""


class BackgroundLeases:
    """`lease` as `ModelManager` has it, for requests in the background.

    At most one of them is in the queue of a model, so that another request waits for one of them at most, besides those
    that are computed already. It joins the queue while no other request waits, and after MAX_WAIT_S all the same: a
    busy server still answers a request in the background from time to time.
    """

    def __init__(self, manager: Leases) -> None:
        self._manager = manager
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def lease(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        """A lease of the manager, inside `async with`. Raises what entering that raises."""
        lease = self._manager.lease(*arguments, **options)
        async with self._turn:
            await self._wait()
            entered = await lease.__aenter__()
        try:
            yield entered
        finally:
            await lease.__aexit__(None, None, None)

    async def _wait(self) -> None:
        """Returns when no request waits for a loaded model, after MAX_WAIT_S at the latest."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MAX_WAIT_S
        while any(model.queue for model in self._manager.loaded()) and loop.time() < until_s:
            await asyncio.sleep(POLL_S)
