"""Context length: as requested, padded as llama.cpp does; the default fits memory; absurd sizes fail at once."""

from dataclasses import replace
from pathlib import Path

import pytest
from answering import Load, TinyModel, ends_of, reply

from moegguf.engine.budgets import pad_context
from moegguf.engine.llama import Llama
from moegguf.engine.machine import Memory, read_memory
from moegguf.engine.memory import check_context, kv_bytes
from moegguf.errors import AllocationError, OptionError
from moegguf.gguf.experts import read_layout

GIB = 1 << 30


def memory(available: int) -> Memory:
    return Memory(64 * GIB, available, "a test")


def test_a_context_above_all_memory_is_refused_at_once(tiny: TinyModel) -> None:
    layout = read_layout(tiny())
    layout = replace(layout, hparams=replace(layout.hparams, n_ctx_train=131072))
    check_context(layout, 131072, memory(0))
    with pytest.raises(AllocationError, match=r"1073741824 tokens needs .* lower n_ctx"):
        check_context(layout, 1 << 30, memory(64 * GIB))


@pytest.mark.parametrize("n_ctx", [-1, 1 << 31, (1 << 31) - 1])
def test_a_context_that_none_can_have_is_named_as_it_was_given(n_ctx: int) -> None:
    with pytest.raises(OptionError, match=f"n_ctx is a number of tokens from 1 to .*, but is {n_ctx}"):
        pad_context(n_ctx)


def test_a_model_is_not_loaded_with_an_absurd_context(tiny: TinyModel) -> None:
    path: Path = tiny()
    n_ctx = 2 * read_memory().total_bytes // (kv_bytes(read_layout(path), 256) // 256)
    for n in (n_ctx, 1 << 30):
        with pytest.raises((AllocationError, OptionError)):
            Llama(path, n_ctx=n, verbose=False)
    with pytest.raises(OptionError):
        Llama(path, n_ctx=-5, verbose=False)


@pytest.mark.parametrize("n_ctx", [300, 1, 0])
def test_a_context_of_any_size_can_be_filled_to_its_end(tiny: TinyModel, load: Load, n_ctx: int) -> None:
    llm = load(tiny("tiny-mix"), n_ctx=n_ctx, logits_all=False)
    assert llm.n_ctx() % 256 == 0
    assert len(llm.input_ids) == llm.n_ctx() == llm.context_params.n_ctx
    if n_ctx:
        bias = dict.fromkeys(ends_of(llm), -1000.0)
        _, timing = reply(llm, prompt="hello", logit_bias=bias, shift=False)
        assert timing.finish == "length"
        assert len(timing.context) == llm.n_ctx()
