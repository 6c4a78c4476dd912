"""From a request to the tokens of its prompt: chat template, earlier context, fill-in-the-middle, truncation.

Evaluates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from moegguf.engine.projector import PLACEHOLDER, ImagePrompt
from moegguf.engine.vocabulary import Vocabulary
from moegguf.errors import CapabilityError, ContextError, OptionError, TemplateError
from moegguf.generate.images import Marked, mark_images, text_of
from moegguf.generate.request import GenerationRequest, Message
from moegguf.generate.template import capabilities, render

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

ANSWER_DIVISOR = 8  # a truncated conversation leaves an eighth of the context to the answer
MAX_TOKEN_CHARACTERS = 256  # a text above this times the context is not worth tokenizing


class Rendered(NamedTuple):
    """The tokens of messages, and their text; with images only what follows the last of them."""

    tokens: list[int]
    text: str
    images: ImagePrompt | None = None


@dataclass(frozen=True)
class Prompt:
    """`tokens` of the prompt; `end`, its text; `template`, the chat template that rendered it, if any.

    `images`: of a prompt with images, which has the same tokens.
    """

    tokens: list[int]
    end: str = ""
    template: str | None = None
    cut_messages: int = 0
    images: ImagePrompt | None = None

    @property
    def text_tokens(self) -> list[int]:
        """The tokens without the placeholders of images."""
        return [token for token in self.tokens if token != PLACEHOLDER] if self.images else self.tokens


def read_prompt(llm: Llama, vocabulary: Vocabulary, request: GenerationRequest) -> Prompt:
    """The prompt of `request`.

    Raises ContextError when it does not fit even after truncation, CapabilityError when the model lacks a capability
    that it needs, TemplateError, and OptionError for an empty request.
    """
    if request.messages is not None:
        prompt = _conversation(llm, vocabulary, request)
    elif request.prompt is not None:
        check_fits(max(len(request.prompt), len(request.suffix or "")) // MAX_TOKEN_CHARACTERS, llm.n_ctx())
        prompt = Prompt(_completion(vocabulary, request, request.prompt))
    else:
        raise OptionError("a request has messages or a prompt; give one of them.")
    vocabulary.check(request.context)
    tokens = [*request.context, *prompt.tokens] or vocabulary.bos_tokens
    if not tokens:
        raise OptionError("the prompt is empty; give at least one word.")
    check_fits(len(tokens), llm.n_ctx())
    return replace(prompt, tokens=tokens, images=prompt.images and prompt.images.after(request.context))


def check_fits(n_tokens: int, n_ctx: int) -> None:
    """Raises ContextError unless a prompt leaves at least one token of the context to the answer."""
    if n_tokens >= n_ctx:
        raise ContextError(
            f"Requested tokens ({n_tokens}) exceed context window of {n_ctx}; give a larger context (num_ctx, --ctx)"
            " or a shorter prompt."
        )


def _completion(vocabulary: Vocabulary, request: GenerationRequest, prompt: str) -> list[int]:
    first = [] if request.context else vocabulary.bos_tokens
    if request.suffix is None:
        return first + _without_second_bos(first, vocabulary.tokens(prompt))
    marks = vocabulary.fim_tokens
    if marks is None:
        raise CapabilityError("this model cannot fill in text before a suffix (insert); ask without one.")
    before, after, gap = marks
    head, tail = vocabulary.tokens(prompt, special=False), vocabulary.tokens(request.suffix, special=False)
    return [*first, before, *head, after, *tail, gap]


def _without_second_bos(first: list[int], tokens: list[int]) -> list[int]:
    """`tokens` without a BOS from the text itself, when `first` adds one."""
    return tokens[1:] if first and tokens[:1] == first else tokens


def _conversation(llm: Llama, vocabulary: Vocabulary, request: GenerationRequest) -> Prompt:
    template = request.template or llm.metadata.get("tokenizer.chat_template") or None
    check_capabilities(template, request)

    def prompt(messages: Sequence[Message]) -> Rendered:
        least = sum(len(text_of(message.get("content"))) for message in messages) // MAX_TOKEN_CHARACTERS
        if least >= llm.n_ctx():
            return Rendered([0] * least, "")  # too long in any case
        first = [] if request.context else vocabulary.bos_tokens
        marked = mark_images(messages)
        if marked.images:
            return _with_images(llm, marked, partial(_render, llm, vocabulary, template, request), first)
        text = _render(llm, vocabulary, template, request, marked.messages)
        return Rendered(first + _without_second_bos(first, vocabulary.tokens(text)), text)

    if not request.messages:
        raise OptionError("there are no messages; give at least one.")
    n_ctx = llm.n_ctx() - len(request.context)
    n_answer = _answer_tokens(request, n_ctx)
    messages, rendered = truncate(request.messages, prompt, n_ctx, n_answer, enabled=request.truncate)
    n_cut = len(request.messages) - len(messages)
    return Prompt(rendered.tokens, rendered.text, template, n_cut, rendered.images)


def _with_images(llm: Llama, marked: Marked, render: Callable[[Sequence[Message]], str], first: list[int]) -> Rendered:
    """The prompt of messages with images. Raises CapabilityError, OptionError, and TemplateError for lost images."""
    if llm.projector is None:
        raise CapabilityError(
            "this model was loaded without a projector, so it cannot read images; give the mmproj file that belongs to"
            " it (--mmproj, or beside the model), or ask without images."
        )
    text = render(marked.messages)
    texts = marked.pieces(text)
    if texts is None:
        text = render(marked.as_lists())
        texts = marked.pieces(text)
    if texts is None:
        raise TemplateError("the chat template leaves out an image; the model needs another one.")
    texts[-1] = texts[-1] or "\n"  # the answer begins after a text
    images = llm.projector.tokenize(texts, marked.images)
    n_bos = len(images.tokens) - len(_without_second_bos(first, images.tokens))
    images = images.after(first, n_bos)
    return Rendered(images.tokens, texts[-1], images)


def check_capabilities(template: str | None, request: GenerationRequest) -> None:
    """Raises CapabilityError when the template does not support the request's tools or thinking."""
    able = capabilities(template) if template else ()
    if request.tools and request.tool_choice != "none" and "tools" not in able:
        raise CapabilityError("this model does not support tools: its chat template has no place for them.")
    if request.think and "thinking" not in able:
        raise CapabilityError("this model does not support thinking; ask without it.")


def _render(
    llm: Llama, vocabulary: Vocabulary, template: str | None, request: GenerationRequest, messages: Sequence[Message]
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


def _answer_tokens(request: GenerationRequest, n_ctx: int) -> int:
    """Tokens that a truncated conversation leaves to its answer."""
    n_answer = max(1, n_ctx // ANSWER_DIVISOR)
    limit = request.sampling.max_tokens
    return min(n_answer, limit) if limit and limit > 0 else n_answer


def truncate(
    messages: Sequence[Message],
    prompt: Callable[[Sequence[Message]], Rendered],
    n_ctx: int,
    n_answer: int,
    *,
    enabled: bool,
) -> tuple[Sequence[Message], Rendered]:
    """The messages that leave `n_answer` tokens free, and their prompt: system messages, and the newest others.

    The others begin with a user's message, or are the last message alone. Raises ContextError when not even that fits,
    or when not `enabled`.
    """
    rendered = prompt(messages)
    if not enabled or len(rendered.tokens) + n_answer <= n_ctx:
        check_fits(len(rendered.tokens), n_ctx)
        return messages, rendered
    others = [i for i, message in enumerate(messages) if message.get("role") != "system"]
    begins = [i for i in others[1:-1] if messages[i].get("role") == "user"] + others[-1:]
    best = (messages, rendered)
    low, high = 0, len(begins) - 1
    while low <= high:  # binary search: fewer messages have fewer tokens
        middle = (low + high) // 2
        kept = [m for i, m in enumerate(messages) if i >= begins[middle] or m.get("role") == "system"]
        rendered = prompt(kept)
        if len(rendered.tokens) + n_answer <= n_ctx:
            best, high = (kept, rendered), middle - 1
        else:
            if len(rendered.tokens) < len(best[1].tokens):
                best = (kept, rendered)
            low = middle + 1
    check_fits(len(best[1].tokens), n_ctx)
    return best
