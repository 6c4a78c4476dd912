"""Models in a running server, for `moegguf run`: the same answers and figures as those of a worker of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegguf.chat.answers import Answer
from moegguf.chat.client import Client, Json, ServerError
from moegguf.errors import ModelNotFoundError, MoeggufError, OptionError
from moegguf.generate.images import images_of, text_of
from moegguf.generate.request import Delta, Message, PromptProgress, Timing
from moegguf.models.entry import Details, ModelEntry, NamedModel
from moegguf.models.names import parse_name
from moegguf.models.recipe import parse
from moegguf.options import LOAD_PARAMETERS
from moegguf.quantities import parse_duration
from moegguf.serving.events import LoadOverrides
from moegguf.serving.wire import build
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.models.recipe import Recipe
    from moegguf.serving.events import Snapshot
    from moegguf.terminal.progress import Spinner

CONNECT_S = 0.5
KNOWN_S = 10.0  # to answer whether it knows a model


def running_server() -> Client | None:
    """A client of the server at MOEGGUF_HOST when that is moegguf's, else None."""
    client = Client()
    try:
        with socket.create_connection((client.host.host, client.host.port), CONNECT_S):
            pass
        version = client.get("/api/version", KNOWN_S)
        return client if isinstance(version, dict) and "moegguf" in version else None  # Ollama has the same port
    except ServerError as error:
        if error.status == 401:
            print_message(
                f"note: the server at {client.host.url} needs a key (MOEGGUF_API_KEY); loading the model here"
            )
        return None
    except (MoeggufError, OSError):
        return None


def server_with(model: str, keep_alive: str | None = None) -> RunningServer | None:
    """`model` in a running server that knows it, else None."""
    if (client := running_server()) is None:
        return None
    try:
        return RunningServer(client, model, keep_alive)
    except (MoeggufError, OSError):
        return None


class ServedNames:
    """The models that a server knows."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def show(self, name: str) -> Json:
        """What the server tells of a model. Raises ModelNotFoundError."""
        try:
            return dict(self._client.post("/api/show", {"model": name}, KNOWN_S))
        except ServerError as error:
            if error.status == 404:
                raise ModelNotFoundError(str(error)) from None
            raise

    def find(self, name: str, shown: Json | None = None) -> NamedModel:
        """A model, with what the server's name for it has. shown: what `show` gave."""
        text = (shown or self.show(name))["modelfile"]
        return NamedModel(parse_name(name).canonical, **parse(text).overrides)

    def entries(self, prefix: str) -> list[ModelEntry]:
        """Those whose names begin so."""
        models = (m for m in self._client.get("/api/tags")["models"] if m["name"].lower().startswith(prefix.lower()))
        return [
            ModelEntry(
                m["name"], "own", (), m["size"], m["digest"], datetime.fromisoformat(m["modified_at"]),
                missing=tuple(map(Path, m.get("missing", ()))),
            )
            for m in models
        ]  # fmt: skip

    def create(self, name: str, recipe: Recipe) -> None:
        """Stores a new model in the server."""
        self._client.post("/api/create", {"model": name, "from": recipe.from_, **recipe.overrides})


class RunningServer:
    """A model in a server, as `OwnWorker` has one here. The server keeps it for `keep_alive` after an answer. `entry`:
    its name.

    The server loads it for the first answer; `load` only does so earlier.
    """

    ended = False
    stats = placement = None  # the server's counts are of every client's answers

    def __init__(self, client: Client, name: str, keep_alive: str | None) -> None:
        self._client = client
        self.url = client.host.url
        self.names = ServedNames(client)
        shown = self.names.show(name)
        self.entry, self.reads_images = self.names.find(name, shown), "vision" in shown["capabilities"]
        self._keep_alive = keep_alive

    def details(self, entry: NamedModel) -> Details:
        """What the headers of a model's files say."""
        return _details(self.names.show(entry.name))

    def options(self, conversation: Conversation) -> Json:
        """How the next answer needs the model to be loaded."""
        return {name: value for name, value in conversation.user_parameters().items() if name in LOAD_PARAMETERS}

    def load(self, entry: NamedModel, options: Mapping[str, Any], spinner: Spinner) -> None:
        """Has the server load a model."""
        shown = self.names.show(entry.name)
        spinner.show(f"loading {entry.name} in the server at {self.url}")
        body = {"model": entry.name, "prompt": "", "stream": False, "options": options}
        if self._keep_alive is not None and parse_duration(self._keep_alive):  # 0 would unload it
            body["keep_alive"] = self._keep_alive
        self._client.post("/api/generate", body)
        self.entry, self.reads_images = entry, "vision" in shown["capabilities"]

    def answer(self, conversation: Conversation) -> Answer:
        """The server's answer to the last message."""
        body = {
            "model": conversation.entry.name,
            "messages": _messages(conversation),
            "options": conversation.user_parameters(),
            "format": conversation.format,
            "think": conversation.think,
            "shift": conversation.context_shift,
            "stream": True,
            "details": True,
            **({} if self._keep_alive is None else {"keep_alive": self._keep_alive}),
        }

        def read(answer: Answer) -> None:
            try:
                with closing(self._client.stream("/api/chat", body)) as lines:
                    for line in lines:
                        if answer.stopped or _take(answer, line):
                            return
                answer.end(self._client.lost_connection())
            except BaseException as error:  # raised again by `deltas`
                answer.end(error)

        def begin(answer: Answer) -> None:
            # On a thread of its own: the first line may wait for a load or for other answers, which nothing interrupts.
            threading.Thread(target=read, args=(answer,), name="moegguf-served", daemon=True).start()

        # The server stops with its next line, which ends the connection.
        return Answer(begin, Answer.end)

    def check_parameter(self, name: str) -> None:
        """Raises OptionError for a parameter of loading that has no effect in a request to a server."""
        known = {field.name for field in fields(LoadOverrides)} - {"n_batch"}
        if name in LOAD_PARAMETERS and LOAD_PARAMETERS[name] not in known:
            raise OptionError(f"{name!r} has no effect on a model in a server; load it here with `moegguf run --local`")

    @property
    def n_ctx(self) -> int:
        """Tokens of the context; 0 of a model that is not loaded."""
        loaded = {model["name"]: model["context_length"] for model in self._client.get("/api/ps")["models"]}
        return int(loaded.get(self.entry.name, 0))

    def modelfile(self, entry: NamedModel) -> str:
        """The Modelfile that makes a model there."""
        return str(self.names.show(entry.name)["modelfile"])

    def print_info(self, entry: NamedModel) -> None:
        """What the server tells of a model."""
        known = self.details(entry)
        rows = {
            "architecture": known.family,
            "parameters": known.parameter_size,
            "quantization": known.quantization,
            "context length": f"{known.n_ctx_train:,} tokens",
            "capabilities": ", ".join(known.capabilities),
        }
        print_message("\n".join(f"  {name:<16}{value}" for name, value in rows.items()))

    def experts(self) -> Snapshot | None:
        """The experts, with what was used and loaded within the last snapshot; None: the model is not loaded."""
        from moegguf.engine.stats import Stats
        from moegguf.serving.events import Snapshot

        loaded = (model for model in self._client.get("/live?once=1")["models"] if self.entry.name in model["names"])
        found = next((model["snapshot"] for model in loaded if model["snapshot"]), None)
        if found is None:
            return None
        stats = {field.name: found["stats"][field.name] for field in fields(Stats)}  # without what follows from them
        return build(Snapshot, found | {"model": self.entry.name, "stats": stats})

    def close(self) -> None:
        """The server keeps the model for other requests."""


def _details(shown: Json) -> Details:
    """What /api/show tells of a model's files."""
    info, known = shown["model_info"], shown["details"]
    names = ("context_length", "embedding_length", "expert_count", "expert_used_count")
    n_ctx, n_embd, n_expert, n_used = (info.get(f"{info.get('general.architecture')}.{name}", 0) for name in names)
    of_file = known["family"], known["parameter_size"], info["general.parameter_count"], known["quantization_level"]
    capabilities, template = tuple(shown["capabilities"]), shown["template"]
    return Details(*of_file, n_ctx, n_embd, n_expert, n_used, capabilities, template, info)


def _messages(conversation: Conversation) -> list[Json]:
    """The messages of /api/chat, without those of the model's name, which the server adds."""
    given, own = conversation.unmarked_messages(), [dict(message) for message in conversation.entry.messages]
    system: list[Message] = []
    if conversation.system is not None:  # "" too: the server would add the one of the model's name
        system.append({"role": "system", "content": conversation.system})
    asked = (*system, *given[len(own) if given[: len(own)] == own else 0 :])
    return [
        {**each, "content": text_of(each["content"]), **({"images": images} if (images := images_of(each)) else {})}
        for each in asked
    ]


def _take(answer: Answer, line: Mapping[str, Any]) -> bool:
    """Takes a line of /api/chat; True for the last one."""
    if line.get("done"):
        answer.timing = build(Timing, line["timing"])
        answer.load_s += line.get("load_duration", 0) / 1e9
        answer.decisions = line["decisions"]
        answer.end()
        return True
    if "prompt_progress" in line:
        answer.put(build(PromptProgress, line["prompt_progress"]))
    else:
        answer.put(Delta(line["message"].get("content", ""), line["message"].get("thinking", "")))
    return False
