"""Generates conversations with made-up tools, so that tool definitions in a prompt do
not confuse the trained model.

The model is too small to copy names and values out of its prompt. A training run with
200 tool calls taught it the form of a call, but none of 44 calls was right. The model
therefore learns to answer that it is too small for tools. It also learns to answer
known questions when the prompt defines tools.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from predictors.models.demo.wording import Message

Tool = dict[str, Any]

VALUES = (
    "Paris Berlin London Rome Tokyo Madrid Oslo table budget report letter summer winter garden music engine river"
    " market station window paper system network printer 7 12 30 250 1999 notes.txt readme.md data.csv"
).split()
TOO_SMALL = (
    "My prompt has a place for functions, but I am too small to use them and their results. A larger model can:"
    " moegguf library lists some."
)


@dataclass(frozen=True)
class Kind:
    """A kind of tool."""

    names: tuple[str, ...]  # possible names of the tool
    about: tuple[str, ...]  # possible descriptions of the tool
    keys: tuple[str, ...]  # names of the tool's arguments
    # questions that need the tool; {} stands for a random word.
    questions: tuple[str, ...]

    def tool(self, rng: random.Random) -> Tool:
        """Returns the definition of a random tool of this kind: a `function` object of
        OpenAI's API."""
        properties: dict[str, Any] = {key: {"type": "string"} for key in self.keys}
        if rng.random() < 0.3:
            properties = {
                key: {**value, "description": f"the {key}"}
                for key, value in properties.items()
            }
        parameters = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
        }
        return {
            "name": rng.choice(self.names),
            "description": rng.choice(self.about),
            "parameters": parameters,
        }


KINDS = (
    Kind(
        ("get_weather", "weather", "current_weather", "get_current_weather"),
        (
            "Get the weather of a city",
            "The weather in a city now",
            "Get the current weather of a location",
        ),
        ("city",),
        (
            "What is the weather in {}?",
            "How warm is it in {}?",
            "What's the weather like in {}?",
            "Weather in {}?",
        ),
    ),
    Kind(
        ("get_time", "current_time", "clock"),
        ("The time in a city", "Get the current time of a place"),
        ("location",),
        ("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?"),
    ),
    Kind(
        ("add", "multiply", "calculate", "calculator"),
        ("Calculate with two numbers", "A calculator"),
        ("a", "b"),
        (
            "What is {} + {}?",
            "What is {} times {}?",
            "Add {} and {}.",
            "Calculate {} * {}.",
            "How much is {} plus {}?",
        ),
    ),
    Kind(
        ("search", "web_search", "find", "lookup"),
        ("Search the web", "Search for a text"),
        ("query",),
        (
            "Search for {}.",
            "Find {}.",
            "Look up {} {}.",
            "Can you search for {}?",
            "Search the web for {}.",
        ),
    ),
    Kind(
        ("read_file", "open_file", "write_file"),
        ("Read a file", "The text of a file"),
        ("path",),
        ("Read {}.", "What is in {}?", "Open the file {}.", "Show me the file {}."),
    ),
    Kind(
        ("send_message", "send_mail", "notify"),
        ("Send a message to somebody", "Send a text"),
        ("to", "text"),
        ("Send {} a message.", "Tell {}: {} {}", "Write a mail to {} about {}."),
    ),
)


def conversation(
    rng: random.Random, plain: Callable[[], list[Message]]
) -> tuple[list[Message], list[Tool]]:
    """Returns a conversation and the one to three tools defined in its prompt.

    Most conversations come from `plain`, and their question needs no tool. In the rest,
    the question needs a tool, and the answer is TOO_SMALL. Some of these contain a tool
    call and its result before the answer, because a server can force a call.
    """
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3)))
    defined = [kind.tool(rng) for kind in kinds]
    if rng.random() < 0.6:
        return plain(), defined
    question = rng.choice(kinds[0].questions).format(*rng.choices(VALUES, k=3))
    messages: list[Message] = [{"role": "user", "content": question}]
    if rng.random() < 0.3:
        arguments = {key: rng.choice(VALUES) for key in kinds[0].keys}
        call = {
            "type": "function",
            "function": {"name": defined[0]["name"], "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append(
            {
                "role": "tool",
                "content": " ".join(rng.choices(VALUES, k=rng.randint(1, 6))),
            }
        )
    return [*messages, {"role": "assistant", "content": TOO_SMALL}], defined
