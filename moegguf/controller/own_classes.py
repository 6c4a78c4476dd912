"""Loads a user's own policies and predictors, given as "FILE.py:CLASS".

The file runs with this process's privileges. A command line, the environment and a
caller in Python can refer to such a file. An HTTP request, a Modelfile and a file of
measurements cannot.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from moegguf.errors import OptionError

_OF_FILE = re.compile(r"\.py(:|$)")

T = TypeVar("T")


def names_file(name: str) -> bool:
    """Returns whether `name` refers to a Python file: it is "FILE.py:CLASS", or a path
    that ends with ".py"."""
    return bool(_OF_FILE.search(name))


def load_class(name: str, kind: str, base: type[T]) -> type[T]:
    """Returns the class that `name`, "FILE.py:CLASS", refers to. `kind` is "policy" or
    "predictor", for error messages.

    Raises OptionError if the file is missing or raises an error, or if the class is
    missing or is not a subclass of `base`. If `base` is a protocol, the class only
    needs the protocol's methods.
    """
    path, separator, class_name = name.rpartition(":")
    if not separator or not class_name.isidentifier():
        raise OptionError(
            f"a {kind} of your own must be written as FILE.py:CLASS, but {name!r:.200} names no class; add the"
            " name of the class."
        )
    file = Path(path).expanduser()
    if not file.is_file():
        raise OptionError(
            f"there is no file {path!r:.200} for the {kind} {name!r:.200}; correct the path."
        )
    found = getattr(
        _load_module(file.resolve(), os.stat(file).st_mtime_ns, kind), class_name, None
    )
    if not inspect.isclass(found):
        raise OptionError(
            f"{path} has no class {class_name!r:.60} for a {kind}; correct the name."
        )
    if not issubclass(found, base):
        rule = "a class with a method scores(history, forecast)"
        if kind == "predictor":
            rule = "a subclass of moegguf.controller.predictors.base.Predictor"
        raise OptionError(
            f"a {kind} must be {rule}, but {class_name} in {path} is not; correct the class."
        )
    return found


def make_own(name: str, kind: str, base: type[T], shape: object) -> T:
    """Returns a new object of the class that `name`, "FILE.py:CLASS", refers to. Calls
    CLASS(shape), or CLASS() if the constructor cannot take one argument.

    Raises OptionError as `load_class` does, and if the constructor fails.
    """
    own = load_class(name, kind, base)
    try:
        return own(shape) if _takes_shape(own, shape) else own()  # type: ignore[call-arg]
    except Exception as error:
        raise OptionError(
            f"the {kind} {name!r:.200} cannot be created: its constructor raised {type(error).__name__}: {error}; it is"
            " called with the model's MoeShape, or without arguments if it takes none."
        ) from error


def _takes_shape(own: type, shape: object) -> bool:
    try:
        inspect.signature(own).bind(shape)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=64)
def _load_module(file: Path, mtime_ns: int, kind: str) -> ModuleType:
    """Imports a Python file once for each `kind`, and again after its modification time
    (`mtime_ns`) has changed. The file can import modules from its folder. Raises
    OptionError if the file raises an error."""
    name = f"moegguf_own_{file.stem}_{abs(hash(file)):x}_{mtime_ns:x}"
    # The path may be a link's target without the suffix .py, so the loader is given
    # explicitly.
    spec = importlib.util.spec_from_file_location(
        name, file, loader=SourceFileLoader(name, str(file))
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module  # dataclasses and pickle look up the module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise OptionError(
            f"the file {str(file)!r:.200} of a {kind} cannot be used: it raised {type(error).__name__}: {error};"
            f" correct the file (`python {file.name}` in its folder shows where the error is)."
        ) from error
    return module
