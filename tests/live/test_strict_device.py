"""Tests many features on a strict simulated device (moegguf/testing/link_device.cpp)
with slots for some experts.

The results equal the results with every expert in VRAM. The device is asynchronous,
repeats graphs as CUDA does, and fills memory with NaN while a copy writes it. Data that
is read too early, overwritten too early or moved shows in the logits, or as a fault
that the device records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import (
    DEMO,
    Received,
    Scripted,
    TinyModel,
    answers_together,
    ask,
    endless,
)
from eager import Eager
from own_process import in_new_process, in_own_process
from pictures import message, png
from running import (
    Llama,
    Meddler,
    greedy_logits,
    random_prompt,
    share_for,
    write_adapter,
)
from test_drafts import CODE, Recalled
from test_vision import KINDS, Projector, answer, last_logits

from moegguf.controller.prefetch import PrefetchOptions
from moegguf.generate import drafting
from moegguf.generate.engine import Engine
from moegguf.generate.request import Request, Sampling
from moegguf.generate.sequence import Sequence
from moegguf.gguf.experts import read_layout
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link
from moegguf.testing.link_device import LinkFigures, add_link_device, link_figures
from tools.gpu.short_plan import switch_bits
from tools.models import PRESETS, QUANTS

OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "n_threads": 1,
    "verbose": False,
    "placement": "slots",
}
LINK = Link(8e9, 5e-6)
TINY = [name for name in PRESETS if name.startswith("tiny-")]
Outcome = Any
Scenario = Callable[[Llama], Outcome]


@dataclass(frozen=True)
class Budgets:
    """Budgets in VRAM and RAM, and the other options with which `load` loads a
    model."""

    vram: str | int
    ram: str | int | None
    options: dict[str, Any]

    def load(self, path: Path) -> Llama:
        return Llama(path, vram_cache=self.vram, expert_cache=self.ram, **self.options)


def add_devices(n: int) -> list[str]:
    """Adds `n` strict devices, each with its own seed for delays. Returns their
    names."""
    return [add_link_device(LINK, strict_seed=seed) for seed in range(1, n + 1)]


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Asserts that both outcomes are equal. Arrays must also be finite."""
    if isinstance(expected, np.ndarray):
        assert np.isfinite(expected).all()
        assert np.array_equal(found, expected)
    else:
        assert found == expected


def assert_acted(names: Iterable[str], before: dict[str, LinkFigures]) -> None:
    """Asserts that no device has a fault.

    Each device must also have replayed graphs, run copies, and launched graphs during
    copies since `before`.
    """
    for name in names:
        figures = link_figures(name)
        assert figures.fault == ""
        assert figures.replays > before[name].replays
        assert figures.copies > before[name].copies
        assert figures.launches_beside_copies > before[name].launches_beside_copies


def compare(
    path: Path,
    scenario: Scenario,
    n_devices: int = 1,
    share: float = 0.4,
    **options: Any,
) -> None:
    """Compares a scenario's outcome with every expert in VRAM with its outcome with
    slots for a `share` of the experts.

    In the second case VRAM and RAM have equal budgets.
    """
    names = add_devices(n_devices)
    options = OPTIONS | options
    options["store"] = StoreOptions(
        device=names[0] if n_devices == 1 else None, staging=1
    )
    n_slots = int(read_layout(path).n_expert_total * share)
    with Budgets("100%", None, options).load(path) as llm:
        expected, n_ubatch = scenario(llm), llm.plan.n_ubatch
    before = {name: link_figures(name) for name in names}
    some = share_for(path, n_slots, names[0])
    with Budgets(some, some, options).load(path) as llm:
        assert llm.plan.n_ubatch == n_ubatch
        with Meddler(llm.session.store):
            assert_same(scenario(llm), expected)
        stats = llm.stats()
        assert stats.hits > 0 and stats.misses > 0 and stats.evictions > 0
    assert_acted(names, before)


# Answers together


class Joining:
    """A schedule that admits one more request in every second step. Sequences leave
    when they are finished."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._step = 0
        self.widths: list[int] = []

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
        self._step += 1
        joined = self._requests[: 1 + self._step // 2]
        chosen = [
            sequence
            for sequence in running
            if any(sequence.request is each for each in joined)
        ] or running
        self.widths.append(len(chosen))
        return chosen

    def ran(self, step: object) -> None:
        pass


@dataclass(frozen=True)
class Batches:
    """A scenario with `n` answers of several lengths, whose sequences join and leave
    the passes at different steps."""

    n: int

    def __call__(self, llm: Llama) -> Outcome:
        random = np.random.default_rng(self.n)
        requests = [
            ask(
                prompt="",
                context=tuple(
                    random.integers(
                        0, llm.n_vocab(), int(random.integers(2, 30))
                    ).tolist()
                ),
                max_tokens=2 * self.n + 2 * i % 5,
                n_logprobs=5,
                logit_bias=endless(llm),
                return_context=False,
            )
            for i in range(self.n)
        ]
        joining = Joining(requests)
        received = answers_together(llm, requests, Scripted(inner=joining))
        assert [each.error for each in received] == [None] * self.n
        assert {1, self.n} <= set(joining.widths), "they join and leave"
        return [(each.text, each.logprobs) for each in received]


@pytest.mark.parametrize("n", [3, pytest.param(6, marks=pytest.mark.slow), 9])
@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-mix"])
def test_sequences_that_join_and_leave_have_the_resident_bits(
    tiny: TinyModel, preset: str, n: int
) -> None:
    in_own_process(
        compare, tiny(preset, "q4_k_m"), Batches(n), n_seq_max=n, flash_attn=None
    )


# Drafts


def texts_of(received: list[Received]) -> list[Any]:
    assert [each.error for each in received] == [None] * len(received)
    return [(each.text, each.logprobs) for each in received]


def recalled(llm: Llama) -> Outcome:
    """Returns three answers without drafts, then the three answers with partly wrong
    drafts (`Recalled`)."""
    drafting.DraftGate = Eager  # type: ignore[misc]
    options: dict[str, Any] = {
        "max_tokens": 24,
        "n_logprobs": 5,
        "return_context": True,
    }
    requests = [ask(prompt=f"{i} {CODE}", **options) for i in range(3)]
    llm.drafts, drafts = None, llm.drafts
    undrafted = answers_together(llm, requests)
    llm.context.clear()
    Recalled.known = [each.summary.context for each in undrafted]
    Recalled.random, Recalled.n_accepted = np.random.default_rng(1), 0
    llm.drafts = Recalled(llm.n_seq_max)
    before = llm.stats()
    drafted = answers_together(llm, requests)
    counted = llm.stats() - before
    llm.drafts = drafts
    assert 0 < counted.accepted_tokens < counted.drafted_tokens
    return texts_of([*undrafted, *drafted])


def heads(llm: Llama) -> Outcome:
    """Returns two batched answers, drafted by the file's MTP heads."""
    drafting.DraftGate = Eager  # type: ignore[misc]
    options: dict[str, Any] = {
        "max_tokens": 24,
        "n_logprobs": 5,
        "return_context": True,
    }
    found = texts_of(
        answers_together(llm, [ask(prompt=f"{i} {CODE}", **options) for i in range(2)])
    )
    assert llm.stats().accepted_tokens > 0
    return found


@pytest.mark.filterwarnings("ignore:draft")
def test_right_and_wrong_drafts_have_the_resident_bits() -> None:
    in_own_process(
        compare, DEMO, recalled, n_seq_max=3, n_ctx=768, flash_attn=None, draft="ngram"
    )


def test_drafts_by_mtp_heads_have_the_resident_bits(tiny: TinyModel) -> None:
    in_own_process(
        compare,
        tiny("tiny-glm4moe"),
        heads,
        n_seq_max=2,
        n_ctx=768,
        flash_attn=None,
        draft="mtp",
    )


# Tests of adapters, images and kept contexts


def short_greedy(llm: Llama) -> Outcome:
    return greedy_logits(llm, random_prompt(llm, 40), 16)


@pytest.mark.parametrize("n_devices", [1, 2])
def test_an_adapter_on_experts_has_the_resident_bits(
    tiny: TinyModel, tmp_path: Path, n_devices: int
) -> None:
    adapter = write_adapter(
        tmp_path / "adapter.gguf",
        "qwen2moe",
        "blk.1.ffn_gate_exps.weight",
        (16, 64, 128),
    )
    options: dict[str, Any] = {
        "lora_path": str(adapter),
        "lora_scale": 0.5,
        "logits_all": True,
    }
    in_own_process(compare, tiny(), short_greedy, n_devices, **options)


def look(llm: Llama) -> Outcome:
    """Returns the last logits of an answer about an image, and of the next answer,
    which is about a second image."""
    first = message("look ", png(120, 64), "what is it?")
    text, _ = answer(llm, [first])
    logits = last_logits(llm)
    answer(
        llm,
        [
            first,
            {"role": "assistant", "content": text},
            message("and ", png(64, 64, seed=2), "this?"),
        ],
    )
    return np.concatenate([logits, last_logits(llm)])


@pytest.mark.parametrize(("kind", "preset"), KINDS)
def test_answers_about_images_have_the_resident_bits(
    tiny: TinyModel, projector: Projector, kind: str, preset: str
) -> None:
    in_own_process(
        compare, tiny(preset), look, mmproj=str(projector(kind)), n_ubatch=64
    )


def kept_contexts(path: Path) -> None:
    """Compares three engines: every expert in VRAM, slots for 40 % of the experts, and
    again slots for 40 %.

    The third engine continues from contexts that the second engine stored.
    """
    (name,) = add_devices(1)
    prompt = np.random.default_rng(0).integers(5, 900, 140).tolist()
    options: dict[str, Any] = {
        "parallel": 1,
        "n_ctx": 512,
        "n_threads": 1,
        "store": StoreOptions(device=name),
    }
    some = share_for(path, int(read_layout(path).n_expert_total * 0.4), name)
    found = []
    before = {name: link_figures(name)}
    slots = {"vram_cache": some, "expert_cache": some}
    for budgets in ({"vram_cache": "100%"}, slots, slots):
        with Engine(path, **budgets, **options) as engine:
            (each,) = engine.generate(
                prompt,
                Sampling(temperature=0.0, max_tokens=20),
                n_logprobs=20,
                return_context=True,
            )
            assert each.error is None
            found.append(each)
    assert found[0].logprobs == found[1].logprobs == found[2].logprobs
    assert [each.summary.disk_tokens for each in found] == [0, 0, len(prompt) - 1]
    assert_acted([name], before)


def test_contexts_restored_from_disk_have_the_resident_bits(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MOEGGUF_CONTEXT_STORE", "1GiB")
    in_own_process(kept_contexts, tiny())


# Tests of pool sizes, prompts, devices and types


def resizing(llm: Llama) -> Outcome:
    """Returns the logits of several runs. Pools are resized between runs, and before
    each evaluation of the last run.

    Pools keep their size if every expert has a slot.
    """
    path, random = Path(llm.model_path), np.random.default_rng(0)
    layout = read_layout(path)
    n_least, n_most = 2 * layout.n_expert_used + 2, int(layout.n_expert_total * 0.4)
    resizes = llm.stats().tiers[0].n_slots < layout.n_expert_total

    def resize() -> None:
        if resizes:
            n_staged = llm.plan.staging_slots_bytes // llm.plan.device_slot_bytes
            n_vram, n_ram = map(int, random.integers(n_least, n_most, 2))
            budgets = (
                share_for(path, n, llm.plan.device) for n in (n_vram + n_staged, n_ram)
            )
            llm.set_budget(
                **dict(zip(("vram_cache", "expert_cache"), budgets, strict=True))
            )

    found = [short_greedy(llm)]
    for _ in range(3):
        resize()
        found.append(short_greedy(llm))
    found.append(greedy_logits(llm, random_prompt(llm, 40), 16, before_each=resize))
    return np.concatenate(found)


def turns(llm: Llama) -> Outcome:
    """Returns the logits of prompts of several sizes in one context, each followed by
    three greedy tokens."""
    llm.reset()
    for n_tokens in (1, 2, 3, 8, 9, 33, 128, 4):
        llm.eval(random_prompt(llm, n_tokens, seed=n_tokens))
        for _ in range(3):
            llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
    return llm.scores[: llm.n_tokens].copy()


@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-gpt-oss"])
def test_pools_that_change_in_size_have_the_resident_bits(
    tiny: TinyModel, preset: str
) -> None:
    in_own_process(compare, tiny(preset), resizing, logits_all=True)


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-gpt-oss"])
def test_staged_prompts_have_the_resident_bits(
    tiny: TinyModel, preset: str, n_devices: int
) -> None:
    split = {"n_gpu_layers": -1, "tensor_split": [1, 1]} if n_devices == 2 else {}
    in_own_process(compare, tiny(preset), turns, n_devices, logits_all=True, **split)


def compare_predicting(path: Path, scenario: Scenario) -> None:
    """Calls `compare` with prefetches of the predictor `skip`, whose scores the
    device's graphs compute."""

    def predicting(llm: Llama) -> Outcome:
        outcome, counters = scenario(llm), llm.session.store.counters()
        acted = (
            counters["forecast_scored"],
            counters["forecast_right"],
            counters["prefetch_started"],
        )
        assert all(acted) or llm.stats().evictions == 0
        return outcome

    prefetch = PrefetchOptions(watchdog=False)
    compare(
        path,
        predicting,
        logits_all=True,
        policy="lru",
        predictor="skip",
        prefetch=prefetch,
    )


@pytest.mark.parametrize("scenario", [turns, resizing])
def test_prediction_in_the_graph_has_the_resident_bits(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, scenario: Scenario
) -> None:
    monkeypatch.setenv("MOEGGUF_SWITCHES", str(switch_bits("abdefgi")))
    in_new_process(compare_predicting, tiny("tiny-mix", "q4_k_m"), scenario)


def compare_all(paths: list[Path]) -> None:
    for path in paths:
        compare(path, short_greedy, logits_all=True)


def quants_of(preset: str) -> list[str]:
    """Returns the quantisations to test: two for models with a recurrent state, and all
    for the others."""
    return ["q4_0", "q4_k_m"] if "r" in PRESETS[preset].mixers else list(QUANTS)


@pytest.mark.parametrize("part", [0, 1])
def test_every_preset_has_the_resident_bits_in_one_quantisation(
    tiny: TinyModel, part: int
) -> None:
    presets = list(enumerate(TINY))[part::2]
    quants = {
        preset: quants_of(preset)[i % len(quants_of(preset))] for i, preset in presets
    }
    in_own_process(
        compare_all, [tiny(preset, quant) for preset, quant in quants.items()]
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", TINY)
def test_every_preset_has_the_resident_bits_in_every_quantisation(
    tiny: TinyModel, preset: str
) -> None:
    in_own_process(compare_all, [tiny(preset, quant) for quant in quants_of(preset)])
