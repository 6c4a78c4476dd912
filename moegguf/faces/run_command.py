"""The options of `moegguf run`. What it does is in run.py."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

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
    from moegguf.faces import run as face

    parameters = {
        "num_ctx": ctx, "num_thread": threads, "num_predict": max_tokens, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    options = face.RunOptions(
        opening=face.LoadOptions(expert_cache, verbose=verbose, policy=policy, predictor=predictor, prefetch=prefetch),
        parameters={name: value for name, value in parameters.items() if value is not None},
        system=system,
        format=None if output_format is None else face.parse_format(output_format),
        think=None if think is None else face.parse_think(think),
        hide_thinking=hide_thinking,
        word_wrap=not no_word_wrap,
        keep_alive=keep_alive,
    )
    return face.run(model, prompt or [], options)
