"""Creates predictors that multiply by matrices: the model's routers (skip), ProMoE's
networks, DuoServe-MoE's ExpertMLP.

The store computes them with weights in signed bytes (`native/predictor.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from moegguf.controller.predictors.base import NoPrediction, Predictor, StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.gguf.routers import Routers
from moegguf.native.predictor import Array, QuantizedMatrix, integers

SKIP, MLP = "skip", "mlp"
# The paper's sizes of ExpertMLP's hidden layers, which are the default of a training
# run. A file may have six other sizes.
HIDDEN_SIZES = (2048, 1024, 512, 256, 128, 64)

Pair = tuple[int, int]  # (layer whose input is used, layer that is predicted)


def skip(shape: MoeShape, routers: Routers) -> StorePredictor:
    """Creates the predictor that applies a later layer's router to the input of the
    current layer's router. It can predict all later layers that have a router. It is
    less accurate at longer distances, because inputs of distant layers differ more."""
    arrays: dict[str, Array] = {
        "n_embd": integers(shape.n_embd), "gating": integers(routers.gating),
        "n_group": integers(routers.n_group), "n_group_used": integers(routers.n_group_used),
    }  # fmt: skip
    for il, router in routers.routers.items():
        matrix = QuantizedMatrix(router.matrix)
        arrays |= {f"{il}.weights": matrix.bytes, f"{il}.scale": matrix.scale}
        biases = {"bias": router.logit_bias, "choice_bias": router.choice_bias}
        arrays |= {
            f"{il}.{name}": bias for name, bias in biases.items() if bias is not None
        }
    return StorePredictor(SKIP, shape, shape.n_moe_layer - 1, arrays, needs_inputs=True)


def window_pairs(shape: MoeShape, windows: Iterable[int]) -> list[Pair]:
    """Returns the pairs (source layer, target layer) for predictions at these distances
    (`windows`), sorted. If a target has fewer layers with experts before it than the
    distance, its source is the first of them. That first layer is never a target."""
    rows = range(1, shape.n_moe_layer)
    return sorted(
        {
            (shape.layers[max(row - k, 0)], shape.layers[row])
            for k in windows
            for row in rows
        }
    )


def mlp(shape: MoeShape, weights: Weights) -> Predictor:
    """Creates ProMoE's predictor, which has one network for each pair (source layer,
    target layer) in `window_pairs`. Returns NoPrediction for a model with only one
    layer with experts.

    The arrays are `<source>.<target>.{hidden,out}.{weight,bias}`, with the facts
    `windows` and `n_hidden`. Raises ValueError if they are not valid for the model, and
    KeyError if a fact is missing. Each prediction evaluates one network.
    """
    windows, n_hidden = weights.facts["windows"], weights.facts["n_hidden"]
    if not windows or not all(
        isinstance(k, int) and k > 0 for k in (n_hidden, *windows)
    ):
        raise ValueError(
            f"windows {windows!r:.80} and n_hidden {n_hidden!r:.80} must be whole numbers above zero; make the file"
            " again"
        )
    pairs, row_of = window_pairs(shape, windows), shape.row_of
    if not pairs:
        return NoPrediction(shape)
    arrays: dict[str, Array] = {
        "n_embd": integers(shape.n_embd), "n_hidden": integers(n_hidden),
        "pairs": integers(*(il for pair in pairs for il in pair)),
    }  # fmt: skip
    for source, target in pairs:
        arrays |= _layer(weights, f"{source}.{target}.hidden", shape.n_embd, n_hidden)
        arrays |= _layer(weights, f"{source}.{target}.out", n_hidden, shape.n_expert)
    reach = max(row_of[target] - row_of[source] for source, target in pairs)
    return StorePredictor(MLP, shape, reach, arrays, needs_inputs=True)


def _layer(weights: Weights, name: str, n_in: int, n_out: int) -> dict[str, Array]:
    """Returns the matrix and bias of one layer of a network, in the form that the store
    reads. Raises ValueError if one is missing, or if their sizes are not `n_in` and
    `n_out`."""
    matrix, bias = (
        weights.array(f"{name}.weight", n_out, n_in),
        weights.array(f"{name}.bias", n_out),
    )
    return QuantizedMatrix(matrix, bias).arrays(name)


def state_size(shape: MoeShape) -> int:
    """Returns the length of ExpertMLP's input: experts chosen so far (h), popularity
    (p) and affinity (a)."""
    k = shape.n_expert_used
    return (shape.n_moe_layer - 1) * k + shape.n_expert + k * shape.n_expert


def expert_mlp(shape: MoeShape, weights: Weights) -> StorePredictor:
    """Creates DuoServe-MoE's ExpertMLP (section 4.2).

    For a sequence with one token in the pass, it predicts the next layer, if every
    earlier layer of the pass was observed. The arrays are `popularity`, `affinity` and
    `layers.<i>.{weight,bias}` (BatchNorm folded in), with the fact `hidden`. Raises
    ValueError if they are not valid for the model, and KeyError if `hidden` is missing.

    The paper leaves some points open, which are decided here as follows. One network
    serves all layers: its input is padded to one length. The network recognizes the
    target layer by the length of the unpadded part and the layer's popularity. Experts
    are numbered from 1, and their numbers are divided by n_expert, so 0 occurs only as
    padding. The vector a_{l-1,l} has the rows of the affinity matrix for the experts
    just chosen, flattened, because the whole matrix would be the same for every token.
    (Section 5: "the inter-layer affinity vector from the previous layer's expert
    selection".) The paper's seven layers are the six hidden layers of HIDDEN_SIZES and
    the output layer.
    """
    hidden = weights.facts["hidden"]
    is_list = isinstance(hidden, (list, tuple)) and len(hidden) == len(HIDDEN_SIZES)
    if not is_list or not all(isinstance(size, int) and size > 0 for size in hidden):
        raise ValueError(
            f"its fact 'hidden' must be a list of {len(HIDDEN_SIZES)} whole numbers above 0, but is {hidden!r:.80};"
            " make it again with `moegguf learn`"
        )
    n_layer, n_expert, sizes = (
        shape.n_moe_layer,
        shape.n_expert,
        [state_size(shape), *hidden, shape.n_expert],
    )
    arrays: dict[str, Array] = {
        "n_expert_used": integers(shape.n_expert_used), "sizes": integers(*sizes),
        "popularity": weights.array("popularity", n_layer, n_expert),
        "affinity": weights.array("affinity", n_layer - 1, n_expert, n_expert),
    }  # fmt: skip
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        arrays |= _layer(weights, f"layers.{i}", n_in, n_out)
    return StorePredictor("expert-mlp", shape, 1, arrays)
