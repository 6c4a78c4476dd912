"""The cost model: the time of a token for each placement of a model's experts.

It predicts every placement and every estimate from measured speeds. The model is an exact cache: every expert that a
token needs is multiplied where its layer is computed, and a miss on the device is copied there first. A is the bytes of
a token's experts over all L layers, and D is the bytes of everything else that it reads. The times of a token are:

    slots          (D + A) / device + (1 - h) A / copies + L * (stop + (1 - h^k) * copy)   h: hit rate, k: experts used
    whole layers   (D + f A) / device + (1 - f) (A / CPU + L * way)               f: share of the layers on the device
    CPU            (D + A) / CPU

With every expert on the device h is 1, and nothing stops. The nodes of a graph that read no weights are added, and
experts that are in no memory are read from the disk. `way` moves activations from the device to the CPU and back.
`copy` is the time of a layer's misses without their bytes. Speeds are measured with kernels and copies. A device that
is only supposed has 0.65 of its memory's bandwidth, and the constants here: other people's measurements fit these.

A pass of a prompt reads the weights of all experts that its tokens use once. It multiplies DEVICE_GAIN or CPU_GAIN
times as fast as single tokens do. Meanwhile experts of later layers are read from the disk, and where experts are
staged, those without a slot are copied. The best placement takes the least time for a typical request: PROMPT_TOKENS,
then ANSWER_TOKENS.

Hit rates to expect are ranges. If the model's own routing was measured (`Measured`), 49 in 50 of its requests lie in
the range. Otherwise the range has all published hit rates for models of this shape, or for all models. Placements are
compared by one curve of hit rates. Within one placement, slots and passes are weighed against each other before any
speed is known: by the bytes that a request moves (`request_cost`).
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
    typical_hit_rate,
)
from moegguf.engine.run_hits import read_run_hits
from moegguf.errors import ExpertIOError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.quantities import Link, format_bytes

KERNEL_SHARE = 0.65
CPU_LAYER_S = 60e-6  # a layer's way to the CPU and back
CPU_NODE_S = 2.2e-6  # a small node of a graph on the CPU and its barrier: 0.1 ms a layer of small models
STOP_S = 35e-6  # a stop at a layer, where the host has to learn the router's choice
TOLERANCE = 0.15  # allowed difference between predicted and measured tokens per second
LAYER_NODES = 30  # nodes of a layer that read few or no weights: norms, attention, the router
PICK_NODES = 2  # further such nodes for each expert that a token uses: the view of its output, the addition to the sum
PROMPT_TOKENS, ANSWER_TOKENS = 512, 256  # a typical request
LONG_PROMPT_TOKENS = 4096  # a document, or a long conversation
DEVICE_GAIN, CPU_GAIN = 10, 5  # gain of many tokens together: H100 and H200 reached 9 to 12, 16 cores of a Xeon 5
SPEED_SPREAD = 0.7  # reads and computation share processors and memory; runs reach this share of the bound, or more
MEMORY_PER_DISK = 16  # bytes read from memory in the time of one from a disk, or over a link

Kind = Literal["resident", "layers", "slots", "cpu"]


@dataclass(frozen=True)
class ModelBytes:
    """The bytes that a token reads."""

    n_layer: int  # layers with experts
    token_bytes: int  # the token's experts
    dense_bytes: int  # all other weights, and the token's part of the KV cache
    n_expert_used: int = 8  # experts that the token uses in each layer
    n_layer_all: int = 0  # all layers

    @property
    def n_nodes(self) -> int:
        """Nodes of a token's graph that read few or no weights."""
        return self.n_layer_all * LAYER_NODES + self.n_layer * self.n_expert_used * PICK_NODES

    @classmethod
    def of(cls, layout: ExpertLayout, kv_bytes: int = 0) -> ModelBytes:
        """Returns the figures of a model whose KV cache has `kv_bytes` bytes in use."""
        dense_bytes = layout.dense_bytes - layout.looked_up_bytes + kv_bytes
        return cls(len(layout.layers), layout.token_cycle_bytes, dense_bytes, layout.n_expert_used, layout.n_layer)


@dataclass(frozen=True)
class Speeds:
    """The speeds of a device and the host beside it, in seconds and in bytes of multiplied weights per second."""

    device_bytes_per_s: float
    copies: Link  # copies of misses from RAM to the device; the latency counts once for all misses of a layer
    cpu_bytes_per_s: float
    stop_s: float = STOP_S  # a stop at a layer
    cpu_layer_s: float = CPU_LAYER_S  # a layer's way to the CPU and back
    device_node_s: float = 0.0  # a small node of a graph on the device
    cpu_node_s: float = CPU_NODE_S  # a small node of a graph on the CPU
    disk_bytes_per_s: float = 1e9  # reads of experts that are in no memory
    source: str = ""  # words about the source of these speeds
    device_dense_bytes_per_s: float = 0.0  # weights that are no experts; 0: as fast as experts
    cpu_dense_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        speeds = (self.device_bytes_per_s, self.copies.bytes_per_s, self.cpu_bytes_per_s, self.disk_bytes_per_s)
        times = (self.stop_s, self.cpu_layer_s, self.device_node_s, self.cpu_node_s, self.copies.latency_s)
        if not all(0 < speed < math.inf for speed in speeds) or not all(0 <= time_s < 1 for time_s in times):
            raise OptionError(f"speeds must be above zero, but are {speeds} bytes/s, with latencies of {times} s.")

    @classmethod
    def supposed(
        cls, memory_bytes_per_s: float, link: Link, cpu_bytes_per_s: float, source: str = "of the device as supposed"
    ) -> Speeds:
        """Speeds of a device that is known by its memory's bandwidth; the link's latency counts as a stop's."""
        copies, stop_s = Link(link.bytes_per_s), link.latency_s or STOP_S
        return cls(KERNEL_SHARE * memory_bytes_per_s, copies, cpu_bytes_per_s, stop_s, source=source)

    @classmethod
    def of_cpu(cls, memory_bytes_per_s: float, disk_bytes_per_s: float) -> Speeds:
        """Returns the speeds of a machine whose CPU computes everything. The device's speeds mean nothing."""
        copies = Link(memory_bytes_per_s)
        return cls(memory_bytes_per_s, copies, memory_bytes_per_s, disk_bytes_per_s=disk_bytes_per_s)


@dataclass(frozen=True)
class Placement:
    """One way to place the experts, and its prediction."""

    kind: Kind
    tokens_per_s: float  # the speed of an answer
    prompt_tokens_per_s: float = math.inf  # the speed of a prompt of PROMPT_TOKENS
    long_prompt_tokens: int = 0  # the longest prompt that the context holds, up to LONG_PROMPT_TOKENS
    long_prompt_tokens_per_s: float = math.inf
    n_layers: int = 0  # whole layers on the device
    slot_bytes: int = 0  # memory of the slots
    hit_rate: float = 0.0  # hit rate of the slots

    @property
    def request_s(self) -> float:
        """Seconds of a typical request."""
        return PROMPT_TOKENS / self.prompt_tokens_per_s + ANSWER_TOKENS / self.tokens_per_s

    @property
    def speeds(self) -> str:
        """Both speeds, for a sentence."""
        prompt, answer = format_speed(self.prompt_tokens_per_s), format_speed(self.tokens_per_s)
        return f"{prompt} tokens/s of a prompt and {answer} of an answer"

    def __str__(self) -> str:
        return {
            "resident": "every expert on the device",
            "layers": f"{self.n_layers} whole layers" if self.n_layers else "no whole layer",
            "slots": f"slots of {format_bytes(self.slot_bytes)}, hit rate {self.hit_rate:.0%}",
            "cpu": "everything on the CPU",
        }[self.kind]


def cpu_s(model: ModelBytes, speeds: Speeds, from_disk: float = 0.0) -> float:
    """Seconds of a token where the CPU computes everything. from_disk: the share of its experts' bytes that is in no
    memory."""
    dense_s = model.dense_bytes / (speeds.cpu_dense_bytes_per_s or speeds.cpu_bytes_per_s)
    experts_s = model.token_bytes * (1 / speeds.cpu_bytes_per_s + from_disk / speeds.disk_bytes_per_s)
    return dense_s + experts_s + model.n_nodes * speeds.cpu_node_s


def layers_s(model: ModelBytes, speeds: Speeds, n_rest: int, rest: float, from_disk: float = 0.0) -> float:
    """Returns the time of a token if the CPU computes the experts of n_rest layers, a share `rest` of the bytes.

    The device computes everything else.
    """
    dense_s = model.dense_bytes / (speeds.device_dense_bytes_per_s or speeds.device_bytes_per_s)
    byte_s = (1 - rest) / speeds.device_bytes_per_s + rest / speeds.cpu_bytes_per_s
    experts_s = model.token_bytes * (byte_s + from_disk / speeds.disk_bytes_per_s)
    return dense_s + experts_s + model.n_nodes * speeds.device_node_s + n_rest * speeds.cpu_layer_s


def slots_s(model: ModelBytes, speeds: Speeds, hit_rate: float, from_disk: float = 0.0) -> float:
    """Returns the time of a token if the device computes everything, from slots with this hit rate.

    hit_rate 1: every expert has a slot.
    """
    if hit_rate >= 1:
        return layers_s(model, speeds, 0, 0.0)
    n_waits = model.n_layer * (1 - hit_rate**model.n_expert_used)
    misses_s = speeds.copies.seconds((1 - hit_rate) * model.token_bytes, n_waits)
    return layers_s(model, speeds, 0, 0.0, from_disk) + misses_s + model.n_layer * speeds.stop_s


def prompt_tokens_per_s(
    layout: ExpertLayout, model: ModelBytes, speeds: Speeds, n_ubatch: int,
    on_cpu: float = 0.0, dense_on_cpu: bool = False, copied: float = 0.0, read: float = 0.0,
    n_prompt: int = PROMPT_TOKENS,
) -> float:  # fmt: skip
    """Returns the speed of a prompt of `n_prompt` tokens.

    on_cpu: share of the experts that the CPU multiplies with. dense_on_cpu: the CPU also computes everything else.

    copied, read: shares of the experts that are copied to the device, and that come from the disk.
    """
    n_tokens = min(n_ubatch, n_prompt)
    touched = touched_bytes(layout, n_tokens)

    def multiply_s(gain: int, has_dense: bool, share: float, bytes_per_s: float) -> float:
        times = n_tokens / gain
        n_bytes = share * max(touched, model.token_bytes * times) + has_dense * model.dense_bytes * max(1, times)
        return n_bytes / bytes_per_s

    device_s = multiply_s(DEVICE_GAIN, not dense_on_cpu, 1 - on_cpu, speeds.device_bytes_per_s)
    cpu_s = multiply_s(CPU_GAIN, dense_on_cpu, on_cpu, speeds.cpu_bytes_per_s)
    copies_s = touched * copied / speeds.copies.bytes_per_s
    reads_s = touched * read / speeds.disk_bytes_per_s
    return n_tokens / max(max(device_s, copies_s) + cpu_s, reads_s)


def touched_bytes(layout: ExpertLayout, n_tokens: int) -> float:
    """Returns the bytes of experts that independent tokens of a pass use, on average."""
    found = 0.0
    for layer in layout.layers:
        unused = (1 - layer.n_expert_used / layer.n_expert) ** n_tokens
        found += layer.n_expert * layer.expert_bytes * (1 - unused)
    return found


def is_off(measured: float, predicted: float) -> bool:
    """Returns whether a measured speed differs from the predicted one by more than TOLERANCE of it."""
    return abs(measured - predicted) > TOLERANCE * predicted


def format_speed(number: float) -> str:
    """Tokens per second with two digits or more: "0.52", "4.6", "38", "1204"."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def request_cost(
    layout: ExpertLayout, n_slots: int, n_ubatch: int, n_ctx: int = PROMPT_TOKENS, prompts_take_slots: bool = False
) -> float:
    """Returns what requests cost, as one number of bytes: those that they read from the disk or copy to a device.

    The requests are a typical one and, where a context of `n_ctx` tokens holds it, one with a long prompt. Their
    prompts are read in passes of `n_ubatch`, their answers token by token. A byte that a prompt reads from memory
    counts as a MEMORY_PER_DISK-th of one. Computing a prompt counts as many bytes as the disk could read in that time.

    prompts_take_slots: prompts have the hit rate of answers; otherwise their hit rate is the share of the experts that
    has slots.
    """
    hit_rate = typical_hit_rate(layout, n_slots)
    missing = 1 - (hit_rate if prompts_take_slots else n_slots / layout.n_expert_total)
    total = 0.0
    for n_prompt in sorted({PROMPT_TOKENS, max(PROMPT_TOKENS, min(n_ctx, LONG_PROMPT_TOKENS))}):
        n_tokens = min(n_ubatch, n_prompt)
        n_pass = -(-n_prompt // n_tokens)
        touched = touched_bytes(layout, n_tokens)
        total += n_pass * (touched * missing + (layout.dense_bytes + touched) / MEMORY_PER_DISK)
        total += n_prompt * (layout.dense_bytes + layout.token_cycle_bytes) / (CPU_GAIN * MEMORY_PER_DISK)
        total += ANSWER_TOKENS * layout.token_cycle_bytes * (1 - hit_rate)
    return total


@dataclass(frozen=True)
class Expected:
    """Low and high ends of an estimate while answering. Bytes are per token. Tokens per second are None where no speed
    was measured.
    """

    hit_low: float
    hit_high: float
    missed_bytes_low: int
    missed_bytes_high: int
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    basis: str


@dataclass(frozen=True)
class HitRates:
    """The known hit rates of a model."""

    layout: ExpertLayout
    measured: Measured | None = None  # None: its routing was not recorded
    of_answers: Mapping[float, float] = field(default_factory=dict)  # hit rates of answers here, by share of slots

    @classmethod
    def of(cls, layout: ExpertLayout) -> HitRates:
        """Returns them with the nearest measurement of this very model, which its routers identify, if the file has
        them here, and with what answers reached."""
        if not layout.is_moe:
            return cls(layout)
        of_answers = read_run_hits(layout)
        with suppress(ExpertIOError):
            return cls(layout, Artifacts(layout).measured(), of_answers)
        return cls(layout, None, of_answers)

    def curve(self) -> HitCurve:
        """Returns the curve of the policy that was measured to be best, else the one to expect of a model of this
        shape."""
        found = published_curve(self.layout.n_expert, self.layout.n_expert_used)
        if self.measured and self.measured.hit_rates:
            policy, n = self.measured.choose(0.5).policy, self.measured.about.get("requests", "some")
            found = HitCurve(self.measured.hit_rates[policy], f"measured on this model: {n} requests, {policy}")
        return found.corrected(self.of_answers)

    def range_at(self, n_slots: int) -> HitRange:
        """The range for `n_slots` slots."""
        share = n_slots / max(1, self.layout.n_expert_total)
        if share >= 1:
            return HitRange(1.0, 1.0, "every expert is in memory")
        if self.measured and (found := self.measured.range_at(share)):
            n = self.measured.about.get("ranges", self.measured.about.get("requests", "some"))
            return HitRange(*found, f"measured on this model: {n} requests of text")
        return published_range(self.layout, n_slots)

    def expect(self, n_slots: int, speeds: Speeds | None = None) -> Expected:
        """The estimate for `n_slots` slots in RAM; with speeds also tokens per second where the CPU computes."""
        hits, cycle, model = self.range_at(n_slots), self.layout.token_cycle_bytes, ModelBytes.of(self.layout)
        most, least = round(cycle * (1 - hits.low)), round(cycle * (1 - hits.high))
        slow = fast = None
        if speeds is not None:
            slow, fast = SPEED_SPREAD / cpu_s(model, speeds, 1 - hits.low), 1 / cpu_s(model, speeds, 1 - hits.high)
        return Expected(hits.low, hits.high, least, most, slow, fast, hits.basis)
