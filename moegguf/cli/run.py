"""`moegguf run`: one answer on stdout, or a chat when there is no prompt and stdin and stdout are a terminal.

stdout gets the answer and a newline; statistics and errors go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from moegguf.cli.options import Cache, Ctx, Insecure, Model, Threads
from moegguf.terminal.arguments import parse_format, parse_think
from moegguf.terminal.loading import LoadOptions, find_or_pull, load
from moegguf.terminal.messages import EXIT_INTERRUPTED, print_message
from moegguf.terminal.progress import Spinner

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.llama import Llama


EXIT_TIMEOUT_S = 1.0  # after Ctrl-C during an answer


def read_prompt(words: Sequence[str]) -> str | None:
    """Piped input and `words`, joined by a space; None when there is neither and stdin and stdout are a terminal.

    "" when `words` are blank. Raises BadParameter when there is no prompt and no terminal.
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


def load_in_server(model: str, keep_alive: str | None) -> int:
    """Loads the model in a running server, which keeps it for `keep_alive`."""
    from moegguf.cli.client import Client
    from moegguf.models.names import parse_name

    body: dict[str, Any] = {"model": parse_name(model).canonical, "prompt": "", "stream": False}
    if keep_alive is not None:
        body["keep_alive"] = keep_alive
    Client().post("/api/generate", body)
    return 0


def answer_once(llm: Llama, conversation: Conversation, prompt: str, load_s: float, spinner: Spinner) -> int:
    """Prints the answer to `prompt`, then statistics if verbose; closes the model. Returns the exit code."""
    from moegguf.chat.image_files import extract_images
    from moegguf.chat.printer import Printer
    from moegguf.chat.turn import write_answer

    if llm.reads_images:
        conversation.add_user_message(*extract_images(prompt))
    else:
        conversation.add_user_message(prompt)
    printer = Printer(wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking)
    reply = write_answer(llm, conversation.request(), printer, spinner, exit_timeout_s=EXIT_TIMEOUT_S)
    printer.end()
    if conversation.verbose and not reply.error:
        from moegguf.terminal.statistics import statistics

        print_message("\n" + "\n".join(statistics(reply.timing, load_s, llm.decisions())))
    llm.close()
    if reply.error is not None:
        raise reply.error
    return EXIT_INTERRUPTED if reply.interrupted else 0


THINK = "--think"

Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT", help='The prompt, after piped input. "" only loads the model in a running server.'
    ),
]
Policy = Annotated[
    str,
    typer.Option("--policy", metavar="NAME", help="Eviction policy: auto (the best measured one, else lru) or a name."),
]
Predictor = Annotated[
    str | None,
    typer.Option("--predictor", metavar="NAME", help="Expert predictor, such as skip or eamc.  [default: as measured]"),
]
Prefetch = Annotated[
    bool | None,
    typer.Option("--prefetch/--no-prefetch", help="Fetch predicted experts ahead while that saves time."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Longest answer.  [default: until it ends]"),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token.  [default: the model's, or 0.8]"),
]
Mmproj = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The model's projector for images.  [default: the one beside the model]"),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Random seed.  [default: random]")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")]
Format = Annotated[
    str | None, typer.Option("--format", metavar="json|SCHEMA", help="The answer is JSON, or follows a JSON schema.")
]
Think = Annotated[
    str | None,
    typer.Option(THINK, metavar="[=LEVEL]", help="Thinking: true (alone), false, low, medium, high or max."),
]
HideThinking = Annotated[bool, typer.Option("--hidethinking", help="Do not show the thinking.")]
NoWordWrap = Annotated[bool, typer.Option("--nowordwrap", help="Leave long lines to the terminal.")]
KeepAlive = Annotated[
    str | None,
    typer.Option("--keepalive", metavar="TIME", help='How long a server keeps it, with the prompt "".'),
]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Statistics on stderr; twice: llama.cpp's log too."
    ),
]


class RunCommand(TyperCommand):
    """Accepts `--think` without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses `args` with `--think` completed."""
        return super().parse_args(ctx, with_think_value(args))


def with_think_value(arguments: list[str]) -> list[str]:
    """`--think` alone becomes `--think=true`; arguments after `--` are not changed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [f"{THINK}=true" if i < end and word == THINK else word for i, word in enumerate(arguments)]


def run(
    model: Model,
    prompt: Prompt = None,
    expert_cache: Cache = None,
    policy: Policy = "auto",
    predictor: Predictor = None,
    prefetch: Prefetch = None,
    threads: Threads = None,
    ctx: Ctx = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    mmproj: Mmproj = None,
    system: System = None,
    output_format: Format = None,
    think: Think = None,
    hide_thinking: HideThinking = False,
    no_word_wrap: NoWordWrap = False,
    keep_alive: KeepAlive = None,
    insecure: Insecure = False,
    verbose: Verbose = 0,
) -> int:
    """Answer PROMPT on stdout; without one, chat.

    Everything that is not the answer goes to stderr.
    """
    load_options = LoadOptions(
        expert_cache, verbose=verbose, policy=policy, predictor=predictor, prefetch=prefetch, mmproj=mmproj
    )
    flags = {
        "num_ctx": ctx, "num_thread": threads, "num_predict": max_tokens, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    parameters = {name: value for name, value in flags.items() if value is not None}
    settings = {
        "system": system,
        "format": None if output_format is None else parse_format(output_format),
        "think": None if think is None else parse_think(think),
        "hide_thinking": hide_thinking,
        "word_wrap": not no_word_wrap,
        "verbose": verbose > 0,
    }
    text = read_prompt(prompt or [])
    if text == "":
        return load_in_server(model, keep_alive)
    conversation = start_conversation(model, load_options, parameters, settings)
    with Spinner() as spinner:
        llm, load_s = load(conversation.entry, conversation.load_options(), spinner)
        if text is not None:
            return answer_once(llm, conversation, text, load_s, spinner)
    from moegguf.chat.chat import Chat

    return Chat(llm, conversation, load_s).run()


def start_conversation(
    model: str, load_options: LoadOptions, parameters: dict[str, Any], settings: dict[str, Any]
) -> Conversation:
    """A conversation with a model, which is pulled first when it is not on this machine."""
    from moegguf.chat.conversation import Conversation
    from moegguf.settings import read_settings

    entry = find_or_pull(model)
    if (n_ctx := read_settings().n_ctx) and "num_ctx" not in entry.parameters:
        parameters = {"num_ctx": n_ctx, **parameters}
    return Conversation(entry, load_options, parameters, **settings)
