"""Checks that the attention matrices have the shapes the metadata promises, where llama.cpp would abort later.

Covers the ordinary names only; a model without them passes. Knows shapes, not what is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from moegguf.errors import ModelFormatError
from moegguf.gguf_file import TensorInfo
from moegguf.hparams import Hparams


def check_attention(tensors: Mapping[str, TensorInfo], hparams: Hparams, label: str) -> None:
    """Raises ModelFormatError for a K or V matrix whose rows are not heads x length, as the metadata gives them.

    Models with lengths of their own for sliding windows, and with latent attention, are left to llama.cpp.
    """
    if hparams.is_mla or hparams.own_window_lengths or hparams.n_head[0] == 0:
        return
    for il in range(hparams.n_layer):
        for name, length in (("attn_k", hparams.key_length), ("attn_v", hparams.value_length)):
            tensor = tensors.get(f"blk.{il}.{name}.weight")
            heads = hparams.n_head_kv[il]
            if tensor is None or len(tensor.shape) != 2 or heads == 0 or tensor.shape[1] == heads * length:
                continue
            raise ModelFormatError(
                f"{label}: tensor '{tensor.name}', data at offset {tensor.offset}: has {tensor.shape[1]} rows, but"
                f" {heads} heads of {length} make {heads * length}; the file cannot be run, fetch it again."
            )
