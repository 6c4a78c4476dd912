"""Code shared by the commands of the laboratory: a parser of the command line, and a
function that writes results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """Returns a parser without options, whose help begins with `text`."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def write_json(path: Path, value: object) -> None:
    """Writes a value as JSON with one item per line."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
