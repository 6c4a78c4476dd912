"""Checks the key-values of the tokenizer: llama.cpp ends the process on a vocabulary that does not fit its model.

Looks at kinds, counts and ids; of the tokens themselves only at those for single bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import STRING, GgufFile

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


def check_tokenizer(file: GgufFile, arch: str) -> None:
    """Raises ModelFormatError for a tokenizer that llama.cpp would abort on. A missing one is left to llama.cpp."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model is None:
        return
    if model in NO_VOCABULARY:
        raise _bad(file, "model", f"is {model!r}: without a vocabulary the model cannot read or write text")
    kind = KINDS.get(str(model))
    if kind is None or (model == "rwkv" and "rwkv" not in arch):
        known = ", ".join(sorted(set(KINDS) - {"rwkv", "test"}))
        raise _bad(file, "model", f"must be one of {known}, but is {str(model)[:40]!r}")
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre in OWN_PRE and pre != model:
        raise _bad(file, "pre", f"is {pre!r}, which only a vocabulary of this kind has, not {model!r}")
    n_tokens = _check_arrays(file)
    if kind.merges and pre != WITHOUT_MERGES and "tokenizer.ggml.merges" not in file.arrays:
        raise _bad(file, "merges", f"is missing, but every vocabulary of kind {model!r} has it")
    if kind.byte_tokens and file.n_byte_tokens < 256:
        raise _bad(file, "tokens", f"has tokens for {file.n_byte_tokens} of 256 bytes, but kind {model!r} needs all")
    _check_added(file, kind, n_tokens)


def _bad(file: GgufFile, name: str, rule: str) -> ModelFormatError:
    return ModelFormatError(
        f"{file.path.name}: key 'tokenizer.ggml.{name}' {rule}; the file cannot be run, fetch it again."
    )


def _check_arrays(file: GgufFile) -> int:
    """Checks types and lengths of the arrays; returns the number of tokens."""
    tokens = file.arrays.get("tokenizer.ggml.tokens")
    n_tokens = tokens.count if tokens else 0
    if n_tokens == 0:
        raise _bad(file, "tokens", "must be a list of tokens, but has none")
    for name, (types, per_token) in ARRAYS.items():
        key = f"tokenizer.ggml.{name}"
        found = file.arrays.get(key)
        if found is None:
            if key in file.metadata:
                raise _bad(file, name, "must be an array, but is one value")
            continue
        if found.gguf_type not in types:
            raise _bad(file, name, f"has items of type {found.gguf_type}, but must have type {types[0]}")
        if per_token and found.count < n_tokens:
            raise _bad(file, name, f"has {found.count} items for {n_tokens} tokens")
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
            raise _bad(file, f"add_{name}_token", f"needs a token '{name}_token_id' from 0 to {n_tokens - 1}")
