"""GGUF files of Mixture-of-Experts models: header, hyperparameters, chat templates, the byte ranges of the experts.

Promises: every value is checked before it is used here, and a damaged one is a typed error with the key or tensor and
its offset. A file that would make llama.cpp abort ends a trial load (`engine/trial.py`). No weights are read except
the routers, and nothing is mapped. Layouts are immutable.
Does not know memory budgets, slots, llama.cpp or how a model is run.
"""
