"""The chat loop: reads a message, runs it as a command or answers it, until Ctrl-D or /bye."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moegguf.chat.commands import completion_words, run_command
from moegguf.chat.reader import InputHistory, Reader, is_quoted_message, unquoted
from moegguf.chat.session import ChatSession, print_error
from moegguf.errors import MoeggufError
from moegguf.settings import data_folder, read_settings, shows_tracebacks
from moegguf.terminal.keyboard import keyboard_echo_off
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.model import ChatModel


class Chat:
    """The loop over what is typed; closes the model, which is loaded, at the end."""

    def __init__(self, model: ChatModel, conversation: Conversation) -> None:
        history = InputHistory(data_folder() / "history", enabled=read_settings().history)
        self._session = ChatSession(model, conversation, history)
        self._reader = Reader(history, completion_words())

    def run(self) -> int:
        """Runs until Ctrl-D or /bye; returns the exit code."""
        session = self._session
        if session.conversation.think and not session.check_thinking():
            session.conversation.think = None
        session.print_model_line()
        try:
            with keyboard_echo_off():
                while True:
                    self._handle_input()
        except EOFError:
            return 0
        finally:
            session.model.connection.close()

    def _handle_input(self) -> None:
        try:
            typed = self._reader.read()
        except KeyboardInterrupt:
            if not self._reader.unsent_text:
                print_message("\nUse Ctrl + d or /bye to exit.")
            return
        text = unquoted(typed)
        if not text.strip():
            return
        conversation = self._session.conversation
        snapshot = conversation.snapshot()
        try:
            if text.lstrip().startswith("/") and not is_quoted_message(typed) and not self._session.is_image(text):
                run_command(self._session, typed.strip())
            else:
                conversation.add_user_message(*self._session.with_images(text))
                self._session.answer(snapshot)
        except KeyboardInterrupt:  # raised outside the prompt and outside an answer
            conversation.restore(snapshot)
            print_message("")
        except (EOFError, BrokenPipeError):
            raise
        except MoeggufError as error:
            conversation.restore(snapshot)
            print_error(error)
        except Exception as error:  # an internal fault must not lose the conversation
            if shows_tracebacks():
                raise
            conversation.restore(snapshot)
            print_message(f"error: unexpected {type(error).__name__}: {' '.join(str(error).split())}")
