"""Facts of `list`, `show` and `estimate` as values for JSON, sizes in bytes. tables.py formats them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moegguf.engine.estimate import NOTE, guess_hit_rate
from moegguf.engine.machine import DiskSpeed, disk_read_speed, read_memory
from moegguf.engine.memory import choose_context
from moegguf.engine.plan import Plan, make_plan, slot_bytes
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import read_gguf
from moegguf.models.catalog import Catalog, find_model
from moegguf.models.details import details, main_type, parameters
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.settings import read_environment

DISK_SECONDS = 0.3
BUDGET_SHARES = (0.10, 0.25, 0.50, 1.0)

Facts = dict[str, Any]


def model_facts(model: str, *, verbose: bool = False) -> Facts:
    """Facts of `moegguf show` about a model given by path or name; `verbose` adds all metadata and tensors."""
    entry = Catalog().find(model)
    facts = layout_facts(read_layout(entry.path)) | entry_facts(entry)
    return facts | _metadata_facts(entry) if verbose else facts


def list_facts(entry: ModelEntry) -> Facts:
    """Facts of `moegguf list` about a catalog entry."""
    return {
        "name": entry.name,
        "source": entry.source,
        "size_bytes": entry.size_bytes,
        "digest": entry.digest,
        "modified": entry.modified.isoformat(),
        "files": [str(file) for file in entry.files],
        "missing": [str(file) for file in entry.missing],
        "mmproj": str(entry.mmproj) if entry.mmproj else None,
        "parent": entry.parent,
    }


def entry_facts(entry: ModelEntry) -> Facts:
    """Facts of `moegguf show` that the files do not have: those of the catalog entry."""
    known = details(entry)
    own_name = known.metadata.get("general.name") or entry.path.stem
    return {
        "title": str(own_name) if entry.source == "path" else f"{entry.name} ({own_name})",
        "capabilities": list(known.capabilities),
        "projector": str(entry.mmproj) if entry.mmproj else None,
        "parameters_set": dict(entry.parameters),
        "system": entry.system,
        "license": entry.license,
    }


def _metadata_facts(entry: ModelEntry) -> Facts:
    """All metadata of the first file, and the tensors of all files."""
    files = [read_gguf(path) for path in entry.files]
    return {
        "metadata": dict(files[0].metadata),
        "tensors": [
            {"name": tensor.name, "shape": list(tensor.shape), "type": tensor.type_name}
            for file in files
            for tensor in file.tensors
        ],
    }


def estimate_model(model: str, expert_cache: str | None, ctx: int | None) -> Facts:
    """Facts of `moegguf estimate`: the plan for this machine now, with the measured disk speed."""
    cache = parse_expert_cache(read_environment().expert_cache if expert_cache is None else expert_cache)
    layout = read_layout(find_model(model))
    memory = read_memory()
    n_ctx = choose_context(layout, ctx, memory)
    plan = make_plan(layout, cache, memory, n_ctx=n_ctx)
    speed = None
    if layout.is_moe and not plan.resident:
        speed = disk_read_speed(layout.shards[0].path, DISK_SECONDS)
        plan = make_plan(layout, cache, memory, n_ctx=n_ctx, disk_bytes_per_s=speed.bytes_per_s)
    return _estimate_facts(layout, plan, cache, n_ctx, speed)


def layout_facts(layout: ExpertLayout) -> Facts:
    """Facts from the headers of a model's files."""
    total, active = parameters(layout)
    return {
        "name": layout.name,
        "path": str(layout.shards[0].path),
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
        "types": {name: {"tensors": n, "bytes": size} for name, (n, size) in layout.tensor_types.items()},
        "dense_bytes": layout.dense_bytes,
        "experts": _expert_facts(layout) if layout.is_moe else None,
        "budgets": _budget_facts(layout) if layout.is_moe else [],
    }


def _expert_facts(layout: ExpertLayout) -> Facts:
    sizes = [layer.expert_bytes for layer in layout.layers]
    return {
        "layers": len(layout.layers),
        "per_layer": layout.n_expert,
        "used": layout.n_expert_used,
        "shared": _shared(layout),
        "total": layout.n_expert_total,
        "smallest_bytes": min(sizes),
        "largest_bytes": max(sizes),
        "slot_bytes": slot_bytes(layout),
        "all_bytes": layout.expert_bytes,
        "token_cycle": layout.token_cycle_slots,
        "token_cycle_bytes": layout.token_cycle_bytes,
        "unused_bytes": layout.unused_bytes,
    }


def _shared(layout: ExpertLayout) -> int:
    """Shared experts, which every token uses; they count as dense weights."""
    count = layout.metadata.get(f"{layout.arch}.expert_shared_count")
    if isinstance(count, int) and count > 0:
        return count
    return int(bool(layout.metadata.get(f"{layout.arch}.expert_shared_feed_forward_length")))


def _budget_facts(layout: ExpertLayout) -> list[Facts]:
    n_total, size = layout.n_expert_total, slot_bytes(layout)
    rows = [(share, max(layout.n_expert_used, int(share * n_total + 1e-9))) for share in BUDGET_SHARES]
    return [
        {"share": share, "slots": n, "bytes": n * size, "hit_rate": round(guess_hit_rate(n / n_total), 3), "note": NOTE}
        for share, n in rows
    ]


def _estimate_facts(layout: ExpertLayout, plan: Plan, cache: ExpertCache, n_ctx: int, speed: DiskSpeed | None) -> Facts:
    """The plan and what it rests on, as values for JSON."""
    return {
        "name": layout.name,
        "path": str(layout.shards[0].path),
        "expert_cache": str(cache),
        "n_ctx": n_ctx,
        "n_expert_total": layout.n_expert_total,
        "expert_bytes": layout.expert_bytes,
        "token_cycle_bytes": layout.token_cycle_bytes,
        "disk": {"bytes_per_s": round(speed.bytes_per_s), "past_page_cache": speed.direct} if speed else None,
        "plan": asdict(plan),
    }
