"""From a request to the tokens the model reads: the chat template, what came before, gaps to fill, what must go.

Does not compute anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moegguf.engine.vocabulary import Vocabulary
from moegguf.errors import CapabilityError, ContextError, OptionError
from moegguf.generate.request import GenerationRequest, Message
from moegguf.generate.template import capabilities, render

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

ROOM_SHARE = 8  # a cut conversation leaves at least an eighth of the context to the answer
LONGEST_TOKEN = 256  # characters: a text above this times the context is not worth cutting into tokens


@dataclass(frozen=True)
class Prompt:
    """What the model reads. `end` is the text it goes on from; `template` the chat template that made it, if any."""

    tokens: list[int]
    end: str = ""
    template: str | None = None
    cut_messages: int = 0


def read_prompt(llm: Llama, vocabulary: Vocabulary, request: GenerationRequest) -> Prompt:
    """The prompt of `ask`.

    Raises ContextError when it does not fit and nothing may be left out, CapabilityError when the model cannot do
    what it needs, TemplateError, and OptionError when nothing was asked.
    """
    if request.messages is not None:
        prompt = _conversation(llm, vocabulary, request)
    elif request.prompt is not None:
        check_fits(max(len(request.prompt), len(request.suffix or "")) // LONGEST_TOKEN, llm.n_ctx())
        prompt = Prompt(_plain(vocabulary, request, request.prompt))
    else:
        raise OptionError("a request has messages or a prompt; give one of them.")
    vocabulary.check(request.context)
    tokens = [*request.context, *prompt.tokens] or vocabulary.first
    if not tokens:
        raise OptionError("the prompt is empty; give at least one word.")
    check_fits(len(tokens), llm.n_ctx())
    return replace(prompt, tokens=tokens)


def check_fits(n_tokens: int, n_ctx: int) -> None:
    """Raises ContextError unless a prompt leaves room for one token of an answer."""
    if n_tokens >= n_ctx:
        raise ContextError(
            f"Requested tokens ({n_tokens}) exceed context window of {n_ctx}; give a larger context (num_ctx, --ctx)"
            " or a shorter prompt."
        )


def _plain(vocabulary: Vocabulary, request: GenerationRequest, prompt: str) -> list[int]:
    first = [] if request.context else vocabulary.first
    if request.suffix is None:
        return first + _without_double(first, vocabulary.tokens(prompt))
    marks = vocabulary.fill_in
    if marks is None:
        raise CapabilityError("this model cannot fill in text before a suffix (insert); ask without one.")
    before, after, gap = marks
    head, tail = vocabulary.tokens(prompt, special=False), vocabulary.tokens(request.suffix, special=False)
    return [*first, before, *head, after, *tail, gap]


def _without_double(first: list[int], tokens: list[int]) -> list[int]:
    """`tokens` without a BOS that the text spelled out itself."""
    return tokens[1:] if first and tokens[:1] == first else tokens


def _conversation(llm: Llama, vocabulary: Vocabulary, request: GenerationRequest) -> Prompt:
    template = request.template or llm.metadata.get("tokenizer.chat_template") or None
    check_capabilities(template, request)

    def prompt(messages: Sequence[Message]) -> tuple[list[int], str]:
        least = sum(len(str(message.get("content") or "")) for message in messages) // LONGEST_TOKEN
        if least >= llm.n_ctx():
            return [0] * least, ""  # far too long
        text = _text(llm, vocabulary, template, messages, request)
        first = [] if request.context else vocabulary.first
        return first + _without_double(first, vocabulary.tokens(text)), text

    if not request.messages:
        raise OptionError("there are no messages; give at least one.")
    n_ctx = llm.n_ctx() - len(request.context)
    messages, tokens, text = cut(request.messages, prompt, n_ctx, _room(request, n_ctx), may_cut=request.truncate)
    return Prompt(tokens, text, template, len(request.messages) - len(messages))


def check_capabilities(template: str | None, request: GenerationRequest) -> None:
    """Raises CapabilityError when the template cannot pass on what was asked."""
    able = capabilities(template) if template else ()
    if request.tools and request.tool_choice != "none" and "tools" not in able:
        raise CapabilityError("this model does not support tools: its chat template has no place for them.")
    if request.think and "thinking" not in able:
        raise CapabilityError("this model does not support thinking; ask without it.")


def _text(
    llm: Llama, vocabulary: Vocabulary, template: str | None, messages: Sequence[Message], request: GenerationRequest
) -> str:
    if template is None:
        return "\n".join(str(message.get("content") or "") for message in messages)
    return render(
        template,
        messages,
        tools=() if request.tool_choice == "none" else request.tools,
        think=request.think,
        options=request.template_options,
        bos=vocabulary.token_text(llm.token_bos()),
        eos=vocabulary.token_text(llm.token_eos()),
    )


def _room(request: GenerationRequest, n_ctx: int) -> int:
    """Tokens that a conversation should leave to its answer."""
    room = max(1, n_ctx // ROOM_SHARE)
    limit = request.sampling.max_tokens
    return min(room, limit) if limit and limit > 0 else room


def cut(
    messages: Sequence[Message],
    prompt: Callable[[Sequence[Message]], tuple[list[int], str]],
    n_ctx: int,
    room: int,
    *,
    may_cut: bool,
) -> tuple[Sequence[Message], list[int], str]:
    """The messages that fit, their tokens and their text: system messages, and as many of the last as leave `room`.

    What remains of the others begins with a user's message, or is the last message alone. Raises ContextError when
    not even that fits, or when nothing may be left out.
    """
    tokens, text = prompt(messages)
    if len(tokens) + (room if may_cut else 1) <= n_ctx or not may_cut:
        check_fits(len(tokens), n_ctx)
        return messages, tokens, text
    others = [i for i, message in enumerate(messages) if message.get("role") != "system"]
    begins = [i for i in others[1:-1] if messages[i].get("role") == "user"] + others[-1:]
    best = (messages, tokens, text)
    low, high = 0, len(begins) - 1
    while low <= high:  # fewer messages are fewer tokens
        middle = (low + high) // 2
        kept = [m for i, m in enumerate(messages) if i >= begins[middle] or m.get("role") == "system"]
        tokens, text = prompt(kept)
        if len(tokens) + room <= n_ctx:
            best, high = (kept, tokens, text), middle - 1
        else:
            if len(tokens) < len(best[1]):
                best = (kept, tokens, text)
            low = middle + 1
    check_fits(len(best[1]), n_ctx)
    return best
