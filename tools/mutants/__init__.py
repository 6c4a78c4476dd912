"""Creates GGUF files with damaged headers: reads a file, applies one to three random
changes, and writes the result.

Imports nothing from moegguf.
"""

from tools.mutants.header import Header, read_header, write_file
from tools.mutants.mutations import mutate

__all__ = ["Header", "mutate", "read_header", "write_file"]
