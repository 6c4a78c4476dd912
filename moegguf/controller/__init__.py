"""Decides, while a model runs, which experts to keep and which to prefetch, from the routing so far.

Promises: policies and predictors in Python are numpy code that reads routing events. A simulation runs the same objects
as a live model. Trained arrays of predictors are kept here, also if the store computes the predictor. No decision,
failure or delay of a policy or predictor changes a token. Each predictor can be measured without prefetching the
experts that it predicts. A controller takes routing events. It returns experts to prefetch and scores (the lowest score
is evicted first). This package does not know devices, ctypes, llama.cpp, recorded traces or the clients that send
requests.
"""
