"""What a model has computed of its sequences, kept on disk: a prompt that begins as an earlier one did is restored, and
only the rest computed, also after the process that computed it was killed.

The KV cache is kept in blocks of BLOCK_TOKENS tokens. A block's name is a hash of everything that its bytes depend on:
of the model, the build, the options that change what is computed, who owns it, and all tokens up to its end; sequences
that begin alike have the same blocks. llama.cpp writes and reads one block as the state of a sequence that has only its
cells. Models with a recurrent state, which cannot be cut, are kept as whole states after some of the tokens.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import itertools
import queue
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moegguf.engine.batch_invariance import is_batch_invariant
from moegguf.engine.context_store import About, ContextStore, default_folder
from moegguf.engine.machine import read_memory
from moegguf.engine.projector import PLACEHOLDER
from moegguf.engine.sequences import LONG_ROPE, MAX_SEQUENCES, Tokens
from moegguf.errors import OptionError
from moegguf.gguf.fingerprint import header_digest, sampled_digest
from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.processor import read_processor
from moegguf.quantities import parse_store_size
from moegguf.settings import read_environment

if TYPE_CHECKING:
    from moegguf.engine.context import Context
    from moegguf.engine.load import LoadPlan
    from moegguf.engine.upstream import UpstreamLlama

BLOCK_TOKENS = 64
SCRATCH = MAX_SEQUENCES - 1  # a sequence id that llama.cpp has room for, and no context uses
MOST_QUEUED_BYTES = 64 << 20  # that wait to be written
READ_AHEAD = 4  # blocks, by
READERS = 2  # threads
WHOLE_STEP_TOKENS = 512  # between two whole states of a prompt; half of its tokens where these are more
NAME_BYTES = 16
_BYTES = c.POINTER(c.c_uint8)
_STATE = struct.Struct("<4I")  # llama.cpp's magic, the sequence, streams, cells
_CELL_BYTES = (12, 24)  # position, number of sequences, one sequence; with two coordinates and a token between them
CONTEXT_FIELDS = (
    "rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type", "rope_freq_base", "rope_freq_scale",
    "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "type_k", "type_v",
    "embeddings", "offload_kqv", "swa_full",
)  # fmt: skip
LOAD_OPTIONS = (
    "kv_overrides", "lora_scale", "main_gpu", "n_gpu_layers", "op_offload", "split_mode", "tensor_split",
)  # fmt: skip


@dataclass(frozen=True)
class KeptCounters:
    """Since the model was loaded: tokens that were restored, blocks that were written, bytes of these, and blocks that
    were not written because too many were waiting, or came from the disk damaged."""

    tokens_restored: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    blocks_dropped: int = 0
    blocks_damaged: int = 0


class KeptContexts:
    """Those of a loaded model in `store`. All methods but `counters` are for the thread that evaluates."""

    def __init__(
        self, llm: UpstreamLlama, context: Context, store: ContextStore, load_plan: LoadPlan, moves: StoreOptions
    ) -> None:
        self._context = context
        self._llm: UpstreamLlama = weakref.proxy(llm)  # type: ignore[assignment]  # which holds this object
        self._store = store
        self._bindings: Any = library.llama_cpp()
        self._root = _root(llm, load_plan, moves)
        self._model = _label(load_plan)
        n_swa = self._bindings.llama_model_n_swa(llm.model)
        self._whole = llm._is_stateful or 0 < n_swa < BLOCK_TOKENS
        self._known = set[str]()  # names of blocks that are there, or about to be
        self._n_whole_tokens = 0  # of the last whole state
        self._writer = _Writer(store)
        self._n_restored = self._n_damaged = self._n_dropped = 0

    @property
    def counters(self) -> KeptCounters:
        """What was read and written so far."""
        written = self._writer
        return KeptCounters(self._n_restored, written.n_blocks, written.n_bytes, self._n_dropped, self._n_damaged)

    def restore(
        self,
        sequence: int,
        tokens: Tokens,
        n_held: int,
        owner: str = "",
        make_room: Callable[[int], object] = lambda n_tokens: None,
    ) -> int:
        """Makes a sequence hold as many of `tokens` as the disk has, where it has more of them than the `n_held` that
        the sequence begins with; returns how many it holds then. owner: whose blocks these are, "" where all share
        them. make_room: called with so many tokens that the context needs cells for."""
        if self._store.is_off or len(tokens) - n_held < BLOCK_TOKENS:
            return n_held
        with self._context.lock:
            restore = self._restore_whole if self._whole else self._restore_blocks
            n_now = restore(sequence, tokens, n_held, self._names(tokens, owner), make_room)
            if n_now != n_held and sequence == 0:
                self._llm.n_tokens, self._llm._requires_eval = n_now, True
                self._llm.input_ids[:n_now] = tokens[:n_now]
        self._n_restored += max(0, n_now - n_held)
        return n_now

    def keep(self, sequence: int, tokens: Tokens, n_new: int, owner: str = "", goes_on: bool = True) -> None:
        """Has full blocks of a sequence that holds `tokens` written that are not on disk, now that the last `n_new` of
        them were computed. goes_on: False at the end of a prompt or an answer, where another prompt may go on."""
        n_full = len(tokens) // BLOCK_TOKENS
        if self._store.is_off or not n_full or (goes_on and len(tokens) % BLOCK_TOKENS >= n_new):
            return
        names = self._names(tokens, owner)
        with self._context.lock:
            if not self._whole:
                self._keep_blocks(sequence, names)
            elif not goes_on or n_new > 1:
                self._keep_whole(sequence, tokens, names, goes_on)
        if not goes_on:
            self._known -= self._writer.take_missing()
            self._writer.touch(names)

    def close(self) -> None:
        """Writes what waits. Twice is harmless."""
        self._writer.close()

    def _names(self, tokens: Tokens, owner: str) -> list[str]:
        """Of the full blocks of text that these tokens begin with."""
        ids = np.asarray(tokens, np.int32)
        images = np.flatnonzero(ids == PLACEHOLDER)
        n_full = (int(images[0]) if images.size else len(ids)) // BLOCK_TOKENS
        data, name, names = ids.tobytes(), _hash(self._root, owner.encode()), list[str]()
        for begin in range(0, n_full * BLOCK_TOKENS * ids.itemsize, BLOCK_TOKENS * ids.itemsize):
            name = _hash(name, data[begin : begin + BLOCK_TOKENS * ids.itemsize])
            names.append(name.hex())
        return names

    # Blocks.

    def _restore_blocks(
        self, sequence: int, _: Tokens, n_held: int, names: Sequence[str], make_room: Callable[[int], object]
    ) -> int:
        first = n_held // BLOCK_TOKENS
        if len(names) <= first or not self._store.holds(names[first]):
            return n_held
        if not self._context.truncate(first * BLOCK_TOKENS, sequence):
            first = 0
        names = list(itertools.takewhile(self._store.holds, names))
        make_room((len(names) - first) * BLOCK_TOKENS)
        n_done = first
        for block in self._read_ahead(names[first:]):
            if block is None or not self._set_block(sequence, n_done, block):
                for name in names[n_done:]:  # so that they are written again
                    self._store.delete(name)
                break
            n_done += 1
        self._known.update(names[:n_done])
        self._writer.touch(names[:n_done])
        return n_done * BLOCK_TOKENS

    def _read_ahead(self, names: Sequence[str]) -> Iterator[memoryview | None]:
        """The blocks, read and checked by other threads."""
        with ThreadPoolExecutor(READERS, "moegguf-contexts") as pool:
            waiting = list[Future[memoryview | None]]()
            for at in range(len(names)):
                waiting += (pool.submit(self._read, name) for name in names[at + len(waiting) : at + READ_AHEAD])
                yield waiting.pop(0).result()

    def _read(self, name: str) -> memoryview | None:
        if not self._store.holds(name):
            return None
        block = self._store.read(name)
        self._n_damaged += block is None
        return block

    def _set_block(self, sequence: int, index: int, block: memoryview) -> bool:
        """Adds a block's cells to a sequence; False where these are not its tokens', or there is no room for them."""
        if not _is_of(block, index):
            return False
        memory = self._llm._ctx.memory
        done = self._set_state(SCRATCH, block)
        if done:
            self._bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, -1, -1)
        self._bindings.llama_memory_seq_rm(memory, SCRATCH, -1, -1)
        return done

    def _keep_blocks(self, sequence: int, names: Sequence[str]) -> None:
        new = [(i, name) for i, name in enumerate(names) if name not in self._known]
        there = {name for _, name in new if self._store.holds(name)}
        self._known |= there
        new = [(i, name) for i, name in new if name not in there]
        memory = self._llm._ctx.memory
        first = self._bindings.llama_memory_seq_pos_min(memory, sequence)  # earlier cells have left a window
        if not new or first > new[0][0] * BLOCK_TOKENS:
            return
        with self._cells_aside(sequence):
            for i, name in new:
                begin, end = i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS
                self._bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, begin, end)
                is_kept = self._keep_state_of(sequence, name, end, i)
                self._bindings.llama_memory_seq_rm(memory, sequence, -1, -1)
                if not is_kept:
                    return

    @contextmanager
    def _cells_aside(self, sequence: int) -> Iterator[None]:
        """The block in which the cells of a sequence are those of SCRATCH, and it has none."""
        memory, bindings = self._llm._ctx.memory, self._bindings
        bindings.llama_memory_seq_cp(memory, sequence, SCRATCH, -1, -1)
        bindings.llama_memory_seq_rm(memory, sequence, -1, -1)
        try:
            yield
        finally:
            bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, -1, -1)
            bindings.llama_memory_seq_rm(memory, SCRATCH, -1, -1)

    def _keep_state_of(self, sequence: int, name: str, n_tokens: int, index: int | None = None) -> bool:
        """Has the state of a sequence written; False where it cannot be, or too much waits already. index: of the block
        that it is to be."""
        n_bytes = self._bindings.llama_state_seq_get_size(self._llm.ctx, sequence)
        if not self._writer.has_room(n_bytes):
            self._n_dropped += 1
            return False
        data = np.empty(n_bytes, np.uint8)
        pointer = data.ctypes.data_as(_BYTES)
        if self._bindings.llama_state_seq_get_data(self._llm.ctx, pointer, n_bytes, sequence) != n_bytes:
            return False
        if index is not None and not _is_of(data.data, index):
            return False
        self._known.add(name)
        n_own = n_tokens if index is None else BLOCK_TOKENS
        self._writer.put(name, About(self._model, n_tokens, n_own), data.data)
        return True

    def _set_state(self, sequence: int, block: memoryview) -> bool:
        pointer = np.frombuffer(block, np.uint8).ctypes.data_as(_BYTES)
        return bool(self._bindings.llama_state_seq_set_data(self._llm.ctx, pointer, len(block), sequence))

    # Whole states, whose names end with the tokens after the last full block.

    def _restore_whole(
        self,
        sequence: int,
        tokens: Tokens,
        n_held: int,
        names: Sequence[str],
        make_room: Callable[[int], object],
    ) -> int:
        for n_full in range(len(names), n_held // BLOCK_TOKENS, -1):
            ends = (int(name.split("-")[1]) for name in self._store.names(names[n_full - 1] + "-"))
            for n_tokens in sorted((n_full * BLOCK_TOKENS + n for n in ends), reverse=True):
                name = _whole_name(names, tokens[:n_tokens])
                if n_held < n_tokens <= len(tokens) and (block := self._read(name)) is not None:
                    make_room(n_tokens)
                    done = self._set_state(sequence, block) and self._n_positions(sequence) == n_tokens
                    self._writer.touch([name])
                    self._n_whole_tokens = n_tokens
                    return n_tokens if done or not self._context.truncate(0, sequence) else 0
        return n_held

    def _keep_whole(self, sequence: int, tokens: Tokens, names: Sequence[str], goes_on: bool) -> None:
        if len(tokens) < self._n_whole_tokens:
            self._n_whole_tokens = 0  # another conversation's
        n_next = self._n_whole_tokens + max(WHOLE_STEP_TOKENS, self._n_whole_tokens // 2)
        if (goes_on and len(tokens) < n_next) or PLACEHOLDER in tokens:
            return
        name = _whole_name(names, tokens)
        n_bytes = self._bindings.llama_state_seq_get_size(self._llm.ctx, sequence)
        if not self._store.holds(name) and n_bytes < read_memory().available_bytes // 2:
            self._keep_state_of(sequence, name, len(tokens))
        self._n_whole_tokens = len(tokens)

    def _n_positions(self, sequence: int) -> int:
        return int(self._bindings.llama_memory_seq_pos_max(self._llm._ctx.memory, sequence)) + 1


def open_contexts(
    llm: UpstreamLlama, context: Context, load_plan: LoadPlan, moves: StoreOptions, limit: str | int
) -> KeptContexts | None:
    """Those of a model that was loaded by this plan, in the user's cache folder, where its context can have any. limit:
    of the folder, as an option. Raises OptionError for one that cannot be read."""
    try:
        limit_bytes = parse_store_size(limit)
    except ValueError as error:
        raise OptionError(f"context_store: {error}.") from None
    options = load_plan.options
    unused = options.get("logits_all") or options.get("embedding") or llm._ctx.memory is None
    if limit_bytes == 0 or unused or llm.context_params.n_seq_max > SCRATCH:
        return None
    store = ContextStore(default_folder(), limit_bytes)
    return None if store.is_off else KeptContexts(llm, context, store, load_plan, moves)


class _Writer:
    """Writes blocks to a store on a thread of its own, and tells it which ones were used."""

    def __init__(self, store: ContextStore) -> None:
        self._store = store
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the next three
        self._n_queued_bytes = 0
        self._missing = set[str]()
        self.n_blocks = self.n_bytes = 0
        self._thread = threading.Thread(target=self._run, name="moegguf-contexts", daemon=True)
        self._thread.start()

    def has_room(self, n_bytes: int) -> bool:
        """Whether so many bytes may wait, too."""
        with self._lock:
            return not self._n_queued_bytes or self._n_queued_bytes + n_bytes <= MOST_QUEUED_BYTES

    def put(self, name: str, about: About, data: memoryview) -> None:
        """Has a block written, which is missing if that fails."""

        def write() -> None:
            is_written = self._store.write(name, about, [data])
            with self._lock:
                self._n_queued_bytes -= len(data)
                if is_written:
                    self.n_blocks, self.n_bytes = self.n_blocks + 1, self.n_bytes + len(data)
                else:
                    self._missing.add(name)

        with self._lock:
            self._n_queued_bytes += len(data)
        self._jobs.put(write)

    def touch(self, names: Sequence[str]) -> None:
        """Notes that these are used now, and which of them are missing."""

        def touch() -> None:
            missing = self._store.touch(names)
            with self._lock:
                self._missing.update(missing)

        self._jobs.put(touch)

    def take_missing(self) -> set[str]:
        """Blocks that were found missing since the last call."""
        with self._lock:
            missing, self._missing = self._missing, set()
        return missing

    def close(self) -> None:
        """Writes what waits, and ends. Twice is harmless."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _is_of(block: memoryview, index: int) -> bool:
    """Whether a state of one sequence has the cells of the block's tokens, each once and in any order of cells."""
    if len(block) < _STATE.size or _STATE.unpack_from(block)[2:] != (1, BLOCK_TOKENS):
        return False
    positions = index * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    for n_bytes in _CELL_BYTES:
        cells = np.frombuffer(block[_STATE.size :][: BLOCK_TOKENS * n_bytes], np.int32).reshape(-1, n_bytes // 4)
        if len(cells) == BLOCK_TOKENS and (cells[:, 1] == 1).all() and (np.sort(cells[:, 0]) == positions).all():
            return True
    return False


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=NAME_BYTES).digest()


def _whole_name(names: Sequence[str], tokens: Tokens) -> str:
    n_full = len(tokens) // BLOCK_TOKENS
    rest = np.asarray(tokens[n_full * BLOCK_TOKENS :], np.int32)
    return f"{names[n_full - 1]}-{len(rest)}-{_hash(rest.tobytes()).hex()}"


def _root(llm: UpstreamLlama, load_plan: LoadPlan, store: StoreOptions) -> bytes:
    """A hash of all that blocks depend on but tokens: those of another model, build or option have other names."""
    layout, plan, options, params = load_plan.layout, load_plan.plan, load_plan.options, llm.context_params
    adapter = options.get("lora_path")
    parts = {
        "model": (header_digest(layout.shards), sampled_digest(tuple(shard.path for shard in layout.shards))),
        "adapter": adapter and (sampled_digest((Path(adapter),)), options.get("lora_scale")),
        "build": library.build_identity(),
        "processor": sorted(read_processor().flags),
        "kernels": (read_environment().kernels, load_plan.hooks, store.repack, plan.exact),
        "devices": (plan.device, plan.layers_on, plan.whole_layers),
        "layers": [(part.name, part.layers) for part in plan.devices],
        "context": {name: getattr(params, name) for name in CONTEXT_FIELDS},
        "options": {name: options.get(name) for name in LOAD_OPTIONS},
        "rope": options["n_ctx"] if any(name.endswith(LONG_ROPE) for name in layout.tensor_types) else 0,
        "passes": None if is_batch_invariant(llm, layout, plan) else (params.n_batch, params.n_ubatch),
    }
    return _hash(repr(parts).encode())


def _label(load_plan: LoadPlan) -> str:
    """The model's name for people: its file's, or of a file named by a digest, what its header says."""
    name = load_plan.layout.shards[0].path.stem
    return str(load_plan.layout.metadata.get("general.name", name)) if name.startswith("sha256-") else name
