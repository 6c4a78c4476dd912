"""Headers on which llama.cpp ends the process, hangs or takes gigabytes are refused before it sees them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moegguf.errors import ModelFormatError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.reader import ggml_type
from tools.mutants import Header, mutate, read_header, write_file
from tools.mutants.header import ARRAY, STRING, Item, KeyValue

TinyModel = Callable[..., Path]
Change = Callable[[Header], Header]
U32, I32, F32, BOOL = 4, 5, 6, 7
ARCH = "qwen2moe"


def key(name: str, gguf_type: int, value: Item) -> Change:
    """The file with this value for a key of the architecture, or a full name."""
    return with_pair(KeyValue(name if "." in name and name.startswith("tok") else f"{ARCH}.{name}", gguf_type, value))


def array(name: str, item_type: int, values: list[Item]) -> Change:
    return with_pair(KeyValue(name, ARRAY, values, item_type))


def with_pair(pair: KeyValue) -> Change:
    return lambda header: replace(header, pairs=(*(p for p in header.pairs if p.key != pair.key), pair))


def without(name: str) -> Change:
    return lambda header: replace(header, pairs=tuple(p for p in header.pairs if p.key != name))


def tensor(name: str, type_name: str) -> Change:
    """The file with another type for one tensor."""

    def change(header: Header) -> Header:
        [index] = [i for i, t in enumerate(header.tensors) if t.name == name]
        return header.with_tensor(index, replace(header.tensors[index], raw_type=ggml_type(type_name)))

    return change


def renamed(old: str, new: str) -> Change:
    return lambda header: replace(
        header, tensors=tuple(replace(t, name=new) if t.name == old else t for t in header.tensors)
    )


def both(first: Change, second: Change) -> Change:
    return lambda header: second(first(header))


DANGEROUS: dict[str, tuple[Change, str]] = {
    "8 GiB for every text": (key("context_length", U32, (1 << 31) - 1), "context_length"),
    "no token": (array("tokenizer.ggml.tokens", STRING, []), "has none"),
    "tokens are numbers": (array("tokenizer.ggml.tokens", I32, [0] * 1024), "items of type"),
    "too few scores": (array("tokenizer.ggml.scores", F32, [0.0] * 5), "5 items for 1024 tokens"),
    "scores are one number": (key("tokenizer.ggml.scores", F32, 0.0), "must be an array"),
    "types are text": (array("tokenizer.ggml.token_type", STRING, [b"1"] * 1024), "items of type"),
    "no merges": (without("tokenizer.ggml.merges"), "merges' is missing"),
    "no vocabulary": (key("tokenizer.ggml.model", STRING, b"none"), "without a vocabulary"),
    "rwkv's vocabulary": (key("tokenizer.ggml.model", STRING, b"rwkv"), "must be one of"),
    "llama's vocabulary without bytes": (key("tokenizer.ggml.model", STRING, b"llama"), "of 256 bytes"),
    "unknown vocabulary": (key("tokenizer.ggml.model", STRING, b"x"), "must be one of"),
    "whitespace's splitting": (key("tokenizer.ggml.pre", STRING, b"whitespace"), "only a vocabulary of this kind"),
    "gemma without BOS": (
        both(key("tokenizer.ggml.model", STRING, b"gemma4"), without("tokenizer.ggml.bos_token_id")),
        "bos_token_id",
    ),
    "unknown gating": (key("expert_gating_func", U32, 5), "expert_gating_func"),
    "epsilon NaN": (key("attention.layer_norm_rms_epsilon", F32, math.nan), "epsilon"),
    "epsilon negative": (key("attention.layer_norm_rms_epsilon", F32, -1e-5), "epsilon"),
    "epsilon infinite": (key("attention.layer_norm_epsilon", F32, math.inf), "epsilon"),
    "no rotated dimension": (key("rope.dimension_count", U32, 0), "dimension_count"),
    "odd rotated dimensions": (key("rope.dimension_count", U32, 31), "dimension_count"),
    "rotated beyond the head": (key("rope.dimension_count", U32, 34), "dimension_count"),
    "rotated beyond the window's head": (key("rope.dimension_count_swa", U32, 64), "sliding-window layers"),
    "frequency NaN": (key("rope.freq_base", F32, math.nan), "freq_base"),
    "frequency zero": (key("rope.freq_base", F32, 0.0), "freq_base"),
    "scaling negative": (key("rope.scaling.factor", F32, -2.0), "scaling.factor"),
    "scale infinite": (key("expert_weights_scale", F32, math.inf), "finite"),
    "window of 2^31": (key("attention.sliding_window", U32, 1 << 31), "sliding_window"),
    "interval zero": (key("full_attention_interval", U32, 0), "full_attention_interval"),
    "a head of nothing": (key("attention.key_length", U32, 0), "key_length"),
    "a length that no layer has": (key("attention.value_length_swa", U32, 2), "no layer has heads of 2"),
    "a width of 2^32": (key("expert_shared_feed_forward_length", U32, (1 << 32) - 1), "shared_feed_forward"),
    "norm in F16": (tensor("blk.0.attn_norm.weight", "F16"), "must have type F32"),
    "norm in Q8_0": (tensor("output_norm.weight", "Q8_0"), "must have type F32"),
    "bias in IQ1_M": (tensor("blk.1.attn_k.bias", "F16"), "must have type F32"),
    "weights in Q8_K": (tensor("blk.0.ffn_up_exps.weight", "I8"), "not one of weights"),
    "weights in I16": (tensor("blk.1.attn_output.weight", "I16"), "not one of weights"),
    "weights in F64": (tensor("token_embd.weight", "F64"), "not one of weights"),
    "weights in I64": (tensor("blk.0.ffn_gate_shexp.weight", "I64"), "not one of weights"),
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
    "no rotated dimensions stated": without(f"{ARCH}.rope.dimension_count"),
    "no bound": key("kda.gate_lower_bound", F32, -math.inf),
    "a router in F16": tensor("blk.0.ffn_gate_inp.weight", "F16"),
    "a vector that is multiplied as a matrix": tensor("blk.0.ffn_gate_inp_shexp.weight", "F16"),
    "a reranker's class in F16": both(
        tensor("blk.0.ffn_gate_inp_shexp.weight", "F16"),
        renamed("blk.0.ffn_gate_inp_shexp.weight", "cls.output.weight"),
    ),
    "K for V in the layers of one length, as in Gemma 4": both(
        key("attention.value_length_swa", U32, 2), renamed("blk.0.attn_v.weight", "blk.0.attn_other.weight")
    ),
    "no types of tokens": without("tokenizer.ggml.token_type"),
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
