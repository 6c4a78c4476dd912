"""The faces room: what a person or another program sees of moegguf.

Promises: stdout carries only what was asked for, everything else goes to stderr; an error is one sentence with the
next step and an exit code that is not 0; `--json` where a script may look. Faces translate words into calls and figures
into words. Does not know experts one by one, ctypes or llama.cpp; if a face needs a loop over experts, the loop belongs
in the engine.
"""
