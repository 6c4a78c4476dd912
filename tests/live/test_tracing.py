"""A trace recorded live equals what another listener received in the same run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import Llama, Load, Reference, TinyModel, greedy_logits, random_prompt

from moegguf.bench.record import RecordOptions, record
from moegguf.engine.recording import TraceOptions
from moegguf.errors import GenerationCancelled, TraceError
from moegguf.gguf.fingerprint import fingerprint
from moegguf.native import library
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import EVERY_PASS, ListenOptions
from moegguf.trace.format import read
from moegguf.trace.prompts import Prompt
from moegguf.trace.recorder import Recorder
from moegguf.trace.trace import Trace

TIGHT: dict[str, Any] = {"expert_cache": "40%", "n_ubatch": 4}


class SecondListener:
    """Receives what the recorder receives."""

    listen_options = ListenOptions(weights=True, everything=True, max_input_tokens=EVERY_PASS)

    def __init__(self) -> None:
        self.passes: list[list[RoutingEvent]] = []
        self.announced: list[Announcement] = []

    def announce(self, announcement: Announcement) -> None:
        self.announced.append(announcement)

    def observe(self, event: RoutingEvent) -> None:
        if not self.passes or self.passes[-1][0].pass_ != event.pass_:
            self.passes.append([])
        self.passes[-1].append(event)


def load_recording(load: Load, path: Path, out: Path, **options: Any) -> tuple[Llama, SecondListener]:
    inputs = options.pop("inputs", False)
    llm = load(path, trace=TraceOptions(out, inputs=inputs), **{**TIGHT, **options})
    second = SecondListener()
    llm.session.listeners.add(second)
    return llm, second


def assert_same(trace: Trace, second: SecondListener) -> None:
    """The trace, and its events, equal what the second listener received."""
    expected = [event for events in second.passes for event in events]
    events = list(trace.events())
    recorded = [event for event in events if isinstance(event, RoutingEvent)]
    assert trace.n_pass == len(second.passes)
    assert trace.pass_sequence.tolist() == [events[0].sequence for events in second.passes]
    assert trace.pass_phase.tolist() == [events[0].phase for events in second.passes]
    assert len(recorded) == len(expected)
    for one, other in zip(recorded, expected, strict=True):
        assert one[2:6] == other[2:6]  # sequence, phase, first_token, il
        assert np.array_equal(one.expert_ids, other.expert_ids)
        np.testing.assert_allclose(one.weights, other.weights, atol=1e-3)
    announced = [event for event in events if isinstance(event, Announcement)]
    for one, other in zip(announced, second.announced, strict=True):
        assert one[:2] == other[:2]  # sequence, phase
        assert np.array_equal(one.tokens, other.tokens)
    assert trace.tokens.tolist() == [token for event in second.announced for token in event.tokens]


@pytest.mark.parametrize("logits_all", [True, False])
@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-deepseek2"])
def test_a_trace_equals_what_another_listener_received(
    tiny: TinyModel, load: Load, reference: Reference, tmp_path: Path, preset: str, logits_all: bool
) -> None:
    llm, second = load_recording(load, tiny(preset), tmp_path / "t", logits_all=logits_all)
    for n, label in enumerate(("prose", "code")):
        llm.recording.label(llm.context.next_request, label)
        llm.create_completion(random_prompt(llm, 10, seed=n), max_tokens=6, temperature=0)
    stats = llm.stats()
    llm.close()
    trace = read(tmp_path / "t")
    assert_same(trace, second)
    assert trace.sequences() == [0, 1]
    assert trace.header.labels == {0: "prose", 1: "code"}
    assert trace.header.fingerprint == fingerprint(llm.layout)
    assert trace.shape.layers == tuple(layer.il for layer in llm.layout.layers)
    settings = trace.header.settings
    assert settings["n_slots"] == llm.plan.n_slots
    assert settings["events_dropped"] == 0
    for name in ("lookups", "hits_ready", "hits_late", "misses", "evictions"):
        assert settings[name] == getattr(stats, name)
    assert trace.pass_phase[0] == Phase.PREFILL
    assert (trace.decode().pass_phase == Phase.DECODE).all()
    assert (np.diff(trace.decode().pass_start) == 1).all()


def test_recording_changes_no_bit_and_includes_resident_models(
    tiny: TinyModel, load: Load, reference: Reference, tmp_path: Path
) -> None:
    llm, second = load_recording(load, tiny(), tmp_path / "t", expert_cache="100%", n_ubatch=512)
    assert np.array_equal(greedy_logits(llm), reference(tiny()))
    llm.close()
    trace = read(tmp_path / "t")
    assert_same(trace, second)
    assert trace.n_tokens == 232
    assert llm.plan.resident


def test_a_failed_or_cancelled_pass_does_not_break_the_file(tiny: TinyModel, load: Load, tmp_path: Path) -> None:
    llm, second = load_recording(load, tiny(), tmp_path / "t")
    prompt = random_prompt(llm, 12)
    greedy_logits(llm, prompt, 2)
    library.arm_fault("read", 1, sticky=True)
    with pytest.raises(Exception, match="read"):
        greedy_logits(llm, random_prompt(llm, 12, seed=1), 2)
    library.arm_fault("read", 0)
    llm.cancel()
    with pytest.raises(GenerationCancelled):
        llm.eval([1])
    llm.resume()
    greedy_logits(llm, prompt, 3)
    llm.close()
    trace = read(tmp_path / "t")
    assert trace.n_pass == len(second.passes)
    whole = trace.select([trace.sequences()[-1]])
    assert whole.n_tokens == 15
    assert (whole.expert_ids >= 0).all()
    for _ in trace.events():
        pass


def test_closed_in_the_middle_of_a_pass(tiny: TinyModel, load: Load, tmp_path: Path) -> None:
    llm, _ = load_recording(load, tiny(), tmp_path / "t")
    steps = llm.generate(random_prompt(llm, 9), temp=0)
    next(steps)
    llm.close()
    assert read(tmp_path / "t").n_tokens >= 9
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_where_no_file_can_be_made_nothing_is_loaded(tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        Llama(tiny(), verbose=False, trace=tmp_path / "nowhere" / "t", **TIGHT)


def test_a_trace_that_cannot_be_completed_is_an_error_and_the_model_is_freed(
    tiny: TinyModel, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = load_recording(load, tiny(), tmp_path / "t")
    session = llm.session
    greedy_logits(llm, random_prompt(llm, 5), 2)

    def full(*_: object, **__: object) -> None:
        raise TraceError("no space left")

    monkeypatch.setattr(Recorder, "close", full)
    with pytest.raises(TraceError, match="no space"):
        llm.close()
    assert session.store._handle is None
    llm.close()


def test_recording_prompts_with_and_without_a_completion(tiny: TinyModel, tmp_path: Path) -> None:
    prompts = [Prompt("once upon", "prose"), Prompt("def f", "code", n_predict=4, completion="(x): return x")]
    done: list[tuple[str, float]] = []
    options = RecordOptions(n_predict=5)
    stats = record(
        tiny(), prompts, tmp_path / "t", options, lambda *said: done.append(said), n_ctx=256, n_threads=1,
        verbose=False, **TIGHT,
    )  # fmt: skip
    trace = read(tmp_path / "t")
    assert {what for what, _ in done[:-2]} == {"loading the model"}
    assert done[-2:] == [("prompt 1 of 2", 0.0), ("prompt 2 of 2", 0.5)]
    assert trace.header.labels == {0: "prose", 1: "code"}
    assert trace.sequences() == [0, 1]
    assert stats.tokens == trace.n_tokens
    assert 1 <= trace.select([0]).decode().n_tokens <= 5
    assert trace.select([1]).decode().n_tokens == 4


@pytest.mark.parametrize(("given", "kind"), [({}, "AUTO"), ({"flash_attn": False}, "DISABLED")])
def test_attention_is_that_of_run_while_recording(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], kind: str
) -> None:
    opened = list[int]()

    class Opened(Llama):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(self.context_params.flash_attn_type)

    monkeypatch.setattr("moegguf.bench.record.Llama", Opened)
    prompts = [Prompt("once", "prose")]
    record(tiny(), prompts, tmp_path / "t", RecordOptions(2), n_ctx=64, n_threads=1, verbose=False, **given)
    assert opened == [getattr(library.llama_cpp(), f"LLAMA_FLASH_ATTN_TYPE_{kind}")]


def test_what_fails_while_recording_leaves_no_file(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("an older trace")

    def progress(what: str, share: float) -> None:
        if what == "prompt 2 of 2":
            raise RuntimeError("enough")

    prompts = [Prompt("once upon", "prose")] * 2
    with pytest.raises(RuntimeError, match="enough"):
        record(tiny(), prompts, tmp_path / "t", RecordOptions(2), progress, n_ctx=256, n_threads=1, verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert (tmp_path / "t").read_text() == "an older trace"
