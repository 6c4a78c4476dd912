"""A model that is loaded in the chat's own process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moegguf.errors import MoeggufError
from moegguf.generate.answer import Answer
from moegguf.models.entry import ModelEntry
from moegguf.terminal.loading import LoadOptions, load
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.llama import Llama
    from moegguf.generate.request import Timing
    from moegguf.models.recipe import Recipe
    from moegguf.terminal.progress import Spinner


class LocalModel:
    """A `ChatModel` of this machine's catalog; `load` comes first."""

    llm: Llama

    def __init__(self) -> None:
        self._loaded: tuple[ModelEntry, LoadOptions] | None = None
        self._load_s = 0.0  # of the load before the last answer
        self._new_load_s = 0.0  # of a load since then
        self._activity_before: tuple[Any, Any] = (0, 0)  # (uses, loads) before the last answer
        self._counts_uses = False

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images."""
        return self.llm.reads_images

    def find(self, name: str) -> ModelEntry:
        """A model of this machine."""
        from moegguf.models.catalog import Catalog

        return Catalog().find(name)

    def load(self, conversation: Conversation, spinner: Spinner) -> None:
        """Closes the present model first, since memory may not hold two; loads it again when the new one fails."""
        entry, before = conversation.entry, self._loaded
        assert isinstance(entry, ModelEntry)  # `find` returns no other
        self.close()
        try:
            self._open(entry, conversation.load_options(), spinner)
        except BaseException:  # also an interrupt: the chat goes on with the model before
            conversation.reset_load_parameters()
            if before is not None:
                self._open(*before, spinner)
            raise

    def _open(self, entry: ModelEntry, options: LoadOptions, spinner: Spinner) -> None:
        self.llm, self._new_load_s = load(entry, options, spinner)
        self._loaded = entry, options
        self._activity_before = (0, 0)

    def prepare(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the model again when a parameter asks for another context, cache or number of threads."""
        if self._loaded is None or conversation.load_options() != self._loaded[1]:
            self.load(conversation, spinner)

    def answer(self, conversation: Conversation) -> Answer:
        """The answer to the last message. Raises what makes it impossible: ContextError, SchemaError, ..."""
        self._load_s, self._new_load_s = self._new_load_s, 0.0
        if self.llm.session is not None:
            if self._counts_uses:  # off before the first /experts: counting slows a fully resident pool
                self.llm.session.store.watch(True)
            self._activity_before = self.llm.session.store.activity()
        return Answer(self.llm, conversation.request())

    def check_parameter(self, name: str) -> None:
        """Every parameter has its effect here."""

    def facts(self) -> list[str]:
        """Context size and number of expert slots."""
        stats = self.llm.stats()
        facts = [f"context of {self.llm.n_ctx():,} tokens"]
        if self.llm.reads_images:
            facts.append("reads images")
        if stats.n_experts:
            first, n_ram = stats.tiers[0].n_slots, sum(tier.n_slots for tier in stats.tiers[1:])
            where = " in VRAM" * stats.in_vram + f", {n_ram:,} in RAM" * (n_ram > 0)
            facts.append(f"slots for {first:,} of {stats.n_experts:,} experts{where}")
        if not stats.exact:
            facts.append("not exact: the CPU computes misses")
        return facts

    def statistics(self, timing: Timing, *, with_load: bool) -> list[str]:
        """Lines about the last answer, and about a load before it."""
        from moegguf.terminal.statistics import statistics

        placed = self.llm.plan.placement
        load_s = self._load_s if with_load else 0.0
        return statistics(timing, load_s, self.llm.decisions(), placed.chosen if placed else None)

    def totals(self) -> list[str]:
        """Lines about all answers since the load."""
        from moegguf.terminal.statistics import total_lines

        return total_lines(self.llm.stats())

    @property
    def _entry(self) -> ModelEntry:
        assert self._loaded is not None
        return self._loaded[0]

    def thinks(self) -> bool:
        """Whether the model supports thinking; one whose header cannot be read may."""
        from moegguf.models.details import details

        with suppress(MoeggufError):
            return "thinking" in details(self._entry).capabilities
        return True

    def print_info(self) -> None:
        """The table of `moegguf show`."""
        from moegguf.terminal.facts import entry_facts, layout_facts, local_model
        from moegguf.terminal.tables import print_model

        print_model(layout_facts(local_model(self._entry)) | entry_facts(self._entry))

    def modelfile(self) -> str:
        """The Modelfile that makes the model."""
        from moegguf.models.catalog import Catalog

        return Catalog().modelfile(self._entry)

    def template(self) -> str:
        """The name's own template, or that of the file."""
        return self._entry.template or self.llm.layout.chat_template or ""

    def print_experts(self) -> None:
        """A map of the experts: which are in memory, and which the last answer used."""
        from rich.console import Console

        from moegguf.terminal.heatmap import heatmap, legend, tiers_line
        from moegguf.terminal.statistics import staged

        loaded = self.llm.session
        if loaded is None:
            print_message("This model has no experts.")
            return
        store, layers = loaded.store, [layer.il for layer in self.llm.layout.layers]
        state, (uses, loads), stats = loaded.places()[layers], store.activity(), self.llm.stats()
        used_before, loaded_before = self._activity_before
        console = Console(stderr=True, highlight=False)
        width = console.width - 1
        grouping = _grouping(state.shape[1], width, layers)
        console.print(f"{self._entry.name}: layers down, experts across{grouping}")
        used, came = (uses - used_before)[layers], (loads - loaded_before)[layers]
        console.print(heatmap(state, used, came, layers, width=width, vram=stats.in_vram))
        console.print(legend(width, stats.in_vram))
        print_message(f"{tiers_line(state, stats.in_vram)}; hit rate {stats.hit_rate:.1%}")
        if stats.staging_bytes:
            print_message(f"Prompts staged since load: {staged(stats)}.")
        if not stats.exact:
            print_message(f"Not exact: the CPU has computed {stats.misses_computed} of {stats.misses} misses.")
        if not self._counts_uses and not uses.any():
            print_message("Uses are counted from the next answer on.")
        self._counts_uses = True

    def print_list(self, prefix: str) -> None:
        """The models on this machine, as `moegguf list` shows them."""
        from moegguf.models.catalog import Catalog
        from moegguf.terminal.tables import print_model_list

        print_model_list(Catalog().entries(prefix))

    def create(self, name: str, recipe: Recipe) -> None:
        """Stores a new model in this machine's catalog."""
        from moegguf.models.catalog import Catalog

        Catalog().create(name, recipe)

    def close(self) -> None:
        """Closes the model, if there is one."""
        if self._loaded is not None:
            self.llm.close()
            self._loaded = None


def _grouping(n_expert: int, width: int, layers: list[int]) -> str:
    from moegguf.terminal.heatmap import MIN_COLUMNS, group_size

    n = group_size(n_expert, max(MIN_COLUMNS, width - len(str(max(layers))) - 1))
    return f", {n} to a letter" if n > 1 else ""
