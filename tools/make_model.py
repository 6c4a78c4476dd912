#!/usr/bin/env python3
"""Write a Mixture-of-Experts GGUF of any shape with random weights. Only the disk
limits the size of the file.

python tools/make_model.py --preset qwen1.5-moe-a2.7b --quant q4_0 -o model.gguf
python tools/make_model.py --preset tiny-mix --quant q4_k_m --split 3 -o tiny.gguf
python tools/make_model.py --preset qwen3-30b-a3b --locality none -o model.gguf
python tools/make_model.py --list
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.models import (
    PRESET_LOCALITY,
    PRESETS,
    PROJECTORS,
    QUANTS,
    Shape,
    model_size_bytes,
    write_model,
    write_projector,
)
from tools.models.locality import LOCALITIES

SIZE_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}
DIMENSIONS = [field.name for field in fields(Shape) if field.type == "int"]


def main() -> int:
    """Runs the program with the command line's options. Returns the exit status."""
    parser = _parser()
    args = parser.parse_args()
    if args.list:
        print(_preset_table())
        return 0
    if args.preset is None or args.output is None:
        parser.error("--preset and --output are needed (or --list)")
    try:
        _write(args)
    except (ValueError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="named shape; every dimension below overrides it",
    )
    parser.add_argument(
        "--quant",
        choices=QUANTS,
        default="q4_0",
        help="by llama-quantize's rules: q4_k_m has Q6_K, too",
    )
    parser.add_argument(
        "--locality",
        choices=[*LOCALITIES, "none"],
        help="whose published reuse of experts the routing has; none: as random weights happen to route "
        "(default: that of the preset's family, none for tiny ones)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write; shards get -00001-of-0000N"
    )
    parser.add_argument(
        "--mmproj",
        choices=PROJECTORS,
        help="write a projector for images beside it, mmproj-FILE",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--list", action="store_true", help="list the presets and their sizes"
    )
    split = parser.add_mutually_exclusive_group()
    split.add_argument(
        "--split",
        type=int,
        default=1,
        metavar="N",
        help="distribute the tensors over N shards",
    )
    split.add_argument(
        "--split-max-size",
        type=_n_bytes,
        metavar="SIZE",
        help="fill shards up to a size such as 2G",
    )
    for name in DIMENSIONS:
        flags = ["--layers"] if name == "n_layer" else []
        parser.add_argument(
            *flags, "--" + name.replace("_", "-"), type=int, dest=name, metavar="N"
        )
    return parser


def _n_bytes(text: str) -> int:
    factor = SIZE_UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if factor > 1 else text) * factor


def _preset_table() -> str:
    rows = [
        f"{'preset':<24} {'arch':<15}" + "".join(f"{quant:>12}" for quant in QUANTS)
    ]
    for name, shape in PRESETS.items():
        sizes = (f"{model_size_bytes(shape, quant) / 1e6:.1f} MB" for quant in QUANTS)
        rows.append(
            f"{name:<24} {shape.arch:<15}" + "".join(f"{size:>12}" for size in sizes)
        )
    return "\n".join(rows)


def _write(args: argparse.Namespace) -> None:
    overrides = {
        name: getattr(args, name)
        for name in DIMENSIONS
        if getattr(args, name) is not None
    }
    shape = replace(PRESETS[args.preset], **overrides)
    locality = args.locality or PRESET_LOCALITY.get(args.preset, "none")
    start = time.monotonic()
    paths = write_model(
        args.output,
        shape,
        args.quant,
        seed=args.seed,
        locality=None if locality == "none" else locality,
        n_split=args.split,
        split_max_bytes=args.split_max_size,
        name=args.preset,
        progress=_show_progress if sys.stderr.isatty() else None,
    )
    if args.mmproj:
        write_projector(
            args.output.with_name(f"mmproj-{args.output.name}"),
            args.mmproj,
            shape.n_embd,
            seed=args.seed,
        )
    seconds = time.monotonic() - start
    n_bytes = sum(path.stat().st_size for path in paths)
    print(
        f"\r{n_bytes / 1e9:.3f} GB in {seconds:.1f} s, {len(paths)} file(s), first {paths[0]}; routing: {locality}",
        file=sys.stderr,
    )


def _show_progress(done_bytes: int, total_bytes: int) -> None:
    print(
        f"\r{done_bytes / 1e9:8.3f} of {total_bytes / 1e9:.3f} GB",
        end="",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
