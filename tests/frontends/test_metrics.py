"""/metrics: every line follows Prometheus' grammar, and no counter decreases."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from servers import Server

from moegguf.engine.stats import Stats, TierStats
from moegguf.generate.request import Timing
from moegguf.server.metrics import Totals, exposition
from moegguf.serving.events import LoadedModel

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})(\{{{LABEL}(?:,{LABEL})*\}})? (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def model(name: str = "demo:latest", pid: int = 1, **fields: Any) -> LoadedModel:
    figures = {"digest": "0" * 64, "n_ctx": 512, "size_bytes": 1000, "vram_bytes": 0, "expires": None, "busy": False,
               "stopping": False, "queue": 0, "n_requests": 0, "stats": Stats()}  # fmt: skip
    return LoadedModel(name=name, pid=pid, **{**figures, **fields})


def samples(text: str) -> dict[str, float]:
    """Every sample by name and labels; fails unless all of `text` is of the format."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert line.split(" ", 3)[2] not in kinds
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind == ("counter" if name.endswith("_total") else "gauge")
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] in kinds
            assert match[1] + (match[2] or "") not in found
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_a_server_without_models_still_has_llama_servers_metrics() -> None:
    found = samples(exposition(Totals(), []))
    assert found["llamacpp:prompt_tokens_total"] == found["llamacpp:predicted_tokens_seconds"] == 0
    assert not [name for name in found if name.startswith("moegguf_")]


def test_answers_are_summed_over_models_and_per_model() -> None:
    totals = Totals()
    totals.add("a:latest", Timing(prompt_tokens=10, cached_tokens=5, answer_tokens=20, prompt_s=0.5, answer_s=2.0))
    totals.add("a:latest", Timing(prompt_tokens=10, answer_tokens=20, prompt_s=0.5, answer_s=2.0))
    totals.add("b:latest", Timing(prompt_tokens=20, answer_tokens=40, prompt_s=1.0, answer_s=4.0))
    loaded = [model("a:latest", busy=True, queue=2), model("b:latest", 2, busy=True, queue=1)]
    found = samples(exposition(totals, loaded))
    assert found["llamacpp:prompt_tokens_total"] == 40
    assert found["llamacpp:prompt_tokens_cached_total"] == 5
    assert found["llamacpp:tokens_predicted_total"] == 80
    assert found["llamacpp:prompt_tokens_seconds"] == 20
    assert found["llamacpp:predicted_tokens_seconds"] == 10
    assert found["llamacpp:requests_processing"] == 2
    assert found["llamacpp:requests_deferred"] == 3
    assert found['moegguf_answers_total{model="a:latest"}'] == 2
    assert found['moegguf_answer_seconds_total{model="b:latest"}'] == 4


def test_expert_counters_equal_stats() -> None:
    stats = Stats(
        tokens=9, lookups=100, hits_ready=60, hits_late=10, misses=30, evictions=7, bytes_missed=4096,
        bytes_prefetched=512, misses_computed=3, exact=False, stall_s=0.125,
        compute_s=0.25, compute_stall_s=0.0625,
        staging_bytes=3 << 20, bytes_staged=5 << 20, staging_copy_s=2.0, staging_stall_s=0.5,
        n_slots=40, slots_used=39, n_experts=64, pool_bytes=1 << 20,
    )  # fmt: skip
    totals, loaded = Totals(), [model(stats=stats, pid=os.getpid(), size_bytes=1 << 21)]
    totals.update(loaded)
    found = samples(exposition(totals, loaded))
    expected = {
        'moegguf_tokens_total{model="demo:latest"}': 9,
        'moegguf_expert_lookups_total{model="demo:latest"}': 100,
        'moegguf_expert_hits_total{kind="ready",model="demo:latest"}': 60,
        'moegguf_expert_hits_total{kind="late",model="demo:latest"}': 10,
        'moegguf_expert_misses_total{model="demo:latest"}': 30,
        'moegguf_expert_misses_computed_total{model="demo:latest"}': 3,
        'moegguf_compute_seconds_total{model="demo:latest"}': 0.25,
        'moegguf_compute_stall_seconds_total{model="demo:latest"}': 0.0625,
        'moegguf_exact{model="demo:latest"}': 0,
        'moegguf_expert_evictions_total{model="demo:latest"}': 7,
        'moegguf_expert_read_bytes_total{cause="miss",model="demo:latest"}': 4096,
        'moegguf_expert_read_bytes_total{cause="prefetch",model="demo:latest"}': 512,
        'moegguf_stall_seconds_total{model="demo:latest"}': 0.125,
        'moegguf_staging_bytes{model="demo:latest"}': 3 << 20,
        'moegguf_staged_bytes_total{model="demo:latest"}': 5 << 20,
        'moegguf_staging_copy_seconds_total{model="demo:latest"}': 2.0,
        'moegguf_staging_stall_seconds_total{model="demo:latest"}': 0.5,
        'moegguf_slots{model="demo:latest"}': 40,
        'moegguf_slots_used{model="demo:latest"}': 39,
        'moegguf_experts{model="demo:latest"}': 64,
        'moegguf_expert_cache_bytes{model="demo:latest"}': 1 << 20,
        'moegguf_planned_bytes{model="demo:latest"}': 1 << 21,
    }
    assert {name: found[name] for name in expected} == expected
    assert found['moegguf_resident_bytes{model="demo:latest"}'] > 1 << 20  # of this very process


def test_tiers_have_counters_and_gauges_of_their_own() -> None:
    vram = TierStats(
        "VRAM", "CUDA0", lookups=100, hits_ready=60, hits_late=10, misses=30, evictions=7, bytes_missed=4096,
        stall_s=0.5, n_slots=16, slots_used=15, pool_bytes=1 << 20,
    )  # fmt: skip
    ram = TierStats("RAM", "CUDA0", lookups=30, hits_ready=20, misses=10, bytes_prefetched=512, n_slots=32)
    totals = Totals()
    totals.update([model(stats=Stats(lookups=100, tiers=(vram, ram)))])
    totals.update([model(pid=2, stats=Stats(lookups=1, tiers=(replace(vram, hits_ready=5), ram)))])  # loaded again
    found = samples(exposition(totals, [model(stats=Stats(tiers=(vram, ram)))]))
    expected = {
        ("hits_total", 'kind="ready",', "vram"): 65,
        ("hits_total", 'kind="late",', "ram"): 0,
        ("misses_total", "", "ram"): 20,
        ("evictions_total", "", "vram"): 14,
        ("stall_seconds_total", "", "vram"): 1.0,
        ("slots", "", "vram"): 16,
        ("slots_used", "", "vram"): 15,
        ("slots", "", "ram"): 32,
        ("bytes", "", "vram"): 1 << 20,
    }
    names = {key: 'moegguf_tier_{}{{device="CUDA0",{}model="demo:latest",tier="{}"}}'.format(*key) for key in expected}
    assert {key: found.get(name) for key, name in names.items()} == expected
    received = 'moegguf_tier_received_bytes_total{{cause="{}",device="CUDA0",model="demo:latest",tier="{}"}}'.format
    assert (found[received("miss", "vram")], found[received("prefetch", "ram")]) == (8192, 1024)
    assert found['moegguf_expert_lookups_total{model="demo:latest"}'] == 101


def test_counters_survive_unloading_and_reloading() -> None:
    totals, before = Totals(), {}
    for loaded in (
        [model(stats=Stats(misses=5, n_slots=3))],
        [model(stats=Stats(misses=8, n_slots=3)), model("b:latest", 2, stats=Stats(misses=1))],
        [model("b:latest", 2, stats=Stats(misses=2))],
        [],
        [model(pid=3, stats=Stats(misses=4))],
        [model(pid=4, stats=Stats(misses=1))],
    ):
        totals.update(loaded)
        now = samples(exposition(totals, loaded))
        assert all(now[name] >= value for name, value in before.items() if "_total" in name)
        before = now
    assert before['moegguf_expert_misses_total{model="demo:latest"}'] == 8 + 4 + 1
    assert before['moegguf_expert_misses_total{model="b:latest"}'] == 2
    assert 'moegguf_slots{model="b:latest"}' not in before


def test_names_that_need_escapes_stay_one_line_each() -> None:
    name = 'a\\b"c\nd:latest'
    totals, loaded = Totals(), [model(name)]
    totals.update(loaded)
    found = samples(exposition(totals, loaded))
    assert found['moegguf_expert_misses_total{model="a\\\\b\\"c\\nd:latest"}'] == 0


def test_an_ended_process_has_no_resident_memory() -> None:
    assert samples(exposition(Totals(), [model(pid=2**22 + 1)]))['moegguf_resident_bytes{model="demo:latest"}'] == 0


def test_a_real_server_keeps_the_counts_of_an_unloaded_model(server: Server) -> None:
    asked = {"model": "tiny", "prompt": "a b c", "max_tokens": 3, "seed": 1}
    assert server.call("/v1/completions", asked).status == 200
    before = samples(server.call("/metrics").text)
    assert before['moegguf_resident_bytes{model="tiny:latest"}'] > 1 << 20
    assert before['moegguf_expert_lookups_total{model="tiny:latest"}'] > 0
    assert before["llamacpp:tokens_predicted_total"] >= 3
    assert server.call("/api/generate", {"model": "tiny", "keep_alive": 0}).json["done_reason"] == "unload"
    after = samples(server.call("/metrics").text)
    assert 'moegguf_slots{model="tiny:latest"}' not in after
    assert all(after[name] >= value for name, value in before.items() if "_total" in name)
