"""Placements of experts on a device and the CPU: the logits of these two with every weight there."""

import ctypes as c
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_measuring_process, in_own_process
from rpc_device import in_child
from running import N_NEW, Llama, Logits, Reference, TinyModel, greedy_logits, hooks_off

from moegguf.engine import planner
from moegguf.engine.devices import gpus
from moegguf.engine.load import choose_gpus
from moegguf.engine.plan import slot_bytes
from moegguf.engine.session import EXPERT_TENSORS, Place, _Override
from moegguf.engine.speeds import KnownSpeeds
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.fingerprint import header_digest
from moegguf.native import library
from moegguf.native.link_device import link_device
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link
from moegguf.settings import cache_folder

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False}
PLAIN = StoreOptions(repack=False)


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here, and hit rates of these runs, stay out of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def only(kind: str) -> None:
    """From now on this process knows no other kind of placement."""
    planner.KINDS_OF["auto"] = (kind,)


def placed(path: Path, kind: str, vram: str, ram: str) -> tuple[Logits, dict[str, Any]]:
    """Logits with experts placed so on a device behind a link, and what the plan and the store say."""
    only(kind)
    link_device(Link(4e9, 5e-6))
    with Llama(path, placement="auto", vram_cache=vram, expert_cache=ram, store=PLAIN, **OPTIONS) as llm:
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
        return logits, facts | {"n_whole": plan.placement.chosen.n_layers, "reasons": plan.reasons}


@pytest.mark.parametrize(
    ("kind", "vram", "ram", "layers", "tiers"),
    [
        ("layers", "50%", "100%", [0, 1, 2], ["RAM"]),  # the last two are larger than the first two
        ("layers", "60%", "100%", [0, 1], ["RAM"]),
        ("layers", "30%", "40%", [0, 1, 2], ["RAM"]),
        ("slots", "50%", "40%", [0, 1, 2, 3], ["VRAM", "RAM"]),
        ("resident", "100%", "50%", [0, 1, 2, 3], ["VRAM"]),
        ("cpu", "50%", "50%", [0, 1, 2, 3], ["RAM"]),
    ],
)
def test_each_placement_gives_the_logits_of_every_expert_resident(
    tiny: TinyModel, reference: Reference, kind: str, vram: str, ram: str, layers: list[int], tiers: list[str]
) -> None:
    path = tiny("tiny-qwen2moe", "q4_k_m")
    logits, facts = in_own_process(placed, path, kind, vram, ram)
    assert (facts["layers"], facts["tiers"]) == (layers, tiers)
    assert np.array_equal(logits, reference(path, n_ubatch=facts["n_ubatch"], repack=False))
    assert (facts["evictions"] > 0) == (kind != "resident" and ram != "100%")
    assert any("tokens/s" in reason or "every expert fits" in reason for reason in facts["reasons"])


class ExpertsOfTheFirstLayersOnTheCpu(Llama):
    """What llama.cpp's --n-cpu-moe 2 does."""

    repack = False  # as slots that are not repacked

    def _attach_model(self, params: c.Structure) -> None:
        super()._attach_model(params)
        cpu = c.CDLL(str(next(library.find_library().glob("libggml-base.*")))).ggml_backend_cpu_buffer_type
        cpu.restype = c.c_void_p
        self._overrides = (_Override * 2)(_Override(b"blk\\.(0|1)" + EXPERT_TENSORS.encode(), cpu()), _Override())
        params.tensor_buft_overrides = c.addressof(self._overrides)
        params.use_extra_bufts = self.repack


def layers_on_rpc(path: Path, ram: str) -> tuple[Logits, Logits, dict[str, int]]:
    """Logits of plain llama.cpp with the experts of two layers on the CPU, those of a store, and its counters."""
    with hooks_off(), ExpertsOfTheFirstLayersOnTheCpu(path, n_gpu_layers=-1, **OPTIONS) as llm:
        plain = greedy_logits(llm)
    with Llama(path, placement="layers", vram_cache="60%", expert_cache=ram, store=PLAIN, **OPTIONS) as llm:
        assert llm.session is not None and llm.plan.layers_on == "RPC0"
        assert [layer.il for layer in llm.session.layout.layers] == [0, 1]
        places = llm.session.places()
        assert (places[2:] == Place.VRAM).all() and (places[:2] != Place.VRAM).all()
        with pytest.raises(BudgetError, match="whole layers, which stay there"):
            llm.set_budget(vram_cache="10%")
        return plain, greedy_logits(llm), llm.session.store.counters()


@pytest.mark.parametrize("ram", ["100%", "40%"])
@pytest.mark.parametrize("quant", ["q4_0", "q4_k_m"])
def test_whole_layers_on_a_device_give_the_logits_of_llama_cpp_with_them(tiny: TinyModel, quant: str, ram: str) -> None:
    plain, logits, counters = in_child(layers_on_rpc, tiny("tiny-qwen2moe", quant), ram)
    assert np.array_equal(logits, plain)
    assert (counters["evictions"] > 0) == (ram != "100%")
    assert counters["misses"] > 0 or ram == "100%"


def decisions(path: Path) -> dict[str, Any]:
    """What is decided, and what is measured once."""
    link_device(Link(1e9, 20e-6))
    files = cache_folder() / "placements"
    found = Llama.estimate(path, placement="auto", n_ctx=512)
    file = files / f"{header_digest(read_layout(path).shards)}.json"
    known = json.loads(file.read_text())
    for speeds in known["facts"].values():  # also of devices of other tests
        speeds["cpu_bytes_per_s"] = 1e12
    file.write_text(json.dumps(known))
    again = Llama.estimate(path, n_ctx=512, placement="auto")
    file.write_text("{")
    assert found.placement is not None and again.placement is not None
    mended = Llama.estimate(path, placement="slots", vram_cache="50%", n_ctx=512).placement
    with pytest.raises(OptionError, match="none of auto, layers, slots, cpu"):
        Llama.estimate(path, placement="gpu", n_ctx=512)
    with pytest.raises(OptionError, match="placement 'cpu' uses no GPU, but n_gpu_layers is 2"):
        Llama.estimate(path, placement="cpu", n_gpu_layers=2, n_ctx=512)
    with pytest.raises(OptionError, match="placement 'cpu' uses no GPU, but n_gpu_layers is -1"):
        Llama.estimate(path, placement="cpu", n_gpu_layers=-1, n_ctx=512)
    every_layer = Llama.estimate(path, placement="auto", n_gpu_layers=-1, n_ctx=512)
    assert every_layer.device or every_layer.layers_on
    assert choose_gpus(None, "auto", {"n_gpu_layers": -1})
    return {
        "source": found.placement.speeds.source,
        "link_bytes_per_s": found.placement.speeds.copies.bytes_per_s,
        "used_again": again.placement.speeds.cpu_bytes_per_s == 1e12,
        "mended": mended.speeds.source,
        "forced": mended.chosen.kind,
        "cpu": Llama.estimate(path, placement="cpu", vram_cache="50%", n_ctx=512).device,
        "own_split": Llama.estimate(path, placement="auto", n_ctx=512, n_gpu_layers=2).placement,
    }


def of_another_disk(path: Path) -> list[bool]:
    """Whether speeds are known: at first, after measuring, for the same file on another file system, and there after
    measuring again."""
    name = link_device(Link(1e9, 20e-6))
    device = next(device for device in gpus() if device.name == name)
    known, found = KnownSpeeds(read_layout(path), 1), list[bool]()
    found.append(known.known(device) is not None)
    known.speeds(device)
    found.append(known.known(device) is not None)
    there, stat = os.stat(path).st_dev, Path.stat
    Path.stat = lambda self, **options: Moved(stat(self, **options), there + 1)  # type: ignore[assignment]
    found.append(known.known(device) is not None)
    known.speeds(device)
    found.append(known.known(device) is not None)
    return found


class Moved:
    """A file's facts, but for its file system."""

    def __init__(self, facts: os.stat_result, device: int) -> None:
        self._facts, self.st_dev = facts, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)


def test_a_model_that_moved_to_another_disk_is_measured_there(tiny: TinyModel) -> None:
    assert in_measuring_process(of_another_disk, tiny("tiny-qwen2moe", "q4_0", 2)) == [False, True, False, True]


def test_speeds_are_measured_once_and_a_damaged_file_is_measured_again(tiny: TinyModel) -> None:
    found = in_measuring_process(decisions, tiny("tiny-qwen2moe", "q4_0", 2))
    assert found["source"].startswith("measured on 2")
    assert 0 < found["link_bytes_per_s"] < 1e9
    assert found["used_again"] and found["mended"].startswith("measured on 2")
    assert (found["forced"], found["cpu"], found["own_split"]) == ("slots", None, None)


def streamed(path: Path, n_slots: int, repack: bool) -> dict[str, Any]:
    """A prompt in one pass through fewer slots of the CPU than a layer has experts, with other layers on a device, and
    what llama.cpp computes with the same layers there."""
    size = slot_bytes(read_layout(path).only((0, 1)))
    how: dict[str, Any] = {"placement": "layers", "vram_cache": "60%", "store": StoreOptions(repack=repack)}
    with Llama(path, expert_cache=n_slots * size, **how, **OPTIONS) as llm:
        assert llm.session is not None and llm.plan.layers_on == "RPC0"
        assert [layer.il for layer in llm.session.layout.layers] == [0, 1]
        logits, plan, counters = greedy_logits(llm), llm.plan, llm.session.store.counters()
    plain = ExpertsOfTheFirstLayersOnTheCpu
    plain.repack = repack
    with hooks_off(), plain(path, n_gpu_layers=-1, n_ubatch=plan.n_ubatch, op_offload=False, **OPTIONS) as llm:
        same = np.array_equal(greedy_logits(llm), logits)
    return {"same": same, "n_slots": plan.n_slots, "n_ubatch": plan.n_ubatch, "counters": counters}


@pytest.mark.parametrize(
    ("quant", "n_slots", "repack"), [("q4_0", 12, False), ("q4_0", 5, True), ("q4_k_m", 20, False)]
)
def test_prompts_stream_through_slots_of_device_layers(tiny: TinyModel, quant: str, n_slots: int, repack: bool) -> None:
    found = in_child(streamed, tiny("tiny-qwen2moe", quant), n_slots, repack)
    assert (found["n_slots"], found["n_ubatch"]) == (n_slots, 512)
    assert found["same"]
    assert found["counters"]["evictions"] > 0
    assert found["counters"]["passes"] == 1 + N_NEW  # the prompt was not cut
