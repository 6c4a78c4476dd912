"""Tests slots on a GPU, filled from slots in RAM: logits are bit-identical to
llama.cpp's with all layers on this GPU.

The tests run on any GPU that ggml sees: a real one (`tools/gpu_trial.py`) or software
Vulkan (`make test-vulkan`). Without a GPU they are skipped.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import Llama, Logits, Meddler, TinyModel, hooks_off, share_for

from moegguf.engine.devices import gpus
from moegguf.engine.machine import Device
from moegguf.gguf.experts import read_layout
from moegguf.native.store import StoreOptions
from tools.models import PRESETS, QUANTS

Prompt = Sequence[int]
Plain = Callable[..., Logits]

OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_threads": 1,
    "logits_all": True,
    "verbose": False,
}
N_UBATCH = 64

# Numbers of tokens in a pass. Some are near the widest pass of matrix-vector kernels (4,
# 5 or 8), others near the tile sizes of matrix kernels (16 or 32).
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 33)
TINY = [name for name in PRESETS if name.startswith("tiny-")]


@pytest.fixture(scope="session")
def devices() -> list[Device]:
    """Returns all GPUs that ggml sees, except integrated ones. Skips the test if there
    are none."""
    found = gpus()
    if not found:
        pytest.skip("ggml sees no GPU: `make test-vulkan` makes a software one")
    return found


@pytest.fixture
def device(devices: list[Device]) -> Device:
    """The first GPU."""
    return devices[0]


@pytest.fixture(scope="session")
def plain(devices: list[Device]) -> Plain:
    """Returns `plain(path, prompt, n_tokens, n_ubatch=N_UBATCH, device=None)`.

    The function calls `logits_of` on plain llama.cpp with every layer on the device
    (None: the first GPU). For equal arguments, it computes the logits only once.
    """
    known: dict[tuple[Any, ...], Logits] = {}

    def compute(
        path: Path,
        prompt: Prompt,
        n_tokens: int,
        n_ubatch: int = N_UBATCH,
        device: Device | None = None,
    ) -> Logits:
        main = (device or devices[0]).index
        key = path, tuple(prompt), n_tokens, n_ubatch, main
        if key not in known:
            of_device = {
                "n_gpu_layers": -1,
                "split_mode": 0,
                "main_gpu": main,
                "n_ubatch": n_ubatch,
            }
            with hooks_off(), Llama(path, **of_device, **OPTIONS) as llm:
                assert llm.session is None
                known[key] = logits_of(llm, prompt, n_tokens)
        return known[key]

    return compute


def logits_of(llm: Llama, prompt: Prompt, n_tokens: int, n_new: int = 4) -> Logits:
    """Evaluates a prompt, `n_tokens` at a time, and then `n_new` greedy tokens, in an
    empty context.

    Returns the logits of all these tokens.
    """
    llm.reset()
    for first in range(0, len(prompt), n_tokens):
        llm.eval(prompt[first : first + n_tokens])
    for _ in range(n_new):
        llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
    return llm.scores[: llm.n_tokens].copy()


def random_tokens(n_tokens: int, seed: int = 0) -> list[int]:
    """Returns random token ids below 1024, determined by `seed`."""
    return np.random.default_rng(seed).integers(0, 1024, n_tokens).tolist()


def slots_of(path: Path, size: str) -> tuple[int, int]:
    """Returns the numbers of slots on the GPU and in RAM for a size: "least", "one
    layer", "40%" or "all but one"."""
    layout = read_layout(path)
    share = layout.n_expert_total * 2 // 5
    return {
        "least": (layout.n_expert_used, 1),
        "one layer": (layout.n_expert, layout.n_expert_used),
        "40%": (share, share),
        "all but one": (layout.n_expert_total - 1, layout.n_expert),
    }[size]


def check_identity(
    path: Path, size: str, prompt: Prompt, n_tokens: int, plain: Plain, device: Device
) -> None:
    """Asserts that slots in VRAM and RAM yield the logits of `plain`, and that both
    tiers evict experts.

    While the model runs, another thread requests prefetches and changes scores.
    """
    vram, ram = (share_for(path, n, device.name) for n in slots_of(path, size))
    store = StoreOptions(device=device.name)
    with Llama(
        path,
        vram_cache=vram,
        expert_cache=ram,
        store=store,
        n_ubatch=N_UBATCH,
        **OPTIONS,
    ) as llm:
        assert llm.plan.device == device.name
        with Meddler(llm.session.store):
            # Up to 20 runs, because one run may never use the single expert that has no
            # slot.
            for _ in range(20):
                logits = logits_of(llm, prompt, n_tokens)
                tiers = llm.session.tiers()
                if all(tiers[name]["evictions"] for name in ("VRAM", "RAM")):
                    break
        n_ubatch = llm.plan.n_ubatch
        # The staging tensors take as much of the VRAM budget as this number of slots.
        n_staged = llm.plan.staging_slots_bytes // llm.plan.slot_bytes
    # A model with a pool smaller than a layer may process a prompt in smaller passes,
    # in which kernels sum in another order. The reference therefore uses the same
    # n_ubatch.
    assert np.isfinite(logits).all()
    assert np.array_equal(logits, plain(path, prompt, n_tokens, n_ubatch, device))
    assert (tiers["VRAM"]["n_slots"] + n_staged, tiers["RAM"]["n_slots"]) == slots_of(
        path, size
    )
    assert tiers["VRAM"]["evictions"] > 0
    assert tiers["RAM"]["evictions"] > 0


@pytest.mark.parametrize("n_tokens", BATCHES)
@pytest.mark.parametrize("size", ["one layer", "40%"])
def test_passes_of_any_width_give_the_gpus_own_logits(
    tiny: TinyModel, plain: Plain, device: Device, size: str, n_tokens: int
) -> None:
    prompt = random_tokens(max(3 * n_tokens, 24))
    check_identity(tiny("tiny-mix", "q4_k_m"), size, prompt, n_tokens, plain, device)


@pytest.mark.parametrize("n_tokens", BATCHES)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_quantisation_with_shared_experts_gives_the_gpus_logits(
    tiny: TinyModel, plain: Plain, device: Device, quant: str, n_tokens: int
) -> None:
    prompt = [token for token in random_tokens(8) for _ in range(max(n_tokens, 4))][
        : max(3 * n_tokens, 32)
    ]
    check_identity(tiny("tiny-qwen3moe", quant), "40%", prompt, n_tokens, plain, device)


@pytest.mark.parametrize("size", ["least", "40%", "all but one"])
@pytest.mark.parametrize(
    ("preset", "quant"),
    [
        *((preset, quant) for quant in ("q4_0", "q4_k_m") for preset in TINY),
        ("tiny-gpt-oss", "mxfp4"),
    ],
)
def test_every_architecture_gives_the_gpus_own_logits(
    tiny: TinyModel, plain: Plain, device: Device, preset: str, quant: str, size: str
) -> None:
    check_identity(tiny(preset, quant), size, random_tokens(96), 32, plain, device)


def test_many_single_token_passes_give_the_gpus_own_logits(
    tiny: TinyModel, plain: Plain, device: Device
) -> None:
    check_identity(
        tiny("tiny-qwen2moe", "q4_0"), "40%", random_tokens(240), 1, plain, device
    )


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("preset", ["tiny-qwen3moe", "tiny-mix"])
def test_budgets_changed_while_decoding_keep_the_logits(
    tiny: TinyModel, plain: Plain, device: Device, preset: str, quant: str
) -> None:
    """The budget changes before each of 50 tokens, so pools are allocated and slots are
    copied.

    Kernels also read the padding behind rows of quantised matrices, which must stay
    zero.
    """
    path, n_new, random = tiny(preset, quant), 50, np.random.default_rng(0)
    layout, prompt = read_layout(path), random_tokens(24)
    most = layout.n_expert_total - 1
    store = StoreOptions(device=device.name, staging=0)
    with Llama(
        path,
        vram_cache=share_for(path, most, device.name),
        expert_cache="50%",
        store=store,
        n_ubatch=1,
        **OPTIONS,
    ) as llm:
        llm.eval(prompt)
        for _ in range(n_new):
            n_slots = int(random.integers(layout.n_expert, most + 1))
            llm.set_budget(vram_cache=share_for(path, n_slots, device.name))
            assert llm.stats().tiers[0].n_slots == n_slots
            llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
        logits = llm.scores[: llm.n_tokens].copy()
    with (
        hooks_off(),
        Llama(
            path,
            n_gpu_layers=-1,
            split_mode=0,
            main_gpu=device.index,
            n_ubatch=1,
            **OPTIONS,
        ) as llm,
    ):
        expected = logits_of(llm, prompt, 1, n_new)
    assert np.array_equal(logits, expected)


def test_every_expert_on_the_gpu_gives_the_gpus_own_logits(
    tiny: TinyModel, plain: Plain, device: Device
) -> None:
    path, prompt = tiny("tiny-qwen3moe", "q4_0"), random_tokens(64)
    with Llama(
        path,
        vram_cache="100%",
        store=StoreOptions(device=device.name),
        n_ubatch=N_UBATCH,
        **OPTIONS,
    ) as llm:
        logits = logits_of(llm, prompt, 32)
        assert list(llm.session.tiers()) == ["VRAM"]
        assert llm.stats().lookups > 0
    assert np.array_equal(logits, plain(path, prompt, 32, device=device))


def test_three_successive_prompts_give_the_gpus_own_logits(
    tiny: TinyModel, plain: Plain, device: Device
) -> None:
    path = tiny("tiny-mix", "q4_k_m")
    vram, ram = (share_for(path, n, device.name) for n in slots_of(path, "40%"))
    store = StoreOptions(device=device.name)
    with Llama(
        path,
        vram_cache=vram,
        expert_cache=ram,
        store=store,
        n_ubatch=N_UBATCH,
        **OPTIONS,
    ) as llm:
        for seed in range(3):
            prompt = random_tokens(33, seed)
            logits = logits_of(llm, prompt, 33)
            assert np.array_equal(
                logits, plain(path, prompt, 33, llm.plan.n_ubatch, device)
            )
        assert llm.stats().evictions > 0


def test_slots_on_the_second_gpu_give_its_own_logits(
    tiny: TinyModel, plain: Plain, devices: list[Device]
) -> None:
    if len(devices) < 2:
        pytest.skip("there is one GPU")
    check_identity(
        tiny("tiny-mix", "q4_k_m"), "40%", random_tokens(96), 16, plain, devices[1]
    )
