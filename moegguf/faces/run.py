"""`moegguf run`: one answer on stdout, or a chat when nothing was asked and someone is there to talk to.

stdout gets the answer and a newline; figures and complaints go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moegguf.faces.messages import STOPPED, say
from moegguf.faces.opening import LoadOptions, find_or_pull, load
from moegguf.faces.progress import Spinner

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.faces.chat.conversation import Conversation

PATIENCE_S = 1.0  # for an answer that was interrupted
SCHEMA_BYTES = 1 << 20
THINK_WORDS = {"true": True, "false": False}
THINK_LEVELS = ("low", "medium", "high", "max")


@dataclass(frozen=True)
class RunOptions:
    """What the command line says besides the model and the prompt. `parameters`: by Ollama's names."""

    opening: LoadOptions = field(default_factory=LoadOptions)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    format: str | Mapping[str, Any] | None = None
    think: bool | str | None = None
    hide_thinking: bool = False
    word_wrap: bool = True
    keep_alive: str | None = None


def run(model: str, words: Sequence[str], options: RunOptions) -> int:
    """Answers the prompt, or talks when there is none. An empty prompt loads the model in a running server.

    Returns the exit code.
    """
    prompt = read_prompt(words)
    if prompt == "":
        return preload(model, options.keep_alive)
    conversation = begin(model, options)
    with Spinner() as spinner:
        llm, load_s = load(conversation.entry.path, conversation.opening(), spinner)
        if prompt is not None:
            return answer(llm, conversation, prompt, load_s, spinner)
    from moegguf.faces.chat.chat import Chat

    return Chat(llm, conversation, load_s).talk()


def begin(model: str, options: RunOptions) -> Conversation:
    """A conversation with a model, which is fetched first when it has to be."""
    entry = find_or_pull(model)
    from moegguf.faces.chat.conversation import Conversation
    from moegguf.settings import read_settings

    given = dict(options.parameters)
    if (n_ctx := read_settings().n_ctx) and "num_ctx" not in entry.parameters:
        given.setdefault("num_ctx", n_ctx)
    return Conversation(
        entry,
        options.opening,
        given,
        system=options.system,
        format=options.format,
        think=options.think,
        hide_thinking=options.hide_thinking,
        word_wrap=options.word_wrap,
        verbose=options.opening.verbose > 0,
    )


def read_prompt(words: Sequence[str]) -> str | None:
    """What was piped in and the words, joined by a space; None when there is neither and a person sits at the terminal.

    "" when the words are there and empty. Raises BadParameter when nothing was asked and nobody can be asked.
    """
    piped, terminal = "", False
    if sys.stdin is not None and not sys.stdin.closed:
        terminal = sys.stdin.isatty()
        if not terminal:
            piped = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    parts = [part for part in (piped.rstrip("\n"), " ".join(words)) if part.strip()]
    if parts:
        return " ".join(parts)
    if words:
        return ""
    if terminal and sys.stdout.isatty():
        return None
    raise typer.BadParameter('there is no prompt: write one, as in `moegguf run demo "hello"`, or pipe one in')


def preload(model: str, keep_alive: str | None) -> int:
    """Has a running server load the model, and keep it for `keep_alive`."""
    from moegguf.faces.client import Client
    from moegguf.models.names import parse_name

    body: dict[str, Any] = {"model": parse_name(model).canonical, "prompt": "", "stream": False}
    if keep_alive is not None:
        body["keep_alive"] = keep_alive
    Client().post("/api/generate", body)
    return 0


def answer(llm: Llama, conversation: Conversation, prompt: str, load_s: float, spinner: Spinner) -> int:
    """Writes the answer to `prompt` on stdout, then the statistics when asked for; closes the model."""
    from moegguf.faces.chat.printer import Printer
    from moegguf.faces.chat.turn import write_answer

    conversation.say(prompt)
    printer = Printer(wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking)
    reply = write_answer(llm, conversation.ask(), printer, spinner, patience_s=PATIENCE_S)
    printer.end()
    if conversation.verbose and not reply.error:
        from moegguf.faces.statistics import statistics

        say("\n" + "\n".join(statistics(reply.timing, load_s, llm.decisions())))
    llm.close()
    if reply.error is not None:
        raise reply.error
    return STOPPED if reply.interrupted else 0


def parse_think(text: str) -> bool | str:
    """True, False or a level. Raises BadParameter for other words."""
    word = text.strip().lower()
    if word in THINK_WORDS:
        return THINK_WORDS[word]
    if word not in THINK_LEVELS:
        raise typer.BadParameter(f"--think takes true, false, {', '.join(THINK_LEVELS)}, but is {text[:40]!r}")
    return word


def parse_format(text: str) -> str | Mapping[str, Any]:
    """ "json", or a JSON schema: itself or the name of its file. Raises BadParameter for anything else."""
    if text.strip() == "json":
        return "json"
    source = text
    if not text.lstrip().startswith("{"):
        try:
            with Path(text).expanduser().open("rb") as file:
                source = file.read(SCHEMA_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise typer.BadParameter(
                f"--format takes json, a JSON schema or the name of a file with one, but is {text[:60]!r} ({error})"
            ) from None
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"--format: the schema is not JSON ({error})") from None
    if not isinstance(schema, dict):
        raise typer.BadParameter('--format: a schema is a JSON object, such as \'{"type": "object"}\'')
    return schema
