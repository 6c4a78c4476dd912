"""Commands in the README and docs exist, their Python compiles, their links lead somewhere; the page of architecture
names files that exist, and every package."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from command_help import help_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README = PAGES[ROOT / "README.md"]
TEXT = "\n".join(PAGES.values())
GROUPS = ("trace", "contexts")  # commands that have commands of their own


def blocks(language: str) -> list[str]:
    return [text for name, text in re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL) if name == language]


def commands(prefix: str) -> list[tuple[str, ...]]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    inline = [" ".join(text.split()) for text in re.findall(rf"`({re.escape(prefix)}[^`]*)`", TEXT)]
    return sorted({tuple(shlex.split(line)) for line in [*lines, *inline] if line.startswith(prefix)})


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {word for line in targets for word in line.split()}
    named = {words[1] for words in commands("make ")}
    assert named
    assert named <= known


@pytest.mark.parametrize("words", commands("moegguf "), ids=lambda words: " ".join(words[1:3]))
def test_every_moegguf_command_and_option_exists(words: tuple[str, ...]) -> None:
    text = help_of(*words[1:3] if words[1] in GROUPS else words[1:2])
    for word in words[2:]:
        if word.startswith("-"):
            assert re.search(rf"(^|[\s,│]){re.escape(word)}\b", text, re.MULTILINE), f"{word} in {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{target} in {page.name}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}, target


def test_the_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1300


def test_python_examples_compile_and_import_what_exists() -> None:
    assert blocks("python")
    for block in blocks("python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "moegguf":
                import moegguf

                assert {alias.name for alias in node.names} <= set(moegguf.__all__)


def test_no_figure_is_promised_that_is_not_there() -> None:
    assert not re.search(r"\b(TODO|TABLE|TBD)\b", TEXT)


def test_figures_have_a_spread_and_no_excuses() -> None:
    assert not re.search(r"\b(noisy|noise|quieter|busy (core|machine)|loaded machine|another day|other work)\b", TEXT)
    assert not re.search(r"(^|[.|] )(As|Of) [a-z]", TEXT, re.MULTILINE), "a sentence begins with its subject"


ARCHITECTURE = PAGES[ROOT / "docs" / "architecture.md"]
DRAWINGS = "\n".join(re.findall(r"```\n(.*?)```", ARCHITECTURE, re.DOTALL))


def test_every_path_of_the_architecture_exists() -> None:
    paths = re.findall(r"`((?:moegguf|tests|patches)/[\w./]*)`", ARCHITECTURE)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_file_in_the_drawings_exists_once() -> None:
    names = set(re.findall(r"\b[\w/]+\.(?:cpp|h|py)\b", DRAWINGS))
    assert len(names) > 5
    for name in names:
        assert len([path for path in (ROOT / "moegguf").rglob(Path(name).name) if path.match(name)]) == 1, name


def test_every_package_is_drawn() -> None:
    packages = {path.parent.name for path in (ROOT / "moegguf").glob("*/__init__.py")}
    assert {name for name in packages if not re.search(rf"\b{name}\b", DRAWINGS)} == set()


def test_the_architecture_stays_one_page() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 125
