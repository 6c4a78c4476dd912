"""The cost model: predicts the time of a token for each placement of a model's experts.

Predictions use measured speeds, or assumed ones for a device that was not measured.
They assume an exact cache: an expert that misses on the device is copied to the device
before it is multiplied there. A is the bytes of a token's experts in all L layers. D is
the bytes of everything else that a token reads. The times of a token are:

    slots          (D + A) / device + (1 - h) A / copies + L * (stop + (1 - h^k) * copy)   h: hit rate, k: experts used
    whole layers   (D + f A) / device + (1 - f) (A / CPU + L * way)               f: share of the layers on the device
    CPU            (D + A) / CPU

`device`, `CPU` and `copies` are speeds in bytes per second. `stop` is the time of a
stop at a layer, where the host waits for the router's choice. `copy` is the latency of
copying a layer's misses, in addition to the time for their bytes. `way` is the time to
move activations from the device to the CPU and back. If every expert is on the device,
h is 1 and nothing stops. The time of graph nodes that read few or no weights is added,
and experts that are not in memory are read from the disk.

Speeds are measured with kernels and copies. A device that was not measured is assumed
to reach 0.65 of its memory's bandwidth. Its times are the constants in this file, which
agree with published measurements.

A pass of a prompt takes at least the time to read the weights of each used expert once.
It also takes at least the time of the same number of single tokens, divided by
DEVICE_GAIN or CPU_GAIN. If the CPU computes everything, and has computed prompts of the
model before, their time is used instead. Reads from the disk overlap with all computation, and copies to
the device overlap with the device's computation. The best placement takes the least
time for a typical request: a prompt of PROMPT_TOKENS and an answer of ANSWER_TOKENS.

Expected hit rates are ranges. If the model's own routing was measured (`Measured`), 49
in 50 of its requests fall within the range. Otherwise the range contains all published
hit rates for models of this shape, or for all models if there are none. Placements are
compared using a single hit-rate curve. Within one placement, more slots leave less
memory for the buffers of passes. The best combination of slots and tokens per pass is
chosen before any speed is known, according to the bytes that a request moves
(`request_cost`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.hit_rates import (
    HitCurve,
    HitRange,
    Measured,
    published_curve,
    published_range,
    reached_range,
    typical_hit_rate,
)
from moegguf.engine.run_hits import read_run_hits
from moegguf.errors import ExpertIOError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.quantities import Link, format_bytes

KERNEL_SHARE = 0.65
CPU_LAYER_S = 60e-6  # seconds to move a layer's activations to the CPU and back
# seconds that a small graph node takes on the CPU, with its barrier; in small models
# such nodes take 0.1 ms per layer
CPU_NODE_S = 2.2e-6
# Seconds that a small graph node takes on a device that was not measured. With 2 us,
# predictions for the shapes of Qwen1.5-MoE and Qwen3-30B-A3B are 0.82x to 1.24x the
# speeds that were measured on an H100 and an H200.
DEVICE_NODE_S = 2e-6
# Seconds that a stop takes at a layer, where the host waits for the router's choice.
STOP_S = 35e-6
# allowed difference between measured and predicted tokens per second, as a share of the
# predicted speed
TOLERANCE = 0.15
# Nodes of a layer that read few or no weights: norms, attention, the router.
LAYER_NODES = 30
PICK_NODES = (
    # Additional small nodes for each expert that a token uses: a view of its output,
    # and an addition to the sum.
    2
)
PROMPT_TOKENS, ANSWER_TOKENS = 512, 256  # a typical request
# Longest prompt considered, for example a document or a long conversation.
LONG_PROMPT_TOKENS = 4096
# speed per token of large passes, relative to single tokens: 9 to 12 on H100 and H200,
# 5 on 16 Xeon cores
DEVICE_GAIN, CPU_GAIN = 10, 5
# Low end of an expected speed, as a share of the prediction: reading slows down
# computation.
SPEED_SPREAD = 0.7
# Assumed bytes that memory delivers while one byte is read from a disk or copied over a
# link. Measured speeds would not improve the choice of a pass: see `solver.ABOUT`.
MEMORY_PER_DISK = 16

Kind = Literal["resident", "layers", "slots", "cpu"]


@dataclass(frozen=True)
class ModelBytes:
    """The bytes that one token reads, and the counts that its time depends on."""

    n_layer: int  # layers with experts
    token_bytes: int  # bytes of the token's experts
    # Bytes of all other weights that the token reads, and of the used part of the KV
    # cache.
    dense_bytes: int
    n_expert_used: int = 8  # experts that the token uses in each layer
    n_layer_all: int = 0  # all layers

    @property
    def n_nodes(self) -> int:
        """Estimated number of nodes in a token's graph that read few or no weights."""
        return (
            self.n_layer_all * LAYER_NODES
            + self.n_layer * self.n_expert_used * PICK_NODES
        )

    @classmethod
    def of(cls, layout: ExpertLayout, kv_bytes: int = 0) -> ModelBytes:
        """Returns the bytes and counts for a token of this model while `kv_bytes` of
        the KV cache are in use."""
        dense_bytes = layout.dense_bytes + layout.tied_output_bytes + kv_bytes
        return cls(
            len(layout.layers),
            layout.token_cycle_bytes,
            dense_bytes,
            layout.n_expert_used,
            layout.n_layer,
        )


@dataclass(frozen=True)
class Speeds:
    """The speeds of a device and its host: times in seconds, and bytes of weights that
    are multiplied per second."""

    device_bytes_per_s: float
    # copies of missed experts from RAM to the device; each layer with misses pays the
    # latency once.
    copies: Link
    cpu_bytes_per_s: float
    stop_s: float = STOP_S  # seconds that a stop takes at a layer
    # Seconds to move a layer's activations to the CPU and back.
    cpu_layer_s: float = CPU_LAYER_S
    device_node_s: float = 0.0  # seconds that a small graph node takes on the device
    cpu_node_s: float = CPU_NODE_S  # seconds that a small graph node takes on the CPU
    disk_bytes_per_s: float = 1e9  # speed of reading experts that are not in memory
    source: str = ""  # origin of these speeds, as text
    # Speed of copies if the system refuses pinned memory for the slots in RAM; None: not
    # known.
    pageable: Link | None = None
    # Speed for weights outside experts; 0: as fast as experts.
    device_dense_bytes_per_s: float = 0.0
    cpu_dense_bytes_per_s: float = 0.0
    # Seconds that the CPU computes for a token of a prompt, measured with earlier
    # prompts; 0: not measured.
    cpu_prompt_token_s: float = 0.0

    def __post_init__(self) -> None:
        speeds = (
            self.device_bytes_per_s,
            self.copies.bytes_per_s,
            self.cpu_bytes_per_s,
            self.disk_bytes_per_s,
        )
        times = (
            self.stop_s,
            self.cpu_layer_s,
            self.device_node_s,
            self.cpu_node_s,
            self.copies.latency_s,
        )
        if not all(0 < speed < math.inf for speed in speeds) or not all(
            0 <= time_s < 1 for time_s in times
        ):
            raise OptionError(
                f"speeds must be above 0 and finite, and latencies from 0 to below 1 s, but the speeds are {speeds}"
                f" bytes/s, and the latencies are {times} s; give other numbers."
            )

    @classmethod
    def supposed(
        cls,
        memory_bytes_per_s: float,
        link: Link,
        cpu_bytes_per_s: float,
        source: str = "given for the device",
    ) -> Speeds:
        """Returns assumed speeds of a device that was not measured, from its memory
        bandwidth, its link and the CPU's speed. The link's latency becomes the time of
        a stop at a layer (`stop_s`); a latency of 0 is replaced by STOP_S."""
        copies = Link(link.bytes_per_s)
        stop_s = link.latency_s or STOP_S
        return cls(
            KERNEL_SHARE * memory_bytes_per_s,
            copies,
            cpu_bytes_per_s,
            stop_s,
            device_node_s=DEVICE_NODE_S,
            source=source,
        )

    @classmethod
    def of_cpu(cls, memory_bytes_per_s: float, disk_bytes_per_s: float) -> Speeds:
        """Returns the speeds of a machine on which everything runs on the CPU. The
        device's speeds are meaningless in this case."""
        copies = Link(memory_bytes_per_s)
        return cls(
            memory_bytes_per_s,
            copies,
            memory_bytes_per_s,
            disk_bytes_per_s=disk_bytes_per_s,
        )


@dataclass(frozen=True)
class Placement:
    """One way to place the experts, with its predicted speeds."""

    kind: Kind
    tokens_per_s: float  # speed of generating an answer
    # Speed of processing a prompt of PROMPT_TOKENS.
    prompt_tokens_per_s: float = math.inf
    # The longest prompt that the context holds, up to LONG_PROMPT_TOKENS.
    long_prompt_tokens: int = 0
    long_prompt_tokens_per_s: float = math.inf
    n_layers: int = 0  # number of whole layers on the device
    slot_bytes: int = 0  # bytes of the slots
    hit_rate: float = 0.0  # hit rate of the slots

    @property
    def request_s(self) -> float:
        """Predicted duration in seconds of a typical request: a prompt of PROMPT_TOKENS
        and an answer of ANSWER_TOKENS tokens."""
        return (
            PROMPT_TOKENS / self.prompt_tokens_per_s + ANSWER_TOKENS / self.tokens_per_s
        )

    @property
    def speeds(self) -> str:
        """The prompt and answer speeds, worded as part of a sentence."""
        prompt = format_speed(self.prompt_tokens_per_s)
        answer = format_speed(self.tokens_per_s)
        return f"{prompt} tokens/s of a prompt and {answer} of an answer"

    def __str__(self) -> str:
        return {
            "resident": "every expert on the device",
            "layers": f"{self.n_layers} whole layers"
            if self.n_layers
            else "no whole layer",
            "slots": f"slots of {format_bytes(self.slot_bytes)}, hit rate {self.hit_rate:.0%}",
            "cpu": "everything on the CPU",
        }[self.kind]


def cpu_s(model: ModelBytes, speeds: Speeds, from_disk: float = 0.0) -> float:
    """Returns the seconds per token if everything runs on the CPU. from_disk: share of
    the token's expert bytes that must be read from disk."""
    dense_s = model.dense_bytes / (
        speeds.cpu_dense_bytes_per_s or speeds.cpu_bytes_per_s
    )
    experts_s = model.token_bytes * (
        1 / speeds.cpu_bytes_per_s + from_disk / speeds.disk_bytes_per_s
    )
    return dense_s + experts_s + model.n_nodes * speeds.cpu_node_s


def layers_s(
    model: ModelBytes, speeds: Speeds, n_rest: int, rest: float, from_disk: float = 0.0
) -> float:
    """Returns the seconds per token if the experts of `n_rest` layers run on the CPU,
    and everything else on the device. rest: these layers' share of the token's expert
    bytes.
    """
    dense_s = model.dense_bytes / (
        speeds.device_dense_bytes_per_s or speeds.device_bytes_per_s
    )
    byte_s = (1 - rest) / speeds.device_bytes_per_s + rest / speeds.cpu_bytes_per_s
    experts_s = model.token_bytes * (byte_s + from_disk / speeds.disk_bytes_per_s)
    return (
        dense_s
        + experts_s
        + model.n_nodes * speeds.device_node_s
        + n_rest * speeds.cpu_layer_s
    )


def slots_s(
    model: ModelBytes, speeds: Speeds, hit_rate: float, from_disk: float = 0.0
) -> float:
    """Returns the seconds per token if everything runs on the device, from slots with
    this hit rate.

    A hit rate of 1 means that every expert has a slot.
    """
    if hit_rate >= 1:
        return layers_s(model, speeds, 0, 0.0)
    n_waits = model.n_layer * (1 - hit_rate**model.n_expert_used)
    misses_s = speeds.copies.seconds((1 - hit_rate) * model.token_bytes, n_waits)
    return (
        layers_s(model, speeds, 0, 0.0, from_disk)
        + misses_s
        + model.n_layer * speeds.stop_s
    )


def prompt_tokens_per_s(
    layout: ExpertLayout, model: ModelBytes, speeds: Speeds, n_ubatch: int,
    on_cpu: float = 0.0, dense_on_cpu: bool = False, copied: float = 0.0, read: float = 0.0,
    n_prompt: int = PROMPT_TOKENS,
) -> float:  # fmt: skip
    """Returns the speed, in tokens per second, at which a prompt of `n_prompt` tokens
    is processed.

    on_cpu: share of the experts that run on the CPU. dense_on_cpu: everything else runs
    on the CPU, too.

    copied: share of the experts that are copied to the device. read: share of the
    experts that are read from the disk.
    """
    n_tokens = min(n_ubatch, n_prompt)
    touched = touched_bytes(layout, n_tokens)

    def multiply_s(
        gain: int, has_dense: bool, share: float, bytes_per_s: float
    ) -> float:
        times = n_tokens / gain
        n_bytes = share * max(
            touched, model.token_bytes * times
        ) + has_dense * model.dense_bytes * max(1, times)
        return n_bytes / bytes_per_s

    device_s = multiply_s(
        DEVICE_GAIN, not dense_on_cpu, 1 - on_cpu, speeds.device_bytes_per_s
    )
    cpu_s = multiply_s(CPU_GAIN, dense_on_cpu, on_cpu, speeds.cpu_bytes_per_s)
    if dense_on_cpu and speeds.cpu_prompt_token_s:
        cpu_s = n_tokens * speeds.cpu_prompt_token_s
    copies_s = touched * copied / speeds.copies.bytes_per_s
    reads_s = touched * read / speeds.disk_bytes_per_s
    return n_tokens / max(max(device_s, copies_s) + cpu_s, reads_s)


def touched_bytes(layout: ExpertLayout, n_tokens: int) -> float:
    """Returns the expected total size, in bytes, of the experts that a pass of
    `n_tokens` tokens uses, if tokens choose experts evenly and independently."""
    found = 0.0
    for layer in layout.layers:
        unused = (1 - layer.n_expert_used / layer.n_expert) ** n_tokens
        found += layer.n_expert * layer.expert_bytes * (1 - unused)
    return found


def is_off(measured: float, predicted: float) -> bool:
    """Returns True if a measured speed differs from the predicted speed by more than
    TOLERANCE (a share)."""
    return abs(measured - predicted) > TOLERANCE * predicted


def format_speed(number: float) -> str:
    """Returns tokens per second as text with two significant digits: "0.52", "4.6",
    "38", "1,200"."""
    rounded = float(f"{number:.2g}")  # 9.96 becomes 10, which has no decimal place
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def request_cost(
    layout: ExpertLayout,
    n_slots: int,
    n_ubatch: int,
    n_ctx: int = PROMPT_TOKENS,
    prompts_take_slots: bool = False,
) -> float:
    """Returns the cost of one or two requests as a number of bytes that are read from
    the disk or copied to a device.

    One request is typical. If `n_ctx` allows a longer prompt, a second request has a
    prompt of `n_ctx` tokens, but at most LONG_PROMPT_TOKENS. Prompts are processed in
    passes of `n_ubatch` tokens, and answers token by token. A byte that a prompt reads
    from memory counts as 1 / MEMORY_PER_DISK of a byte. A prompt's compute time counts
    as the bytes that the disk could read in that time.

    prompts_take_slots: prompts have the hit rate of answers. Otherwise their hit rate
    is the share of experts with slots.
    """
    hit_rate = typical_hit_rate(layout, n_slots)
    missing = 1 - (hit_rate if prompts_take_slots else n_slots / layout.n_expert_total)
    total = 0.0
    for n_prompt in sorted(
        {PROMPT_TOKENS, max(PROMPT_TOKENS, min(n_ctx, LONG_PROMPT_TOKENS))}
    ):
        n_tokens = min(n_ubatch, n_prompt)
        n_pass = -(-n_prompt // n_tokens)
        touched = touched_bytes(layout, n_tokens)
        total += n_pass * (
            touched * missing + (layout.dense_bytes + touched) / MEMORY_PER_DISK
        )
        total += (
            n_prompt
            * (layout.dense_bytes + layout.token_cycle_bytes)
            / (CPU_GAIN * MEMORY_PER_DISK)
        )
        total += ANSWER_TOKENS * layout.token_cycle_bytes * (1 - hit_rate)
    return total


@dataclass(frozen=True)
class Expected:
    """The expected hit rate, missed bytes per token and speed while an answer is
    generated, each as a range from low to high. Speeds are None if no speed was
    measured."""

    hit_low: float
    hit_high: float
    missed_bytes_low: int
    missed_bytes_high: int
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    # Speed if reads at the high hit rate took all the time; None if nothing is missed.
    reads_tokens_per_s: float | None
    computing_tokens_per_s: float | None  # speed if nothing were read from the disk
    basis: str


@dataclass(frozen=True)
class HitRates:
    """The known hit rates of a model."""

    layout: ExpertLayout
    measured: Measured | None = None  # None: there is no measurement of this model
    # hit rates that answers have reached on this machine, by the share of experts that
    # had slots
    of_answers: Mapping[float, float] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: ExpertLayout) -> HitRates:
        """Returns the known hit rates of a model. `measured` is the first measurement
        of exactly this model in the search order of `Artifacts`. `of_answers` holds the
        hit rates that its answers have reached on this machine. The model is identified
        by its routers; if they cannot be read, there is no measurement."""
        if not layout.is_moe:
            return cls(layout)
        of_answers = read_run_hits(layout)
        with suppress(ExpertIOError):
            return cls(layout, Artifacts(layout).measured(), of_answers)
        return cls(layout, None, of_answers)

    def curve(self) -> HitCurve:
        """Returns the hit-rate curve of the policy that was measured to be best with
        slots for half of the experts. Without a measurement, returns the published
        curve for models of this shape. The curve is corrected by the hit rates that
        answers have reached on this machine."""
        found = published_curve(self.layout.n_expert, self.layout.n_expert_used)
        if self.measured and self.measured.hit_rates:
            policy = self.measured.choose(0.5).policy
            n = self.measured.about.get("requests", "some")
            found = HitCurve(
                self.measured.hit_rates[policy],
                f"measured on this model with {n} requests and the policy {policy}",
            )
        return found.corrected(self.of_answers)

    def range_at(self, n_slots: int) -> HitRange:
        """Returns the range of measured or published hit rates with `n_slots` slots."""
        share = n_slots / max(1, self.layout.n_expert_total)
        if share >= 1:
            return HitRange(1.0, 1.0, "every expert is in memory")
        if self.measured and (found := self.measured.range_at(share)):
            n = self.measured.about.get(
                "ranges", self.measured.about.get("requests", "some")
            )
            return HitRange(*found, f"measured on this model: {n} requests of text")
        return published_range(self.layout, n_slots)

    def expect(self, n_slots: int, speeds: Speeds | None = None) -> Expected:
        """Returns the estimate for `n_slots` slots in RAM. If answers on this machine
        have reached a hit rate with about this number of slots, the estimate uses this
        hit rate. With `speeds`, the estimate includes the CPU's tokens per second."""
        hits = reached_range(
            self.layout, n_slots, self.curve(), self.of_answers
        ) or self.range_at(n_slots)
        cycle = self.layout.token_cycle_bytes
        model = ModelBytes.of(self.layout)
        most = round(cycle * (1 - hits.low))
        least = round(cycle * (1 - hits.high))
        slow = fast = reads = computing = None
        if speeds is not None:
            slow = SPEED_SPREAD / cpu_s(model, speeds, 1 - hits.low)
            fast = 1 / cpu_s(model, speeds, 1 - hits.high)
            reads = speeds.disk_bytes_per_s / least if least else None
            computing = 1 / cpu_s(model, speeds)
        return Expected(
            hits.low, hits.high, least, most, slow, fast, reads, computing, hits.basis
        )
