"""Tests the random models of tools/models: files are well-formed, equal seeds give
equal files, and weights have mean 0."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType as QType
from gguf.quants import dequantize

from moegguf.gguf.experts import read_layout
from moegguf.quantities import GIB
from tools.models import (
    PRESETS,
    QUANTS,
    Shape,
    model_size_bytes,
    write_model,
    write_sparse_model,
)
from tools.models.blocks import BLOCK_MAKERS, random_blocks
from tools.models.hybrids import TABLE
from tools.models.tensors import tensors
from tools.models.vocabulary import SPECIALS, build_vocabulary, byte_characters

MAKE_MODEL = Path(__file__).parents[2] / "tools" / "make_model.py"


def tensor_bytes(paths: list[Path]) -> dict[str, bytes]:
    return {
        t.name: t.data.tobytes() for path in paths for t in GGUFReader(path).tensors
    }


def test_shards_are_complete_and_equal_the_single_file(tmp_path: Path) -> None:
    shape = PRESETS["tiny-mix"]
    whole = tensor_bytes(write_model(tmp_path / "whole.gguf", shape, "q4_k_m"))
    dealt = write_model(tmp_path / "dealt.gguf", shape, "q4_k_m", n_split=3)
    filled = write_model(
        tmp_path / "filled.gguf", shape, "q4_k_m", split_max_bytes=2_000_000
    )
    assert [path.name for path in dealt] == [
        f"dealt-0000{no}-of-00003.gguf" for no in (1, 2, 3)
    ]
    assert len(filled) > 3
    assert tensor_bytes(dealt) == tensor_bytes(filled) == whole, "of the same seed"
    assert (
        tensor_bytes(write_model(tmp_path / "other.gguf", shape, "q4_k_m", seed=1))
        != whole
    )
    for no, path in enumerate(dealt):
        fields = GGUFReader(path).fields
        keys = ("split.no", "split.count", "split.tensors.count")
        assert [fields[key].contents() for key in keys] == [no, 3, len(whole)]
        assert [fields[key].types[0].name for key in keys] == [
            "UINT16",
            "UINT16",
            "INT32",
        ]


@pytest.mark.parametrize("qtype", BLOCK_MAKERS, ids=lambda qtype: qtype.name)
def test_random_blocks_have_mean_zero_and_the_requested_deviation(qtype: QType) -> None:
    weights = dequantize(random_blocks(qtype, 4096, 0.02, seed=1), qtype)
    assert abs(weights.mean()) < 0.02 * 5 / np.sqrt(weights.size) * 2
    assert abs(weights.mean(axis=0)).max() < 0.02 * 0.1
    assert weights.std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("quant", QUANTS)
def test_write_model_makes_no_two_equal_experts(tmp_path: Path, quant: str) -> None:
    data = tensor_bytes(
        write_model(tmp_path / "m.gguf", PRESETS["tiny-qwen3moe"], quant)
    )
    n_expert = PRESETS["tiny-qwen3moe"].n_expert
    stacks = [
        np.frombuffer(raw, np.uint8) for name, raw in data.items() if "_exps." in name
    ]
    experts = [part.tobytes() for stack in stacks for part in np.split(stack, n_expert)]
    assert len(set(experts)) == len(experts)


@pytest.mark.parametrize(
    ("preset", "quant", "gigabytes"),
    [
        ("qwen1.5-moe-a2.7b", "q4_0", 8.06),
        ("qwen3-30b-a3b", "q4_0", 17.2),
        ("mixtral-8x7b", "q4_0", 26.3),
        ("deepseek-v2-lite", "q4_0", 8.85),
        ("lfm2-8b-a1b", "q4_k_m", 5.045),
        ("granite-4.0-h-small", "q4_k_m", 19.477),
        ("nemotron-3-nano-30b-a3b", "q4_k_m", 24.656),
        ("kimi-linear-48b-a3b", "q8_0", 52.248),
        # ggml-org/gemma-4-26B-A4B-it-GGUF on Hugging Face
        ("gemma-4-26b-a4b", "q4_k_m", 16.796),
        ("gemma-4-26b-a4b", "q8_0", 26.860),
        # localweights/Qwen3.6-35B-A3B-MTP-BF16-GGUF on Hugging Face
        ("qwen3.6-35b-a3b", "bf16", 71.1),
    ],
)
def test_named_presets_have_the_size_of_published_files(
    preset: str, quant: str, gigabytes: float
) -> None:
    assert model_size_bytes(PRESETS[preset], quant) / 1e9 == pytest.approx(
        gigabytes, rel=0.01
    )


def test_deepseek_v4_flash_without_heads_has_the_size_of_a_published_file() -> None:
    # teamblobfish/DeepSeek-V4-Flash-GGUF on Hugging Face
    shape = replace(PRESETS["deepseek-v4-flash"], n_layer_nextn=0)
    assert model_size_bytes(shape, "q8_0") / GIB == pytest.approx(282, rel=0.01)


def test_ngram_table_has_the_published_rows_and_bytes() -> None:
    made = {
        tensor.name: tensor
        for tensor in tensors(PRESETS["qwen3.8-flash-next"], "iq4_xs")
    }[TABLE]
    assert made.shape == (320_001_536, 160)
    assert made.qtype == QType.IQ4_NL
    assert made.n_bytes / 1e9 == pytest.approx(28.8, abs=0.01)


NAMED = [name for name in PRESETS if not name.startswith("tiny-")]


@pytest.mark.parametrize("preset", NAMED)
def test_named_preset_with_fewer_layers_has_all_kinds_of_layers(
    tmp_path: Path, preset: str
) -> None:
    whole = PRESETS[preset]
    shape = replace(
        whole, n_layer=8, n_vocab=1024, ple_vocab_base=min(whole.ple_vocab_base, 1000)
    )
    layout = read_layout(write_sparse_model(tmp_path / "m.gguf", shape, "q4_k_m"))
    assert layout.hparams.n_layer == 8
    assert {shape.mixer(il) for il in range(8)} == set(shape.mixers)
    assert layout.n_expert == shape.n_expert
    has_experts = "e" if "e" in shape.mixers else "awr"
    behind_lead = range(shape.n_layer_dense_lead, 8)
    expected = [il for il in behind_lead if shape.mixer(il) in has_experts]
    assert [layer.il for layer in layout.layers] == expected


@pytest.mark.parametrize("n_vocab", [259, 300, 1024, 151936])
def test_vocabulary_has_bytes_unique_tokens_and_reachable_merges(n_vocab: int) -> None:
    vocabulary = build_vocabulary(n_vocab)
    assert (
        len(vocabulary.tokens)
        == len(set(vocabulary.tokens))
        == len(vocabulary.types)
        == n_vocab
    )
    assert vocabulary.tokens[:256] == byte_characters()
    assert (
        vocabulary.tokens[vocabulary.id_of("<|im_end|>")]
        == SPECIALS[2]
        == vocabulary.tokens[-1]
    )
    known = set(byte_characters())
    for merge in vocabulary.merges:
        left, right = merge.split(" ")
        assert left in known and right in known
        known.add(left + right)
    assert known <= set(vocabulary.tokens)


def test_write_model_rejects_impossible_shapes_and_writes_nothing(
    tmp_path: Path,
) -> None:
    tiny = PRESETS["tiny-qwen2moe"]
    with pytest.raises(ValueError, match="n_expert_used"):
        replace(tiny, n_expert_used=17)
    with pytest.raises(ValueError, match="arch"):
        Shape("gpt2", 1, 32, 1, 1, 32, 2, 1, 32, 300)
    with pytest.raises(ValueError, match="positive n_ff_shexp"):
        replace(tiny, n_ff_shexp=0)
    with pytest.raises(ValueError, match="first layer attends"):
        write_model(tmp_path / "m.gguf", PRESETS["tiny-nemotron"], locality="glm")
    with pytest.raises(ValueError, match="multiple of 32"):
        write_model(tmp_path / "m.gguf", replace(tiny, n_ff_exp=48))
    with pytest.raises(ValueError, match="another quant"):
        write_model(tmp_path / "m.gguf", PRESETS["tiny-mix"], "q4_k_m", locality="glm")
    with pytest.raises(OSError, match="GB free"):
        write_model(
            tmp_path / "m.gguf", replace(PRESETS["mixtral-8x7b"], n_layer=2_000)
        )
    assert list(tmp_path.iterdir()) == []


def test_command_line_writes_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    command = [
        sys.executable, str(MAKE_MODEL), "--preset", "tiny-mixtral", "--layers", "1", "--locality", "mixtral", "-o",
        str(path),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert GGUFReader(path).fields["llama.block_count"].contents() == 1
    assert "routing: mixtral" in done.stderr
