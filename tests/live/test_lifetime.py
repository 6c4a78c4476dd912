"""Tests closed models, forked processes, refused copies, and models that threads share.

Also tests that models leave no thread, open file or memory behind.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import Llama, Load, Reference, TinyModel, greedy_logits
from waiting import status_of

from moegguf import errors
from moegguf.native import library
from moegguf.testing.library import FAULT, arm_fault
from tools.models import PRESETS, write_model

CHILD_TIMEOUT_S = 30

USES: dict[str, Callable[[Llama], Any]] = {
    "eval": lambda llm: llm.eval([1]),
    "embed": lambda llm: llm.embed("a"),
    "stats": lambda llm: llm.stats(),
    "set_budget": lambda llm: llm.set_budget(expert_cache="50%"),
    "call": lambda llm: llm("a", max_tokens=1),
    "stream": lambda llm: list(llm("a", max_tokens=1, stream=True)),
    "chat": lambda llm: llm.create_chat_completion(
        [{"role": "user", "content": "a"}], max_tokens=1
    ),
    "generate": lambda llm: next(llm.generate([1])),
    "sample": lambda llm: llm.sample(),
    "tokenize": lambda llm: llm.tokenize(b"a"),
    "detokenize": lambda llm: llm.detokenize([1]),
    "n_vocab": lambda llm: llm.n_vocab(),
    "n_ctx": lambda llm: llm.n_ctx(),
    "save_state": lambda llm: llm.save_state(),
    "enter": lambda llm: llm.__enter__(),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_model_raises_closed_error(
    tiny: TinyModel, load: Load, use: str
) -> None:
    llm = load(tiny(), expert_cache="40%")
    llm.eval([1, 2])
    llm.close()
    llm.close()
    with pytest.raises(errors.ClosedError):
        USES[use](llm)
    llm.cancel()
    llm.resume()
    assert llm.session is None or llm.session.store._handle is None


def test_an_unfinished_stream_of_a_closed_model_raises_closed_error(
    tiny: TinyModel, load: Load
) -> None:
    llm = load(tiny(), expert_cache="40%")
    steps = llm.generate([1, 2, 3])
    next(steps)
    llm.close()
    with pytest.raises(errors.ClosedError):
        next(steps)


class Footprint:
    """The numbers of this process's threads and open files, and its resident memory in
    bytes."""

    def __init__(self) -> None:
        gc.collect()
        # Returns freed memory to the system. malloc would otherwise keep an amount that
        # depends on earlier tests.
        ctypes.CDLL(None).malloc_trim(0)
        self.threads = len(os.listdir("/proc/self/task"))
        self.files = len(os.listdir("/proc/self/fd"))
        self.bytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def check(self, before: Footprint) -> None:
        assert (self.threads, self.files) == (before.threads, before.files)
        assert self.bytes - before.bytes < 4 << 20


def test_a_model_without_references_is_freed(tiny: TinyModel) -> None:
    options: dict[str, Any] = {"expert_cache": "40%", "n_threads": 1, "verbose": False}
    with Llama(tiny(), **options) as first:
        # The first evaluation in a process allocates memory that stays allocated.
        first.eval([1, 2, 3])
    before = Footprint()
    llm = Llama(tiny(), progress=lambda _share: None, **options)
    llm.eval([1, 2, 3])
    assert Footprint().files > before.files
    gone = weakref.ref(llm)
    del llm
    Footprint().check(before)
    assert gone() is None


def test_twenty_loads_leave_no_threads_files_or_memory(tiny: TinyModel) -> None:
    def use() -> None:
        with Llama(
            tiny("tiny-mix", "q8_0"),
            expert_cache="40%",
            n_threads=1,
            n_ctx=512,
            verbose=False,
        ) as llm:
            llm("some text", max_tokens=4)

    # The first three loads warm up libraries and allocators. The figures are compared
    # before and after the 20 later loads.
    for n_loads in (3, 20):
        before = Footprint()
        for _ in range(n_loads):
            use()
    Footprint().check(before)


@pytest.mark.parametrize(
    "fault", ["open", "alloc", "thread", "stop", "format", "budget", "context"]
)
def test_failed_loads_leave_no_threads_files_or_memory(
    tiny: TinyModel, tmp_path: Path, fault: str
) -> None:
    path, options = tiny(), {"expert_cache": "40%", "verbose": False, "n_threads": 1}
    if fault == "format":
        data = (
            tiny()
            .read_bytes()
            .replace(b"blk.0.attn_norm.weight", b"blk.0.attn_nrom.weight")
        )
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
    if fault == "budget":
        options["expert_cache"] = 1
    if fault == "stop":
        options["progress"] = lambda _share: False
    if fault == "context":
        path = tmp_path / "narrow.gguf"
        write_model(path, replace(PRESETS["tiny-qwen3moe"], n_embd_head=48), "q4_0")
        # Q4_0: llama.cpp refuses a head size that is not a multiple of 32.
        options["type_v"] = 2

    def fail() -> None:
        if fault in FAULT:
            arm_fault(fault, 1, sticky=True)
        expected = (
            OSError,
            errors.AllocationError,
            errors.GenerationCancelled,
            errors.ModelFormatError,
        )
        with pytest.raises((*expected, errors.BudgetError)):
            Llama(path, **options)
        if fault in FAULT:
            arm_fault(fault, 0)

    Llama(tiny(), expert_cache="40%", verbose=False).close()
    fail()
    before = Footprint()
    for _ in range(5):
        fail()
    Footprint().check(before)
    with Llama(tiny(), expert_cache="40%", verbose=False) as llm:
        llm.eval([1])


def child_of_fork(llm: Llama) -> int:
    """Returns 0 if six uses of the model raise ForkError, close() works, and eval()
    then raises ClosedError.

    Returns another number for each kind of failure. The test calls this function in a
    forked child.
    """
    for use in ("eval", "stats", "call", "generate", "embed", "set_budget"):
        try:
            USES[use](llm)
        except errors.ForkError:
            continue
        except BaseException:
            return 1
        return 2
    llm.close()
    try:
        llm.eval([1])
    except errors.ClosedError:
        return 0
    return 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_uses_in_a_forked_child_raise_fork_error_and_the_parent_works(
    tiny: TinyModel, load: Load, reference: Reference
) -> None:
    llm = load(tiny(), expert_cache="40%")
    llm.eval([1, 2, 3])
    pid = os.fork()
    if pid == 0:
        status = 4
        try:
            status = child_of_fork(llm)
        finally:
            os._exit(status)
    assert status_of(pid) == 0
    assert np.array_equal(greedy_logits(llm), reference(tiny()))


def run_script(
    script: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("closed_in_child", [True, False])
def test_a_forked_child_exits_normally_with_busy_readers(
    tiny: TinyModel, closed_in_child: bool
) -> None:
    script = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from moegguf import Llama
        llm = Llama(sys.argv[1], expert_cache="40%", n_threads=1, verbose=False)
        llm.eval([1, 2, 3])
        rng = range(16)
        for _ in range(5):
            llm.session.store.prefetch([1] * 16 + [2] * 16, [*rng, *rng])
            pid = os.fork()
            if pid == 0:
                if sys.argv[2] == "True":
                    llm.close()
                sys.exit(7)  # the interpreter frees what it holds
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 7, status
            llm.eval([4])
        print("parent done")
    """
    result = run_script(script, tiny(), closed_in_child)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "parent done\n"


def test_a_process_exits_normally_without_closing_its_model(tiny: TinyModel) -> None:
    script = """
        import sys
        from moegguf import Llama
        llm = Llama(sys.argv[1], expert_cache="40%", n_threads=1, verbose=False)
        llm.session.store.listen(on_routing=lambda event: None)
        llm.eval([1, 2, 3])
        steps = llm.generate([4, 5])
        next(steps)
    """
    result = run_script(script, tiny())
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_copies_of_a_model_are_refused(tiny: TinyModel, load: Load) -> None:
    llm = load(tiny(), expert_cache="40%")
    for attempt in (copy.copy, copy.deepcopy):
        with pytest.raises(errors.OptionError, match="cannot be copied"):
            attempt(llm)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_threads_that_share_a_model_get_their_own_texts(
    tiny: TinyModel, load: Load, stream: bool
) -> None:
    llm = load(tiny(), expert_cache="40%")
    prompts = ["experts", "a memory", "of slots"]

    def text(prompt: str) -> str:
        answer = llm(prompt, max_tokens=12, temperature=0.0, stream=stream)
        return "".join(
            part["choices"][0]["text"] for part in (answer if stream else [answer])
        )

    alone = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        for _ in range(3):
            assert list(threads.map(text, prompts)) == alone


def test_a_new_request_cancels_the_unfinished_stream_of_its_thread(
    tiny: TinyModel, load: Load
) -> None:
    llm = load(tiny(), expert_cache="40%")
    expected = llm("another", max_tokens=8, temperature=0.0)["choices"][0]["text"]
    left = llm("experts", max_tokens=50, stream=True)
    next(left)
    assert (
        llm("another", max_tokens=8, temperature=0.0)["choices"][0]["text"] == expected
    )
    with pytest.raises(errors.GenerationCancelled, match="another request"):
        list(left)


def test_a_dropped_stream_releases_the_model_for_other_threads(
    tiny: TinyModel, load: Load
) -> None:
    llm = load(tiny(), expert_cache="40%")
    for _ in llm("experts", max_tokens=50, stream=True):
        break
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(llm, "a", max_tokens=2).result()["choices"][0][
            "finish_reason"
        ]


def test_a_stock_llama_cpp_imported_first_raises_library_error(
    tiny: TinyModel, tmp_path: Path
) -> None:
    # A folder with a libllama that imitates another package's llama.cpp.
    stock = shutil.copytree(library.find_library(), tmp_path / "stock")
    script = """
        import sys
        import llama_cpp
        from moegguf.errors import LibraryError
        try:
            from moegguf import Llama
        except LibraryError as error:
            print(error)
    """
    bindings = str(Path(library.llama_cpp().__file__).parents[1])
    path = os.pathsep.join([bindings, *sys.path])
    result = run_script(script, tiny(), LLAMA_CPP_LIB_PATH=str(stock), PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert "imported before moegguf" in result.stdout
    assert str(stock) in result.stdout


def test_own_bindings_are_imported_beside_a_stock_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(
        "raise AssertionError('the stock package was imported')"
    )
    script = """
        import sys
        before = list(sys.path)
        from moegguf import Llama
        import llama_cpp
        assert issubclass(Llama, llama_cpp.Llama) and sys.path == before
        print(llama_cpp.__file__)
    """
    result = run_script(script, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert result.returncode == 0, result.stderr
    assert Path("moegguf/bindings/llama_cpp/__init__.py") == Path(
        *Path(result.stdout.strip()).parts[-4:]
    )
