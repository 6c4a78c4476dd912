"""Tests `Requests`: which evaluation begins a request, and which evaluations belong to
its prompt."""

from collections.abc import Generator

import pytest

from moegguf.engine.context import Requests
from moegguf.native.events import Phase

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


class Context:
    """Counts evaluated tokens like `Llama`. `noted` collects (number of the request,
    phase) for each evaluation."""

    def __init__(self) -> None:
        self.requests = Requests()
        self.n_past = 0
        self.noted: list[tuple[int, Phase]] = []

    def eval(self, n_tokens: int) -> None:
        phase = self.requests.next_phase(self.n_past, n_tokens)
        self.noted.append((self.requests.sequence, phase))
        self.n_past += n_tokens

    def generate(self, n_prompt: int, *, keep: int = 0) -> Generator[int, None, None]:
        """Evaluates `n_prompt` tokens after the `keep` tokens in the context, then
        single tokens."""

        def steps() -> Generator[int, None, None]:
            self.n_past = keep
            self.eval(n_prompt)
            while True:
                yield self.n_past
                self.eval(1)

        return self.requests.run(steps())


def take(steps: Generator[int, None, None], n: int) -> None:
    for _ in range(n):
        next(steps)
    steps.close()


def test_prompt_of_any_length_starts_a_request_but_an_unstarted_generator_does_not() -> (
    None
):
    context = Context()
    take(context.generate(5), 2)
    take(context.generate(1, keep=6), 2)
    assert context.noted[2:] == [(1, PREFILL), (1, DECODE)]
    context = Context()
    steps = context.generate(5)
    next(steps)
    context.eval(3)  # a draft's tokens
    steps.close()
    assert context.noted == [(0, PREFILL), (0, DECODE)]
    context = Context()
    context.generate(4).close()
    assert context.requests.sequence == -1
    context.eval(3)
    assert context.noted == [(0, PREFILL)]


@pytest.mark.parametrize(
    ("n_past", "first", "then", "noted"),
    [
        (0, (4, 1, 1), (1, 1, 3),
         [(0, PREFILL), (0, DECODE), (0, DECODE), (1, PREFILL), (1, DECODE), (1, PREFILL)]),
        # A loaded state has 10 tokens before the first evaluation.
        (10, (1,), (), [(0, PREFILL)]),
        # The first pass failed and left no tokens, so it is repeated.
        (0, (4,), (4,), [(0, PREFILL), (1, PREFILL)]),
    ],
)  # fmt: skip
def test_eval_on_an_empty_context_starts_a_request(
    n_past: int,
    first: tuple[int, ...],
    then: tuple[int, ...],
    noted: list[tuple[int, Phase]],
) -> None:
    context = Context()
    for context.n_past, counts in ((n_past, first), (0, then)):
        for n_tokens in counts:
            context.eval(n_tokens)
    assert context.noted == noted


def test_failed_request_ends() -> None:
    context = Context()

    def failing() -> Generator[int, None, None]:
        context.eval(4)
        yield 0
        raise RuntimeError("disk")

    steps = context.requests.run(failing())
    next(steps)
    with pytest.raises(RuntimeError):
        next(steps)
    context.eval(1)
    context.eval(2)
    assert context.noted == [(0, PREFILL), (0, DECODE), (0, PREFILL)]
