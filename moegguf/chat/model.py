"""The one client of a model that answers, for `run` and the chat. What it loads, asks and tells is the same wherever
the model is: in a worker that belongs to this program and ends with it, or in a running server."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import closing
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moegguf.chat.client import KNOWN_S, Client, Json, ServerError
from moegguf.errors import ModelNotFoundError, MoeggufError, OptionError
from moegguf.generate.request import Delta, Message, OnProgress, PromptProgress, Timing
from moegguf.gguf.reader import FileVersion
from moegguf.models.entry import Details, ModelEntry, NamedModel
from moegguf.options import LOAD_PARAMETERS
from moegguf.quantities import parse_duration
from moegguf.serving import worker_process
from moegguf.serving.events import LoadOverrides, Snapshot
from moegguf.serving.wire import build
from moegguf.serving.worker_process import PendingRequest, WorkerProcess
from moegguf.settings import read_settings
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.cost import Placement
    from moegguf.engine.stats import Stats
    from moegguf.models.recipe import Recipe
    from moegguf.terminal.progress import Spinner

POLL_S = 0.1  # a signal that another thread receives does not interrupt queue.get()
BUSY = 503  # a server's status

Result = TypeVar("Result")


class Answer:
    """One answer, and what became of it. `read` gets its parts on a thread of its own and gives them to `put`; `deltas`
    yields them on the main thread, which Ctrl-C can then interrupt, and collects them in `text` and `thinking`.

    `stop` has the other process end it; None: `read` sees that by itself (`stopped`), and nobody waits for it. `timing`
    and `decisions` (`Llama.decisions`) are complete when it has ended. `load_s`: of a load before it.
    """

    def __init__(self, read: Callable[[Answer], object], stop: Callable[[], object] | None = None) -> None:
        self.timing = Timing(finish="cancelled")
        self.decisions: Mapping[str, Any] = {}
        self.load_s = 0.0
        self.text = self.thinking = ""
        self.error: MoeggufError | None = None  # that ended it early
        self.stopped = self.is_interrupted = False
        self._read = read
        self._stop = stop
        self._parts: queue.SimpleQueue[Delta | PromptProgress | BaseException | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def put(self, part: Delta | PromptProgress) -> None:
        """The next part."""
        self._parts.put(part)

    def _end(self, error: BaseException | None = None) -> None:
        self._ended.set()
        self._parts.put(error)

    def cancel(self, timeout_s: float = 0.0) -> bool:
        """Ends the answer, from any thread; False when it has not ended after `timeout_s`."""
        self.stopped = True
        (self._stop or self._end)()
        return self._ended.wait(timeout_s)

    def deltas(self, on_progress: OnProgress) -> Generator[Delta, None, None]:
        """The parts of the answer as they arrive; iterate once. Ending the loop early cancels the answer."""

        def read() -> None:
            try:
                self._read(self)
            except BaseException as error:  # raised again below
                self._end(error)
            else:
                self._end()

        try:
            threading.Thread(target=read, name="moegguf-answer", daemon=True).start()
            while True:
                try:
                    part = self._parts.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if part is None:
                    return
                if isinstance(part, BaseException):
                    raise part
                if isinstance(part, PromptProgress):
                    on_progress(part)
                else:
                    self.text += part.text
                    self.thinking += part.thinking
                    yield part
        finally:
            if not self._ended.is_set():
                self.cancel()


class OwnWorker:
    """A model of this machine's catalog, in a worker of its own; `load` comes first. log: shows llama.cpp's messages. A
    worker starts at once: it takes as long as this program needs to find and describe the model. The event loop that
    `WorkerProcess` needs runs on a thread of its own."""

    url = None  # of a server
    n_ctx, reads_images = 0, False
    placement: Placement | None = None  # of the experts, if there was a choice

    def __init__(self, *, log: bool = False) -> None:
        self._settings = read_settings()
        self._log = log
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="moegguf-worker", daemon=True).start()
        self._spare: WorkerProcess | None = self._start()
        self._worker: WorkerProcess | None = None  # that has loaded a model
        self._files: list[FileVersion | None] = []  # of that model
        from moegguf.models.catalog import Catalog

        self.names = Catalog()
        self._before: PendingRequest | Snapshot | None = None  # the experts when the last answer began

    def _start(self) -> WorkerProcess:
        start = WorkerProcess.start(
            command=worker_process.COMMAND,
            on_warning=lambda text: print_message(f"warning: {text}"),
            echo_stderr=self._log or self._settings.debug,
            cancel_grace_s=math.inf,  # a person waits, who can end this program
        )
        return self._run(start)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def details(self, entry: NamedModel) -> Details:
        """What the headers of a model's files say. Raises ModelFormatError, ExpertIOError."""
        from moegguf.models.details import details

        return details(_here(entry))

    def options(self, conversation: Conversation) -> dict[str, Any]:
        """How the next answer needs the model to be loaded: keywords of `Llama`."""
        return conversation.load_options()

    def load(self, entry: NamedModel, options: Mapping[str, Any], spinner: Spinner) -> None:
        """Loads a model; the present one ends first, since memory may not hold two."""
        here, start_s = _here(entry), time.perf_counter()
        versions = [FileVersion.now(path) for path in here.all_files]
        if self._worker:
            self.close()
        spinner.show("starting a worker")
        worker, self._spare = self._spare or self._start(), None
        try:
            from moegguf.engine.cost import Placement
            from moegguf.gguf.experts import read_layout
            from moegguf.serving import memory_budget
            from moegguf.terminal.loading import warn_of_long_context
            from moegguf.terminal.progress import loading_text

            layout = read_layout(here.path)  # while the worker starts
            warn_of_long_context(layout, options.get("n_ctx"))

            def on_progress(share: float) -> None:
                spinner.show(loading_text(layout.name, share, layout.dense_bytes, time.perf_counter() - start_s))

            settings = replace(self._settings, loading=options, debug=self._log)
            memory = memory_budget.MemoryLimits(settings).ram(0)
            size = memory_budget.measure(here, LoadOverrides(), settings, memory)
            config = replace(size.load_config(size.plan_within(size.wanted)), silent=not self._log)
            ready = self._run(worker.load(config, math.inf, on_progress))
        except BaseException:  # also an interrupt
            self._run(worker.close(0))
            raise
        self._worker, self._before, self._files = worker, None, versions
        self.n_ctx, self.reads_images = ready.n_ctx, ready.reads_images
        placement = ready.plan.get("placement")
        self.placement = None if placement is None else build(Placement, placement["chosen"])

    @property
    def ended(self) -> bool:
        """True when no process has the model as its files are now."""
        changed = any(file is not None and file.is_changed() for file in self._files)
        return changed or self._worker is None or self._worker.exited.done()

    @property
    def stats(self) -> Stats | None:
        """Counts since the load; None of a model that is not loaded."""
        return self._worker.stats if self._worker else None

    def answer(self, conversation: Conversation) -> Answer:
        """The answer to the last message."""
        worker = self._worker
        assert worker is not None

        async def send() -> PendingRequest:
            self._before = worker.request("experts", watch_s=0)
            return worker.request("generate", generation=conversation.request(), stream=True)

        async def read(answer: Answer) -> None:
            try:
                async for event in request.events():
                    if isinstance(event, Delta | PromptProgress):
                        answer.put(event)
                    else:
                        answer.timing = build(Timing, event)
            finally:
                answer.decisions = worker.decisions

        request = self._run(send())
        return Answer(lambda answer: self._run(read(answer)), lambda: self._loop.call_soon_threadsafe(request.cancel))

    def experts(self) -> Snapshot | None:
        """The experts now, with what was used and loaded since the last answer began; None: the model is not loaded."""
        if (worker := self._worker) is None:
            return None

        async def ask() -> Snapshot:
            before, self._before = self._before, None
            if isinstance(before, PendingRequest):
                before = build(Snapshot, await before.value())
            now, self._before = build(Snapshot, await worker.request("experts", watch_s=math.inf).value()), before
            return now.since(before)

        return self._run(ask())

    def check_parameter(self, name: str) -> None:
        """Every parameter has its effect here."""

    def modelfile(self, entry: NamedModel) -> str:
        """The Modelfile that makes a model."""
        return self.names.modelfile(_here(entry))

    def print_info(self, entry: NamedModel) -> None:
        """Prints the table of `moegguf show`."""
        from moegguf.terminal.facts import facts_of
        from moegguf.terminal.tables import print_model

        print_model(facts_of(_here(entry)))

    def close(self) -> None:
        """Ends the worker, if there is one."""
        workers, self._spare, self._worker = (self._spare, self._worker), None, None
        for worker in filter(None, workers):
            self._run(worker.close())


def _here(entry: NamedModel) -> ModelEntry:
    assert isinstance(entry, ModelEntry)  # `find` returns no other
    return entry


class RunningServer:
    """A model in a server, as `OwnWorker` has one here. The server loads it for the first answer, `load` only does so
    earlier, and keeps it for `keep_alive` after an answer. `entry`: its name. `names`: this, which finds, lists and
    creates models there."""

    ended = False
    stats = placement = None  # the server's counts are of every client's answers

    def __init__(self, client: Client, name: str, keep_alive: str | None) -> None:
        self._client = client
        self.url = client.host.url
        self.names = self
        shown = self._show(name)
        self.entry, self.reads_images = _named(name, shown), "vision" in shown["capabilities"]
        self._keep_alive = {} if keep_alive is None else {"keep_alive": keep_alive}

    def _show(self, name: str) -> Json:
        """What the server tells of a model. Raises ModelNotFoundError."""
        try:
            return dict(self._client.post("/api/show", {"model": name}, KNOWN_S))
        except ServerError as error:
            if error.status == 404:
                raise ModelNotFoundError(str(error)) from None
            raise

    def find(self, name: str) -> NamedModel:
        """A model, with what the server's name for it has. Raises ModelNotFoundError."""
        return _named(name, self._show(name))

    def entries(self, prefix: str) -> list[ModelEntry]:
        """The models whose names begin so."""
        return [
            ModelEntry(
                m["name"], "own", (), m["size"], m["digest"], datetime.fromisoformat(m["modified_at"]),
                missing=tuple(map(Path, m.get("missing", ()))),
            )
            for m in self._client.get("/api/tags")["models"] if m["name"].lower().startswith(prefix.lower())
        ]  # fmt: skip

    def create(self, name: str, recipe: Recipe) -> None:
        """Stores a new model in the server."""
        self._client.post("/api/create", {"model": name, "from": recipe.from_, **recipe.overrides})

    def modelfile(self, entry: NamedModel) -> str:
        """The Modelfile that makes a model there."""
        return str(self._show(entry.name)["modelfile"])

    def details(self, entry: NamedModel) -> Details:
        """What the headers of a model's files say."""
        shown = self._show(entry.name)
        info, known = shown["model_info"], shown["details"]
        names = ("context_length", "embedding_length", "expert_count", "expert_used_count")
        n_ctx, n_embd, n_expert, n_used = (info.get(f"{info.get('general.architecture')}.{name}", 0) for name in names)
        size = known["parameter_size"], info["general.parameter_count"], known["quantization_level"]
        what = tuple(shown["capabilities"]), shown["template"], info
        return Details(known["family"], *size, n_ctx, n_embd, n_expert, n_used, *what)

    def print_info(self, entry: NamedModel) -> None:
        """Prints what the server tells of a model."""
        known = self.details(entry)
        rows = {
            "architecture": known.family,
            "parameters": known.parameter_size,
            "quantization": known.quantization,
            "context length": f"{known.n_ctx_train:,} tokens",
            "capabilities": ", ".join(known.capabilities),
        }
        print_message("\n".join(f"  {name:<16}{value}" for name, value in rows.items()))

    def options(self, conversation: Conversation) -> Json:
        """How the next answer needs the model to be loaded: parameters of a request."""
        return {name: value for name, value in conversation.user_parameters().items() if name in LOAD_PARAMETERS}

    def load(self, entry: NamedModel, options: Mapping[str, Any], spinner: Spinner) -> None:
        """Has the server load a model."""
        shown = self._show(entry.name)
        spinner.show(f"loading {entry.name} in the server at {self.url}")
        body = {"model": entry.name, "prompt": "", "stream": False, "options": options}
        kept = {name: text for name, text in self._keep_alive.items() if parse_duration(text)}  # 0 would unload it
        self._client.post("/api/generate", body | kept)
        self.entry, self.reads_images = entry, "vision" in shown["capabilities"]

    @property
    def n_ctx(self) -> int:
        """Tokens of the context; 0 of a model that is not loaded."""
        loaded = {model["name"]: model["context_length"] for model in self._client.get("/api/ps")["models"]}
        return int(loaded.get(self.entry.name, 0))

    def check_parameter(self, name: str) -> None:
        """Raises OptionError for a parameter of loading that has no effect in a request to a server."""
        known = {field.name for field in fields(LoadOverrides)} - {"n_batch"}
        if name in LOAD_PARAMETERS and LOAD_PARAMETERS[name] not in known:
            raise OptionError(f"{name!r} has no effect on a model in a server; load it here with `moegguf run --local`")

    def answer(self, conversation: Conversation) -> Answer:
        """The server's answer to the last message."""
        body = {
            "model": conversation.entry.name,
            "messages": messages_to_server(conversation),
            "options": conversation.user_parameters(),
            "format": conversation.format,
            "think": conversation.think,
            "shift": conversation.context_shift,
            "stream": True,
            "details": True,
        } | self._keep_alive

        def read(answer: Answer) -> None:
            with closing(self._client.stream("/api/chat", body)) as lines:
                for line in lines:
                    if answer.stopped:  # the server stops, too, when the connection ends
                        return
                    if line.get("done"):
                        answer.timing, answer.decisions = build(Timing, line["timing"]), line["decisions"]
                        answer.load_s += line["load_s"]
                        return
                    if "prompt_progress" in line:
                        answer.put(build(PromptProgress, line["prompt_progress"]))
                    else:
                        answer.put(Delta(line["message"].get("content", ""), line["message"].get("thinking", "")))
            raise self._client.lost_connection()

        return Answer(read)

    def experts(self) -> Snapshot | None:
        """The experts, with what was used and loaded within the last snapshot; None: the model is not loaded."""
        from moegguf.chat.experts import read_snapshot

        loaded = (model for model in self._client.get("/live?once=1")["models"] if self.entry.name in model["names"])
        found = next((model["snapshot"] for model in loaded if model["snapshot"]), None)
        return None if found is None else replace(read_snapshot(found), model=self.entry.name)

    def close(self) -> None:
        """The server keeps the model for other requests."""


def _named(name: str, shown: Json) -> NamedModel:
    from moegguf.models.names import parse_name
    from moegguf.models.recipe import parse

    return NamedModel(parse_name(name).canonical, **parse(shown["modelfile"]).overrides)


def messages_to_server(conversation: Conversation) -> list[Json]:
    """The messages of /api/chat, without those of the model's name, which the server adds."""
    from moegguf.generate.images import images_of, text_of

    given, own = conversation.messages, [dict(message) for message in conversation.entry.messages]
    system: list[Message] = []
    if conversation.system is not None:  # "" too: the server would add the one of the model's name
        system.append({"role": "system", "content": conversation.system})
    asked = (*system, *given[len(own) if given[: len(own)] == own else 0 :])
    return [
        {**each, "content": text_of(each["content"]), **({"images": images} if (images := images_of(each)) else {})}
        for each in asked
    ]


class ChatModel:
    """A model behind a connection, which answers one conversation at a time. Methods raise MoeggufError."""

    def __init__(self, connection: OwnWorker | RunningServer) -> None:
        self.connection = connection
        self._loaded: Mapping[str, Any] | None = None  # the options that it was loaded with by `load`
        self._load_s = 0.0  # of that, since the last answer
        self._answer: Answer | None = None  # the last one since then

    def load(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the conversation's model; where that fails, the parameters of loading that were set in the chat go."""
        start_s, options = time.perf_counter(), self.connection.options(conversation)
        try:
            self.connection.load(conversation.entry, options, spinner)
        except BaseException as error:  # also an interrupt: the chat goes on with the model before
            if getattr(error, "status", None) != BUSY:  # nothing is wrong with them then
                kept = conversation.parameters.items()
                conversation.parameters = {name: value for name, value in kept if name not in LOAD_PARAMETERS}
            raise
        self._loaded, self._load_s, self._answer = options, time.perf_counter() - start_s, None

    def prepare(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the model again when a parameter asks for another context, cache or number of threads, when its process
        has ended, and when its file was written to."""
        if self.connection.ended or self.connection.options(conversation) != self._loaded:
            self.load(conversation, spinner)

    def answer(self, conversation: Conversation) -> Answer:
        """The answer to the last message; its `load_s` and `decisions` are those of the model."""
        self._answer = answer = self.connection.answer(conversation)
        answer.load_s, self._load_s = self._load_s, 0.0
        return answer

    def facts(self) -> list[str]:
        """Context size, whether it reads images, the number of expert slots, and which server has it."""
        n_ctx, stats, url = self.connection.n_ctx, self.connection.stats, self.connection.url
        facts = [f"context of {n_ctx:,} tokens"] if n_ctx else []
        if self.connection.reads_images:
            facts.append("reads images")
        if stats and stats.n_experts:
            first, n_ram = stats.tiers[0].n_slots, sum(tier.n_slots for tier in stats.tiers[1:])
            where = " in VRAM" * stats.in_vram + f", {n_ram:,} in RAM" * (n_ram > 0)
            facts.append(f"slots for {first:,} of {stats.n_experts:,} experts{where}")
        return [*facts, f"in the server at {url}"] if url else facts

    def statistics(self, *, with_load: bool) -> list[str]:
        """Lines about the last answer, and about a load before it; none where there is no answer since the load."""
        from moegguf.terminal.statistics import LABEL_WIDTH, statistics

        if (answer := self._answer) is None:
            return []
        load_s, url = answer.load_s if with_load else 0.0, self.connection.url
        lines = statistics(answer.timing, load_s, answer.decisions, self.connection.placement)
        return [*lines, f"{'answered by:':<{LABEL_WIDTH}}{url}"] if url else lines

    def print_experts(self) -> None:
        """A map of the experts: which are in memory, and which were used and loaded of late."""
        from moegguf.chat.experts import print_map

        found, url = self.connection.experts(), self.connection.url
        if found is None or not found.layers:
            print_message("The model is not loaded." if found is None else "This model has no experts.")
            return
        print_map(found)
        if url:
            print_message(f"It is in the server at {url}; `moegguf top` shows its experts live.")
