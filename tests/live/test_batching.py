"""Tests many answers on one context: no answer depends on another's tokens, and an
error ends only affected answers.

With batch-invariant kernels, an answer has the same bits alone and in a batch. Without
these kernels the last bits may differ, and the rounding of activations to eight bits
enlarges the differences. Logprobs are then compared within BOUND. Another test needs no
bound: with equal steps, the tokens of other answers do not change a single bit.
MOEGGUF_INTERLEAVINGS is the number of answers in random interleavings (default: 200),
rounded up to full blocks.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from answering import (
    DEMO,
    QUESTION,
    Load,
    Received,
    Scripted,
    TinyModel,
    answers_of,
    answers_together,
    ask,
    endless,
    of_tokens,
    reply,
    running,
    solo,
)

from moegguf.engine.llama import Llama
from moegguf.engine.sequences import SequenceTokens
from moegguf.errors import (
    ClosedError,
    ContextError,
    ExpertIOError,
    OptionError,
    SchemaError,
    TemplateError,
)
from moegguf.generate.request import PromptProgress, Request, TokenLogprob
from moegguf.generate.sequence import Sequence, Task
from moegguf.native.events import Phase
from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment
from moegguf.testing.library import arm_fault

# Limit on the difference of a logprob without batch-invariant kernels. Differences in
# the last bits are amplified most by the random routers of tiny models.
BOUND = 1.0
PER_BLOCK = 25
N_BLOCKS = -(-int(os.environ.get("MOEGGUF_INTERLEAVINGS", "200")) // PER_BLOCK)

BATCH_INVARIANT = has_kernels(read_processor(), read_environment().kernels)

Random = np.random.Generator


@pytest.fixture
def load(load: Load) -> Load:
    """Returns `load` with flash_attn=None: models use flash attention, which is
    batch-invariant, if it is supported."""
    return functools.partial(load, flash_attn=None)


@pytest.fixture(scope="module")
def pair(tiny: TinyModel) -> Iterator[tuple[Llama, Llama]]:
    """Loads one model twice and yields both. The first has six sequences and slots for
    40 % of the experts. The second has one sequence and, by default, slots for all
    experts.
    """
    options: dict[str, Any] = {
        "n_ctx": 256,
        "n_threads": 1,
        "flash_attn": None,
        "verbose": False,
    }
    with (
        Llama(tiny(), n_seq_max=6, expert_cache="40%", **options) as many,
        Llama(tiny(), **options) as one,
    ):
        yield many, one


def random_tokens(llm: Llama, random: Random, n_tokens: int) -> list[int]:
    return [int(token) for token in random.integers(0, llm.n_vocab(), n_tokens)]


def assert_same(received: list[TokenLogprob], alone: list[TokenLogprob]) -> None:
    """Asserts that `received` equals the beginning of `alone`, on a CPU with
    batch-invariant kernels.

    On other CPUs, logprobs may differ by less than BOUND. Different tokens are allowed
    where the two best logprobs differ by less than BOUND. Later tokens are then not
    compared.
    """
    if BATCH_INVARIANT:
        assert received == alone[: len(received)]
        return
    for one, other in zip(received, alone, strict=False):
        margin = other.top[0].logprob - other.top[1].logprob
        if one.token != other.token:
            assert margin < BOUND, (one, other)
            return
        assert abs(one.logprob - other.logprob) < BOUND, (one, other)
    assert len(received) <= len(alone)


class RandomSubset:
    """A schedule that selects a random subset of the running sequences in each step. An
    empty subset means all."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
        return (answer for answer in running if self._random.random() < 0.7)

    def ran(self, step: object) -> None:
        pass


@pytest.mark.parametrize("block", range(N_BLOCKS))
def test_random_interleavings_give_the_answers_of_solo_requests(
    block: int, pair: tuple[Llama, Llama]
) -> None:
    many, one = pair
    random = np.random.default_rng(block)
    shared = random_tokens(one, random, 40)
    requests, received, cancelled, poisoned = (
        list[Request](),
        list[Received](),
        set[int](),
        set[int](),
    )
    submitted: list[Sequence] = []
    for i in range(PER_BLOCK):
        tokens = shared[: int(random.integers(0, 40))] + random_tokens(
            one, random, int(random.integers(1, 60))
        )
        options: dict[str, Any] = {"max_tokens": int(random.integers(1, 12))}
        if random.random() < 0.1:
            poisoned.add(i)
            options["logit_bias"] = {one.n_vocab(): 1.0}
        elif random.random() < 0.1:
            # A seed prevents reuse of a prefix unless kernels are batch-invariant.
            options["seed"] = 1
        requests.append(of_tokens(one, tokens, **options))
        received.append(Received())

    lock = threading.Lock()

    def submit_one() -> None:
        with lock:
            if len(submitted) < PER_BLOCK:
                submitted.append(
                    loop.submit(requests[len(submitted)], received[len(submitted)])
                )

    def meddle(step: int) -> None:
        while len(submitted) < PER_BLOCK and random.random() < 0.5:
            submit_one()
        if random.random() < 0.05:
            i = int(random.integers(len(submitted)))
            cancelled.add(i)
            loop.cancel(submitted[i])
        if random.random() < 0.05:
            arm_fault("read", 1)  # The next read fails once, and the store retries it.

    schedule = Scripted(meddle, RandomSubset(random))
    with running(many, schedule, step_tokens=int(random.integers(1, 64))) as loop:
        for events in received:
            while not events.ended.wait(0.01):
                submit_one()
    arm_fault("read", 0)
    for i, events in enumerate(received):
        if i in poisoned:
            assert isinstance(events.error, OptionError) or i in cancelled
            continue
        assert events.error is None
        assert_same(events.logprobs, solo(one, requests[i]))
        if i not in cancelled:
            assert events.summary.answer_tokens == requests[i].sampling.max_tokens
            assert events.summary.finish == "length"


def test_equal_steps_beside_other_tokens_give_equal_bits(
    pair: tuple[Llama, Llama],
) -> None:
    many, _ = pair
    lengths = [50, 3, 21, 34, 1, 13]

    def logprobs(target: int, seed: int) -> list[TokenLogprob]:
        """Returns the logprobs of answer `target`. Its prompt is fixed; `seed`
        determines the other prompts."""
        own, others = np.random.default_rng(target), np.random.default_rng(seed)
        requests = [
            of_tokens(
                many, random_tokens(many, own if i == target else others, n), seed=1
            )
            for i, n in enumerate(lengths)
        ]
        many.context.clear()
        received = answers_together(
            many, requests, step_tokens=16
        )  # the fixed order of the requests determines which KV cells each one gets
        assert [events.error for events in received] == [None] * len(requests)
        return received[target].logprobs

    for target in range(len(lengths)):
        assert logprobs(target, 100) == logprobs(target, 200)


def test_a_lone_request_in_a_loop_has_the_bits_of_a_solo_answer(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    many.context.clear()
    request = of_tokens(
        one, random_tokens(one, np.random.default_rng(7), 70), max_tokens=20
    )
    with running(many) as loop:
        [received] = answers_of(loop, [request])
    assert received.logprobs == solo(one, request)
    assert received.summary.prompt_tokens == 70
    assert received.progress[-1].n_done == 70


def test_exact_requests_beside_others_have_the_bits_of_solo_answers(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    random = np.random.default_rng(3)
    requests = [
        of_tokens(one, random_tokens(one, random, 30), exact=i % 3 == 1)
        for i in range(9)
    ]
    with running(many) as loop:
        for request, received in zip(requests, answers_of(loop, requests), strict=True):
            assert received.error is None
            if request.sampling.exact:
                assert received.logprobs == solo(one, request)
            assert_same(received.logprobs, solo(one, request))


@pytest.mark.parametrize(
    "options", [{}, {"seed": 1, "exact": True}], ids=["free", "exact"]
)
def test_a_shared_prefix_of_several_requests_is_computed_once(
    pair: tuple[Llama, Llama], options: dict[str, Any]
) -> None:
    many, one = pair
    many.context.clear()
    if options and not many.batch_invariant:
        pytest.skip("exact requests reuse nothing on this processor")
    random = np.random.default_rng(4)
    system = random_tokens(one, random, 120)
    requests = [
        of_tokens(one, system + random_tokens(one, random, 5), **options)
        for _ in range(6)
    ]
    with running(many) as loop:
        received = answers_of(loop, requests)
        later = answers_of(loop, requests[:1])
    assert sorted(events.summary.prompt_tokens for events in received) == [5] * 5 + [
        125
    ]
    assert later[0].summary.cached_tokens == 124, "what has ended is kept"
    for events, request in zip(received, requests, strict=True):
        assert_same(events.logprobs, solo(one, request))


def test_only_requests_of_one_owner_wait_for_a_shared_prompt(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    prompt = random_tokens(one, np.random.default_rng(5), 40)
    for owners, n_first in ((("ann", "bob"), 2), (("ann", "ann"), 1)):
        many.context.clear()
        stream = Scripted()
        answers_together(
            many, [of_tokens(one, prompt, owner=owner) for owner in owners], stream
        )
        assert len(stream.steps[0].sequences) == n_first


def test_more_sequences_than_tokens_of_a_pass_take_turns(load: Load) -> None:
    many = load(DEMO, n_seq_max=4, logits_all=False)
    one = load(DEMO, logits_all=False)
    random = np.random.default_rng(6)
    requests = [of_tokens(one, random_tokens(one, random, 9)) for _ in range(5)]
    many.n_batch, stream = 2, Scripted()
    received = answers_together(many, requests, stream)
    assert {step.n_tokens for step in stream.steps} == {1, 2}
    answering = [len(step.sequences) for step in stream.steps]
    assert answering.count(2) > len(answering) // 2
    for events, request in zip(received, requests, strict=True):
        assert (events.error, events.summary.answer_tokens) == (None, 8)
        assert_same(events.logprobs, solo(one, request))


def test_steps_with_decoding_sequences_have_at_most_128_tokens(load: Load) -> None:
    llm = load(
        DEMO,
        n_ctx=256,
        n_seq_max=12,
        n_threads=1,
        logits_all=False,
        expert_cache="100%",
    )
    random, script = np.random.default_rng(4), Scripted()
    early = [
        of_tokens(llm, random_tokens(llm, random, 30), max_tokens=6 if i < 4 else 24)
        for i in range(12)
    ]
    late = [of_tokens(llm, random_tokens(llm, random, 100)) for _ in range(4)]
    received = answers_together(llm, [*early, *late], script)
    assert [events.error for events in received] == [None] * len(received)
    n_tokens = [
        step.n_tokens
        for step in script.steps
        if len(step.sequences) < step.n_tokens < 200
    ]
    assert max(n_tokens) == 128


FORMED = {
    "format": {"type": "string", "minLength": 1000},
    "repeat_penalty": 1.3,
    "temperature": 1.0,
    "seed": 1,
}


@pytest.mark.parametrize(
    "options", [{}, FORMED], ids=["free", "with sampler and constraint"]
)
def test_a_full_kv_cache_requeues_the_newest_and_answers_every_request(
    tiny: TinyModel, load: Load, options: dict[str, Any]
) -> None:
    many = load(tiny(), n_ctx=256, n_seq_max=4, kv_tokens=512, logits_all=False)
    one = load(tiny(), n_ctx=256, logits_all=False)
    random = np.random.default_rng(5)
    requests = [
        of_tokens(one, random_tokens(one, random, 150), max_tokens=60, **options)
        for _ in range(8)
    ]
    stream = Scripted()
    received = answers_together(many, requests, stream)
    assert max(len(step.sequences) for step in stream.steps) >= 3
    for events, request in zip(received, requests, strict=True):
        assert (events.error, events.summary.answer_tokens) == (None, 60)
        assert_same(events.logprobs, solo(one, request))


def test_invalid_requests_fail_without_the_others(load: Load) -> None:
    many = load(DEMO, n_seq_max=4, logits_all=False)
    good = ask(QUESTION, max_tokens=30)
    alone, _ = reply(many, QUESTION, max_tokens=30)
    many.context.clear()
    bad = {
        OptionError: ask(QUESTION, logit_bias={many.n_vocab(): 1.0}),
        TemplateError: ask(QUESTION, template="{{ 1 / 0 }}"),
        SchemaError: ask(QUESTION, format={"type": "decimal"}),
        ContextError: ask("word " * 4000, truncate=False),
    }
    with running(many) as loop:
        received = answers_of(loop, [good, *bad.values(), good])
        assert [type(events.error) for events in received[1:-1]] == list(bad)
        assert received[0].text == received[-1].text == alone
        failing = Received()
        broken = loop.submit(good, failing)
        beside = Received()
        loop.submit(ask("Who are you?", max_tokens=30), beside)
        while broken.kv is None:
            pass
        broken.sampler = None  # type: ignore[assignment]
        assert isinstance(failing.wait().error, AttributeError)
        assert beside.wait().error is None
        assert answers_of(loop, [good])[0].text == alone


def test_slow_tokenization_does_not_delay_other_requests(
    demo: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, tokens = threading.Event(), demo.vocabulary.tokens

    def slow(text: str, **options: bool) -> list[int]:
        assert "wait" not in text or go_on.wait(60)
        return tokens(text, **options)

    monkeypatch.setattr(demo.vocabulary, "tokens", slow)
    waiting = [Received() for _ in range(8)]
    with running(demo) as loop:
        for events in waiting:
            loop.submit(ask("wait", max_tokens=1), events)
        assert answers_of(loop, [ask(QUESTION, max_tokens=3)])[0].text
        assert not any(events.ended.is_set() for events in waiting)
        go_on.set()
        assert not any(events.wait().error for events in waiting)


def test_a_read_error_ends_only_the_sequences_with_the_expert(
    pair: tuple[Llama, Llama], monkeypatch: Any
) -> None:
    many, one = pair
    random = np.random.default_rng(9)
    requests = [
        of_tokens(one, random_tokens(one, random, 10), max_tokens=20) for _ in range(4)
    ]
    evaluate = many.context.eval_sequences
    victims: list[Sequence] = []

    def fail_for_the_victim(chunks: list[SequenceTokens]) -> list[int] | None:
        if any(
            chunk.request == victim.number for chunk in chunks for victim in victims
        ):
            raise ExpertIOError("expert 3 of layer 1 cannot be read")
        return evaluate(chunks)

    def choose_a_victim(step: int) -> None:
        if step == 5:
            victims.append(loop._running[2])

    monkeypatch.setattr(many.context, "eval_sequences", fail_for_the_victim)
    with running(many, Scripted(choose_a_victim)) as loop:
        received = answers_of(loop, requests)
    assert [type(events.error) for events in received].count(ExpertIOError) == 1
    for events, request in zip(received, requests, strict=True):
        if events.error is None:
            assert_same(events.logprobs, solo(one, request))


def test_a_failing_disk_ends_the_running_answers_and_keeps_the_loop(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    random = np.random.default_rng(10)
    requests = [
        of_tokens(one, random_tokens(one, random, 30), max_tokens=40) for _ in range(4)
    ]

    def fail(step: int) -> None:
        if step == 5:
            arm_fault("read", 1, errno=5, sticky=True)

    with running(many, Scripted(fail)) as loop:
        received = answers_of(loop, requests)
        assert all(isinstance(events.error, ExpertIOError) for events in received)
        arm_fault("read", 0)
        [again] = answers_of(loop, requests[:1])
    assert_same(again.logprobs, solo(one, requests[0]))


def test_cancel_ends_one_answer_or_all_during_a_slow_read(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    random = np.random.default_rng(11)
    requests = [
        of_tokens(one, random_tokens(one, random, 10), max_tokens=100) for _ in range(3)
    ]
    received = [Received() for _ in requests]

    def cancel(step: int) -> None:
        if step == 10:
            loop.cancel(submitted[1])

    with running(many, Scripted(cancel)) as loop:
        submitted = [
            loop.submit(*each) for each in zip(requests, received, strict=True)
        ]
        assert [events.wait().summary.finish for events in received] == [
            "length",
            "cancelled",
            "length",
        ]
        assert all(events.error is None for events in received)
        assert 0 < received[1].summary.answer_tokens < 100
        arm_fault("slow_read", 1, sticky=True)
        received = [Received() for _ in requests]
        submitted = [
            loop.submit(*each) for each in zip(requests, received, strict=True)
        ]
        for answer in submitted:
            loop.cancel(answer)
        assert all(events.wait().summary.finish == "cancelled" for events in received)
        arm_fault("slow_read", 0)
        assert answers_of(loop, requests[:1])[0].summary.finish == "length"


def test_a_full_context_shifts_in_each_sequence(load: Load) -> None:
    many = load(DEMO, n_ctx=256, n_seq_max=3, logits_all=False)
    with running(many) as loop:
        received = answers_of(
            loop,
            [
                ask(QUESTION, max_tokens=300 + 50 * i, logit_bias=endless(many))
                for i in range(3)
            ],
        )
    for i, events in enumerate(received):
        assert (events.error, events.summary.answer_tokens) == (None, 300 + 50 * i)
        assert events.summary.n_shifts >= 1


def test_batch_invariant_is_about_the_model_and_exact_requests_that_shift_are_alone(
    load: Load,
) -> None:
    one, many = (load(DEMO, n_ctx=256, n_seq_max=n, logits_all=False) for n in (1, 2))
    options = {"max_tokens": 300, "logit_bias": endless(one)}
    alone, _ = reply(one, QUESTION, **options)
    before = many.batch_invariant
    with running(many) as loop:
        # Uses the first place in the KV cache.
        answers_of(loop, [ask("Who are you?", max_tokens=3)])
        received = answers_of(
            loop, [ask(QUESTION, exact=True, **options), ask("Who are you?", **options)]
        )
    assert received[0].error is None
    assert received[0].summary.n_shifts and received[0].text == alone
    del many.batch_invariant  # clears the cached value
    assert many.batch_invariant is before


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_a_cancel_within_a_prompt_keeps_its_complete_passes(
    tiny: TinyModel, load: Load, n_seq_max: int
) -> None:
    llm = load(
        tiny("tiny-mix"),
        expert_cache="25%",
        n_batch=16,
        n_seq_max=n_seq_max,
        logits_all=False,
    )
    request = of_tokens(llm, random_tokens(llm, np.random.default_rng(12), 60))
    timers = []

    class Interrupted(Received):
        def on_progress(self, progress: PromptProgress) -> None:
            super().on_progress(progress)
            if progress.n_done == 32:
                arm_fault("slow_read", 1, sticky=True)
                timers.append(threading.Timer(0.1, lambda: loop.cancel(submitted)))
                timers[0].start()

    with running(llm) as loop:
        received = Interrupted()
        submitted = loop.submit(request, received)
        assert (
            received.wait().summary.finish == "cancelled"
            and received.progress[-1].n_done == 32
        )
        arm_fault("slow_read", 0)
        (again,) = answers_of(loop, [request])
    assert (again.summary.cached_tokens, again.summary.prompt_tokens) == (32, 28)
    assert_same(again.logprobs, solo(llm, request))


def test_a_task_runs_after_the_answers_submitted_before(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    request = of_tokens(one, [1, 2, 3], max_tokens=20)
    ended = threading.Event()
    with running(many) as loop:
        first, second = Received(), Received()
        loop.submit(request, first)
        first_done = []
        failed: list[Exception] = []
        while not loop.n_running:
            pass
        loop.submit_task(
            Task(
                lambda: (first_done.append(first.ended.is_set()), ended.set()),
                lambda: None,
                failed.append,
            )
        )
        loop.submit(request, second)
        assert ended.wait(60) and first_done == [True]
        assert second.wait().error is None
        assert loop.n_answer_tokens == 40 and loop.n_running == 0
    late = loop.submit_task(Task(lambda: None, lambda: None, failed.append))
    assert [type(error) for error in failed] == [ClosedError] and not late.cancelled


def test_closing_the_loop_cancels_open_requests_and_refuses_new_ones(
    pair: tuple[Llama, Llama],
) -> None:
    many, one = pair
    received = [Received() for _ in range(20)]
    with running(many) as loop:
        for events in received:
            loop.submit(of_tokens(one, [1, 2, 3], max_tokens=200), events)
        while not loop.n_answer_tokens:
            pass
    assert all(
        events.wait().summary.finish == "cancelled" or events.error
        for events in received
    )
    late = Received()
    loop.submit(of_tokens(one, [1]), late)
    assert late.wait().error is not None


def test_memory_stays_flat_over_many_requests(pair: tuple[Llama, Llama]) -> None:
    many, one = pair
    random = np.random.default_rng(12)

    def run(n: int) -> int:
        with running(many) as loop:
            for _ in range(n):
                answers_of(
                    loop,
                    [
                        of_tokens(one, random_tokens(one, random, 20), max_tokens=3)
                        for _ in range(6)
                    ],
                )
        return int(psutil.Process().memory_info().rss)

    run(10)
    assert run(30) - run(5) < 16 << 20


def test_input_ids_of_a_copied_prefix_are_unknown(load: Load) -> None:
    llm = load(DEMO, n_seq_max=2, logits_all=False)
    llm.context.eval_sequences([SequenceTokens(1, [5, 6, 7], 0, 1, Phase.PREFILL)])
    assert llm.context.copy(1, 0, 3)
    assert (llm.n_tokens, llm.input_ids[:3].tolist()) == (3, [-1] * 3)
