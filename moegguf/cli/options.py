"""Creates the flags of commands from the table of options, and defines types of
arguments that several commands use. Imports only modules that load fast, because
`--help` needs this module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from moegguf.options import (
    GROUPS,
    MAX_THREADS,
    MEMORY,
    MODEL,
    OPTIONS,
    OUTPUT,
    RESEARCH,
    SAMPLING,
    Option,
)

OFTEN = "Options"
"""Title of the help panel for the most used flags, and for flags that have no other
panel."""

EXISTING_FILE = {"exists": True, "dir_okay": False}
"""Settings of a flag whose value is the path of an existing file."""

Given = dict[str, Any]
"""{name of an option: its value}, for the options on the command line."""

OF_THE_MODEL = ("mmproj", "lora_path")
"""Load options whose values are files that belong to one model."""

OF_THINKING = ("reasoning_budget_tokens", "reasoning_budget_message")
"""Request options that the environment can also set."""

_TYPE_OF_PYTHON = re.compile(r" <.*>$")
# The limits of a number at the end of a help text: "  [x>=0]", or "; x>=0" before "]".
_RANGE = re.compile(r"  \[[-\d.<=]*x[-\d.<>=]*\]$|; [-\d.<=]*x[-\d.<>=]*(?=\]$)")
_NO_BREAK = "\N{NON-BREAKING HYPHEN}"
_TYPES: dict[str, Any] = {
    "whole": int,
    "number": float,
    "switch": bool,
    "threads": int,
    "paths": list[str],
}


class Command(TyperCommand):
    """A command whose help has a panel for each group of flags. The help for arguments
    shows neither Python types nor the limits of numbers."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words of the usage line, without braces."""
        return [
            piece.replace("{", "").replace("}", "")
            for piece in super().collect_usage_pieces(ctx)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then the flags by panel. The panel of the most common
        flags comes first."""
        panels: dict[str, list[tuple[str, str]]] = {
            name: [] for name in ("Arguments", OFTEN, *GROUPS)
        }
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                if param.param_type_name == "argument":
                    panel = "Arguments"
                else:
                    panel = getattr(param, "rich_help_panel", None) or OFTEN
                name, text = record
                # click would break lines at hyphens.
                text = _RANGE.sub("", text).replace("-", _NO_BREAK)
                panels[panel].append((_TYPE_OF_PYTHON.sub("", name), text))
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        formatter.buffer = [part.replace(_NO_BREAK, "-") for part in formatter.buffer]


class Flag(NamedTuple):
    """A flag of one command. If the value is a list, the flag can be given several
    times. Some commands also split each value at commas.

    flags: the names of the flag. The value's name is the first of them.

    kind: type of the value. If `kind` is None, the value has the type of the default: a
    list of strings for a list, and a string for None. A value whose default is None may
    be None.

    settings: further keyword arguments of `typer.Option`.

    group: title of the help panel.

    own_name: name of the value, if it differs from the flag's.
    """

    flags: str
    metavar: str | None
    help: str
    default: Any = None
    kind: Any = None
    settings: Mapping[str, Any] = {}
    group: str = OFTEN
    own_name: str = ""

    @property
    def name(self) -> str:
        """The name of the value."""
        first = self.flags.split()[0].partition("/")[0]
        return self.own_name or first.strip("-").replace("-", "_")

    def option(self) -> Any:
        """Returns the flag as typer's option."""
        return typer.Option(
            *self.flags.split(),
            metavar=self.metavar,
            help=self.help,
            rich_help_panel=self.group,
            **self.settings,
        )

    def parameter(self) -> inspect.Parameter:
        """Returns the parameter that the flag has in the command's signature."""
        if isinstance(self.default, list):
            inferred: Any = list[str]
        else:
            inferred = str if self.default is None else type(self.default)
        kind = self.kind or inferred
        if self.default is None:
            kind = kind | None
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[kind, self.option()],
        )


model_flag = partial(Flag, group=MODEL)
memory_flag = partial(Flag, group=MEMORY)
sampling_flag = partial(Flag, group=SAMPLING)
output_flag = partial(Flag, group=OUTPUT)
research_flag = partial(Flag, group=RESEARCH)


def _flag_of(option: Option) -> Flag:
    settings = {
        "show_default": False,
        "min": option.least,
        # Other limits are checked later.
        "max": option.most if option.scope == "server" or option.most == 1 else None,
        "parser": parse_threads if option.kind == "threads" else None,
    }
    return Flag(
        " ".join(option.flags),
        option.metavar or None,
        option.full_help,
        None,
        _TYPES.get(option.kind, str),
        settings,
        OFTEN if option.often else option.group,
        option.name,
    )


def flags(
    *names: str, own: Sequence[Flag] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds the flags of the options `names`, and the flags in
    `own`, to a command.

    The command receives the dict `given` with the values of the options that the user
    has set, converted to the types of the Python API. It receives the values of `own`
    flags as keyword arguments of the same names. Before the command runs, OptionError
    or BudgetError is raised for an option whose text is invalid.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def call(**values: Any) -> Any:
            from moegguf.settings import parse_option

            given = {
                name: value
                for name in names
                if (value := values.pop(name, None)) not in (None, [])
            }
            for name, text in given.items():
                if isinstance(text, str):
                    given[name] = parse_option(name, text, OPTIONS[name].flags[0])
            return command(given=given, **values)

        signature = inspect.signature(command, eval_str=True)
        taken = {"given", "chosen", *(flag.name for flag in own)}
        parameters = [
            each for each in signature.parameters.values() if each.name not in taken
        ]
        parameters += [
            flag.parameter()
            for flag in (*own, *(_flag_of(OPTIONS[name]) for name in names))
        ]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {
            parameter.name: parameter.annotation for parameter in parameters
        }
        return call

    return add


def loading_options(given: Given, names: Sequence[str]) -> Given:
    """Removes the options `names` from `given` and returns them as options for loading
    a model. An option whose scope is not "load" is left out if its value is 0, so that
    its default applies. Raises OptionError or BudgetError for an invalid value, which
    can also come from an environment variable."""
    from moegguf.engine.live_controller import ControllerOptions
    from moegguf.engine.load_spec import LoadSpec

    taken = {name: given.pop(name) for name in names if name in given}
    taken = {
        name: value
        for name, value in taken.items()
        if value != 0 or OPTIONS[name].scope == "load"
    }
    LoadSpec.of(taken, commands=True)
    ControllerOptions(taken.get("policy", "auto"), taken.get("predictor"))
    return taken


def parse_threads(text: str) -> int | None:
    """Parses a number of threads. Returns None for "auto". Raises typer.BadParameter
    for any other text, and for a number outside the range from 1 to MAX_THREADS."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_THREADS:
        raise typer.BadParameter(
            f"{text!r} is neither a number from 1 to {MAX_THREADS} nor 'auto'."
        )
    return int(text)


def complete_model(incomplete: str) -> list[str]:
    """Returns the names that begin with `incomplete`, ignoring case, for completion in
    a shell: models on this machine, then models of the library."""
    from moegguf.models.catalog import Catalog
    from moegguf.models.names import library

    names = [
        *(entry.name.removesuffix(":latest") for entry in Catalog().entries()),
        *(each.name for each in library()),
    ]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Returns typer's object for an argument."""
    return typer.Argument(metavar=metavar, help=help, **settings)


def model_argument(help: str, metavar: str = "MODEL", **settings: Any) -> Any:
    """Returns typer's object for an argument that shells complete with model names."""
    return argument(metavar, help, autocompletion=complete_model, **settings)


Model = Annotated[str, model_argument(
    "A name from `moegguf list` or `moegguf library`, hf.co/USER/REPOSITORY:QUANT, a GGUF file (of a split model,"
    " the first file), or `demo`.")]  # fmt: skip
Prefix = Annotated[
    str, argument("PREFIX", "Only models whose names begin with PREFIX.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, for scripts.")
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", hidden=True, help="Accepted, as Ollama has it; no effect."
    ),
]


def hub_name(repository: str) -> str:
    """Returns the full name of the model on Hugging Face that "USER/REPOSITORY[:QUANT]"
    names, as in llama.cpp's `-hf`. Raises typer.BadParameter if the text does not name
    a repository."""
    from moegguf.models.names import hub_name_of

    if (name := hub_name_of(repository)) is None:
        raise typer.BadParameter(
            f"-hf must be USER/REPOSITORY[:QUANT], but is {repository!r}."
        )
    return name.canonical
