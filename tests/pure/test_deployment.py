"""docs/deployment.md and deploy/: commands, variables, paths and options exist, and the config files are valid."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_help import help_of

from moegguf.serving.ray.config import read_config

ROOT = Path(__file__).resolve().parents[2]
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


def test_every_path_on_the_page_exists_and_every_file_is_on_it() -> None:
    named = set(re.findall(r"(?<![\w/])((?:deploy|moegguf|tests)/[\w./]+\w)", PAGE))
    assert {path for path in named if not (ROOT / path).exists()} == set()
    assert {name for name in FILES if f"deploy/{name}" not in PAGE} == set()


def test_every_variable_is_one_of_the_servers() -> None:
    known = help_of("serve")
    text = PAGE + "".join(FILES.values())
    own = {"MOEGGUF_MEMORY_LIMIT"}  # of compose.yaml
    assert own <= set(re.findall(r"\$\{(\w+)", FILES["compose.yaml"]))
    assert {name for name in re.findall(r"\bMOEGGUF_[A-Z_]+\b", text) if name not in known} == own


@pytest.mark.parametrize("line", [line for line in LINES if re.match(r"(moegguf|make) ", line)])
def test_commands_of_ours_exist(line: str) -> None:
    program, command, *_ = line.split()
    if program == "make":
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        help_of(command)


@pytest.mark.parametrize("line", [line for line in LINES if re.match(r"(serve|ray) ", line)])
def test_commands_of_ray_exist(line: str) -> None:
    pytest.importorskip("ray.serve")
    program, command, *rest = line.split()
    shown = subprocess.check_output([Path(sys.executable).with_name(program), command, "--help"], text=True)
    assert all(word in shown for word in rest if word.startswith("--"))


def test_the_metrics_on_the_page_are_those_of_the_server() -> None:
    from moegguf.server.metrics import COUNTS

    known = {f"moegguf_{each.name}_total" for each in COUNTS}
    named = set(re.findall(r"\bmoegguf_\w+_total", PAGE))
    assert named and named <= known


def test_the_unit_is_valid() -> None:
    assert "moegguf serve" in FILES["moegguf.service"]
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    shown = subprocess.run(
        ["systemd-analyze", "verify", DEPLOY / "moegguf.service"], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in shown.stderr.splitlines() if "not executable" not in line]
    assert not [line for line in complaints if "moegguf.service" in line]


def test_the_image_has_what_the_compose_file_mounts() -> None:
    service = yaml_of("compose.yaml")["services"]["moegguf"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["volumes"] == ["models:/models"] and "VOLUME /models" in FILES["Dockerfile"]
    assert service["mem_limit"] == service["memswap_limit"]
    command = re.findall(r'"([^"]+)"', FILES["Dockerfile"].partition("CMD ")[2])
    assert command[:2] == ["moegguf", "serve"]
    shown = help_of("serve")
    assert all(word in shown for word in command if word.startswith("--"))


def test_prometheus_scrapes_the_service_with_its_key() -> None:
    compose, (scrape,) = yaml_of("compose.yaml"), yaml_of("prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["moegguf:11434"]
    assert (
        scrape["authorization"]["credentials_file"] == f"/run/secrets/{compose['services']['prometheus']['secrets'][0]}"
    )
    assert "./prometheus.yml:" in compose["services"]["prometheus"]["volumes"][0]


def test_the_config_of_ray_is_one_of_ours() -> None:
    config = yaml_of("ray.yaml")
    (application,) = config["applications"]
    assert application["import_path"] in PAGE
    assert len(read_config(application["args"])) == 2


def test_the_config_of_ray_is_one_of_rays() -> None:
    pytest.importorskip("ray.serve")
    from ray.serve import Application
    from ray.serve.schema import ServeDeploySchema

    from moegguf.serving.ray import app

    config = ServeDeploySchema.model_validate(yaml_of("ray.yaml"))
    assert isinstance(app(config.applications[0].args), Application)
