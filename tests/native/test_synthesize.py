"""Made-up routing meets the hit rates that were published, in the simulator that replays recorded routing."""

from pathlib import Path

import numpy as np
import pytest

from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import NoPrediction
from moegguf.errors import OptionError
from moegguf.trace.format import read, write
from moegguf.trace.simulate import Simulation, slots_of
from moegguf.trace.trace import Trace
from predictors.study.synthesize import shape_of, synthesize
from tools.models.locality import LOCALITIES, find_locality


def hit_rate(trace: Trace, share: float) -> float:
    return Simulation(trace, LRU, NoPrediction(trace.shape), slots_of(trace.shape, share)).run().hit_rate


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOCALITIES)
def test_hit_rates_are_within_three_points_of_the_published(name: str, seed: int) -> None:
    trace = synthesize(name, shape_of(name, 4), 1024, seed)
    for share, published in LOCALITIES[name].hit_rates.items():
        assert hit_rate(trace, share) == pytest.approx(published, abs=0.03), share


def test_a_trace_is_the_same_for_the_same_seed_and_survives_its_file(tmp_path: Path) -> None:
    shape = shape_of("glm", 3, 40, 5, 1000)
    trace, again, other = (synthesize("glm", shape, 50, seed) for seed in (7, 7, 8))
    assert np.array_equal(trace.expert_ids, again.expert_ids)
    assert not np.array_equal(trace.expert_ids, other.expert_ids)
    write(tmp_path / "t", trace)
    found = read(tmp_path / "t")
    assert found.shape == shape
    assert np.array_equal(found.expert_ids, trace.expert_ids)
    assert found.header.settings == {"locality": "glm", "seed": 7}
    assert "synthetic" in found.header.model


def test_unknown_names_and_shapes_are_refused() -> None:
    with pytest.raises(OptionError, match="qwen3-30b, glm"):
        find_locality("qwen")
    with pytest.raises(OptionError, match="at most all 4 experts"):
        shape_of("glm", 3, 4, 5)
