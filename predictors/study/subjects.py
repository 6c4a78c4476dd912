"""The models whose figures are reported, each with a folder for its traces and
predictors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moegguf.models.catalog import find_model
from moegguf.trace.format import read, write
from predictors.commands import write_json
from predictors.study.common import Study
from predictors.study.figures import RESULTS, read_result
from predictors.study.papers import Workload, routing_digest, write_collections
from predictors.study.requests import ROLES

WORK = Path("build/evidence")
N_WARM = 4
LABORATORY, DEMO, EIGHT, DEEP = "laboratory", "demo", "eight", "deep"
CARD = "card"  # name of the result with a made model's card; no step computes it


@dataclass(frozen=True)
class Subject:
    """A model whose figures are reported. title: its name in tables. recipe: the module
    in `recipes` that makes it, and the module's options; None: the model is bundled.
    training: {predictor: its training options}."""

    title: str
    recipe: tuple[str, ...] | None
    training: Mapping[str, tuple[str, ...]]


COUNTED: dict[str, tuple[str, ...]] = {"popularity": (), "affinity": (), "token-id": ()}
# ProMoE's networks have the paper's size, 2 million weights each: (n_embd + n_expert) x
# n_hidden. ExpertMLP has the sizes given in its paper.
SUBJECTS = {
    DEMO: Subject(
        "demo", None,
        {**COUNTED, "mlp": ("windows=4", "n_hidden=6945", "epochs=4", "lr=1e-3", "patience=0"),
         "routing-path": ("epochs=4",), "expert-mlp": ("epochs=3",)},
    ),
    LABORATORY: Subject(
        "laboratory model", ("make_lab_model",),
        {**COUNTED, "mlp": ("windows=1,4", "n_hidden=3125", "epochs=8", "lr=1e-3", "patience=0"),
         "routing-path": ("epochs=8",), "expert-mlp": ("epochs=15",)},
    ),
    EIGHT: Subject(
        "laboratory model, 2 of 8 experts",
        ("make_lab_model", "--experts", "8", "--used", "2", "--neurons", "64", "--shared", "16"),
        {**COUNTED, "expert-mlp": ("epochs=8",)},
    ),
    DEEP: Subject(
        "deep model", ("train_deep_model",),
        {**COUNTED, "mlp": ("windows=1,4", "n_hidden=6945", "epochs=4", "lr=1e-3", "patience=0"),
         "routing-path": ("epochs=4",), "expert-mlp": ("epochs=3",)},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """A subject, and the folder with its model, its traces and its predictors."""

    name: str
    work: Path

    @property
    def subject(self) -> Subject:
        """The subject with this name."""
        return SUBJECTS[self.name]

    @cached_property
    def model(self) -> Path:
        """The model's file."""
        return (
            find_model(DEMO) if self.subject.recipe is None else self.work / "lab.gguf"
        )

    @property
    def predictors(self) -> Path:
        """The folder for trained predictors and MoE-Infinity's collection."""
        return self.work / "predictors"

    def trace(self, role: str) -> Path:
        """Returns the path of the recording with this name, such as "learning"."""
        return self.work / f"{role}.trace"

    @property
    def mlp_facts(self) -> dict[str, Any]:
        """Facts about the training of ProMoE's networks."""
        card = json.loads((self.predictors / "mlp.json").read_text("utf-8"))
        return dict(card["training"])

    @cached_property
    def learning(self) -> Study:
        """The recorded requests from which predictors learn."""
        return self._study("learning")

    @cached_property
    def choosing(self) -> Study:
        """The recorded requests on which settings are chosen."""
        return self._study("choosing")

    @cached_property
    def reporting(self) -> Study:
        """The recorded requests for which figures are reported."""
        return self._study("reporting")

    @cached_property
    def workload(self) -> Workload:
        """All test requests, after N_WARM requests that only warm the cache."""
        return self.some(None)

    def some(self, n_counted: int | None) -> Workload:
        """Returns a workload with about `n_counted` counted requests, in equal numbers
        for each kind of text, or with all requests for None. N_WARM requests before
        them only warm the cache."""
        warm = self.choosing.trace
        return Workload.of(
            self.reporting, warm.select(warm.sequences()[-N_WARM:]), n_counted
        )

    def _study(self, role: str) -> Study:
        return Study.open(self.trace(role), self.model, self.predictors)

    def learn(self, n_entries: int) -> None:
        """Writes MoE-Infinity's collection with `n_entries` entries from the last
        training requests. If `n_entries` is 0, only removes the collection's file."""
        write_collections(self.predictors, [self.learning.trace], n_entries)

    def prepare(self) -> None:
        """Creates the model, the recordings and the predictors if they are missing.
        Stores the digest of the reporting recording. Raises CalledProcessError.
        """
        self.predictors.mkdir(parents=True, exist_ok=True)
        if not self.model.exists():
            recipe, *options = self.subject.recipe or ()
            run(f"recipes.{recipe}", "-o", str(self.model), *options)
            if self.name != EIGHT:
                (RESULTS / self.name).mkdir(exist_ok=True)
                shutil.copy(
                    self.model.with_suffix(".json"),
                    RESULTS / self.name / f"{CARD}.json",
                )
        if not all(self.trace(role).exists() for role in ROLES):
            run(
                "predictors.study.requests",
                "record",
                str(self.model),
                "-o",
                str(self.work),
            )
        note_recording(self.name, routing_digest(self.reporting.trace))
        # Predictors are scored on a trace with a single request, because scoring is
        # slow.
        few = self.trace("few")
        if not few.exists():
            trace = read(self.trace("choosing"))
            write(few, trace.select(trace.sequences()[:1]))
        for predictor in self.subject.training:
            self.train(predictor)

    def train(self, predictor: str) -> None:
        """Trains a predictor if its file does not exist. Raises CalledProcessError."""
        if (self.predictors / f"{predictor}.safetensors").exists():
            return
        options = [
            word
            for setting in self.subject.training[predictor]
            for word in ("--set", setting)
        ]
        traces = str(self.trace("learning")), "--heldout-trace", str(self.trace("few"))
        of = (
            "--model",
            str(self.model),
            "--predictor",
            predictor,
            "--out",
            str(self.predictors),
        )
        run("predictors.train.predictor", *traces, *of, *options)


def run(module: str, *words: str) -> None:
    """Runs a module of this repository as a command. Raises CalledProcessError."""
    print(f"python -m {module} {' '.join(words)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", module, *words], check=True)


def recordings() -> dict[str, str]:
    """Returns {subject: digest of the recorded routing from which its figures were
    computed}."""
    return dict(json.loads((RESULTS / "recordings.json").read_text("utf-8")))


def note_recording(name: str, digest: str) -> None:
    """Writes the digest of the recording from which a subject's figures are now
    computed."""
    write_json(RESULTS / "recordings.json", recordings() | {name: digest})


def chosen_window(name: str, paper: str) -> int | None:
    """Returns the prefetch window, in layers, that the step tuned-PAPER chose for this
    subject; None if this step has no result."""
    found = read_result(f"{name}/tuned-{paper}")
    return int(found["figures"]["chosen"]) if found else None
