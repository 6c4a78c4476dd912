"""Reads GGUF files of Mixture-of-Experts models: header, hyperparameters, chat
templates, byte ranges of the experts.

Promises: every value is checked before it is used. A value that breaks a rule of the
format raises ModelFormatError, which names the key or tensor. Some faults are found
only by llama.cpp, which may abort: a trial load in a separate process
(`engine/trial.py`) finds such faults. Of the weights, only the routers and small
samples for digests are read. Files are not memory-mapped. Layouts are immutable. Apart
from `moegguf.errors`, this package imports nothing from moegguf, so it does not know
about slots, budgets or models that run.
"""
