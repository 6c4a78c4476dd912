"""The `moegguf` command: its subcommands, their flags, and their results as text or JSON.

Promises: `--help` imports no model library. Commands with results have `--json`. Flags that llama.cpp or Ollama also
have, have the same names. This package translates flags into calls, and results into text. Does not know how a model is
loaded, ctypes or llama.cpp.
"""
