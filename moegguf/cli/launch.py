"""`moegguf launch`: starts a coding agent or a chat program that uses a model of the
server at MOEGGUF_HOST."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from moegguf.cli.launch_clients import CLIENTS, NO_KEY, LaunchClient, Target
from moegguf.cli.options import argument, complete_model
from moegguf.errors import MoeggufError, OptionError
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.client import Client

START_S = 30.0  # seconds within which a started server must answer
STOP_S = 10.0  # seconds that the server has to end after SIGTERM before it is killed
POLL_S = 0.1
SHOW_S = 30.0  # seconds within which the server must say whether it has a model
NOT_FOUND = 404  # HTTP status
LOG = "launch.log"
KEY_PLACEHOLDER = "YOUR_KEY"  # printed in place of an API key

Name = Annotated[
    str | None, argument("NAME", "The program. Without NAME, the programs are listed.")
]
Words = Annotated[
    list[str] | None, argument("WORDS", "The program's own arguments, after `--`.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", autocompletion=complete_model,
        help="The model, which is fetched if it is missing.  [default: the loaded model, or the newest]",
    ),
]  # fmt: skip
Config = Annotated[
    bool,
    typer.Option("--config", help="Print the program's settings and start nothing."),
]


def launch(
    name: Name = None,
    words: Words = None,
    model: ModelName = None,
    config: Config = False,
) -> int:
    """Start a coding agent or a chat program with a model of this server.

    If no server is running, one is started for the session. The files of other programs
    are not changed: settings are passed in the environment, or printed for you to
    paste.
    """
    if name is None:
        for known, each in CLIENTS.items():
            print(
                f"{known:<12}{each.title}{'' if each.start else ' (prints its settings)'}"
            )
        return 0
    if name not in CLIENTS:
        raise typer.BadParameter(
            f"there is no program {name!r}; known programs: {', '.join(CLIENTS)}",
            param_hint="NAME",
        )
    from moegguf.chat.client import Client

    program, client = CLIENTS[name], Client()
    if program.start is None or config:
        _print_settings(program, _target(client, model, to_print=True))
        return 0
    if (path := shutil.which(program.command)) is None:
        raise OptionError(
            f"{program.title} is not installed: {program.command!r} is not on PATH. Install it, or see its settings"
            f" with `moegguf launch {name} --config`."
        )
    with _running(client):
        start = program.start(_target(client, model, to_print=False))
        environment = {**os.environ, **start.environment}
        before = signal.signal(signal.SIGINT, _leave_to_program)
        try:
            return subprocess.run(
                [path, *start.arguments, *(words or ())], env=environment
            ).returncode
        finally:
            signal.signal(signal.SIGINT, before)


def _leave_to_program(*_: object) -> None:
    """Does nothing on Ctrl-C: the started program also receives the signal and handles
    it."""


def _target(client: Client, model: str | None, *, to_print: bool) -> Target:
    """Returns the server, the model and the key for a program. With `to_print`, a
    placeholder replaces the API key. Otherwise, if the server is on this machine and
    lacks `model`, fetches the model."""
    key = client.api_key or NO_KEY
    if to_print and client.api_key:
        key = KEY_PLACEHOLDER
    if model is None:
        model = _default_model(client)
    elif to_print:
        _warn_if_missing(client, model)
    elif client.host.is_loopback:
        model = _name_on_server(client, model)
    return Target(client.host.url, model, key)


def _name_on_server(client: Client, model: str) -> str:
    """Returns the name under which a server on this machine finds a model. If the
    server does not have the model, fetches it, unless this user has it. Raises
    OptionError for a path, and if the server does not have the model afterwards,
    because it uses other folders. Also raises the errors of `find_or_pull`, and
    ServerError."""
    from moegguf.models.names import name_or_none
    from moegguf.terminal.loading import find_or_pull

    name = name_or_none(model)
    if name is not None and _has_model(client, name.canonical):
        return name.canonical
    entry = find_or_pull(model)
    if entry.source == "path":
        raise OptionError(
            f"a server finds models by name, but {model!r} is a path; give the file a name with `moegguf create`."
        )
    if not _has_model(client, entry.name):
        raise OptionError(
            f"the server at {client.host.url} does not have the model {entry.name!r}, because it uses other folders"
            " than this command; start it with the same MOEGGUF_HOME and MOEGGUF_MODELS, or choose one of its models."
        )
    return entry.name


def _warn_if_missing(client: Client, model: str) -> None:
    """Prints a warning if the running server, if any, does not have the model."""
    from moegguf.chat.client import NoServerError

    with suppress(NoServerError):
        if not _has_model(client, model):
            print_message(
                f"warning: the server at {client.host.url} has no model named {model!r}; `moegguf list` lists"
                " the models."
            )


def _has_model(client: Client, name: str) -> bool:
    from moegguf.chat.client import ServerError

    try:
        client.post("/api/show", {"model": name}, SHOW_S)
    except ServerError as error:
        if error.status != NOT_FOUND:
            raise
        return False
    return True


def _default_model(client: Client) -> str:
    """Returns the name of a model that the server has loaded, or of the server's newest
    model if none is loaded. If the server does not answer, returns the name of the
    newest model on this machine. Returns the demo only if the list from which the name
    is taken has no other model."""
    from moegguf.models.catalog import Catalog
    from moegguf.models.sources import DEMO_NAME

    try:
        loaded = client.get("/api/ps")["models"]
        names = [
            str(each["name"]) for each in loaded or client.get("/api/tags")["models"]
        ]
    except MoeggufError:  # settings can also be printed if no server is running
        names = [entry.name for entry in Catalog().entries()]
    own = [name for name in names if name.partition(":")[0] != DEMO_NAME]
    return [*own, *names, DEMO_NAME][0]


def _print_settings(program: LaunchClient, target: Target) -> None:
    if program.settings is not None:
        print(program.settings(target), end="")
    if program.start is not None:
        start = program.start(target)
        for name, value in start.environment.items():
            print(f"export {name}={shlex.quote(value)}")
        print(shlex.join([program.command, *start.arguments]))


@contextmanager
def _running(client: Client) -> Iterator[None]:
    """Context manager that uses the server at the client's address, or starts a server
    there for the duration of the block. Raises OptionError or ServerError if the server
    at the address is not moegguf, and OptionError if a server does not start. Raises
    NoServerError if no server answers and the address is not a loopback address."""
    from moegguf.chat.client import NoServerError

    try:
        version = client.get("/api/version")
    except NoServerError:
        with _started(client):
            yield
        return
    if "moegguf" not in version:
        raise OptionError(
            f"the server at {client.host.url} is not moegguf; stop it, or set MOEGGUF_HOST to another address."
        )
    yield


@contextmanager
def _started(client: Client) -> Iterator[None]:
    from moegguf.child import child_command, child_environment
    from moegguf.settings import data_folder

    if not client.host.is_loopback:
        raise client.no_server()
    log = data_folder() / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    print_message(
        f"starting a server at {client.host.url}, which ends with this command (its log: {log})"
    )
    with log.open("wb") as file:
        server = subprocess.Popen(
            [*child_command("moegguf"), "serve"], env=child_environment(), stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    # SIGTERM also stops the server.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait(client, server)
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(client: Client, server: subprocess.Popen[bytes]) -> None:
    """Waits until the server answers. Raises OptionError if the server's process ends,
    or if the server does not answer within START_S seconds."""
    from moegguf.settings import data_folder

    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and server.poll() is None:
        try:
            client.get("/api/version", POLL_S * 10)
            return
        except MoeggufError:
            time.sleep(POLL_S)
    raise OptionError(
        f"the server did not start; see {data_folder() / LOG} for the reason."
    )
