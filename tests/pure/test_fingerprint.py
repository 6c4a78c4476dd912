"""The fingerprint: the same for the same routers, another for any other router or shape."""

import os
from pathlib import Path

import pytest
from gguf_builder import Q4_0_T, Q8_0_T, Gguf, moe

from moegguf.errors import MoeggufError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.gguf.reader import read_gguf

N_EMBD, N_EXPERT = 64, 4


def with_routers(g: Gguf, layers: range = range(2), n_expert: int = N_EXPERT) -> Gguf:
    for il in layers:
        g.tensor(f"blk.{il}.ffn_gate_inp.weight", N_EMBD, n_expert)
    return g


def write(path: Path, g: Gguf) -> Path:
    """The model with routers of other bytes than the rest."""
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


def test_other_quantisations_share_it(tmp_path: Path) -> None:
    four = write(tmp_path / "4.gguf", with_routers(moe(types=(Q4_0_T, Q4_0_T, Q4_0_T))))
    eight = write(tmp_path / "8.gguf", with_routers(moe(types=(Q8_0_T, Q8_0_T, Q8_0_T))))
    assert of(four) == of(eight)
    assert len(of(four)) == 32 and int(of(four), 16) >= 0


def test_any_byte_of_a_router_counts_and_no_other(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", with_routers(moe()))
    before = of(path)
    for tensor in read_gguf(path).tensors:
        original = path.read_bytes()
        patch(path, tensor.offset + tensor.n_bytes - 1, b"\x7f")
        assert (of(path) != before) == ("ffn_gate_inp" in tensor.name), tensor.name
        path.write_bytes(original)


@pytest.mark.parametrize("change", [{"n_used": 1}, {"vocab": 17}, {"arch": "qwen3moe"}])
def test_architecture_and_sizes_count(tmp_path: Path, change: dict[str, int]) -> None:
    path = write(tmp_path / "m.gguf", with_routers(moe()))
    other = write(tmp_path / "o.gguf", with_routers(moe(**change)))  # type: ignore[arg-type]
    assert of(path) != of(other)


def test_swapped_routers_count(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", with_routers(moe()))
    before = of(path)
    one, two = (tensor for tensor in read_gguf(path).tensors if "ffn_gate_inp" in tensor.name)
    data = path.read_bytes()
    patch(path, one.offset, data[two.offset : two.offset + two.n_bytes])
    patch(path, two.offset, data[one.offset : one.offset + one.n_bytes])
    assert of(path) != before


def test_shards_give_what_the_whole_gives(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", with_routers(moe()))
    first = with_routers(moe(split=(0, 2, 12), il_range=range(1)), range(1))
    second = with_routers(moe(split=(1, 2, 12), il_range=range(1, 2)), range(1, 2))
    write(tmp_path / "s-00002-of-00002.gguf", second)
    path = write(tmp_path / "s-00001-of-00002.gguf", first)
    assert of(path) == of(whole)


def test_a_model_without_routers_has_one_too(tmp_path: Path) -> None:
    assert len(of(moe().write(tmp_path / "m.gguf"))) == 32


def test_a_file_cut_short_since_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", with_routers(moe()))
    layout = read_layout(path)
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(MoeggufError):
        fingerprint(layout)
