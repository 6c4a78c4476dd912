"""Messages from the parts that APIs send: texts, images as base64 or data URLs, tool calls and their results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moegguf.errors import OptionError
from moegguf.generate.images import image_part
from moegguf.generate.request import Message

Part = dict[str, str]

_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.IGNORECASE)


def text_part(text: str) -> Part:
    """The part for a text."""
    return {"type": "text", "text": text}


def image_of_base64(data: str) -> Part:
    """The part for an image as base64. Raises ValueError when it cannot be used."""
    try:
        return image_part(data)
    except OptionError as error:
        raise ValueError(str(error)) from None


def image_of_url(url: str) -> Part:
    """The part for an image in a data URL. Raises ValueError for any other URL: the server fetches nothing."""
    found = _DATA_URL.match(url[:100])
    if found is None:
        raise ValueError(
            f"an image is sent as data:image/png;base64,..., but this is {url[:40]!r}; the server fetches nothing"
        )
    return image_of_base64(url[found.end() :])


def part_of(part: Any, texts: Mapping[str, str], image_kind: str) -> Part:
    """A part of OpenAI's messages: a text, under {its type: its key}, or an image. Raises ValueError for others."""
    kind = part.get("type") if isinstance(part, dict) else None
    first = next(iter(texts))
    if kind == image_kind:
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str):
            raise ValueError('image_url must be {"url": "data:image/png;base64,..."}')
        return image_of_url(url)
    if isinstance(kind, str) and kind not in texts:
        raise ValueError(f"parts of type {kind[:40]!r} are not supported; send {first} or {image_kind}")
    text = part.get(texts[kind]) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise ValueError(f'a part must be {{"type": "{first}", "text": "..."}}')
    return text_part(text)


def content_of(parts: Sequence[Part]) -> str | list[Part]:
    """The content of a message: one text, its parts joined by newlines, unless there are images."""
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)


def call_of(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call of an assistant's message."""
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def tool_message(content: Any, call_id: str | None, name: str | None) -> Message:
    """The message with what a tool returned; without the id or name where it is None."""
    known = {"tool_call_id": call_id, "tool_name": name}
    return {"role": "tool", "content": content} | {key: value for key, value in known.items() if value is not None}
