"""A ggml device whose memory is not host memory, for tests: ggml's RPC backend over
loopback.

The shipped library has no RPC backend (its server trusts its peers), so the backend is
built here from the vendored sources, against the same libggml-base. A registered device
cannot be removed, and llama.cpp uses it for every model loaded later. Tests that need
the device run in a process of their own (`in_child`).
"""

import ctypes as c
import functools
import importlib
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from own_process import LONGEST_S, in_own_process, started_process
from waiting import until

ROOT = Path(__file__).resolve().parents[1]
GGML = ROOT / "build/vendor/llama.cpp/ggml"
SOURCES = [GGML / "src/ggml-rpc" / name for name in ("ggml-rpc.cpp", "transport.cpp")]
BUILT = ROOT / "build/test-rpc/libggml-rpc.so"
START_S = LONGEST_S // 3


def rpc_library() -> Path:
    """Returns libggml-rpc.so. Builds it if it is missing or older than its sources.

    Skips the test if there is no compiler or no vendored source.
    """
    from moegguf.native.library import find_library

    folder = find_library()
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None or not all(source.exists() for source in SOURCES):
        pytest.skip(
            "the RPC device needs a C++ compiler and the vendored sources (`make`)"
        )
    inputs = [*SOURCES, folder / "libggml-base.so"]
    if BUILT.exists() and BUILT.stat().st_mtime > max(
        path.stat().st_mtime for path in inputs
    ):
        return BUILT
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    partial = BUILT.with_suffix(f".{os.getpid()}")
    command = [
        compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED",
        f"-I{GGML}/include", f"-I{GGML}/src", *map(str, SOURCES), "-o", str(partial), f"-L{folder}", "-lggml-base",
        f"-Wl,-rpath,{folder.resolve()}", "-lpthread",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    partial.replace(BUILT)
    return BUILT


def _ggml() -> c.CDLL:
    """Returns libggml.so as loaded by libmoegguf, with the types of the functions used
    here."""
    from moegguf.native import library

    library.load()
    ggml = c.CDLL(str(library.find_library() / "libggml.so"))
    for name, arguments in {
        "ggml_backend_dev_by_name": [c.c_char_p],
        "ggml_backend_register": [c.c_void_p],
    }.items():
        getattr(ggml, name).restype = c.c_void_p
        getattr(ggml, name).argtypes = arguments
    return ggml


def _serve(rpc: Path, port: int) -> None:
    """Serves this machine's CPU over RPC until the process is terminated."""
    device = (c.c_void_p * 1)(_ggml().ggml_backend_dev_by_name(b"CPU"))
    start = c.CDLL(str(rpc)).ggml_backend_rpc_start_server
    start.argtypes = [c.c_char_p, c.c_char_p, c.c_size_t, c.c_size_t, c.c_void_p]
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, device)


def register(rpc: Path, port: int) -> str:
    """Registers the server's device in this process permanently. Returns its name."""
    ggml, backend = _ggml(), c.CDLL(str(rpc))
    backend.ggml_backend_rpc_add_server.restype = c.c_void_p
    backend.ggml_backend_rpc_add_server.argtypes = [c.c_char_p]
    number = next(
        n for n in itertools.count() if not ggml.ggml_backend_dev_by_name(b"RPC%d" % n)
    )
    ggml.ggml_backend_register(
        backend.ggml_backend_rpc_add_server(f"127.0.0.1:{port}".encode())
    )
    assert ggml.ggml_backend_dev_by_name(b"RPC%d" % number)
    return f"RPC{number}"


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a free port of the loopback interface, and keeps other programs from using
    the port.

    A server that sets SO_REUSEADDR, such as the RPC server, can listen on this port:
    the socket here does not listen.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@contextmanager
def server() -> Iterator[tuple[Path, int]]:
    """Runs an RPC server on a free port of the loopback interface. Yields the arguments
    of `register`."""
    rpc = rpc_library()
    with reserved_port() as port:
        process = started_process(_serve, rpc, port)
        try:
            until(lambda: _listens(port) or not process.is_alive(), START_S)
            assert process.is_alive(), "the RPC server died"
            yield rpc, port
        finally:
            process.terminate()
            process.join()


def in_child(call: Callable[..., Any], *arguments: Any, n_servers: int = 1) -> Any:
    """Runs call(*arguments) in another process. The process has the devices RPC0, RPC1,
    ... of n_servers new servers."""
    with ExitStack() as stack:
        servers = [stack.enter_context(server()) for _ in range(n_servers)]
        return in_own_process(_registered, servers, call, arguments)


def _registered(
    servers: list[tuple[Path, int]],
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    for at in servers:
        register(*at)
    return call(*arguments)


def on_servers(
    n_servers: int = 0,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that runs a test in another process.

    The process has the devices of n_servers RPC servers, and devices that the test adds
    itself. The test's fixtures must be picklable.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            of_test = (test.__module__, test.__name__, fixtures)
            in_child(
                _run_test, *of_test, n_servers=n_servers
            ) if n_servers else in_own_process(_run_test, *of_test)

        return run

    return decorate


def _run_test(module: str, name: str, fixtures: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**fixtures)
