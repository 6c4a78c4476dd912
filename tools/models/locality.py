"""Published measurements of expert reuse from token to token in real models, and a
random process fitted to them.

The process draws router logits for each layer and expert. The experts with the largest
logits are chosen. A logit is a sum of three independent Gaussian parts. The constant
part is the popularity of the expert. The slow part is the topic, an AR(1) process that
decays over `memory_tokens`. The third part is drawn independently for each token. The
parts' shares of the variance were fitted so that LRU eviction has about the published
hit rates. The program predictors/study/synthesize.py samples from the process. Models
written by tools/make_model.py imitate it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError


@dataclass(frozen=True)
class Locality:
    """The published reuse of one model's experts, and the parameters of the fitted
    process.

    `hit_rates` maps the share of experts in memory to the hit rate of decoding with LRU
    eviction. `constant` and `slow` are shares of a logit's variance.
    """

    model: str
    source: str
    n_expert: int
    n_expert_used: int
    hit_rates: Mapping[float, float]
    constant: float
    slow: float
    memory_tokens: float

    @property
    def own(self) -> float:
        """Returns the share of a logit's variance that is drawn independently for each
        token."""
        return 1 - self.constant - self.slow


LOCALITIES = {
    # The first point, 6 %, is 8 of 128 experts per layer: memory holds only the last
    # token's experts. The hit rate is the share of these experts that the next token
    # reuses. On another text, the same author measured 45 % instead of 37 %.
    "qwen3-30b": Locality(
        "Qwen3-30B-A3B", "kekzl/imp#1359, #1365, #1374", 128, 8,
        {0.0625: 0.37, 0.18: 0.706, 0.19: 0.74, 0.24: 0.803, 0.26: 0.84, 0.40: 0.90, 0.64: 0.96},
        constant=0.42, slow=0.28, memory_tokens=16,
    ),
    # A token reuses 23 % of the previous token's experts on average.
    "glm": Locality(
        "GLM-5.3-Flash", "a thread on llama.cpp", 288, 8,
        {0.033: 0.21, 0.047: 0.27, 0.10: 0.41, 0.13: 0.48, 0.20: 0.58, 0.31: 0.70},
        constant=0.25, slow=0.46, memory_tokens=2.5,
    ),
    # Only one hit rate was published, which does not determine `memory_tokens`.
    "olmoe": Locality(
        "OLMoE", "JustVugg/colibri#1092", 64, 8, {0.25: 0.51}, constant=0.25, slow=0.25, memory_tokens=10,
    ),
    # A second-hand report: a hit rate of 40 to 60 % with half of the experts in memory,
    # "residency plus a few points".
    "mixtral": Locality(
        "Mixtral-8x7B", "second-hand", 8, 2, {0.50: 0.54}, constant=0.05, slow=0.15, memory_tokens=10,
    ),
}  # fmt: skip


def popularity(n_expert: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Returns the popularity of each expert in one layer (n_expert,): quantiles of a
    standard Gaussian in random order.

    The constant part of a logit is this popularity times a factor.
    """
    quantiles = [NormalDist().inv_cdf((i + 0.5) / n_expert) for i in range(n_expert)]
    return rng.permutation(np.array(quantiles, np.float32))


def find_locality(name: str) -> Locality:
    """Returns the entry of LOCALITIES with this name. Raises OptionError for an unknown
    name."""
    if name not in LOCALITIES:
        raise OptionError(
            f"--locality takes {', '.join(LOCALITIES)}, but not {name!r}."
        )
    return LOCALITIES[name]
