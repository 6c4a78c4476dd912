"""The published reuse of routing from token to token in real models, and a random process with this reuse.

The process draws the router's logits of each layer and expert, and the largest logits are chosen. A logit is a sum of
three independent Gaussian parts. A constant part is the popularity of the expert. A part that decays over
`memory_tokens` is the topic, an AR(1) process. A third part is drawn anew for each token. The shares of their variance
are fitted so that
least-recent-use eviction has the published hit rates. predictors/study/synthesize.py draws from the process.
tools/make_model.py builds models that route by it.
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
    """Published reuse of one model's routing, and the process fitted to it.

    hit_rates: {share of all experts in memory: hit rate} while decoding with least-recent-use eviction. constant, slow:
    shares of the variance of a logit; the rest is each token's own.
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
        """The share of the variance that each token draws anew."""
        return 1 - self.constant - self.slow


LOCALITIES = {
    # 6 % was 8 of 128 experts per layer, one token's: the hit rate there is the share of experts that the next token
    # uses too. The same author counted 45 % on another text, which excludes 37 % here.
    "qwen3-30b": Locality(
        "Qwen3-30B-A3B", "kekzl/imp#1359, #1365, #1374", 128, 8,
        {0.0625: 0.37, 0.18: 0.706, 0.19: 0.74, 0.24: 0.803, 0.26: 0.84, 0.40: 0.90, 0.64: 0.96},
        constant=0.42, slow=0.28, memory_tokens=16,
    ),
    # 23 % of the experts repeat at the next token.
    "glm": Locality(
        "GLM-5.3-Flash", "a thread on llama.cpp", 288, 8,
        {0.033: 0.21, 0.047: 0.27, 0.10: 0.41, 0.13: 0.48, 0.20: 0.58, 0.31: 0.70},
        constant=0.25, slow=0.46, memory_tokens=2.5,
    ),
    # One point was published, which leaves the memory open.
    "olmoe": Locality(
        "OLMoE", "JustVugg/colibri#1092", 64, 8, {0.25: 0.51}, constant=0.25, slow=0.25, memory_tokens=10,
    ),
    # Second-hand: 40 to 60 % with half resident; "residency plus a few points".
    "mixtral": Locality(
        "Mixtral-8x7B", "second-hand", 8, 2, {0.50: 0.54}, constant=0.05, slow=0.15, memory_tokens=10,
    ),
}  # fmt: skip


def popularity(n_expert: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """The constant part of the logits of one layer, of variance 1: the same values in any order."""
    quantiles = [NormalDist().inv_cdf((i + 0.5) / n_expert) for i in range(n_expert)]
    return rng.permutation(np.array(quantiles, np.float32))


def find_locality(name: str) -> Locality:
    """The published routing of this name. Raises OptionError."""
    if name not in LOCALITIES:
        raise OptionError(f"--locality takes {', '.join(LOCALITIES)}, but not {name!r}.")
    return LOCALITIES[name]
