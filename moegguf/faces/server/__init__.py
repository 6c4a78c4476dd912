"""The server: Ollama's and OpenAI's APIs over the models that the pool holds.

Promises that every mistake of a client becomes a JSON error of its dialect, and that a client that leaves stops what
was computed for it. Does not know how a model is loaded or computes, nor which process it lives in.
"""
