"""Checks that attention matrices have the shapes the metadata promises, where llama.cpp would abort later.

Covers the ordinary names only; a model without them passes. Knows shapes, not what is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from moegguf.errors import ModelFormatError
from moegguf.gguf_file import TensorInfo
from moegguf.hparams import Hparams


def check_attention(tensors: Mapping[str, TensorInfo], hparams: Hparams, label: str) -> None:
    """Raises ModelFormatError for a Q, K or V matrix whose rows are not heads x length, as the metadata says.

    Q may have twice the rows (some models keep a gate in it). Models with lengths of their own for sliding
    windows, and with latent attention, are left to llama.cpp.
    """
    hp = hparams
    if hp.is_mla or hp.own_window_lengths or hp.n_head[0] == 0:
        return
    for il in range(hp.n_layer):
        for name, heads, length in (
            ("attn_q", hp.n_head[il], hp.key_length),
            ("attn_k", hp.n_head_kv[il], hp.key_length),
            ("attn_v", hp.n_head_kv[il], hp.value_length),
        ):
            tensor = tensors.get(f"blk.{il}.{name}.weight")
            if tensor is None or len(tensor.shape) != 2 or heads == 0:
                continue
            n_rows, wanted = tensor.shape[1], heads * length
            if n_rows != wanted and not (name == "attn_q" and n_rows == 2 * wanted):
                raise ModelFormatError(
                    f"{label}: tensor '{tensor.name}', data at offset {tensor.offset}: has {n_rows} rows, but"
                    f" {heads} heads of {length} make {wanted}; fetch the file again."
                )
