"""Tests docs/evidence and the programs that compute its figures. Pages must match the
recorded results.

Other tests check the texts from which the demo learns: they contain every starter, each
question has one answer, and all commands and options exist.
"""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from command_help import help_of
from traces import SMALL, random_trace

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import NoPrediction
from moegguf.native.events import Phase
from moegguf.trace.format import write
from moegguf.trace.prompts import read_prompts
from moegguf.trace.simulate import Meter
from predictors import texts
from predictors.models.demo import questions
from predictors.study import evidence, figures, regenerate, render, requests, subjects
from predictors.study.arrange import answered, joined
from predictors.study.claims import (
    CLAIMS,
    FAILS,
    HOLDS,
    SAME_SLOTS,
    UNTESTED,
    VERDICTS,
    Claim,
    half,
)
from predictors.study.common import Study
from predictors.study.figures import ratios, spread
from predictors.study.papers import (
    ABLATION,
    BASELINES,
    LINKS,
    Link,
    Workload,
    ahead,
    collection,
    strategy,
    systems_of,
    write_collections,
)
from predictors.study.replay import Replay
from predictors.study.subjects import SUBJECTS

ROOT = Path(__file__).resolve().parents[2]


def test_batches_table_compares_each_batch_with_the_first_per_round() -> None:
    row = {"experts": 4.0, "hit_rate": 0.5, "mb_per_token": 1.25, "peak_mb": 99.6}
    of = {n: evidence.Batch("demo", "25%", 512, n, "fifo", 8, 8) for n in (1, 8)}
    found = {
        of[1]: [{**row, "ts": 10.0}, {**row, "ts": 20.0}],
        of[8]: [{**row, "ts": 20.0}, {**row, "ts": 30.0}],
    }
    base, other = {"token_ms": [2.0, 3.0, 8.0]}, {"token_ms": [1.0, 3.0, 2.0]}
    assert (
        ratios(base, other) == [2.0, 1.0, 4.0]
        and spread(ratios(base, other)) == "2.00 (1.00 to 4.00)"
    )
    table = evidence.batches_table(found).splitlines()
    assert (
        table[3]
        == "| 8 | fifo | 4.0 | 50.0% | 1.25 | 100 | 25.0 (20.0 to 30.0) | 1.75 (1.50 to 2.00) |"
    )
    assert table[2].endswith("| 1.00 (1.00 to 1.00) |")


def test_evidence_pages_equal_the_recorded_results_and_claims_have_verdicts() -> None:
    for page in render.pages():
        text = page.read_text(encoding="utf-8")
        assert render.rendered(text) == text, (
            f"{page.name} is not what is recorded: python -m predictors.study.render"
        )
    assert {claim.paper for claim in CLAIMS} == set(LINKS)
    for claim in CLAIMS:
        assert claim.confidence in ("medium", "low"), claim.text
        for model in SUBJECTS:
            assert claim.verdict(model) in VERDICTS and "{" not in claim.resolved(model)


def test_rows_of_the_routing_table_have_the_right_plural() -> None:
    table = render.routing_table("laboratory")
    assert (
        "| accuracy of `skip`, 1 layer ahead |" in table
        and "| accuracy of `skip`, 2 layers ahead |" in table
    )


def test_rows_with_the_strategys_slots_allow_two_layers_of_the_papers_baselines() -> (
    None
):
    rows = [claim for claim in CLAIMS if SAME_SLOTS in claim.note]
    # SE-MoE keeps the experts of two layers.
    assert "at most two layers' experts" in SAME_SLOTS
    assert any("SE-MoE" in claim.text for claim in rows)


def test_claim_holds_if_all_conditions_hold_and_recovery_needs_three_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    systems = {
        "none": {"token_ms": [4.0, 6.0, 9.0] * 9},
        "own": {"token_ms": [2.0, 4.0, 6.0] * 9},
    }
    monkeypatch.setattr(
        figures,
        "read_result",
        lambda name: {"figures": {"systems": systems, "share": 0.5}},
    )
    gain, share = (
        ("speed,step,own,none", 1.4),
        ("share,step,share", "number,step,share"),
    )
    assert Claim("promoe", "", (gain, share), "").verdict("demo") == HOLDS
    assert (
        Claim("promoe", "", (gain, ("share,step,share", 0.6)), "").verdict("demo")
        == FAILS
    )
    assert Claim("promoe", "", UNTESTED, "").verdict("demo") == UNTESTED
    assert (
        Claim("promoe", "", (("speed,step,another,none", 1.4),), "").verdict("demo")
        == UNTESTED
    )
    text = Claim(
        "promoe",
        "",
        (),
        "{speed,step,own}, {share,step,share}. {share,step,another} is missing.",
    )
    assert text.resolved("demo") in (
        "1.50 [1.50 to 1.50], 50.0 %.",
        "1.50 [1.50 to 2.00], 50.0 %.",
    )
    known = [100.0] * 8
    assert (
        figures._recovered(
            {"shifted_ms": [130.0, 120, 100, 100, 101, 99, 99, 99], "known_ms": known}
        )
        == 2
    )
    assert figures._recovered({"shifted_ms": [110.0] * 8, "known_ms": known}) is None


def test_recorded_result_has_its_command_commit_machine_and_trace() -> None:
    names = [
        path.relative_to(regenerate.RESULTS).with_suffix("")
        for path in regenerate.RESULTS.glob("*/*.json")
    ]
    live = {f"live-{paper}" for paper in LINKS}
    assert {name.parent.name for name in names} <= set(SUBJECTS)
    assert {name.name for name in names} <= {*regenerate.STEPS, *live, subjects.CARD}
    found = {
        str(name): figures.read_result(str(name))
        for name in names
        if name.name != subjects.CARD
    }
    assert found
    for name, result in found.items():
        assert (
            result
            and {"command", "commit", "machine", "reporting_trace", "figures"}
            <= result.keys()
        )
        assert name.partition("/")[0] in regenerate.recordings()


def test_is_current_compares_code_version_trace_and_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = regenerate.key_of("laboratory", "link-promoe")
    recorded = {"key": key, "figures": {}}
    monkeypatch.setattr(regenerate, "read_result", lambda name: recorded)
    assert regenerate.is_current("laboratory/link-promoe")
    assert not regenerate.is_current("laboratory/link-promoe-50"), (
        "another share of the experts"
    )
    monkeypatch.setattr(regenerate, "recordings", lambda: {"laboratory": "another"})
    assert not regenerate.is_current("laboratory/link-promoe")
    monkeypatch.undo()
    monkeypatch.setattr(regenerate, "read_result", lambda name: recorded)
    monkeypatch.setattr(regenerate, "CODE_VERSION", key["code"] + 1)
    assert not regenerate.is_current("laboratory/link-promoe")


def test_judged_claim_with_outdated_figures_is_marked_as_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = next(claim for claim in CLAIMS if "link-moe-infinity" in claim.steps)
    for current in (True, False):
        monkeypatch.setattr(render, "is_current", lambda name, current=current: current)
        assert (render.EARLIER in render._judged(claim, "laboratory")) != current


def test_requests_load_splits_roles_in_order_and_checks_the_hashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(folder: Path) -> dict[str, texts.Texts]:
        return {
            kind: texts.Texts(
                [f"{kind} {i} " + "word " * 120 for i in range(texts.N_REQUESTS)],
                [],
                [],
            )
            for kind in texts.SOURCES
        }

    monkeypatch.setattr(texts, "load", found)
    loaded = requests.load(tmp_path)
    assert [request.role for request in loaded] == [
        role for role, n in requests.ROLES.items() for _ in range(n)
    ]
    assert {request.kind for request in loaded[-80:]} == set(texts.SOURCES)
    requests.write_prompts(tmp_path / "r.jsonl", loaded)
    read = read_prompts(tmp_path / "r.jsonl")
    assert [prompt.text + (prompt.completion or "") for prompt in read] == [
        request.text for request in loaded
    ]
    with pytest.raises(ValueError, match="but the manifest has"):
        requests.checked(tmp_path)


def test_interrupted_record_role_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(
        model: Path, prompts: object, out: Path, *_: object, **options: object
    ) -> None:
        write(out, random_trace(n_sequences=1, n_prefill=6, n_decode=0))

    monkeypatch.setattr(requests, "record", recorded)
    monkeypatch.setattr(
        requests.library, "llama_cpp", Mock(side_effect=KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        requests.record_role(
            tmp_path / "m.gguf", [], tmp_path / "learning.trace", inputs=False
        )
    assert not list(tmp_path.iterdir())


def test_answered_splits_a_single_pass_into_prompt_and_decode_passes() -> None:
    trace = random_trace(n_sequences=2, n_prefill=6, n_decode=0)
    found = answered(trace, {0: 4, 1: 9})
    assert np.diff(found.pass_start).tolist() == [4, 1, 1, 6]
    assert found.pass_phase.tolist() == [
        Phase.PREFILL,
        Phase.DECODE,
        Phase.DECODE,
        Phase.PREFILL,
    ]
    assert found.pass_sequence.tolist() == [0, 0, 0, 1]
    assert np.array_equal(found.expert_ids, trace.expert_ids)


def test_workload_replays_all_requests_after_a_warm_up(tmp_path: Path) -> None:
    trace = random_trace(n_sequences=8, n_labels=3)
    study = Study(trace.select(range(2, 8)), Artifacts(None, "", tmp_path))
    every = Workload.of(study, trace.select([0, 1]))
    assert every.counted == [2, 3, 4, 5, 6, 7]
    workload = Workload.of(study, trace.select([0, 1]), 4)
    labels = trace.header.labels
    assert sorted(labels[sequence] for sequence in workload.counted) == sorted(
        2 * ["kind0", "kind1", "kind2"]
    )
    systems = {name: strategy(name) for name in ("none", "lru")} | {
        "counting": BASELINES["moe-infinity"]["counting"]
    }
    found = workload.systems(systems, 40, LINKS["promoe"])
    assert all(
        len(of["token_ms"]) == 6 and 0 < of["ready"] < 1 for of in found.values()
    )
    assert min(ratios(found["none"], found["lru"])) >= 1
    assert all(of["prompt_ms"] and of["ahead"] is None for of in found.values())
    for of in found.values():
        assert np.mean(of["by_request"]["ready"]) == pytest.approx(
            of["ready"], abs=1e-3
        )
        assert np.mean(of["by_request"]["experts"]) == pytest.approx(
            of["experts"], abs=0.01
        )


class EventByEvent(Replay):
    """A replay that handles all events separately, as replays with predictions do."""

    def _replay_passes(self, context: object, meter: Meter) -> None:
        self._replay_events(meter.store, None, meter)


def test_replay_of_whole_passes_counts_like_a_replay_of_single_events() -> None:
    trace = random_trace(n_sequences=3)
    options = LINKS["promoe"].options(trace.shape)
    whole, single = (
        of(trace, LRU, NoPrediction(trace.shape), 20, options).counted()
        for of in (Replay, EventByEvent)
    )
    assert whole.keys() == single.keys() and whole["lookups"].sum() > 0
    assert all(np.array_equal(whole[name], single[name]) for name in whole)


def test_joined_puts_the_warm_up_first_with_new_sequence_numbers() -> None:
    trace = random_trace(n_sequences=4, with_inputs=True)
    found = joined(trace.select([1, 2]), trace.select([0, 3]))
    assert found.sequences() == [3, 6, 1, 2]
    assert found.header.labels == {3: "kind0", 6: "kind1", 1: "kind1", 2: "kind0"}
    parts = [trace.select([sequence]) for sequence in (0, 3, 1, 2)]
    assert np.array_equal(found.tokens, np.concatenate([part.tokens for part in parts]))
    assert found.inputs is not None
    assert np.array_equal(found.inputs[:, -1], parts[-1].inputs[:, -1])  # type: ignore[index]
    assert found.pass_start[-1] == found.n_tokens == len(found.sequence_of)


def test_link_scales_expert_time_to_the_load_of_the_paper() -> None:
    link = Link(expert_us=3000, layer_us=1500, n_expert_used=2)
    shape = replace(SMALL, n_expert_used=8, expert_bytes=6000)
    assert (
        shape.n_expert_used * link.expert_us_of(shape) / link.layer_us
        == 2 * 3000 / 1500
    )
    options = link.options(shape)
    assert (
        options.link_bytes_per_s == pytest.approx(6000 / 750e-6)
        and options.layer_pass_us == 1500
    )
    assert LINKS["duoserve"].expert_us_of(shape) * 8 / LINKS["duoserve"].layer_us == 4


def test_compared_systems_have_equal_sweep_settings_and_keep_their_strategies() -> None:
    for paper in LINKS:
        sweeps = {system.store.sweep for system in systems_of(paper).values()}
        assert sweeps == {strategy(paper).store.sweep}
        assert {"none", "lru", "moegguf", paper} <= systems_of(paper).keys()
    assert systems_of("promoe", 2)["promoe"].prefetch.window == 2  # type: ignore[union-attr]
    assert systems_of("promoe")["promoe"].prefetch == strategy("promoe").prefetch
    assert ahead("promoe", 1).store == strategy("promoe").store


def test_ablation_starts_like_the_paper_and_adds_one_part_at_a_time() -> None:
    parts = [
        (
            bool(of.prefetch),
            of.store.chunked,
            of.store.demand_first and of.store.preempt,
            of.store.overlap,
        )
        for of in list(ABLATION.values())[1:]
    ]
    assert [sum(of) for of in parts] == [1, 2, 3, 4]
    assert all(
        not set(np.flatnonzero(one)) - set(np.flatnonzero(other))
        for one, other in pairwise(parts)
    )
    base = next(iter(ABLATION.values()))
    assert base.prefetch is None and not base.store.overlap and not base.store.sweep


def test_baselines_of_the_papers_replay_as_described(tmp_path: Path) -> None:
    # Across all 24 layers, a token uses more experts than a single layer has.
    shape = replace(SMALL, n_layer=24, layers=tuple(range(24)))
    trace = random_trace(shape, n_sequences=8, n_labels=3)
    link = LINKS["duoserve"]
    workload = Workload.of(
        Study(trace.select(range(2, 8)), Artifacts(None, "", tmp_path)),
        trace.select([0, 1]),
    )
    systems = {
        name: systems_of("duoserve")[name]
        for name in ("none", "on demand", *BASELINES["expertflow"])
    }
    pool = workload.systems(
        {"on demand": systems["on demand"]}, 2 * shape.n_expert_used, link
    )["on demand"]
    n_layer, used_ms = (
        len(shape.layers),
        shape.n_expert_used * link.expert_us_of(shape) / 1e3,
    )
    assert pool["ready"] < 0.1 and pool["experts"] > 0.9 * n_layer * shape.n_expert_used
    assert (
        pool["token_ms"]
        == [pytest.approx(n_layer * (used_ms + link.layer_us / 1e3), rel=0.1)] * 6
    )
    found = workload.systems(systems, n_layer * shape.n_expert // 2, link)
    assert found["on demand"]["ready"] == found["none"]["ready"], (
        "with as many slots it is an LRU cache"
    )
    whole, first = found["whole next layer"], found["whole next layer first"]
    assert whole["experts"] > 2 * found["none"]["experts"]
    assert sum(whole["ahead"]) == pytest.approx(1, abs=1e-3)
    assert min(ratios(first, whole)) > 1, "misses wait there for all of the next layer"


def test_together_counts_layer_time_once_for_requests_of_a_group(
    tmp_path: Path,
) -> None:
    study = Study(random_trace(n_sequences=6), Artifacts(None, "", tmp_path))
    workload = Workload.together(study, 2, 2)
    assert workload.counted == [2, 4]
    trace = study.trace
    n_slots = len(trace.shape.layers) * trace.shape.n_expert
    found = workload.systems({"none": strategy("none")}, n_slots, LINKS["promoe"])
    layers_ms = len(trace.shape.layers) * LINKS["promoe"].layer_us / 1e3
    assert (
        found["none"]["ready"] > 0.99
        and found["none"]["token_ms"] == [pytest.approx(layers_ms, rel=0.05)] * 2
    )
    large = Workload.together(study, 4, 3)
    assert large.counted == [4, 8, 12] and len(large.study.trace.sequences()) == 16


def test_claim_bounds_are_half_of_the_stated_gain() -> None:
    speeds = {bound for claim in CLAIMS if not isinstance(claim.judged, str) for question, bound in claim.judged
              if question.split(",")[0] in ("speed", "first", "whole", "stall")}  # fmt: skip
    stated = (
        1.0,
        0.98,
        *map(
            half,
            (1.09, 1.16, 1.21, 1.33, 1.34, 1.37, 1.42, 1.49, 1.78, 1.96, 2, 2.12, 2.6),
        ),
    )
    assert speeds - {bound for bound in speeds if isinstance(bound, str)} <= set(stated)


def test_write_collections_keeps_the_last_requests(tmp_path: Path) -> None:
    trace = random_trace(n_sequences=5)
    trace = replace(trace, header=replace(trace.header, fingerprint="ab" * 8))
    artifacts = Artifacts(None, "ab" * 8, tmp_path)
    write_collections(tmp_path, [trace], 3)
    found = artifacts.collection(trace.shape)
    assert found is not None and found.n_entries == 3
    assert found.state[0].sum() == 24 * trace.shape.n_expert_used * len(
        trace.shape.layers
    )
    write_collections(tmp_path, [trace], 0)
    assert artifacts.collection(trace.shape) is None
    write_collections(tmp_path, [trace, trace.select([0])])
    assert artifacts.collection(trace.shape).n_entries == 6  # type: ignore[union-attr]
    windows = collection(trace, 12).state
    assert len(windows) == 12 and windows[
        0
    ].sum() == 12 * trace.shape.n_expert_used * len(trace.shape.layers)


ANSWERS = sorted(set(questions.answers().values()))
OPTIONS = (questions.ROOT / "docs" / "options.md").read_text(encoding="utf-8")
COMMANDS = help_of()


def test_starters_are_taught_with_one_answer_each_and_conversations_use_taught_answers() -> (
    None
):
    starters = questions.starters()
    assert "What does moegguf do?" in starters and "Who are you?" in starters
    assert set(starters) <= questions.answers().keys()
    asked = [
        (question, entry["answer"])
        for entry in questions.lines(questions.TAUGHT)
        for question in entry.get("ask", ())
    ]
    assert len(dict(asked)) == len(set(asked))
    # An assistant's message may be the beginning of an answer, because a system message
    # may request one sentence.
    for entry in questions.lines(questions.TAUGHT):
        for message in entry.get("messages", ()):
            assert message["role"] != "assistant" or any(
                one.startswith(message["content"]) for one in ANSWERS
            ), message


def test_heldout_questions_have_taught_answers_and_are_not_taught() -> None:
    found = questions.heldout()
    assert len(found) >= 80 and all(one.right <= set(ANSWERS) for one in found)
    assert not {one.question for one in found} & questions.answers().keys()


@pytest.mark.parametrize(
    "answer", [text for text in ANSWERS if re.search(r"moegguf [a-z]+|--[a-z]", text)]
)
def test_answers_name_only_commands_and_options_that_exist(answer: str) -> None:
    for option in re.findall(r"--[a-z][a-z-]+", answer):
        assert f"`{option}`" in OPTIONS or option in ("--help", "--verbose"), option
    for command in re.findall(r"(?:: |or |with )moegguf ([a-z]+)", answer):
        assert re.search(rf"^\W*{command}\b", COMMANDS, re.MULTILINE), command


def test_template_of_the_demo_file_equals_the_recipes_template() -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers of the laboratory")
    from moegguf.models.catalog import Catalog
    from moegguf.models.details import details
    from recipes.demo.tokenizer import CHAT_TEMPLATE

    assert details(Catalog().find("demo")).template == CHAT_TEMPLATE
