"""Prints docs/api.md, the page of the Python API, from signatures and docstrings:
`python -m tools.api_page`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import moegguf


def page() -> Iterator[str]:
    """Yields the lines of the page: each public name with its signature, its docstring
    and its public methods."""
    yield from (
        "<!-- made by `python -m tools.api_page > docs/api.md` -->",
        "# Python API",
        "",
    )
    yield "What `moegguf` exports, with the documentation that `help()` shows. [python](python.md) has examples."
    for name in sorted(each for each in moegguf.__all__ if not each.startswith("_")):
        found = getattr(moegguf, name)
        yield from ("", f"## {name}", "")
        yield from _entry(name, found)
        for method, value in vars(found).items() if inspect.isclass(found) else ():
            if not method.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, staticmethod | property)
            ):
                yield from ("", f"### {name}.{method}", "")
                yield from _entry(
                    method, value.fget if isinstance(value, property) else value
                )


def _entry(name: str, value: Any) -> Iterator[str]:
    """Yields the code block of a name: its docstring and, except for an exception, its
    signature. Adds the docstring of `__init__` for a class that defines `__init__` and
    is not a dataclass."""
    signature = (
        ""
        if inspect.isclass(value) and issubclass(value, Exception)
        else _signature(value)
    )
    texts = [inspect.getdoc(value)]
    if (
        inspect.isclass(value)
        and "__init__" in vars(value)
        and not hasattr(value, "__dataclass_fields__")
    ):
        texts.append(inspect.cleandoc(vars(value)["__init__"].__doc__ or ""))
    yield from ("```text", f"{name}{signature}", "")
    yield from "\n\n".join(text for text in texts if text).splitlines()
    yield "```"


def _signature(value: Any) -> str:
    """Returns the signature of a function or class, with string annotations
    unquoted."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))


if __name__ == "__main__":
    print("\n".join(page()))
