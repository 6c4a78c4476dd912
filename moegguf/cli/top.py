"""`moegguf top`: what a running server's models do, live in a terminal, or once for scripts.

Reads `/live` on a thread of its own and draws twice a second. How it looks lies in top_screen.py.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moegguf.cli.client import Client
    from moegguf.cli.top_screen import Model

PER_S = 2
SILENCE_S = 20.0  # the server shows that it is there every few seconds
KEYS = "q quits"


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One look as JSON on stdout, for scripts.")] = False,
) -> None:
    """Watch the experts of the models that a running server has loaded."""
    from moegguf.cli.client import Client

    client = Client()
    if as_json:
        print_as_json(client)
    elif once or not sys.stdout.isatty():
        print_frame(client)
    else:
        watch(client)


def print_as_json(client: Client) -> None:
    """Every model's figures, its plan, and its experts as a digit each: 0 absent, 1 on its way, 2 there."""
    from moegguf.cli.top_screen import state_rows
    from moegguf.terminal.tables import print_json

    models = client.get("/live?once=1")["models"]
    for model in models:
        view = model.pop("snapshot")
        experts = {name: view[name] for name in ("layers", "n_expert")} | {"state": state_rows(view)} if view else None
        model |= {"tokens_per_s": view["tokens_per_s"] if view else 0.0, "experts": experts}
    print_json({"server": client.host.url, "models": models})


def print_frame(client: Client) -> None:
    """One frame on stdout, however high."""
    from moegguf.cli.top_screen import Model, Screen
    from moegguf.terminal.tables import make_console, print_part

    models = []
    for facts in client.get("/live?once=1")["models"]:
        models.append(Model(facts["name"]))
        models[-1].take(facts, facts["snapshot"])
    print_part(make_console(), Screen(client.host.url, models, height=None))


def watch(client: Client) -> None:
    """Draws until `q`, Ctrl-C, or until the server has gone, which raises NoServerError."""
    from rich.console import Console
    from rich.live import Live

    from moegguf.cli.top_screen import Screen

    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    first = start_reading(client, lines)
    models: dict[str, Model] = {}
    take_line(models, first)
    console = Console(highlight=False)

    def frame() -> Screen:
        return Screen(client.host.url, models.values(), height=console.height, keys=KEYS)

    with key_reader() as quit_pressed, Live(frame(), console=console, screen=True, auto_refresh=False) as live:
        try:
            while not quit_pressed(1 / PER_S):
                take_lines(models, lines)
                live.update(frame(), refresh=True)
                for model in models.values():
                    model.shown()
        except KeyboardInterrupt:
            return


def start_reading(client: Client, lines: queue.SimpleQueue[Any]) -> Any:
    """The first line of `/live`; the others go to `lines` as they come, and then the error that ended them."""
    from moegguf.cli.client import NoServerError
    from moegguf.errors import MoeggufError

    stream = client.stream(f"/live?per_s={PER_S}", timeout_s=SILENCE_S)
    first = next(stream)

    def read() -> None:
        try:
            for line in stream:
                lines.put(line)
            lines.put(NoServerError(f"the server at {client.host.url} has gone."))
        except MoeggufError as error:
            lines.put(error)

    threading.Thread(target=read, name="moegguf-top", daemon=True).start()
    return first


def take_lines(models: dict[str, Model], lines: queue.SimpleQueue[Any]) -> None:
    """What has come since; raises the error that ended the stream."""
    while not lines.empty():
        line = lines.get()
        if isinstance(line, Exception):
            raise line
        take_line(models, line)


def take_line(models: dict[str, Model], line: dict[str, Any]) -> None:
    """A view, or the names of the models that are loaded."""
    from moegguf.cli.top_screen import Model

    if "loaded_models" in line:
        for name in line["loaded_models"]:
            models.setdefault(name, Model(name))
        for name in models.keys() - set(line["loaded_models"]):
            del models[name]
    elif line["model"] in models:
        models[line["model"]].take(line["loaded"], line)


@contextmanager
def key_reader() -> Iterator[Any]:
    """`quit_pressed(seconds)`: waits so long, or until `q`. Keys are read one by one while it lasts."""
    try:
        import select
        import termios
        import tty
    except ImportError:
        tty = None  # type: ignore[assignment]
    if tty is None or sys.stdin is None or not sys.stdin.isatty():  # no keys to be read: Ctrl-C quits
        yield time.sleep
        return

    def quit_pressed(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        keys = os.read(descriptor, 64) if ready else b" "
        return not keys or b"q" in keys.lower()  # no keys: the terminal has gone

    descriptor = sys.stdin.fileno()
    settings = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield quit_pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)
