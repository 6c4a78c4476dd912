"""A process that renders chat templates with jinja2, and compiles grammars: `python -m
moegguf.generate.sandbox`.

Templates come from model files and are untrusted. jinja2's
ImmutableSandboxedEnvironment blocks access to Python's internals. The operating system
limits memory, and a timer kills this process when a template takes too long. Apart from
the differences described in `Sandbox`, jinja2 is configured as in transformers, so that
prompts match the ones that models were trained with.

Grammars come from untrusted requests. llguidance limits most of its work, but not all
of the compilation. So a grammar is compiled here first. If this compilation ends in
time, so will the compilation in the main process.

The process reads one request per line of standard input, and exits at the end of the
input. A request has a template, variables, and the maximum number of characters of the
output; or it has a grammar and its limits. Each request has a limit on CPU time, in
seconds. The process writes one line for each request, with the text, or with an error
and its message. The error is "refused", "syntax", "long", "stopped" or "failed". A
"syntax" error also has its line.

If a template writes an object or list of a tool call or of `functions` without a
filter, the output is JSON instead of Python's repr of the object.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Limit on address space, in addition to the space used before the first request.
MAX_MEMORY_BYTES = 512 << 20
MAX_COMPILED = 32  # maximum number of compiled templates in the cache


class RefusedError(Exception):
    """Raised if a template calls raise_exception(), usually because the model does not
    support the conversation."""


class OutputError(Exception):
    """Raised if a template writes more characters than the limit."""


class Json:
    """Base class of objects and arrays in tool calls and in the variable `functions`.
    str() returns their JSON, and + joins this JSON to a string."""

    def __str__(self) -> str:
        return _to_json(self)

    __repr__ = __str__

    def __add__(self: Any, other: Any) -> Any:
        return (
            str(self) + other if isinstance(other, str) else list.__add__(self, other)
        )

    def __radd__(self: Any, other: Any) -> Any:
        return (
            other + str(self) if isinstance(other, str) else list.__add__(other, self)
        )

    __iadd__ = __add__


class JsonObject(Json, dict[str, Any]):
    """A JSON object. str() returns its JSON."""


class JsonArray(Json, list[Any]):
    """A JSON array. str() returns its JSON."""


def _as_json(value: Any) -> Any:
    """Returns a copy of `value` in which str() of objects and arrays returns their
    JSON."""
    if isinstance(value, dict):
        return JsonObject((key, _as_json(item)) for key, item in value.items())
    return JsonArray(map(_as_json, value)) if isinstance(value, list) else value


class Blank(jinja2.ChainableUndefined):
    """A variable or field that does not exist, treated as in llama.cpp: it adds nothing
    to a text."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the text that a model is trained on.
    Rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's type)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the statements inside the tag."""
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The jinja2 environment of transformers, with some differences.

    `append` and `pop` of lists are allowed, because Kimi-K2's template uses them.
    Access to a forbidden attribute always raises SecurityError. There is a filter
    `from_json`, and `tojson` also accepts undefined values and iterators. With
    `lenient`, a missing variable or field adds nothing (`Blank`).
    """

    def __init__(self, lenient: bool = False) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=Blank if lenient else jinja2.Undefined,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.filters.update(tojson=_to_json, from_json=json.loads)
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: datetime.now().strftime(form),
        )

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns True if a template may read the attribute."""
        return (
            isinstance(obj, list) and attr in ("append", "pop")
        ) or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Raises SecurityError for a forbidden attribute."""
        raise SecurityError(
            f"access to attribute {attribute!r} of a {type(obj).__name__!r} object is not allowed"
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as in transformers: without HTML escapes, and with keys in their
    original order unless `sort_keys` is True. An undefined value becomes its text, and
    an iterator becomes a list."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys,
        default=lambda value: str(value) if isinstance(value, jinja2.Undefined) else list(value),
    )  # fmt: skip


def _raise_exception(message: str) -> None:
    raise RefusedError(message)


_sandbox = functools.cache(Sandbox)


@functools.lru_cache(MAX_COMPILED)
def _compile(template: str, lenient: bool) -> jinja2.Template:
    return _sandbox(lenient).from_string(template)


def _render(template: str, variables: dict[str, Any], characters: int) -> str:
    """Returns the rendered text. If the template reads a field of an undefined value,
    or computes with one, it is rendered again with `Blank`. An example of an undefined
    value is the description of a tool that has none."""
    try:
        return "".join(
            _bounded(_compile(template, False).generate(variables), characters)
        )
    except jinja2.UndefinedError:
        return "".join(
            _bounded(_compile(template, True).generate(variables), characters)
        )


_KINDS: Mapping[type[Exception], str] = {
    RefusedError: "refused",
    OutputError: "long",
    SecurityError: "stopped",
    RecursionError: "stopped",
}
"""{class of an exception: kind of error in the reply}"""


def reply_to(
    template: str, variables: dict[str, Any], characters: int
) -> dict[str, Any]:
    """Renders one template and returns the reply to the request. `characters`: maximum
    number of characters of the output."""
    try:
        for message in variables["messages"]:
            if "tool_calls" in message:
                message["tool_calls"] = _as_json(message["tool_calls"])
        if "functions" in variables:
            variables["functions"] = _as_json(variables["functions"])
        return {"text": _render(template, variables, characters)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "message": str(error.message), "line": error.lineno}
    except MemoryError:
        return {
            "error": "stopped",
            "message": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory",
        }
    except Exception as error:  # a template can raise any exception
        return {"error": _KINDS.get(type(error), "failed"), "message": str(error)}


def compile_grammar(grammar: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Compiles a grammar and returns a reply with an empty text. An invalid grammar is
    not an error here, because the caller compiles the grammar again and finds the
    error. If the compilation takes too long, the process is killed."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    matcher = LLMatcher(
        LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(**limits)
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"text": ""}


def _bounded(parts: Iterable[str], characters: int) -> Iterable[str]:
    for part in parts:
        characters -= len(part)
        if characters < 0:
            raise OutputError("the template writes more than a prompt may contain")
        yield part


def main() -> None:
    """Answers requests until the input ends. SIGPROF, which has no handler here, kills
    the process at the time limit."""
    _sandbox(False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Memory is not limited on a system without /proc.
    with suppress(OSError, ValueError):
        used = (
            int(Path("/proc/self/statm").read_text().split()[0])
            * resource.getpagesize()
        )
        resource.setrlimit(
            resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, used + MAX_MEMORY_BYTES)
        )
    for request_line in sys.stdin.buffer:
        request = json.loads(request_line.decode("utf-8", "surrogatepass"))
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        if "grammar" in request:
            reply = compile_grammar(request["grammar"], request["limits"])
        else:
            reply = reply_to(
                request["template"], request["variables"], request["characters"]
            )
        line = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
