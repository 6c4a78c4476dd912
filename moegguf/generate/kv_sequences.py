"""The sequences of a context: their tokens in the KV cache, shared prefixes, free
cells, and the tokens of each step.

A step contains one token (and the draft) of each decoding sequence that takes part. The
rest of the step's token limit goes to prompts. A schedule may choose which sequences
take part. A *place* is one sequence id of the KV cache. When an answer has ended, its
place keeps the tokens, for later prompts that begin with them. Only one thread may use
this module's objects.
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

# Minimum number of further shared tokens for which a prompt waits for another prompt.
MIN_SHARED_TOKENS = 32
# Number of tokens that `num_keep` cannot protect, so that a shift can drop some, as in
# llama.cpp.
MIN_SHIFTED = 4
# Token limit of a step in which sequences decode, if all experts are in memory.
MIXED_STEP_TOKENS = 128


@dataclass(frozen=True)
class Step:
    """A completed step."""

    sequences: tuple[Sequence, ...]
    n_tokens: int  # tokens of all sequences, including drafts
    seconds: float


class Schedule(Protocol):
    """Chooses the sequences of each step. The batch loop's thread calls both methods,
    so they must return quickly."""

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
        """Returns the sequences of `running` (never empty, oldest first) that take part
        in the next step. Prompts get tokens in the returned order until the step is
        full. The other sequences stay in the KV cache. If none is chosen (None or an
        empty iterable), all sequences take part."""

    def ran(self, step: Step) -> None:
        """Receives the sequences, tokens and time of a step. The batch loop calls this
        after each step in which tokens were evaluated."""


class KvSequences:
    """The places of a model's KV cache, and the choice of tokens for each step.
    `step_tokens`: token limit of a step in which some sequences decode. None:
    MIXED_STEP_TOKENS if all experts are in memory, otherwise DEFAULT_UBATCH_TOKENS, but
    never more than fit into one pass."""

    def __init__(self, llm: Llama, step_tokens: int | None = None) -> None:
        self._llm = llm
        self._all = [KvSequence(seq_id) for seq_id in range(llm.n_seq_max)]
        self._pass_tokens = min(int(llm.context_params.n_ubatch), llm.n_batch)
        resident = llm.session is None or llm.plan.resident
        mixed = min(
            MIXED_STEP_TOKENS if resident else DEFAULT_UBATCH_TOKENS, self._pass_tokens
        )
        self._step_tokens = step_tokens or mixed
        self._own_cells = not shares_cells(llm.layout)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, seq_id: int) -> KvSequence:
        return self._all[seq_id]

    # Places of sequences in the KV cache

    def place(self, sequence: Sequence) -> None:
        """Assigns a free place to a sequence; at least one must be free. Chooses the
        place that loses the fewest tokens (see `loss`). A sequence that is processed
        alone gets place 0. Drops the place's tokens after the shared prefix."""
        free = [kv for kv in self._all if kv.sequence is None]
        # `Llama`'s own methods also change this place, so its tokens come from `Llama`.
        if len(self._all) == 1:
            free[0].tokens = self._llm.input_ids[: self._llm.n_tokens].tolist()
        if sequence.alone:
            # Place 0 is the only place that can evaluate images, and the only one whose
            # cells can be moved.
            free = self._all[:1]
        shared = {kv.seq_id: self._common_prefix(kv, sequence) for kv in free}

        def loss(kv: KvSequence) -> tuple[int, bool, int]:
            """Returns a sort key: the number of lost tokens first. Among equal places,
            places whose shared prefix cannot be copied to another place come first,
            then the least recently used."""
            n_shared = shared[kv.seq_id]
            is_copied = not n_shared or self._llm.context.rollback.can_copy(kv.seq_id)
            return len(kv.tokens) - n_shared, is_copied, kv.n_used

        kv = min(free, key=loss)
        self.truncate(kv, shared[kv.seq_id])
        kv.n_clean = None
        kv.owner = sequence.owner
        kv.sequence = sequence
        sequence.kv = kv
        sequence.has_begun = False

    def release(self, sequence: Sequence) -> None:
        """Calls `store` for a sequence, and frees its place. The tokens stay in the KV
        cache for later prompts that begin with them. If `n_clean` is set, only the
        first `n_clean` tokens stay, because the values of later ones depend on tokens
        that a shift dropped."""
        kv = sequence.place
        if sequence.draft:  # drafted tokens that were not accepted are dropped
            self.truncate(kv, len(kv.tokens))
        self.store(sequence, 1, goes_on=False)
        sequence.kv = kv.sequence = None
        if kv.n_clean is not None:
            self.truncate(kv, kv.n_clean)

    def truncate(self, kv: KvSequence, n_tokens: int) -> None:
        """Keeps the first `n_tokens` tokens of a place and drops the others. If the
        model's state cannot be cut there, fewer tokens are kept: up to the nearest
        saved state, or none."""
        cache = self._llm.prefix_cache
        n_tokens = self._llm.context.return_to_checkpoint(n_tokens, kv.seq_id)
        if cache is not None:
            n_tokens = cache.truncate(kv.seq_id, kv.tokens, n_tokens, kv.owner)
        elif not self._llm.context.truncate(n_tokens, kv.seq_id):
            n_tokens = 0
        del kv.tokens[n_tokens:]

    def drop_lost(self) -> None:
        """Drops the tokens of a failed pass from all places, and shortens the token
        lists of places whose tokens the context has lost."""
        for kv in self._all:
            self.truncate(kv, len(kv.tokens))

    def replace(
        self, kv: KvSequence, tokens: list[int], owner: str, state: bytes
    ) -> bool:
        """Replaces the tokens of a place that no sequence uses. `state` is llama.cpp's
        state of the new tokens. Returns False if llama.cpp cannot place this state in
        the context; the place is then empty."""
        self.truncate(kv, 0)
        self._make_room(len(tokens))
        if not self._llm.context.write_state(kv.seq_id, tokens, state):
            return False
        kv.tokens, kv.owner, kv.n_clean = tokens, owner, None
        return True

    def clear(self) -> None:
        """Removes all tokens from the context. A context with a single place is left
        unchanged."""
        if len(self._all) > 1:
            self._llm.context.clear()
            for kv in self._all:
                kv.tokens.clear()

    def drop_unused(self) -> bool:
        """Empties the least recently used place that has tokens but no sequence.
        Returns False if there is no such place."""
        unused = [kv for kv in self._all if kv.sequence is None and kv.tokens]
        if unused:
            self.truncate(min(unused, key=lambda kv: kv.n_used), 0)
        return bool(unused)

    def _make_room(self, n_tokens: int) -> None:
        """Empties places that no sequence uses, until the KV cache has room for
        `n_tokens` more tokens or all such places are empty. Does nothing if the context
        has a single place."""
        n_cells = self._llm.plan.context.kv_tokens or self._llm.n_ctx()
        while sum(len(kv.tokens) for kv in self._all) + n_tokens > n_cells:
            if len(self._all) == 1 or not self.drop_unused():
                return

    def shift(self, sequence: Sequence) -> None:
        """Drops the older half of a sequence's tokens after the first `num_keep`, if
        its context is almost full and the sequence may shift.

        If the sequence must be processed alone or the context has a single place, the
        cells of the later tokens are moved, if the model allows this. Otherwise the
        next steps evaluate these tokens again, because other sequences may share their
        cells at the old positions. The first `num_keep` tokens are also evaluated again
        if the model's state cannot go back to them, or if the sequence must not reuse
        tokens of earlier passes (`Sequence.reuses_prefix`).
        """
        kv = sequence.place
        if not sequence.shifts or len(kv.tokens) < sequence.n_ctx - 1:
            return
        n_keep = sequence.request.sampling.num_keep
        n_keep = (
            len(sequence.prompt.tokens)
            if n_keep < 0
            else n_keep + len(self._llm.vocabulary.bos_tokens)
        )
        n_keep = min(n_keep, sequence.n_ctx - MIN_SHIFTED)
        n_dropped = (len(kv.tokens) - n_keep) // 2
        del sequence.context[n_keep : n_keep + n_dropped]
        context = self._llm.context
        if context.can_shift and (sequence.alone or len(self._all) == 1):
            context.shift(n_keep, n_dropped)
            del kv.tokens[n_keep : n_keep + n_dropped]
            kv.n_clean = n_keep
        else:
            self.truncate(kv, n_keep if sequence.reuses_prefix else 0)
        sequence.summary.n_shifts += 1

    # Contexts on disk

    def store(self, sequence: Sequence, n_new: int, goes_on: bool = True) -> None:
        """Writes a sequence's new tokens to disk, after a step that added `n_new`
        tokens. Does nothing without a prefix cache, or after a shift that moved cells.
        `goes_on` is False at the end of the prompt or the answer."""
        cache, kv = self._llm.prefix_cache, sequence.kv
        if cache is not None and kv is not None and kv.n_clean is None:
            cache.store(kv.seq_id, kv.tokens, n_new, kv.owner, goes_on)

    def store_unused(self) -> bool:
        """Continues to write the tokens of unused places to disk, if there was too much
        to write in one step. Returns True if there is still more to write."""
        cache = self._llm.prefix_cache
        if cache is None or not cache.behind:
            return False
        for kv in self._all:
            if kv.sequence is None and kv.seq_id in cache.behind:
                cache.store(kv.seq_id, kv.tokens, 1, kv.owner, goes_on=False)
        return bool(cache.behind)

    # The tokens of a step

    def select_sequences(self, chosen: list[Sequence], n_step: int) -> list[Sequence]:
        """Selects the sequences of a step and sets `n_next`, the number of tokens of
        each. Decoding sequences get one token each, and prompts get the rest of the
        step's token limit. Prompts that get none, or that have to wait for a prefix,
        are left out. If there are more sequences than tokens in a batch, they take
        turns; `n_step`, the number of the step, determines the turn."""
        most = self._llm.n_batch
        if len(chosen) > most:  # divide them into turns of about equal length
            n_turn = -(-len(chosen) // -(-len(chosen) // most))
            first = n_step * n_turn % len(chosen)
            chosen = [*chosen[first:], *chosen[:first]][:n_turn]
        step = [each for each in chosen if each.decodes]
        for each in step:
            each.n_next = 1
        whole = chosen[0].alone or len(self._all) == 1
        if self._llm.prefix_cache is not None and self._llm.prefix_cache.has_window:
            # One pass per step: the cells of its tokens must be saved before later
            # tokens reuse them.
            whole = False
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
            # If the prompt has another image, this step evaluates only text before the
            # image. If no such text is left, it evaluates the whole image.
            if (image := each.image) is not None:
                n = min(image.begin - each.n_evaluated, n_left) or image.n_tokens
            elif self._llm.prefix_cache is not None:
                n = self._llm.prefix_cache.pass_tokens(
                    each.place.seq_id, each.n_evaluated, each.n_pending, n
                )
            if each.request.prompt_logprobs:
                n = min(n, n_logits)
                n_logits -= n
            if n:
                each.n_next = n
                n_left -= n
                prompts.append(each)
        step += prompts
        if self._own_cells:  # the sequences of one ubatch must have consecutive ids
            step.sort(key=lambda each: each.place.seq_id)
        return step

    def _begin_prompt(self, sequence: Sequence, prompts: list[Sequence]) -> bool:
        """Copies the longest known prefix of a prompt to its place, from another place
        or from the disk. Returns False if the prompt has to wait, because this step
        evaluates more of its prefix for one of `prompts`."""
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
        awaited = [other for other in own if self._await_prefix(sequence, other)]
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
        """Copies the first `n_shared` tokens of a place to another one, or as many as
        the model's state allows. Returns the number of tokens in `target`
        afterwards."""
        cache, n_held = self._llm.prefix_cache, len(target.tokens)
        if cache is not None:
            return cache.copy(
                source.seq_id,
                target.seq_id,
                source.tokens[:n_shared],
                n_held,
                target.owner,
            )
        return (
            n_shared
            if self._llm.context.copy(source.seq_id, target.seq_id, n_shared)
            else n_held
        )

    def _await_prefix(self, sequence: Sequence, other: Sequence) -> bool:
        """Returns True if the prompt of `sequence` has to wait until a prefix that it
        shares with `other` has been evaluated. A recurrent state can be copied only at
        the end of this prefix. So for models with such a state, this method first
        reduces `other.n_next`, to make the step stop there."""
        n_shared = common_tokens(other.context, sequence.context[:-1])
        if n_shared < sequence.n_evaluated + MIN_SHARED_TOKENS:
            return False
        if self._llm._is_stateful:
            if n_shared <= other.n_evaluated:
                return False
            other.n_next = min(other.n_next, n_shared - other.n_evaluated)
        return True

    def _common_prefix(self, kv: KvSequence, sequence: Sequence) -> int:
        """Returns the number of tokens of a place that a sequence can reuse, or 0 if
        the owners differ. At least one token of the sequence is left to evaluate."""
        if kv.owner != sequence.owner or not sequence.reuses_prefix:
            return 0
        n = common_tokens(kv.tokens, sequence.context[:-1])
        if kv.seq_id == 0:
            images = sequence.prompt.images
            n = self._llm.context.images.common_prefix(
                n, images.spans if images else ()
            )
        # The cache can restore a state.
        if n == len(kv.tokens) or self._llm.prefix_cache is not None:
            return n
        return n if self._llm.context.keeps(n, kv.seq_id) else 0
