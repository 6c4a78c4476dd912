"""Loaded models, each in a worker process of its own, and the order in which requests use them.

Promises: an abort in native code ends one request with a clear error and nothing else; unloading gives all memory
back; requests of a model are answered in the order they came, none ever interrupts another; models together stay
within one memory budget, the least recently used idle one is unloaded first; a request that was given up stops within
a token. Knows processes, queues, budgets and generation requests. Does not know HTTP, terminals or experts one by one.
"""
