"""Damaged GGUF headers: a file taken apart, changed in one or two places by a seeded choice, and put together again.

Uses nothing of moegguf.
"""

from tools.mutants.header import Header, read_header, write_file
from tools.mutants.mutations import mutate

__all__ = ["Header", "mutate", "read_header", "write_file"]
