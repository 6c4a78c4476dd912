"""Answers a file of requests without a model, slowly: `python answer_batch.py REQUESTS ANSWERS`, to be killed."""

import asyncio
import json
import sys
from pathlib import Path

from batch_files import ENDPOINTS

from moegguf.serving.batch.answers import Reply, Requests, answer_requests, open_journal


async def answer(url: str, raw: bytes) -> Reply:
    """The text that was sent, many times: lines that a kill can tear."""
    await asyncio.sleep(0.01)
    return Reply(200, {"text": json.loads(raw)["messages"][0]["content"] * 20_000})


source, target = map(Path, sys.argv[1:])
with source.open("rb") as file:
    requests = Requests(file, ENDPOINTS)
    journal = open_journal(target.with_suffix(".partial"), requests)
    print("begun", flush=True)
    asyncio.run(answer_requests(requests, journal, answer, 8, lambda entry: None))
    journal.finish(target)
