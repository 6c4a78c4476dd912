"""Parses the C header moegguf.h: its constants and structs at import, and its function
signatures at first use.

Structs become ctypes structures. Constants and structs lose their prefix: MOEGGUF_IO is
`IO`, struct moegguf_tier_info is `TierInfo`, and `enum("kind")` is {"gate": 0, "up": 1,
...}. The wheel contains the header in this folder. Parsing the header takes about 2 ms,
no longer than defining the same classes in Python. No file is generated that could
become outdated. This module parses only the part of C that the header uses, and does
not know what the functions do.
"""

from __future__ import annotations

import ctypes as c
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SCALARS: dict[str, Any] = {
    "int": c.c_int, "int8_t": c.c_int8, "uint8_t": c.c_uint8, "int32_t": c.c_int32, "uint32_t": c.c_uint32,
    "int64_t": c.c_int64, "uint64_t": c.c_uint64, "size_t": c.c_size_t, "float": c.c_float, "double": c.c_double,
    "bool": c.c_bool, "char": c.c_char,
}  # fmt: skip
# Functions that are called for each pass and never wait. Calls to them keep Python's
# global interpreter lock. A call that released the lock could wait 5 ms or more to get
# it back while other threads run Python.
_SHORT_CALLS = ("moegguf_context_awaits_tokens", "moegguf_context_is_clear")


def _struct_name(name: str) -> str:
    return "".join(map(str.capitalize, name.removeprefix("moegguf_").split("_")))


class Header:
    """A parsed C header. Its constants and structs are attributes, named without their
    prefix."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        self._enums = {name: _constants(body) for name, body in self._bodies("enum")}
        self._known: dict[str, Any] = {
            name: int(value)
            for name, value in re.findall(r"#define MOEGGUF_(\w+) (\d+)", self._text)
        }
        for constants in self._enums.values():
            self._known |= constants
        for name, body in self._bodies("struct"):
            rows = [self._field(row.strip()) for row in body.split(";") if row.strip()]
            self._known[_struct_name(name)] = type(
                _struct_name(name), (c.Structure,), {"_fields_": rows}
            )

    def __getattr__(self, name: str) -> Any:
        """Returns the constant or the struct class with this name (without the prefix).
        Raises AttributeError."""
        if name in self._known:
            return self._known[name]
        raise AttributeError(f"{self._name} has no {name}")

    def enum(self, name: str) -> dict[str, int]:
        """Returns the constants of an enum as {name: value}, with names in lower case
        and without the prefix MOEGGUF_.

        If every name has several words and all begin with the same word, that word is
        removed. A constant whose name ends in _KINDS is left out, because it is the
        number of kinds.
        """
        constants = [
            (words.split("_"), value)
            for words, value in self._enums[name].items()
            if not words.endswith("_KINDS")
        ]
        first = constants[0][0][0]
        shared = all(len(words) > 1 and words[0] == first for words, _ in constants)
        return {"_".join(words[shared:]).lower(): value for words, value in constants}

    @functools.cached_property
    def functions(self) -> dict[str, tuple[Any, list[Any], bool]]:
        """Maps each function's name to (result type, argument types, True if the result
        is an enum moegguf_status)."""
        found = {}
        for result, name, arguments in re.findall(
            r"MOEGGUF_API\s+([^;()]*?)(moegguf_\w+)\(([^;]*?)\);", self._text
        ):
            types = [
                self._type(argument)
                for argument in arguments.split(",")
                if argument.strip() != "void"
            ]
            found[name] = (
                self._type(result),
                types,
                result.strip() == "int" and name not in _SHORT_CALLS,
            )
        return found

    def declare(self, library: c.CDLL, check: Callable[[int], None]) -> None:
        """Sets the ctypes signatures of the header's functions in a loaded library.

        `check` is called with each moegguf_status that one of these functions returns.
        """
        keeping_the_lock = c.PyDLL(library._name)
        for name, (result, arguments, is_status) in self.functions.items():
            function = getattr(
                keeping_the_lock if name in _SHORT_CALLS else library, name
            )
            function.restype = result
            function.argtypes = arguments
            if is_status:
                function.errcheck = lambda status, *_: check(status)
            setattr(library, name, function)

    def _bodies(self, keyword: str) -> list[tuple[str, str]]:
        return re.findall(
            rf"\n{keyword} moegguf_(\w+) \{{(.*?)\}};", self._text, re.DOTALL
        )

    def _type(self, declaration: str, *, is_field: bool = False) -> Any:
        """Returns the ctypes type for a C declaration, which may include the declared
        name. `void` becomes None.

        Types that are neither numbers, strings nor known structs become addresses
        (c_void_p). A pointer to a number is a typed pointer in a field or a callback's
        argument, and an address in a function's argument.
        """
        base = re.sub(r"\b(const|struct|enum)\b|\*", " ", declaration).split()[0]
        n_stars = declaration.count("*")
        if base == "char" and n_stars:
            return c.c_char_p if n_stars == 1 else c.POINTER(c.c_char_p)
        known = _SCALARS.get(base) or self._known.get(_struct_name(base))
        if n_stars == 0:
            return None if base == "void" else known or c.c_void_p
        as_address = known is None or n_stars > 1 or (base in _SCALARS and not is_field)
        return c.c_void_p if as_address else c.POINTER(known)

    def _field(self, declaration: str) -> tuple[str, Any]:
        """Returns (name, ctypes type) of a struct's field. The name `pass` (a Python
        keyword) becomes `pass_`."""
        if callback := re.match(r"void \(\*(\w+)\)\((.*)\)", declaration, re.DOTALL):
            name, arguments = callback.groups()
            return name, c.CFUNCTYPE(
                None,
                *(
                    self._type(argument, is_field=True)
                    for argument in arguments.split(",")
                ),
            )
        name, length = re.findall(r"(\w+)(?:\[(\w+)\])?$", declaration)[0]
        type_ = self._type(declaration, is_field=True)
        if length:
            type_ = type_ * (
                int(length)
                if length.isdigit()
                else self._known[length.removeprefix("MOEGGUF_")]
            )
        return "pass_" if name == "pass" else name, type_


def _constants(body: str) -> dict[str, int]:
    """Returns the constants in the text of an enum as {name without MOEGGUF_: value}.

    The value of a constant without an explicit value is its position in the enum,
    counted from 0.
    """
    found: dict[str, int] = {}
    for name, value in re.findall(r"MOEGGUF_(\w+)(?:\s*=\s*([\d <]+))?", body):
        one, _, shift = value.partition("<<")
        found[name] = int(one) << int(shift or 0) if value else len(found)
    return found


_HEADER = Header(Path(__file__).with_name("moegguf.h"))
enum = _HEADER.enum
declare = _HEADER.declare


def __getattr__(name: str) -> Any:
    """Returns the constant or struct class of moegguf.h with this name (without the
    prefix).

    Raises AttributeError.
    """
    return getattr(_HEADER, name)
