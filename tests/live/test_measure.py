"""Tests tools/gpu/measure.py on a simulated device."""

import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from own_process import in_own_process
from running import TinyModel

from moegguf.native.store import Store
from tools.gpu import measure
from tools.gpu.case import Case

N_PROMPTS = 2


def check_run(path: Path) -> None:
    case = Case(
        str(path),
        device="",
        system="moegguf",
        link="8GB/s",
        options={"vram_cache": "40%", "placement": "slots"},
        n_prompt=64,
        n_prompts=N_PROMPTS,
        n_decode=8,
        n_ctx=256,
        n_ubatch=64,
    )
    events, values = list[str](), dict[str, object]()
    drain = Store.drain

    def read_clock() -> float:
        events.append("clock")
        return time.perf_counter()

    def drain_store(store: Store, timeout_s: float = 60.0) -> None:
        events.append("drain")
        drain(store, timeout_s)

    with (
        patch.object(measure, "time", SimpleNamespace(perf_counter=read_clock)),
        patch.object(Store, "drain", drain_store),
    ):
        for part in measure.run(case):
            values |= part
    # The first two readings of the clock time the load.
    clocks = [i for i, event in enumerate(events) if event == "clock"]
    starts = clocks[2::2]
    assert len(starts) == 1 + N_PROMPTS + 2
    assert [events[start - 1] for start in starts] == ["drain"] * len(starts)
    assert values["placement"] == "slots" and values["complete"] is False
    for predicted in (values["predicted"], values["predicted_prompts"]):
        assert isinstance(predicted, dict) and predicted["chosen"] == predicted["slots"]


def test_measurement_drains_the_store_before_each_timed_part(tiny: TinyModel) -> None:
    in_own_process(check_run, tiny())
