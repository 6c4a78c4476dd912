"""Tests `moegguf launch`: the settings for each client program, and the server that it
starts if none is running."""

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from servers import Command, Server, environment
from terminal import moegguf_command

from moegguf.cli.launch import KEY_PLACEHOLDER
from moegguf.cli.launch_clients import CLIENTS, NO_KEY, Target

TARGET = Target("http://127.0.0.1:11434", "hf.co/user/repo:Q4_K_M", "secret")
STARTED = [name for name, client in CLIENTS.items() if client.start]

# A program that prints its arguments and its environment as JSON. If ANTHROPIC_BASE_URL
# is set, it also prints the server's list of models. Its exit code is 7.
PROGRAM = f"""#!{sys.executable}
import json, os, sys, urllib.request
url = os.environ.get("ANTHROPIC_BASE_URL")
models = json.load(urllib.request.urlopen(url + "/api/tags")) if url else None
print(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ), "models": models}}))
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """Writes a copy of PROGRAM under the command name of each client that `launch` can
    start. Returns a PATH that begins with the folder of these copies.
    """
    for name in STARTED:
        file = tmp_path / CLIENTS[name].command
        file.write_text(PROGRAM)
        file.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def launched(*words: object, **extra: str) -> tuple[int, dict[str, object], str]:
    """Runs `moegguf launch`. Returns its exit code, the object that the program
    printed, and stderr."""
    command = moegguf_command("launch", *words)
    done = subprocess.run(
        command, env=environment(**extra), capture_output=True, text=True, timeout=90
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("name", STARTED)
def test_each_client_gets_the_address_the_model_and_the_key(name: str) -> None:
    start = CLIENTS[name].start
    assert start is not None
    said = json.dumps([start(TARGET).environment, start(TARGET).arguments])
    for words in (TARGET.url, TARGET.key):
        assert words in said
    # open-webui reads the list of models itself.
    assert TARGET.model in said or name == "open-webui"


def test_codex_gets_toml_settings_and_opencode_gets_json() -> None:
    codex, opencode = CLIENTS["codex"].start, CLIENTS["opencode"].start
    assert codex and opencode
    settings = tomllib.loads("\n".join(codex(TARGET).arguments[1::2]))
    assert settings["model_provider"] in settings["model_providers"]
    provider = settings["model_providers"]["moegguf"]
    assert provider["base_url"] == TARGET.openai_url and codex(TARGET).environment == {
        provider["env_key"]: TARGET.key
    }
    config = json.loads(opencode(TARGET).environment["OPENCODE_CONFIG_CONTENT"])
    provider_id, _, model = config["model"].partition("/")
    assert model in config["provider"][provider_id]["models"]


@pytest.mark.parametrize("name", CLIENTS)
def test_config_prints_settings_without_the_key(here: Command, name: str) -> None:
    done = here(
        "launch",
        name,
        "--config",
        "-m",
        "demo",
        MOEGGUF_API_KEY="hidden",
        MOEGGUF_HOST="127.0.0.1:9",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "http://127.0.0.1:9" in done.stdout and "hidden" not in done.stdout
    assert KEY_PLACEHOLDER in done.stdout
    for word in done.stdout.splitlines():
        assert "PATH=" not in word


def test_launch_with_a_running_server_passes_arguments_and_exit_code(
    server: Server, programs: str
) -> None:
    code, said, stderr = launched(
        "claude",
        "-m",
        "demo",
        "--",
        "-p",
        "a b",
        MOEGGUF_HOST=server.url,
        PATH=programs,
    )
    assert (code, stderr, said["arguments"]) == (7, "", ["-p", "a b"])
    environ = said["environment"]
    assert isinstance(environ, dict)
    assert (
        environ["ANTHROPIC_MODEL"] == "demo:latest"
        and environ["ANTHROPIC_AUTH_TOKEN"] == NO_KEY
    )
    assert environ["ANTHROPIC_BASE_URL"] == server.url


def test_launch_starts_a_server_that_ends_with_the_program(
    programs: str, tmp_path: Path
) -> None:
    port, home = free_port(), tmp_path / "home"
    address = {"MOEGGUF_HOST": f"127.0.0.1:{port}", "MOEGGUF_HOME": str(home)}
    code, said, stderr = launched("claude", **address, PATH=programs)
    assert code == 7 and "demo:latest" in json.dumps(said["models"])
    assert stderr.startswith(f"starting a server at http://127.0.0.1:{port}")
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    assert list(home.rglob("launch.log"))


def test_launch_with_a_missing_program_or_a_path_names_the_next_step(
    here: Command, server: Server, programs: str, tmp_path: Path
) -> None:
    done = here("launch", "claude", PATH="/nowhere")
    assert done.returncode == 1 and "moegguf launch claude --config" in done.stderr
    assert "known programs: claude, codex" in here("launch", "nobody").stderr
    path = Path(__file__).parents[2] / "moegguf/demo/moegguf-demo-Q4_0.gguf"
    done = here("launch", "claude", "-m", path, MOEGGUF_HOST=server.url, PATH=programs)
    assert done.returncode == 1 and "moegguf create" in done.stderr


def test_settings_for_a_model_that_the_server_lacks_come_with_a_warning(
    here: Command, server: Server
) -> None:
    ask = ("launch", "claude", "--config", "-m")
    done = here(*ask, "nosuch", MOEGGUF_HOST=server.url)
    assert done.returncode == 0 and "has no model named 'nosuch'" in done.stderr
    assert not here(*ask, "demo", MOEGGUF_HOST=server.url).stderr
    assert not here(*ask, "nosuch").stderr  # no server is running


def test_launch_uses_the_models_of_a_server_with_other_folders(
    here: Command, server: Server, programs: str, tmp_path: Path
) -> None:
    own = {
        "MOEGGUF_HOST": server.url,
        "PATH": programs,
        "MOEGGUF_MODELS": str(tmp_path / "models"),
    }
    (tmp_path / "models").mkdir()
    _, said, _ = launched("claude", "-m", "tiny", **own)
    environ = said["environment"]
    assert isinstance(environ, dict) and environ["ANTHROPIC_MODEL"] == "tiny:latest"
    demo = Path(__file__).parents[2] / "moegguf/demo/moegguf-demo-Q4_0.gguf"
    (tmp_path / "models/mine.gguf").symlink_to(demo)
    done = here("launch", "claude", "-m", "mine", **own)
    assert done.returncode == 1 and not done.stdout
    assert f"{server.url} does not have the model 'mine:latest'" in " ".join(
        done.stderr.split()
    )


def test_sigterm_ends_the_program_and_the_started_server(
    programs: str, tmp_path: Path
) -> None:
    waiting = tmp_path / CLIENTS["claude"].command
    waiting.write_text(
        f"#!{sys.executable}\nimport time\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    port = free_port()
    names = {
        "MOEGGUF_HOST": f"127.0.0.1:{port}",
        "MOEGGUF_HOME": str(tmp_path / "home"),
        "PATH": programs,
    }
    with subprocess.Popen(moegguf_command("launch", "claude"), env=environment(**names), stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
