"""Models in a running server, for `moegguf run`: the same answers and figures as those of a model in this process."""

from __future__ import annotations

import base64
import socket
import threading
import time
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
from moegguf.models.entry import ModelEntry, NamedModel
from moegguf.models.modelfile import parse
from moegguf.models.names import parse_name
from moegguf.options import LOAD_PARAMETERS
from moegguf.quantities import parse_duration
from moegguf.serving.events import LoadOverrides
from moegguf.serving.wire import build
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.models.recipe import Recipe
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


def server_with(model: str, keep_alive: str | None = None) -> ServedModel | None:
    """`model` in a running server that knows it, else None."""
    if (client := running_server()) is None:
        return None
    try:
        return ServedModel(client, model, keep_alive)
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
        models = self._client.get("/api/tags")["models"]
        return [_listed(model) for model in models if model["name"].lower().startswith(prefix.lower())]

    def create(self, name: str, recipe: Recipe) -> None:
        """Stores a new model in the server."""
        self._client.post("/api/create", {"model": name, "from": recipe.from_, **recipe.overrides})


class ServedModel:
    """A model in a server, with the methods of `LocalModel`. The server keeps it for `keep_alive` after an answer.
    `entry`: its name.

    The server loads it for the first answer; `load` only does so earlier.
    """

    def __init__(self, client: Client, name: str, keep_alive: str | None) -> None:
        self._client = client
        self.names = ServedNames(client)
        self._shown = self.names.show(name)
        self.entry = self.names.find(name, self._shown)
        self._keep_alive = keep_alive
        self._load_parameters: Json = {}
        self._new_load_s = 0.0  # of a load since the last answer
        self._answer: Answer

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images."""
        return "vision" in self._shown["capabilities"]

    def with_context(self, parameters: Mapping[str, Any]) -> Json:
        """`parameters` with the model's own context length for `--ctx 0`."""
        return {**parameters, "num_ctx": self._n_ctx_train} if parameters.get("num_ctx") == 0 else dict(parameters)

    @property
    def _n_ctx_train(self) -> int:
        info = self._shown["model_info"]
        return int(info.get(f"{info.get('general.architecture')}.context_length", 0))

    def load(self, conversation: Conversation, spinner: Spinner) -> None:
        """Has the server load the conversation's model."""
        name, start_s = conversation.entry.name, time.perf_counter()
        shown, parameters = self.names.show(name), _load_parameters(conversation)
        spinner.show(f"loading {name} in the server at {self._client.host.url}")
        body = {"model": name, "prompt": "", "stream": False, "options": parameters}
        if self._keep_alive is not None and parse_duration(self._keep_alive):  # 0 would unload it
            body["keep_alive"] = self._keep_alive
        try:
            self._client.post("/api/generate", body)
        except ServerError as error:
            if error.status != 503:  # busy: nothing is wrong with them
                conversation.reset_load_parameters()
            raise
        self.entry, self._shown, self._load_parameters = conversation.entry, shown, parameters
        self._new_load_s = time.perf_counter() - start_s

    def prepare(self, conversation: Conversation, spinner: Spinner) -> None:
        """Has the server load the model again when a parameter asks for another context, cache or threads."""
        if _load_parameters(conversation) != self._load_parameters:
            self.load(conversation, spinner)

    def answer(self, conversation: Conversation) -> Answer:
        """The server's answer to the last message; its `load_s` and `decisions` are those of the model there."""
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
        self._answer = Answer(begin, Answer.end, self._new_load_s)
        self._new_load_s = 0.0
        return self._answer

    def check_parameter(self, name: str) -> None:
        """Raises OptionError for a parameter of loading that has no effect in a request to a server."""
        known = {field.name for field in fields(LoadOverrides)} - {"n_batch"}
        if name in LOAD_PARAMETERS and LOAD_PARAMETERS[name] not in known:
            raise OptionError(f"{name!r} has no effect on a model in a server; load it here with `moegguf run --local`")

    def facts(self) -> list[str]:
        """Context size, and which server has the model."""
        loaded = {model["name"]: model for model in self._client.get("/api/ps")["models"]}
        found = loaded.get(self.entry.name)
        return [
            *([f"context of {found['context_length']:,} tokens"] if found else []),
            *(["reads images"] if self.reads_images else []),
            f"in the server at {self._client.host.url}",
        ]

    def statistics(self, timing: Timing, *, with_load: bool) -> list[str]:
        """Lines about the last answer, and about a load before it."""
        from moegguf.terminal.statistics import LABEL_WIDTH, statistics

        lines = statistics(timing, self._answer.load_s if with_load else 0.0, self._answer.decisions)
        return [*lines, f"{'answered by:':<{LABEL_WIDTH}}{self._client.host.url}"]

    def totals(self) -> list[str]:
        """None: the server's counts are of every client's answers."""
        return []

    def thinks(self) -> bool:
        """Whether the model supports thinking."""
        return "thinking" in self._shown["capabilities"]

    def print_info(self) -> None:
        """What the server tells of the model."""
        details = self._shown["details"]
        rows = {
            "architecture": details["family"],
            "parameters": details["parameter_size"],
            "quantization": details["quantization_level"],
            "context length": f"{self._n_ctx_train:,} tokens",
            "capabilities": ", ".join(self._shown["capabilities"]),
        }
        print_message("\n".join(f"  {name:<16}{value}" for name, value in rows.items()))

    def modelfile(self) -> str:
        """The Modelfile that makes the model there."""
        return str(self.names.show(self.entry.name)["modelfile"])

    def template(self) -> str:
        """The prompt template."""
        return str(self._shown["template"])

    def print_experts(self) -> None:
        """A map of its experts in the server, with what was used and loaded within the last snapshot."""
        from moegguf.engine.stats import Stats
        from moegguf.terminal.heatmap import print_map

        loaded = (model for model in self._client.get("/live?once=1")["models"] if self.entry.name in model["names"])
        found = next((model["snapshot"] for model in loaded if model["snapshot"]), None)
        if found is None or not found["layers"]:
            print_message("The server has no experts of this model in memory.")
            return
        parts = [base64.b64decode(found[name]) for name in ("state", "uses", "loads")]
        stats = build(Stats, {field.name: found["stats"][field.name] for field in fields(Stats)})
        print_map(self.entry.name, parts, found["layers"], found["n_expert"], stats)
        print_message(f"It is in the server at {self._client.host.url}; `moegguf top` shows its experts live.")

    def close(self) -> None:
        """The server keeps the model for other requests."""


def _load_parameters(conversation: Conversation) -> Json:
    return {name: value for name, value in conversation.user_parameters().items() if name in LOAD_PARAMETERS}


def _messages(conversation: Conversation) -> list[Json]:
    """The messages of /api/chat, without those of the model's name, which the server adds."""
    given, own = conversation.unmarked_messages(), [dict(message) for message in conversation.entry.messages]
    system: list[Message] = []
    if conversation.system is not None:  # "" too: the server would add the one of the model's name
        system.append({"role": "system", "content": conversation.system})
    return [_message(each) for each in (*system, *given[len(own) if given[: len(own)] == own else 0 :])]


def _message(message: Message) -> Json:
    images = images_of(message)
    return {**message, "content": text_of(message["content"]), **({"images": images} if images else {})}


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


def _listed(model: Json) -> ModelEntry:
    """An object of /api/tags as an entry of a list."""
    modified, missing = datetime.fromisoformat(model["modified_at"]), tuple(map(Path, model.get("missing", ())))
    return ModelEntry(model["name"], "own", (), model["size"], model["digest"], modified, missing=missing)
