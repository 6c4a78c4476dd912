"""Loads a model: runs a trial load, opens the expert store, makes llama.cpp read the
weights, and starts threads.

The store is opened before the model and closed after it, because the model's expert
tensors use a buffer type that belongs to the store and only reserves address space.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moegguf.controller.artifacts import Artifacts
from moegguf.decisions import is_logged
from moegguf.engine.error_log import llama_log
from moegguf.engine.eviction_log import EvictionLog
from moegguf.engine.live_controller import ControllerOptions, LiveController
from moegguf.engine.load import LoadPlan
from moegguf.engine.machine import MACHINE, read_memory
from moegguf.engine.memory import logits_tokens
from moegguf.engine.recurrent import shares_cells
from moegguf.engine.run_hits import RunHits
from moegguf.engine.session import Session
from moegguf.engine.threadpool import GovernedThreads, Threadpool
from moegguf.engine.trial import try_first
from moegguf.engine.warm_start import save_uses, start_warm
from moegguf.engine.windows import has_whole_windows
from moegguf.errors import CallbackError, GenerationCancelled, MoeggufError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import StrPath
from moegguf.gguf.shards import mirror_paths
from moegguf.native import library

if TYPE_CHECKING:
    from moegguf.engine.recording import Recording, TraceOptions

Progress = Callable[[float], object]
ADVICE_BYTES = 4 << 20
REPORT_S = 0.5  # seconds between reports while memory is pinned


class Loader:
    """Loads one model according to its plan. `n_seq_max` is the number of sequences in
    the context. Raises the same errors as `Llama`.

    options: keywords of llama_cpp.Llama, as the user passed them.

    progress: called with the share of the weights that llama.cpp has read. The load is
    cancelled if `progress` returns False or raises.
    """

    def __init__(
        self, load_plan: LoadPlan, options: dict[str, Any], progress: Progress | None
    ) -> None:
        self.load_plan = load_plan
        self.n_seq_max = load_plan.plan.context.n_seq_max
        self.session: Session | None = None
        self.controller: LiveController | None = None
        self.threads: GovernedThreads | None = None
        self.recording: Recording | None = None
        self.run_hits = RunHits(load_plan.layout, load_plan.plan.on_device)
        self._saves_uses = False
        self._artifacts = Artifacts(load_plan.layout)
        self._threadpool: Threadpool | None = None
        self._bindings = library.llama_cpp()
        self._progress = progress
        self._ended_by: MoeggufError | None = None
        self._deciding: Future[None] | None = None
        self._callback: Any = self._bindings.llama_progress_callback(self._report)
        # An empty list of devices: its first entry is null.
        self._no_devices = (c.c_void_p * 1)()
        plan = load_plan.plan
        store = load_plan.spec.store
        try_first(load_plan.layout, load_plan.spec, options, self._report_waiting)
        if load_plan.no_device or plan.layers_on:
            # `device` names the device of the slots; here they are in RAM.
            store = replace(store, device=None)
        if load_plan.hooks:
            mirrors = [
                mirror_paths(path, load_plan.layout.shards)
                for path in load_plan.spec.mirror
            ]
            self.session = self._open(
                lambda: Session(
                    load_plan.layout.without(plan.whole_layers), plan, store, mirrors
                )
            )
            if is_logged():
                self.session.listeners.add(EvictionLog(self.session))
            self.session.store.pause_fill(True)  # until llama.cpp has read the weights

    def _report(self, share: float, _user: int = 0) -> bool:
        if self._deciding is not None and isinstance(
            error := self._deciding.exception(), MoeggufError
        ):
            # The controller could not be created. llama.cpp's first report waits for
            # the controller in `exception()`, so no weights have been read yet.
            self._ended_by = error
            return False
        try:
            if self._progress is not None and self._progress(share) is False:
                self._ended_by = GenerationCancelled(
                    "loading was stopped, because the progress callback returned False; load the model again."
                )
        except BaseException as error:  # must not propagate into llama.cpp
            self._ended_by = CallbackError(
                f"the progress callback raised {type(error).__name__}: {error}; correct it, and load the model again."
            )
            self._ended_by.__cause__ = error
        return self._ended_by is None

    def _open(self, open_session: Callable[[], Session]) -> Session:
        """Opens the store. If it has slots in RAM below a device, their memory is
        pinned, which may take a minute. The progress callback is then called with 0.0
        every REPORT_S seconds. If the callback cancels the load, the store is closed as
        soon as it is open."""
        if not self.load_plan.plan.n_ram_slots:
            return open_session()
        with ThreadPoolExecutor(1, "moegguf-store") as beside:
            opening = beside.submit(open_session)
            try:
                while wait([opening], REPORT_S).not_done:
                    self._report_waiting()
            except BaseException:
                with suppress(MoeggufError):
                    opening.result().close()
                raise
            return opening.result()

    def _report_waiting(self) -> None:
        """Calls the progress callback with 0.0, during the trial load or while memory
        is pinned. Raises if the callback cancels the load."""
        self._report(0.0)
        if self._ended_by is not None:
            raise self._ended_by

    def attach_model(self, params: c.Structure) -> None:
        """Sets the experts' buffer type, the progress callback and other fields in
        struct llama_model_params."""
        params.load_mtp = self.load_plan.layout.loads_heads
        params.use_extra_bufts = (
            params.use_extra_bufts and self.load_plan.spec.store.repack
        )
        if self.session is not None:
            self.session.attach_model(params)
        params.progress_callback = self._callback
        if self.load_plan.no_device:
            params.devices = c.addressof(self._no_devices)

    def attach_context(self, params: c.Structure) -> None:
        """Sets the expert hook, sequences, pass sizes and flash attention in struct
        llama_context_params."""
        context = self.load_plan.plan.context
        params.n_rs_seq = context.n_rs_seq
        params.swa_full = has_whole_windows(self.load_plan.layout, self.load_plan.spec)
        # Each checkpoint is a sequence for llama.cpp.
        params.n_seq_max = self.n_seq_max * (1 + context.n_checkpoints)
        if self.n_seq_max > 1:
            params.n_ctx = context.kv_tokens
        if params.n_seq_max > 1:
            params.kv_unified = shares_cells(self.load_plan.layout)
        options = self.load_plan.options
        if not options["embedding"]:
            params.n_batch = min(options["n_ctx"], context.n_batch)
            params.n_ubatch = min(params.n_batch, options["n_ubatch"])
            if not options.get("logits_all"):
                params.n_outputs_max = logits_tokens(
                    self.load_plan.layout, self.n_seq_max
                )
        # The base class can only switch flash attention on or off.
        if self.load_plan.spec.flash_attn is None:
            params.flash_attn_type = self._bindings.LLAMA_FLASH_ATTN_TYPE_AUTO
        if self.session is not None:
            self.session.attach_context(params)

    def read(
        self,
        construct: Callable[[], None],
        unload: Callable[[], None],
        options: ControllerOptions,
    ) -> None:
        """Calls `construct`, which creates llama.cpp's model and context. If there is
        an expert store, creates the controller in another thread, while llama.cpp reads
        the headers and the vocabulary."""
        session = self.session
        if session is not None or not self.load_plan.layout.is_moe:
            for warning in self.load_plan.plan.warnings:
                warnings.warn(warning, stacklevel=3)
        if session is None:
            self._construct(construct, unload)
            return

        def decide() -> None:
            self.controller = LiveController(session, self._artifacts, options)

        with ThreadPoolExecutor(1, "moegguf-controller") as beside:
            self._deciding = beside.submit(decide)
            self._construct(construct, unload)
        self._deciding.result()

    def _construct(
        self, construct: Callable[[], None], unload: Callable[[], None]
    ) -> None:
        """Calls `construct`. If a device has no memory for the model, calls `unload`
        and tries again with fewer slots."""
        while True:
            llama_log().forget()
            try:
                with self._weights_read_ahead():
                    construct()
                break
            except MoeggufError:
                raise
            except (MemoryError, ValueError, RuntimeError) as error:
                if self._ended_by is not None:
                    raise self._ended_by from self._ended_by.__cause__
                if (
                    isinstance(error, RuntimeError)
                    or self.session is None
                    or not self.session.give_slots_back(unload)
                ):
                    raise self.load_plan.failure(error, llama_log().reason()) from error
        # The callback refers to this object and would keep it alive.
        self._callback = None
        self.load_plan.layout.check_unchanged()

    @contextmanager
    def _weights_read_ahead(self) -> Iterator[None]:
        """Reads weights into the page cache in another thread, while the `with` block
        makes llama.cpp read them. Does nothing without an expert store.

        Without that thread, the disk would be idle while llama.cpp converts a tensor or
        builds the vocabulary. If a cgroup limits the memory, these pages are dropped
        afterwards, because the cgroup counts them. Otherwise they stay, and the next
        load of the model is faster.
        """
        if self.session is None:
            yield
            return
        layout = self.session.layout
        stop = threading.Event()
        work = threading.Thread(
            target=_advise, args=(layout, "POSIX_FADV_WILLNEED", stop), daemon=True
        )
        work.start()
        try:
            yield
        finally:
            stop.set()
            work.join()
            if read_memory().limited_by != MACHINE:
                _advise(layout, "POSIX_FADV_DONTNEED", threading.Event())
            self.session.store.pause_fill(False)

    def start_threads(self, context: int) -> None:
        """Starts the compute threads of this context. Leaves this to llama.cpp if there
        is no expert store and `govern_threads` is not set. If `govern_threads` is set,
        also creates the object that adapts the number of threads to other processes'
        use of the processors. Does nothing if there is only one compute thread."""
        options = self.load_plan.options
        governed = self.load_plan.govern_threads
        n_threads = options["n_threads"]
        n_threads_batch = options["n_threads_batch"]
        if max(n_threads, n_threads_batch) == 1:
            return
        if self.load_plan.hooks or governed:
            self._threadpool = Threadpool(context, n_threads, n_threads_batch)
        if governed:
            session = self.session
            self.threads = GovernedThreads(
                context,
                n_threads,
                lambda: session.store.counters()["stall_ns"] / 1e9 if session else 0.0,
            )

    def start_parts(
        self, warm_start: bool, trace: StrPath | TraceOptions | None
    ) -> None:
        """Fetches the most frequently used experts of earlier runs, if `warm_start` is
        True and no device holds whole layers. Starts the recording if `trace` is set.
        Raises OptionError for `trace` without an expert store."""
        session = self.session
        if trace and session is None:
            raise OptionError(
                "trace: there is nothing to record, because this model has no experts or MOEGGUF_HOOKS=0 is set;"
                " leave trace out, or unset MOEGGUF_HOOKS."
            )
        if session is None:
            return
        self._saves_uses = warm_start and not session.plan.whole_layers
        if self._saves_uses:
            start_warm(session, self._artifacts)
        if trace:
            from moegguf.engine.recording import Recording

            self.recording = Recording(session, self._artifacts, trace)

    def end_parts(self, discard: bool = False) -> None:
        """Stops the controller and the recording, and saves what was learned. discard:
        deletes the unfinished recording."""
        if self.recording is not None and discard:
            self.recording.discard()
        for part in (self.controller, self.recording):
            if part is not None:
                part.close()
        self.run_hits.save()
        if self._saves_uses and self.session is not None:
            save_uses(self.session, self._artifacts)

    def close(self) -> None:
        """Frees the threads and the store. Call this after llama.cpp's context and
        model have been freed. A second call does nothing."""
        if self._threadpool is not None:
            self._threadpool.close()
        if self.session is not None:
            self.session.close()


def _advise(layout: ExpertLayout, advice: str, stop: threading.Event) -> None:
    """Passes this advice to posix_fadvise() for the bytes of a model's files, part by
    part, until `stop` is set. Experts and tables that are read by row are left out;
    headers are included. Does nothing on a system without this advice."""
    if not hasattr(os, advice):
        return
    for index, shard in enumerate(layout.shards):
        experts = [
            (m.offset, m.n_expert * m.expert_bytes)
            for m in layout.matrices
            if m.shard == index
        ]
        tables = [
            (table.offset, table.n_bytes)
            for table in layout.row_tables
            if table.shard == index
        ]
        # llama.cpp opens the file next, and reports the error.
        with suppress(OSError), open(shard.path, "rb") as file:
            begin = 0
            for end, skipped in [*sorted(experts + tables), (shard.n_bytes, 0)]:
                for offset in range(begin, end, ADVICE_BYTES):
                    if stop.is_set():
                        return
                    os.posix_fadvise(
                        file.fileno(),
                        offset,
                        min(ADVICE_BYTES, end - offset),
                        getattr(os, advice),
                    )
                begin = end + skipped
