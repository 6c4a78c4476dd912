"""A generation request, the deltas of its answer, and the timing: plain data that fits in JSON.

The chat, and the server through its workers, fill in a `GenerationRequest` and receive `Delta`s and one `Timing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moegguf.engine.stats import Stats

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content`: a text, or a list of texts and images (images.py). Where known
also `thinking`, `tool_calls` (each {"id", "function": {"name", "arguments": object}}), `tool_name` and
`tool_call_id`."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options, with Ollama's names and defaults.

    temperature 0 takes the likeliest token. max_tokens None: until the model ends or the context is full (of one that
    shifts: ten times). num_keep: the first tokens, besides BOS, that stay when the context shifts; -1: the prompt. seed
    None is random. exact: the same bits whatever else the model is asked. A batch-invariant model
    (`Llama.batch_invariant`) gives these always; another computes such a request without others and from an
    empty context, one with a seed from an empty context; the last bits of the rest depend on who else is in a pass.
    reasoning_budget_tokens: tokens of thinking, after which `reasoning_budget_message` and the end of the thinking are
    forced; 0 is no thinking, None no limit.
    text_bias: texts whose tokens each get a bias, beside those of logit_bias. ignore_eos: no token ends the answer, but
    for one that follows a format. num_ctx: tokens of the model's context that the request may use; None: all of them.
    """

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
    num_keep: int = 4
    seed: int | None = None
    stop: tuple[str, ...] = ()
    exact: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    reasoning_budget_tokens: int | None = None
    reasoning_budget_message: str = ""
    text_bias: tuple[tuple[str, float], ...] = ()
    ignore_eos: bool = False
    num_ctx: int | None = None

    def context_within(self, n_ctx: int) -> int:
        """Returns the tokens that a request may use of a context of `n_ctx`."""
        return min(n_ctx, self.num_ctx or n_ctx)


@dataclass(frozen=True)
class GenerationRequest:
    """One request: either `messages` (through the model's chat template) or `prompt` (verbatim).

    `context`: tokens before the prompt, from the timing of an earlier answer with `return_context`; texts among them
    become tokens, with BOS before the first where it begins the context. `suffix`: text after the gap that the model
    fills; `files`: names and texts of other files that it may depend on. `format`: "json", or a JSON schema that the
    answer follows; `strict`: an error where a keyword of that schema cannot be followed.
    `grammar`: a grammar in GBNF that the answer follows. `tool_choice`: "auto", "none", "required" or the name of one
    of `tools` (in OpenAI's format: {"type": "function", "function": {...}}). `think`: None thinks where the template
    can; a level such as "high" where the template has levels. `truncate`: leave out the oldest messages when not all
    fit the context, instead of raising ContextError. `shift`: with `truncate`, cut a message or prompt that is still
    too long; and drop the older half of the context when the answer reaches its end, instead of ending the answer.
    `continue_final_message`: go on with an assistant's message at the end; `begins_answer`: else end the prompt with
    the beginning of an answer, as nearly all models need it. `n_logprobs`: None for no logprobs, else 0
    to 20 alternatives per token; `prompt_logprobs`: of the prompt's tokens, too, all of which are evaluated then.
    `prompt_only`: the prompt is evaluated, and no token sampled. `return_tokens`: deltas have their tokens.
    `think_marks`: for the thinking budget of a `prompt`,
    the text before thinking and texts that end it, the first of which is forced; () takes the model's. `owner`: a
    request takes over tokens of others with the same one only; "" is that of all who are not told apart. `asker`: the
    client that may see which experts the request uses.
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    context: tuple[int | str, ...] = ()
    suffix: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    format: str | Mapping[str, Any] | None = None
    strict: bool = False
    grammar: str | None = None
    think: bool | str | None = None
    template: str | None = None  # a Jinja template in place of the model's
    template_options: Mapping[str, Any] = field(default_factory=dict)
    truncate: bool = True
    shift: bool = True
    continue_final_message: bool = True
    begins_answer: bool = True
    n_logprobs: int | None = None
    prompt_logprobs: bool = False
    prompt_only: bool = False
    return_context: bool = False
    think_marks: tuple[str, ...] = ()
    return_tokens: bool = False
    owner: str = ""
    asker: str = ""
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.sampling.reasoning_budget_tokens == 0:
            object.__setattr__(self, "think", False)

    @property
    def begins_with_token(self) -> bool:
        """True where the context begins with a token, which is BOS only if the request says so."""
        return bool(self.context) and isinstance(self.context[0], int)


@dataclass(frozen=True)
class ToolCall:
    """A function call by the model. `arguments`: the parsed JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class TokenChance:
    """A token, its bytes, and the natural logarithm of its probability before sampling."""

    token: int
    piece: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The piece as text. Part of a code point becomes U+FFFD."""
        return self.piece.decode(errors="replace")


@dataclass(frozen=True)
class TokenLogprob(TokenChance):
    """A token of an answer or a prompt, and the likeliest tokens in its place."""

    top: tuple[TokenChance, ...] = ()


@dataclass(frozen=True)
class Delta:
    """A part of an answer: text, thinking, complete tool calls; usually only one of them is not empty. `prompt`: with
    `prompt_logprobs` and before all else, the prompt's tokens but a BOS that the model adds. The first one's logprob is
    0 and means nothing. `tokens`: with `return_tokens`, those that the text came from."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob, ...] = ()
    tokens: tuple[int, ...] = ()


def join(deltas: Sequence[Delta]) -> Delta:
    """One delta with the content of all, in order. Thinking comes before its answer, also in one delta."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        thinking="".join(delta.thinking for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt=tuple(logprob for delta in deltas for logprob in delta.prompt),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
    )


@dataclass(frozen=True)
class PromptProgress:
    """Tokens of the prompt: all, those reused from the context, and those done (reused ones included)."""

    n_tokens: int
    n_cached: int
    n_done: int
    seconds: float


OnProgress = Callable[[PromptProgress], object]


@dataclass
class Timing:
    """Counts and times of an answer. `prompt_tokens`: those evaluated; `cached_tokens`: those of the prompt that were
    reused from the context; `disk_tokens`: of these, those that were on disk only. `thinking_tokens`: those of the
    answer up to the end of its thinking. `stop_string`: that which ended the answer. `stats` covers the whole answer,
    `answer_stats` the part after its first token; both count all that the model computed meanwhile, for other answers
    too where it computes several at once. `cut_messages`, `cut_tokens`: of the prompt, left out to fit the context.
    `n_shifts`: how often the context was full and lost its older half. `context`: tokens of prompt and answer, with
    `return_context`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    answer_tokens: int = 0
    thinking_tokens: int = 0
    prompt_s: float = 0.0
    answer_s: float = 0.0
    total_s: float = 0.0
    finish: str = "stop"  # "stop", "length" or "cancelled"
    stop_string: str = ""
    cut_messages: int = 0
    cut_tokens: int = 0
    n_shifts: int = 0
    context: tuple[int, ...] = ()
    stats: Stats = field(default_factory=Stats)
    answer_stats: Stats = field(default_factory=Stats)


MAX_TOP_LOGPROBS = 20
THINK_LEVELS = ("low", "medium", "high", "max")


def sampling_with(base: Sampling, parameters: Mapping[str, Any]) -> Sampling:
    """`base` changed by the sampling options among `parameters`; others are ignored.

    num_predict below 1, num_ctx 0 and reasoning_budget_tokens below 0 set no limit. seed -1 is random at each request,
    others count modulo 2^32.
    """
    changes: dict[str, Any] = {}
    for name, value in parameters.items():
        field = "max_tokens" if name == "num_predict" else name
        if field not in Sampling.__dataclass_fields__:
            continue
        if name == "stop":
            value = tuple(text for text in ([value] if isinstance(value, str) else value) if text)
        elif name == "num_predict":
            value = value if value > 0 else None
        elif name == "reasoning_budget_tokens":
            value = None if value is None or value < 0 else value
        elif name == "num_ctx":
            value = value or None
        elif name == "seed":
            value = None if value == -1 else value & 0xFFFFFFFF
        changes[field] = value
    return replace(base, **changes)
