"""Layers on two devices, and some on the CPU: the bits of the same devices with every expert resident."""

from __future__ import annotations

import ctypes as c
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from rpc_device import in_child_of_two, register
from running import N_NEW, Llama, Logits, Meddler, TinyModel, greedy_logits, hooks_off, share_for

from moegguf.engine.device_split import count_layers
from moegguf.engine.devices import gpus
from moegguf.engine.known_speeds import KnownSpeeds
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.native import library
from moegguf.native.link_device import add_link_device
from moegguf.native.store import Tier
from moegguf.quantities import Link

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False}
Outcome = tuple[Logits, Logits, dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, tuple[int, ...]]]


def assigned_layers(path: Path, **options: Any) -> dict[str, list[int]]:
    """{device: layers}, as llama.cpp's log says when it loads the model plainly. For processes of their own."""
    bindings, lines, n_layer = library.llama_cpp(), list[str](), count_layers(read_layout(path))
    callback = bindings.llama_log_callback(lambda _level, text, _user: lines.append(text.decode(errors="replace")))
    bindings.llama_log_set(callback, c.c_void_p(None))
    with hooks_off(), Llama(path, **{**OPTIONS, "n_ctx": 64, **options}):
        pass
    bindings.llama_log_set(bindings._logger.llama_log_callback, c.c_void_p(None))
    found: dict[str, list[int]] = {}
    for il, device in re.findall(r"layer +(\d+) assigned to device (\w+)", "".join(lines)):
        if int(il) < n_layer:  # the output is one more
            found.setdefault(device, []).append(int(il))
    return found


def compare(path: Path, vram: str, n_ram: int, split: dict[str, Any], shrink: bool) -> Outcome:
    """Logits of plain llama.cpp with this split, those of slots on its devices, and the figures of these.

    Both read prompts in passes of the same size: the CPU's kernels round differently with others.
    """
    with Llama(path, vram_cache=vram, expert_cache=share_for(path, n_ram), **OPTIONS, **split) as llm:
        assert llm.session is not None
        store, passes = llm.session.store, count()

        def before_each() -> None:
            meddler.meddle()
            if shrink and next(passes) == N_NEW // 2:
                for index in range(len(store.devices)):
                    store.resize(max(4, store.device(index)["n_slots"] // 2), device=index)
                store.resize(max(1, n_ram // 3), Tier.LOWER)

        with Meddler(store) as meddler:
            logits = greedy_logits(llm, before_each=before_each)
        store.drain(30)  # prefetches under way would count between two figures
        layers = {part.name or "CPU": part.layers for part in llm.plan.devices}
        figures, n_ubatch = (llm.session.devices(), llm.session.tiers()), llm.plan.n_ubatch
    with hooks_off(), Llama(path, n_ubatch=n_ubatch, **OPTIONS, **split) as llm:
        return greedy_logits(llm), logits, *figures, layers


def on_two_servers(
    rpc: Path, ports: tuple[int, int], path: Path, *arguments: Any
) -> tuple[Outcome, dict[str, list[int]]]:
    for port in ports:
        register(rpc, port)
    outcome = compare(path, *arguments)
    split = arguments[2]
    return outcome, assigned_layers(path, **{"n_gpu_layers": -1, **split})


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize(
    ("quant", "vram", "split"),
    [
        ("q4_0", "40%", {"n_gpu_layers": -1, "tensor_split": [1, 1]}),
        ("q4_k_m", "30%,20%", {"n_gpu_layers": -1, "tensor_split": [3, 2]}),
        ("q4_0", "30%", {"n_gpu_layers": 4, "tensor_split": [1, 1]}),
    ],
)
def test_slots_on_two_servers_give_the_logits_of_these_devices(
    tiny: TinyModel, quant: str, vram: str, split: dict[str, Any], shrink: bool
) -> None:
    (plain, logits, devices, tiers, layers), assigned = in_child_of_two(
        on_two_servers, tiny("tiny-qwen2moe", quant), vram, 26, split, shrink
    )
    assert np.array_equal(logits, plain)
    assert {name: list(of) for name, of in layers.items()} == assigned
    assert set(devices) == set(layers)
    for figures in devices.values():
        assert figures["evictions"] > 0
        assert figures["misses"] > 0
    for name in ("lookups", "misses", "evictions"):
        assert tiers["VRAM"][name] == sum(figures[name] for figures in devices.values())
    assert tiers["RAM"]["evictions"] > 0
    assert tiers["RAM"]["hits_ready"] > 0


def one_of_two(rpc: Path, ports: tuple[int, int], path: Path) -> bool:
    """Options that choose among two servers, and those that do not fit them."""
    KnownSpeeds.link = lambda *_: None  # type: ignore[method-assign]  # free memory alone decides, and nothing is measured
    for port in ports:
        register(rpc, port)
    assert [device.name for device in gpus()] == ["RPC0", "RPC1"]
    alone = {"split_mode": 0, "main_gpu": 1, "n_gpu_layers": -1}
    with hooks_off(), Llama(path, n_ubatch=1, **OPTIONS, **alone) as llm:
        plain = greedy_logits(llm, n_new=8)
    with Llama(path, vram_cache="40%", expert_cache="50%", **OPTIONS, **alone) as llm:
        assert llm.session is not None
        assert llm.plan.n_ubatch == 1  # nothing is staged
        assert np.array_equal(greedy_logits(llm, n_new=8), plain)
        assert list(llm.session.devices()) == ["RPC1"]
        assert llm.session.tiers()["VRAM"]["evictions"] > 0
    with Llama(path, vram_cache="40%", expert_cache="50%", **OPTIONS) as llm:  # both, as free memory has it
        assert llm.session is not None
        assert list(llm.session.devices()) == ["RPC0", "RPC1"]
        assert sorted(il for part in llm.plan.devices for il in part.layers) == [0, 1, 2, 3]
        assert llm.plan.device == "RPC0, RPC1"
    with Llama(path, vram_cache="100%", **OPTIONS) as llm:
        assert llm.session is not None
        assert list(llm.session.tiers()) == ["VRAM"]
    check_placements(path, alone)
    for options, message in (
        ({"split_mode": 2}, "split_mode 2 divides each matrix"),
        ({"split_mode": 3}, "split_mode 3 divides each matrix"),
        ({"split_mode": 0, "main_gpu": 2}, r"main_gpu is 2, but there are: 0 \(RPC0\), 1 \(RPC1\)"),
        ({"split_mode": 0, "main_gpu": -1}, "main_gpu is -1"),
        ({"tensor_split": [1, 1, 1]}, "3 proportions for 2 devices"),
        ({"tensor_split": [0, 0]}, "some above"),
        ({"n_gpu_layers": 0}, "n_gpu_layers is 0"),
    ):
        with pytest.raises(OptionError, match=message):
            Llama(path, vram_cache="40%", expert_cache="50%", **OPTIONS, **options)
    for vram, split, message in (
        ("20%,20%,20%", None, "3 budgets for 2 devices"),
        ("20%,1KiB", [1, 1], "on RPC1, but a token needs 4"),
        ("10%,1KiB", None, "vram_cache='10%,1.00KiB' holds what a token needs of"),
    ):
        with pytest.raises(BudgetError, match=message):
            Llama(path, vram_cache=vram, tensor_split=split, expert_cache="50%", **OPTIONS)
    return True


def check_placements(path: Path, alone: dict[str, int]) -> None:
    """Several devices have slots, without a comparison; whole layers lie on one of them."""
    auto: dict[str, Any] = {"placement": "auto", "n_ctx": 512}
    for options, device in (({}, "RPC0, RPC1"), (alone, "RPC1")):
        plan = Llama.estimate(path, vram_cache="40%", expert_cache="50%", **auto, **options)
        assert (plan.device, plan.placement) == (device, None)
        assert any("'auto' is slots" in reason for reason in plan.reasons)
    for cache in ("40%", None):
        with pytest.raises(OptionError, match=r"placement 'layers' is for one GPU .* compute: RPC0, RPC1"):
            Llama.estimate(path, vram_cache=cache, placement="layers", n_ctx=512)
    with pytest.raises(OptionError, match="n_gpu_layers 3"):
        Llama.estimate(path, vram_cache="40%", placement="layers", n_ctx=512, **{**alone, "n_gpu_layers": 3})
    with Llama(path, vram_cache="50%", expert_cache="50%", placement="layers", **OPTIONS, **alone) as llm:
        assert llm.session is not None and llm.plan.layers_on == "RPC1"
        assert [layer.il for layer in llm.session.layout.layers] == [0, 1]
        greedy_logits(llm, n_new=4)
        assert llm.session.tiers()["RAM"]["evictions"] > 0
    assert Llama.estimate(path, placement="cpu", n_ctx=512).device is None
    assert Llama.estimate(path, n_gpu_layers=3, **auto).device is None  # the caller divides the model
    assert Llama.estimate(path, split_mode=2, n_gpu_layers=-1, **auto).device is None


def test_one_device_of_two_and_splits_that_do_not_fit(tiny: TinyModel) -> None:
    assert in_child_of_two(one_of_two, tiny("tiny-qwen2moe", "q4_0"))


def behind_links(path: Path, n_links: int, vram: str, split: dict[str, Any]) -> Outcome:
    for n in range(n_links):
        add_link_device(Link((n + 1) * 1e9, 1e-5), pinned=n == 0)
    return compare(path, vram, 20, split, shrink=False)


@pytest.mark.parametrize(
    ("n_links", "vram", "split"),
    [(2, "30%", {"n_gpu_layers": -1, "tensor_split": [1, 3]}), (1, "25%", {"n_gpu_layers": 3})],
)
def test_devices_behind_links_and_layers_on_the_cpu(
    tiny: TinyModel, n_links: int, vram: str, split: dict[str, Any]
) -> None:
    plain, logits, devices, tiers, layers = in_own_process(
        behind_links, tiny("tiny-qwen2moe", "q4_k_m"), n_links, vram, split
    )
    assert np.array_equal(logits, plain)
    assert list(devices) == list(layers)
    assert ("CPU" in devices) == (n_links == 1)
    assert all(figures["evictions"] > 0 for figures in devices.values())
    assert tiers["RAM"]["evictions"] > 0
