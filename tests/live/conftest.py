"""Fixtures for tests that load models: reference logits, tiny models, and the demo
model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import pytest

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

Reference = Callable[..., npt.NDArray[Any]]
TinyModel = Callable[..., Path]
Own = Callable[..., Path]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Returns `reference(path, **options)`, which returns the logits of a random prompt
    and of greedy tokens.

    By default, the tested build computes them as plain llama.cpp, without moegguf's
    hooks. If `resident` is True, the expert store is used, with a slot for every
    expert. Results are computed only once per session for each set of arguments.
    """
    from running import (
        N_NEW,
        N_PROMPT,
        Llama,
        WithoutRepacking,
        greedy_logits,
        hooks_off,
        random_prompt,
    )

    from moegguf.native.store import StoreOptions

    known: dict[tuple[Any, ...], npt.NDArray[Any]] = {}

    def compute(
        path: Path,
        *,
        n_ubatch: int = 512,
        repack: bool = True,
        resident: bool = False,
        n_prompt: int = N_PROMPT,
        n_new: int = N_NEW,
        **options: Any,
    ) -> npt.NDArray[Any]:
        key = path, n_ubatch, repack, resident, n_prompt, n_new, tuple(options.items())
        if key not in known:
            options = {
                "n_ctx": 512,
                "n_threads": 1,
                "logits_all": True,
                "verbose": False,
                **options,
            }
            if resident:
                store = StoreOptions(repack=repack)
                with Llama(
                    path, expert_cache="100%", n_ubatch=n_ubatch, store=store, **options
                ) as llm:
                    known[key] = greedy_logits(llm, random_prompt(llm, n_prompt), n_new)
                    assert llm.stats().lookups > 0, "the store was not in use"
            else:
                with (
                    hooks_off(),
                    (Llama if repack else WithoutRepacking)(
                        path, n_ubatch=n_ubatch, **options
                    ) as llm,
                ):
                    assert llm.session is None
                    known[key] = greedy_logits(llm, random_prompt(llm, n_prompt), n_new)
        return known[key]

    return compute


@pytest.fixture
def path(tiny: TinyModel, request: pytest.FixtureRequest) -> Path:
    """Returns the path of a tiny model. It is tiny-qwen2moe in Q4_0 unless an indirect
    parameter names another preset and quantisation."""
    return tiny(*getattr(request, "param", ("tiny-qwen2moe", "q4_0")))


@pytest.fixture
def own(tiny: TinyModel, tmp_path: Path) -> Own:
    """Returns `own(preset)`, which links a tiny model into the test's own folder and
    returns the link's path.

    The folder contains no files that other tests have learned for the model.
    """

    def link(preset: str = "tiny-qwen2moe") -> Path:
        path = tmp_path / "models" / f"{preset}.gguf"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            os.link(tiny(preset), path)
        return path

    return link


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """Disarms every fault after each test."""
    from moegguf.testing.library import FAULT, arm_fault

    yield
    for kind in FAULT:
        arm_fault(kind, 0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    """Yields the demo model, loaded once per test file."""
    from answering import DEMO

    from moegguf.engine.llama import Llama

    with Llama(DEMO, n_ctx=512, n_threads=1, verbose=False) as llm:
        yield llm


@pytest.fixture
def demo(shared: Llama) -> Llama:
    """Returns the shared demo model after resetting its context."""
    shared.reset()
    return shared


@pytest.fixture(scope="module")
def whole(shared: Llama) -> str:
    """Returns the whole answer of `shared` to answering.QUESTION."""
    from answering import QUESTION, reply

    shared.reset()
    return reply(shared, QUESTION)[0]


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores contexts in a folder of the test, with a limit of 1 GiB."""
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MOEGGUF_CONTEXT_STORE", "1GiB")
