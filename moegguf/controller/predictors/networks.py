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
Sizes = dict[str, tuple[int, ...]]  # {name of an array: its size}


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


def mlp_sizes(shape: MoeShape, windows: Iterable[int], n_hidden: int) -> Sizes:
    """Returns the sizes of the arrays of ProMoE's networks."""
    sizes: Sizes = {}
    for source, target in window_pairs(shape, windows):
        sizes |= _layer_sizes(f"{source}.{target}.hidden", shape.n_embd, n_hidden)
        sizes |= _layer_sizes(f"{source}.{target}.out", n_hidden, shape.n_expert)
    return sizes


def _layer_sizes(name: str, n_in: int, n_out: int) -> Sizes:
    return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}


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
    arrays |= _layers(weights, mlp_sizes(shape, windows, n_hidden))
    reach = max(row_of[target] - row_of[source] for source, target in pairs)
    return StorePredictor(MLP, shape, reach, arrays, needs_inputs=True)


def _layers(weights: Weights, sizes: Sizes) -> dict[str, Array]:
    """Returns the matrix and bias of each layer in `sizes`, in the form that the store
    reads. Raises ValueError if an array is missing or has another size."""
    arrays: dict[str, Array] = {}
    for name in sizes:
        layer, _, part = name.rpartition(".")
        if part == "weight":
            matrix = weights.array(name, *sizes[name])
            bias = weights.array(f"{layer}.bias", len(matrix))
            arrays |= QuantizedMatrix(matrix, bias).arrays(layer)
    return arrays


def state_size(shape: MoeShape) -> int:
    """Returns the length of ExpertMLP's input: experts chosen so far (h), popularity
    (p) and affinity (a)."""
    k = shape.n_expert_used
    return (shape.n_moe_layer - 1) * k + shape.n_expert + k * shape.n_expert


def expert_mlp_sizes(shape: MoeShape, hidden: Iterable[int]) -> Sizes:
    """Returns the sizes of ExpertMLP's arrays. `hidden` lists the sizes of its hidden
    layers."""
    n_layer = shape.n_moe_layer
    n_expert = shape.n_expert
    sizes: Sizes = {
        "popularity": (n_layer, n_expert),
        "affinity": (n_layer - 1, n_expert, n_expert),
    }
    widths = [state_size(shape), *hidden, n_expert]
    for i, (n_in, n_out) in enumerate(pairwise(widths)):
        sizes |= _layer_sizes(f"layers.{i}", n_in, n_out)
    return sizes


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
    sizes = expert_mlp_sizes(shape, hidden)
    arrays: dict[str, Array] = {
        "n_expert_used": integers(shape.n_expert_used),
        "sizes": integers(state_size(shape), *hidden, shape.n_expert),
        **{
            name: weights.array(name, *sizes[name])
            for name in ("popularity", "affinity")
        },
    }
    arrays |= _layers(weights, sizes)
    return StorePredictor("expert-mlp", shape, 1, arrays)
