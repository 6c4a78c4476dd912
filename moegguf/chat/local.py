"""A model of this machine's catalog, which `run` and the chat load through a `ModelManager` of their own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from moegguf.models.entry import Details, ModelEntry, NamedModel
from moegguf.serving.events import Event, LoadedModel, LoadOverrides, Snapshot
from moegguf.serving.wire import build
from moegguf.serving.worker_process import Workers
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import Spinner, loading_text

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.cost import Placement
    from moegguf.engine.stats import Stats
    from moegguf.serving.lease import Lease
    from moegguf.serving.model_manager import ModelManager
    from moegguf.settings import Settings

Result = TypeVar("Result")


class LocalModel:
    """A model that this program loads. `load` comes first.

    The event loop runs only while a method waits. Ctrl-C interrupts a method, and an answer goes on until `stop`.
    """

    url = None  # of a server

    def __init__(self, settings: Settings) -> None:
        """Starts a worker: it takes as long as this program needs to find and describe the model."""
        # One person waits, who can end this program.
        self._settings = replace(settings, n_parallel=1, kv_tokens=None, keep_alive_s=math.inf, load_timeout_s=math.inf)
        self._runner = asyncio.Runner()
        self._workers = self._new_workers()
        self._run(self._start_worker())
        from moegguf.models.catalog import Catalog

        self.names = Catalog()
        self._opened = AsyncExitStack()  # holds the manager
        self._manager: ModelManager | None = None  # of the model that is loaded
        self._entry: ModelEntry  # that model
        self._overrides = LoadOverrides()
        self._spinner = Spinner()
        self._lease: Lease | None = None  # of the answer, once it has the model
        self._reading: asyncio.Task[None] | None = None  # reads the events of the answer
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._before: Snapshot | None = None  # the experts when the last answer began

    def _new_workers(self) -> Workers:
        return Workers(echo_stderr=self._settings.debug, cancel_grace_s=math.inf)

    async def _start_worker(self) -> None:
        await asyncio.wait({self._workers.prepare()})

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(coroutine)

    def details(self, entry: NamedModel) -> Details:
        """Returns the facts in the headers of a model's files. Raises ModelFormatError, ExpertIOError."""
        from moegguf.models.details import details

        return details(_here(entry))

    def parameters(self, conversation: Conversation) -> Mapping[str, Any]:
        """Returns the parameters that the next answer has."""
        return conversation.all_parameters()

    def load(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the conversation's model. The present one ends first, because memory may not hold two."""
        from moegguf.gguf.experts import read_layout
        from moegguf.serving.model_manager import ModelManager
        from moegguf.terminal.loading import warn_of_long_context

        self._unload()
        spinner.show("starting a worker")
        self._spinner = spinner
        parameters = conversation.all_parameters()
        self._entry = _here(conversation.entry)
        self._overrides = LoadOverrides.of(parameters)
        warn_of_long_context(read_layout(self._entry.path), self._overrides.n_ctx)
        settings = self._settings
        if (n_gpu_layers := parameters.get("num_gpu", -1)) != -1:
            settings = replace(settings, loading={**settings.loading, "n_gpu_layers": n_gpu_layers})
        self._manager = ModelManager(
            self.names, settings, workers=self._workers, on_load=self._show_load, on_warning=_print_warning
        )
        try:
            self._run(self._open(self._manager))
        except BaseException:  # also an interrupt
            self._unload()
            raise

    async def _open(self, manager: ModelManager) -> None:
        await self._opened.enter_async_context(manager)
        await manager.load(self._entry, self._overrides)

    def _show_load(self, entry: ModelEntry, share: float, seconds: float) -> None:
        from moegguf.gguf.experts import read_layout

        layout = read_layout(entry.path)
        self._spinner.show(loading_text(layout.name, share, layout.dense_bytes, seconds))

    @property
    def _loaded(self) -> LoadedModel | None:
        models = self._manager.loaded() if self._manager else []
        return models[0] if models else None

    @property
    def n_ctx(self) -> int:
        """Tokens of the context; 0 of a model that is not loaded."""
        return self._loaded.n_ctx if self._loaded else 0

    @property
    def stats(self) -> Stats | None:
        """Counts since the load; None of a model that is not loaded."""
        return self._loaded.stats if self._loaded else None

    @property
    def placement(self) -> Placement | None:
        """The placement of the experts that was chosen, if there was a choice."""
        from moegguf.engine.cost import Placement

        found = self._loaded.plan.get("placement") if self._loaded else None
        return build(Placement, found["chosen"]) if found else None

    @property
    def ended(self) -> bool:
        """True when the model has to be loaded before it can answer."""
        return self._manager is None

    @property
    def reads_images(self) -> bool:
        """True for a loaded model with a projector."""
        from moegguf.models.details import projector_of

        return self._manager is not None and projector_of(self._entry) is not None

    def answer(self, conversation: Conversation, spinner: Spinner) -> Generator[Event]:
        """Yields the events of the answer to the last message. A model whose process has ended, or whose files have
        changed, is loaded again before it."""
        self._spinner = spinner
        self._events = asyncio.Queue()
        self._reading = self._runner.get_loop().create_task(self._read(conversation))
        while (event := self._run(self._events.get())) is not None:
            yield event
        self._reading.result()

    async def _read(self, conversation: Conversation) -> None:
        """Takes the model for an answer and reads its events."""
        assert self._manager is not None
        try:
            async with self._manager.lease(self._entry, self._overrides) as self._lease:
                self._before = await self._snapshot(0)
                async for event in self._lease.answer(conversation.request()):
                    self._events.put_nowait(event)
        finally:
            self._lease = None
            self._events.put_nowait(None)

    def stop(self, timeout_s: float | None) -> list[Event] | None:
        """Cancels the answer. Returns the events up to its end, or None when it has not ended after `timeout_s`."""
        assert self._reading is not None
        if self._lease is None and not self._reading.done():  # the model is being loaded again
            self._unload()
            return []
        if self._lease is not None:
            self._lease.cancel()
        done, _ = self._run(asyncio.wait({self._reading}, timeout=timeout_s))
        if not done:
            return None
        rest = [self._events.get_nowait() for _ in range(self._events.qsize())]
        self._reading.result()
        return [event for event in rest if event is not None]

    async def _snapshot(self, watch_s: float) -> Snapshot | None:
        found = await self._manager.snapshots(self._entry, watch_s) if self._manager else []
        return found[0] if found else None

    def experts(self) -> Snapshot | None:
        """Returns the experts with the uses and loads since the last answer began; None of a model that is not
        loaded."""
        now = self._run(self._snapshot(math.inf))
        return now and now.since(self._before)

    def check_parameter(self, name: str) -> None:
        """Accepts every parameter: each has its effect here."""

    def modelfile(self, entry: NamedModel) -> str:
        """Returns the Modelfile that makes a model."""
        return self.names.modelfile(_here(entry))

    def print_info(self, entry: NamedModel) -> None:
        """Prints the table of `moegguf show`."""
        from moegguf.terminal.facts import facts_of
        from moegguf.terminal.tables import print_model

        print_model(facts_of(_here(entry)))

    def _unload(self) -> None:
        """Ends the present model; the next one gets another manager."""
        if self._reading is not None:
            self._reading.cancel()
        if self._manager is not None:
            self._manager, self._before = None, None
            self._workers = self._new_workers()
            self._run(self._opened.aclose())

    def close(self) -> None:
        """Ends every process."""
        self._unload()
        self._run(self._workers.close())
        self._runner.close()


def _print_warning(_model: str, text: str) -> None:
    print_message(f"warning: {text}")


def _here(entry: NamedModel) -> ModelEntry:
    assert isinstance(entry, ModelEntry)  # `find` returns no other
    return entry
