"""Terminal output shared by the command line and the chat: messages, progress, tables, statistics, the map of experts.

Promises: only results go to stdout, everything else goes to stderr. An error message says what to do next. A command
that fails exits with a non-zero status; a chat goes on after an error. The terminal's mode is restored at every exit,
including exits by SIGTERM and SIGHUP. This package does not know about the table of commands, and leaves the
computations over experts to the engine.
"""
