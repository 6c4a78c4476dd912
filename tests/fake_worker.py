"""A scripted replacement for `moegguf.serving.worker`: `python fake_worker.py FD`.
Imports only the standard library, so that it starts fast. `python fake_worker.py
COMMAND ...` runs `moegguf COMMAND ...` with this worker.

The path of the model to load may be a JSON object. Its fields control the load:

- "log": a file to which each load adds a line
- "fractions": the number of progress messages
- "wait": a file to wait for. The default is the file that FAKE_WORKER_WAIT names.
- "die": a file with the number of further loads that crash
- "fail": the class of an error
- "stall": the load never finishes
- "n_parallel": the number of requests that the worker claims to answer at a time

The prompt, or the last message, selects the answer. Any other message is echoed.

- "say WORD ..."
- "count N"
- "hold FILE": one delta, then waits for FILE or for cancellation
- "hang": one delta, then waits forever, ignoring cancellation
- "die": one delta, then SIGKILL
- "die-silently FILE": SIGKILL while the number in FILE is above 0. Each time, the number decreases by 1.
- "fail CLASS [TEXT]": an error, after TEXT
- "think: THINKING|TEXT"
- "slowly TEXT": repeats TEXT until cancelled
- "stubborn TEXT": repeats TEXT until cancelled, but the answer never ends
- "progress": the progress of a long prompt, then waits for cancellation
- "messages", "settings": the request itself
- "cut": an answer after messages were left out of the prompt
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MESSAGES: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
CANCELLED = threading.Event()
SEND_LOCK = threading.Lock()
TIMING = {
    "prompt_tokens": 1,
    "answer_tokens": 2,
    "prompt_s": 0.25,
    "answer_s": 0.5,
    "total_s": 0.75,
}
SNAPSHOT = {
    "model": "a", "layers": [0], "n_expert": 2, "state": "AAI=", "uses": "AQAAAAAAAAA=", "loads": "AAAAAAAAAAA=",
    "stats": {}, "busy": False, "seconds": 1.0,
}  # fmt: skip
NO_EXPERTS = {
    **SNAPSHOT,
    "layers": [],
    "n_expert": 0,
    "state": "",
    "uses": "",
    "loads": "",
}
# Fields of the JSON object in the loaded model's path; they control this worker.
LOADED: dict[str, Any] = {}
Event = dict[str, Any]


class FailError(Exception):
    """Ends an answer with an error. The exception's text is the name of the error's
    class."""


def send(kind: str, **fields: Any) -> None:
    with SEND_LOCK:
        CONNECTION.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")


def listen() -> None:
    for line in CONNECTION.makefile("rb"):
        message = json.loads(line)
        if message["kind"] == "cancel":
            CANCELLED.set()
        elif message["kind"] == "tokenize":
            end(message["id"], value=[ord(letter) for letter in message["text"]])
        elif message["kind"] == "experts":
            end(message["id"], Snapshot=SNAPSHOT if "log" in LOADED else NO_EXPERTS)
        else:
            MESSAGES.put(message)
    os._exit(0)


def end(number: int, **outcome: Any) -> None:
    send(
        "end",
        id=number,
        stats={"tokens": number - 1},
        decisions={"policy": "lru", "predictor": "none"},
        **outcome,
    )


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_left(file: Path) -> None:
    """Does nothing if the number in the file is 0. Otherwise decreases the number by 1
    and kills the process."""
    if (left := int(file.read_text())) > 0:
        file.write_text(str(left - 1))
        kill_self()


def load(number: int, config: dict[str, Any]) -> None:
    n_ctx = config["plan"]["context"]["n_ctx"]
    script = json.loads(config["path"]) if config["path"].startswith("{") else {}
    LOADED.update(script)
    if "log" in script:
        with open(script["log"], "a") as log:
            log.write(json.dumps(config | {"n_ctx": n_ctx}) + "\n")
    for i in range(script.get("fractions", 0)):
        send("event", id=number, LoadProgress={"share": (i + 1) / script["fractions"]})
    wait = script.get("wait", os.environ.get("FAKE_WORKER_WAIT"))
    while wait and not Path(wait).exists():
        threading.Event().wait(0.002)
    if script.get("stall"):
        threading.Event().wait()
    if "die" in script:
        die_while_left(Path(script["die"]))
    if "fail" in script:
        send(
            "end", id=number, error={"class": script["fail"], "message": "as scripted"}
        )
        sys.exit()
    ready = {"n_ctx": n_ctx, "n_parallel": script.get("n_parallel", 1)}
    send("end", id=number, Ready=ready, stats={}, decisions={})


def events(request: dict[str, Any]) -> Iterator[Event]:
    """Yields the events of the scripted answer to a request. Raises FailError."""
    messages = request.get("messages")
    prompt = messages[-1]["content"] if messages else request["prompt"]
    command, _, rest = prompt.partition(" ")
    if command == "say":
        yield from (text(word) for word in rest.split())
    elif command == "count":
        for i in range(int(rest)):
            if CANCELLED.is_set():
                break
            yield text(f"{i} ")
    elif command == "hold":
        yield text("held")
        while not Path(rest).exists() and not CANCELLED.wait(0.002):
            pass
        if Path(rest).exists():
            CANCELLED.clear()
    elif command == "hang":
        yield text("hung")
        threading.Event().wait()
    elif command == "die":
        yield text("last")
        print("GGML_ASSERT(as scripted) failed", file=sys.stderr, flush=True)
        kill_self()
    elif command == "die-silently":
        die_while_left(Path(rest))
        yield text("alive")
    elif command == "fail":
        kind, _, said = rest.partition(" ")
        if said:
            yield text(said)
        raise FailError(kind)
    elif command in ("slowly", "stubborn"):
        while not CANCELLED.wait(0.02):
            yield text(f"{rest} ")
        threading.Event().wait(None if command == "stubborn" else 0)
    elif command == "think:":
        thinking, _, said = rest.partition("|")
        yield {"Delta": {"thinking": thinking}}
        yield text(said)
    elif command == "progress":
        yield {
            "PromptProgress": {
                "n_tokens": 6300,
                "n_cached": 0,
                "n_done": 1024,
                "seconds": 22.0,
            }
        }
        CANCELLED.wait()
    elif command == "messages":
        yield text(
            " ".join(f"[{each['role']}: {each['content']}]" for each in messages or ())
        )
    elif command == "settings":
        sampling = " ".join(
            f"{name}={value}" for name, value in request.get("sampling", {}).items()
        )
        yield text(
            f"{sampling} format={request.get('format')} think={request.get('think')}"
        )
    else:
        yield from map(text, prompt)


def text(said: str) -> Event:
    return {"Delta": {"text": said}}


def answer(message: dict[str, Any]) -> None:
    number, request = message["id"], message["request"]
    CANCELLED.clear()
    try:
        for event in events(request):
            send("event", id=number, **event)
    except FailError as error:
        return end(number, error={"class": str(error), "message": "as scripted"})
    finish = {"finish": "cancelled" if CANCELLED.is_set() else "stop"}
    if messages := request.get("messages"):
        finish |= TIMING | (
            {"cut_messages": 3} if messages[-1]["content"] == "cut" else {}
        )
    end(number, AnswerSummary=finish)


if __name__ == "__main__" and sys.argv[1].isdigit():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the real worker ignores SIGINT, too
    CONNECTION = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=listen, daemon=True).start()
    first = MESSAGES.get()
    load(first["id"], first["config"])
    while True:
        answer(MESSAGES.get())
elif __name__ == "__main__":
    from moegguf.cli import app
    from moegguf.serving import worker_process

    worker_process.COMMAND = (sys.executable, "-I", "-S", __file__)
    sys.exit(app.main())
