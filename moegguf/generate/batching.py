"""Answers many requests together: each step is one pass with the next token of every running sequence.

Prompt tokens of others take part up to the step's budget, so that a long prompt does not stop running answers
(continuous batching: Orca, section 4; prompts in chunks: Sarathi-Serve, section 4). Everything but the pass belongs to
a sequence: what one of them fails with, or its cancellation, does not reach another.

Where the model is not batch-invariant (`Llama.batch_invariant`), the last bits of an answer depend on what else is in
its passes, as in llama.cpp; a request with `exact` is then computed alone, in steps of its own, as is every request
with images or of a context with one sequence (`Llama.n_seq_max`).
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from moegguf.engine.sequences import Chunk
from moegguf.errors import ClosedError, ContextError, ExpertIOError, GenerationCancelled
from moegguf.generate.answer import AnswerEvents, BatchedAnswer, Task
from moegguf.generate.drafting import Drafter
from moegguf.generate.kv_slots import KvSlots, Part, Schedule, Step
from moegguf.generate.request import GenerationRequest
from moegguf.native.events import Phase

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.engine.stats import Stats

KEEP_AGAIN_S = 0.05  # while nothing is computed and what was computed waits to be written
LAST_KEEP_S = 2.0  # for that at the end
MAX_READERS = 32  # prompts that are read at once: a slow template or a long text holds up nobody else


class BatchLoop:
    """Owns the context of a model: `run` computes, on one thread, what others submit, until `close`.

    `schedule`: which sequences compute in a step; None: all, the oldest prompts first. `step_tokens`: its budget, as of
    `KvSlots`. `together`: the block in which the answers of a step get their events. `on_pass` is called before each
    pass, with the asker of all of its requests; None where there are several.
    """

    def __init__(
        self,
        llm: Llama,
        schedule: Schedule | None = None,
        step_tokens: int | None = None,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_pass: Callable[[str | None], object] = lambda asker: None,
    ) -> None:
        self._llm = llm
        self._schedule = schedule
        self._together, self._on_pass = together, on_pass
        self._slots = KvSlots(llm, step_tokens)
        self._drafter = Drafter(llm, llm.drafts) if llm.drafts else None
        self._changed = threading.Condition()  # of the four below
        self._arrived: list[BatchedAnswer | Task] = []
        self._computing: tuple[BatchedAnswer, ...] = ()
        self._task: Task | None = None  # that runs
        self._closing = False
        self._readers = ThreadPoolExecutor(MAX_READERS, "moegguf-prompt")
        self._waiting: list[BatchedAnswer | Task] = []  # by ticket; from here on of the loop's thread
        self._running: list[BatchedAnswer] = []  # by ticket
        self._is_full = False  # an answer was put back for others, of which none has ended since
        self._n_steps = 0
        self._n_ended_tokens = 0
        self._stats: Stats | None = None  # of the model, since the last pass

    @property
    def n_running(self) -> int:
        """Answers that are computed now."""
        return len(self._running) + (self._task is not None)

    @property
    def n_answer_tokens(self) -> int:
        """Tokens of all answers so far."""
        return self._n_ended_tokens + sum(answer.timing.answer_tokens for answer in list(self._running))

    # From any thread.

    def submit(self, request: GenerationRequest, events: AnswerEvents) -> BatchedAnswer:
        """Begins to answer a request; what is wrong with it is an error of its `on_end`."""
        answer = BatchedAnswer(request, events)
        with self._changed:
            if not self._closing:
                self._readers.submit(self._read, answer)
                return answer
        self._arrive(answer)
        return answer

    def submit_task(
        self,
        run: Callable[[], object],
        cancel: Callable[[], object],
        fail: Callable[[Exception], object],
        asker: str = "",
    ) -> Task:
        """Has `run` called on the loop's thread once no answer is being computed; `cancel` is to end it. Of one that is
        cancelled before, or that the end of the loop meets, `fail` gets the reason."""
        task = Task(run, cancel, fail, asker)
        self._arrive(task)
        return task

    def cancel(self, job: BatchedAnswer | Task) -> None:
        """Ends an answer, normally: after the step that computes now, at once if nobody else takes part in it."""
        with self._changed:
            job.cancelled = True
            if self._task is not None and self._task is job:
                self._task.stop()
            elif self._computing and all(answer.cancelled for answer in self._computing):
                self._llm.cancel()
            self._changed.notify()

    def close(self) -> None:
        """Cancels all answers; `run` returns soon."""
        with self._changed:
            self._closing = True
            for answer in self._computing:
                answer.cancelled = True
            if self._computing:
                self._llm.cancel()
            if self._task is not None:
                self._task.stop()
            self._changed.notify()

    def _read(self, answer: BatchedAnswer) -> None:
        if not self._closing:
            answer.read(self._llm)
        self._arrive(answer)

    def _arrive(self, job: BatchedAnswer | Task) -> None:
        with self._changed:
            if not self._closing:
                self._arrived.append(job)
                self._changed.notify()
                return
        closed = ClosedError("the model is closed; load it again.")
        job.events.on_end(job.timing, closed) if isinstance(job, BatchedAnswer) else job.fail(closed)

    # On the loop's thread.

    def run(self) -> None:
        """Computes until `close`; raises what events raise. What waits or runs then ends as cancelled, or with that."""
        failure: Exception | None = None
        try:
            while self._wait():
                self._take_arrived()
                for job in [job for job in (*self._running, *self._waiting) if job.cancelled]:
                    self._end(job)
                self._admit()
                if self._running:
                    self._step()
        except Exception as error:
            failure = error
            raise
        finally:
            with self._changed:
                self._closing = True
            self._readers.shutdown()  # they use the model
            self._take_arrived()
            for job in [*self._running, *self._waiting]:
                self._end(job, failure)
            last_s = time.monotonic() + LAST_KEEP_S
            while failure is None and self._slots.keep_unused() and time.monotonic() < last_s:
                time.sleep(KEEP_AGAIN_S)

    def _wait(self) -> bool:
        """For work; False after `close`."""
        with self._changed:
            while not (self._closing or self._arrived or self._waiting or self._running):
                self._changed.wait(KEEP_AGAIN_S if self._slots.keep_unused() else None)
            return not self._closing

    def _take_arrived(self) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, []
        for job in arrived:
            insort(self._waiting, job, key=lambda known: known.ticket)
            if isinstance(job, BatchedAnswer) and job.error is not None:
                self._end(job, job.error)

    def _admit(self) -> None:
        """Gives slots to those who wait, in order of arrival. Who computes alone waits until nobody runs, and holds up
        those behind it."""
        while self._waiting and not (self._is_full and self._running):
            first = self._waiting[0]
            if self._running and (isinstance(first, Task) or first.alone or self._running[0].alone):
                return
            if len(self._running) == len(self._slots):
                return
            self._waiting.pop(0)
            if isinstance(first, Task):
                self._run_task(first)
            else:
                self._begin(first)

    def _begin(self, answer: BatchedAnswer) -> None:
        if answer.number < 0:
            answer.begin(self._llm.context.begin_request(), self._stats_now())
        if answer.alone:
            self._slots.clear()
        self._slots.place(answer)
        insort(self._running, answer, key=lambda known: known.ticket)
        if answer.n_pending > self._llm.n_batch:
            answer.events.on_progress(answer.progress())

    def _run_task(self, task: Task) -> None:
        """From an empty context; where it has one sequence only, from what was left there. It leaves it empty: nobody's
        requests begin with what it computed."""
        self._stats = None
        self._slots.clear()
        with self._changed:
            self._task = task
            if task.cancelled or self._closing:
                task.stop()
        self._on_pass(task.asker)
        try:
            task.run()
        finally:
            with self._changed:
                self._task = None
            self._llm.resume()  # a cancel may have come after its end
        self._slots.clear()
        self._llm.reset()

    def _end(self, job: BatchedAnswer | Task, error: Exception | None = None) -> None:
        """Ends an answer that waits or runs, or a task that waits. An answer's slot keeps the tokens, for prompts that
        begin with them."""
        if job in self._waiting:
            self._waiting.remove(job)
        if isinstance(job, Task):
            reason = "the model is closed; load it again." if self._closing else "it was cancelled while it waited."
            job.fail(error or (ClosedError if self._closing else GenerationCancelled)(reason))
            return
        if job in self._running:
            self._running.remove(job)
        if job.slot is not None:
            self._slots.release(job)
            self._is_full = False
            if job.alone:
                self._slots.clear()
        if job.number >= 0:
            error = job.complete(self._stats_now(), error)
            self._n_ended_tokens += job.timing.answer_tokens
        job.events.on_end(job.timing, error)

    def _stats_now(self) -> Stats:
        """The model's counters after the last pass. Reading them takes as long as sampling several tokens, and the
        answers that begin or end between two passes need the same ones."""
        if self._stats is None:
            self._stats = self._llm.stats()
        return self._stats

    # A step.

    def _step(self) -> None:
        for answer in self._running:
            self._slots.shift(answer)
        running = tuple(self._running)
        chosen = (self._schedule and self._schedule.choose(running)) or running
        start_s, parts = time.perf_counter(), self._slots.parts(chosen, self._n_steps)
        drafter = self._drafter
        if drafter is not None and drafter.gate.is_due() and all(answer.decodes for answer, _ in parts):
            drafter.propose([answer for answer, _ in parts])
        else:
            drafter = None
        n_drafted = sum(len(answer.draft) for answer, _ in parts)
        computed = self._compute(parts)
        if not computed:
            return
        seconds = time.perf_counter() - start_s
        if drafter is not None:
            drafter.ran(len(computed), seconds)
        if self._schedule is not None:
            answers, n_tokens = tuple(answer for answer, _ in computed), sum(n for _, n in computed)
            self._schedule.ran(Step(answers, n_drafted + n_tokens, seconds))

    def _compute(self, parts: Sequence[Part]) -> list[Part]:
        """Evaluates the parts of a step and lets who has all of its tokens sample; returns what was evaluated.

        An expert that cannot be read fails the pass of all: they are then computed without drafts, and each alone, and
        those that need it end.
        """
        self._stats, drafted = None, any(answer.draft for answer, _ in parts)
        try:
            evaluated, rows = self._evaluate(parts)
        except GenerationCancelled:
            return []  # they end at the next turn
        except ExpertIOError as error:
            if drafted:
                return self._compute(parts)
            if len(parts) > 1:
                return [done for part in parts for done in self._compute([part])]
            self._end(parts[0][0], error)
            return []
        except Exception as error:
            for answer, _ in parts:
                if answer.slot is not None:
                    self._end(answer, error)
            return []
        self._n_steps += 1
        with self._together():
            kept = [self._advance(*part, row) for part, row in zip(evaluated, rows, strict=True)]
        for (answer, _), (n_new, goes_on) in zip(evaluated, kept, strict=True):  # once tokens are on their way
            self._slots.keep(answer, n_new, goes_on=goes_on)
        return evaluated

    def _evaluate(self, parts: Sequence[Part]) -> tuple[list[Part], list[int]]:
        """The parts that were evaluated, without those of answers that were put back because the KV cache was full, and
        their rows of logits. After an exception the slots are as before."""
        remaining = list(parts)
        while remaining:
            try:
                rows = self._rows(remaining)
            except BaseException:  # the sequences end as they were before the pass
                for answer, _ in remaining:
                    self._slots.truncate(answer.held, answer.n_evaluated)
                    answer.draft = ()
                raise
            if rows is not None:
                return remaining, rows
            if any(answer.draft for answer, _ in remaining):
                for answer, _ in remaining:
                    answer.draft = ()
                continue
            if not self._make_room():
                raise ContextError("the KV cache has no room for the context of one sequence; lower n_ctx.")
            remaining = [part for part in remaining if part[0].slot is not None]
        return [], []

    def _rows(self, parts: Sequence[Part]) -> list[int] | None:
        """Their rows of logits; None when the KV cache has no room for them. Cancelling all of them ends the pass."""
        answers, context = tuple(answer for answer, _ in parts), self._llm.context
        with self._changed:
            if self._closing or all(answer.cancelled for answer in answers):
                raise GenerationCancelled("the answers were stopped.")
            self._computing = answers
        askers = {answer.request.asker for answer in answers}
        self._on_pass(askers.pop() if len(askers) == 1 else None)
        image, images = answers[0].image, answers[0].prompt.images
        try:
            if images is not None and image is not None and image.begin == answers[0].n_evaluated:
                context.eval_image(images, image, answers[0].number)
                return [-1]
            return context.eval_chunks([_chunk(*part) for part in parts])
        finally:
            with self._changed:
                self._computing = ()
                if all(answer.cancelled for answer in answers):
                    self._llm.resume()

    def _make_room(self) -> bool:
        """Drops the tokens of the least recently used slot that nobody uses, else puts the newest answer back in the
        queue: it is computed again later. False when only one runs."""
        if self._slots.drop_unused():
            return True
        if len(self._running) < 2:
            return False
        newest = self._running.pop()
        self._slots.truncate(newest.held, 0)
        self._slots.release(newest)
        insort(self._waiting, newest, key=lambda known: known.ticket)
        self._is_full = True
        return True

    def _advance(self, answer: BatchedAnswer, n_tokens: int, row: int) -> tuple[int, bool]:
        """After a pass with so many of its tokens: samples, and goes on after each token of the draft that is the one
        sampled before it; the others leave the KV cache. How many are new there, and whether more of the prompt or the
        answer follow."""
        slot, draft = answer.held, answer.draft
        is_prompt, n_done = not answer.generated, len(slot.tokens)
        slot.tokens += answer.context[n_done : n_done + n_tokens]
        slot.n_used = self._n_steps
        if is_prompt:
            answer.timing.prompt_tokens = len(slot.tokens) - answer.timing.cached_tokens
            answer.events.on_progress(answer.progress())
            if answer.request.prompt_logprobs:
                answer.note_prompt(n_done, n_tokens, row)
        if not answer.n_pending and not answer.cancelled:
            self._sample(answer, row)
        n_accepted = 0
        for token in draft:
            if answer.slot is None or answer.cancelled or answer.context[-1] != token:
                break
            n_accepted += 1
            slot.tokens.append(token)
            self._sample(answer, row + n_accepted)
        if draft and self._drafter is not None:
            if answer.slot is not None:
                self._slots.truncate(slot, len(slot.tokens))
            self._drafter.verified(answer, slot, n_accepted)
            answer.draft = ()
        return max(0, len(slot.tokens) - n_done), not (is_prompt and answer.n_pending < 2)

    def _sample(self, answer: BatchedAnswer, row: int) -> None:
        error = answer.sample(row, self._stats_now)
        if error is not None or answer.ended:
            self._end(answer, error)


def _chunk(answer: BatchedAnswer, n_tokens: int) -> Chunk:
    """The tokens of a part, as the model takes them."""
    n_past, decodes = answer.n_evaluated, answer.decodes
    tokens = answer.context[n_past : n_past + n_tokens]
    wants_logits = n_past + n_tokens == len(answer.context)
    return Chunk(
        answer.held.sequence,
        tokens,
        n_past,
        answer.number,
        Phase.DECODE if decodes else Phase.PREFILL,
        wants_logits,
        answer.request.prompt_logprobs and not decodes,
        answer.draft,
    )
