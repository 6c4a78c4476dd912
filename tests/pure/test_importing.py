"""Tests the import of routing that other programs recorded.

Arrays and tables are imported. The model's shape comes from files, options or a GGUF
file. The error for a wrong file names the file and the broken rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from traces import random_trace

from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.native.events import Announcement, Phase
from moegguf.trace.format import read, write
from moegguf.trace.importing import PROMPT_PASS, ImportOptions, import_trace
from moegguf.trace.summary import summary

N_TOKENS, N_LAYERS, N_EXPERT, N_USED = 12, 3, 8, 2
SIZE = ImportOptions(n_expert=N_EXPERT, expert_bytes=1000)
Arrays = dict[str, Any]


def logits(n_tokens: int = N_TOKENS, seed: int = 0) -> Any:
    return (
        np.random.default_rng(seed)
        .standard_normal((n_tokens, N_LAYERS, N_EXPERT))
        .astype(np.float32)
    )


def chosen(n_tokens: int = N_TOKENS, seed: int = 0) -> Any:
    return np.argsort(-logits(n_tokens, seed), axis=2)[:, :, :N_USED]


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def table(
    n_tokens: int = 4, requests: tuple[str, ...] = ("a", "b")
) -> list[dict[str, Any]]:
    """Returns the rows of a table with n_tokens tokens per request. The token at
    position 0 is the prompt."""
    return [
        {
            "request": request, "position": position, "layer": layer + 1,
            "experts": chosen(n_tokens, seed)[position, layer].tolist(), "token": 10 * seed + position,
            "phase": "decode" if position else "prefill",
        }
        for seed, request in enumerate(requests) for position in range(n_tokens) for layer in range(N_LAYERS)
    ]  # fmt: skip


def as_csv(rows: list[dict[str, Any]]) -> str:
    texts = [{**row, "experts": " ".join(map(str, row["experts"]))} for row in rows]
    return (
        "\n".join(
            [",".join(texts[0]), *(",".join(map(str, row.values())) for row in texts)]
        )
        + "\n"
    )


def as_jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_logits_and_expert_ids_import_to_equal_traces_in_every_array_format(
    tmp_path: Path,
) -> None:
    forms: list[Path] = [
        npz(tmp_path / "logits.npz", router_logits=logits(), n_prompt=5)
    ]
    forms.append(
        npz(
            tmp_path / "ids.npz",
            expert_ids=chosen().astype(np.int16),
            n_prompt=np.array([5]),
        )
    )
    np.save(tmp_path / "logits.npy", logits())
    np.save(tmp_path / "ids.npy", chosen())
    save_file(
        {"expert_ids": chosen().astype(np.uint8), "n_prompt": np.array(5)},
        tmp_path / "ids.safetensors",
    )
    forms += [tmp_path / name for name in ("logits.npy", "ids.npy", "ids.safetensors")]
    options = ImportOptions(
        n_expert=N_EXPERT, n_expert_used=N_USED, expert_bytes=1000, n_prompt=5
    )
    for path in forms:
        made = import_trace([path], tmp_path / "out.npz", options)
        found = read(tmp_path / "out.npz")
        assert (found.expert_ids == chosen().transpose(1, 0, 2)).all(), path.name
        assert (
            found.shape
            == MoeShape(N_LAYERS, N_EXPERT, N_USED, (0, 1, 2), expert_bytes=1000)
            == made.shape
        )
        assert found.pass_phase.tolist() == [Phase.PREFILL] + [Phase.DECODE] * (
            N_TOKENS - 5
        )
        assert np.diff(found.pass_start).tolist() == [5] + [1] * (N_TOKENS - 5)
        assert (found.tokens == -1).all()
        assert found.header.settings == {
            "imported_from": path.name,
            "imported_files": 1,
        }


def test_import_trace_makes_one_request_of_each_array_file(tmp_path: Path) -> None:
    files = [
        npz(tmp_path / f"{n}.npz", expert_ids=chosen(n + 3, n), tokens=np.arange(n + 3), n_prompt=n, layers=[1, 2, 4],
            n_expert=N_EXPERT, expert_bytes=7, n_layer=6)
        for n in range(3)
    ]  # fmt: skip
    made = import_trace(files, tmp_path / "out", ImportOptions())
    assert made.shape == MoeShape(6, N_EXPERT, N_USED, (1, 2, 4), expert_bytes=7)
    assert made.sequences() == [0, 1, 2]
    for n in range(3):
        part = made.select([n])
        assert part.tokens.tolist() == list(range(n + 3))
        assert part.decode().n_tokens == 3
        assert (part.expert_ids == chosen(n + 3, n).transpose(1, 0, 2)).all()


def test_import_trace_splits_a_long_prompt_into_passes_of_one_announcement(
    tmp_path: Path,
) -> None:
    n = 2 * PROMPT_PASS + 7
    file = npz(tmp_path / "long.npz", expert_ids=chosen(n + 1), n_prompt=n)
    made = import_trace([file], tmp_path / "out", SIZE)
    assert made.pass_first_token.tolist() == [0, PROMPT_PASS, 2 * PROMPT_PASS, 0]
    announced = [event for event in made.events() if isinstance(event, Announcement)]
    assert [len(event.tokens) for event in announced] == [n, 1]


@pytest.mark.parametrize(("suffix", "text"), [(".csv", as_csv), (".jsonl", as_jsonl)])
def test_import_trace_reads_tables_of_several_requests_in_any_row_order(
    tmp_path: Path, suffix: str, text: Callable[[list[dict[str, Any]]], str]
) -> None:
    rows = table()
    shuffled = [rows[n] for n in np.random.default_rng(1).permutation(len(rows))]
    # Requests are numbered in the order of their first rows, so the rows of request a
    # must come first.
    shuffled.sort(key=lambda row: row["request"])
    file = tmp_path / f"table{suffix}"
    file.write_text(text(shuffled), encoding="utf-8")
    made = import_trace([file], tmp_path / "out", SIZE)
    assert (made.shape.layers, made.shape.n_layer) == ((1, 2, 3), 4)
    for seed in range(2):
        part = made.select([seed])
        assert (part.expert_ids == chosen(4, seed).transpose(1, 0, 2)).all()
        assert part.tokens.tolist() == [10 * seed + position for position in range(4)]
        assert part.pass_phase.tolist() == [Phase.PREFILL] + [Phase.DECODE] * 3


def test_import_trace_without_phases_takes_the_prompt_length_from_n_prompt(
    tmp_path: Path,
) -> None:
    file = tmp_path / "table.jsonl"
    bare = [
        {name: row[name] for name in ("request", "position", "layer", "experts")}
        for row in table()
    ]
    file.write_text(as_jsonl(bare), encoding="utf-8")
    assert import_trace([file], tmp_path / "out", SIZE).decode().n_tokens == 6
    three = ImportOptions(n_expert=N_EXPERT, expert_bytes=1, n_prompt=3)
    assert import_trace([file], tmp_path / "out", three).decode().n_tokens == 2
    long = ImportOptions(n_expert=N_EXPERT, expert_bytes=1, n_prompt=99)
    assert import_trace([file], tmp_path / "out", long).decode().n_tokens == 0


def test_import_trace_takes_shape_and_fingerprint_from_a_gguf(
    tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    model = tiny("tiny-deepseek2")
    layout = read_layout(model)
    shape = MoeShape.of(layout)
    rng = np.random.default_rng(0)
    file = npz(
        tmp_path / "a.npz",
        router_logits=rng.random((6, len(shape.layers), shape.n_expert)),
    )
    made = import_trace([file], tmp_path / "out", ImportOptions(model))
    assert made.shape == shape and made.shape.layers[0] > 0
    assert (
        made.header.fingerprint == fingerprint(layout)
        and made.header.model == model.stem
    )


WRONG: dict[str, tuple[Arrays, str]] = {
    "no routing": (
        {"tokens": np.arange(3)},
        "'expert_ids' or 'router_logits', but there is neither",
    ),
    "axes": (
        {"expert_ids": np.zeros((3, 2), np.int64)},
        r"axes \(token, layer, expert\), but has the shape \(3, 2\)",
    ),
    "nothing": (
        {"expert_ids": np.zeros((0, 3, 2), np.int64)},
        r"but has the shape \(0, 3, 2\)",
    ),
    "floats as ids": ({"expert_ids": logits()}, "must hold whole numbers"),
    "not finite": (
        {"router_logits": np.full((2, 3, 8), np.nan, np.float32)},
        "finite numbers",
    ),
    "objects": ({"expert_ids": np.array([[[None]]])}, "damaged or in another format"),
    "an id too large": (
        {"expert_ids": chosen() + 3},
        "from 0 to below 8, but one is 10",
    ),
    "an id below zero": ({"expert_ids": chosen() - 1}, "but one is -1"),
    "an expert twice": (
        {"expert_ids": np.zeros((3, 3, 2), np.int64)},
        r"one twice in layer 0 \[0, 0\]",
    ),
    "tokens that do not fit": (
        {"expert_ids": chosen(), "tokens": np.arange(3)},
        "each of the 12 rows",
    ),
    "tokens out of range": (
        {"expert_ids": chosen(), "tokens": np.full(12, 1 << 40)},
        "tokens must be from -1",
    ),
    "a long prompt": (
        {"expert_ids": chosen(), "n_prompt": 13},
        "from 0 to 12, the number of tokens in its request, but is 13",
    ),
    "two numbers": (
        {"expert_ids": chosen(), "n_prompt": [1, 2]},
        "n_prompt must be one whole number",
    ),
    "layers that fall": (
        {"expert_ids": chosen(), "layers": [2, 1, 0]},
        "layers must be in rising order",
    ),
    "other facts": (
        {"router_logits": logits(), "n_expert": 9},
        "n_expert is 9, but router_logits has 8",
    ),
    "too few layers": (
        {"expert_ids": chosen(), "n_layer": 2},
        "layers must be in rising order, each from 0 to 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_import_trace_rejects_wrong_arrays_and_writes_nothing(
    tmp_path: Path, name: str
) -> None:
    arrays, words = WRONG[name]
    file = npz(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(TraceError, match=words):
        import_trace([file], tmp_path / "out", SIZE)
    assert {path.name for path in tmp_path.iterdir()} == {"wrong.npz"}


def changed(
    n: int, **values: Any
) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: [
        {**row, **values} if i == n else row for i, row in enumerate(rows)
    ]


TABLES: dict[str, tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], str]] = {
    "none": (lambda rows: [], "there are no rows"),
    "a row less": (lambda rows: rows[:4] + rows[5:], "request 'a'.* position 1, layer 2 breaks this rule"),
    "the last row less": (lambda rows: rows[:-1], "request 'b'.* position 3, layer 3 breaks this rule"),
    "a row twice": (lambda rows: [*rows, rows[0]], "request 'a'.* position 0, layer 2 breaks this rule"),
    "a position far away": (changed(11, position=2_000_000_000), "position 3, layer 3 breaks this rule"),
    "a word": (changed(2, layer="three"), "line 3: layer must be a whole number from 0 .* but is 'three'"),
    "below zero": (changed(2, position=-1), "line 3: position must be"),
    "a fraction": (changed(2, position=1.5), "line 3: position must be"),
    "too large": (changed(2, layer=1 << 31), "line 3: layer must be"),
    "another number of experts": (changed(2, experts=[1]), r"line 3: each row must have .* the first row \(2\)"),
    "a field less": (changed(2, experts=None), "line 3 must have .*, but lacks experts"),
    "a phase of another name": (changed(2, phase="prompt"), "phase must be prefill or decode, but is 'prompt'"),
    "a prompt after its answer": (changed(9, phase="prefill"), "prefill must be lower than positions of decode"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_import_trace_names_the_line_or_place_in_a_wrong_table(
    tmp_path: Path, name: str
) -> None:
    change, words = TABLES[name]
    file = tmp_path / "table.jsonl"
    file.write_text(as_jsonl(change(table())), encoding="utf-8")
    with pytest.raises(TraceError, match=rf"table\.jsonl: .*{words}"):
        import_trace([file], tmp_path / "out", SIZE)
    assert not (tmp_path / "out").exists()


HUGE = (
    b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999, 99, 99), }".ljust(
        117
    )
    + b"\n"
)
HUGE = b"\x93NUMPY\x01\x00\x76\x00" + HUGE
FILES: Mapping[str, tuple[bytes, str]] = {
    "a.npz": (b"PK\x03\x04 no zip", "damaged or in another format"),
    "empty.npz": (b"", "damaged or in another format"),
    "a.npy": (b"\x93NUMPY\x01\x00", "damaged or in another format"),
    "huge.npy": (HUGE, "damaged or in another format"),
    "a.safetensors": (b"\xff" * 40, "damaged or in another format"),
    "a.csv": (b"\xff\xfe\x00bin", "damaged or in another format|lacks|there are no rows"),
    "columns.csv": (b"request,position\na,0\n", "lacks layer, experts"),
    "more.csv": (b"request,position,layer,experts\na,0,0,1,2\n", "more fields than the header"),
    "a.jsonl": (b"{", "damaged or in another format"),
    "list.jsonl": (b"[1]\n", "line 1 must be a JSON object"),
    "deep.jsonl": (b"[" * 100_000, "damaged or in another format"),
    "a.pt": (b"", "routing is read from .npz, .npy, .safetensors, .csv, .jsonl, but the name ends in '.pt'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_import_trace_rejects_files_of_other_formats(tmp_path: Path, name: str) -> None:
    data, words = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TraceError, match=words) as caught:
        import_trace([tmp_path / name], tmp_path / "out", SIZE)
    assert name in str(caught.value)
    with pytest.raises(TraceError, match=r"cannot be read|ends in"):
        import_trace([tmp_path / f"missing-{name}"], tmp_path / "out", SIZE)


def test_import_trace_rejects_a_file_that_is_a_trace(tmp_path: Path) -> None:
    write(tmp_path / "trace.npz", random_trace())
    with pytest.raises(TraceError, match="is already a moegguf trace"):
        import_trace([tmp_path / "trace.npz"], tmp_path / "out", SIZE)


def test_import_trace_asks_to_correct_values_that_a_trace_cannot_have(
    tmp_path: Path,
) -> None:
    file = npz(tmp_path / "a.npz", expert_ids=chosen())
    with pytest.raises(
        TraceError,
        match=r"n_expert: .* 32767, but is 40000; a trace file cannot .* correct it\.$",
    ):
        import_trace(
            [file], tmp_path / "out", ImportOptions(n_expert=40000, expert_bytes=1)
        )
    file = npz(
        tmp_path / "b.npz", expert_ids=chosen(), tokens=np.full(N_TOKENS, 7), n_vocab=7
    )
    with pytest.raises(
        TraceError,
        match=r"tokens must be from -1 to below 7; .* correct the imported files, or the",
    ):
        import_trace([file], tmp_path / "out", SIZE)


def test_import_trace_rejects_contradicting_and_missing_facts(tmp_path: Path) -> None:
    file = npz(tmp_path / "a.npz", router_logits=logits())
    other = npz(tmp_path / "b.npz", expert_ids=chosen(), n_expert=16)
    with pytest.raises(TraceError, match=r"n_expert is 8 in a\.npz, but 16 in b\.npz"):
        import_trace(
            [file, other],
            tmp_path / "out",
            ImportOptions(n_expert_used=N_USED, expert_bytes=1),
        )
    with pytest.raises(
        TraceError, match=r"n_expert is 9 in the options, but 8 in a\.npz"
    ):
        import_trace(
            [file],
            tmp_path / "out",
            ImportOptions(n_expert=9, n_expert_used=N_USED, expert_bytes=1),
        )
    for options, missing in (
        (ImportOptions(expert_bytes=1), "n_expert_used is required.*--used N.*--model"),
        (
            ImportOptions(n_expert_used=2),
            "expert_bytes is required.*--expert-size SIZE",
        ),
        (
            ImportOptions(n_expert_used=9, expert_bytes=1),
            "uses 9 experts, but has logits for 8",
        ),
        (
            ImportOptions(n_expert_used=2, expert_bytes=1, layers=(1, 2)),
            "has 3 layers, but the model has experts in 2",
        ),
    ):
        with pytest.raises(TraceError, match=missing):
            import_trace([file], tmp_path / "out", options)
    ids = npz(tmp_path / "ids.npz", expert_ids=chosen())
    with pytest.raises(TraceError, match=r"n_expert is required.*--experts N"):
        import_trace([ids], tmp_path / "out", ImportOptions(expert_bytes=1))


def test_summary_counts_requests_tokens_and_reuse(tmp_path: Path) -> None:
    same = np.repeat(chosen(1), 10, axis=0)
    other = np.stack([(chosen(1)[0] + 2 * n) % N_EXPERT for n in range(10)])
    files = [
        npz(tmp_path / "same.npz", expert_ids=same),
        npz(tmp_path / "other.npz", expert_ids=other),
    ]
    found = summary(import_trace(files, tmp_path / "out", SIZE))
    assert (found.n_requests, found.n_tokens, found.n_decoded, found.recorded) == (
        2,
        20,
        18,
        (),
    )
    assert 0.5 <= found.reuse < 1
    assert summary(import_trace(files[:1], tmp_path / "out", SIZE)).reuse == 1
