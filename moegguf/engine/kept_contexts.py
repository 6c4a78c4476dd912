"""What a model has computed of its sequences, kept on disk: a prompt that begins as an earlier one did is restored, and
only the rest computed, also after the process that computed it was killed.

The KV cache is kept in blocks of BLOCK_TOKENS tokens. A block's name is a hash of everything that its bytes depend on:
of the model, the build, the options that change what is computed, who owns it, and all tokens up to its end; sequences
that begin alike have the same blocks. What follows the last full block is kept where a prompt or an answer ends.
llama.cpp writes and reads one block as the state of a sequence that has only its cells. A block does not end within an
image, and its name has the image's hash in it. Models with a recurrent state, which cannot be cut, are kept as whole
states after some of the tokens.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import itertools
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moegguf.engine.batch_invariance import is_batch_invariant
from moegguf.engine.context_store import About, Buffer, ContextStore
from moegguf.engine.machine import read_memory
from moegguf.engine.projector import PLACEHOLDER, ImageSpan
from moegguf.engine.recent_experts import RecentExperts
from moegguf.engine.sequences import MAX_SEQUENCES, Tokens
from moegguf.errors import OptionError
from moegguf.gguf.fingerprint import header_digest, sampled_digest
from moegguf.native import library
from moegguf.native.kv_blocks import KVBlocks
from moegguf.native.store import StoreOptions
from moegguf.processor import read_processor
from moegguf.quantities import parse_store_size
from moegguf.settings import read_environment

if TYPE_CHECKING:
    from moegguf.engine.context import Context
    from moegguf.engine.load import LoadPlan
    from moegguf.engine.upstream import UpstreamLlama

Ints = npt.NDArray[np.int32]
Images = Sequence[ImageSpan]
MakeRoom = Callable[[int], object]

BLOCK_TOKENS = 64
READ_TOGETHER = 64  # blocks
SCRATCH = MAX_SEQUENCES - 1  # a sequence id that llama.cpp has room for, and no context uses
MOST_QUEUED_BYTES = 64 << 20  # that wait to be written
WAIT_SHARE, MOST_WAIT_S = 0.01, 0.5  # of the time since the last call that one may wait for that
WHOLE_STEP_TOKENS = 512  # between two whole states of a prompt; half of its tokens where these are more
NAME_BYTES = 16
_BYTES = c.POINTER(c.c_uint8)
_REST = re.compile(r"-(\d\d?)-[0-9a-f]+$")  # of a name: tokens after the last full block
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
    positions: Ints


class KeptContexts:
    """Those of a loaded model in `store`. For the thread that evaluates."""

    def __init__(
        self,
        llm: UpstreamLlama,
        context: Context,
        store: ContextStore,
        load_plan: LoadPlan,
        moves: StoreOptions,
        recent: RecentExperts | None,
    ) -> None:
        self._context = context
        self._llm: UpstreamLlama = weakref.proxy(llm)  # type: ignore[assignment]  # which holds this object
        self._store, self._recent = store, recent
        self._bindings: Any = library.llama_cpp()
        self._root = _root(llm, load_plan, moves)
        self._model = _label(load_plan)
        n_swa = self._bindings.llama_model_n_swa(llm.model)
        self._whole = llm._is_stateful or 0 < n_swa < BLOCK_TOKENS
        self._n_whole_tokens = 0  # of the last whole state
        self._writer = _Writer(store)
        self._wait_s, self._last_s = 0.0, time.monotonic()  # for room in the queue; the last call of `keep`
        self.behind = set[int]()  # sequences of which blocks could not be written, as too many were waiting
        self._fill_held = False

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
        if self._recent is not None and len(tokens) >= BLOCK_TOKENS:
            self._recent.begin()
        if self._store.is_off or len(tokens) - n_held < 2 or tokens[-1] == PLACEHOLDER:
            return n_held
        self._hold_fill(True)  # until what follows was computed
        n_now = n_held
        try:
            with self._context.lock:
                parts = self._parts(tokens, owner, images)
                if self._whole:
                    n_now = self._restore_whole(sequence, tokens[:-1], n_held, parts, make_room, images)
                else:
                    n_now = self._restore_parts(sequence, tokens, n_held, parts, make_room, images)
                if n_now != n_held and sequence == 0:
                    self._llm.n_tokens, self._llm._requires_eval = n_now, True
                    self._llm.input_ids[:n_now] = tokens[:n_now]
                    self._context.images.hold(images, n_now)
                if n_now == len(tokens):
                    n_now = n_now - 1 if self._context.truncate(n_now - 1, sequence) else 0
        finally:
            self._hold_fill(n_now > n_held)
        return n_now

    def _hold_fill(self, on: bool) -> None:
        if on != self._fill_held:
            self._context.hold_fill(on)
            self._fill_held = on

    def keep(self, sequence: int, tokens: Tokens, n_new: int, owner: str = "", goes_on: bool = True) -> None:
        """Has blocks of a sequence that holds `tokens` written that are not on disk, now that the last `n_new` of them
        were computed. goes_on: False at the end of a prompt or an answer, where another prompt may go on: then also
        what follows the last full block."""
        self.behind.discard(sequence)
        self._hold_fill(False)
        if not goes_on and self._recent is not None and (experts := self._recent.end()) is not None:
            self._writer.put(self._recent.name, About(self._model, 0, 0), experts)
        if self._store.is_off or len(tokens) < BLOCK_TOKENS or (goes_on and len(tokens) % BLOCK_TOKENS >= n_new):
            return
        images = self._context.images.spans if sequence == 0 else ()
        parts = self._parts(tokens, owner, images)
        now_s = time.monotonic()
        self._wait_s, self._last_s = min(MOST_WAIT_S, (now_s - self._last_s) * WAIT_SHARE), now_s
        with self._context.lock:
            if not self._whole:
                rest = [] if goes_on else self._rest(parts, tokens, images)
                self._keep_parts(sequence, [*parts, *(part for part in rest if part.begin < part.end)])
            elif parts and (not goes_on or n_new > 1):
                self._keep_whole(sequence, self._rest(parts, tokens, images), len(tokens), goes_on)
        if not goes_on:
            self._writer.touch([part.name for part in parts])

    def close(self) -> None:
        """Writes what waits. Twice is harmless."""
        self._writer.close()

    def _parts(self, tokens: Tokens, owner: str, images: Images) -> list[_Part]:
        """The full blocks that these tokens begin with; no image is cut."""
        ids, n_known = np.asarray(tokens, np.int32), _n_known(tokens, images)
        positions = _positions(len(tokens), images)
        name, parts, begin = _hash(self._root, owner.encode()), list[_Part](), 0
        while (end := _uncut(begin + BLOCK_TOKENS, images)) <= n_known:
            name = _hash(name, _content(ids, begin, end, images))
            parts.append(_Part(name.hex(), begin, end, positions[begin : end + 1]))
            begin = end
        return parts

    def _rest(self, parts: Sequence[_Part], tokens: Tokens, images: Images) -> list[_Part]:
        """What follows these blocks, which end less than a block before the end of `tokens`."""
        begin, end = parts[-1].end if parts else 0, len(tokens)
        if not parts or not 0 <= end - begin < BLOCK_TOKENS or _uncut(end, images) != end:
            return []
        if _n_known(tokens, images) < end:
            return []
        content = _content(np.asarray(tokens, np.int32), begin, end, images)
        name = f"{parts[-1].name}-{end - begin}-{_hash(content).hex()}"
        return [_Part(name, begin, end, _positions(end, images)[begin:])]

    def _kept_rest(self, parts: Sequence[_Part], tokens: Tokens, images: Images) -> list[_Part]:
        """The longest that is on disk of what follows these blocks and begins as the tokens after them."""
        kept = self._store.names(f"{parts[-1].name}-") if parts else []
        sizes = {int(found[1]) for name in kept if (found := _REST.search(name))}
        for n_tokens in sorted((parts[-1].end + size for size in sizes), reverse=True):
            rest = self._rest(parts, tokens[:n_tokens], images) if n_tokens <= len(tokens) else []
            if rest and rest[0].name in kept:
                return rest
        return []

    # Parts: blocks, the last of which may have fewer tokens.

    def _restore_parts(
        self, sequence: int, tokens: Tokens, n_held: int, parts: list[_Part], make_room: MakeRoom, images: Images
    ) -> int:
        first = sum(part.end <= n_held for part in parts)
        there = first + sum(1 for _ in itertools.takewhile(lambda part: self._store.holds(part.name), parts[first:]))
        rest = self._kept_rest(parts[:there], tokens, images)
        wanted = [*parts[first:there], *rest]
        if not wanted or wanted[-1].end <= n_held:
            return n_held
        begin = wanted[0].begin
        if not self._context.truncate(begin, sequence):  # all or nothing
            wanted, begin = [*parts[:there], *rest], 0
        make_room(wanted[-1].end - begin)
        n_done = 0
        while n_done < len(wanted):
            parts = wanted[n_done : n_done + READ_TOGETHER]
            with KVBlocks(self._store.seed) as blocks:
                n_added = sum(1 for _ in itertools.takewhile(lambda p: self._add_part(blocks, sequence, p), parts))
                n_right = min(n_added, blocks.fill())
            n_done += n_right
            if n_right < len(parts):
                first_wrong = int(wanted[n_done].positions[0])
                self._bindings.llama_memory_seq_rm(self._llm._ctx.memory, sequence, first_wrong, -1)
                for unusable in wanted[n_done:]:  # so that they are written again
                    self._store.delete(unusable.name)
                break
        names = [part.name for part in wanted[:n_done]]
        self._writer.known.update(names)
        self._writer.touch(names)
        return wanted[n_done - 1].end if n_done else begin

    def _add_part(self, blocks: KVBlocks, sequence: int, part: _Part) -> bool:
        """Adds a block's cells to a sequence, which `blocks` fills later; False where these are not its tokens', or
        there is no room for them."""
        file = self._store.open(part.name, _STATE.size + max(_CELL_BYTES) * (part.end - part.begin))
        if file is None or not _is_of(file.head, part):
            return False
        memory = self._llm._ctx.memory
        state = c.cast(blocks.add(file), _BYTES)
        done = bool(self._bindings.llama_state_seq_set_data(self._llm.ctx, state, file.n_bytes, SCRATCH))
        if done:
            self._bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, -1, -1)
        self._bindings.llama_memory_seq_rm(memory, SCRATCH, -1, -1)
        return done

    def _keep_parts(self, sequence: int, parts: Sequence[_Part]) -> None:
        known = self._writer.known
        known.update(part.name for part in parts if part.name not in known and self._store.holds(part.name))
        new = [part for part in parts if part.name not in known]
        memory = self._llm._ctx.memory
        first = self._bindings.llama_memory_seq_pos_min(memory, sequence)  # earlier cells have left a window
        if not new or first > new[0].positions[0]:
            return
        with self._cells_aside(sequence):
            for part in new:
                first_position, after = int(part.positions[0]), int(part.positions[-1])
                self._bindings.llama_memory_seq_cp(memory, SCRATCH, sequence, first_position, after)
                is_kept = self._keep_state(sequence, part)
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

    def _keep_state(self, sequence: int, part: _Part) -> bool:
        """Has the state of a sequence written as this part; False where it cannot be, or too much waits already."""
        n_bytes = self._bindings.llama_state_seq_get_size(self._llm.ctx, sequence)
        start_s = time.monotonic()
        has_room = self._writer.wait_for_room(n_bytes, self._wait_s)
        self._wait_s -= time.monotonic() - start_s
        if not has_room:
            self.behind.add(sequence)
            return False
        data = np.empty(n_bytes, np.uint8)
        pointer = data.ctypes.data_as(_BYTES)
        if self._bindings.llama_state_seq_get_data(self._llm.ctx, pointer, n_bytes, sequence) != n_bytes:
            return False
        if not self._whole and not _is_of(data.data, part):
            return False
        self._writer.put(part.name, About(self._model, part.end, part.end - part.begin), data.data)
        return True

    # Whole states, named as what follows the last full block.

    def _restore_whole(
        self, sequence: int, tokens: Tokens, n_held: int, parts: list[_Part], make_room: MakeRoom, images: Images
    ) -> int:
        for n_full in range(len(parts), sum(part.end <= n_held for part in parts), -1):
            for rest in self._kept_rest(parts[:n_full], tokens, images):
                if (block := self._store.read(rest.name)) is not None and rest.end > n_held:
                    make_room(rest.end)
                    state = np.frombuffer(block, np.uint8).ctypes.data_as(_BYTES)
                    found = self._bindings.llama_state_seq_set_data(self._llm.ctx, state, len(block), sequence)
                    n_found = self._bindings.llama_memory_seq_pos_max(self._llm._ctx.memory, sequence) + 1
                    self._writer.touch([rest.name])
                    self._n_whole_tokens = rest.end
                    if found and n_found == rest.positions[-1]:
                        return rest.end
                    self._store.delete(rest.name)
                    self._context.truncate(0, sequence)
                    return 0
        return n_held

    def _keep_whole(self, sequence: int, rest: Sequence[_Part], n_tokens: int, goes_on: bool) -> None:
        if n_tokens < self._n_whole_tokens:
            self._n_whole_tokens = 0  # another conversation's
        n_next = self._n_whole_tokens + max(WHOLE_STEP_TOKENS, self._n_whole_tokens // 2)
        if goes_on and n_tokens < n_next:
            return
        n_bytes = self._bindings.llama_state_seq_get_size(self._llm.ctx, sequence)
        for part in rest:
            if not self._store.holds(part.name) and n_bytes < read_memory().available_bytes // 2:
                self._keep_state(sequence, replace(part, begin=0))
        self._n_whole_tokens = n_tokens


def store_limit(given: str | int | None) -> int | None:
    """Bytes of an option, or without it of the environment; None: as `ContextStore` chooses. Raises OptionError."""
    try:
        return parse_store_size(read_environment().context_store if given is None else given)
    except ValueError as error:
        raise OptionError(f"context_store: {error}.") from None


def open_contexts(
    llm: UpstreamLlama,
    context: Context,
    load_plan: LoadPlan,
    moves: StoreOptions,
    store: ContextStore,
    recent: RecentExperts | None,
) -> KeptContexts | None:
    """Those of a model that was loaded by this plan, in `store`, where its context can have any."""
    options = load_plan.options
    unused = options.get("logits_all") or options.get("embedding") or llm._ctx.memory is None
    if store.is_off or unused or llm.context_params.n_seq_max > SCRATCH:
        return None
    return KeptContexts(llm, context, store, load_plan, moves, recent)


class _Writer:
    """Writes blocks to a store on a thread of its own, and tells it which ones were used. `known`: names of blocks that
    are there, or about to be."""

    def __init__(self, store: ContextStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "moegguf-contexts")
        self._changed = threading.Condition()  # of the next one
        self._n_queued_bytes = 0
        self.known = set[str]()

    def wait_for_room(self, n_bytes: int, most_s: float) -> bool:
        """Whether so many bytes may wait, too, now or after at most that many seconds."""

        def has_room() -> bool:
            return not self._n_queued_bytes or self._n_queued_bytes + n_bytes <= MOST_QUEUED_BYTES

        with self._changed:
            return self._changed.wait_for(has_room, max(0.0, most_s))

    def put(self, name: str, about: About, data: memoryview) -> None:
        """Has a block written."""
        self.known.add(name)
        with self._changed:
            self._n_queued_bytes += len(data)
        self.do(self._write, name, about, data)

    def _write(self, name: str, about: About, data: memoryview) -> None:
        self._store.write(name, about, [data])
        with self._changed:
            self._n_queued_bytes -= len(data)
            self._changed.notify()

    def touch(self, names: Sequence[str]) -> None:
        """Notes that these are used now. Those that are missing are unknown then."""
        self.do(lambda: self.known.difference_update(self._store.touch(names)))

    def do(self, job: Callable[..., object], *arguments: Any) -> None:
        """Has this done after what waits."""
        self._pool.submit(job, *arguments)

    def close(self) -> None:
        """Writes what waits, and ends. Twice is harmless."""
        self._pool.shutdown()


def _is_of(block: Buffer, part: _Part) -> bool:
    """Whether a state of one sequence has the cells of the part's tokens, each once and in any order of cells."""
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


def _uncut(end: int, images: Images) -> int:
    """`end`, or that of the image that it would cut."""
    return next((image.end for image in images if image.begin < end < image.end), end)


def _n_known(tokens: Tokens, images: Images) -> int:
    """The number of first tokens that are text or of these images: who evaluates others into a context, such as a chat
    handler, does not say what they are."""
    unknown = np.asarray(tokens, np.int32) == PLACEHOLDER
    for image in images:
        unknown[image.begin : image.end] = False
    found = np.flatnonzero(unknown)
    return int(found[0]) if found.size else len(unknown)


def _content(ids: Ints, begin: int, end: int, images: Images) -> bytes:
    """What the cells of these tokens depend on beside those before: the tokens, and the keys of images."""
    keys = [image.key for image in images if begin <= image.begin < end]
    return ids[begin:end].tobytes() + "".join(keys).encode()


def _positions(n_tokens: int, images: Images) -> Ints:
    """Positions of the first `n_tokens` and of the next: tokens of an image with fewer positions than tokens share the
    first of them (M-RoPE)."""
    steps = np.ones(n_tokens + 1, np.int32)
    for image in images:
        if image.n_positions != image.n_tokens and image.end <= n_tokens:
            steps[image.begin + 1 : image.end] = 0
            steps[image.end] = image.n_positions
    steps[0] = 0
    return np.cumsum(steps, dtype=np.int32)


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=NAME_BYTES).digest()


def _root(llm: UpstreamLlama, load_plan: LoadPlan, store: StoreOptions) -> bytes:
    """A hash of all that blocks depend on but tokens: those of another model, build or option have other names."""
    layout, plan, options, params = load_plan.layout, load_plan.plan, load_plan.options, llm.context_params
    adapter = options.get("lora_path")
    parts = {
        "model": (header_digest(layout.shards), sampled_digest(tuple(shard.path for shard in layout.shards))),
        "projector": load_plan.projector and sampled_digest((load_plan.projector.path,)),
        "adapter": adapter and (sampled_digest((Path(adapter),)), options.get("lora_scale")),
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
    return _hash(repr(parts).encode())


def _label(load_plan: LoadPlan) -> str:
    """The model's name for people: its file's, or of a file named by a digest, what its header says."""
    name = load_plan.layout.shards[0].path.stem
    return str(load_plan.layout.metadata.get("general.name", name)) if name.startswith("sha256-") else name
