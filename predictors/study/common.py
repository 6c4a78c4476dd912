"""Code shared by the commands in this folder: a trace with its model's artifacts, and a
function to run a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

import typer

from moegguf.controller.predictors.base import Predictor
from moegguf.models.catalog import find_model
from moegguf.terminal.messages import run_with_exit_code
from moegguf.trace.analysis import TraceAnalysis
from moegguf.trace.simulate import SimOptions
from predictors.study.controls import ORACLE, FreshGate, Oracle
from predictors.study.token_scheduler import RoutingPaths, make_paths

# Enough tokens to be precise to about one percent, within a minute or two.
DEFAULT_TOKENS = 2500

PredictorNames = Annotated[
    list[str],
    typer.Option(
        "--predictor", metavar="NAMES", help="Predictors, separated by commas, or all."
    ),
]


class Study(TraceAnalysis):
    """A trace analysis with two more predictors, the oracle and the fresh-gate control.

    Also provides routing paths for the token scheduler.
    """

    @classmethod
    def load(cls, file: Path, model: str | None, folder: Path | None) -> Self:
        """Calls `open` with the file of the model named `model`, or without a model if
        `model` is None or "".

        Propagates errors from `open` and `find_model`.
        """
        return cls.open(file, find_model(model) if model else None, folder)

    known_predictors: ClassVar[tuple[str, ...]] = (
        *TraceAnalysis.known_predictors,
        FreshGate.name,
    )

    def new_predictor(self, name: str) -> Predictor:
        """Returns the predictor with this name, which may also be the oracle or the
        fresh-gate control."""
        if name == FreshGate.name:
            return FreshGate(self.trace.shape, self.artifacts.routers())
        return Oracle(self.trace) if name == ORACLE else super().new_predictor(name)

    def paths(self, name: str) -> RoutingPaths:
        """Returns a new `RoutingPaths` of the kind `name`, for the token scheduler.
        Raises OptionError."""
        return make_paths(name, self.trace.shape, self.artifacts)


def sim_options(
    link: float | None, latency: float, layer_compute: float
) -> SimOptions | None:
    """Returns the options of a replay over a link; None if `link` is None or 0.

    `link` is in GB/s. `latency` and `layer_compute` (for each token) are in
    microseconds.
    """
    if not link:
        return None
    return SimOptions(
        link_bytes_per_s=link * 1e9,
        link_latency_s=latency / 1e6,
        layer_compute_us=layer_compute,
    )


def run(command: Callable[..., None], arguments: Sequence[str] | None = None) -> int:
    """Runs one command with these arguments, or with the arguments of this process;
    returns its exit code."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.command()(command)
    return run_with_exit_code(lambda: app(arguments, standalone_mode=False))
