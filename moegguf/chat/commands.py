"""The chat's commands, which begin with a slash: which there are, and what /set does. None reaches the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moegguf.chat import help as texts
from moegguf.chat import showing
from moegguf.chat.parameters import parse_parameter
from moegguf.chat.reading import QUOTES, unquoted
from moegguf.chat.turn import say_error
from moegguf.errors import MoeggufError, OptionError
from moegguf.terminal.arguments import THINK_LEVELS, parse_format
from moegguf.terminal.messages import say

if TYPE_CHECKING:
    from moegguf.chat.chat import Chat

Command = Callable[["Chat", str], None]

READ_LIMIT_BYTES = 4 << 20

_WORD = re.compile(r'"[^"]*"|\'[^\']*\'|\S+')


def obey(chat: Chat, line: str) -> None:
    """Does what `line`, which begins with a slash, says; an error of a command is said and changes nothing."""
    word, rest = [*line.split(maxsplit=1), ""][:2]
    command = COMMANDS.get(word)
    if command is None:
        say(f"Unknown command '{word}'. Type /? for help")
        return
    try:
        command(chat, rest.strip())
    except (MoeggufError, OSError, typer.BadParameter) as error:
        say_error(error)


def _help(_chat: Chat, topic: str) -> None:
    topics = {"set": texts.SET, "show": texts.SHOW, "shortcut": texts.SHORTCUTS, "shortcuts": texts.SHORTCUTS}
    say(topics.get(topic.removeprefix("/"), texts.COMMANDS))


def _bye(_chat: Chat, _rest: str) -> None:
    raise EOFError


def _clear(chat: Chat, _rest: str) -> None:
    chat.conversation.clear()
    say("Cleared session context")


def _load(chat: Chat, name: str) -> None:
    if len(name.split()) != 1:
        say("Usage:\n  /load <modelname>")
        return
    chat.load_model(name)


def _save(chat: Chat, name: str) -> None:
    if len(name.split()) != 1:
        say("Usage:\n  /save <modelname>")
        return
    from moegguf.models.catalog import Catalog

    Catalog().create(name, showing.recipe(chat.conversation))
    say(f"Created new model '{name}'")


def _regen(chat: Chat, _rest: str) -> None:
    saved = chat.conversation.saved()
    if not chat.conversation.take_back_answer():
        say("There is no message to answer again.")
        return
    chat.answer(saved)


def _read(chat: Chat, name: str) -> None:
    if not name:
        say("Usage:\n  /read <file>")
        return
    with Path(_bare(name)).expanduser().open("rb") as file:
        data = file.read(READ_LIMIT_BYTES + 1)
    if len(data) > READ_LIMIT_BYTES:
        raise OptionError(f"/read takes files of up to {READ_LIMIT_BYTES >> 20} MiB; '{name}' is larger")
    if b"\0" in data:
        raise OptionError(f"/read takes text; '{name}' is none")
    text = data.decode("utf-8", errors="replace").rstrip("\n")
    before = f"{chat.conversation.pending}\n\n" if chat.conversation.pending else ""
    chat.conversation.pending = before + text
    say(f"Read '{name}' ({len(text):,} characters); it goes before your next message.")


def _bare(word: str) -> str:
    """A word without the quotes around it."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word


def _set(chat: Chat, rest: str) -> None:
    what, _, value = rest.partition(" ")
    value = value.strip()
    if what in SWITCHES:
        _switch(chat, what)
    elif what in SETTERS:
        SETTERS[what](chat, value)
    elif what:
        say(f"Unknown command '/set {what}'. Type /? for help")
    else:
        say(texts.SET)


def _switch(chat: Chat, what: str) -> None:
    owner, name, value, message = SWITCHES[what]
    setattr(chat.conversation if owner == "conversation" else chat.reader.history, name, value)
    say(message)


def _set_parameter(chat: Chat, value: str) -> None:
    words = [_bare(word) for word in _WORD.findall(value)]
    if len(words) < 2:
        say(texts.PARAMETERS)
        return
    name, *values = words
    try:
        chat.conversation.parameters[name] = parse_parameter(name, values)
    except MoeggufError as error:
        say(f"Couldn't set parameter: {error}")
        return
    say(f"Set parameter '{name}' to '{', '.join(values)}'")


def _set_system(chat: Chat, value: str) -> None:
    if not value:
        say(texts.SET)
        return
    chat.conversation.system = unquoted(value) if value.startswith(QUOTES) else value
    say("Set system message.")


def _set_format(chat: Chat, value: str) -> None:
    if not value:
        say("Invalid or missing format. For 'json' mode use '/set format json'")
        return
    chat.conversation.format = parse_format(value)
    say(f"Set format to '{value}' mode." if value == "json" else "Set format to a JSON schema.")


def _set_think(chat: Chat, level: str) -> None:
    if level and level not in THINK_LEVELS:
        say(f"Invalid level '{level}'. There are {', '.join(THINK_LEVELS)}, or none.")
        return
    if not chat.thinks():
        return
    chat.conversation.think = level or True
    say(f"Set 'think' mode to '{level}'." if level else "Set 'think' mode.")


SWITCHES = {
    "history": ("history", "on", True, "Set 'history' mode."),
    "nohistory": ("history", "on", False, "Set 'nohistory' mode."),
    "wordwrap": ("conversation", "word_wrap", True, "Set 'wordwrap' mode."),
    "nowordwrap": ("conversation", "word_wrap", False, "Set 'nowordwrap' mode."),
    "verbose": ("conversation", "verbose", True, "Set 'verbose' mode."),
    "quiet": ("conversation", "verbose", False, "Set 'quiet' mode."),
    "noformat": ("conversation", "format", None, "Disabled format."),
    "nothink": ("conversation", "think", False, "Set 'nothink' mode."),
}
SETTERS: dict[str, Command] = {
    "parameter": _set_parameter,
    "system": _set_system,
    "format": _set_format,
    "think": _set_think,
}
COMMANDS: dict[str, Command] = {
    "/?": _help,
    "/help": _help,
    "/bye": _bye,
    "/exit": _bye,
    "/clear": _clear,
    "/load": _load,
    "/model": _load,
    "/save": _save,
    "/set": _set,
    "/show": showing.show,
    "/list": showing.list_models,
    "/ls": showing.list_models,
    "/regen": _regen,
    "/read": _read,
    "/stats": showing.show_statistics,
    "/experts": showing.show_experts,
}


def completions() -> list[str]:
    """What Tab offers."""
    sets = sorted([*SWITCHES, *SETTERS])
    return [
        *COMMANDS,
        *(f"/set {what}" for what in sets),
        *(f"/show {part}" for part in showing.PARTS),
        *(f"/? {topic}" for topic in ("set", "show", "shortcuts")),
    ]
