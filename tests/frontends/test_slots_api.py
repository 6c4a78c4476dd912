"""Tests /slots/N over HTTP: llama-server's actions and replies, a folder for each API
key, and refused file names."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_manager import FakeManager, server_of

from moegguf.serving.clients import owner_of

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def client(manager: FakeManager) -> Iterator[httpx.Client]:
    with server_of(manager, api_keys=("of-ann",), storage_bytes=1000) as url:
        headers = {"authorization": "Bearer of-ann"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
            yield client


def test_a_slot_is_saved_restored_and_erased_for_its_key(
    client: httpx.Client, manager: FakeManager, home: Path
) -> None:
    (home / "slots/x").mkdir(parents=True)
    (home / "slots/x/other").write_bytes(b"x" * 300)
    saved = client.post(
        "/slots/1?action=save", json={"filename": "a.bin", "model": "demo"}
    ).json()
    assert saved.pop("timings")["save_ms"] >= 0
    assert saved == {"id_slot": 1, "filename": "a.bin", "n_saved": 5, "n_written": 99}
    restored = client.post(
        "/slots/0?action=restore&model=demo", json={"filename": "a.bin"}
    ).json()
    assert restored["timings"].keys() == {"restore_ms"} and restored["n_restored"] == 5
    assert client.post("/slots/0?action=erase&model=demo").json() == {
        "id_slot": 0,
        "n_erased": 5,
    }
    owner = owner_of("of-ann")
    file = {"path": str(home / "slots" / owner / "a.bin"), "most_bytes": 700}
    assert manager.slots == [
        ("save", 1, owner, file),
        ("restore", 0, owner, file),
        ("erase", 0, owner, {}),
    ]


@pytest.mark.parametrize(
    "name", ["", "../a", "a/b", ".hidden", "a\0b", "a" * 201, "C:\\a", "ä"]
)
def test_paths_as_filenames_of_slots_get_a_400(
    client: httpx.Client, manager: FakeManager, name: str
) -> None:
    refused = client.post("/slots/0?action=save&model=demo", json={"filename": name})
    assert (
        refused.status_code == 400 and "filename" in refused.json()["error"]["message"]
    )
    assert not manager.slots


@pytest.mark.parametrize(
    "path",
    [
        "/slots/0",
        "/slots/0?action=copy",
        "/slots/x?action=erase",
        "/slots/-1?action=erase",
    ],
)
def test_unknown_actions_and_slots_get_a_400(
    client: httpx.Client, manager: FakeManager, path: str
) -> None:
    refused = client.post(path, json={"filename": "a", "model": "demo"})
    assert refused.status_code == 400 and not manager.slots
    assert client.get("/slots/0").status_code == 405
