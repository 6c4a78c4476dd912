"""Conversations about moegguf from `demo_questions.jsonl`, varied in their wording and packed into rows."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from predictors.models.demo.data import IGNORED, Batch, Windows
from predictors.models.demo.tokenizer import END_OF_TEXT, IM_END, IM_START, special_id

Message = dict[str, str]
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows moegguf.",
    "Be short.",
)
OPENINGS = (
    "Please tell me: ",
    "Hey, ",
    "Can you tell me: ",
    "I have a question. ",
    "Quick question: ",
    "So, ",
)


def read_conversations(path: Path) -> list[list[Message]]:
    """One conversation per question; a line holds either `ask` and `answer`, or `messages`."""
    conversations = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "messages" in entry:
            conversations.append(entry["messages"])
            continue
        for question in entry["ask"]:
            user = {"role": "user", "content": question}
            conversations.append([user, {"role": "assistant", "content": entry["answer"]}])
    return conversations


def reword(question: str, rng: random.Random) -> str:
    """The same question as another person might type it: case, punctuation, an opening."""
    if rng.random() < 0.3:
        question = question.rstrip(".?!")
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.replace("moegguf", rng.choice(("Moegguf", "MoEGGUF", "MOEGGUF")))
    if rng.random() < 0.1 and len(question) > 12:
        question = rng.choice(OPENINGS) + question[0].lower() + question[1:]
    if rng.random() < 0.08:
        question += rng.choice(("?", "??", " ?", "!", ".", " please"))
    return question


def vary(conversations: Sequence[list[Message]], rng: random.Random) -> list[Message]:
    """A conversation at random, sometimes two in a row or behind a system prompt, its questions reworded."""
    messages = list(rng.choice(conversations))
    if rng.random() < 0.25:
        messages += [m for m in rng.choice(conversations) if m["role"] != "system"]
    if messages[0]["role"] != "system" and rng.random() < 0.12:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return [{**m, "content": reword(m["content"], rng)} if m["role"] == "user" else m for m in messages]


@dataclass(frozen=True)
class Chat:
    """Batches of packed conversations, and rows of the corpus so that it is not forgotten."""

    tokenizer: Tokenizer
    conversations: Sequence[list[Message]]
    base: Windows
    chat_rows: int
    base_rows: int

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ids in ChatML, and the same with IGNORED wherever the model is not the one who speaks."""
        ids: list[int] = []
        spoken: list[int] = []
        for message in messages:
            head = self.tokenizer.encode(f"{IM_START}{message['role']}\n").ids
            body = self.tokenizer.encode(f"{message['content']}{IM_END}").ids
            tail = self.tokenizer.encode("\n").ids
            ids += head + body + tail
            own = body if message["role"] == "assistant" else [IGNORED] * len(body)
            spoken += [IGNORED] * len(head) + own + [IGNORED] * len(tail)
        return ids, spoken

    def deltas(self, rng: random.Random) -> Iterator[tuple[list[int], list[int]]]:
        """Encoded conversations without end."""
        while True:
            yield self.encode(vary(self.conversations, rng))

    def row(self, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
        """n_ctx + 1 ids, targets and conversation numbers; what is left over at the end is padding."""
        size = self.base.n_ctx + 1
        ids: list[int] = []
        spoken: list[int] = []
        numbers: list[int] = []
        for number, (piece, own) in enumerate(self.deltas(rng)):
            if len(ids) + len(piece) > size:
                break
            ids += piece
            spoken += own
            numbers += [number] * len(piece)
        n_padding = size - len(ids)
        padding = [special_id(self.tokenizer, END_OF_TEXT)] * n_padding
        return ids + padding, spoken + [IGNORED] * n_padding, numbers + [-1] * n_padding

    def batch(self, step: int) -> Batch:
        """Conversations do not see each other; rows of the corpus are one piece each."""
        rng = random.Random(step)
        rows = [self.row(rng) for _ in range(self.chat_rows)]
        ids, spoken, numbers = (torch.tensor(part) for part in zip(*rows, strict=True))
        base = self.base.batch(step, self.base_rows)
        same = numbers[:, :-1, None] == numbers[:, None, :-1]
        whole = torch.ones(self.base_rows, self.base.n_ctx, self.base.n_ctx, dtype=torch.bool)
        return Batch(
            torch.cat((ids[:, :-1], base.ids)),
            torch.cat((spoken[:, 1:], base.targets)),
            torch.cat((same, whole)).tril()[:, None],
        )
