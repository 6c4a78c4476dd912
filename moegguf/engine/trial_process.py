"""The process of a trial load: `python -m moegguf.engine.trial_process REQUEST`, a
trial.Request in JSON.

Uses a model briefly as users do: loads it with slots for a few experts, tokenizes
texts, evaluates a prompt, and generates some tokens. Then writes a JSON object to
stdout and exits. Also exits when its stdin closes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

TEXTS = (
    "The quick brown fox jumps over the lazy dog, what do you think?\n\n    def f(x):\n        return x + 1.5\n",
    "Hello, wörld 你好 🙂\n\t 12345",
    "<|im_start|>user\nfor (int i = 0; i < 10; ++i) {}<|im_end|>",
    "\x00\x7f  x" * 9,
)
N_NEW = 3
# Not a square, and no side is a multiple of 14 or 16, the usual patch sizes.
IMAGE_WIDTH, IMAGE_HEIGHT = 100, 60


def _limit(memory_bytes: int, cpu_s: int) -> None:
    """Limits this process's memory and CPU time. If `memory_bytes` is 0, memory is not
    limited. If the machine runs out of memory, the system kills this process first."""
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, cpu_s)]
    if memory_bytes:
        limits.append((resource.RLIMIT_DATA, memory_bytes))
    for which, value in limits:
        with suppress(ValueError, OSError):  # a lower limit is already set
            resource.setrlimit(
                which, (value, resource.getrlimit(which)[1] if value else 0)
            )
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def end_with_parent() -> None:
    """Terminates this process when its stdin closes."""
    sys.stdin.buffer.read()
    os._exit(1)


def _try(request: dict[str, Any]) -> None:
    from moegguf.engine.llama import Llama
    from moegguf.engine.trial import N_BATCH
    from moegguf.errors import MoeggufError

    options = request["options"]
    with Llama(request["path"], **options) as llm:
        # llama.cpp also looks up bytes that no token begins with.
        llm.tokenize(bytes(range(256)), add_bos=False)
        for text in TEXTS:
            llm.detokenize(llm.tokenize(text.encode(), add_bos=True, special=True))
            llm.vocabulary.tokens(text)
        for token in range(
            0, llm.vocabulary.n_tokens, max(1, llm.vocabulary.n_tokens // 500)
        ):
            llm.vocabulary.piece(token, special=True)
        if options.get("vocab_only"):
            return
        if options.get("embedding"):
            llm.embed([TEXTS[0]])
            return
        llm.eval([0] * (N_BATCH + 1))
        llm.create_completion([0], max_tokens=N_NEW)
        if llm.reads_images:
            # The user's first image will raise this error, too; texts still work.
            with suppress(MoeggufError):
                read_an_image(llm)


def read_an_image(llm: Llama) -> None:
    """Evaluates a small image between two texts. Stops before an image that does not
    fit into the context. Raises the projector's errors."""
    from moegguf.engine.projector import Image

    reader = llm.context.open_projector()
    at = 0
    assert reader is not None
    # pixels of different colours.
    pixels = bytes(7 * i % 256 for i in range(3 * IMAGE_WIDTH * IMAGE_HEIGHT))
    ppm = f"P6 {IMAGE_WIDTH} {IMAGE_HEIGHT} 255\n".encode() + pixels
    prompt = reader.tokenize(["look", "\n"], [Image(ppm, IMAGE_WIDTH, IMAGE_HEIGHT)])
    llm.reset()
    for span in prompt.spans:
        if span.end >= llm.n_ctx():
            return
        llm.eval(prompt.tokens[at : span.begin])
        llm.context.eval_image(prompt, span, llm.context.requests.begin())
        at = span.end
    llm.eval(prompt.tokens[at:])


def main() -> None:
    """Tries the model of the request on the command line, and writes the result to
    stdout."""
    request = json.loads(sys.argv[1])
    _limit(request["memory_bytes"], request["cpu_s"])
    threading.Thread(target=end_with_parent, daemon=True).start()
    from moegguf.engine.trial import describe

    answer = {"kind": "passed", "reason": ""}
    try:
        _try(request)
    except BaseException as error:
        # Every exception, because the process only reports it and exits.
        answer = describe(error)
    os.write(1, json.dumps(answer).encode())
    os._exit(0)  # the exit of the process frees everything


if __name__ == "__main__":
    main()
