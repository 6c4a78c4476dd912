"""Decides, while a model runs, which experts to keep and which to prefetch, from the routing so far.

Promises: policies and predictors in Python are numpy over routing events, the same objects live and in simulation; of
predictors that the store computes, what they were trained to is here; no decision, failure or delay of theirs changes a
token; each predictor can be measured without acting on it. A controller takes routing events and returns scores (the
lowest is evicted first) and experts to prefetch. Does not know devices, ctypes, llama.cpp, recorded traces or requests'
origins.
"""
