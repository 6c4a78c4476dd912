"""Builds the prompt of a request, as tokens. The sources are messages that the chat
template renders, an earlier context, and a text, which may have a gap that the model
fills.

If the request allows it, a prompt that is too long is shortened. In a conversation,
whole messages are left out, the oldest first; then the longest message is cut at its
beginning. Any other prompt keeps its first and its last tokens, and loses its middle.
As in llama.cpp, it keeps the number of tokens that a full context keeps in a shift. A
prompt with a gap is never shortened. This module evaluates nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from moegguf.engine.projector import PLACEHOLDER, ImagePrompt
from moegguf.errors import CapabilityError, ContextError, OptionError, TemplateError
from moegguf.generate.continuation import Continuation, continuation_of, split_last
from moegguf.generate.images import Marked, mark_images, text_of
from moegguf.generate.request import Message, Request, Tool
from moegguf.generate.template import LongPromptError, render
from moegguf.gguf.chat_template import CHATML, CHATML_END, capabilities_of
from moegguf.gguf.experts import ExpertLayout

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

# The number of tokens of a longer text is estimated before the text is tokenized.
MAX_WHOLE_CHARACTERS = 512 << 10
# Maximum characters of a rendered prompt per token of the context; COPIES may allow
# more.
TOKEN_CHARACTERS = 32
COPIES = 4  # a rendered prompt may be this many times as long as its messages and tools
USUAL_CHARACTERS = 4  # typical number of characters per token, for estimates
# Characters of a cut message that are tokenized for each token that may be kept.
HEADROOM_CHARACTERS = 8
# A shortened conversation leaves 1/8 of the context for the answer, or `max_tokens` if
# less.
ANSWER_DIVISOR = 8
# Estimated number of tokens in the template's delimiters around a message.
MESSAGE_TOKENS = 8

Token = TypeVar("Token")


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request, as tokens and as text."""

    tokens: list[int]  # tokens of the prompt, including image placeholders
    # The whole text of the prompt; "" if it is not known, or for a conversation that is
    # far too long.
    end: str = ""
    # Tokens of the whole prompt; an estimate for a text that is far too long; 0: not
    # counted.
    n_tokens: int = 0
    template: str | None = None  # the chat template that rendered the messages
    continuation: Continuation | None = None  # given if the answer continues a message
    cut_messages: int = 0  # number of messages that were left out
    cut_tokens: int = 0  # number of tokens that were left out
    images: ImagePrompt | None = None
    stops: tuple[str, ...] = ()  # strings that end the answer, as end tokens do

    @property
    def text_tokens(self) -> list[int]:
        """The tokens without the image placeholders."""
        return (
            [token for token in self.tokens if token != PLACEHOLDER]
            if self.images
            else self.tokens
        )


def read_prompt(llm: Llama, request: Request) -> Prompt:
    """Returns the prompt of `request`.

    Raises ContextError if the prompt does not fit into the context, even after any
    shortening that the request allows. Raises CapabilityError if the prompt needs a
    capability that the model lacks. Raises TemplateError if the chat template fails.
    Raises OptionError for an invalid token or image, for an empty list of messages, and
    for an empty prompt unless the model has a BOS token.
    """
    if request.messages is not None:
        prompt = _Renderer(llm, request).conversation(request.messages)
    elif request.prompt is not None:
        prompt = _Reader(llm, request).completion(request.prompt)
    else:
        raise OptionError(
            "a request must have messages or a prompt, but this one has neither; give one of them."
        )
    prompt = replace(prompt, tokens=prompt.tokens or llm.vocabulary.bos_tokens)
    if not prompt.tokens:
        rendered = (
            " once its template has rendered it" if request.messages is not None else ""
        )
        raise OptionError(f"the prompt is empty{rendered}; give at least one word.")
    return prompt


def render_prompt(llm: Llama, request: Request) -> str:
    """Returns the text of a conversation's prompt. Raises CapabilityError and
    TemplateError as `read_prompt` does, and ContextError for a conversation that is far
    too long."""
    renderer = _Renderer(llm, request)
    found = renderer.render(request.messages or ())
    if not found.end:
        renderer.check_fits(found.n_tokens)
    return found.end


def count_prompt(llm: Llama, request: Request) -> int:
    """Returns the number of tokens of a conversation's prompt, which may be too long
    for the context. For a conversation that is far too long, returns an estimate.
    Raises CapabilityError and TemplateError as `read_prompt` does."""
    return _Renderer(llm, request).render(request.messages or ()).n_tokens


def template_of(layout: ExpertLayout, *, with_tools: bool) -> str:
    """Returns the chat template for a conversation. A model may have a separate
    template for conversations with tools. For a model without a template, returns
    CHATML."""
    return (
        (layout.tool_template if with_tools else None) or layout.chat_template or CHATML
    )


class _Reader:
    """Builds the prompt of one request."""

    def __init__(self, llm: Llama, request: Request) -> None:
        self._llm, self._request, self._vocabulary = llm, request, llm.vocabulary
        self._n_ctx = request.sampling.context_within(llm.n_ctx())
        # The tokens that come before the first token of the text or conversation.
        self._first = [] if request.context else llm.vocabulary.bos_tokens

    def check_fits(self, n_tokens: int) -> None:
        """Raises ContextError if a prompt of `n_tokens` tokens leaves no room in the
        context for the answer."""
        if n_tokens >= self._n_ctx:
            raise ContextError(
                f"Requested tokens ({n_tokens}) exceed context window of {self._n_ctx}, and the answer needs at least"
                " one token; give a larger context (n_ctx, num_ctx or --ctx) or a shorter prompt."
            )

    def completion(self, prompt: str) -> Prompt:
        """Returns the prompt of a request that has a text, perhaps with a suffix."""
        context = self._context_tokens()
        if self._request.suffix is None:
            tokens, n_tokens = self._tokens(prompt)
            whole = context + _joined(self._first, tokens)
            return self._fitted(whole, n_tokens - len(tokens))
        marks = self._vocabulary.fim_tokens
        if marks is None:
            raise CapabilityError(
                "this model cannot fill in text before a suffix (insert); ask without one."
            )
        before, after, gap = marks
        head, n_head = self._tokens(prompt, special=False)
        tail, n_tail = self._tokens(self._request.suffix, special=False)
        files = self._file_tokens(self._request.files)
        tokens = [*context, *self._first, *files, before, *head, after, *tail, gap]
        self.check_fits(len(tokens) + n_head - len(head) + n_tail - len(tail))
        return Prompt(tokens)

    def _tokens(self, text: str, *, special: bool = True) -> tuple[list[int], int]:
        """Returns the tokens of `text`, and their number. For a text that is far too
        long, returns the same as `_far`."""
        if far := self._far(text, special=special):
            return far
        tokens = self._vocabulary.tokens(text, special=special)
        return tokens, len(tokens)

    def _far(self, text: str, *, special: bool = True) -> tuple[list[int], int] | None:
        """Returns only the first and last tokens, and an estimate of the number of all
        tokens, for a text that is far too long. Such a text is longer than
        MAX_WHOLE_CHARACTERS and needs more than twice the context. Returns None for any
        other text."""
        if len(text) <= MAX_WHOLE_CHARACTERS:
            return None
        half = MAX_WHOLE_CHARACTERS // 2
        ends = self._vocabulary.tokens(text[:half] + text[-half:], special=special)
        n_tokens = len(ends) * len(text) // MAX_WHOLE_CHARACTERS
        return (ends, n_tokens) if n_tokens > 2 * self._n_ctx else None

    def _context_tokens(self) -> list[int]:
        """Returns the tokens of `request.context`, which may contain strings. If the
        first element is a string, BOS comes first. Raises OptionError for a number that
        is not a valid token id, and ContextError for a string that is far too long."""
        request, vocabulary = self._request, self._vocabulary
        vocabulary.check(each for each in request.context if isinstance(each, int))
        has_own_begin = request.begins_with_token or not request.context
        tokens = list[int]()
        for each in request.context:
            if isinstance(each, int):
                tokens.append(each)
                continue
            found, n_found = self._tokens(each)
            if n_found > len(found):
                self.check_fits(n_found)
            tokens += found
        return _joined([] if has_own_begin else vocabulary.bos_tokens, tokens)

    def _file_tokens(self, files: Sequence[tuple[str, str]]) -> list[int]:
        """Returns the tokens of `files`, which are (name, text) pairs, in
        llama-server's format, or [] if there are no files.

        If the model has tokens for a repository (arXiv 2409.12186), each text follows
        its name. At the end, the constant "filename" is the name of the file with the
        gap. For other models the files are snippets without names. Raises ContextError
        for a file that does not fit into the context.
        """
        tokens, marks = list[int](), self._vocabulary.repository_tokens
        if not files:
            return tokens
        if marks:
            tokens += [marks[0], *self._vocabulary.tokens("myproject\n", special=False)]
        for name, text in (*files, ("filename", "")) if marks else files:
            head = f"{name}\n" if marks else "\n\n--- snippet ---\n\n"
            tokens += [marks[1]] if marks else []
            tokens += self._vocabulary.tokens(head, special=False)
            found, n_found = self._tokens(text, special=False)
            self.check_fits(n_found)
            tokens += found
        return tokens

    def _fitted(self, tokens: list[int], n_more: int = 0) -> Prompt:
        """Returns the prompt with these tokens. If there are too many, some tokens in
        the middle are cut. `n_more`: number of tokens that are already missing in the
        middle. Raises ContextError if a cut is necessary, but `truncate` or `shift` of
        the request is False."""
        request, n_whole = self._request, len(tokens) + n_more
        if n_whole < self._n_ctx:
            return Prompt(tokens)
        if not (request.truncate and request.shift):
            self.check_fits(n_whole)
        n_keep = request.sampling.num_keep
        n_bos = len(self._vocabulary.bos_tokens)
        kept = cut_middle(
            tokens, self._n_ctx, self._n_ctx if n_keep < 0 else n_keep + n_bos
        )
        return Prompt(kept, cut_tokens=n_whole - len(kept))


def _joined(first: list[int], tokens: list[int]) -> list[int]:
    """Returns `first` and `tokens`, without the first of `tokens` if it repeats the BOS
    token in `first`."""
    return first + (tokens[1:] if first and tokens[:1] == first else tokens)


class _Renderer(_Reader):
    """Builds the prompt of a conversation. If the answer continues the last message,
    the prompt ends with this message's text. Raises CapabilityError if the request has
    tools or thinking but the chat template does not support them."""

    def __init__(self, llm: Llama, request: Request) -> None:
        super().__init__(llm, request)
        self._tools = tuple(map(_shown, request.tools))
        self._template = request.template or template_of(
            llm.layout, with_tools=bool(self._tools)
        )
        able = capabilities_of(self._template)
        if self._tools and "tools" not in able:
            raise CapabilityError(
                "this model does not support tools: its chat template has no place for them; ask without tools."
            )
        if request.think and "thinking" not in able:
            raise CapabilityError(
                "this model does not support thinking; ask without it."
            )

    def conversation(self, messages: Sequence[Message]) -> Prompt:
        """Returns the prompt of a conversation, after the tokens of
        `request.context`."""
        context = self._context_tokens()
        if not messages:
            raise OptionError("there are no messages; give at least one.")
        prompt = self._truncated(messages)
        if not context:
            return prompt
        if prompt.images is not None:
            images = prompt.images.after(context)
            self.check_fits(len(images.tokens))
            return replace(prompt, tokens=images.tokens, images=images)
        fitted = self._fitted(context + prompt.tokens)
        n_cut = prompt.cut_tokens + fitted.cut_tokens
        return replace(prompt, tokens=fitted.tokens, cut_tokens=n_cut)

    def render(self, messages: Sequence[Message]) -> Prompt:
        """Renders and tokenizes the messages. For messages that are far too long,
        returns only an estimate of `n_tokens`. Raises TemplateError, and for images
        CapabilityError and OptionError."""
        text = "".join(text_of(message.get("content")) for message in messages)
        if far := self._far(text):
            return Prompt([], n_tokens=far[1])
        last = None
        if self._request.continue_final_message:
            messages, last = split_last(messages)
        marked = mark_images(messages)
        most = max(
            TOKEN_CHARACTERS * self._n_ctx, COPIES * self._n_given(marked.messages)
        )
        try:
            text = render(
                self._template,
                marked.messages,
                tools=self._tools,
                think=self._request.think,
                options=self._request.template_options,
                bos=self._vocabulary.token_text(self._llm.token_bos()),
                eos=self._vocabulary.token_text(self._llm.token_eos()),
                begins_answer=self._request.begins_answer or last is not None,
                characters=most,
            )
        except LongPromptError:
            return Prompt([], n_tokens=most // USUAL_CHARACTERS)
        if far := self._far(text):
            return Prompt([], n_tokens=far[1])
        continuation = None
        if last is not None:
            continuation = continuation_of(last, text, self._template)
            text += continuation.text
        images = self._read_images(marked, text) if marked.images else None
        tokens = (
            images.tokens
            if images
            else _joined(self._first, self._vocabulary.tokens(text))
        )
        return Prompt(
            tokens,
            text,
            len(tokens),
            self._template,
            continuation,
            images=images,
            stops=(CHATML_END,) if self._template is CHATML else (),
        )

    def _image_tokens(self, message: Message) -> int:
        """Returns the number of tokens of a message's images, or 0 if the model has no
        projector."""
        images = mark_images([message]).images
        projector = self._llm.context.open_projector()
        if not images or projector is None:
            return 0
        return len(projector.tokenize([""] * (len(images) + 1), images).tokens)

    def _n_given(self, messages: Sequence[Message]) -> int:
        """Returns the number of characters in the messages and tools that the template
        receives."""
        values = [value for message in messages for value in message.values()]
        return sum(len(str(value)) for value in (*values, *self._tools))

    def _read_images(self, marked: Marked, text: str) -> ImagePrompt:
        projector = self._llm.context.open_projector()
        if projector is None:
            raise CapabilityError(
                "this model was loaded without a projector, so it cannot read images; give the mmproj file that belongs"
                " to it (--mmproj, or a file in the model's folder), or ask without images."
            )
        texts = marked.pieces(text)
        if texts is None:
            raise TemplateError(
                "the chat template leaves out an image; give the model a template with a place for images."
            )
        # The answer must come after text, not after an image.
        texts[-1] = texts[-1] or "\n"
        images = projector.tokenize(texts, marked.images)
        first, n_tokens = self._first, len(images.tokens)
        n_bos = len(first) + n_tokens - len(_joined(first, images.tokens))
        return images.after(first, n_bos)

    def _truncated(self, messages: Sequence[Message]) -> Prompt:
        """Returns the prompt of a conversation.

        If the prompt leaves too little room for an answer and the request has
        `truncate`, only system messages and the newest other messages are kept. If
        these still fill the context and the request has `shift`, the longest message is
        cut. Raises ContextError if the prompt still does not fit into the context.
        """
        request, n_ctx, whole = self._request, self._n_ctx, self.render(messages)
        n_answer, limit = max(1, n_ctx // ANSWER_DIVISOR), request.sampling.max_tokens
        n_room = n_ctx - (min(n_answer, limit) if limit and limit > 0 else n_answer)
        kept, best = list(messages), whole
        if request.truncate and whole.n_tokens > n_room:
            kept, best = self._newest(messages, n_room)
            if best.n_tokens >= n_ctx and request.shift:
                best = self._with_cut_text(kept) or best
        if best.n_tokens >= n_ctx:
            self.check_fits(whole.n_tokens)
        n_cut = max(0, whole.n_tokens - best.n_tokens)
        return replace(best, cut_messages=len(messages) - len(kept), cut_tokens=n_cut)

    def _newest(
        self, messages: Sequence[Message], n_room: int
    ) -> tuple[list[Message], Prompt]:
        """Returns the messages of a shortened conversation that fits into `n_room`
        tokens, and its prompt. If no shortened conversation fits, returns the shortest
        one."""
        conversation = Conversation(messages)
        n_characters = sum(len(_droppable_text(message)) for message in messages)
        exact = n_characters <= MAX_WHOLE_CHARACTERS
        sizes = [self._estimate(message, exact) for message in messages]
        fixed = self.render(conversation.fixed)
        begin = conversation.steady_begin(sizes, n_room - fixed.n_tokens)
        found = self.render(conversation.kept(begin))
        later = [other for other in conversation.begins if other > begin]
        # The estimate was too low: searches for the first beginning that fits.
        if found.n_tokens > n_room and later:
            n = bisect_left(
                later,
                True,
                key=lambda other: (
                    self.render(conversation.kept(other)).n_tokens <= n_room
                ),
            )
            begin = later[min(n, len(later) - 1)]
            found = self.render(conversation.kept(begin))
        return conversation.kept(begin), found

    def _estimate(self, message: Message, exact: bool) -> int:
        """Returns the estimated number of tokens of a message, or 0 for a system
        message. A message has the same estimate in every request. `exact`: True if the
        text is tokenized for the estimate."""
        text = _droppable_text(message)
        n_tokens = (
            len(self._vocabulary.tokens(text))
            if exact
            else len(text) // USUAL_CHARACTERS
        )
        if message.get("role") != "system":
            n_tokens += self._image_tokens(message)
        return n_tokens + MESSAGE_TOKENS if n_tokens else 0

    def _with_cut_text(self, messages: Sequence[Message]) -> Prompt | None:
        """Returns a prompt in which the beginning of the longest message is cut off, so
        that the prompt has no more tokens than a full context after a shift. System
        messages are not cut. Returns None if there is no message to cut, or if the
        other messages leave no room."""
        at = longest(messages)
        if at is None:
            return None
        text, vocabulary = str(messages[at]["content"]), self._vocabulary

        def with_text(text: str) -> Prompt:
            changed = {**messages[at], "content": text}
            return self.render([*messages[:at], changed, *messages[at + 1 :]])

        n_rest = with_text(" ").n_tokens
        n_text = n_most = n_after_shift(self._n_ctx, n_rest) - n_rest
        tokens = (
            vocabulary.tokens(text[-n_text * HEADROOM_CHARACTERS :])
            if n_text > 0 and n_rest < self._n_ctx - 1
            else []
        )
        while n_text > 0 and tokens:
            end = b"".join(
                vocabulary.piece(token, special=True) for token in tokens[-n_text:]
            )
            found = with_text(end.decode(errors="ignore"))
            if found.n_tokens <= n_rest + n_most:
                return found
            n_text -= max(1, found.n_tokens - n_rest - n_most)
        return None


def _droppable_text(message: Message) -> str:
    """Returns the text and the calls of a message, or "" for a system message, which is
    never dropped."""
    if message.get("role") == "system":
        return ""
    return f"{text_of(message.get('content'))}{message.get('tool_calls') or ''}"


def _shown(tool: Tool) -> Tool:
    """Returns a tool for the template, without its field `strict`, which concerns only
    the constraint of the answer."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    return {
        **tool,
        "function": {key: value for key, value in function.items() if key != "strict"},
    }


def n_after_shift(n_ctx: int, n_keep: int) -> int:
    """Returns the number of tokens that a full context has left after a shift. The
    first `n_keep` tokens are kept, and the older half of the others (at least one
    token) is dropped."""
    n_keep = min(max(n_keep, 0), n_ctx - 1)
    return n_ctx - max((n_ctx - n_keep) // 2, 1)


def cut_middle(tokens: Sequence[Token], n_ctx: int, n_keep: int) -> list[Token]:
    """Returns the first `n_keep` and the last tokens of a prompt that is too long. The
    result has as many tokens as a full context has left after a shift.

    `tokens` may lack some tokens in the middle of the prompt.
    """
    n_keep = min(max(n_keep, 0), n_ctx - 1)
    n_last = n_after_shift(n_ctx, n_keep) - n_keep
    return [*tokens[:n_keep], *tokens[max(n_keep, len(tokens) - n_last) :]]


class Conversation:
    """A conversation that can be shortened. System messages and the user's last message
    are always kept.

    `begins` has the indices of the messages that may come first in a shortened
    conversation. These are messages of the user, and the assistant's messages after the
    user's last one, so that a call is never separated from its results.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        roles = [message.get("role") for message in messages]
        self._last_user = max(
            (i for i, role in enumerate(roles) if role == "user"), default=-1
        )
        self.begins = [
            i
            for i, role in enumerate(roles)
            if role == "user" or (role == "assistant" and i > self._last_user)
        ]

    @property
    def fixed(self) -> list[Message]:
        """The messages of the shortest conversation: the system messages, and an empty
        user message."""
        system = [
            message for message in self._messages if message.get("role") == "system"
        ]
        return [*system, {"role": "user", "content": ""}]

    def kept(self, begin: int) -> list[Message]:
        """Returns the messages that are kept if the conversation begins at the message
        with index `begin`."""
        return [
            message
            for i, message in enumerate(self._messages)
            if i >= begin or i == self._last_user or message.get("role") == "system"
        ]

    def steady_begin(self, n_tokens: Sequence[int], room: int) -> int:
        """Returns the index of the message to begin with, so that the messages have
        about `room` tokens or fewer. 0 means that all messages are kept.

        The number of dropped tokens is rounded up to a multiple of half of the room. So
        several successive turns begin at the same message, and the context already
        contains most of their prompts.

        n_tokens: number of tokens of each message, 0 for system messages.
        """
        sums, step = [0, *accumulate(n_tokens)], max(1, room // 2)
        n_least = -(-(sums[-1] - room) // step) * step
        if n_least <= 0 or not self.begins:
            return 0
        i = bisect_left(self.begins, n_least, key=lambda begin: sums[begin])
        return self.begins[min(i, len(self.begins) - 1)]


def longest(messages: Sequence[Message]) -> int | None:
    """Returns the index of the message with the longest text. System messages, and
    contents that are lists of parts, are ignored. Returns None if no other message has
    text."""
    sizes = {
        i: len(message["content"])
        for i, message in enumerate(messages)
        if message.get("role") != "system"
        and isinstance(message.get("content"), str)
        and message["content"]
    }
    return max(sizes, key=lambda i: sizes[i], default=None)
