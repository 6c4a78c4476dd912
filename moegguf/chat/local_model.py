"""A model of this machine, in a worker that belongs to this program and ends with it, however that ends.

The event loop that `WorkerProcess` needs runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from moegguf.chat.answers import Answer
from moegguf.errors import MoeggufError
from moegguf.generate.request import Delta, PromptProgress, Timing
from moegguf.models.entry import ModelEntry
from moegguf.serving import worker_process
from moegguf.serving.wire import LoadConfig, Ready, build
from moegguf.serving.worker_process import PendingRequest, WorkerProcess
from moegguf.settings import read_settings
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.models.catalog import Catalog
    from moegguf.serving.events import Snapshot
    from moegguf.terminal.progress import Spinner

Result = TypeVar("Result")


class LocalModel:
    """A model of this machine's catalog; `load` comes first. log: shows llama.cpp's messages. Methods raise
    MoeggufError.

    A worker starts at once: it takes as long as this program needs to find and describe the model.
    """

    def __init__(self, *, log: bool = False) -> None:
        self._settings = read_settings()
        self._log = log
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="moegguf-worker", daemon=True).start()
        self._worker: WorkerProcess | None = self._start()
        self._ready = Ready(n_ctx=0)
        self._loaded: tuple[ModelEntry, Mapping[str, Any]] | None = None
        self._load_s = 0.0  # since the last answer
        self._counts_uses = False
        self._answer: Answer

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

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images."""
        return self._ready.reads_images

    @property
    def names(self) -> Catalog:
        """The models of this machine."""
        from moegguf.models.catalog import Catalog

        return Catalog()

    def load(self, conversation: Conversation, spinner: Spinner) -> None:
        """Closes the present model first, since memory may not hold two; loads it again when the new one fails."""
        entry, before = conversation.entry, self._loaded
        assert isinstance(entry, ModelEntry)  # `find` returns no other
        if before is not None:
            self.close()
        try:
            self._open(entry, conversation.load_options(), spinner)
        except BaseException:  # also an interrupt: the chat goes on with the model before
            conversation.reset_load_parameters()
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
            chosen: dict[str, Any] = {**defaults, **options, "verbose": self._log, "silent": not self._log}
            config = LoadConfig(entry.name, str(entry.path), **chosen)
            self._ready = self._run(worker.load(config, math.inf, on_progress))
        except BaseException:  # also an interrupt
            self._run(worker.close(0))
            raise
        self._worker, self._loaded = worker, (entry, options)
        self._load_s = time.perf_counter() - start_s

    def prepare(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the model again when a parameter asks for another context, cache or number of threads, and when its
        process has ended."""
        if self._loaded is None or self._own.exited.done() or conversation.load_options() != self._loaded[1]:
            self.load(conversation, spinner)

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
                requests.append(worker.request("generate", generation=generation, stream=True, mark=True))
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

        load_s, self._load_s = self._load_s, 0.0
        self._answer = Answer(begin, stop, load_s)
        return self._answer

    def _experts(self) -> Snapshot:
        """The experts now, with what was used and loaded since the last answer began."""
        from moegguf.serving.events import Snapshot

        async def ask() -> Any:
            return [event async for event in self._own.request("experts").events()][-1]

        return build(Snapshot, self._run(ask()))

    def check_parameter(self, name: str) -> None:
        """Every parameter has its effect here."""

    def facts(self) -> list[str]:
        """Context size and number of expert slots."""
        stats = self._own.stats
        facts = [f"context of {self._ready.n_ctx:,} tokens"]
        if self.reads_images:
            facts.append("reads images")
        if stats.n_experts:
            first, n_ram = stats.tiers[0].n_slots, sum(tier.n_slots for tier in stats.tiers[1:])
            where = " in VRAM" * stats.in_vram + f", {n_ram:,} in RAM" * (n_ram > 0)
            facts.append(f"slots for {first:,} of {stats.n_experts:,} experts{where}")
        return facts

    def statistics(self, timing: Timing, *, with_load: bool) -> list[str]:
        """Lines about the last answer, and about a load before it."""
        from moegguf.engine.cost import Placement
        from moegguf.terminal.statistics import statistics

        placement = self._ready.plan.get("placement")
        chosen = None if placement is None else build(Placement, placement["chosen"])
        return statistics(timing, self._answer.load_s if with_load else 0.0, self._answer.decisions, chosen)

    def totals(self) -> list[str]:
        """Lines about all answers since the load."""
        from moegguf.terminal.statistics import total_lines

        return total_lines(self._own.stats)

    @property
    def _entry(self) -> ModelEntry:
        assert self._loaded is not None
        return self._loaded[0]

    def thinks(self) -> bool:
        """Whether the model supports thinking; one whose header cannot be read may."""
        from moegguf.models.details import details

        with suppress(MoeggufError):
            return "thinking" in details(self._entry).capabilities
        return True

    def print_info(self) -> None:
        """The table of `moegguf show`."""
        from moegguf.terminal.facts import entry_facts, layout_facts, local_model
        from moegguf.terminal.tables import print_model

        print_model(layout_facts(local_model(self._entry)) | entry_facts(self._entry))

    def modelfile(self) -> str:
        """The Modelfile that makes the model."""
        return self.names.modelfile(self._entry)

    def template(self) -> str:
        """The name's own template, or that of the file."""
        from moegguf.gguf.experts import read_layout

        return self._entry.template or read_layout(self._entry.path).chat_template or ""

    def print_experts(self) -> None:
        """A map of the experts: which are in memory, and which the last answer used."""
        from moegguf.terminal.heatmap import print_map

        found = self._experts()
        if not found.layers:
            print_message("This model has no experts.")
            return
        parts = (found.state, found.uses, found.loads)
        print_map(self._entry.name, parts, found.layers, found.n_expert, found.stats)
        if not self._counts_uses and not any(found.uses):
            print_message("Uses are counted from the next answer on.")
        self._counts_uses = True

    def close(self) -> None:
        """Ends the worker, if there is one."""
        worker, self._worker, self._loaded = self._worker, None, None
        if worker is not None:
            self._run(worker.close())
