"""Tests the pinned source distribution and the patches.

The distribution is fetched from any index that pip can read, is not built, and has the
pinned digest. Patches are listed, explained, and can be applied twice.
"""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from tools import patches, vendor

NAME = "llama_cpp_python-0.3.36"
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import pathlib

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder) / "llama_cpp_python-0.3.36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: llama_cpp_python\\nVersion: 0.3.36\\n")
    return info.name

def build_wheel(*args):
    raise RuntimeError("llama.cpp would be compiled here")
"""
FILES = {
    "pyproject.toml": PROJECT,
    "backend.py": BACKEND,
    "PKG-INFO": "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.36\n",
    "LICENSE.md": "MIT",
    "llama_cpp/__init__.py": "",
    "vendor/llama.cpp/CMakeLists.txt": "",
    "vendor/llama.cpp/tests/test.cpp": "",
}


@pytest.fixture
def index(tmp_path: Path) -> str:
    """The URL of an index that offers a small distribution with the pinned name and
    version."""
    folder = tmp_path / "simple" / "llama-cpp-python"
    folder.mkdir(parents=True)
    with tarfile.open(folder / f"{NAME}.tar.gz", "w:gz") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(f"{NAME}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    (folder / "index.html").write_text(f'<a href="{NAME}.tar.gz">{NAME}.tar.gz</a>')
    return folder.parent.as_uri()


@pytest.fixture
def pin(index: str, tmp_path: Path) -> dict[str, str]:
    """patches/UPSTREAM with the digest of that distribution."""
    digest = hashlib.sha256(
        (tmp_path / "simple" / "llama-cpp-python" / f"{NAME}.tar.gz").read_bytes()
    ).hexdigest()
    return vendor.read_pin() | {"version": "0.3.36", "sha256": digest}


@pytest.fixture(autouse=True)
def nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses an empty cache, and removes all variables that name package indexes."""
    for name in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "PIP_NO_INDEX",
        "MOEGGUF_LLAMA_SDIST",
    ):
        monkeypatch.delenv(name, raising=False)
    for others in vendor.UV_VARIABLES.values():
        for name in others:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_fetch_takes_the_sdist_from_uvs_index_without_building(
    index: str, pin: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"ours={index}")
    path = vendor.fetch(pin)
    assert path == vendor.cache_path(pin)
    # The second build finds it in the cache.
    monkeypatch.setattr(vendor, "download", None)
    assert vendor.fetch(pin) == path


def test_fetch_without_an_index_and_apply_without_git_explain_the_remedy(
    tmp_path: Path, pin: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    with pytest.raises(
        vendor.VendorError,
        match=r"is a package index reachable.*MOEGGUF_LLAMA_SDIST.*0\.3\.36",
    ):
        vendor.fetch(pin)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(vendor.VendorError, match="git is missing"):
        vendor.apply(vendor.series()[0], tmp_path)


def test_fetch_checks_a_local_sdist_of_any_name(
    index: str, pin: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = (tmp_path / "simple" / "llama-cpp-python" / f"{NAME}.tar.gz").rename(
        tmp_path / "copy.tar.gz"
    )
    monkeypatch.setenv("MOEGGUF_LLAMA_SDIST", str(local))
    vendor.unpack(vendor.fetch(pin), tmp_path / "tree")
    assert [path.name for path in (tmp_path / "tree").rglob("*")] == ["CMakeLists.txt"]
    vendor.extract(local, "", vendor.WANTED_BINDINGS, tmp_path / "bindings")
    assert (tmp_path / "bindings" / "llama_cpp" / "__init__.py").exists()
    with pytest.raises(vendor.VendorError, match="sha256"):
        vendor.fetch(vendor.read_pin())
    monkeypatch.setenv("MOEGGUF_LLAMA_SDIST", str(tmp_path / "missing"))
    with pytest.raises(
        vendor.VendorError, match=r"no file .*missing, which MOEGGUF_LLAMA_SDIST names"
    ):
        vendor.fetch(pin)


def test_fetch_rejects_an_sdist_with_another_hash() -> None:
    pin = vendor.read_pin()
    path = vendor.cache_path(pin)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else")
    with pytest.raises(vendor.VendorError, match="sha256"):
        vendor.fetch(pin)


def test_pip_variables_precede_uv_variables() -> None:
    given = {
        "PIP_INDEX_URL": "https://pip/simple", "UV_DEFAULT_INDEX": "https://uv/simple",
        "UV_INDEX": "one=https://one/simple https://two/?a=b", "UV_FIND_LINKS": "/wheels,https://links",
    }  # fmt: skip
    assert vendor.pip_variables(given) == {
        "PIP_EXTRA_INDEX_URL": "https://one/simple https://two/?a=b",
        "PIP_FIND_LINKS": "/wheels https://links",
    }


def test_patches_are_listed_explained_and_apply_without_fuzz_twice() -> None:
    assert list(patches.problems_of_headers()) == []
    assert list(patches.problems_of_application()) == []
    tree = vendor.prepare()
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")}
    assert vendor.prepare() == tree
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")} == before


def test_problems_of_headers_find_orphan_missing_and_unexplained_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "PATCHES", tmp_path)
    (tmp_path / "README.md").write_text("nothing")
    (tmp_path / "series").write_text("# heading\nmissing.patch\nbare.patch\n")
    (tmp_path / "orphan.patch").write_text("Subject: x\n")
    (tmp_path / "bare.patch").write_text("--- a/src/x.cpp\n+++ b/src/x.cpp\n")
    found = "\n".join(patches.problems_of_headers())
    assert "orphan.patch is not listed" in found
    assert "missing.patch, which does not exist" in found
    assert "bare.patch has no 'Until:'" in found
