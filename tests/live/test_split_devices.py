"""Tests layers that are divided between two devices, or between a device and the CPU,
and tests placements.

The logits equal the logits of the same division with every expert resident.
"""

import ctypes as c
import json
import os
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from own_process import in_measuring_process, in_own_process
from rpc_device import on_servers
from running import (
    N_NEW,
    Llama,
    Logits,
    Meddler,
    Reference,
    TinyModel,
    devices_of,
    greedy_logits,
    hooks_off,
    random_prompt,
    share_for,
)

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies import make_policy
from moegguf.controller.predictors.base import NoPrediction
from moegguf.engine import solver
from moegguf.engine.devices import gpus
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.plan import slot_bytes
from moegguf.engine.recording import TraceOptions
from moegguf.engine.session import EXPERT_TENSORS, Place, _Override
from moegguf.engine.speeds import KnownSpeeds
from moegguf.engine.stats import Stats
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.fingerprint import header_digest
from moegguf.native import library
from moegguf.native.store import StoreOptions, Tier
from moegguf.quantities import Link
from moegguf.settings import cache_folder
from moegguf.terminal.statistics import expert_lines
from moegguf.testing.link_device import add_link_device, link_device
from moegguf.trace.format import read
from moegguf.trace.simulate import SimOptions, Simulation, TierSpan

OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "n_threads": 1,
    "logits_all": True,
    "verbose": False,
}
Outcome = tuple[
    dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, tuple[int, ...]]
]


def assigned_layers(path: Path, **options: Any) -> dict[str, list[int]]:
    """Returns {device: layers} from the log of a load by plain llama.cpp.

    Changes the log callback, so the caller must run in its own process.
    """
    bindings, lines, n_layer = (
        library.llama_cpp(),
        list[str](),
        read_layout(path).hparams.n_layer_all,
    )
    callback = bindings.llama_log_callback(
        lambda _level, text, _user: lines.append(text.decode(errors="replace"))
    )
    bindings.llama_log_set(callback, c.c_void_p(None))
    with hooks_off(), Llama(path, **{**OPTIONS, "n_ctx": 64, **options}):
        pass
    bindings.llama_log_set(bindings._logger.llama_log_callback, c.c_void_p(None))
    found: dict[str, list[int]] = {}
    for il, device in re.findall(
        r"layer +(\d+) assigned to device (\w+)", "".join(lines)
    ):
        if int(il) < n_layer:  # llama.cpp counts the output as one more layer
            found.setdefault(device, []).append(int(il))
    return found


def compare(
    path: Path, vram: str, n_ram: int, split: dict[str, Any], shrink: bool
) -> Outcome:
    """Asserts that slots yield the logits of plain llama.cpp, with the layers on the
    devices of `split`.

    Both use the same n_ubatch, because the CPU's kernels round differently in passes of
    another size. Returns the figures by device, the figures by tier, and the layers by
    device.
    """
    with Llama(
        path, vram_cache=vram, expert_cache=share_for(path, n_ram), **OPTIONS, **split
    ) as llm:
        store, passes = llm.session.store, count()

        def before_each() -> None:
            meddler.meddle()
            if shrink and next(passes) == N_NEW // 2:
                for index in range(len(store.devices)):
                    store.resize(
                        max(4, store.device(index)["n_slots"] // 2), device=index
                    )
                store.resize(max(1, n_ram // 3), Tier.RAM)

        with Meddler(store) as meddler:
            logits = greedy_logits(llm, before_each=before_each)
        store.drain(30)  # no prefetch may finish between two reads of the figures below
        layers = {part.name or "CPU": part.layers for part in llm.plan.devices}
        figures, n_ubatch = (devices_of(llm), llm.session.tiers()), llm.plan.n_ubatch
    with hooks_off(), Llama(path, n_ubatch=n_ubatch, **OPTIONS, **split) as llm:
        assert np.array_equal(greedy_logits(llm), logits)
    return *figures, layers


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize(
    ("path", "vram", "split"),
    [
        (
            ("tiny-qwen2moe", "q4_0"),
            "40%",
            {"n_gpu_layers": -1, "tensor_split": [1, 1]},
        ),
        (
            ("tiny-qwen2moe", "q4_k_m"),
            "30%,20%",
            {"n_gpu_layers": -1, "tensor_split": [3, 2]},
        ),
        (("tiny-qwen2moe", "q4_0"), "30%", {"n_gpu_layers": 4, "tensor_split": [1, 1]}),
    ],
    indirect=["path"],
)
@on_servers(2)
def test_slots_on_two_devices_give_the_logits_of_plain_llama_cpp(
    path: Path, vram: str, split: dict[str, Any], shrink: bool
) -> None:
    devices, tiers, layers = compare(path, vram, 26, split, shrink)
    assert {name: list(of) for name, of in layers.items()} == assigned_layers(
        path, **{"n_gpu_layers": -1, **split}
    )
    assert set(devices) == set(layers)
    for figures in devices.values():
        assert figures["evictions"] > 0
        assert figures["misses"] > 0
    for name in ("lookups", "misses", "evictions"):
        assert tiers["VRAM"][name] == sum(
            figures[name] for device, figures in devices.items() if device != "CPU"
        )
    assert tiers["RAM"]["evictions"] > 0
    assert tiers["RAM"]["hits_ready"] > 0


@on_servers(2)
def test_one_of_two_devices_is_selected_and_wrong_splits_are_refused(
    path: Path,
) -> None:
    assert [device.name for device in gpus()] == ["RPC0", "RPC1"]
    alone = {"split_mode": 0, "main_gpu": 1, "n_gpu_layers": -1}
    with hooks_off(), Llama(path, n_ubatch=1, **OPTIONS, **alone) as llm:
        plain = greedy_logits(llm, n_new=8)
    with Llama(path, vram_cache="40%", expert_cache="50%", **OPTIONS, **alone) as llm:
        assert llm.plan.n_ubatch == 1  # nothing is staged
        assert np.array_equal(greedy_logits(llm, n_new=8), plain)
        assert list(devices_of(llm)) == ["RPC1"]
        assert llm.session.tiers()["VRAM"]["evictions"] > 0
    # Split by the free memory of both.
    with Llama(path, vram_cache="40%", expert_cache="50%", **OPTIONS) as llm:
        assert list(devices_of(llm)) == ["RPC0", "RPC1"]
        assert sorted(il for part in llm.plan.devices for il in part.layers) == [
            0,
            1,
            2,
            3,
        ]
        assert llm.plan.device == "RPC0, RPC1"
    with Llama(path, vram_cache="100%", **OPTIONS) as llm:
        assert list(llm.session.tiers()) == ["VRAM"]
    check_placements(path, alone)
    for options, message in (
        ({"split_mode": 2}, "split_mode 2 divides each matrix"),
        (
            {"split_mode": 0, "main_gpu": 2},
            r"main_gpu is 2, but must be one of: 0 \(RPC0\), 1 \(RPC1\)",
        ),
        ({"split_mode": 0, "main_gpu": -1}, "main_gpu is -1"),
        ({"n_gpu_layers": 0}, "n_gpu_layers 0 puts no layer"),
    ):
        with pytest.raises(OptionError, match=message):
            Llama(path, vram_cache="40%", expert_cache="50%", **OPTIONS, **options)


def check_placements(path: Path, alone: dict[str, int]) -> None:
    """Checks plans of placements. With several devices, "auto" means slots; with one,
    "auto" compares all placements.

    The placement "layers" needs exactly one device.
    """
    auto: dict[str, Any] = {"placement": "auto", "n_ctx": 512}
    plan = Llama.estimate(path, vram_cache="40%", expert_cache="50%", **auto)
    assert (plan.device, plan.placement) == ("RPC0, RPC1", None)
    assert any("'auto' is slots" in reason for reason in plan.reasons)
    plan = Llama.estimate(path, vram_cache="40%", expert_cache="50%", **auto, **alone)
    assert (plan.device or plan.layers_on) == "RPC1" and plan.placement is not None
    for cache in ("40%", None):
        with pytest.raises(
            OptionError, match=r"placement 'layers' needs one GPU .* give RPC0, RPC1"
        ):
            Llama.estimate(path, vram_cache=cache, placement="layers", n_ctx=512)
    with Llama(
        path,
        vram_cache="50%",
        expert_cache="50%",
        placement="layers",
        **OPTIONS,
        **alone,
    ) as llm:
        assert llm.session is not None and llm.plan.layers_on == "RPC1"
        assert [layer.il for layer in llm.session.layout.layers] == [0, 1]
        greedy_logits(llm, n_new=4)
        assert llm.session.tiers()["RAM"]["evictions"] > 0
    assert Llama.estimate(path, placement="cpu", n_ctx=512).device is None
    # n_gpu_layers already divides the model.
    assert Llama.estimate(path, n_gpu_layers=3, **auto).device is None
    assert Llama.estimate(path, split_mode=2, n_gpu_layers=-1, **auto).device is None


@pytest.mark.parametrize("path", [("tiny-qwen2moe", "q4_k_m")], indirect=True)
@pytest.mark.parametrize(
    ("n_links", "vram", "split"),
    [
        (2, "30%", {"n_gpu_layers": -1, "tensor_split": [1, 3]}),
        (1, "25%", {"n_gpu_layers": 3}),
    ],
)
@on_servers()
def test_slots_behind_links_and_on_the_cpu_give_the_logits_of_llama_cpp(
    path: Path, n_links: int, vram: str, split: dict[str, Any]
) -> None:
    for n in range(n_links):
        add_link_device(Link((n + 1) * 1e9, 1e-5), pinned=n == 0, strict_seed=1 - n)
    devices, tiers, layers = compare(path, vram, 20, split, shrink=False)
    assert list(devices) == list(layers)
    assert ("CPU" in devices) == (n_links == 1)
    assert all(figures["evictions"] > 0 for figures in devices.values())
    assert tiers["RAM"]["evictions"] > 0


@pytest.mark.parametrize(("vram", "ram", "n_staging"), [(20, 20, 1), (64, 12, 0)])
@on_servers()
def test_prompts_stream_through_cpu_slots_beside_a_device(
    path: Path, vram: int, ram: int, n_staging: int
) -> None:
    """A prompt is processed in one pass, although the CPU has fewer slots than a layer
    has experts."""
    add_link_device(Link(8e9, 5e-6), memory_bytes=256 << 20)
    budgets = {
        "vram_cache": share_for(path, vram),
        "expert_cache": share_for(path, ram),
    }
    how = {
        "n_gpu_layers": 3,
        "placement": "slots",
        "store": StoreOptions(staging=n_staging, repack=False),
    }
    with Llama(path, **budgets, **OPTIONS, **how) as llm:
        of_cpu = next(part for part in llm.plan.devices if part.name is None)
        logits = greedy_logits(llm)
        figures, plan, tiers = devices_of(llm)["CPU"], llm.plan, llm.session.tiers()
        counters, places = llm.session.store.counters(), llm.session.places()
        shown = expert_lines(llm.stats(), Stats())
    of_both = {
        name: tiers["VRAM"][name] + tiers["CPU"][name]
        for name in ("lookups", "hits_ready", "evictions")
    }
    assert (
        of_both == {name: counters[name] for name in of_both}
        and tiers["CPU"] == figures
    )
    assert tiers["VRAM"]["n_slots"] == plan.n_slots - of_cpu.n_slots
    assert (
        tiers["VRAM"]["device"] != "CPU"
        and f"on {tiers['VRAM']['device']}" in shown["expert cache VRAM"]
    )
    assert shown["expert cache CPU"].startswith(f"{of_cpu.n_slots} of ")
    on_cpu = np.isin(np.arange(len(places)), list(of_cpu.layers))
    assert (
        Place.VRAM in places[~on_cpu]
        and Place.RAM in places[on_cpu]
        and Place.VRAM not in places[on_cpu]
    )
    # The CPU runs its layers with weights that are not repacked, because they are in
    # host memory that the device has pinned.
    with (
        hooks_off(),
        Llama(
            path, n_ubatch=plan.n_ubatch, op_offload=False, **OPTIONS, n_gpu_layers=3
        ) as llm,
    ):
        assert np.array_equal(greedy_logits(llm), logits)
    assert (plan.supply.n_staging, plan.supply.streams, plan.n_ubatch) == (
        n_staging,
        True,
        512,
    )
    assert 4 <= of_cpu.n_slots < 16, "of the experts of a layer"
    assert figures["evictions"] > 0 and figures["misses"] > 0


@on_servers()
def test_budgets_of_a_device_and_the_cpu_change_independently(path: Path) -> None:
    add_link_device(Link(8e9, 5e-6), memory_bytes=256 << 20)
    budgets = {"vram_cache": share_for(path, 24), "expert_cache": share_for(path, 24)}
    how = {
        "n_gpu_layers": 3,
        "placement": "slots",
        "store": StoreOptions(staging=0, repack=False),
    }
    with Llama(path, **budgets, **OPTIONS, **how) as llm:
        store, prompt, found = (
            llm.session.store,
            random_prompt(llm, 12),
            list[tuple[int, ...]](),
        )
        expected = greedy_logits(llm, prompt, n_new=4)
        cpu = [device.name for device in store.devices].index(None)

        def slots() -> tuple[int, ...]:
            below = [store.tier(tier)["n_slots_usable"] for tier in store.tiers[1:]]
            return (
                store.device(1 - cpu)["n_slots_usable"],
                store.device(cpu)["n_slots_usable"],
                *below,
            )

        for change in (
            {"vram_cache": share_for(path, 18)},
            {"expert_cache": share_for(path, 12)},
            {"vram_cache": "auto", "expert_cache": "auto"},
            {"vram_cache": share_for(path, 60)},
            {"vram_cache": "25%"},
        ):
            llm.set_budget(**change)
            assert np.array_equal(greedy_logits(llm, prompt, n_new=4), expected)
            found.append(slots())
        with pytest.raises(BudgetError, match=r"vram_cache=.* is too small"):
            llm.set_budget(vram_cache=share_for(path, 3))
        with pytest.raises(BudgetError, match="2 layers on the CPU"):
            llm.set_budget(expert_cache=share_for(path, 4))
        assert slots() == found[-1]
        with pytest.warns(UserWarning, match="16 expert slots .* continuing with 8"):
            assert llm.session.give_slots_back(lambda: None)
        assert slots() == (8, *found[-1][1:])
    assert llm.plan.device_slots == 24
    assert found == [(18, 12, 12), (18, 6, 6), (24, 12, 12), (24, 12, 12), (16, 12, 12)]


@pytest.mark.parametrize(
    ("vram", "staging"), [("30%,20%", 0), ("45%", 0), ("40%,20%", 1)]
)
@on_servers(2)
def test_simulated_counters_of_two_devices_equal_the_live_ones(
    path: Path, tmp_path: Path, vram: str, staging: int
) -> None:
    store, out, n_ram = StoreOptions(sweep=False, staging=staging), tmp_path / "t", 20
    with Llama(
        path, vram_cache=vram, expert_cache=share_for(path, n_ram), tensor_split=[3, 2], n_gpu_layers=-1, n_ubatch=8,
        n_ctx=256, policy="vram=next-use,ram=slru", predictor="none", lockstep=True, verbose=False, store=store,
        trace=TraceOptions(out),
    ) as llm:  # fmt: skip
        for n, n_prompt in enumerate((30, 1, 9)):
            llm.create_completion(
                random_prompt(llm, n_prompt, seed=n),
                max_tokens=24,
                temperature=0.8,
                seed=n,
            )
        llm.session.store.drain(10)
        figures = llm.session.tiers() | devices_of(llm)
        tiers = {name: TierSpan.of(of) for name, of in figures.items()}
        slots = [
            replace(device, link=Link(2e9, 2e-5))
            for device in llm.session.store.devices
        ]
    trace = read(out)
    assert trace.header.settings["events_dropped"] == 0
    policy = make_policy("next-use", trace.shape, Artifacts(read_layout(path)))
    how = StoreOptions(sweep=False)
    options = SimOptions(
        store=how, link_bytes_per_s=1e9, n_ram_slots=n_ram, ram_policy="slru"
    )
    result = Simulation(trace, policy, NoPrediction(trace.shape), slots, options).run()
    for name in tiers:
        for figure in ("lookups", "hits", "evictions", "bytes_in"):
            assert getattr(tiers[name], figure) == getattr(
                result.tiers[name], figure
            ), (name, figure)
    assert set(tiers) == {"VRAM", "RAM", "RPC0", "RPC1"}
    assert all(result.tiers[name].evictions > 0 for name in tiers)


PLAIN = StoreOptions(repack=False)


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the speeds and hit rates measured in these tests out of the user's cache
    folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def placed(path: Path, kind: str, vram: str, ram: str) -> tuple[Logits, dict[str, Any]]:
    """Returns the logits with one kind of placement on a device behind a link, and
    facts about the plan and the store."""
    solver.KINDS_OF["auto"] = (kind,)  # "auto" chooses only this kind in this process
    link_device(Link(4e9, 5e-6))
    with Llama(
        path,
        placement="auto",
        vram_cache=vram,
        expert_cache=ram,
        store=PLAIN,
        **OPTIONS,
    ) as llm:
        plan, session = llm.plan, llm.session
        assert plan.placement is not None and session is not None
        layers = [layer.il for layer in session.layout.layers]
        logits = greedy_logits(llm)
        facts: dict[str, Any] = {
            "n_ubatch": plan.n_ubatch,
            "layers": layers,
            "tiers": list(session.tiers()),
            "evictions": llm.stats().evictions,
        }
        return logits, facts | {
            "n_whole": plan.placement.chosen.n_layers,
            "reasons": plan.reasons,
        }


@pytest.mark.parametrize(
    ("kind", "vram", "ram", "layers", "tiers"),
    [
        # Only layer 3 is entirely on the device at 50 %, because layers 2 and 3 are
        # larger than layers 0 and 1.
        ("layers", "50%", "100%", [0, 1, 2], ["RAM"]),
        ("layers", "60%", "100%", [0, 1], ["RAM"]),
        ("layers", "30%", "40%", [0, 1, 2], ["RAM"]),
        ("slots", "50%", "40%", [0, 1, 2, 3], ["VRAM", "RAM"]),
        ("resident", "100%", "50%", [0, 1, 2, 3], ["VRAM"]),
        ("cpu", "50%", "50%", [0, 1, 2, 3], ["RAM"]),
    ],
)
def test_each_placement_gives_the_logits_of_every_expert_resident(
    tiny: TinyModel,
    reference: Reference,
    kind: str,
    vram: str,
    ram: str,
    layers: list[int],
    tiers: list[str],
) -> None:
    path = tiny("tiny-qwen2moe", "q4_k_m")
    logits, facts = in_own_process(placed, path, kind, vram, ram)
    assert (facts["layers"], facts["tiers"]) == (layers, tiers)
    assert np.array_equal(
        logits, reference(path, n_ubatch=facts["n_ubatch"], repack=False)
    )
    assert (facts["evictions"] > 0) == (kind != "resident" and ram != "100%")
    assert any(
        "tokens/s" in reason or "every expert fits" in reason
        for reason in facts["reasons"]
    )


class ExpertsOfTheFirstLayersOnTheCpu(Llama):
    """A model whose experts of layers 0 and 1 stay in the CPU's memory, as with
    llama.cpp's --n-cpu-moe 2."""

    repack = False  # True: the CPU repacks its weights, as it may repack slots

    def _attach_model(self, params: c.Structure) -> None:
        super()._attach_model(params)
        cpu = c.CDLL(
            str(next(library.find_library().glob("libggml-base.*")))
        ).ggml_backend_cpu_buffer_type
        cpu.restype = c.c_void_p
        self._overrides = (_Override * 2)(
            _Override(b"blk\\.(0|1)" + EXPERT_TENSORS.encode(), cpu()), _Override()
        )
        params.tensor_buft_overrides = c.addressof(self._overrides)
        params.use_extra_bufts = self.repack


def decisions(path: Path) -> dict[str, Any]:
    """Returns facts about the placement that "auto" chooses, and about the file of
    measured speeds."""
    link_device(Link(1e9, 20e-6))
    files = cache_folder() / "placements"
    found = Llama.estimate(path, placement="auto", n_ctx=512)
    # Files with speeds that were measured for this model.
    known = list(files.glob(f"{header_digest(read_layout(path).shards)}-*.json"))
    for file in known:
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"cpu_bytes_per_s": 1e12})
        )
    again = Llama.estimate(path, n_ctx=512, placement="auto")
    for file in known:
        file.write_text("{")
    assert found.placement is not None and again.placement is not None
    mended = Llama.estimate(
        path, placement="slots", vram_cache="50%", n_ctx=512
    ).placement
    every_layer = Llama.estimate(path, placement="auto", n_gpu_layers=-1, n_ctx=512)
    assert every_layer.device or every_layer.layers_on
    assert LoadSpec(n_gpu_layers=-1).choose_gpus(gpus)
    return {
        "source": found.placement.speeds.source,
        "link_bytes_per_s": found.placement.speeds.copies.bytes_per_s,
        "used_again": again.placement.speeds.cpu_bytes_per_s == 1e12,
        "mended": mended.speeds.source,
        "forced": mended.chosen.kind,
        "cpu": Llama.estimate(
            path, placement="cpu", vram_cache="50%", n_ctx=512
        ).device,
        "own_split": Llama.estimate(
            path, placement="auto", n_ctx=512, n_gpu_layers=2
        ).placement,
    }


def of_another_disk(path: Path) -> list[bool]:
    """Checks four times whether the model's speeds are known. Returns the results.

    The checks are before and after a measurement, then before and after a measurement
    on another file system.
    """
    name = link_device(Link(1e9, 20e-6))
    device = next(device for device in gpus() if device.name == name)
    known, found = KnownSpeeds(read_layout(path), 1), list[bool]()
    found.append(known.known(device) is not None)
    known.speeds(device)
    found.append(known.known(device) is not None)
    there, stat = os.stat(path).st_dev, Path.stat
    moved = SimpleNamespace(st_dev=there + 1)
    Path.stat = lambda self, **how: moved if self == path else stat(self, **how)  # type: ignore[assignment]
    found.append(known.known(device) is not None)
    known.speeds(device)
    found.append(known.known(device) is not None)
    return found


def test_a_model_on_another_file_system_is_measured_again(tiny: TinyModel) -> None:
    assert in_measuring_process(of_another_disk, tiny("tiny-qwen2moe", "q4_0", 2)) == [
        False,
        True,
        False,
        True,
    ]


def test_speeds_are_measured_once_and_a_damaged_file_is_measured_again(
    tiny: TinyModel,
) -> None:
    found = in_measuring_process(decisions, tiny("tiny-qwen2moe", "q4_0", 2))
    assert found["source"].startswith("measured on 2")
    assert 0 < found["link_bytes_per_s"] < 1e9
    assert found["used_again"] and found["mended"].startswith("measured on 2")
    assert (found["forced"], found["cpu"], found["own_split"]) == ("slots", None, None)


@pytest.mark.parametrize(
    ("path", "n_slots", "repack"),
    [
        (("tiny-qwen2moe", "q4_0"), n, repack)
        for n, repack in ((5, True), (12, False), (32, False))
    ]
    + [(("tiny-qwen2moe", "q4_k_m"), 20, False)],
    indirect=["path"],
)
@on_servers(1)
def test_prompts_stream_through_slots_of_device_layers(
    path: Path, n_slots: int, repack: bool
) -> None:
    """A prompt is processed in one pass, even with fewer slots than a layer has
    experts.

    Layers 2 and 3 are entirely on the device.
    """
    size = slot_bytes(read_layout(path).only((0, 1)))
    how: dict[str, Any] = {
        "placement": "layers",
        "vram_cache": "60%",
        "store": StoreOptions(repack=repack),
    }
    with Llama(path, expert_cache=n_slots * size, **how, **OPTIONS) as llm:
        assert llm.session is not None and llm.plan.layers_on == "RPC0"
        assert [layer.il for layer in llm.session.layout.layers] == [0, 1]
        places = llm.session.places()
        assert (places[2:] == Place.VRAM).all() and (places[:2] != Place.VRAM).all()
        with pytest.raises(BudgetError, match="whole layers, which stay there"):
            llm.set_budget(vram_cache="10%")
        logits, plan, counters = (
            greedy_logits(llm),
            llm.plan,
            llm.session.store.counters(),
        )
    plain = ExpertsOfTheFirstLayersOnTheCpu
    plain.repack = repack
    with (
        hooks_off(),
        plain(
            path, n_gpu_layers=-1, n_ubatch=plan.n_ubatch, op_offload=False, **OPTIONS
        ) as llm,
    ):
        assert np.array_equal(greedy_logits(llm), logits)
    assert (plan.n_slots, plan.n_ubatch) == (n_slots, 512)
    assert (counters["evictions"] > 0) == (n_slots < 32)
    assert counters["passes"] == 1 + N_NEW  # the prompt was one pass
