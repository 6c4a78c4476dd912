"""A predictor of your own, whose experts are fetched ahead, in a running model and in a simulation of the same routing.

Prints how many experts were fetched ahead, and how many of them were used: live, and simulated, where all are in time.
"""

from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from moegguf import Llama
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, RoutingEvent
from moegguf.trace.analysis import SimOptions, TraceAnalysis


class LastToken(Predictor):
    """Predicts for each layer the experts that the last token used there."""

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=2)  # layers ahead
        self._last: Float32s = np.zeros(shape.table, np.float32)

    def observe(self, event: RoutingEvent) -> None:
        """Notes the experts of the last token of a routing event."""
        self._last[event.il] = 0
        self._last[event.il, event.expert_ids[-1]] = 1

    def predict(self, il: int, distance: int) -> Float32s:
        """Returns a probability for each expert of layer `il`."""
        return self._last[il] / (1 + distance)


def main(trace: Path) -> None:
    own = f"{__file__}:LastToken"
    always = PrefetchOptions(watchdog=False)  # which ends prefetching where it saves no time
    with Llama("demo", expert_cache="30%", predictor=own, prefetch=always, trace=trace, verbose=False) as llm:
        llm("An expert is", temperature=0, max_tokens=60)
        live = llm.stats()
    print(f"live: {live.prefetch_started} fetched ahead, {live.prefetch_useful} of them used in time")
    row, _ = TraceAnalysis.open(trace).simulate(["lru"], [own], [0.3], SimOptions(always))
    n = row.simulated.counters if row.simulated else {}
    print(f"simulated: {n['prefetch_started']} fetched ahead, {n['prefetch_useful']} of them used")


if __name__ == "__main__":
    with NamedTemporaryFile(suffix=".npz") as file:
        main(Path(file.name))
