"""Answers many requests together. A step evaluates the next token of each sequence that
takes part.

A step also evaluates tokens of prompts, up to the token limit of the step, so a long
prompt does not hold up the answers that are being generated. A step is one pass; only a
prompt that is processed alone may take several passes. (Continuous batching: Orca,
section 4. Prompts in chunks: Sarathi-Serve, section 4.) If one sequence is cancelled,
or needs an expert that cannot be read, the other sequences continue. Any other error of
a step ends all its sequences.

If the model is not batch-invariant (`Llama.batch_invariant`), the last bits of an
answer's logits depend on the other tokens in its passes, as in llama.cpp. A request
with `exact` is then processed alone. A request with images is always processed alone,
and so is every request if the context has only one sequence (`Llama.n_seq_max`).
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from moegguf.decisions import log_decision
from moegguf.engine.sequences import SequenceTokens
from moegguf.errors import ClosedError, ContextError, ExpertIOError, GenerationCancelled
from moegguf.generate.drafting import Drafter
from moegguf.generate.kv_sequences import KvSequences, Schedule, Step
from moegguf.generate.request import Request
from moegguf.generate.sequence import AnswerEvents, Sequence, Task
from moegguf.native.events import Phase

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.engine.stats import Stats

# Seconds between attempts to write computed tokens to disk while the model is idle.
KEEP_AGAIN_S = 0.05
# Seconds for which a loop that ends keeps trying to write computed tokens to disk.
LAST_KEEP_S = 2.0
CLOSED = "the model is closed; load it again."
CANCELLED = "the request was cancelled while it waited; send it again."
# Maximum number of threads that read prompts; a slow template occupies only one of
# them.
MAX_READERS = 32


class BatchLoop:
    """Owns the context of a model. One thread calls `run`, which processes the requests
    that other threads submit.

    `schedule` chooses the sequences of each step; None chooses all of them, the oldest
    prompts first. `step_tokens` is the token limit of a step in which a sequence
    decodes (see `KvSequences`). The events for the tokens of a step are sent inside one
    `with together():` block. `on_pass` is called before each pass, with the client key
    that all of its requests share, or None if they have different keys. It is also
    called before each task without `keeps_context`.
    """

    def __init__(
        self,
        llm: Llama,
        schedule: Schedule | None = None,
        step_tokens: int | None = None,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_pass: Callable[[str | None], object] = lambda client_key: None,
    ) -> None:
        self._llm = llm
        self._schedule = schedule
        self._together = together
        self._on_pass = on_pass
        self._kv = KvSequences(llm, step_tokens)
        self._drafter = Drafter(llm, llm.drafts) if llm.drafts else None
        self._changed = threading.Condition()  # protects the next four fields
        self._arrived: list[Sequence | Task] = []
        self._computing: list[Sequence] = []
        # The running task; None if there is none or if the task has keeps_context.
        self._task: Task | None = None
        self._closing = False
        self._readers = ThreadPoolExecutor(MAX_READERS, "moegguf-prompt")
        # Only the loop's thread changes the fields from here on.
        self._waiting: list[Sequence | Task] = []  # sorted by ticket (order of arrival)
        self._running: list[Sequence] = []  # sorted by ticket
        # A sequence was put back because the KV cache was full, and none has ended
        # since.
        self._is_full = False
        self._n_steps = 0
        self._n_ended_tokens = 0
        # Counters of the model after the last pass; None: not read yet.
        self._stats: Stats | None = None

    @property
    def places(self) -> KvSequences:
        """The places of the KV cache, for tasks that read or change them without
        computing."""
        return self._kv

    @property
    def n_running(self) -> int:
        """The number of sequences that are being processed. A running task counts as
        one, unless it has `keeps_context`."""
        return len(self._running) + (self._task is not None)

    @property
    def n_answer_tokens(self) -> int:
        """The number of tokens generated so far, in all answers."""
        return self._n_ended_tokens + sum(
            each.summary.answer_tokens for each in list(self._running)
        )

    # Methods that any thread may call

    def submit(self, request: Request, events: AnswerEvents) -> Sequence:
        """Starts answering a request and returns its sequence. If the request is
        invalid or the loop is closed, `events.on_end` receives the error."""
        sequence = Sequence(request, events)
        with self._changed:
            if not self._closing:
                self._readers.submit(self._read, sequence)
                return sequence
        self._arrive(sequence)
        return sequence

    def submit_task(self, task: Task) -> Task:
        """Queues a task. The loop's thread calls its `run` when no answer is being
        generated. If the task is cancelled or the loop ends first, its `fail` is called
        instead."""
        self._arrive(task)
        return task

    def cancel(self, work: Sequence | Task) -> None:
        """Cancels an answer or a task. An answer ends without an error after the
        current step; the step itself is aborted only if all of its sequences are
        cancelled. A running task is stopped, and a waiting task fails with
        GenerationCancelled."""
        with self._changed:
            work.cancelled = True
            if self._task is not None and self._task is work:
                self._task.stop()
            elif self._computing and all(each.cancelled for each in self._computing):
                self._llm.cancel()
            self._changed.notify()

    def close(self) -> None:
        """Cancels all answers and stops the running task, so that `run` returns
        soon."""
        with self._changed:
            self._closing = True
            for each in self._computing:
                each.cancelled = True
            if self._computing:
                self._llm.cancel()
            if self._task is not None:
                self._task.stop()
            self._changed.notify()

    def _read(self, sequence: Sequence) -> None:
        if not self._closing:
            sequence.read(self._llm)
        self._arrive(sequence)

    def _arrive(self, work: Sequence | Task) -> None:
        with self._changed:
            if not self._closing:
                self._arrived.append(work)
                self._changed.notify()
                return
        work.fail(ClosedError(CLOSED))

    # Methods that only the loop's thread calls

    def run(self) -> None:
        """Processes requests and tasks until `close` is called, or until an exception
        stops the loop, such as one raised by an event callback. Unfinished answers then
        end as cancelled, or with the exception, which `run` also raises."""
        failure: Exception | None = None
        try:
            while self._wait():
                self._queue_arrived()
                for work in [
                    work for work in (*self._running, *self._waiting) if work.cancelled
                ]:
                    self._end(work)
                self._admit()
                if self._running:
                    self._step()
        except Exception as error:
            failure = error
            raise
        finally:
            with self._changed:
                self._closing = True
            # Waits for the threads that read prompts: they use the model.
            self._readers.shutdown()
            self._queue_arrived()
            for work in [*self._running, *self._waiting]:
                self._end(work, failure)
            last_s = time.monotonic() + LAST_KEEP_S
            while (
                failure is None
                and self._kv.store_unused()
                and time.monotonic() < last_s
            ):
                time.sleep(KEEP_AGAIN_S)
            self._drop_other_scales()

    def _drop_other_scales(self) -> None:
        """Resets the LoRA adapter's scale to its value when the model was loaded. If
        this changes the scale, also clears the context, because its tokens were
        computed with the other scale."""
        scale = self._llm.context.lora_scale
        self._llm.context.scale_adapter(None)
        if scale != self._llm.context.lora_scale:
            self._llm.context.clear()

    def _wait(self) -> bool:
        """Waits for work. Returns False when the loop is closed, otherwise True."""
        with self._changed:
            while not (
                self._closing or self._arrived or self._waiting or self._running
            ):
                self._changed.wait(KEEP_AGAIN_S if self._kv.store_unused() else None)
            return not self._closing

    def _queue_arrived(self) -> None:
        with self._changed:
            arrived = self._arrived
            self._arrived = []
        for work in arrived:
            insort(self._waiting, work, key=_ticket)
            if isinstance(work, Sequence) and work.error is not None:
                self._end(work, work.error)

    def _admit(self) -> None:
        """Starts waiting requests and tasks in order of arrival. If the first one
        cannot be processed together with the running sequences, it waits until they
        have ended. If no place is free, or the KV cache was full, it waits until a
        sequence has ended. All later ones wait for the first one."""
        while self._waiting and not (self._is_full and self._running):
            first = self._waiting[0]
            if self._running and (
                isinstance(first, Task) or not first.computes_with(self._running[0])
            ):
                return
            if len(self._running) == len(self._kv):
                return
            self._waiting.pop(0)
            if isinstance(first, Task):
                self._run_task(first)
            else:
                self._begin(first)

    def _begin(self, sequence: Sequence) -> None:
        if sequence.number < 0:
            sequence.begin(self._llm.context.requests.begin(), self._stats_now())
        if sequence.alone:
            self._kv.clear()
        self._kv.place(sequence)
        insort(self._running, sequence, key=_ticket)
        if sequence.n_pending > self._llm.n_batch:
            sequence.events.on_progress(sequence.progress())

    def _run_task(self, task: Task) -> None:
        """Runs a task, and clears the context before and after it. (A context with a
        single sequence is not cleared before the task.) A task with `keeps_context`
        computes nothing and leaves the context unchanged."""
        if task.keeps_context:
            task.run()
            return
        self._stats = None
        self._kv.clear()
        with self._changed:
            self._task = task
            if task.cancelled or self._closing:
                task.stop()
        self._on_pass(task.client_key)
        self._llm.context.scale_adapter(None)
        try:
            task.run()
        finally:
            with self._changed:
                self._task = None
            # A cancellation may have come after the task's end; it must not stop the
            # next pass.
            self._llm.resume()
        self._kv.clear()
        self._llm.reset()

    def _end(self, work: Sequence | Task, error: Exception | None = None) -> None:
        """Ends a sequence, or a task that has not started. The tokens of a sequence
        stay in the KV cache, for later prompts that begin with them. They are removed
        only if the context has several places and the sequence had to be processed
        alone (`Sequence.alone`)."""
        if work in self._waiting:
            self._waiting.remove(work)
        if isinstance(work, Task):
            reason = (
                ClosedError(CLOSED) if self._closing else GenerationCancelled(CANCELLED)
            )
            work.fail(error or reason)
            return
        if work in self._running:
            self._running.remove(work)
        if work.kv is not None:
            self._kv.release(work)
            self._is_full = False
            if work.alone:
                self._kv.clear()
        if work.number >= 0:
            error = work.complete(self._stats_now(), error)
            self._n_ended_tokens += work.summary.answer_tokens
            # Expert hits are recorded only if no other sequence runs. They are not
            # recorded if the client sent the context as tokens, since these may not be
            # real text.
            if not self._running and not work.request.begins_with_token:
                summary = work.summary
                run_hits = self._llm.context.run_hits
                run_hits.add(summary.answer_stats)
                run_hits.add_prompt(summary.stats - summary.answer_stats)
        work.events.on_end(work.summary, error)

    def _stats_now(self) -> Stats:
        """Returns the model's counters after the last pass. They are cached, because
        reading them takes as long as sampling several tokens."""
        if self._stats is None:
            self._stats = self._llm.stats()
        return self._stats

    # Computation of one step

    def _step(self) -> None:
        for sequence in self._running:
            self._kv.shift(sequence)
        running = tuple(self._running)
        start_s = time.perf_counter()
        chosen = (self._schedule and self._schedule.choose(running)) or ()
        step = self._kv.select_sequences(list(chosen) or list(running), self._n_steps)
        drafter = self._drafter
        if (
            drafter is not None
            and drafter.gate.begin_pass()
            and all(each.decodes for each in step)
        ):
            drafter.propose(step)
        else:
            drafter = None
        n_drafted = sum(len(each.draft) for each in step)
        repeats = any(each.repeats for each in step) and all(
            each.repeats or each.decodes for each in step
        )
        # A shift repeats tokens without a draft.
        repeats = repeats and self._llm.context.returns_to_checkpoints
        computed = self._compute(step)
        if not computed:
            return
        seconds = time.perf_counter() - start_s
        if drafter is not None:
            drafter.note_pass(len(computed), seconds)
        elif self._drafter is not None and repeats:
            self._drafter.gate.note_repeated(len(computed), seconds)
        if self._schedule is not None:
            n_tokens = n_drafted + sum(each.n_next for each in computed)
            self._schedule.ran(Step(tuple(computed), n_tokens, seconds))

    def _compute(self, step: list[Sequence]) -> list[Sequence]:
        """Evaluates the tokens of a step, and samples for each sequence that has no
        tokens left to evaluate. Returns the sequences that were evaluated.

        An expert that cannot be read fails the whole pass. The step is then repeated
        without drafts, and then with one sequence at a time; only the sequences that
        need this expert end with the error. Any other error ends all sequences of the
        step.
        """
        self._stats = None
        has_drafts = any(each.draft for each in step)
        try:
            evaluated, rows = self._evaluate(step)
        except GenerationCancelled:
            # The next iteration of the loop in `run` ends the cancelled sequences.
            return []
        except ExpertIOError as error:
            step = [each for each in step if each.kv is not None]
            if has_drafts:
                return self._compute(step)
            if len(step) > 1:
                return [done for each in step for done in self._compute([each])]
            self._end(step[0], error)
            return []
        except Exception as error:
            for each in step:
                if each.kv is not None:
                    self._end(each, error)
            return []
        self._n_steps += 1
        with self._together():
            kept = [
                self._take_pass(each, row)
                for each, row in zip(evaluated, rows, strict=True)
            ]
        # Computed tokens are written to disk only after the step's new tokens were sent
        # to the clients.
        for each, (n_new, goes_on) in zip(evaluated, kept, strict=True):
            self._kv.store(each, n_new, goes_on=goes_on)
        return evaluated

    def _evaluate(self, step: list[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Evaluates a step. Returns the sequences that were evaluated, and each
        sequence's row index in the logits. If the KV cache was full, some sequences may
        have gone back to the queue; they are left out. After an exception, the KV cache
        contains each sequence's tokens from before the pass, or fewer of them. Raises
        ContextError if the KV cache has no room for one sequence."""
        remaining = step
        while remaining:
            try:
                rows = self._evaluate_pass(remaining)
            except BaseException:
                # Removes the tokens of the failed pass from the KV cache.
                self._kv.drop_lost()
                for each in remaining:
                    each.draft = ()
                raise
            if rows is not None:
                return remaining, rows
            if any(each.draft for each in remaining):
                for each in remaining:
                    each.draft = ()
            elif not self._make_room():
                raise ContextError(
                    "the KV cache has no room for the context of one sequence; give a smaller n_ctx, or a larger"
                    " kv_tokens."
                )
            remaining = [each for each in remaining if each.kv is not None]
        return [], []

    def _evaluate_pass(self, step: list[Sequence]) -> list[int] | None:
        """Evaluates one pass. Returns each sequence's row index in the logits, or None
        if the KV cache is full. The pass is aborted when all of its sequences are
        cancelled."""
        context = self._llm.context
        with self._changed:
            if self._closing or all(each.cancelled for each in step):
                raise GenerationCancelled("the answers were stopped.")
            self._computing = step
        client_keys = {each.request.client_key for each in step}
        self._on_pass(client_keys.pop() if len(client_keys) == 1 else None)
        first = step[0]
        context.scale_adapter(first.request.lora_scale)
        images = first.prompt.images
        image = first.image
        try:
            if (
                images is not None
                and image is not None
                and image.begin == first.n_evaluated
            ):
                context.eval_image(images, image, first.number)
                return [-1]
            return context.eval_sequences([_next_tokens(each) for each in step])
        finally:
            with self._changed:
                self._computing = []
                if all(each.cancelled for each in step):
                    self._llm.resume()

    def _make_room(self) -> bool:
        """Makes room in the KV cache. Empties the least recently used place that no
        sequence uses. If all such places are empty, puts the newest sequence back in
        the queue, to be processed again later. Returns False if this is impossible
        because only one sequence runs."""
        if self._kv.drop_unused():
            return True
        if len(self._running) < 2:
            return False
        newest = self._running.pop()
        log_decision(
            "sequence_put_back", n_tokens=len(newest.place.tokens), n_running=len(self._running),
            kv_tokens=int(self._llm.context_params.n_ctx),
        )  # fmt: skip
        self._kv.truncate(newest.place, 0)
        self._kv.release(newest)
        insort(self._waiting, newest, key=_ticket)
        self._is_full = True
        return True

    def _take_pass(self, sequence: Sequence, row: int) -> tuple[int, bool]:
        """Records the tokens of a sequence that a pass has evaluated, and samples the
        next tokens. A drafted token is accepted if it equals the token that was just
        sampled; the rest of the draft is dropped from the KV cache. Returns the number
        of new tokens in the KV cache. The second value is False if the pass evaluated
        the rest of the prompt, or all of it except the last token; otherwise True. The
        second value has no meaning if the sequence has ended."""
        kv = sequence.place
        is_prompt = not sequence.generated
        n_done = len(kv.tokens)
        kv.tokens += sequence.context[n_done : n_done + sequence.n_next]
        kv.n_used = self._n_steps
        if is_prompt:
            sequence.summary.prompt_tokens = (
                len(kv.tokens) - sequence.summary.cached_tokens
            )
            sequence.events.on_progress(sequence.progress())
            if sequence.request.prompt_logprobs:
                sequence.note_prompt(n_done, sequence.n_next, row)
        if not sequence.n_pending and not sequence.cancelled:
            self._sample(sequence, row)
        n_accepted = 0
        for token in sequence.draft:
            if (
                sequence.kv is None
                or sequence.cancelled
                or sequence.context[-1] != token
            ):
                break
            n_accepted += 1
            kv.tokens.append(token)
            self._sample(sequence, row + n_accepted)
        if sequence.draft and self._drafter is not None:
            if sequence.kv is not None:
                self._kv.truncate(kv, len(kv.tokens))
            self._drafter.note_verified(sequence, kv, n_accepted)
            sequence.draft = ()
        return max(0, len(kv.tokens) - n_done), not (
            is_prompt and sequence.n_pending < 2
        )

    def _sample(self, sequence: Sequence, row: int) -> None:
        error = sequence.sample(row, self._stats_now)
        if error is not None or sequence.ended:
            self._end(sequence, error)


def _ticket(work: Sequence | Task) -> int:
    return work.ticket


def _next_tokens(sequence: Sequence) -> SequenceTokens:
    """Returns the tokens of a sequence that the next pass evaluates, as an item for
    `Context.eval_sequences`."""
    n_past = sequence.n_evaluated
    end = n_past + sequence.n_next
    decodes = sequence.decodes or sequence.repeats
    return SequenceTokens(
        sequence.place.seq_id,
        sequence.context[n_past:end],
        n_past,
        sequence.number,
        Phase.DECODE if decodes else Phase.PREFILL,
        wants_logits=end == len(sequence.context),
        all_logits=sequence.request.prompt_logprobs and not decodes,
        draft=sequence.draft,
    )
