"""A model in a running server: the server loads it and generates the answers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegguf.chat.client import KNOWN_S, Client, Json, ServerError
from moegguf.chat.conversation import of_loading
from moegguf.errors import ModelNotFoundError, OptionError
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    Event,
    Message,
    PromptProgress,
)
from moegguf.models.entry import Details, ModelEntry, NamedModel
from moegguf.options import LOCAL_PARAMETERS
from moegguf.quantities import parse_duration
from moegguf.serving.events import Snapshot, load_overrides
from moegguf.serving.wire import build
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import Spinner

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.models.recipe import Recipe


class ServedModel:
    """A model in a server. The server loads it for the first answer, or when `load` is
    called, and keeps it loaded for `keep_alive` after an answer (None: the server's
    setting). `entry`: the model's name and the settings of its Modelfile. `names`: the
    object that finds and creates models; here, this object itself."""

    must_load = False
    # Unknown: this program has not loaded the model, and the server's counters include
    # other clients' answers.
    loaded = placement = None

    def __init__(
        self, client: Client, name: str, keep_alive: str | None, spinner: Spinner
    ) -> None:
        self.spinner = spinner
        self._client = client
        self.url = client.host.url
        self.names = self
        shown = self._show(name)
        self.entry, self.reads_images = (
            _named(name, shown),
            "vision" in shown["capabilities"],
        )
        self._keep_alive = {} if keep_alive is None else {"keep_alive": keep_alive}

    def _show(self, name: str) -> Json:
        """Returns the server's description of a model. Raises ModelNotFoundError if the
        server does not have the model."""
        try:
            return dict(self._client.post("/api/show", {"model": name}, KNOWN_S))
        except ServerError as error:
            if error.status == 404:
                raise ModelNotFoundError(str(error)) from None
            raise

    def find(self, name: str) -> NamedModel:
        """Returns the model's name and the settings of its Modelfile. Raises
        ModelNotFoundError if the server does not have the model."""
        return _named(name, self._show(name))

    def entries(self, prefix: str) -> list[ModelEntry]:
        """Returns the server's models whose names begin with `prefix`, ignoring
        case."""
        return [
            ModelEntry(
                m["name"], "own", (), m["size"], m["digest"], datetime.fromisoformat(m["modified_at"]),
                missing=tuple(map(Path, m.get("missing", ()))),
            )
            for m in self._client.get("/api/tags")["models"] if m["name"].lower().startswith(prefix.lower())
        ]  # fmt: skip

    def create(self, name: str, recipe: Recipe) -> None:
        """Creates a new model in the server."""
        self._client.post(
            "/api/create", {"model": name, "from": recipe.from_, **recipe.overrides}
        )

    def modelfile(self, entry: NamedModel) -> str:
        """Returns a Modelfile from which the server can create the model again."""
        return str(self._show(entry.name)["modelfile"])

    def details(self, entry: NamedModel) -> Details:
        """Returns facts from the headers of a model's files, as reported by the
        server."""
        shown = self._show(entry.name)
        info, known = shown["model_info"], shown["details"]
        names = (
            "context_length",
            "embedding_length",
            "expert_count",
            "expert_used_count",
        )
        n_ctx, n_embd, n_expert, n_used = (
            info.get(f"{info.get('general.architecture')}.{name}", 0) for name in names
        )
        size = (
            known["parameter_size"],
            info["general.parameter_count"],
            known["quantization_level"],
        )
        what = tuple(shown["capabilities"]), shown["template"], info
        return Details(known["family"], *size, n_ctx, n_embd, n_expert, n_used, *what)

    def print_info(self, entry: NamedModel) -> None:
        """Prints the most important facts about a model."""
        known = self.details(entry)
        rows = {
            "architecture": known.family,
            "parameters": known.parameter_size,
            "quantization": known.quantization,
            "context length": f"{known.n_ctx_train:,} tokens",
            "capabilities": ", ".join(known.capabilities),
        }
        print_message("\n".join(f"  {name:<16}{value}" for name, value in rows.items()))

    def parameters(self, conversation: Conversation) -> Mapping[str, Any]:
        """Returns the parameters from the command line and the chat. The server adds
        the parameters of the model itself."""
        return conversation.user_parameters()

    def load(self, conversation: Conversation) -> None:
        """Loads the conversation's model in the server, and waits until it is
        loaded."""
        self.check_context(conversation)
        entry = conversation.entry
        shown = self._show(entry.name)
        self.spinner.show(f"loading {entry.name} in the server at {self.url}")
        options = of_loading(conversation.user_parameters())
        body = {"model": entry.name, "prompt": "", "stream": False, "options": options}
        # 0 unloads the model.
        kept = {
            name: text
            for name, text in self._keep_alive.items()
            if parse_duration(text)
        }
        self._client.post("/api/generate", body | kept)
        self.entry, self.reads_images = entry, "vision" in shown["capabilities"]

    def check_context(self, conversation: Conversation) -> None:
        """Prints a warning if the user has set a context that is longer than the
        context with which the model was trained."""
        from moegguf.terminal.loading import warn_of_long_context

        if n_ctx := load_overrides(conversation.user_parameters()).get("n_ctx"):
            warn_of_long_context(self.details(conversation.entry).n_ctx_train, n_ctx)

    @property
    def n_ctx(self) -> int:
        """The size of the context in tokens, or 0 if the model is not loaded."""
        return self._fact("context_length")

    @property
    def size_bytes(self) -> int:
        """The memory of the loaded model in bytes, or 0 if it is not loaded."""
        return self._fact("size")

    def _fact(self, name: str) -> int:
        models = self._client.get("/api/ps")["models"]
        found = (each[name] for each in models if each["name"] == self.entry.name)
        return int(next(found, 0))

    def check_parameter(self, name: str) -> None:
        """Raises OptionError if `name` is a parameter for loading that a request to a
        server cannot set."""
        if name in LOCAL_PARAMETERS:
            raise OptionError(
                f"{name!r} has no effect on a model in a server; load the model here with `moegguf run --local`."
            )

    def answer(self, conversation: Conversation) -> Generator[Event]:
        """Sends the conversation to the server and yields the events of its answer."""
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
        with closing(self._client.stream("/api/chat", body)) as lines:
            for line in lines:
                if line.get("done"):
                    yield build(AnswerSummary, line["timing"])
                    return
                if "prompt_progress" in line:
                    yield build(PromptProgress, line["prompt_progress"])
                else:
                    yield Delta(
                        line["message"].get("content", ""),
                        line["message"].get("thinking", ""),
                    )
        raise self._client.lost_connection()

    def rest(self, timeout_s: float | None) -> list[Event]:
        """Returns an empty list: the connection is closed, so the server stops the
        answer and sends no more events."""
        return []

    def experts(self) -> Snapshot | None:
        """Returns the server's last snapshot of the experts, with their recent uses and
        loads. Returns None if the server has no snapshot of the model, for example
        because the model is not loaded."""
        from moegguf.chat.experts import read_snapshot

        loaded = (
            model
            for model in self._client.get("/live?once=1")["models"]
            if self.entry.name in model["names"]
        )
        found = next((model["snapshot"] for model in loaded if model["snapshot"]), None)
        return (
            None
            if found is None
            else replace(read_snapshot(found), model=self.entry.name)
        )

    def close(self) -> None:
        """Does nothing, because the server keeps the model for other requests."""


def _named(name: str, shown: Json) -> NamedModel:
    from moegguf.models.names import parse_name
    from moegguf.models.recipe import parse

    return NamedModel(parse_name(name).canonical, **parse(shown["modelfile"]).overrides)


def messages_to_server(conversation: Conversation) -> list[Json]:
    """Returns the messages for /api/chat. Leaves out the messages of the model's
    Modelfile if the conversation begins with them, because the server adds them."""
    from moegguf.generate.images import images_of, text_of

    given, own = (
        conversation.messages,
        [dict(message) for message in conversation.entry.messages],
    )
    system: list[Message] = []
    # Even if it is "": without a system message, the server adds the model's own.
    if conversation.system is not None:
        system.append({"role": "system", "content": conversation.system})
    asked = (*system, *given[len(own) if given[: len(own)] == own else 0 :])
    return [
        {
            **each,
            "content": text_of(each["content"]),
            **({"images": images} if (images := images_of(each)) else {}),
        }
        for each in asked
    ]
