"""The chat's commands that show something: the model, its parameters, statistics, the map of its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moegguf.chat import help as help_texts
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.session import ChatSession
    from moegguf.engine.llama import Llama
    from moegguf.models.recipe import Recipe


def show(session: ChatSession, part: str) -> None:
    """/show and one of PARTS."""
    if not part:
        print_message(help_texts.SHOW)
    elif part in PARTS:
        PARTS[part](session)
    else:
        print_message(f"Unknown command '/show {part}'. Type /? for help")


def _info(session: ChatSession) -> None:
    from moegguf.terminal.facts import entry_facts, layout_facts, local_model
    from moegguf.terminal.tables import print_model

    entry = session.conversation.entry
    print_model(layout_facts(local_model(entry)) | entry_facts(entry))


def _license(session: ChatSession) -> None:
    print_message(session.conversation.entry.license or "No license was specified for this model.")


def _modelfile(session: ChatSession) -> None:
    from moegguf.models.modelfile import render

    print_message(render(session.conversation.entry))


def _parameters(session: ChatSession) -> None:
    from moegguf.models.modelfile import parameter_lines

    conversation = session.conversation
    lines = ["Model defined parameters:"]
    own = [f"  {line}" for line in parameter_lines(conversation.entry.parameters)]
    lines += own or ["  No additional parameters were specified for this model."]
    if user := parameter_lines({**conversation.initial_parameters, **conversation.parameters}):
        lines += ["", "User defined parameters:", *(f"  {line}" for line in user)]
    print_message("\n".join([*lines, ""]))


def _system(session: ChatSession) -> None:
    text = session.conversation.system_text
    print_message(f"{text}\n" if text else "No system message was specified for this model.")


def _template(session: ChatSession) -> None:
    template = session.conversation.entry.template or session.llm.layout.chat_template
    print_message(template or "No prompt template was specified for this model.")


PARTS: dict[str, Callable[[ChatSession], None]] = {
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


def list_models(_session: ChatSession, prefix: str) -> None:
    """The models on this machine, as `moegguf list` shows them."""
    from moegguf.models.catalog import Catalog
    from moegguf.terminal.tables import print_model_list

    print_model_list(Catalog().entries(prefix))


def show_statistics(session: ChatSession, _rest: str) -> None:
    """Statistics of the last answer, and since the model was loaded."""
    from moegguf.terminal.statistics import statistics, total_lines

    if session.conversation.last_timing is None:
        print_message("There is no answer yet.")
        return
    lines = statistics(session.conversation.last_timing, 0.0, session.llm.decisions())
    print_message("\n".join([*lines, *total_lines(session.llm.stats())]))


def show_experts(session: ChatSession, _rest: str) -> None:
    """A map of the experts: which are in memory, and which the last answer used."""
    from rich.console import Console

    from moegguf.terminal.heatmap import heatmap, legend

    loaded = session.llm.session
    if loaded is None:
        print_message("This model has no experts.")
        return
    store, layers = loaded.store, [layer.il for layer in loaded.layout.layers]
    state, (uses, loads) = store.residency()[layers], store.activity()
    used_before, loaded_before = session.activity_before
    console = Console(stderr=True, highlight=False)
    width = console.width - 1
    console.print(
        f"{session.conversation.entry.name}: layers down, experts across{_grouping(state.shape[1], width, layers)}"
    )
    console.print(heatmap(state, (uses - used_before)[layers], (loads - loaded_before)[layers], layers, width=width))
    console.print(legend(width))
    print_message(experts_text(session.llm, int((state == 2).sum())))
    if not session.counts_uses and not uses.any():
        print_message("Uses are counted from the next answer on.")
    session.counts_uses = True


def _grouping(n_expert: int, width: int, layers: list[int]) -> str:
    from moegguf.terminal.heatmap import MIN_COLUMNS, group_size

    n = group_size(n_expert, max(MIN_COLUMNS, width - len(str(max(layers))) - 1))
    return f", {n} to a letter" if n > 1 else ""


def experts_text(llm: Llama, n_resident: int) -> str:
    """How many experts are in memory, and the hit rate since the model was loaded."""
    stats = llm.stats()
    return f"{n_resident:,} of {stats.n_experts:,} experts in memory; hit rate {stats.hit_rate:.1%}"
