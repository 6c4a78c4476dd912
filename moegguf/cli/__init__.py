"""The `moegguf` command: its subcommands, their flags, and their results as text or
JSON.

Promises: `--help` imports no model library. Commands that print tables of models,
contexts, traces or results can print JSON instead. Flags that also exist in llama.cpp
or Ollama have the same names. This package translates flags into calls, and results
into text. It does not know about llama.cpp.
"""
