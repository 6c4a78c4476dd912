"""Tests the catalog: models are found by name, listed, described and removed."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from catalog_helpers import cache, names
from fake_hub import FakeHub
from gguf_builder import F32, U32, moe

from moegguf.errors import ModelNameError, ModelNotFoundError, OptionError, PullError
from moegguf.models.catalog import Catalog, find_model
from moegguf.models.details import parameters_of
from moegguf.models.pull import pull
from moegguf.models.recipe import Recipe
from moegguf.models.sources import hub_cache

pytestmark = pytest.mark.usefixtures("catalog", "any_file_is_a_model")


# Looking up


def test_find_accepts_a_path_as_the_name(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    for name in (
        "a.gguf",
        "models/b-00001-of-00002.gguf",
        "models/b-00002-of-00002.gguf",
    ):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    entry = catalog.find("./a.gguf")
    assert (entry.source, entry.name, entry.size_bytes) == (
        "path",
        str(tmp_path / "a.gguf"),
        6,
    )
    assert catalog.find(entry.name).digest == entry.digest
    split = catalog.find("models")
    assert [path.name for path in split.files] == [
        "b-00001-of-00002.gguf",
        "b-00002-of-00002.gguf",
    ]
    assert find_model("models") == Path("models/b-00001-of-00002.gguf")
    assert "a.gguf" not in str(names())


def test_catalog_without_paths_opens_and_names_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.gguf").write_bytes(b"secret")
    monkeypatch.chdir(tmp_path)
    served = Catalog(paths=False)
    for name in (
        str(tmp_path / "secret.gguf"),
        "./secret.gguf",
        "../x/secret.gguf",
        str(tmp_path),
        ".",
        "~",
    ):
        with pytest.raises(ModelNameError):
            served.find(name)
    for name in ("secret.gguf", "secre.gguf", "x/secret.gguf"):
        with pytest.raises(ModelNotFoundError) as refused:
            served.find(name)
        assert "secret.gguf'?" not in str(refused.value)
    with pytest.raises(ModelNotFoundError):
        served.find("")


@pytest.mark.parametrize("has_folder", [False, True])
def test_catalog_without_paths_puts_no_path_or_command_into_errors(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool
) -> None:
    if has_folder:
        (tmp_path / "known.gguf").write_bytes(b"GGUF")
        monkeypatch.setenv("MOEGGUF_MODELS", str(tmp_path))
    (tmp_path / "gone.gguf").write_bytes(b"GGUF")
    catalog.create("mine", Recipe(from_=str(tmp_path / "gone.gguf")))
    (tmp_path / "gone.gguf").unlink()
    for name in (
        "",
        "xyzzy",
        "knwn",
        "demmo",
        "xyzzy.gguf",
        "user/repo",
        "hf.co/user/repo:Q4_K_M",
        "mine",
    ):
        with pytest.raises(ModelNotFoundError) as refused:
            Catalog(paths=False).find(name)
        assert not re.search(
            r"path|moegguf |MOEGGUF_|folder|" + re.escape(str(tmp_path)),
            str(refused.value),
        ), name
    with pytest.raises(
        ModelNotFoundError, match="no model named 'demmo'; did you mean 'demo'"
    ):
        Catalog(paths=False).find("demmo")
    monkeypatch.setattr("moegguf.models.sources.demo_path", lambda: None)
    with pytest.raises(
        ModelNotFoundError,
        match=r"^the demo model .* is not in this installation; [^/]*$",
    ):
        Catalog(paths=False).find("demo")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets MOEGGUF_MODELS to a folder with two models, a split model, a model in a
    subfolder and a text file."""
    big = [f"Big-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    for name in ("Qwen-Q4_0.gguf", *big, "mix/mix.gguf", "two words.gguf", "notes.txt"):
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF" if name.endswith("gguf") else b"")
    monkeypatch.setenv("MOEGGUF_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def test_find_compares_file_names_without_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = [
        "Big-00001-of-00003.GGUF",
        "Big-00002-of-00003.GGUF",
        "big-00003-OF-00003.gguf",
    ]
    for name in ("one/Chat.GGUF", "one/MMPROJ-Chat.Gguf", "Tiny.Gguf", *split):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.setenv("MOEGGUF_MODELS", str(tmp_path))
    assert {"Big:latest", "Chat:latest", "Tiny:latest"} < set(names())
    catalog = Catalog()
    for name in ("chat", "CHAT.gguf", tmp_path / "one" / "Chat.GGUF", tmp_path / "one"):
        entry = catalog.find(name)
        assert (entry.path.name, entry.mmproj) == (
            "Chat.GGUF",
            tmp_path / "one" / "MMPROJ-Chat.Gguf",
        )
    assert [path.name for path in catalog.find("big").files] == split


def test_find_model_resolves_file_names_in_the_models_folder(folder: Path) -> None:
    for name, file in (
        ("Qwen-Q4_0", "Qwen-Q4_0.gguf"), ("qwen-q4_0", "Qwen-Q4_0.gguf"), ("qwen-q4_0.gguf", "Qwen-Q4_0.gguf"),
        ("big-q8_0", "Big-Q8_0-00001-of-00002.gguf"), ("mix", "mix/mix.gguf"),
        ("big-q8_0-00001-of-00002:latest", "Big-Q8_0-00001-of-00002.gguf"),
        # A file's path finds that file, whatever its kind. A folder's path finds the
        # only model in the folder.
        (folder / "notes.txt", "notes.txt"), (folder / "mix", "mix/mix.gguf"),
    ):  # fmt: skip
        assert find_model(name) == folder / file
    with pytest.raises(ModelNotFoundError, match="has 3 models"):
        find_model(folder)
    for wrong, words in (
        ("qwen-q4_1", "did you mean 'qwen-q4_0'"), ("xyzzy", "`moegguf list` shows"), ("", "try 'demo'"),
        ("dem", "'demo'"), (folder / "Qwen-Q4_O.gguf", "check the path"),
    ):  # fmt: skip
        with pytest.raises(ModelNotFoundError, match=words):
            find_model(wrong)


def test_entries_list_each_file_of_moegguf_models_once(
    catalog: Catalog, folder: Path
) -> None:
    listed = [entry for entry in catalog.entries() if entry.source == "folder"]
    assert sorted(entry.name for entry in listed) == [
        "Big-Q8_0:latest", "Qwen-Q4_0:latest", "mix:latest", "two-words:latest"
    ]  # fmt: skip
    for entry in listed:
        assert catalog.find(entry.name) == entry
        assert Catalog(paths=False).find(entry.name.lower()) == entry
    assert len(catalog.find("big-q8_0").files) == 2
    with pytest.raises(OptionError, match="a file in the folder MOEGGUF_MODELS"):
        catalog.remove("big-q8_0")


def test_find_resolves_models_in_the_hub_cache(catalog: Catalog) -> None:
    shards = {f"BF16/M-BF16-0000{n}-of-00002.gguf": bytes([n]) * 10 for n in (1, 2)}
    folder = cache(
        "User/Repo",
        {
            "M-Q8_0.gguf": b"8",
            "mmproj-F16.gguf": b"m",
            **shards,
            "N-Q2_K-00001-of-00003.gguf": b"1",
        },
    )
    (folder / "blobs" / ("f" * 64 + ".incomplete")).write_bytes(b"half")
    cache("legacy", {"x-Q4_0.gguf": b"x"})
    assert sorted(names("hf.co")) == ["hf.co/User/Repo:BF16", "hf.co/User/Repo:Q8_0"]
    entry = catalog.find("user/repo")
    assert entry.name == "hf.co/User/Repo:Q8_0"
    assert entry.digest == hashlib.sha256(b"8").hexdigest()
    assert (
        entry.mmproj
        and entry.mmproj.name == "mmproj-F16.gguf"
        and entry.size_bytes == 2
    )
    assert [path.name for path in catalog.find("hf.co/user/repo:bf16").files] == [
        path[5:] for path in shards
    ]
    for missing in ("user/repo:Q2_K", "user/repo:Q4_K_M", "user/other"):
        with pytest.raises(
            ModelNotFoundError, match=r"fetch it with `moegguf pull hf\.co/user/"
        ):
            catalog.find(missing)


def test_hub_cache_prefers_the_newest_commit_and_falls_back_to_older_ones(
    catalog: Catalog,
) -> None:
    repository = cache(
        "u/r", {"x-Q4_0.gguf": b"old", "x-Q8_0.gguf": b"old 8"}, "a" * 40
    )
    cache("u/r", {"x-Q4_0.gguf": b"new"}, "b" * 40)
    assert catalog.find("u/r:q4_0").path.read_bytes() == b"new"
    assert catalog.find("u/r:q8_0").path.read_bytes() == b"old 8"
    assert sorted(names("hf.co")) == ["hf.co/u/r:Q4_0", "hf.co/u/r:Q8_0"]
    for blob in (repository / "blobs").iterdir():  # a broken link is not a model
        blob.unlink()
    assert names("hf.co") == []


def test_find_model_imports_no_network_package(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"x")
    code = (
        "import sys\nfrom moegguf.models.catalog import find_model\nfrom moegguf.models.catalog import Catalog\n"
        f"find_model({str(tmp_path / 'x.gguf')!r}); find_model('demo'); Catalog().entries()\n"
        "print([name for name in ('huggingface_hub', 'httpx2', 'httpx', 'tqdm', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


# Tests of removing models from the Hugging Face cache


def test_remove_deletes_only_the_files_of_a_cached_model(catalog: Catalog) -> None:
    folder = cache(
        "u/r",
        {
            "x-Q4_0.gguf": b"4",
            "x-Q8_0.gguf": b"8",
            "mmproj-F16.gguf": b"m",
            "README.md": b"r",
        },
    )
    cache("u/r", {"x-Q4_0.gguf": b"4 new"}, "b" * 40)
    assert catalog.remove("u/r:q4_0").name == "hf.co/u/r:Q4_0"
    assert names("hf.co") == ["hf.co/u/r:Q8_0"]
    kept = catalog.find("u/r:q8_0")
    assert kept.path.read_bytes() == b"8" and kept.mmproj
    assert len(list((folder / "blobs").iterdir())) == 3
    catalog.remove("u/r:q8_0")
    assert [path.read_bytes() for path in (folder / "blobs").iterdir()] == [b"r"]


def test_remove_keeps_cached_files_that_a_copy_still_needs(
    catalog: Catalog, hub: FakeHub
) -> None:
    hub.add("u/r", {"x-Q4_K_M.gguf": b"4" * 1000})
    pull("u/r", catalog, lambda status: None)
    folder = hub_cache() / "models--u--r"
    catalog.copy("u/r", "mine")
    catalog.remove("u/r")
    assert names("hf.co") == []
    with pytest.raises(ModelNotFoundError):
        catalog.find("u/r")
    assert catalog.find("mine").path.read_bytes() == b"4" * 1000
    assert pull("u/r", catalog, lambda status: None).name == "hf.co/u/r:Q4_K_M", (
        "the name comes back"
    )
    assert (
        names("hf.co") == ["hf.co/u/r:Q4_K_M"] and len(hub.gets("x-Q4_K_M.gguf")) == 1
    )
    catalog.remove("u/r")
    cache("u/r", {"x-Q8_0.gguf": b"8"}, "b" * 40)
    assert catalog.find("u/r").name == "hf.co/u/r:Q8_0", (
        "a removed name does not hide its neighbours"
    )
    catalog.remove("u/r:q8_0")
    catalog.remove("mine")
    assert list((folder / "blobs").iterdir()) == []


# Details


def test_parameters_of_a_name_override_parameters_of_its_file(
    catalog: Catalog, tmp_path: Path
) -> None:
    assert parameters_of(catalog.find("demo")) == {"temperature": 0.0}
    assert catalog.create("same", Recipe(from_="demo")).parameters == {}
    warm = catalog.create(
        "warm", Recipe(from_="demo", parameters={"temperature": 0.5, "top_k": 3})
    )
    assert parameters_of(warm) == {"temperature": 0.5, "top_k": 3}
    odd = (
        moe()
        .add("general.sampling.temp", F32, -3)
        .add("general.sampling.top_k", U32, 20)
    )
    assert parameters_of(catalog.find(odd.write(tmp_path / "odd.gguf"))) == {
        "top_k": 20
    }
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    assert parameters_of(catalog.find(tmp_path / "cut.gguf")) == {}


@pytest.mark.parametrize("how", ["off", "ngram", "mtp", "auto"])
def test_draft_method_replaces_the_draft_model_of_the_base(
    catalog: Catalog, how: str
) -> None:
    drafted = catalog.create("drafted", Recipe(from_="demo", draft="demo"))
    assert drafted.draft == catalog.find("demo").path
    made = catalog.create("made", Recipe(from_="drafted", draft=how))
    assert (made.draft, made.parameters) == (None, {"draft": how})
    assert f'PARAMETER draft "{how}"' in catalog.modelfile(made)


# Tests of the Hugging Face cache's location, and of a removal that fails


def test_hub_cache_reads_the_environment_at_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub_cache() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert hub_cache() == tmp_path / "elsewhere"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert hub_cache() == tmp_path / "cache" / "huggingface" / "hub"


def test_remove_keeps_the_name_of_a_file_that_cannot_be_deleted(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache("u/r", {"x-Q4_0.gguf": b"4"})
    # A reference to a commit that does not exist, which must not affect the removal.
    (folder / "refs" / "other").write_text("f" * 40)

    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "unlink", Mock(side_effect=PermissionError(1, "not permitted"))
        )
        with pytest.raises(PullError, match=r"cannot be removed .*not permitted"):
            catalog.remove("u/r")
    assert names("hf.co") == ["hf.co/u/r:Q4_0"]
    catalog.remove("u/r")
    assert names("hf.co") == []
