"""The interactive chat: a loop that answers typed messages and runs commands, which
begin with a slash. Also contains the tables of commands. A command is never sent to the
model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from moegguf.chat.reader import (
    QUOTES,
    InputHistory,
    Reader,
    is_quoted_message,
    unquoted,
)
from moegguf.chat.session import begins_with_image, extract_images, print_answer
from moegguf.errors import ModelNotFoundError, MoeggufError, OptionError
from moegguf.generate.images import text_of
from moegguf.generate.request import THINK_LEVELS
from moegguf.models.recipe import PARAMETERS, check_ranges, parse_parameter
from moegguf.settings import data_folder, read_settings, shows_tracebacks
from moegguf.terminal.loading import parse_format
from moegguf.terminal.messages import print_error, print_message
from moegguf.text import decode_text

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation, Snapshot
    from moegguf.chat.model import ChatModel

MAX_READ_BYTES = 4 << 20
NAME = "<modelname>"  # placeholder for an argument that must be a single word

_WORD = re.compile(r'"[^"]*"|\'[^\']*\'|\S+')


class Chat:
    """A chat in the terminal: one conversation, one loaded model at a time, and the
    loop that reads input. `history`: the messages and commands typed in this chat and
    earlier ones."""

    def __init__(self, model: ChatModel, conversation: Conversation) -> None:
        self.model = model
        self.conversation = conversation
        self.history = InputHistory(
            data_folder() / "history", enabled=read_settings().history
        )
        words = [
            *COMMANDS,
            *(f"/set {name}" for name in sorted(SETTINGS)),
            *(f"/show {part}" for part in PARTS),
        ]
        self._reader = Reader(
            self.history,
            [*words, *(f"/? {topic}" for topic in ("set", "show", "shortcuts"))],
        )

    def run(self) -> int:
        """Runs the chat until Ctrl-D, /bye or /exit, and returns exit code 0. The
        caller must have entered `keyboard_echo_off`."""
        if self.conversation.think and not self.check_thinking():
            self.conversation.think = None
        self.model.print_line(self.conversation)
        try:
            while True:
                self._handle_input()
        except EOFError:
            return 0

    def _handle_input(self) -> None:
        try:
            typed = self._reader.prompt()
        except KeyboardInterrupt:
            if not self._reader.unsent_text:
                print_message("\nUse Ctrl + d or /bye to exit.")
            return
        text = unquoted(typed)
        if not text.strip():
            return
        snapshot, reads_images = (
            self.conversation.snapshot(),
            self.model.connection.reads_images,
        )
        is_command = text.lstrip().startswith("/") and not is_quoted_message(typed)
        try:
            if is_command and not (reads_images and begins_with_image(text)):
                run_command(self, typed.strip())
            else:
                self.conversation.add_user_message(
                    *(extract_images(text) if reads_images else (text, []))
                )
                self.answer(snapshot)
        except KeyboardInterrupt:
            # Ctrl-C while a command runs, while a model loads, or before an answer
            # begins.
            self.conversation.restore(snapshot)
            print_message("")
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            # A bug must not end the chat and lose the conversation.
            is_expected = isinstance(error, MoeggufError | OSError | typer.BadParameter)
            if shows_tracebacks() and not is_expected:
                raise
            self.conversation.restore(snapshot)
            print_error(
                error, "" if is_expected else f"unexpected {type(error).__name__}: "
            )

    def answer(self, snapshot: Snapshot) -> None:
        """Answers the conversation's last message, and appends the answer. If an error
        or Ctrl-C ends the answer before any text or thinking, restores `snapshot`
        instead."""
        conversation = self.conversation
        with self.model.spinner:
            self.model.prepare(conversation)
            answer = print_answer(self.model, conversation, "\n\n")
        if answer.error is not None:
            print_error(answer.error)
        if (
            answer.text
            or answer.thinking
            or not (answer.is_interrupted or answer.error)
        ):
            thinking = {"thinking": answer.thinking} if answer.thinking else {}
            conversation.messages.append(
                {"role": "assistant", "content": answer.text, **thinking}
            )
        else:
            conversation.restore(snapshot)
        if conversation.verbose:
            print_message("\n".join([*self.model.statistics(with_load=True), ""]))

    def check_thinking(self) -> bool:
        """Returns True if the model supports thinking, or if the model's facts cannot
        be read. Otherwise prints a warning and returns False."""
        try:
            if (
                "thinking"
                in self.model.connection.details(self.conversation.entry).capabilities
            ):
                return True
        except MoeggufError:
            return True
        print_message(
            f"warning: model '{self.conversation.entry.name}' does not support thinking output"
        )
        return False


Command = Callable[[Chat, str], None]


class Row(NamedTuple):
    """A row of a command table {word: row}. A row without a `help` text is not shown in
    the help."""

    run: Command
    help: str = ""
    usage: str = ""  # shown in the help instead of the word
    needs: str = ""  # name of the required argument, or "" if there is none


def run_command(chat: Chat, line: str) -> None:
    """Runs a command line that begins with a slash. Raises MoeggufError, OSError or
    BadParameter if the command fails, and EOFError to end the chat."""
    word, rest = [*line.split(maxsplit=1), ""][:2]
    if word not in COMMANDS:
        print_message(f"Unknown command '{word}'. Type /? for help")
        return
    row, n_words = COMMANDS[word], len(rest.split())
    if row.needs and (n_words == 0 or (n_words > 1 and row.needs == NAME)):
        print_message(f"Usage:\n  {word} {row.needs}")
    else:
        row.run(chat, rest.strip())


def _help_of(rows: Mapping[str, Row], width: int, before: str = "") -> str:
    """Returns the help text for a command table. `width`: width of the left column in
    characters. `before`: prefix of each word."""
    lines = (
        f"  {before + (row.usage or word):<{width}}{row.help}"
        for word, row in rows.items()
        if row.help
    )
    return "\n".join(["Available Commands:", *lines, ""])


def _help(_chat: Chat, topic: str) -> None:
    texts = {
        "set": SET_HELP,
        "show": SHOW_HELP,
        "shortcut": SHORTCUTS_HELP,
        "shortcuts": SHORTCUTS_HELP,
    }
    print_message(
        texts.get(topic.removeprefix("/"), _help_of(COMMANDS, 16) + MORE_HELP)
    )


def _bye(_chat: Chat, _rest: str) -> None:
    raise EOFError


def _clear(chat: Chat, _rest: str) -> None:
    chat.conversation.clear()
    print_message("Cleared session context")


def _load(chat: Chat, name: str) -> None:
    """Switches the conversation to the model `name`, and loads the model. If there is
    no such model, prints a message. If the load fails, raises the error, and the caller
    switches back to the previous model."""
    try:
        entry = chat.model.connection.names.find(name)
    except ModelNotFoundError:
        print_message(f"Couldn't find model '{name}'")
        return
    print_message(f"Loading model '{name}'")
    chat.conversation.switch_model(entry)
    with chat.model.spinner:
        chat.model.load(chat.conversation)
    chat.model.print_line(chat.conversation)


def _save(chat: Chat, name: str) -> None:
    """Saves the conversation as a new model: the current model's files, its parameters
    plus the ones set in the chat, the system message, and the messages without
    images."""
    from moegguf.models.recipe import Recipe

    conversation = chat.conversation
    recipe = Recipe(
        from_=conversation.entry.name,
        parameters={**conversation.entry.parameters, **conversation.parameters},
        system=conversation.system_text or None,
        messages=tuple(
            {**m, "content": text_of(m["content"])} for m in conversation.messages
        ),
        license=conversation.entry.license,
    )
    chat.model.connection.names.create(name, recipe)
    print_message(f"Created new model '{name}'")


def _regen(chat: Chat, _rest: str) -> None:
    snapshot, messages = chat.conversation.snapshot(), chat.conversation.messages
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if messages and messages[-1]["role"] == "user":
        chat.answer(snapshot)
    else:
        print_message("There is no message to answer again.")


def _read(chat: Chat, name: str) -> None:
    path = Path(_strip_quotes(name)).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_READ_BYTES + 1)
    except OSError as error:
        raise OptionError(
            f"/read cannot read '{name}' ({error.strerror}); check the path."
        ) from None
    if len(data) > MAX_READ_BYTES:
        raise OptionError(
            f"/read accepts files of up to {MAX_READ_BYTES >> 20} MiB, but '{name}' is larger; read a smaller file."
        )
    text = decode_text(data).rstrip("\n")
    if "\0" in text:
        raise OptionError(
            f"/read accepts text files, but '{name}' is binary; read a text file."
        )
    pending = chat.conversation.pending_text
    chat.conversation.pending_text = f"{pending}\n\n{text}" if pending else text
    print_message(
        f"Read '{name}' ({len(text):,} characters); it goes before your next message."
    )


def _strip_quotes(word: str) -> str:
    """Returns `word` without the pair of quotes around it, if any."""
    return (
        word[1:-1]
        if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"
        else word
    )


def _list_models(chat: Chat, prefix: str) -> None:
    from moegguf.terminal.tables import print_model_list

    print_model_list(chat.model.connection.names.entries(prefix))


def _statistics(chat: Chat, _rest: str) -> None:
    from moegguf.terminal.statistics import total_lines

    if not (lines := chat.model.statistics(with_load=False)):
        print_message("There is no answer yet.")
        return
    if loaded := chat.model.connection.loaded:
        lines += total_lines(loaded.stats)
    print_message("\n".join(lines))


def _show(chat: Chat, part: str) -> None:
    if part in PARTS:
        PARTS[part].run(chat, "")
    else:
        print_message(
            f"Unknown command '/show {part}'. Type /? for help" if part else SHOW_HELP
        )


def _show_text(text: Callable[[Chat], str | None], what: str) -> Command:
    """Returns a command that prints the result of `text`. If the result is empty or
    None, the command prints that the model has no `what`."""
    return lambda chat, _: print_message(
        text(chat) or f"No {what} was specified for this model."
    )


def _show_parameters(chat: Chat, _rest: str) -> None:
    from moegguf.models.details import parameters_of
    from moegguf.models.recipe import parameter_lines

    lines = ["Model defined parameters:"]
    own = [
        f"  {line}" for line in parameter_lines(parameters_of(chat.conversation.entry))
    ]
    lines += own or ["  No additional parameters were specified for this model."]
    if user := parameter_lines(chat.conversation.user_parameters()):
        lines += ["", "User defined parameters:", *(f"  {line}" for line in user)]
    print_message("\n".join([*lines, ""]))


def _set(chat: Chat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name in SETTINGS:
        SETTINGS[name].run(chat, value.strip())
    else:
        print_message(
            f"Unknown setting '{name}'. Type /set for the settings"
            if name
            else SET_HELP
        )


def _switch(
    attribute: str, value: Any, message: str, owner: str = "conversation"
) -> Command:
    """Returns a command that sets an attribute of the conversation (or of another
    `owner` in the chat) and prints a message."""

    def switch(chat: Chat, _rest: str) -> None:
        setattr(getattr(chat, owner), attribute, value)
        print_message(message)

    return switch


def _set_parameter(chat: Chat, value: str) -> None:
    words = [_strip_quotes(word) for word in _WORD.findall(value)]
    if not words or (words[0] in PARAMETERS and len(words) < 2):
        print_message(PARAMETERS_HELP)
        return
    name, *values = words
    values = values or [""]  # an unknown name without a value
    try:
        parsed = (
            values if PARAMETERS.get(name) is list else parse_parameter(name, values[0])
        )
        check_ranges({name: parsed})
        chat.model.connection.check_parameter(name)
    except MoeggufError as error:
        print_message(f"Couldn't set parameter: {error}")
        return
    chat.conversation.parameters[name] = parsed
    print_message(f"Set parameter '{name}' to '{', '.join(values)}'")


def _set_system(chat: Chat, value: str) -> None:
    if not value:
        print_message("Usage:\n  /set system <string>")
        return
    chat.conversation.system = unquoted(value) if value.startswith(QUOTES) else value
    print_message("Set system message.")


def _set_format(chat: Chat, value: str) -> None:
    if not value:
        print_message(
            "Invalid or missing format. For 'json' mode use '/set format json'"
        )
        return
    chat.conversation.format = parse_format(value)
    print_message(
        f"Set format to '{value}' mode."
        if value == "json"
        else "Set format to a JSON schema."
    )


def _set_think(chat: Chat, level: str) -> None:
    if level and level not in THINK_LEVELS:
        print_message(
            f"Invalid level '{level}'. Use one of {', '.join(THINK_LEVELS)}, or no level."
        )
    elif chat.check_thinking():
        chat.conversation.think = level or True
        print_message(
            f"Set 'think' mode to '{level}'." if level else "Set 'think' mode."
        )


SETTINGS = {
    "parameter": Row(_set_parameter, "Set a parameter", "parameter ..."),
    "system": Row(_set_system, "Set system message", "system <string>"),
    "history": Row(
        _switch("enabled", True, "Set 'history' mode.", "history"), "Enable history"
    ),
    "nohistory": Row(
        _switch("enabled", False, "Set 'nohistory' mode.", "history"), "Disable history"
    ),
    "wordwrap": Row(
        _switch("word_wrap", True, "Set 'wordwrap' mode."), "Enable wordwrap"
    ),
    "nowordwrap": Row(
        _switch("word_wrap", False, "Set 'nowordwrap' mode."), "Disable wordwrap"
    ),
    "format": Row(_set_format, "Enable JSON mode", "format json"),
    "noformat": Row(_switch("format", None, "Disabled format."), "Disable formatting"),
    "verbose": Row(_switch("verbose", True, "Set 'verbose' mode."), "Show LLM stats"),
    "quiet": Row(_switch("verbose", False, "Set 'quiet' mode."), "Disable LLM stats"),
    "think": Row(_set_think, "Enable thinking", "think [level]"),
    "nothink": Row(_switch("think", False, "Set 'nothink' mode."), "Disable thinking"),
}
PARTS = {
    "info": Row(
        lambda c, _: c.model.connection.print_info(c.conversation.entry),
        "Show details for this model",
    ),
    "license": Row(
        _show_text(lambda c: c.conversation.entry.license, "license"),
        "Show model license",
    ),
    "modelfile": Row(
        lambda c, _: print_message(c.model.connection.modelfile(c.conversation.entry)),
        "Show Modelfile for this model",
    ),
    "parameters": Row(_show_parameters, "Show parameters for this model"),
    "system": Row(
        _show_text(
            lambda c: (text := c.conversation.system_text) and f"{text}\n",
            "system message",
        ),
        "Show system message",
    ),
    "template": Row(
        _show_text(
            lambda c: c.model.connection.details(c.conversation.entry).template,
            "prompt template",
        ),
        "Show prompt template",
    ),
}
COMMANDS = {
    "/set": Row(_set, "Set session variables"),
    "/show": Row(_show, "Show model information"),
    "/load": Row(_load, "Load a session or model", "/load <model>", NAME),
    "/model": Row(_load, needs=NAME),
    "/save": Row(_save, "Save your current session", "/save <model>", NAME),
    "/clear": Row(_clear, "Clear session context"),
    "/list": Row(_list_models, "List the models on this machine"),
    "/ls": Row(_list_models),
    "/regen": Row(_regen, "Answer the last message again"),
    "/read": Row(
        _read, "Put a file's text before the next message", "/read <file>", "<file>"
    ),
    "/stats": Row(_statistics, "Figures of the last answer"),
    "/experts": Row(
        lambda c, _: c.model.print_experts(),
        "Show which experts are in memory and used",
    ),
    "/bye": Row(_bye, "Exit"),
    "/exit": Row(_bye),
    "/?": Row(_help, "Help for a command", "/?, /help"),
    "/help": Row(_help),
}
"""{command: row}, in the order of the help. Ollama's commands have Ollama's help
texts."""

SET_HELP, SHOW_HELP = _help_of(SETTINGS, 23, "/set "), _help_of(PARTS, 19, "/show ")

MORE_HELP = """\
  /? shortcuts    Help for keyboard shortcuts

Use \"\"\" to begin a multi-line message.
"""

PARAMETERS_HELP = """\
Available Parameters:
  /set parameter seed <int>             Random number seed
  /set parameter num_predict <int>      Max number of tokens to predict
  /set parameter top_k <int>            Pick from top k num of tokens
  /set parameter top_p <float>          Pick from tokens with this total share
  /set parameter min_p <float>          Drop tokens less likely than this share
  /set parameter num_keep <int>         Tokens kept when the context is full
  /set parameter num_ctx <int>          Set the context size
  /set parameter temperature <float>    Set creativity level
  /set parameter repeat_penalty <float> How much to penalize repetitions
  /set parameter repeat_last_n <int>    How far back to look for repetitions
  /set parameter num_gpu <int>          The number of layers to send to the GPU
  /set parameter stop <string> <string> ...   Set the stop parameters
"""

SHORTCUTS_HELP = """\
Available keyboard shortcuts:
  Ctrl + a            Move to the beginning of the line (Home)
  Ctrl + e            Move to the end of the line (End)
   Alt + b            Move back (left) one word
   Alt + f            Move forward (right) one word
  Ctrl + k            Delete the sentence after the cursor
  Ctrl + u            Delete the sentence before the cursor
  Ctrl + w            Delete the word before the cursor
  Ctrl + p, Ctrl + n  The message before, the message after (Up, Down)
  Ctrl + r            Search the messages before

  Ctrl + j            Begin a new line
  Ctrl + l            Clear the screen
  Ctrl + g            Open default editor to compose a prompt
  Ctrl + c            Stop the model from responding
  Ctrl + z            Suspend
  Ctrl + d            Exit (/bye)
"""
