"""Tests `MemoryParts` with a llama.cpp without moegguf's patches, as in measurements of
stock llama.cpp."""

from types import SimpleNamespace

import pytest

from moegguf.engine import memory_parts
from moegguf.engine.memory_parts import WHOLE, MemoryParts


def test_stock_llama_cpp_changes_the_whole_memory_by_its_own_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed = list[tuple[int, ...]]()
    stock = SimpleNamespace(
        llama_cpp=SimpleNamespace(_lib=SimpleNamespace()),
        llama_memory_seq_rm=lambda *given: removed.append(given) or True,
        llama_memory_seq_pos_min=lambda memory, sequence: 3,
        llama_memory_seq_pos_max=lambda memory, sequence: 8,
    )
    monkeypatch.setattr(memory_parts.library, "llama_cpp", lambda: stock)
    llm = SimpleNamespace(_ctx=SimpleNamespace(memory=7))
    parts = MemoryParts(llm)  # type: ignore[arg-type]
    assert parts.all == WHOLE
    assert parts.remove(WHOLE, 1, 4, 6) and removed == [(7, 1, 4, 6)]
    assert (parts.first(WHOLE, 1), parts.end(WHOLE, 1)) == (3, 9)
