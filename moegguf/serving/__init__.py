"""Loaded models, each in its own worker process, and the scheduling of requests over them.

Promises: an abort in native code ends one request with a clear error and nothing else; unloading frees all memory of a
model; requests of a model run in order of arrival and none interrupts another; all models together stay within one
memory budget, the least recently used idle model is unloaded first; a cancelled request stops within a token; a batch
of requests loses nothing when its process is killed. Contains processes, queues, budgets, requests and
batches. Does not know HTTP, terminals or single experts.
"""
