"""Plain data: a request to a model, the progress of its prompt, the deltas of its
answer, and the summary at the end; embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moegguf.engine.stats import Stats

Message = dict[str, Any]
"""A message of a conversation, with the keys `role` (system, user, assistant, tool) and
`content`, which is a string or a list of texts and images (images.py). Optional keys:
`thinking`, `tool_calls` (each {"id", "function": {"name", "arguments": object}}),
`tool_name` and `tool_call_id`."""

Tool = Mapping[str, Any]
"""A tool in OpenAI's format: {"type": "function", "function": {"name", "parameters"}},
or only the object of its key `function`."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options with Ollama's names and defaults, except that Ollama's
    `num_predict` is called `max_tokens`. Options that Ollama does not have are named as
    in llama-server, except `exact` and `text_bias`.

    Attributes:
        temperature: 0 or less chooses the most likely token (if XTC applies, the most likely token that XTC keeps).
        top_n_sigma: only tokens whose logit is within this number of standard deviations of the highest logit can be
            sampled. 0 or less allows all tokens.
        xtc_probability: the probability that XTC applies. XTC removes all tokens with a probability of at least
            `xtc_threshold`, except the least likely of these tokens.
        dry_multiplier: lowers the logit of a token that would continue a repetition of `length` tokens by
            `dry_multiplier * dry_base ** (length - dry_allowed_length)`, if `length` is at least `dry_allowed_length`.
            0: no penalty.
        dry_penalty_last_n: number of most recent tokens in which DRY searches for repetitions. -1: the whole context.
            0: no penalty.
        dry_sequence_breakers: strings that end a repetition.
        mirostat: 1 or 2 uses this version of Mirostat instead of the truncation samplers, unless `temperature` is 0 or
            less. The target entropy is `mirostat_tau`, and the learning rate is `mirostat_eta`. 0: no Mirostat.
        max_tokens: maximum number of tokens of the answer. With None or a value below 1, the answer continues until the
            model ends it or the context is full. If the context shifts, the answer has at most ten times as many tokens
            as the context.
        num_keep: number of leading tokens, not counting BOS, that remain when the context shifts. -1: the whole prompt.
        seed: the seed of the random numbers. None: each answer gets a random seed.
        exact: if True, the answer is bit-identical whatever other requests are processed. For a batch-invariant model
            (`Llama.batch_invariant`), every answer is bit-identical unless the context shifts. With another model, or
            if a shift may move tokens, a request with `exact` is processed alone. A model that is not batch-invariant
            evaluates requests with `exact` or a seed from an empty context.
        reasoning_budget_tokens: maximum number of thinking tokens. At this number, `reasoning_budget_message` and the
            end of the thinking are forced. 0: no thinking. None: no limit.
        text_bias: pairs of a string and a bias. Each token of a string gets the bias, in addition to `logit_bias`.
        ignore_eos: if True, end tokens are never sampled, so only stop strings and limits end the answer. This option
            has no effect if the answer has a required format, such as a schema, a grammar or a call.
        num_ctx: number of tokens of the model's context that the request may use. None: all tokens.
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
        """Returns the number of tokens that a request may use in a context of `n_ctx`
        tokens.

        Example:
            >>> moegguf.Sampling(num_ctx=1024).context_within(4096)
            1024
        """
        return min(n_ctx, self.num_ctx or n_ctx)


REPEAT_LIMIT = 30  # Ollama's repetition limit, see `Request.repeat_limit`


@dataclass(frozen=True)
class Request:
    """One request to a model. It has either `messages`, which the chat template
    renders, or `prompt`, which is used verbatim."""

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    # Token ids and strings before the prompt, such as the tokens in the summary of an
    # earlier answer with `return_context`. A string is tokenized. If the first element
    # is a string, BOS is added before it.
    context: tuple[int | str, ...] = ()
    suffix: str | None = None  # text after the gap that the model fills
    # (name, text) of other files, as context for filling the gap.
    files: tuple[tuple[str, str], ...] = ()
    tools: tuple[Tool, ...] = ()  # becomes empty if `tool_choice` is "none"
    tool_choice: str = "auto"  # "auto", "none", "required" or the name of a tool
    # "json", or a JSON schema that the answer satisfies.
    format: str | Mapping[str, Any] | None = None
    # True: a schema keyword that no grammar can enforce is an error; False: it is
    # ignored.
    strict: bool = False
    grammar: str | None = None  # GBNF grammar that the answer matches
    # True, False, or (for some templates) a level such as "high". None: the template's
    # default, with `enable_thinking` set to True.
    think: bool | str | None = None
    template: str | None = None  # Jinja template instead of the model's own
    template_options: Mapping[str, Any] = field(default_factory=dict)
    # False: messages that do not fit raise ContextError. True: the oldest messages are
    # dropped instead, but no system message and not the user's last message.
    truncate: bool = True
    # True: when an answer fills the context, the older half of the tokens after
    # `num_keep` is dropped, unless the prompt has images. If `truncate` is True as
    # well, a message or prompt that is still too long is cut.
    shift: bool = True
    # If True and the last message is the assistant's, the answer continues it.
    continue_final_message: bool = True
    # If True, the template adds the header of an answer, which nearly all models need.
    begins_answer: bool = True
    # Number of alternatives per token, up to 20; None: no logprobs.
    n_logprobs: int | None = None
    # If True, the prompt's tokens also get logprobs, so the whole prompt is evaluated.
    prompt_logprobs: bool = False
    prompt_only: bool = False  # if True, evaluates the prompt and samples no token
    return_context: bool = False
    # The text before the thinking, then the texts that may end it; the thinking budget
    # uses them. When the budget is used up, the first of the ending texts is forced.
    # (): the delimiters of the model's template.
    think_marks: tuple[str, ...] = ()
    return_tokens: bool = False  # True if deltas contain their tokens
    # If one token is repeated more often than this, the answer ends. A cycle of a few
    # tokens may be repeated CYCLE_PATIENCE times as often
    # (`moegguf.generate.sequence`). 0: no limit.
    repeat_limit: int = 0
    # Only requests with equal `owner` may reuse each other's computed tokens.
    owner: str = ""
    # Scale of the LoRA adapter; None: the scale that the model was loaded with.
    lora_scale: float | None = None
    # Key of the client that may see which experts the request uses.
    client_key: str = ""
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.sampling.reasoning_budget_tokens == 0:
            object.__setattr__(self, "think", False)
        if self.tool_choice == "none":
            object.__setattr__(self, "tools", ())

    @property
    def begins_with_token(self) -> bool:
        """True if the context begins with a token id. No BOS is then added; the request
        must contain its own."""
        return bool(self.context) and isinstance(self.context[0], int)


def prompt_fields(prompt: str | Sequence[Any]) -> dict[str, Any]:
    """Returns the fields of a `Request` for a prompt, which is a string, or a list of
    token ids and strings."""
    is_text = isinstance(prompt, str)
    return {"prompt": prompt} if is_text else {"prompt": "", "context": tuple(prompt)}


@dataclass(frozen=True)
class ToolCall:
    """A function call by the model. `arguments`: {name: value}, with values that JSON
    can represent."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class TokenChance:
    """A token, its bytes, and the natural logarithm of its probability before any
    sampling option is applied."""

    token: int
    piece: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The piece as text. An incomplete code point becomes U+FFFD."""
        return self.piece.decode(errors="replace")


@dataclass(frozen=True)
class TokenLogprob(TokenChance):
    """A token of an answer or a prompt. `top`: the likeliest tokens at its position,
    the likeliest first."""

    top: tuple[TokenChance, ...] = ()


@dataclass(frozen=True)
class Delta:
    """A part of an answer: text, thinking or complete tool calls. Usually only one of
    the three is non-empty."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # logprobs of the tokens in this part
    # The prompt's tokens without an added BOS, in the first delta of a request with
    # `prompt_logprobs`. The first token's logprob is always 0.
    prompt: tuple[TokenLogprob, ...] = ()
    # tokens of this part, if the request has `return_tokens`.
    tokens: tuple[int, ...] = ()


def join(deltas: Sequence[Delta]) -> Delta:
    """Returns one delta with the contents of all deltas, in order. (Thinking precedes
    text in an answer, even within one delta.)"""
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
    """The progress of a prompt's evaluation."""

    n_tokens: int  # tokens of the prompt
    n_cached: int  # tokens that were reused from the context or the disk
    n_done: int  # tokens processed so far, including the reused ones
    seconds: float  # time since the evaluation began


@dataclass
class AnswerSummary:
    """Counts and times of an answer, whose last event is its summary."""

    prompt_tokens: int = 0  # tokens of the prompt that were evaluated
    # Tokens of the prompt that were reused from the context or the disk.
    cached_tokens: int = 0
    disk_tokens: int = 0  # the part of cached_tokens that was read from disk
    answer_tokens: int = 0
    thinking_tokens: int = 0  # tokens of the answer up to the end of its thinking
    prompt_s: float = 0.0
    answer_s: float = 0.0
    total_s: float = 0.0
    finish: str = "stop"  # "stop", "length" or "cancelled"
    stop_string: str = ""  # the stop string that ended the answer, or "" if none did
    # Messages that were left out so that the prompt fits the context.
    cut_messages: int = 0
    cut_tokens: int = 0  # tokens that were left out of the prompt
    n_shifts: int = 0  # number of times that the full context lost its older half
    # Tokens of prompt and answer if the request had `return_context`, otherwise empty.
    context: tuple[int, ...] = ()
    # Counters of all computation during the answer, including computation for other
    # answers. `answer_stats` counts only from the answer's first token on.
    stats: Stats = field(default_factory=Stats)
    answer_stats: Stats = field(default_factory=Stats)
    # Seconds of the load for which the request waited in a server's queue.
    load_s: float = 0.0
    # Value of `Llama.decisions()` at the end of the answer, if a worker computed it.
    decisions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole_prompt_tokens(self) -> int:
        """The number of tokens of the prompt, evaluated or reused."""
        return self.prompt_tokens + self.cached_tokens


Event = PromptProgress | Delta | AnswerSummary
"""An event of an answer, from the batch loop to the client."""


@dataclass(frozen=True)
class Embeddings:
    """Embeddings or scores of inputs. `vectors`: [n_inputs][n_embd], or [n_inputs][1]
    for scores, in the order of the inputs. `n_tokens`: total number of tokens in all
    inputs."""

    vectors: list[list[float]]
    n_tokens: int


MAX_TOP_LOGPROBS = 20
THINK_LEVELS = ("low", "medium", "high", "max")


def sampling_with(base: Sampling, parameters: Mapping[str, Any]) -> Sampling:
    """Returns a copy of `base` with the sampling options in `parameters`. Other
    parameters are ignored.

    A value of num_predict below 1, num_ctx 0, or reasoning_budget_tokens below 0 sets
    no limit. seed -1 is random for each request; other seeds are taken modulo 2^32.
    None leaves an option as in `base` if the option cannot be None.
    """
    changes: dict[str, Any] = {}
    for name, value in parameters.items():
        field = "max_tokens" if name == "num_predict" else name
        if field not in Sampling.__dataclass_fields__:
            continue
        if value is None:
            if Sampling.__dataclass_fields__[field].default is None:
                changes[field] = None
            continue
        if name == "stop":
            value = tuple(
                text for text in ([value] if isinstance(value, str) else value) if text
            )
        elif name == "dry_sequence_breakers":
            value = tuple(value)
        elif name == "num_predict":
            value = value if value > 0 else None
        elif name == "reasoning_budget_tokens":
            value = value if value >= 0 else None
        elif name == "num_ctx":
            value = value or None
        elif name == "seed":
            value = None if value == -1 else value & 0xFFFFFFFF
        changes[field] = value
    return replace(base, **changes)
