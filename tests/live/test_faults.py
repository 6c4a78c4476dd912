"""Tests failed reads, failed allocations and callbacks that raise. Each leads to a
typed error or the expected logits.

Afterwards the model can be used as before. The first two tests make the Nth operation
of a kind fail, for growing N, until a run has fewer than N operations.
"""

import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import DEMO
from running import (
    Llama,
    Load,
    Reference,
    TinyModel,
    greedy_logits,
    hooks_off,
    random_prompt,
)
from scripted_manager import n_files
from waiting import until

from moegguf import errors
from moegguf.engine.upstream import UpstreamLlama
from moegguf.gguf.experts import ExpertLayout
from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.testing.library import arm_fault, count_operations

N_PROMPT, N_NEW = 20, 12


def operations(kind: str) -> int:
    """Returns the number of operations of this kind since `arm_fault` was called for
    it."""
    return count_operations(kind)


def faults(*kinds: str) -> list[Any]:
    """Returns parameters (kind, sticky) for each kind of fault.

    sticky False: the fault occurs once. True: it also occurs in all later operations.
    The sticky "eintr" is left out, because a read that is interrupted every time never
    ends.
    """
    every = [
        (kind, sticky)
        for kind in kinds
        for sticky in (False, True)
        if (kind, sticky) != ("eintr", True)
    ]
    return [
        pytest.param(*each, id=f"{each[0]} {'for good' if each[1] else 'once'}")
        for each in every
    ]


def growing() -> Iterator[int]:
    """Yields 1, 2, 3, ...; later, each number is about a third larger than the one
    before.

    Late operations of a run resemble each other, so most of them are skipped.
    """
    n = 1
    while True:
        yield n
        n += max(1, n // 3)


@pytest.fixture(scope="module")
def clean(tiny: TinyModel) -> Any:
    """Returns the logits of `short_run` in plain llama.cpp, without a fault."""
    with (
        hooks_off(),
        Llama(tiny(), n_ctx=512, n_threads=1, logits_all=True, verbose=False) as llm,
    ):
        return greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)


def short_run(llm: Llama) -> Any:
    return greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)


@pytest.mark.parametrize(
    "store", [{}, {"direct": False, "readers": 1}], ids=["direct", "buffered"]
)
@pytest.mark.parametrize(
    ("kind", "sticky"), faults("read", "stat", "short_read", "eintr")
)
def test_a_fault_in_any_operation_of_a_run_raises_or_keeps_the_logits(
    tiny: TinyModel,
    load: Load,
    clean: Any,
    kind: str,
    sticky: bool,
    store: dict[str, Any],
) -> None:
    llm = load(tiny(), expert_cache="40%", store=StoreOptions(**store))
    n_failed = 0
    for n in growing():
        arm_fault(kind, n, sticky=sticky)
        try:
            assert np.array_equal(short_run(llm), clean)
        except errors.ExpertIOError:
            n_failed += 1
        met = operations(kind) >= n
        arm_fault(kind, 0)
        assert np.array_equal(short_run(llm), clean), (
            f"the run after operation {n} failed"
        )
        if not met:
            break
    assert n > 3, "no fault was ever met"
    stats = llm.stats()
    assert (stats.read_errors > 0) == (n_failed > 0)
    # A read that fails once is retried. A failed stat() is not retried, because the
    # file may have changed.
    expected = {"read": sticky, "stat": True, "short_read": False, "eintr": False}[kind]
    assert (n_failed > 0) == expected
    if kind == "read":
        assert stats.read_retries > 0


@pytest.mark.parametrize(
    ("kind", "sticky"),
    faults("open", "read", "stat", "alloc", "thread", "short_read", "eintr"),
)
def test_a_fault_in_any_operation_of_a_load_raises_or_keeps_the_logits(
    tiny: TinyModel, load: Load, clean: Any, kind: str, sticky: bool
) -> None:
    path = tiny()
    load(path, expert_cache="40%").close()
    before = n_files()
    n_failed = n_smaller = 0
    for n in growing():
        arm_fault(kind, n, sticky=sticky)
        llm = None
        try:
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                llm = load(path, expert_cache="40%")
        except (errors.ExpertIOError, errors.AllocationError):
            n_failed += 1
        met = operations(kind) >= n
        arm_fault(kind, 0)
        if llm is None:
            llm = load(path, expert_cache="40%")
        elif llm.stats().n_slots < llm.plan.n_slots:
            n_smaller += 1
            assert any("more slowly" in str(warning.message) for warning in given)
        assert np.array_equal(short_run(llm), clean)
        llm.close()
        assert n_files() == before, f"a load that failed at {n} left files open"
        if not met:
            break
    if kind == "open" or (kind in ("alloc", "thread") and sticky):
        assert n_failed > 0
    assert n_smaller > 0 or kind != "alloc" or sticky, (
        "little memory gives a smaller pool"
    )


def test_a_read_error_of_llama_cpp_in_a_load_raises_expert_io_error(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = "error loading model: read error: Input/output error"

    def fail(*_: Any, **__: Any) -> None:
        base = library._open(library.find_library(), "ggml-base")
        base.ggml_log_internal(library.LOG_ERROR, f"{logged}\n".encode())
        raise ValueError("Failed to load model from file: x")

    with monkeypatch.context() as patch:
        patch.setattr(UpstreamLlama, "__init__", fail)
        with pytest.raises(errors.ExpertIOError, match=f"reading .* failed: {logged}"):
            load(tiny(), expert_cache="40%")
    load(tiny(), expert_cache="40%")


def wait_for_a_slow_read(n: int) -> None:
    """Waits until the store has begun the `n`-th read since "slow_read" was armed."""
    until(lambda: operations("slow_read") >= n)


def cancel_in_a_read(llm: Llama, moments: list[float], n: int) -> threading.Thread:
    def run() -> None:
        wait_for_a_slow_read(n)
        moments.append(time.perf_counter())
        llm.cancel()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# The first reads of a pass are the rows of its tokens.
@pytest.mark.parametrize("n", [5, 80], ids=["a row", "an expert"])
def test_cancel_during_a_slow_read_returns_within_a_second(
    tiny: TinyModel, load: Load, reference: Reference, n: int
) -> None:
    llm = load(tiny(), expert_cache="40%")
    arm_fault("slow_read", n, sticky=True)
    moments: list[float] = []
    thread = cancel_in_a_read(llm, moments, n)
    with pytest.raises(errors.GenerationCancelled):
        greedy_logits(llm)
    assert time.perf_counter() - moments[0] < 1.0
    thread.join()
    arm_fault("slow_read", 0)
    with pytest.raises(errors.GenerationCancelled):
        llm.eval([1])
    llm.resume()
    assert np.array_equal(greedy_logits(llm), reference(tiny()))


def test_close_cancels_the_pass_of_another_thread(tiny: TinyModel, load: Load) -> None:
    llm = load(tiny(), expert_cache="40%")
    arm_fault("slow_read", 5, sticky=True)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            greedy_logits(llm)
        except errors.MoeggufError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_a_slow_read(5)
    arm_fault("slow_read", 0)
    llm.close()
    thread.join(10)
    assert isinstance(ended[0], errors.GenerationCancelled)


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=repr
)
def test_an_exception_of_progress_ends_the_load(
    tiny: TinyModel, load: Load, clean: Any, error: BaseException
) -> None:
    def progress(_share: float) -> None:
        raise error

    with pytest.raises(errors.CallbackError) as caught:
        load(tiny(), expert_cache="40%", progress=progress)
    assert caught.value.__cause__ is error
    assert np.array_equal(short_run(load(tiny(), expert_cache="40%")), clean)


def test_progress_increases_to_1_and_false_cancels_the_load(
    tiny: TinyModel, load: Load
) -> None:
    shares: list[float] = []
    load(tiny(), expert_cache="40%", progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    with pytest.raises(errors.GenerationCancelled, match="progress"):
        load(tiny(), expert_cache="40%", progress=lambda _share: False)


def run_often(llm: Llama) -> None:
    """Runs many passes, because another thread calls the listener at an unknown
    time."""
    for _ in range(100):
        short_run(llm)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_an_exception_of_a_listener_is_raised_by_a_later_pass(
    tiny: TinyModel, load: Load, clean: Any, error: BaseException
) -> None:
    llm = load(tiny(), expert_cache="40%")
    calls: list[int] = []

    def callback(_event: object) -> None:
        calls.append(1)
        raise error

    llm.session.store.listen(on_routing=callback)
    with pytest.raises(errors.CallbackError) as caught:
        run_often(llm)
    assert caught.value.__cause__ is error
    assert calls == [1]
    assert np.array_equal(short_run(llm), clean)


def test_an_exception_of_stopping_criteria_reaches_the_caller(
    tiny: TinyModel, load: Load
) -> None:
    llm = load(tiny(), expert_cache="40%")

    def stop(_tokens: object, _logits: object) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(llm.generate([1, 2, 3], stopping_criteria=stop))
    assert len(list(zip(range(3), llm.generate([1, 2, 3]), strict=False))) == 3


def test_a_file_written_to_during_its_load_is_an_error(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, check = (
        Path(shutil.copy(tiny(), tmp_path / "copy.gguf")),
        ExpertLayout.check_unchanged,
    )

    def overwrite_first(layout: ExpertLayout) -> None:
        copied.write_bytes(copied.read_bytes())
        check(layout)

    monkeypatch.setattr(ExpertLayout, "check_unchanged", overwrite_first)
    with pytest.raises(
        errors.ExpertIOError,
        match=r"copy\.gguf was written to or replaced while it was being loaded",
    ):
        Llama(copied, expert_cache="40%", verbose=False)


@pytest.mark.parametrize(
    ("code", "error"), [(-2, errors.AllocationError), (-3, errors.LibraryError)]
)
def test_a_failed_decode_raises_a_typed_error_and_the_next_pass_succeeds(
    load: Load, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    llm = load(DEMO)
    llm.eval([5, 6])

    def fail(_batch: Any) -> None:
        raise RuntimeError(f"llama_decode returned {code}")

    with monkeypatch.context() as patched:
        patched.setattr(llm._ctx, "decode", fail)
        with pytest.raises(error, match="this pass"):
            llm.eval([7])
    assert llm.n_tokens == 2
    llm.eval([7])
    assert llm.n_tokens == 3
