"""Tests the option `mirror` in Modelfiles, commands and options of workers, and the
figures of each copy."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moegguf.cli.batch import batch
from moegguf.cli.bench import bench
from moegguf.cli.model_commands import estimate
from moegguf.cli.run import run
from moegguf.cli.serve import serve
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import Memory
from moegguf.engine.speeds import expert_read_speed
from moegguf.engine.stats import DriveStats, Stats
from moegguf.errors import ModelNotFoundError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.shards import mirror_paths
from moegguf.models.catalog import Catalog, demo_path
from moegguf.models.entry import ModelEntry
from moegguf.models.recipe import Recipe, parse
from moegguf.server.common.options import Loading
from moegguf.server.metrics import Totals, exposition
from moegguf.serving.events import LoadOverrides, load_overrides
from moegguf.serving.memory_budget import measure
from moegguf.settings import Settings
from moegguf.terminal.statistics import expert_lines

MODELFILE = "FROM demo\nPARAMETER mirror /mnt/b/demo.gguf\nPARAMETER mirror copies"


def mirrors_of(
    entry: ModelEntry, overrides: LoadOverrides, **loading: Any
) -> list[str]:
    """Returns the mirrors with which a worker loads a model, given 4 GiB of memory."""
    settings, memory = (
        replace(Settings(), loading=loading),
        Memory(1 << 32, 1 << 32, "a test", 0),
    )
    size = measure(entry, {**overrides, "n_ctx": 256}, settings, memory)
    return list(size.load_config(size.plan_within({"RAM": 1 << 32})).spec.mirror)


def test_modelfile_with_mirrors_loads_the_model_with_them(catalog: Catalog) -> None:
    entry = catalog.create("mine", parse(MODELFILE))
    mirrors = ["/mnt/b/demo.gguf", str(Path("copies").absolute())]
    assert catalog.find("mine").parameters["mirror"] == mirrors
    overrides = load_overrides(entry.parameters)
    assert mirrors_of(entry, overrides) == mirrors
    assert mirrors_of(entry, overrides, mirror=["/other"]) == mirrors
    text = catalog.modelfile(entry)
    assert parse(text).parameters["mirror"] == mirrors


def test_create_rejects_mirrors_of_clients_and_keeps_mirrors_of_the_base(
    catalog: Catalog,
) -> None:
    catalog.create("mine", parse(MODELFILE))
    served = Catalog(paths=False)
    with pytest.raises(
        OptionError, match=r"may not change .* mirrors.* gives ./etc/passwd"
    ):
        served.create(
            "theirs", Recipe(from_="mine", parameters={"mirror": ["/etc/passwd"]})
        )
    with pytest.raises(
        OptionError, match=r"may not change .* mirrors.* gives ./etc/passwd"
    ):
        served.create(
            "theirs", Recipe(from_="demo", parameters={"mirror": ["/etc/passwd"]})
        )
    mirrors = served.find("mine").parameters["mirror"]
    saved = served.create(
        "saved", Recipe(from_="mine", parameters={"mirror": mirrors, "top_k": 1})
    )
    assert saved.parameters["mirror"] == mirrors


def test_request_options_ignore_mirror() -> None:
    body = Loading.model_validate(
        {"options": {"mirror": ["/etc/passwd"], "num_ctx": 512}}
    )
    assert body.overrides() == {"n_ctx": 512}


def test_mirrors_of_a_command_reach_the_worker(catalog: Catalog) -> None:
    demo = catalog.find("demo")
    assert mirrors_of(demo, {}, mirror=["/mnt/b", "/mnt/c"]) == ["/mnt/b", "/mnt/c"]
    assert mirrors_of(demo, {}) == []


@pytest.mark.parametrize(
    "command",
    [run, batch, serve, bench, estimate],
    ids=lambda command: command.__name__,
)
def test_command_has_a_mirror_option(command: Any) -> None:
    assert "mirror" in inspect.signature(command).parameters


def test_load_spec_makes_mirror_paths_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert LoadSpec.of({"mirror": ["copy.gguf", "~/b"]}).mirror == (
        f"{tmp_path}/copy.gguf",
        "/home/me/b",
    )
    assert LoadSpec.of({"mirror": Path("/mnt/b")}).mirror == ("/mnt/b",)
    assert LoadSpec.of({}).mirror == LoadSpec.of({"mirror": None}).mirror == ()
    with pytest.raises(OptionError, match="mirror is ''"):
        LoadSpec.of({"mirror": [""]})


def test_mirror_paths_accepts_a_folder_or_the_first_shard(
    tiny: Any, tmp_path: Path
) -> None:
    shards = read_layout(tiny("tiny-qwen2moe", "q4_0", 3)).shards
    names = [shard.path.name for shard in shards]
    here = [tmp_path / name for name in names]
    assert list(mirror_paths(tmp_path, shards)) == here
    assert list(mirror_paths(here[0], shards)) == here
    assert list(mirror_paths(tmp_path / "first.gguf", shards)) == [
        tmp_path / "first.gguf",
        *here[1:],
    ]
    other = [tmp_path / f"copy-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert list(mirror_paths(other[0], shards)) == other


def test_plan_counts_16_mib_for_the_readers_of_each_mirror(catalog: Catalog) -> None:
    entry, memory = catalog.find("demo"), Memory(1 << 32, 1 << 32, "a test", 0)
    plans = [
        measure(
            entry, {"n_ctx": 256}, replace(Settings(), loading=loading), memory
        ).wanted["RAM"]
        for loading in ({}, {"mirror": ["/mnt/b"]}, {"mirror": ["/mnt/b", "/mnt/c"]})
    ]
    assert plans[2] - plans[1] == plans[1] - plans[0] == 16 << 20


def test_expert_read_speed_includes_mirrors_and_rejects_missing_ones() -> None:
    layout = read_layout(str(demo_path()))
    assert expert_read_speed(layout, 0.01, mirrors=[str(demo_path())]).bytes_per_s > 0
    with pytest.raises(ModelNotFoundError, match="unplugged"):
        expert_read_speed(layout, 0.01, mirrors=["/mnt/unplugged"])


BEFORE = Stats(
    drives=(DriveStats("file", 3, 300, 9), DriveStats("mirror 1", 1, 100, 4))
)
AFTER = Stats(
    n_experts=8, drives=(DriveStats("file", 5, 500, 7), DriveStats("mirror 1", 4, 400, 6, is_dropped=True))
)  # fmt: skip


def test_stats_subtract_and_add_the_figures_of_each_copy() -> None:
    own, other = (AFTER - BEFORE).drives
    assert (own, other) == (
        DriveStats("file", 2, 200, 7),
        DriveStats("mirror 1", 3, 300, 6, is_dropped=True),
    )
    assert (BEFORE + AFTER).drives == (
        DriveStats("file", 8, 800, 7),
        DriveStats("mirror 1", 5, 500, 6, True),
    )
    assert (AFTER + Stats()).drives == AFTER.drives


def test_expert_lines_name_the_bytes_of_each_copy() -> None:
    assert (
        expert_lines(AFTER, Stats())["read from"]
        == "0.00 MB of file (0.00 GB/s), 0.00 MB of mirror 1 (failed)"
    )
    assert "read from" not in expert_lines(Stats(n_experts=8), Stats())


def test_metrics_have_the_bytes_of_each_copy() -> None:
    totals = Totals()
    totals.stats["demo:latest"] += AFTER
    text = exposition(totals, [])
    assert (
        'moegguf_drive_read_bytes_total{drive="mirror 1",model="demo:latest"} 400.0'
        in text
    )
    assert 'moegguf_drive_reads_total{drive="file",model="demo:latest"} 5.0' in text
