"""The chat's commands, which begin with a slash: the tables of them, and /set. None reaches the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moegguf.chat import help as help_texts
from moegguf.chat import show_commands
from moegguf.chat.conversation import parse_parameter
from moegguf.chat.reader import QUOTES, unquoted
from moegguf.chat.session import print_error
from moegguf.chat.show_commands import Row, help_of, show_help
from moegguf.errors import MoeggufError, OptionError
from moegguf.generate.request import THINK_LEVELS
from moegguf.terminal.loading import parse_format
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.session import ChatSession

Command = Callable[["ChatSession", str], None]

MAX_READ_BYTES = 4 << 20

_WORD = re.compile(r'"[^"]*"|\'[^\']*\'|\S+')


def run_command(session: ChatSession, line: str) -> None:
    """Runs `line`, which begins with a slash. An error is printed and changes nothing."""
    word, rest = [*line.split(maxsplit=1), ""][:2]
    command = COMMANDS.get(word)
    if command is None:
        print_message(f"Unknown command '{word}'. Type /? for help")
        return
    try:
        command.run(session, rest.strip())
    except (MoeggufError, OSError, typer.BadParameter) as error:
        print_error(error)


def _help(_session: ChatSession, topic: str) -> None:
    texts: dict[str, Callable[[], str]] = {"set": _set_help, "show": show_help}
    texts |= dict.fromkeys(("shortcut", "shortcuts"), lambda: help_texts.SHORTCUTS)
    print_message(texts.get(topic.removeprefix("/"), lambda: help_of(COMMANDS, 16) + help_texts.MORE)())


def _set_help() -> str:
    return help_of(SETTINGS, 23, "/set ")


def _bye(_session: ChatSession, _rest: str) -> None:
    raise EOFError


def _clear(session: ChatSession, _rest: str) -> None:
    session.conversation.clear()
    print_message("Cleared session context")


def _load(session: ChatSession, name: str) -> None:
    if len(name.split()) != 1:
        print_message("Usage:\n  /load <modelname>")
        return
    session.load_model(name)


def _save(session: ChatSession, name: str) -> None:
    if len(name.split()) != 1:
        print_message("Usage:\n  /save <modelname>")
        return
    session.model.connection.names.create(name, show_commands.recipe(session.conversation))
    print_message(f"Created new model '{name}'")


def _regen(session: ChatSession, _rest: str) -> None:
    snapshot = session.conversation.snapshot()
    if not session.conversation.remove_last_answer():
        print_message("There is no message to answer again.")
        return
    session.answer(snapshot)


def _read(session: ChatSession, name: str) -> None:
    if not name:
        print_message("Usage:\n  /read <file>")
        return
    with Path(_strip_quotes(name)).expanduser().open("rb") as file:
        data = file.read(MAX_READ_BYTES + 1)
    if len(data) > MAX_READ_BYTES:
        raise OptionError(f"/read takes files of up to {MAX_READ_BYTES >> 20} MiB; '{name}' is larger")
    if b"\0" in data:
        raise OptionError(f"/read takes text; '{name}' is binary")
    text = data.decode("utf-8", errors="replace").rstrip("\n")
    pending = session.conversation.pending_text
    session.conversation.pending_text = f"{pending}\n\n{text}" if pending else text
    print_message(f"Read '{name}' ({len(text):,} characters); it goes before your next message.")


def _strip_quotes(word: str) -> str:
    """`word` without a pair of quotes around it."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word


def _set(session: ChatSession, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name in SETTINGS:
        SETTINGS[name].run(session, value.strip())
    else:
        print_message(f"Unknown command '/set {name}'. Type /? for help" if name else _set_help())


def _switch(owner: str, attribute: str, value: Any, message: str) -> Command:
    """Sets an attribute of the conversation, or of the session's history."""

    def switch(session: ChatSession, _rest: str) -> None:
        setattr(getattr(session, owner), attribute, value)
        print_message(message)

    return switch


def _set_parameter(session: ChatSession, value: str) -> None:
    words = [_strip_quotes(word) for word in _WORD.findall(value)]
    if len(words) < 2:
        print_message(help_texts.PARAMETERS)
        return
    name, *values = words
    try:
        parsed = parse_parameter(name, values)
        session.model.connection.check_parameter(name)
    except MoeggufError as error:
        print_message(f"Couldn't set parameter: {error}")
        return
    session.conversation.parameters[name] = parsed
    print_message(f"Set parameter '{name}' to '{', '.join(values)}'")


def _set_system(session: ChatSession, value: str) -> None:
    if not value:
        print_message(_set_help())
        return
    session.conversation.system = unquoted(value) if value.startswith(QUOTES) else value
    print_message("Set system message.")


def _set_format(session: ChatSession, value: str) -> None:
    if not value:
        print_message("Invalid or missing format. For 'json' mode use '/set format json'")
        return
    session.conversation.format = parse_format(value)
    print_message(f"Set format to '{value}' mode." if value == "json" else "Set format to a JSON schema.")


def _set_think(session: ChatSession, level: str) -> None:
    if level and level not in THINK_LEVELS:
        print_message(f"Invalid level '{level}'. There are {', '.join(THINK_LEVELS)}, or none.")
        return
    if not session.check_thinking():
        return
    session.conversation.think = level or True
    print_message(f"Set 'think' mode to '{level}'." if level else "Set 'think' mode.")


SETTINGS = {
    "parameter": Row(_set_parameter, "Set a parameter", "parameter ..."),
    "system": Row(_set_system, "Set system message", "system <string>"),
    "history": Row(_switch("history", "enabled", True, "Set 'history' mode."), "Enable history"),
    "nohistory": Row(_switch("history", "enabled", False, "Set 'nohistory' mode."), "Disable history"),
    "wordwrap": Row(_switch("conversation", "word_wrap", True, "Set 'wordwrap' mode."), "Enable wordwrap"),
    "nowordwrap": Row(_switch("conversation", "word_wrap", False, "Set 'nowordwrap' mode."), "Disable wordwrap"),
    "format": Row(_set_format, "Enable JSON mode", "format json"),
    "noformat": Row(_switch("conversation", "format", None, "Disabled format."), "Disable formatting"),
    "verbose": Row(_switch("conversation", "verbose", True, "Set 'verbose' mode."), "Show LLM stats"),
    "quiet": Row(_switch("conversation", "verbose", False, "Set 'quiet' mode."), "Disable LLM stats"),
    "think": Row(_set_think, "Enable thinking", "think [level]"),
    "nothink": Row(_switch("conversation", "think", False, "Set 'nothink' mode."), "Disable thinking"),
}
COMMANDS = {
    "/set": Row(_set, "Set session variables"),
    "/show": Row(show_commands.show, "Show model information"),
    "/load": Row(_load, "Load a session or model", "/load <model>"),
    "/model": Row(_load),
    "/save": Row(_save, "Save your current session", "/save <model>"),
    "/clear": Row(_clear, "Clear session context"),
    "/list": Row(show_commands.list_models, "List the models on this machine"),
    "/ls": Row(show_commands.list_models),
    "/regen": Row(_regen, "Answer the last message again"),
    "/read": Row(_read, "Put a file's text before the next message", "/read <file>"),
    "/stats": Row(show_commands.show_statistics, "Figures of the last answer"),
    "/experts": Row(show_commands.show_experts, "Show which experts are in memory and used"),
    "/bye": Row(_bye, "Exit"),
    "/exit": Row(_bye),
    "/?": Row(_help, "Help for a command", "/?, /help"),
    "/help": Row(_help),
}
"""Ollama's commands first, with its texts, then moegguf's own."""


def completion_words() -> list[str]:
    """Completions for the Tab key."""
    return [
        *COMMANDS,
        *(f"/set {name}" for name in sorted(SETTINGS)),
        *(f"/show {part}" for part in show_commands.PARTS),
        *(f"/? {topic}" for topic in ("set", "show", "shortcuts")),
    ]
