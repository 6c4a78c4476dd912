"""The chat's commands that show something: the model, its parameters, statistics, the map of its experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from moegguf.generate.images import text_of
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.session import ChatSession
    from moegguf.models.recipe import Recipe


class Row(NamedTuple):
    """A command, or a part of one, in a table {word: row} and in the help of that: without a text it is not there."""

    run: Callable[[ChatSession, str], None]
    help: str = ""
    usage: str = ""  # in place of the word


def help_of(rows: Mapping[str, Row], width: int, before: str = "") -> str:
    """The help of a table; `width`: of its left column."""
    lines = (f"  {before + (row.usage or word):<{width}}{row.help}" for word, row in rows.items() if row.help)
    return "\n".join(["Available Commands:", *lines, ""])


def show(session: ChatSession, part: str) -> None:
    """/show and one of PARTS."""
    if not part:
        print_message(show_help())
    elif part in PARTS:
        PARTS[part].run(session, "")
    else:
        print_message(f"Unknown command '/show {part}'. Type /? for help")


def show_help() -> str:
    """The help of /show."""
    return help_of(PARTS, 19, "/show ")


def _info(session: ChatSession, _rest: str) -> None:
    session.model.connection.print_info(session.conversation.entry)


def _license(session: ChatSession, _rest: str) -> None:
    print_message(session.conversation.entry.license or "No license was specified for this model.")


def _modelfile(session: ChatSession, _rest: str) -> None:
    print_message(session.model.connection.modelfile(session.conversation.entry))


def _parameters(session: ChatSession, _rest: str) -> None:
    from moegguf.models.details import parameters_of
    from moegguf.models.modelfile import parameter_lines

    conversation = session.conversation
    lines = ["Model defined parameters:"]
    own = [f"  {line}" for line in parameter_lines(parameters_of(conversation.entry))]
    lines += own or ["  No additional parameters were specified for this model."]
    if user := parameter_lines(conversation.user_parameters()):
        lines += ["", "User defined parameters:", *(f"  {line}" for line in user)]
    print_message("\n".join([*lines, ""]))


def _system(session: ChatSession, _rest: str) -> None:
    text = session.conversation.system_text
    print_message(f"{text}\n" if text else "No system message was specified for this model.")


def _template(session: ChatSession, _rest: str) -> None:
    print_message(
        session.model.connection.details(session.conversation.entry).template
        or "No prompt template was specified for this model."
    )


PARTS: dict[str, Row] = {
    "info": Row(_info, "Show details for this model"),
    "license": Row(_license, "Show model license"),
    "modelfile": Row(_modelfile, "Show Modelfile for this model"),
    "parameters": Row(_parameters, "Show parameters for this model"),
    "system": Row(_system, "Show system message"),
    "template": Row(_template, "Show prompt template"),
}


def recipe(conversation: Conversation) -> Recipe:
    """The conversation as a new model: files, settings and messages, without their images."""
    from moegguf.models.recipe import Recipe

    return Recipe(
        from_=conversation.entry.name,
        parameters={**conversation.entry.parameters, **conversation.parameters},
        system=conversation.system_text or None,
        messages=tuple({**m, "content": text_of(m["content"])} for m in conversation.unmarked_messages()),
        license=conversation.entry.license,
    )


def list_models(session: ChatSession, prefix: str) -> None:
    """The models that /load takes."""
    from moegguf.terminal.tables import print_model_list

    print_model_list(session.model.connection.names.entries(prefix))


def show_statistics(session: ChatSession, _rest: str) -> None:
    """Statistics of the last answer, and since the model was loaded."""
    if session.conversation.last_timing is None:
        print_message("There is no answer yet.")
        return
    lines = session.model.statistics(session.conversation.last_timing, with_load=False)
    print_message("\n".join([*lines, *session.model.totals()]))


def show_experts(session: ChatSession, _rest: str) -> None:
    """A map of the experts."""
    session.model.print_experts()
