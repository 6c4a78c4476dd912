"""Tests trace files and files of prompts.

A written trace is read back unchanged. Files of other kinds raise a TraceError. A
damaged file raises a TraceError or still yields the written trace. Prompts are read
from both documented formats, and errors name the faulty line.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import SMALL, batched, random_trace, same

from moegguf.errors import OptionError, TraceError
from moegguf.trace.format import TraceWriter, read, write
from moegguf.trace.prompts import Prompt, read_prompts
from moegguf.trace.trace import Trace, TraceHeader

Members = dict[str, bytes]


def small(**wanted: bool) -> Trace:
    return random_trace(n_sequences=2, n_prefill=2, n_decode=2, seed=1, **wanted)


def unpack(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def header_with(members: Members, changes: dict[str, Any]) -> Members:
    """Returns `members` with `changes` applied to header.json. A key of the model's
    shape is changed within `shape`."""
    header = json.loads(members["header.json"])
    for key, value in changes.items():
        (header["shape"] if key in header["shape"] else header)[key] = value
    return {**members, "header.json": json.dumps(header).encode()}


@pytest.fixture
def members(tmp_path: Path) -> Members:
    write(tmp_path / "good.npz", small())
    return unpack(tmp_path / "good.npz")


WRITTEN = [
    batched(),
    small(with_inputs=True).select([]),
    *(
        small(with_weights=w, with_inputs=i)
        for w in (False, True)
        for i in (False, True)
    ),
]


@pytest.mark.parametrize("trace", WRITTEN)
def test_written_trace_is_read_back_unchanged(tmp_path: Path, trace: Trace) -> None:
    trace = replace(
        trace,
        header=replace(
            trace.header, settings={"budget": "50%", "threads": 2, "gb_per_s": 1.5}
        ),
    )
    write(tmp_path / "t.npz", trace)
    assert same(read(tmp_path / "t.npz"), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]
    # Numpy can open the file without moegguf.
    with np.load(tmp_path / "t.npz", allow_pickle=False) as arrays:
        assert json.loads(arrays["header.json"])["shape"]["n_expert"] == 16
        assert "expert_ids.000000" not in arrays or np.array_equal(
            arrays["expert_ids.000000"], trace.expert_ids
        )


def test_trace_blocks_without_inputs_are_read_as_zeros(tmp_path: Path) -> None:
    trace = small(with_inputs=True)
    without, with_ = replace(trace.select([0]), inputs=None), trace.select([1])
    writer = TraceWriter(
        tmp_path / "t.npz", trace.shape, trace.header, weights=True, inputs=True
    )
    writer.add(without)
    writer.add(with_)
    writer.close(trace.header)
    assert list(unpack(tmp_path / "t.npz"))[-1] == "header.json"
    found = read(tmp_path / "t.npz")
    assert not found.inputs[:, : without.n_tokens].any()
    assert np.array_equal(found.inputs[:, without.n_tokens :], with_.inputs)
    assert np.array_equal(found.expert_ids, trace.expert_ids)


def test_unfinished_recording_leaves_no_complete_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    writer = TraceWriter(path, SMALL, TraceHeader(), weights=True, inputs=False)
    writer.add(small())
    assert not path.exists()
    with pytest.raises(TraceError, match="damaged or incomplete"):
        read(writer.partial)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_failed_write_raises_trace_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        write(tmp_path / "missing" / "t.npz", small())
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/fd/1"):
        with pytest.raises(
            TraceError, match="give a file's path, not a folder, pipe or device"
        ):
            write(path, small())
    (tmp_path / "pipe").unlink()
    with pytest.raises(TraceError, match=r"expert_ids must be an array of int16"):
        write(
            tmp_path / "t.npz",
            replace(small(), expert_ids=small().expert_ids.astype(np.int32)),
        )
    with pytest.raises(TraceError, match="settings"):
        write(
            tmp_path / "t.npz",
            replace(
                small(), header=replace(small().header, settings={"x": float("nan")})
            ),
        )
    writer = TraceWriter(
        tmp_path / "u.npz", SMALL, TraceHeader(), weights=True, inputs=False
    )
    with pytest.raises(TraceError, match="has inputs, but the writer accepts none"):
        writer.add(small(with_inputs=True))
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"PK", b"\0" * 100, b"GGUF" * 30])
def test_read_rejects_files_that_are_not_traces(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.npz").write_bytes(data)
    with pytest.raises(TraceError, match=r"t\.npz: the trace is damaged or incomplete"):
        read(tmp_path / "t.npz")
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "missing.npz")
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"format": "other"}, "format: Input should be 'moegguf-trace'"),
        ({"version": 1}, "version: Input should be 2, but is 1"),
        ({"n_pass": 5}, "n_pass and n_tokens must be the sums over the blocks"),
        ({"labels": {"x": "y"}}, "labels"),
        ({"settings": {"a": True}}, "settings.a"),
        ({"blocks": [[6, 8, 1, 0]]}, "a block must have at least"),
        ({"blocks": [[6, 8, 0, 1]]}, "damaged or incomplete"),
        (
            {"blocks": [[6, 8, 0, 0]] * 1000, "n_pass": 6000, "n_tokens": 8000},
            "damaged or incomplete",
        ),
        ({"blocks": [[6, 9, 0, 0]], "n_tokens": 9}, "pass_start must go from 0 to 9"),
        (
            {"blocks": [[6, 1 << 31, 0, 0]], "n_tokens": 1 << 31},
            "at most [0-9]+ are allowed",
        ),
        ({"layers": [1, 2, 3, 4, 6]}, "layers must be in rising order"),
        ({"n_expert": 1}, "n_expert_used is more"),
        ({"n_expert": 4}, "expert_ids must be from -1 to below 4"),
        ({"n_layer": 1 << 40}, "n_layer: Input should be"),
    ],
)
def test_read_rejects_a_header_that_breaks_a_rule(
    tmp_path: Path, members: Members, changes: dict[str, Any], rule: str
) -> None:
    with pytest.raises(TraceError, match=rule):
        read(pack(tmp_path / "t.npz", header_with(members, changes)))


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Members], Members]:
    """Returns a function that applies `change` to the array `name` of the first block.

    `change` returns the new array, or changes its argument and returns None.
    """

    def apply(members: Members) -> Members:
        array = np.load(io.BytesIO(members[f"{name}.000000.npy"]))
        result = change(array)
        return {
            **members,
            f"{name}.000000.npy": npy(array if result is None else result),
        }

    return apply


def put(at: Any, value: Any) -> Callable[[Any], None]:
    return lambda array: array.__setitem__(at, value)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (
            changed("expert_ids", put((0, 0, 0), 16)),
            "expert_ids must be from -1 to below 16",
        ),
        (
            changed("expert_ids", put((0, 0, 1), -1)),
            "expert_ids must hold the same number of experts",
        ),
        (
            changed("expert_ids", put((0, 1), -1)),
            "expert_ids must contain a pass's last tokens",
        ),
        (changed("expert_ids", lambda a: a.astype(np.int32)), "must be int16"),
        (
            changed("expert_ids", lambda a: a.reshape(-1, *a.shape[1:][::-1])),
            "must be int16",
        ),
        (changed("weights", put((0, 0, 0), np.nan)), "not finite"),
        (changed("weights", lambda a: np.full(a.shape, None)), "damaged"),
        (changed("tokens", put(0, 64)), "tokens must be from -1 to below 64"),
        (changed("pass_phase", put(0, 2)), "pass_phase must be at most 1"),
        (changed("pass_first_token", put(0, -2)), "pass_first_token must be"),
        (changed("pass_start", put(0, 1)), "pass_start must go from 0 to 8"),
        (changed("pass_start", put(1, 7)), "pass_start must rise"),
        (
            lambda m: {k: v for k, v in m.items() if k != "tokens.000000.npy"},
            "damaged or incomplete",
        ),
        (
            lambda m: {k: v for k, v in m.items() if k != "header.json"},
            "header.json is missing in this file",
        ),
        (lambda m: {**m, "header.json": b"[" * 100_000}, "Invalid JSON"),
        (lambda m: {**m, "header.json": b"[]"}, "trace header"),
        (
            lambda m: {
                **m,
                "tokens.000000.npy": b"\x93NUMPY\x01\x00\x20\x00" + b"(" * 150,
            },
            "damaged",
        ),
    ],
)
def test_read_rejects_damaged_members(
    tmp_path: Path, members: Members, damage: Callable[[Members], Members], rule: str
) -> None:
    with pytest.raises(TraceError, match=rule):
        read(pack(tmp_path / "t.npz", damage(members)))


def test_read_unpacks_no_more_bytes_than_allowed_and_expected(
    tmp_path: Path, members: Members
) -> None:
    path = tmp_path / "t.npz"
    write(path, small())
    with pytest.raises(TraceError, match="at most 99 are allowed"):
        read(path, max_bytes=99)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(
                name, data + bytes(20 << 20) if name == "tokens.000000.npy" else data
            )
    assert path.stat().st_size < 100_000
    with pytest.raises(TraceError, match=r"bytes, but \d+ and a header are expected"):
        read(path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Trace]:
    folder = tmp_path_factory.mktemp("good")
    trace = small(with_inputs=True)
    write(folder / "t.npz", trace)
    return folder / "broken.npz", (folder / "t.npz").read_bytes(), trace


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_read_rejects_or_tolerates_any_flipped_byte(
    good: tuple[Path, bytes, Trace], data: st.DataObject
) -> None:
    path, content, trace = good
    broken = bytearray(content)
    broken[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(
        st.integers(1, 255)
    )
    path.write_bytes(broken)
    try:
        found = read(path)
    except TraceError:
        return
    assert same(found, trace)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_read_rejects_a_trace_cut_anywhere(
    good: tuple[Path, bytes, Trace], data: st.DataObject
) -> None:
    path, content, _ = good
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(TraceError):
        read(path)


def put_file(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_read_prompts_reads_paragraphs_of_text_and_json_lines(tmp_path: Path) -> None:
    path = put_file(
        tmp_path, "stories.txt", "\ufeff\n\nOnce upon\r\na time.\n \n\n\nThe end."
    )
    assert read_prompts(path) == [
        Prompt("Once upon\na time.", "stories"),
        Prompt("The end.", "stories"),
    ]
    lines = [
        '{"prompt": "a \u2028 b", "label": " code ", "n_predict": 7, "completion": "c"}',
        "",
        '{"prompt": "d"}\r',
    ]
    path = put_file(tmp_path, "mixed.jsonl", "\n".join(lines))
    assert read_prompts(path) == [
        Prompt("a \u2028 b", "code", 7, "c"),
        Prompt("d", "mixed"),
    ]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ('{"label": "x"}', "prompt: Field required"),
        ('{"prompt": 3}', "prompt: Input should be a valid string, but is 3"),
        (r'{"prompt": "\ud800"}', "Invalid JSON"),
        ('{"prompt": "x", "label": ""}', "label: String should have at least 1"),
        ('{"prompt": "x", "n_predict": 0}', "n_predict: Input should be greater"),
        ('{"prompt": "x", "n_tokens": 1}', "n_tokens: Extra inputs are not permitted"),
    ],
)
def test_read_prompts_names_the_line_of_a_mistake(
    tmp_path: Path, line: str, rule: str
) -> None:
    path = put_file(tmp_path, "p.jsonl", '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(OptionError) as caught:
        read_prompts(path)
    assert rule in str(caught.value) and "'p.jsonl', line 3:" in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_read_prompts_accepts_bom_utf_16_and_crlf(
    tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "p.txt").write_text("café\r\n\r\nthé", encoding, newline="")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt")] == [
        "café",
        "thé",
    ]


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_read_prompts_rejects_empty_missing_and_non_utf_8_files(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(OptionError, match="has no prompt"):
        read_prompts(put_file(tmp_path, name, " \n\n"))
    with pytest.raises(OptionError, match="line 2: must be UTF-8, but has byte 0xff"):
        read_prompts(put_file(tmp_path, name, b"fine\nnot \xff fine"))
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path / ("missing" + name))
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path)


WORD = st.text(min_size=1, max_size=20).filter(lambda text: bool(text.strip()))


@given(
    st.lists(
        st.builds(
            Prompt,
            WORD,
            WORD.map(str.strip),
            st.none() | st.integers(1, 99),
            st.none() | WORD,
        ),
        min_size=1,
    )
)
@settings(max_examples=50)
def test_prompts_written_as_json_lines_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, given_: list[Prompt]
) -> None:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [
        {
            "prompt": p.text,
            "label": p.label,
            "n_predict": p.n_predict,
            "completion": p.completion,
        }
        for p in given_
    ]
    path.write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), newline=""
    )
    assert read_prompts(path) == given_
