"""Tests that a replay of the shipped trace reproduces its recorded figures, so that
recorded results are valid for this code."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.collection import Eamc
from moegguf.trace.format import read
from predictors.study import shipped
from predictors.study.regenerate import CODE_VERSION


def test_shipped_trace_replays_its_three_recorded_figures_exactly() -> None:
    assert shipped.TRACE.stat().st_size < 200_000
    recorded = json.loads(shipped.FIGURES.read_text(encoding="utf-8"))
    assert len(recorded) == 3
    assert shipped.replayed() == recorded, (
        f"the code counts other figures: python -m predictors.study.shipped, and CODE_VERSION {CODE_VERSION + 1}"
    )
    assert (
        0 < recorded["LRU, ready"] < 1 and recorded["token table, times as fast"] != 1
    )


@pytest.mark.usefixtures("user")
def test_replayed_figures_ignore_a_collection_that_an_earlier_run_saved() -> None:
    trace = read(shipped.TRACE)
    artifacts = Artifacts(None, trace.header.fingerprint)
    shape = trace.shape
    collection = Eamc(*shape.table)
    collection.add(np.ones(shape.table, np.float32))
    artifacts.save_collection(shape, collection.weights())
    assert artifacts.collection(shape) is not None
    assert (
        replace(artifacts, folder=shipped.TRACE.parent, only_folder=True).collection(
            shape
        )
        is None
    )
    assert shipped.replayed() == json.loads(shipped.FIGURES.read_text(encoding="utf-8"))
