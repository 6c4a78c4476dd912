"""Loads libmoegguf-testing, which can make operations of the store fail, slow down
reads of files, and break the store's bookkeeping. link_device.py calls the library's
functions for simulated devices."""

from __future__ import annotations

import ctypes as c
import functools
from pathlib import Path

from moegguf.errors import LibraryError
from moegguf.native import abi, library
from moegguf.native.store import Store
from moegguf.quantities import Link

ABI = abi.Header(Path(__file__).with_name("testing.h"))
FAULT = ABI.enum("fault_kind")
CORRUPTION = ABI.enum("corruption")


@functools.cache
def load() -> c.CDLL:
    """Returns the testing library, which is loaded once. Raises LibraryError if it was
    not built."""
    library.load()
    try:
        loaded = library.open_part("moegguf-testing")
    except LibraryError as error:
        raise LibraryError(
            "this build of moegguf has no test equipment (libmoegguf-testing), which only a build from the source"
            " folder has; run `make` there."
        ) from error
    ABI.declare(loaded, _check)
    return loaded


def _check(status: int) -> None:
    if status != abi.OK:
        raise library.error(
            status, load().moegguf_testing_last_error().decode(errors="replace")
        )


def arm_fault(kind: str, nth: int, *, sticky: bool = False, errno: int = 0) -> None:
    """Makes the fault of a kind (one of FAULT) occur in the nth operation of the kind,
    counted from now. If `sticky` is true, the fault also occurs in all later operations
    of the kind. An `nth` of 0 disarms the kind. An `errno` of 0 means EIO."""
    load().moegguf_fault_arm(FAULT[kind], nth, sticky, errno)


def limit_faults(path: Path | None) -> None:
    """Limits faults of reads and fstat to the file at `path`; None: they occur for all
    files. Raises OptionError if the file does not exist."""
    load().moegguf_fault_file(None if path is None else bytes(path))


def slow_drive(path: Path, link: Link | None) -> None:
    """Slows the store's reads of this file down to the speed of a drive with this link.
    With None, reads are no longer slowed down.

    Reads share the bandwidth of the link. Raises OptionError if the file does not exist
    or too many files are slow.
    """
    per_ns, latency_ns = (
        (link.bytes_per_s / 1e9, link.latency_s * 1e9) if link else (0.0, 0.0)
    )
    load().moegguf_drive_slow(bytes(path), per_ns, latency_ns)


def count_operations(kind: str) -> int:
    """Returns the number of operations of a kind since the kind was armed; 0 if it is
    not armed. Operations on files that `limit_faults` excludes are not counted."""
    return int(load().moegguf_fault_count(FAULT[kind]))


def corrupt(store: Store, rule: str) -> None:
    """Breaks a rule (one of CORRUPTION) in the bookkeeping of a store. After that, the
    store may only be checked and closed.

    Raises OptionError if no slot is in a state in which the rule could be broken.
    """
    load().moegguf_corrupt(store.handle, CORRUPTION[rule])
