"""The library of short names: its table is consistent, and a name means one file of a repository."""

from pathlib import Path

import pytest

from moegguf.errors import ModelNotFoundError, PullError
from moegguf.models.catalog import Catalog
from moegguf.models.names import LibraryModel, fetchable_name, find_in_library, library, nearest_names, parse_name
from moegguf.models.pull import pull
from moegguf.models.selection import select_files


@pytest.mark.parametrize("model", library(), ids=lambda model: model.name)
def test_a_model_of_the_library_is_plausible(model: LibraryModel) -> None:
    assert parse_name(model.name).canonical == model.name
    assert parse_name(model.hub_name).repo == model.repository
    prefix, _, rest = model.file.partition("-00001-of-0000")
    files = [f"{prefix}-0000{n}-of-0000{rest}" for n in range(1, int(rest[0]) + 1)] if rest else [model.file]
    assert select_files([*files, "other-Q2_K.gguf"], model.quantization).files == tuple(files)
    assert 4 < 8 * model.size_bytes / model.n_parameters < 9  # bits of a weight
    assert 0.5 < model.expert_bytes / model.size_bytes < 1
    assert 0 < model.token_bytes < model.expert_bytes and model.dense_bytes > 0


def test_names_are_found_with_and_without_a_tag_and_near_ones_are_named() -> None:
    assert len(library()) == len({model.name for model in library()}) >= 30
    found = find_in_library("GPT-OSS")
    assert found is not None and found.name == "gpt-oss:20b" and find_in_library("gpt-oss:latest") == found
    assert fetchable_name("qwen3:30b") == "hf.co/Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"
    assert fetchable_name("user/repo") == "user/repo" and fetchable_name("gpt") is None
    assert nearest_names("gpt-os:20b")[0] == "gpt-oss:20b"
    with pytest.raises(ModelNotFoundError, match="did you mean 'gpt-oss:20b'"):
        pull("gpt-os:20b", Catalog(), lambda _status: None)


def test_a_model_that_was_fetched_is_found_by_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"is hf\.co/ggml-org/.* Fetch it with `moegguf pull gpt-oss:20b`"):
        Catalog().find("gpt-oss")
    with pytest.raises(PullError, match="HF_HUB_OFFLINE"):
        pull("gpt-oss:20b", Catalog(), lambda _status: None)
    folder = tmp_path / "models--ggml-org--gpt-oss-20b-GGUF" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "gpt-oss-20b-MXFP4.gguf").write_bytes(b"GGUF")
    assert Catalog().find("gpt-oss:20b").path == folder / "gpt-oss-20b-MXFP4.gguf"
    assert pull("gpt-oss:20b", Catalog(), lambda _status: None).name == "hf.co/ggml-org/gpt-oss-20b-GGUF:MXFP4"
