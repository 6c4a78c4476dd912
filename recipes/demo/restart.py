"""Reads the tokenizer and the dequantised weights from a GGUF file of this recipe, so
that another run can start from them."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models

from recipes.demo import tokenizer
from recipes.demo.export import gguf_name
from recipes.demo.model import DemoModel


def read_tokenizer(path: Path) -> Tokenizer:
    """Returns a tokenizer with the vocabulary and merges of the GGUF file."""
    fields = gguf.GGUFReader(path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges: list[str] = fields["tokenizer.ggml.merges"].contents()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    found = tokenizer.with_splits(
        models.BPE({token: i for i, token in enumerate(tokens)}, pairs)
    )
    found.add_special_tokens(list(tokenizer.SPECIALS))
    return found


def read_weights(path: Path, model: DemoModel) -> None:
    """Copies the file's weights into a model of the same shape. Raises ValueError if a
    tensor has a different number of weights."""
    tensors: Mapping[str, gguf.ReaderTensor] = {
        t.name: t for t in gguf.GGUFReader(path).tensors
    }
    state = {}
    for name, weight in model.state_dict().items():
        tensor = tensors[gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(
            np.float32
        )
        if values.size != weight.numel():
            raise ValueError(
                f"{path}: {tensor.name} has {values.size} weights, this recipe's has {weight.numel()}"
            )
        state[name] = torch.from_numpy(values).view_as(weight)
    model.load_state_dict(state)
