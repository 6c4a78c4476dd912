"""Tests contexts that are stored on disk.

An answer from a restored context has the same logprobs as an answer without stored
contexts. Damaged blocks are recomputed.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import DEMO, TinyModel, prompt_of
from pictures import message, png
from rpc_device import on_servers

from moegguf.engine import prefix_cache
from moegguf.engine.kv_block_store import (
    About,
    KvBlockStore,
    default_folder,
    stored_blocks,
)
from moegguf.engine.llama import Llama
from moegguf.engine.prefix_cache import BLOCK_TOKENS, PrefixCache
from moegguf.generate.engine import Engine, EngineAnswer
from moegguf.generate.request import Sampling
from moegguf.gguf.reader import read_gguf
from moegguf.native.store import StoreOptions
from moegguf.quantities import GIB, Link
from moegguf.testing.link_device import add_link_device

N_PROMPT, N_NEW = 5 * BLOCK_TOKENS + 9, BLOCK_TOKENS + 20
MODELS = {
    "demo": DEMO, "iswa": "tiny-gpt-oss", "deepseek": "tiny-deepseek2", "qwen3": "tiny-qwen3moe",
    "m-rope": "tiny-qwen3vlmoe", "shared kv": "tiny-gemma4",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_home")


def engine(model: Path | str, **options: Any) -> Engine:
    return Engine(model, **{"parallel": 2, "n_ctx": 1024, "n_threads": 1, **options})


def answer(
    engine: Engine, prompt: Sequence[int], owner: str = "", **sampling: Any
) -> EngineAnswer:
    """Returns an answer with the 20 best logprobs at each token, which tests compare in
    place of all logits."""
    (found,) = engine.generate(
        list(prompt),
        Sampling(
            **{"temperature": 0.0, "max_tokens": N_NEW, "ignore_eos": True, **sampling}
        ),
        n_logprobs=20,
        return_context=True,
        owner=owner,
    )
    if found.error:
        raise found.error
    return found


def computed(found: EngineAnswer) -> tuple[int, int]:
    return found.summary.prompt_tokens, found.summary.disk_tokens


@pytest.fixture
def unkept(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineAnswer]:
    """Returns a function that generates the answer of an engine without a context
    store, in an empty context."""

    def ask(model: Path | str, prompt: Sequence[int], **options: Any) -> EngineAnswer:
        with engine(model, context_store=0, **options) as alone:
            return answer(alone, prompt)

    return ask


@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_context_continues_with_the_same_bits(
    name: str, n_parallel: int, tiny: TinyModel, unkept: Callable[..., EngineAnswer]
) -> None:
    model, prompt = (
        MODELS[name] if name == "demo" else tiny(MODELS[name]),
        prompt_of(N_PROMPT),
    )
    expected = unkept(model, prompt)
    for n_computed, n_disk in ((N_PROMPT, 0), (1, N_PROMPT - 1)):
        with engine(model, parallel=n_parallel) as first:
            assert first.llm.batch_invariant
            found = answer(first, prompt)
            assert (found.text, found.logprobs) == (expected.text, expected.logprobs)
            assert computed(found) == (n_computed, n_disk)
    longer = [*expected.summary.context, *prompt_of(70, seed=1)]  # the next turn
    expected = unkept(model, longer)
    with engine(model, parallel=n_parallel) as later:
        found = answer(later, longer)
        assert (found.text, found.logprobs) == (expected.text, expected.logprobs)
        # 70 new tokens and the last token of the previous answer, which was not
        # evaluated.
        assert computed(found) == (71, len(longer) - 71)


@pytest.mark.parametrize("name", ["demo", "iswa"])
def test_another_question_computes_only_tokens_after_the_shared_blocks(
    name: str, tiny: TinyModel, unkept: Callable[..., EngineAnswer]
) -> None:
    model, prompt = (
        MODELS[name] if name == "demo" else tiny(MODELS[name]),
        prompt_of(N_PROMPT),
    )
    others = [
        [*prompt[: 4 * BLOCK_TOKENS + 7], *prompt_of(30, seed)] for seed in (1, 2)
    ]
    expected = [unkept(model, other) for other in others]
    with engine(model) as first:
        answer(first, prompt)
    with engine(model) as later:
        for other, wanted in zip(others, expected, strict=True):
            found = answer(later, other)
            assert (found.text, found.logprobs) == (wanted.text, wanted.logprobs)
            assert found.summary.cached_tokens >= 4 * BLOCK_TOKENS


def test_recurrent_states_are_stored_and_damaged_ones_computed_again(
    tiny: TinyModel,
) -> None:
    model, prompt = tiny("tiny-lfm2moe"), prompt_of(N_PROMPT)
    with engine(model, context_store=0) as never_stopped:
        first_turn = answer(never_stopped, prompt)
        longer = [*first_turn.summary.context, *prompt_of(70, seed=1)]
        expected = answer(never_stopped, longer)
        # 70 new tokens and the last token of the previous answer, which was not
        # evaluated.
        assert computed(expected) == (71, 0)
    with engine(model) as first:
        assert answer(first, prompt).logprobs == first_turn.logprobs
    with engine(model) as later:
        found = answer(later, longer)
        assert found.logprobs == expected.logprobs
        assert computed(found) == (71, len(longer) - 71)
    with engine(model) as again:
        assert computed(answer(again, [*prompt, *prompt_of(5, seed=2)])) == (
            6,
            N_PROMPT - 1,
        )
        assert computed(answer(again, prompt)) == (
            1,
            0,
        )  # the sequence still holds these tokens, and goes back to an earlier state
    for block in stored_blocks(default_folder()):
        block.path.write_bytes(block.path.read_bytes()[:-1] + b"?")
    with engine(model) as damaged:
        assert answer(damaged, prompt).logprobs == first_turn.logprobs


@pytest.mark.parametrize("cache", ["40%", "100%"])
def test_experts_of_the_last_token_are_fetched_during_the_load(cache: str) -> None:
    prompt, n_started = prompt_of(N_PROMPT), []
    for turn in range(3):
        with engine(
            DEMO, parallel=1, expert_cache=cache, store=StoreOptions(fill=False)
        ) as each:
            session, n_used = each.llm.session, each.llm.layout.token_cycle_slots
            assert session is not None
            session.store.drain()
            n_started.append(session.store.counters()["prefetch_started"])
            before = each.llm.stats()
            answer(each, prompt, max_tokens=1)
            assert turn != 1 or (each.llm.stats() - before).misses == 0
        if turn == 1:
            (known,) = default_folder().glob("??/*-experts")
            known.write_bytes(b"damaged")
    assert n_started == [0, n_used, 0]


def test_generate_of_llama_continues_from_stored_blocks(
    unkept: Callable[..., EngineAnswer],
) -> None:
    prompt, options = (
        prompt_of(N_PROMPT),
        {"n_ctx": 1024, "flash_attn": True, "verbose": False, "n_threads": 1},
    )
    logits = []
    for n_evaluated in (N_PROMPT, 1):
        with Llama(DEMO, **options) as llm:
            steps = llm.generate(prompt, temp=0.0)
            tokens = [next(steps) for _ in range(3)]
            logits.append((tokens, llm.context.logits().copy().tobytes()))
            steps.close()
            assert llm.stats().tokens == n_evaluated + 2
    assert logits[0] == logits[1]


def test_other_options_or_weights_reuse_no_stored_block(
    tiny: TinyModel, tmp_path: Path
) -> None:
    prompt, copy = prompt_of(N_PROMPT), tmp_path / "copy.gguf"
    path = tiny("tiny-qwen3moe")
    with engine(path) as first:
        answer(first, prompt)
    data = bytearray(path.read_bytes())
    norm = next(
        tensor
        for tensor in read_gguf(path).tensors
        if tensor.name == "blk.0.attn_norm.weight"
    )
    # The zeros imitate other weights in a model of the same shape.
    data[norm.offset : norm.offset + norm.n_bytes] = bytes(norm.n_bytes)
    copy.write_bytes(data)
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    for options in (
        {"type_k": 0},
        {"rope_freq_base": 1e4},
        {"flash_attn": False},
        {"model": copy},
    ):
        with engine(**{"model": path, **options}) as other:
            assert computed(answer(other, prompt))[1] == 0, options
    with engine(path, n_ctx=512, expert_cache="60%", parallel=1) as same:
        assert computed(answer(same, prompt)) == (1, N_PROMPT - 1)


@on_servers()
def test_a_context_in_device_memory_is_restored(path: Path) -> None:
    """Three engines answer the same prompt in turn. One stored block is damaged after
    the first answer."""
    device, found = (
        add_link_device(Link(8e9, 5e-6), memory_bytes=256 << 20, strict_seed=1),
        list[EngineAnswer](),
    )
    for _ in range(3):
        with engine(
            path, store=StoreOptions(device=device), vram_cache="100%", parallel=1
        ) as each:
            found.append(answer(each, prompt_of(N_PROMPT)))
        if len(found) == 1:
            damaged = block_paths()[3]
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert all(each.logprobs == found[0].logprobs for each in found)
    n_left = 3 * BLOCK_TOKENS
    assert [computed(each) for each in found] == [
        (N_PROMPT, 0),
        (N_PROMPT - n_left, n_left),
        (1, N_PROMPT - 1),
    ]


def test_owners_share_no_stored_block() -> None:
    prompt = prompt_of(N_PROMPT)
    for n_disk in (0, N_PROMPT - 1):
        with engine(DEMO) as each:
            for owner in ("a", "b", ""):
                assert computed(answer(each, prompt, owner=owner)) == (
                    N_PROMPT - n_disk,
                    n_disk,
                )


def block_paths() -> list[Path]:
    """Returns the paths of the first five full blocks, in the order of their tokens."""
    blocks = sorted(
        stored_blocks(default_folder()), key=lambda block: block.about.n_tokens
    )
    return [block.path for block in blocks if block.about.n_own_tokens == BLOCK_TOKENS][
        :5
    ]


def crafted(path: Path, index: int) -> None:
    """Replaces a stored block with one that has a wrong value but a correct checksum.

    `index` selects the value: 0 is the type of K, 1 the number of cells, and 2 a
    position.
    """
    store = KvBlockStore(default_folder(), GIB)
    data = store.read(path.name)
    words = np.frombuffer(data, np.int32).copy()
    words[{0: 2 + 3 * BLOCK_TOKENS + 2, 1: 1, 2: 2}[index]] += 1
    store.write(path.name, About("", 0, 0), [words.tobytes()])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "a crafted type": lambda path: crafted(path, 0),
    "a crafted number of cells": lambda path: crafted(path, 1),
    "a crafted position": lambda path: crafted(path, 2),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("n_damaged", [1, 5])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_blocks_are_computed_again_and_replaced(
    damage: Callable[[Path], object],
    n_damaged: int,
    unkept: Callable[..., EngineAnswer],
) -> None:
    prompt = prompt_of(N_PROMPT)
    expected = unkept(DEMO, prompt)
    with engine(DEMO) as first:
        answer(first, prompt)
    paths = block_paths()
    for path in paths[2:3] if n_damaged == 1 else paths:
        damage(path)
    with engine(DEMO) as later:
        found = answer(later, prompt)
        assert (found.text, found.logprobs) == (expected.text, expected.logprobs)
        assert found.summary.disk_tokens == (2 * BLOCK_TOKENS if n_damaged == 1 else 0)
    with engine(DEMO) as again:  # the recomputed blocks have replaced the damaged ones
        found = answer(again, prompt)
        assert found.logprobs == expected.logprobs
        assert computed(found) == (1, N_PROMPT - 1)


def test_blocks_refused_by_a_full_write_queue_are_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The write queue holds one block at a time.
    monkeypatch.setattr(prefix_cache, "MOST_QUEUED_BYTES", 1)
    prompt, kept, keep = prompt_of(10 * BLOCK_TOKENS), [], PrefixCache._keep_block
    monkeypatch.setattr(
        PrefixCache, "_keep_block", lambda *given: kept.append(keep(*given)) or kept[-1]
    )
    with engine(DEMO) as first:
        answer(first, prompt, max_tokens=1)
    assert not all(kept)
    with engine(DEMO) as later:
        assert computed(answer(later, prompt, max_tokens=1)) == (
            1,
            10 * BLOCK_TOKENS - 1,
        )


def test_a_restored_context_replaces_old_sequences_in_a_full_cache(
    unkept: Callable[..., EngineAnswer],
) -> None:
    prompts = [prompt_of(N_PROMPT, seed) for seed in range(4)]
    expected = [unkept(DEMO, prompt).logprobs for prompt in prompts]
    for n_computed in (N_PROMPT, 1):
        with engine(DEMO, parallel=4, n_ctx=512, kv_tokens=1024) as small:
            found = [answer(small, prompt) for prompt in prompts]
        assert [each.logprobs for each in found] == expected
        assert [each.summary.prompt_tokens for each in found] == [n_computed] * 4


def test_blocks_after_a_context_shift_are_not_stored(
    unkept: Callable[..., EngineAnswer],
) -> None:
    prompt, sampling = prompt_of(200), {"max_tokens": 300}
    with engine(DEMO, parallel=1, n_ctx=256, context_store=0) as alone:
        expected = answer(alone, prompt, **sampling)
        assert expected.summary.n_shifts
    for _ in range(2):
        with engine(DEMO, parallel=1, n_ctx=256) as kept:
            assert answer(kept, prompt, **sampling).logprobs == expected.logprobs
    assert max(block.about.n_tokens for block in stored_blocks(default_folder())) < 256


@pytest.mark.parametrize(
    ("kind", "preset", "size"),
    [
        ("mlp", "tiny-qwen2moe", (128, 96)),
        ("gemma3", "tiny-qwen3moe", (128, 96)),
        ("qwen2vl_merger", "tiny-qwen3vlmoe", (640, 512)),
    ],
)
def test_images_are_restored_by_the_hash_of_their_content(
    kind: str,
    preset: str,
    size: tuple[int, int],
    tiny: TinyModel,
    projector: Callable[[str], Path],
) -> None:
    model, mmproj, words = (
        tiny(preset),
        projector(kind),
        "what is it, and what was it before? " * 3,
    )

    def turn(engine: Engine, seed: int) -> EngineAnswer:
        asked = message(
            "look ", png(*size, seed=seed), words, png(64, 64, seed=9), "and this?"
        )
        (found,) = engine.chat([asked], temperature=0.0, max_tokens=8, n_logprobs=20)
        if found.error:
            raise found.error
        return found

    with engine(
        model, n_ctx=4096, mmproj=mmproj, context_store=0, parallel=1
    ) as unkept:
        expected = {seed: turn(unkept, seed).logprobs for seed in (1, 2)}
    with engine(model, n_ctx=4096, mmproj=mmproj) as first:
        # This prompt occupies one sequence, so the images are evaluated in another one.
        answer(first, prompt_of(90))
        found = turn(first, 1)
        assert found.logprobs == expected[1]
        n_all, n_disk = computed(found)
        assert n_all > 100 and n_disk == 0
    with engine(model, n_ctx=4096, mmproj=mmproj) as later:
        found = turn(later, 1)
        assert found.logprobs == expected[1]
        assert computed(found) == (1, n_all - 1)
        # Another picture of the same size does not share any stored block.
        found = turn(later, 2)
        assert found.logprobs == expected[2]
        assert computed(found)[1] == 0
