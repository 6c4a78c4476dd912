"""What the chat's commands show: the model, its parameters, figures, and the picture of its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moegguf.chat import help as texts
from moegguf.terminal.messages import say

if TYPE_CHECKING:
    from moegguf.chat.chat import Chat
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.llama import Llama
    from moegguf.models.recipe import Recipe

NAME_WIDTH = 30  # of a parameter's name, as in Ollama


def show(chat: Chat, part: str) -> None:
    """/show and one of PARTS."""
    if not part:
        say(texts.SHOW)
    elif part in PARTS:
        PARTS[part](chat)
    else:
        say(f"Unknown command '/show {part}'. Type /? for help")


def _info(chat: Chat) -> None:
    from moegguf.terminal.facts import entry_facts, show_facts
    from moegguf.terminal.tables import print_show

    print_show(show_facts(chat.llm.layout) | entry_facts(chat.conversation.entry))


def _license(chat: Chat) -> None:
    say(chat.conversation.entry.license or "No license was specified for this model.")


def _modelfile(chat: Chat) -> None:
    from moegguf.models.modelfile import render

    say(render(chat.conversation.entry))


def _parameters(chat: Chat) -> None:
    from moegguf.models.modelfile import parameter_lines

    conversation = chat.conversation
    lines = ["Model defined parameters:"]
    own = [f"  {line}" for line in parameter_lines(conversation.entry.parameters)]
    lines += own or ["  No additional parameters were specified for this model."]
    if user := parameter_lines({**conversation.given, **conversation.parameters}):
        lines += ["", "User defined parameters:", *(f"  {line}" for line in user)]
    say("\n".join([*lines, ""]))


def _system(chat: Chat) -> None:
    text = chat.conversation.system_text
    say(f"{text}\n" if text else "No system message was specified for this model.")


def _template(chat: Chat) -> None:
    template = chat.conversation.entry.template or chat.llm.layout.chat_template
    say(template or "No prompt template was specified for this model.")


PARTS: dict[str, Callable[[Chat], None]] = {
    "info": _info,
    "license": _license,
    "modelfile": _modelfile,
    "parameters": _parameters,
    "system": _system,
    "template": _template,
}


def recipe(conversation: Conversation) -> Recipe:
    """The conversation as a model of its own: its files, what was set, what was said."""
    from moegguf.models.recipe import Recipe

    return Recipe(
        from_=conversation.entry.name,
        parameters={**conversation.entry.parameters, **conversation.parameters},
        system=conversation.system_text or None,
        messages=tuple(conversation.said()),
        license=conversation.entry.license,
    )


def list_models(_chat: Chat, prefix: str) -> None:
    """The models on this machine, as `moegguf list` shows them."""
    from moegguf.models.catalog import Catalog
    from moegguf.terminal.tables import print_entries

    print_entries(Catalog().entries(prefix))


def show_statistics(chat: Chat, _rest: str) -> None:
    """Figures of the last answer, and of all of them."""
    from moegguf.terminal.statistics import statistics, totals

    if chat.conversation.last is None:
        say("There is no answer yet.")
        return
    lines = statistics(chat.conversation.last, 0.0, chat.llm.decisions())
    say("\n".join([*lines, *totals(chat.llm.stats())]))


def show_experts(chat: Chat, _rest: str) -> None:
    """Which experts are in memory, and which the last answer used."""
    from rich.console import Console

    from moegguf.terminal.heatmap import heatmap, legend

    session = chat.llm.session
    if session is None:
        say("This model has no experts.")
        return
    store, layers = session.store, [layer.il for layer in session.layout.layers]
    state, (uses, loads) = store.residency()[layers], store.activity()
    used_before, loaded_before = chat.activity_before
    console = Console(stderr=True, highlight=False)
    width = console.width - 1
    console.print(
        f"{chat.conversation.entry.name}: layers down, experts across{_shared(state.shape[1], width, layers)}"
    )
    console.print(heatmap(state, (uses - used_before)[layers], (loads - loaded_before)[layers], layers, width=width))
    console.print(legend(width))
    say(experts_line(chat.llm, int((state == 2).sum())))
    if not chat.watching and not uses.any():
        say("Uses are counted from the next answer on.")
    chat.watching = True


def _shared(n_expert: int, width: int, layers: list[int]) -> str:
    from moegguf.terminal.heatmap import LEAST_COLUMNS, joined

    n = joined(n_expert, max(LEAST_COLUMNS, width - len(str(max(layers))) - 1))
    return f", {n} to a letter" if n > 1 else ""


def experts_line(llm: Llama, there: int) -> str:
    """How many experts are in memory, and how often they were found there."""
    stats = llm.stats()
    return f"{there:,} of {stats.n_experts:,} experts in memory; found there {stats.hit_rate:.1%} of the time"
