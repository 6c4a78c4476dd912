"""Checks that tensors have types with which llama.cpp can compute: it ends the process on others.

What is added to or multiplied with activations element by element (norms, biases, scales) must be F32; everything else
is multiplied as a matrix, which takes any type that has a dot product.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import GgufFile, TensorInfo

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


def check_types(files: Iterable[GgufFile]) -> None:
    """Raises ModelFormatError for the first tensor of a type that its use does not allow."""
    for file in files:
        for tensor in file.tensors:
            if rule := _fault(tensor):
                raise ModelFormatError(
                    f"{file.path.name}: tensor '{tensor.name}', data at offset {tensor.offset}: {rule};"
                    " the file cannot be run, convert or fetch it again."
                )


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
