"""Terminal output shared by the command line and the chat: messages, progress, tables, statistics, the map of experts.

Promises: stdout carries results only, everything else goes to stderr. An error is one sentence with the next step and
a non-zero exit code. The terminal's mode is restored at any exit. Does not know commands or flags; a loop over experts
belongs in the engine.
"""
