"""Warm start: uses saved at the end of a run choose what is fetched at the next load; no logit depends on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import Load, Own, Reference, TinyModel, greedy_logits, random_prompt

from moegguf.controller.artifacts import USES, Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.warm_start import HALF_LIFE_PASSES, most_used
from moegguf.gguf.experts import read_layout

pytestmark = pytest.mark.usefixtures("user")

TIGHT: dict[str, Any] = {"expert_cache": "40%", "n_ubatch": 4, "warm_start": True}
N_PROMPT, N_NEW = 12, 6


def saved(path: Path) -> Any:
    layout = read_layout(path)
    return Artifacts(layout).uses(MoeShape.of(layout))


def use(llm: Any, seed: int = 0) -> np.ndarray:
    return greedy_logits(llm, random_prompt(llm, N_PROMPT, seed=seed), N_NEW)


def test_what_was_used_most_is_there_at_first(own: Own, load: Load, tiny: TinyModel, reference: Reference) -> None:
    path = own()
    expected = reference(tiny(), n_ubatch=4, n_prompt=N_PROMPT, n_new=N_NEW)
    llm = load(path, **TIGHT)
    assert llm.stats().prefetch_started == 0
    assert np.array_equal(use(llm), expected)
    uses, _ = llm.session.store.activity()
    llm.close()
    assert np.array_equal(saved(path), uses)
    llm = load(path, **TIGHT)
    llm.session.store.drain(10)
    there, n_slots = llm.session.store.residency() == 2, llm.stats().n_slots
    il, experts = most_used(saved(path), n_slots)
    assert il.size == n_slots
    assert there[il, experts].all()
    assert np.array_equal(use(llm), expected)


def test_uses_of_later_runs_are_added_and_those_before_fade(own: Own, load: Load) -> None:
    path, total = own(), np.float32(0)
    for run in range(2):
        llm = load(path, **TIGHT)
        use(llm, seed=run)
        uses, passes = llm.session.store.activity()[0], llm.session.store.counters()["passes"]
        total = uses + total * np.float32(0.5 ** (passes / HALF_LIFE_PASSES))
        llm.close()
        assert np.allclose(saved(path), total)


def test_nothing_is_saved_when_off_unused_resident_or_in_lockstep(own: Own, load: Load, user: Path) -> None:
    path = own()
    for options in ({"warm_start": False}, {"expert_cache": "100%"}, {"lockstep": True}):
        llm = load(path, **{**TIGHT, **options})
        use(llm)
        llm.close()
    load(path, **TIGHT).close()
    assert not list(path.parent.rglob(USES))
    assert not user.exists() or not list(user.rglob(USES))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64])
def test_a_damaged_file_is_one_warning(own: Own, load: Load, content: bytes) -> None:
    path = own()
    folder = path.with_name(path.name + ".moegguf")
    folder.mkdir()
    (folder / USES).write_bytes(content)
    with pytest.warns(UserWarning, match="going on without it"):
        llm = load(path, **TIGHT)
    use(llm)
    with pytest.warns(UserWarning, match="going on without it"):
        llm.close()
    assert saved(path).any()


def test_most_used_leaves_out_what_was_never_used() -> None:
    uses = np.array([[0, 3, 1], [2, 0, 0]], np.float32)
    il, experts = most_used(uses, 5)
    assert list(zip(il.tolist(), experts.tolist(), strict=True)) == [(0, 1), (1, 0), (0, 2)]
    il, experts = most_used(uses, 1)
    assert list(zip(il.tolist(), experts.tolist(), strict=True)) == [(0, 1)]
