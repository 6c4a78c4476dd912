"""Renders a conversation to a prompt with the model's chat template, which is
untrusted.

Templates receive the variables that transformers and llama-server define, and are
rendered in child processes with limits on time and memory. This module uses neither a
model nor a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegguf.errors import TemplateError
from moegguf.generate.request import Message, Tool
from moegguf.generate.sandbox_pool import LimitedError
from moegguf.generate.template_forms import (
    MAX_CHARACTERS,
    default_variables,
    forms_of,
    rendered,
)

MAX_TEMPLATE_BYTES = 128 << 10


class LongPromptError(TemplateError):
    """Raised if a template writes more characters than the caller allows."""


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    think: bool | str | None = None,
    options: Mapping[str, Any] | None = None,
    bos: str = "",
    eos: str = "",
    begins_answer: bool = True,
    characters: int = MAX_CHARACTERS,
) -> str:
    """Returns the prompt of a conversation.

    `tools` have OpenAI's form. `bos` and `eos` are the texts of these tokens.

    think: True, False or a level such as "high". Templates read the value from
    different variables: enable_thinking (Qwen, GLM), thinking (DeepSeek, Granite),
    thinking_mode (MiniMax), thinking_budget (Seed; set only by False), reasoning_effort
    (gpt-oss; set only by a level). None sets only enable_thinking, to True as in
    llama-server, unless `options` has this variable.

    options: further variables.

    begins_answer: if True, the template adds the header of an answer to the end of the
    prompt.

    Raises LongPromptError for a prompt of more than `characters` characters. Raises
    TemplateError if the template is too long or invalid, rejects the conversation,
    fails, or exceeds the limits on time or memory.
    """
    variables = (
        default_variables()
        | _reasoning(options or {})
        | {"bos_token": bos, "eos_token": eos}
    )
    variables["add_generation_prompt"] = begins_answer
    if think is not None:
        mode = "enabled" if think else "disabled"
        variables |= {
            "enable_thinking": bool(think),
            "thinking": bool(think),
            "thinking_mode": mode,
        }
    if think is False:
        variables["thinking_budget"] = 0
    if isinstance(think, str):
        variables |= _reasoning({"reasoning_effort": think})
    size = len(template.encode(errors="replace"))
    if size > MAX_TEMPLATE_BYTES:
        raise TemplateError(
            f"a chat template may have up to {MAX_TEMPLATE_BYTES} bytes, but this one has {size}; give the model a"
            " shorter one."
        )
    try:
        return rendered(
            template, forms_of(template), messages, tools, variables, characters
        )
    except LimitedError as error:
        if error.kind == "long":
            raise LongPromptError(
                f"the chat template writes more than {characters} characters; shorten the conversation."
            ) from error
        reason = str(error).rstrip(".")
        messages_of = {
            "refused": f"the chat template rejects this conversation: {reason}; change the conversation.",
            "syntax": f"the chat template cannot be read (line {error.line}): {reason}; give the model another one.",
            "stopped": f"the chat template was stopped: {reason}; the model needs another one.",
        }
        raise TemplateError(
            messages_of.get(
                error.kind,
                f"the chat template fails: {reason}; change the conversation, or give the model another template.",
            )
        ) from error


def _reasoning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options, with synonyms added for `preserve_reasoning` and
    `reasoning_effort`, because templates have different names for these choices.
    llama-server adds the same synonyms. Given options are not replaced."""
    added = dict[str, Any]()
    if isinstance(keeps := options.get("preserve_reasoning"), bool):
        added = {"preserve_thinking": keeps}
        added |= dict.fromkeys(
            ("clear_thinking", "truncate_history_thinking", "drop_thinking"), not keeps
        )
    if isinstance(effort := options.get("reasoning_effort"), str):
        added["reasoning_strength"] = effort
    return added | dict(options)
