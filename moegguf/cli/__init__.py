"""The `moegguf` command: its subcommands, their flags, and their results as text or JSON.

Promises: `--help` answers without importing a model library; `--json` where a script may look; flags carry the names
that llama.cpp and Ollama use where those have one. Translates words into calls and figures into words. Does not know
how a model is loaded, ctypes or llama.cpp.
"""
