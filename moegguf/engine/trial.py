"""Tries a model in a separate process the first time that its file is loaded. If
llama.cpp aborts, only the separate process is lost.

With a projector the trial also reads an image. The verdict is kept (`known_facts`). It
is valid for the same file headers, the same build and processor, and the same values of
OPTIONS. The trial ends before the load begins, so that the two never use memory at the
same time. MOEGGUF_TRIAL_LOAD=0 skips the trial; "again" repeats it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moegguf.child import child_command, child_environment
from moegguf.engine.devices import has_gpu
from moegguf.engine.known_facts import KnownFact
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import count_cpus
from moegguf.engine.memory import Sizes
from moegguf.engine.plan import layer_slots, slot_bytes
from moegguf.errors import (
    AllocationError,
    ExpertIOError,
    ModelFormatError,
    MoeggufError,
)
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import header_digest
from moegguf.gguf.projector import ProjectorHeader
from moegguf.options import BUDGETS
from moegguf.settings import read_environment

COMMAND = child_command("moegguf.engine.trial_process")
# Keywords of `Llama` that can make llama.cpp run different code, and that a LoadSpec
# does not contain (`LoadSpec.keywords`). The trial ignores all other keywords of the
# load.
OPTIONS = frozenset(
    {"kv_overrides", "lora_scale", "offload_kqv", "op_offload", "pooling_type", "rope_freq_base", "rope_freq_scale",
     "rope_scaling_type", "swa_full", "vocab_only", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow",
     "yarn_ext_factor", "yarn_orig_ctx"}
)  # fmt: skip
# tokens that fit in the context, maximum tokens in a batch, and tokens whose experts
# have slots at the same time
N_CTX, N_BATCH, N_SLOT_TOKENS = (256, 8, 4)
# Additional context tokens for the trial's image; an image that does not fit is not
# evaluated.
N_IMAGE_TOKENS = 1024
MAX_IMAGE_THREADS = 4
# Limit on CPU time: CPU_S, plus one second for each 50 MiB of dense weights.
CPU_S, CPU_BYTES_PER_S = (20, 50 << 20)
# the limit is longer for an image: the projector's weights are multiplied with each
# patch, at most MAX_PATCHES times
MAX_PATCHES, CPU_PATCH_BYTES_PER_S = 4096, 4 << 30
# limit on the total time, which includes waiting for the disk: WALL_S, plus one second
# for each 5 MiB of dense weights
WALL_S, DISK_BYTES_PER_S = 90, 5 << 20
# The memory limit is twice the bytes that the trial needs, plus these bytes.
SPARE_BYTES = 1 << 30
# Seconds to add to the limits if there is a GPU: its driver may compile kernels on
# first use.
COMPILE_S = 600
POLL_S = 0.1
# Signals that are not blamed on the file: the system kills a process for lack of
# memory, or a user kills it.
OUTSIDE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
)
MARKS = ("ASSERT", "what():", "GGML_ABORT", "fatal error")
NO_MEMORY = "bad_alloc"  # text of the C++ exception for lack of memory
OUT_OF_MEMORY = (
    "a trial load ran out of memory, or needed more than its limit ({}); free some memory, set MOEGGUF_TRIAL_LOAD=0 to"
    " load the file without a trial"
)
FETCH = "fetch the file again"
AGAIN = f"{FETCH}, or set MOEGGUF_TRIAL_LOAD=again to try it once more"
TOO_LONG = "a trial load did not finish within"
NO_DAMAGE = (
    "that is no sign of damage in the file; set MOEGGUF_TRIAL_LOAD=again to try it once more, or 0 to load it without a"
    " trial"
)


@dataclass(frozen=True)
class Request:
    """The load that the trial process must try, and its limits."""

    path: str
    options: Mapping[str, Any]  # keywords of `Llama`
    memory_bytes: int
    cpu_s: int
    wall_s: int


Outcome = tuple[str, bool]
"""(reason why the trial failed, or ""; True if the outcome is kept, because another
trial would have the same one)."""

# The trial has no result: only the load itself can show whether the model works.
NO_VERDICT: Outcome = "", False


def try_first(
    layout: ExpertLayout,
    spec: LoadSpec,
    options: Mapping[str, Any],
    waiting: Callable[[], object],
) -> None:
    """Tries the model, with its projector, unless its verdict is known or trials are
    switched off. Calls `waiting` repeatedly while the trial runs; an exception from
    `waiting` stops the trial.

    options: keywords of llama_cpp.Llama, as the user passed them.

    Raises ModelFormatError for a model whose trial failed, now or earlier. Raises
    AllocationError if the trial used far more memory than it should, or if the system
    killed it. Raises ExpertIOError if the mapped file could not be read.
    """
    mode = read_environment().trial_load
    tried = _tried(spec, options)
    projector = spec.projector
    if mode == "off":
        return
    verdict = _verdict(layout, tried, projector)
    reason = None if mode == "again" else verdict.read(str)
    name = layout.shards[0].path.name
    without = ""
    if projector is not None:
        name = f"{name} with {projector.path.name}"
        without = "load the model without its projector, "
    if reason is None:
        try:
            reason, is_lasting = _run(_request(layout, tried, projector), waiting)
        except (AllocationError, ExpertIOError) as error:
            # no verdict was kept, so the next load has a new trial without
            # MOEGGUF_TRIAL_LOAD=again
            raise type(error)(f"{name}: {error}, {without}or {FETCH}.") from None
        if is_lasting:
            verdict.write(reason)
    if reason:
        raise ModelFormatError(
            f"{name}: {reason}; {NO_DAMAGE if reason.startswith(TOO_LONG) else without + AGAIN}."
        )


def _tried(spec: LoadSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that can change the result of a trial. Leaves out values that
    JSON cannot express."""
    chosen = spec.keywords
    for name, value in sorted(options.items()):
        if name in OPTIONS and value is not None:
            with suppress(TypeError, ValueError):
                json.dumps(value)
                chosen[name] = value
    return chosen


def _request(
    layout: ExpertLayout, options: dict[str, Any], projector: ProjectorHeader | None
) -> Request:
    n_image = 0
    n_ctx = N_CTX
    extra_s = COMPILE_S if has_gpu() else 0
    dense_bytes = layout.dense_bytes if layout.is_moe else layout.n_bytes
    beside = dense_bytes - layout.dense_bytes
    if adapter := options.get("lora_path"):
        beside += read_adapter(adapter).n_bytes
    if projector is not None:
        n_image = projector.one_pass_tokens
        n_ctx = N_CTX + N_IMAGE_TOKENS
        extra_s += (
            projector.weight_bytes
            * min(projector.n_patches, MAX_PATCHES)
            // CPU_PATCH_BYTES_PER_S
        )
        dense_bytes += projector.weight_bytes
    n_slots = min(
        N_SLOT_TOKENS * layout.n_expert_used, max(layout.n_expert, layout.n_expert_used)
    )
    n_slots = max(n_slots, layer_slots(layout, n_image))
    pool_bytes = n_slots * slot_bytes(layout) if layout.is_moe else 0
    # Texts are evaluated with one thread: several threads would waste the limited CPU
    # time waiting for each other. An image takes seconds of CPU time, so up to
    # MAX_IMAGE_THREADS threads read it.
    n_threads_batch = (
        min(count_cpus(), MAX_IMAGE_THREADS) if projector is not None else 1
    )
    size: dict[str, Any] = {
        BUDGETS["RAM"]: pool_bytes or "auto", BUDGETS["VRAM"]: "", "n_ctx": n_ctx, "n_batch": N_BATCH,
        "context_store": 0, "policy": "lru", "verbose": False, "n_threads": 1, "n_threads_batch": n_threads_batch,
        "mmproj": str(projector.path.absolute()) if projector is not None else None,
    }  # fmt: skip
    sizes = Sizes(n_ctx, spec=LoadSpec(projector=projector))
    needs = sizes.needs(layout, max(N_BATCH, n_image), n_slots).total_bytes + beside
    # layers on a device: no memory limit, because drivers map far more memory than they
    # use
    on_device = bool(options.get("n_gpu_layers"))
    return Request(
        path=str(layout.shards[0].path.absolute()),
        options=size | options,
        memory_bytes=0 if on_device else 2 * (needs + pool_bytes) + SPARE_BYTES,
        cpu_s=CPU_S + dense_bytes // CPU_BYTES_PER_S + extra_s,
        wall_s=WALL_S + dense_bytes // DISK_BYTES_PER_S + extra_s,
    )


def _verdict(
    layout: ExpertLayout, options: Mapping[str, Any], projector: ProjectorHeader | None
) -> KnownFact:
    """Returns the known fact that stores the verdict: the reason why the model failed,
    or "" if it passed."""
    images = header_digest((projector.shard,)) if projector is not None else None
    if adapter := options.get("lora_path"):
        options = {
            **options,
            "lora_path": header_digest((read_adapter(adapter).shard,)),
        }
    return KnownFact("trials", layout, [options, images])


def _run(request: Request, waiting: Callable[[], object]) -> Outcome:
    """Starts the trial process and waits until it exits or reaches the time limit. The
    trial process also exits if this process exits, because its stdin is then closed.
    Raises AllocationError if the trial used far more memory than it should, or if the
    system killed it. Raises ExpertIOError if the file could not be read.
    """
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GGML_NO_BACKTRACE"), "1"
    )
    try:
        process = subprocess.Popen(
            [*COMMAND, json.dumps(vars(request))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The trial uses the expert store even if the load will not: without the
            # store, the trial could use all memory.
            env=child_environment(MOEGGUF_TRIAL_LOAD="0", MOEGGUF_HOOKS="1", **threads),
            start_new_session=True,
        )
    except OSError:
        return NO_VERDICT
    # `process.stdin` is None from here on, because communicate() would close it too
    # early.
    end = time.monotonic() + request.wall_s
    stdin = process.stdin
    process.stdin = None
    assert stdin is not None
    try:
        with stdin:
            while True:
                try:
                    answer, log = process.communicate(timeout=POLL_S)
                    return _outcome(
                        process.returncode,
                        answer,
                        log.decode(errors="replace"),
                        request.cpu_s,
                    )
                except subprocess.TimeoutExpired:
                    waiting()
                    if time.monotonic() > end:
                        return f"{TOO_LONG} {request.wall_s:.0f} s", False
    finally:
        process.kill()
        process.communicate()


def _outcome(code: int, answer: bytes, log: str, cpu_s: int) -> Outcome:
    name = next(
        (known.name for known in signal.Signals if known == -code), f"signal {-code}"
    )
    if code == 0:
        try:
            found = json.loads(answer)
            reason = str(found["reason"])
            kind = str(found["kind"])
        except (ValueError, KeyError, TypeError):
            # The output may come from a program that is not the trial process.
            return NO_VERDICT
        if kind == "memory":
            raise AllocationError(OUT_OF_MEMORY.format(reason))
        if kind == "known":
            return NO_VERDICT  # the load itself raises this error
        return f"a trial load failed ({reason})" if reason else "", True
    # llama.cpp never exits with such a code: the program was not Python, or Python did
    # not find this package
    if code > 0:
        return NO_VERDICT
    if code == -signal.SIGXCPU:
        return f"{TOO_LONG} {cpu_s} s of computing", not has_gpu()
    if code == -signal.SIGBUS:
        raise ExpertIOError(
            "reading the file failed in a trial load (SIGBUS); check the disk"
        )
    if -code in OUTSIDE_SIGNALS:
        raise AllocationError(
            f"a trial load was killed ({name}), for example because memory ran out; free memory and try"
            " again"
        )
    why = next(
        (
            line.strip()[-200:]
            for line in reversed(log.splitlines())
            if any(m in line for m in MARKS)
        ),
        "",
    )
    if NO_MEMORY in why:
        raise AllocationError(OUT_OF_MEMORY.format(why))
    return f"llama.cpp ended a trial load with {name}{': ' if why else ''}{why}", True


def describe(error: BaseException) -> dict[str, str]:
    """Returns the answer of a trial process in which `error` was raised."""
    text = f"{type(error).__name__}: {error}"[:300].rstrip(".")
    if isinstance(error, MemoryError):
        return {"kind": "memory", "reason": text}
    # known errors are not the file's fault, or the load itself raises them again
    known = isinstance(error, MoeggufError | OSError | ImportError)
    return {"kind": "known" if known else "bare", "reason": text}
