"""Lists the devices of ggml's backends, and reads how much memory is free on them."""

from __future__ import annotations

import ctypes as c
import functools
import json
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from moegguf.child import child_command, child_environment
from moegguf.engine.machine import Device
from moegguf.errors import BudgetError, OptionError
from moegguf.native import library
from moegguf.options import BUDGETS

NO_GPU = (
    f"{BUDGETS['VRAM']}, and a placement other than 'auto' and 'cpu', need a GPU, but this build of moegguf sees none"
    " (`moegguf doctor` lists devices); leave these options out, or install a backend for your GPU (docs/install.md)."
)
# Time limit in seconds for the process that `query_gpus` starts; a driver may take a
# long time to start.
QUERY_S = 60

# Names of the values of enum ggml_backend_dev_type.
KINDS = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")


class BackendDevice(NamedTuple):
    """A device of a ggml backend. handle: address of the ggml_backend_dev. kind: one of
    KINDS, or "type N" for a number that is not in KINDS."""

    handle: int
    name: str
    description: str
    backend: str
    kind: str

    def memory(self) -> tuple[int, int]:
        """Returns (free bytes, total bytes). The call makes some drivers reserve device
        memory for this process."""
        free = c.c_size_t()
        total = c.c_size_t()
        _ggml().ggml_backend_dev_memory(self.handle, c.byref(free), c.byref(total))
        return free.value, total.value


@functools.cache
def _ggml() -> Any:
    """Returns libggml, which the native library has loaded, with the signatures of its
    device functions declared."""
    ggml = library.ggml()
    name = c.c_char_p
    device = c.c_void_p
    size = c.POINTER(c.c_size_t)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "dev_count": (c.c_size_t, []),
        "dev_get": (device, [c.c_size_t]),
        "dev_name": (name, [device]),
        "dev_description": (name, [device]),
        "dev_type": (c.c_int, [device]),
        "dev_backend_reg": (device, [device]),
        "reg_name": (name, [device]),
        "dev_memory": (None, [device, size, size]),
    }
    for short, (result, arguments) in signatures.items():
        function = getattr(ggml, f"ggml_backend_{short}")
        function.restype = result
        function.argtypes = arguments
    return ggml


def all_devices() -> list[BackendDevice]:
    """Returns every device of every backend that the native library has loaded."""
    ggml = _ggml()
    found = list[BackendDevice]()
    for handle in map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count())):
        backend = ggml.ggml_backend_reg_name(ggml.ggml_backend_dev_backend_reg(handle))
        said = (
            ggml.ggml_backend_dev_name(handle),
            ggml.ggml_backend_dev_description(handle),
            backend,
        )
        kind = ggml.ggml_backend_dev_type(handle)
        name, about, of = (text.decode(errors="replace") for text in said)
        found.append(
            BackendDevice(
                handle,
                name,
                about,
                of,
                KINDS[kind] if 0 <= kind < len(KINDS) else f"type {kind}",
            )
        )
    return found


def gpus() -> list[Device]:
    """Returns the GPUs to which llama.cpp may assign layers, in llama.cpp's order:
    remote GPUs (RPC) come first. Integrated GPUs are left out."""
    found = sorted(
        (found for found in all_devices() if found.kind == "GPU"),
        key=lambda found: found.backend != "RPC",
    )
    return [
        Device(of.name, i, *of.memory(), of.description, of.handle)
        for i, of in enumerate(found)
    ]


def has_gpu() -> bool:
    """Returns True if ggml has found a GPU, ignoring integrated GPUs. Unlike `gpus`,
    this call does not reserve memory on the GPU."""
    return any(device.kind == "GPU" for device in all_devices())


def find_gpus(name: str | None = None) -> list[Device]:
    """Returns a list with the GPU that has this name, or with all GPUs if `name` is
    None.

    Raises BudgetError if there is no GPU, and OptionError if no GPU has this name.
    """
    found = gpus()
    if not found:
        raise BudgetError(NO_GPU)
    return found if name is None else [find_device(found, name)]


def find_device(devices: Sequence[Device], name: str) -> Device:
    """Returns the device with this name. Raises OptionError if there is none."""
    for device in devices:
        if device.name == name:
            return device
    names = ", ".join(device.name for device in devices)
    raise OptionError(f"there is no GPU named {name!r}; the GPUs are: {names}.")


def query_gpus() -> list[Device]:
    """Returns the result of `gpus()` in a separate process, so that drivers reserve no
    device memory for this process. The `handle` of each device is valid only in that
    process.

    Raises BudgetError if that process cannot be started, ends without an answer, or
    takes longer than QUERY_S.
    """
    command = child_command("moegguf.engine.devices")
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            env=child_environment(),
            timeout=QUERY_S,
            check=False,
        )
        return [Device(**fields) for fields in json.loads(asked.stdout)]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise BudgetError(
            f"the GPUs of this machine could not be listed ({error}); run `moegguf doctor` to see why, or use placement"
            " 'cpu'."
        ) from None


if __name__ == "__main__":
    print(json.dumps([vars(device) for device in gpus()]))
