"""The laboratory's commands in docs/evidence and predictors/README.md exist; tables are what was recorded; what the
demo is taught: every starter, one answer for each question, and only commands and options that exist."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_help import help_of
from traces import SMALL, random_trace

from moegguf.controller.artifacts import Artifacts
from moegguf.native.events import Phase
from moegguf.trace.prompts import read_prompts
from predictors import texts
from predictors.models.demo import questions
from predictors.study import evidence, figures, regenerate, render, requests
from predictors.study.arrange import answered
from predictors.study.claims import CLAIMS, FAILS, HOLDS, UNTESTED, VERDICTS, Claim
from predictors.study.common import Study
from predictors.study.figures import ratios, spread
from predictors.study.papers import BASELINES, LINKS, Workload, collection, write_collections

ROOT = Path(__file__).resolve().parents[2]


def test_batches_are_compared_with_the_first_round_by_round() -> None:
    row = {"experts": 4.0, "hit_rate": 0.5, "mb_per_token": 1.25, "peak_mb": 99.6}
    of = {n: evidence.Batch("demo", "25%", 512, n, "fifo", 8, 8) for n in (1, 8)}
    found = {of[1]: [{**row, "ts": 10.0}, {**row, "ts": 20.0}], of[8]: [{**row, "ts": 20.0}, {**row, "ts": 30.0}]}
    base, other = {"token_ms": [2.0, 3.0, 8.0]}, {"token_ms": [1.0, 3.0, 2.0]}
    assert ratios(base, other) == [2.0, 1.0, 4.0] and spread(ratios(base, other)) == "2.00 (1.00 to 4.00)"
    table = evidence.batches_table(found).splitlines()
    assert table[3] == "| 8 | fifo | 4.0 | 50.0% | 1.25 | 100 | 25.0 (20.0 to 30.0) | 1.75 (1.50 to 2.00) |"
    assert table[2].endswith("| 1.00 (1.00 to 1.00) |")


def test_tables_are_what_was_recorded_and_every_claim_has_a_verdict() -> None:
    for page in render.pages():
        text = page.read_text(encoding="utf-8")
        assert render.rendered(text) == text, f"{page.name} is not what is recorded: python -m predictors.study.render"
    assert {claim.paper for claim in CLAIMS} == set(LINKS)
    for claim in CLAIMS:
        assert claim.verdict in VERDICTS and claim.confidence in ("medium", "low"), claim.text
        assert "{" not in claim.resolved


def test_a_claim_holds_where_all_its_conditions_do_and_a_shift_is_over_after_three_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    systems = {"none": {"token_ms": [4.0, 6.0, 9.0]}, "own": {"token_ms": [2.0, 4.0, 10.0]}}
    monkeypatch.setattr(figures, "read_result", lambda name: {"figures": {"systems": systems, "share": 0.5}})
    gain, share = ("speed,step,own,none", 1.4), ("share,step,share", "number,step,share")
    assert Claim("promoe", "", (gain, share), "").verdict == HOLDS
    assert Claim("promoe", "", (gain, ("share,step,share", 0.6)), "").verdict == FAILS
    assert Claim("promoe", "", UNTESTED, "").verdict == UNTESTED
    assert Claim("promoe", "", (), "{speed,step,own}, {share,step,share}").resolved == "1.50 (0.90 to 2.00)x, 50.0 %"
    known = [100.0] * 8
    assert figures._recovered({"shifted_ms": [130.0, 120, 100, 100, 101, 99, 99, 99], "known_ms": known}) == 2
    assert figures._recovered({"shifted_ms": [110.0] * 8, "known_ms": known}) is None


def test_every_result_says_how_it_came_about() -> None:
    names = [path.stem for path in regenerate.RESULTS.glob("*.json")]
    live = {f"live-{paper}" for paper in LINKS}
    assert set(names) <= {*regenerate.STEPS, *live, "requests", "laboratory-model"}
    found = [figures.read_result(name) for name in names if name in {*regenerate.STEPS, *live}]
    assert found
    for result in found:
        assert result and {"command", "commit", "machine", "reporting_trace", "figures"} <= result.keys()
    assert len({result["reporting_trace"] for result in found if result}) == 1


def test_requests_are_split_by_time_and_known_by_their_hashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(folder: Path) -> dict[str, texts.Texts]:
        return {
            kind: texts.Texts([f"{kind} {i} " + "word " * 120 for i in range(texts.N_REQUESTS)], [], [])
            for kind in texts.SOURCES
        }

    monkeypatch.setattr(texts, "load", found)
    loaded = requests.load(tmp_path)
    assert [request.role for request in loaded] == [role for role, n in requests.ROLES.items() for _ in range(n)]
    assert {request.kind for request in loaded[-80:]} == set(texts.SOURCES)
    requests.write_prompts(tmp_path / "r.jsonl", loaded)
    read = read_prompts(tmp_path / "r.jsonl")
    assert [prompt.text + (prompt.completion or "") for prompt in read] == [request.text for request in loaded]
    with pytest.raises(ValueError, match="but the manifest has"):
        requests.checked(tmp_path)


def test_a_request_in_one_pass_is_replayed_as_if_it_had_been_decoded() -> None:
    trace = random_trace(n_sequences=2, n_prefill=6, n_decode=0)
    found = answered(trace, {0: 4, 1: 9})
    assert np.diff(found.pass_start).tolist() == [4, 1, 1, 6]
    assert found.pass_phase.tolist() == [Phase.PREFILL, Phase.DECODE, Phase.DECODE, Phase.PREFILL]
    assert found.pass_sequence.tolist() == [0, 0, 0, 1]
    assert np.array_equal(found.expert_ids, trace.expert_ids)


def test_systems_are_replayed_over_the_same_requests_after_some_that_warm_the_cache(tmp_path: Path) -> None:
    trace = random_trace(n_sequences=8, n_labels=3)
    study = Study(trace, Artifacts(None, "", tmp_path))
    workload = Workload.of(study, 2, 5)
    labels = trace.header.labels
    assert len(workload.counted) == 6 and not {0, 1} & set(workload.counted)
    assert sorted(labels[sequence] for sequence in workload.counted) == sorted(2 * ["kind0", "kind1", "kind2"])
    found = workload.strategies(["none", "lru"], 0.5, LINKS["promoe"])
    found |= workload.systems({"counting": BASELINES["moe-infinity"]["counting"]}, 0.5, LINKS["promoe"])
    assert all(len(of["token_ms"]) == 6 and 0 < of["ready"] < 1 for of in found.values())
    assert min(ratios(found["none"], found["lru"])) >= 1
    assert all(of["prompt_ms"] and of["ahead"] is None for of in found.values())


def test_what_papers_compare_with_is_a_system_of_the_store(tmp_path: Path) -> None:
    shape = replace(SMALL, n_layer=24, layers=tuple(range(24)))  # a token uses more experts than one layer has
    trace, link = random_trace(shape, n_sequences=8, n_labels=3), LINKS["duoserve"]
    workload = Workload.of(Study(trace, Artifacts(None, "", tmp_path)), 2, 5)
    found = workload.systems(BASELINES["duoserve"], 0.5, link) | workload.strategies(["none"], 0.5, link)
    demand, whole = found["on demand"], found["whole next layer"]
    n_layer, used_ms = len(shape.layers), shape.n_expert_used * link.expert_us / 1e3
    assert demand["ready"] < 0.1 and demand["experts"] > 0.9 * n_layer * shape.n_expert_used
    assert demand["token_ms"] == [pytest.approx(n_layer * (used_ms + link.layer_us / 1e3), rel=0.1)] * 6
    assert whole["experts"] > 2 * found["none"]["experts"]
    assert sum(whole["ahead"]) == pytest.approx(1, abs=1e-3)


def test_requests_that_decode_together_take_the_layers_time_once(tmp_path: Path) -> None:
    study = Study(random_trace(n_sequences=6), Artifacts(None, "", tmp_path))
    workload = Workload.together(study, 2)
    assert workload.counted == [2, 4]
    found = workload.strategies(["none"], 1.0, LINKS["promoe"])["none"]
    layers_ms = len(study.trace.shape.layers) * LINKS["promoe"].layer_us / 1e3
    assert found["ready"] > 0.99 and found["token_ms"] == [pytest.approx(layers_ms, rel=0.05)] * 2


def test_a_collection_has_the_last_requests(tmp_path: Path) -> None:
    trace = random_trace(n_sequences=5)
    trace = replace(trace, header=replace(trace.header, fingerprint="ab" * 8))
    artifacts = Artifacts(None, "ab" * 8, tmp_path)
    write_collections(tmp_path, [trace], 3)
    found = artifacts.collection(trace.shape)
    assert found is not None and found.n_entries == 3
    assert found.state[0].sum() == 24 * trace.shape.n_expert_used * len(trace.shape.layers)
    write_collections(tmp_path, [trace], 0)
    assert artifacts.collection(trace.shape) is None
    write_collections(tmp_path, [trace, trace.select([0])])
    assert artifacts.collection(trace.shape).n_entries == 6  # type: ignore[union-attr]
    windows = collection(trace, 12).state
    assert len(windows) == 12 and windows[0].sum() == 12 * trace.shape.n_expert_used * len(trace.shape.layers)


ANSWERS = sorted(set(questions.answers().values()))
OPTIONS = (questions.ROOT / "docs" / "options.md").read_text(encoding="utf-8")
COMMANDS = help_of()


def test_every_starter_is_taught_with_one_answer_and_conversations_are_of_these() -> None:
    starters = questions.starters()
    assert "What does moegguf do?" in starters and "Who are you?" in starters
    assert set(starters) <= questions.answers().keys()
    asked = [
        (question, entry["answer"]) for entry in questions.lines(questions.TAUGHT) for question in entry.get("ask", ())
    ]
    assert len(dict(asked)) == len(set(asked))
    # Or of their first sentences, where a system message asks for one.
    for entry in questions.lines(questions.TAUGHT):
        for message in entry.get("messages", ()):
            assert message["role"] != "assistant" or any(one.startswith(message["content"]) for one in ANSWERS), message


def test_heldout_questions_have_taught_answers_and_are_not_taught() -> None:
    found = questions.heldout()
    assert len(found) >= 80 and all(one.right <= set(ANSWERS) for one in found)
    assert not {one.question for one in found} & questions.answers().keys()


@pytest.mark.parametrize("answer", [text for text in ANSWERS if re.search(r"moegguf [a-z]+|--[a-z]", text)])
def test_commands_and_options_in_answers_exist(answer: str) -> None:
    for option in re.findall(r"--[a-z][a-z-]+", answer):
        assert f"`{option}`" in OPTIONS or option in ("--help", "--verbose"), option
    for command in re.findall(r"(?:: |or |with )moegguf ([a-z]+)", answer):
        assert re.search(rf"^\W*{command}\b", COMMANDS, re.MULTILINE), command


def test_the_template_of_the_file_is_the_recipe_s() -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers of the laboratory")
    from moegguf.models.catalog import Catalog
    from moegguf.models.details import details
    from recipes.demo.tokenizer import CHAT_TEMPLATE

    assert details(Catalog().find("demo")).template == CHAT_TEMPLATE
