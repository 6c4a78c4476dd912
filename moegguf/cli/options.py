"""Types of arguments and options that several commands take. Imports nothing heavy: `--help` reads them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from moegguf.options import with_new_flags

MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS


class Command(TyperCommand):
    """A command that takes old names of its flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses `args` with the new names."""
        return super().parse_args(ctx, with_new_flags(args))


def parse_threads(text: str) -> int | None:
    """A number of threads, None for "auto". Raises typer.BadParameter."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_THREADS:
        raise typer.BadParameter(f"{text!r} is neither a number from 1 to {MAX_THREADS} nor 'auto'.")
    return int(text)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name (`moegguf list` shows those here; hf.co/USER/REPOSITORY:QUANT is fetched), a GGUF file"
        " (of a split model the first), or `demo`.",
    ),
]
Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="Only names that begin with this.")]
Cache = Annotated[
    str | None,
    typer.Option(
        "--expert-cache",
        metavar="BUDGET",
        help='Memory for experts: "auto", a share of them such as "50%", or a size such as "4GiB".'
        "  [default: MOEGGUF_EXPERT_CACHE, or auto]",
    ),
]
VramCache = Annotated[
    str | None,
    typer.Option(
        "--vram-cache",
        metavar="BUDGET",
        help="Memory of a GPU for experts, in the same forms; --expert-cache is RAM beside it. Of several GPUs"
        " together; with commas, of each. Prompts may be staged in a part of it (`moegguf estimate`)."
        "  [default: MOEGGUF_VRAM_CACHE, or auto]",
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        "--placement",
        metavar="WHERE",
        help="What goes into that memory: layers (whole ones; the CPU computes the others), slots (experts as they are"
        " used), cpu (nothing: no GPU) or auto, which measures; with several GPUs auto is slots."
        "  [default: MOEGGUF_PLACEMENT, or auto]",
    ),
]
Misses = Annotated[
    str | None,
    typer.Option(
        "--misses",
        metavar="HOW",
        help="Experts that the GPU lacks: fetch copies them there, compute lets the CPU compute them in decode where"
        " that is faster. Not exact: answers then depend on what was in VRAM.  [default: MOEGGUF_MISSES, or fetch]",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        parser=parse_threads,
        metavar="N",
        help='CPU threads, or "auto": as many as other processes leave free.  [default: auto]',
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        "-c",
        "--ctx-size",
        min=0,
        metavar="TOKENS",
        help="Context size; 0: the model's own.  [default: the largest in a tenth of the free memory]",
    ),
]
TypeK = Annotated[
    str | None,
    typer.Option("--cache-type-k", "-ctk", metavar="TYPE", help="Type of the K cache, such as q8_0.  [default: f16]"),
]
TypeV = Annotated[
    str | None,
    typer.Option("--cache-type-v", "-ctv", metavar="TYPE", help="Type of the V cache, such as q8_0.  [default: f16]"),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="What decides on experts: moegguf (what was measured to be best), none, lru, or as a whole one of"
        " moe-infinity, promoe, expertflow, duoserve.  [default: MOEGGUF_STRATEGY, or moegguf]",
    ),
]
WarmStart = Annotated[
    bool | None,
    typer.Option(
        "--warm-start/--no-warm-start",
        help="Fetch the experts that earlier runs used most when the model is loaded, and remember this run's."
        "  [default: MOEGGUF_WARM_START, or off]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]
Insecure = Annotated[bool, typer.Option("--insecure", hidden=True, help="Accepted, as Ollama has it; no effect.")]

_HUB_HOSTS = ("hf.co/", "huggingface.co/", "https://")


def hub_name(repository: str) -> str:
    """The model name of `repository` on Hugging Face, "USER/REPOSITORY[:QUANT]" as llama.cpp's `-hf` takes it.

    Raises typer.BadParameter for anything else.
    """
    if repository.startswith(_HUB_HOSTS):
        return repository
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise typer.BadParameter(f"-hf takes USER/REPOSITORY[:QUANT], but is {repository!r}.")
    return f"hf.co/{repository}"
