"""A model of this machine, in a worker that belongs to this program and ends with it, however that ends.

The event loop that `WorkerProcess` needs runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from moegguf.chat.answers import Answer
from moegguf.errors import MoeggufError
from moegguf.generate.request import Delta, PromptProgress, Timing
from moegguf.models.entry import ModelEntry, NamedModel
from moegguf.serving import worker_process
from moegguf.serving.wire import LoadConfig, build
from moegguf.serving.worker_process import PendingRequest, WorkerProcess
from moegguf.settings import read_settings
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.cost import Placement
    from moegguf.engine.stats import Stats
    from moegguf.models.entry import Details
    from moegguf.serving.events import Snapshot
    from moegguf.terminal.progress import Spinner

Result = TypeVar("Result")


class OwnWorker:
    """A model of this machine's catalog; `load` comes first. log: shows llama.cpp's messages. A worker starts at once:
    it takes as long as this program needs to find and describe the model."""

    url = None  # of a server

    def __init__(self, *, log: bool = False) -> None:
        self._settings = read_settings()
        self._log = log
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="moegguf-worker", daemon=True).start()
        self._worker: WorkerProcess | None = self._start()
        from moegguf.models.catalog import Catalog

        self.names = Catalog()
        self.n_ctx, self.reads_images = 0, False
        self._plan: Mapping[str, Any] = {}
        self._loaded: tuple[ModelEntry, Mapping[str, Any]] | None = None
        self._before: PendingRequest | Snapshot | None = None  # the experts when the last answer began

    def _start(self) -> WorkerProcess:
        """A new worker, whose requests may take as long as they need to end: a person waits, who can end this
        program."""
        start = WorkerProcess.start(
            command=worker_process.COMMAND,
            on_warning=lambda text: print_message(f"warning: {text}"),
            echo_stderr=self._log or self._settings.debug,
            cancel_grace_s=math.inf,
        )
        return self._run(start)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What a coroutine gives on the worker's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def details(self, entry: NamedModel) -> Details:
        """What the headers of a model's files say. Raises ModelFormatError, ExpertIOError."""
        from moegguf.models.details import details

        return details(_here(entry))

    def options(self, conversation: Conversation) -> dict[str, Any]:
        """How the next answer needs the model to be loaded."""
        return conversation.load_options()

    def load(self, entry: NamedModel, options: Mapping[str, Any], spinner: Spinner) -> None:
        """Closes the present model first, since memory may not hold two; loads it again when the new one fails."""
        before = self._loaded
        if before is not None:
            self.close()
        try:
            self._open(_here(entry), options, spinner)
        except BaseException:  # also an interrupt
            if before is not None:
                self._open(*before, spinner)
            raise

    def _open(self, entry: ModelEntry, options: Mapping[str, Any], spinner: Spinner) -> None:
        start_s = time.perf_counter()
        spinner.show("starting a worker")
        worker, self._worker = self._worker or self._start(), None
        try:
            from moegguf.gguf.experts import read_layout
            from moegguf.models.details import projector_of
            from moegguf.terminal.loading import warn_of_long_context
            from moegguf.terminal.progress import loading_text

            layout, projector = read_layout(entry.path), projector_of(entry)  # while the worker starts
            warn_of_long_context(layout, options.get("n_ctx"))

            def on_progress(share: float | None) -> None:
                text = loading_text(layout.name, share, layout.dense_bytes, time.perf_counter() - start_s)
                spinner.show(f"trying {layout.name}, the first time it is loaded" if share is None else text)

            defaults = {"mmproj": projector and str(projector.path), "flash_attn": self._settings.flash_attention}
            beside = {"lora_path": entry.adapter, "draft": entry.draft}
            defaults |= {name: str(path) for name, path in beside.items() if path}
            chosen = {**defaults, **options, "verbose": self._log}
            config = LoadConfig(entry.name, str(entry.path), options=chosen, silent=not self._log)
            ready = self._run(worker.load(config, math.inf, on_progress))
        except BaseException:  # also an interrupt
            self._run(worker.close(0))
            raise
        self._worker, self._loaded, self._before = worker, (entry, options), None
        self.n_ctx, self.reads_images, self._plan = ready.n_ctx, ready.reads_images, ready.plan

    @property
    def ended(self) -> bool:
        """Whether there is no process with a model."""
        return self._loaded is None or self._own.exited.done()

    @property
    def _own(self) -> WorkerProcess:
        assert self._worker is not None
        return self._worker

    def answer(self, conversation: Conversation) -> Answer:
        """The answer to the last message."""
        generation, worker, requests = conversation.request(), self._own, list[PendingRequest]()

        async def read(answer: Answer) -> None:
            error = None
            try:
                self._before = worker.request("experts", watch_s=0)
                requests.append(worker.request("generate", generation=generation, stream=True))
                if answer.stopped:
                    requests[0].cancel()
                async for event in requests[0].events():
                    if isinstance(event, Delta | PromptProgress):
                        answer.put(event)
                    else:
                        answer.timing = build(Timing, event)
            except MoeggufError as failure:
                error = failure
            answer.decisions = worker.decisions
            answer.end(error)

        def begin(answer: Answer) -> None:
            asyncio.run_coroutine_threadsafe(read(answer), self._loop)

        def stop(_: Answer) -> None:
            for request in requests:
                self._loop.call_soon_threadsafe(request.cancel)

        return Answer(begin, stop)

    def experts(self) -> Snapshot:
        """The experts now, with what was used and loaded since the last answer began."""
        from moegguf.serving.events import Snapshot

        async def ask() -> Snapshot:
            before, self._before = self._before, None
            if isinstance(before, PendingRequest):
                before = build(Snapshot, await before.value())
            now, self._before = build(Snapshot, await self._own.request("experts", watch_s=math.inf).value()), before
            return now.since(before)

        return self._run(ask())

    def check_parameter(self, name: str) -> None:
        """Every parameter has its effect here."""

    @property
    def stats(self) -> Stats:
        """Counts since the load."""
        return self._own.stats

    @property
    def placement(self) -> Placement | None:
        """The placement of the experts that was chosen, if there was a choice."""
        from moegguf.engine.cost import Placement

        placement = self._plan.get("placement")
        return None if placement is None else build(Placement, placement["chosen"])

    def modelfile(self, entry: NamedModel) -> str:
        """The Modelfile that makes a model."""
        return self.names.modelfile(_here(entry))

    def print_info(self, entry: NamedModel) -> None:
        """The table of `moegguf show`."""
        from moegguf.terminal.facts import entry_facts, layout_facts, local_model
        from moegguf.terminal.tables import print_model

        here = _here(entry)
        print_model(layout_facts(local_model(here)) | entry_facts(here))

    def close(self) -> None:
        """Ends the worker, if there is one."""
        worker, self._worker, self._loaded = self._worker, None, None
        if worker is not None:
            self._run(worker.close())


def _here(entry: NamedModel) -> ModelEntry:
    assert isinstance(entry, ModelEntry)  # `find` returns no other
    return entry
