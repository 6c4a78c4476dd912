"""Tests tools/type_shares.py, which counts the bytes of each tensor type in widely used
GGUF files."""

import math

import pytest

from tools.type_shares import FILES, FTYPES, SHAPES, File, Quantiser, count


@pytest.fixture(scope="module")
def quantiser() -> Quantiser:
    return Quantiser()


def test_quantiser_uses_blocks_of_32_for_rows_that_256_does_not_divide(
    quantiser: Quantiser,
) -> None:
    names = {number: name for name, number in quantiser.ggml.types.items()}
    shape = SHAPES["GLM-4.5-Air"]
    found = zip(shape.tensors(), quantiser.types(shape, FTYPES["IQ4_XS"]), strict=True)
    of_experts = {
        name.partition("ffn_")[2]: names[number]
        for (name, _), number in found
        if name.startswith("blk.9.")
    }
    assert of_experts["gate_exps.weight"] == "iq4_xs"
    assert of_experts["down_exps.weight"] == "iq4_nl"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_count_assigns_a_type_to_every_byte_of_a_file(
    quantiser: Quantiser, file: File
) -> None:
    found = count(quantiser, file)
    n_values = sum(math.prod(dims) for _, dims in SHAPES[file.shape].tensors())
    assert 1.5 < 8 * found.total() / n_values < 8.6
