"""Stands for `moegguf.serving.worker` where rules are tested and models are not: `python fake_worker.py FD`.

The path of the model it is told to load is JSON: {"log": file} gets a line per load; "shares": how many reports;
"die": file with how many loads shall still die; "fail": an error's class; "stall": never finishes.

The prompt says what an answer does: "say WORD ..." · "count N" · "hold FILE" (one piece, then waits for FILE or for a
cancel) · "hang" (waits for ever, deaf) · "die" (one piece, then kill -9) · "fail CLASS". Only the standard library, so
that it starts at once.
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

LINK = socket.socket(fileno=int(sys.argv[1]))
ORDERS: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
CANCELLED = threading.Event()
SENDING = threading.Lock()


def send(kind: str, **fields: Any) -> None:
    with SENDING:
        LINK.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")


def listen() -> None:
    for line in LINK.makefile("rb"):
        message = json.loads(line)
        if message["kind"] == "cancel":
            CANCELLED.set()
        elif message["kind"] == "watch":
            send_view(message["per_s"])
        elif message["kind"] == "tokenize":
            end(message["id"], value=[ord(letter) for letter in message["text"]])
        else:
            ORDERS.put(message)
    os._exit(0)


def send_view(per_s: float) -> None:
    """One view for each order to watch, which says how often: tests want no clock."""
    view = {"model": NAME, "layers": [0], "n_expert": 2, "state": "AAI=", "uses": "AQA=", "loads": "AAA=", "stats": {}}
    send("view", view={**view, "busy": False, "tokens_per_s": per_s, "seconds": 1.0}, decisions={})


def end(number: int, **outcome: Any) -> None:
    send("end", id=number, stats={"tokens": number}, decisions={"policy": "lru"}, **outcome)


def piece(number: int, text: str) -> None:
    send("event", id=number, Delta={"text": text})


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load(order: dict[str, Any]) -> None:
    script = json.loads(order["path"])
    if "log" in script:
        with open(script["log"], "a") as log:
            log.write(json.dumps(order) + "\n")
    for i in range(script.get("shares", 0)):
        send("loading", share=(i + 1) / script["shares"])
    if script.get("stall"):
        threading.Event().wait()
    if "die" in script and (left := int(Path(script["die"]).read_text())) > 0:
        Path(script["die"]).write_text(str(left - 1))
        killed()
    if "fail" in script:
        send("failed", error={"class": script["fail"], "message": "as scripted"})
        sys.exit()
    send("ready", ready={"n_ctx": order["n_ctx"], "plan": {"n_slots": 3}}, stats={}, decisions={})


def answer(message: dict[str, Any]) -> None:
    number = message["id"]
    command, _, rest = message["generation"]["prompt"].partition(" ")
    finish = "stop"
    CANCELLED.clear()
    if command == "say":
        for word in rest.split():
            piece(number, word)
    elif command == "count":
        for i in range(int(rest)):
            if CANCELLED.is_set():
                finish = "cancelled"
                break
            piece(number, f"{i} ")
    elif command == "hold":
        piece(number, "held")
        while not Path(rest).exists() and not CANCELLED.wait(0.002):
            pass
        finish = "stop" if Path(rest).exists() else "cancelled"
    elif command == "hang":
        piece(number, "hung")
        threading.Event().wait()
    elif command == "die":
        piece(number, "last")
        print("GGML_ASSERT(as scripted) failed", file=sys.stderr, flush=True)
        killed()
    elif command == "fail":
        return end(number, error={"class": rest, "message": "as scripted"})
    end(number, value={"finish": finish})


ORDER: dict[str, Any]
threading.Thread(target=listen, daemon=True).start()
ORDER = ORDERS.get()["order"]
NAME = ORDER["name"]
load(ORDER)
while True:
    answer(ORDERS.get())
