"""Keeps the hit rates that answers reached on this machine, and the time that prompts
took to compute, for later plans and estimates of the same model."""

from __future__ import annotations

import math
from contextlib import suppress

from moegguf.engine.known_facts import KnownFact
from moegguf.engine.stats import Stats
from moegguf.gguf.experts import ExpertLayout

LEAST_PASSES = 32  # answers with fewer passes are ignored
# Prompts are ignored if a pass had fewer tokens on average.
LEAST_PASS_TOKENS = 128


class RunHits:
    """Adds up the statistics of one load's answers, separately for each share of
    experts that had a slot. `save` writes the hit rate of each share, and the shortest
    time for a token of a prompt.

    on_device: True if layers run on a device, so that prompts are not timed.
    """

    def __init__(self, layout: ExpertLayout, on_device: bool = False) -> None:
        self._layout = layout
        self._on_device = on_device
        self._answers = dict[float, Stats]()
        self._prompt_token_s = math.inf

    def add(self, answer: Stats) -> None:
        """Adds an answer's statistics. Ignores the answer if it is short, if slots were
        still empty, or if every expert had a slot."""
        if (
            answer.passes >= LEAST_PASSES
            and answer.slots_used == answer.n_slots < answer.n_experts
        ):
            share = round(answer.n_slots / answer.n_experts, 2)
            before = self._answers.get(share)
            self._answers[share] = before + answer if before else answer

    def add_prompt(self, prompt: Stats) -> None:
        """Adds a prompt's statistics. Ignores the prompt if its passes were short, or
        if a device computed it. The shortest time counts, because other programs only
        lengthen it."""
        if not self._on_device and prompt.tokens >= LEAST_PASS_TOKENS * max(
            1, prompt.passes
        ):
            token_s = (prompt.eval_s - prompt.stall_s) / prompt.tokens
            self._prompt_token_s = min(self._prompt_token_s, token_s)

    def save(self) -> None:
        """Saves the hit rate of each share of slots. This overwrites the rate that an
        earlier load saved for the same share. Also saves the time for a token of a
        prompt, if it is shorter than the saved one. Saves nothing if the model's files
        can no longer be read."""
        if self._prompt_token_s < math.inf:
            known_s = read_prompt_token_s(self._layout) or math.inf
            if self._prompt_token_s < known_s:
                _prompt_fact(self._layout).write(self._prompt_token_s)
        if self._answers:
            rates = {
                share: answers.hit_rate for share, answers in self._answers.items()
            }
            _fact(self._layout).write([*(read_run_hits(self._layout) | rates).items()])


def read_run_hits(layout: ExpertLayout) -> dict[float, float]:
    """Returns {share of experts with a slot: hit rate} of earlier loads; {} if the file
    is damaged or missing."""
    with suppress(ValueError, TypeError):
        return {
            float(share): min(1.0, float(rate))
            for share, rate in _fact(layout).read(list) or ()
        }
    return {}


def read_prompt_token_s(layout: ExpertLayout) -> float:
    """Returns the seconds that the CPU computed for a token of a prompt, without waiting
    for reads; 0.0 if no prompt was timed."""
    found = _prompt_fact(layout).read(float) or 0.0
    return found if 0 < found < math.inf else 0.0


def _prompt_fact(layout: ExpertLayout) -> KnownFact:
    return KnownFact("prompt_seconds", layout, None)


def _fact(layout: ExpertLayout) -> KnownFact:
    return KnownFact("hit_rates", layout, None)
