"""Which processors have kernels whose bits do not depend on the pass."""

import pytest

from moegguf.engine.sequences import NEEDED_FLAGS, has_kernels
from moegguf.processor import Processor


@pytest.mark.parametrize(
    ("flags", "chosen", "expected"),
    [
        (NEEDED_FLAGS, "", True),
        (NEEDED_FLAGS | {"avx512f"}, "avx2", True),
        (NEEDED_FLAGS, "upstream", False),
        ({"avx2", "f16c"}, "", False),
        (set(), "", False),
    ],
)
def test_the_processor_and_the_chosen_kernels_decide(flags: set[str], chosen: str, expected: bool) -> None:
    assert has_kernels(Processor("a processor", frozenset(flags)), chosen) is expected
