"""The index of our own names: whole after damage, crashes and many writers."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import crashing
import pytest
from catalog_helpers import cache, names

from moegguf.models.catalog import Catalog, demo_path
from moegguf.models.entry import ModelEntry
from moegguf.models.own_store import Index
from moegguf.models.recipe import Recipe
from moegguf.models.sources import hub_cache
from moegguf.settings import data_folder

pytestmark = pytest.mark.usefixtures("catalog", "any_file_is_a_model")


def named(name: str, **values: Any) -> ModelEntry:
    demo = demo_path()
    assert demo
    return ModelEntry(name, "own", (demo,), 0, "0" * 64, datetime.now(UTC), **values)


def test_the_index_keeps_everything(tmp_path: Path) -> None:
    index = Index(tmp_path / "deep" / "folder")
    full = named(
        "Me:v1", system="é\n\"", template="{{ x }}", parameters={"stop": ["a"], "top_k": 3, "temperature": 0.25},
        messages=({"role": "user", "content": "x"},), license="MIT", parent="demo:latest", mmproj=hub_cache() / "x",
    )  # fmt: skip
    with index.changed() as contents:
        contents.entries["me:v1"] = full
    assert Index(index.folder).read().entries == {"me:v1": full}


OUTSIDE = ("7", '"hub:../../x.gguf"', '"sets:/etc/passwd"', '"sets:../../x.gguf"', '"what:x"', '"x.gguf"')


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda text: text[: len(text) // 2], 0),
        (lambda text: "", 0),
        (lambda text: "[]", 0),
        (lambda text: "[" * 200_000, 0),
        (lambda text: text.replace('"version": 1', '"version": 2'), 2),
        (lambda text: text.replace('"a:latest"', '"../a"'), 1),
        *((lambda text, place=place: text.replace('"demo:"', place, 1), 1) for place in OUTSIDE),
        (lambda text: text.replace('"temperature": 0.5', '"temperature": "hot"'), 1),
        (lambda text: text.replace('"models": [', '"models": [3, null, {"name": "x"}, '), 2),
    ],
)
def test_a_damaged_index_is_set_aside_and_what_can_be_read_is_kept(damage: Any, kept: int) -> None:
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


def test_many_who_write_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom moegguf.models.catalog import Catalog\n"
        "for n in range(8): Catalog().copy('demo', f'{sys.argv[1]}-{n}')\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, f"p{n}"]) for n in range(3)]
    faults: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(8):
                Catalog().copy("demo", f"t{n}-{i}")
                if i % 2:
                    Catalog().remove(f"t{n}-{i}")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [worker.wait(60) for worker in workers] == [0, 0, 0] and not faults
    assert len(names("p")) == 24 and len(names("t")) == 16


@pytest.fixture
def killed() -> Iterator[subprocess.Popen[str]]:
    """Copies, makes and removes names until it is killed."""
    code = (
        "from moegguf.models.catalog import Catalog\nfrom moegguf.models.recipe import Recipe\nc = Catalog()\n"
        "for n in range(10_000):\n"
        " c.create('same', Recipe(from_='demo', system='x' * 50_000, parameters={'top_k': n}))\n"
        " print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait(20)
    process.stdout.close()


@pytest.mark.parametrize("n_lines", [1, 2, 5, 9])
def test_killed_while_it_writes_the_index_is_old_or_new(killed: subprocess.Popen[str], n_lines: int) -> None:
    for _ in range(n_lines):
        last = int(killed.stdout.readline())
    killed.kill()
    killed.wait(20)
    entry = Catalog().find("same")
    assert entry.parameters["top_k"] >= last and entry.system == "x" * 50_000
    Catalog().copy("same", "after")  # no lock is left behind
    assert len(names("same")) == len(names("after")) == 1


def test_killed_at_any_change_names_are_whole(tmp_path: Path) -> None:
    for name in ("kept", "gone"):
        Catalog().create(name, Recipe(from_="demo", system="old"))
    assert int(crashing.run("create", data_folder())) > 25
    assert Catalog().find("kept").system == "new"
    kept = Catalog().find("kept").weights
    assert [path.name for path in (data_folder() / "blobs").iterdir()] == [f"sha256-{kept}"]
