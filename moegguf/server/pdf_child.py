"""A process that reads a PDF file from standard input and writes its text: `python -m
moegguf.server.pdf_child`.

PDF files are not trusted. pypdf, which reads them, is written in Python, and a file can
keep it busy forever. So the operating system limits the process's CPU time and memory.
The process writes one JSON object: {"n_pages", "text"} or {"error"}.
"""

from __future__ import annotations

import io
import json
import logging
import resource
import sys
from collections.abc import Iterator
from typing import Any

CPU_S = 30
MEMORY_BYTES = 1 << 30
MAX_CHARS = 4_000_000


def read_pdf(data: bytes) -> dict[str, Any]:
    """Returns {"n_pages", "text"} of a PDF file, or {"error"} if the file cannot be
    read."""
    from pypdf import PdfReader
    from pypdf.errors import FileNotDecryptedError, PyPdfError, WrongPasswordError

    try:
        reader = PdfReader(io.BytesIO(data))
        return {
            "n_pages": len(reader.pages),
            "text": "".join(_bounded(page.extract_text() for page in reader.pages)),
        }
    except (FileNotDecryptedError, WrongPasswordError):
        return {"error": "it is protected by a password; save a copy without one"}
    except MemoryError:
        return {
            "error": f"reading it takes more than {MEMORY_BYTES >> 20} MiB of memory; attach a part of it"
        }
    except PyPdfError as error:
        return {
            "error": f"it is not a PDF file that can be read ({error}); save it as a PDF file again"
        }
    except Exception as error:  # a damaged file can cause any exception
        return {
            "error": f"it is damaged ({type(error).__name__}: {error}); save it again"
        }


def _bounded(pages: Iterator[str]) -> Iterator[str]:
    """Yields the text of each page that has text, followed by an empty line. Without
    these lines, the texts together have at most MAX_CHARS characters; further text is
    cut off."""
    left = MAX_CHARS
    for page in pages:
        text = page.strip()[:left]
        if not text:
            continue
        left -= len(text)
        yield text + "\n\n"


def main() -> None:
    """Limits this process, reads one file from standard input, and writes the result to
    standard output."""
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    found = read_pdf(sys.stdin.buffer.read())
    sys.stdout.buffer.write(json.dumps(found).encode())


if __name__ == "__main__":
    main()
