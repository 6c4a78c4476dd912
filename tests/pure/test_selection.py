"""Tests which files of a repository a tag selects, and the library of short names.

The library's table is consistent, and each name selects one file of a repository.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegguf.errors import ModelNotFoundError, PullError
from moegguf.models.catalog import Catalog
from moegguf.models.names import (
    LibraryModel,
    fetchable_name,
    find_in_library,
    library,
    nearest_names,
    parse_name,
)
from moegguf.models.pull import pull
from moegguf.models.selection import (
    is_model,
    models_in,
    select_files,
    without_incomplete,
)

USUAL = [
    "README.md", "imatrix_unsloth.dat", "Model.imatrix.gguf", "Model-IQ4_XS.gguf", "Model-Q2_K.gguf",
    "Model-Q4_K_M.gguf", "Model-Q8_0.gguf", "Model-UD-Q4_K_XL.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf",
    "mtp-Model-Q4_K_M.gguf", "eagle3-Model-Q4_K_M.gguf",
    "dflash-Model-Q4_K_M.gguf", "dspark-Model-Q4_K_M.gguf",
    "BF16/Model-BF16-00001-of-00003.gguf", "BF16/Model-BF16-00002-of-00003.gguf",
    "BF16/Model-BF16-00003-of-00003.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "tag", "file"),
    [
        *((USUAL, tag, file) for tag, file in (
            ("latest", "Model-Q4_K_M.gguf"), ("q4_k_m", "Model-Q4_K_M.gguf"), ("Q8_0", "Model-Q8_0.gguf"),
            ("UD-Q4_K_XL", "Model-UD-Q4_K_XL.gguf"), ("Q4_K_XL", "Model-UD-Q4_K_XL.gguf"),
            ("Model-Q2_K.gguf", "Model-Q2_K.gguf"), ("model-q2_k", "Model-Q2_K.gguf"),
            ("bf16", "BF16/Model-BF16-00001-of-00003.gguf"), ("4_K_M", "Model-Q4_K_M.gguf"),
            ("Model-BF16-00002-of-00003.gguf", "BF16/Model-BF16-00001-of-00003.gguf"),
            ("Model-BF16.gguf", "BF16/Model-BF16-00001-of-00003.gguf"),
        )),
        # The tag "latest" selects Q4_K_M, then Q8_0, then the first model. A whole-word
        # match is preferred to a partial one.
        (["b-Q2_K.gguf", "b-Q8_0.gguf", "a-F16.gguf"], "latest", "b-Q8_0.gguf"),
        (["mmproj-a.gguf", "b.gguf", "z-F16-00001-of-00001.gguf"], "latest", "b.gguf"),
        (["m-IQ4_XS.gguf", "m-Q4_XS.gguf"], "Q4_XS", "m-Q4_XS.gguf"), (["m-IQ4_XS.gguf"], "Q4_XS", "m-IQ4_XS.gguf"),
    ],
)  # fmt: skip
def test_select_files_matches_a_quantisation_or_file_name_in_any_case(
    listed: list[str], tag: str, file: str
) -> None:
    assert select_files(listed, tag).files[0] == file


def test_select_files_takes_all_shards_and_names_missing_ones() -> None:
    names = [f"sub/x-Q4_K_M-{n:05d}-of-00012.gguf" for n in range(1, 13)]
    assert select_files(
        [*reversed(names), "sub/x-Q4_K_M-00001-of-00002.gguf.part"]
    ).files == tuple(names)
    names = [f"x-Q4_K_M-{n:05d}-of-00004.gguf" for n in (1, 2, 4)]
    with pytest.raises(
        ModelNotFoundError,
        match=r"u/r: 1 of the 4 shards .*\(x-Q4_K_M-00003-of-00004\.gguf\)",
    ):
        select_files(names, repo="u/r")
    with pytest.raises(ModelNotFoundError, match="has no GGUF file"):
        select_files(["README.md", "mmproj-F16.gguf", "model.safetensors"], repo="u/r")
    with pytest.raises(ModelNotFoundError) as refused:
        select_files(USUAL, "Q9_9", repo="u/r")
    message = str(refused.value)
    assert "'Q9_9'" in message and "Available GGUF files: " in message
    assert (
        "Model-Q4_K_M.gguf" in message and "Model-BF16-00001-of-00003.gguf" in message
    )
    assert "mmproj" not in message and "mtp-" not in message and "00002" not in message


@pytest.mark.parametrize(
    ("model", "projectors", "expected"),
    [
        ("x-Q4_K_M.gguf", ["mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "mmproj-Q8_0.gguf"),
        ("x-BF16.gguf", ["mmproj-F32.gguf", "mmproj-Q8_0.gguf"], "mmproj-Q8_0.gguf"),
        (
            "a/x-BF16.gguf",
            ["mmproj-BF16.gguf", "a/mmproj-Q8_0.gguf"],
            "a/mmproj-Q8_0.gguf",
        ),
        ("a/x-BF16.gguf", ["b/mmproj-BF16.gguf"], None),
        ("x-Q8_0.gguf", ["a/mmproj-Q8_0.gguf"], None),
        ("x-Q8_0.gguf", [], None),
    ],
)
def test_select_files_takes_the_projector_closest_in_folder_and_width(
    model: str, projectors: list[str], expected: str | None
) -> None:
    assert select_files([model, *projectors]).mmproj == expected


def test_models_in_derives_tags_from_file_names() -> None:
    assert [tag for tag, _ in models_in(USUAL)] == [
        "BF16",
        "IQ4_XS",
        "Q2_K",
        "Q4_K_M",
        "Q8_0",
        "UD-Q4_K_XL",
    ]
    assert [tag for tag, _ in models_in(["qwen-q4_k_m.gguf", "two words.gguf"])] == [
        "Q4_K_M"
    ]
    assert [tag for tag, _ in models_in(["two words.gguf"])] == ["latest"]
    assert [tag for tag, _ in models_in(["a-Q4_0.gguf", "b-Q4_0.gguf"])] == [
        "Q4_0",
        "b-Q4_0",
    ]
    assert models_in(["x-Q4_0-00001-of-00002.gguf"]) == ()


WORDS = (
    "Q4_K_M",
    "q8_0",
    "IQ4_XS",
    "UD-Q4_K_XL",
    "BF16",
    "model",
    "mmproj",
    "x",
    "00001-of-00002",
    "00002-of-00002",
)
stems = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("-".join)
path = stems.flatmap(
    lambda stem: st.sampled_from(
        [f"{stem}.gguf", f"sub/{stem}.gguf", f"{stem}.GGUF", stem]
    )
)
paths = st.lists(path, max_size=8, unique=True)


@given(paths)
def test_every_tag_of_models_in_selects_its_files(listed: list[str]) -> None:
    models = models_in(listed)
    assert len({tag.lower() for tag, _ in models}) == len(models)
    for tag, choice in models:
        assert select_files(without_incomplete(listed), tag) == choice
        assert all(is_model(path) for path in choice.files)
    if models:
        assert select_files(without_incomplete(listed)).files


@given(paths, st.text(max_size=8))
def test_select_files_returns_listed_files_or_raises_for_any_tag(
    listed: list[str], tag: str
) -> None:
    found: set[str] = set()
    with suppress(ModelNotFoundError):
        found = set(select_files(listed, tag).files)
    assert found <= set(listed)


@pytest.mark.parametrize("model", library(), ids=lambda model: model.name)
def test_library_model_has_consistent_names_files_and_sizes(
    model: LibraryModel,
) -> None:
    assert parse_name(model.name).canonical == model.name
    assert parse_name(model.hub_name).repo == model.repository
    prefix, _, rest = model.file.partition("-00001-of-0000")
    files = (
        [f"{prefix}-0000{n}-of-0000{rest}" for n in range(1, int(rest[0]) + 1)]
        if rest
        else [model.file]
    )
    assert select_files([*files, "other-Q2_K.gguf"], model.quantization).files == tuple(
        files
    )
    assert 4 < 8 * model.resident_bytes / model.n_parameters < 9  # bits per weight
    assert 0.5 < model.expert_bytes / model.resident_bytes < 1
    assert 0 < model.token_bytes < model.expert_bytes and model.dense_bytes > 0


def test_library_model_with_a_row_table_excludes_the_table_from_memory() -> None:
    found = find_in_library("qwen3.8-flash-next")
    assert found is not None
    assert (
        found.size_bytes - found.resident_bytes
        == found.row_table_bytes
        == 320_001_536 * 90
    )
    assert found.expert_bytes + found.dense_bytes == found.resident_bytes


def test_library_contains_the_hybrids_of_2026() -> None:
    names = (
        "qwen3.5",
        "qwen3.6",
        "qwen3.6-mtp",
        "qwen3.8-flash-next",
        "qwen3-next",
        "kimi-linear",
    )
    others = (
        "nemotron-3-nano",
        "nemotron-3-super",
        "glm-5.3-flash",
        "lfm2.5",
        "granite4",
        "deepseek-v4-flash",
        "ling-3.0-flash",
    )
    assert all(find_in_library(name) for name in names + others)


def test_find_in_library_accepts_a_missing_tag_and_pull_suggests_near_names() -> None:
    assert len(library()) == len({model.name for model in library()}) >= 30
    found = find_in_library("GPT-OSS")
    assert (
        found is not None
        and found.name == "gpt-oss:20b"
        and find_in_library("gpt-oss:latest") == found
    )
    assert fetchable_name("qwen3:30b") == "hf.co/Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"
    assert fetchable_name("user/repo") == "user/repo" and fetchable_name("gpt") is None
    assert nearest_names("gpt-os:20b")[0] == "gpt-oss:20b"
    with pytest.raises(ModelNotFoundError, match="did you mean 'gpt-oss:20b'"):
        pull("gpt-os:20b", Catalog(), lambda _status: None)


def test_catalog_finds_a_fetched_model_by_its_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ModelNotFoundError,
        match=r"is hf\.co/ggml-org/.* Fetch it with `moegguf pull gpt-oss:20b`",
    ):
        Catalog().find("gpt-oss")
    with pytest.raises(PullError, match="HF_HUB_OFFLINE"):
        pull("gpt-oss:20b", Catalog(), lambda _status: None)
    folder = tmp_path / "models--ggml-org--gpt-oss-20b-GGUF" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "gpt-oss-20b-MXFP4.gguf").write_bytes(b"GGUF")
    assert Catalog().find("gpt-oss:20b").path == folder / "gpt-oss-20b-MXFP4.gguf"
    assert (
        pull("gpt-oss:20b", Catalog(), lambda _status: None).name
        == "hf.co/ggml-org/gpt-oss-20b-GGUF:MXFP4"
    )
