"""The `moegguf` command: its subcommands, their flags, and their results as text or JSON.

Promises: `--help` imports no model library; commands with results have `--json`; flags have the names of llama.cpp and
Ollama where those exist. Translates flags into calls and results into text. Does not know how a model is loaded, ctypes
or llama.cpp.
"""
