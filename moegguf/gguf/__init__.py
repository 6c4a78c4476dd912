"""Reads GGUF files of Mixture-of-Experts models: header, hyperparameters, chat templates, byte ranges of the experts.

Promises: every value is checked before it is used. A damaged value raises a typed error that names the key or tensor.
If llama.cpp aborts on a file, only the process of a trial load is lost (`engine/trial.py`). Of the weights, only the
routers and small samples for digests are read. Files are not mapped into memory. Layouts are immutable. This package
does not know about memory budgets, slots or llama.cpp, or how a model is run.
"""
