"""Collects the facts that `list`, `show`, `estimate` and `library` print, as values for
JSON. Sizes are in bytes. tables.py formats the facts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from moegguf.engine import machine
from moegguf.engine.cost import (
    CPU_GAIN,
    SPEED_SPREAD,
    HitRates,
    ModelBytes,
    Speeds,
    cpu_s,
    published_curve,
)
from moegguf.engine.learnt import learnt_facts
from moegguf.engine.load import plan_here, read_model
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.plan import Plan, slot_bytes
from moegguf.engine.run_hits import read_prompt_token_s
from moegguf.engine.solver import make_plan, predict
from moegguf.engine.speeds import expert_read_speed
from moegguf.errors import ModelNotFoundError, OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import GGML_TYPES, read_gguf
from moegguf.models.catalog import Catalog
from moegguf.models.details import (
    details,
    files_of,
    main_type,
    parameters,
    parameters_of,
)
from moegguf.models.entry import ModelEntry
from moegguf.models.names import fetchable_name, library
from moegguf.models.sources import demo_path, hub_offline
from moegguf.options import BUDGETS, load_options_of
from moegguf.quantities import Link, parse_link, parse_size

DISK_SECONDS = 0.3
BUDGET_SHARES = (0.10, 0.25, 0.50, 1.0)
READING_TOKENS_PER_S = 5.0  # reading speed of a fast reader
RESERVE_BYTES = 1 << 30  # memory kept for a context, buffers and the process itself

Facts = dict[str, Any]


@contextmanager
def described(model: str) -> Iterator[tuple[ModelEntry, bool]]:
    """Context manager that yields the entry of the model with this path or name, and
    True if the model's files are on this machine.

    For a model that is only on Hugging Face, fetches only the headers of the files, and
    yields an entry that refers to the headers, and False. Raises ModelNotFoundError,
    ModelNameError, ModelFormatError or PullError.
    """
    try:
        entry = Catalog().find(model)
    except ModelNotFoundError:
        name = fetchable_name(model)
        if hub_offline() or name is None:
            raise
        from moegguf.models.hub import remote_model

        with remote_model(name) as entry:
            yield entry, False
        return
    yield entry, True


def _shown_path(entry: ModelEntry, is_here: bool) -> str:
    return (
        str(entry.path) if is_here else f"{entry.name}, {entry.path.name} (not fetched)"
    )


def _hit_rates(layout: ExpertLayout, is_here: bool) -> HitRates:
    """Returns the known hit rates of a model. Measured rates are included if the model
    is on this machine and has been measured; otherwise, only published rates are
    known."""
    return HitRates.of(layout) if is_here else HitRates(layout)


def model_facts(model: str, *, verbose: bool = False) -> Facts:
    """Returns the facts that `moegguf show` prints about a model (a path or a name).
    `verbose` adds the metadata of the first file, without long texts, long arrays and
    arrays of strings. `verbose` also adds the names, shapes and types of the tensors in
    all files."""
    with described(model) as (entry, is_here):
        facts = facts_of(entry, is_here)
        if verbose:
            files = [read_gguf(path) for path in entry.files]
            tensors = [tensor for file in files for tensor in file.tensors]
            facts["metadata"] = dict(files[0].metadata)
            facts["tensors"] = [
                {"name": t.name, "shape": list(t.shape), "type": t.type_name}
                for t in tensors
            ]
        return facts


def list_facts(entry: ModelEntry) -> Facts:
    """Returns the facts that `moegguf list` prints about one model of the catalog."""
    names = (
        "name",
        "source",
        "size_bytes",
        "digest",
        "files",
        "missing",
        "mmproj",
        "adapter",
        "draft",
        "parent",
    )
    return {name: getattr(entry, name) for name in names} | {
        "modified": entry.modified.isoformat()
    }


@dataclass(frozen=True)
class SupposedDevice:
    """A hypothetical GPU, which this machine need not have. `moegguf estimate` predicts
    the speed of a model with this GPU."""

    memory_bytes: int  # memory that is free before the model is loaded
    memory_bytes_per_s: float  # memory bandwidth
    link: Link  # link between the GPU and RAM

    @classmethod
    def parse(
        cls, memory: str | None, bandwidth: str | None, link: str | None
    ) -> SupposedDevice | None:
        """Parses texts such as "8GB", "448GB/s" and "24GB/s,35us". Returns None if all
        three are None. Raises OptionError if only some are None, or if a text cannot be
        parsed."""
        if memory is None and bandwidth is None and link is None:
            return None
        if memory is None or bandwidth is None or link is None:
            raise OptionError(
                "a device is described by all three of --device-memory 8GB --device-bandwidth 448GB/s --link 24GB/s,"
                " but only some are given; add the others."
            )
        try:
            return cls(
                parse_size(memory), parse_link(bandwidth).bytes_per_s, parse_link(link)
            )
        except ValueError as error:
            raise OptionError(f"--device-memory: {error}.") from None


def estimate_model(
    model: str,
    given: Mapping[str, Any] | None = None,
    device: SupposedDevice | None = None,
) -> Facts:
    """Returns the facts that `moegguf estimate` prints: the plan for this machine now,
    with the measured memory speed. The disk's speed is also measured if the model is
    here and the plan reads experts from disk.

    given: {load option: value}; an option replaces the same parameter in the model's
    entry. device: a GPU for which a prediction is added.
    """
    with described(model) as (entry, is_here):
        options = {
            **files_of(entry),
            **load_options_of(entry.parameters),
            **(given or {}),
        }
        spec = LoadSpec.of(options, commands=True)
        layout = read_model(entry.path, spec)
        plan = plan_here(layout, spec)
        reads = is_here and layout.is_moe and not plan.resident
        disk = (
            expert_read_speed(layout, DISK_SECONDS, spec.store, spec.mirror)
            if reads
            else None
        )
        budgets: Facts = {**spec.budgets.texts}
        if not (plan.placement or plan.on_device):
            budgets[BUDGETS["VRAM"]] = None
        placed, hit_rates = plan, _hit_rates(layout, is_here)
        memory_bytes_per_s = _memory_speed()
        on_cpu = Speeds.of_cpu(
            memory_bytes_per_s, disk.bytes_per_s if disk else memory_bytes_per_s
        )
        if is_here and layout.is_moe:
            on_cpu = replace(on_cpu, cpu_prompt_token_s=read_prompt_token_s(layout))
        # Predicts with unlimited RAM, so "auto" is a slot for every expert, and with the
        # context length of the plan for this machine.
        if device:
            there = machine.Device(
                "GPU0",
                0,
                device.memory_bytes,
                device.memory_bytes,
                margin_bytes=machine.OWN_MARGIN_BYTES,
            )
            ample = machine.Machine(
                machine.Memory(1 << 62, 1 << 62, "what is supposed"), devices=(there,)
            )
            speeds = Speeds.supposed(
                device.memory_bytes_per_s, device.link, memory_bytes_per_s
            )
            if disk:
                speeds = replace(speeds, disk_bytes_per_s=disk.bytes_per_s)
            free = replace(spec.with_free_placement(), n_ctx=plan.context.n_ctx)
            placed = make_plan(layout, ample, free, speeds, hit_rates.curve())
        return {
            "name": layout.name,
            "path": _shown_path(entry, is_here),
            "fetched": is_here,
            **budgets,
            "cache_types": [
                GGML_TYPES[number][0].lower() for number in (spec.type_k, spec.type_v)
            ],
            "n_ctx": plan.context.n_ctx,
            "n_expert_total": layout.n_expert_total,
            "row_table_bytes": layout.row_table_bytes,
            "expert_bytes": layout.expert_bytes,
            "token_cycle_bytes": layout.token_cycle_bytes,
            "disk": {
                "bytes_per_s": round(disk.bytes_per_s),
                "past_page_cache": disk.direct,
            }
            if disk
            else None,
            "plan": plan.facts(),
            "expected": _expectation(
                hit_rates, plan, on_cpu if disk or plan.resident else None
            ),
            "placement": _placement(placed),
            "cpu": _cpu_placements(
                layout, hit_rates, plan, on_cpu, is_disk_known=disk is not None
            ),
        }


def _memory_speed() -> float:
    return machine.memory_read_speed(machine.count_cpus())


def _expectation(hit_rates: HitRates, plan: Plan, speeds: Speeds | None) -> Facts:
    """Returns the expected hit rates, bytes per token and speed of answers. The speed
    is None if a device has slots, or if `speeds`, the speeds of this machine's CPU and
    disk, is None."""
    if plan.device is not None:
        speeds = None
    expected = hit_rates.expect(max(plan.n_slots, plan.n_ram_slots), speeds)
    return asdict(expected) | {
        "memory_bytes_per_s": round(speeds.cpu_bytes_per_s) if speeds else None
    }


def _cpu_placements(
    layout: ExpertLayout,
    hit_rates: HitRates,
    plan: Plan,
    speeds: Speeds,
    is_disk_known: bool,
) -> Facts | None:
    """Returns the predicted speeds of prompts and answers if the CPU runs every layer.

    There is one prediction with the plan's slots (only if `is_disk_known`), and one
    with a slot for every expert. Returns None for a plan with a device and for a model
    without experts.
    """
    if plan.on_device or not layout.is_moe:
        return None
    curve = hit_rates.curve()
    resident = replace(plan, memories=(replace(plan.ram, n_slots=plan.n_experts),))
    plans = {"every expert in memory": resident}
    if is_disk_known:
        plans = {
            f"{plan.n_slots:,} of {plan.n_experts:,} experts in memory": plan
        } | plans
    predicted = {
        text: predict(layout, "cpu", each, speeds, curve)
        for text, each in plans.items()
    }
    return {
        "placements": [
            asdict(placement) | {"text": text} for text, placement in predicted.items()
        ],
        "hit_rates": curve.source,
        # None: prompts have been timed
        "assumed_prompt_gain": None if speeds.cpu_prompt_token_s else CPU_GAIN,
    }


def _placement(plan: Plan) -> Facts | None:
    """Returns the placements of experts that the plan compared, their predicted speeds,
    the reason for the choice, and the reasons why other placements do not fit. Returns
    None if the plan compared none."""
    if (placed := plan.placement) is None:
        return None
    return asdict(placed) | {
        "placements": [
            asdict(each) | {"text": str(each)} for each in placed.placements
        ],
        "refused": [reason for reason in plan.reasons if reason.startswith("not ")],
    }


def facts_of(entry: ModelEntry, is_here: bool = True) -> Facts:
    """Returns the facts that `moegguf show` prints about the model of a catalog entry.
    Of the model's own files, only the headers are read."""
    layout, known = read_layout(entry.path), details(entry)
    total, active = parameters(layout)
    own_name = known.metadata.get("general.name") or entry.path.stem
    beside = {"projector": entry.mmproj, "adapter": entry.adapter, "draft": entry.draft}
    return {
        "name": layout.name,
        "path": _shown_path(entry, is_here),
        "architecture": layout.arch,
        "parameters": total,
        "active_parameters": active,
        "quantization": main_type(layout),
        "context_length": layout.hparams.n_ctx_train,
        "embedding_length": layout.hparams.n_embd,
        "n_layer": layout.n_layer,
        "n_vocab": layout.n_vocab,
        "chat_template": layout.chat_template is not None,
        "file_bytes": layout.n_bytes,
        "shards": [shard.path.name for shard in layout.shards],
        "types": {
            name: {"tensors": n, "bytes": size}
            for name, (n, size) in layout.tensor_types.items()
        },
        "dense_bytes": layout.dense_bytes,
        "row_table_bytes": layout.row_table_bytes,
        **(
            _expert_facts(layout, _hit_rates(layout, is_here))
            if layout.is_moe
            else {"experts": None, "budgets": []}
        ),
        "learnt": learnt_facts(layout) if is_here and layout.is_moe else [],
        "title": str(own_name)
        if entry.source == "path"
        else f"{entry.name} ({own_name})",
        "capabilities": list(known.capabilities),
        **{name: str(path) if path else None for name, path in beside.items()},
        "parameters_set": parameters_of(entry),
        "system": entry.system,
        "license": entry.license,
    }


def _expert_facts(layout: ExpertLayout, hit_rates: HitRates) -> Facts:
    """Returns facts about the model's experts. Also returns, for each budget in
    BUDGET_SHARES, the number of slots, their bytes and the range of hit rates."""
    sizes, n_total, size = (
        [layer.expert_bytes for layer in layout.layers],
        layout.n_expert_total,
        slot_bytes(layout),
    )
    # Every token uses the shared experts, so elsewhere they are treated as dense
    # weights.
    count = layout.metadata.get(f"{layout.arch}.expert_shared_count")
    if not isinstance(count, int) or count <= 0:
        count = int(
            bool(
                layout.metadata.get(f"{layout.arch}.expert_shared_feed_forward_length")
            )
        )
    rows = [
        (share, max(layout.n_expert_used, int(share * n_total + 1e-9)))
        for share in BUDGET_SHARES
    ]
    return {
        "experts": {
            "layers": len(layout.layers),
            "per_layer": layout.n_expert,
            "used": layout.n_expert_used,
            "shared": count,
            "total": n_total,
            "smallest_bytes": min(sizes),
            "largest_bytes": max(sizes),
            "slot_bytes": size,
            "all_bytes": layout.expert_bytes,
            "token_cycle": layout.token_cycle_slots,
            "token_cycle_bytes": layout.token_cycle_bytes,
            "unused_bytes": layout.unused_bytes,
        },
        "budgets": [
            {
                "share": share,
                "slots": n,
                "bytes": n * size,
                **asdict(hit_rates.range_at(n)),
            }
            for share, n in rows
        ],
    }


def library_facts(prefix: str = "") -> list[Facts]:
    """Returns facts about the library's models whose names start with `prefix`
    (ignoring case), with their predicted speeds on this machine.

    The speeds are for the CPU, with the memory that is free now and the disk on which
    moegguf is installed. A speed is None if the weights that one token uses and
    RESERVE_BYTES do not fit into the free memory.
    """
    free_bytes, found = machine.read_memory().available_bytes, []
    disk = machine.disk_read_speed(demo_path() or sys.executable, DISK_SECONDS)
    speeds = Speeds.of_cpu(_memory_speed(), disk.bytes_per_s)
    for model in (
        model for model in library() if model.name.startswith(prefix.lower())
    ):
        least_bytes = model.dense_bytes + model.token_bytes + RESERVE_BYTES
        share, tokens_per_s, here = 0.0, None, False
        with suppress(ModelNotFoundError):
            here = bool(Catalog().find(model.hub_name))
        if free_bytes >= least_bytes:
            for_experts = free_bytes - RESERVE_BYTES - model.dense_bytes
            share = min(1.0, for_experts / model.expert_bytes)
            hit_rate = (
                1.0
                if share == 1
                else published_curve(model.n_expert, model.n_expert_used).at(share)
            )
            read = ModelBytes(
                model.n_layer,
                model.token_bytes,
                model.dense_bytes,
                model.n_expert_used,
                model.n_layer,
            )
            fast = 1 / cpu_s(read, speeds, 1 - hit_rate)
            tokens_per_s = [SPEED_SPREAD * fast, fast]
        found.append(
            asdict(model) | {
                "hub_name": model.hub_name,
                "here": here,
                "least_bytes": least_bytes,
                "all_bytes": model.resident_bytes + RESERVE_BYTES,
                "expert_share": share,
                "tokens_per_s": tokens_per_s,
            }
        )  # fmt: skip
    best = best_fit_of(found)
    return [facts | {"fits_best": facts["name"] == best} for facts in found]


def best_fit_of(models: Sequence[Facts]) -> str | None:
    """Returns the name of the model with the largest file among the models that may
    answer at reading speed. If there is none, returns the name of the fastest model
    that can run here, or None."""
    running = [facts for facts in models if facts["tokens_per_s"]]
    fluent = [
        facts for facts in running if facts["tokens_per_s"][1] >= READING_TOKENS_PER_S
    ]
    if fluent:
        return max(fluent, key=lambda facts: facts["size_bytes"])["name"]
    return (
        max(running, key=lambda facts: facts["tokens_per_s"][1])["name"]
        if running
        else None
    )
