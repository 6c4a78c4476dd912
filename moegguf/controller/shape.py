"""The shape of a model's routing: numbers of layers and experts, and the sizes that
predictors and prefetching need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moegguf.gguf.experts import ExpertLayout


@dataclass(frozen=True)
class MoeShape:
    """The shape of a model's routing.

    Tables over experts are (n_layer, n_expert), with one row for each layer of the
    model. Rows of layers without experts are unused. Distances between layers count
    only layers with experts.
    """

    n_layer: int
    n_expert: int
    n_expert_used: int
    layers: tuple[int, ...]  # numbers of the layers with experts, ascending
    n_embd: int = 0
    n_vocab: int = 0
    expert_bytes: int = 1  # average size of one expert in the file, in bytes

    @classmethod
    def of(cls, layout: ExpertLayout) -> MoeShape:
        """Returns the shape of the model with this layout."""
        return cls(
            n_layer=layout.n_layer,
            n_expert=layout.n_expert,
            n_expert_used=layout.n_expert_used,
            layers=tuple(layer.il for layer in layout.layers),
            n_embd=layout.hparams.n_embd,
            n_vocab=layout.n_vocab,
            expert_bytes=max(1, layout.expert_bytes // max(1, layout.n_expert_total)),
        )

    @property
    def n_moe_layer(self) -> int:
        """The number of layers with experts."""
        return len(self.layers)

    @property
    def table(self) -> tuple[int, int]:
        """The shape (n_layer, n_expert) of a table over all experts."""
        return self.n_layer, self.n_expert

    @cached_property
    def row_of(self) -> dict[int, int]:
        """{layer number: position of the layer among the layers with experts}."""
        return {il: row for row, il in enumerate(self.layers)}
