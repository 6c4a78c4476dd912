"""Tests stored contexts of models whose memory cannot be truncated at every token.

Recurrent states and sliding windows are stored beside the blocks of KV cells. For some
models the whole memory is stored instead. A prompt continues from the nearest stored
state, and its results do not change by a single bit. Damaged states are recomputed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import prompt_of
from running import TinyModel

from moegguf.engine.kv_block_store import (
    KvBlockStore,
    StoredBlock,
    default_folder,
    stored_blocks,
)
from moegguf.engine.llama import Llama
from moegguf.engine.prefix_cache import BLOCK_TOKENS, MOST_STEP_TOKENS
from moegguf.engine.sequences import SequenceTokens
from moegguf.generate.engine import Engine, EngineAnswer
from moegguf.generate.request import Sampling
from moegguf.native.events import Phase
from moegguf.quantities import GIB

RECURRENT = [
    "tiny-qwen3next", "tiny-qwen35moe", "tiny-qwen4exp", "tiny-nemotron", "tiny-lfm2moe", "tiny-kimi-linear",
    "tiny-bailingmoe3", "tiny-granitehybrid",
]  # fmt: skip
WINDOWED = ["tiny-gpt-oss", "tiny-gemma4"]
WHOLE = ["tiny-deepseek4"]
ALL = RECURRENT + WINDOWED + WHOLE
# Models whose sequences do not share KV cells.
OWN_CELLS = ["tiny-qwen4exp", "tiny-deepseek4"]
N_PROMPT, N_NEW = 5 * BLOCK_TOKENS + 9, 20
# More tokens than two passes hold, and more than a sliding window and a pass together.
N_LONG = 1100


pytestmark = pytest.mark.usefixtures("own_home")


def engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"parallel": 1, "n_ctx": 2048, "n_threads": 1, **options})


def answer(engine: Engine, prompt: Sequence[int], owner: str = "") -> EngineAnswer:
    """Returns an answer with the 20 best logprobs at each token, which tests compare in
    place of all logits."""
    sampling = Sampling(temperature=0.0, max_tokens=N_NEW)
    (found,) = engine.generate(
        list(prompt), sampling, n_logprobs=20, return_context=True, owner=owner
    )
    if found.error:
        raise found.error
    return found


def unkept(model: Path, prompt: Sequence[int]) -> EngineAnswer:
    """Returns the answer of an engine without a context store, from an empty
    context."""
    with engine(model, context_store=0) as alone:
        return answer(alone, prompt)


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def states() -> list[StoredBlock]:
    return [
        block
        for block in stored_blocks(default_folder())
        if block.path.name.endswith("-state")
    ]


@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("preset", ALL)
def test_a_repeated_prompt_in_a_new_engine_computes_its_last_token(
    tiny: TinyModel, preset: str, n_parallel: int
) -> None:
    model, prompt = tiny(preset), prompt_of(N_PROMPT)
    expected = unkept(model, prompt)
    for n_computed in (N_PROMPT, 1):
        with engine(model, parallel=n_parallel) as each:
            assert each.llm.n_seq_max == n_parallel
            found = answer(each, prompt)
        assert found.logprobs == expected.logprobs
        assert found.summary.prompt_tokens == n_computed


@pytest.mark.parametrize(
    "preset",
    [
        "tiny-lfm2moe",
        "tiny-qwen35moe",
        "tiny-qwen4exp",  # Each sequence has its own KV cells.
        "tiny-kimi-linear",
        *WINDOWED,
    ],
)
def test_a_sequence_shares_cells_up_to_the_nearest_state_of_another(
    tiny: TinyModel, preset: str
) -> None:
    model, common = tiny(preset), prompt_of(MOST_STEP_TOKENS + 10)
    first, second = ([*common, *prompt_of(n, seed=n)] for n in (450, 200))
    with engine(model, parallel=2) as both:
        answer(both, first)
        found = answer(both, second)
        assert found.summary.disk_tokens == 0
        assert found.summary.cached_tokens >= MOST_STEP_TOKENS
        assert found.logprobs == unkept(model, second).logprobs
        # The sequence of the first prompt has kept its tokens.
        assert answer(both, first).summary.prompt_tokens == 1


@pytest.mark.parametrize("preset", ["tiny-lfm2moe", "tiny-deepseek4"])
def test_a_context_shift_returns_to_the_kept_state_of_the_prompt(
    tiny: TinyModel, preset: str
) -> None:
    """The whole prompt remains, and the state before its last token is kept."""
    n_full = N_PROMPT + 61
    sampling = Sampling(temperature=0.0, max_tokens=80, num_keep=-1, num_ctx=n_full)
    found, n_computed = [], []
    for store in (0, "1GiB"):
        with engine(tiny(preset), context_store=store, draft="off") as each:
            found += each.generate(prompt_of(N_PROMPT), sampling, n_logprobs=20)
            n_computed.append(each.llm.context.n_computed)
    assert found[0].summary.n_shifts == found[1].summary.n_shifts == 1
    assert len(found[0].logprobs) == 80
    assert found[0].logprobs == found[1].logprobs
    assert n_computed[0] - n_computed[1] == N_PROMPT - 1


@pytest.mark.parametrize("preset", ALL)
def test_the_next_turn_in_a_new_engine_computes_only_new_tokens(
    tiny: TinyModel, preset: str
) -> None:
    model, prompt = tiny(preset), prompt_of(N_PROMPT)
    with engine(model) as first:
        turn = answer(first, prompt)
    longer = [*turn.summary.context, *prompt_of(70, seed=1)]
    with engine(model) as later:
        found = answer(later, longer)
    assert found.logprobs == unkept(model, longer).logprobs
    # 70 new tokens and the last token of the previous answer, which was not evaluated.
    assert found.summary.prompt_tokens == 71


@pytest.mark.parametrize("preset", OWN_CELLS)
def test_contexts_are_reused_after_a_change_of_the_number_of_sequences(
    tiny: TinyModel, preset: str
) -> None:
    model, prompt = tiny(preset), prompt_of(N_PROMPT)
    expected = unkept(model, prompt)
    for n_parallel, n_computed in ((1, N_PROMPT), (3, 1), (2, 1)):
        with engine(model, parallel=n_parallel) as each:
            found = answer(each, prompt)
        assert found.logprobs == expected.logprobs
        assert found.summary.prompt_tokens == n_computed


@pytest.mark.parametrize("preset", OWN_CELLS)
def test_a_copied_prefix_continues_with_a_stored_context(
    tiny: TinyModel, preset: str
) -> None:
    model, prompt = tiny(preset), prompt_of(N_PROMPT)
    n_shared = N_PROMPT - 100
    options: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_seq_max": 2}

    def evaluate(llm: Llama, sequence: int, tokens: list[int], n_past: int) -> bytes:
        chunk = SequenceTokens(sequence, tokens, n_past, sequence, Phase.PREFILL)
        rows = llm.context.eval_sequences([chunk])
        assert rows is not None
        return llm.context.logits(rows[0]).tobytes()

    with Llama(model, verbose=False, **options) as llm:
        assert llm.prefix_cache is not None
        evaluate(llm, 0, prompt[:-1], 0)
        llm.prefix_cache.store(0, prompt[:-1], N_PROMPT - 1, goes_on=False)
        expected = evaluate(llm, 0, prompt[-1:], N_PROMPT - 1)
    with Llama(model, verbose=False, **options) as llm:
        assert llm.prefix_cache is not None
        evaluate(llm, 0, prompt[:n_shared], 0)
        assert llm.prefix_cache.copy(0, 1, prompt[:n_shared], 0) == n_shared
        # llama.cpp delays the copy of cells until the next pass. It must not overwrite
        # the cells of the longer context.
        assert llm.prefix_cache.restore(1, prompt, n_shared) == N_PROMPT - 1
        assert evaluate(llm, 1, prompt[-1:], N_PROMPT - 1) == expected


@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "from disk"])
@pytest.mark.parametrize("preset", ALL)
def test_an_edited_last_message_continues_from_the_nearest_state(
    tiny: TinyModel, preset: str, in_memory: bool
) -> None:
    model, prompt = tiny(preset), prompt_of(N_LONG)
    n_same = N_LONG - 50
    edited = [*prompt[:n_same], *prompt_of(40, seed=1)]
    with engine(model) as first:
        answer(first, prompt)
        if in_memory:
            found = answer(first, edited)
    if not in_memory:
        with engine(model) as later:
            found = answer(later, edited)
    assert found.logprobs == unkept(model, edited).logprobs
    assert 40 <= found.summary.prompt_tokens <= 40 + MOST_STEP_TOKENS


@pytest.mark.parametrize("preset", ALL)
def test_two_conversations_share_the_state_of_their_common_beginning(
    tiny: TinyModel, preset: str
) -> None:
    model, common = tiny(preset), prompt_of(MOST_STEP_TOKENS + 10)
    first, second = ([*common, *prompt_of(n, seed=n)] for n in (150, 200))
    with engine(model) as one:
        answer(one, first)
    with engine(model) as other:
        found = answer(other, second)
        again = answer(other, first)
    assert found.logprobs == unkept(model, second).logprobs
    assert again.logprobs == unkept(model, first).logprobs
    assert found.summary.cached_tokens >= MOST_STEP_TOKENS
    assert again.summary.prompt_tokens == 1


@pytest.mark.parametrize(
    ("preset", "n_parallel", "form"),
    [
        ("tiny-qwen2moe", 2, "blocks"),
        ("tiny-gpt-oss", 2, "blocks and windows"),
        ("tiny-gemma4", 2, "blocks and windows"),
        ("tiny-qwen35moe", 2, "blocks and states"),
        ("tiny-qwen4exp", 1, "blocks and states"),
        ("tiny-qwen4exp", 2, "blocks and states"),
        ("tiny-deepseek4", 2, "whole states"),
    ],
)
def test_prefix_cache_form_depends_on_the_models_memory(
    tiny: TinyModel, preset: str, n_parallel: int, form: str
) -> None:
    with engine(tiny(preset), parallel=n_parallel) as each:
        assert each.llm.prefix_cache is not None
        assert each.llm.prefix_cache.form == form


def test_recurrent_states_are_stored_beside_blocks_without_duplicates(
    tiny: TinyModel,
) -> None:
    prompt = prompt_of(N_LONG)
    with engine(tiny("tiny-lfm2moe")) as first:
        answer(first, prompt)
    found = states()
    assert len(found) >= N_LONG // MOST_STEP_TOKENS
    # A state's size does not grow with the conversation.
    assert len({block.n_bytes for block in found}) <= 2
    blocks = [
        block
        for block in stored_blocks(default_folder())
        if block.about.n_own_tokens == BLOCK_TOKENS
    ]
    assert len(blocks) == (N_LONG + N_NEW - 1) // BLOCK_TOKENS


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("preset", ["tiny-lfm2moe", "tiny-qwen35moe", "tiny-deepseek4"])
def test_a_damaged_state_is_computed_again(
    tiny: TinyModel, preset: str, kept: int
) -> None:
    """Damages all stored states except the first `kept` ones, which have the fewest
    tokens."""
    model, prompt = tiny(preset), prompt_of(N_LONG)
    with engine(model) as first:
        expected = answer(first, prompt)
    damaged = sorted(states(), key=lambda block: block.about.n_tokens)[kept:]
    for block in damaged:
        flip_last_byte(block.path)
    with engine(model) as later:
        found = answer(later, prompt)
    assert found.logprobs == expected.logprobs
    assert found.summary.cached_tokens == (MOST_STEP_TOKENS if kept else 0)
    with engine(model) as again:  # the recomputed states have replaced the damaged ones
        assert answer(again, prompt).summary.prompt_tokens == 1


@pytest.mark.parametrize("word", [0, 1], ids=["cells", "position"])
def test_a_wrong_state_with_a_right_checksum_is_computed_again(
    tiny: TinyModel, word: int
) -> None:
    model, prompt = tiny("tiny-lfm2moe"), prompt_of(N_PROMPT)
    with engine(model) as first:
        expected = answer(first, prompt)
    store = KvBlockStore(default_folder(), GIB)
    for block in states():
        words = np.frombuffer(store.read(block.path.name), np.uint8).copy()
        words[: 4 * (len(words) // 4)].view(np.int32)[word] += 1
        store.write(block.path.name, block.about, [words.tobytes()])
    with engine(model) as later:
        found = answer(later, prompt)
    assert found.logprobs == expected.logprobs
    assert found.summary.cached_tokens == 0


def test_a_damaged_block_before_a_state_limits_reuse_to_earlier_tokens(
    tiny: TinyModel,
) -> None:
    model, prompt = tiny("tiny-lfm2moe"), prompt_of(N_LONG)
    with engine(model) as first:
        expected = answer(first, prompt)
    (block,) = (
        each
        for each in stored_blocks(default_folder())
        if each.about.n_tokens == 10 * BLOCK_TOKENS
    )
    flip_last_byte(block.path)
    with engine(model) as later:
        found = answer(later, prompt)
    assert found.logprobs == expected.logprobs
    assert found.summary.cached_tokens == MOST_STEP_TOKENS


@pytest.mark.parametrize("preset", WINDOWED)
def test_a_sliding_window_is_restored_without_earlier_windows(
    tiny: TinyModel, preset: str
) -> None:
    model, prompt = tiny(preset), prompt_of(N_LONG)
    with engine(model) as first:
        expected = answer(first, prompt)
    windows = [
        block
        for block in stored_blocks(default_folder())
        if block.path.name.endswith("-window")
    ]
    for block in windows:
        if block.about.n_tokens < N_LONG - 300:
            block.path.unlink()
    with engine(model) as later:
        found = answer(later, prompt)
    assert found.logprobs == expected.logprobs
    assert found.summary.prompt_tokens == 1


def test_owners_share_no_stored_state(tiny: TinyModel) -> None:
    model, prompt = tiny("tiny-lfm2moe"), prompt_of(N_PROMPT)
    for n_computed in (N_PROMPT, 1):
        with engine(model) as each:
            for owner in ("a", "b"):
                assert answer(each, prompt, owner).summary.prompt_tokens == n_computed


def test_the_last_tokens_of_a_long_prompt_are_a_separate_pass(tiny: TinyModel) -> None:
    model, prompt = tiny("tiny-lfm2moe"), prompt_of(N_LONG)
    edited = [*prompt[: N_LONG - 50], *prompt_of(40, seed=1)]
    with engine(model, n_batch=2048, n_ubatch=2048) as each:
        answer(each, prompt)
        found = answer(each, edited)
    assert found.logprobs == unkept(model, edited).logprobs
    assert found.summary.prompt_tokens == 40 + MOST_STEP_TOKENS - 50
