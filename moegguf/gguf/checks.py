"""Checks tensor types and the tokenizer's key-values: llama.cpp ends the process on those that it cannot compute with.

What is added to or multiplied with activations element by element (norms, biases, scales) must be F32; everything else
is multiplied as a matrix, which takes any type that has a dot product. The tokenizer's kinds, counts and ids must fit
the model; its tokens are looked at only for those of single bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import STRING, GgufFile

# Types without a dot product: those of activations, and plain numbers.
NO_DOT_PRODUCT = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
# Tables of whole numbers: expert ids by token (deepseek4).
I32_TABLES = re.compile(r"blk\.\d+\.ffn_gate_tid2eid\.weight")
# Vectors that are multiplied as a matrix of one row: the second is a reranker's, with one class.
MATRIX_VECTORS = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight|cls\.output\.weight")
# Used element by element, or as coefficients, by the table LLM_TENSOR_INFOS (llama-arch.cpp).
ELEMENTWISE = re.compile(
    r".*(norm[^.]*\.weight|\.bias|\.scale|\.input_scale|attn_sinks\.weight|ssm_conv1d[^.]*\.weight|ssm_[ad]"
    r"|ple_conv1d\.weight|shortconv\.conv\.weight|hc_[a-z]*_?(base|scale)[^.]*\.weight|rope_freqs\.weight"
    r"|rope_factors_(long|short)\.weight|_res_score\.weight)"
)

NO_VOCABULARY = ("none", "no_vocab")
F32, I32, I8, U8 = 6, 5, 1, 0  # GGUF's value types


class Kind(NamedTuple):
    """One `tokenizer.ggml.model` as llama.cpp reads it: default special tokens (None: there is none), whether BOS and
    EOS are added by default, and whether it needs merges, or a token for each byte."""

    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    merges: bool = False
    byte_tokens: bool = False
    forces_bos: bool = False  # whatever the file says


KINDS = {
    "llama": Kind(bos=1, eos=2, add_bos=True, byte_tokens=True),
    "bert": Kind(bos=101, add_bos=True),
    "gpt2": Kind(bos=11, eos=11, merges=True),
    "hybriddna": Kind(bos=11, eos=11, merges=True),
    "whitespace": Kind(bos=11, eos=11, merges=True),
    "gemma4": Kind(merges=True, forces_bos=True),
    "t5": Kind(eos=1, add_eos=True),
    "plamo2": Kind(bos=1, eos=2, byte_tokens=True),
    "rwkv": Kind(),
    "test": Kind(),
}
WITHOUT_MERGES = "kimi-k2"  # a `tokenizer.ggml.pre` that needs none
OWN_PRE = frozenset({"whitespace"})  # `tokenizer.ggml.pre` of the model of this name only
# {key after "tokenizer.ggml.": types of the array's items}, and whether there is one per token
ARRAYS = {
    "tokens": ((STRING,), True),
    "merges": ((STRING,), False),
    "scores": ((F32, I32), True),
    "token_type": ((I32,), True),
    "suppress_tokens": ((I32,), False),
}


def check_types(files: Iterable[GgufFile]) -> None:
    """Raises ModelFormatError for the first tensor of a type that its use does not allow."""
    for file in files:
        for tensor in file.tensors:
            name, type_name = tensor.name, tensor.type_name
            if I32_TABLES.fullmatch(name):
                if type_name != "I32":
                    raise file.tensor_error(tensor, f"must have type I32, but has {type_name}")
                continue
            if type_name in NO_DOT_PRODUCT:
                raise file.tensor_error(
                    tensor, f"type {type_name} is not one of weights, nothing is multiplied with it"
                )
            is_vector = sum(ne > 1 for ne in tensor.shape) <= 1 and not MATRIX_VECTORS.fullmatch(name)
            if type_name != "F32" and (is_vector or ELEMENTWISE.fullmatch(name)):
                rule = f"must have type F32, because it is used element by element, but has {type_name}"
                raise file.tensor_error(tensor, rule)


def check_tokenizer(file: GgufFile, arch: str) -> None:
    """Raises ModelFormatError for a tokenizer that llama.cpp would abort on. A missing one is left to llama.cpp."""

    def fail(name: str, rule: str) -> ModelFormatError:
        return file.key_error(f"tokenizer.ggml.{name}", rule)

    model, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model is None:
        return
    if model in NO_VOCABULARY:
        raise fail("model", f"is {model!r}: without a vocabulary the model cannot read or write text")
    kind = KINDS.get(str(model))
    if kind is None or (model == "rwkv" and "rwkv" not in arch):
        known = ", ".join(sorted(set(KINDS) - {"rwkv", "test"}))
        raise fail("model", f"must be one of {known}, but is {str(model)[:40]!r}")
    if pre in OWN_PRE and pre != model:
        raise fail("pre", f"is {pre!r}, which only a vocabulary of this kind has, not {model!r}")
    tokens = file.arrays.get("tokenizer.ggml.tokens")
    n_tokens = tokens.count if tokens else 0
    if n_tokens == 0:
        raise fail("tokens", "must be a list of tokens, but has none")
    for name, (types, per_token) in ARRAYS.items():
        key = f"tokenizer.ggml.{name}"
        found = file.arrays.get(key)
        if found is None:
            if key in file.metadata:
                raise fail(name, "must be an array, but is one value")
            continue
        if found.gguf_type not in types:
            raise fail(name, f"has items of type {found.gguf_type}, but must have type {types[0]}")
        if per_token and found.count < n_tokens:
            raise fail(name, f"has {found.count} items for {n_tokens} tokens")
    if kind.merges and pre != WITHOUT_MERGES and "tokenizer.ggml.merges" not in file.arrays:
        raise fail("merges", f"is missing, but every vocabulary of kind {model!r} has it")
    if kind.byte_tokens and file.n_byte_tokens < 256:
        raise fail("tokens", f"has tokens for {file.n_byte_tokens} of 256 bytes, but kind {model!r} needs all")
    for name, default, adds in (("bos", kind.bos, kind.add_bos), ("eos", kind.eos, kind.add_eos)):
        forced = name == "bos" and kind.forces_bos
        if forced or file.metadata.get(f"tokenizer.ggml.add_{name}_token", adds) is True:
            ids = file.metadata.get(f"tokenizer.ggml.{name}_token_id"), default
            if not any(isinstance(id, int) and 0 <= id < n_tokens for id in ids):
                raise fail(f"add_{name}_token", f"needs a token '{name}_token_id' from 0 to {n_tokens - 1}")
