"""Tests names of models. An invalid name raises one of moegguf's errors, and does not
open any file outside moegguf's folders."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moegguf
from moegguf.errors import ModelNameError, ModelNotFoundError
from moegguf.models.catalog import Catalog
from moegguf.models.names import MAX_NAME, MAX_TAG, parse_name
from moegguf.models.sources import repo_folder


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("demo", "demo:latest"), ("Demo:V1", "Demo:V1"), ("hf.co/User/Repo-GGUF", "hf.co/User/Repo-GGUF:latest"),
        ("huggingface.co/u/r:Q4_K_M", "hf.co/u/r:Q4_K_M"), ("HF.CO/u/r:q8_0", "hf.co/u/r:q8_0"),
        ("hf:u/r", "hf.co/u/r:latest"), ("hf://u/r", "hf.co/u/r:latest"), ("u/r:q4_k_m", "hf.co/u/r:q4_k_m"),
        ("u/r:file-Q4_K_M-00001-of-00003.gguf", "hf.co/u/r:file-Q4_K_M-00001-of-00003.gguf"),
        ("https://huggingface.co/u/r", "hf.co/u/r:latest"), ("https://huggingface.co/u/r/", "hf.co/u/r:latest"),
        ("https://hf.co/u/r:Q2_K", "hf.co/u/r:Q2_K"),
        ("https://huggingface.co/u/r/tree/main", "hf.co/u/r:latest"),
        ("https://huggingface.co/u/r/blob/main/sub/x-Q4_0.gguf", "hf.co/u/r:x-Q4_0.gguf"),
        ("https://huggingface.co/u/r/resolve/main/x.gguf?download=true", "hf.co/u/r:x.gguf"),
        ("ollama:llama3", "registry.ollama.ai/library/llama3:latest"),
        ("ollama:me/llama3:8b", "registry.ollama.ai/me/llama3:8b"),
        ("localhost:5000/library/x:y", "localhost:5000/library/x:y"),
        ("user.name/some.repo", "hf.co/user.name/some.repo:latest"),
    ],
)  # fmt: skip
def test_parse_name_gives_every_form_one_canonical_spelling(
    text: str, canonical: str
) -> None:
    name = parse_name(text)
    assert name.canonical == parse_name(canonical).canonical == canonical
    assert name.key == parse_name(canonical.upper().replace("HTTPS", "https")).key, (
        "more than case tells names apart"
    )
    assert name.is_hub == canonical.startswith("hf.co/") and (
        not name.is_hub or name.repo in canonical
    )


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "demo ", " demo", "a b", "demo:", ":tag", "a//b", "/", "a/", "/a", ".", "..", "../x",
        "../../etc/passwd", "/etc/passwd", "./x", "~/x", "x/../y", "hf.co/../x", "hf.co/u/..", "hf.co/u/r:..",
        "hf.co/u/r:../x", "a\0b", "demo\n", "%2e%2e/%2e%2e", "a%2fb", "\u2025/x", "a\uff0e\uff0eb", "\u200bdemo",
        "dem\u00f6", "hf.co", "hf.co/x", "hf:x", "hf", "ollama",
        "ollama:", "a/b/c", "a/b/c/d", "hf.co/a/b/c", "x" * 10_000, "u/r:" + "t" * (MAX_TAG + 1), "-x", ".x", "x.",
        "u/r--x", "u--v/r", "C:\\x", "a\\b", "https://example.com/u/r", "https://huggingface.co/",
        "https://huggingface.co/u", "file:///etc/passwd", "https://huggingface.co/u/..%2f..%2fx", "https://[",
        "host.io/na.me/x", "sha256:../../x", "\ud800", None, 3, b"demo", ["demo"],
    ],
)  # fmt: skip
def test_parse_name_rejects_invalid_names_with_a_short_error(text: Any) -> None:
    with pytest.raises(ModelNameError) as refused:
        parse_name(text)
    assert len(str(refused.value)) < 400
    if isinstance(text, str):
        with pytest.raises((ModelNameError, ModelNotFoundError)):
            Catalog(paths=False).find(text)


part = st.text(alphabet="aZ09._-%/:\\ \0é", max_size=12)


@given(st.lists(part, max_size=5).map("/".join) | st.text(max_size=MAX_NAME + 9))
def test_accepted_name_parses_to_itself_and_stays_in_its_folder(text: str) -> None:
    try:
        name = parse_name(text)
    except ModelNameError:
        return
    assert parse_name(name.canonical) == name
    assert parse_name(name.key).key == name.key
    root = Path("/store")
    for piece in (name.host, name.namespace, name.model, name.tag):
        assert (
            "/" not in piece
            and "\\" not in piece
            and "\0" not in piece
            and ".." not in piece
        )
        assert piece == "" or (root / piece).parent == root
    if name.is_hub:
        assert len(repo_folder(name.repo, Path()).name.split("--")) == 3


STRAY = """
import sys
from moegguf.models import details, pull, sources  # all that is imported later would be opened
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


def test_invalid_names_open_no_file_outside_the_data_folders(tmp_path: Path) -> None:
    (tmp_path / "secret.gguf").write_bytes(b"secret")
    bad = [
        "../../etc/passwd", "/etc/passwd", "a\0b", "%2e%2e/x", "x" * 10_000, "\u2025/x", "../secret.gguf",
        str(tmp_path / "secret.gguf"), "sha256:../../secret.gguf", "hf.co/../secret", "ollama:../secret", "~/x", ".",
    ]  # fmt: skip
    places = {"MOEGGUF_HOME": "home", "HF_HOME": "hf", "OLLAMA_MODELS": "ollama"}
    environment = os.environ | {
        name: str(tmp_path / folder) for name, folder in places.items()
    }
    allowed = [
        *(environment[name] for name in places),
        str(Path(moegguf.__file__).parents[1]),
    ]
    command = [sys.executable, "-c", STRAY, ":".join(allowed), repr(bad)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
