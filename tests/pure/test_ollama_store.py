"""Tests reading an Ollama store. moegguf never writes into the store, and does not
follow links that lead out of it."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moegguf.errors import ModelNameError, ModelNotFoundError, OptionError
from moegguf.models.catalog import Catalog
from moegguf.models.sources import ollama_blob, ollama_folders

pytestmark = pytest.mark.usefixtures("any_file_is_a_model")

KIND = "application/vnd.ollama.image."
BAD = "registry.ollama.ai/library/bad/latest"
GO = "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"


class Store:
    """Writes blobs and manifests as Ollama does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs" / f"sha256-{digest}").write_bytes(data)
        return f"sha256:{digest}"

    def layer(self, kind: str, data: bytes) -> dict[str, Any]:
        return {"mediaType": KIND + kind, "digest": self.blob(data), "size": len(data)}

    def manifest(self, name: str, layers: list[dict[str, Any]]) -> Path:
        path = self.folder / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"schemaVersion": 2, "config": {}, "layers": layers})
        )
        return path

    def model(self, name: str, data: bytes = b"weights", **texts: bytes) -> Path:
        return self.manifest(
            name,
            [self.layer("model", data), *(self.layer(k, v) for k, v in texts.items())],
        )


@pytest.fixture
def store(tmp_path: Path, catalog: Catalog) -> Store:
    return Store(tmp_path / "ollama")


def names() -> list[str]:
    return sorted(
        entry.name for entry in Catalog().entries() if entry.source == "ollama"
    )


def test_catalog_reads_all_layers_of_an_ollama_model(store: Store) -> None:
    texts = {
        "template": GO.encode(),
        "system": b"Be brief.",
        "params": json.dumps(
            {"temperature": 0.6, "stop": ["<|end|>"], "unknown": 1}
        ).encode(),
        "messages": json.dumps([{"role": "user", "content": "Hi"}]).encode(),
        "license": b"MIT",
        "projector": b"eyes",
    }
    store.model("registry.ollama.ai/library/Mixtral/8x7b", **texts)
    entry = Catalog().find("mixtral:8x7b")
    assert (entry.name, entry.source) == ("Mixtral:8x7b", "ollama")
    assert entry.path.read_bytes() == b"weights"
    assert entry.mmproj and entry.mmproj.read_bytes() == b"eyes"
    assert entry.size_bytes == len(b"weightseyes")
    assert (
        len(entry.digest) == 64
        and entry.digest != entry.weights == hashlib.sha256(b"weights").hexdigest()
    )
    assert (entry.system, entry.template, entry.license) == ("Be brief.", None, "MIT")
    assert entry.parameters == {"temperature": 0.6, "stop": ["<|end|>"]}
    assert entry.messages == ({"role": "user", "content": "Hi"},)
    assert names() == ["Mixtral:8x7b"]


@pytest.mark.parametrize(
    ("manifest", "shown", "asked"),
    [
        (
            "registry.ollama.ai/library/llama3/latest",
            "llama3:latest",
            ["llama3", "ollama:llama3", "OLLAMA:Llama3"],
        ),
        (
            "registry.ollama.ai/me/mine/v1",
            "me/mine:v1",
            ["me/mine:v1", "ollama:me/mine:v1"],
        ),
        (
            "hf.co/u/r-GGUF/Q4_K_M",
            "hf.co/u/r-GGUF:Q4_K_M",
            ["u/r-gguf:q4_k_m", "hf.co/u/r-GGUF:Q4_K_M"],
        ),
        ("example.com/a/b/c", "example.com/a/b:c", ["example.com/a/b:c"]),
    ],
)
def test_catalog_finds_ollama_models_by_their_names(
    store: Store, manifest: str, shown: str, asked: list[str]
) -> None:
    store.model(manifest)
    assert names() == [shown]
    for name in asked:
        assert Catalog().find(name).name == shown
        assert Catalog(paths=False).find(name).path.read_bytes() == b"weights"


def test_own_name_precedes_an_ollama_name_and_ollama_models_sets_the_folder(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.model("registry.ollama.ai/library/demo/latest")
    assert Catalog().find("demo").source == "demo"
    assert Catalog().find("ollama:demo").source == "ollama"
    assert [entry.source for entry in Catalog().entries("demo")] == ["demo"]
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ollama_folders() == [
        tmp_path / ".ollama/models",
        Path("/usr/share/ollama/.ollama/models"),
    ]
    monkeypatch.setenv("OLLAMA_MODELS", "~/elsewhere")
    assert ollama_folders() == [tmp_path / "elsewhere"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda store, path: path.write_text("{"),
        lambda store, path: path.write_text("[" * 100_000),
        lambda store, path: store.manifest(BAD, []),
        lambda store, path: store.manifest(
            BAD,
            [
                store.layer("model", b"a"),
                store.layer("adapter", b"one"),
                store.layer("adapter", b"two"),
            ],
        ),
        lambda store, path: store.manifest(
            BAD, [store.layer("model", b"a") | {"digest": "sha256:../../x"}]
        ),
        lambda store, path: store.manifest(
            BAD, [store.layer("model", b"a") | {"size": 99}]
        ),
        lambda store, path: store.model(BAD, params=b'{"num_ctx": "many"}'),
        lambda store, path: (
            store.folder / "blobs" / f"sha256-{hashlib.sha256(b'bad').hexdigest()}"
        ).unlink(),
        lambda store, path: path.rename(path.with_name("two words")),
        lambda store, path: path.write_bytes(b" " * (5 << 20)),
    ],
)
def test_catalog_leaves_out_a_damaged_ollama_model(
    store: Store, damage: Callable[[Store, Path], Any]
) -> None:
    store.model("registry.ollama.ai/library/good/latest")
    path = store.model(BAD, b"bad")
    damage(store, path)
    assert names() == ["good:latest"]
    with pytest.raises(ModelNotFoundError):
        Catalog().find("bad")


def test_catalog_ignores_links_out_of_the_ollama_store(
    store: Store, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"weights")
    path = store.model(BAD, b"weights")
    blob = next((store.folder / "blobs").iterdir())
    blob.unlink()
    blob.symlink_to(secret)
    assert names() == []
    blob.unlink()
    blob.write_bytes(b"weights")
    assert names() == ["bad:latest"]
    (tmp_path / "manifest").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "manifest")
    assert names() == []


@pytest.mark.parametrize(
    "digest",
    [
        "", "sha256:", "sha256:../../x", "sha256-" + "g" * 64, "sha256:" + "0" * 63, "/etc/passwd",
        "sha256:" + "0" * 64 + "\n", "sha512:" + "0" * 64, None, "sha256:" + "０" * 64,
    ],
)  # fmt: skip
def test_ollama_blob_rejects_digests_other_than_64_hexadecimal_digits(
    store: Store, digest: Any
) -> None:
    with pytest.raises(ModelNameError, match="a digest must be"):
        ollama_blob(store.folder, digest)
    for method in (Catalog().blobs.has, Catalog().blobs.path):
        with pytest.raises(ModelNameError, match="a digest must be"):
            method(digest)


def test_catalog_never_writes_into_the_ollama_store(store: Store) -> None:
    store.model("registry.ollama.ai/library/llama3/latest", system=b"Be brief.")
    before = {path: path.stat() for path in sorted(store.folder.rglob("*"))}
    for path in [*before, store.folder]:
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    catalog = Catalog()
    with pytest.raises(OptionError, match="`ollama rm`"):
        catalog.remove("llama3")
    copied = catalog.copy("llama3", "mine")
    assert copied.system == "Be brief." and copied.path == catalog.find("llama3").path
    catalog.remove("mine")
    assert {
        path: path.stat().st_mtime_ns for path in sorted(store.folder.rglob("*"))
    } == {path: info.st_mtime_ns for path, info in before.items()}
    for path in [store.folder, *before]:
        os.chmod(path, 0o755 if path.is_dir() else 0o644)
