"""Formats the statistics after an answer: the lines of `ollama run --verbose`, then
lines about the expert cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegguf.engine.cost import Placement, format_speed, is_off
from moegguf.engine.stats import DriveStats, Stats, TierStats
from moegguf.generate.request import AnswerSummary
from moegguf.quantities import format_bytes
from moegguf.terminal.progress import duration

# An answer's speed is compared with the prediction only if the answer has more tokens
# than this.
LEAST_TOKENS = 16
LABEL_WIDTH = 22  # characters of Ollama's longest label, its colon and a space

Lines = dict[str, str]  # {label: value}


def statistics(
    summary: AnswerSummary, load_s: float, predicted: Placement | None = None
) -> list[str]:
    """Returns the lines of statistics. In the lines about experts, the stall and the
    numbers per token cover only the answer; the other numbers include the prompt.

    The eval rate is the answer's token count divided by its duration, as in llama.cpp
    and in clients of the APIs. The count includes the first token, which comes from the
    prompt's last pass, before the duration begins.

    predicted: the chosen placement of experts with its predicted speeds.
    """
    lines = {"total duration": duration(summary.total_s + load_s)}
    if load_s:
        lines["load duration"] = duration(load_s)
    if summary.prompt_tokens:
        prompt_speed = summary.prompt_tokens / summary.prompt_s
        lines["prompt eval count"] = f"{summary.prompt_tokens} token(s)"
        lines["prompt eval duration"] = duration(summary.prompt_s)
        lines["prompt eval rate"] = f"{prompt_speed:.2f} tokens/s"
    speed = summary.answer_tokens / summary.answer_s if summary.answer_s else 0.0
    if summary.answer_tokens:
        lines["eval count"] = f"{summary.answer_tokens} token(s)"
        if summary.answer_tokens > 1:
            lines["eval duration"] = duration(summary.answer_s)
            lines["eval rate"] = f"{speed:.2f} tokens/s"
        lines["time to first token"] = duration(summary.prompt_s)
    if summary.cached_tokens:
        from_disk = f", {summary.disk_tokens} from disk" if summary.disk_tokens else ""
        lines["prompt cached"] = f"{summary.cached_tokens} token(s){from_disk}"
    if summary.stats.n_threads:
        lines["threads"] = str(summary.stats.n_threads)
    if (stats := summary.answer_stats).draft_passes:
        accepted = f"{stats.accepted_tokens} of {stats.drafted_tokens} accepted ({stats.draft_acceptance:.0%})"
        passes = f"{stats.draft_passes} pass" + "es" * (stats.draft_passes > 1)
        lines["drafts"] = (
            f"{accepted}, {passes} of {stats.tokens_per_draft_pass:.2f} tokens"
        )
        if stats.n_experts:
            read_bytes = round(stats.bytes_per_accepted_token)
            lines["read per token kept"] = format_bytes(read_bytes)
    lines |= expert_lines(summary.stats, summary.answer_stats)
    lines |= policy_lines(summary.decisions, summary.stats)
    if predicted is not None:
        lines["placement"] = str(predicted)
        if (
            summary.answer_tokens > LEAST_TOKENS
            and speed
            and is_off(speed, predicted.tokens_per_s)
        ):
            differs = (
                f"this answer differs by {speed / predicted.tokens_per_s - 1:+.0%}"
            )
            lines["predicted"] = (
                f"{format_speed(predicted.tokens_per_s)} tokens/s; {differs}"
            )
    return _aligned(lines)


def _aligned(lines: Lines) -> list[str]:
    return [f"{label + ':':<{LABEL_WIDTH}}{value}" for label, value in lines.items()]


def expert_lines(stats: Stats, decode: Stats) -> Lines:
    """Returns {label: value} about the expert cache, or {} for a model without experts.
    `stats` count the prompt and the answer, `decode` the answer from its second token
    on."""
    if not stats.n_experts:
        return {}
    lines = {"expert cache": _slots(stats, stats.n_experts)}
    if stats.in_vram:
        lines = {
            f"expert cache {tier.name}": _slots(tier, stats.n_experts)
            for tier in stats.tiers
        }
        lines["expert cache VRAM"] += f" on {stats.tiers[0].device}"
    if stats.lookups:
        lines["hit rate"] = f"{lookup_shares(stats)} of {stats.lookups} lookups"
    moved = f"{stats.bytes_read / 1e6:.2f} MB from disk"
    if decode.tokens:
        moved += f" ({decode.bytes_per_accepted_token / 1e6:.2f} MB/token)"
    if stats.in_vram:
        mb = [
            (tier.bytes_missed + tier.bytes_prefetched) / 1e6
            for tier in (*stats.tiers[:1], *decode.tiers[:1])
        ]
        each = (
            f" ({mb[1] / decode.tokens:.2f} MB/token)"
            if decode.tokens and decode.tiers
            else ""
        )
        lines["moved to VRAM"] = f"{mb[0]:.2f} MB{each}"
    if stats.staging_bytes:
        lines["prompts staged"] = staged(stats)
    lines["moved"] = moved
    by_tier = ", ".join(f"{tier.evictions} {tier.name}" for tier in stats.tiers)
    lines["evictions"] = by_tier if len(stats.tiers) > 1 else str(stats.evictions)
    if decode.tokens and decode.eval_s:
        each = f"{decode.stall_per_token_s * 1e3:.2f} ms/token"
        of_disk = (
            f", {decode.below.stall_s / decode.eval_s:.0%} for disk"
            if decode.below
            else ""
        )
        lines["stall"] = (
            f"{decode.stall_s / decode.eval_s:.0%} of decode, {each}{of_disk}"
        )
    if stats.drives:
        lines["read from"] = ", ".join(map(_drive, stats.drives))
    if stats.read_retries:
        lines["read retries"] = str(stats.read_retries)
    return lines


def _drive(drive: DriveStats) -> str:
    """Returns the bytes that were read from one copy of the model's files: "812.30 MB
    of mirror 1 (0.41 GB/s)". The word "failed" replaces the speed of a copy that is no
    longer used."""
    about = "failed" if drive.is_dropped else f"{drive.bytes_per_s / 1e9:.2f} GB/s"
    return f"{drive.bytes_read / 1e6:.2f} MB of {drive.name} ({about})"


def _slots(of: Stats | TierStats, n_experts: int) -> str:
    share = of.n_slots / n_experts
    return f"{of.n_slots} of {n_experts} experts ({share:.0%}), {format_bytes(of.pool_bytes)}"


def staged(stats: Stats) -> str:
    """Returns a text such as "12.30 MB through 48 MiB, 93% of the time while
    computing".

    The first number counts the bytes that prompts copied into staging tensors, and the
    second is the size of these tensors. The share is the part of the copying time in
    which no layer waited; it is left out if nothing was copied.
    """
    text = (
        f"{stats.bytes_staged / 1e6:.2f} MB through {format_bytes(stats.staging_bytes)}"
    )
    return text + f", {stats.staging_overlap:.0%} of the time while computing" * (
        stats.bytes_staged > 0
    )


def lookup_shares(stats: Stats) -> str:
    """Returns the shares of lookups by the place of the expert: "ram 97.3% in flight
    0.4% disk 2.3%", or "vram 80.1% ram 15.0% in flight 0.4% disk 4.5%"."""
    ram = stats.below or TierStats("RAM")
    cpu = stats.on_cpu or TierStats("CPU")
    n_late = stats.hits_late + ram.hits_late
    counts = dict[str, int]()
    if stats.in_vram:
        counts["vram"] = stats.hits_ready - cpu.hits_ready
        if stats.below or stats.on_cpu:
            counts["ram"] = ram.hits_ready + cpu.hits_ready
    else:
        counts["ram"] = stats.hits_ready
    if n_late:
        counts["in flight"] = n_late
    counts["disk"] = stats.misses - ram.hits
    return " ".join(f"{where} {n / stats.lookups:.1%}" for where, n in counts.items())


def total_lines(stats: Stats) -> list[str]:
    """Returns lines with the statistics since the model was loaded, or [] if no expert
    was looked up."""
    if not stats.lookups:
        return []
    return _aligned(
        {
            "since load": f"{stats.tokens} token(s) evaluated",
            "hit rate since load": f"{lookup_shares(stats)} of {stats.lookups} lookups",
            "moved since load": f"{stats.bytes_read / 1e6:.2f} MB from disk",
        }
    )


def policy_lines(decisions: Mapping[str, Any], stats: Stats) -> Lines:
    """Returns {label: value} about the policy, the predictor and prefetching. Returns
    {} for plain LRU, and if `decisions` is empty."""
    if not decisions or (
        decisions["policy"] == "lru" and decisions["predictor"] == "none"
    ):
        return {}
    lines = {name: decisions[name] for name in ("policy", "predictor")}
    if decisions["prefetch"] != "off":
        used = stats.prefetch_useful + stats.prefetch_late
        late = stats.prefetch_late
        useful = f"{used} of {stats.prefetch_started} used" + (
            f", {late} of them late" if late else ""
        )
        saved = decisions.get("time_saved_by_prefetch")
        measured = (
            "" if saved is None else f"; saved {saved:.0%} of the time when measured"
        )
        lines["prefetch"] = f"{decisions['prefetch']}, {useful}{measured}"
    if "us_per_event" in decisions:
        lines["controller"] = f"{decisions['us_per_event']:.0f}µs per routing event"
    return lines
