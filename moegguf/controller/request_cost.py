"""How layers and memory are divided: over devices as llama.cpp splits a model, and between slots and staging tensors by
the bytes that a typical request moves.

llama.cpp puts layers on devices in order: the last `n_gpu_layers` of the model, its output counted as one, in the
proportions of `tensor_split`. Plans of models and simulated devices go by the rules here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moegguf.controller.hit_rates import typical_hit_rate
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes
from moegguf.native.store import STAGING_SHARE, STAGING_TENSORS

ON_CPU = -1


def device_of_layers(n_layer: int, tensor_split: Sequence[float], n_gpu_layers: int = -1) -> list[int]:
    """The index of the device that computes each layer, ON_CPU for none (llama-model.cpp, load_tensors).

    n_layer: those that llama.cpp counts. n_gpu_layers: -1 is every layer and the output. Raises OptionError for a split
    that is not one.
    """
    split = np.asarray(tensor_split, np.float32)
    if split.size == 0 or not np.isfinite(split).all() or (split < 0).any() or split.sum() == 0:
        raise OptionError(
            f"tensor_split is {list(tensor_split)}, but has a proportion for each device, none below 0 and some above."
        )
    bounds = np.cumsum(split, dtype=np.float32)
    bounds /= bounds[-1]
    n_on_devices = n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layer + 1)
    first = n_layer + 1 - n_on_devices
    places = np.arange(n_layer - first, dtype=np.float32) / np.float32(max(1, n_on_devices))
    return [ON_CPU] * min(first, n_layer) + np.searchsorted(bounds, places, side="right").tolist()


def share_out(total: int, shares: Sequence[int], most: Sequence[int], least: int) -> list[int]:
    """`total` slots of several devices in proportion to `shares`, none with more than its `most`, for all of its
    experts, and none with fewer than `least`, where it needs as many and there are; what is over goes to the others."""
    least = min(least, total // max(1, sum(of > 0 for of in most)))
    given = [min(of, least) for of in most]
    while (left := total - sum(given)) > 0 and (free := [d for d in range(len(most)) if given[d] < most[d]]):
        weight = sum(shares[d] for d in free)
        more = {d: min(most[d] - given[d], left * shares[d] // weight if weight else 0) for d in free}
        if not any(more.values()):
            more = {free[0]: 1}
        for d, n in more.items():
            given[d] += n
    return given


PROMPT_TOKENS, ANSWER_TOKENS = 512, 256  # of that request
MEMORY_PER_DISK = 16  # bytes read from memory in the time of one from a disk, or over a link
NO_LIMIT = 1 << 30


class Passes(NamedTuple):
    """Slots on devices, the tokens of a prompt's pass with them, bytes of staging tensors there, and whether every
    expert has a slot."""

    n_slots: int
    n_ubatch: int
    staged_bytes: int = 0
    resident: bool = False


def allowed_ubatch(layout: ExpertLayout, n_slots: int, streams: bool = False, slot_tokens: int = NO_LIMIT) -> int:
    """The most tokens of a pass that `n_slots` suffice for; NO_LIMIT without a limit.

    streams: experts without a slot of their own are streamed or staged. slot_tokens: of a pass whose experts are in
    slots that layers share, as the device computes more of them otherwise than with every expert there
    (`slot_sizes.slot_tokens`).
    """
    if streams or n_slots >= layout.n_expert_total:
        return NO_LIMIT
    n_tokens = NO_LIMIT if n_slots >= layout.n_expert else max(1, n_slots // layout.n_expert_used)
    return min(n_tokens, slot_tokens)


def request_cost(
    layout: ExpertLayout, slot_bytes: int, n_slots: int, n_ubatch: int, prompts_take_slots: bool = False
) -> float:
    """Bytes read from the disk, or copied to a device, for PROMPT_TOKENS in passes of n_ubatch and ANSWER_TOKENS one by
    one, and, in the same unit, from memory. prompts_take_slots: they find as much there as answers do; else the share
    of the experts that has slots."""
    n_pass = -(-PROMPT_TOKENS // n_ubatch)
    touched = slot_bytes * sum(_touched(layer.n_expert, layer.n_expert_used, n_ubatch) for layer in layout.layers)
    hit_rate = typical_hit_rate(layout, n_slots)
    missing = 1 - (hit_rate if prompts_take_slots else n_slots / layout.n_expert_total)
    prompt = n_pass * (touched * missing + (layout.dense_bytes + touched) / MEMORY_PER_DISK)
    return prompt + ANSWER_TOKENS * layout.token_cycle_bytes * (1 - hit_rate)


def _touched(n_expert: int, n_expert_used: int, n_tokens: int) -> float:
    """Experts of a layer that a pass of independent tokens uses, on average."""
    return n_expert * (1 - (1 - n_expert_used / n_expert) ** n_tokens)


def passes_cost(layout: ExpertLayout, passes: Passes, staged: bool) -> float:
    """`request_cost` on a device whose prompts are staged, or take its slots."""
    size = slot_sizes(layout).slot_bytes
    return request_cost(layout, size, passes.n_slots, passes.n_ubatch, prompts_take_slots=not staged)


def staging_bytes(layout: ExpertLayout, n_tensors: int) -> int:
    """Bytes of so many tensors of a layer's full shape."""
    return slot_sizes(layout, n_tensors * layout.n_expert).pool_bytes if n_tensors else 0


def staging_slots(staged_bytes: int, slot_bytes: int) -> int:
    """Slots that hold so many bytes: what staging tensors take of a budget that is given."""
    return -(-staged_bytes // slot_bytes) if staged_bytes else 0


def best_staging(layout: ExpertLayout, passes: Callable[[int], Passes | None]) -> int:
    """The most of 0, 1 and STAGING_TENSORS staging tensors on each device that fit: with more than one, into
    STAGING_SHARE of the memory for experts; with one, where a request costs less so than with prompts in passes that
    slots are exact for, and a token's experts over all layers keep their slots where there are as many without. None
    where every expert has a slot. passes: with so many tensors; None: they do not fit.
    """
    without = passes(0)
    if without is not None and without.resident:
        return 0
    for n in range(STAGING_TENSORS, 0, -1):
        staged = passes(n)
        if staged is not None and _staging_pays(layout, n, staged, without):
            return n
    return 0


def _staging_pays(layout: ExpertLayout, n: int, staged: Passes, without: Passes | None) -> bool:
    if n > 1:
        n_bytes = staged.staged_bytes
        return n_bytes <= STAGING_SHARE * (n_bytes + staged.n_slots * slot_sizes(layout).slot_bytes)
    if without is None:
        return True
    keeps_cycle = not staged.n_slots < layout.token_cycle_slots <= without.n_slots
    return keeps_cycle and passes_cost(layout, staged, True) < passes_cost(layout, without, False)


def divided_over(
    layout: ExpertLayout, budgets: Sequence[int], n_experts: Sequence[int], slot_tokens: int
) -> tuple[list[int], int]:
    """(slots of each device, staging tensors of each) where layers with n_experts experts are on each.

    budgets: slots that each device's memory for experts holds, or, as one number, all of them together. slot_tokens:
    as in `allowed_ubatch`. Where no budget holds a token's experts beside staging, devices have slots and no staging.
    """

    def slots_beside(n_staging: int) -> list[int]:
        n_staged, size = staging_bytes(layout, n_staging), slot_sizes(layout).slot_bytes
        if len(budgets) == len(n_experts):
            left = [n - staging_slots(n_staged, size) for n in budgets]
            return [min(n, most) for n, most in zip(left, n_experts, strict=True)]
        total = min(budgets[0] - staging_slots(len(n_experts) * n_staged, size), sum(n_experts))
        return share_out(total, n_experts, n_experts, layout.n_expert_used)

    def passes(n_staging: int) -> Passes | None:
        slots = slots_beside(n_staging)
        if min(slots) < layout.n_expert_used:
            return None
        allowed = [
            NO_LIMIT if n >= most else allowed_ubatch(layout, n, n_staging > 0, slot_tokens)
            for n, most in zip(slots, n_experts, strict=True)
        ]
        resident = all(n >= most for n, most in zip(slots, n_experts, strict=True))
        n_bytes = len(slots) * staging_bytes(layout, n_staging)
        return Passes(sum(slots), min(PROMPT_TOKENS, *allowed), n_bytes, resident)

    n_staging = best_staging(layout, passes)
    return slots_beside(n_staging), n_staging
