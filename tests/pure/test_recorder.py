"""Tests the recorder: the trace that it writes from events, its use of memory, and its
failures."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import SMALL, batched, random_trace, same

from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.trace import recorder
from moegguf.trace.format import TraceWriter, read
from moegguf.trace.recorder import Recorder
from moegguf.trace.trace import Trace, TraceHeader

TINY = MoeShape(
    n_layer=3, n_expert=4, n_expert_used=2, layers=(0, 2), n_embd=2, n_vocab=100
)
HEADER = TraceHeader("tiny", "ab", {}, {"threads": 2})


def routed(
    pass_: int,
    il: int,
    ids: list[list[int]],
    *,
    sequence: int = 0,
    first: int = 0,
    **more: object,
) -> RoutingEvent:
    """Returns a routing event with the experts `ids`. Its time is 10 ns times the pass
    number."""
    fields = {
        "pass_": pass_,
        "time_ns": 10 * pass_,
        "sequence": sequence,
        "phase": Phase.DECODE,
    }
    return RoutingEvent(
        **{
            **fields,
            "first_token": first,
            "il": il,
            "expert_ids": np.array(ids, np.int32),
            **more,
        }
    )  # type: ignore[arg-type]


def announcement(tokens: list[int]) -> Announcement:
    return Announcement(0, Phase.DECODE, np.array(tokens, np.int32))


def record(
    path: Path, *events: RoutingEvent | Announcement, inputs: bool = False
) -> Trace:
    session = Recorder(path, TINY, HEADER, inputs=inputs)
    for event in events:
        session.observe(event) if isinstance(event, RoutingEvent) else session.announce(
            event
        )
    session.close()
    return read(path)


@pytest.mark.parametrize("block_passes", [1, 2, 7, 256])
@pytest.mark.parametrize(
    "trace",
    [random_trace(seed=1, with_inputs=True), batched()],
    ids=["alone", "batched"],
)
def test_recorder_writes_the_observed_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Trace, block_passes: int
) -> None:
    """A trace is written in blocks of passes.

    The first block may contain no pass with several sequences, although a later block
    does.
    """
    monkeypatch.setattr(recorder, "BLOCK_PASSES", block_passes)
    session = Recorder(
        tmp_path / "t.npz", SMALL, replace(trace.header, labels={}), inputs=True
    )
    for event in trace.events():
        session.observe(event) if isinstance(event, RoutingEvent) else session.announce(
            event
        )
    for sequence, label in trace.header.labels.items():
        session.label(sequence, label)
    session.close()
    assert same(read(tmp_path / "t.npz"), trace)


@pytest.mark.parametrize(
    ("events", "expert_ids"),
    [
        ([], [[], []]),
        ([announcement([1])], [[], []]),
        ([routed(1, 0, [[0, 1]]), routed(2, 0, [[1, 2]]), routed(2, 2, [[2, 3]])],
         [[[0, 1], [1, 2]], [[-1, -1], [2, 3]]]),
        ([routed(1, 0, [[2]]), routed(1, 2, [[2, 3]]), routed(1, 1, [[2, 3]]), routed(2, 5, [[2, 3]]),
          routed(3, 0, [[0, 1, 2]])], [[[2, -1]], [[2, 3]]]),
        ([routed(1, 0, [[0, 1]], sequence=1), routed(2, 0, [[1, 2]]), routed(3, 0, [[2, 3]]),
          routed(4, 0, np.empty((0, 2)))], [[[0, 1], [1, 2], [2, 3]], [[-1, -1]] * 3]),  # type: ignore[arg-type]
    ],
    ids=["no events", "announced alone", "a pass that failed keeps what it had",
         "no such layer or too many experts: left out", "in the order they began, none without tokens"],
)  # fmt: skip
def test_recorder_makes_passes_from_events(
    tmp_path: Path, events: list[RoutingEvent | Announcement], expert_ids: list[Any]
) -> None:
    trace = record(tmp_path / "t.npz", *events)
    assert trace.expert_ids.tolist() == expert_ids
    assert trace.pass_ns.tolist() == sorted(
        trace.pass_ns.tolist()
    ) and trace.n_pass == len(expert_ids[0])


def test_recorder_copies_arrays_of_events(tmp_path: Path) -> None:
    ids, weights, inputs = (
        np.zeros((1, 2), np.int32),
        np.zeros((1, 2), np.float32),
        np.zeros((1, 2), np.float32),
    )
    tokens = np.zeros(1, np.int32)
    session = Recorder(tmp_path / "t.npz", TINY, HEADER, inputs=True)
    for step in range(3):
        ids[:], weights[:], inputs[:], tokens[:] = [step, 3], step / 2, step + 1, step
        session.announce(Announcement(0, Phase.DECODE, tokens))
        session.observe(
            RoutingEvent(step, 0, 0, Phase.DECODE, 0, 2, ids, weights, inputs)
        )
    session.close()
    trace = read(tmp_path / "t.npz")
    assert trace.tokens.tolist() == [0, 1, 2] and trace.expert_ids[1].tolist() == [
        [0, 3],
        [1, 3],
        [2, 3],
    ]
    assert trace.weights[1, :, 0].tolist() == [0, 0.5, 1] and trace.inputs[
        1, :, 0
    ].tolist() == [1, 2, 3]
    assert not trace.inputs[0].any()


def test_recorder_fills_missing_inputs_with_zeros_and_clips_to_float16(
    tmp_path: Path,
) -> None:
    huge = np.array([[1e9, np.nan]], np.float32)
    trace = record(
        tmp_path / "t.npz",
        routed(1, 0, [[0, 1], [1, 2]]),
        routed(2, 0, [[2, 3]], inputs=huge, weights=-huge),
        routed(3, 0, [[2, 3]]),
        inputs=True,
    )
    assert trace.inputs[0].tolist() == [[0, 0], [0, 0], [65504, 0], [0, 0]], (
        "what float16 can hold"
    )
    assert trace.weights[0].tolist() == [[0, 0], [0, 0], [-65504, 0], [0, 0]]


def test_recorder_writes_blocks_to_bound_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, add = list[int](), TraceWriter.add

    def counted(self: TraceWriter, block: Trace) -> None:
        add(self, block)
        written.append(block.n_pass)

    monkeypatch.setattr(recorder, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(TraceWriter, "add", counted)
    session = Recorder(
        tmp_path / "t.npz", replace(TINY, n_embd=64), HEADER, inputs=True
    )
    for number in range(40):
        session.observe(
            routed(number, 0, [[0, 1]], inputs=np.ones((1, 64), np.float32))
        )
        assert number - sum(written) <= 4
    session.close()
    assert read(tmp_path / "t.npz").n_pass == 40


def test_recorder_adds_labels_and_dropped_events_to_the_header(tmp_path: Path) -> None:
    session = Recorder(tmp_path / "t.npz", TINY, HEADER)
    session.observe(routed(1, 0, [[0, 1]]))
    session.label(0, "code")
    session.close(dropped=3)
    session.observe(routed(2, 0, [[0, 1]]))
    session.discard()
    trace = read(tmp_path / "t.npz")
    assert trace.header.settings == {
        "threads": 2,
        "dropped": 3,
    } and trace.header.labels == {0: "code"}
    assert trace.n_pass == 1


def test_full_disk_ends_the_recording_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TraceWriter, block: Trace) -> None:
        with self._writing():
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder, "BLOCK_PASSES", 2)
    monkeypatch.setattr(TraceWriter, "add", full)
    session = Recorder(tmp_path / "t.npz", TINY, HEADER)
    for number in range(10):
        session.observe(routed(number, 0, [[0, 1]]))
    with pytest.raises(TraceError, match="No space left on device"):
        session.close()
    session.close()
    assert list(tmp_path.iterdir()) == []


def test_recorder_rejects_a_missing_folder_and_a_shape_without_inputs(
    tmp_path: Path,
) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        Recorder(tmp_path / "missing" / "t.npz", TINY, HEADER)
    with pytest.raises(TraceError, match="n_embd"):
        Recorder(tmp_path / "t.npz", replace(TINY, n_embd=0), HEADER, inputs=True)
    session = Recorder(tmp_path / "t.npz", TINY, HEADER)
    session.discard()
    session.close()
    assert list(tmp_path.iterdir()) == []
