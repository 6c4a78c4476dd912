"""What the command line and the chat share in a terminal: messages, progress, tables, figures, the picture of experts.

Promises: stdout carries only what was asked for, everything else goes to stderr; an error is one sentence with the
next step and an exit code that is not 0; the terminal is as it was after any end. Does not know commands or flags; if
something here needs a loop over experts, the loop belongs in the engine.
"""
