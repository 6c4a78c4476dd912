"""Decides, while a model runs, which experts to keep and which to prefetch, from the routing so far.

Promises: policies and predictors are numpy over routing events, the same objects live and in simulation; where the
store has one of the same name, that one acts, and the one here is what it is checked against; no decision, failure or
delay of theirs changes a token; each predictor can be measured without acting on it. A controller takes routing events
and returns scores (the lowest is evicted first) and experts to prefetch. Does not know devices, ctypes, llama.cpp,
recorded traces or requests' origins.
"""
