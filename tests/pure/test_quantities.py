"""Tests sizes, budgets, times and environment variables: accepted texts, messages of
refusals, and printed forms."""

import contextlib
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegguf.errors import BudgetError, MoeggufError, OptionError
from moegguf.quantities import (
    ExpertCache,
    Link,
    format_bytes,
    format_bytes_up,
    human_bytes,
    human_duration,
    human_number,
    human_time,
    parse_expert_cache,
    parse_link,
    parse_size,
    processor_split,
)
from moegguf.settings import read_environment, read_load_keywords


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4GiB", 4 << 30), ("4gib", 4 << 30), (" 4 GiB ", 4 << 30), ("4G", 4 << 30), ("2.5 GB", 2_500_000_000),
        ("512MiB", 512 << 20), ("0.5k", 512), ("1TB", 10**12), ("1000", 1000), ("7B", 7), (1 << 33, 1 << 33),
    ],
)  # fmt: skip
def test_parse_size_reads_numbers_with_units(text: str | int, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


BAD_SIZES = [
    "",
    "0",
    "-1",
    "-4GiB",
    "1e9",
    "2.5",
    "GiB",
    "4 PiB",
    "4GiBs",
    "٤GiB",
    "1 2",
    "9" * 30,
    "4GiB\0",
    "0x10",
]


def test_parse_expert_cache_reads_auto_percentages_and_sizes() -> None:
    assert parse_expert_cache("auto") == ExpertCache("auto")
    assert parse_expert_cache(" AUTO ") == ExpertCache("auto")
    assert parse_expert_cache("50%") == ExpertCache("fraction", fraction=0.5)
    assert parse_expert_cache("100 %") == ExpertCache("fraction", fraction=1.0)
    assert parse_expert_cache("4GiB") == ExpertCache("bytes", n_bytes=4 << 30)
    assert parse_expert_cache(4e9) == ExpertCache("bytes", n_bytes=4_000_000_000)
    assert parse_expert_cache(ExpertCache("auto")) == ExpertCache("auto")


BAD_BUDGETS = [
    0,
    -1,
    True,
    0.0,
    0.5,
    -2.5,
    math.nan,
    math.inf,
    1e30,
    "0%",
    "101%",
    "-5%",
    "abc",
    "half",
    *BAD_SIZES,
]


@pytest.mark.parametrize("value", [*BAD_BUDGETS, None, [], b"4GiB"])
def test_parse_expert_cache_rejects_other_values_and_lists_accepted_forms(
    value: object,
) -> None:
    with pytest.raises(BudgetError, match=r'"auto".*"50%".*"4GiB"') as caught:
        parse_expert_cache(value)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MoeggufError)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["50", " 100 ", "1", "12.5"])
def test_parse_expert_cache_suggests_percent_for_a_bare_number_up_to_100(
    text: str,
) -> None:
    with pytest.raises(BudgetError, match=f'did you mean "{text.strip()}%"') as caught:
        parse_expert_cache(text)
    assert len(str(caught.value)) < 300
    assert (
        parse_expert_cache("101").n_bytes == 101
        and parse_expert_cache("50 B").n_bytes == 50
    )
    assert parse_expert_cache(50).n_bytes == 50, "a number from a program is in bytes"


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30))
def test_parse_expert_cache_returns_or_raises_budget_error_for_any_text(
    text: str,
) -> None:
    with contextlib.suppress(BudgetError):
        parse_expert_cache(text)


@settings(max_examples=50, deadline=None)
@given(st.integers(min_value=1, max_value=1 << 50))
def test_format_bytes_up_never_rounds_down(n_bytes: int) -> None:
    assert n_bytes <= parse_size(format_bytes_up(n_bytes)) + 1 <= n_bytes + (1 << 20)


def test_read_environment_checks_values_and_unknown_option_suggests_a_name() -> None:
    assert read_environment({}) == read_environment(
        {"MOEGGUF_HOOKS": "", "MOEGGUF_EXPERT_CACHE": " "}
    )
    variables = {
        "MOEGGUF_HOOKS": "0",
        "MOEGGUF_EXPERT_CACHE": "25%",
        "MOEGGUF_MODELS": "/m",
    }
    env = read_environment(variables)
    assert (env.hooks, env.models, env.library) == (False, Path("/m"), None)
    assert str(read_load_keywords(environ=variables)["expert_cache"]) == "25%"
    with pytest.raises(OptionError, match="MOEGGUF_HOOKS"):
        read_environment({"MOEGGUF_HOOKS": "maybe"})
    with pytest.raises(BudgetError, match="MOEGGUF_EXPERT_CACHE"):
        read_load_keywords(environ={"MOEGGUF_EXPERT_CACHE": "lots"})
    error = OptionError.unknown("n_gpu_layer", ["n_ctx", "n_gpu_layers", "n_batch"])
    assert "did you mean 'n_gpu_layers'?" in str(error)
    assert isinstance(error, TypeError)
    assert "did you mean" not in str(OptionError.unknown("zzz", ["n_ctx"]))


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("24GB/s", Link(24e9)),
        ("24GB/s,35us", Link(24e9, 35e-6)),
        (" 12.5 GB/s , 0.1ms", Link(12.5e9, 1e-4)),
        ("1GiB/s,0s", Link(float(1 << 30))),
    ],
)
def test_parse_link_reads_bandwidth_and_latency(text: str, link: Link) -> None:
    assert parse_link(text) == link
    assert parse_link(str(Link(24e9, 35e-6))) == Link(24e9, 35e-6), (
        "it says what can be read again"
    )
    assert link.seconds(2e9, 3) == pytest.approx(
        2e9 / link.bytes_per_s + 3 * link.latency_s
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24GB",
        "24",
        "/s",
        "24GB/ms",
        "0GB/s",
        "-1GB/s",
        "24GB/s,fast",
        "24GB/s,-1",
        "x",
    ],
)
def test_parse_link_rejects_malformed_texts(text: str) -> None:
    with pytest.raises(OptionError, match="24GB/s,35us"):
        parse_link(text)


NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("human", "n", "text"),
    [
        *((human_bytes, *row) for row in (
            (0, "0 B"), (999, "999 B"), (1000, "1 KB"), (4_700_000_000, "4.7 GB"), (17_300_000_000, "17 GB"),
            (274_000_000, "274 MB"), (2_500_000_000_000, "2.5 TB"),
        )),
        *((human_duration, *row) for row in (
            (0.3, "Less than a second"), (1, "1 second"), (59, "59 seconds"), (61, "About a minute"),
            (240, "4 minutes"), (3600, "About an hour"), (47 * 3600, "47 hours"), (3 * 86400, "3 days"),
            (15 * 86400, "2 weeks"), (70 * 86400, "2 months"), (800 * 86400, "2 years"),
        )),
        *((human_number, *row) for row in (
            (0, "0"), (999, "999"), (1000, "1K"), (23_387_904, "23.4M"), (30_532_122_624, "30.5B"), (8 * 10**9, "8B"),
        )),
        *((format_bytes, *row) for row in (
            (0, "0 B"), (900, "900 B"), (1024, "1.00KiB"), (23383245, "22.3MiB"), (8066839552, "7.51GiB"),
            (-2048, "-2.00KiB"),
        )),
    ],
)  # fmt: skip
def test_human_formats_print_bytes_durations_and_numbers(
    human: Callable[[float], str], n: float, text: str
) -> None:
    assert human(n) == text


def test_human_time_prints_past_and_future_times() -> None:
    assert human_time(NOW - timedelta(days=3), NOW) == "3 days ago"
    assert (
        human_time(NOW + timedelta(minutes=4, seconds=10), NOW) == "4 minutes from now"
    )
    assert human_time(None) == "Forever"


@pytest.mark.parametrize(
    ("size_bytes", "vram_bytes", "text"),
    [
        (10, 0, "100% CPU"),
        (10, 10, "100% GPU"),
        (10, 12, "Unknown"),
        (0, 3, "Unknown"),
        (100, 52, "48%/52% CPU/GPU"),
    ],
)
def test_processor_split_prints_the_shares_of_cpu_and_gpu(
    size_bytes: int, vram_bytes: int, text: str
) -> None:
    assert processor_split(size_bytes, vram_bytes) == text
