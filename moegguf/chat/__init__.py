"""The chat in a terminal: Ollama's commands and keys, one conversation at a time.

Promises: commands, which begin with a slash, are never sent to the model; input typed during an answer goes to the next
prompt; Ctrl-C stops the answer and keeps its text so far. Knows models of this machine and of a running server, and the
server's client. Does not know the other subcommands of moegguf, or how experts are read and cached.
"""
