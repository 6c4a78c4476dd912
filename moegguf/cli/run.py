"""`moegguf run`: one answer on stdout, or a chat when there is no prompt and stdin and
stdout are a terminal.

The answer goes to stdout, statistics and errors go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegguf.cli.options import (
    OF_THE_MODEL,
    OF_THINKING,
    Command,
    Flag,
    Given,
    argument,
    flags,
    hub_name,
    model_argument,
    model_flag,
    output_flag,
)
from moegguf.errors import MoeggufError, OptionError
from moegguf.options import LOAD_PARAMETERS, OPTIONS, load_options_of
from moegguf.quantities import parse_duration
from moegguf.terminal.keyboard import keyboard_echo_off
from moegguf.terminal.loading import (
    find_or_pull,
    parse_format,
    parse_think,
    print_card_note,
    with_files,
)
from moegguf.terminal.messages import EXIT_INTERRUPTED, print_message
from moegguf.terminal.progress import Spinner
from moegguf.text import decode_text

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.model import ChatModel
    from moegguf.models.entry import NamedModel
    from moegguf.settings import Settings

PS_TIMEOUT_S = 1.0  # seconds within which a server must list its loaded models
# Seconds that a cancelled answer has to end, after CANCEL_TIMEOUT_S, before moegguf
# exits.
EXIT_TIMEOUT_S = 0.5


def _read_prompt(words: Sequence[str]) -> str | None:
    """Returns the prompt: piped input and `words`, joined by a space. A blank part is
    left out. Returns "" if `words` are given and both parts are blank.

    If there are no words and no piped text, returns None for a chat, or raises
    BadParameter if stdin or stdout is not a terminal.
    """
    terminal = sys.stdin.isatty()
    piped = "" if terminal else decode_text(sys.stdin.buffer.read())
    parts = [part for part in (piped.rstrip("\n"), " ".join(words)) if part.strip()]
    if parts:
        return " ".join(parts)
    if words:
        return ""
    if terminal and sys.stdout.isatty():
        return None
    raise typer.BadParameter(
        "there is no prompt, and a chat needs a terminal for input and output: write a prompt, as in"
        ' `moegguf run demo "hello"`, or pipe one in'
    )


def _answer_once(model: ChatModel, conversation: Conversation, prompt: str) -> int:
    """Prints the answer to `prompt`, then statistics if the conversation is verbose.
    Returns the exit code. If the answer ended with an error, raises this error instead
    of printing statistics."""
    from moegguf.chat.session import extract_images, print_answer

    conversation.add_user_message(
        *(extract_images(prompt) if model.connection.reads_images else (prompt, []))
    )
    answer = print_answer(model, conversation, exit_timeout_s=EXIT_TIMEOUT_S)
    if conversation.verbose and not answer.error:
        print_message("\n" + "\n".join(model.statistics(with_load=True)))
    if answer.error is not None:
        raise answer.error
    return EXIT_INTERRUPTED if answer.is_interrupted else 0


THINK = "--think"

ModelName = Annotated[
    str | None,
    model_argument(
        "A name from `moegguf list` or `moegguf library`, hf.co/USER/REPOSITORY:QUANT, a GGUF file, or `demo`.",
        show_default=False,
    ),
]
Prompt = Annotated[
    list[str] | None,
    argument(
        "PROMPT", 'The prompt, after piped input. "" only loads the model in a server.'
    ),
]
FLAGS = (
    model_flag("--prompt -p", "TEXT", "Same as PROMPT."),
    model_flag("--model -m", "MODEL", "Same as MODEL. Of a split model, the first file."),
    model_flag("--hf-repo -hf", "USER/REPOSITORY[:QUANT]", "A model on Hugging Face."),
    Flag("--system --system-prompt -sys", "TEXT", "The system message."),
    output_flag("--format", "json|SCHEMA", "Answer in JSON, or in JSON that follows a schema."),
    output_flag(THINK, "[=LEVEL]", "Thinking: true (same as no LEVEL), false, low, medium, high or max."),
    output_flag("--hidethinking", None, "Do not show the thinking.", False),
    output_flag("--nowordwrap", None, "Do not wrap long lines between words.", False),
    output_flag("--context-shift/--no-context-shift", None,
        "When the context is full, drop its older half and continue, or end the answer.", True),
    model_flag("--keepalive", "TIME", "Time for which a server keeps the model loaded afterwards."),
    output_flag("--insecure", None, "Accepted, as Ollama has it; no effect.", False, bool,
        {"hidden": True}),
    model_flag("--local", None,
        "Load the model without the server, even if one is running. Options of loading imply --local, except for"
        " --ctx.",
        False),
    Flag("--verbose -v", None, "Print statistics. Twice: llama.cpp's log.", 0,
        int, {"count": True, "show_default": False}),
)  # fmt: skip
PARAMETERS = {option: parameter for parameter, option in LOAD_PARAMETERS.items()}


class RunCommand(Command):
    """The command `run`, whose flag `--think` may be given without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses `args` after replacing `--think` with `--think=true`. Arguments after
        `--` are not changed."""
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(
            ctx,
            [THINK + "=true" if word == THINK else word for word in args[:end]]
            + args[end:],
        )


def model_and_words(
    model: str | None,
    prompt: Sequence[str],
    model_file: str | None,
    hub_model: str | None,
) -> tuple[str, list[str]]:
    """Returns the model's name and the words of the prompt. With --model or --hf-repo,
    all words belong to the prompt.

    Raises BadParameter when no model is named, when both --model and --hf-repo are
    given, or when the value of --hf-repo does not name a repository.
    """
    if model_file and hub_model:
        raise typer.BadParameter("give --model or --hf-repo, not both.")
    words = [*([model] if model is not None else []), *prompt]
    if hub_model:
        return hub_name(hub_model), words
    if model_file:
        return model_file, words
    if model is None:
        raise typer.BadParameter(
            "there is no MODEL: name one, as in `moegguf run demo`; `moegguf list` prints the names"
        )
    return model, words[1:]


@flags(
    *(
        name
        for name, option in OPTIONS.items()
        if option.flags and option.scope in ("load", "request")
    ),
    own=FLAGS,
)
def run(
    named: ModelName = None, words: Prompt = None, *, given: Given, **chosen: Any
) -> int:
    """Answer PROMPT on stdout, or chat if there is no PROMPT. A running server that has
    the model answers."""
    _check(given, chosen["keepalive"])
    name, words = model_and_words(
        named, words or [], chosen["model"], chosen["hf_repo"]
    )
    of_loading = [name for name in given if OPTIONS[name].scope == "load"]
    is_here = (
        chosen["local"] or chosen["verbose"] > 1 or bool(set(of_loading) - {"n_ctx"})
    )
    loading = {name: given.pop(name) for name in of_loading if name not in PARAMETERS}
    files = {name: loading.pop(name) for name in OF_THE_MODEL if name in loading}
    parameters = {PARAMETERS.get(name, name): value for name, value in given.items()}
    verbose, keep_alive = chosen["verbose"], chosen["keepalive"]
    settings = {
        "system": chosen["system"],
        "hide_thinking": chosen["hidethinking"],
        "context_shift": chosen["context_shift"],
        "format": None if chosen["format"] is None else parse_format(chosen["format"]),
        "think": None if chosen["think"] is None else parse_think(chosen["think"]),
        "word_wrap": not chosen["nowordwrap"],
        "verbose": verbose > 0,
    }
    text = _read_prompt(
        words if chosen["prompt"] is None else [*words, chosen["prompt"]]
    )
    # Keys typed during the load are kept for the chat.
    with keyboard_echo_off() if text is None else nullcontext():
        from moegguf.chat.client import Client, running_server
        from moegguf.chat.local import LocalModel
        from moegguf.chat.served import ServedModel
        from moegguf.settings import read_settings

        if text == "":  # an empty prompt only loads the model in a running server
            from moegguf.models.names import parse_name

            kept = {} if keep_alive is None else {"keep_alive": keep_alive}
            Client().post(
                "/api/generate",
                {"model": parse_name(name).canonical, "prompt": "", "stream": False}
                | kept,
            )
            return 0
        client = None if is_here else running_server([name])
        if is_here:
            _print_copy_note(name)
        environment = read_settings()
        spinner = Spinner()
        connection: LocalModel | ServedModel
        if client is not None:
            connection = ServedModel(client, name, keep_alive, spinner)
        else:  # starts a worker in the background
            debug = environment.debug or verbose > 1
            connection = LocalModel(
                replace(environment, loading=loading, debug=debug), spinner
            )
        from moegguf.chat.conversation import Conversation
        from moegguf.chat.model import ChatModel

        with closing(connection), spinner:
            if isinstance(connection, ServedModel):
                entry = connection.entry
            else:
                entry = with_files(find_or_pull(name), **files)
                parameters = _defaults(environment, entry) | parameters
                if sys.stderr.isatty() or verbose:
                    print_card_note(loading | load_options_of(parameters))
            # --ctx 0: the context length that the model was trained with.
            if parameters.get("num_ctx") == 0:
                parameters["num_ctx"] = connection.details(entry).n_ctx_train
            conversation = Conversation(entry, parameters, **settings)
            chat_model = ChatModel(connection)
            # A server loads the model itself when it answers a prompt.
            if isinstance(connection, ServedModel) and text is not None:
                connection.check_context(conversation)
            else:
                chat_model.load(conversation)
                spinner.close()
                if text is not None and sys.stderr.isatty():
                    chat_model.print_line(conversation)
            if text is not None:
                return _answer_once(chat_model, conversation, text)
            from moegguf.chat.chat import Chat

            return Chat(chat_model, conversation).run()


def _print_copy_note(name: str) -> None:
    """Prints a note if a running server also has the model in memory."""
    from moegguf.chat.client import Client
    from moegguf.models.names import parse_name

    with suppress(MoeggufError, TypeError, KeyError):
        client = Client()
        loaded = [
            str(model["name"]).lower()
            for model in client.get("/api/ps", PS_TIMEOUT_S)["models"]
        ]
        if parse_name(name).key in loaded:
            print_message(
                f"note: the server at {client.host.url} has {name} in memory, too. This command loads another copy;"
                " without --local and load options, the server would answer."
            )


def _defaults(environment: Settings, entry: NamedModel) -> dict[str, Any]:
    """Returns the request parameters that the environment sets and the model's entry
    does not set. The caller applies these parameters to a model that this command
    loads."""
    found = {name: getattr(environment, name) for name in OF_THINKING}
    return {
        name: value
        for name, value in found.items()
        if value not in (None, "") and name not in entry.parameters
    }


def _check(given: Given, keep_alive: str | None) -> None:
    """Raises BadParameter for an invalid value of --keepalive or --strategy, for
    --max-tokens 0, and for a request option above its upper limit. If typer checked
    these limits, the help would list them."""
    if keep_alive is not None:
        try:
            parse_duration(keep_alive)
        except OptionError as error:
            raise typer.BadParameter(str(error), param_hint="--keepalive") from None
    if given.get("num_predict") == 0:
        raise typer.BadParameter(
            "an answer must have 1 token or more, but 0 are given; -1 means no limit.",
            param_hint="--max-tokens",
        )
    for option in (OPTIONS[name] for name in given if OPTIONS[name].scope == "request"):
        if option.most is not None and given[option.name] > option.most:
            raise typer.BadParameter(
                f"it must be at most {option.most:.0f}, but is {given[option.name]}.",
                param_hint=option.flags[0],
            )
    if "strategy" in given:
        from moegguf.controller.strategies import find_strategy

        try:
            find_strategy(given["strategy"])
        except OptionError as error:
            raise typer.BadParameter(str(error), param_hint="--strategy") from None
