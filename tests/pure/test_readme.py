"""Tests the README and docs: commands exist, Python code compiles, and links lead to
existing files and headings.

docs/architecture.md names every package, and only files that exist. Variables and
options in docs/deployment.md exist, and the configuration files in deploy/ are valid.
"""

import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_help import help_of

from moegguf.serving.ray.config import read_config

ROOT = Path(__file__).resolve().parents[2]
FRONT_DOOR = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "examples/README.md",
)
FILES_OF_PAGES = (
    *(ROOT / name for name in FRONT_DOOR),
    *sorted((ROOT / "docs").glob("*.md")),
)
PAGES = {path: path.read_text() for path in FILES_OF_PAGES}
README = PAGES[ROOT / "README.md"]
TEXT = "\n".join(PAGES.values())
LABORATORY = (
    ROOT / "predictors/README.md",
    ROOT / "recipes/README.md",
    *sorted((ROOT / "docs/evidence").glob("*.md")),
)
ALL_TEXT = "\n".join((TEXT, *(page.read_text(encoding="utf-8") for page in LABORATORY)))
# Programs that import torch when they start. Their help is not tested.
TRAINING = ("recipes.make_lab_model", "recipes.train_deep_model", "recipes.train_demo")
GROUPS = ("trace", "contexts")  # commands that have subcommands


def blocks(language: str, text: str = TEXT) -> list[str]:
    return [
        block
        for name, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
        if name == language
    ]


def commands(prefix: str) -> list[tuple[str, ...]]:
    lines = [
        line.split("#")[0].strip()
        for block in blocks("sh", ALL_TEXT)
        for line in block.splitlines()
    ]
    inline = [
        " ".join(text.split())
        for text in re.findall(rf"`({re.escape(prefix)}[^`]*)`", TEXT)
    ]
    return sorted(
        {
            tuple(shlex.split(line))
            for line in [*lines, *inline]
            if line.startswith(prefix)
        }
    )


def test_pages_name_only_make_targets_that_exist() -> None:
    targets = set(
        re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    known = {word for line in targets for word in line.split()}
    named = {words[1] for words in commands("make ")}
    assert named
    assert named <= known


@pytest.mark.parametrize(
    "words", commands("moegguf "), ids=lambda words: " ".join(words[1:3])
)
def test_pages_name_only_moegguf_commands_and_options_that_exist(
    words: tuple[str, ...],
) -> None:
    text = help_of(*words[1:3] if words[1] in GROUPS else words[1:2])
    for word in words[2:]:
        if word.startswith("-"):
            assert re.search(rf"(^|[\s,│]){re.escape(word)}\b", text, re.MULTILINE), (
                f"{word} in {words}"
            )


LABORATORY_COMMANDS = [
    *commands("python -m predictors."),
    *commands("python -m recipes."),
]
HELP_OF_MODULES = """
import contextlib, io, json, runpy, sys
texts = {}
for line in sys.argv[1:]:
    module, *command = line.split()
    out = io.StringIO()
    sys.argv[1:] = [*command, "--help"]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    texts[line] = out.getvalue()
print(json.dumps(texts))
"""


def command_of(words: tuple[str, ...]) -> str:
    """Returns the module of a laboratory command, followed by its subcommand if it has
    one."""
    module, *rest = words[2:]
    return " ".join([module, *rest[: module.endswith(".evidence")]])


@functools.cache
def help_of_modules() -> dict[str, str]:
    """Returns the help of each laboratory command. One process prints all of them,
    because imports take longer than help."""
    asked = sorted(
        {command_of(words) for words in LABORATORY_COMMANDS if words[2] not in TRAINING}
    )
    printed = subprocess.check_output(
        [sys.executable, "-c", HELP_OF_MODULES, *asked], text=True, cwd=ROOT
    )
    texts: dict[str, str] = json.loads(printed)
    return texts


@pytest.mark.parametrize("words", LABORATORY_COMMANDS, ids=lambda words: words[2])
def test_pages_name_only_laboratory_commands_and_options_that_exist(
    words: tuple[str, ...],
) -> None:
    module, *rest = words[2:]
    assert find_spec(module)
    shown = "" if module in TRAINING else help_of_modules()[command_of(words)]
    assert module in TRAINING or "--help" in shown
    options = (
        [] if module in TRAINING else [word for word in rest if word.startswith("-")]
    )
    assert not [
        name
        for name in options
        if not re.search(rf"(^|[\s,/]){name}\b", shown, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_an_existing_file_and_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{target} in {page.name}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
                for title in headings
            }, target


def test_readme_and_architecture_keep_their_maximum_length() -> None:
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1300
    assert len(ARCHITECTURE.split()) <= 2200


def test_python_examples_compile_and_import_public_names() -> None:
    assert blocks("python")
    for block in blocks("python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "moegguf":
                import moegguf

                assert {alias.name for alias in node.names} <= set(moegguf.__all__)


def test_pages_contain_no_excuses_for_figures_and_no_placeholders() -> None:
    assert not re.search(
        r"\b(noisy|noise|quieter|busy (core|machine)|loaded machine|another day|other work)\b",
        TEXT,
    )
    assert not re.search(r"(^|[.|] )(As|Of) [a-z]", TEXT, re.MULTILINE), (
        "a sentence begins with its subject"
    )
    assert not re.search(r"\b(TODO|TABLE|TBD)\b", TEXT), "what is promised is there"


ARCHITECTURE = PAGES[ROOT / "docs" / "architecture.md"]
DRAWINGS = "\n".join(re.findall(r"```\n(.*?)```", ARCHITECTURE, re.DOTALL))


def test_architecture_names_existing_files_and_every_package() -> None:
    paths = re.findall(r"`((?:moegguf|tests|patches)/[\w./]*)`", ARCHITECTURE)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
    names = set(re.findall(r"\b[\w/]+\.(?:cpp|h|py)\b", DRAWINGS))
    assert len(names) > 5
    for name in names:
        assert (
            len(
                [
                    path
                    for path in (ROOT / "moegguf").rglob(Path(name).name)
                    if path.match(name)
                ]
            )
            == 1
        ), name
    packages = {path.parent.name for path in (ROOT / "moegguf").glob("*/__init__.py")}
    assert {
        name for name in packages if not re.search(rf"\b{name}\b", DRAWINGS)
    } == set()


DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
FILES = {path.name: path.read_text(encoding="utf-8") for path in DEPLOY.iterdir()}
LINES = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def yaml_of(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load(FILES[name])


def test_deployment_page_names_existing_paths_and_every_deploy_file() -> None:
    named = set(re.findall(r"(?<![\w/])((?:deploy|moegguf|tests)/[\w./]+\w)", PAGE))
    assert {path for path in named if not (ROOT / path).exists()} == set()
    assert {name for name in FILES if f"deploy/{name}" not in PAGE} == set()


def test_deployment_page_names_only_variables_of_serve() -> None:
    known = help_of("serve")
    text = PAGE + "".join(FILES.values())
    own = {"MOEGGUF_MEMORY_LIMIT"}  # a variable that only compose.yaml reads
    assert own <= set(re.findall(r"\$\{(\w+)", FILES["compose.yaml"]))
    assert {
        name for name in re.findall(r"\bMOEGGUF_[A-Z_]+\b", text) if name not in known
    } == own


@pytest.mark.parametrize(
    "line", [line for line in LINES if re.match(r"(serve|ray) ", line)]
)
def test_deployment_page_names_only_ray_commands_that_exist(line: str) -> None:
    pytest.importorskip("ray.serve")
    program, command, *rest = line.split()
    shown = subprocess.check_output(
        [Path(sys.executable).with_name(program), command, "--help"], text=True
    )
    assert all(word in shown for word in rest if word.startswith("--"))


def test_deployment_page_names_only_metrics_of_the_server() -> None:
    from moegguf.server.metrics import COUNTS

    known = {f"moegguf_{each.name}_total" for each in COUNTS}
    named = set(re.findall(r"\bmoegguf_\w+_total", PAGE))
    assert named and named <= known


def test_systemd_unit_is_valid() -> None:
    assert "moegguf serve" in FILES["moegguf.service"]
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    shown = subprocess.run(
        ["systemd-analyze", "verify", DEPLOY / "moegguf.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    complaints = [
        line for line in shown.stderr.splitlines() if "not executable" not in line
    ]
    assert not [line for line in complaints if "moegguf.service" in line]


def test_dockerfile_matches_the_compose_file_and_serve_options() -> None:
    service = yaml_of("compose.yaml")["services"]["moegguf"]
    assert (
        DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]
    ).is_file()
    assert (
        service["volumes"] == ["models:/models"]
        and "VOLUME /models" in FILES["Dockerfile"]
    )
    assert service["mem_limit"] == service["memswap_limit"]
    command = re.findall(r'"([^"]+)"', FILES["Dockerfile"].partition("CMD ")[2])
    assert command[:2] == ["moegguf", "serve"]
    shown = help_of("serve")
    assert all(word in shown for word in command if word.startswith("--"))


def test_prometheus_scrapes_the_service_with_its_key() -> None:
    compose, (scrape,) = (
        yaml_of("compose.yaml"),
        yaml_of("prometheus.yml")["scrape_configs"],
    )
    assert scrape["static_configs"][0]["targets"] == ["moegguf:11434"]
    assert (
        scrape["authorization"]["credentials_file"]
        == f"/run/secrets/{compose['services']['prometheus']['secrets'][0]}"
    )
    assert "./prometheus.yml:" in compose["services"]["prometheus"]["volumes"][0]


def test_ray_config_is_accepted_by_read_config() -> None:
    config = yaml_of("ray.yaml")
    (application,) = config["applications"]
    assert application["import_path"] in PAGE
    assert len(read_config(application["args"])) == 2


def test_ray_config_is_accepted_by_ray() -> None:
    pytest.importorskip("ray.serve")
    from ray.serve import Application
    from ray.serve.schema import ServeDeploySchema

    from moegguf.serving.ray import app

    config = ServeDeploySchema.model_validate(yaml_of("ray.yaml"))
    assert isinstance(app(config.applications[0].args), Application)
