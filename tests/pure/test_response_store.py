"""Tests stored responses: their contents, owners and age limit."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moegguf.errors import BusyError, OptionError, StorageError, UnknownIdError
from moegguf.serving import responses
from moegguf.serving.clients import current_owner
from moegguf.serving.responses import ResponseStore

AGE_S = 100.0


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ResponseStore]:
    made = ResponseStore(tmp_path / "responses", AGE_S, clock)
    yield made
    made.close()


def turn(text: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text.upper()},
    ]


def test_history_returns_the_turns_of_a_conversation_in_order(
    store: ResponseStore,
) -> None:
    store.add({"id": "a"}, None, turn("one"))
    store.add({"id": "b", "n": 1}, "a", turn("two"))
    store.add({"id": "c"}, "a", turn("other"))
    assert store.history("b") == [*turn("one"), *turn("two")]
    assert store.history("c") == [*turn("one"), *turn("other")]
    assert store.get("b") == {"id": "b", "n": 1}


def test_deleted_response_ends_the_history_of_its_continuations(
    store: ResponseStore,
) -> None:
    store.add({"id": "a"}, None, turn("one"))
    store.add({"id": "b"}, "a", turn("two"))
    store.delete("a")
    assert store.get("b") == {"id": "b"}
    for call in (store.history, store.get, store.delete):
        with pytest.raises(UnknownIdError, match="'a' not found"):
            call("a")
    with pytest.raises(UnknownIdError):
        store.history("b")


def test_response_expires_at_its_age_limit_unless_continued(
    store: ResponseStore, clock: Clock
) -> None:
    for name in ("a", "alone"):
        store.add({"id": name}, None, turn(name))
    clock.now_s += AGE_S - 1
    store.add({"id": "b"}, "a", turn("two"))
    clock.now_s += 2
    assert len(store.history("b")) == 4
    with pytest.raises(UnknownIdError):
        store.get("alone")
    clock.now_s += AGE_S
    with pytest.raises(UnknownIdError):
        store.get("b")


def test_start_deletes_expired_responses_of_an_earlier_run(
    tmp_path: Path, clock: Clock, store: ResponseStore
) -> None:
    store.start()
    assert not (tmp_path / "responses").exists(), "nothing was stored yet"
    store.add({"id": "a"}, None, turn("one"))
    store.close()
    assert (tmp_path / "responses" / responses.DATABASE).stat().st_mode & 0o777 == 0o600
    clock.now_s += AGE_S + 1
    later = ResponseStore(tmp_path / "responses", AGE_S, clock)
    later.start()
    assert later._open().execute("SELECT count(*) FROM response") == [(0,)]
    later.close()


def test_response_is_visible_only_to_its_owner_or_to_all_without_owner(
    store: ResponseStore,
) -> None:
    store.add({"id": "open"}, None, turn("one"))
    token = current_owner.set("ann")
    try:
        store.add({"id": "own"}, "open", turn("two"))
        assert len(store.history("own")) == 4
        current_owner.set("bob")
        assert store.get("open")
        for call in (store.history, store.get, store.delete):
            with pytest.raises(UnknownIdError):
                call("own")
        current_owner.set("ann")
        assert store.get("own")
    finally:
        current_owner.reset(token)


def test_add_deletes_the_oldest_responses_above_the_limit(
    store: ResponseStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_BYTES", 1000)
    for name in ("a", "b", "c"):
        store.add({"id": name}, None, turn("x" * 150))
        clock.now_s += 1
    with pytest.raises(UnknownIdError):
        store.get("a")
    assert store.get("b") and store.get("c")


def test_history_rejects_a_conversation_that_is_too_long(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_HISTORY_BYTES", 300)
    store.add({"id": "a"}, None, turn("x" * 80))
    store.add({"id": "b"}, "a", turn("y" * 80))
    assert store.history("a")
    with pytest.raises(OptionError, match="begin a new one"):
        store.history("b")


def test_add_raises_busy_error_if_another_process_has_the_store(
    tmp_path: Path, store: ResponseStore
) -> None:
    store.add({"id": "a"}, None, turn("one"))
    code = (
        "import sys; from pathlib import Path; from moegguf.serving.responses import ResponseStore;"
        "store = ResponseStore(Path(sys.argv[1]), 9.0); store.start()\n"
        "try: store.add({'id': 'b'}, None, [])\nexcept Exception as error: print(type(error).__name__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "responses"],
        capture_output=True,
        text=True,
    )
    assert (
        run.stdout.strip() == BusyError.__name__
        and "another process is using" in run.stderr
    )


def test_damaged_database_raises_storage_error(
    tmp_path: Path, store: ResponseStore
) -> None:
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / responses.DATABASE).write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="damaged"):
        store.add({"id": "a"}, None, [])
