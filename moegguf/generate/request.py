"""A request to a model, the deltas of its answer, and the summary at its end: plain data that fits in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moegguf.engine.stats import Stats

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content`: a text, or a list of texts and images (images.py). Where known
also `thinking`, `tool_calls` (each {"id", "function": {"name", "arguments": object}}), `tool_name` and
`tool_call_id`."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options, with Ollama's names and defaults; names that Ollama does not have are llama-server's.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_n_sigma: leaves the tokens whose logit is within this number of standard deviations of the highest one; at
            most 0: all.
        xtc_probability: the chance that all tokens with at least `xtc_threshold` but the least likely one are dropped.
        dry_multiplier: tokens that would go on a repetition lose `dry_multiplier * dry_base ** (length -
            dry_allowed_length)`, where the repetition is that long or longer; 0: none do.
        dry_penalty_last_n: tokens in which repetitions are looked for; -1: the context's.
        dry_sequence_breakers: texts over which no repetition reaches.
        mirostat: 1 or 2 is that version of Mirostat, in place of the samplers that leave tokens out. It aims at an
            entropy of `mirostat_tau`, at the rate `mirostat_eta`. 0: neither.
        max_tokens: None: until the model ends or the context is full; where the context shifts, ten contexts.
        num_keep: first tokens after BOS that stay when the context shifts; -1: the prompt.
        seed: None is random.
        exact: the answer has the same bits beside other requests. A batch-invariant model (`Llama.batch_invariant`)
            always gives these. Another model computes such a request without others and from an empty context, and a
            request with a seed from an empty context; the last bits of other answers depend on the other sequences of
            a pass.
        reasoning_budget_tokens: tokens of thinking, after which `reasoning_budget_message` and the end of the thinking
            are forced; 0: no thinking; None: no limit.
        text_bias: texts whose tokens each get a bias, beside `logit_bias`.
        ignore_eos: no token ends the answer, unless the answer follows a format.
        num_ctx: tokens of the model's context that the request may use; None: all.
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
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
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
        """Returns the tokens that a request may use of a context of `n_ctx`.

        Example:
            >>> moegguf.Sampling(num_ctx=1024).context_within(4096)
            1024
        """
        return min(n_ctx, self.num_ctx or n_ctx)


REPEAT_LIMIT = 30  # Ollama's number


@dataclass(frozen=True)
class Request:
    """One request to a model, with `messages` (through the chat template) or with `prompt` (verbatim)."""

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    # Tokens before the prompt, from the summary of an earlier answer with `return_context`. Texts among them become
    # tokens, with BOS before a text that begins the context.
    context: tuple[int | str, ...] = ()
    suffix: str | None = None  # text behind the gap that the model fills
    files: tuple[tuple[str, str], ...] = ()  # names and texts of other files that the gap may depend on
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI's format: {"type": "function", "function": {...}}
    tool_choice: str = "auto"  # "auto", "none", "required" or the name of a tool
    format: str | Mapping[str, Any] | None = None  # "json", or a JSON schema that the answer follows
    strict: bool = False  # a keyword of that schema that cannot be followed is an error
    grammar: str | None = None  # a grammar in GBNF that the answer follows
    think: bool | str | None = None  # a level such as "high" where the template has levels; None: where it can
    template: str | None = None  # a Jinja template in place of the model's
    template_options: Mapping[str, Any] = field(default_factory=dict)
    truncate: bool = True  # leaves out the oldest messages when not all fit the context; else ContextError
    # Cuts, with `truncate`, a message or prompt that is still too long; and drops the older half of the context when an
    # answer reaches its end.
    shift: bool = True
    continue_final_message: bool = True  # the answer goes on with an assistant's message at the end
    begins_answer: bool = True  # the prompt ends with the beginning of an answer, as nearly all models need it
    n_logprobs: int | None = None  # alternatives per token, up to 20; None for no logprobs
    prompt_logprobs: bool = False  # logprobs of the prompt's tokens, too: then the whole prompt is evaluated
    prompt_only: bool = False  # evaluates the prompt and samples no token
    return_context: bool = False
    # The text before thinking, then the texts that end the thinking, for the thinking budget of a `prompt`. A used-up
    # budget forces the first text that ends it. () takes the model's texts.
    think_marks: tuple[str, ...] = ()
    return_tokens: bool = False  # deltas have their tokens
    repeat_limit: int = 0  # repetitions of one token, white space aside, that end the answer; 0: no number does
    owner: str = ""  # reuses the tokens of requests with this owner only; "": of all who are not told apart
    lora_scale: float | None = None  # scale of the model's adapter; None: the scale that the model was loaded with
    client_key: str = ""  # key of the client that may see which experts the request uses
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
    `prompt_logprobs` and before all else, the prompt's tokens, without a BOS that the model added. The first one's
    logprob is 0 and means nothing. `tokens`: with `return_tokens`, those that the text came from."""

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


@dataclass
class AnswerSummary:
    """Counts and times of an answer."""

    prompt_tokens: int = 0  # tokens of the prompt that were evaluated
    cached_tokens: int = 0  # tokens of the prompt that were reused from the context
    disk_tokens: int = 0  # the part of cached_tokens that was on disk only
    answer_tokens: int = 0
    thinking_tokens: int = 0  # tokens of the answer up to the end of its thinking
    prompt_s: float = 0.0
    answer_s: float = 0.0
    total_s: float = 0.0
    finish: str = "stop"  # "stop", "length" or "cancelled"
    stop_string: str = ""  # the string that ended the answer
    cut_messages: int = 0  # messages of the prompt that were left out to fit the context
    cut_tokens: int = 0
    n_shifts: int = 0  # number of times that the context was full and lost its older half
    context: tuple[int, ...] = ()  # tokens of prompt and answer, with `return_context`
    # Counts of all computation during the answer, also for other answers; `answer_stats` from its first token on.
    stats: Stats = field(default_factory=Stats)
    answer_stats: Stats = field(default_factory=Stats)

    @property
    def whole_prompt_tokens(self) -> int:
        """Returns the tokens of the prompt, evaluated or reused."""
        return self.prompt_tokens + self.cached_tokens


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
        elif name == "dry_sequence_breakers":
            value = tuple(value)
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
