"""`moegguf.h` as ctypes: its version, enums, structs and the signatures of its functions, and nothing that loads it."""

from __future__ import annotations

import ctypes as c
from typing import Any

ABI_VERSION = 14
OK, INVALID, MEMORY, IO, CANCELLED, FORKED, ROUTING, SLOTS = range(8)
COMPUTE_TIER, LOWER_TIER, STAGING_TIER, DEVICE_TIER = range(4)  # enum moegguf_tier
POLICY_FORECAST, POLICY_SCORES = 1, 2  # enum moegguf_policy_trait
PREDICT_ONCE, PREDICT_LOCKSTEP = 1, 2  # enum moegguf_predict_flag

KIND = {"gate": 0, "up": 1, "down": 2, "gate_up": 3}

FLAG = {
    name: 1 << bit
    for bit, name in enumerate(
        ("repack", "direct", "chunked", "preempt", "overlap", "sweep", "fill", "simulate", "stream", "demand_first")
    )
}

_FAULTS = ("open", "read", "stat", "alloc", "thread", "short_read", "eintr", "slow_read", "copy", "slow_compute")
FAULT = {name: kind for kind, name in enumerate(_FAULTS)}


class Matrix(c.Structure):
    """struct moegguf_matrix: one expert tensor of the file."""

    _fields_ = [
        ("name", c.c_char_p),
        ("il", c.c_int32),
        ("kind", c.c_int32),
        ("type", c.c_int32),
        ("n_expert", c.c_int32),
        ("ne0", c.c_int64),
        ("ne1", c.c_int64),
        ("shard", c.c_int32),
        ("padding_bytes", c.c_int32),
        ("offset", c.c_uint64),
        ("expert_bytes", c.c_uint64),
    ]


class Device(c.Structure):
    """struct moegguf_device: one that computes layers, and its slots."""

    _fields_ = [
        ("name", c.c_char_p),
        ("n_slots", c.c_int32),
        ("has_lower_tier", c.c_int32),
        ("n_staging_tensors", c.c_int32),
        ("n_pass_slots", c.c_int32),
        ("sim_copy_bytes_per_ns", c.c_double),
        ("sim_copy_latency_ns", c.c_double),
    ]


class Config(c.Structure):
    """struct moegguf_config."""

    _fields_ = [
        ("abi", c.c_uint32),
        ("flags", c.c_uint32),
        ("n_layer", c.c_int32),
        ("n_matrices", c.c_int32),
        ("n_shards", c.c_int32),
        ("n_devices", c.c_int32),
        ("n_readers", c.c_int32),
        ("n_lower_slots", c.c_int32),
        ("matrices", c.POINTER(Matrix)),
        ("shard_paths", c.POINTER(c.c_char_p)),
        ("n_expert_used", c.POINTER(c.c_int32)),
        ("devices", c.POINTER(Device)),
        ("device_of_layer", c.POINTER(c.c_int32)),
        ("sim_bytes_per_ns", c.c_double),
        ("sim_latency_ns", c.c_double),
    ]


class Counters(c.Structure):
    """struct moegguf_counters: cumulative figures and gauges, all uint64."""

    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "passes tokens routing_events lookups hits_ready hits_late misses evictions bytes_missed bytes_prefetched"
            " reads read_retries read_errors stall_ns hook_ns read_ns upload_ns prefetch_requested prefetch_started"
            " prefetch_useful prefetch_wasted prefetch_dropped events_dropped forecast_picks forecast_right forecast_ns"
            " slots_used slots_pinned chunks_reading queue_needed queue_wanted sim_clock_ns"
        ).split()
    ]


class PoolInfo(c.Structure):
    """struct moegguf_pool_info."""

    _fields_ = [
        *((name, c.c_uint64) for name in ("slot_bytes", "pool_bytes", "staging_bytes")),
        *(
            (name, c.c_int32)
            for name in "n_slots n_slots_usable n_experts n_layers n_repacked n_uncached n_matrices resident"
            " direct".split()
        ),
    ]


class TierInfo(c.Structure):
    """struct moegguf_tier_info: what a tier is, and what was counted there."""

    _fields_ = [
        *(
            (name, c.c_uint64)
            for name in (
                "lookups hits_ready hits_late misses evictions bytes_missed bytes_prefetched stall_ns"
                " stream_waits copy_ns slots_used slots_pinned pool_bytes"
            ).split()
        ),
        *((name, c.c_int32) for name in "n_slots n_slots_usable resident pinned_memory".split()),
        ("device", c.c_char * 64),
        ("note", c.c_char * 192),
    ]


class Computed(c.Structure):
    """struct moegguf_computed: experts that the CPU has computed in place of a copy to the device."""

    _fields_ = [
        *((name, c.c_uint64) for name in ("misses", "compute_ns", "stall_ns")),
        *((name, c.c_double) for name in ("compute_bytes_ns", "copy_bytes_ns")),
        *((name, c.c_int32) for name in ("n_layers", "reserved")),
        ("note", c.c_char * 192),
    ]


LISTEN = {name: 1 << bit for bit, name in enumerate(("weights", "inputs", "everything", "lockstep", "lazy"))}


class TokensEvent(c.Structure):
    """struct moegguf_tokens_event: tokens is [n_tokens], valid during the callback only."""

    _fields_ = [
        ("lane", c.c_int32),
        ("sequence", c.c_int32),
        ("phase", c.c_int32),
        ("n_tokens", c.c_int32),
        ("tokens", c.c_void_p),
        ("sequences", c.c_void_p),
        ("phases", c.c_void_p),
        ("outputs", c.c_void_p),
    ]


class RoutingEventStruct(c.Structure):
    """struct moegguf_routing_event: its arrays are valid during the callback only."""

    _fields_ = [
        ("pass_", c.c_uint64),
        ("time_ns", c.c_uint64),
        ("lane", c.c_int32),
        ("il", c.c_int32),
        ("n_tokens", c.c_int32),
        ("n_expert_used", c.c_int32),
        ("sequence", c.c_int32),
        ("phase", c.c_int32),
        ("first_token", c.c_int32),
        ("n_embd", c.c_int32),
        ("expert_ids", c.c_void_p),
        ("weights", c.c_void_p),
        ("inputs", c.c_void_p),
        ("sequences", c.c_void_p),
        ("phases", c.c_void_p),
    ]


class ResidencyEvent(c.Structure):
    """struct moegguf_residency_event."""

    _fields_ = [
        ("time_ns", c.c_uint64),
        ("il", c.c_int32),
        ("expert", c.c_int32),
        ("slot", c.c_int32),
        ("resident", c.c_int32),
    ]


TOKENS_CALLBACK = c.CFUNCTYPE(None, c.c_void_p, c.POINTER(TokensEvent))
ROUTING_CALLBACK = c.CFUNCTYPE(None, c.c_void_p, c.POINTER(RoutingEventStruct))
RESIDENCY_CALLBACK = c.CFUNCTYPE(None, c.c_void_p, c.POINTER(ResidencyEvent))


class Listener(c.Structure):
    """struct moegguf_listener."""

    _fields_ = [
        ("flags", c.c_uint32),
        ("max_input_tokens", c.c_int32),
        ("on_tokens", TOKENS_CALLBACK),
        ("on_routing", ROUTING_CALLBACK),
        ("on_residency", RESIDENCY_CALLBACK),
        ("user", c.c_void_p),
    ]


class Parameter(c.Structure):
    """struct moegguf_parameter: a named row of numbers."""

    _fields_ = [("name", c.c_char_p), ("n", c.c_int32), ("reserved", c.c_int32), ("values", c.POINTER(c.c_float))]


class Policy(c.Structure):
    """struct moegguf_policy: an eviction policy of the store by name."""

    _fields_ = [
        ("name", c.c_char_p),
        ("n_parameters", c.c_int32),
        ("reserved", c.c_int32),
        ("parameters", c.POINTER(Parameter)),
    ]


class Array(c.Structure):
    """struct moegguf_array: what a predictor was trained to, by name."""

    _fields_ = [
        ("name", c.c_char_p),
        ("type", c.c_int32),
        ("reserved", c.c_int32),
        ("n", c.c_uint64),
        ("data", c.c_void_p),
    ]


class Predictor(c.Structure):
    """struct moegguf_predictor: a predictor of the store by name."""

    _fields_ = [
        ("name", c.c_char_p),
        ("n_arrays", c.c_int32),
        ("flags", c.c_uint32),
        ("arrays", c.POINTER(Array)),
        ("window", c.c_int32),
        ("most_prefetches", c.c_int32),
        ("waste_weight", c.c_float),
        ("reserved", c.c_int32),
    ]


class Sizes(c.Structure):
    """struct moegguf_sizes: what slots take."""

    _fields_ = [
        ("stride_bytes", c.c_uint64 * len(KIND)),
        *((name, c.c_uint64) for name in ("slot_bytes", "pool_bytes", "guard_bytes", "streams")),
    ]


class Routing(c.Structure):
    """struct moegguf_routing: routing events to be replayed."""

    _fields_ = [
        *((name, c.c_int64) for name in ("n_events", "n_ids")),
        *((name, c.c_void_p) for name in ("il", "n_tokens", "n_expert_used", "expert_ids", "compute_ns")),
    ]


class LinkStruct(c.Structure):
    """struct moegguf_link: a device behind a link in real time."""

    _fields_ = [
        ("bytes_per_ns", c.c_double),
        ("latency_ns", c.c_double),
        ("memory_bytes", c.c_uint64),
        ("most_buffer_bytes", c.c_uint64),
        ("pinned", c.c_int32),
        ("n_threads", c.c_int32),
        ("strict_seed", c.c_uint32),
        ("reserved", c.c_uint32),
    ]


class SpeedsStruct(c.Structure):
    """struct moegguf_speeds: of the CPU, a device and the link between them."""

    _fields_ = [
        *(
            (name, c.c_double)
            for name in (
                "cpu_bytes_per_ns cpu_op_ns device_bytes_per_ns device_op_ns copy_bytes_per_ns copy_ns stop_ns"
                " cpu_layer_ns"
            ).split()
        ),
        *((name, c.c_int32) for name in ("pinned_memory", "reserved")),
    ]


class Failure(c.Structure):
    """struct moegguf_failure: why a pass ended."""

    _fields_ = [
        ("status", c.c_int32),
        ("sys_errno", c.c_int32),
        ("il", c.c_int32),
        ("expert", c.c_int32),
        ("message", c.c_char * 256),
    ]


_STATUS_CALLS: dict[str, list[Any]] = {
    "moegguf_slot_sizes": [c.POINTER(Matrix), c.c_int32, c.c_int32, c.POINTER(Sizes)],
    "moegguf_pad": [c.c_char_p, c.POINTER(Matrix), c.c_int32],
    "moegguf_most_slots": [c.c_char_p, c.POINTER(Matrix), c.c_int32, c.c_int32, c.POINTER(c.c_int32)],
    "moegguf_link_add": [c.POINTER(LinkStruct), c.POINTER(c.c_char_p)],
    "moegguf_measure_speeds": [c.POINTER(Config), c.c_int32, c.c_double, c.POINTER(SpeedsStruct)],
    "moegguf_store_open": [c.POINTER(Config), c.POINTER(c.c_void_p)],
    "moegguf_store_info": [c.c_void_p, c.POINTER(PoolInfo)],
    "moegguf_store_counters": [c.c_void_p, c.POINTER(Counters)],
    "moegguf_store_tier": [c.c_void_p, c.c_int32, c.POINTER(TierInfo)],
    "moegguf_store_residency": [c.c_void_p, c.c_int32, c.c_void_p, c.c_size_t],
    "moegguf_store_activity": [c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t],
    "moegguf_store_watch": [c.c_void_p, c.c_int],
    "moegguf_store_set_scores": [c.c_void_p, c.c_void_p, c.c_size_t],
    "moegguf_store_set_policy": [c.c_void_p, c.c_int32, c.POINTER(Policy)],
    "moegguf_store_set_forecast": [c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t],
    "moegguf_store_set_predictor": [c.c_void_p, c.POINTER(Predictor)],
    "moegguf_store_act": [c.c_void_p, c.c_int],
    "moegguf_store_forecast": [c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t],
    "moegguf_store_prefetch": [c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t, c.c_int],
    "moegguf_store_warm": [c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t],
    "moegguf_store_listen": [c.c_void_p, c.POINTER(Listener)],
    "moegguf_store_cancel": [c.c_void_p, c.c_int],
    "moegguf_store_resize": [c.c_void_p, c.c_int32, c.c_int32],
    "moegguf_store_reallocate": [c.c_void_p, c.c_int32, c.c_int32],
    "moegguf_store_compute_misses": [c.c_void_p, c.c_int32],
    "moegguf_store_sim_compute_misses": [c.c_void_p, c.c_double, c.c_double],
    "moegguf_store_computed": [c.c_void_p, c.POINTER(Computed)],
    "moegguf_store_drain": [c.c_void_p, c.c_double],
    "moegguf_store_read_slot": [c.c_void_p, c.c_int32, c.c_int32, c.c_void_p, c.c_size_t],
    "moegguf_store_probe": [c.c_void_p, c.c_double, c.POINTER(c.c_double)],
    "moegguf_store_sim_advance": [c.c_void_p, c.c_uint64],
    "moegguf_matvec_q8": [c.c_void_p] * 3 + [c.c_int32, c.c_int32, c.c_void_p, c.c_int, c.c_void_p],
    "moegguf_eamc_add_row": [c.c_void_p, c.c_size_t, c.c_void_p, c.c_int32, c.c_void_p, c.c_int32] + [c.c_void_p] * 2,
    "moegguf_eamc_match": [c.c_void_p] * 3 + [c.c_int32] * 2 + [c.c_void_p] * 3,
    "moegguf_lane_open": [c.c_void_p, c.POINTER(c.c_void_p)],
    "moegguf_lane_acquire": [
        c.c_void_p,
        c.c_int32,
        c.c_void_p,
        c.c_int32,
        c.c_int32,
        c.c_void_p,
        c.c_int32,
        c.c_void_p,
    ],
    "moegguf_lane_replay": [c.c_void_p, c.POINTER(Routing), c.POINTER(c.c_int64)],
    "moegguf_lane_announce": [c.c_void_p, c.POINTER(TokensEvent)],
    "moegguf_lane_failure": [c.c_void_p, c.POINTER(Failure), c.c_int],
}

_PLAIN_CALLS: dict[str, tuple[object, list[type]]] = {
    "moegguf_last_error": (c.c_char_p, []),
    "moegguf_policy_name": (c.c_char_p, [c.c_int32, c.POINTER(c.c_uint32)]),
    "moegguf_predictor_name": (c.c_char_p, [c.c_int32]),
    "moegguf_store_close": (None, [c.c_void_p]),
    "moegguf_store_buft": (c.c_void_p, [c.c_void_p]),
    "moegguf_slot_tokens": (c.c_int32, [c.c_char_p]),
    "moegguf_lane_close": (None, [c.c_void_p]),
    "moegguf_fault_arm": (None, [c.c_int, c.c_uint64, c.c_int, c.c_int]),
    "moegguf_fault_count": (c.c_uint64, [c.c_int]),
}

# Called in every pass. They wait for nothing, so they keep the interpreter's lock: taking it again takes longer than
# they do, up to a thread's turn (5 ms) while others run Python.
_SHORT_CALLS: dict[str, list[type]] = {
    "moegguf_lane_awaits_tokens": [c.c_void_p, c.c_int32, c.c_int32],
    "moegguf_lane_is_clear": [c.c_void_p],
}


def declare(library: c.CDLL) -> None:
    """Sets the signatures of every function of the loaded `library`."""
    for name, (result, arguments) in _PLAIN_CALLS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name, arguments in _STATUS_CALLS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c.c_int, arguments
    keeping_the_lock = c.PyDLL(library._name)
    for name, arguments in _SHORT_CALLS.items():
        function = getattr(keeping_the_lock, name)
        function.restype, function.argtypes = c.c_int, arguments
        setattr(library, name, function)
