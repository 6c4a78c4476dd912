"""The failure line of a log."""

from __future__ import annotations

import pytest

from moegguf.serving.worker_process import failure_line

COMPUTE = "graph_compute: ggml_backend_sched_graph_compute_async"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("all is well\n", ""),
        ("a\nggml.c:12: GGML_ASSERT(x) failed\n[New LWP 5]\n", "ggml.c:12: GGML_ASSERT(x) failed"),
        ("Traceback\nMemoryError: no memory\n\n", "MemoryError: no memory"),
        (f"an error\n{COMPUTE} failed with error 1\n", "an error"),
        (f"{COMPUTE} failed with error -1\n", f"{COMPUTE} failed with error -1"),
        ("what(): " + "x" * 999, "what(): " + "x" * 292),
    ],
)
def test_the_failure_line_of_a_log(text: str, expected: str) -> None:
    assert failure_line(text) == expected
