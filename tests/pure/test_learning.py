"""Tests `moegguf.learning`.

Training reduces the loss, and equal seeds give equal results. Strategies are judged on
requests that they did not learn from. An interrupted training run keeps the old files.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import Gguf, moe
from traces import random_trace

from moegguf.controller import weights as weights_file
from moegguf.controller.artifacts import Artifacts
from moegguf.controller.predictors import (
    LEARNED,
    LEARNT_FOR,
    make_predictor,
    prefetch_predictor,
)
from moegguf.controller.shape import MoeShape
from moegguf.controller.strategies import STRATEGIES
from moegguf.controller.weights import Weights, read_facts
from moegguf.errors import OptionError, StorageError
from moegguf.gguf.experts import read_layout
from moegguf.learning import expert_mlp, mlp, routing_path
from moegguf.learning.counts import collect
from moegguf.learning.feed_forward import (
    FeedForward,
    FeedForwardTrainee,
    Samples,
    logits,
)
from moegguf.learning.fitting import (
    Batch,
    Fitted,
    Schedule,
    Trainee,
    accuracy,
    cross_entropy,
    fit,
    rate_at,
)
from moegguf.learning.gradients import Node
from moegguf.learning.learn import (
    INPUT_BYTES,
    LEARNERS,
    Learning,
    check_strategies,
    most_tokens,
)
from moegguf.native.predictor import QuantizedMatrix
from moegguf.trace.trace import Trace

pytestmark = pytest.mark.usefixtures("user")

N_LAYER, N_EXPERT, N_EMBD = 4, 8, 32
SMALL = {
    "mlp": mlp.Options(windows=(1, 2, 4), n_hidden=32, epochs=4, batch=64),
    "expert-mlp": expert_mlp.Options(
        hidden=(32,) * 6, epochs=2, batch=64, most_samples=1000
    ),
    "routing-path": routing_path.Options(
        epochs=4, n_embd=16, n_ff=16, window=8, chunk=4, batch=8
    ),
}


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    """The artifacts of a small model whose file is in the test's folder."""
    g: Gguf = moe(n_layer=N_LAYER, n_expert=N_EXPERT, n_embd=N_EMBD, vocab=64)
    for il in range(N_LAYER):
        g.tensor(f"blk.{il}.ffn_gate_inp.weight", N_EMBD, N_EXPERT)
    return Artifacts(read_layout(g.write(tmp_path / "model.gguf")))


@pytest.fixture
def trace(artifacts: Artifacts) -> Trace:
    assert artifacts.layout is not None
    found = random_trace(
        MoeShape.of(artifacts.layout), n_sequences=12, n_decode=20, with_inputs=True
    )
    return replace(
        found, header=replace(found.header, fingerprint=artifacts.fingerprint)
    )


def fitted(seed: int) -> tuple[FeedForward, Fitted]:
    """Returns a network trained to choose two of six outputs from eight inputs, and the
    result of its training run."""
    rng = np.random.default_rng(7)
    inputs = rng.standard_normal((600, 8)).astype(np.float32)
    scores = inputs @ rng.standard_normal((8, 6))
    chosen = (scores >= np.sort(scores, axis=1)[:, -2:-1]).astype(np.float32)
    own = np.random.default_rng(seed)
    network = FeedForward((8, 32, 6), own)
    samples = Samples(
        np.arange(600) % 5 == 0, lambda numbers: (inputs[numbers], chosen[numbers])
    )
    trainee = FeedForwardTrainee(network, samples, cross_entropy, 32)
    return network, fit(trainee, Schedule(epochs=10, lr=1e-2, patience=0, seed=seed))


def test_training_reduces_the_loss_and_generalises() -> None:
    _, found = fitted(0)
    assert found.losses[-1] < 0.8 * found.losses[0]
    assert found.best > 0.85 > 2 / 6
    assert found.epochs == 10


def test_training_with_equal_seeds_gives_equal_networks() -> None:
    one, other, third = (fitted(seed)[0].matrices() for seed in (0, 0, 1))
    for (weight, bias), (same_weight, same_bias), (different, _) in zip(
        one, other, third, strict=True
    ):
        assert np.array_equal(weight, same_weight) and np.array_equal(bias, same_bias)
        assert not np.array_equal(weight, different)


class Scripted(Trainee):
    """A trainee whose only parameter is the epoch's number, and whose accuracies are
    scripted."""

    def __init__(self, *accuracies: float) -> None:
        self.nodes = [Node(np.array(0.0))]
        self._accuracies = accuracies

    @property
    def epoch(self) -> int:
        return int(self.nodes[0].value)

    n_batches = 1

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        self.nodes[0].value = np.array(self.epoch + 1.0)
        yield Batch(Node(np.zeros(1, np.float32)), 1.0, np.zeros(1, np.float32))

    def validate(self) -> float:
        return self._accuracies[self.epoch - 1]


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ((0.5, 0.75, 0.75, 0.25), 2),
        ((0.5, 0.0, 0.0), 1),
        ((0.0, 0.25, 0.0), 2),
        ((0.0, 0.0, 0.0), 3),
    ],
)
def test_fit_keeps_the_first_best_epoch_or_the_last_one_without_accuracy(
    accuracies: tuple[float, ...], best: int
) -> None:
    trainee = Scripted(*accuracies)
    found = fit(trainee, Schedule(epochs=len(accuracies), patience=0))
    assert (trainee.epoch, found.accuracies) == (best, [*accuracies])


def test_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [rate_at(share) for share in np.linspace(0, 1, 21)]
    assert (
        rates[0] == 0 and max(rates) == rates[2] == 1 and rates[-1] == pytest.approx(0)
    )
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_quantized_mlp_keeps_its_accuracy_for_inputs_that_hardly_change() -> None:
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((500, 24)).astype(np.float32)
    scores = inputs @ rng.standard_normal((24, 6))
    chosen = (scores >= np.sort(scores, axis=1)[:, -2:-1]).astype(np.float32)
    inputs[:, :4] *= 1e-6
    arrays, found = mlp.train_pair(
        inputs,
        chosen,
        np.arange(500) % 5 == 0,
        replace(SMALL["mlp"], epochs=20, lr=1e-2),
    )
    matrices = []
    for name in ("hidden", "out"):
        quantized = QuantizedMatrix(arrays[f"{name}.weight"].astype(np.float32))
        matrix = quantized.bytes * quantized.scale[:, np.newaxis]
        matrices.append((matrix, arrays[f"{name}.bias"]))
    assert found.best > 0.5
    assert accuracy([(logits(inputs, matrices), chosen)]) > found.best - 0.05


def test_routing_path_learns_from_tokens(trace: Trace) -> None:
    learned = routing_path.train(trace, SMALL["routing-path"])
    assert learned.facts["validation"] > 1.3 * trace.shape.n_expert_used / N_EXPERT
    embedding = learned.arrays["embedding"]
    assert embedding.shape == (trace.shape.n_vocab + 1, 16)
    absent = sorted(set(range(trace.shape.n_vocab)) - set(trace.tokens.tolist()))
    assert not embedding[absent].any() and embedding[trace.tokens].any()


@pytest.mark.parametrize("name", LEARNERS)
def test_learned_strategy_is_judged_on_other_requests_saved_and_found(
    name: str, trace: Trace, artifacts: Artifacts
) -> None:
    learning = Learning(trace, artifacts, SMALL)
    steps: list[float] = []
    found = learning.learn(name, lambda step, share: steps.append(share))
    assert steps[-1] == 1 and steps == sorted(steps)
    judged, training = (
        set(part.sequences()) for part in (learning.judged, learning.training)
    )
    assert judged and not judged & training and judged | training == set(range(12))
    assert (found.tokens, found.requests) == (learning.training.n_tokens, len(training))
    assert {path.stem for path in found.files} == {
        file for file, of in LEARNT_FOR.items() if of == name
    }
    assert (
        0 < found.right <= 1
        and 0 < found.popularity <= 1
        and 0 < found.hits <= 1
        and 0 < found.lru < 1
    )
    if name in ("promoe", "expertflow"):
        assert found.right > found.popularity
    shape = trace.shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in found.files:
            assert read_facts(path)["strategy"] == name
            if path.stem in LEARNED:
                made = make_predictor(path.stem, shape, Artifacts(artifacts.layout))
                assert made.native() is not None
        collection = Artifacts(artifacts.layout).collection(shape)
    if name == "moe-infinity":
        assert collection is not None and collection.n_entries == len(training)


def test_learned_files_are_equal_for_equal_seeds(
    trace: Trace, artifacts: Artifacts
) -> None:
    def saved() -> dict[str, bytes]:
        learning = Learning(trace, artifacts, SMALL)
        return {
            path.name: path.read_bytes()
            for name in LEARNERS
            for path in learning.learn(name).files
        }

    first = saved()
    assert len(first) == len(LEARNT_FOR)
    assert saved() == first


def test_interrupted_training_keeps_the_old_files(
    trace: Trace, artifacts: Artifacts
) -> None:
    learning = Learning(trace, artifacts, SMALL)
    before = {path: path.read_bytes() for path in learning.learn("duoserve").files}

    def interrupt(step: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Learning(
            trace,
            artifacts,
            {**SMALL, "expert-mlp": replace(SMALL["expert-mlp"], seed=5)},
        ).learn("duoserve", interrupt)
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in next(iter(before)).parent.iterdir()} >= {
        path.name for path in before
    }


def test_learn_names_a_file_that_cannot_be_written(
    trace: Trace, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_file, "save", full)
    with pytest.raises(
        StorageError,
        match=r"eamc.safetensors cannot be written \(No space left on device\); make",
    ):
        Learning(trace, artifacts, SMALL).learn("moe-infinity")


def test_learn_names_a_folder_that_cannot_be_created(
    trace: Trace, artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("in the way")
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        StorageError, match=r"home/models.* cannot be written \(Not a directory\); make"
    ):
        Learning(trace, artifacts, SMALL).learn("moe-infinity")


def test_learning_rejects_a_trace_that_lacks_requests_tokens_or_inputs(
    trace: Trace, artifacts: Artifacts
) -> None:
    with pytest.raises(
        OptionError,
        match="held out to test what was learned, but there are 3; give more texts",
    ):
        Learning(trace.select(range(3)), artifacts)
    with pytest.raises(OptionError, match="recorded from another model"):
        Learning(
            replace(trace, header=replace(trace.header, fingerprint="0" * 32)),
            artifacts,
        )
    with pytest.raises(
        OptionError,
        match=r"does not state from which model .* import it again with --model FILE\.gguf",
    ):
        Learning(
            replace(trace, header=replace(trace.header, fingerprint="")), artifacts
        )
    with pytest.raises(
        OptionError, match="held out for the test have none; record longer answers"
    ):
        Learning(trace.keep(trace.phase_of == 0), artifacts)
    with pytest.raises(
        OptionError, match="record it with `moegguf trace record --inputs`"
    ):
        Learning(replace(trace, inputs=None), artifacts, SMALL).learn("promoe")


def test_learning_splits_requests_that_all_have_different_kinds(
    trace: Trace, artifacts: Artifacts
) -> None:
    labels = {sequence: f"kind {sequence}" for sequence in trace.sequences()}
    learning = Learning(
        replace(trace, header=replace(trace.header, labels=labels)), artifacts, SMALL
    )
    assert (
        len(learning.judged.sequences()) == 2
        and len(learning.training.sequences()) == 10
    )


def test_check_strategies_rejects_unknown_and_unlearned_strategies() -> None:
    assert (
        check_strategies([])
        == list(LEARNERS)
        == ["promoe", "expertflow", "duoserve", "moe-infinity"]
    )
    assert check_strategies(["duoserve", "duoserve"]) == ["duoserve"]
    with pytest.raises(
        OptionError,
        match="the strategy 'lru' needs no learning; these strategies do: promoe",
    ):
        check_strategies(["lru"])
    with pytest.raises(OptionError, match="no strategy 'promo'"):
        check_strategies(["promo"])


def test_every_strategy_with_a_learned_predictor_has_a_learner() -> None:
    assert set(LEARNERS) <= set(STRATEGIES)
    for strategy in STRATEGIES.values():
        if strategy.predictor in LEARNED:
            assert LEARNT_FOR[strategy.predictor] == strategy.name
    assert set(LEARNED) <= set(LEARNT_FOR)


def test_most_tokens_is_limited_by_the_memory_of_router_inputs() -> None:
    assert (
        most_tokens(48, 2048, ["promoe"], 8192) == INPUT_BYTES // (48 * 2048 * 2) < 8192
    )
    assert most_tokens(48, 2048, ["duoserve", "expertflow"], 8192) == 8192
    assert most_tokens(4, 64, LEARNERS, 8192) == 8192


def test_make_predictor_names_the_command_for_a_missing_file(
    artifacts: Artifacts,
) -> None:
    assert artifacts.layout is not None
    shape = MoeShape.of(artifacts.layout)
    for name in LEARNED:
        command = f"`moegguf learn MODEL --strategy {LEARNT_FOR[name]}`"
        with pytest.raises(
            OptionError,
            match=f"{name!r} has to be trained for this model first: {command}; these need",
        ):
            make_predictor(name, shape, artifacts)


def test_prefetch_predictor_chooses_mlp_unless_skip_was_right_more_often(
    artifacts: Artifacts,
) -> None:
    assert artifacts.layout is not None
    shape = MoeShape.of(artifacts.layout)
    folder = artifacts.writable_folder()
    assert prefetch_predictor(artifacts) == "skip"
    for facts, expected in (
        ({}, "mlp"),
        ({"mlp_right": 0.6, "skip_right": 0.5}, "mlp"),
        ({"mlp_right": 0.5, "skip_right": 0.6}, "skip"),
        ({"mlp_right": "0.5", "skip_right": 0.6}, "mlp"),
    ):
        weights_file.save(
            folder / "mlp.safetensors",
            "mlp",
            artifacts.fingerprint,
            shape,
            Weights({}, facts),
        )
        assert prefetch_predictor(artifacts) == expected


def test_collect_adds_each_request_once(trace: Trace) -> None:
    from moegguf.controller.collection import Eamc

    eamc = Eamc(*trace.shape.table)
    collect(trace, eamc)
    collect(trace, eamc)
    assert eamc.n_entries == 12
    assert (
        eamc.state.sum(axis=(1, 2)) == 20 * N_LAYER * trace.shape.n_expert_used
    ).all()
