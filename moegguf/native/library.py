"""Finds and loads the native library, and converts its status codes to exceptions.

The patched libllama is in the same folder. The package also contains the matching
`llama_cpp` bindings. They are imported from the package, even if llama-cpp-python is
installed, and load the patched libllama. Loading a model fails if the process has
already imported another `llama_cpp`, because that module has loaded another libllama.
"""

from __future__ import annotations

import ctypes as c
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from moegguf.errors import (
    AllocationError,
    ExpertIOError,
    ForkError,
    GenerationCancelled,
    LibraryError,
    MoeggufError,
    OptionError,
)
from moegguf.native import abi, plugins
from moegguf.package import package_folders
from moegguf.processor import read_processor
from moegguf.settings import read_environment

LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR of enum ggml_log_level
# GOMP_SPINCOUNT: the number of polls before a waiting thread sleeps. 20000 polls take a
# large fraction of a millisecond; GNU's default is 300000. While experts can be absent
# (`moegguf/native/threads.h`), OpenMP polls only 1000 times, or 100 times without
# `active`. With all experts present, such a low number of polls would cost up to a
# fifth of the speed.
SPINNING = {"GOMP_SPINCOUNT": "20000", "OMP_WAIT_POLICY": "active"}


def library_folders() -> Iterable[Path]:
    """Returns the folders that may hold libmoegguf: only MOEGGUF_LIBRARY if set, else
    `lib` in each package folder."""
    chosen = read_environment().library
    return [chosen] if chosen else [folder / "lib" for folder in package_folders()]


def find_library() -> Path:
    """Returns the first library folder that contains libmoegguf. libllama is in the
    same folder.

    Raises LibraryError when no library folder contains libmoegguf.
    """
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    for folder in library_folders():
        if (folder / f"libmoegguf.{suffix}").exists():
            return folder
    if chosen := read_environment().library:
        raise LibraryError(
            f"MOEGGUF_LIBRARY is {chosen}, which has no libmoegguf.{suffix}; correct it, or unset it."
        )
    looked = ", ".join(str(folder) for folder in library_folders())
    raise LibraryError(
        f"the native library is not built (looked in {looked}); install moegguf, or run `make` again."
    )


def check_processor(folder: Path) -> None:
    """Raises LibraryError when this processor lacks instructions that the library in
    `folder` was compiled to use.

    Such a library would crash the process with SIGILL. Checks nothing if the needed
    instructions or the processor's instructions are unknown.
    """
    listed = folder / "CPU_FEATURES"
    needed = listed.read_text().split() if listed.exists() else []
    processor = read_processor()
    if processor.flags and (
        missing := [flag for flag in needed if flag not in processor.flags]
    ):
        raise LibraryError(
            f"the native library in {folder} was built for another processor: this one ({processor.model}) has no"
            f" {', '.join(missing)}. Install moegguf from source on this machine, or a portable wheel (`make wheel`)."
        )


@contextmanager
def _short_spins() -> Iterator[None]:
    """Sets environment variables inside the `with` block, so that OpenMP's threads spin
    less before they sleep.

    Does nothing if one of the variables in SPINNING is already set. OpenMP must be
    loaded inside the `with` block. With GNU's default, threads spin for longer than a
    time slice of the scheduler. Threads that share a processor on a busy machine then
    wait for each other's full time slices at every barrier, hundreds of times per
    token.
    """
    spinning = {} if any(name in os.environ for name in SPINNING) else SPINNING
    os.environ |= spinning
    try:
        yield
    finally:
        for name in spinning:
            del os.environ[name]


def build_identity() -> str:
    """Returns a string that differs between builds of the native library and of its
    plug-ins.

    The string lists the names, sizes and modification times of the files in their
    folders.
    """
    folders = [find_library(), *plugins.plugin_folders()]
    files = [
        path
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    return repr(
        [
            (path.name, info.st_size, info.st_mtime_ns)
            for path in files
            for info in [path.stat()]
        ]
    )


class BackendProblems(NamedTuple):
    """Reasons why ggml backends were not loaded, or found no devices."""

    # A sentence for each plug-in that was not loaded because it was built from
    # different sources.
    refused: list[str]
    errors: list[str]  # error messages that ggml logged while backends were loaded


_problems = BackendProblems([], [])


_log_callback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)


# ggml's log callback from the end of load() until the bindings set theirs. Without a
# callback, ggml prints every line of its log, for example the devices that it found.
@_log_callback
def _log_errors(level: int, text: bytes, _user: object) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


@_log_callback  # `moegguf doctor` prints these errors
def _keep_errors(level: int, text: bytes, _user: object) -> None:
    if level == LOG_ERROR:
        _problems.errors.append(text.decode(errors="replace").strip())


@functools.cache
def load() -> c.CDLL:
    """Returns the native library. The first call loads it.

    Raises LibraryError when the library is missing or cannot be loaded, has a different
    ABI than this package, or needs instructions that this processor lacks.
    """
    folder = find_library()
    check_processor(folder)
    try:
        with _short_spins():
            library = _open(folder, "moegguf")
            _load_backends(folder)
    except OSError as error:
        raise _not_loaded(f"the native library in {folder}", error) from error
    found = library.moegguf_abi_version()
    if found != abi.ABI_VERSION:
        raise LibraryError(
            f"the native library has ABI {found}, but this package needs ABI {abi.ABI_VERSION}; install moegguf"
            " again, or run `make` again in a checkout."
        )
    abi.declare(library, check)
    return library


def _not_loaded(
    what: str,
    why: object,
    step: str = "install the missing library that this message names, or ",
) -> LibraryError:
    """Returns the error for a library that does not load.

    why: the cause, for example the message of the dynamic linker. step: what to try
    before moegguf is installed again.
    """
    chosen = (
        ", or correct or unset MOEGGUF_LIBRARY" if read_environment().library else ""
    )
    return LibraryError(
        f"{what} does not load ({why}); {step}install moegguf from source on this machine{chosen}."
    )


def _load_backends(folder: Path) -> None:
    """Loads the build's own ggml backends, then the plug-in backends.

    Raises OSError when a library does not load, and LibraryError when none of the
    build's own backends runs on this machine.
    """
    base = _open(folder, "ggml-base")
    base.ggml_log_set(_keep_errors, None)
    ggml = _open(folder, "ggml")
    # A portable build; by default, ggml would also search the current folder.
    if any(folder.glob("libggml-cpu-*")):
        ggml.ggml_backend_load_all_from_path.argtypes = [c.c_char_p]
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    if ggml.ggml_backend_dev_count() == 0:
        raise _not_loaded(
            f"the native library in {folder}",
            "none of its backends runs on this processor",
            "",
        )
    _problems.refused.extend(plugins.load_plugins(ggml, plugins.read_pin(folder)))
    base.ggml_log_set(_log_errors, None)


def backend_problems() -> BackendProblems:
    """Returns the problems that occurred while backends were loaded. Raises
    LibraryError."""
    load()
    return _problems


def _open(folder: Path, name: str) -> c.CDLL:
    return c.CDLL(
        str(folder / f"lib{name}.{'dylib' if sys.platform == 'darwin' else 'so'}")
    )


def open_part(name: str) -> c.CDLL:
    """Loads another library of the build, and returns it. Raises LibraryError when that
    fails."""
    try:
        return _open(find_library(), name)
    except OSError as error:
        raise _not_loaded(f"lib{name}", error) from error


def ggml() -> c.CDLL:
    """Returns libggml, which the native library has loaded."""
    load()
    return _open(find_library(), "ggml")


def cpu_function(name: str) -> int:
    """Returns the address of a function in ggml's CPU backend. Raises LibraryError if
    the backend has no such function.

    ggml looks up the function, because the backend's file has different names in
    different builds.
    """
    loaded = ggml()
    for function in (
        loaded.ggml_backend_reg_by_name,
        loaded.ggml_backend_reg_get_proc_address,
    ):
        function.restype = c.c_void_p
    loaded.ggml_backend_reg_get_proc_address.argtypes = [c.c_void_p, c.c_char_p]
    address = loaded.ggml_backend_reg_get_proc_address(
        loaded.ggml_backend_reg_by_name(b"CPU"), name.encode()
    )
    if address is None:
        raise LibraryError(
            f"ggml's CPU backend must have the function {name}, but lacks it; install moegguf again."
        )
    return int(address)


@functools.cache
def llama_cpp() -> ModuleType:
    """Imports the `llama_cpp` bindings of this package, which use our libllama, and
    returns them.

    Raises LibraryError when another `llama_cpp` has already been imported, or when the
    bindings are not installed.
    """
    load()
    try:
        import llama_cpp as bindings
    except ImportError as error:
        raise LibraryError(
            f"the llama_cpp bindings do not import ({error}); install moegguf again."
        ) from error
    loaded = Path(bindings.llama_cpp._lib._name).resolve().parent
    if loaded != find_library().resolve():
        raise LibraryError(
            f"llama_cpp was imported before moegguf and holds the library in {loaded}, which has no expert store;"
            " import moegguf first, or use another process."
        )
    _correct_log_levels()
    return bindings


def find_bindings() -> ModuleSpec | None:
    """Returns the import spec of this package's bindings, and makes them load our
    libllama; None if they are not installed.

    Raises LibraryError when the native library does not load.
    """
    load()
    os.environ["LLAMA_CPP_LIB_PATH"] = os.environ["MTMD_CPP_LIB"] = str(find_library())
    return PathFinder.find_spec(
        "llama_cpp", [str(folder / "bindings") for folder in package_folders()]
    )


def mtmd() -> ModuleType:
    """Imports the bindings of libmtmd, which reads images, and returns them.

    Raises LibraryError when libmtmd or the bindings cannot be loaded.
    """
    llama_cpp()
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise _not_loaded("libmtmd, which reads images,", error) from error
    return mtmd_cpp


def _correct_log_levels() -> None:
    """Corrects the bindings' table of log levels.

    ggml's levels are DEBUG = 1 to ERROR = 4. Release 0.3.36 of the bindings maps them
    to wrong levels, and hides errors.
    """
    from llama_cpp import _logger

    levels = (
        logging.CRITICAL,
        logging.DEBUG,
        logging.INFO,
        logging.WARNING,
        logging.ERROR,
    )
    _logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL.update(enumerate(levels))
    if _logger.logger.level == logging.NOTSET:
        # Logs only errors until a model is loaded with verbose=True.
        _logger.set_verbose(False)


_ERRORS: dict[int, type[MoeggufError]] = {
    abi.INVALID: OptionError,
    abi.MEMORY: AllocationError,
    abi.IO: ExpertIOError,
    abi.CANCELLED: GenerationCancelled,
    abi.FORKED: ForkError,
}


def error(status: int, message: str) -> MoeggufError:
    """Returns an exception with this message, of the type for a status of the C ABI.

    For a status that is not in _ERRORS, such as abi.ROUTING, the type is MoeggufError.
    """
    return _ERRORS.get(status, MoeggufError)(message)


def check(status: int) -> None:
    """Raises an exception for a status other than abi.OK, with the library's reason as
    its text.

    ctypes calls this function after each library call that returns a status.
    """
    if status != abi.OK:
        raise error(status, load().moegguf_last_error().decode(errors="replace"))
