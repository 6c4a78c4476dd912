"""Names that add to the files of others: digests of their own, Modelfiles that work, and files that have moved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from catalog_helpers import cache, names

from moegguf.errors import ModelNotFoundError
from moegguf.models.catalog import Catalog, demo_path
from moegguf.models.modelfile import parse
from moegguf.models.recipe import Recipe
from moegguf.terminal.tables import print_model_list

pytestmark = pytest.mark.usefixtures("catalog")
PIRATE = Recipe(from_="demo", system="You are a pirate.", parameters={"temperature": 0.5, "stop": ["x"]})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A model's file at a path of its own."""
    path = tmp_path / "files" / "two words.gguf"
    path.parent.mkdir()
    path.write_bytes(demo_path().read_bytes())  # type: ignore[union-attr]
    return path


def test_what_a_name_adds_gives_it_a_digest(catalog: Catalog) -> None:
    demo, pirate = catalog.find("demo"), catalog.create("pirate", PIRATE)
    assert pirate.digest != demo.digest and len(pirate.digest) == 64
    assert pirate.weights == demo.weights == demo.digest
    assert catalog.find("pirate").digest == pirate.digest, "it is stable"
    others = [
        catalog.create("other", Recipe(from_="demo", system="You are a king.")),
        catalog.create("other", Recipe(from_="demo", system="")),
        catalog.create("other", Recipe(from_="demo", template="{% x %}")),
        catalog.create("other", Recipe(from_="demo", license="MIT")),
        catalog.create("other", Recipe(from_="demo", messages=({"role": "user", "content": "x"},))),
    ]
    assert len({entry.digest for entry in (demo, pirate, *others)}) == 7


def test_the_same_content_has_the_same_digest(catalog: Catalog) -> None:
    pirate = catalog.create("pirate", PIRATE)
    assert catalog.create("again", PIRATE).digest == pirate.digest
    step = catalog.create("step", Recipe(from_="demo", system="You are a pirate."))
    two = catalog.create("two", Recipe(from_="step", parameters={"stop": ["x"], "temperature": 0.5}))
    assert two.digest == pirate.digest != step.digest
    assert catalog.copy("pirate", "copy").digest == pirate.digest
    assert catalog.create("same", Recipe(from_="demo")).digest == catalog.find("demo").digest
    assert catalog.create("same", Recipe(from_="copy", system="You are a pirate.")).digest == pirate.digest


def test_another_file_at_the_same_path_is_another_model(catalog: Catalog, file: Path) -> None:
    before = catalog.create("mine", Recipe(from_=str(file), system="x"))
    file.write_bytes(file.read_bytes() + b"more")
    after = catalog.find("mine")
    assert after.weights == catalog.find(str(file)).digest != before.weights
    assert after.digest != before.digest


def test_records_without_a_digest_of_their_files_get_one(catalog: Catalog) -> None:
    created = catalog.create("pirate", PIRATE)
    path = catalog.index.path
    text = path.read_text().replace(created.digest, created.weights)
    path.write_text(text.replace(f'"files_digest": "{created.weights}"', '"files_digest": ""'))
    assert catalog.find("pirate").digest == created.digest
    assert catalog.find("pirate").weights == created.weights


@pytest.mark.parametrize("kind", ["demo", "hub", "path"])
def test_a_modelfile_makes_the_model_again_after_its_name_is_gone(catalog: Catalog, file: Path, kind: str) -> None:
    cache("u/r", {"x-Q4_0.gguf": b"GGUF", "mmproj-F16.gguf": b"m"})
    base = {"demo": "demo:latest", "hub": "hf.co/u/r:Q4_0", "path": str(file)}[kind]
    catalog.create("step", Recipe(from_=base, system="x"))
    made = catalog.create("mine", Recipe(from_="step", parameters={"seed": 3}))
    text = catalog.modelfile(made)
    assert parse(text).from_ == base
    catalog.remove("mine")
    catalog.remove("step")
    again = catalog.create("again", parse(text))
    assert (again.files, again.digest, again.mmproj) == (made.files, made.digest, made.mmproj)


def test_a_modelfile_names_the_file_where_the_hub_s_name_was_removed(catalog: Catalog) -> None:
    cache("u/r", {"x-Q4_0.gguf": b"GGUF"})
    made = catalog.create("mine", Recipe(from_="u/r", system="x"))
    catalog.remove("u/r")
    assert parse(catalog.modelfile(made)).from_ == str(made.path)
    assert catalog.create("again", parse(catalog.modelfile(made))).files == made.files


def test_a_model_whose_file_has_moved_is_listed_and_can_be_removed(
    catalog: Catalog, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = catalog.create("mine", Recipe(from_=str(file), system="x"))
    file.rename(file.with_name("elsewhere.gguf"))
    (found,) = (entry for entry in catalog.entries() if entry.name == "mine:latest")
    assert (found.missing, found.size_bytes, found.digest) == ((file,), 0, made.digest)
    print_model_list([found])
    assert re.search(rf" missing    .+ ago: {re.escape(str(file))} is no longer there\n", capsys.readouterr().out)
    for name in ("mine", "MINE:latest"):
        with pytest.raises(ModelNotFoundError, match=r"words\.gguf', which is no longer there: put it back, or rem"):
            catalog.find(name)
    with pytest.raises(ModelNotFoundError, match="no longer there"):
        catalog.copy("mine", "other")
    file.with_name("elsewhere.gguf").rename(file)
    assert catalog.find("mine") == made
    file.unlink()
    assert catalog.remove("mine").missing == (file,)
    assert names() == ["demo:latest"]


def test_a_model_whose_download_is_gone_says_what_to_fetch(catalog: Catalog) -> None:
    folder = cache("u/r", {"x-Q4_0.gguf": b"GGUF"})
    catalog.create("mine", Recipe(from_="u/r", system="x"))
    next((folder / "blobs").iterdir()).unlink()
    with pytest.raises(ModelNotFoundError, match=r"fetch hf\.co/u/r:Q4_0 again with `moegguf pull`"):
        catalog.find("mine")
    assert names() == ["mine:latest", "demo:latest"]
    catalog.create("mine", PIRATE)  # the name is free to take
    assert catalog.find("mine").path == demo_path()


def test_an_unknown_name_says_how_models_of_the_hub_are_named(catalog: Catalog) -> None:
    for name in ("house:30b", "house"):
        with pytest.raises(ModelNotFoundError, match=r"no model named 'house.*hf\.co/USER/REPOSITORY:Q4_K_M"):
            catalog.find(name)
