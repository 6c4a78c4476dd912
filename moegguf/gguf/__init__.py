"""GGUF files of Mixture-of-Experts models: the header, what it says, and where the experts lie.

Promises: nothing of a file is believed before it is checked; a file that llama.cpp would abort on is a typed error
with the key or tensor and its offset; no weights are read except the routers, and nothing is mapped. Layouts are
immutable. Does not know memory budgets, slots, llama.cpp or how a model is run.
"""
