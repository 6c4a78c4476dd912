"""Answers the requests of a batch, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from moegguf.serving.batch.answers import Entry, error_entry, response_entry
from moegguf.serving.batch.requests import RequestLine, Requests

BUSY = (429, 503)
BUSY_RETRY_S = 1.0


@dataclass(frozen=True)
class Reply:
    """What an endpoint answers: HTTP's status, and the JSON of its body."""

    status: int
    body: Any


Answer = Callable[[str, bytes], Awaitable[Reply]]
"""(url, body as JSON) to the reply of that endpoint. Cancelling it ends the request."""


class Answers(Protocol):
    """Where answers go; `answered` has the numbers of lines that have one."""

    @property
    def answered(self) -> Any:
        """A collection of numbers of lines."""

    def append(self, number: int, entry: Entry) -> None:
        """Adds the answer of a line."""


async def answer_requests(
    requests: Requests, answers: Answers, answer: Answer, n_parallel: int, on_answer: Callable[[Entry], object]
) -> None:
    """Adds the answers that are missing, `n_parallel` requests at a time; `on_answer` gets each.

    Those that need the same loaded model are answered together and then the next ones, so that models are not swapped
    back and forth. A busy server is asked again. When cancelled, requests that have not ended have no answer.

    Raises what `answer` and `answers.append` raise; the other requests are then cancelled.
    """

    def add(line: RequestLine, entry: Entry) -> None:
        answers.append(line.number, entry)
        on_answer(entry)

    async def work(pending: Iterator[RequestLine]) -> None:
        for line in pending:
            url, body = requests.read(line)
            reply = await _patiently(answer, url, body)
            add(line, response_entry(requests, line, reply.status, reply.body))

    for line in requests.lines:
        if line.error is not None and line.number not in answers.answered:
            add(line, error_entry(requests, line, line.error))
    for group in requests.groups(answers.answered):
        pending = iter(group)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(n_parallel, len(group))):
                    tasks.create_task(work(pending))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others were cancelled, or failed for the same reason


async def _patiently(answer: Answer, url: str, body: bytes) -> Reply:
    while (reply := await answer(url, body)).status in BUSY:
        await asyncio.sleep(BUSY_RETRY_S)
    return reply
