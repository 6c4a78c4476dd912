"""Keeps computed contexts on disk, so that only the rest of a prompt is evaluated if
its beginning is kept. Kept contexts outlive the process that computed them.

The KV cache is kept in blocks of BLOCK_TOKENS tokens. A block's name is a hash of the
model, the build, the options that change results, the owner, and all tokens up to the
block's end. So sequences of one owner with the same beginning share blocks. At the end
of a prompt or an answer, the tokens after the last full block are kept, too. llama.cpp
writes and reads a block as the state of a sequence that contains only the block's
cells. A block that would end within an image ends after the image instead, and its name
depends on the image's hash.

Cells of sliding windows are separate blocks: a sequence can continue if the blocks of
the last window are kept. A recurrent state cannot be shortened, so states are kept only
at the ends of some prefixes. A state's name, like a block's, is a hash of all tokens
before it. A sequence continues after the longest prefix for which the state and all
blocks are kept. The distance between two states depends on their cost (`StateCost`). A
sequence in memory that must lose tokens also goes back to the nearest earlier state. If
a context's memory cannot be divided into such parts, the whole memory of a sequence is
kept as a state.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moegguf.engine.kv_block_store import About, Buffer, KVBlocks, KvBlockStore
from moegguf.engine.machine import read_memory
from moegguf.engine.memory_parts import CELLS, RECURRENT, WHOLE, WINDOW
from moegguf.engine.projector import PLACEHOLDER, ImageSpan
from moegguf.engine.recent_experts import RecentExperts
from moegguf.engine.sequences import MAX_SEQUENCES, Tokens, is_batch_invariant
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.fingerprint import header_digest, weights_digest
from moegguf.native import library
from moegguf.processor import read_processor
from moegguf.settings import read_environment

if TYPE_CHECKING:
    from moegguf.engine.context import Context
    from moegguf.engine.load import LoadPlan
    from moegguf.engine.upstream import UpstreamLlama

Images = Sequence[ImageSpan]
MakeRoom = Callable[[int], object]

BLOCK_TOKENS = 64
# Sequence id for temporary copies. A context with MAX_SEQUENCES sequences uses this id,
# too, so it gets no prefix cache.
SCRATCH = MAX_SEQUENCES - 1
# limit on the bytes that are waiting to be written; the first block, or a state at an
# end, may exceed this limit
MOST_QUEUED_BYTES = 64 << 20
# Maximum number of tokens between two kept states, unless `StateCost.step` needs more.
MOST_STEP_TOKENS = 512
# Time spent keeping states, as a share of token compute time (a target:
# `StateCost.step`).
STEP_COST = 0.05
# Share of the store's limit that one conversation's states may occupy.
STATES_SHARE = 0.5
FORMAT = 2  # version of the data that is hashed into block names
_NAMES = {CELLS: "", WINDOW: "-window"}  # suffixes of block names, by kind of cells
# First fields of a state with cells: number of streams, number of cells.
_STATE = struct.Struct("<2I")
# first fields of a recurrent state: number of cells, last position, number of sequences
_RECURRENT_STATE = struct.Struct("<IiI")
# bytes of a cell: position, number of sequences, sequence; 24 bytes if two coordinates
# and a token are added
_CELL_BYTES = (12, 24)
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
    """A range of a sequence's tokens from `begin` up to but not including `end`. `name`
    is the name of the block with these tokens.

    `positions` holds the position of each of these tokens, and of the token after them.
    """

    name: str
    begin: int
    end: int
    positions: npt.NDArray[np.int32]

    @property
    def first_position(self) -> int:
        """The position of the part's first token."""
        return int(self.positions[0])

    @property
    def end_position(self) -> int:
        """The position of the token after the part."""
        return int(self.positions[-1])


class _Parts:
    """Divides a sequence's tokens into parts that do not end within an image.

    blocks: the full parts, from the beginning to the first image that is not in
    `images`. name: a hash of everything that the parts depend on, except tokens and
    images.
    """

    def __init__(self, name: str, tokens: Tokens, images: Images) -> None:
        self._name = name
        self._images = images
        self._ids = np.asarray(tokens, np.int32)
        n_tokens = len(self._ids)
        # True for placeholders outside the given images, and after the last token
        unknown = np.append(self._ids == PLACEHOLDER, True)
        steps = np.ones(n_tokens + 1, np.int32)
        for image in images:
            unknown[image.begin : image.end] = False
            if image.n_positions != image.n_tokens and image.end <= n_tokens:
                # An image's tokens share its first position (M-RoPE).
                steps[image.begin + 1 : image.end] = 0
                steps[image.end] = image.n_positions
        unknown[n_tokens] = True
        steps[0] = 0
        self._n_known = int(np.argmax(unknown))
        self._positions = np.cumsum(steps, dtype=np.int32)
        self.blocks = list[_Part]()
        end = 0
        while block := self._part(name, end, self._uncut(end + BLOCK_TOKENS)):
            self.blocks.append(block)
            name = block.name
            end = block.end

    def rest(self, n_blocks: int, end: int) -> _Part | None:
        """Returns the part from the end of the first `n_blocks` blocks up to `end`.
        Returns None if the part would have BLOCK_TOKENS tokens or more, would end
        within an image, or has tokens of an unknown image."""
        name, begin = (
            (self.blocks[n_blocks - 1].name, self.blocks[n_blocks - 1].end)
            if n_blocks
            else (self._name, 0)
        )
        if 0 <= end - begin < BLOCK_TOKENS and self._uncut(end) == end:
            return self._part(name, begin, end)
        return None

    def _part(self, before: str, begin: int, end: int) -> _Part | None:
        if end > self._n_known:
            return None
        keys = (image.key for image in self._images if begin <= image.begin < end)
        name = _hash(before, str(end - begin), self._ids[begin:end].tobytes(), *keys)
        return _Part(name, begin, end, self._positions[begin : end + 1])

    def _uncut(self, end: int) -> int:
        """Returns `end`, or the end of an image if `end` is within that image."""
        return next(
            (image.end for image in self._images if image.begin < end < image.end), end
        )


class PrefixCache:
    """Keeps contexts of a loaded model in `store`. Only the thread that evaluates
    tokens may call the methods; another thread writes the files."""

    def __init__(
        self,
        llm: UpstreamLlama,
        context: Context,
        store: KvBlockStore,
        load_plan: LoadPlan,
        recent: RecentExperts | None,
    ) -> None:
        self._context = context
        self._llm: UpstreamLlama = weakref.proxy(llm)  # type: ignore[assignment]  # `llm` holds this object
        self._store = store
        self._recent = recent
        # A hash of everything that affects computed bits, except tokens and images:
        # model, build, processor, devices and options.
        self.name = _root(llm, load_plan)
        self._model = load_plan.layout.shards[0].path.stem  # name for display
        if self._model.startswith("sha256-"):
            self._model = str(
                load_plan.layout.metadata.get("general.name", self._model)
            )
        self._memory = context.memory
        self._n_swa = library.llama_cpp().llama_model_n_swa(llm.model)
        self._choose_parts(self._memory.all)
        self._state_cost = StateCost(store.limit_bytes)
        # {sequence: number of tokens before its last kept state}.
        self._state_ends: dict[int, int] = {}
        # Sequences whose prompt will lack only its last token after the next pass.
        self._almost_read: set[int] = set()
        self._pool = ThreadPoolExecutor(1, "moegguf-contexts")
        # {name of a block that is waiting to be written: its size in bytes}.
        self._queued: dict[str, int] = {}
        self._lock = threading.Lock()  # guards `_queued`
        # Sequences with blocks that were not written because too many bytes were
        # waiting.
        self.behind = set[int]()
        self._fill_held = False

    def _choose_parts(self, parts: int) -> None:
        """Decides how each kind of the context's memory is kept: as blocks or in
        states. parts: the bits CELLS, WINDOW and RECURRENT, or WHOLE."""
        narrow = 0 < self._n_swa < BLOCK_TOKENS  # the window is smaller than a block
        if parts == CELLS and narrow:
            parts = WHOLE
        self._has_cells = bool(parts & CELLS)
        # True: cells of a sliding window are kept as blocks. The context reuses such
        # cells for later tokens, so they must be kept after each pass.
        self.has_window = bool(parts & WINDOW) and not narrow
        state = parts & (RECURRENT | (WINDOW if narrow else 0))
        # parts that are kept in states; None: no states are kept
        self._state: int | None = state or (None if self._has_cells else WHOLE)

    def restore(
        self,
        sequence: int,
        tokens: Tokens,
        n_held: int,
        owner: str = "",
        make_room: MakeRoom = lambda n_tokens: None,
        images: Images = (),
    ) -> int:
        """Restores the beginning of `tokens` into a sequence, if more of it is kept
        than the sequence already has.

        The last token is never restored. Returns the number of tokens that the sequence
        has afterwards.

        n_held: number of tokens that the sequence has before the call.

        owner: owner of the blocks; "" for blocks that everyone shares.

        make_room: called with the number of tokens for which the context needs free
        cells.

        images: the images among the tokens; only sequence 0 can have images.
        """
        n_tokens = len(tokens)
        if self._recent is not None and n_tokens >= BLOCK_TOKENS:
            self._recent.begin()
        if (
            self._store.is_off
            or n_tokens < max(BLOCK_TOKENS, n_held + 2)
            or tokens[-1] == PLACEHOLDER
        ):
            return n_held
        # Pauses the background reading of experts until the next call of `store`. If no
        # token is restored, the reading resumes immediately.
        self._pause_fill(True)
        n_now = n_held
        try:
            with self._context.lock:
                parts = self._parts(
                    owner, tokens if self._state is None else tokens[:-1], images
                )
                n_now = self._restore(sequence, parts, n_held, make_room)
                if n_now != n_held and sequence == 0:
                    self._llm.input_ids[:n_now] = tokens[:n_now]
                    self._note_end(n_now, images)
                if n_now == n_tokens:
                    n_now = (
                        n_now - 1 if self._context.truncate(n_now - 1, sequence) else 0
                    )
        finally:
            self._pause_fill(n_now > n_held)
        return n_now

    def truncate(
        self, sequence: int, tokens: Tokens, n_tokens: int, owner: str = ""
    ) -> int:
        """Shortens a sequence that holds `tokens` to their first `n_tokens`. If its
        memory cannot be shortened there, the sequence goes back to the nearest earlier
        position whose state or window is kept, or is emptied. Returns the number of
        tokens that the sequence then has."""
        with self._context.lock:
            if self._context.cut(n_tokens, sequence):
                n_now = n_tokens
            else:
                images = self._context.images.spans if sequence == 0 else ()
                n_now = self._go_back(
                    sequence, self._parts(owner, tokens[:n_tokens], images), n_tokens
                )
                if sequence == 0:
                    self._note_end(n_now, images)
        self._state_ends[sequence] = min(n_now, self._state_ends.get(sequence, 0))
        return n_now

    def copy(
        self, source: int, target: int, tokens: Tokens, n_held: int, owner: str = ""
    ) -> int:
        """Copies `tokens`, the beginning of the sequence `source`, to the sequence
        `target`. If not all of them can be copied, copies the longest prefix for which
        the necessary states and windows are kept. Before the call, `target` already has
        the first `n_held` of `tokens`. Returns how many of `tokens` the target has
        after the call."""
        if self._context.copy(source, target, len(tokens)):
            return len(tokens)
        if not self._needs_more_than_cells:
            return n_held
        with self._context.lock:
            parts = self._parts(owner, tokens, ())
            place = next(self._places(parts, len(parts.blocks), len(tokens)), None)
            if not self._has_cells or place is None or place.end <= n_held:
                return n_held
            self._memory.remove(CELLS, target)
            self._memory.copy(CELLS, source, target)
            n_now = self._go_back(target, parts, place.end)
            if target == 0:
                self._llm.input_ids[:n_now] = tokens[:n_now]
                self._note_end(n_now, ())
            return n_now

    def pass_tokens(self, sequence: int, n_held: int, n_pending: int, n: int) -> int:
        """Returns how many tokens of a prompt the next pass evaluates: `n`, or fewer.
        `n_pending` tokens follow the first `n_held`.

        The number is lower if states are kept and the pass would reach the end of a
        prompt of more than BLOCK_TOKENS tokens. The last MOST_STEP_TOKENS tokens are
        then left to later passes, so that a prompt with an edited end can continue from
        the state before them. The very last token also gets its own pass, so that a
        repeated prompt can continue from the state before it.
        """
        is_end = 1 < n == n_pending and n_held + n > BLOCK_TOKENS
        if self._state is None or self._store.is_off or not is_end:
            return n
        if n > MOST_STEP_TOKENS:
            return n - MOST_STEP_TOKENS
        self._almost_read.add(sequence)
        return n - 1

    @property
    def form(self) -> str:
        """The kinds of data that are kept, as text: "whole states", or "blocks",
        possibly followed by "and windows" and "and states"."""
        if not self._has_cells:
            return "whole states"
        kept = ["blocks"]
        if self.has_window:
            kept.append("windows")
        if self._state is not None:
            kept.append("states")
        return " and ".join(kept)

    @property
    def _needs_more_than_cells(self) -> bool:
        """True if a sequence cannot continue from cells of full attention alone."""
        return self.has_window or self._state is not None

    def _parts(self, owner: str, tokens: Tokens, images: Images) -> _Parts:
        return _Parts(_hash(self.name, owner), tokens, images)

    def _note_end(self, n_tokens: int, images: Images) -> None:
        """Sets the number of tokens of sequence 0 and the images within these tokens.
        Marks the logits in memory as outdated."""
        self._llm.n_tokens = n_tokens
        self._llm._requires_eval = True
        self._context.images.spans = list(images)
        self._context.images.truncate(n_tokens)

    def _pause_fill(self, on: bool) -> None:
        """Pauses (True) or resumes (False) the filling of free slots in the
        background."""
        session = self._context.session
        if session is not None and on != self._fill_held:
            session.store.pause_fill(on)
            self._fill_held = on

    def store(
        self,
        sequence: int,
        tokens: Tokens,
        n_new: int,
        owner: str = "",
        goes_on: bool = True,
    ) -> None:
        """Queues for writing the sequence's blocks that are not kept yet, and its state
        if one is due. `tokens` are all its tokens; the last `n_new` were just
        evaluated.

        goes_on: False at the end of a prompt or an answer, where a later prompt may
        continue. The tokens after the last full block are then written, too.
        """
        self.behind.discard(sequence)
        self._pause_fill(False)
        if (
            not goes_on
            and self._recent is not None
            and (experts := self._recent.end()) is not None
        ):
            self._put(self._recent.name, About(self._model, 0, 0), experts)
        self._state_cost.note_pass(self._context.eval_s, n_new)
        is_end = not goes_on or sequence in self._almost_read
        self._almost_read.discard(sequence)
        n_tokens = len(tokens)
        if (
            self._store.is_off
            or n_tokens < BLOCK_TOKENS
            or (not is_end and n_tokens % BLOCK_TOKENS >= n_new)
        ):
            return
        parts = self._parts(
            owner, tokens, self._context.images.spans if sequence == 0 else ()
        )
        blocks = parts.blocks
        rest = parts.rest(len(parts.blocks), n_tokens)
        with self._context.lock:
            state = self._state_to_keep(sequence, rest, is_end) if rest else None
            wants_rest = (
                rest is not None
                and rest.begin < rest.end
                and (not goes_on or state is not None)
            )
            kept = [*blocks, rest] if wants_rest and rest else blocks
            if self._has_cells:
                self._keep_cells(CELLS, sequence, kept)
            if self.has_window:
                self._keep_cells(WINDOW, sequence, kept)
            if rest and state is not None:
                self._keep_state(sequence, rest, state)
        if not goes_on:
            self._pool.submit(self._store.touch, [block.name for block in blocks])

    def close(self) -> None:
        """Waits until the queued blocks have been written, and stops the writer thread.
        A second call does nothing."""
        self._pool.shutdown()

    # Restoring a sequence.

    def _restore(
        self, sequence: int, parts: _Parts, n_held: int, make_room: MakeRoom
    ) -> int:
        n_first = sum(block.end <= n_held for block in parts.blocks)
        n_there = len(parts.blocks)
        if self._has_cells:
            n_there = n_first
            while n_there < len(parts.blocks) and self._store.holds(
                parts.blocks[n_there].name
            ):
                n_there += 1
        place = next(self._places(parts, n_there, n_live=0), None)
        if place is None or place.end <= n_held:
            return n_held
        if not self._has_cells:
            make_room(place.end)
            return self._go_back(sequence, parts, place.end)
        blocks = [block for block in parts.blocks[:n_there] if block.end <= place.begin]
        rest = [place] if place.begin < place.end else []
        wanted = [*blocks[n_first:], *rest]
        if not self._keep_first_cells(sequence, wanted[0]):
            wanted = [*blocks, *rest]
        make_room(wanted[-1].end - wanted[0].begin)
        n_done = self._load(CELLS, sequence, wanted)
        return self._go_back(
            sequence, parts, wanted[n_done - 1].end if n_done else wanted[0].begin
        )

    def _keep_first_cells(self, sequence: int, part: _Part) -> bool:
        """Removes the cells of a sequence from the beginning of `part` on. Returns
        False if the sequence could only be emptied."""
        if self._needs_more_than_cells:
            return self._memory.remove(CELLS, sequence, part.first_position)
        return self._context.truncate(part.begin, sequence)

    def _places(self, parts: _Parts, n_blocks: int, n_live: int) -> Iterator[_Part]:
        """Yields the parts, possibly empty, at whose ends a sequence can continue, the
        longest prefix first. Each part follows at most `n_blocks` full blocks. n_live:
        number of tokens whose cells are in memory."""
        for n in range(n_blocks, -1, -1):
            begin = parts.blocks[n - 1].end if n else 0
            for end in range(begin + BLOCK_TOKENS - 1, begin - 1, -1):
                rest = parts.rest(n, end)
                if rest and self._can_go_on(parts.blocks[:n], rest, n_live):
                    yield rest

    def _can_go_on(self, blocks: Sequence[_Part], rest: _Part, n_live: int) -> bool:
        """Returns True if the state and window that the model needs after `rest` are
        kept, and the cells of `rest` are kept or in memory. Does not check the cells
        before `rest`."""
        if self._state is not None and not self._is_kept(_state_name(rest)):
            return False
        if (
            self._has_cells
            and rest.begin < rest.end
            and rest.end > n_live
            and not self._store.holds(rest.name)
        ):
            return False
        return not self.has_window or all(
            self._is_kept(_name(WINDOW, part)) for part in self._window(blocks, rest)
        )

    def _window(self, blocks: Sequence[_Part], rest: _Part) -> list[_Part]:
        """Returns the parts, up to the end of `rest`, that have cells in the sliding
        window of the last token or of the token after it."""
        chain = [*blocks, rest] if rest.begin < rest.end else blocks
        first = rest.end_position - self._n_swa
        last_parts = itertools.takewhile(
            lambda part: part.end_position > first, reversed(chain)
        )
        return list(last_parts)[::-1]

    def _go_back(self, sequence: int, parts: _Parts, n_tokens: int) -> int:
        """Shortens a sequence to the longest prefix of at most `n_tokens` tokens from
        which it can continue, and restores the window and state at its end. Cells of
        full attention must be in memory for the first `n_tokens` tokens. Returns the
        number of tokens that the sequence then has."""
        if not self._needs_more_than_cells:
            return n_tokens
        n_blocks = sum(block.end <= n_tokens for block in parts.blocks)
        for place in self._places(parts, n_blocks, n_tokens):
            if 0 < place.end <= n_tokens and self._take_place(sequence, parts, place):
                self._state_ends[sequence] = place.end
                return place.end
        self._context.truncate(0, sequence)
        return 0

    def _take_place(self, sequence: int, parts: _Parts, place: _Part) -> bool:
        """Removes the cells of a sequence after `place`, and restores the window and
        the state at the end of `place`. Returns False if the window or the state cannot
        be restored, or if the cells before the end of `place` are missing."""
        end = place.end_position
        if self._has_cells:
            if self._memory.end(CELLS, sequence) < end:
                return False
            self._memory.remove(CELLS, sequence, end)
        if self.has_window:
            blocks = [block for block in parts.blocks if block.end <= place.begin]
            window = self._window(blocks, place)
            self._wait_for([_name(WINDOW, part) for part in window])
            self._memory.remove(WINDOW, sequence)
            if self._load(WINDOW, sequence, window) < len(window):
                return False
        return self._state is None or self._take_state(self._state, sequence, place)

    def _take_state(self, kind: int, sequence: int, place: _Part) -> bool:
        name = _state_name(place)
        self._wait_for([name])
        state = self._store.read(name)
        if state is None:
            return False
        if kind != RECURRENT or _is_recurrent_after(state, place):
            data = np.frombuffer(state, np.uint8)
            done = self._memory.set_state(kind, sequence, data.ctypes.data, len(state))
            self._context.rollback.forget(sequence)
            if done and self._memory.end(kind, sequence) == place.end_position:
                self._pool.submit(self._store.touch, [name])
                return True
        self._store.delete(name)
        return False

    def _wait_for(self, names: Sequence[str]) -> None:
        """Waits until none of these blocks is still queued for writing."""
        if any(name in self._queued for name in names):
            self._pool.submit(lambda: None).result()

    # Blocks of cells.

    def _load(self, kind: int, sequence: int, parts: Sequence[_Part]) -> int:
        """Adds the cells of parts to a sequence, up to the first part that cannot be
        used. Deletes the blocks from that part on. Returns how many parts were
        added."""
        self._memory.share_stream(SCRATCH, sequence)
        with KVBlocks() as read:
            n_added = sum(
                1
                for _ in itertools.takewhile(
                    lambda part: self._add(kind, read, sequence, part), parts
                )
            )
            n_done = min(n_added, read.fill())
        if n_done < len(parts):
            self._memory.remove(kind, sequence, parts[n_done].first_position)
            for unusable in parts[n_done:]:  # deleted, so that they are rewritten
                self._store.delete(_name(kind, unusable))
        self._pool.submit(
            self._store.touch, [_name(kind, part) for part in parts[:n_done]]
        )
        return n_done

    def _add(self, kind: int, read: KVBlocks, sequence: int, part: _Part) -> bool:
        """Adds a block's cells to a sequence; `read` fills them later. Returns False if
        the block is missing, if its cells belong to other tokens, or if there is no
        room for them."""
        block = self._store.open(
            _name(kind, part), _STATE.size + max(_CELL_BYTES) * (part.end - part.begin)
        )
        if block is None or not _has_cells_of(block.head, part):
            return False
        done = self._memory.set_state(
            kind, SCRATCH, read.add(block), block.n_bytes - block.begin
        )
        if done:
            self._memory.copy(kind, SCRATCH, sequence)
        self._memory.remove(kind, SCRATCH)
        return done

    def _keep_cells(self, kind: int, sequence: int, parts: Sequence[_Part]) -> None:
        """Queues for writing the parts that are not kept yet.

        WINDOW: skips parts whose first cell the sequence has lost. CELLS: queues
        nothing if the first new part has lost its first cell, and nothing after a part
        that cannot be queued.
        """
        first = self._memory.first(kind, sequence)
        new = [part for part in parts if not self._is_kept(_name(kind, part))]
        if kind == WINDOW:
            new = [part for part in new if part.first_position >= first]
        if not new or first > new[0].first_position:
            return
        memory = self._memory
        memory.share_stream(SCRATCH, sequence)
        memory.copy(kind, sequence, SCRATCH)
        memory.remove(kind, sequence)
        try:
            for part in new:
                memory.copy(
                    kind, SCRATCH, sequence, part.first_position, part.end_position
                )
                is_kept = self._keep_block(kind, sequence, part)
                memory.remove(kind, sequence)
                # Later blocks are useless without this one.
                if not is_kept and kind == CELLS:
                    return
        finally:
            memory.copy(kind, SCRATCH, sequence)
            memory.remove(kind, SCRATCH)

    def _keep_block(self, kind: int, sequence: int, part: _Part) -> bool:
        """Queues all cells of a sequence to be written as the block of `part`. Returns
        False if llama.cpp cannot write the cells, if they are not the part's cells, or
        if too many bytes are already waiting to be written."""
        n_bytes = self._memory.state_bytes(kind, sequence)
        if not self._has_queue_for(n_bytes):
            self.behind.add(sequence)
            return False
        data = self._memory.state(kind, sequence, n_bytes)
        if data is None or not _has_cells_of(data.data, part):
            return False
        n_own_tokens = part.end - part.begin if kind == CELLS else 0
        self._put(
            _name(kind, part), About(self._model, part.end, n_own_tokens), data.data
        )
        return True

    def _is_kept(self, name: str) -> bool:
        return name in self._queued or self._store.holds(name)

    def _has_queue_for(self, n_bytes: int) -> bool:
        with self._lock:
            return (
                not self._queued
                or sum(self._queued.values()) + n_bytes <= MOST_QUEUED_BYTES
            )

    def _put(
        self,
        name: str,
        about: About,
        data: memoryview,
        written: Callable[[float], object] = float,
    ) -> None:
        """Queues a block to be written. written: called by the writer thread with the
        time that writing took, in seconds."""

        def write() -> None:
            begin_s = time.perf_counter()
            self._store.write(name, about, [data])
            written(time.perf_counter() - begin_s)
            with self._lock:
                self._queued.pop(name, None)

        with self._lock:
            self._queued[name] = len(data)
        self._pool.submit(write)

    # States.

    def _state_to_keep(self, sequence: int, place: _Part, is_end: bool) -> int | None:
        """Returns the size in bytes of the state after `place` if the state should be
        kept now, otherwise None."""
        if self._state is None:
            return None
        last = self._state_ends.get(sequence, 0)
        n_since = place.end - last if last <= place.end else place.end
        n_bytes = self._memory.state_bytes(self._state, sequence)
        # False if the state is at a different position, such as after drafted tokens
        is_there = self._memory.end(self._state, sequence) == place.end_position
        if not is_there or n_since < (
            2 if is_end else self._state_cost.step(n_bytes, place.end)
        ):
            return None
        if self._is_kept(_state_name(place)):
            self._state_ends[sequence] = place.end
            return None
        has_room = n_bytes < read_memory().available_bytes // 2
        if has_room and (is_end or self._has_queue_for(n_bytes)):
            return n_bytes
        return None

    def _keep_state(self, sequence: int, place: _Part, n_bytes: int) -> None:
        """Queues the state of a sequence after `place` to be written."""
        assert self._state is not None
        begin_s = time.perf_counter()
        data = self._memory.state(self._state, sequence, n_bytes)
        copy_s = time.perf_counter() - begin_s
        if data is None:
            return
        self._state_ends[sequence] = place.end
        n_own_tokens = 0 if self._has_cells else place.end
        about = About(self._model, place.end, n_own_tokens)
        note_state = self._state_cost.note_state
        self._put(
            _state_name(place),
            about,
            data.data,
            lambda write_s: note_state(n_bytes, copy_s + write_s),
        )


@dataclass
class StateCost:
    """Chooses the distance between kept states, based on the time and disk space that
    keeping them costs."""

    limit_bytes: int
    _eval_s: float = 0.0  # total seconds of all passes
    _pass_s: float = 0.0  # seconds of the last pass
    _n_pass: int = 0  # tokens of the last pass
    _token_s: float = 0.0  # seconds to compute one prompt token; 0: not known yet
    _byte_s: float = 0.0  # seconds to keep one byte of a state; 0: not known yet

    def note_pass(self, eval_s: float, n_new: int) -> None:
        """Records that a pass evaluated `n_new` tokens of a sequence. eval_s: the
        context's total compute time so far, in seconds."""
        # Another pass has run, so the previous pass's token count is complete.
        if eval_s != self._eval_s:
            if self._n_pass >= BLOCK_TOKENS // 2:
                self._token_s = self._pass_s / self._n_pass
            self._pass_s = eval_s - self._eval_s
            self._eval_s = eval_s
            self._n_pass = 0
        self._n_pass += n_new

    def note_state(self, n_bytes: int, seconds: float) -> None:
        """Records how long it took to copy and write a state of `n_bytes` bytes."""
        self._byte_s = seconds / n_bytes

    def step(self, n_bytes: int, n_tokens: int) -> int:
        """Returns the distance in tokens from one kept state to the next, in a
        conversation of `n_tokens` tokens whose state has `n_bytes` bytes."""
        seconds = self._byte_s * n_bytes
        # Tokens computed in that time.
        pays_off = seconds / self._token_s if self._token_s else 0.0
        by_time = max(min(pays_off / STEP_COST, MOST_STEP_TOKENS), pays_off)
        by_space = n_bytes * n_tokens / (STATES_SHARE * self.limit_bytes)
        return max(BLOCK_TOKENS, math.ceil(by_time), math.ceil(by_space))


def _name(kind: int, part: _Part) -> str:
    """Returns the name of the block with this part's cells, of full attention or of a
    sliding window."""
    return part.name + _NAMES[kind]


def _state_name(place: _Part) -> str:
    return f"{place.name}-state"


def open_prefix_cache(
    llm: UpstreamLlama,
    context: Context,
    load_plan: LoadPlan,
    store: KvBlockStore,
    recent: RecentExperts | None,
) -> PrefixCache | None:
    """Returns the prefix cache of a model that was loaded with this plan; None if
    `store` is off, or if the model's contexts cannot be kept."""
    options = load_plan.options
    unused = (
        options.get("logits_all") or options.get("embedding") or llm._ctx.memory is None
    )
    if store.is_off or unused or llm.context_params.n_seq_max > SCRATCH:
        return None
    return PrefixCache(llm, context, store, load_plan, recent)


def _has_cells_of(block: Buffer, part: _Part) -> bool:
    """Returns True if `block`, the beginning of a sequence's state, has exactly the
    cells of the part's tokens, in any order."""
    n_tokens = part.end - part.begin
    if len(block) < _STATE.size or _STATE.unpack_from(block) != (1, n_tokens):
        return False
    for n_bytes in _CELL_BYTES:
        cells = np.frombuffer(
            block[_STATE.size :][: n_tokens * n_bytes // 4 * 4], np.uint8
        )
        if len(cells) == n_tokens * n_bytes:
            fields = cells.view(np.int32).reshape(n_tokens, -1)
            if (fields[:, 1] == 1).all() and (
                np.sort(fields[:, 0]) == part.positions[:-1]
            ).all():
                return True
    return False


def _is_recurrent_after(state: Buffer, part: _Part) -> bool:
    """Returns True if a state is the recurrent state of one sequence after the part's
    last token."""
    if len(state) < _RECURRENT_STATE.size:
        return False
    return _RECURRENT_STATE.unpack_from(state) == (1, part.end_position - 1, 0)


def _hash(*parts: str | bytes) -> str:
    joined = b"\0".join(
        part if isinstance(part, bytes) else part.encode() for part in parts
    )
    return hashlib.blake2b(joined, digest_size=16).hexdigest()


def _root(llm: UpstreamLlama, load_plan: LoadPlan) -> str:
    """Returns a hash of everything that blocks depend on, except owner, tokens and
    images: model, build, processor, devices and options."""
    layout = load_plan.layout
    plan = load_plan.plan
    options = load_plan.options
    params = llm.context_params
    adapter = load_plan.spec.lora_path
    projector = load_plan.spec.projector
    parts = {
        "format": FORMAT,
        "model": (header_digest(layout.shards), weights_digest(layout.shards)),
        "projector": projector and weights_digest((projector.shard,)),
        "adapter": adapter
        and (weights_digest((read_adapter(adapter).shard,)), options.get("lora_scale")),
        "build": library.build_identity(),
        "processor": sorted(read_processor().flags),
        "kernels": (
            read_environment().kernels,
            load_plan.hooks,
            load_plan.spec.store.repack,
        ),
        "devices": (plan.device, plan.layers_on, plan.whole_layers),
        "layers": [(part.name, part.layers) for part in plan.devices],
        "context": {name: getattr(params, name) for name in CONTEXT_FIELDS},
        "options": {name: options.get(name) for name in LOAD_OPTIONS},
        "rope": options["n_ctx"] if layout.has_long_rope else 0,
        "passes": None
        if is_batch_invariant(llm, layout, plan)
        else (params.n_batch, params.n_ubatch, params.kv_unified or params.n_seq_max),
    }
    return _hash(repr(parts))
