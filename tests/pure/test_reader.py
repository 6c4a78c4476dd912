"""Tests the GGUF reader with files that break one rule each, cut files, and hostile
files.

For such a file, the reader raises a ModelFormatError that names the key or tensor and
an offset. The reader uses little memory and time. Missing files and disk errors raise
other typed errors.
"""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf_builder as build
import pytest
from gguf_builder import ARR, STR, U32, Gguf, moe, string, u32, u64

from moegguf.errors import ExpertIOError, ModelFormatError, ModelNotFoundError
from moegguf.gguf import reader
from moegguf.gguf.reader import GGML_TYPES, MAX_KV, MAX_TENSORS, read_gguf


def small() -> Gguf:
    return Gguf().add("a.key", U32, 1).tensor("t0", 32, 2).tensor("t1", 64)


def refuse(tmp_path: Path, data: bytes) -> str:
    """Writes `data` to a file and reads the file. Returns the message of the
    ModelFormatError that this raises.

    Asserts that the message contains the file's name and an offset.
    """
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "bad.gguf" in message and "offset" in message
    return message


def test_read_gguf_returns_the_written_metadata_and_tensors(tmp_path: Path) -> None:
    g = (
        Gguf(alignment=64)
        .add("general.alignment", U32, 64)
        .add("s", STR, "text")
        .add("f", build.F64, 1.5)
    )
    g.add("b", build.BOOL, 1).add("i", build.I64, -3).add_array("n", build.I16, [1, -2])
    g.add_array("words", STR, ["x", "", "yz"]).tensor("t0", 32, 3, ggml_type=2).tensor(
        "t1", 5
    )
    file = read_gguf(g.write(tmp_path / "ok.gguf"))
    expected = {
        "general.alignment": 64,
        "s": "text",
        "f": 1.5,
        "b": True,
        "i": -3,
        "n": (1, -2),
    }
    assert dict(file.metadata) == expected
    assert file.arrays["words"] == 3
    assert [(t.name, t.shape, t.n_bytes, t.type_name) for t in file.tensors] == [
        ("t0", (32, 3), 54, "Q4_0"),
        ("t1", (5,), 20, "F32"),
    ]
    assert [t.offset - file.shard.header_bytes for t in file.tensors] == [0, 64]
    assert (
        file.shard.header_bytes % 64 == 0
        and file.shard.n_bytes == (tmp_path / "ok.gguf").stat().st_size
    )


def with_fields(**fields: object) -> Callable[[], bytes]:
    def make() -> bytes:
        g = small()
        for name, value in fields.items():
            setattr(g, name, value)
        return g.build()

    return make


def with_kv(*raw: bytes) -> Callable[[], bytes]:
    return lambda: Gguf(kv=list(raw)).tensor("t0", 32).build()


def with_tensor(
    *shape: int, name: str | bytes = "bad.weight", **raw: int
) -> Callable[[], bytes]:
    raw.setdefault("n_bytes", 128)
    return lambda: Gguf().tensor("ok.weight", 32).tensor(name, *shape, **raw).build()


HUGE = 1 << 62
KEY = string("some.key")
BAD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty file": (lambda: b"", "ends at 0"),
    "bad magic": (with_fields(magic=b"GGML"), "starts with 'GGUF'"),
    "version 4": (with_fields(version=4), "must be 2 or 3"),
    "big endian": (with_fields(version=3 << 24), "big-endian"),
    "a billion key-values": (with_fields(n_kv=10**9), "too many"),
    "key-values do not fit": (with_fields(n_kv=MAX_KV), "do not fit"),
    "tensors over the cap": (with_fields(n_tensors=MAX_TENSORS + 1), "too many"),
    "tensors do not fit": (with_fields(n_tensors=MAX_TENSORS), "do not fit"),
    "empty key": (with_kv(string("") + u32(U32) + u32(1)), "the key is empty"),
    "key of 100 kB": (
        with_kv(string("k" * 100_000) + u32(U32) + u32(1)),
        "at most 65535",
    ),
    "duplicate key": (with_kv(*[KEY + u32(U32) + u32(1)] * 2), "'some.key'.*twice"),
    "string of 4 GiB": (
        with_kv(KEY + u32(STR) + u64(4 << 30)),
        "'some.key'.*4294967296",
    ),
    "value type 13": (with_kv(KEY + u32(13) + u64(0)), "'some.key'.*type 13"),
    "array of arrays": (
        with_kv(KEY + u32(ARR) + u32(ARR) + u64(1)),
        "'some.key'.*elements of type 9",
    ),
    "array of 2^62": (
        with_kv(KEY + u32(ARR) + u32(build.U8) + u64(HUGE)),
        "'some.key'.*too long",
    ),
    "strings of 2^62": (
        with_kv(KEY + u32(ARR) + u32(STR) + u64(HUGE)),
        "'some.key'.*too long",
    ),
    "long string in array": (
        with_kv(KEY + u32(ARR) + u32(STR) + u64(1) + u64(1 << 40) + b"x"),
        "1099511627776 bytes.*the file ends",
    ),
    "alignment 48": (
        lambda: small().add("general.alignment", U32, 48).build(),
        "alignment",
    ),
    "alignment text": (
        lambda: small().add("general.alignment", STR, "32").build(),
        "alignment",
    ),
    "name of 64 bytes": (with_tensor(32, name="n" * 64), "64 bytes long"),
    "empty name": (with_tensor(32, name=""), "name is empty"),
    "zero in name": (with_tensor(32, name=b"a\0b"), "zero byte"),
    "duplicate tensor": (with_tensor(32, name="ok.weight"), "'ok.weight'.*two tensors"),
    "5 dimensions": (with_tensor(2, 2, 2, 2, 2), "'bad.weight'.*1 to 4"),
    "0 dimensions": (with_tensor(32, n_dims=0), "'bad.weight'.*1 to 4"),
    "zero dimension": (with_tensor(32, 0), "'bad.weight'.*zero"),
    "product over 2^63": (with_tensor(1 << 32, 1 << 31), "'bad.weight'.*too large"),
    "bytes over 2^63": (with_tensor(1 << 62), "'bad.weight'.*too large"),
    "type 4 (removed)": (with_tensor(32, ggml_type=4), "'bad.weight'.*type 4"),
    "row not whole blocks": (
        with_tensor(33, ggml_type=2),
        "'bad.weight'.*multiple of 32",
    ),
    "unaligned offset": (with_tensor(16, offset=129), "'bad.weight'.*must be 128"),
    "offset past the end": (
        with_tensor(32, offset=1 << 20),
        "'bad.weight'.*past the end",
    ),
    "offset 2^63": (with_tensor(32, offset=1 << 63), "'bad.weight'.*past the end"),
    "data past the end": (with_tensor(32, n_bytes=64), "'bad.weight'.*past the end"),
    "gap": (with_tensor(16, offset=160), "'bad.weight'.*must be 128"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_read_gguf_rejects_a_file_that_breaks_a_rule(tmp_path: Path, kind: str) -> None:
    make, pattern = BAD_FILES[kind]
    message = refuse(tmp_path, make())
    assert re.search(pattern, message), message


def test_read_gguf_rejects_a_file_cut_anywhere(tmp_path: Path) -> None:
    g = moe()
    n_header, n_bytes, path = (
        len(g.header()),
        len(g.build()),
        g.write(tmp_path / "cut.gguf"),
    )
    for size in (
        *range(n_bytes - 32, n_header, -n_bytes // 100),
        *range(n_header, -1, -1),
    ):
        os.truncate(path, size)
        with pytest.raises(
            ModelFormatError, match="offset" if size <= n_header else "past the end"
        ):
            read_gguf(path)


HOSTILE = {
    "strings": u64(1) + KEY + u32(ARR) + u32(STR) + u64(1 << 22),
    "numbers": u64(1) + KEY + u32(ARR) + u32(build.U64) + u64(1 << 30),
    "text": u64(1) + KEY + u32(STR) + u64(4 << 30),
    "keys": u64(10**9),
}

CHILD = """
import resource, sys, time
from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import read_gguf
for path in sys.argv[1:]:
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        read_gguf(path)
    except ModelFormatError:
        pass
    assert time.process_time() - begin < 2, (path, time.process_time() - begin)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, (path, grown)
"""


def test_read_gguf_rejects_hostile_files_fast_and_with_little_memory(
    tmp_path: Path,
) -> None:
    paths = []
    for kind, head in HOSTILE.items():
        paths.append(tmp_path / kind)
        paths[-1].write_bytes(b"GGUF" + u32(3) + u64(0) + head)
        os.truncate(paths[-1], 20 << 30)
    g = Gguf(n_tensors=MAX_TENSORS)
    for i in range(MAX_TENSORS):
        g.kv.append(string(f"t{i:062d}") + u32(1) + u64(8) + u32(0) + u64(32 * i))
    g.n_kv = 0
    paths.append(g.write(tmp_path / "tensors"))
    g = Gguf(kv=[string(f"key{i}") + u32(U32) + u32(1) for i in range(MAX_KV)])
    paths.append(g.write(tmp_path / "many-keys"))
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths)], check=True, cwd=root
    )


def test_read_gguf_reads_strings_across_chunks_and_limits_their_bytes(
    tmp_path: Path,
) -> None:
    words = ["x" * (300_000 + i) for i in range(12)]
    g = (
        Gguf()
        .add_array("words", STR, words)
        .add("long", STR, "x" * (2 << 20))
        .add("after", U32, 7)
    )
    g.add("s", STR, b"\xff\xfe").add(b"k\xff", U32, 1).tensor(b"t\xff", 32)
    file = read_gguf(g.write(tmp_path / "l.gguf"))
    assert "long" not in file.metadata and file.metadata["after"] == 7
    assert file.metadata["s"] == "\ufffd\ufffd" and file.tensors[0].name == "t\\xff"
    g = Gguf()
    for i in range(14):
        g.add(f"long{i}", STR, "x" * ((1 << 20) - 1))
    with pytest.raises(
        ModelFormatError, match="may take 12582912 bytes of memory, but take 125857"
    ):
        read_gguf(g.write(tmp_path / "m.gguf"))


def test_read_gguf_raises_typed_errors_for_missing_files_and_disk_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (
        tmp_path,
        tmp_path / "none.gguf",
        tmp_path / "pipe.gguf",
        "a\0b",
        tmp_path / "pipe.gguf" / "x",
    ):
        with pytest.raises(ModelNotFoundError):
            read_gguf(path)
    assert issubclass(ModelNotFoundError, FileNotFoundError)
    path = small().write(tmp_path / "io.gguf")

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader, "open", opening(broken), raising=False)
    with pytest.raises(ExpertIOError, match="Input/output error"):
        read_gguf(path)


def opening(readinto: Callable[..., int]) -> Callable[..., io.BufferedReader]:
    kind = type("Raw", (io.FileIO,), {"readinto": readinto})
    return lambda path, mode, buffering, opener: io.BufferedReader(
        kind(path, mode, opener=opener), buffering
    )


def test_read_gguf_joins_short_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = small().add_array("words", STR, ["a", "bcdefghijkl", ""])
    g.version = 2
    whole, real = read_gguf(g.write(tmp_path / "short.gguf")), io.FileIO.readinto
    monkeypatch.setattr(
        reader,
        "open",
        opening(lambda raw, to: real(raw, memoryview(to)[:7])),
        raising=False,
    )
    assert read_gguf(g.write(tmp_path / "short.gguf")).tensors == whole.tensors


def test_ggml_types_agree_with_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    for number, sizes in constants.GGML_QUANT_SIZES.items():
        # The gguf package counts 4 bytes for a scale that ggml stores in 2.
        if number.name != "Q8_1":
            assert GGML_TYPES[int(number)] == (number.name, *sizes)
