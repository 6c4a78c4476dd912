"""The distance between kept states follows from what they cost and what computing tokens again takes."""

import pytest

from moegguf.engine.prefix_cache import BLOCK_TOKENS, MOST_STEP_TOKENS, StateCost
from moegguf.quantities import GIB, MIB


def step(
    state_bytes: int, *, write_bytes_per_s: float, tokens_per_s: float, n_tokens: int = 1000, limit: int = 16 * GIB
) -> int:
    """Returns the distance after a prompt of two passes and a state were measured."""
    cost = StateCost(limit)
    for n_pass in (1, 2, 3):
        cost.note_pass(eval_s=512 * n_pass / tokens_per_s, n_new=512)
    cost.note_state(state_bytes, state_bytes / write_bytes_per_s)
    return cost.step(state_bytes, n_tokens)


def test_small_states_are_kept_at_every_block() -> None:
    assert step(100_000, write_bytes_per_s=1e9, tokens_per_s=100) == BLOCK_TOKENS


def test_a_larger_state_is_kept_after_tokens_that_take_twenty_times_as_long() -> None:
    assert step(100_000_000, write_bytes_per_s=1e9, tokens_per_s=200) == 400


def test_states_are_never_further_apart_than_the_most_where_writing_is_faster_than_computing() -> None:
    assert step(100_000_000, write_bytes_per_s=1e9, tokens_per_s=1000) == MOST_STEP_TOKENS


def test_a_state_that_takes_longer_than_the_tokens_is_not_worth_it() -> None:
    assert step(100_000_000, write_bytes_per_s=1e8, tokens_per_s=1000) == 1000


@pytest.mark.parametrize(("n_tokens", "expected"), [(16_000, 512), (64_000, 977)])
def test_states_of_a_long_conversation_take_half_of_the_store(n_tokens: int, expected: int) -> None:
    found = step(125 * MIB, write_bytes_per_s=1e9, tokens_per_s=1000, n_tokens=n_tokens)
    assert found == expected


def test_sequences_that_share_a_pass_share_its_time() -> None:
    cost = StateCost(16 * GIB)
    for eval_s in (1.0, 2.0):
        for _ in range(4):
            cost.note_pass(eval_s, n_new=50)
    cost.note_state(1_000_000, 0.1)
    assert cost.step(1_000_000, 1000) == 400  # a token takes 1/200 s


def test_passes_of_single_tokens_say_nothing_about_prompts() -> None:
    cost = StateCost(16 * GIB)
    for eval_s in (1.0, 2.0, 3.0):
        cost.note_pass(eval_s, n_new=1)
    cost.note_state(1_000_000, 10.0)
    assert cost.step(1_000_000, 1000) == BLOCK_TOKENS
