"""Tests that every public function of Llama, Engine and Sampling has a docstring
example that prints what it shows."""

from __future__ import annotations

import doctest
from collections.abc import Iterator

import pytest

import moegguf

CLASSES = (moegguf.Llama, moegguf.Engine, moegguf.Sampling)


def _public_functions(owner: type) -> set[str]:
    """Returns the qualified names of public functions and properties that `owner`
    itself defines."""
    return {
        f"{owner.__name__}.{name}"
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, (property, staticmethod)))
    }


def _examples() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=True)
    return {
        found.name: found
        for owner in CLASSES
        for found in finder.find(owner, owner.__name__)
        if found.examples
    }


EXAMPLES = _examples()


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, object]]:
    """Yields the names that examples use: the package, a loaded model `llm`, and an
    `engine`."""
    with (
        moegguf.Llama("demo", verbose=False) as llm,
        moegguf.Engine("demo", n_ctx=512) as engine,
    ):
        yield {"moegguf": moegguf, "llm": llm, "engine": engine}


def test_every_public_function_has_an_example() -> None:
    wanted = set().union(*map(_public_functions, CLASSES)) | {"Llama", "Engine"}
    assert wanted - set(EXAMPLES) == set()


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_docstring_example_prints_the_shown_output(
    name: str, objects: dict[str, object]
) -> None:
    example = EXAMPLES[name]
    example.globs = dict(objects)
    printed: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    result = runner.run(example, out=printed.append)
    assert result.failed == 0, "".join(printed)
