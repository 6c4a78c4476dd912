"""Rewords questions at random, as other people might type them, to train the demo
model."""

import random
import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
OPENINGS = (
    "Please tell me: ",
    "Hey, ",
    "Can you tell me: ",
    "I have a question. ",
    "Quick question: ",
    "So, ",
    "And ",
    "Ok. ",
    "Now: ",
    "One more thing: ",
)
PATTERNS = (
    (
        re.compile(r"What (?:is|are) ([^?]+)\?$"),
        (
            "What's {}?", "whats {}", "Could you explain what {} is?", "Can you tell me what {} is?",
            "Tell me what {} is.", "Explain {}.", "What exactly is {}?", "I would like to know what {} is.",
            "Do you know what {} is?", "What does {} mean?", "Please explain {}.", "{}?", "What do you mean by {}?",
            "Tell me about {}.",
            "Give me a short explanation of {}.", "What is meant by {}?", "In simple words, what is {}?",
            "Describe {}.",
        ),
    ),
    (
        re.compile(r"How do I ([^?]+)\?$"),
        (
            "How can I {}?", "How to {}?", "How would I {}?", "Tell me how to {}.", "I want to {}.", "how do you {}?",
            "Can you tell me how to {}?", "What is the way to {}?", "Show me how to {}.", "How could I {}?",
            "I would like to {}. How?", "What do I have to type to {}?", "Is there a way to {}?", "Explain how to {}.",
        ),
    ),
    (
        re.compile(r"What does ([^?]+) do\?$"),
        ("What is {} for?", "Explain what {} does.", "Tell me what {} does.", "What is {} good for?", "what's {} do"),
    ),
    (
        re.compile(r"(?:Does|Can) ([^?]+)\?$"),
        ("I wonder: does {}?", "Tell me, does {}?", "Is it true that {}?", "will {}?", "Could {}?"),
    ),
)  # fmt: skip


def wordings(question: str) -> list[str]:
    """Returns the rephrasings of a question from which `reword` may choose one.

    Returns [] if no pattern matches the question.
    """
    return [
        form.format(found[1])
        for pattern, forms in PATTERNS
        if (found := pattern.match(question))
        for form in forms
    ]


def reword(question: str, rng: random.Random) -> str:
    """Returns a question as another person might type it.

    Words, case and punctuation may change at random, and an opening or a typing error
    may be added.
    """
    forms = wordings(question)
    if forms and rng.random() < 0.35:
        question = rng.choice(forms)
    if rng.random() < 0.3:
        question = question.rstrip(".?!")
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.replace(
            "moegguf", rng.choice(("Moegguf", "MoEGGUF", "MOEGGUF"))
        )
    if rng.random() < 0.1 and len(question) > 12:
        question = rng.choice(OPENINGS) + question[0].lower() + question[1:]
    if rng.random() < 0.08:
        question += rng.choice(("?", "??", " ?", "!", ".", " please", " Thanks!", "\n"))
    if rng.random() < 0.04 and len(question) > 12:
        at = rng.randrange(4, len(question) - 1)
        question = question[:at] + question[at + 1 :]
    return question


def reworded(messages: Sequence[Message], rng: random.Random) -> list[Message]:
    """Returns a copy of a conversation in which the user's messages are reworded."""
    return [
        {**m, "content": reword(m["content"], rng)} if m["role"] == "user" else m
        for m in messages
    ]
