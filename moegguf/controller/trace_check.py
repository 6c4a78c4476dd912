"""What the values of a trace must be, whoever wrote it: the rules that everything that listens to it relies on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.controller.trace import Trace
from moegguf.errors import TraceError
from moegguf.native.events import Phase


def check(trace: Trace) -> None:
    """Raises TraceError for the first rule that the values break; types and shapes are taken for granted."""
    starts, tokens, ids = trace.pass_start, trace.tokens, trace.expert_ids
    n_vocab = trace.shape.n_vocab or np.iinfo(np.int32).max
    n_expert = trace.shape.n_expert
    _require((np.diff(starts) > 0).all(), "pass_start", "must rise: each pass has a token")
    _require(starts[0] == 0 and starts[-1] == trace.n_tokens, "pass_start", f"must go from 0 to {trace.n_tokens}")
    _require((trace.pass_phase <= max(Phase)).all(), "pass_phase", f"must be at most {max(Phase):d}")
    _require((trace.pass_first_token >= -1).all(), "pass_first_token", "must be at least -1")
    _require(((tokens >= -1) & (tokens < n_vocab)).all(), "tokens", f"must be from -1 to below {n_vocab}")
    _require(((ids >= -1) & (ids < n_expert)).all(), "expert_ids", f"must be from -1 to below {n_expert}")
    _require(_is_even(ids), "expert_ids", "must be as many for each token of a layer, -1 behind them")
    _require(_is_last(ids, starts), "expert_ids", "must be those of a pass's last tokens where some are missing")


def _require(holds: bool | np.bool_, name: str, rule: str) -> None:
    if not holds:
        raise TraceError(f"{name} {rule}, which is not so; record the trace again.")


def _is_even(ids: npt.NDArray[np.int16]) -> bool:
    """Whether each layer has, for every token, either no expert or as many as for the others, the -1 behind them."""
    chosen: npt.NDArray[np.bool_] = ids >= 0
    used: npt.NDArray[np.bool_] = np.asarray(chosen.any(axis=1, keepdims=True))
    return bool((used[:, :, 1:] <= used[:, :, :-1]).all() and (chosen == (chosen[:, :, :1] & used)).all())


def _is_last(ids: npt.NDArray[np.int16], pass_start: npt.NDArray[np.int64]) -> bool:
    """Whether, within each pass, no token that a layer was computed for comes before one that it was not."""
    computed = ids[:, :, 0] >= 0
    ends = computed[:, :-1] & ~computed[:, 1:]
    ends[:, pass_start[1:-1] - 1] = False  # behind the last token of a pass comes another pass
    return not bool(ends.any())
