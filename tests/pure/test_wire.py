"""Tests messages between server and worker.

Messages survive encoding and decoding, and invalid messages are refused. Other tests
check which deltas are sent together, and the failure line in a worker's log.
"""

import json
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moegguf.errors
from moegguf.engine.cost import Placement, Speeds
from moegguf.engine.load_spec import Budgets, LoadSpec
from moegguf.engine.memory import ContextPlan, MemoryNeeds
from moegguf.engine.plan import MemoryPlan, PlacementPlan, Plan, SupplyPlan
from moegguf.engine.stats import Stats
from moegguf.errors import ContextError, MoeggufError, OptionError, WorkerError
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    PromptProgress,
    Request,
    Sampling,
    TokenChance,
    TokenLogprob,
    ToolCall,
    join,
)
from moegguf.gguf.projector import ProjectorHeader
from moegguf.gguf.reader import Shard
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link
from moegguf.serving import wire
from moegguf.serving.events import Snapshot
from moegguf.serving.memory_budget import LoadConfig
from moegguf.serving.wire import Ready, build, build_error, decode, encode, encode_error
from moegguf.serving.worker import DELTA_S, Events, Outbox
from moegguf.serving.worker_process import failure_line

STATS = Stats(tokens=5, stall_s=0.25, pool_bytes=1 << 40)

SPEEDS = Speeds(1e9, Link(2e9, 1e-5), 3e9)
SLOTS = Placement("slots", 3.5, slot_bytes=7, hit_rate=0.5)
PLAN = Plan(
    (MemoryPlan("GPU0", (0, 1), 2, 17), MemoryPlan(None, (2,), 2, 17, 99, 1)), 7, 8, 6,
    ContextPlan(4096, n_seq_max=2), 512, MemoryNeeds(1, 2, 3), SupplyPlan(n_staging=2),
    reasons=("a reason",), tensor_split=(2.0, 1.0),
    placement=PlacementPlan((SLOTS,), SLOTS, "fast", SPEEDS, "put in", 30),
)  # fmt: skip
SPEC = LoadSpec(
    4096, type_k=8, flash_attn=None, budgets=Budgets.of({"expert_cache": "4GiB", "vram_cache": "50%,auto"}),
    projector=ProjectorHeader(Shard(Path("/a b/p.gguf"), 1, 2, 3, 4, 5), "mlp", 6, 7, 8, 9, 10),
    mirror=("/b", "/c"), tensor_split=(0.5, 1.5), store=StoreOptions(overlap=False),
)  # fmt: skip
LIKELY = TokenLogprob(
    7, b"t", -0.5, (TokenChance(8, b"\xe6\x97", -1.0), TokenChance(9, b"v", -2.0))
)
OBJECTS = [
    Request(prompt="hi"),
    Request(messages=({"role": "user", "content": "ä\n\u2028\ud800"}, {"role": "tool", "content": None})),
    Request(
        messages=(), context=(1, "a", 3), suffix="s",
        tools=({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},),
        tool_choice="required", format={"type": "object", "properties": {}}, think="high", template="{{ x }}",
        template_options={"a": [1, None]}, truncate=False, n_logprobs=0,
        sampling=Sampling(temperature=0.0, seed=2**63, stop=("a", "\n"), logit_bias={5: -1.5, 7: 2.0},
                          text_bias=(("a", 1.5),)),
    ),
    Request(prompt="", think=False, format="json"),
    Delta("text"),
    Delta(thinking="hm"),
    Delta("t", "h", (ToolCall("1", "f", {"x": 1.5}),), (LIKELY,), tokens=(7, 8)),
    PromptProgress(10, 2, 5, 0.5),
    AnswerSummary(
        1, 2, 3, prompt_s=0.1, answer_s=0.2, total_s=0.3, finish="length", stop_string="END", cut_messages=4,
        cut_tokens=5, n_shifts=6, context=(1, 2), stats=STATS, answer_stats=STATS,
    ),
    AnswerSummary(),
    STATS,
    Snapshot("a:latest", (0, 2), 3, b"\x00\x01\x02\x02\x01\x00", b"\xff" * 6, b"\x00" * 6, STATS, True, 12.5, 3.0),
    LoadConfig("a", "/a b", SPEC, PLAN, {"policy": "lru"}),
    Ready(512, 4),
]  # fmt: skip


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: type(item).__name__)
def test_objects_survive_encoding_and_decoding(item: Any) -> None:
    line = encode({"kind": "x", "item": item})
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert build(type(item), decode(line)["item"]) == item


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_survives_encoding_and_decoding(text: str, thinking: str) -> None:
    delta = Delta(text, thinking)
    assert build(Delta, decode(encode({"kind": "x", "item": delta}))["item"]) == delta


def test_encode_sends_only_fields_that_differ_from_defaults() -> None:
    assert json.loads(encode({"kind": "event", "Delta": Delta("a")})) == {
        "kind": "event",
        "Delta": {"text": "a"},
    }
    line = encode(
        {
            "kind": "x",
            "item": Request(prompt="", template_options=MappingProxyType({"a": 1})),
        }
    )
    assert build(Request, decode(line)["item"]).template_options == {"a": 1}


@pytest.mark.parametrize(
    "name",
    sorted(
        name for name, kind in vars(moegguf.errors).items() if isinstance(kind, type)
    ),
)
def test_encoded_moegguf_error_keeps_its_class(name: str) -> None:
    kind = getattr(moegguf.errors, name)
    if issubclass(kind, MoeggufError):
        error = build_error(json.loads(json.dumps(encode_error(kind("why")))))
        assert type(error) is kind and str(error) == "why"


@pytest.mark.parametrize(
    "name", ["ValueError", "Iterable", "difflib", "__name__", "SystemExit", ""]
)
def test_build_error_turns_other_classes_into_moegguf_error(name: str) -> None:
    error = build_error({"class": name, "message": "why"})
    assert type(error) is MoeggufError and "why" in str(error)
    assert str(build_error(encode_error(ContextError()))) == "ContextError", (
        "one without text names its class"
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'{"a":1}',
        b'{"kind":1}',
        b"\xff",
        b"[" * 9999,
    ],
)
def test_decode_rejects_an_invalid_message(line: bytes) -> None:
    with pytest.raises(WorkerError):
        decode(line)


@pytest.mark.parametrize(
    "data",
    [None, 5, [], {"txt": "a"}, {"tool_calls": 5}, {"logprobs": [{"text": "a"}]}],
)
def test_build_rejects_an_invalid_delta(data: Any) -> None:
    with pytest.raises(WorkerError, match="Delta"):
        build(Delta, data)


def test_build_puts_the_text_of_another_error_into_brackets_without_its_full_stop() -> (
    None
):
    data = json.loads(encode({"speeds": SPEEDS}))["speeds"] | {"disk_bytes_per_s": -1}
    with pytest.raises(
        WorkerError,
        match=r"not a valid Speeds \(speeds must be .*; give other numbers\)\.$",
    ):
        build(Speeds, data)


def test_encode_rejects_long_messages_and_values_outside_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(OptionError, match=r"\d{4} bytes.*fewer than 1000"):
        encode({"kind": "generate", "request": Request(prompt="x" * 2000)})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), deep, {1j: 2}):
        with pytest.raises(OptionError, match="JSON"):
            encode({"kind": "x", "value": value})


COMPUTE = "graph_compute: ggml_backend_sched_graph_compute_async"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("all is well\n", ""),
        (
            "a\nggml.c:12: GGML_ASSERT(x) failed\n[New LWP 5]\n",
            "ggml.c:12: GGML_ASSERT(x) failed",
        ),
        ("Traceback\nMemoryError: no memory\n\n", "MemoryError: no memory"),
        (f"an error\n{COMPUTE} failed with error 1\n", "an error"),
        (f"{COMPUTE} failed with error -1\n", f"{COMPUTE} failed with error -1"),
        ("what(): " + "x" * 999, "what(): " + "x" * 292),
    ],
)
def test_failure_line_finds_the_error_in_a_log(text: str, expected: str) -> None:
    assert failure_line(text) == expected


def test_outbox_sends_the_lines_of_a_block_in_one_call_even_after_an_error() -> None:
    calls = list[bytes]()
    outbox = Outbox(SimpleNamespace(sendall=calls.append))  # type: ignore[arg-type]

    def fill_and_fail() -> None:
        with outbox.one_call():
            outbox.put(b"b\n")
            outbox.put(b"c\n")
            assert calls == [b"a\n"]
            raise RuntimeError

    outbox.put(b"a\n")
    with pytest.raises(RuntimeError):
        fill_and_fail()
    with outbox.one_call():
        pass
    outbox.put(b"d\n")
    assert calls == [b"a\n", b"b\nc\n", b"d\n"]


def sent(
    texts_and_waits: list[tuple[str, float]], *, stream: bool = True
) -> tuple[list[str], str]:
    """Returns the texts of the deltas that are sent before an answer ends, and the text
    that is sent when it ends.

    `texts_and_waits` lists the text of each delta, and the seconds until the next one.
    """
    found, now_s = list[str](), 1000.0
    events = Events(
        stream=stream, send=lambda delta: found.append(delta.text),  # type: ignore[union-attr]
        end=lambda *_: None, clock=lambda: now_s,
    )  # fmt: skip
    for text, wait_s in texts_and_waits:
        events.on_delta(Delta(text))
        now_s += wait_s
    before = list(found)
    events.on_end(AnswerSummary(), None)
    return before, "".join(found[len(before) :])


def test_events_send_the_first_delta_at_once_and_join_frequent_ones() -> None:
    often, seldom = DELTA_S * 0.4, DELTA_S * 1.1
    assert sent([(letter, often) for letter in "abcde"]) == (["a", "bcd"], "e")
    assert sent([(letter, seldom) for letter in "abc"]) == (["a", "b", "c"], "")
    assert sent([(letter, 1000) for letter in "abc"], stream=False) == ([], "abc")


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0, 0.1))))
def test_events_lose_no_text(steps: list[tuple[str, float]]) -> None:
    before, rest = sent(steps)
    assert "".join(before) + rest == "".join(text for text, _ in steps)


def test_join_keeps_all_fields_in_order() -> None:
    calls = tuple(ToolCall(str(i), "f", {}) for i in range(2))
    logprobs = tuple(TokenLogprob(n, b"ab"[n : n + 1], -1.0) for n in range(2))
    deltas = [
        Delta("a", "x", calls[:1], logprobs[:1]),
        Delta("b", "y", calls[1:], logprobs[1:]),
    ]
    assert join(deltas) == Delta("ab", "xy", calls, logprobs)
    assert join(deltas[:1]) is deltas[0]
