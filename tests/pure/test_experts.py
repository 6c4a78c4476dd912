"""Tests the layout of experts. Byte ranges are checked against the file, and
inconsistent files are refused."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_builder as build
import pytest
from gguf_builder import F32, F32_T, I32, Q4_0_T, STR, U32, Gguf, moe

from moegguf.engine.memory import sequences_of
from moegguf.errors import ModelFormatError, ModelNotFoundError
from moegguf.gguf.experts import read_layout
from tools.mutants import mutate, read_header, write_file


def write(g: Gguf, folder: Path, name: str = "m.gguf") -> Path:
    return g.write(folder / name)


def refuse(path: Path, pattern: str) -> str:
    with pytest.raises(ModelFormatError, match=pattern) as caught:
        read_layout(path)
    return str(caught.value)


def without(g: Gguf, name: str) -> Gguf:
    g.tensors = [t for t in g.tensors if t.name != name]
    return g


def replaced(g: Gguf, name: str, **fields: Any) -> Gguf:
    g.tensors = [
        dataclasses.replace(t, **fields) if t.name == name else t for t in g.tensors
    ]
    return g


def test_read_layout_of_a_small_model_has_its_sizes_and_shard(tmp_path: Path) -> None:
    layout = read_layout(write(moe(n_layer=3, n_expert=6, n_used=2), tmp_path))
    assert (layout.arch, layout.n_layer, layout.n_expert, layout.n_expert_used) == (
        "qwen2moe",
        3,
        6,
        2,
    )
    assert layout.is_moe and layout.kinds == ("gate", "up", "down")
    one = 3 * 64 * 32 // 32 * 18
    assert layout.layers[0].expert_bytes == one
    assert layout.expert_bytes == 3 * 6 * one
    assert layout.token_cycle_bytes == 3 * 2 * one and layout.token_cycle_slots == 6
    assert layout.n_expert_total == 18
    assert (
        layout.dense_bytes == 4 * (64 * 16 + 3 * 64)
        and layout.row_table_bytes == 4 * 64 * 16
    )
    in_memory = layout.dense_bytes + layout.expert_bytes
    assert in_memory + layout.row_table_bytes == sum(
        n for _, n in layout.tensor_types.values()
    )
    assert (
        layout.n_vocab == 16
        and layout.chat_template == "{{ messages }}"
        and layout.name == "tiny"
    )
    stat = (tmp_path / "m.gguf").stat()
    shard = layout.shards[0]
    assert (shard.ino, shard.n_bytes, shard.mtime_ns) == (
        stat.st_ino,
        stat.st_size,
        stat.st_mtime_ns,
    )


def test_sequences_are_not_combined_if_rotary_factors_would_change(
    tmp_path: Path,
) -> None:
    plain, with_factors = moe(), moe()
    with_factors.tensor("rope_factors_long.weight", 8)
    for g, n_together in ((plain, 4), (with_factors, 1)):
        layout = read_layout(
            write(
                g.add("qwen2moe.rope.scaling.original_context_length", U32, 1024),
                tmp_path,
            )
        )
        assert [sequences_of(layout, n_ctx, 4) for n_ctx in (256, 1024, 2048)] == [
            4,
            n_together,
            4,
        ]


def test_read_layout_reads_valid_sampling_parameters(tmp_path: Path) -> None:
    key = "general.sampling."
    given = (
        moe()
        .add(f"{key}temp", F32, 0.6)
        .add(f"{key}top_k", I32, 20)
        .add(f"{key}penalty_last_n", I32, -1)
    )
    given.add(f"{key}top_p", F32, float("nan")).add(f"{key}min_p", STR, "much").add(
        f"{key}mirostat", I32, 1
    )
    asked = {"temperature": 0.6, "top_k": 20, "repeat_last_n": -1, "mirostat": 1}
    assert read_layout(write(given, tmp_path)).sampling == asked
    assert read_layout(write(moe(), tmp_path)).sampling == {}


def test_read_layout_accepts_fused_gateless_and_dense_layers(tmp_path: Path) -> None:
    layout = read_layout(write(moe(fused=True), tmp_path))
    assert (
        layout.kinds == ("down", "gate_up") and layout.layers[0].matrices[1].ne1 == 64
    )
    g = moe()
    for il in range(2):
        without(g, f"blk.{il}.ffn_gate_exps.weight")
    assert read_layout(write(g, tmp_path)).kinds == ("up", "down")
    g = moe("llama", skip_kv=("expert_count", "expert_used_count"))
    g.tensors = [t for t in g.tensors if "exps" not in str(t.name)]
    layout = read_layout(write(g, tmp_path))
    assert (
        not layout.is_moe
        and layout.expert_bytes == layout.n_expert == layout.token_cycle_bytes == 0
    )
    g = moe()
    extra = (
        "ffn_gate_chexps.weight",
        "ffn_up_exps.bias",
        "ffn_up_exps.scale",
        "ffn_norm_exps.weight",
    )
    for name in extra:
        g.tensor(f"blk.0.{name}", 64)
    layout = read_layout(write(g, tmp_path))
    assert len(layout.matrices) == 6 and layout.dense_bytes == 4 * (
        64 * 16 + 2 * 64 + 4 * 64
    )


def test_expert_used_count_may_differ_per_layer(tmp_path: Path) -> None:
    g = moe(skip_kv=("expert_used_count",)).add_array(
        "qwen2moe.expert_used_count", U32, [1, 3]
    )
    layout = read_layout(write(g, tmp_path))
    assert [layer.n_expert_used for layer in layout.layers] == [
        1,
        3,
    ] and layout.n_expert_used == 3
    assert layout.token_cycle_slots == 4
    g = moe(skip_kv=("expert_used_count",)).add_array(
        "qwen2moe.expert_used_count", U32, [1, 3, 1]
    )
    refuse(
        write(g, tmp_path),
        "expert_used_count.*a number for each of 2 layers, but has 3",
    )
    g = moe(skip_kv=("expert_used_count",)).add_array(
        "qwen2moe.expert_used_count", STR, ["1", "3"]
    )
    refuse(
        write(g, tmp_path),
        "'qwen2moe.expert_used_count': must have .* numbers, but is an array of 2 strings",
    )
    for name in (
        "feed_forward_length",
        "nextn_predict_layers",
        "attention.head_count_kv",
    ):
        g = moe(skip_kv=(name,)).add_array(f"qwen2moe.{name}", STR, ["1", "3"])
        refuse(
            write(g, tmp_path),
            f"'qwen2moe.{name}': must have .* numbers, but is an array of 2 strings",
        )
    g = moe(skip_kv=("expert_used_count",)).add_array(
        "qwen2moe.expert_used_count", U32, [2, 0]
    )
    refuse(write(g, tmp_path), "layer 1 has experts, but a token uses 0")


def test_read_layout_reads_tied_output_mla_nextn_layers_and_mixed_types(
    tmp_path: Path,
) -> None:
    assert read_layout(write(moe(), tmp_path)).tied_output_bytes == 0
    assert (
        read_layout(write(without(moe(), "output.weight"), tmp_path)).tied_output_bytes
        == 4 * 64 * 16
    )
    assert read_layout(write(latent(), tmp_path)).hparams.is_mla
    layout = read_layout(
        write(moe(n_layer=3).add("qwen2moe.nextn_predict_layers", U32, 1), tmp_path)
    )
    assert (
        layout.n_layer == 2
        and len(layout.layers) == 2
        and layout.unused_bytes * 2 == layout.expert_bytes
    )
    layout = read_layout(write(moe(types=(Q4_0_T, F32_T, Q4_0_T)), tmp_path))
    assert {m.kind: m.expert_bytes for m in layout.matrices} == {
        "gate": 1152,
        "up": 8192,
        "down": 1152,
    }


def latent(**changed: int) -> Gguf:
    """Returns a model with latent attention. Keywords replace values in the metadata of
    this attention."""
    numbers = {
        "head_count_kv": 1,
        "key_length": 40,
        "key_length_mla": 24,
        "value_length_mla": 16,
    }
    g = moe("deepseek2", skip_kv=("attention.head_count_kv",)).add(
        "deepseek2.rope.dimension_count", U32, 8
    )
    for key, value in {"kv_lora_rank": 32, **numbers, **changed}.items():
        g.add(f"deepseek2.attention.{key}", U32, value)
    return g


UP, GATE = (f"blk.1.ffn_{kind}_exps.weight" for kind in ("up", "gate"))
BAD_LAYOUTS: dict[str, tuple[Gguf, str]] = {
    "used > count": (moe(n_used=5), "expert_used_count.*5 of 4"),
    "used missing": (
        moe(skip_kv=("expert_used_count",)),
        "expert_used_count.*above zero",
    ),
    "both missing": (
        moe(skip_kv=("expert_count", "expert_used_count")),
        "holds 4 experts, but .* is 0",
    ),
    "count too large": (moe(n_expert=1025), "expert_count.*1024"),
    "count != ne2": (
        replaced(moe(), UP, shape=(64, 32, 5)),
        f"'{UP}'.*holds 5 experts, but .* is 4",
    ),
    "no up": (without(moe(), UP), "layer 1 has no ffn_up_exps"),
    "gate is not up": (
        replaced(moe(), GATE, shape=(64, 64, 4)),
        "layer 1 has gate experts of 64x64",
    ),
    "two dimensions": (replaced(moe(), UP, shape=(64, 128)), "3 dimensions"),
    "fused does not fit": (
        replaced(moe(fused=True), "blk.1.ffn_gate_up_exps.weight", shape=(64, 32, 4)),
        "gate_up experts of 64x32",
    ),
    "fused and separate": (
        moe(fused=True).tensor(UP, 64, 32, 4, ggml_type=2),
        "both ffn_gate_up_exps and",
    ),
    "layer beyond": (
        moe().tensor("blk.7.ffn_up_exps.weight", 64, 32, 4),
        "layer 7 is beyond the model's layers, which are 0 to 1",
    ),
    "no layers": (moe(n_layer=0), "block_count.*from 1"),
    "too many layers": (moe(n_layer=513, il_range=range(1)), "block_count.*512"),
    "no block_count": (moe(skip_kv=("block_count",)), "block_count.*missing"),
    "8 GiB for every text": (
        moe(skip_kv=("context_length",)).add(
            "qwen2moe.context_length", U32, (1 << 31) - 1
        ),
        "context_length",
    ),
    "width text": (
        moe(skip_kv=("embedding_length",)).add("qwen2moe.embedding_length", STR, "x"),
        "whole number",
    ),
    "all prediction": (
        moe().add("qwen2moe.nextn_predict_layers", U32, 2),
        "nextn_predict_layers",
    ),
    "groups": (
        moe().add("qwen2moe.expert_group_count", U32, 4),
        "expert_group_count.*must be below 4 .*, but is 4",
    ),
    "group split": (
        moe().add("qwen2moe.expert_group_count", U32, 3),
        "do not divide into 3 groups",
    ),
    "group used": (
        moe().add("qwen2moe.expert_group_count", U32, 2),
        "expert_group_used_count",
    ),
    "no architecture": (Gguf().tensor("t", 4), "general.architecture"),
    "odd architecture": (
        Gguf().add("general.architecture", STR, "a\n").tensor("t", 4),
        "general.architecture",
    ),
    "no tensors": (Gguf().add("general.architecture", STR, "llama"), "no tensors"),
}


@pytest.mark.parametrize("kind", BAD_LAYOUTS)
def test_read_layout_rejects_inconsistent_fields(tmp_path: Path, kind: str) -> None:
    g, pattern = BAD_LAYOUTS[kind]
    assert "bad.gguf" in refuse(write(g, tmp_path, "bad.gguf"), pattern)


def test_mutants_depend_only_on_the_seed_and_raise_only_typed_errors(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    good, n_refused = read_header(tiny("tiny-qwen2moe")), 0
    for seed in range(120):
        mutant, words = mutate(good, seed)
        assert (mutant, words) == mutate(good, seed)
        write_file(mutant, tmp_path / "mutant.gguf")
        try:
            read_layout(tmp_path / "mutant.gguf")
        except ModelFormatError:
            n_refused += 1
    assert 20 < n_refused < 100


def shards(folder: Path, name: str = "m", n: int = 3, **kwargs: Any) -> list[Path]:
    """Writes a model of 3 layers as `n` shards, with layer i in shard i. Returns the
    paths.

    The first shard also contains the 2 tensors that belong to no layer.
    """
    total = 2 + 3 * 4
    paths = []
    for i in range(n):
        g = moe(n_layer=3, split=(i, n, total), il_range=range(i, i + 1), **kwargs)
        paths.append(g.write(folder / f"{name}-{i + 1:05d}-of-{n:05d}.gguf"))
    return paths


def test_read_layout_joins_shards_and_names_a_missing_one(tmp_path: Path) -> None:
    first, *_ = shards(tmp_path)
    layout = read_layout(first)
    assert (
        len(layout.shards) == 3
        and [m.shard for m in layout.matrices] == [0] * 3 + [1] * 3 + [2] * 3
    )
    assert [layer.il for layer in layout.layers] == [0, 1, 2]
    for m in layout.matrices:
        assert m.offset + m.n_expert * m.expert_bytes <= layout.shards[m.shard].n_bytes
    first, second, _ = shards(tmp_path)
    second.unlink()
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00003\.gguf"):
        read_layout(first)


def test_read_layout_compares_shard_names_without_case(tmp_path: Path) -> None:
    first, second, third = shards(tmp_path)
    first = first.rename(tmp_path / "M-00001-of-00003.GGUF")
    second.rename(tmp_path / "M-00002-of-00003.GGUF")
    third.rename(tmp_path / "m-00003-OF-00003.Gguf")
    assert [shard.path.suffix for shard in read_layout(first).shards] == [
        ".GGUF",
        ".GGUF",
        ".Gguf",
    ]
    refuse(tmp_path / "M-00002-of-00003.GGUF", "open 'M-00001-of-00003.GGUF'")


@pytest.mark.parametrize(
    ("change", "opened", "pattern"),
    [
        (lambda paths: None, 1, "open 'm-00001-of-00003.gguf'"),
        (
            lambda paths: paths[1].write_bytes(paths[2].read_bytes()),
            0,
            r"m-00002.*split.no.*must be 1, but is 2",
        ),
        (
            lambda paths: os.truncate(paths[1], paths[1].stat().st_size - 64),
            0,
            "m-00002.*past the end",
        ),
    ],
    ids=["a later one", "another's place", "cut"],
)
def test_read_layout_rejects_a_broken_set_of_shards(
    tmp_path: Path, change: Callable[[list[Path]], object], opened: int, pattern: str
) -> None:
    paths = shards(tmp_path)
    change(paths)
    refuse(paths[opened], pattern)


def foreign(**kwargs: Any) -> Gguf:
    return moe(n_layer=3, il_range=range(1, 2), **kwargs)


@pytest.mark.parametrize(
    ("second", "pattern"),
    [
        (
            foreign(split=(1, 4, 14)),
            "m-00002-of-00003.gguf.*split.count.*is 4, but .* 3",
        ),
        (foreign(split=(1, 3, 99)), "m-00002-of-00003.gguf.*split.tensors.count.*99"),
        (
            foreign(split=(1, 3, 14)).add("general.name", STR, "other"),
            "m-00002-of-00003.gguf.*general.name.*other",
        ),
        (
            moe(n_layer=3, il_range=range(1, 2)),
            "m-00002-of-00003.gguf.*split.no.*is missing; fetch the shard again",
        ),
    ],
)
def test_read_layout_rejects_a_shard_of_another_model(
    tmp_path: Path, second: Gguf, pattern: str
) -> None:
    first, path, _ = shards(tmp_path)
    second.write(path)
    refuse(first, pattern)


def test_read_layout_rejects_a_split_count_that_differs_from_the_name(
    tmp_path: Path,
) -> None:
    first, *_ = shards(tmp_path)
    refuse(
        first.rename(tmp_path / "renamed.gguf"),
        "has 3 files according to the key 'split.count' .*, but 1 according",
    )
    refuse(
        write(moe(), tmp_path, "m-00001-of-00005.gguf"),
        "has 1 files according to the key 'split.count' .*, but 5 according",
    )
    g = moe(split=(0, 2, 10))
    refuse(
        write(g, tmp_path, "n-00001-of-00004.gguf"),
        "has 2 files according to the key 'split.count' .*, but 4 according to its name",
    )
    g = moe(split=(0, 1, 10))
    assert len(read_layout(write(g, tmp_path, "one-00001-of-00001.gguf")).shards) == 1
    g = moe().add("split.count", build.I32, -5)
    refuse(write(g, tmp_path), "split.count.*-5")
