"""What may be asked of a model, and the pieces of what it answers: plain data that fits in JSON.

No model, no templates, no text processing here. Everyone who asks (the chat, the server through its workers) fills in
a `GenerationRequest`; everyone who listens gets `Delta`s and one `Timing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moegguf.engine.stats import Stats

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content`; where known also `thinking`, `tool_calls` (each
{"id", "function": {"name", "arguments": object}}), `tool_name` and `tool_call_id`."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the names and defaults of Ollama's options. temperature 0 takes the likeliest; max_tokens
    None goes on until the model ends or the context is full; seed None differs each time, and a seed makes the answer
    the same whatever was asked before (nothing of an earlier request is reused)."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationRequest:
    """One request. Either `messages` (through the model's chat template) or `prompt` (as it is).

    `context`: tokens that come before the prompt, as an earlier answer gave them when asked to `tell_context`.
    `suffix`: text after the gap that the model fills. `format`: "json", or a JSON schema that the answer follows.
    `tool_choice`: "auto", "none", "required" or the name of one of `tools` (OpenAI's form: {"type": "function",
    "function": {...}}). `think`: None leaves it to the template; a level such as "high" where the template knows
    levels. `truncate`: leave out the oldest messages when all do not fit the context; else that raises ContextError.
    `n_logprobs`: None for none, 0 to 20 alternatives per token.
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    context: tuple[int, ...] = ()
    suffix: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    format: str | Mapping[str, Any] | None = None
    think: bool | str | None = None
    template: str | None = None  # a Jinja template in place of the model's
    template_options: Mapping[str, Any] = field(default_factory=dict)
    truncate: bool = True
    n_logprobs: int | None = None
    tell_context: bool = False
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class ToolCall:
    """A function the model wants called. `arguments` is what its JSON says."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's text and the natural logarithm of its probability before sampling; `top` are the likeliest others."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """A part of an answer as it comes: text, thinking, finished tool calls; often only one of them is not empty."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptProgress:
    """Tokens of the prompt: all, those that an earlier request left in the context, and those done (with them)."""

    n_tokens: int
    n_cached: int
    n_done: int
    seconds: float


@dataclass
class Timing:
    """What an answer took. `prompt_tokens` are those evaluated; `cached_tokens` those of the prompt that the context
    still held. `stats` is for all of the answer, `answer_stats` for the part after its first token. `cut_messages`
    were left out so that the rest fits the context. `context`: the tokens of prompt and answer, when asked to
    `tell_context`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    prompt_s: float = 0.0
    answer_s: float = 0.0
    total_s: float = 0.0
    finish: str = "stop"  # "stop", "length" or "cancelled"
    cut_messages: int = 0
    context: tuple[int, ...] = ()
    stats: Stats = field(default_factory=Stats)
    answer_stats: Stats = field(default_factory=Stats)
