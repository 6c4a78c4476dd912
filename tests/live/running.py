"""Helpers to run a tiny model twice and compare: prompts, greedy logits, and a thread that disturbs the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter

from moegguf.controller.controller import Controller
from moegguf.engine.live_controller import LiveController
from moegguf.engine.llama import Llama
from moegguf.gguf.experts import read_layout
from moegguf.native.store import Store

Logits = npt.NDArray[np.float32]
TinyModel = Callable[..., Path]  # the fixtures of conftest.py
Load = Callable[..., Llama]
Reference = Callable[..., Logits]
Own = Callable[..., Path]

N_PROMPT, N_NEW = 120, 16


class WithoutRepacking(Llama):
    """Plain llama.cpp without the CPU's interleaved layout of weights, as in a pool whose slots are not repacked."""

    def _attach_model(self, params: Structure) -> None:
        super()._attach_model(params)
        params.use_extra_bufts = False


def random_prompt(llm: Llama, n_tokens: int = N_PROMPT, seed: int = 0) -> list[int]:
    """Returns random tokens, which the routers spread over all experts."""
    return np.random.default_rng(seed).integers(0, llm.n_vocab(), n_tokens).tolist()


def greedy_logits(
    llm: Llama,
    prompt: Sequence[int] | None = None,
    n_new: int = N_NEW,
    before_each: Callable[[], object] = lambda: None,
) -> Logits:
    """Returns logits of the prompt and `n_new` greedy tokens in an empty context. Calls `before_each` before a pass."""
    llm.reset()
    before_each()
    llm.eval(random_prompt(llm) if prompt is None else prompt)
    for _ in range(n_new):
        before_each()
        llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
    return llm.scores[: llm.n_tokens].copy()


def share_for(path: Path, n_slots: int, device: str | None = None) -> int:
    """Returns the bytes of a budget for exactly `n_slots` slots.

    The slots are on `device`; with None they are in the CPU's memory, or in RAM below a device.
    """
    from moegguf.engine.plan import slot_bytes
    from moegguf.native.slot_sizes import padded

    return n_slots * slot_bytes(padded(read_layout(path), [device]))


def written(writer: GGUFWriter, path: Path) -> Path:
    """Writes the file of a writer that has all its keys and tensors. Returns its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_adapter(path: Path, arch: str, matrix: str, shape: tuple[int, ...]) -> Path:
    """Writes a LoRA adapter of rank 8 that changes logits. It has one matrix, whose `shape` is in numpy order."""
    writer, rng = GGUFWriter(path, arch), np.random.default_rng(0)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for half, rows in (("lora_a", (8, shape[-1])), ("lora_b", (shape[-2], 8))):
        values = 0.1 * rng.standard_normal((*shape[:-2], *rows), np.float32)
        writer.add_tensor(f"{matrix}.{half}", values)
    return written(writer, path)


@contextmanager
def hooks_off() -> Iterator[None]:
    """Makes models that are loaded in this block run plain llama.cpp."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEGGUF_HOOKS", "0")
        yield


def controller_of(llm: Llama) -> Controller:
    """Returns the controller that decides for a model."""
    controller = llm.context.controller
    assert isinstance(controller, LiveController) and controller.controller is not None
    return controller.controller


def count_scores(llm: Llama) -> list[bool]:
    """Returns a list that grows at each call of store.set_scores(): True for a table of scores, False for None."""
    store, given = llm.session.store, list[bool]()
    set_scores = store.set_scores

    def count(scores: npt.ArrayLike | None) -> None:
        given.append(scores is not None)
        set_scores(scores)

    store.set_scores = count  # type: ignore[method-assign]
    return given


class Meddler:
    """Sets random scores and starts random prefetches, before each pass and from another thread during passes."""

    def __init__(self, store: Store, seed: int = 0) -> None:
        self._store = store
        self._random = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meddler")

    def meddle(self, random: np.random.Generator | None = None) -> None:
        random = random or self._random
        n_layer, n_expert = self._store.shape
        self._store.set_scores(random.random((n_layer, n_expert)) if random.random() < 0.9 else None)
        # Some of these do not exist: layers below the first with experts, and one beyond the last.
        self._store.prefetch(random.integers(0, n_layer + 1, 8), random.integers(0, n_expert, 8))

    def _run(self) -> None:
        random = np.random.default_rng(1)
        while not self._stop.wait(0.001):
            self.meddle(random)

    def __enter__(self) -> Meddler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def devices_of(llm: Llama) -> dict[str, dict[str, Any]]:
    """Returns the store's figures of each device that computes layers, by ggml's name, in the order of layers."""
    store = llm.session.store
    found = (store.device(index) for index in range(len(store.devices)))
    return {figures["device"]: figures for figures in found}
