"""Terminal output shared by the command line and the chat: messages, progress, tables,
statistics, the map of experts.

Promises: only results go to stdout, everything else goes to stderr. An error message
states the next step. A command that fails exits with a non-zero status; a chat goes on
after an error. The terminal's mode is restored when the program ends, even by SIGTERM
or SIGHUP. This package does not know about the commands, and leaves computations about
experts to the engine.
"""
