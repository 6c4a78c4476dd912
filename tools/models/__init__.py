"""Writes random Mixture-of-Experts models as GGUF files, for tests and benchmarks.
Their tokenizer can encode any text.

Imports only an error class, the locality's metadata key and the list of architectures
with prediction heads from moegguf. Never holds a whole model in memory.
"""

from tools.models.projector import PROJECTORS, write_projector
from tools.models.shapes import PRESET_LOCALITY, PRESETS, Shape
from tools.models.tensors import QUANTS, model_size_bytes
from tools.models.writer import write_model, write_sparse_model

__all__ = [
    "PRESETS",
    "PRESET_LOCALITY",
    "PROJECTORS",
    "QUANTS",
    "Shape",
    "model_size_bytes",
    "write_model",
    "write_projector",
    "write_sparse_model",
]
