"""Loaded models, each in its own worker process, and the scheduling of requests over them.

Promises: an abort in native code ends one request with a clear error and nothing else. Unloading frees all memory of a
model. Requests of a model run in order of arrival and none interrupts another. All models together stay within one
memory budget. The least recently used idle model is unloaded first. A cancelled request stops within a token. A batch
of requests loses nothing when its process is killed. Contains processes, queues, budgets, requests and batches. Does
not know HTTP, terminals or single experts.
"""
