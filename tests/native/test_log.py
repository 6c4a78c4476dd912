"""What ggml logs before the bindings read it: devices that it finds, kernels that it repacks for."""

from __future__ import annotations

import subprocess
import sys

LOGGED = """
import sys
from moegguf.native import library
library.load()
base = library._open(library.find_library(), "ggml-base")
for level in (1, 2, 3, 4):  # from DEBUG to ERROR
    base.ggml_log_internal(level, f"level {level}\\n".encode())
"""


def test_errors_alone_are_written() -> None:
    run = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "level 4\n")
