"""Tries a model in a process of its own the first time its file is loaded: what llama.cpp aborts on ends only that one.

The verdict is kept in the cache folder, for the bytes of the header, the options that change what is computed, and the
build of the native library. The trial ends before the load begins, so that memory is never taken twice.
MOEGGUF_TRIAL_LOAD=0 skips it; "again" repeats it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegguf.atomic_write import write_atomically
from moegguf.engine.memory import memory_needs
from moegguf.engine.plan import slot_bytes
from moegguf.errors import AllocationError, ModelFormatError, MoeggufError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.fingerprint import header_digest
from moegguf.native import library
from moegguf.settings import cache_folder, read_environment

# -P: a folder named moegguf in the working directory does not shadow this package.
COMMAND = (sys.executable or "python3", "-P", "-m", "moegguf.engine.trial_process")
# Keywords of `Llama` with which other code of llama.cpp runs; the rest is size or speed.
OPTIONS = frozenset(
    {"embedding", "flash_attn", "kv_overrides", "main_gpu", "n_gpu_layers", "offload_kqv", "op_offload", "pooling_type",
     "rope_freq_base", "rope_freq_scale", "rope_scaling_type", "split_mode", "swa_full", "tensor_split", "type_k",
     "type_v", "vocab_only", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor",
     "yarn_orig_ctx"}
)  # fmt: skip
N_CTX, N_BATCH, N_PASS_EXPERTS = 256, 8, 4  # a pass takes at most as many tokens as N_PASS_EXPERTS
CPU_S, CPU_BYTES_PER_S = 20, 50 << 20  # computing allowed: CPU_S, and a second per so many dense bytes
WALL_S, DISK_BYTES_PER_S = 90, 5 << 20  # the same for waiting for the disk, too
SPARE_BYTES = 1 << 30  # of the limit of memory, beside twice what is needed
POLL_S = 0.1
# Not the file's fault: killed for memory, or by a user.
OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
MARKS = ("ASSERT", "what():", "GGML_ABORT", "fatal error")
NO_MEMORY = "bad_alloc"  # what() of C++'s exception
AGAIN = "fetch the file again, or set MOEGGUF_TRIAL_LOAD=again to try it once more"


@dataclass(frozen=True)
class Request:
    """What the process is to try, with its limits."""

    path: str
    options: Mapping[str, Any]
    n_slots_bytes: int
    memory_bytes: int
    cpu_s: int

    @property
    def wall_s(self) -> float:
        """Seconds after which the process is ended."""
        return WALL_S + (self.cpu_s - CPU_S) * (CPU_BYTES_PER_S / DISK_BYTES_PER_S)


@dataclass(frozen=True)
class Outcome:
    """How a process ended. `reason` is empty when the model passed; `lasting`: it would end so again."""

    reason: str = ""
    lasting: bool = True
    out_of_memory: bool = False


NO_VERDICT = Outcome(lasting=False)  # the load itself is what remains


def is_due(layout: ExpertLayout, options: Mapping[str, Any]) -> bool:
    """Whether loading with these keywords of `Llama` begins with a trial."""
    mode = read_environment().trial_load
    return mode == "again" or (mode == "on" and _Verdicts(layout, _tried(options)).read() is None)


def try_first(layout: ExpertLayout, options: Mapping[str, Any], waiting: Callable[[], object]) -> None:
    """Tries the model if that is due; calls `waiting` meanwhile, whose exception ends the trial.

    Raises ModelFormatError for a model that ended its trial, now or earlier, AllocationError when it took far more
    memory than it should.
    """
    mode, tried = read_environment().trial_load, _tried(options)
    if mode == "off":
        return
    verdicts = _Verdicts(layout, tried)
    reason = None if mode == "again" else verdicts.read()
    if reason is None:
        outcome = _run(_request(layout, tried), waiting)
        if outcome.out_of_memory:
            raise AllocationError(f"{_name(layout)}: {outcome.reason}; free memory, or {AGAIN}.")
        if outcome.lasting:
            verdicts.write(outcome.reason)
        reason = outcome.reason
    if reason:
        raise ModelFormatError(f"{_name(layout)}: {reason}; {AGAIN}.")


def _name(layout: ExpertLayout) -> str:
    return layout.shards[0].path.name


def _tried(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a trial, those that JSON has; `hooks` beside them, because it changes the graph."""
    chosen = {name: value for name, value in sorted(options.items()) if name in OPTIONS and value is not None}
    return {name: value for name, value in chosen.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    with suppress(TypeError, ValueError):
        json.dumps(value)
        return True
    return False


def _request(layout: ExpertLayout, options: Mapping[str, Any]) -> Request:
    n_slots = min(N_PASS_EXPERTS * layout.n_expert_used, max(layout.n_expert, layout.n_expert_used))
    pool_bytes = n_slots * slot_bytes(layout) if layout.is_moe else 0
    dense_bytes = layout.dense_bytes if layout.is_moe and read_environment().hooks else layout.n_bytes
    needs = memory_needs(layout, N_CTX, N_BATCH).total_bytes(n_slots) + dense_bytes - layout.dense_bytes
    on_device = bool(options.get("n_gpu_layers"))  # drivers map far more than they use
    return Request(
        path=str(layout.shards[0].path.absolute()),
        options=options,
        n_slots_bytes=pool_bytes,
        memory_bytes=0 if on_device else 2 * (needs + pool_bytes) + SPARE_BYTES,
        cpu_s=CPU_S + dense_bytes // CPU_BYTES_PER_S,
    )


class _Verdicts:
    """What is known of one header: {key of the options: reason}, with the build of the library it was tried with."""

    def __init__(self, layout: ExpertLayout, options: Mapping[str, Any]) -> None:
        self._path = cache_folder() / "trials" / f"{header_digest(layout.shards)}.json"
        text = json.dumps([options, read_environment().hooks], sort_keys=True)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self) -> str | None:
        """The reason why the model failed, "" when it passed, None when it was not tried or the file is damaged."""
        found = self._load().get(self._key)
        return found if isinstance(found, str) else None

    def _load(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            data = json.loads(self._path.read_bytes())
            if data["library"] == library.build_identity():
                return dict(data["reasons"])
        return {}

    def write(self, reason: str) -> None:
        """Remembers the reason, where the folder can be written."""
        data = {"library": library.build_identity(), "reasons": {**self._load(), self._key: reason}}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(data).encode())


def _run(request: Request, waiting: Callable[[], object]) -> Outcome:
    """Starts the process and waits for its end. It ends with this one, too: it watches its stdin."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GGML_NO_BACKTRACE"), "1")
    path = os.pathsep.join(folder for folder in sys.path if folder)  # also what this process has added to it
    try:
        process = subprocess.Popen(
            [*COMMAND, json.dumps(vars(request))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | threads | {"MOEGGUF_TRIAL_LOAD": "0", "PYTHONPATH": path},
            start_new_session=True,
        )
    except OSError:
        return NO_VERDICT
    try:
        written = _wait(process, request.wall_s, waiting)
    finally:
        process.kill()
        process.communicate()
    if written is None:
        return Outcome(f"a trial load did not end within {request.wall_s:.0f} s", lasting=False)
    return _outcome(process.returncode, written[0], written[1].decode(errors="replace"), request.cpu_s)


def _wait(process: subprocess.Popen[bytes], wall_s: float, waiting: Callable[[], object]) -> tuple[bytes, bytes] | None:
    """What the process has written to stdout and stderr; None when it did not end within `wall_s`."""
    end = time.monotonic() + wall_s
    stdin, process.stdin = process.stdin, None  # communicate() would close it
    assert stdin is not None
    with stdin:
        while True:
            try:
                return process.communicate(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                waiting()
                if time.monotonic() > end:
                    return None


def _outcome(code: int, answer: bytes, log: str, cpu_s: int) -> Outcome:
    if code == 0:
        return _answered(answer)
    if code > 0:  # llama.cpp never exits: this was another program than Python, or it did not find this package
        return NO_VERDICT
    if code == -signal.SIGXCPU:
        return Outcome(f"a trial load did not end within {cpu_s} s of computing")
    if -code in OUTSIDE_SIGNALS:
        return Outcome(
            f"the system ended a trial load ({_signal_name(-code)}), most likely for memory",
            lasting=False, out_of_memory=True,
        )  # fmt: skip
    why = next((line.strip()[-200:] for line in reversed(log.splitlines()) if any(m in line for m in MARKS)), "")
    if NO_MEMORY in why:
        return Outcome(f"a trial load took more memory than planned ({why})", lasting=False, out_of_memory=True)
    return Outcome(f"llama.cpp ended a trial load with {_signal_name(-code)}{': ' if why else ''}{why}")


def _answered(answer: bytes) -> Outcome:
    """The outcome that the process itself has written."""
    try:
        found = json.loads(answer)
        reason, kind = str(found["reason"]), str(found["kind"])
    except (ValueError, KeyError, TypeError):
        return NO_VERDICT  # of another program, too
    if kind == "memory":
        return Outcome(f"a trial load took more memory than planned ({reason})", lasting=False, out_of_memory=True)
    if kind == "known":
        return NO_VERDICT  # the load itself raises this error
    return Outcome(f"a trial load failed ({reason})" if reason else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe(error: BaseException) -> dict[str, str]:
    """The answer of a process that `error` has ended."""
    text = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, MemoryError):
        return {"kind": "memory", "reason": text}
    known = isinstance(error, MoeggufError | OSError | ImportError)  # not the file's fault, or told by the load itself
    return {"kind": "known" if known else "bare", "reason": text}


def folder() -> Path:
    """Where verdicts are kept."""
    return cache_folder() / "trials"
