"""Decides, while a model runs, which experts to keep and which to fetch ahead, from what the routers chose so far.

Promises: policies and predictors are numpy over routing events, the same objects live and in simulation; nothing that
they do, fail to do or do late changes a token; each prediction can be judged without acting on it. A controller takes
routing events and returns scores (the lowest is evicted first) and experts to fetch ahead. Does not know devices,
ctypes, llama.cpp, recorded traces, or who made the request.
"""
