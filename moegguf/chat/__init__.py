"""The chat in a terminal: Ollama's commands and keys, one conversation at a time.

Commands, which begin with a slash, are never sent to the model. Input typed during an answer is kept for the next
prompt. Ctrl-C stops the answer and keeps its text so far. The model is loaded by this program or by a running server.
This package has no code for the other subcommands of moegguf, or for reading and caching experts.
"""
