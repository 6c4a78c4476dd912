"""What a chat asks of its model, whether it is in a worker of this program or in a running server, and its answers."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from moegguf.generate.request import Delta, OnProgress, PromptProgress, Timing

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.models.entry import ModelEntry, NamedModel
    from moegguf.models.recipe import Recipe
    from moegguf.terminal.progress import Spinner

POLL_S = 0.1  # a signal that another thread receives does not interrupt queue.get()


class RemoteAnswer(ABC):
    """One answer, whose parts arrive on another thread (`put`, then `end`); `deltas` gives them to the main thread,
    which Ctrl-C can then interrupt.

    `timing` and `decisions` (`Llama.decisions`) are complete when it has ended. `load_s`: of a load before it.
    """

    def __init__(self, load_s: float = 0.0) -> None:
        self.timing = Timing(finish="cancelled")
        self.decisions: Mapping[str, Any] = {}
        self.load_s = load_s
        self._parts: queue.SimpleQueue[Delta | PromptProgress | BaseException | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    @abstractmethod
    def _begin(self) -> None:
        """Has the other process compute it."""

    @abstractmethod
    def _stop(self) -> None:
        """Has the other process end it."""

    def cancel(self, timeout_s: float) -> bool:
        """Ends the answer, from any thread; False when it has not ended after `timeout_s`."""
        self._stop()
        return self._ended.wait(timeout_s)

    def deltas(self, on_progress: OnProgress) -> Generator[Delta, None, None]:
        """The parts of the answer as they arrive; iterate once. Ending the loop early cancels the answer."""
        try:
            self._begin()
            while (part := self._next()) is not None:
                if isinstance(part, BaseException):
                    raise part
                if isinstance(part, PromptProgress):
                    on_progress(part)
                else:
                    yield part
        finally:
            if not self._ended.is_set():
                self._stop()

    def _next(self) -> Delta | PromptProgress | BaseException | None:
        while True:
            try:
                return self._parts.get(timeout=POLL_S)
            except queue.Empty:
                continue

    def _put(self, part: Delta | PromptProgress) -> None:
        self._parts.put(part)

    def _end(self, error: BaseException | None = None) -> None:
        """Ends the deltas, with an error if there is one; a second call has no effect."""
        self._ended.set()
        self._parts.put(error)


class Names(Protocol):
    """Models by name: this machine's (`moegguf.models.catalog.Catalog`), or those of a server."""

    def find(self, name: str, /) -> NamedModel:
        """A model. Raises ModelNotFoundError."""

    def entries(self, prefix: str, /) -> Iterable[ModelEntry]:
        """Those whose names begin so."""

    def create(self, name: str, recipe: Recipe, /) -> object:
        """Stores a new model."""

    def modelfile(self, entry: Any, /) -> str:
        """The Modelfile that makes a model."""


class ChatModel(Protocol):
    """A conversation's model. Methods raise MoeggufError."""

    @property
    def names(self) -> Names:
        """The models that `load` can load."""

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images."""

    def load(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the conversation's model in place of the present one, which stays if that fails."""

    def prepare(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the model again when the conversation asks for another context, cache or number of threads."""

    def answer(self, conversation: Conversation) -> RemoteAnswer:
        """The answer to the conversation's last message, not computed yet."""

    def check_parameter(self, name: str) -> None:
        """Raises OptionError for a parameter that has no effect on this model."""

    def facts(self) -> list[str]:
        """Facts for the line after a load."""

    def statistics(self, timing: Timing, *, with_load: bool) -> list[str]:
        """Lines about the last answer, and about a load before it."""

    def totals(self) -> list[str]:
        """Lines about all answers since the load."""

    def thinks(self) -> bool:
        """Whether the model supports thinking."""

    def print_info(self) -> None:
        """Prints facts from the model's header."""

    def template(self) -> str:
        """The prompt template; "" for none."""

    def print_experts(self) -> None:
        """Prints a map of the experts."""

    def close(self) -> None:
        """Ends the use of the model."""
