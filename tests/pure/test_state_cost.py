"""Tests the distance between kept states, which depends on the times to write a state
and to recompute tokens."""

import pytest

from moegguf.engine.prefix_cache import BLOCK_TOKENS, MOST_STEP_TOKENS, StateCost
from moegguf.quantities import GIB, MIB


def step(
    state_bytes: int,
    *,
    write_bytes_per_s: float,
    tokens_per_s: float,
    n_tokens: int = 1000,
    limit: int = 16 * GIB,
) -> int:
    """Returns the distance that is chosen once two passes of a prompt and one write of
    a state have been measured."""
    cost = StateCost(limit)
    for n_pass in (1, 2, 3):
        cost.note_pass(eval_s=512 * n_pass / tokens_per_s, n_new=512)
    cost.note_state(state_bytes, state_bytes / write_bytes_per_s)
    return cost.step(state_bytes, n_tokens)


def test_step_of_a_small_state_is_one_block() -> None:
    assert step(100_000, write_bytes_per_s=1e9, tokens_per_s=100) == BLOCK_TOKENS


def test_step_of_a_larger_state_computes_twenty_times_as_long_as_the_write() -> None:
    assert step(100_000_000, write_bytes_per_s=1e9, tokens_per_s=200) == 400


def test_step_is_capped_if_writing_is_faster_than_computing() -> None:
    assert (
        step(100_000_000, write_bytes_per_s=1e9, tokens_per_s=1000) == MOST_STEP_TOKENS
    )


def test_step_is_the_whole_prompt_if_writing_takes_longer_than_computing() -> None:
    assert step(100_000_000, write_bytes_per_s=1e8, tokens_per_s=1000) == 1000


@pytest.mark.parametrize(("n_tokens", "expected"), [(16_000, 512), (64_000, 977)])
def test_step_of_a_long_conversation_uses_half_of_the_store(
    n_tokens: int, expected: int
) -> None:
    found = step(125 * MIB, write_bytes_per_s=1e9, tokens_per_s=1000, n_tokens=n_tokens)
    assert found == expected


def test_note_pass_divides_the_time_of_a_pass_among_its_tokens() -> None:
    cost = StateCost(16 * GIB)
    for eval_s in (1.0, 2.0):
        for _ in range(4):
            cost.note_pass(eval_s, n_new=50)
    cost.note_state(1_000_000, 0.1)
    assert cost.step(1_000_000, 1000) == 400  # a token takes 1/200 s


def test_note_pass_ignores_passes_of_single_tokens() -> None:
    cost = StateCost(16 * GIB)
    for eval_s in (1.0, 2.0, 3.0):
        cost.note_pass(eval_s, n_new=1)
    cost.note_state(1_000_000, 10.0)
    assert cost.step(1_000_000, 1000) == BLOCK_TOKENS
