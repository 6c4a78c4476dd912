"""Layers with a sliding window: which layers have one, and for how many tokens
llama.cpp allocates their KV cache.

Such a layer reads only the last tokens of a sequence. llama.cpp then needs cells only
for the window and the tokens of a pass, and reuses the cells of older tokens
(src/llama-kv-cache-iswa.cpp).
"""

from __future__ import annotations

from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.recurrent import padded, shares_cells
from moegguf.gguf.experts import ExpertLayout

# Architectures whose files need not list the layers with a window (src/models/*.cpp):
# the layers of a group. All layers of a group have a window, except the last.
GROUPS = {
    "afmoe": 4, "exaone-moe": 4, "gemma3": 6, "gpt-oss": 2, "llama4": 4, "mellum": 4, "muse-glimmer": 4,
}  # fmt: skip
# Here all layers of a group have a window, except the first.
GROUPS_AFTER_FIRST = {"cohere2moe": 4, "laguna": 4, "smallthinker": 4}
# Windows that llama.cpp does not read from the file.
FIXED_WINDOWS = {"llama4": 8192, "smallthinker": 4096}


def window_tokens(layout: ExpertLayout) -> int:
    """Returns the length of the sliding window in tokens; 0 if there is none."""
    fixed = FIXED_WINDOWS.get(layout.arch, 0)
    # Files of Llama 4 state only that there is no window.
    default = fixed if layout.arch == "llama4" else 0
    given = layout.number("attention.sliding_window", default)
    return fixed or given if given else 0


def window_layers(layout: ExpertLayout) -> frozenset[int]:
    """Returns the indices of the layers with a sliding window. Returns no layers if the
    file does not list them and the architecture is not known to have any."""
    arch = layout.arch
    if not window_tokens(layout):
        return frozenset()
    pattern = layout.metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return frozenset(il for il, marked in enumerate(pattern) if marked)
    known = (GROUPS | GROUPS_AFTER_FIRST).get(arch)
    if known is None:
        return frozenset()
    n_group = pattern if isinstance(pattern, int) else known
    layers = frozenset(range(layout.hparams.n_layer))
    if not n_group:
        return layers
    first_whole = 0 if arch in GROUPS_AFTER_FIRST else n_group - 1
    return layers.difference(range(first_whole, len(layers), n_group))


def has_whole_windows(layout: ExpertLayout, spec: LoadSpec) -> bool:
    """Returns True if layers with a sliding window have cells for the whole context.

    This is always so if each sequence has its own cells. DeepSeek V4 is the only such
    model with a window. Its memory is not divided into parts, and its plan counts the
    keys of all tokens.
    """
    return spec.whole_windows or not shares_cells(layout)


def window_cells(
    layout: ExpertLayout, n_cells: int, n_seq_max: int, n_ubatch: int
) -> int:
    """Returns how many cells each layer with a sliding window has if other layers have
    `n_cells`. All sequences share the cells, and a pass has `n_ubatch` tokens."""
    n_needed = n_seq_max * window_tokens(layout) + n_ubatch
    return padded(min(n_cells, n_needed))
