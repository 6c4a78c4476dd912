"""Tests imports: a package imports only packages below it, and no import is circular.

Everything public has a docstring.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moegguf"

# The packages that each package may import, in addition to itself and the "floor". The
# floor is the set of modules that are in none of these packages.
ALLOWED: dict[str, set[str]] = {
    "floor": set(),
    "gguf": set(),
    "native": {"gguf"},
    "testing": {"native", "gguf"},
    "controller": {"native", "gguf"},
    "trace": {"controller", "native", "gguf"},
    "learning": {"trace", "controller", "native", "gguf"},
    "models": {"gguf"},
    "engine": {"models", "trace", "controller", "native", "gguf"},
    "generate": {"engine", "native", "gguf"},
    "bench": {"generate", "engine", "trace", "controller", "testing", "native", "gguf"},
    "serving": {"generate", "engine", "models", "gguf"},
    "terminal": {"generate", "engine", "models", "gguf"},
    "chat": {"terminal", "serving", "generate", "engine", "models", "gguf"},
    "server": {"serving", "generate", "engine", "models", "gguf"},
    "cli": {
        "chat", "server", "terminal", "serving", "bench", "generate", "engine", "learning", "trace", "controller",
        "models", "gguf",
    },
}  # fmt: skip

# Packages within `server` that must not import each other. Shared code is in
# `server.common`.
DIALECTS = {"openai", "ollama", "anthropic"}
APART = {name: DIALECTS - {name} for name in (*DIALECTS, "common")} | {
    "llama_server": {"ollama", "anthropic"}
}

# The packages that may import each of these libraries. Other libraries may be imported
# anywhere.
OWNED: dict[str, set[str]] = {
    "ctypes": {"native", "testing", "engine", "generate", "bench"},
    "llama_cpp": {"native", "engine"},
    "typer": {"cli", "chat", "terminal", "server"},
    "rich": {"cli", "chat", "terminal"},
    "matplotlib": set(),
    "torch": set(),
    "prompt_toolkit": {"chat"},
    "huggingface_hub": {"models"},
    "httpx2": {"models", "cli"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "pydantic": {"server", "serving", "trace"},
    "python_multipart": {"server"},
    "prometheus_client": {"server"},
    "llguidance": {"generate"},
    "ray": {"serving"},
}

# Folders beside the package. Their code imports the package, and the package must not
# import them.
BESIDE = ("predictors", "recipes", "tools", "tests")

MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def package_of(module: str) -> str:
    parts = module.split(".")
    if parts[-1] == "__main__":
        return "cli"
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "floor"


def name_of(path: Path) -> str:
    return ".".join(
        path.relative_to(PACKAGE.parent).with_suffix("").parts
    ).removesuffix(".__init__")


NAMES = {name_of(path) for path in MODULES}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path, *, types: bool = False) -> list[str]:
    """Returns the names of imported modules, including imports in functions. With
    `types`, includes imports for type checkers."""
    tree = tree_of(path)
    found: list[str] = []
    for node in ast.walk(tree if types else without_type_checking(tree)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` names the module, not the package.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner in NAMES else node.module)
    return found


def without_type_checking(tree: ast.Module) -> ast.Module:
    kept = [
        n
        for n in tree.body
        if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
    ]
    return ast.Module(kept, [])


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_imports_only_packages_that_its_package_may_import(path: Path) -> None:
    package = package_of(name_of(path))
    for name in imports_of(path):
        top = name.split(".")[0]
        assert package in OWNED.get(top, {package}), (
            f"{name_of(path)} imports {name}, which belongs to {OWNED[top]}"
        )
        assert top not in BESIDE, (
            f"{name_of(path)} imports {name}, which is no part of the package"
        )
        if top == "moegguf" and name != "moegguf":
            other = package_of(name)
            assert other in ALLOWED[package] | {package, "floor"}, (
                f"{name_of(path)} ({package}) imports {name} ({other})"
            )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_server_packages_do_not_import_each_other(path: Path) -> None:
    _, package, inner, *_ = (*name_of(path).split("."), "", "")
    forbidden = (
        {f"moegguf.server.{other}" for other in APART.get(inner, ())}
        if package == "server"
        else set()
    )
    assert not [name for name in imports_of(path) if name.startswith(tuple(forbidden))]


def test_packages_import_each_other_in_one_direction_only() -> None:
    order = list(ALLOWED)
    assert all(
        order.index(lower) < order.index(upper)
        for upper, allowed in ALLOWED.items()
        for lower in allowed
    )


def test_only_the_manager_and_its_leases_import_worker_processes() -> None:
    users = {
        name_of(path)
        for path in MODULES
        if "moegguf.serving.worker_process" in imports_of(path)
    }
    # This module starts workers itself, and hands them to its manager later.
    starts_early = "moegguf.chat.local"
    assert users == {
        "moegguf.serving.model_manager",
        "moegguf.serving.lease",
        starts_early,
    }


def test_modules_have_no_circular_imports() -> None:
    arrows = {
        name_of(path): {name for name in imports_of(path, types=True) if name in NAMES}
        - {"moegguf"}
        for path in MODULES
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for other in sorted(arrows[module]):
                visit(other, (*way, module))
            done.add(module)

    for module in sorted(arrows):
        visit(module, ())


@pytest.mark.parametrize("package", [name for name in ALLOWED if name != "floor"])
def test_package_docstring_states_its_promises_and_limits(package: str) -> None:
    text = (
        ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text()))
        or ""
    )
    assert "Promises" in text
    assert "not know" in text


def public(
    node: ast.Module | ast.ClassDef,
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields the public classes, functions, methods and properties of a module or
    class. Leaves out setters and overloads."""
    for inner in node.body:
        if not isinstance(
            inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) or inner.name.startswith("_"):
            continue
        if not any(
            ast.unparse(decorator).endswith((".setter", "overload"))
            for decorator in inner.decorator_list
        ):
            yield inner
        if isinstance(inner, ast.ClassDef):
            yield from public(inner)


@pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE.parent))
)
def test_modules_and_their_public_names_have_docstrings(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree)
    assert [
        f"{node.name}, line {node.lineno}"
        for node in public(tree)
        if not ast.get_docstring(node)
    ] == []
    said = (ast.get_docstring(node) or "" for node in public(tree))
    assert [text for text in said if text.startswith(("Of ", "As "))] == [], (
        "a docstring begins with what it is"
    )
