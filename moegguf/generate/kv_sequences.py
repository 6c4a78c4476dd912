"""The sequences of a context: what the KV cache holds of each, shared prefixes, room, and the tokens of a step.

A step has one token of each sequence that decodes, and of prompts what the budget leaves, of all sequences or of those
that a schedule chooses. A place in the context keeps the tokens of an answer that has ended, for prompts that begin
with them. For one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moegguf.decisions import log_decision
from moegguf.engine.memory import DEFAULT_UBATCH_TOKENS
from moegguf.engine.recurrent import shares_cells
from moegguf.engine.sequences import common_tokens
from moegguf.generate.sequence import KvSequence, Sequence

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

MIN_SHARED_TOKENS = 32  # a request waits for a prefix of this length that another prompt is about to compute
MIN_SHIFTED = 4  # tokens at the end of the context that a shift may drop; llama.cpp's number
MIXED_STEP_TOKENS = 128  # tokens of a step in which sequences decode, if no experts have to be read for it


@dataclass(frozen=True)
class Step:
    """A step that was computed."""

    sequences: tuple[Sequence, ...]
    n_tokens: int  # tokens of all sequences, with drafts
    seconds: float


class Schedule(Protocol):
    """Chooses the sequences that compute. The loop's thread calls both methods, which must not take long."""

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
        """Returns the sequences of `running` (never empty, oldest first) that compute in the next step, in the order in
        which prompts share the step's budget. The others keep their place in the KV cache. All compute where none is
        chosen."""

    def ran(self, step: Step) -> None:
        """Receives a step that was computed."""


class KvSequences:
    """The sequences of a model's context. `step_tokens`: tokens of a step in which some sequences decode; None: a usual
    pass where experts have to be read for it, else MIXED_STEP_TOKENS."""

    def __init__(self, llm: Llama, step_tokens: int | None = None) -> None:
        self._llm = llm
        self._all = [KvSequence(seq_id) for seq_id in range(llm.n_seq_max)]
        self._pass_tokens = min(int(llm.context_params.n_ubatch), llm.n_batch)
        resident = llm.session is None or llm.plan.resident
        mixed = min(MIXED_STEP_TOKENS if resident else DEFAULT_UBATCH_TOKENS, self._pass_tokens)
        self._step_tokens = step_tokens or mixed
        self._own_cells = not shares_cells(llm.layout)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, seq_id: int) -> KvSequence:
        return self._all[seq_id]

    # Places.

    def place(self, sequence: Sequence) -> None:
        """Gives a sequence the free place whose tokens are the least loss; of equal ones, the least recently used.
        There must be one."""
        free = [kv for kv in self._all if kv.sequence is None]
        if len(self._all) == 1:  # the model's own methods use it, too
            free[0].tokens = self._llm.input_ids[: self._llm.n_tokens].tolist()
        if sequence.prompt.images is not None:
            free = self._all[:1]  # images are evaluated in this one; the sequence computes alone
        shared = {kv.seq_id: self._common_prefix(kv, sequence) for kv in free}

        def loss(kv: KvSequence) -> tuple[int, bool, int]:
            """Returns what is lost with a place. What cannot be copied out of one is reused in it."""
            n_shared = shared[kv.seq_id]
            is_copied = not n_shared or self._llm.context.can_copy(kv.seq_id)
            return len(kv.tokens) - n_shared, is_copied, kv.n_used

        kv = min(free, key=loss)
        self.truncate(kv, shared[kv.seq_id])
        kv.n_clean = None
        kv.owner = sequence.owner
        kv.sequence = sequence
        sequence.kv = kv
        sequence.has_begun = False

    def release(self, sequence: Sequence) -> None:
        """Frees the place of a sequence. Its tokens stay there for later prompts that begin with them. Tokens that were
        computed after ones that a shift has dropped are removed."""
        kv = sequence.place
        if sequence.draft:  # drafted tokens that were not accepted do not belong to the sequence
            self.truncate(kv, len(kv.tokens))
        self.store(sequence, 1, goes_on=False)
        sequence.kv = kv.sequence = None
        if kv.n_clean is not None:
            self.truncate(kv, kv.n_clean)

    def truncate(self, kv: KvSequence, n_tokens: int) -> None:
        """Keeps the first tokens of a place. Where the model's memory cannot be cut there, the place
        keeps those up to the nearest state that is kept, or none."""
        cache = self._llm.prefix_cache
        if cache is not None:
            n_tokens = cache.truncate(kv.seq_id, kv.tokens, n_tokens, kv.owner)
        elif not self._llm.context.truncate(n_tokens, kv.seq_id):
            n_tokens = 0
        del kv.tokens[n_tokens:]

    def drop_lost(self) -> None:
        """Forgets tokens that the context has lost in a pass that has failed."""
        for kv in self._all:
            self.truncate(kv, len(kv.tokens))

    def replace(self, kv: KvSequence, tokens: list[int], owner: str, state: bytes) -> bool:
        """Makes a place that no sequence has hold these tokens, with llama.cpp's state of them. Returns False where the
        context has no room for them; the place is then empty."""
        self.truncate(kv, 0)
        self._make_room(len(tokens))
        if not self._llm.context.write_state(kv.seq_id, tokens, state):
            return False
        kv.tokens, kv.owner, kv.n_clean = tokens, owner, None
        return True

    def clear(self) -> None:
        """Empties a context of several sequences."""
        if len(self._all) > 1:
            self._llm.context.clear()
            for kv in self._all:
                kv.tokens.clear()

    def drop_unused(self) -> bool:
        """Empties the least recently used place that no sequence has. Returns False when none of these holds tokens."""
        unused = [kv for kv in self._all if kv.sequence is None and kv.tokens]
        if unused:
            self.truncate(min(unused, key=lambda kv: kv.n_used), 0)
        return bool(unused)

    def _make_room(self, n_tokens: int) -> None:
        """Empties places that no sequence has, until the context has this number of free cells."""
        n_cells = self._llm.plan.kv_tokens or self._llm.n_ctx()
        while sum(len(kv.tokens) for kv in self._all) + n_tokens > n_cells:
            if len(self._all) == 1 or not self.drop_unused():
                return

    def shift(self, sequence: Sequence) -> None:
        """Drops the older half of a context that is about to be full, where the request allows it. The rest of a
        sequence that computes alone moves up. Among others the rest is evaluated again, because its cells may belong to
        other sequences, too, whose positions stay."""
        kv = sequence.place
        if not sequence.shifts or len(kv.tokens) < sequence.n_ctx - 1:
            return
        n_keep = sequence.request.sampling.num_keep
        n_keep = len(sequence.prompt.tokens) if n_keep < 0 else n_keep + len(self._llm.vocabulary.bos_tokens)
        n_keep = min(n_keep, sequence.n_ctx - MIN_SHIFTED)
        n_dropped = (len(kv.tokens) - n_keep) // 2
        del sequence.context[n_keep : n_keep + n_dropped]
        if sequence.alone or len(self._all) == 1:
            self._llm.context.shift(n_keep, n_dropped)
            del kv.tokens[n_keep : n_keep + n_dropped]
            kv.n_clean = n_keep
        else:
            self.truncate(kv, n_keep)
        sequence.summary.n_shifts += 1

    # Contexts on disk.

    def store(self, sequence: Sequence, n_new: int, goes_on: bool = True) -> None:
        """Writes to disk what a place holds, after a step with `n_new` tokens of it. `goes_on` is False at the end of
        the prompt or the answer."""
        cache, kv = self._llm.prefix_cache, sequence.kv
        if cache is not None and kv is not None and kv.n_clean is None:
            cache.store(kv.seq_id, kv.tokens, n_new, kv.owner, goes_on)

    def store_unused(self) -> bool:
        """Writes more of places that no sequence has, where too much was waiting before. Returns whether more has to
        wait again."""
        cache = self._llm.prefix_cache
        if cache is None or not cache.behind:
            return False
        for kv in self._all:
            if kv.sequence is None and kv.seq_id in cache.behind:
                cache.store(kv.seq_id, kv.tokens, 1, kv.owner, goes_on=False)
        return bool(cache.behind)

    # A step.

    def select_sequences(self, chosen: Iterable[Sequence], n_step: int) -> list[Sequence]:
        """Sets `n_next` of the sequences that take part in a step, and returns these: the next token of every sequence
        that decodes, and tokens of prompts up to the budget. `n_step` counts steps: sequences take turns where a step
        has too few tokens for all."""
        chosen = list(chosen)
        most = self._llm.n_batch
        if len(chosen) > most:  # divide them into turns of equal length
            n_turn = -(-len(chosen) // -(-len(chosen) // most))
            first = n_step * n_turn % len(chosen)
            chosen = [*chosen[first:], *chosen[:first]][:n_turn]
        step = [each for each in chosen if each.decodes]
        for each in step:
            each.n_next = 1
        whole = chosen[0].alone or len(self._all) == 1
        if self._llm.prefix_cache is not None and self._llm.prefix_cache.leaves_window:
            whole = False  # each pass has to be kept before its cells are given to others
        budget = most if whole else self._pass_tokens
        if step:
            budget = self._step_tokens
        n_left = min(max(budget, len(step) + 1), most) - len(step)
        n_logits = max(1, self._llm.context.n_logits - len(chosen))
        prompts = list[Sequence]()
        for each in chosen:
            if each.decodes or n_left <= 0 or not self._begin_prompt(each, prompts):
                continue
            n = min(each.n_pending, n_left)
            if (image := each.image) is not None:  # a whole one, or the tokens before it
                n = min(image.begin - each.n_evaluated, n_left) or image.n_tokens
            elif self._llm.prefix_cache is not None:
                n = self._llm.prefix_cache.pass_tokens(each.place.seq_id, each.n_evaluated, each.n_pending, n)
            if each.request.prompt_logprobs:
                n = min(n, n_logits)
                n_logits -= n
            if n:
                each.n_next = n
                n_left -= n
                prompts.append(each)
        step += prompts
        if self._own_cells:  # sequences with consecutive numbers are then computed at once
            step.sort(key=lambda each: each.place.seq_id)
        return step

    def _begin_prompt(self, sequence: Sequence, prompts: list[Sequence]) -> bool:
        """Gives a prompt the longest prefix that another sequence or the disk has. Returns False where the prompt waits
        for one of `prompts`, which are in the step and about to compute more of that prefix."""
        if sequence.has_begun or not sequence.reuses_prefix:
            sequence.has_begun = True
            return True
        kv = sequence.place
        source = max(self._all, key=lambda other: self._common_prefix(other, sequence))
        n_shared = self._common_prefix(source, sequence)
        if n_shared > len(kv.tokens):
            kv.tokens = source.tokens[: self._copy(source, kv, n_shared)]
        n_held = len(kv.tokens)
        own = [other for other in prompts if other.owner == kv.owner]
        awaited = [other for other in own if self._awaits(sequence, other)]
        if awaited:
            return False
        if self._llm.prefix_cache is not None:
            spans = sequence.prompt.images.spans if sequence.prompt.images else ()
            n_now = self._llm.prefix_cache.restore(
                kv.seq_id, sequence.context, n_held, kv.owner, self._make_room, spans
            )
            kv.tokens = sequence.context[:n_now]
            sequence.summary.disk_tokens = max(0, n_now - n_held)
        sequence.has_begun = True
        log_decision(
            "prefix_reused", seq_id=kv.seq_id, n_prompt=len(sequence.context), n_reused=len(kv.tokens),
            n_from_disk=sequence.summary.disk_tokens,
        )  # fmt: skip
        if not sequence.summary.prompt_tokens:
            sequence.summary.cached_tokens = len(kv.tokens)
        return True

    def _copy(self, source: KvSequence, target: KvSequence, n_shared: int) -> int:
        """Makes a place hold as many of the first `n_shared` tokens of another one as both can share. Returns how many
        of them it holds then."""
        cache, n_held = self._llm.prefix_cache, len(target.tokens)
        if cache is not None:
            return cache.copy(source.seq_id, target.seq_id, source.tokens[:n_shared], n_held, target.owner)
        return n_shared if self._llm.context.copy(source.seq_id, target.seq_id, n_shared) else n_held

    def _awaits(self, sequence: Sequence, other: Sequence) -> bool:
        """Returns whether a prompt waits until `other` has computed a prefix of both. A recurrent state can be copied
        only where it has seen the prefix and nothing more, so `other` stops there once."""
        n_shared = common_tokens(other.context, sequence.context[:-1])
        if n_shared < sequence.n_evaluated + MIN_SHARED_TOKENS:
            return False
        if self._llm._is_stateful:
            if n_shared <= other.n_evaluated:
                return False
            other.n_next = min(other.n_next, n_shared - other.n_evaluated)
        return True

    def _common_prefix(self, kv: KvSequence, sequence: Sequence) -> int:
        """Returns the tokens of a place that a sequence can begin with. At least one is left to evaluate."""
        if kv.owner != sequence.owner or not sequence.reuses_prefix:
            return 0
        n = common_tokens(kv.tokens, sequence.context[:-1])
        if kv.seq_id == 0:
            images = sequence.prompt.images
            n = self._llm.context.images.common_prefix(n, images.spans if images else ())
        if n == len(kv.tokens) or self._llm.prefix_cache is not None:  # the cache goes back to the nearest state
            return n
        return n if self._llm.context.keeps(n, kv.seq_id) else 0
