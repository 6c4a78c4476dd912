"""Builds training rows from the conversations in `demo_questions.jsonl` and `tools.py`.
Their wording and length vary, and most rows contain several conversations.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer

from moegguf.generate.sandbox import Sandbox
from predictors.models.demo import questions, tools
from predictors.models.demo.tools import Tool
from predictors.models.demo.wording import Message, reworded
from recipes.demo.data import IGNORED, Batch, Tokens, Windows
from recipes.demo.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, IM_START, special_id

STEPS = (
    (512, 4, 0), (1024, 2, 0), (512, 3, 1), (2048, 1, 0), (512, 4, 0), (1024, 1, 1),
    (512, 4, 0), (2048, 1, 0), (512, 3, 1), (1024, 2, 0), (2048, 0, 1), (512, 4, 0),
)  # fmt: skip
"""The training steps, which are repeated in a cycle: (tokens per row, rows of
conversations, rows of the corpus)."""
SETTLING_STEPS = (
    (512, 2, 2),
    (1024, 1, 1),
    (512, 2, 2),
    (2048, 0, 1),
    (512, 1, 3),
    (2048, 1, 0),
)
"""The steps of the last stage, in the form of STEPS but with more rows of the corpus.
The conversations of STEPS make the model forget some of the corpus, and these steps
bring it back."""
# Probabilities of variations of a conversation
WITH_TOOLS, WITH_LONG_SYSTEM, WITH_SYSTEM, CHAINED, APART = 0.06, 0.05, 0.15, 0.35, 0.4
# STARTERS: share of starters among the drawn questions. LONG_TEXT: share of long
# conversations that begin with a long excerpt of the corpus.
STARTERS, LONG_TEXT = 0.12, 0.4
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows moegguf.",
    "You are moegguf's demo model.",
    "You are a friendly assistant. Answer the user's questions as well as you can.",
    "Answer truthfully. If you do not know something, say so.",
    "Be short.",
)
N_CTX = max(n_ctx for n_ctx, _, _ in STEPS)
# Minimum number of positions that a gap leaves for the rest of the conversation.
MARGIN = 128
PARTS = ("ids", "spoken", "positions")


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, and the tools that are defined in its prompt."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()


@dataclass
class Encoded:
    """The tokens of a conversation, or of a row of several conversations."""

    ids: list[int] = field(default_factory=list)
    # The ids in the model's own turns, and IGNORED in place of all other ids
    spoken: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, own: bool = False, gap: int = 0) -> None:
        """Appends ids, and skips `gap` positions before the first of them. `own` is
        True if the model writes these ids in its own turn."""
        start = self.positions[-1] + 1 + gap if self.positions else 0
        self.ids.extend(ids)
        self.spoken.extend(ids if own else [IGNORED] * len(ids))
        self.positions.extend(range(start, start + len(ids)))


@dataclass(frozen=True)
class Chat:
    """Builds training batches of conversations. Rows of the corpus are mixed in, so
    that the model does not forget the corpus.
    """

    tokenizer: Tokenizer
    conversations: Sequence[list[Message]]
    corpus: Tokens
    steps: Sequence[tuple[int, int, int]] = STEPS

    @cached_property
    def windows(self) -> dict[int, Windows]:
        """{row length: the corpus cut into windows of this length}, for every row
        length in `steps`."""
        return {
            n_ctx: Windows(self.corpus, n_ctx, seed=1) for n_ctx, _, _ in self.steps
        }

    @cached_property
    def template(self) -> Any:
        """The compiled chat template, which renders text as a server does."""
        return Sandbox().from_string(CHAT_TEMPLATE)

    def excerpt(self, rng: random.Random, n_tokens: int) -> str:
        """Returns a random piece of the corpus with n_tokens tokens, as text."""
        start = rng.randrange(len(self.corpus) - n_tokens)
        return str(
            self.tokenizer.decode(self.corpus[start : start + n_tokens].tolist())
        ).strip()

    def draw(self, rng: random.Random) -> list[Message]:
        """Returns a random conversation, reworded. Starters are drawn more often than
        other questions, because their answers must be right."""
        return reworded(
            rng.choice(
                self.starters if rng.random() < STARTERS else self.conversations
            ),
            rng,
        )

    @cached_property
    def starters(self) -> list[list[Message]]:
        """The questions of the web page and the documentation, each with its answer."""
        known = questions.answers()
        return [
            questions.exchange(question, known[question])
            for question in questions.starters()
        ]

    def plain(self, rng: random.Random) -> list[Message]:
        """Returns a random conversation as `draw` does, but without a system
        message."""
        return [m for m in self.draw(rng) if m["role"] != "system"]

    def vary(self, rng: random.Random, n_tokens: int) -> Conversation:
        """Returns a random conversation with random variations: tools, a system
        message, or further questions. About one in three conversations without tools
        continues with further questions, up to about `n_tokens` tokens."""
        if rng.random() < WITH_TOOLS:
            messages, defined = tools.conversation(rng, lambda: self.plain(rng))
            if rng.random() < 0.2:
                messages = [
                    {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)},
                    *messages,
                ]
            return Conversation(messages, defined)
        messages = self.draw(rng)
        if messages[0]["role"] != "system" and rng.random() < WITH_SYSTEM:
            messages.insert(
                0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
            )
        elif messages[0]["role"] != "system" and rng.random() < WITH_LONG_SYSTEM:
            about = f"{rng.choice(SYSTEM_PROMPTS)}\n\n{self.excerpt(rng, rng.randrange(20, n_tokens // 3))}"
            messages.insert(0, {"role": "system", "content": about})
        if rng.random() < CHAINED:
            for _ in range(rng.randrange(1, max(2, n_tokens // 70))):
                messages += self.plain(rng)
        return Conversation(messages)

    def long(self, rng: random.Random, n_tokens: int) -> Encoded:
        """Returns the tokens of one conversation of at most `n_tokens` tokens. Appends
        random conversations until the next one would not fit. With probability
        LONG_TEXT, begins with a long system message."""
        messages: list[Message] = []
        if rng.random() < LONG_TEXT:
            text = self.excerpt(rng, rng.randrange(n_tokens // 4, n_tokens * 3 // 4))
            messages.append(
                {"role": "system", "content": f"{rng.choice(SYSTEM_PROMPTS)}\n\n{text}"}
            )
        encoded = Encoded()
        while True:
            longer = [*messages, *self.plain(rng)]
            candidate = self.encode(Conversation(longer))
            if len(candidate.ids) > n_tokens:
                return encoded
            messages, encoded = longer, candidate

    def encode(
        self, conversation: Conversation, rng: random.Random | None = None
    ) -> Encoded:
        """Returns the tokens of a conversation, as rendered by the chat template.

        With `rng`, leaves random gaps, less than N_CTX in total, between the positions
        of its turns. The gaps teach the model larger distances between turns than fit
        in a short row.
        """
        messages, done, encoded = conversation.messages, "", Encoded()
        gap = 0
        if rng:
            n_turns = sum(message["role"] == "assistant" for message in messages)
            gap = rng.randrange(N_CTX) // (n_turns + 1)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("tool_calls"):
                # The model does not learn to write a call, because the server forces
                # calls.
                continue
            prompt = self.render(conversation, messages[:i], add_generation_prompt=True)
            whole = self.render(
                conversation, messages[: i + 1], add_generation_prompt=False
            ).removesuffix("\n")
            question = prompt.rindex(f"{IM_START}user")
            encoded.add(self.tokenizer.encode(prompt[len(done) : question]).ids)
            room = (
                N_CTX
                - MARGIN
                - len(encoded.ids)
                - (encoded.positions[-1] + 1 if encoded.positions else 0)
            )
            encoded.add(
                self.tokenizer.encode(prompt[question:]).ids, gap=max(0, min(gap, room))
            )
            encoded.add(self.tokenizer.encode(whole[len(prompt) :]).ids, own=True)
            done = whole
        encoded.add(self.tokenizer.encode("\n").ids)
        return encoded

    def render(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Returns the text that the chat template renders from `messages`, the first
        messages of a conversation."""
        variables = {"messages": messages, "tools": conversation.tools or None}
        return str(
            self.template.render(
                **variables, add_generation_prompt=add_generation_prompt
            )
        )

    def deltas(self, rng: random.Random, n_tokens: int) -> Iterator[Encoded]:
        """Yields the tokens of random conversations endlessly."""
        while True:
            yield self.encode(
                self.vary(rng, n_tokens), rng if rng.random() < APART else None
            )

    def row(self, rng: random.Random, n_ctx: int) -> tuple[Encoded, list[int]]:
        """Returns a row of n_ctx + 1 ids filled with random conversations, and the
        number of each id's conversation. Padding at the end of the row is numbered
        -1."""
        size = n_ctx + 1
        row, numbers = Encoded(), list[int]()
        n_refused = 0
        for number, piece in enumerate(self.deltas(rng, n_ctx)):
            if len(row.ids) + len(piece.ids) > size:
                n_refused += 1
                if n_refused > 3:
                    break
                continue
            row.ids += piece.ids
            row.spoken += piece.spoken
            row.positions += piece.positions
            numbers += [number] * len(piece.ids)
        return self.padded(row, size), numbers + [-1] * (size - len(numbers))

    def padded(self, row: Encoded, size: int) -> Encoded:
        """Appends padding to the row until it has `size` tokens, and returns it."""
        row.add([special_id(self.tokenizer, END_OF_TEXT)] * (size - len(row.ids)))
        return row

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step. The same step number always yields the same
        batch.

        In a row of several conversations, tokens attend only to their own conversation.
        A row of the corpus, or of one long conversation, is not divided.
        """
        n_ctx, n_chat, n_base = self.steps[step % len(self.steps)]
        rng = random.Random(step)
        base = self.windows[n_ctx].batch(step, n_base)
        if not n_chat:
            return base
        numbers: list[list[int]] = []
        if n_ctx == N_CTX:
            rows = [self.padded(self.long(rng, n_ctx + 1), n_ctx + 1)]
        else:
            rows, numbers = map(
                list, zip(*(self.row(rng, n_ctx) for _ in range(n_chat)), strict=True)
            )
        ids, spoken, positions = (
            torch.tensor([getattr(row, of) for row in rows]) for of in PARTS
        )
        if not numbers:
            return Batch(ids[:, :-1], spoken[:, 1:])
        number = torch.tensor(numbers)
        return Batch(
            torch.cat((ids[:, :-1], base.ids)),
            torch.cat((spoken[:, 1:], base.targets)),
            torch.cat(
                (
                    number[:, :-1, None] == number[:, None, :-1],
                    torch.ones(n_base, n_ctx, n_ctx, dtype=torch.bool),
                )
            ).tril()[:, None],
            torch.cat((positions[:, :-1], torch.arange(n_ctx).expand(n_base, -1))),
        )
