"""`moegguf run`: one answer on stdout, or a chat when nothing was asked and someone is there to talk to.

stdout gets the answer and a newline; figures and complaints go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from moegguf.terminal.arguments import parse_format, parse_think
from moegguf.terminal.loading import OpenOptions, find_or_pull, load
from moegguf.terminal.messages import STOPPED, say
from moegguf.terminal.progress import Spinner

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.llama import Llama


from typing import Annotated

from typer.core import TyperCommand

PATIENCE_S = 1.0  # for an answer that was interrupted


@dataclass(frozen=True)
class RunOptions:
    """What the command line says besides the model and the prompt. `parameters`: by Ollama's names."""

    opening: OpenOptions = field(default_factory=OpenOptions)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    format: str | Mapping[str, Any] | None = None
    think: bool | str | None = None
    hide_thinking: bool = False
    word_wrap: bool = True
    keep_alive: str | None = None


def run_model(model: str, words: Sequence[str], options: RunOptions) -> int:
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
    from moegguf.chat.chat import Chat

    return Chat(llm, conversation, load_s).talk()


def begin(model: str, options: RunOptions) -> Conversation:
    """A conversation with a model, which is fetched first when it has to be."""
    entry = find_or_pull(model)
    from moegguf.chat.conversation import Conversation
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
    from moegguf.cli.client import Client
    from moegguf.models.names import parse_name

    body: dict[str, Any] = {"model": parse_name(model).canonical, "prompt": "", "stream": False}
    if keep_alive is not None:
        body["keep_alive"] = keep_alive
    Client().post("/api/generate", body)
    return 0


def answer(llm: Llama, conversation: Conversation, prompt: str, load_s: float, spinner: Spinner) -> int:
    """Writes the answer to `prompt` on stdout, then the statistics when asked for; closes the model."""
    from moegguf.chat.printer import Printer
    from moegguf.chat.turn import write_answer

    conversation.say(prompt)
    printer = Printer(wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking)
    reply = write_answer(llm, conversation.request(), printer, spinner, patience_s=PATIENCE_S)
    printer.end()
    if conversation.verbose and not reply.error:
        from moegguf.terminal.statistics import statistics

        say("\n" + "\n".join(statistics(reply.timing, load_s, llm.decisions())))
    llm.close()
    if reply.error is not None:
        raise reply.error
    return STOPPED if reply.interrupted else 0


THINK = "--think"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name (`moegguf list` shows those here; hf.co/USER/REPOSITORY:QUANT is fetched), a GGUF file"
        " (of a split model the first), or `demo`.",
    ),
]
Prompt = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", help='The question; what is piped in goes before it. "" loads the model only.'),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--expert-cache",
        metavar="BUDGET",
        help='Memory for experts: "auto", a share of them such as "50%", or a size such as "4GiB".'
        "  [default: MOEGGUF_EXPERT_CACHE, or auto]",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy", metavar="NAME", help="Which experts stay: auto (what was measured to be best, else lru) or a name."
    ),
]
Predictor = Annotated[
    str | None,
    typer.Option(
        "--predictor", metavar="NAME", help="Which experts come next, such as skip or eamc.  [default: as measured]"
    ),
]
Prefetch = Annotated[
    bool | None,
    typer.Option("--prefetch/--no-prefetch", help="Fetch predicted experts ahead while that saves time."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, metavar="N", help="CPU threads.  [default: all allowed]")
]
Ctx = Annotated[
    int | None, typer.Option("--ctx", "-c", min=1, metavar="TOKENS", help="Context size.  [default: what fits]")
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Longest answer.  [default: until it ends]"),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token.  [default: the model's, or 0.8]"),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Repeats an answer.  [default: random]")]
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
    str | None, typer.Option("--keepalive", metavar="TIME", help='How long a server keeps it, with the prompt "".')
]
Insecure = Annotated[bool, typer.Option("--insecure", hidden=True, help="Accepted; no effect.")]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Statistics on stderr; twice: llama.cpp's log too."
    ),
]


class RunCommand(TyperCommand):
    """`--think` may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_think_value(args))


def with_think_value(arguments: list[str]) -> list[str]:
    """`--think` alone becomes `--think=true`; what comes after `--` is left as it is."""
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
    parameters = {
        "num_ctx": ctx, "num_thread": threads, "num_predict": max_tokens, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    options = RunOptions(
        opening=OpenOptions(expert_cache, verbose=verbose, policy=policy, predictor=predictor, prefetch=prefetch),
        parameters={name: value for name, value in parameters.items() if value is not None},
        system=system,
        format=None if output_format is None else parse_format(output_format),
        think=None if think is None else parse_think(think),
        hide_thinking=hide_thinking,
        word_wrap=not no_word_wrap,
        keep_alive=keep_alive,
    )
    return run_model(model, prompt or [], options)
