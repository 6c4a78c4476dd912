"""Tests that CONTRIBUTING.md names files, folders of tests, commands and header fields
that exist.

Other tests check the issue forms, and CITATION.cff.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_help import help_of

from tools.patches import HEADER_FIELDS

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FORMS = sorted(
    path.stem
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    if path.stem != "config"
)
COMMANDS = sorted(set(re.findall(r"\.venv/bin/moegguf ([^`\n]*)", GUIDE)))


def rows_below(heading: str) -> list[list[str]]:
    """Returns the cells of each row in the first table below a heading, without the
    header row and the separator."""
    table = re.search(
        rf"^#+ {heading}\n.*?((?:^\|[^\n]*\n)+)", GUIDE, re.MULTILINE | re.DOTALL
    )
    assert table, heading
    return [
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in table[1].splitlines()[2:]
    ]


def form(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load(
        (ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text("utf-8")
    )


def test_guide_names_only_files_that_exist() -> None:
    named = set(
        re.findall(
            r"(?<![\w/.])((?:tests|tools|patches|moegguf|docs|build)/[\w/.]*\w)", GUIDE
        )
    )
    assert len(named) > 15
    built = {name for name in named if name.startswith("build/")}
    assert {name for name in named - built if not (ROOT / name).exists()} == set()


def test_example_of_a_test_name_in_the_guide_exists() -> None:
    (name,) = set(re.findall(r"`(test_\w+)`", GUIDE))
    assert any(
        f"def {name}(" in path.read_text("utf-8")
        for path in (ROOT / "tests").rglob("test_*.py")
    )


def test_guide_lists_every_folder_of_tests() -> None:
    rooms = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {row[0] for row in rows_below("One test")} == {
        f"`tests/{path.name}`" for path in rooms
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_guide_names_only_commands_and_options_that_exist(command: str) -> None:
    name, *rest = shlex.split(command)
    shown = help_of(name)
    assert all(
        re.search(rf"(^|[\s,│]){word}\b", shown, re.MULTILINE)
        for word in rest
        if word.startswith("-")
    )


def test_guide_names_the_header_fields_of_a_patch() -> None:
    fields = re.search(r"header fields (.*?),? a line in", GUIDE, re.DOTALL)
    assert fields
    assert tuple(re.findall(r"`(\w+)`", fields[1])) == HEADER_FIELDS


def test_guide_has_ten_plain_english_pairs_and_unique_words() -> None:
    pairs = re.findall(
        r"^- (.+)\n\+ (.+)$",
        GUIDE.partition("```diff\n")[2].partition("```")[0],
        re.MULTILINE,
    )
    assert len(pairs) == 10
    assert all(before != after for before, after in pairs)
    words = [word for row in rows_below("Words") for word in row[0].split(", ")]
    assert len(words) == len(set(words)) > 20


@pytest.mark.parametrize("name", FORMS)
def test_issue_form_is_valid(name: str) -> None:
    parsed = form(name)
    assert set(parsed) == {"name", "description", "labels", "body"}
    ids = [part["id"] for part in parsed["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for part in parsed["body"]:
        assert part["type"] in (
            "markdown",
            "textarea",
            "input",
            "dropdown",
            "checkboxes",
        )
        assert part["attributes"]["value" if part["type"] == "markdown" else "label"]
        assert all(
            isinstance(option, str) for option in part["attributes"].get("options", ())
        )


def test_bug_form_requires_the_output_of_doctor() -> None:
    (doctor,) = (part for part in form("bug")["body"] if part.get("id") == "doctor")
    assert "moegguf doctor" in doctor["attributes"]["label"]
    assert doctor["validations"] == {"required": True}


def test_citation_names_the_project_and_the_four_papers() -> None:
    cited = pytest.importorskip("yaml").safe_load(
        (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    )
    assert (
        cited["authors"] == [{"name": "the moegguf authors"}]
        and cited["license"] == "MIT"
    )
    papers = [paper["title"].partition(":")[0] for paper in cited["references"]]
    assert papers == ["MoE-Infinity", "ProMoE", "ExpertFlow", "DuoServe-MoE"]
    assert all(
        paper["authors"] and paper["url"].startswith("https://arxiv.org/abs/")
        for paper in cited["references"]
    )
