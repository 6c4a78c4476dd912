"""Tests models with a recurrent state.

With the expert store, their logits are bit-identical to plain llama.cpp's. Files with
MTP heads are read, too.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import pytest
from running import TinyModel, greedy_logits, random_prompt

from moegguf.gguf.experts import read_layout

Load = Callable[..., Any]
Reference = Callable[..., Any]

HYBRIDS = [
    "tiny-qwen3next", "tiny-qwen35moe", "tiny-qwen4exp", "tiny-nemotron", "tiny-lfm2moe", "tiny-kimi-linear",
    "tiny-bailingmoe3", "tiny-granitehybrid", "tiny-deepseek4",
]  # fmt: skip
WITH_HEADS = [
    "tiny-qwen3next", "tiny-qwen35moe", "tiny-nemotron", "tiny-bailingmoe3", "tiny-deepseek4",
]  # fmt: skip
# Longer than a chunk in the computation of the recurrent state, longer than a group of
# tokens that share one compressed key, and longer than a sliding window.
N_PROMPT = 150
N_NEW = 12


@pytest.mark.parametrize("quant", ["q4_0", "q4_k_m"])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_hybrid_models_with_few_slots_have_the_bits_of_plain_llama_cpp(
    tiny: TinyModel, load: Load, reference: Reference, preset: str, quant: str
) -> None:
    path = tiny(preset, quant)
    expected = reference(path, n_prompt=N_PROMPT, n_new=N_NEW)
    assert np.isfinite(expected).all()
    start = monotonic()
    llm = load(path, expert_cache="40%")
    assert monotonic() - start < 5.0
    found = greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)
    assert found.tobytes() == expected.tobytes()
    assert llm.stats().misses > 0
    assert len(set(found.argmax(axis=-1))) > N_PROMPT // 4, (
        "the tokens do not depend on the text"
    )


@pytest.mark.parametrize("preset", WITH_HEADS)
def test_files_of_hybrid_models_have_one_mtp_layer(
    tiny: TinyModel, preset: str
) -> None:
    layout = read_layout(tiny(preset))
    assert layout.hparams.n_layer_all - layout.hparams.n_layer == 1
    assert layout.unused_bytes > 0
