#!/usr/bin/env python3
"""The planner against every forced placement, on a device behind a simulated link, and its cost model against time.

python tools/placement_bench.py model.gguf                             # 0.5, 1 and 2 GB/s, four budgets
python tools/placement_bench.py model.gguf --links 1GB/s,35us --budgets 25% --rounds 3 --ram 40%

The device computes with --device-threads, the CPU with --cpu-threads; one thread more copies. Where these are more than
the machine's cores, times exceed the model's: on two cores, give --device-threads 1. All placements of a link and a
budget run in turns, each in a process of its own. Tokens are decoded one by one, random ones: give a model with
locality.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

LINKS = ("0.5GB/s,35us", "1GB/s,35us", "2GB/s,35us")
BUDGETS = ("12%", "25%", "50%", "75%")
FORCED = ("layers", "slots", "cpu")


def rows(args: argparse.Namespace, link: str, budget: str) -> list[dict[str, Any]]:
    """One row of `moegguf bench` for auto, then for each forced placement."""
    command = [
        sys.executable, "-m", "moegguf", "bench", "-m", args.model, "-p", "0", "-n", str(args.tokens), "-d", "64",
        "-r", "1", "-t", str(args.cpu_threads), "--simulate-threads", str(args.device_threads),
        "--simulate-link", link, "--vram-cache", budget, "--expert-cache", args.ram, "--placement",
        ",".join(("auto", *FORCED)), "--rounds", str(args.rounds), "--keep-page-cache", "-o", "json",
    ]  # fmt: skip
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert isinstance(found, list)
    return found


def speed(row: dict[str, Any]) -> float:
    """Tokens per second by the median time of a token, which a pause of the machine does not change."""
    return 1e3 / float(row["token_ms_p50"])


def print_rows(link: str, budget: str, found: list[dict[str, Any]]) -> None:
    """A line for each placement: predicted and measured tokens per second; then the choice against the best."""
    for row, name in zip(found, ("auto", *FORCED), strict=True):
        if row["error"]:
            print(f"{link:14} {budget:>5} {name:7} {row['error']}")
            continue
        time_ratio = row["predicted_ts"] / speed(row)
        print(
            f"{link:14} {budget:>5} {name:7} predicted {row['predicted_ts']:7.2f} measured {speed(row):7.2f} t/s"
            f"  time {time_ratio:5.2f}x of the model  hits {row.get('hit_rate', 0):.2f}  {row['placement']}",
            flush=True,
        )
    best = max((speed(row) for row in found[1:] if not row["error"]), default=0.0)
    if best and not found[0]["error"]:
        print(f"{link:14} {budget:>5} auto is {speed(found[0]) / best:.2f}x of the best forced one", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="LINK")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, metavar="BUDGET")
    parser.add_argument("--ram", default="100%", metavar="BUDGET", help="--expert-cache")
    parser.add_argument("--tokens", type=int, default=96, metavar="N")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument("--cpu-threads", type=int, default=1, metavar="N")
    parser.add_argument("--device-threads", type=int, default=2, metavar="N")
    args = parser.parse_args()
    for link in args.links:
        for budget in args.budgets:
            print_rows(link, budget, rows(args, link, budget))


if __name__ == "__main__":
    main()
