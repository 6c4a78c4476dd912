"""Learns the arrays that strategies need from one trace of a model, and saves them next
to the model or in the user's folder.

Some requests are left out of the training. The simulator replays these requests with a
strategy to measure two figures: the share of the predicted experts that the router
chose, and the hit rate. The share is saved with the share of a predictor that always
predicts the most used experts, and the hit rate with the hit rate of LRU alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from moegguf.controller import weights as weights_file
from moegguf.controller.artifacts import Artifacts
from moegguf.controller.collection import Eamc
from moegguf.controller.policies import make_policy
from moegguf.controller.predictors import LEARNED, LEARNT_FOR, UNTRAINED
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.predictors.networks import MLP, SKIP
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.strategies import Strategy, find_strategy
from moegguf.controller.weights import Weights
from moegguf.errors import ModelFormatError, OptionError, StorageError
from moegguf.learning import expert_mlp, mlp, routing_path
from moegguf.learning.counts import COUNTED, collect
from moegguf.learning.fitting import Report, no_report
from moegguf.learning.splitting import held_out
from moegguf.trace.simulate import SimOptions, SimResult, Simulation, slots_of
from moegguf.trace.trace import Trace

LEARNERS = tuple(dict.fromkeys(LEARNT_FOR.values()))
"""Names of the strategies for which arrays can be learned."""

TRAINERS: dict[str, ModuleType] = {
    MLP: mlp,
    "expert-mlp": expert_mlp,
    "routing-path": routing_path,
}
"""{predictor: the module that trains it}. Each module has a function `train` and a
class `Options`, whose fields are saved as facts."""

BRIEF: dict[str, Any] = {
    MLP: mlp.Options(windows=(1, 2, 4), n_hidden=256, epochs=10, batch=128),
    "expert-mlp": expert_mlp.Options(
        hidden=(512, 256, 128, 64, 32, 16),
        epochs=20,
        batch=128,
        lr=3e-3,
        patience=4,
        most_samples=1 << 15,
    ),
    "routing-path": routing_path.Options(epochs=24, patience=3),
}
"""{predictor: training options with which a few thousand tokens are learned in minutes
on two processors}"""

EAMC = "eamc"
LEAST_REQUESTS = 4
HELD_OUT_SHARE = 0.2
# Share of all experts that have slots while strategies are evaluated.
JUDGED_SHARE = 0.25
LAYER_US = 1000.0  # compute time of a layer in the simulation, in microseconds
LAYER_EXPERTS = 2  # number of experts that the simulated link copies while a layer runs
TRACE_BYTES = 1 << 30  # maximum size of a given trace to learn from, in bytes
# Size limit for the router inputs in a recorded trace; training needs twice this
# memory.
INPUT_BYTES = 768 << 20


@dataclass(frozen=True)
class Learnt:
    """The outcome of learning for one strategy. The shares and hit rates were measured
    on answers that were not used for training."""

    strategy: str
    files: tuple[Path, ...]  # the files that were saved
    tokens: int  # number of tokens in the requests for training and validation
    requests: int  # number of requests for training and validation
    seconds: float
    # Accuracy on the validation requests; None: the predictor was counted, not trained.
    validation: float | None
    right: float  # share of the strategy's predicted experts that the router chose
    # `right` of a predictor that always predicts the most used experts.
    popularity: float
    hits: float  # hit rate with the strategy
    lru: float  # hit rate with LRU alone


def most_tokens(
    n_layer: int, n_embd: int, strategies: Iterable[str], wanted: int
) -> int:
    """Returns the number of tokens to record for learning: `wanted`, or fewer if a
    strategy needs the routers' inputs and these would exceed INPUT_BYTES."""
    if not needs_inputs(strategies):
        return wanted
    token_bytes = 2 * n_layer * n_embd
    return max(1, min(wanted, INPUT_BYTES // token_bytes))


def needs_inputs(strategies: Iterable[str]) -> bool:
    """Returns whether any of these strategies learns from the routers' inputs."""
    return any(find_strategy(name).predictor == MLP for name in strategies)


def check_strategies(names: Sequence[str]) -> list[str]:
    """Returns the names without duplicates, or all of LEARNERS if there are none.
    Raises OptionError for a strategy that is unknown or has nothing to learn."""
    for name in names:
        if find_strategy(name).name not in LEARNERS:
            raise OptionError(
                f"the strategy {name!r} needs no learning; these strategies do: {', '.join(LEARNERS)}."
            )
    return list(dict.fromkeys(names)) or list(LEARNERS)


def _unwritable(path: object, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be written ({error.strerror}); make room on the disk, or make its folder writable."
    )


class Learning:
    """The requests of a trace, split into requests to learn from and held-out requests
    on which the result is evaluated.

    `options` replaces training options in BRIEF, predictor by predictor. Raises
    OptionError for a trace of another model or of an unknown one, with too few
    requests, or without decoded tokens in the held-out requests.
    """

    def __init__(
        self,
        trace: Trace,
        artifacts: Artifacts,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        trace.header.check_model(artifacts.fingerprint)
        requests = trace.sequences()
        if len(requests) < LEAST_REQUESTS:
            raise OptionError(
                f"learning needs at least {LEAST_REQUESTS} requests, because some are held out to test what was"
                f" learned, but there are {len(requests)}; give more texts (--prompts), or record a trace of more"
                " requests."
            )
        judging = held_out(trace, HELD_OUT_SHARE, seed)
        self.artifacts = artifacts
        self.judged = trace.select(judging)
        if not self.judged.decode().n_tokens:
            raise OptionError(
                "learning is tested on answers, but the requests held out for the test have none; record longer answers"
                " (--max-tokens)."
            )
        self.training = trace.select(set(requests) - set(judging))
        self._options = {**BRIEF, **(options or {})}
        self._lru: float | None = None
        self._popularity = COUNTED["popularity"](self.training)

    def learn(self, name: str, report: Report = no_report) -> Learnt:
        """Learns, evaluates and saves one strategy. Raises OptionError, and
        StorageError if a file cannot be written. An interruption before saving leaves
        the old files unchanged."""
        start = time.monotonic()
        strategy = find_strategy(name)
        learned = {
            file: self._train(file, report)
            for file, of in LEARNT_FOR.items()
            if of == name
        }
        report("judging on held-out requests", 1.0)
        facts = self._judge(strategy, learned)
        try:
            folder = self.artifacts.writable_folder()
        except OSError as error:
            raise _unwritable(error.filename, error) from error
        paths = []
        for file, of_file in learned.items():
            path = folder / f"{file}.safetensors"
            saved = Weights(of_file.arrays, {**of_file.facts, **facts})
            try:
                weights_file.save(
                    path, file, self.artifacts.fingerprint, self.training.shape, saved
                )
            except OSError as error:
                raise _unwritable(path, error) from error
            paths.append(path)
        own = learned[str(strategy.predictor)].facts
        shown = {
            key: facts[key]
            for key in ("tokens", "requests", "right", "popularity", "hits", "lru")
        }
        return Learnt(
            name,
            tuple(paths),
            seconds=time.monotonic() - start,
            validation=own.get("validation"),
            **shown,
        )

    def _train(self, file: str, report: Report) -> Weights:
        if file == EAMC:
            return self._collected()
        if file in COUNTED:
            return COUNTED[file](self.training)
        found: Weights = TRAINERS[file].train(
            self.training, self._options[file], report
        )
        return found

    def _collected(self) -> Weights:
        """Returns MoE-Infinity's collection of this model with the training requests
        added."""
        shape = self.training.shape
        eamc = self.artifacts.collection(shape) or Eamc(*shape.table)
        collect(self.training, eamc)
        return eamc.weights()

    def _judge(
        self, strategy: Strategy, learned: Mapping[str, Weights]
    ) -> dict[str, Any]:
        """Replays the held-out requests with a strategy. Returns the results as facts
        for the strategy's files."""
        own = str(strategy.predictor)
        of_own = learned[own]
        training = self.training
        shape = training.shape
        predictor = self._predictor(own, of_own)
        found = self._replay(strategy, predictor)
        by_popularity = self._replay(
            strategy, LEARNED["popularity"](shape, self._popularity)
        )
        if self._lru is None:
            self._lru = self._replay(
                find_strategy("lru"), NoPrediction(shape)
            ).decode_hit_rate
        facts = {
            "strategy": strategy.name,
            "requests": len(training.sequences()),
            "tokens": training.n_tokens,
            "right": _right(found),
            "popularity": _right(by_popularity),
            "hits": round(found.decode_hit_rate, 4),
            "lru": round(self._lru, 4),
        }
        if own == MLP:
            facts |= self._beside_skip(of_own)
        return facts

    def _beside_skip(self, learned: Weights) -> dict[str, float]:
        """Returns the shares of correct predictions of the trained networks
        ("mlp_right") and of the model's own routers ("skip_right"), each with LRU and
        prefetching. `prefetch_predictor` compares these shares later. Returns {} if the
        routers cannot be read."""
        default = Strategy("", "", "lru", prefetch=PrefetchOptions(watchdog=False))
        shape = self.training.shape
        try:
            skip = UNTRAINED[SKIP](shape, self.artifacts)
        except (ModelFormatError, OptionError):
            # Only llama.cpp can read these routers, or there is no model file.
            return {}
        predictors = {MLP: self._predictor(MLP, learned), SKIP: skip}
        return {
            f"{name}_right": _right(self._replay(default, each))
            for name, each in predictors.items()
        }

    def _predictor(self, name: str, learned: Weights) -> Predictor:
        shape = self.training.shape
        if name == EAMC:
            return EamcPredictor(shape, Eamc.from_weights(shape, learned))
        return LEARNED[name](shape, learned)

    def _replay(self, strategy: Strategy, predictor: Predictor) -> SimResult:
        shape = self.judged.shape
        prefetch = strategy.prefetch
        if not isinstance(prefetch, PrefetchOptions):
            prefetch = None
        layer_s = LAYER_US / 1e6
        options = SimOptions(
            prefetch,
            link_bytes_per_s=LAYER_EXPERTS * shape.expert_bytes / layer_s,
            layer_compute_us=LAYER_US,
            store=strategy.store,
        )
        policy = make_policy(strategy.policy, shape, self.artifacts)
        n_slots = slots_of(shape, JUDGED_SHARE)
        simulation = Simulation(self.judged, policy, predictor, n_slots, options)
        return simulation.run()


def _right(result: SimResult) -> float:
    """Returns the share of the predicted experts that the router chose; 0 if there are
    no predictions."""
    right = result.counters["forecast_right"]
    predicted = result.counters["forecast_picks"]
    return round(right / max(1, predicted), 4)
