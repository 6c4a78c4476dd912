"""Decides, while a model runs, which experts to keep and which to prefetch, from the
routing so far.

Promises: a simulation runs the same classes of controller, policies and predictors as a
live model. This package loads the trained arrays of all predictors, including
predictors that the store computes. No decision, failure or delay of a policy or
predictor changes a token. The accuracy of each predictor can be measured without
prefetching the experts that it predicts. A controller receives routing events. It sends
prefetch requests, and scores from policies in Python, to the store, which evicts the
expert with the lowest score first. This package does not know about ctypes, llama.cpp,
recorded traces, or the clients that send requests.
"""
