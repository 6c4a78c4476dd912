"""Tests the log of decisions: its documented table, its records, and a worker's records
in the server's log."""

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moegguf import decisions
from moegguf.decisions import DecisionHandler, is_logged, log_decision, start_log
from moegguf.errors import OptionError
from moegguf.server.serve import _JsonFormatter

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    before = decisions.log.level, decisions.log.propagate, list(decisions.log.handlers)
    yield
    decisions.log.setLevel(before[0])
    decisions.log.propagate = before[1]
    decisions.log.handlers = before[2]


def logged_in_code() -> dict[str, set[str]]:
    """Returns {event: names of its fields} for all calls to `log_decision` in the
    package that name an event."""
    found = {}
    for path in (ROOT / "moegguf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "log_decision"
            ):
                continue
            # Skips a call without positional arguments, which logs a decision that a
            # worker has sent.
            if node.args:
                event = ast.literal_eval(node.args[0])
                assert event not in found, f"{event} is logged at two places"
                found[event] = {keyword.arg or "" for keyword in node.keywords}
    return found


def test_documentation_lists_every_decision_with_its_fields() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \|",
        (ROOT / "docs" / "decisions.md").read_text(),
        re.MULTILINE,
    )
    assert {
        event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows
    } == logged_in_code()


def test_log_decision_logs_nothing_without_moegguf_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MOEGGUF_LOG", raising=False)
    # The level that `--log-level debug` sets.
    logging.getLogger("moegguf").setLevel(logging.DEBUG)
    try:
        start_log()
        assert not is_logged() and not decisions.log.handlers
        log_decision("model_expired", name="a")
        assert caplog.records == []
    finally:
        logging.getLogger("moegguf").setLevel(logging.NOTSET)


def test_log_decision_with_debug_writes_a_line_on_stderr_and_json_fields(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOEGGUF_LOG", "debug")
    start_log()
    start_log()  # a second call has no effect
    log_decision("model_unloaded", name="a", for_model="b", short_bytes={"RAM": 5})
    assert (
        capsys.readouterr().err
        == "model_unloaded name=a for_model=b short_bytes={'RAM': 5}\n"
    )
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    start_log(handler)
    log_decision("model_unloaded", name="a", for_model="b", short_bytes={"RAM": 5})
    found = json.loads(_JsonFormatter().format(records[0]))
    assert (
        found["event"] == "model_unloaded"
        and found["short_bytes"] == {"RAM": 5}
        and found["level"] == "debug"
    )
    taken = list[object]()
    start_log(DecisionHandler(taken.append))
    log_decision("model_expired", name="a")
    assert taken == [{"event": "model_expired", "name": "a"}] and len(records) == 1


def test_start_log_rejects_another_value_of_moegguf_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOEGGUF_LOG", "loud")
    with pytest.raises(OptionError, match=r"MOEGGUF_LOG.*debug"):
        start_log()
