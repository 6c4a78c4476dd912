"""The chat in a terminal: Ollama's commands and keys, one conversation at a time.

Promises: commands, which begin with a slash, are never sent to the model. Input typed
during an answer is kept for the next prompt. Ctrl-C stops the answer and keeps its text
so far. The model is loaded by this program or by a running server. This package does
not know about the other subcommands of moegguf, or how experts are read and cached.
"""
