"""Keeps the last errors that llama.cpp and libmtmd have logged. moegguf's error
messages include them as reasons."""

from __future__ import annotations

import ctypes as c
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from moegguf.native.library import LOG_ERROR, llama_cpp, mtmd

N_KEPT = 3


class ErrorLog:
    """Keeps the last errors that the library named `library` has logged.

    install: sets the library's log callback. The library may call that callback at any
    time. forward: receives every line of the log.
    """

    def __init__(
        self,
        library: str,
        install: Callable[[Any, Any], object],
        forward: Callable[[int, bytes, Any], object],
    ) -> None:
        self._library = library
        self._errors: deque[str] = deque(maxlen=N_KEPT)

        def keep(level: int, text: bytes, user: Any) -> None:
            if level == LOG_ERROR:
                self._errors.append(" ".join(text.decode(errors="replace").split()))
            forward(level, text, user)

        self._callback = llama_cpp().llama_log_callback(keep)
        install(self._callback, None)

    def forget(self) -> None:
        """Discards earlier errors. Called before an operation, so that `reason` returns
        only errors of that operation."""
        self._errors.clear()

    def reason(self) -> str:
        """Returns the last errors, joined with "; ", without a full stop at the end. If
        there are none, returns a text that says so."""
        return "; ".join(self._errors).rstrip(".") or f"{self._library} gives no reason"


@functools.cache
def llama_log() -> ErrorLog:
    """Returns the error log of llama.cpp in this process. A callback that was set
    earlier still receives all lines."""
    bindings = llama_cpp()
    before = bindings.llama_log_callback()
    user_data = c.c_void_p()
    bindings.llama_log_get(c.byref(before), c.byref(user_data))
    return ErrorLog(
        "llama.cpp",
        bindings.llama_log_set,
        lambda level, text, _: before(level, text, user_data),
    )


@functools.cache
def mtmd_log() -> ErrorLog:
    """Returns the error log of libmtmd in this process. If llama.cpp's log is shown,
    libmtmd's lines are shown, too."""
    logger = llama_cpp()._logger

    def forward(level: int, text: bytes, user: Any) -> None:
        # Forwards only in verbose mode; otherwise errors would be shown twice.
        if logger.logger.level <= logging.DEBUG:
            logger.llama_log_callback(level, text, user)

    return ErrorLog("libmtmd", mtmd().mtmd_helper_log_set, forward)
