"""The log of decisions: with MOEGGUF_LOG=debug, moegguf says on stderr why it did what it did (docs/decisions.md).

Each decision is a record of Python's logging, with the event and its fields as text, and in `record.decision`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from moegguf.settings import logs_decisions

log = logging.getLogger(__name__)
log.setLevel(logging.WARNING)  # not by the level of another log


def start_log(handler: logging.Handler | None = None) -> None:
    """Prints decisions on stderr from now on, or passes them to `handler`, where MOEGGUF_LOG=debug. Raises OptionError
    for another value of that variable."""
    if not logs_decisions():
        return
    log.setLevel(logging.DEBUG)
    log.propagate = False
    if handler is not None or not log.handlers:
        log.handlers = [handler or logging.StreamHandler()]


def is_logged() -> bool:
    """Returns whether decisions are logged."""
    return log.isEnabledFor(logging.DEBUG)


def log_decision(event: str, **fields: object) -> None:
    """Logs a decision. Fields have types of JSON."""
    if log.isEnabledFor(logging.DEBUG):
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        log.debug("%s %s", event, text, extra={"decision": {"event": event, **fields}})


class DecisionHandler(logging.Handler):
    """Calls a function with the event and the fields of each decision."""

    def __init__(self, take: Callable[[Mapping[str, Any]], object]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        """logging.Handler's."""
        self._take(vars(record)["decision"])
