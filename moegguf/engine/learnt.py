"""Lists the files of data learnt from a model's routing, for `moegguf show`."""

from __future__ import annotations

from typing import Any

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.predictors import LEARNT_FOR
from moegguf.controller.weights import read_facts
from moegguf.gguf.experts import ExpertLayout

SHOWN = ("tokens", "requests", "right")


def learnt_facts(layout: ExpertLayout) -> list[dict[str, Any]]:
    """Returns a dictionary for each predictor that has a file of learnt data: the
    predictor, the strategy that uses it, and the file's path. If there are several
    files, the first one in the search order of `Artifacts` is used.

    tokens and requests: the size of the training data. right: the share of held-out
    choices that the predictor guessed correctly. Each of these is None if the file does
    not contain it as a number.
    """
    artifacts = Artifacts(layout)
    found = []
    for name, strategy in LEARNT_FOR.items():
        path = next(artifacts.find(f"{name}.safetensors"), None)
        if path is not None:
            facts = read_facts(path)
            about = {key: facts.get(key) for key in SHOWN}
            known = {
                key: value if isinstance(value, int | float) else None
                for key, value in about.items()
            }
            found.append(
                {"predictor": name, "strategy": strategy, "path": str(path), **known}
            )
    return found
