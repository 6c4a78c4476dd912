"""Helpers for tests that run a tiny model in two ways and compare the logits.

They create prompts, budgets and adapters, and compute the logits of greedy answers. A
`Meddler` disturbs the store while the model runs.
"""

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
# Types of the fixtures `tiny`, `load`, `reference` and `own`.
TinyModel = Callable[..., Path]
Load = Callable[..., Llama]
Reference = Callable[..., Logits]
Own = Callable[..., Path]

N_PROMPT, N_NEW = 120, 16


class WithoutRepacking(Llama):
    """A model whose weights are not repacked for the CPU, for comparison with slots
    that are not repacked."""

    def _attach_model(self, params: Structure) -> None:
        super()._attach_model(params)
        params.use_extra_bufts = False


def random_prompt(llm: Llama, n_tokens: int = N_PROMPT, seed: int = 0) -> list[int]:
    """Returns random tokens from the model's vocabulary, determined by `seed`."""
    return np.random.default_rng(seed).integers(0, llm.n_vocab(), n_tokens).tolist()


def greedy_logits(
    llm: Llama,
    prompt: Sequence[int] | None = None,
    n_new: int = N_NEW,
    before_each: Callable[[], object] = lambda: None,
) -> Logits:
    """Evaluates a prompt (None: a random one) and then `n_new` greedy tokens, in an
    empty context.

    Returns the logits, [n_tokens][n_vocab]. Calls `before_each` before each evaluation.
    """
    llm.reset()
    before_each()
    llm.eval(random_prompt(llm) if prompt is None else prompt)
    for _ in range(n_new):
        before_each()
        llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
    return llm.scores[: llm.n_tokens].copy()


def share_for(path: Path, n_slots: int, device: str | None = None) -> Any:
    """Returns a budget that holds exactly `n_slots` slots: bytes for the CPU (None), or
    a share of all experts for a device, where slots may have several sizes."""
    from moegguf.engine.plan import slot_bytes
    from moegguf.native.slot_sizes import padded

    layout = read_layout(path)
    if device is not None:
        return f"{100 * n_slots / layout.n_expert_total:.9f}%"
    return n_slots * slot_bytes(padded(layout, [None]))


def written(writer: GGUFWriter, path: Path) -> Path:
    """Writes and closes the file of `writer`, to which all keys and tensors have been
    added. Returns `path`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_adapter(path: Path, arch: str, matrix: str, shape: tuple[int, ...]) -> Path:
    """Writes a LoRA adapter of rank 8 with random values for one matrix. `shape` is the
    matrix's shape in numpy order."""
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
    """Sets MOEGGUF_HOOKS=0 inside the `with` block, so that models loaded there run
    plain llama.cpp."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEGGUF_HOOKS", "0")
        yield


def controller_of(llm: Llama) -> Controller:
    """Returns the Python controller of a loaded model. Asserts that the model has
    one."""
    controller = llm.context.controller
    assert isinstance(controller, LiveController) and controller.controller is not None
    return controller.controller


def count_scores(llm: Llama) -> list[bool]:
    """Returns a list to which, from now on, each call to store.set_scores() appends
    True for a table of scores, or False for None."""
    store, given = llm.session.store, list[bool]()
    set_scores = store.set_scores

    def count(scores: npt.ArrayLike | None) -> None:
        given.append(scores is not None)
        set_scores(scores)

    store.set_scores = count  # type: ignore[method-assign]
    return given


class Meddler:
    """Disturbs a store with random scores and prefetches: at each call to `meddle`, and
    from a thread during the `with` block."""

    def __init__(self, store: Store, seed: int = 0) -> None:
        self._store = store
        self._random = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meddler")

    def meddle(self, random: np.random.Generator | None = None) -> None:
        random = random or self._random
        n_layer, n_expert = self._store.shape
        self._store.set_scores(
            random.random((n_layer, n_expert)) if random.random() < 0.9 else None
        )
        # Some of these experts may not exist: there is no layer n_layer, and a layer
        # may have no experts.
        self._store.prefetch(
            random.integers(0, n_layer + 1, 8), random.integers(0, n_expert, 8)
        )

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
    """Returns the figures of each device's slots, keyed by ggml's name for the device,
    in the order of the store's devices."""
    store = llm.session.store
    found = (store.device(index) for index in range(len(store.devices)))
    return {figures["device"]: figures for figures in found}
