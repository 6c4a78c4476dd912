"""The devices of ggml's backends that have memory of their own: which one holds experts, and what is free there."""

from __future__ import annotations

import ctypes as c
import json
import subprocess
from typing import Any

from moegguf.child import child_command, child_environment
from moegguf.engine.machine import Device
from moegguf.errors import BudgetError, OptionError
from moegguf.native import library

NO_GPU = (
    "a vram_cache, and any placement but 'auto' and 'cpu', need a GPU, and this build of moegguf sees none (`moegguf"
    " doctor` lists devices); leave them out, or build with a backend for your GPU."
)
QUERY_S = 60  # a driver may take long to start

GPU = 1  # enum ggml_backend_dev_type


def all_devices() -> tuple[Any, list[int]]:
    """libggml, which the native library has loaded, with the functions about devices declared; the address of each
    device of every backend."""
    ggml = library.ggml()
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_dev_count": (c.c_size_t, []),
        "ggml_backend_dev_get": (c.c_void_p, [c.c_size_t]),
        "ggml_backend_dev_name": (c.c_char_p, [c.c_void_p]),
        "ggml_backend_dev_description": (c.c_char_p, [c.c_void_p]),
        "ggml_backend_dev_type": (c.c_int, [c.c_void_p]),
        "ggml_backend_dev_backend_reg": (c.c_void_p, [c.c_void_p]),
        "ggml_backend_reg_name": (c.c_char_p, [c.c_void_p]),
        "ggml_backend_dev_memory": (None, [c.c_void_p, c.POINTER(c.c_size_t), c.POINTER(c.c_size_t)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml, [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]


def read_device(ggml: Any, handle: int, index: int) -> Device:
    """The device at this address, with what is free of its memory now."""
    free, total = c.c_size_t(), c.c_size_t()
    ggml.ggml_backend_dev_memory(handle, c.byref(free), c.byref(total))
    name, description = (
        call(handle).decode(errors="replace")
        for call in (ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description)
    )
    return Device(name, index, free.value, total.value, description, handle)


def gpus() -> list[Device]:
    """Every device of the kind that llama.cpp puts layers on, in its order, remote ones first; empty without any."""
    ggml, handles = all_devices()

    def is_local(handle: int) -> bool:
        return bool(ggml.ggml_backend_reg_name(ggml.ggml_backend_dev_backend_reg(handle)) != b"RPC")

    found = sorted((handle for handle in handles if ggml.ggml_backend_dev_type(handle) == GPU), key=is_local)
    return [read_device(ggml, handle, index) for index, handle in enumerate(found)]


def has_gpu() -> bool:
    """Whether there is a GPU that this build can use. Unlike `gpus` it takes no memory of one."""
    ggml, handles = all_devices()
    return any(ggml.ggml_backend_dev_type(handle) == GPU for handle in handles)


def find_gpus(name: str | None = None) -> list[Device]:
    """The GPU of this name; None: every one.

    Raises BudgetError where there is no GPU, OptionError for another name.
    """
    found = gpus()
    if not found:
        raise BudgetError(NO_GPU)
    chosen = [device for device in found if name in (None, device.name)]
    if not chosen:
        names = ", ".join(device.name for device in found)
        raise OptionError(f"there is no GPU named {name!r}; there are: {names}.")
    return chosen


def query_gpus() -> list[Device]:
    """`gpus()` of a process of its own: a driver keeps some memory of a device for every process that asks it.

    Raises BudgetError when it ends without an answer.
    """
    command = child_command("moegguf.engine.devices")
    try:
        asked = subprocess.run(command, capture_output=True, env=child_environment(), timeout=QUERY_S, check=False)
        return [Device(**fields) for fields in json.loads(asked.stdout)]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise BudgetError(f"the devices of this machine could not be listed ({error}); try `moegguf doctor`.") from None


if __name__ == "__main__":
    print(json.dumps([vars(device) for device in gpus()]))
