"""Tests the planned buffer sizes of a pass, the limit of its logits, and that longer
passes do not change a single bit."""

import ctypes as c
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import DEMO, Load, TinyModel
from own_process import in_own_process
from running import random_prompt

from moegguf.engine.memory import logits_tokens, pass_bytes
from moegguf.engine.sequences import SequenceTokens
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout
from moegguf.native import library
from moegguf.native.events import Phase
from tools.models import PRESETS

PASSES = ((512, 512, False), (8192, 2048, True))  # n_ctx, n_ubatch, flash_attn


def buffer_bytes(paths: list[Path]) -> list[tuple[str, float, int]]:
    """Returns (case, bytes that llama.cpp reserves, planned bytes) for each of PASSES
    of each model."""
    bindings, found = library.llama_cpp(), list[float]()

    def note(_level: int, text: bytes, _user: Any) -> None:
        size = re.search(
            rb"sched_reserve:.* compute buffer size = +([0-9.]+) MiB", text
        )
        if size:
            found.append(float(size[1]) * 2**20)

    callback = bindings.llama_log_callback(note)
    bindings.llama_log_set(callback, c.c_void_p())
    bindings.llama_backend_init()
    planned = list[tuple[str, int]]()
    for path in paths:
        layout = read_layout(path)
        model = bindings.llama_model_load_from_file(
            str(path).encode(), bindings.llama_model_default_params()
        )
        for n_ctx, n_ubatch, flash_attn in PASSES:
            params = bindings.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ubatch, n_ubatch
            params.flash_attn_type, params.n_outputs_max = (
                int(flash_attn),
                logits_tokens(layout, 1),
            )
            bindings.llama_free(bindings.llama_init_from_model(model, params))
            n_bytes = pass_bytes(
                layout, n_ctx, n_ubatch, flash_attn, n_logits=logits_tokens(layout, 1)
            )
            planned.append((f"{path.name} {n_ctx} {n_ubatch}", n_bytes))
        bindings.llama_model_free(model)
    return [
        (name, reserved, n_bytes)
        for reserved, (name, n_bytes) in zip(found, planned, strict=True)
    ]


def test_buffers_of_a_pass_are_within_the_planned_bytes(tiny: TinyModel) -> None:
    presets = [name for name in PRESETS if name.startswith("tiny-")]
    for name, reserved, planned in in_own_process(
        buffer_bytes, [tiny(preset) for preset in presets]
    ):
        assert 0 < reserved <= planned, name


def test_long_passes_give_the_logits_of_short_passes(
    tiny: TinyModel, load: Load
) -> None:
    options: dict[str, Any] = {
        "n_ctx": 2048,
        "expert_cache": "40%",
        "flash_attn": None,
        "logits_all": False,
    }
    found = []
    for n_tokens in (1024, 512):
        llm = load(
            tiny("tiny-qwen3moe"), n_batch=n_tokens, n_ubatch=n_tokens, **options
        )
        assert (
            llm.n_batch == llm.plan.n_ubatch == llm.context_params.n_ubatch == n_tokens
        )
        llm.eval(random_prompt(llm, 1500))
        found.append(llm.context.logits().copy())
    assert np.array_equal(*found)


def test_too_many_logits_of_a_pass_raise_and_the_next_pass_succeeds(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(DEMO, logits_all=False)
    monkeypatch.setattr(llm.context, "n_logits", 10)
    tokens = random_prompt(llm, 11)
    with pytest.raises(OptionError, match="logits_all=True"):
        llm.context.eval_sequences(
            [SequenceTokens(0, tokens, 0, 1, Phase.PREFILL, all_logits=True)]
        )
    assert llm.context.eval_sequences(
        [SequenceTokens(0, tokens[:-1], 0, 1, Phase.PREFILL, all_logits=True)]
    )
