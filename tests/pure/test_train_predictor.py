"""Tests predictors/train/predictor.py: held-out requests, checks of options, and
loading of the written files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import Gguf, moe
from oracles import accuracy
from traces import random_trace

from moegguf.controller import weights as weights_file
from moegguf.controller.predictors import LEARNED
from moegguf.controller.predictors.counts import affinity
from moegguf.controller.predictors.networks import expert_mlp, mlp
from moegguf.controller.shape import MoeShape
from moegguf.gguf.experts import read_layout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.learning import expert_mlp as expert_mlp_training
from moegguf.learning import mlp as mlp_training
from moegguf.learning.counts import COUNTED
from moegguf.learning.feed_forward import FeedForward, logits
from moegguf.learning.learn import TRAINERS
from moegguf.learning.splitting import held_out, validation_tokens
from moegguf.trace import format as trace_file
from moegguf.trace.trace import Trace
from predictors.study.arrange import shuffled
from predictors.study.asked import asked
from predictors.train.predictor import main, options, parse_setting

N_EMBD, N_EXPERT = 64, 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    g: Gguf = moe(n_layer=3, n_expert=N_EXPERT, n_embd=N_EMBD, vocab=32)
    for il in range(3):
        g.tensor(f"blk.{il}.ffn_gate_inp.weight", N_EMBD, N_EXPERT)
    return g.write(tmp_path / "model.gguf")


def recorded(model: Path, *, with_inputs: bool = False) -> Trace:
    layout = read_layout(model)
    trace = random_trace(MoeShape.of(layout), n_sequences=12, with_inputs=with_inputs)
    return replace(trace, header=replace(trace.header, fingerprint=fingerprint(layout)))


def test_held_out_takes_whole_requests_of_every_kind() -> None:
    trace = random_trace(n_sequences=12, n_labels=3)
    unseen = held_out(trace, 0.25, seed=0)
    assert len(unseen) == 3
    assert {trace.header.labels[sequence] for sequence in unseen} == {
        "kind0",
        "kind1",
        "kind2",
    }
    assert held_out(trace, 0.25, seed=0) == unseen
    assert held_out(trace, 1.0, seed=0) != trace.sequences()
    tokens = validation_tokens(trace, seed=0)
    sequence_of = np.repeat(trace.pass_sequence, np.diff(trace.pass_start))
    assert set(sequence_of[tokens]) & set(sequence_of[~tokens]) == set()


def test_parse_setting_takes_the_type_of_the_default() -> None:
    assert parse_setting((1, 2), "4,8") == (4, 8)
    assert parse_setting(0.5, "1e-3") == 1e-3
    with pytest.raises(SystemExit, match="popularity has no option 'lr'; it has none"):
        options("popularity", ["lr=1"])
    assert {*COUNTED, *TRAINERS} == set(LEARNED)


def test_main_writes_a_counted_predictor_with_its_accuracy(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = recorded(model, with_inputs=True)
    trace_file.write(tmp_path / "t.trace", trace)
    main(
        [
            str(tmp_path / "t.trace"),
            "--model",
            str(model),
            "--predictor",
            "affinity",
            "--out",
            str(tmp_path / "out"),
        ]
    )
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[1:]] == [
        "affinity", "skip", "affinity, shuffled", "skip, shuffled",
    ]  # fmt: skip
    facts = json.loads((tmp_path / "out/affinity.json").read_text())
    assert facts["fingerprint"] == trace.header.fingerprint
    assert facts["training"]["requests"] + facts["heldout"]["requests"] == 12
    assert set(facts["heldout"]["accuracy"]["affinity"]) == {"1", "2", "4", "8"}
    made = facts["manifest"]
    assert (
        made["options"][:2] == ["--predictor", "affinity"]
        and "--seed" in made["options"]
    )
    assert (
        made["trained_on"]["sha256"]
        == hashlib.sha256((tmp_path / "t.trace").read_bytes()).hexdigest()
    )
    used = made["trained_on"]["requests"], made["scored_on"]["requests"]
    assert sorted(used[0] + used[1]) == list(range(12))
    path = tmp_path / "out/affinity.safetensors"
    found = weights_file.load(
        path,
        "affinity",
        trace.header.fingerprint,
        trace.shape,
        lambda w: affinity(trace.shape, w),
    )
    assert found is not None


def test_main_rejects_a_trace_of_another_model(tmp_path: Path, model: Path) -> None:
    trace_file.write(tmp_path / "t.trace", random_trace())
    with pytest.raises(SystemExit, match="their fingerprints differ"):
        main(
            [
                str(tmp_path / "t.trace"),
                "--model",
                str(model),
                "--predictor",
                "affinity",
                "--out",
                str(tmp_path),
            ]
        )


def test_expert_mlp_defaults_equal_the_paper_and_patience_0_runs_all_epochs() -> None:
    chosen = expert_mlp_training.Options()
    assert (chosen.hidden, chosen.epochs, chosen.patience) == (
        (2048, 1024, 512, 256, 128, 64),
        45,
        0,
    )
    trace, small = random_trace(n_sequences=4, n_decode=8), (16,) * 6
    for patience, runs in ((1, range(2, 30)), (0, range(30, 31))):
        options = expert_mlp_training.Options(
            hidden=small, epochs=30, patience=patience, batch=32, lr=1e-6
        )
        assert expert_mlp_training.train(trace, options).facts["epochs_run"] in runs


def test_training_records_the_validation_accuracy_of_each_epoch() -> None:
    trace = random_trace(n_sequences=8, n_decode=20, with_inputs=True)
    for training, sizes in (
        (mlp_training, {"windows": (1,), "n_hidden": 8}),
        (expert_mlp_training, {"hidden": (16,) * 6}),
    ):
        curve = training.train(
            trace, training.Options(epochs=3, batch=32, patience=0, **sizes)
        ).facts["curve"]
        assert len(curve) == 3 and all(0 < value <= 1 for value in curve)


def test_trained_mlp_beats_a_shuffled_control_on_held_out_requests() -> None:
    trace = random_trace(n_sequences=20, n_decode=60, with_inputs=True)
    seen, unseen = trace.select(range(16)), trace.select(range(16, 20))
    chosen = mlp_training.Options(windows=(1,), n_hidden=64, epochs=6, batch=64)
    learned, control = (
        mlp(trace.shape, mlp_training.train(taught, chosen))
        for taught in (seen, shuffled(seen, 0))
    )
    learned, control = (asked(lambda each=each: each) for each in (learned, control))
    assert (
        accuracy(learned, unseen, 1) > accuracy(control, shuffled(unseen, 1), 1) + 0.1
    )


def test_trained_expert_mlp_has_its_batch_norms_folded_in() -> None:
    rng = np.random.default_rng(0)
    network = FeedForward((12, 32, *(16,) * 5, 5), rng, norms=True)
    x = (3 * rng.standard_normal((4096, 12)) + 1).astype(np.float32)
    for _ in range(200):  # lets the norms' running means and variances converge
        expected = network.training_logits(x).value
    assert logits(x, network.matrices()) == pytest.approx(expected, abs=0.02)
    trace = random_trace(n_sequences=4, n_decode=8)
    chosen = expert_mlp_training.Options(hidden=(32,) + (16,) * 5, epochs=1, batch=32)
    taught = expert_mlp(trace.shape, expert_mlp_training.train(trace, chosen))
    assert 0 < accuracy(asked(lambda: taught), trace, 1) <= 1
