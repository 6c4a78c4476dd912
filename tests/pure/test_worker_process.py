"""The failure line of a log, and splitting a stream into lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegguf.serving.worker_process import WorkerConnection, failure_line

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


@given(st.lists(st.binary(max_size=5).map(lambda line: line.replace(b"\n", b""))), st.data())
def test_lines_are_split_however_they_arrive(lines: list[bytes], data: st.DataObject) -> None:
    received = list[bytes]()
    connection = WorkerConnection(lambda line: received.append(bytes(line)), lambda: None)
    stream = b"".join(line + b"\n" for line in lines)
    while stream:
        n_bytes = data.draw(st.integers(1, len(stream)))
        connection.data_received(stream[:n_bytes])
        stream = stream[n_bytes:]
    assert received == lines
