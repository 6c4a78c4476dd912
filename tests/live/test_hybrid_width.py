"""Tests on the CPU that the bits of hybrid models' logits depend neither on the width
of passes nor on other sequences."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_shapes import SHAPES, write_hybrid
from running import Llama, TinyModel

from moegguf.engine.sequences import STATEFUL_ARCHS, PassBatch, SequenceTokens
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment
from tools.models import PRESETS
from tools.width_check import CHECKED_BY, MOVES, operations_of

pytestmark = pytest.mark.skipif(
    not has_kernels(read_processor(), read_environment().kernels),
    reason="bits depend on the pass here",
)

# Characteristic operations that a model's graph must contain, by preset or
# architecture.
STATES = {
    "tiny-qwen3next": {"GATED_DELTA_NET", "SSM_CONV"},
    "tiny-qwen35moe": {"GATED_DELTA_NET", "SSM_CONV"},
    "tiny-qwen4exp": {"GATED_DELTA_NET", "SSM_CONV", "TOP_K", "DSV4_HC_PRE"},
    "tiny-nemotron": {"SSM_SCAN", "SSM_CONV"},
    "tiny-lfm2moe": {"SSM_CONV"},
    "tiny-kimi-linear": {"GATED_DELTA_NET", "SSM_CONV"},
    "tiny-bailingmoe3": {"GATED_DELTA_NET", "SSM_CONV"},
    "tiny-granitehybrid": {"SSM_SCAN", "SSM_CONV"},
    "tiny-deepseek4": {"LIGHTNING_INDEXER", "TOP_K", "DSV4_HC_COMB"},
    "jamba": {"SSM_SCAN", "SSM_CONV"},
    "minimax-01": {"GATED_LINEAR_ATTN"},
    "kimi-k3": {"GATED_DELTA_NET", "SSM_CONV"},
    "glm5-next": {"GATED_DELTA_NET", "SSM_CONV", "LIGHTNING_INDEXER", "TOP_K"},
}
# Models without a recurrent state in which most layers have a sliding window.
WINDOWED = {"tiny-gemma4": {"FLASH_ATTN_EXT", "GEGLU", "GELU", "TANH"}}
CHECKED = STATES | WINDOWED
# Models in which each sequence may have its own KV cells: they are tested with shared
# and with separate cells.
OWN_CELLS = ("tiny-qwen4exp", "tiny-deepseek4")
N_TOKENS = 200
N_TOGETHER = 126
N_VOCAB = 1024

Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def write(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Returns `write(name)`, which writes a random model and returns its path.

    `name` is a preset or an architecture of hybrid_shapes.py.
    """
    folder = tmp_path_factory.mktemp("hybrids")

    def write(name: str) -> Path:
        if name in PRESETS:
            return tiny(name, "q4_k_m")
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_hybrid(path, name)

    return write


class Sequences:
    """A llama.cpp context for three sequences of a model on the CPU, with ubatches of
    at most n_ubatch tokens. `has_whole_window`: False if cells that have left a sliding
    window are reused."""

    def __init__(
        self,
        path: Path,
        n_ubatch: int = N_TOKENS,
        is_unified: bool = True,
        has_whole_window: bool = True,
    ) -> None:
        self._llama = llama = library.llama_cpp()
        self._undo = ExitStack()
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        model = llama.llama_model_load_from_file(str(path).encode(), options)
        self._undo.callback(llama.llama_model_free, model)
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = (
            3072,
            3 * N_TOKENS,
            n_ubatch,
        )
        settings.n_seq_max, settings.kv_unified, settings.flash_attn_type = (
            3,
            is_unified,
            1,
        )
        settings.swa_full = has_whole_window
        settings.n_threads = settings.n_threads_batch = 1
        self._context = llama.llama_init_from_model(model, settings)
        self._undo.callback(llama.llama_free, self._context)
        self._batch = PassBatch(settings.n_batch)

    def compute(self, *chunks: SequenceTokens) -> list[bytes]:
        """Calls llama_decode once. Returns the logits' bytes for each token whose
        logits a chunk requests."""
        self._batch.fill(chunks)
        status = self._llama.llama_decode(self._context, self._batch.batch)
        assert status == 0, f"llama_decode: status {status}"
        rows = np.flatnonzero(self._batch.logits[: self._batch.batch.n_tokens])
        return [self._logits(int(row)) for row in rows]

    def _logits(self, row: int) -> bytes:
        logits: Any = self._llama.llama_get_logits_ith(self._context, row)
        return bytes(np.ctypeslib.as_array(logits, shape=(N_VOCAB,)))

    def passes(self, tokens: Sequence[int], widths: Sequence[int]) -> list[bytes]:
        """Clears the context and evaluates `tokens` as sequence 0, in passes of these
        widths.

        Returns the logits of each token.
        """
        self._llama.llama_memory_clear(
            self._llama.llama_get_memory(self._context), True
        )
        found: list[bytes] = []
        for width in widths:
            found += self.compute(part(0, tokens, len(found), len(found) + width))
        return found

    def close(self) -> None:
        self._undo.close()


def part(
    sequence: int,
    tokens: Sequence[int],
    begin: int,
    end: int,
    wants_logits: bool = True,
) -> SequenceTokens:
    """Returns a chunk with the tokens of a sequence from `begin` to `end` - 1."""
    own = tokens[begin:end]
    return SequenceTokens(
        sequence, own, begin, 0, Phase.PREFILL, wants_logits, all_logits=wants_logits
    )


def text(seed: int, n: int = N_TOKENS) -> list[int]:
    return [
        int(token) for token in np.random.default_rng(seed).integers(5, N_VOCAB - 5, n)
    ]


@pytest.fixture
def opened() -> Iterator[Callable[..., Sequences]]:
    """Yields `opened(path, ...)`, which returns a `Sequences` that is closed at the end
    of the test."""
    with ExitStack() as undo:

        def open_sequences(*arguments: Any, **options: Any) -> Sequences:
            sequences = Sequences(*arguments, **options)
            undo.callback(sequences.close)
            return sequences

        yield open_sequences


def differing(found: Sequence[bytes], expected: Sequence[bytes]) -> list[int]:
    """Returns the indices of tokens whose logits differ."""
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]


@pytest.mark.parametrize("name", CHECKED)
def test_hybrid_models_have_equal_bits_at_any_width_and_beside_others(
    write: Write, opened: Callable[..., Sequences], name: str
) -> None:
    tokens = text(1)
    sequences = opened(write(name))
    alone = sequences.passes(tokens, [1] * N_TOKENS)
    assert len(set(alone)) == N_TOKENS
    for widths in (
        [200],
        [100, 100],
        [65, 65, 65, 5],
        [64, 64, 64, 8],
        [7] * 28 + [4],
        [1, 64, 1, 134],
    ):
        assert differing(sequences.passes(tokens, widths), alone) == [], (
            f"in passes of {widths}"
        )
    for is_unified in (True, False) if name in OWN_CELLS else (True,):
        together = beside_others(opened(write(name), is_unified=is_unified), tokens)
        assert differing(together, alone[:N_TOGETHER]) == [], (
            f"together, cells shared: {is_unified}"
        )


def beside_others(sequences: Sequences, tokens: Sequence[int]) -> list[bytes]:
    """Evaluates N_TOGETHER tokens as sequence 0: each pass contains seven of them and
    seven tokens of sequence 1.

    Every second pass also contains seven tokens of sequence 2. Returns the logits of
    sequence 0.
    """
    found: list[bytes] = []
    for begin in range(0, N_TOGETHER, 7):
        chunks = [part(1, text(2), begin, begin + 7, wants_logits=False)]
        chunks.append(part(0, tokens, begin, begin + 7))
        if begin % 2:
            first = begin // 14 * 7
            chunks.append(part(2, text(3), first, first + 7, wants_logits=False))
        found += sequences.compute(*chunks)
    return found


@pytest.mark.parametrize("name", ["tiny-deepseek4", *WINDOWED])
def test_windowed_models_have_equal_bits_after_the_window_wraps_in_the_cache(
    write: Write, opened: Callable[..., Sequences], name: str
) -> None:
    n = 500
    sequences = opened(write(name), n_ubatch=100, has_whole_window=False)
    alone = sequences.passes(text(4, n), [1] * n)
    for widths in [100] * 5, [100, 1, 1, 98, 300]:
        assert differing(sequences.passes(text(4, n), widths), alone) == [], (
            f"in passes of {widths}"
        )


@pytest.mark.parametrize("name", CHECKED)
def test_every_operation_of_a_hybrid_graph_is_checked_at_several_widths(
    write: Write, name: str
) -> None:
    found = operations_of(write(name))
    assert found >= CHECKED[name]
    assert found - MOVES - CHECKED_BY.keys() == set()


def test_hybrid_models_are_batch_invariant(write: Write) -> None:
    archs = {name if name in SHAPES else PRESETS[name].arch for name in STATES}
    assert archs == STATEFUL_ARCHS
    for name in ("tiny-qwen35moe", "tiny-deepseek4", "glm5-next"):
        with Llama(write(name), n_ctx=256, flash_attn=True, verbose=False) as llm:
            assert llm.batch_invariant
        with Llama(write(name), n_ctx=256, flash_attn=False, verbose=False) as llm:
            assert not llm.batch_invariant
