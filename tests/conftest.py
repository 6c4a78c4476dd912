"""Fixtures for all test folders: tiny models, written once per session, and `load`,
which closes the models that it loaded.

This module imports the native library only for tests that use the fixture `load`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import inspect
import os
import signal
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

TinyModel = Callable[..., Path]
Load = Callable[..., "Llama"]

# Time limit of a test, in seconds. Most tests take a few seconds, but they can take
# much longer on two cores shared with other jobs, or when a device compiles kernels.
LONGEST_TEST_S = int(os.environ.get("MOEGGUF_LONGEST_TEST_S", "120"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(
        pyfuncitem.obj(
            **{
                name: pyfuncitem.funcargs[name]
                for name in pyfuncitem._fixtureinfo.argnames
            }
        )
    )
    return True


def pytest_collection_finish() -> None:
    """Excludes the imported modules and the collected tests from later garbage
    collections.

    A full collection would otherwise visit more than 600,000 objects. Some tests make a
    full collection before they count open files. Objects that tests create are
    collected as usual.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_deadlock(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints the stack of every thread and ends the test run if a test takes longer
    than LONGEST_TEST_S seconds."""
    # pytest's own copy of stderr, because the process's stderr is captured
    file = request.config.stash.get(fault_handler_stderr_fd_key, 2)
    faulthandler.dump_traceback_later(LONGEST_TEST_S, exit=True, file=file)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Makes SIGINT interrupt tests and subprocesses, even if the shell started pytest
    with SIGINT ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Makes all HTTP clients in this process share one TLS context. No test uses TLS,
    and reading the root certificates for each client takes 16 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ssl, "create_default_context", functools.cache(ssl.create_default_context)
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Redirects the data and cache folders to temporary folders, for subprocesses too.
    Tests therefore save nothing about models in the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data")
        patch.setenv("XDG_DATA_HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # No trial loads: tests load hundreds of new models (live/test_trial.py turns
        # trials on)
        patch.setenv("MOEGGUF_TRIAL_LOAD", "0")
        # No contexts on disk: tests count evaluated tokens (tests of the context store
        # turn it on)
        patch.setenv("MOEGGUF_CONTEXT_STORE", "0")
        # A fixed placement, even on machines with a GPU. Tests in which measured speeds
        # choose the placement override it.
        patch.setenv("MOEGGUF_PLACEMENT", "slots")
        yield folder


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets XDG_DATA_HOME, the parent of moegguf's data folder, for one test. Returns
    its path."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Returns `tiny(preset, quant, n_split=1, template=NAME)`, which returns the path
    of a random model's first file.

    The first call with given arguments writes the model. `template` is a name in
    tests/templates.py.
    """
    import templates

    from tools.models import PRESETS, write_model

    folder = tmp_path_factory.mktemp("models")
    written: dict[tuple[str, str, int, str], Path] = {}

    def write(
        preset: str = "tiny-qwen2moe",
        quant: str = "q4_0",
        n_split: int = 1,
        template: str | None = None,
    ) -> Path:
        key = preset, quant, n_split, template or ""
        if key not in written:
            path = folder / (
                "-".join(filter(None, (preset, quant, str(n_split), template)))
                + ".gguf"
            )
            options = (
                {"chat_template": templates.TEMPLATES[template]} if template else {}
            )
            written[key] = write_model(
                path, PRESETS[preset], quant, n_split=n_split, **options
            )[0]
        return written[key]

    return write


@pytest.fixture(scope="session")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns `projector(kind)`, which returns the path of a random image projector for
    the tiny models of width 128. The first call with a kind writes the file."""
    from tools.models import write_projector

    folder = tmp_path_factory.mktemp("projectors")

    def write(kind: str = "mlp") -> Path:
        path = folder / f"mmproj-{kind}.gguf"
        return path if path.exists() else write_projector(path, kind, 128)

    return write


@pytest.fixture
def load() -> Iterator[Load]:
    """Yields `load(path, **options)`, which loads a `Llama`. By default it keeps every
    token's logits, does not print a log, and has a context of 512 tokens.

    The fixture closes these models after the test. By default a model uses one compute
    thread, because more OpenMP threads would spin while other processes use the cores.
    The number of threads does not change any result.
    """
    from moegguf.engine.llama import Llama

    loaded: list[Llama] = []

    def load_one(path: Path, *, kind: type[Llama] = Llama, **options: Any) -> Llama:
        llm = kind(
            path,
            **{
                "n_ctx": 512,
                "n_threads": 1,
                "logits_all": True,
                "verbose": False,
                **options,
            },
        )
        loaded.append(llm)
        return llm

    yield load_one
    for llm in loaded:
        llm.close()
