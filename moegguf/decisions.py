"""The log of decisions: with MOEGGUF_LOG=debug, moegguf prints its decisions and their reasons (docs/decisions.md).

Each decision is a record of Python's logging. Its text has the event and its fields, and so has `record.decision`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from moegguf.settings import logs_decisions

log = logging.getLogger(__name__)
log.setLevel(logging.WARNING)  # does not inherit the level of another logger


def start_log(handler: logging.Handler | None = None) -> None:
    """Prints decisions on stderr from now on, or passes them to `handler`, if MOEGGUF_LOG is "debug". Raises
    OptionError for an unknown value of this variable."""
    if not logs_decisions():
        return
    log.setLevel(logging.DEBUG)
    log.propagate = False
    if handler is not None or not log.handlers:
        log.handlers = [handler or logging.StreamHandler()]


def is_logged() -> bool:
    """Returns True if decisions are logged."""
    return log.isEnabledFor(logging.DEBUG)


def log_decision(event: str, **fields: object) -> None:
    """Logs a decision. The values of `fields` must have types that JSON has."""
    if log.isEnabledFor(logging.DEBUG):
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        log.debug("%s %s", event, text, extra={"decision": {"event": event, **fields}})


class DecisionHandler(logging.Handler):
    """A log handler that calls a function with the event and the fields of each decision."""

    def __init__(self, take: Callable[[Mapping[str, Any]], object]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        """Passes the decision of a log record to the function."""
        self._take(vars(record)["decision"])
