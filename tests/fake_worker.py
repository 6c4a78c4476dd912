"""A scripted replacement of `moegguf.serving.worker`, for tests of scheduling: `python fake_worker.py FD`.

The path of the model to load is JSON: {"log": file that gets a line per load; "fractions": number of progress messages;
"wait": file to wait for;
"die": file with the number of loads that still crash; "fail": class of an error; "stall": never finishes;
"n_parallel": requests that it claims to answer at once}.

The prompt selects the answer: "say WORD ..." · "count N" · "hold FILE" (one delta, then waits for FILE or a cancel) ·
"hang" (waits for ever, ignores a cancel) · "die" (one delta, then SIGKILL) · "fail CLASS". Imports the standard library
only, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

CONNECTION = socket.socket(fileno=int(sys.argv[1]))
MESSAGES: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
CANCELLED = threading.Event()
SEND_LOCK = threading.Lock()


def send(kind: str, **fields: Any) -> None:
    with SEND_LOCK:
        CONNECTION.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")


def listen() -> None:
    for line in CONNECTION.makefile("rb"):
        message = json.loads(line)
        if message["kind"] == "cancel":
            CANCELLED.set()
        elif message["kind"] == "watch":
            send_snapshot(message["per_s"])
        elif message["kind"] == "tokenize":
            end(message["id"], value=[ord(letter) for letter in message["text"]])
        else:
            MESSAGES.put(message)
    os._exit(0)


def send_snapshot(per_s: float) -> None:
    """One snapshot per watch message, with its rate as `tokens_per_s`."""
    snapshot = {
        "model": NAME,
        "layers": [0],
        "n_expert": 2,
        "state": "AAI=",
        "uses": "AQA=",
        "loads": "AAA=",
        "stats": {},
    }
    send("snapshot", snapshot={**snapshot, "busy": False, "tokens_per_s": per_s, "seconds": 1.0}, decisions={})


def end(number: int, **outcome: Any) -> None:
    send("end", id=number, stats={"tokens": number}, decisions={"policy": "lru"}, **outcome)


def send_delta(number: int, text: str) -> None:
    send("event", id=number, Delta={"text": text})


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_left(file: Path) -> None:
    """The file has the number of deaths to come."""
    if (left := int(file.read_text())) > 0:
        file.write_text(str(left - 1))
        kill_self()


def load(config: dict[str, Any]) -> None:
    script = json.loads(config["path"])
    if "log" in script:
        with open(script["log"], "a") as log:
            log.write(json.dumps(config) + "\n")
    for i in range(script.get("fractions", 0)):
        send("loading", fraction=(i + 1) / script["fractions"])
    while "wait" in script and not Path(script["wait"]).exists():
        threading.Event().wait(0.002)
    if script.get("stall"):
        threading.Event().wait()
    if "die" in script:
        die_while_left(Path(script["die"]))
    if "fail" in script:
        send("failed", error={"class": script["fail"], "message": "as scripted"})
        sys.exit()
    ready = {"n_ctx": config["n_ctx"], "plan": {"n_slots": 3}, "n_parallel": script.get("n_parallel", 1)}
    send("ready", ready=ready, stats={}, decisions={})


def answer(message: dict[str, Any]) -> None:
    number = message["id"]
    command, _, rest = message["generation"]["prompt"].partition(" ")
    finish = "stop"
    CANCELLED.clear()
    if command == "say":
        for word in rest.split():
            send_delta(number, word)
    elif command == "count":
        for i in range(int(rest)):
            if CANCELLED.is_set():
                finish = "cancelled"
                break
            send_delta(number, f"{i} ")
    elif command == "hold":
        send_delta(number, "held")
        while not Path(rest).exists() and not CANCELLED.wait(0.002):
            pass
        finish = "stop" if Path(rest).exists() else "cancelled"
    elif command == "hang":
        send_delta(number, "hung")
        threading.Event().wait()
    elif command == "die":
        send_delta(number, "last")
        print("GGML_ASSERT(as scripted) failed", file=sys.stderr, flush=True)
        kill_self()
    elif command == "die-silently":
        die_while_left(Path(rest))
        send_delta(number, "alive")
    elif command == "fail":
        return end(number, error={"class": rest, "message": "as scripted"})
    end(number, value={"finish": finish})


threading.Thread(target=listen, daemon=True).start()
CONFIG: dict[str, Any] = MESSAGES.get()["config"]
NAME = CONFIG["name"]
load(CONFIG)
while True:
    answer(MESSAGES.get())
