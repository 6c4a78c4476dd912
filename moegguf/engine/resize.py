"""Changes a loaded model's budgets for experts, and thereby the number of slots in its
tiers.

A budget must hold the slots that the model's passes use; one slot is enough in RAM
below devices. A tier never gets more slots than it had at load time. "auto" restores
that number.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moegguf.engine.load_spec import Budget
from moegguf.engine.session import (
    Session,
    Slots,
    devices_of_layers,
    divide_among_devices,
)
from moegguf.engine.solver import budget_slots, divide_ram_slots
from moegguf.errors import BudgetError
from moegguf.native import library
from moegguf.native.store import Tier
from moegguf.quantities import ExpertCache, format_bytes_up, parse_expert_cache

if TYPE_CHECKING:
    from moegguf.engine.context import Context
    from moegguf.engine.plan import Plan
    from moegguf.engine.upstream import UpstreamLlama


def set_budget(
    llm: UpstreamLlama,
    context: Context,
    session: Session | None,
    given: Mapping[str, Budget | None],
) -> None:
    """Implements `Llama.set_budget` for a model with this context and session.

    given: {tier: budget}; None leaves a budget unchanged. If `session` is None, the
    model has no slots, and nothing changes."""
    context.check_caller()
    with context.lock:
        context.check_open()
        if session is None:
            return
        store = session.store
        plan = session.plan
        controller = context.controller
        caches = {
            tier: parse_expert_cache(value, tier)
            for tier, value in given.items()
            if value is not None
        }
        wanted = _in_vram(session, caches["VRAM"]) if "VRAM" in caches else {}
        n_in_vram = sum(wanted.values()) if wanted else plan.device_slots
        if "RAM" in caches:
            wanted |= _in_ram(session, caches["RAM"])
        on_device = plan.device is not None
        try:
            if on_device:
                library.llama_cpp().llama_synchronize(llm.ctx)
            # no pass runs while this thread holds the context's lock
            for (tier, device), n_slots in reversed(wanted.items()):
                store.resize(n_slots, tier, device)
        finally:
            if n_in_vram < plan.device_slots:
                _shorten_passes(llm, plan)
            if controller is not None and any(
                tier is Tier.COMPUTE for tier, _ in wanted
            ):
                controller.update()


def _shorten_passes(llm: UpstreamLlama, plan: Plan) -> None:
    """Limits passes, with a warning, to the number of tokens for which a device
    produces the same bits from slots as with every expert in memory. Does nothing if no
    device has slots, if there are staging tensors, or if passes are short enough."""
    most = plan.supply.slot_tokens
    if (
        plan.device is None
        or plan.supply.n_staging
        or min(llm.n_batch, plan.n_ubatch) <= most
    ):
        return
    llm.n_batch = most
    warnings.warn(
        f"{plan.device} had a slot for every expert and has no staging tensors for prompts. With fewer slots,"
        f" prompts are read {most} token{'s' * (most > 1)} at a time, because slots are exact only for such passes;"
        " load the model again with this vram_cache to get staging tensors.",
        stacklevel=4,
    )


def _in_vram(session: Session, cache: ExpertCache) -> dict[Slots, int]:
    """Returns the number of slots that a budget holds on each device, in addition to
    the staging tensors that the budget includes. Raises BudgetError if there are fewer
    slots than passes use, or if no device has slots."""
    plan = session.plan
    store = session.store
    if plan.layers_on is not None:
        raise BudgetError(
            f"{cache.as_given}: {plan.layers_on} has the experts of whole layers, which stay there; load the"
            " model again with another vram_cache, or with placement 'slots'."
        )
    if plan.device is None:
        raise BudgetError(
            f"{cache.as_given}: the CPU computes this model, so it has no experts in VRAM; load it with"
            " vram_cache (--vram-cache) to use a GPU."
        )
    # staging tensors whose number the user has set are not part of the budget
    beside = store.options.staging is not None
    size = plan.device_slot_bytes
    staged = 0 if beside or cache.mode == "auto" else plan.staging_slots_bytes // size
    least = sum(device.pass_slots for device in devices_of_layers(store).values())
    n_slots = _budget_slots(session, cache, plan.device_slots + staged, size) - staged
    _checked(plan, n_slots, least, cache.as_given, size, staged)
    return divide_among_devices(store, n_slots)


def _in_ram(session: Session, cache: ExpertCache) -> dict[Slots, int]:
    """Returns the numbers of slots in RAM for a budget. If every layer runs on the CPU,
    these are all the slots. Otherwise they are the slots below devices, and the slots
    of layers that run on the CPU, in the same proportion as at load time.

    Raises BudgetError for too few slots, and if the model has no slots in RAM.
    """
    store = session.store
    plan = session.plan
    option = cache.as_given
    size = plan.slot_bytes
    least = plan.pass_slots(session.layout, on_device=False)
    if plan.device is None:
        n_slots = _budget_slots(session, cache, store.tier()["n_slots"], size)
        _checked(plan, n_slots, least, option, size)
        return divide_among_devices(store, n_slots)
    cpu = next(
        (index for index, device in enumerate(store.devices) if device.name is None),
        None,
    )
    n_cpu = 0 if cpu is None else store.device(cpu)["n_slots"]
    n_ram = store.tier(Tier.RAM)["n_slots"] if Tier.RAM in store.tiers else 0
    if n_cpu + n_ram == 0:
        raise BudgetError(
            f"{option}: the model was loaded with every expert in VRAM, so it has no slots in RAM; change vram_cache,"
            " or load the model again with a smaller one."
        )
    total = _budget_slots(session, cache, n_cpu + n_ram, size)
    if cpu is None:
        if not total:
            raise BudgetError(
                f"{option} is too small for one expert; give at least {format_bytes_up(size)!r}."
            )
        return {(Tier.RAM, None): total}
    least = min(n_cpu, least)
    n_layers = len(store.devices[cpu].layers)
    which = f"{option}, shared by {n_layers} layers on the CPU,"
    _checked(plan, total, least + min(1, n_ram), which, size)
    n_cpu, below = divide_ram_slots(total, n_cpu, n_ram, least)
    return {(Tier.COMPUTE, cpu): n_cpu} | ({(Tier.RAM, None): below} if n_ram else {})


def _budget_slots(
    session: Session, cache: ExpertCache, most: int, slot_bytes: int
) -> int:
    """Returns the number of slots that a budget holds, but at most `most`. For "auto",
    returns `most`."""
    if cache.mode == "auto":
        return most
    return min(most, budget_slots(cache, session.layout, slot_bytes))


def _checked(
    plan: Plan,
    n_slots: int,
    least: int,
    option: str,
    slot_bytes: int,
    n_staged: int = 0,
) -> None:
    if n_slots < least:
        raise BudgetError(
            f"{option} is too small for a model that was loaded to read {plan.n_ubatch} tokens at a time; give at least"
            f" {format_bytes_up((least + n_staged) * slot_bytes)!r}, or load it again with the smaller budget."
        )
