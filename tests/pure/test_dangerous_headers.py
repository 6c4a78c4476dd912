"""Numbers in a header that nothing can be computed with, or that take gigabytes, are refused before llama.cpp runs.

What llama.cpp aborts on ends a trial load: `tests/live/test_trial.py`."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moegguf.errors import ModelFormatError
from moegguf.gguf.experts import read_layout
from tools.mutants import Header, mutate, read_header, write_file
from tools.mutants.header import Item, KeyValue

TinyModel = Callable[..., Path]
Change = Callable[[Header], Header]
U32, F32 = 4, 6
ARCH = "qwen2moe"


def key(name: str, gguf_type: int, value: Item) -> Change:
    """The file with this value for a key of the architecture."""
    return with_pair(KeyValue(f"{ARCH}.{name}", gguf_type, value))


def with_pair(pair: KeyValue) -> Change:
    return lambda header: replace(header, pairs=(*(p for p in header.pairs if p.key != pair.key), pair))


DANGEROUS: dict[str, tuple[Change, str]] = {
    "8 GiB for every text": (key("context_length", U32, (1 << 31) - 1), "context_length"),
    "unknown gating": (key("expert_gating_func", U32, 5), "expert_gating_func"),
    "epsilon NaN": (key("attention.layer_norm_rms_epsilon", F32, math.nan), "epsilon"),
    "epsilon negative": (key("attention.layer_norm_rms_epsilon", F32, -1e-5), "epsilon"),
    "epsilon infinite": (key("attention.layer_norm_epsilon", F32, math.inf), "epsilon"),
    "frequency NaN": (key("rope.freq_base", F32, math.nan), "freq_base"),
    "frequency zero": (key("rope.freq_base", F32, 0.0), "freq_base"),
    "scaling negative": (key("rope.scaling.factor", F32, -2.0), "scaling.factor"),
    "scale infinite": (key("expert_weights_scale", F32, math.inf), "finite"),
    "window of 2^31": (key("attention.sliding_window", U32, 1 << 31), "sliding_window"),
    "interval zero": (key("full_attention_interval", U32, 0), "full_attention_interval"),
    "a head of nothing": (key("attention.key_length", U32, 0), "key_length"),
    "a width of 2^32": (key("expert_shared_feed_forward_length", U32, (1 << 32) - 1), "shared_feed_forward"),
}


@pytest.fixture(scope="module")
def good(tiny: TinyModel) -> Header:
    return read_header(tiny("tiny-qwen2moe"))


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_dangerous_header_is_refused(good: Header, tmp_path: Path, name: str) -> None:
    change, words = DANGEROUS[name]
    write_file(change(good), tmp_path / "bad.gguf")
    with pytest.raises(ModelFormatError, match=r"bad\.gguf.*" + words):
        read_layout(tmp_path / "bad.gguf")


HARMLESS: dict[str, Change] = {
    "a context of 10 Mi": key("context_length", U32, 10 << 20),
    "gating by default": key("expert_gating_func", U32, 0),
    "what a model does not have": key("attention.sliding_window", U32, 0),
    "no scaling": key("rope.scaling.factor", F32, 0.0),
    "epsilon zero": key("attention.layer_norm_epsilon", F32, 0.0),
    "no pooling": key("pooling_type", U32, (1 << 32) - 1),
    "no bound": key("kda.gate_lower_bound", F32, -math.inf),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_real_files_have_is_accepted(good: Header, tmp_path: Path, name: str) -> None:
    write_file(HARMLESS[name](good), tmp_path / "good.gguf")
    assert read_layout(tmp_path / "good.gguf").is_moe


def test_mutants_are_the_same_for_the_same_seed_and_only_raise_typed_errors(good: Header, tmp_path: Path) -> None:
    n_refused = 0
    for seed in range(120):
        mutant, words = mutate(good, seed)
        assert (mutant, words) == mutate(good, seed)
        write_file(mutant, tmp_path / "mutant.gguf")
        try:
            read_layout(tmp_path / "mutant.gguf")
        except ModelFormatError:
            n_refused += 1
    assert 20 < n_refused < 100
