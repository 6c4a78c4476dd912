"""`moegguf.h` as ctypes, read from the header when imported: constants, structs, and the signatures of functions.

Names lose their prefix: MOEGGUF_IO is `IO`, struct moegguf_tier_info is `TierInfo`, and `enum("fault_kind")` is
{"open": 0, "read": 1, ...}. The header is in the wheel beside this file; reading it takes 2 ms, what creating the same
classes from Python takes, and nothing that was generated can be out of date. Knows the C that the header is written in,
and not what its calls mean.
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
_HEADER = re.sub(r"//.*", "", Path(__file__).with_name("moegguf.h").read_text(encoding="utf-8"))
# Called in every pass. They wait for nothing, so they keep the interpreter's lock: taking it again takes longer than
# they do, up to a thread's turn (5 ms) while others run Python.
_SHORT_CALLS = ("moegguf_context_awaits_tokens", "moegguf_context_is_clear")


_ENUMS: dict[str, dict[str, int]] = {}  # {enum: {its constants in the header's words: value}}
for _name, _body in re.findall(r"enum moegguf_(\w+) \{(.*?)\}", _HEADER, re.DOTALL):
    _ENUMS[_name] = {}
    for _constant, _value in re.findall(r"MOEGGUF_(\w+)(?:\s*=\s*([\d <]+))?", _body):
        _one, _, _shift = _value.partition("<<")
        _ENUMS[_name][_constant] = int(_one) << int(_shift or 0) if _value else len(_ENUMS[_name])
_CONSTANTS = {name: int(value) for name, value in re.findall(r"#define MOEGGUF_(\w+) (\d+)", _HEADER)}
for _of_enum in _ENUMS.values():
    _CONSTANTS |= _of_enum


def enum(name: str) -> dict[str, int]:
    """{constant in small letters, without the words that all of them begin with: value} of enum moegguf_NAME.

    A last constant that only counts the others (..._KINDS) is none of them.
    """
    constants = [(words.split("_"), value) for words, value in _ENUMS[name].items() if not words.endswith("_KINDS")]
    first = constants[0][0][0]
    shared = all(len(words) > 1 and words[0] == first for words, _ in constants)
    return {"_".join(words[shared:]).lower(): value for words, value in constants}


def _struct_name(name: str) -> str:
    return "".join(map(str.capitalize, name.removeprefix("moegguf_").split("_")))


def _type(declaration: str, *, is_field: bool = False) -> Any:
    """The type in a declaration, with a name or without; what is not of this header is an address.

    Fields keep what they point to. Callers give arguments that point to numbers as addresses.
    """
    base, n_stars = re.sub(r"\b(const|struct|enum)\b|\*", " ", declaration).split()[0], declaration.count("*")
    if base == "char" and n_stars:
        return c.c_char_p if n_stars == 1 else c.POINTER(c.c_char_p)
    known = _SCALARS.get(base) or _STRUCTS.get(_struct_name(base))
    if n_stars == 0:
        return None if base == "void" else known or c.c_void_p
    as_address = known is None or n_stars > 1 or (base in _SCALARS and not is_field)
    return c.c_void_p if as_address else c.POINTER(known)


def _field(declaration: str) -> tuple[str, Any]:
    """(name, type) of one field; keywords of Python get an underscore."""
    if callback := re.match(r"void \(\*(\w+)\)\((.*)\)", declaration, re.DOTALL):
        name, arguments = callback.groups()
        return name, c.CFUNCTYPE(None, *(_type(argument, is_field=True) for argument in arguments.split(",")))
    name, length = re.findall(r"(\w+)(?:\[(\w+)\])?$", declaration)[0]
    type_ = _type(declaration, is_field=True)
    if length:
        type_ = type_ * (int(length) if length.isdigit() else _CONSTANTS[length.removeprefix("MOEGGUF_")])
    return "pass_" if name == "pass" else name, type_


_STRUCTS: dict[str, Any] = {}
for _name, _body in re.findall(r"\nstruct moegguf_(\w+) \{(.*?)\n\}", _HEADER, re.DOTALL):
    _rows = [_field(row.strip()) for row in _body.split(";") if row.strip()]
    _STRUCTS[_struct_name(_name)] = type(_struct_name(_name), (c.Structure,), {"_fields_": _rows})


def __getattr__(name: str) -> Any:
    """A constant or a struct by its name without the prefix."""
    for found in (_CONSTANTS, _STRUCTS):
        if name in found:
            return found[name]
    raise AttributeError(f"moegguf.h has no {name}")


@functools.cache
def functions() -> dict[str, tuple[Any, list[Any], bool]]:
    """{function: (type of its result, types of its arguments, whether the result is an enum moegguf_status)}."""
    found = {}
    for result, name, arguments in re.findall(r"MOEGGUF_API\s+([^;()]*?)(moegguf_\w+)\(([^;]*?)\);", _HEADER):
        types = [_type(argument) for argument in arguments.split(",") if argument.strip() != "void"]
        found[name] = _type(result), types, result.strip() == "int" and name not in _SHORT_CALLS
    return found


def declare(library: c.CDLL, check: Callable[[int], None]) -> None:
    """Sets the signatures of every function of the loaded `library`; `check` gets the status of those that have one."""
    keeping_the_lock = c.PyDLL(library._name)
    for name, (result, arguments, is_status) in functions().items():
        function = getattr(keeping_the_lock if name in _SHORT_CALLS else library, name)
        function.restype, function.argtypes = result, arguments
        if is_status:
            function.errcheck = lambda status, *_: check(status)
        setattr(library, name, function)
