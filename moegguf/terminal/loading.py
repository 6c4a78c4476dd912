"""Loads a model with progress on the terminal; Ctrl-C cancels it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.gguf.experts import ExpertLayout
    from moegguf.models.entry import ModelEntry
    from moegguf.terminal.progress import Spinner

CANCEL_TIMEOUT_S = 0.5  # for a load that was interrupted


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. None: moegguf's default. verbose: 1 prints statistics, 2 also llama.cpp's log.

    mmproj: a projector in place of the one that the model's name has.
    """

    expert_cache: str | None = None
    n_threads: int | None = None
    n_ctx: int | None = None
    verbose: int = 0
    strategy: str | None = None
    policy: str = "auto"
    predictor: str | None = None
    prefetch: bool | None = None
    warm_start: bool | None = None
    n_batch: int | None = None
    n_gpu_layers: int | None = None
    mmproj: str | None = None
    type_k: str | None = None
    type_v: str | None = None
    vram_cache: str | None = None
    placement: str | None = None
    misses: str | None = None


def find_or_pull(name: str) -> ModelEntry:
    """The entry called `name`; a Hugging Face name that is not on this machine is pulled first.

    Raises ModelNotFoundError, ModelNameError, PullError.
    """
    from moegguf.errors import ModelNotFoundError
    from moegguf.models.catalog import Catalog
    from moegguf.models.names import is_hub_name

    catalog = Catalog()
    try:
        return catalog.find(name)
    except ModelNotFoundError:
        if not is_hub_name(name):
            raise
    from moegguf.models.pull import pull
    from moegguf.terminal.progress import PullProgress

    with PullProgress() as progress:
        return pull(name, catalog, progress.report)


def load_in_thread(load: Callable[[threading.Event], Llama]) -> Llama:
    """Runs `load` on another thread: a KeyboardInterrupt raised in a callback from C would be lost.

    On Ctrl-C sets the event, then raises KeyboardInterrupt, or ends the process if `load` runs on for CANCEL_TIMEOUT_S.
    """
    from moegguf.terminal.keyboard import exit_now

    interrupted = threading.Event()
    done: queue.SimpleQueue[Llama | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put(load(interrupted))
        except BaseException as error:  # raised again by the waiting thread
            done.put(error)

    thread = threading.Thread(target=work, name="moegguf-load", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        interrupted.set()
        thread.join(CANCEL_TIMEOUT_S)
        if thread.is_alive():
            exit_now()
        raise
    result = done.get()
    if isinstance(result, BaseException):
        raise result
    return result


def silence_llama_log() -> None:
    """Turns off llama.cpp's log, which the bindings filter by this logger's level."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)


def projector_path(entry: ModelEntry, options: LoadOptions) -> str | None:
    """The projector to load `entry` with: the one given, else the model's own if it can be used."""
    from moegguf.models.details import projector_of

    own = projector_of(entry)
    return options.mmproj or (str(own.path) if own else None)


def load(entry: ModelEntry, options: LoadOptions, spinner: Spinner) -> tuple[Llama, float]:
    """Loads a model; returns it and the seconds that took."""
    start = time.perf_counter()
    spinner.show("loading the library")
    import moegguf
    from moegguf.engine.trial import is_due
    from moegguf.gguf.projector import read_projector
    from moegguf.terminal.progress import loading_text

    layout = moegguf.read_layout(entry.path)
    mmproj = projector_path(entry, options)
    arguments = {**_llama_arguments(layout, options), "mmproj": mmproj}
    tried = is_due(layout, arguments, read_projector(mmproj) if mmproj else None)

    def open_model(interrupted: threading.Event) -> Llama:
        def progress(share: float) -> bool:
            elapsed_s = time.perf_counter() - start
            text = loading_text(layout.name, share, layout.dense_bytes, elapsed_s)
            spinner.show(text if share or not tried else f"trying {layout.name}, the first time it is loaded")
            return not interrupted.is_set()

        return moegguf.Llama(entry.path, progress=progress, **arguments)

    if options.verbose <= 1:
        silence_llama_log()  # before llama.cpp's first line
    llm = load_in_thread(open_model)
    if options.verbose <= 1:
        silence_llama_log()  # the bindings have set the level again
    return llm, time.perf_counter() - start


def context_size(
    layout: ExpertLayout, requested: int | None, budgets: dict[str, Any] | None = None, **types: Any
) -> int:
    """Tokens of context: as requested, else as planned; warns when more are requested than the model was trained on.

    budgets: `expert_cache` and where experts may go, as `plan_here` takes them; None: those of the environment. types:
    those of the KV cache, as `plan.Sizes` has them.
    """
    from moegguf.engine.here import plan_here

    trained = layout.hparams.n_ctx_train
    if requested and requested > trained:
        print_message(f"warning: a context of {requested} tokens is more than the {trained} the model was trained on.")
    if requested:
        return requested
    return plan_here(layout, **(budgets or {}), **types).n_ctx


def _llama_arguments(layout: ExpertLayout, options: LoadOptions) -> dict[str, Any]:
    """Keyword arguments for `Llama`."""
    types = {name: value for name, value in _kv_cache_arguments(options).items() if value is not None}
    where = ("expert_cache", "vram_cache", "placement", "misses", "n_gpu_layers")
    return {
        **{name: value for name, value in vars(options).items() if value is not None},
        **types,
        "n_ctx": context_size(layout, options.n_ctx, {name: getattr(options, name) for name in where}, **types),
        "verbose": options.verbose > 1,
        "flash_attn": types.get("flash_attn"),  # None as llama.cpp's own programs
    }


def _kv_cache_arguments(options: LoadOptions) -> dict[str, int | bool | None]:
    """The types of the KV cache as ggml's numbers; llama.cpp takes a quantised V cache with flash attention only."""
    from moegguf.gguf.reader import GGML_TYPES, ggml_type
    from moegguf.settings import read_settings

    types = {"type_k": options.type_k, "type_v": options.type_v}
    numbers = {name: None if type is None else ggml_type(type) for name, type in types.items()}
    quantised = numbers["type_v"] is not None and GGML_TYPES[numbers["type_v"]][1] > 1
    return numbers | {"flash_attn": True if quantised else read_settings().flash_attention}
