"""The input of DuoServe-MoE's ExpertMLP: all choices of a pass so far, and what they say of the next layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.native.events import Float32s


def states(
    popularity: Float32s, affinity: Float32s, expert_ids: npt.NDArray[np.integer], row: int, out: Float32s
) -> Float32s:
    """s_l = [h_l, p_l, a_{l-1,l}] (equation 5) for MoE layer number `row`, at least 1: (n_tokens, state_size).

    expert_ids (at least `row`, n_tokens, n_expert_used): the choices before it, in the router's order. `out` is
    filled and returned.
    """
    n_layer, n_expert = popularity.shape
    n_tokens, k = expert_ids.shape[1:]
    h, p, a = np.split(out, [(n_layer - 1) * k, (n_layer - 1) * k + n_expert], axis=1)
    h[:, row * k :] = 0
    h[:, : row * k] = expert_ids[:row].transpose(1, 0, 2).reshape(n_tokens, -1)
    h[:, : row * k] += 1
    h /= n_expert
    p[:] = popularity[row]
    a[:] = affinity[row - 1, expert_ids[row - 1]].reshape(n_tokens, -1)
    return out
