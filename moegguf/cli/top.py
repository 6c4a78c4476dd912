"""`moegguf top`: shows the models of a running server, live in a terminal, or once for
scripts.

The screen (top_screen.py) is redrawn for each line that the server sends on `/live`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegguf.cli.options import AsJson

if TYPE_CHECKING:
    from moegguf.chat.client import Client
    from moegguf.cli.top_screen import ModelView

FRAMES_PER_S = 2  # requested snapshots per second of each model
# Seconds to wait for a line; the server sends at least one every few seconds.
STREAM_TIMEOUT_S = 20.0


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch the experts of the models that a running server has loaded."""
    from moegguf.chat.client import Client

    client = Client()
    if as_json or once or not sys.stdout.isatty():
        print_once(client, as_json=as_json)
    else:
        watch(client)


def print_once(client: Client, *, as_json: bool) -> None:
    """Prints one frame with every layer, or with `as_json` the statistics, plan and
    experts of each model as JSON.

    In JSON an expert is a digit: 0 on disk, 1 in flight, 2 in RAM, 3 in VRAM.
    """
    from moegguf.chat.experts import maps_of
    from moegguf.cli.top_screen import ModelView, Screen
    from moegguf.terminal.tables import print_json, print_renderable

    models, views = client.get("/live?once=1")["models"], []
    for model in models:
        views.append(view := ModelView(model["name"]))
        view.update(dict(model), model.pop("snapshot"))
        experts, now = None, view.snapshot
        if now is not None:
            digits = ["".join(map(str, row)) for row in maps_of(now)[0]]
            experts = {"layers": now.layers, "n_expert": now.n_expert, "state": digits}
        model |= {"tokens_per_s": now.tokens_per_s if now else 0.0, "experts": experts}
    if as_json:
        print_json({"server": client.host.url, "models": models})
    else:
        print_renderable(Screen(client.host.url, views, height=None))


def watch(client: Client) -> None:
    """Draws the screen for each line of `/live`, until `q` or Ctrl-C is pressed. Raises
    NoServerError if there is no server or the connection is lost."""
    from rich.console import Console
    from rich.live import Live

    from moegguf.cli.top_screen import Screen

    models: dict[str, ModelView] = {}
    stream = client.stream(f"/live?per_s={FRAMES_PER_S}", timeout_s=STREAM_TIMEOUT_S)
    apply_line(models, next(stream))
    console = Console(highlight=False)

    def frame() -> Screen:
        return Screen(
            client.host.url, models.values(), height=console.height, keys="q quits"
        )

    live = Live(frame(), console=console, screen=True, auto_refresh=False)
    try:
        with interrupt_on_q():
            # No `with`, since after Ctrl-C in start() nothing would call stop().
            live.start()
            for line in stream:
                apply_line(models, line)
                live.update(frame(), refresh=True)
        raise client.lost_connection()
    except KeyboardInterrupt:
        return
    finally:
        live.stop()


def apply_line(models: dict[str, ModelView], line: dict[str, Any]) -> None:
    """Updates `models` with a line of `/live`: a snapshot of one model, or the list of
    loaded models."""
    from moegguf.cli.top_screen import ModelView

    if "loaded_models" in line:
        for name in line["loaded_models"]:
            models.setdefault(name, ModelView(name))
        for name in models.keys() - set(line["loaded_models"]):
            del models[name]
    elif line["model"] in models:
        models[line["model"]].update(line["loaded"], line)


@contextmanager
def interrupt_on_q() -> Iterator[None]:
    """Context manager in which the key `q` raises KeyboardInterrupt, as Ctrl-C does.
    Does nothing if stdin is not a terminal."""
    # Keys cannot be read, so only Ctrl-C quits.
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    from moegguf.terminal.keyboard import keyboard_echo_off

    def read_keys() -> None:
        # b"" (terminal closed) also ends the loop.
        while os.read(sys.stdin.fileno(), 1) not in b"qQ":
            pass
        # Interrupts the main thread, which waits for a line.
        os.kill(os.getpid(), signal.SIGINT)

    with keyboard_echo_off():
        threading.Thread(target=read_keys, name="moegguf-keys", daemon=True).start()
        yield
