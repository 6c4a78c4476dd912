"""Runs models with damaged headers, each in a child process, and counts how they end.

    python -m tools.mutate_headers MODEL.gguf... --count 1000 --seed 1 [--keep FOLDER]
    python -m tools.mutate_headers MMPROJ.gguf... --text-model MODEL.gguf --count 1000 --seed 1

Every mutant is loaded, tokenizes, reads a prompt and generates some tokens. The trial
load (a first load in a child process) is off, so that only the checks of the header
protect the program. A mutant of a projector reads images together with the good
--text-model. A mutant that ends badly is rerun with the trial load on, as users run it.
The exit status is 1 if a mutant ends badly again: by a signal, after --limit seconds,
or with an error that is not moegguf's own.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path

from moegguf.engine.llama import Llama
from moegguf.errors import MoeggufError
from moegguf.generate.engine import Engine
from moegguf.generate.images import with_images
from moegguf.generate.request import Sampling
from tools.mutants import mutate, read_header, write_file

MEMORY_BYTES = 6 << 30
TEXTS = (
    b"Hello world, this is a test of 12345 tokens.\n",
    "Grüße 你好 🙂\0".encode(),
    b"<|im_start|>\xff\xfe  x" * 8,
)
# Width and height of the test images, in pixels.
IMAGE_SIZES = ((64, 64), (100, 30), (8, 200))
GOOD = ("ok", "typed")


def use(path: Path, text_model: Path | None) -> None:
    """Loads and uses the mutant: as a projector of `text_model`, or as a text model if
    `text_model` is None."""
    if text_model is None:
        use_model(path)
    else:
        use_projector(path, text_model)


def use_projector(path: Path, text_model: Path) -> None:
    """Loads the projector and generates a short answer about an image of each size.
    Raises an answer's error, if there is one."""
    with Engine(
        text_model,
        parallel=1,
        mmproj=path,
        n_ctx=2048,
        n_threads=1,
        expert_cache="100%",
    ) as engine:
        for width, height in IMAGE_SIZES:
            message = {
                "role": "user",
                "content": with_images("what is it?", [png(width, height)]),
            }
            sampling = Sampling(temperature=0.8, max_tokens=3, seed=1)
            (answer,) = engine.chat([message], sampling)
            if answer.error is not None:
                raise answer.error


def png(width: int, height: int) -> bytes:
    """Returns the bytes of a greyscale PNG image of this size in pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = b"".join(
        b"\0" + bytes((x * y) % 256 for x in range(width)) for y in range(height)
    )
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def use_model(path: Path) -> None:
    """Loads the model, tokenizes and detokenizes TEXTS, reads a prompt and generates up
    to six tokens."""
    with Llama(path, n_ctx=256, n_threads=1, expert_cache="100%", verbose=False) as llm:
        for text in TEXTS:
            tokens = llm.vocabulary.tokens(text.decode(errors="replace"))
            llm.detokenize(tokens)
        llm.eval(llm.tokenize(TEXTS[0])[:60] or [0])
        llm.create_completion(
            "The quick brown fox", max_tokens=6, temperature=0.8, seed=1
        )


def _child(path: Path, text_model: Path | None, out: Path, trial: bool) -> None:
    """Uses the mutant, writes the class and details of the result to `out`, and exits.
    Runs in a forked process."""
    os.environ["MOEGGUF_TRIAL_LOAD"] = "1" if trial else "0"
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        use(path, text_model)
        result = ["ok", ""]
    except MoeggufError as error:
        result = ["typed", f"{type(error).__name__}: {error}"]
    except BaseException as error:
        # An error that is not moegguf's own: counted as "bare".
        result = ["bare", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"]
    out.write_text(json.dumps(result))
    os._exit(0)


def run(
    path: Path, text_model: Path | None, folder: Path, limit_s: float, trial: bool
) -> tuple[str, str]:
    """Uses one mutant in a child process. Returns (class, details) of the result.

    The class is ok, typed (an error of moegguf), bare (another error), hang, or the
    name of the signal that ended the process.
    """
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(path, text_model, out, trial)
    end = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang", ""
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        lines = out.with_suffix(".log").read_text(errors="replace").splitlines()
        marked = [
            line
            for line in lines
            if "ASSERT" in line or "rror" in line or "abort" in line
        ]
        return signal.Signals(os.WTERMSIG(status)).name, " | ".join(marked[-2:])
    kind, details = json.loads(out.read_text())
    return kind, details


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with the command line's options. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="+", type=Path, help="good models of one file each, small ones"
    )
    parser.add_argument(
        "--text-model",
        type=Path,
        help="the good model that the files, all projectors, belong to",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=100,
        help="mutants in all, dealt to the models in turn",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first mutant; the others count up"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=30.0,
        help="seconds until a mutant counts as a hang",
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for mutants that the header's checks let die"
    )
    options = parser.parse_args(arguments)
    headers = [(path.stem, read_header(path)) for path in options.models]
    counts: collections.Counter[str] = collections.Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["MOEGGUF_HOME"] = str(folder / "home")
        for seed in range(options.seed, options.seed + options.count):
            name, header = headers[seed % len(headers)]
            mutant, words = mutate(header, seed)
            path = folder / f"{name}-{seed}.gguf"
            write_file(mutant, path)
            kind, details = run(
                path, options.text_model, folder, options.limit, trial=False
            )
            counts[f"checks: {kind}"] += 1
            if kind not in GOOD:
                seen, told = run(
                    path, options.text_model, folder, options.limit, trial=True
                )
                counts[f"user: {seen}"] += 1
                failed += seen not in GOOD
                print(json.dumps({"seed": seed, "model": name, "checks": kind, "why": details, "user": seen,
                                  "told": told, "mutant": words}), flush=True)  # fmt: skip
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    shutil.move(path, options.keep)
            path.unlink(missing_ok=True)
    print(json.dumps(counts), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
