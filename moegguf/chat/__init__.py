"""The chat in a terminal: Ollama's commands and keys, one conversation at a time.

Promises: no command reaches the model; what is typed while an answer is written waits for the next prompt; Ctrl-C
stops the answer and keeps what was written. Does not know the command line's other commands, HTTP or experts one by
one.
"""
