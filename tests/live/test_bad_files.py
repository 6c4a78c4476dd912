"""Files that break a rule end as a typed error from `Llama`, and the process goes on to load a good one."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from running import Llama, Load, Reference, TinyModel, greedy_logits

from moegguf.errors import ExpertIOError, ModelFormatError
from moegguf.gguf.experts import ExpertLayout, read_layout

TENSOR = b"blk.1.ffn_up_exps.weight"
EXPERT_COUNT = b"qwen2moe.expert_count"

Change = Callable[[bytearray], object]


def after(data: bytearray, name: bytes, n_bytes: int = 0) -> int:
    """Where the bytes after a length-prefixed name begin, and `n_bytes` further on."""
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + n_bytes


BAD_FILES: dict[str, Change] = {  # the reader's own tests have every rule
    "cut in the data": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "wrong magic": lambda data: data.__setitem__(slice(0, 4), b"GGML"),
    "offset of 2^63": lambda data: struct.pack_into("<Q", data, after(data, TENSOR, 4 + 24 + 4), 1 << 63),
    "another number of experts": lambda data: struct.pack_into("<I", data, after(data, EXPERT_COUNT, 4), 8),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_a_format_error_and_the_next_good_one_loads(
    tiny: TinyModel, load: Load, reference: Reference, tmp_path: Path, name: str
) -> None:
    data = bytearray(tiny().read_bytes())
    BAD_FILES[name](data)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"bad\.gguf"):
        Llama(bad, verbose=False)
    llm = load(tiny(), expert_cache="40%")
    assert np.array_equal(greedy_logits(llm), reference(tiny()))


def cut_experts_off(path: Path) -> None:
    """Cut the file where its experts begin."""
    first = min(matrix.offset for matrix in read_layout(path).matrices)
    with path.open("r+b") as file:
        file.truncate(first)


@pytest.fixture
def copied(tiny: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny(), tmp_path / "copy.gguf"))


def test_a_file_truncated_in_use_ends_the_pass(copied: Path, tiny: TinyModel, load: Load, reference: Reference) -> None:
    llm = load(copied, expert_cache="40%")
    whole = copied.read_bytes()
    greedy_logits(llm, n_new=2)
    cut_experts_off(copied)
    with pytest.raises(ExpertIOError, match=r"copy\.gguf"):
        greedy_logits(llm)
    copied.write_bytes(whole)  # the same bytes, which only another load can know
    with pytest.raises(ExpertIOError, match=r"copy\.gguf' was written to after the model was loaded"):
        greedy_logits(llm)
    assert np.array_equal(greedy_logits(load(copied, expert_cache="40%")), reference(tiny()))


def test_a_file_written_to_while_it_is_loaded_is_an_error(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ExpertLayout.check_not_overwritten

    def overwrite_first(layout: ExpertLayout) -> None:
        copied.write_bytes(copied.read_bytes())
        check(layout)

    monkeypatch.setattr(ExpertLayout, "check_not_overwritten", overwrite_first)
    with pytest.raises(ExpertIOError, match=r"copy\.gguf was written to while it was loaded"):
        Llama(copied, expert_cache="40%", verbose=False)


def test_what_llama_cpp_refuses_is_a_format_error_too(tiny: TinyModel, tmp_path: Path) -> None:
    data = bytearray(tiny().read_bytes())
    data[:] = data.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_nrom.weight")
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"bad\.gguf"):
        Llama(tmp_path / "bad.gguf", verbose=False)
