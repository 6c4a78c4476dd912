"""Names that are no names: an error of ours each time, and no file is opened but our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import moegguf

STRAY = """
import sys
from moegguf.models import details, hub, ollama_store, pull  # all that is imported later would be opened
from moegguf.models.catalog import Catalog
from moegguf.models.recipe import Recipe
allowed = tuple(sys.argv[1].split(":"))
catalog, opened = Catalog(paths=False), []
calls = [
    catalog.find, catalog.remove, catalog.blobs.has, catalog.blobs.path, catalog.blobs.writer,
    lambda name: catalog.copy(name, "x"), lambda name: catalog.copy("demo", name),
    lambda name: catalog.create("x", Recipe(from_=name)), lambda name: catalog.create(name, Recipe(from_="demo")),
    lambda name: catalog.create("x", Recipe(files={"x.gguf": name})),
    lambda name: catalog.create("x", Recipe(files={name: "sha256:" + "0" * 64})),
    lambda name: pull.pull(name, catalog, print),
]
catalog.entries()
seen = ("open", "os.listdir", "os.scandir")
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event in seen else None)
for name in eval(sys.argv[2]):
    for call in calls:
        try:
            call(name)
        except (ValueError, OSError, TypeError) as error:
            assert type(error).__module__ == "moegguf.errors", (name, error)
        else:
            raise AssertionError((name, call))
print([path for path in opened if not path.startswith(allowed)])
"""


def test_bad_names_open_nothing_outside_our_folders(tmp_path: Path) -> None:
    (tmp_path / "secret.gguf").write_bytes(b"secret")
    bad = [
        "../../etc/passwd", "/etc/passwd", "a\0b", "%2e%2e/x", "x" * 10_000, "\u2025/x", "CON", "../secret.gguf",
        str(tmp_path / "secret.gguf"), "sha256:../../secret.gguf", "hf.co/../secret", "ollama:../secret", "~/x", ".",
    ]  # fmt: skip
    places = {"MOEGGUF_HOME": "home", "HF_HOME": "hf", "OLLAMA_MODELS": "ollama"}
    environment = os.environ | {name: str(tmp_path / folder) for name, folder in places.items()}
    allowed = [*(environment[name] for name in places), str(Path(moegguf.__file__).parents[1])]
    command = [sys.executable, "-c", STRAY, ":".join(allowed), repr(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
