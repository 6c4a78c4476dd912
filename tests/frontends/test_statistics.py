"""Statistics after an answer; durations as Go prints them, since scripts parse Ollama's lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moegguf.engine.stats import Stats, TierStats
from moegguf.generate.request import Timing
from moegguf.terminal.statistics import duration, expert_lines, policy_lines, statistics, total_lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ns"), (3e-9, "3ns"), (412.5e-6, "412.5µs"), (1.234e-3, "1.234ms"), (4.9, "4.9s"), (60, "1m0s"),
        (123.5, "2m3.5s"), (3605, "1h0m5s"), (0.9999999999, "1s"), (298.000000001, "4m58.000000001s"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_token_has_no_rate() -> None:
    lines = statistics(Timing(prompt_tokens=3, answer_tokens=1, prompt_s=0.5, total_s=0.5), 0.1)
    assert lines[-2] == "eval count:           1 token(s)"
    assert not any(line.startswith("eval rate") for line in lines)


WHOLE = Stats(
    tokens=12, lookups=200, hits_ready=150, hits_late=10, misses=40, evictions=4, bytes_missed=40_000_000,
    bytes_prefetched=5_000_000, n_slots=32, n_experts=64, pool_bytes=32 << 20, n_threads=2,
)  # fmt: skip
DECODE = Stats(tokens=9, stall_s=0.09, eval_s=0.5, bytes_missed=18_000_000, n_slots=32, n_experts=64)


def test_the_expert_caches_lines_follow_ollamas() -> None:
    timing = Timing(
        prompt_tokens=3, cached_tokens=7, answer_tokens=10, prompt_s=0.25, answer_s=0.5, total_s=0.75,
        stats=WHOLE, answer_stats=DECODE,
    )  # fmt: skip
    assert statistics(timing, 0.25) == [
        "total duration:       1s",
        "load duration:        250ms",
        "prompt eval count:    3 token(s)",
        "prompt eval duration: 250ms",
        "prompt eval rate:     12.00 tokens/s",
        "eval count:           10 token(s)",
        "eval duration:        500ms",
        "eval rate:            20.00 tokens/s",
        "time to first token:  250ms",
        "prompt cached:        7 token(s)",
        "threads:              2",
        "expert cache:         32 of 64 experts (50%), 32.0MiB",
        "hit rate:             ram 75.0% in flight 5.0% disk 20.0% of 200 lookups",
        "moved:                45.00 MB from disk (2.00 MB/token)",
        "evictions:            4",
        "stall:                18% of decode, 10.00 ms/token",
    ]


def test_totals_since_the_model_was_loaded() -> None:
    assert total_lines(Stats()) == []
    assert total_lines(WHOLE) == [
        "since load:           12 token(s) evaluated",
        "hit rate:             ram 75.0% in flight 5.0% disk 20.0% of 200 lookups",
        "moved:                45.00 MB from disk",
    ]


def test_two_tiers_have_lines_of_their_own() -> None:
    vram = TierStats(
        "VRAM", "RPC0", lookups=200, hits_ready=150, hits_late=10, misses=40, evictions=9, bytes_missed=60_000_000,
        n_slots=16, pool_bytes=16 << 20,
    )  # fmt: skip
    ram = TierStats("RAM", "RPC0", lookups=40, hits_ready=24, hits_late=2, misses=14, evictions=4, n_slots=32,
                    pool_bytes=32 << 20)  # fmt: skip
    whole = replace(WHOLE, n_slots=16, tiers=(vram, ram))
    decode = replace(DECODE, tiers=(replace(vram, bytes_missed=9_000_000), replace(ram, stall_s=0.045)))
    assert expert_lines(whole, decode) == [
        ("expert cache VRAM", "16 of 64 experts (25%), 16.0MiB on RPC0"),
        ("expert cache RAM", "32 of 64 experts (50%), 32.0MiB"),
        ("hit rate", "vram 75.0% ram 12.0% in flight 6.0% disk 7.0% of 200 lookups"),
        ("moved to VRAM", "60.00 MB (1.00 MB/token)"),
        ("moved", "45.00 MB from disk (2.00 MB/token)"),
        ("evictions", "9 VRAM, 4 RAM"),
        ("stall", "18% of decode, 10.00 ms/token, 9% for disk"),
    ]
    alone = dict(expert_lines(replace(whole, tiers=(vram,)), replace(decode, tiers=(vram,))))
    assert alone["hit rate"] == "vram 75.0% in flight 5.0% disk 20.0% of 200 lookups"
    assert alone["evictions"] == "4" and "expert cache RAM" not in alone


def test_slots_of_the_cpu_beside_a_device_are_ram() -> None:
    vram = TierStats("VRAM", "RPC0", lookups=150, hits_ready=120, misses=30, n_slots=12)
    cpu = TierStats("CPU", "CPU", lookups=50, hits_ready=30, misses=20, evictions=7, n_slots=4, pool_bytes=4 << 20)
    lines = dict(
        expert_lines(replace(WHOLE, lookups=200, hits_ready=150, hits_late=0, misses=50, tiers=(vram, cpu)), DECODE)
    )
    assert lines["expert cache CPU"] == "4 of 64 experts (6%), 4.00MiB"
    assert lines["hit rate"] == "vram 60.0% ram 15.0% disk 25.0% of 200 lookups"
    assert lines["evictions"] == "0 VRAM, 7 CPU"


def test_tiers_are_added_and_subtracted_by_name_and_device() -> None:
    before = Stats(lookups=3, tiers=(TierStats("VRAM", "A", lookups=3, n_slots=9), TierStats("RAM", "A", misses=1)))
    now = Stats(lookups=10, tiers=(TierStats("VRAM", "A", lookups=10, n_slots=8), TierStats("VRAM", "B", lookups=4)))
    grown = (now - before).tiers
    assert [(tier.device, tier.lookups, tier.n_slots) for tier in grown] == [("A", 7, 8), ("B", 4, 0)]
    total = (before + now).tiers
    assert [(tier.name, tier.device, tier.lookups, tier.misses) for tier in total] == [
        ("VRAM", "A", 13, 0), ("VRAM", "B", 4, 0), ("RAM", "A", 0, 1)
    ]  # fmt: skip
    assert total[0].n_slots == 8


DECIDED: dict[str, Any] = {
    "policy": "next-use",
    "predictor": "skip",
    "prefetch": "on",
    "gates": 10,
    "us_per_event": 41.6,
}


def test_policy_and_predictor_have_lines() -> None:
    stats = Stats(prefetch_started=57, prefetch_useful=24)
    assert policy_lines(DECIDED, stats) == [
        ("policy", "next-use"),
        ("predictor", "skip"),
        ("prefetch", "on, 24 of 57 used"),
        ("controller", "42µs per routing event"),
    ]


def test_measured_savings_of_prefetching_are_shown() -> None:
    paused = DECIDED | {"prefetch": "paused", "time_saved_by_prefetch": -0.034}
    assert dict(policy_lines(paused, Stats()))["prefetch"].endswith("saved -3% of the time when measured")


@pytest.mark.parametrize("decisions", [{}, {"policy": "lru", "predictor": "none", "prefetch": "off"}])
def test_plain_lru_has_no_line(decisions: dict[str, Any]) -> None:
    assert policy_lines(decisions, Stats()) == []
    assert statistics(Timing(prompt_tokens=3, prompt_s=0.5, total_s=0.5), 0, decisions)[-1].startswith(
        "prompt eval rate"
    )


def test_without_prefetching_there_is_no_line_about_it() -> None:
    lines = policy_lines({"policy": "lfu", "predictor": "none", "prefetch": "off", "us_per_event": 3.0}, Stats())
    assert lines == [("policy", "lfu"), ("predictor", "none"), ("controller", "3µs per routing event")]
