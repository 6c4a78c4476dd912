"""Conversations that the dense model makes up itself: what a chat puts into the feed-forward networks.

Magpie (Xu et al., 2024, section 2): an instruction-tuned model that is given a chat template up to where the user's
words begin writes the user's words, and then answers them. So no list of questions is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moegguf.native import library

START, END = "<|im_start|>", "<|im_end|>"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OPENING, ANSWERING = f"{START}system\n{SYSTEM}{END}\n{START}user\n", f"{END}\n{START}assistant\n"
SHORTEST_QUESTION = 12
QUESTION_TOKENS, ANSWER_TOKENS = 64, 256


def load_or_make(path: Path, model: Path, n_talks: int) -> list[str]:
    """The conversations kept at `path`, each a whole text with its template; made first as far as they are missing."""
    talks = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    if len(talks) < n_talks:
        llm = library.llama_cpp().Llama(str(model), n_ctx=512, n_gpu_layers=0, verbose=False)
        with path.open("a", encoding="utf-8") as file:
            while len(talks) < n_talks:
                talks.append(make(llm, seed=len(talks)))
                file.write(json.dumps(talks[-1]) + "\n")
                file.flush()
    return talks[:n_talks]


def make(llm: Any, seed: int) -> str:
    """One question and its answer; questions that are too short or have no end are drawn again."""
    words, attempt, ended = "", 0, False
    while not ended or len(words) < SHORTEST_QUESTION:
        words, ended = _continue(llm, OPENING, QUESTION_TOKENS, 1000 * seed + attempt)
        attempt += 1
    asked = f"{OPENING}{words}{ANSWERING}"
    answer, ended = _continue(llm, asked, ANSWER_TOKENS, seed)
    return f"{asked}{answer}{END}\n" if ended else asked + answer


def question(talk: str) -> str:
    """The conversation up to where the answer begins."""
    return talk[: talk.index(ANSWERING) + len(ANSWERING)]


def _continue(llm: Any, text: str, max_tokens: int, seed: int) -> tuple[str, bool]:
    """What the model writes next, and whether it ended there."""
    reply = llm.create_completion(text, max_tokens=max_tokens, temperature=1.0, top_p=0.95, top_k=0, seed=seed)
    choice = reply["choices"][0]
    return str(choice["text"]).strip(), choice["finish_reason"] == "stop"
