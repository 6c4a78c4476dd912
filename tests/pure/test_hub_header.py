"""Tests descriptions and plans of models that are on the Hugging Face hub, not on disk.

Only the beginning of each model file is fetched.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, Fault, Gate, cut_after, status
from gguf_builder import STR, moe

from moegguf.errors import ModelFormatError, ModelNotFoundError, PullError
from moegguf.gguf.experts import read_layout
from moegguf.models import hub as downloads
from moegguf.models.hub import remote_model
from moegguf.models.sources import hub_cache
from moegguf.terminal.facts import estimate_model, model_facts

PATH = "m-Q4_0.gguf"


@pytest.fixture
def data(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Returns the bytes of a 2.7 MB model that the hub offers in u/r.

    The first request for a header fetches 1,000 bytes.
    """
    monkeypatch.setattr(downloads, "FIRST_BYTES", 1000)
    data = moe(n_layer=6, n_expert=16, n_used=4, n_ff=256).build()
    hub.add("u/r", {PATH: data})
    return data


@pytest.fixture
def gates(hub: FakeHub, data: bytes) -> Iterator[list[Fault]]:
    """Makes the hub pause the next two downloads of the model after a tenth of the
    file. Returns the hub's list of faults."""
    hub.faults[PATH] = list(gates := [Gate(len(data) // 10), Gate(len(data) // 10)])
    yield hub.faults[PATH]
    for gate in gates:
        gate.open.set()


def test_estimate_of_a_remote_model_equals_the_estimate_of_its_file(
    gates: list[Fault], data: bytes, tmp_path: Path
) -> None:
    path = tmp_path / PATH
    path.write_bytes(data)
    remote, local = (
        estimate_model(name, {"expert_cache": "50%", "n_ctx": 512})
        for name in ("hf.co/u/r", str(path))
    )
    assert remote["plan"] == local["plan"] | {
        "available_bytes": remote["plan"]["available_bytes"]
    }
    assert "not fetched" in remote["path"] and not remote["fetched"]
    assert remote["expected"]["tokens_per_s_low"] is None and remote["disk"] is None
    assert not list(hub_cache().rglob("*.gguf")), "nothing is kept"
    assert model_facts("hf.co/u/r")["experts"] == model_facts(str(path))["experts"]
    assert gates == [], "a tenth was enough"


def test_remote_model_makes_one_request_and_removes_its_folder(
    hub: FakeHub, data: bytes
) -> None:
    with remote_model("u/r") as entry:
        layout = read_layout(entry.path)
        assert layout.n_expert_total == 96 and entry.size_bytes == len(data)
        folder = entry.path.parent
    assert hub.gets(PATH) == [""], "one request"
    assert folder.is_relative_to(tempfile.gettempdir()) and not folder.exists()


def test_remote_model_reads_the_header_of_each_shard(hub: FakeHub) -> None:
    names = [f"m-{n:05d}-of-00002.gguf" for n in (1, 2)]
    shards = {
        name: moe(n_layer=2, split=(i, 2, 10), il_range=range(i, i + 1)).build()
        for i, name in enumerate(names)
    }
    hub.add("u/split", shards)
    with remote_model("u/split") as entry:
        assert [path.name for path in entry.files] == names
        assert len(read_layout(entry.path).shards) == 2


def test_estimate_counts_a_remote_projector_unless_damaged(
    hub: FakeHub, data: bytes, projector: Callable[[str], Path]
) -> None:
    for repo, content in (
        ("u/see", projector("mlp").read_bytes()),
        ("u/damaged", b"GGUF" + b"x" * 5000),
    ):
        hub.add(repo, {PATH: data, "mmproj-m.gguf": content})
        plan = estimate_model(f"hf.co/{repo}", {"expert_cache": "50%", "n_ctx": 512})[
            "plan"
        ]
        assert bool(plan["projector_bytes"]) == (repo == "u/see")


def test_remote_model_retries_transient_errors_and_raises_others(
    hub: FakeHub, data: bytes
) -> None:
    for fault in (status(503), cut_after(500)):
        hub.faults[PATH] = [fault]
        with remote_model("u/r") as entry:
            assert read_layout(entry.path).n_layer == 6
    for name in ("u/none", "u/r:Q8_0"):
        with pytest.raises(ModelNotFoundError):
            estimate_model(f"hf.co/{name}")


@pytest.mark.parametrize("content", [b"GGUF" + b"x" * 5000, b"<html>"])
def test_remote_model_rejects_files_that_are_not_gguf(
    hub: FakeHub, content: bytes
) -> None:
    hub.add("u/bad", {PATH: content})
    with pytest.raises(ModelFormatError), remote_model("u/bad"):
        pass


def test_remote_model_stops_at_a_header_that_is_too_long(
    hub: FakeHub, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "MOST_BYTES", 1500)
    hub.add(
        "u/long", {PATH: moe().add("general.description", STR, "x" * 400_000).build()}
    )
    with pytest.raises(PullError, match="not complete within"), remote_model("u/long"):
        pass


def test_estimate_offline_makes_no_request(
    hub: FakeHub, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="moegguf pull"):
        estimate_model("hf.co/u/r")
    assert hub.requests == []
