"""Flags of `moegguf trace` that the commands in this folder share."""

from pathlib import Path
from typing import Annotated

from moegguf.cli.trace import SIMULATE_FLAGS

_OPTIONS = {flag.name: flag.option() for flag in SIMULATE_FLAGS}
Tokens = Annotated[int, _OPTIONS["tokens"]]
Shares = Annotated[str, _OPTIONS["expert_cache"]]
ModelFile = Annotated[str | None, _OPTIONS["model"]]
Folder = Annotated[Path | None, _OPTIONS["predictors"]]
LinkSpeed = Annotated[float | None, _OPTIONS["link"]]
Latency = Annotated[float, _OPTIONS["latency"]]
Compute = Annotated[float, _OPTIONS["layer_compute"]]
