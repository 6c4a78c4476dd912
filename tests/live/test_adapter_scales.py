"""Tests the LoRA adapter scale that a request sets. The scale applies to this request
only, and only requests with the same scale reuse the request's computed context.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import Received, TinyModel, answers_together, ask
from running import write_adapter

from moegguf.engine.llama import Llama
from moegguf.errors import OptionError
from moegguf.generate.engine import Engine
from moegguf.generate.request import Request

WIDTH = 128
PROMPT = " the".join(str(n) for n in range(90))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    return write_adapter(
        path, "qwen2moe", "blk.1.ffn_gate_exps.weight", (16, 64, WIDTH)
    )


def load(path: Path, adapter: Path | None, **options: Any) -> Llama:
    options = {
        "n_ctx": 512,
        "n_seq_max": 4,
        "expert_cache": "50%",
        "flash_attn": None,
        "verbose": False,
        **options,
    }
    return Llama(path, lora_path=adapter, **options)


@pytest.fixture
def llm(tiny: TinyModel, adapter: Path) -> Iterator[Llama]:
    with load(tiny("tiny-qwen2moe"), adapter) as llm:
        yield llm


def request(
    scale: float | None = None, prompt: str = PROMPT, **options: Any
) -> Request:
    return ask(prompt=prompt, lora_scale=scale, n_logprobs=2, max_tokens=6, **options)


def facts(received: Received) -> tuple[Any, ...]:
    assert received.error is None
    return received.text, received.logprobs


def test_requests_in_one_batch_use_their_own_lora_scale(
    llm: Llama, tiny: TinyModel, adapter: Path
) -> None:
    scales = (None, 0.0, 2.0, None, 2.0, 1.0)
    together = [
        facts(each)
        for each in answers_together(llm, [request(scale) for scale in scales])
    ]
    assert together[0] == together[3] == together[5] and together[2] == together[4]
    assert len({text for text, _ in (together[0], together[1], together[2])}) > 1
    for scale, found in ((2.0, together[2]), (1.0, together[0])):
        with load(tiny("tiny-qwen2moe"), adapter, lora_scale=scale) as loaded:
            assert facts(answers_together(loaded, [request()])[0]) == found
    with load(tiny("tiny-qwen2moe"), None) as without:
        assert facts(answers_together(without, [request()])[0]) == together[1]
        (refused,) = answers_together(without, [request(1.0)])
        assert isinstance(refused.error, OptionError)


def test_a_cached_prefix_is_reused_only_at_its_lora_scale(
    tiny: TinyModel, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tiny("tiny-qwen2moe")
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "n_logprobs": 2}
    for _ in range(2):  # the second engine finds the first one's contexts on disk
        with Engine(load(path, adapter, context_store="64MiB")) as engine:
            found = [
                engine.generate(PROMPT, lora_scale=scale, **options)[0]
                for scale in (None, 2.0, None, 2.0)
            ]
            engine.llm.close()
        n_cached = [each.summary.cached_tokens for each in found]
        assert (
            found[0].logprobs
            == found[2].logprobs
            != found[1].logprobs
            == found[3].logprobs
        )
        assert n_cached[2] > 0 and n_cached[3] > 0
        n_disk = [each.summary.disk_tokens for each in found]
    assert n_disk[0] > 0 and n_disk[1] > 0


def test_the_loop_restores_the_lora_scale_of_the_load(
    llm: Llama, adapter: Path
) -> None:
    tokens = llm.vocabulary.tokens(PROMPT)
    llm.eval(tokens)
    expected = llm.context.logits().copy()
    llm.reset()
    answers_together(llm, [request(2.0)])
    assert llm.context.lora_scale == 1.0 and llm.n_tokens == 0
    llm.eval(tokens)
    assert (llm.context.logits() == expected).all()
