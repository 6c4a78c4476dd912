"""Tests the prose linter: it finds sentences that break a rule and accepts plain ones.

This project's own packages must have no findings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import prose


def rules(words: str, kind: str = "docstring") -> list[str]:
    return list(prose.rules_broken(prose.Text("file.py", 1, kind, words)))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("Whether a slot is pinned.", "opens with 'whether'"),
        ("Of a layer: its experts.", "opens with 'of'"),
        ("pool.h: what a pool holds.", "opens with 'what'"),
        ("The same for all layers.", "opens with 'the same'"),
        ("Returns the size of a slot and that of a pool.", "says 'that of'"),
        ("Raises StorageError where so many bytes are left.", "says 'so many'"),
        ("Evicts " + "an expert " * 15 + "of a pool.", "has a sentence of 34 words"),
    ],
)
def test_prose_finds_a_sentence_that_breaks_a_rule(words: str, rule: str) -> None:
    assert rules(words) == [rule]


@pytest.mark.parametrize(
    "words",
    [
        "Returns the slot of an expert, or None where it has none.",
        "A slot in a pool.",
        "tier.h: the experts of one pool.",
        "Reads a file.\n\n    python -m tools.prose of which so many words are code and no sentence at all\n",
    ],
)
def test_prose_accepts_a_plain_sentence(words: str) -> None:
    assert rules(words) == []


def test_prose_finds_a_class_docstring_with_five_fields() -> None:
    fields = "A plan. n_slots: slots. n_ctx: tokens. n_batch: tokens. n_ubatch: tokens. seed: a number."
    assert rules(fields, "class") == ["describes more than 4 fields in a paragraph"]
    assert rules(fields, "docstring") == []


def test_prose_allows_a_comment_that_opens_with_if() -> None:
    assert rules("If the file is gone, nothing is left to do.", "comment") == []
    assert rules("of a layer", "comment") == ["opens with 'of'"]


def test_prose_joins_comments_on_successive_lines() -> None:
    source = "# One sentence that goes\n# over two lines.\nx = 1  # bytes\n"
    assert [text.words for text in prose.python_texts("a.py", source)] == [
        "One sentence that goes\nover two lines.",
        "bytes",
    ]
    native = '// One sentence that goes\n// over two lines.\nint x; // bytes\nconst char * s = "// no comment";\n'
    assert [text.words for text in prose.native_texts("a.h", native)] == [
        "One sentence that goes\nover two lines.",
        "bytes",
    ]


def test_findings_name_file_line_and_rule(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""A module."""\n\n\ndef f() -> None:\n    """What it does."""\n'
    )
    assert [str(finding) for finding in prose.findings_in(["."], tmp_path)] == [
        "a.py:5: opens with 'what': What it does."
    ]


def test_packages_in_order_have_no_finding() -> None:
    assert not [str(finding) for finding in prose.findings_in(prose.IN_ORDER)]
    assert len(prose.EXCEPTIONS) <= prose.MOST_EXCEPTIONS
