"""The chat in a terminal.

Promises: what the model writes is all that goes to stdout; Ctrl-C stops an answer and nothing else; an error of a turn
or a command leaves the conversation as it was. Does not know how a model computes or where its files lie.
"""
