"""Who leaves so that a model fits, and when it has to wait."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegguf.engine.machine import Memory
from moegguf.errors import BudgetError
from moegguf.serving.memory_budget import Admission, Limit, LoadedModel, Size, admit, is_embedding
from moegguf.serving.worker_process import WorkerConnection, last_words
from moegguf.settings import Settings

GIB = 1 << 30


def size(wish: int, least: int) -> Size:
    return Size(wish, least, cast(Any, None), cast(Any, None))


@pytest.mark.parametrize(
    ("wish", "least", "tenants", "verdict"),
    [
        (50, 10, [], Admission(50)),
        (200, 10, [], Admission(100)),
        (50, 10, [("a", 40, True)], Admission(50)),
        (80, 10, [("a", 40, True)], Admission(leave=("a",))),
        (80, 10, [("a", 40, True), ("b", 30, True)], Admission(leave=("a", "b"))),
        (60, 10, [("a", 40, True), ("b", 30, True)], Admission(leave=("a",))),
        (60, 10, [("a", 40, False), ("b", 30, True)], Admission(leave=("b",))),
        (80, 10, [("a", 40, False)], Admission(60)),
        (80, 70, [("a", 40, False)], Admission()),
        (80, 70, [("a", 40, False), ("b", 10, True)], Admission()),
    ],
)
def test_room(wish: int, least: int, tenants: list[tuple[str, int, bool]], verdict: Admission) -> None:
    assert admit(size(wish, least), 100, [LoadedModel(*tenant) for tenant in tenants]) == verdict


def test_one_that_is_leaving_is_waited_for() -> None:
    assert admit(size(80, 10), 100, [LoadedModel("a", 40, False, leaving=True)]) == Admission(leave=("a",))


def test_places_count_as_memory_does() -> None:
    tenants = [LoadedModel("a", 1, True), LoadedModel("b", 1, True)]
    assert admit(size(5, 5), 100, tenants, 2) == Admission(leave=("a",))
    assert admit(size(5, 5), 100, [LoadedModel("a", 1, False)], 1) == Admission()


def test_what_never_fits_is_an_error() -> None:
    with pytest.raises(BudgetError, match=r"'m' needs at least 2.00GiB.* 1.00GiB"):
        admit(size(3 * GIB, 2 * GIB), GIB, [], name="m")


@given(
    st.integers(1, 150), st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 60), st.booleans(), st.booleans()), max_size=6), st.integers(1, 7),
)  # fmt: skip
def test_no_verdict_ever_breaks_the_limit(
    wish: int, least: int, others: list[tuple[int, bool, bool]], max_models: int
) -> None:
    wish = max(wish, least)
    tenants, used = list[LoadedModel](), 0
    for i, (n_bytes, idle, leaving) in enumerate(others):
        if used + n_bytes <= 100:
            tenants.append(LoadedModel(str(i), n_bytes, idle, leaving))
            used += n_bytes
    verdict = admit(size(wish, least), 100, tenants, max_models)
    gone = [t for t in tenants if t.name in verdict.leave]
    assert all(t.idle or t.leaving for t in gone)
    assert not (verdict.take_bytes and verdict.leave)
    if verdict.take_bytes:
        assert least <= verdict.take_bytes <= wish and used + verdict.take_bytes <= 100
        assert len(tenants) < max_models
    elif verdict.leave:
        assert used - sum(t.size_bytes for t in gone) + least <= 100
        assert len(tenants) - len(gone) < max_models
    else:
        busy = [t for t in tenants if not (t.idle or t.leaving)]
        assert sum(t.size_bytes for t in busy) + least > 100 or len(busy) >= max_models


def test_the_limit_is_the_setting_or_what_is_free() -> None:
    free = [10 * GIB]

    def memory() -> Memory:
        return Memory(16 * GIB, free[0], "the machine")

    assert Limit(Settings(memory_bytes=GIB), memory).bytes(5 * GIB) == GIB
    limit = Limit(Settings(), memory)
    at_start = limit.bytes(0)
    assert at_start == 10 * GIB - GIB // 2
    free[0] = 7 * GIB
    assert limit.bytes(4 * GIB) == at_start, "models took it, not others"
    free[0] = 2 * GIB
    assert 5 * GIB < limit.bytes(4 * GIB) < 6 * GIB, "others took the rest"
    free[0] = 0
    assert limit.bytes(0) == 0


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"general.architecture": "bert", "bert.pooling_type": 1}, True),
        ({"general.architecture": "bert", "bert.pooling_type": 0}, False),
        ({"general.architecture": "qwen2moe"}, False),
        ({}, False),
    ],
)
def test_which_models_give_vectors(metadata: dict[str, Any], expected: bool) -> None:
    assert is_embedding(metadata) is expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("all is well\n", ""),
        ("a\nggml.c:12: GGML_ASSERT(x) failed\n[New LWP 5]\n", "ggml.c:12: GGML_ASSERT(x) failed"),
        ("Traceback\nMemoryError: no memory\n\n", "MemoryError: no memory"),
        ("what(): " + "x" * 999, "what(): " + "x" * 292),
    ],
)
def test_last_words(text: str, words: str) -> None:
    assert last_words(text) == words


@given(st.lists(st.binary(max_size=5).map(lambda line: line.replace(b"\n", b""))), st.data())
def test_lines_are_cut_wherever_they_arrive_broken(lines: list[bytes], data: st.DataObject) -> None:
    heard = list[bytes]()
    link = WorkerConnection(lambda line: heard.append(bytes(line)), lambda: None)
    stream = b"".join(line + b"\n" for line in lines)
    while stream:
        n_bytes = data.draw(st.integers(1, len(stream)))
        link.data_received(stream[:n_bytes])
        stream = stream[n_bytes:]
    assert heard == lines
