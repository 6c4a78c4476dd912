"""Tests passes with several requests.

Tests cover the sequences in recorded events, a replay with equal counters, predictions
that do not change any logit, and ExpertFlow's schedule, which evaluates the sequences
in groups.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import TinyModel, answers_of, ask, running

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies import make_policy
from moegguf.controller.predictors import make_predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.engine.llama import Llama
from moegguf.engine.recording import TraceOptions
from moegguf.engine.sequences import SequenceTokens
from moegguf.generate.engine import Engine
from moegguf.generate.kv_sequences import Step
from moegguf.generate.request import Sampling
from moegguf.generate.sequence import Sequence
from moegguf.native.events import Phase
from moegguf.trace.format import read
from moegguf.trace.simulate import Simulation
from predictors.study.sequence_groups import ExpertFlow

N_SEQUENCES, N_PROMPT, N_DECODE = 4, 5, 6


def decode_together(
    llm: Llama, after_each: Callable[[list[int]], object] = lambda rows: None
) -> None:
    """Evaluates random prompts of N_SEQUENCES sequences in two passes, then N_DECODE
    passes with one token of each sequence.

    Calls `after_each` after each of these later passes, with the row numbers of its
    logits.
    """
    random = np.random.default_rng(0)
    tokens = random.integers(
        0, llm.n_vocab(), (N_SEQUENCES, N_PROMPT + N_DECODE)
    ).tolist()
    requests = [llm.context.requests.begin() for _ in range(N_SEQUENCES)]
    for half in (range(2), range(2, N_SEQUENCES)):
        llm.context.eval_sequences(
            [
                SequenceTokens(s, tokens[s][:N_PROMPT], 0, requests[s], Phase.PREFILL)
                for s in half
            ]
        )
    for at in range(N_PROMPT, N_PROMPT + N_DECODE):
        chunks = [
            SequenceTokens(s, [tokens[s][at]], at, requests[s], Phase.DECODE)
            for s in range(N_SEQUENCES)
        ]
        after_each(llm.context.eval_sequences(chunks) or [])


@pytest.mark.parametrize(
    ("policy", "predictor"),
    [
        ("lru", "none"),
        ("lfu", "none"),
        ("next-use", "previous-token"),
        ("next-use", "skip"),
    ],
)
def test_replay_of_a_recorded_batch_has_its_counters(
    tiny: TinyModel, tmp_path: Path, policy: str, predictor: str
) -> None:
    path = tmp_path / "batches.npz"
    options = {
        "n_ctx": 64,
        "n_threads": 1,
        "verbose": False,
        "n_seq_max": N_SEQUENCES,
        "expert_cache": "50%",
    }
    options |= {
        "policy": policy,
        "predictor": predictor,
        "trace": TraceOptions(path, inputs=predictor == "skip"),
    }
    with Llama(tiny(), lockstep=True, strategy="lru", **options) as llm:
        decode_together(llm)
        was, n_slots, shape = (
            llm.session.store.counters(),
            llm.stats().n_slots,
            MoeShape.of(llm.layout),
        )
        ahead = make_predictor(predictor, shape, Artifacts(llm.layout))
    assert (was["forecast_picks"] > 0) == (predictor != "none")
    trace = read(path)
    assert trace.token_sequence is not None
    assert trace.sequence_of[-N_SEQUENCES:].tolist() == trace.sequences()
    lengths = [
        np.count_nonzero(trace.sequence_of == sequence)
        for sequence in trace.sequences()
    ]
    assert lengths == [N_PROMPT + N_DECODE] * N_SEQUENCES
    prompts = trace.phase_of == Phase.PREFILL
    assert np.count_nonzero(prompts) == N_SEQUENCES * N_PROMPT
    # The last layer is computed only for the last token of each prompt.
    last = trace.expert_ids[-1, prompts, 0] >= 0
    assert last.tolist() == [*[False] * (N_PROMPT - 1), True] * N_SEQUENCES
    chosen = make_policy(policy, shape, None)  # type: ignore[arg-type]
    replay = Simulation(trace, chosen, ahead, n_slots).run()
    for name in ("lookups", "misses", "evictions", "forecast_picks", "forecast_right"):
        assert replay.counters[name] == was[name], name


@pytest.mark.parametrize(
    ("options", "policy", "predictor"),
    [
        ({"n_seq_max": 2}, "next-use", "skip"),
        ({}, "next-use", "skip"),
        ({"n_seq_max": 2, "prefetch": False}, "next-use", "none"),
        ({"policy": "slru"}, "slru", "none"),
        ({"n_seq_max": 2, "strategy": "lru"}, "lru", "none"),
    ],
)
def test_an_unmeasured_model_uses_next_use_and_prefetches(
    tiny: TinyModel, options: dict[str, Any], policy: str, predictor: str
) -> None:
    with Llama(
        tiny(), n_ctx=64, n_threads=1, verbose=False, expert_cache="40%", **options
    ) as llm:
        found = llm.decisions()
        assert (found["policy"], found["predictor"]) == (policy, predictor)


@pytest.mark.parametrize("predictor", ["previous-token", "skip"])
def test_predicting_for_several_sequences_changes_no_logit(
    tiny: TinyModel, predictor: str
) -> None:
    fixed = {
        "n_ctx": 64,
        "n_threads": 1,
        "verbose": False,
        "n_seq_max": N_SEQUENCES,
        "strategy": "lru",
    }

    def logits(llm: Llama) -> Any:
        found = []

        def keep(rows: list[int]) -> None:
            pointers = [llm._ctx.get_logits_ith(row) for row in rows]
            found.extend(
                np.ctypeslib.as_array(each, (llm.n_vocab(),)).copy()
                for each in pointers
            )

        llm.context.clear()
        decode_together(llm, keep)
        return np.array(found)

    with Llama(tiny(), **fixed, expert_cache="100%") as llm:
        expected = logits(llm)
    ahead = PrefetchOptions(window=2, watchdog=False, waste_weight=0.0)
    deadline = time.monotonic() + 60
    with Llama(
        tiny(),
        **fixed,
        expert_cache="40%",
        policy="next-use",
        predictor=predictor,
        prefetch=ahead,
    ) as llm:
        while True:
            assert np.array_equal(logits(llm), expected)
            if llm.stats().prefetch_started > 0 or time.monotonic() > deadline:
                # A run without prefetches is repeated: the threads that predict and
                # read may have had no core.
                break
        assert llm.stats().prefetch_started > 0 and llm.stats().evictions > 0


class Counted:
    """A schedule that selects the sequences that `inner` selects.

    `counts` holds two numbers for each selection: how many decoding sequences were
    selected, and how many were running.
    """

    def __init__(self, inner: ExpertFlow) -> None:
        self.inner = inner
        self.counts: list[tuple[int, int]] = []

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
        chosen = self.inner.choose(running)
        n_chosen, n_running = (
            sum(answer.decodes for answer in answers) for answers in (chosen, running)
        )
        self.counts.append((n_chosen, n_running))
        return chosen

    def ran(self, step: Step) -> None:
        pass


def test_expert_flow_runs_half_of_the_sequences_in_a_step(tiny: TinyModel) -> None:
    with Llama(
        tiny(),
        n_ctx=64,
        n_threads=1,
        verbose=False,
        n_seq_max=4,
        expert_cache="40%",
        strategy="lru",
    ) as llm:
        schedule = ExpertFlow.of(llm)
        assert isinstance(schedule, ExpertFlow)
        counted = Counted(schedule)
        with running(llm, counted) as loop:
            answers = answers_of(
                loop, [ask(prompt=f"question {i}", max_tokens=10) for i in range(6)]
            )
        schedule.close()
        schedule.close()
        assert llm.stats().prefetch_requested > 0
    assert not any(received.error for received in answers)
    assert {n_running for _, n_running in counted.counts} >= {1, 2, 4}
    assert all(n_chosen <= 2 for n_chosen, _ in counted.counts)
    assert (2, 4) in counted.counts and (1, 2) in counted.counts


def test_expert_flow_is_off_for_a_resident_model(tiny: TinyModel) -> None:
    with Llama(
        tiny(), n_ctx=64, n_threads=1, verbose=False, n_seq_max=2, expert_cache="100%"
    ) as llm:
        assert ExpertFlow.of(llm) is None


def test_an_engine_with_expert_flow_answers_and_closes(tiny: TinyModel) -> None:
    options: dict[str, Any] = {
        "n_ctx": 64,
        "n_threads": 1,
        "expert_cache": "40%",
        "strategy": "lru",
    }
    with Engine(tiny(), parallel=3, schedule=ExpertFlow.of, **options) as engine:
        answers = engine.generate(
            [f"question {i}" for i in range(5)], Sampling(max_tokens=6)
        )
    assert [answer.error for answer in answers] == [None] * 5
