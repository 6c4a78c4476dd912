"""Drafts against none, in turns: the same tokens, and how much faster.

    python -m tools.draft_check                                  2,000 answers of the demo, greedy and sampled
    python -m tools.draft_check --speed --model FILE [--expert-cache 4GiB] [--rounds 3]

The second takes the prompts of tests/live/repeating.json (code edits, and extraction from the prompt) with their
answers, and as many that repeat nothing. A model that cannot write them is made to: each token is sampled, and then
replaced by that of the answer, so that what is computed, and what experts it needs, are the model's own. The first
drafts whether it pays or not, so that many drafts are compared. Exit status 1 when a token differs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moegguf.engine.stats import Stats
from moegguf.generate.drafting import Acceptance, DraftGate
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling
from moegguf.generate.sampler import Sampler

PROMPTS = Path(__file__).resolve().parents[1] / "tests" / "live" / "repeating.json"
LONGEST = 160  # tokens of an answer
WIDTH = 6  # tokens of a draft that does not depend on time


class Eager(DraftGate):
    """Always drafts, as long as it may."""

    def is_due(self) -> bool:
        return True

    def widths(self, answers: Sequence[Sequence[Acceptance]]) -> list[list[int]]:
        return [[WIDTH] * len(of_answer) for of_answer in answers]

    def ran(self, *_: Any) -> None:
        pass


@contextmanager
def undrafted(engine: Engine) -> Iterator[None]:
    """Within it the engine drafts nothing."""
    loop = engine._loop
    drafter, loop._drafter = loop._drafter, None
    try:
        yield
    finally:
        loop._drafter = drafter


def compare(engine: Engine, n_answers: int, begin: int = 0, n_together: int = 40) -> int:
    """How many answers with drafts differ from those without, from number `begin` on."""
    prompts, n_different, before = [each["prompt"] for each in json.loads(PROMPTS.read_text())], 0, engine.stats()
    assert engine._loop._drafter is not None
    engine._loop._drafter.gate = Eager()
    for first in range(begin, n_answers, n_together):
        seeds = range(first, min(first + n_together, n_answers))
        samplings = [Sampling(temperature=float(seed % 2), seed=seed, max_tokens=48) for seed in seeds]
        texts = [f"{seed // len(prompts)}\n{prompts[seed % len(prompts)]}" for seed in seeds]
        found = []
        for draft in (False, True):
            if draft:
                answers = engine.generate(texts, samplings, return_context=True)
            else:
                with undrafted(engine):
                    answers = engine.generate(texts, samplings, return_context=True)
            found.append([(answer.summary.context, answer.text, answer.finish) for answer in answers])
        n_different += sum(a != b for a, b in zip(*found, strict=True))
        print(f"{seeds.stop} answers, {n_different} differ; {acceptance(engine.stats() - before)}", flush=True)
    return n_different


def acceptance(stats: Stats) -> str:
    """What drafts did, in words."""
    return f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted in {stats.draft_passes} passes"


@contextmanager
def taught(tokens: Sequence[int]) -> Iterator[None]:
    """Within it an answer has these tokens, which the model samples as ever."""
    left, sample = iter(tokens), Sampler.sample

    def given(self: Sampler, row: int = -1) -> int | None:
        sample(self, row)
        return next(left)

    Sampler.sample = given  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sampler.sample = sample  # type: ignore[method-assign]


def answer_s(engine: Engine, prompt: str, answer: str) -> tuple[float, Stats]:
    """Seconds from its first token to the end."""
    tokens = engine.llm.tokenize(answer.encode(), add_bos=False)[:LONGEST]
    with taught(tokens):
        done = engine.generate(prompt, Sampling(temperature=0.0, max_tokens=len(tokens)))[0]
    if done.error is not None:
        raise done.error
    return done.summary.answer_s, done.summary.answer_stats


def speed(engine: Engine, rounds: int, n_prompts: int) -> None:
    """Prints how much faster each kind of text is with drafts: medians of ratios, and of all the time."""
    texts = [(each["kind"], each["prompt"], each["answer"]) for each in json.loads(PROMPTS.read_text())]
    words = sorted({word for _, prompt, answer in texts for word in (prompt + answer).split()})
    others = [("other", text[1], " ".join(random.Random(i).sample(words, 90))) for i, text in enumerate(texts)]
    chosen = [*texts[:: max(1, len(texts) // n_prompts)], *others[:: max(1, len(texts) // n_prompts)]]
    for text in chosen[:2]:
        answer_s(engine, *text[1:])
    ratios, seconds, counted = dict[str, list[float]](), dict[str, list[list[float]]](), dict[str, Stats]()
    for turn in range(rounds):
        for i, (kind, prompt, answer) in enumerate(chosen):
            took = {}
            for draft in (False, True) if (turn + i) % 2 else (True, False):
                if draft:
                    took[True], stats = answer_s(engine, prompt, answer)
                    counted[kind] = counted[kind] + stats if kind in counted else stats
                else:
                    with undrafted(engine):
                        took[False], _ = answer_s(engine, prompt, answer)
            ratios.setdefault(kind, []).append(took[False] / took[True])
            seconds.setdefault(kind, []).append([took[False], took[True]])
    for kind, found in ratios.items():
        whole = [sum(each) for each in zip(*seconds[kind], strict=True)]
        print(
            f"{kind:8} {statistics.median(found):.3f}x, the median of {len(found)} turns;"
            f" {whole[0] / whole[1]:.3f}x of all the time; {acceptance(counted[kind])}"
        )


def main() -> int:
    """Prints what was found. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--expert-cache", default="50%")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--begin", type=int, default=0, help="with this answer, where an earlier call was ended")
    parser.add_argument("--parallel", type=int, default=4, help="answers at once, of those that are compared")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    given: dict[str, Any] = {"expert_cache": options.expert_cache, "draft": options.draft, "n_ctx": 2048}
    with Engine(options.model, 1 if options.speed else options.parallel, **given) as engine:
        if options.speed:
            speed(engine, options.rounds, options.prompts)
            return 0
        return 1 if compare(engine, options.answers, options.begin) else 0


if __name__ == "__main__":
    sys.exit(main())
