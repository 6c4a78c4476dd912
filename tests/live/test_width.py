"""On a CPU the bits of a token do not depend on the passes that computed it, nor on other sequences and their cells."""

from collections.abc import Iterator

import numpy as np
import pytest
from answering import DEMO, TinyModel

from moegguf.engine.llama import Llama
from moegguf.engine.sequences import Chunk
from moegguf.native.events import Phase
from tools.models import PRESETS, QUANTS

N_TOKENS, N_CELLS = 60, 256


@pytest.fixture(scope="module", params=["100%", "40%"])
def llm(request: pytest.FixtureRequest) -> Iterator[Llama]:
    """The demo, with every expert resident and with fewer."""
    with Llama(DEMO, n_ctx=N_CELLS, n_seq_max=3, expert_cache=request.param, flash_attn=True, verbose=False) as llm:
        yield llm


def tokens_of(llm: Llama, seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, llm.n_vocab() - 5, n)]


def logits(llm: Llama) -> bytes:
    """The logits of the last token of the pass before."""
    return bytes(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)))


def computed(llm: Llama, tokens: list[int], n_past: int, sequence: int = 0) -> bytes:
    phase = Phase.DECODE if len(tokens) == 1 else Phase.PREFILL
    llm.context.eval_chunks([Chunk(sequence, tokens, n_past, sequence, phase)])
    return logits(llm)


def in_passes(llm: Llama, tokens: list[int], widths: list[int]) -> dict[int, bytes]:
    """By number of tokens: the logits after a pass that ended there."""
    found, n_past = {}, 0
    for width in widths:
        found[n_past + width] = computed(llm, tokens[n_past : n_past + width], n_past)
        n_past += width
    return found


@pytest.fixture
def alone(llm: Llama) -> dict[int, bytes]:
    """The logits after each token, computed one by one in an empty context."""
    llm.context.clear()
    return in_passes(llm, tokens_of(llm, 1, N_TOKENS), [1] * N_TOKENS)


@pytest.mark.parametrize("widths", [[60], [1, 59], [7, 1, 33, 2, 17], [16, 16, 16, 12], [31, 29]])
def test_a_prompt_has_its_bits_in_passes_of_any_width(llm: Llama, alone: dict[int, bytes], widths: list[int]) -> None:
    llm.context.clear()
    for n, found in in_passes(llm, tokens_of(llm, 1, N_TOKENS), widths).items():
        assert found == alone[n], f"after {n} tokens"


TINY = sorted(name for name in PRESETS if name.startswith("tiny-"))


@pytest.mark.parametrize(
    ("preset", "quant"), [(preset, "q4_k_m") for preset in TINY] + [("tiny-mixtral", quant) for quant in QUANTS]
)
def test_every_model_has_the_same_bits_in_passes_of_any_width(tiny: TinyModel, preset: str, quant: str) -> None:
    with Llama(tiny(preset, quant), n_ctx=N_CELLS, n_seq_max=2, flash_attn=True, verbose=False) as llm:
        tokens = tokens_of(llm, 1, N_TOKENS)
        one_by_one = in_passes(llm, tokens, [1] * N_TOKENS)
        for widths in [60], [7, 1, 33, 2, 17]:
            llm.context.clear()
            for n, found in in_passes(llm, tokens, widths).items():
                assert found == one_by_one[n], f"after {n} tokens, in passes of {widths}"


def test_other_sequences_in_the_pass_and_in_the_cache_change_no_bit(llm: Llama, alone: dict[int, bytes]) -> None:
    llm.context.clear()
    tokens, others = tokens_of(llm, 1, N_TOKENS), tokens_of(llm, 2, 80)
    computed(llm, others[:50], 0, sequence=1)
    for n in range(0, 30, 3):  # two sequences in each pass
        llm.context.eval_chunks(
            [
                Chunk(1, others[50 + n : 52 + n], 50 + n, 1, Phase.PREFILL, wants_logits=False),
                Chunk(0, tokens[n : n + 3], n, 0, Phase.PREFILL),
            ]
        )
        assert logits(llm) == alone[n + 3]
        llm.context.eval_chunks([Chunk(1, others[52 + n : 53 + n], 52 + n, 1, Phase.DECODE)])
    llm.context.truncate(0, sequence=1)  # frees cells before and between those of sequence 0
    for n in range(30, N_TOKENS):
        assert computed(llm, tokens[n : n + 1], n) == alone[n + 1], f"after {n + 1} tokens"


def test_a_prefix_that_another_sequence_computed_has_the_same_bits(llm: Llama, alone: dict[int, bytes]) -> None:
    llm.context.clear()
    tokens = tokens_of(llm, 1, N_TOKENS)
    computed(llm, tokens[:41], 0, sequence=2)
    assert llm.context.copy(2, 0, 37)
    computed(llm, tokens_of(llm, 3, 9), 41, sequence=2)
    for n in range(37, N_TOKENS):
        assert computed(llm, tokens[n : n + 1], n) == alone[n + 1], f"after {n + 1} tokens"
