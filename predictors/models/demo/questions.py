"""Reads the conversations that the demo model learns, and the questions used to test
it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictors.models.demo.wording import Message, wordings

ROOT = Path(__file__).parents[3]
TAUGHT = Path(__file__).parents[1] / "demo_questions.jsonl"
HELDOUT = Path(__file__).parents[1] / "demo_heldout.jsonl"
PAGE = ROOT / "moegguf" / "server" / "static" / "index.html"
DOCUMENTED = re.compile(
    r'run demo "([^"]+)"|demo", .{0,40}"role": "user", "content": "([^"]+)"'
)


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects in a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_conversations() -> list[list[Message]]:
    """Returns the conversations in the file TAUGHT. A line with `messages` is one conversation.

    Any other line has an `answer` and a list `ask`, and represents one conversation per
    question in `ask`.
    """
    conversations = []
    for entry in lines(TAUGHT):
        if "messages" in entry:
            conversations.append(entry["messages"])
            continue
        conversations += [
            exchange(question, entry["answer"]) for question in entry["ask"]
        ]
    return conversations


def exchange(question: str, answer: str) -> list[Message]:
    """Returns a question and its answer as two messages."""
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def answers() -> dict[str, str]:
    """Returns {question: answer} for the single questions that the model learns."""
    return {
        question: entry["answer"]
        for entry in lines(TAUGHT)
        if "ask" in entry
        for question in entry["ask"]
    }


def starters() -> list[str]:
    """Returns the questions that the web page offers, and the questions that README.md
    and docs/*.md ask the demo."""
    page = PAGE.read_text(encoding="utf-8")
    offered = re.findall(
        r"<button[^>]*>([^<]+)</button>",
        page[page.index('class="starters"') :].partition("</ul>")[0],
    )
    texts = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    ]
    asked = [one or other for text in texts for one, other in DOCUMENTED.findall(text)]
    return list(dict.fromkeys((*offered, *asked)))


@dataclass(frozen=True)
class Heldout:
    """A question in a wording that is not in the training data, and its right
    answers."""

    question: str
    right: frozenset[str]


def heldout() -> list[Heldout]:
    """Returns the held-out questions. Omits questions that may occur in training,
    ignoring case and punctuation."""
    known = answers()
    seen = {
        _bare(form) for question in known for form in (question, *wordings(question))
    }
    return [
        Heldout(question, frozenset(known[one] for one in entry["as"]))
        for entry in lines(HELDOUT)
        for question in entry["ask"]
        if _bare(question) not in seen
    ]


def _bare(question: str) -> str:
    """Returns a question in lower case, without punctuation, and with single spaces
    between words."""
    return " ".join(re.sub(r"[^\w\s]", "", question.lower()).split())
