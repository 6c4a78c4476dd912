"""Reads GGUF files of Mixture-of-Experts models: header, hyperparameters, chat templates, byte ranges of the experts.

Promises: every value is checked before it is used. A damaged value raises a typed error with the key or tensor and its
offset. If llama.cpp would abort on a file, only a trial load ends (`engine/trial.py`). No weights are read except the
routers, and no file is mapped into memory. Layouts are immutable. This package does not know memory budgets, slots,
llama.cpp or how a model is run.
"""
