"""Tests routers that are read from GGUF files.

They choose experts as llama.cpp does, with gating, biases, groups and quantised
matrices. The fingerprint of a model changes with its routers and its shape.
"""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from gguf_builder import F16_T, F32_T, Q4_0_T, Q8_0_T, U32, Gguf, moe, pad

from moegguf.errors import ModelFormatError, MoeggufError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.gguf.reader import read_gguf
from moegguf.gguf.routers import Gating, Router, Routers, read_gating, read_routers
from predictors.study.controls import probabilities

N_EMBD, N_EXPERT = 64, 4
RNG = np.random.default_rng(0)
MATRICES = RNG.standard_normal((2, N_EXPERT, N_EMBD)).astype(np.float32)
INPUTS = RNG.standard_normal((5, N_EMBD)).astype(np.float32)


def write(path: Path, g: Gguf, values: dict[str, bytes]) -> ExpertLayout:
    """Writes a GGUF file whose tensors have the bytes of `values`, or zeros. Returns
    the file's layout."""
    out = bytearray(pad(g.header(), g.alignment))
    for tensor in g.tensors:
        data = values.get(str(tensor.name), bytes(tensor.size()))
        assert len(data) == tensor.size()
        out += pad(data, g.alignment)
    path.write_bytes(out)
    return read_layout(path)


def encoded(matrix: np.ndarray, ggml_type: int) -> bytes:
    return quants.quantize(matrix, GGMLQuantizationType(ggml_type)).tobytes()


def model(
    arch: str = "qwen2moe", ggml_type: int = F32_T
) -> tuple[Gguf, dict[str, bytes]]:
    g, values = moe(arch), {}
    for il, matrix in enumerate(MATRICES):
        g.tensor(f"blk.{il}.ffn_gate_inp.weight", N_EMBD, N_EXPERT, ggml_type=ggml_type)
        values[f"blk.{il}.ffn_gate_inp.weight"] = encoded(matrix, ggml_type)
    return g, values


@pytest.mark.parametrize(
    ("ggml_type", "error"), [(F32_T, 0), (F16_T, 1e-3), (30, 1e-2), (Q8_0_T, 2e-2)]
)
def test_read_routers_dequantizes_matrices_of_any_type(
    tmp_path: Path, ggml_type: int, error: float
) -> None:
    g, values = model(ggml_type=F32_T if ggml_type == 30 else ggml_type)
    if ggml_type == 30:  # the GGUF builder does not support BF16
        for tensor in g.tensors:
            if "gate_inp" in str(tensor.name):
                tensor.ggml_type, tensor.n_bytes = 30, 2 * N_EMBD * N_EXPERT
                values[str(tensor.name)] = encoded(
                    MATRICES[int(str(tensor.name)[4])], 30
                )
    routers = read_routers(write(tmp_path / "m.gguf", g, values))
    for il in (0, 1):
        assert np.abs(routers.routers[il].matrix - MATRICES[il]).max() <= error
    assert routers.routers[0].n_expert_used == 2


def test_router_probabilities_rank_experts_by_their_logits(tmp_path: Path) -> None:
    routers = read_routers(write(tmp_path / "m.gguf", *model()))
    expected = np.argsort(-(INPUTS @ MATRICES[1].T), axis=1)[:, :2]
    for vector, ids in zip(INPUTS, expected, strict=True):
        found = probabilities(routers, 1, vector)
        assert found.dtype == np.float32 and found.min() >= 0 and found.max() <= 1
        assert np.argsort(-found)[:2].tolist() == ids.tolist()


def test_logit_bias_and_choice_bias_change_the_chosen_expert(tmp_path: Path) -> None:
    g, values = model("glm4moe")
    g.add("glm4moe.expert_gating_func", U32, 2)
    g.tensor("blk.0.ffn_gate_inp.bias", N_EXPERT).tensor(
        "blk.1.exp_probs_b.bias", N_EXPERT
    )
    values["blk.0.ffn_gate_inp.bias"] = struct.pack("<4f", 0, 0, 0, 1e3)
    values["blk.1.exp_probs_b.bias"] = struct.pack("<4f", 0, -7, 5, 0)
    routers = read_routers(write(tmp_path / "m.gguf", g, values))
    assert routers.gating == Gating.SIGMOID
    for row in INPUTS:
        assert (
            probabilities(routers, 0, row).argmax() == 3
            and probabilities(routers, 1, row).argmax() == 2
        )
    found = probabilities(routers, 1, INPUTS[0])
    assert found.argmax() == 2 and found.argmin() == 1 and found[1] == 0


def test_router_chooses_only_from_the_best_groups() -> None:
    # The logits are hundredths of 9 7 | 8 1 | 2 6. The scores are their sigmoids, so
    # the groups have the sums 1.040, 1.022 and 1.020 (rounded). The third group is not
    # used: its 6 is not chosen, but the second group's 1 is.
    matrix = np.array([[9], [7], [8], [1], [2], [6]], np.float32)
    router = Router(4, matrix / 100)
    routers = Routers(Gating.SIGMOID, {0: router}, n_group=3, n_group_used=2)
    found = probabilities(routers, 0, np.ones(1, np.float32))
    assert np.argsort(-found, kind="stable")[:4].tolist() == [0, 2, 1, 3]
    assert found[4:].tolist() == [0, 0]
    free = Routers(Gating.SIGMOID, {0: router})
    assert np.argsort(-probabilities(free, 0, np.ones(1, np.float32)))[:4].tolist() == [
        0,
        2,
        1,
        5,
    ]


@pytest.mark.parametrize(
    ("gating", "expected"),
    [
        (Gating.SOFTMAX, np.exp([1, -2]) / np.exp([1, -2]).sum()),
        (Gating.SIGMOID, 1 / (1 + np.exp([-1.0, 2]))),
        (Gating.SQRT_SOFTPLUS, np.sqrt(np.log1p(np.exp([1.0, -2])))),
    ],
)
def test_gating_function_determines_the_effect_of_a_choice_bias(
    gating: Gating, expected: np.ndarray
) -> None:
    # The first expert has the larger probability. The second one is chosen if the
    # choice bias outweighs the difference.
    for bias, winner in ((0.6, expected[1] + 0.6 > expected[0]), (0.01, False)):
        router = Router(
            1,
            np.array([[1], [-2]], np.float32),
            choice_bias=np.array([0, bias], np.float32),
        )
        assert probabilities(
            Routers(gating, {0: router}), 0, np.ones(1, np.float32)
        ).argmax() == int(winner)


def test_read_routers_skips_layers_routed_by_token_id_and_defaults_to_one_group(
    tmp_path: Path,
) -> None:
    g, values = model()
    g.add("qwen2moe.expert_group_count", U32, 0)
    g.add("qwen2moe.expert_group_used_count", U32, 0)
    routers = read_routers(write(tmp_path / "m.gguf", g, values))
    assert (routers.n_group, routers.n_group_used) == (1, 1)
    g, values = model()
    g.tensor("blk.0.ffn_gate_tid2eid.weight", 2, 16, ggml_type=26, n_bytes=4 * 32)
    assert list(read_routers(write(tmp_path / "m.gguf", g, values)).routers) == [1]


def test_read_gating_falls_back_to_the_architecture(tmp_path: Path) -> None:
    def gating(arch: str, func: int | None = None) -> Gating:
        g = moe(arch)
        if func is not None:
            g.add(f"{arch}.expert_gating_func", U32, func)
        return read_gating(read_layout(g.write(tmp_path / f"{arch}.gguf")))

    assert gating("qwen2moe") == Gating.SOFTMAX
    assert gating("glm4moe") == Gating.SIGMOID
    assert gating("glm4moe", 1) == Gating.SOFTMAX
    assert gating("llama4", 1) == Gating.SIGMOID
    assert gating("gpt-oss") == Gating.SOFTMAX_WEIGHT


def test_read_routers_rejects_missing_misshapen_and_infinite_matrices(
    tmp_path: Path,
) -> None:
    g, values = model()
    g.tensors.pop()
    with pytest.raises(
        ModelFormatError, match=r"no tensor 'blk\.1\.ffn_gate_inp\.weight'"
    ):
        read_routers(write(tmp_path / "missing.gguf", g, values))
    g, values = model()
    g.tensors[-1].shape = (N_EXPERT, N_EMBD)
    with pytest.raises(
        ModelFormatError, match=r"its shape must be \(64, 4\), but is \(4, 64\)"
    ):
        read_routers(write(tmp_path / "shape.gguf", g, values))
    g, values = model()
    values["blk.0.ffn_gate_inp.weight"] = np.full(
        N_EMBD * N_EXPERT, np.nan, np.float32
    ).tobytes()
    with pytest.raises(ModelFormatError, match="not finite"):
        read_routers(write(tmp_path / "nan.gguf", g, values))
    g, values = model()
    # I32: not weights.
    g.tensors[-1].ggml_type, g.tensors[-1].n_bytes = 26, 4 * N_EMBD * N_EXPERT
    with pytest.raises(ModelFormatError, match="type I32 cannot be read here"):
        read_routers(write(tmp_path / "type.gguf", g, values))


def test_read_routers_detects_a_file_cut_after_opening(tmp_path: Path) -> None:
    layout = write(tmp_path / "m.gguf", *model())
    path = layout.shards[0].path
    path.write_bytes(path.read_bytes()[:-100])
    for read in (read_routers, fingerprint):
        with pytest.raises(MoeggufError):
            read(layout)


def with_routers(g: Gguf, layers: range = range(2)) -> Gguf:
    for il in layers:
        g.tensor(f"blk.{il}.ffn_gate_inp.weight", N_EMBD, N_EXPERT)
    return g


def with_other_bytes(path: Path, g: Gguf) -> Path:
    """Writes a model in which each router's tensor contains the tensor's own name, so
    that routers differ.

    Returns its path.
    """
    g.write(path)
    for tensor in read_gguf(path).tensors:
        if "ffn_gate_inp" in tensor.name:
            patch(path, tensor.offset, f"{tensor.name:256}".encode() * 4)
    return path


def patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def of(path: Path) -> str:
    return fingerprint(read_layout(path))


def test_fingerprint_is_equal_for_other_quantisations_of_the_experts(
    tmp_path: Path,
) -> None:
    four = with_other_bytes(
        tmp_path / "4.gguf", with_routers(moe(types=(Q4_0_T, Q4_0_T, Q4_0_T)))
    )
    eight = with_other_bytes(
        tmp_path / "8.gguf", with_routers(moe(types=(Q8_0_T, Q8_0_T, Q8_0_T)))
    )
    assert of(four) == of(eight)
    assert len(of(four)) == 32 and int(of(four), 16) >= 0
    assert len(of(moe().write(tmp_path / "m.gguf"))) == 32


def test_fingerprint_depends_on_router_bytes_and_order_but_not_on_shards(
    tmp_path: Path,
) -> None:
    path = with_other_bytes(tmp_path / "m.gguf", with_routers(moe()))
    before = of(path)
    for tensor in read_gguf(path).tensors:
        original = path.read_bytes()
        patch(path, tensor.offset + tensor.n_bytes - 1, b"\x7f")
        assert (of(path) != before) == ("ffn_gate_inp" in tensor.name), tensor.name
        path.write_bytes(original)
    path = with_other_bytes(tmp_path / "m.gguf", with_routers(moe()))
    before = of(path)
    one, two = (
        tensor for tensor in read_gguf(path).tensors if "ffn_gate_inp" in tensor.name
    )
    data = path.read_bytes()
    patch(path, one.offset, data[two.offset : two.offset + two.n_bytes])
    patch(path, two.offset, data[one.offset : one.offset + one.n_bytes])
    assert of(path) != before
    whole = with_other_bytes(tmp_path / "m.gguf", with_routers(moe()))
    first = with_routers(moe(split=(0, 2, 12), il_range=range(1)), range(1))
    second = with_routers(moe(split=(1, 2, 12), il_range=range(1, 2)), range(1, 2))
    with_other_bytes(tmp_path / "s-00002-of-00002.gguf", second)
    path = with_other_bytes(tmp_path / "s-00001-of-00002.gguf", first)
    assert of(path) == of(whole)


@pytest.mark.parametrize("change", [{"n_used": 1}, {"vocab": 17}, {"arch": "qwen3moe"}])
def test_fingerprint_depends_on_architecture_and_sizes(
    tmp_path: Path, change: dict[str, int]
) -> None:
    path = with_other_bytes(tmp_path / "m.gguf", with_routers(moe()))
    other = with_other_bytes(tmp_path / "o.gguf", with_routers(moe(**change)))  # type: ignore[arg-type]
    assert of(path) != of(other)
