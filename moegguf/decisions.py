"""Logs moegguf's decisions, such as a chosen placement, if MOEGGUF_LOG is "debug" when
`start_log` is called. See docs/decisions.md.

Each decision is a record of Python's `logging`. The record's message and its attribute
`decision` both contain the event's name and fields.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from moegguf.settings import logs_decisions

log = logging.getLogger(__name__)
log.setLevel(logging.WARNING)  # does not inherit the level of another logger


def start_log(handler: logging.Handler | None = None) -> None:
    """Turns the log on if MOEGGUF_LOG is "debug". Decisions then go to `handler` if it
    is given, otherwise to the handler that is already set, or else to stderr. Raises
    OptionError if the variable has an unknown value."""
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
    """Logs a decision if the log is on. The values of `fields` must be valid in
    JSON."""
    if is_logged():
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        log.debug("%s %s", event, text, extra={"decision": {"event": event, **fields}})


class DecisionHandler(logging.Handler):
    """A log handler that calls `take` with a mapping for each decision: the event's
    name as "event", and the fields."""

    def __init__(self, take: Callable[[Mapping[str, Any]], object]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        """Passes the decision of a log record to `take`."""
        self._take(vars(record)["decision"])
