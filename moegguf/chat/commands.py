"""The chat's commands, which begin with a slash: what each does, and the tables of them. None reaches the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from moegguf.chat import help as help_texts
from moegguf.chat.conversation import parse_parameter
from moegguf.chat.reader import QUOTES, unquoted
from moegguf.chat.session import print_error
from moegguf.errors import MoeggufError, OptionError
from moegguf.generate.images import text_of
from moegguf.generate.request import THINK_LEVELS
from moegguf.terminal.loading import parse_format
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.session import ChatSession

Command = Callable[["ChatSession", str], None]

MAX_READ_BYTES = 4 << 20

_WORD = re.compile(r'"[^"]*"|\'[^\']*\'|\S+')


class Row(NamedTuple):
    """A command, or a part of one, in a table {word: row} and in the help of that: without a text it is not there."""

    run: Command
    help: str = ""
    usage: str = ""  # in place of the word


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


def _help_of(rows: Mapping[str, Row], width: int, before: str = "") -> str:
    """The help of a table; `width`: of its left column."""
    lines = (f"  {before + (row.usage or word):<{width}}{row.help}" for word, row in rows.items() if row.help)
    return "\n".join(["Available Commands:", *lines, ""])


def _help(_session: ChatSession, topic: str) -> None:
    texts: dict[str, Callable[[], str]] = {"set": _set_help, "show": _show_help}
    texts |= dict.fromkeys(("shortcut", "shortcuts"), lambda: help_texts.SHORTCUTS)
    print_message(texts.get(topic.removeprefix("/"), lambda: _help_of(COMMANDS, 16) + help_texts.MORE)())


def _set_help() -> str:
    return _help_of(SETTINGS, 23, "/set ")


def _show_help() -> str:
    return _help_of(PARTS, 19, "/show ")


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
    """Stores the conversation as a new model: files, settings and messages, without their images."""
    from moegguf.models.recipe import Recipe

    if len(name.split()) != 1:
        print_message("Usage:\n  /save <modelname>")
        return
    conversation = session.conversation
    recipe = Recipe(
        from_=conversation.entry.name,
        parameters={**conversation.entry.parameters, **conversation.parameters},
        system=conversation.system_text or None,
        messages=tuple({**m, "content": text_of(m["content"])} for m in conversation.unmarked_messages()),
        license=conversation.entry.license,
    )
    session.model.connection.names.create(name, recipe)
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


def _list_models(session: ChatSession, prefix: str) -> None:
    from moegguf.terminal.tables import print_model_list

    print_model_list(session.model.connection.names.entries(prefix))


def _statistics(session: ChatSession, _rest: str) -> None:
    if session.conversation.last_timing is None:
        print_message("There is no answer yet.")
        return
    lines = session.model.statistics(session.conversation.last_timing, with_load=False)
    print_message("\n".join([*lines, *session.model.totals()]))


def _show(session: ChatSession, part: str) -> None:
    if not part:
        print_message(_show_help())
    elif part in PARTS:
        PARTS[part].run(session, "")
    else:
        print_message(f"Unknown command '/show {part}'. Type /? for help")


def _show_text(text: Callable[[ChatSession], str | None], what: str) -> Command:
    """Shows a text of the model, or says that there is none of `what`."""

    def show(session: ChatSession, _rest: str) -> None:
        print_message(text(session) or f"No {what} was specified for this model.")

    return show


def _show_parameters(session: ChatSession, _rest: str) -> None:
    from moegguf.models.details import parameters_of
    from moegguf.models.recipe import parameter_lines

    conversation = session.conversation
    lines = ["Model defined parameters:"]
    own = [f"  {line}" for line in parameter_lines(parameters_of(conversation.entry))]
    lines += own or ["  No additional parameters were specified for this model."]
    if user := parameter_lines(conversation.user_parameters()):
        lines += ["", "User defined parameters:", *(f"  {line}" for line in user)]
    print_message("\n".join([*lines, ""]))


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
PARTS = {
    "info": Row(lambda s, _: s.model.connection.print_info(s.conversation.entry), "Show details for this model"),
    "license": Row(_show_text(lambda s: s.conversation.entry.license, "license"), "Show model license"),
    "modelfile": Row(
        lambda s, _: print_message(s.model.connection.modelfile(s.conversation.entry)), "Show Modelfile for this model"
    ),
    "parameters": Row(_show_parameters, "Show parameters for this model"),
    "system": Row(
        _show_text(lambda s: (text := s.conversation.system_text) and f"{text}\n", "system message"),
        "Show system message",
    ),
    "template": Row(
        _show_text(lambda s: s.model.connection.details(s.conversation.entry).template, "prompt template"),
        "Show prompt template",
    ),
}
COMMANDS = {
    "/set": Row(_set, "Set session variables"),
    "/show": Row(_show, "Show model information"),
    "/load": Row(_load, "Load a session or model", "/load <model>"),
    "/model": Row(_load),
    "/save": Row(_save, "Save your current session", "/save <model>"),
    "/clear": Row(_clear, "Clear session context"),
    "/list": Row(_list_models, "List the models on this machine"),
    "/ls": Row(_list_models),
    "/regen": Row(_regen, "Answer the last message again"),
    "/read": Row(_read, "Put a file's text before the next message", "/read <file>"),
    "/stats": Row(_statistics, "Figures of the last answer"),
    "/experts": Row(lambda s, _: s.model.print_experts(), "Show which experts are in memory and used"),
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
        *(f"/show {part}" for part in PARTS),
        *(f"/? {topic}" for topic in ("set", "show", "shortcuts")),
    ]
