"""Decides, while a model runs, which experts to keep and which to prefetch, from the routing so far.

Promises: policies and predictors in Python are numpy over routing events, with the same objects live and in
simulation. Predictors that the store computes have their trained arrays here. No decision, failure or delay of a
policy or predictor changes a token. Each predictor can be measured without acting on it. A controller takes routing
events and returns scores (the lowest is evicted first) and experts to prefetch. Does not know devices, ctypes,
llama.cpp, recorded traces or requests' origins.
"""
