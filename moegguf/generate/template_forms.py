"""Determines the form in which a chat template expects a conversation.

The content of a message is a string or a list of parts. The arguments of a call are an
object or a string. Some templates do not support system messages. Templates do not
declare which forms they expect. A template that receives another form leaves out the
text or fails. So `forms_of` renders short conversations in which each text begins with
a marker, and chooses the forms that lose the fewest markers, as llama.cpp does
(common/jinja/caps.cpp). Messages are then rendered in these forms, in child processes
with limits on time and memory (sandbox_pool.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from typing import Any

from moegguf.generate.request import Message, Tool
from moegguf.generate.sandbox_pool import LimitedError, reply_of

MAX_CHARACTERS = 16 << 20  # maximum number of characters of a prompt
MAX_KNOWN = 64  # maximum number of templates whose forms are cached


@dataclass(frozen=True)
class Forms:
    """The forms of messages that a template expects."""

    # Roles whose content must be a list of parts.
    part_roles: frozenset[str] = frozenset()
    # System messages become the beginning of the next user message.
    merges_system: bool = False
    user_results: bool = False  # tool results are user messages
    # The content of a message with calls but no text is null, not "".
    null_content: bool = False
    # The arguments of a call are a string of JSON, not an object.
    text_arguments: bool = False
    # If there are no tools, `tools` is an empty list, not null.
    empty_tools: bool = False

    def messages(self, messages: Iterable[Message]) -> list[Message]:
        """Returns the messages in these forms."""
        formed = [self._message(message) for message in messages]
        if self.merges_system:
            formed = list(_without_system(formed))
        for message in formed:
            if message.get("role") in self.part_roles and isinstance(
                text := message["content"], str
            ):
                message["content"] = [{"type": "text", "text": text}] if text else []
        return formed

    def _message(self, message: Message) -> Message:
        """Returns a copy with additional names of fields that templates read, and
        without `images`, `index` and fields that are None. Absent fields other than
        `content` remain absent, because templates distinguish them from empty ones."""
        formed = {
            key: value
            for key, value in message.items()
            if value is not None and key not in ("images", "index")
        }
        formed.setdefault("content", "")
        if self.user_results and formed.get("role") == "tool":
            formed["role"] = "user"
        if thinking := formed.get("thinking"):
            formed["reasoning_content"] = formed["reasoning"] = thinking
        if calls := [self._call(call) for call in formed.pop("tool_calls", None) or ()]:
            formed["tool_calls"] = calls
            if self.null_content:
                formed["content"] = formed["content"] or None
        if "tool_name" in formed:
            formed.setdefault("name", formed["tool_name"])
        return formed

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        given = function.get("arguments", {})
        if self.text_arguments and not isinstance(given, str):
            function["arguments"] = json.dumps(given, ensure_ascii=False)
        elif not self.text_arguments and isinstance(given, str):
            # Arguments that are invalid JSON remain a string.
            with suppress(ValueError):
                function["arguments"] = json.loads(given)
        return {"id": call.get("id", ""), "type": "function", "function": function}


def _without_system(messages: Iterable[Message]) -> Iterator[Message]:
    """Yields the messages without system messages, whose texts are put before the text
    of the next user message. If there is no such message, the texts become a user
    message at the end."""
    texts = list[str]()
    for message in messages:
        if message.get("role") == "system":
            texts.append(message["content"])
        elif texts and message.get("role") == "user":
            yield {**message, "content": "\n\n".join([*texts, message["content"]])}
            texts = []
        else:
            yield message
    if texts:
        yield {"role": "user", "content": "\n\n".join(texts)}


def default_variables() -> dict[str, Any]:
    """Returns the variables that every template receives, with llama-server's
    values."""
    now = datetime.now()
    return {
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
        "enable_thinking": True,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
    }


def rendered(
    template: str,
    forms: Forms,
    messages: Iterable[Message],
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    characters: int = MAX_CHARACTERS,
) -> str:
    """Renders a conversation in these forms. Raises LimitedError if the template fails
    or exceeds a limit, or if the prompt has more than `characters` characters."""
    formed = forms.messages(messages)
    if "length 9" in template:
        _shorten_ids(formed)
    given = {
        **variables,
        "messages": formed,
        "tools": list(tools) or ([] if forms.empty_tools else None),
    }
    if tools:
        given.setdefault("functions", [tool.get("function", tool) for tool in tools])
    return reply_of(
        {"template": template, "variables": given, "characters": characters}
    )


def _shorten_ids(messages: Iterable[Message]) -> None:
    """Replaces call ids with ids that Mistral's templates accept: nine letters and
    digits."""

    def shortened(text: Any) -> str:
        return "".join(c for c in str(text) if c.isascii() and c.isalnum())[-9:].rjust(
            9, "0"
        )

    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = shortened(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = shortened(message["tool_call_id"])


# Probes

# {field of `Forms`: word}. A form is tried only if the template contains this word;
# otherwise the template cannot support the form.
_WORDS = {
    "part_roles": "text",
    "null_content": "tool_calls",
    "text_arguments": "arguments",
    "empty_tools": "tools",
}
_MARK = "q7z"  # marker at the beginning of each text; the case is ignored


@dataclass(frozen=True)
class _Probe:
    """A conversation in which each text begins with a marker, and the forms to try."""

    messages: Sequence[Message]
    choices: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()

    def n_lost(self, template: str, forms: Forms) -> int:
        """Returns the number of markers that are missing from the prompt. If the
        template rejects the conversation or fails, all markers are treated as missing.
        Merging system messages counts as one more missing marker, so that other forms
        that lose no marker are preferred. Raises LimitedError for a syntax error, or if
        the template exceeds a limit."""
        marks = {
            word
            for word in json.dumps(self.messages).split('"')
            if word.startswith(_MARK)
        }
        try:
            prompt = rendered(
                template, forms, self.messages, self.tools, default_variables()
            )
        except LimitedError as error:
            if error.kind in ("refused", "failed"):
                return len(marks)
            raise
        prompt = prompt.lower()
        return sum(mark not in prompt for mark in marks) + forms.merges_system


def _choices(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns all combinations of values for fields of `Forms`. Combinations of the
    first values come first."""
    return [
        dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())
    ]


def _text(role: str, n: int = 0) -> Message:
    return {"role": role, "content": f"{_MARK}{role}{n}"}


_TOOL = {
    "type": "function",
    "function": {
        "name": f"{_MARK}tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {f"{_MARK}key": {"type": "string", "description": "A text."}},
            "required": [f"{_MARK}key"],
        },
    },
}
_CALL = {
    "id": "call00001",
    "function": {"name": f"{_MARK}tool", "arguments": {f"{_MARK}key": f"{_MARK}value"}},
}
_PROBES = (
    _Probe(
        (_text("system"), _text("user")),
        _choices(
            empty_tools=(False, True),
            merges_system=(False, True),
            part_roles=((), ("system", "user"), ("user",), ("system",)),
        ),
    ),
    _Probe(
        (_text("user"), _text("assistant"), _text("user", 1)), _choices(part_roles=((), ("assistant",)))
    ),
    _Probe(
        (
            _text("user"),
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {**_text("tool"), "tool_call_id": "call00001", "tool_name": f"{_MARK}tool"},
            _text("assistant"),
            _text("user", 1),
        ),
        _choices(
            user_results=(False, True),
            part_roles=((), ("tool",)),
            null_content=(False, True),
            text_arguments=(False, True),
        ),
        (_TOOL,),
    ),
)  # fmt: skip


@functools.lru_cache(MAX_KNOWN)
def forms_of(template: str) -> Forms:
    """Returns the forms that a template expects. Raises LimitedError if the template
    has a syntax error or exceeds a limit."""
    forms = Forms()
    for probe in _PROBES:
        forms = _best(template, probe, forms)
    return forms


def _best(template: str, probe: _Probe, known: Forms) -> Forms:
    """Returns the `known` forms with the first of the probe's choices that loses the
    fewest markers."""
    losses = dict[Forms, int]()
    for choice in probe.choices:
        if any(
            choice.get(field) and word not in template for field, word in _WORDS.items()
        ):
            continue
        forms = replace(
            known,
            **{**choice, "part_roles": known.part_roles.union(choice["part_roles"])},
        )
        losses[forms] = probe.n_lost(template, forms)
        if not losses[forms]:
            break
    return min(losses, key=losses.__getitem__)
