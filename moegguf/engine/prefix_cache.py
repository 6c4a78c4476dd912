"""Keeps on disk what a model has computed: a prompt that begins as an earlier one did is restored, and only the rest is
computed, also after the process that computed it was killed.

The KV cache is kept in blocks of BLOCK_TOKENS tokens. A block's name is a hash of everything that its bytes depend on:
of the model, the build, the options that change what is computed, who owns it, and all tokens up to its end; sequences
that begin alike have the same blocks. What follows the last full block is kept where a prompt or an answer ends.
llama.cpp writes and reads one block as the state of a sequence that has only its cells. A block does not end within an
image, and its name has the image's hash in it. Models with a recurrent state, which cannot be cut, are kept as whole
states after some of the tokens, by the name of what follows the last full block there.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import itertools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moegguf.engine.kv_block_store import About, Buffer, KVBlocks, KvBlockStore
from moegguf.engine.machine import read_memory
from moegguf.engine.projector import PLACEHOLDER, ImageSpan
from moegguf.engine.recent_experts import RecentExperts
from moegguf.engine.sequences import MAX_SEQUENCES, Tokens, is_batch_invariant
from moegguf.errors import OptionError
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.fingerprint import header_digest, weights_digest
from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.processor import read_processor
from moegguf.quantities import parse_store_size
from moegguf.settings import read_environment, read_load_keywords

if TYPE_CHECKING:
    from moegguf.engine.context import Context
    from moegguf.engine.load import LoadPlan
    from moegguf.engine.upstream import UpstreamLlama

Images = Sequence[ImageSpan]
MakeRoom = Callable[[int], object]

BLOCK_TOKENS = 64
SCRATCH = MAX_SEQUENCES - 1  # a sequence id that llama.cpp has room for, and no context uses
MOST_QUEUED_BYTES = 64 << 20  # that wait to be written
WHOLE_STEP_TOKENS = 512  # between two whole states of a prompt; half of its tokens where these are more
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
class _Part:
    """Tokens of a sequence from `begin` to before `end`, and the name of their block; `positions`: those of each, and
    of the token after them."""

    name: str
    begin: int
    end: int
    positions: npt.NDArray[np.int32]


class _Parts:
    """The parts of a sequence. No part cuts an image.

    blocks: the full parts at the beginning. name: stands for all that the parts depend on but tokens and `images`.
    """

    def __init__(self, name: str, tokens: Tokens, images: Images) -> None:
        self._name, self._images, self._ids = name, images, np.asarray(tokens, np.int32)
        n_tokens = len(self._ids)
        unknown = np.append(self._ids == PLACEHOLDER, True)  # who evaluates images into a context does not say which
        steps = np.ones(n_tokens + 1, np.int32)
        for image in images:
            unknown[image.begin : image.end] = False
            if image.n_positions != image.n_tokens and image.end <= n_tokens:
                steps[image.begin + 1 : image.end] = 0  # they share the position of the first (M-RoPE)
                steps[image.end] = image.n_positions
        unknown[n_tokens], steps[0] = True, 0
        self._n_known = int(np.argmax(unknown))
        self._positions = np.cumsum(steps, dtype=np.int32)
        self.blocks, end = list[_Part](), 0
        while block := self._part(name, end, self._uncut(end + BLOCK_TOKENS)):
            self.blocks.append(block)
            name, end = block.name, block.end

    def rest(self, n_blocks: int, end: int) -> _Part | None:
        """Returns the part behind the first blocks up to `end`, less than another block; None where it has no name."""
        name, begin = (self.blocks[n_blocks - 1].name, self.blocks[n_blocks - 1].end) if n_blocks else (self._name, 0)
        return self._part(name, begin, end) if 0 <= end - begin < BLOCK_TOKENS and self._uncut(end) == end else None

    def _part(self, before: str, begin: int, end: int) -> _Part | None:
        if end > self._n_known:
            return None
        keys = (image.key for image in self._images if begin <= image.begin < end)
        name = _hash(before, str(end - begin), self._ids[begin:end].tobytes(), *keys)
        return _Part(name, begin, end, self._positions[begin : end + 1])

    def _uncut(self, end: int) -> int:
        """Returns `end`, or the end of the image that it would cut."""
        return next((image.end for image in self._images if image.begin < end < image.end), end)


class PrefixCache:
    """The kept contexts of a loaded model, in `store`. For the thread that evaluates; another thread writes."""

    def __init__(
        self,
        llm: UpstreamLlama,
        context: Context,
        store: KvBlockStore,
        load_plan: LoadPlan,
        moves: StoreOptions,
        recent: RecentExperts | None,
    ) -> None:
        self._context = context
        self._llm: UpstreamLlama = weakref.proxy(llm)  # type: ignore[assignment]  # which holds this object
        self._store, self._recent = store, recent
        self._bindings: Any = library.llama_cpp()
        self._root = _root(llm, load_plan, moves)
        self._model = load_plan.layout.shards[0].path.stem  # for people
        if self._model.startswith("sha256-"):
            self._model = str(load_plan.layout.metadata.get("general.name", self._model))
        n_swa = self._bindings.llama_model_n_swa(llm.model)
        self._whole = llm._is_stateful or 0 < n_swa < BLOCK_TOKENS
        self._n_whole_tokens = 0  # of the last whole state
        self._pool = ThreadPoolExecutor(1, "moegguf-contexts")
        self._queued: dict[str, int] = {}  # names of blocks that wait to be written, and their bytes
        self._lock = threading.Lock()  # of these
        self.behind = set[int]()  # sequences of which blocks could not be written, as too many were waiting
        self._fill_held = False

    @property
    def name(self) -> str:
        """Returns what stands for all that computed bits depend on but tokens: model, build and options."""
        return self._root

    def restore(
        self,
        sequence: int,
        tokens: Tokens,
        n_held: int,
        owner: str = "",
        make_room: MakeRoom = lambda n_tokens: None,
        images: Images = (),
    ) -> int:
        """Makes a sequence hold as many of `tokens` as the disk has, but for the last one, where it has more of them
        than the `n_held` that the sequence begins with; returns how many it holds then. owner: whose blocks these are,
        "" where all share them. make_room: called with so many tokens that the context needs cells for. images: those
        among the tokens, of sequence 0."""
        n_tokens = len(tokens)
        if self._recent is not None and n_tokens >= BLOCK_TOKENS:
            self._recent.begin()
        if self._store.is_off or n_tokens < max(BLOCK_TOKENS, n_held + 2) or tokens[-1] == PLACEHOLDER:
            return n_held
        self._pause_fill(True)  # until what follows was computed
        n_now = n_held
        try:
            with self._context.lock:
                parts = _Parts(_hash(self._root, owner), tokens[:-1] if self._whole else tokens, images)
                restore = self._restore_whole if self._whole else self._restore_parts
                n_now = restore(sequence, parts, n_held, make_room)
                if n_now != n_held and sequence == 0:
                    self._llm.n_tokens, self._llm._requires_eval = n_now, True
                    self._llm.input_ids[:n_now] = tokens[:n_now]
                    self._context.images.spans = list(images)
                    self._context.images.truncate(n_now)
                if n_now == n_tokens:
                    n_now = n_now - 1 if self._context.truncate(n_now - 1, sequence) else 0
        finally:
            self._pause_fill(n_now > n_held)
        return n_now

    def _pause_fill(self, on: bool) -> None:
        if on != self._fill_held:
            self._context.pause_fill(on)
            self._fill_held = on

    def store(self, sequence: int, tokens: Tokens, n_new: int, owner: str = "", goes_on: bool = True) -> None:
        """Writes those blocks of a sequence with `tokens` that are not on disk, now that the last `n_new` tokens were
        computed. `goes_on` is False at the end of a prompt or an answer, where another prompt may go on: then what
        follows the last full block is written, too."""
        self.behind.discard(sequence)
        self._pause_fill(False)
        if not goes_on and self._recent is not None and (experts := self._recent.end()) is not None:
            self._put(self._recent.name, About(self._model, 0, 0), experts)
        n_tokens = len(tokens)
        if self._store.is_off or n_tokens < BLOCK_TOKENS or (goes_on and n_tokens % BLOCK_TOKENS >= n_new):
            return
        parts = _Parts(_hash(self._root, owner), tokens, self._context.images.spans if sequence == 0 else ())
        blocks, rest = parts.blocks, parts.rest(len(parts.blocks), n_tokens)
        with self._context.lock:
            if not self._whole:
                last = [rest] if rest and rest.begin < rest.end and not goes_on else []
                self._keep_parts(sequence, [*blocks, *last])
            elif rest and (not goes_on or n_new > 1):
                self._keep_whole(sequence, rest, goes_on)
        if not goes_on:
            self._pool.submit(self._store.touch, [block.name for block in blocks])

    def close(self) -> None:
        """Writes what waits. Twice is harmless."""
        self._pool.shutdown()

    def _kept_rests(self, parts: _Parts, n_blocks: int) -> Iterator[_Part]:
        """Yields the parts on disk that follow the first blocks, the longest first."""
        begin = parts.blocks[n_blocks - 1].end if n_blocks else 0
        for end in range(begin + BLOCK_TOKENS - 1, begin - 1, -1):
            if (rest := parts.rest(n_blocks, end)) and self._store.holds(rest.name):
                yield rest

    # Parts: blocks, the last of which may have fewer tokens.

    def _restore_parts(self, sequence: int, parts: _Parts, n_held: int, make_room: MakeRoom) -> int:
        blocks = parts.blocks
        first = sum(block.end <= n_held for block in blocks)
        there = first + sum(1 for _ in itertools.takewhile(lambda block: self._store.holds(block.name), blocks[first:]))
        rests = list(itertools.islice(self._kept_rests(parts, there), 1))
        wanted = [*blocks[first:there], *rests]
        if not wanted or wanted[-1].end <= n_held:
            return n_held
        if not self._context.truncate(wanted[0].begin, sequence):  # all or nothing
            wanted = [*blocks[:there], *rests]
        begin = wanted[0].begin
        make_room(wanted[-1].end - begin)
        with KVBlocks() as read:
            n_added = sum(1 for _ in itertools.takewhile(lambda part: self._add_part(read, sequence, part), wanted))
            n_done = min(n_added, read.fill())
        if n_done < len(wanted):
            first_wrong = int(wanted[n_done].positions[0])
            self._bindings.llama_memory_seq_rm(self._llm._ctx.memory, sequence, first_wrong, -1)
            for unusable in wanted[n_done:]:  # so that they are written again
                self._store.delete(unusable.name)
        self._pool.submit(self._store.touch, [part.name for part in wanted[:n_done]])
        return wanted[n_done - 1].end if n_done else begin

    def _add_part(self, read: KVBlocks, sequence: int, part: _Part) -> bool:
        """Adds a block's cells to a sequence, which `read` fills later; False where these are not its tokens', or there
        is no room for them."""
        block = self._store.open(part.name, _STATE.size + max(_CELL_BYTES) * (part.end - part.begin))
        if block is None or not _is_of(block.head, part):
            return False
        memory = self._llm._ctx.memory
        state = c.cast(read.add(block), _BYTES)
        done = bool(self._bindings.llama_state_seq_set_data(self._llm.ctx, state, block.n_bytes - block.begin, SCRATCH))
        if done:
            self._bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, -1, -1)
        self._bindings.llama_memory_seq_rm(memory, SCRATCH, -1, -1)
        return done

    def _keep_parts(self, sequence: int, parts: Sequence[_Part]) -> None:
        new = [part for part in parts if not self._is_kept(part)]
        memory, bindings = self._llm._ctx.memory, self._bindings
        first = bindings.llama_memory_seq_pos_min(memory, sequence)  # earlier cells have left a window
        if not new or first > new[0].positions[0]:
            return
        bindings.llama_memory_seq_cp(memory, sequence, SCRATCH, -1, -1)
        bindings.llama_memory_seq_rm(memory, sequence, -1, -1)
        try:
            for part in new:
                begin, end = int(part.positions[0]), int(part.positions[-1])
                bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, begin, end)
                is_kept = self._keep_state(sequence, part)
                bindings.llama_memory_seq_rm(memory, sequence, -1, -1)
                if not is_kept:
                    return
        finally:
            bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, -1, -1)
            bindings.llama_memory_seq_rm(memory, SCRATCH, -1, -1)

    def _is_kept(self, part: _Part) -> bool:
        return part.name in self._queued or self._store.holds(part.name)

    def _keep_state(self, sequence: int, part: _Part) -> bool:
        """Queues the state of a sequence to be written as this part. Returns False where llama.cpp cannot give it, or
        too much waits already."""
        n_bytes = self._bindings.llama_state_seq_get_size(self._llm.ctx, sequence)
        with self._lock:
            if self._queued and sum(self._queued.values()) + n_bytes > MOST_QUEUED_BYTES:
                self.behind.add(sequence)
                return False
        data = np.empty(n_bytes, np.uint8)
        pointer = data.ctypes.data_as(_BYTES)
        if self._bindings.llama_state_seq_get_data(self._llm.ctx, pointer, n_bytes, sequence) != n_bytes:
            return False
        if not self._whole and not _is_of(data.data, part):
            return False
        about = About(self._model, part.end, part.end if self._whole else part.end - part.begin)
        self._put(part.name, about, data.data)
        return True

    def _put(self, name: str, about: About, data: memoryview) -> None:
        """Queues a block to be written."""

        def write() -> None:
            self._store.write(name, about, [data])
            with self._lock:
                self._queued.pop(name, None)

        with self._lock:
            self._queued[name] = len(data)
        self._pool.submit(write)

    # Whole states.

    def _restore_whole(self, sequence: int, parts: _Parts, n_held: int, make_room: MakeRoom) -> int:
        n_first = sum(block.end <= n_held for block in parts.blocks)
        for rest in (r for n in range(len(parts.blocks), n_first - 1, -1) for r in self._kept_rests(parts, n)):
            if rest.end <= n_held or (state := self._store.read(rest.name)) is None:
                continue
            make_room(rest.end)
            data = np.frombuffer(state, np.uint8).ctypes.data_as(_BYTES)
            found = self._bindings.llama_state_seq_set_data(self._llm.ctx, data, len(state), sequence)
            n_found = self._bindings.llama_memory_seq_pos_max(self._llm._ctx.memory, sequence) + 1
            self._pool.submit(self._store.touch, [rest.name])
            self._n_whole_tokens = rest.end
            if found and n_found == rest.positions[-1]:
                return rest.end
            self._store.delete(rest.name)
            self._context.truncate(0, sequence)
            return 0
        return n_held

    def _keep_whole(self, sequence: int, rest: _Part, goes_on: bool) -> None:
        if rest.end < self._n_whole_tokens:
            self._n_whole_tokens = 0  # another conversation's
        if goes_on and rest.end < self._n_whole_tokens + max(WHOLE_STEP_TOKENS, self._n_whole_tokens // 2):
            return
        n_bytes = self._bindings.llama_state_seq_get_size(self._llm.ctx, sequence)
        if not self._is_kept(rest) and n_bytes < read_memory().available_bytes // 2:
            self._keep_state(sequence, rest)
        self._n_whole_tokens = rest.end


def store_limit(given: str | int | None) -> int | None:
    """Returns the bytes of an option, or without it of the environment; None: as `KvBlockStore` chooses. Raises
    OptionError."""
    try:
        return parse_store_size(read_load_keywords().get("context_store", "auto") if given is None else given)
    except ValueError as error:
        raise OptionError(f"context_store: {error}.") from None


def open_prefix_cache(
    llm: UpstreamLlama,
    context: Context,
    load_plan: LoadPlan,
    moves: StoreOptions,
    store: KvBlockStore,
    recent: RecentExperts | None,
) -> PrefixCache | None:
    """Returns the kept contexts of a model that was loaded by this plan; None where its context can have none."""
    options = load_plan.options
    unused = options.get("logits_all") or options.get("embedding") or llm._ctx.memory is None
    if store.is_off or unused or llm.context_params.n_seq_max > SCRATCH:
        return None
    return PrefixCache(llm, context, store, load_plan, moves, recent)


def _is_of(block: Buffer, part: _Part) -> bool:
    """Returns whether a state of one sequence has the cells of the part's tokens, each once and in any order."""
    n_tokens = part.end - part.begin
    if len(block) < _STATE.size or _STATE.unpack_from(block)[2:] != (1, n_tokens):
        return False
    for n_bytes in _CELL_BYTES:
        cells = np.frombuffer(block[_STATE.size :][: n_tokens * n_bytes // 4 * 4], np.uint8)
        if len(cells) == n_tokens * n_bytes:
            fields = cells.view(np.int32).reshape(n_tokens, -1)
            if (fields[:, 1] == 1).all() and (np.sort(fields[:, 0]) == part.positions[:-1]).all():
                return True
    return False


def _hash(*parts: str | bytes) -> str:
    joined = b"\0".join(part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.blake2b(joined, digest_size=16).hexdigest()


def _root(llm: UpstreamLlama, load_plan: LoadPlan, store: StoreOptions) -> str:
    """Returns a hash of everything except tokens that blocks depend on: model, build and options."""
    layout, plan, options, params = load_plan.layout, load_plan.plan, load_plan.options, llm.context_params
    adapter, projector = load_plan.spec.lora_path, load_plan.spec.projector
    parts = {
        "model": (header_digest(layout.shards), weights_digest(layout.shards)),
        "projector": projector and weights_digest((projector.shard,)),
        "adapter": adapter and (weights_digest((read_adapter(adapter).shard,)), options.get("lora_scale")),
        "build": library.build_identity(),
        "processor": sorted(read_processor().flags),
        "kernels": (read_environment().kernels, load_plan.hooks, store.repack),
        "devices": (plan.device, plan.layers_on, plan.whole_layers),
        "layers": [(part.name, part.layers) for part in plan.devices],
        "context": {name: getattr(params, name) for name in CONTEXT_FIELDS},
        "options": {name: options.get(name) for name in LOAD_OPTIONS},
        "rope": options["n_ctx"] if layout.has_long_rope else 0,
        "passes": None if is_batch_invariant(llm, layout, plan) else (params.n_batch, params.n_ubatch),
    }
    return _hash(repr(parts))
