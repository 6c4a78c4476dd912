"""Who may import whom: faces → serving → engine → models, controller → native.

The floor is open to all and imports nobody but itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moegguf"

# What each room may import of the package, besides itself and the floor.
ALLOWED = {
    "floor": set[str](),
    "native": set[str](),
    "controller": {"native"},
    "models": set[str](),
    "engine": {"controller", "native", "models"},
    "serving": {"engine", "models"},
    "faces": {"engine", "controller", "models", "serving"},
}

# Libraries that belong to some rooms only.
OWNED = {
    "ctypes": {"native", "engine"},
    "llama_cpp": {"native", "engine"},
    "typer": {"faces"},
    "rich": {"faces"},
    "matplotlib": {"faces"},
    "torch": set[str](),
    "prompt_toolkit": {"faces"},
    "huggingface_hub": {"models"},
    "httpx2": {"models"},
    "starlette": {"faces"},
    "uvicorn": {"faces"},
    "pydantic": {"faces"},
}

MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    parts = module.split(".")
    if parts[-1] == "__main__":
        return "faces"
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "floor"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[str]:
    """Everything the module imports, also inside functions; not what only type checkers see."""
    for node in ast.walk(without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    return tree


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(name_of(path))
    for name in imports_of(path):
        top = name.split(".")[0]
        assert room in OWNED.get(top, {room}), f"{name_of(path)} imports {name}, which belongs to {OWNED[top]}"
        if top == "moegguf" and name != "moegguf":
            other = room_of(name)
            assert other in ALLOWED[room] | {room, "floor"}, f"{name_of(path)} ({room}) imports {name} ({other})"


@pytest.mark.parametrize("room", ["native", "controller", "models", "engine", "serving", "faces"])
def test_each_room_has_a_door_that_says_what_it_promises_and_does_not_know(room: str) -> None:
    door = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    assert "Promises" in door
    assert "not know" in door
