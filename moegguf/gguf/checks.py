"""Checks tensor types and the tokenizer's key-values: llama.cpp ends the process on those that it cannot compute with.

What is added to or multiplied with activations element by element (norms, biases, scales) must be F32; everything else
is multiplied as a matrix, which takes any type that has a dot product. The tokenizer's kinds, counts and ids must fit
the model; its tokens are looked at only for those of single bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from moegguf.gguf.reader import STRING, GgufFile, TensorInfo

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
            if rule := _fault(tensor):
                raise file.tensor_error(tensor, rule)


def _fault(tensor: TensorInfo) -> str | None:
    """The rule that a tensor's type breaks; None when it can be computed with."""
    if I32_TABLES.fullmatch(tensor.name):
        return None if tensor.type_name == "I32" else f"must have type I32, but has {tensor.type_name}"
    if tensor.type_name in NO_DOT_PRODUCT:
        return f"type {tensor.type_name} is not one of weights, nothing can be multiplied with it"
    is_vector = sum(ne > 1 for ne in tensor.shape) <= 1 and not MATRIX_VECTORS.fullmatch(tensor.name)
    if (is_vector or ELEMENTWISE.fullmatch(tensor.name)) and tensor.type_name != "F32":
        return f"must have type F32, because it is used element by element, but has {tensor.type_name}"
    return None


def check_tokenizer(file: GgufFile, arch: str) -> None:
    """Raises ModelFormatError for a tokenizer that llama.cpp would abort on. A missing one is left to llama.cpp."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model is None:
        return
    if model in NO_VOCABULARY:
        raise file.key_error(
            "tokenizer.ggml.model", f"is {model!r}: without a vocabulary the model cannot read or write text"
        )
    kind = KINDS.get(str(model))
    if kind is None or (model == "rwkv" and "rwkv" not in arch):
        known = ", ".join(sorted(set(KINDS) - {"rwkv", "test"}))
        raise file.key_error("tokenizer.ggml.model", f"must be one of {known}, but is {str(model)[:40]!r}")
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre in OWN_PRE and pre != model:
        raise file.key_error(
            "tokenizer.ggml.pre", f"is {pre!r}, which only a vocabulary of this kind has, not {model!r}"
        )
    n_tokens = _check_arrays(file)
    if kind.merges and pre != WITHOUT_MERGES and "tokenizer.ggml.merges" not in file.arrays:
        raise file.key_error("tokenizer.ggml.merges", f"is missing, but every vocabulary of kind {model!r} has it")
    if kind.byte_tokens and file.n_byte_tokens < 256:
        raise file.key_error(
            "tokenizer.ggml.tokens", f"has tokens for {file.n_byte_tokens} of 256 bytes, but kind {model!r} needs all"
        )
    _check_added(file, kind, n_tokens)


def _check_arrays(file: GgufFile) -> int:
    """Checks types and lengths of the arrays; returns the number of tokens."""
    tokens = file.arrays.get("tokenizer.ggml.tokens")
    n_tokens = tokens.count if tokens else 0
    if n_tokens == 0:
        raise file.key_error("tokenizer.ggml.tokens", "must be a list of tokens, but has none")
    for name, (types, per_token) in ARRAYS.items():
        key = f"tokenizer.ggml.{name}"
        found = file.arrays.get(key)
        if found is None:
            if key in file.metadata:
                raise file.key_error(key, "must be an array, but is one value")
            continue
        if found.gguf_type not in types:
            raise file.key_error(key, f"has items of type {found.gguf_type}, but must have type {types[0]}")
        if per_token and found.count < n_tokens:
            raise file.key_error(key, f"has {found.count} items for {n_tokens} tokens")
    return n_tokens


def _check_added(file: GgufFile, kind: Kind, n_tokens: int) -> None:
    """A token that is added to every text must be there."""
    for name, default, adds in (("bos", kind.bos, kind.add_bos), ("eos", kind.eos, kind.add_eos)):
        forced = name == "bos" and kind.forces_bos
        if not forced and file.metadata.get(f"tokenizer.ggml.add_{name}_token", adds) is not True:
            continue
        given = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        ids = (given, default)
        if not any(isinstance(id, int) and 0 <= id < n_tokens for id in ids):
            raise file.key_error(
                f"tokenizer.ggml.add_{name}_token", f"needs a token '{name}_token_id' from 0 to {n_tokens - 1}"
            )
