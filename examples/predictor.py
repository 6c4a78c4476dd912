"""A predictor of your own, whose experts are fetched ahead.

Prints how many experts were fetched ahead and how many of them were used. The watchdog, which ends prefetching where it
saves no time, is off here, so that there is something to see.
"""

import numpy as np

from moegguf import Llama, read_layout
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.models.catalog import find_model
from moegguf.native.events import Float32s, RoutingEvent


class LastToken(Predictor):
    """Predicts for each layer the experts that the last token used there."""

    name = "last-token"

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=2)
        self._last: Float32s = np.zeros(shape.table, np.float32)

    def observe(self, event: RoutingEvent) -> None:
        """Notes the experts of the last token of a routing event."""
        self._last[event.il] = 0
        self._last[event.il, event.expert_ids[-1]] = 1

    def predict(self, il: int, distance: int) -> Float32s:
        """Returns a probability for each expert of layer `il`."""
        return self._last[il] / (1 + distance)


def main() -> None:
    path = find_model("demo")
    predictor = LastToken(MoeShape.of(read_layout(path)))
    always = PrefetchOptions(watchdog=False)
    with Llama(path, n_ctx=512, expert_cache="30%", predictor=predictor, prefetch=always, verbose=False) as llm:
        llm.create_chat_completion([{"role": "user", "content": "Who are you?"}], temperature=0, max_tokens=60)
        stats = llm.stats()
        print(f"predictor: {llm.decisions()['predictor']}")
    print(f"{stats.prefetch_started} experts were fetched ahead, {stats.prefetch_useful} of them were used.")


if __name__ == "__main__":
    main()
