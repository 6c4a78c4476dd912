"""The chat's commands that show something: the model, its parameters, statistics, the map of its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moegguf.chat import help as help_texts
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.chat import Chat
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.llama import Llama
    from moegguf.models.recipe import Recipe

NAME_WIDTH = 30  # of a parameter's name, as in Ollama


def show(chat: Chat, part: str) -> None:
    """/show and one of PARTS."""
    if not part:
        print_message(help_texts.SHOW)
    elif part in PARTS:
        PARTS[part](chat)
    else:
        print_message(f"Unknown command '/show {part}'. Type /? for help")


def _info(chat: Chat) -> None:
    from moegguf.terminal.facts import entry_facts, layout_facts
    from moegguf.terminal.tables import print_model

    print_model(layout_facts(chat.llm.layout) | entry_facts(chat.conversation.entry))


def _license(chat: Chat) -> None:
    print_message(chat.conversation.entry.license or "No license was specified for this model.")


def _modelfile(chat: Chat) -> None:
    from moegguf.models.modelfile import render

    print_message(render(chat.conversation.entry))


def _parameters(chat: Chat) -> None:
    from moegguf.models.modelfile import parameter_lines

    conversation = chat.conversation
    lines = ["Model defined parameters:"]
    own = [f"  {line}" for line in parameter_lines(conversation.entry.parameters)]
    lines += own or ["  No additional parameters were specified for this model."]
    if user := parameter_lines({**conversation.initial_parameters, **conversation.parameters}):
        lines += ["", "User defined parameters:", *(f"  {line}" for line in user)]
    print_message("\n".join([*lines, ""]))


def _system(chat: Chat) -> None:
    text = chat.conversation.system_text
    print_message(f"{text}\n" if text else "No system message was specified for this model.")


def _template(chat: Chat) -> None:
    template = chat.conversation.entry.template or chat.llm.layout.chat_template
    print_message(template or "No prompt template was specified for this model.")


PARTS: dict[str, Callable[[Chat], None]] = {
    "info": _info,
    "license": _license,
    "modelfile": _modelfile,
    "parameters": _parameters,
    "system": _system,
    "template": _template,
}


def recipe(conversation: Conversation) -> Recipe:
    """The conversation as a new model: files, settings and messages."""
    from moegguf.models.recipe import Recipe

    return Recipe(
        from_=conversation.entry.name,
        parameters={**conversation.entry.parameters, **conversation.parameters},
        system=conversation.system_text or None,
        messages=tuple(conversation.unmarked_messages()),
        license=conversation.entry.license,
    )


def list_models(_chat: Chat, prefix: str) -> None:
    """The models on this machine, as `moegguf list` shows them."""
    from moegguf.models.catalog import Catalog
    from moegguf.terminal.tables import print_model_list

    print_model_list(Catalog().entries(prefix))


def show_statistics(chat: Chat, _rest: str) -> None:
    """Statistics of the last answer, and since the model was loaded."""
    from moegguf.terminal.statistics import statistics, total_lines

    if chat.conversation.last_timing is None:
        print_message("There is no answer yet.")
        return
    lines = statistics(chat.conversation.last_timing, 0.0, chat.llm.decisions())
    print_message("\n".join([*lines, *total_lines(chat.llm.stats())]))


def show_experts(chat: Chat, _rest: str) -> None:
    """A map of the experts: which are in memory, and which the last answer used."""
    from rich.console import Console

    from moegguf.terminal.heatmap import heatmap, legend

    session = chat.llm.session
    if session is None:
        print_message("This model has no experts.")
        return
    store, layers = session.store, [layer.il for layer in session.layout.layers]
    state, (uses, loads) = store.residency()[layers], store.activity()
    used_before, loaded_before = chat.activity_before
    console = Console(stderr=True, highlight=False)
    width = console.width - 1
    console.print(
        f"{chat.conversation.entry.name}: layers down, experts across{_grouping(state.shape[1], width, layers)}"
    )
    console.print(heatmap(state, (uses - used_before)[layers], (loads - loaded_before)[layers], layers, width=width))
    console.print(legend(width))
    print_message(experts_text(chat.llm, int((state == 2).sum())))
    if not chat.counts_uses and not uses.any():
        print_message("Uses are counted from the next answer on.")
    chat.counts_uses = True


def _grouping(n_expert: int, width: int, layers: list[int]) -> str:
    from moegguf.terminal.heatmap import MIN_COLUMNS, group_size

    n = group_size(n_expert, max(MIN_COLUMNS, width - len(str(max(layers))) - 1))
    return f", {n} to a letter" if n > 1 else ""


def experts_text(llm: Llama, n_resident: int) -> str:
    """How many experts are in memory, and the hit rate since the model was loaded."""
    stats = llm.stats()
    return f"{n_resident:,} of {stats.n_experts:,} experts in memory; hit rate {stats.hit_rate:.1%}"
