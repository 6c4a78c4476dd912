"""The `moegguf` command: its subcommands, their flags, and their results as text or JSON.

Promises: `--help` imports no model library. Commands that list or describe something have `--json`. Flags that also
exist in llama.cpp or Ollama have the same names. This package translates flags into calls, and results into text. It
does not know about ctypes or llama.cpp, or about how a model is loaded.
"""
