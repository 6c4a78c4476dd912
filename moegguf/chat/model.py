"""What a chat asks of its model, whether it is in a worker of this program or in a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moegguf.chat.answer import RemoteAnswer
    from moegguf.chat.conversation import Conversation
    from moegguf.generate.request import Timing
    from moegguf.models.entry import NamedModel
    from moegguf.models.recipe import Recipe
    from moegguf.terminal.progress import Spinner


class ChatModel(Protocol):
    """A conversation's model. Methods raise MoeggufError."""

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images."""

    def find(self, name: str) -> NamedModel:
        """Another model that `load` can load. Raises ModelNotFoundError."""

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

    def modelfile(self) -> str:
        """The Modelfile that makes the model."""

    def template(self) -> str:
        """The prompt template; "" for none."""

    def print_experts(self) -> None:
        """Prints a map of the experts."""

    def print_list(self, prefix: str) -> None:
        """Prints the models that `find` finds."""

    def create(self, name: str, recipe: Recipe) -> None:
        """Stores a new model, which `find` then finds."""

    def close(self) -> None:
        """Ends the use of the model."""
