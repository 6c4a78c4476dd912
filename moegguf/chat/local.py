"""A model in this machine's catalog. `run` and the chat load it with their own
`ModelManager`, without a server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from moegguf.generate.request import Event
from moegguf.models.entry import Details, ModelEntry, NamedModel
from moegguf.options import load_options_of
from moegguf.serving.events import LoadedModel, LoadOverrides, Snapshot
from moegguf.serving.worker_process import Workers
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import Spinner, loading_text

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.cost import Placement
    from moegguf.serving.lease import Lease
    from moegguf.serving.model_manager import ModelManager
    from moegguf.settings import Settings

Result = TypeVar("Result")


class LocalModel:
    """A model that this program loads into a worker process.

    The model manager's event loop runs only while one of the methods waits for a
    result. The loop runs in the caller's thread, so Ctrl-C interrupts it.
    """

    url = None  # there is no server

    def __init__(self, settings: Settings, spinner: Spinner) -> None:
        """Starts a worker process in advance, so that it initializes while this program
        finds and describes the model."""
        self.spinner = spinner
        # There is only one user, who can end this program at any time. So loads and
        # cancelled answers need no time limit.
        self._settings = replace(
            settings,
            loading={**settings.loading, "n_parallel": 1, "kv_tokens": 0},
            keep_alive_s=math.inf,
            load_timeout_s=math.inf,
        )
        self._runner = asyncio.Runner()
        self._workers = Workers(echo_stderr=settings.debug, cancel_grace_s=math.inf)
        self._run(self._workers.prepare())
        from moegguf.models.catalog import Catalog

        self.names = Catalog()
        self._opened = AsyncExitStack()  # closes the manager
        self._manager: ModelManager | None = None  # manager of the loaded model
        self._entry: ModelEntry  # entry of the loaded model
        self._overrides: LoadOverrides
        self._lease: Lease  # lease of the last answer
        # State of the experts when the last answer began.
        self._before: Snapshot | None = None

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(coroutine)

    def details(self, entry: NamedModel) -> Details:
        """Returns facts from the headers of a model's files. Raises ModelNotFoundError,
        ModelFormatError or ExpertIOError."""
        from moegguf.models.details import details

        return details(_here(entry))

    def print_info(self, entry: NamedModel) -> None:
        """Prints the table that `moegguf show` prints."""
        from moegguf.terminal.facts import facts_of
        from moegguf.terminal.tables import print_model

        print_model(facts_of(_here(entry)))

    def modelfile(self, entry: NamedModel) -> str:
        """Returns a Modelfile from which the model can be created again."""
        return self.names.modelfile(_here(entry))

    def parameters(self, conversation: Conversation) -> Mapping[str, Any]:
        """Returns all parameters of the conversation, including the model's own.
        `ChatModel` reloads the model if one of its loading parameters has changed."""
        return conversation.all_parameters()

    def load(self, conversation: Conversation) -> None:
        """Loads the conversation's model. Unloads the current model first, because the
        memory may be too small for both."""
        from moegguf.gguf.experts import read_layout
        from moegguf.serving.model_manager import ModelManager
        from moegguf.terminal.loading import warn_of_long_context

        self._unload()
        self.spinner.show("starting a worker")
        parameters = conversation.all_parameters()
        self._entry = _here(conversation.entry)
        self._overrides = load_options_of(parameters)
        layout = read_layout(self._entry.path)
        warn_of_long_context(layout.hparams.n_ctx_train, self._overrides.get("n_ctx"))
        self._manager = ModelManager(
            self.names,
            self._settings,
            workers=self._workers,
            on_load=self._show_load,
            on_warning=_print_warning,
        )
        self._run_or_unload(self._opened.enter_async_context(self._manager))
        self._run_or_unload(self._manager.load(self._entry, self._overrides))

    def _run_or_unload(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine that may load a model. If it fails or is interrupted,
        unloads the model."""
        try:
            return self._run(coroutine)
        except BaseException:
            self._unload()
            raise

    def _show_load(self, entry: ModelEntry, share: float, seconds: float) -> None:
        from moegguf.gguf.experts import read_layout

        layout = read_layout(entry.path)
        self.spinner.show(loading_text(layout.name, share, layout.dense_bytes, seconds))

    @property
    def loaded(self) -> LoadedModel | None:
        """The state of the loaded model, or None while no model is loaded."""
        models = self._manager.loaded() if self._manager else []
        return models[0] if models else None

    @property
    def n_ctx(self) -> int:
        """The size of the context in tokens, or 0 while no model is loaded."""
        return self.loaded.n_ctx if self.loaded else 0

    @property
    def size_bytes(self) -> int:
        """The memory of the loaded model in bytes, or 0 while no model is loaded."""
        return self.loaded.size_bytes if self.loaded else 0

    @property
    def placement(self) -> Placement | None:
        """The chosen placement of the experts. None if the plan compared no placements,
        or while no model is loaded."""
        found = self.loaded.plan.placement if self.loaded else None
        return found.chosen if found else None

    @property
    def reads_images(self) -> bool:
        """True if a model is loaded and its projector can be read."""
        from moegguf.models.details import projector_of

        return self._manager is not None and projector_of(self._entry) is not None

    @property
    def must_load(self) -> bool:
        """True before the first load, and after a load that failed or was
        interrupted."""
        return self._manager is None

    def answer(self, conversation: Conversation) -> Generator[Event]:
        """Yields the events of the answer. If the model's process has ended or its
        files have changed, reloads the model first."""
        assert self._manager is not None
        self._lease = self._manager.lease(self._entry, self._overrides)
        self._run_or_unload(self._lease.__aenter__())
        try:
            self._before = self._run(self._snapshot(0))
            events = self._lease.answer(conversation.request())
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            self._run(self._lease.__aexit__())

    def rest(self, timeout_s: float | None) -> list[Event] | None:
        """Returns the remaining events of a cancelled answer. Returns None if the
        answer does not end within `timeout_s` seconds (None: no limit)."""
        try:
            return self._run(asyncio.wait_for(self._lease.rest(), timeout_s))
        except TimeoutError:
            return None

    async def _snapshot(self, watch_s: float) -> Snapshot | None:
        found = (
            await self._manager.snapshots(self._entry, watch_s) if self._manager else []
        )
        return found[0] if found else None

    def experts(self) -> Snapshot | None:
        """Returns the state of the experts, with their uses and loads since the last
        answer began (0 before the first answer). Returns None if no model is loaded."""
        now = self._run(self._snapshot(math.inf))
        return now and now.since(self._before)

    def check_parameter(self, name: str) -> None:
        """Accepts every parameter, because all of them take effect in this program."""

    def _unload(self) -> None:
        """Unloads the current model and closes its manager."""
        self._manager = self._before = None
        self._run(self._opened.aclose())

    def close(self) -> None:
        """Unloads the model and stops all worker processes."""
        self._unload()
        self._run(self._workers.close())
        self._runner.close()


async def _next(events: AsyncGenerator[Event]) -> Event | None:
    return await anext(events, None)


def _print_warning(_model: str, text: str) -> None:
    print_message(f"warning: {text}")


def _here(entry: NamedModel) -> ModelEntry:
    assert isinstance(entry, ModelEntry)  # `Catalog.find` returns a ModelEntry
    return entry
