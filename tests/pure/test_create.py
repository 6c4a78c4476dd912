"""Tests models that users create under new names: copies, recipes, and models of
uploaded blobs.

Other tests check the digests of names, and that the index of names survives damage,
kills and concurrent writers.
"""

import hashlib
import json
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import crashing
import pytest
from catalog_helpers import add_blob, cache, files_of, names, send

from moegguf.errors import (
    ModelFormatError,
    ModelNameError,
    ModelNotFoundError,
    OptionError,
    PullError,
)
from moegguf.models import own_store
from moegguf.models.catalog import Catalog, demo_path
from moegguf.models.details import details
from moegguf.models.entry import ModelEntry
from moegguf.models.own_store import Index
from moegguf.models.recipe import Recipe, parse
from moegguf.settings import data_folder
from moegguf.terminal.tables import print_model_list

pytestmark = pytest.mark.usefixtures("catalog")


def test_copy_adds_a_name_and_no_bytes(catalog: Catalog) -> None:
    entry = catalog.copy("demo", "Mine")
    assert (entry.name, entry.source, entry.path, entry.parent) == (
        "Mine:latest",
        "own",
        demo_path(),
        "demo:latest",
    )
    assert entry.digest == catalog.find("demo").digest
    assert names() == ["Mine:latest", "demo:latest"]
    assert catalog.find("MINE") == entry
    assert files_of(data_folder()) == ["models.json", "models.lock"]
    assert catalog.remove("mine").name == "Mine:latest"
    assert names() == ["demo:latest"]
    with pytest.raises(ModelNotFoundError):
        catalog.remove("mine")


def test_copy_and_remove_reject_names_of_other_sources(catalog: Catalog) -> None:
    cache("u/r", {"x-Q4_0.gguf": b"x"})
    for name in ("demo", "DEMO:latest", "u/r:q4_0", "hf.co/u/r"):
        with pytest.raises(OptionError, match="is already in use"):
            catalog.copy("demo", name)
    for name in ("../x", "a b", ""):
        with pytest.raises(ModelNameError):
            catalog.copy("demo", name)
    with pytest.raises(OptionError, match="ships with moegguf"):
        catalog.remove("demo")
    with pytest.raises(ModelNotFoundError):
        catalog.copy("nothing", "mine")
    path = demo_path()
    assert path and path.is_file()
    with pytest.raises(OptionError, match="it is a path"):
        catalog.remove(str(path))


def test_recipe_overrides_and_extends_its_base(catalog: Catalog) -> None:
    recipe = Recipe(
        from_="demo",
        system="Be brief.",
        parameters={"temperature": 0.1, "stop": ["x"]},
        license="MIT",
    )
    first = catalog.create("one", recipe)
    assert (first.system, first.license, first.parameters) == (
        "Be brief.",
        "MIT",
        {"temperature": 0.1, "stop": ["x"]},
    )
    hello = ({"role": "user", "content": "hi"},)
    second = catalog.create(
        "two",
        Recipe(
            from_="one", parameters={"temperature": 0.9, "num_ctx": 512}, messages=hello
        ),
    )
    assert (second.system, second.parent, second.messages) == (
        "Be brief.",
        "one:latest",
        hello,
    )
    assert second.parameters == {"temperature": 0.9, "num_ctx": 512, "stop": ["x"]}
    assert catalog.create("two", parse(catalog.modelfile(second))) == catalog.find(
        "two"
    )
    again = catalog.find("two")
    assert (again.system, again.parameters, again.messages) == (
        second.system,
        second.parameters,
        second.messages,
    )
    catalog.remove("one")
    assert catalog.find("two").path == demo_path()


def test_create_rejects_invalid_recipes(catalog: Catalog) -> None:
    for recipe in (
        Recipe(),
        Recipe(from_="demo", files={"x": "y"}),
        Recipe(from_="demo", parameters={"num_ctx": "x"}),
        Recipe(from_="demo", parameters={"num_ctx": 99999999999}),
        Recipe(from_="demo", parameters={"top_p": 1.5}),
        Recipe(from_="demo", messages=({"role": "king"},)),
        Recipe(files={"../x.gguf": "sha256:" + "0" * 64}),
        Recipe(files={"a/b.gguf": "sha256:" + "0" * 64}),
    ):
        with pytest.raises(OptionError):
            catalog.create("mine", recipe)
    with pytest.raises(ModelNameError):
        catalog.create("mine", Recipe(files={"x.gguf": "sha256:../../etc/passwd"}))
    with pytest.raises(ModelNotFoundError):
        catalog.create("mine", Recipe(files={"x.gguf": "sha256:" + "0" * 64}))
    with pytest.warns(UserWarning, match="Go's language"):
        assert (
            catalog.create(
                "mine", Recipe(from_="demo", template="{{ .Prompt }}")
            ).template
            is None
        )
    assert names() == ["mine:latest", "demo:latest"]


def test_create_from_blobs_links_the_file_and_removes_unused_blobs(
    catalog: Catalog, tiny: Any
) -> None:
    data = tiny().read_bytes()
    digest = send(catalog, data)
    assert (
        catalog.blobs.has(digest)
        and catalog.blobs.path(digest.replace(":", "-")).read_bytes() == data
    )
    entry = catalog.create("sent", Recipe(files={"tiny.gguf": digest}, system="Hi"))
    assert entry.path.read_bytes() == data and entry.path.name == "tiny.gguf"
    assert (entry.weights, entry.size_bytes) == (digest[7:], len(data))
    assert entry.path.stat().st_ino == catalog.blobs.path(digest).stat().st_ino
    assert details(entry).n_expert > 0
    before = entry.path.stat()
    catalog.create("again", Recipe(files={"tiny.gguf": digest}))
    # A server that has loaded the file would detect a change.
    assert entry.path.stat() == before
    catalog.remove("again")
    catalog.copy("sent", "other")
    catalog.remove("sent")
    assert catalog.find("other").path.read_bytes() == data
    catalog.remove("other")
    assert files_of(data_folder()) == ["models.json", "models.lock"]


def test_create_from_blobs_keeps_the_names_of_shards(
    catalog: Catalog, tiny: Any
) -> None:
    first = tiny(n_split=3)
    shards = sorted(first.parent.glob(first.name.replace("00001", "*")))
    files = {path.name: send(catalog, path.read_bytes()) for path in shards}
    entry = catalog.create("split", Recipe(files=dict(reversed(files.items()))))
    assert [path.name for path in entry.files] == [path.name for path in shards]
    assert details(entry).family == "qwen2moe"
    with pytest.raises(ModelNotFoundError, match="shards"):
        catalog.create("cut", Recipe(files={shards[0].name: files[shards[0].name]}))


def test_create_rejects_files_that_are_not_gguf(
    catalog: Catalog, tiny: Any, tmp_path: Path
) -> None:
    for data in (b"not a model", tiny().read_bytes()[:5000]):
        digest = send(catalog, data)
        with pytest.raises(ModelFormatError):
            catalog.create("bad", Recipe(files={"bad.gguf": digest}))
    assert not list((data_folder() / "sets").glob("*"))
    other = tmp_path / "photo.png"
    other.write_bytes(b"\x89PNG" + bytes(100))
    with pytest.raises(ModelFormatError, match=r"photo\.png is not a GGUF file"):
        catalog.create("bad", Recipe(from_=str(other)))
    assert names() == ["demo:latest"]
    for name in ("house:30b", "house"):
        with pytest.raises(
            ModelNotFoundError, match=r"no model named 'house"
        ) as caught:
            catalog.find(name)
        assert "hf.co/USER/REPOSITORY:Q4_K_M" in caught.value.hint


def test_add_blob_keeps_nothing_unless_the_digest_matches_and_the_disk_has_room(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    with pytest.raises(ModelFormatError, match="was announced"):
        add_blob(catalog, digest, [b"ab", b"d"])
    assert not catalog.blobs.has(digest)
    with pytest.raises(ZeroDivisionError):
        add_blob(catalog, digest, (bytes(1 // n) for n in (1, 0)))
    assert files_of(data_folder()) == []
    monkeypatch.setattr(own_store, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(PullError, match=r"needs 2\.00GiB .* has 1\.00MiB free"):
        add_blob(catalog, digest, iter(()), 2 << 30)
    with pytest.raises(PullError, match=r"64\.0MiB to spare.* has 1\.00MiB free"):
        # No size was announced, so only the required free space is checked.
        add_blob(catalog, digest, [b"abc"])
    assert files_of(data_folder()) == []
    monkeypatch.undo()


def test_add_blob_keeps_nothing_on_a_full_disk(catalog: Catalog) -> None:
    _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        with pytest.raises(PullError, match="cannot be written"):
            add_blob(catalog, f"sha256:{'0' * 64}", [bytes(50_000)] * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files_of(data_folder()) == []


def test_add_blob_removes_leftovers_of_dead_writers_only(catalog: Catalog) -> None:
    digest = f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    folder = data_folder() / "blobs"
    folder.mkdir(parents=True)
    (folder / ".dead.partial").write_bytes(b"x")
    with catalog.blobs.writer(digest) as live:
        live.write(b"a")
        send(catalog, b"other")
        live.write(b"bc")
        live.commit()
    assert catalog.blobs.has(digest)
    assert len(files_of(folder)) == 2


def test_interrupted_create_keeps_a_set_that_another_name_uses(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"model.gguf": send(catalog, demo_path().read_bytes())}  # type: ignore[union-attr]
    first = catalog.create("first", Recipe(files=files))
    with monkeypatch.context() as patch:
        patch.setattr(own_store, "read_layout", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            catalog.create("second", Recipe(files=files))
    assert first.path.exists() and catalog.find("first").path == first.path


PIRATE = Recipe(
    from_="demo",
    system="You are a pirate.",
    parameters={"temperature": 0.5, "stop": ["x"]},
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A copy of the demo model's file in the test's folder."""
    path = tmp_path / "files" / "two words.gguf"
    path.parent.mkdir()
    path.write_bytes(demo_path().read_bytes())  # type: ignore[union-attr]
    return path


def test_digest_of_a_name_depends_on_each_field_of_its_recipe(catalog: Catalog) -> None:
    demo, pirate = catalog.find("demo"), catalog.create("pirate", PIRATE)
    assert pirate.digest != demo.digest and len(pirate.digest) == 64
    assert pirate.weights == demo.weights == demo.digest
    assert catalog.find("pirate").digest == pirate.digest, "it is stable"
    others = [
        catalog.create("other", Recipe(from_="demo", system="You are a king.")),
        catalog.create("other", Recipe(from_="demo", system="")),
        catalog.create("other", Recipe(from_="demo", template="{% x %}")),
        catalog.create("other", Recipe(from_="demo", license="MIT")),
        catalog.create(
            "other", Recipe(from_="demo", messages=({"role": "user", "content": "x"},))
        ),
    ]
    assert len({entry.digest for entry in (demo, pirate, *others)}) == 7


def test_equal_recipes_have_equal_digests(catalog: Catalog) -> None:
    pirate = catalog.create("pirate", PIRATE)
    assert catalog.create("again", PIRATE).digest == pirate.digest
    step = catalog.create("step", Recipe(from_="demo", system="You are a pirate."))
    two = catalog.create(
        "two", Recipe(from_="step", parameters={"stop": ["x"], "temperature": 0.5})
    )
    assert two.digest == pirate.digest != step.digest
    assert catalog.copy("pirate", "copy").digest == pirate.digest
    assert (
        catalog.create("same", Recipe(from_="demo")).digest
        == catalog.find("demo").digest
    )
    assert (
        catalog.create("same", Recipe(from_="copy", system="You are a pirate.")).digest
        == pirate.digest
    )


def test_digest_of_a_name_follows_a_changed_file(catalog: Catalog, file: Path) -> None:
    before = catalog.create("mine", Recipe(from_=str(file), system="x"))
    assert (catalog.find("mine").digest, catalog.find("mine").weights) == (
        before.digest,
        before.weights,
    )
    # The file's new contents are treated as a different model.
    file.write_bytes(file.read_bytes() + b"more")
    after = catalog.find("mine")
    assert after.weights == catalog.find(str(file)).digest != before.weights
    assert after.digest != before.digest


@pytest.mark.parametrize("kind", ["demo", "hub", "path"])
def test_modelfile_recreates_a_model_whose_base_name_is_gone(
    catalog: Catalog, file: Path, kind: str
) -> None:
    cache("u/r", {"x-Q4_0.gguf": b"GGUF", "mmproj-F16.gguf": b"m"})
    base = {"demo": "demo:latest", "hub": "hf.co/u/r:Q4_0", "path": str(file)}[kind]
    catalog.create("step", Recipe(from_=base, system="x"))
    made = catalog.create("mine", Recipe(from_="step", parameters={"seed": 3}))
    text = catalog.modelfile(made)
    assert parse(text).from_ == base
    catalog.remove("step")
    # The Modelfile names the base's file, because the base has lost its name.
    if kind == "hub":
        catalog.remove("u/r")
        assert parse(catalog.modelfile(made)).from_ == str(made.path)
        assert (
            catalog.create("again", parse(catalog.modelfile(made))).files == made.files
        )
        return
    catalog.remove("mine")
    again = catalog.create("again", parse(text))
    assert (again.files, again.digest, again.mmproj) == (
        made.files,
        made.digest,
        made.mmproj,
    )


def test_model_with_a_missing_file_is_listed_and_can_be_removed(
    catalog: Catalog, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = catalog.create("mine", Recipe(from_=str(file), system="x"))
    file.rename(file.with_name("elsewhere.gguf"))
    (found,) = (entry for entry in catalog.entries() if entry.name == "mine:latest")
    assert (found.missing, found.size_bytes, found.digest) == ((file,), 0, made.digest)
    print_model_list([found])
    assert re.search(
        rf" missing    .+ ago: {re.escape(str(file))} is no longer there\n",
        capsys.readouterr().out,
    )
    for name in ("mine", "MINE:latest"):
        with pytest.raises(
            ModelNotFoundError,
            match=r"words\.gguf', which no longer exists: put it back, or rem",
        ):
            catalog.find(name)
    with pytest.raises(ModelNotFoundError, match="no longer exists"):
        catalog.copy("mine", "other")
    file.with_name("elsewhere.gguf").rename(file)
    assert catalog.find("mine") == made
    file.unlink()
    assert catalog.remove("mine").missing == (file,)
    assert names() == ["demo:latest"]


def test_find_names_the_pull_command_for_a_deleted_download(catalog: Catalog) -> None:
    folder = cache("u/r", {"x-Q4_0.gguf": b"GGUF"})
    catalog.create("mine", Recipe(from_="u/r", system="x"))
    next((folder / "blobs").iterdir()).unlink()
    with pytest.raises(
        ModelNotFoundError, match=r"fetch hf\.co/u/r:Q4_0 again with `moegguf pull`"
    ):
        catalog.find("mine")
    assert names() == ["mine:latest", "demo:latest"]
    catalog.create("mine", PIRATE)  # a name whose file is gone can be created again
    assert catalog.find("mine").path == demo_path()


def named(name: str, **values: Any) -> ModelEntry:
    demo = demo_path()
    assert demo
    return ModelEntry(name, "own", (demo,), 0, "0" * 64, datetime.now(UTC), **values)


OUTSIDE = (
    "7",
    '"hub:../../x.gguf"',
    '"sets:/etc/passwd"',
    '"sets:../../x.gguf"',
    '"what:x"',
    '"x.gguf"',
)


@pytest.mark.usefixtures("any_file_is_a_model")
@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda text: text[: len(text) // 2], 0),
        (lambda text: "", 0),
        (lambda text: "[]", 0),
        (lambda text: "[" * 200_000, 0),
        (lambda text: text.replace('"version": 1', '"version": 2'), 2),
        (lambda text: text.replace('"version": 1', '"edition": 1'), 2),
        (lambda text: text.replace('"hidden": []', '"hidden": 7'), 2),
        (lambda text: text.replace('"a:latest"', '"../a"'), 1),
        *(
            (lambda text, place=place: text.replace('"demo:"', place, 1), 1)
            for place in OUTSIDE
        ),
        (lambda text: text.replace('"temperature": 0.5', '"temperature": "hot"'), 1),
        (
            lambda text: text.replace(
                '"models": [', '"models": [3, null, {"name": "x"}, '
            ),
            2,
        ),
    ],
)
def test_damaged_index_is_set_aside_and_readable_entries_are_kept(
    damage: Any, kept: int
) -> None:
    index = Index(data_folder())
    first = named("a:latest", parameters={"temperature": 0.5})
    with index.changed() as contents:
        contents.entries = {"a:latest": first, "b:latest": named("b:latest")}
    broken = damage(index.path.read_text())
    assert broken != index.path.read_text()
    index.path.write_text(broken)
    cache("u/r", {"x-Q4_0.gguf": b"4"})
    with pytest.warns(UserWarning, match="index of models was damaged"):
        listed = names()
    assert len(listed) == kept + 2 and "hf.co/u/r:Q4_0" in listed
    aside = list(data_folder().glob("models.json.damaged-*"))
    assert [path.read_text() for path in aside] == [broken]
    Catalog().copy("demo", "new")
    assert len(json.loads(index.path.read_text())["models"]) == kept + 1


def test_concurrent_writers_of_the_index_lose_no_name(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom moegguf.models.catalog import Catalog\n"
        "for n in range(8): Catalog().copy('demo', f'{sys.argv[1]}-{n}')\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code, f"p{n}"]) for n in range(3)
    ]

    def work(n: int) -> None:
        for i in range(8):
            Catalog().copy("demo", f"t{n}-{i}")
            if i % 2:
                Catalog().remove(f"t{n}-{i}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert len(names("p")) == 24 and len(names("t")) == 16


def test_kill_at_any_write_leaves_the_index_whole(tmp_path: Path) -> None:
    for name in ("kept", "gone"):
        Catalog().create(name, Recipe(from_="demo", system="old"))
    assert int(crashing.run("create", data_folder())) > 25
    assert Catalog().find("kept").system == "new"
    kept = Catalog().find("kept").weights
    assert [path.name for path in (data_folder() / "blobs").iterdir()] == [
        f"sha256-{kept}"
    ]
