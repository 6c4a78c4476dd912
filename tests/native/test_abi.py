"""Tests wrong arguments to library functions: each raises a typed error, and the
library stays usable."""

import ctypes as c
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_model import FakeModel, Open, make_model

from moegguf.errors import LibraryError, MoeggufError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native import abi, library
from moegguf.native.store import Store, StoreOptions
from moegguf.processor import read_processor

QUIET = StoreOptions(repack=False)


def with_matrix(layout: ExpertLayout, **changes: Any) -> ExpertLayout:
    """Returns the layout with changed fields in its first matrix."""
    first = layout.layers[0]
    matrices = (replace(first.matrices[0], **changes), *first.matrices[1:])
    return replace(
        layout, layers=(replace(first, matrices=matrices), *layout.layers[1:])
    )


def test_library_runs_on_this_processor_and_store_open_rejects_another_abi() -> None:
    needed = (library.find_library() / "CPU_FEATURES").read_text().split()
    assert needed and set(needed) <= read_processor().flags
    handle = c.c_void_p()
    with pytest.raises(OptionError, match=f"ABI {abi.ABI_VERSION}"):
        library.load().moegguf_store_open(c.byref(abi.Config(abi=99)), c.byref(handle))
    assert handle.value is None


def test_library_calls_reject_null_pointers(fake: FakeModel, open_store: Open) -> None:
    lib = library.load()
    store, context = open_store(fake, 4)
    ids = np.zeros(2, np.int32).ctypes.data
    calls: list[tuple[Any, ...]] = [
        (lib.moegguf_store_open, None, None), (lib.moegguf_store_counters, None, c.byref(abi.Counters())),
        (lib.moegguf_store_drain, None, 1.0),
        (lib.moegguf_context_failure, None, c.byref(abi.Failure()), 1),
        (lib.moegguf_context_acquire, None, 0, ids, 2, 1, None, 0, ids),
        (lib.moegguf_context_acquire, context.handle, 0, None, 2, 1, None, 0, ids),
        (lib.moegguf_context_acquire, context.handle, 0, ids, 2, 1, None, 0, None),
        (lib.moegguf_store_counters, store.handle, None),
        (lib.moegguf_store_tier, store.handle, 0, None), (lib.moegguf_store_residency, store.handle, 0, None, 32),
        (lib.moegguf_store_want, store.handle, None, None, 3, 0),
        (lib.moegguf_store_set_policy, store.handle, 0, None), (lib.moegguf_store_set_policy, None, 0, b"lru"),
    ]  # fmt: skip
    for call, *arguments in calls:
        with pytest.raises(OptionError):
            call(*arguments)
    assert lib.moegguf_store_buft(None) is None
    lib.moegguf_store_close(None)
    fake.token(store, context, [0, 1])


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 0}, {"n_layer": -1}, {"n_matrices": 0}, {"n_shards": 0}, {"n_shards": -1}, {"n_mirrors": -1},
        {"matrices": None}, {"shard_paths": None}, {"n_expert_used": None}, {"n_layer": 1 << 30}, {"n_devices": 0},
        {"n_devices": 65}, {"devices": None}, {"device_of_layer": (c.c_int32 * 1)(1)},
        {"device_of_layer": (c.c_int32 * 1)(-1)}, {"devices": (abi.Device * 1)(abi.Device(None, 0))}, {"n_devices": 2},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_store_open_rejects_a_config_with_one_invalid_field(
    fake: FakeModel, change: dict[str, Any]
) -> None:
    matrices = (abi.Matrix * 1)(abi.Matrix(b"m", 0, 0, 0, 8, 4, 4, 0, 0, 0, 64))
    paths = (c.c_char_p * 1)(str(fake.paths[0]).encode())
    # The only layer is on the first device. A config with both devices is invalid,
    # because the second has no layer.
    devices = (abi.Device * 2)(abi.Device(None, 4), abi.Device(None, 4))
    fields: dict[str, Any] = {
        "abi": abi.ABI_VERSION, "n_layer": 1, "n_matrices": 1, "n_shards": 1, "n_devices": 1, "n_readers": 1,
        "matrices": matrices, "shard_paths": paths, "n_expert_used": (c.c_int32 * 1)(2), "devices": devices,
    }  # fmt: skip
    handle = c.c_void_p()
    open_ = library.load().moegguf_store_open
    open_(c.byref(abi.Config(**fields)), c.byref(handle))
    library.load().moegguf_store_close(handle)
    with pytest.raises(OptionError):
        open_(c.byref(abi.Config(**{**fields, **change})), c.byref(handle))


@pytest.mark.parametrize(
    "change",
    [
        {"il": -1}, {"il": 99}, {"n_expert": 0}, {"n_expert": -3}, {"n_expert": 7}, {"n_expert": 1 << 31 - 1},
        {"ne0": 0}, {"ne0": -64}, {"ne0": 63}, {"ne1": 0}, {"ne0": 1 << 62}, {"ne1": 1 << 62},
        {"expert_bytes": 0}, {"expert_bytes": 1}, {"ggml_type": -1}, {"ggml_type": 4}, {"ggml_type": 999},
        {"shard": -1}, {"shard": 1}, {"kind": "up"}, {"offset": (1 << 64) - 4096},
        {"ggml_type": 0, "ne0": 1 << 40, "ne1": 1 << 40, "expert_bytes": 0},
    ],
    ids=str,
)  # fmt: skip
def test_store_rejects_matrices_with_impossible_fields(
    fake: FakeModel, change: dict[str, Any]
) -> None:
    with pytest.raises(OptionError):
        Store(with_matrix(fake.layout, **change), 4, QUIET)


def test_offset_beyond_the_file_fails_only_the_event_of_its_layer(
    fake: FakeModel,
) -> None:
    store = Store(with_matrix(fake.layout, offset=1 << 40), 4, QUIET)
    context = store.context
    with pytest.raises(MoeggufError):
        context.acquire(0, [0, 1])
    assert context.take_failure() is not None
    fake.acquire(store, context, 1, [0, 1])
    store.close()


@pytest.mark.parametrize(
    ("n_slots", "n_used", "options", "words"),
    [
        *((n_slots, 2, {}, "at least one slot") for n_slots in (0, -1)),
        # Wrong, because the layer has 8 experts.
        *((4, n_used, {}, "more experts than it has") for n_used in (0, -1, 9)),
        *(
            (4, 2, {"readers": readers}, "between 1 and 64")
            for readers in (-1, 0, 65, 1000)
        ),
        (4, 2, {"device": "NPU7"}, "NPU7"),
    ],
)
def test_store_rejects_impossible_slots_experts_readers_and_devices(
    tmp_path: Path, n_slots: int, n_used: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        Store(
            make_model(tmp_path, n_used=n_used).layout,
            n_slots,
            replace(QUIET, **options),
        )


@pytest.mark.parametrize("il", [-1, 1, 4, 1 << 30])
@pytest.mark.parametrize("n_slots", [4, 24], ids=["shared", "resident"])
def test_acquire_of_a_layer_without_experts_fails_and_the_next_pass_works(
    tmp_path: Path, open_store: Open, n_slots: int, il: int
) -> None:
    fake = make_model(tmp_path, dense_layers=[1])
    store, context = open_store(fake, n_slots)
    fake.acquire(store, context, 0, [0, 1])
    with pytest.raises(MoeggufError, match="layer without experts"):
        context.acquire(il, [0, 1])
    assert context.take_failure() is not None
    fake.token(store, context, [0, 1])


@pytest.mark.parametrize(
    ("n_used", "n_tokens"), [(0, 1), (2, 0), (-1, 1), (2, -1), (1 << 30, 1 << 30)]
)
def test_acquire_rejects_impossible_numbers_of_tokens_and_experts(
    fake: FakeModel, open_store: Open, n_used: int, n_tokens: int
) -> None:
    store, context = open_store(fake, 4)
    ids = np.zeros(2, np.int32)
    event = library.load().moegguf_context_acquire
    with pytest.raises(OptionError):
        event(
            context.handle,
            0,
            ids.ctypes.data,
            n_used,
            n_tokens,
            None,
            0,
            ids.ctypes.data,
        )
    fake.token(store, context, [0, 1])


def test_scores_forecasts_and_residency_reject_arrays_of_the_wrong_size(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 4)
    with pytest.raises(OptionError, match="32 entries"):
        store.set_scores(np.zeros(31))
    for shape in ((4, 9), (8, 4), (1, 32)):
        with pytest.raises(OptionError, match=r"shape \(4, 8\)"):
            store.set_forecast(np.zeros(shape, np.float32), [0])
    small = np.zeros(3, np.uint8)
    with pytest.raises(OptionError):
        library.load().moegguf_store_residency(store.handle, 0, small.ctypes.data, 3)
    fake.token(store, context, [0, 1])


def test_drain_accepts_any_timeout_and_prefetch_accepts_empty_lists(
    fake: FakeModel, open_store: Open
) -> None:
    store, _ = open_store(fake, 4)
    for timeout_s in (0.0, -1.0, float("inf"), 1e300):
        store.drain(timeout_s)
    store.prefetch([], [])
    assert store.counters()["prefetch_requested"] == 0


LOGGED = """
import sys
from moegguf.native import library
library.load()
base = library._open(library.find_library(), "ggml-base")
for level in (1, 2, 3, 4):  # from DEBUG to ERROR
    base.ggml_log_internal(level, f"level {level}\\n".encode())
"""


def test_ggml_logs_only_errors_and_find_library_names_a_folder_without_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOGGED], capture_output=True, text=True, check=True
    )
    assert (run.stdout, run.stderr) == ("", "level 4\n")
    monkeypatch.setenv("MOEGGUF_LIBRARY", str(tmp_path))
    with pytest.raises(
        LibraryError, match=f"MOEGGUF_LIBRARY is {tmp_path}, which has no libmoegguf"
    ):
        library.find_library()


def test_a_library_that_does_not_load_raises_an_error_with_a_step_for_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / Path(library.load()._name).name).write_bytes(b"no library")
    monkeypatch.setenv("MOEGGUF_LIBRARY", str(tmp_path))
    with pytest.raises(
        LibraryError, match=r"does not load .*, or correct or unset MOEGGUF_LIBRARY\.$"
    ):
        library.load.__wrapped__()
    monkeypatch.delenv("MOEGGUF_LIBRARY")
    ggml = SimpleNamespace(
        ggml_backend_dev_count=lambda: 0, ggml_log_set=lambda *_: None
    )
    monkeypatch.setattr(library, "_open", lambda folder, name: ggml)
    with pytest.raises(
        LibraryError,
        match=r"on this processor\); install moegguf from source on this machine\.$",
    ):
        library._load_backends(tmp_path)


def test_cpu_function_raises_library_error_for_a_function_that_the_backend_lacks() -> (
    None
):
    assert library.cpu_function("ggml_threadpool_new")
    with pytest.raises(
        LibraryError, match="must have the function ggml_none, but lacks it"
    ):
        library.cpu_function("ggml_none")
