"""What a new name is made from: its base or files, and what it adds to them. Data and its checks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moegguf.errors import OptionError
from moegguf.models.entry import Overrides
from moegguf.options import DRAFTS, LOAD_PARAMETERS, OPTIONS

MAX_TEXT = 1 << 20  # characters of a system message, template, license or message
ROLES = ("system", "user", "assistant", "tool")

INTS = (
    "num_ctx num_batch num_gpu main_gpu num_thread draft_num_predict num_keep seed num_predict top_k repeat_last_n"
    " mirostat num_gqa"
).split()
FLOATS = (
    "top_p min_p typical_p tfs_z temperature repeat_penalty presence_penalty frequency_penalty mirostat_tau"
    " mirostat_eta"
).split()
SWITCHES = "use_mmap use_mlock numa low_vram f16_kv logits_all vocab_only embedding_only penalize_newline".split()
TEXTS = ("expert_cache", "draft")
PARAMETERS: dict[str, type] = {
    **dict.fromkeys(INTS, int), **dict.fromkeys(FLOATS, float), **dict.fromkeys(SWITCHES, bool),
    **dict.fromkeys(TEXTS, str), "stop": list,
}  # fmt: skip
"""Ollama's options (api/types.go) and ours, with their types; `stop` takes many values."""

RANGES = {
    name: (option.least, option.most)
    for name in PARAMETERS
    if (option := OPTIONS.get(LOAD_PARAMETERS.get(name, name))) and option.least is not None and option.most is not None
}
"""{parameter: (least, most)}"""

_GO_ACTION = re.compile(
    r"\{\{-?\s*(\.|\$|if\b|range\b(?!\()|else\b|end\b|with\b|block\b|define\b|template\b|or\b|and\b|eq\b|not\b)"
)


@dataclass(frozen=True)
class Recipe(Overrides):
    """Either `from_` (a name or a path) or `files` ({file name: digest} of blobs), and what the new name changes.

    `adapter`: the path of a LoRA adapter, or `adapters` the same as one blob. `draft`: a model by name or path.
    """

    from_: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""


def is_go_template(text: str) -> bool:
    """Whether a template is one of Ollama's, in Go's template language, and not Jinja."""
    return bool(_GO_ACTION.search(text)) and "{%" not in text


def jinja_or_none(template: str | None) -> str | None:
    """`template`; None for a Go template, which cannot be used: the model's own stays."""
    return None if not template or is_go_template(template) else template


def left_out(recipe: Recipe) -> list[str]:
    """What a model made from `recipe` does without, a sentence each."""
    found = [f"there is no parameter {name!r:.60}; it is left out." for name in recipe.parameters.keys() - PARAMETERS]
    if recipe.template and is_go_template(recipe.template):
        found.append("the template is in Go's language and is left out: the model's own is used, or one in Jinja.")
    return sorted(found)


def check_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values read from a file, as keyword arguments of `Overrides`; unknown parameters are left out, and those out of
    their range.

    Raises OptionError for a value of the wrong type.
    """
    return {
        **{name: check_text(name, values.get(name)) for name in ("system", "template", "license")},
        "parameters": usable_parameters(values.get("parameters") or {}),
        "messages": check_messages(list(values.get("messages") or ())),
    }


def check_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with their types right; unknown names are left out. Raises OptionError for a wrong type."""
    return {name: _convert(name, value) for name, value in values.items() if name in PARAMETERS}


def usable_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are known and in their range, with their types right. Raises OptionError for a wrong type."""
    return {name: value for name, value in check_parameters(values).items() if _is_in_range(name, value)}


def check_ranges(parameters: Mapping[str, Any]) -> None:
    """Raises OptionError for a parameter out of its range."""
    for name, value in parameters.items():
        if not _is_in_range(name, value):
            least, most = RANGES[name]
            raise OptionError(f"{name} takes {least:,} to {most:,}, but is {value:,}")


def _is_in_range(name: str, value: Any) -> bool:
    least, most = RANGES.get(name, (-math.inf, math.inf))
    return name not in RANGES or least <= value <= most


def check_messages(messages: Any) -> tuple[Mapping[str, Any], ...]:
    """The messages, each with a role and a text only. Raises OptionError for others."""
    if not isinstance(messages, list | tuple):
        raise OptionError(f"messages must be a list, but is {messages!r:.40}.")
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES or not isinstance(message.get("content", ""), str):
            raise OptionError(f"a message has a role ({', '.join(ROLES)}) and a content, but is {message!r:.60}.")
        check_text("a message", message.get("content", ""))
    return tuple({"role": m["role"], "content": m.get("content", "")} for m in messages)


def check_text(what: str, text: str | None) -> str | None:
    """`text` as valid UTF-8; None stays None. Raises OptionError when it is too long or not text."""
    if text is None:
        return None
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise OptionError(f"{what} must be a text of at most {MAX_TEXT} characters, but is {text!r:.40}.")
    return text.encode("utf-8", "replace").decode()


def parse_parameter(name: str, text: str) -> Any:
    """The value of parameter `name` from the text of a Modelfile or of `/set parameter`; for `stop` one text.

    Raises OptionError for an unknown name or a value that does not fit.
    """
    kind = PARAMETERS.get(name)
    if kind is None:
        raise OptionError.unknown(name, PARAMETERS, "docs/modelfile.md")
    if kind in (str, list):
        return text
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return _convert(name, json.loads(text))
    except (ValueError, RecursionError):
        raise _wrong(name, text) from None


def _convert(name: str, value: Any) -> Any:
    kind: type = PARAMETERS[name]
    if kind is list:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list | tuple) and all(isinstance(text, str) for text in values):
            return list(values)
        raise _wrong(name, value)
    given = value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 53 else math.inf
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    fits = fits and (name != "draft" or value in DRAFTS)  # a file is not a client's to choose
    fits = fits and (kind is not float or math.isfinite(value)) and (kind is not int or -(1 << 63) <= value < 1 << 63)
    if not fits:
        raise _wrong(name, given)
    return value


def _wrong(name: str, value: Any) -> OptionError:
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "texts"}
    return OptionError(f"the parameter {name!r} must be {kinds[PARAMETERS[name]]}, but is {value!r:.60}.")
