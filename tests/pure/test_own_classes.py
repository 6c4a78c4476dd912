"""Tests the user's own policies and predictors, which are named FILE.py:CLASS.

A class is constructed with the model's shape or without arguments. A class that breaks
a rule is refused with an error that names the rule. Requests, Modelfiles and files of
measurements cannot name a class.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from traces import SMALL, random_trace

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.controller import name_of
from moegguf.controller.hit_rates import Measured, read_measured, write_measured
from moegguf.controller.own_classes import names_file
from moegguf.controller.policies import check_policy, make_policy
from moegguf.controller.predictors import check_predictor, make_predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.engine.live_controller import ControllerOptions
from moegguf.errors import OptionError
from moegguf.models.recipe import PARAMETERS, usable_parameters
from moegguf.options import LOAD_PARAMETERS
from moegguf.trace.analysis import TraceAnalysis
from moegguf.trace.simulate import SimOptions

HERE = Artifacts(None)
SOURCE = """
import numpy as np
from moegguf.controller.predictors.base import Predictor

class Newest:
    def scores(self, history, forecast):
        return history.last_use.astype(np.float32)

class Shaped(Newest):
    def __init__(self, shape):
        self.shape = shape

class Again(Predictor):
    def __init__(self, shape):
        super().__init__(shape, reach=2)
        self.last = np.zeros(shape.table, np.float32)

    def observe(self, event):
        self.last[event.il] = 0
        self.last[event.il, event.expert_ids[-1]] = 1

    def predict(self, il, distance):
        return self.last[il]

class Failing:
    def __init__(self, shape):
        raise RuntimeError("no weights")

    def scores(self, history, forecast):
        return None

class Demanding(Newest):
    def __init__(self, one, two):
        pass

class WithoutReach(Predictor):
    def __init__(self, shape):
        pass

    def predict(self, il, distance):
        return None

class Abstract(Predictor):
    pass

class Nothing:
    pass

value = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_own_class_is_constructed_with_the_shape_or_without_arguments(
    file: Path,
) -> None:
    newest = make_policy(f"{file}:Newest", SMALL, HERE)
    assert name_of(newest) == "Newest"
    shaped = make_policy(f"{file}:Shaped", SMALL, HERE)
    assert shaped.shape is SMALL  # type: ignore[union-attr]
    again = make_predictor(f"{file}:Again", SMALL, HERE)
    assert (again.reach, again.shape) == (2, SMALL)
    assert type(make_predictor(f"{file}:Again", SMALL, HERE)) is type(again), (
        "the file runs once"
    )
    ControllerOptions(f"{file}:Newest", f"{file}:Again")
    ControllerOptions(f"vram={file}:Newest,ram=slru")


def test_changed_class_file_is_read_again_and_may_import_its_neighbours(
    file: Path,
) -> None:
    make_policy(f"{file}:Newest", SMALL, HERE)
    file.with_name("neighbour_of_own.py").write_text("SCORE = 7\n", encoding="utf-8")
    changed = f"import neighbour_of_own\n{SOURCE}\nNewest.title = str(neighbour_of_own.SCORE)\n"
    file.write_text(changed, encoding="utf-8")
    assert name_of(make_policy(f"{file}:Newest", SMALL, HERE)) == "7"


def test_class_file_may_be_a_link_to_a_file_with_another_suffix(file: Path) -> None:
    link = file.with_name("link.py")
    link.symlink_to(file.rename(file.with_name("4f2a.blob")))
    assert name_of(make_policy(f"{link}:Newest", SMALL, HERE)) == "Newest"


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("policy", "FOLDER/missing.py:X", "there is no file"),
        ("policy", "FOLDER:X.py", "names no class"),
        ("policy", "FILE", "names no class"),
        ("policy", "FILE:", "names no class"),
        ("policy", "FILE:not-a-name", "names no class"),
        ("policy", "FILE:Missing", "has no class 'Missing' for a policy"),
        ("policy", "FILE:value", "has no class 'value'"),
        (
            "policy",
            "FILE:Nothing",
            r"a policy must be a class with a method scores\(history, forecast\), but Nothing",
        ),
        (
            "predictor",
            "FILE:Nothing",
            "a predictor must be a subclass of .*Predictor, but Nothing",
        ),
        ("predictor", "FILE:Newest", "a predictor must be a subclass"),
        ("policy", "FILE:Failing", "its constructor raised RuntimeError: no weights"),
        ("policy", "FILE:Demanding", "its constructor raised TypeError"),
        ("predictor", "FILE:Abstract", "its constructor raised TypeError"),
        (
            "predictor",
            "FILE:WithoutReach",
            r"must have a whole number as its reach; call super\(\).__init__\(shape, reach\)",
        ),
        ("policy", "BROKEN:X", "it raised SyntaxError"),
        ("policy", "EXITS:X", "it raised SystemExit"),
        ("policy", "CLOSED:X", "there is no file"),
    ],
)
def test_own_class_that_breaks_a_rule_is_refused_with_that_rule(
    file: Path, tmp_path: Path, kind: str, name: str, words: str
) -> None:
    (tmp_path / "broken.py").write_text("def", encoding="utf-8")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)", encoding="utf-8")
    (tmp_path / "closed.py").mkdir()
    known = {
        "FILE": "own.py",
        "FOLDER": ".",
        "BROKEN": "broken.py",
        "EXITS": "exits.py",
        "CLOSED": "closed.py",
    }
    for short, path in known.items():
        name = name.replace(short, str(tmp_path / path))
    make = make_policy if kind == "policy" else make_predictor
    with pytest.raises(OptionError, match=words):
        make(name, SMALL, HERE)
    # A check without a model finds these errors, too.
    if "constructor" not in words and "reach" not in words:
        with pytest.raises(OptionError, match=words):
            (check_policy if kind == "policy" else check_predictor)(name)


def test_simulate_accepts_own_classes_beside_names(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(SOURCE, encoding="utf-8")
    analysis = TraceAnalysis(random_trace(), HERE)
    names = ["lru", f"{file}:Newest", f"{other}:Newest"]
    rows = analysis.simulate(names, ["none"], [0.25])
    assert [row.policy for row in rows] == [*names, "belady"], (
        "two classes of one name stay apart"
    )
    assert rows[0].simulated and rows[1].simulated
    assert (
        rows[0].simulated.counters["evictions"]
        == rows[1].simulated.counters["evictions"]
    )
    lru, again, _ = analysis.simulate(["lru"], ["none", f"{file}:Again"], [0.25])
    assert again.predictor == f"{file}:Again"
    assert again.hit_rate == lru.hit_rate, "nothing acts on it"


def test_simulation_without_a_link_has_no_late_prefetch_and_counts_accuracy(
    file: Path,
) -> None:
    analysis = TraceAnalysis(random_trace(), HERE)
    options = SimOptions(prefetch=PrefetchOptions())
    (lru, _), (ahead, _) = (
        analysis.simulate(["lru"], [name], [0.25], how)
        for name, how in (("none", SimOptions()), (f"{file}:Again", options))
    )
    assert lru.simulated and ahead.simulated
    assert lru.simulated.prefetch_accuracy is None
    counters = ahead.simulated.counters
    assert counters["prefetch_started"] > 0 == counters["prefetch_late"]
    accuracy = ahead.simulated.prefetch_accuracy
    assert (
        accuracy is not None
        and accuracy == counters["prefetch_useful"] / counters["prefetch_started"]
    )
    assert 0.2 < accuracy <= 1
    assert ahead.decode_hit_rate > lru.decode_hit_rate
    with pytest.raises(OptionError, match="--prefetch needs a predictor"):
        analysis.simulate(["lru"], ["none"], [0.25], options)


def test_save_rejects_hit_rates_of_an_unknown_model(tmp_path: Path) -> None:
    trace = random_trace()
    trace = replace(trace, header=replace(trace.header, fingerprint=""))
    analysis = TraceAnalysis(trace, Artifacts(None, "", tmp_path))
    rows = analysis.simulate(["lru"], ["none"], [0.25])
    with pytest.raises(OptionError, match="import it again with --model"):
        analysis.save(rows, rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["hit_rates", "predictors"])
def test_read_measured_rejects_names_of_class_files(
    tmp_path: Path, file: Path, place: str
) -> None:
    own = f"{file}:Newest"
    path = tmp_path / "measured.json"
    write_measured(
        path, Measured("f", {"lru": {0.5: 0.5}, "lfu": {0.5: 0.9}}, {"lfu": "none"})
    )
    assert read_measured(path).choose(0.5).policy == "lfu"
    facts = json.loads(path.read_text())
    rates = {"lru": {"0.5": 0.5}, own: {"0.5": 0.9}}
    facts |= {place: {"hit_rates": rates, "predictors": {"lfu": own}}[place]}
    path.write_text(json.dumps(facts))
    with pytest.raises(OptionError, match="is not the name of a built-in"):
        read_measured(path)


def test_requests_and_modelfiles_cannot_name_a_policy_or_predictor(file: Path) -> None:
    names = {"policy", "predictor", "strategy", "prefetch"}
    assert not names & (
        PARAMETERS.keys() | LOAD_PARAMETERS.keys() | set(LOAD_PARAMETERS.values())
    )
    assert usable_parameters(dict.fromkeys(names, f"{file}:Newest")) == {}


@pytest.mark.parametrize(
    ("name", "is_file"),
    [("lru", False), ("a.py:B", True), ("a.py", True), ("happy", False)],
)
def test_names_file_distinguishes_class_files_from_names(
    name: str, is_file: bool
) -> None:
    assert names_file(name) == is_file
