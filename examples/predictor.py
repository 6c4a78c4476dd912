"""A custom predictor. The store prefetches the experts that the predictor expects.

Prints the number of prefetched experts, and how many of them were used. The watchdog,
which stops prefetching if it saves no time, is off here, so that experts are always
prefetched. `moegguf trace simulate` accepts the class, too.
"""

import numpy as np

from moegguf import Llama
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, RoutingEvent


class Followers(Predictor):
    """Predicts that the next layer will use the experts that have followed this layer's
    experts most often so far."""

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=1)  # layers ahead
        self._counts: Float32s = np.zeros((*shape.table, shape.n_expert), np.float32)
        self._before = np.zeros((1, shape.n_expert_used), np.int32)

    def observe(self, event: RoutingEvent) -> None:
        """Counts which experts of this layer follow which experts of the previous
        layer. The last layer of a prompt is computed for fewer tokens, so only the last
        tokens that both layers computed are compared."""
        n = min(len(event.expert_ids), len(self._before))
        now = event.expert_ids.copy()
        np.add.at(
            self._counts[event.il],
            (self._before[-n:, :, np.newaxis], now[-n:, np.newaxis]),
            1,
        )
        self._before = now

    def predict(self, il: int, distance: int) -> Float32s:
        """Returns a probability for each expert of layer `il`: (n_expert,)."""
        followed = self._counts[il, self._before[-1]].sum(axis=0)
        return followed * self.shape.n_expert_used / max(1, followed.sum())


def main() -> None:
    own = f"{__file__}:Followers"
    always = PrefetchOptions(watchdog=False)
    with Llama(
        "demo", expert_cache="30%", predictor=own, prefetch=always, verbose=False
    ) as llm:
        llm("An expert is", temperature=0, max_tokens=150)
        stats = llm.stats()
        print(f"predictor: {llm.decisions()['predictor']}")
    used = stats.prefetch_useful + stats.prefetch_late
    print(
        f"{stats.prefetch_started} experts were fetched ahead, {used} of them were used."
    )


if __name__ == "__main__":
    main()
