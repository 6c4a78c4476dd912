"""Facts of `moegguf library`: which models of the library would run on this machine, and how fast."""

from __future__ import annotations

import sys
from dataclasses import asdict

from moegguf.engine.cost import SPEED_SPREAD, ModelBytes, Speeds, cpu_s, published_curve
from moegguf.engine.machine import count_cpus, disk_read_speed, memory_read_speed, read_memory
from moegguf.errors import ModelNotFoundError
from moegguf.models.catalog import Catalog
from moegguf.models.folder import demo_path
from moegguf.models.library import LibraryModel, library
from moegguf.terminal.facts import DISK_SECONDS, Facts

RESERVE_BYTES = 1 << 30  # of a context, buffers and the process itself


def library_facts(prefix: str = "") -> list[Facts]:
    """Facts of the models whose names start with `prefix`, with this machine's memory and speeds now.

    Speeds are those of the processor; None where one token's experts do not fit into the free memory. The disk is the
    one that moegguf is installed on.
    """
    free_bytes = read_memory().available_bytes
    disk = disk_read_speed(demo_path() or sys.executable, DISK_SECONDS)
    speeds = Speeds.of_cpu(memory_read_speed(count_cpus()), disk.bytes_per_s)
    chosen = (model for model in library() if model.name.startswith(prefix.lower()))
    return [_facts(model, free_bytes, speeds) for model in chosen]


def _facts(model: LibraryModel, free_bytes: int, speeds: Speeds) -> Facts:
    least_bytes = model.dense_bytes + model.token_bytes + RESERVE_BYTES
    share = min(1.0, (free_bytes - RESERVE_BYTES - model.dense_bytes) / model.expert_bytes)
    slow = fast = None
    if free_bytes >= least_bytes:
        hit_rate = 1.0 if share == 1 else published_curve(model.n_expert, model.n_expert_used).at(share)
        read = ModelBytes(model.n_layer, model.token_bytes, model.dense_bytes, model.n_expert_used, model.n_layer)
        fast = 1 / cpu_s(read, speeds, 1 - hit_rate)
        slow = SPEED_SPREAD * fast
    return asdict(model) | {
        "hub_name": model.hub_name,
        "here": _is_here(model),
        "least_bytes": least_bytes,
        "all_bytes": model.size_bytes + RESERVE_BYTES,
        "expert_share": max(0.0, share) if fast else 0.0,
        "tokens_per_s": [slow, fast] if fast else None,
    }


def _is_here(model: LibraryModel) -> bool:
    try:
        return bool(Catalog().find(model.hub_name))
    except ModelNotFoundError:
        return False
