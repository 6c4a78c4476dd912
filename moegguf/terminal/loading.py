"""Opens a model for a person who waits: what is happening is shown, and Ctrl-C ends it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegguf.terminal.messages import say

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.gguf.experts import ExpertLayout
    from moegguf.models.entry import ModelEntry
    from moegguf.terminal.progress import Spinner

PATIENCE_S = 0.5  # for a load that was interrupted


@dataclass(frozen=True)
class OpenOptions:
    """How a model is opened. None: as moegguf decides. verbose 1 shows our statistics, 2 llama.cpp's log as well."""

    expert_cache: str | None = None
    threads: int | None = None
    ctx: int | None = None
    verbose: int = 0
    policy: str = "auto"
    predictor: str | None = None
    prefetch: bool | None = None
    batch: int | None = None
    gpu_layers: int | None = None


def find_or_pull(name: str) -> ModelEntry:
    """What `name` stands for; a name of Hugging Face that is not here yet is fetched first.

    Raises ModelNotFoundError, ModelNameError, PullError.
    """
    from moegguf.errors import ModelNotFoundError
    from moegguf.models.catalog import Catalog

    catalog = Catalog()
    try:
        return catalog.find(name)
    except ModelNotFoundError:
        if not _is_on_hub(name):
            raise
    from moegguf.models.pull import pull
    from moegguf.terminal.progress import PullProgress

    with PullProgress() as progress:
        return pull(name, catalog, progress.report)


def _is_on_hub(name: str) -> bool:
    """Whether a name that is not here can be fetched: not a path, though that may look like USER/REPOSITORY."""
    from moegguf.errors import ModelNameError
    from moegguf.models.names import parse_name

    if name.lower().endswith(".gguf") and ":" not in name:
        return False
    try:
        return parse_name(name).is_hub
    except ModelNameError:
        return False


def interruptible(load: Callable[[threading.Event], Llama]) -> Llama:
    """`load` on a thread of its own: C computes for seconds, and a signal in a callback from C would be lost.

    Raises KeyboardInterrupt on Ctrl-C, with the event set, or ends the process when `load` does not heed it.
    """
    from moegguf.terminal.keyboard import leave_now

    interrupted = threading.Event()
    done: queue.SimpleQueue[Llama | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put(load(interrupted))
        except BaseException as error:  # raised again by the thread that waits
            done.put(error)

    thread = threading.Thread(target=work, name="moegguf-load", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        interrupted.set()
        thread.join(PATIENCE_S)
        if thread.is_alive():
            leave_now()
        raise
    result = done.get()
    if isinstance(result, BaseException):
        raise result
    return result


def silence() -> None:
    """llama.cpp's log, which goes to stderr through this logger's level, says nothing."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)


def load(path: Path, options: OpenOptions, spinner: Spinner) -> tuple[Llama, float]:
    """The model, and the seconds it took to load."""
    start = time.perf_counter()
    spinner.show("loading the library")
    import moegguf
    from moegguf.terminal.progress import loading_words

    layout = moegguf.read_layout(path)
    arguments = _arguments(layout, options)

    def open_model(interrupted: threading.Event) -> Llama:
        def progress(share: float) -> bool:
            spinner.show(loading_words(layout.name, share, layout.dense_bytes, time.perf_counter() - start))
            return not interrupted.is_set()

        return moegguf.Llama(path, progress=progress, **arguments)

    if options.verbose <= 1:
        silence()  # from the first line on
    llm = interruptible(open_model)
    if options.verbose <= 1:
        silence()  # the bindings have turned warnings on again, such as that a pass was cancelled
    return llm, time.perf_counter() - start


def context_of(layout: ExpertLayout, asked: int | None) -> int:
    """Tokens of context; says so when more are asked for than the model knows."""
    from moegguf.engine.machine import read_memory
    from moegguf.engine.memory import choose_context

    trained = layout.hparams.n_ctx_train
    if asked and asked > trained:
        say(f"warning: a context of {asked} tokens is more than the {trained} the model was trained on.")
    return choose_context(layout, asked, read_memory())


def _arguments(layout: ExpertLayout, options: OpenOptions) -> dict[str, Any]:
    """Keywords for `Llama`."""
    arguments: dict[str, Any] = {
        "expert_cache": options.expert_cache,
        "policy": options.policy,
        "predictor": options.predictor,
        "prefetch": options.prefetch,
        "n_ctx": context_of(layout, options.ctx),
        "n_threads": options.threads,
        "verbose": options.verbose > 1,
    }
    if options.batch is not None:
        arguments["n_batch"] = options.batch
    if options.gpu_layers is not None:
        arguments["n_gpu_layers"] = options.gpu_layers
    return arguments
