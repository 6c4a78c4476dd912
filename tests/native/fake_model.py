"""A model for tests of the store: files of random bytes, and a layout with the
locations of the experts."""

import ctypes as c
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moegguf.gguf.experts import ExpertLayout, ExpertMatrix, Kind, MoeLayer
from moegguf.gguf.hparams import Hparams
from moegguf.gguf.reader import Shard
from moegguf.native import library
from moegguf.native.store import Store, StoreContext

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, IQ4_NL, I32, MXFP4 = 0, 1, 2, 8, 12, 14, 20, 26, 39
Q4_1, Q5_0, Q5_1, Q2_K, Q3_K = 3, 6, 7, 10, 11
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ3_S, IQ2_S, IQ4_XS, IQ1_M = (
    16,
    17,
    18,
    19,
    21,
    22,
    23,
    29,
)
# Offset of nb[2] in struct ggml_tensor; nb[2] is the number of bytes from one matrix to
# the next.
NB2 = 64
BLOCKS = {
    F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34), Q4_K: (256, 144), Q6_K: (256, 210), IQ4_NL: (32, 18),
    MXFP4: (32, 17), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24), Q2_K: (256, 84), Q3_K: (256, 110),
    IQ2_XXS: (256, 66), IQ2_XS: (256, 74), IQ3_XXS: (256, 98), IQ1_S: (256, 50), IQ3_S: (256, 110), IQ2_S: (256, 82),
    IQ4_XS: (256, 136), IQ1_M: (256, 56),
}  # fmt: skip

Types = dict[Kind, int]
Open = Callable[..., tuple[Store, StoreContext]]
PLAIN: Types = {"gate": Q4_0, "up": Q4_0, "down": Q8_0}


class InitParams(c.Structure):
    """struct ggml_init_params."""

    _fields_ = [
        ("mem_size", c.c_size_t),
        ("mem_buffer", c.c_void_p),
        ("no_alloc", c.c_bool),
    ]


def bytes_of(ggml_type: int, ne0: int, ne1: int) -> int:
    """Returns the size in bytes of a matrix with ne1 rows of ne0 values."""
    per_block, block_bytes = BLOCKS[ggml_type]
    assert ne0 % per_block == 0
    return ne0 // per_block * block_bytes * ne1


@dataclass(frozen=True)
class FakeModel:
    """A layout and the bytes of its shards as they were written."""

    layout: ExpertLayout
    contents: tuple[bytes, ...]

    @property
    def paths(self) -> list[Path]:
        return [shard.path for shard in self.layout.shards]

    @property
    def expert_bytes(self) -> int:
        """Returns the size in bytes of one expert of the first layer."""
        return self.layout.layers[0].expert_bytes

    def matrix_bytes(self, index: int, expert: int) -> bytes:
        """Returns the bytes of one matrix of one expert, as they are in the file."""
        m = self.layout.matrices[index]
        at = m.offset + expert * m.expert_bytes
        return self.contents[m.shard][at : at + m.expert_bytes]

    def check(
        self, store: Store, il: int, expert_ids: npt.ArrayLike, slot_ids: npt.ArrayLike
    ) -> None:
        """Asserts that the slots of a routing event hold the file's bytes, and that no
        two experts share a slot."""
        pairs = set(
            zip(np.ravel(expert_ids).tolist(), np.ravel(slot_ids).tolist(), strict=True)
        )
        assert (
            len({expert for expert, _ in pairs})
            == len({slot for _, slot in pairs})
            == len(pairs)
        )
        for expert, slot in pairs:
            self.check_slot(store, il, expert, slot, len(np.atleast_2d(expert_ids)))

    def check_slot(
        self, store: Store, il: int, expert: int, slot: int, n_tokens: int = 1
    ) -> None:
        """Asserts that a pass of n_tokens finds the bytes of this expert at this slot
        id.

        Slots must not be repacked.
        """
        for index, m in enumerate(self.layout.matrices):
            if m.il == il:
                found = _slot_bytes(store, m, slot, n_tokens)
                assert found == self.matrix_bytes(index, expert), (
                    f"layer {il} expert {expert} {m.kind} in slot {slot}"
                )

    def acquire(
        self, store: Store, context: StoreContext, il: int, expert_ids: npt.ArrayLike
    ) -> npt.NDArray[np.int32]:
        """Acquires slots for a routing event and checks their bytes. Returns the slot
        ids."""
        slots = context.acquire(il, expert_ids)
        self.check(store, il, expert_ids, slots)
        return slots

    def token(
        self, store: Store, context: StoreContext, expert_ids: npt.ArrayLike
    ) -> None:
        """Acquires slots in every layer with experts, as in a pass that routes to the
        same experts in each layer."""
        for layer in self.layout.layers:
            self.acquire(store, context, layer.il, expert_ids)


@functools.cache
def _ggml() -> c.CDLL:
    loaded = library.open_part("ggml-base")
    for name in (
        "init",
        "new_tensor_2d",
        "new_tensor_3d",
        "backend_alloc_ctx_tensors_from_buft",
    ):
        getattr(loaded, f"ggml_{name}").restype = c.c_void_p
    return loaded


def _slot_bytes(store: Store, m: ExpertMatrix, slot: int, n_tokens: int) -> bytes:
    """Reads the bytes of one slot from the pool tensor that the patched llama.cpp uses
    in place of the tensor `m`."""
    ggml, data = _ggml(), c.create_string_buffer(m.expert_bytes)
    context = c.c_void_p(ggml.ggml_init(InitParams(1 << 12, None, True)))
    w = c.c_void_p(
        ggml.ggml_new_tensor_3d(
            context, m.ggml_type, *map(c.c_int64, (m.ne0, m.ne1, m.n_expert))
        )
    )
    ggml.ggml_set_name(w, m.name.encode())
    reserved = ggml.ggml_backend_alloc_ctx_tensors_from_buft(
        context, c.c_void_p(store.buffer_type)
    )
    ids = ggml.ggml_new_tensor_2d(context, I32, c.c_int64(1), c.c_int64(n_tokens))
    pool = library.load().moegguf_pool_tensor(w, ids)
    stride = c.c_size_t.from_address(pool + NB2).value
    ggml.ggml_backend_tensor_get(
        c.c_void_p(pool), data, c.c_size_t(slot * stride), c.c_size_t(m.expert_bytes)
    )
    ggml.ggml_backend_buffer_free(c.c_void_p(reserved))
    ggml.ggml_free(context)
    return data.raw


def layer_matrices(
    il: int, types: Types, n_embd: int, n_ff: int, n_expert: int
) -> list[ExpertMatrix]:
    shapes: dict[Kind, tuple[int, int]] = {
        "gate": (n_embd, n_ff), "up": (n_embd, n_ff), "down": (n_ff, n_embd), "gate_up": (n_embd, 2 * n_ff),
    }  # fmt: skip
    return [
        ExpertMatrix(
            il, kind, f"blk.{il}.ffn_{kind}_exps.weight", ggml_type, *shapes[kind], n_expert, 0, 0,
            bytes_of(ggml_type, *shapes[kind]),
        )
        for kind, ggml_type in types.items()
    ]  # fmt: skip


def _hparams(
    n_layer: int, n_expert: int, n_used: int, n_embd: int, n_ff: int
) -> Hparams:
    return Hparams(
        arch="fake", n_layer_all=n_layer, n_layer=n_layer, n_ctx_train=512, n_embd=n_embd, n_expert=n_expert,
        n_expert_used=(n_used,) * n_layer, n_head=(1,) * n_layer, n_head_kv=(1,) * n_layer, n_ff=(n_ff,) * n_layer,
        n_ff_exp=(n_ff,) * n_layer, key_length=64, value_length=64, is_mla=False, key_lengths=(64,),
        value_lengths=(64,),
    )  # fmt: skip


def make_model(
    folder: Path,
    *,
    n_layer: int = 4,
    n_expert: int = 8,
    n_used: int = 2,
    n_embd: int = 64,
    n_ff: int = 32,
    types: Sequence[Types] = (PLAIN,),
    n_shards: int = 1,
    gap: int = 32,
    seed: int = 0,
    dense_layers: Sequence[int] = (),
    weights: Callable[[ExpertMatrix], bytes] | None = None,
) -> FakeModel:
    """Writes the shards and returns the model.

    Layer il has the types `types[il % len(types)]`; layers in `dense_layers` have no
    experts. The matrices are assigned to the shards in turn. They are at least `gap`
    bytes apart, at multiples of 32, because GGUF aligns tensors. The last matrix of a
    shard ends where the file ends. `weights` returns the bytes of all experts of a
    matrix. None: the bytes are random.
    """
    rng = np.random.default_rng(seed)
    ends, layers = [gap] * n_shards, []
    for il in range(n_layer):
        if il in dense_layers:
            continue
        placed = []
        for m in layer_matrices(il, types[il % len(types)], n_embd, n_ff, n_expert):
            shard = (il + len(placed)) % n_shards
            offset = -(-(ends[shard] + gap) // 32) * 32
            ends[shard] = offset + n_expert * m.expert_bytes
            row = (
                m.il,
                m.kind,
                m.name,
                m.ggml_type,
                m.ne0,
                m.ne1,
                n_expert,
                shard,
                offset,
                m.expert_bytes,
            )
            placed.append(ExpertMatrix(*row))
        layers.append(MoeLayer(il, n_expert, n_used, tuple(placed)))
    shards, contents = [], []
    for shard, end in enumerate(ends):
        path = folder / f"fake-{shard}.bin"
        content = bytearray(rng.bytes(end))
        for layer in layers if weights else ():
            for m in layer.matrices:
                if m.shard == shard:
                    content[m.offset : m.offset + n_expert * m.expert_bytes] = weights(
                        m
                    )
        contents.append(bytes(content))
        path.write_bytes(contents[-1])
        stat = os.stat(path)
        shards.append(
            Shard(
                path, end, stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns
            )
        )
    layout = ExpertLayout(
        arch="fake", shards=tuple(shards), n_layer=n_layer, layers=tuple(layers), dense_bytes=0,
        expert_bytes=sum(layer.n_expert * layer.expert_bytes for layer in layers), unused_bytes=0,
        tied_output_bytes=0, n_vocab=0, hparams=_hparams(n_layer, n_expert, n_used, n_embd, n_ff), metadata={},
        tensor_types={},
    )  # fmt: skip
    return FakeModel(layout, tuple(contents))


def check_counters(counters: dict[str, int], n_slots: int) -> None:
    """Asserts that counters agree with each other and with `n_slots`, and that no read
    is queued or running."""
    assert (
        counters["lookups"]
        == counters["hits_ready"] + counters["hits_late"] + counters["misses"]
    )
    assert (
        counters["prefetch_requested"]
        == counters["prefetch_started"] + counters["prefetch_dropped"]
    )
    assert (
        sum(counters[f"prefetch_{how}"] for how in ("useful", "late", "wasted"))
        <= counters["prefetch_started"]
    )
    assert counters["slots_used"] <= n_slots
    for gauge in ("chunks_reading", "queue_needed", "queue_wanted"):
        assert counters[gauge] == 0, gauge
    assert counters["hook_ns"] < 1 << 62  # never below zero
    assert counters["stall_ns"] < 1 << 62
