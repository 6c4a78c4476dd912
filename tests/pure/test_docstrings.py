"""Everything public has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "moegguf").rglob("*.py"))


def public(node: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public classes, functions, methods and properties; setters share their property's docstring."""
    for inner in node.body:
        if not isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or inner.name.startswith("_"):
            continue
        if not any(ast.unparse(decorator).endswith((".setter", "overload")) for decorator in inner.decorator_list):
            yield inner
        if isinstance(inner, ast.ClassDef):
            yield from public(inner)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_what_is_public_in_them_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert [f"{node.name}, line {node.lineno}" for node in public(tree) if not ast.get_docstring(node)] == []
